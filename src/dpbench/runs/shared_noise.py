"""Runs that drew their noise or lots from one key for different releases: no epsilon covers them together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path

from dpbench.errors import LedgerError
from dpbench.files import from_here
from dpbench.privacy.accounting.ledger import check_own_randomness, read_ledger
from dpbench.runs.folder import RunFolder

_HEADER = b'{"record":"header"'
_MOST_NEIGHBORS = 500  # ledgers beside a run whose headers are read


def shared_noise(runs: Iterable[RunFolder]) -> list[str]:
    """One line for each two runs that share noise or lots for different releases."""
    drawn: dict[tuple[str, int, str], list[Path]] = {}
    for run in runs:
        for source in _sources(run.ledger):
            drawn.setdefault(source, []).append(run.ledger)
    pairs = {pair for ledgers in drawn.values() for pair in combinations(ledgers, 2)}
    return [line for pair in sorted(pairs) for line in _complaint(*pair)]


def shared_with_neighbors(run: RunFolder) -> list[str]:
    """One line for each run in the same folder, or in one beside it, that shares noise or lots with a run."""
    if not run.ledger.is_file():
        return []
    sources = _sources(run.ledger)
    lines = []
    for number, ledger in enumerate(_neighbors(run)):
        if number >= _MOST_NEIGHBORS:
            break
        if sources & _sources(ledger):
            lines += _complaint(run.ledger, ledger)
    return lines


def _neighbors(run: RunFolder) -> Iterator[Path]:
    around = run.path.resolve().parent
    for pattern, folder in (("*", around), ("*/*", around.parent)):
        for ledger in folder.glob(f"{pattern}/{RunFolder.ledger}"):
            other = ledger.parent
            if other != run.path.resolve() and (pattern == "*" or other.parent != around):
                yield ledger


def _sources(ledger: Path) -> set[tuple[str, int, str]]:
    """What the phases of a ledger drew from, as their headers say."""
    sources = set()
    try:
        with ledger.open("rb") as file:
            headers = [json.loads(line) for line in file if line.startswith(_HEADER)]
        for header in headers:
            for name in ("noise_source", "lot_source"):
                if header.get(name) is not None:
                    sources.add((name, header["phase"], header[name]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # damaged: other readers say so
        return set()
    return sources


def _complaint(one: Path, other: Path) -> list[str]:
    try:
        check_own_randomness({from_here(path.parent): read_ledger(path) for path in (one, other)})
    except LedgerError as error:
        return [str(error)]
    return []
