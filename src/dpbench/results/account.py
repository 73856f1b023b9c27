"""`dpbench account`: a ledger's epsilon as text or JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from dpbench.privacy.accounting import ledger_epsilon, microbatch_epsilon
from dpbench.privacy.ledger import read_ledger


def account(path: Path, delta: float | None, accountant: str, as_json: bool) -> tuple[str, str | None]:
    """Epsilon of a ledger.

    Args:
        path: The ledger.
        delta: δ; None takes the run's own.
        accountant: Name of an accountant.
        as_json: JSON instead of a table.

    Returns:
        The text, and what is wrong with the file (None if it is intact).

    Raises:
        DPBenchError: The ledger is unreadable, or the accountant or δ does not fit it.
    """
    book = read_ledger(path)
    header = book.header
    delta = header.delta if delta is None else delta
    epsilon = ledger_epsilon(book, delta, accountant)
    size = header.microbatch_size
    whole = microbatch_epsilon(book, delta, accountant) if size > 1 else None
    facts: dict[str, Any] = {
        "epsilon": epsilon if math.isfinite(epsilon) else None,
        **({"epsilon_microbatch": whole} if whole is not None else {}),
        "delta": delta,
        "accountant": accountant,
        "steps": len(book.releases),
        "unit": header.unit,
        **({"microbatch_size": size} if size > 1 else {}),
        "neighbouring_relation": header.neighbouring_relation,
        "population": header.population,
        "sampling": sorted({release.sampling.kind for _, release in book.releases}),
        "complete": book.damage is None,
    }
    if as_json:
        return json.dumps(facts, indent=2, allow_nan=False), book.damage
    facts["epsilon"] = f"{epsilon:.4f}" + ("" if book.damage is None else " at least")
    if whole is not None:
        facts["epsilon_microbatch"] = f"{whole:.4f} nominal, for a fixed microbatch as the unit"
    facts["sampling"] = ", ".join(facts["sampling"])
    return "\n".join(f"{name.replace('_', ' '):<22} {value}" for name, value in facts.items()), book.damage
