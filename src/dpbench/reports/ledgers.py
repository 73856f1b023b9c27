"""Ledgers of runs: found in folders, and shown to people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpbench.errors import ConfigurationError, LedgerError
from dpbench.runs.folder import RunFolder, places_of
from dpbench.runs.ledgers import lost_ledger


def find_ledgers(paths: Sequence[Path]) -> dict[str, Path]:
    """Ledgers of runs, and of all runs below folders of sweeps.

    Args:
        paths: Ledgers, folders of runs, folders of sweeps.

    Raises:
        ConfigurationError: A folder holds none, cannot be looked into, or a ledger is named twice.
        LedgerError: The ledger of a private run is gone.
    """
    found: list[Path] = []
    for path in paths:
        below = _ledgers_below(path) if path.is_dir() else [path]
        if not path.exists():
            raise ConfigurationError(
                f"{path}: No such file or directory; name the folder of a run or of a sweep, or a ledger."
            )
        for folder in without_ledger([path]):
            if (lost := lost_ledger(folder)) is not None:
                raise LedgerError(f"{folder}: {lost}. Without it no epsilon can be told: restore it.")
        if not below and runs_without_privacy([path]):
            raise ConfigurationError(f"{path} trained without privacy: it has no ledger, epsilon is infinite.")
        if not below:
            raise ConfigurationError(f"there is no {RunFolder.ledger} in or below {path}.")
        found += below
    if len({path.resolve() for path in found}) < len(found):
        raise ConfigurationError("a ledger is named twice: each run counts once.")
    return {str(path.parent if path.name == RunFolder.ledger else path): path for path in found}


def _ledgers_below(folder: Path) -> list[Path]:
    """All ledgers in and below a folder; where a run has one, copies of it (such as an exported model's) only once."""
    found = [RunFolder(place).ledger for place in places_of(RunFolder.ledger, folder)]
    own = RunFolder(folder).ledger
    if own not in found:
        return found
    return [own, *(path for path in found if path != own and path.read_bytes() != own.read_bytes())]


def runs_without_privacy(paths: Sequence[Path]) -> list[str]:
    """Runs below some folders that trained and have no ledger, because their strategy is not private."""
    return sorted(str(folder) for folder in without_ledger(paths) if lost_ledger(folder) is None)


def without_ledger(paths: Sequence[Path]) -> list[RunFolder]:
    """Runs below some folders that trained and have no ledger, for whatever reason."""
    traces = (RunFolder.result, RunFolder.partial_result, RunFolder.checkpoint)
    found = {place for path in paths for name in traces for place in places_of(name, path)}
    return [run for run in map(RunFolder, sorted(found)) if not run.ledger.exists()]


def shown_range(value: float | list[float]) -> str:
    """A figure, or the least and the most of several, with five digits."""
    return " to ".join(f"{each:.5g}" for each in (value if isinstance(value, list) else [value]))


def shown_noise(facts: Mapping[str, Any]) -> str:
    """Noise and lots of a run in one line, for people.

    Args:
        facts: As `noise_of` gives them, with the population.
    """
    own = facts.get("noise_std_over_max_grad_norm", facts["noise_multiplier"])
    lots = (
        f"lots of {shown_range(facts['expected_batch_size'])} of {facts['population']} {facts.get('unit') or 'record'}s"
    )
    rate = f"(rate {shown_range(facts['sample_rate'])})"
    return f"noise multiplier {shown_range(own)}, {lots} {rate}"


def shown_uncovered(facts: Mapping[str, Any]) -> str | None:
    """The δ that comes on top because noise ends somewhere, in one line for people; None where it is negligible.

    Args:
        facts: As `noise_of` gives them.
    """
    beyond, end = facts.get("uncovered_delta"), facts.get("noise_end")
    if beyond is None:
        return None
    if end is not None:
        return f"{beyond:.2g} at most on top, whatever epsilon: noise ends at {end:g} standard deviations"
    return (
        f"{beyond:.2g} or more on top, whatever epsilon, if there were no compiled kernels: without them the noise of "
        "that version ended at 5.77 standard deviations"
    )
