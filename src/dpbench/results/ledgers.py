"""Ledgers of runs: found, read, and compared with what the run's result or checkpoint knows of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from dpbench.errors import ConfigurationError
from dpbench.privacy.ledger import Ledger, read_ledger
from dpbench.privacy.plan import record_changes
from dpbench.privacy.seal import Seal, difference

LEDGER, CHECKPOINT = "ledger.jsonl", Path("checkpoints") / "last.ckpt"
RESULT, PARTIAL = "result.json", "partial_result.json"
_STRATEGY = "dpbench.PrivateStrategy"
_UNREADABLE = "unreadable"
_OTHER_SHAPES = (ValueError, TypeError, AttributeError)


def find_ledgers(paths: Sequence[Path]) -> dict[str, Path]:
    """Ledgers of runs, and of all runs below folders of sweeps.

    Args:
        paths: Ledgers, folders of runs, folders of sweeps.

    Raises:
        ConfigurationError: A folder holds none, or a ledger is named twice.
    """
    found: list[Path] = []
    for path in paths:
        below = [path / LEDGER] if (path / LEDGER).exists() else sorted(path.rglob(LEDGER)) if path.is_dir() else [path]
        if not path.exists():
            raise ConfigurationError(
                f"{path}: No such file or directory; name the folder of a run or of a sweep, or a ledger."
            )
        if not below and runs_without_privacy([path]):
            raise ConfigurationError(f"{path} trained without privacy: it has no ledger, epsilon is infinite.")
        if not below:
            raise ConfigurationError(f"there is no {LEDGER} in or below {path}.")
        found += below
    if len({path.resolve() for path in found}) < len(found):
        raise ConfigurationError("a ledger is named twice: each run counts once.")
    return {str(path.parent if path.name == LEDGER else path): path for path in found}


def runs_without_privacy(paths: Sequence[Path]) -> list[str]:
    """Runs below some folders that trained and have no ledger, because their strategy is not private."""
    traces = (RESULT, PARTIAL, "checkpoints")
    found = {trace.parent for path in paths if path.is_dir() for name in traces for trace in path.rglob(name)}
    return sorted(str(folder) for folder in found if not (folder / LEDGER).exists())


def read_run_ledger(path: Path) -> Ledger:
    """A ledger, with `doubt` where it is not what its run left.

    Args:
        path: Of the ledger; its run's folder is looked at if it lies in one.

    Raises:
        LedgerError: It is no ledger.
    """
    ledger = read_ledger(path)
    if path.name == LEDGER:
        ledger.doubt = doubt_about(path.parent, len(ledger.releases))
    return ledger


def noise_of(ledger: Ledger) -> dict[str, Any]:
    """With how much noise, and from what lots, releases were made.

    Args:
        ledger: With releases.

    Returns:
        noise_multiplier: noise over sensitivity of a whole release, statistics included, as accountants take it.
        noise_std_over_max_grad_norm: what `strategy.noise_multiplier` means, where that is another figure.
        sample_rate, expected_batch_size: of the lots. Each is [least, most] where releases differ.
    """
    size = ledger.header.microbatch_size
    made = [(queries[0].noise_std, sampling) for sampling, queries in ledger.events]  # one query that costs as much
    rates = [sampling.expected_batch_size / sampling.population for _, sampling in made]
    facts = {"noise_multiplier": _range([z for z, _ in made])}
    over_bound = _range([z * record_changes(sampling, size) for z, sampling in made])
    facts |= {} if over_bound == facts["noise_multiplier"] else {"noise_std_over_max_grad_norm": over_bound}
    sizes = _range([sampling.expected_batch_size for _, sampling in made])
    return {**facts, "sample_rate": _range(rates), "expected_batch_size": sizes}


def _range(values: Sequence[float]) -> float | list[float]:
    least, most = min(values), max(values)
    return least if most <= least * (1 + 1e-8) else [least, most]  # bounds that adapt round differently


def shown_range(value: float | list[float]) -> str:
    """For people: five digits."""
    return " to ".join(f"{each:.5g}" for each in (value if isinstance(value, list) else [value]))


def shown_noise(facts: Mapping[str, Any]) -> str:
    """The same in one line."""
    own = facts.get("noise_std_over_max_grad_norm", facts["noise_multiplier"])
    lots = f"lots of {shown_range(facts['expected_batch_size'])} of {facts['population']} records"
    rate = f"(rate {shown_range(facts['sample_rate'])})"
    return f"noise multiplier {shown_range(own)}, {lots} {rate}"


def doubt_about(run: Path, releases: int | None = None) -> str | None:
    """What is wrong with a run's ledger in the eyes of its result or, before there is one, of its checkpoint.

    Args:
        run: Folder, with a ledger.
        releases: In the ledger; compared with results that are older than the running hash.

    Returns:
        None, also where nobody knows anything of it, or a piece of a sentence.
    """
    for witness, told, ended in _witnesses(run):
        if _UNREADABLE in told:
            return f"{LEDGER} cannot be compared with {run / CHECKPOINT}, which cannot be read"
        seal = Seal.read(told.get("ledger"))
        if seal is not None:
            wrong = difference(run / LEDGER, seal, witness, ended)
        else:
            before, now = told.get("releases"), releases
            fewer = isinstance(before, int) and now is not None and (now < before or (ended and now > before))
            wrong = f"{now} releases of {before} that {witness} counts: it was cut, or is of another run"
            wrong = wrong if fewer else None
        if wrong is not None:
            return f"{LEDGER} has {wrong}"
    return None


def _witnesses(run: Path) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Who tells what of a ledger, and whether it was complete then."""
    for name in (RESULT, PARTIAL):
        with suppress(OSError, KeyError, RecursionError, *_OTHER_SHAPES):
            privacy = json.loads((run / name).read_text(encoding="utf-8"))["privacy"]
            yield name, dict(privacy), name == RESULT
            if name == RESULT:
                return  # written last, with what the checkpoint knows
    if (run / CHECKPOINT).is_file():
        import torch

        told: dict[str, Any] = {_UNREADABLE: True}
        with suppress(
            OSError, RuntimeError, EOFError, UnpicklingError, LookupError, ValueError, TypeError, AttributeError
        ):
            state = torch.load(run / CHECKPOINT, map_location="cpu", weights_only=True, mmap=True)
            told = dict(state["callbacks"][_STRATEGY])
        yield "the checkpoint", told, False
