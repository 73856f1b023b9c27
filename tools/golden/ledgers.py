"""Committed ledgers of each schema: kept for ever, so that they cost the same for every later reader.

Those without `plan` in their name were written under schema 1. A new one is put beside them by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dpbench.privacy.accounting.accountants import ACCOUNTANTS
from dpbench.privacy.accounting.composition import microbatch_epsilon
from dpbench.privacy.accounting.ledger import read_ledger
from tools.golden.values import epsilons, lines_of, significant

FOLDER = Path(__file__).parents[2] / "tests" / "golden" / "ledgers"
LEDGERS = sorted(path.stem for path in FOLDER.glob("*.jsonl"))
"""Names of the ledgers."""


def facts_of(path: Path) -> dict[str, Any]:
    """What every reader must make of a ledger: epsilons to ten digits by each accountant."""
    ledger = read_ledger(path)
    delta = ledger.header.delta
    facts: dict[str, Any] = {
        "phases": len(ledger.headers),
        "releases": len(ledger.releases),
        "unit": ledger.header.unit,
        "damage": ledger.damage and ledger.damage.partition(" (")[0],
        "secure": ledger.secure,
        "epsilon": epsilons(ledger, delta, ACCOUNTANTS),
    }
    if ledger.header.microbatch_size > 1:
        facts["epsilon of a fixed microbatch"] = significant(microbatch_epsilon(ledger, delta), 10)
    return facts


def add_facts() -> list[str]:
    """Note what ledgers cost of which it is not known yet; of the others it stays as it is.

    Returns:
        Names of the new ones.
    """
    path = FOLDER / "facts.json"
    facts = json.loads(path.read_text(encoding="utf-8"))
    new = [name for name in LEDGERS if name not in facts]
    for name in new:
        facts[name] = facts_of(FOLDER / f"{name}.jsonl")
    path.write_text(lines_of(facts), encoding="utf-8")
    return new
