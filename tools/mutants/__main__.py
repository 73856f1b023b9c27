"""`python -m tools.mutants reach|run|again`; see CONTRIBUTING.md, "Mutants of the source"."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from tools.mutants.mutation import Mutation, mutations_of, sample
from tools.mutants.reached import Reach
from tools.mutants.trial import KILLED, PACKAGE, ROOT, Trials, copy_tree, record

TABLE = ROOT / "tests" / "mutants.tsv"
_WORK = ROOT / ".mutants"
_REACH = _WORK / "reach.tsv"
_HEAD = ("room", "function", "kind", "change", "verdict", "by")
CORE = {
    "privacy/mechanism": "mechanism",
    "privacy/sampling": "sampling",
    "privacy/accounting/ledger.py": "ledger",
    "privacy/accounting/writer.py": "ledger",
    "privacy/budget.py": "ledger",
    "privacy/releases.py": "ledger",
    "privacy/accounting": "accounting",
    "privacy/gradients": "gradients",
    "session": "session",
    "guards": "guards",
    "records": "records",
    "privacy/randomness.py": "randomness",
    "privacy/kept_keys.py": "randomness",
    "callback/run_key.py": "randomness",
}
"""Folder or file → room that ε depends on. A file belongs to the first that names it."""
_CORE_COUNT = 30
_COUNT = 10

Row = tuple[str, ...]


def rooms() -> dict[str, list[Mutation]]:
    """All mutations of each room: those of `CORE`, then each other folder, and the files beside them as "top"."""
    mutations: dict[str, list[Mutation]] = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        mutations.setdefault(_room_of(path.relative_to(ROOT / PACKAGE)), []).extend(mutations_of(path))
    return mutations


def _room_of(path: Path) -> str:
    for place, room in CORE.items():
        if path.is_relative_to(place):
            return room
    return next((folder for folder in path.parts[:-1] if folder not in ("harness", "capabilities")), "top")


def read_table(path: Path) -> dict[Row, Row]:
    """Verdicts by room and name of the mutant."""
    if not path.exists():
        return {}
    rows = [tuple(line.split("\t")) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row[:4]: row[4:] for row in rows if row != _HEAD}


def try_all(mutants: Sequence[tuple[str, Mutation]], workers: int, seconds: float, progress: Path) -> None:
    """Try mutants in workers, each with a copy of the tree; a line of the progress file for each verdict."""
    if not _REACH.exists():
        raise SystemExit("which test reaches what is not known here: run `python -m tools.mutants reach` first.")
    parts = [mutants[worker::workers] for worker in range(workers)]
    with ProcessPoolExecutor(workers) as pool:
        list(pool.map(partial(_work, seconds, progress), parts))


def _work(seconds: float, progress: Path, mutants: Sequence[tuple[str, Mutation]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(copy_tree(Path(folder)), Reach(_REACH), seconds)
        for room, mutation in mutants:
            row = (room, *mutation.name, *trials.verdict(mutation))
            with progress.open("a", encoding="utf-8") as file:
                file.write("\t".join(row) + "\n")
            print(*row, sep=" | ", flush=True)


def run(names: Sequence[str], workers: int, seconds: float) -> None:
    """Draw mutants of rooms, try those that have no verdict yet, and write the table, also if interrupted."""
    ranked = []
    for room, mutations in rooms().items():
        if not names or room in names:
            count = _CORE_COUNT if room in CORE.values() else _COUNT
            ranked += [(rank, room, mutation) for rank, mutation in enumerate(sample(mutations, count))]
    ranked.sort(key=lambda one: one[0])  # a few of each room first
    drawn = [(room, mutation) for _, room, mutation in ranked]
    progress = _WORK / "verdicts.tsv"
    known = read_table(TABLE) | read_table(progress)
    try:
        try_all([one for one in drawn if (one[0], *one[1].name) not in known], workers, seconds, progress)
    finally:
        known |= read_table(progress)
        chosen = {row for row in known if names and row[0] not in names}
        chosen |= {(room, *mutation.name) for room, mutation in drawn}
        rows = [_HEAD, *sorted((*row, *known[row]) for row in chosen & known.keys())]
        TABLE.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
        print(summary(rows[1:]))


def again(workers: int, seconds: float) -> int:
    """Try the mutants of the table wherever they lie today, and say which are noticed no longer."""
    committed = read_table(TABLE)
    today: dict[Row, list[tuple[str, Mutation]]] = {}
    for room, mutations in rooms().items():
        for mutation in mutations:
            today.setdefault(mutation.name, []).append((room, mutation))
    mutants, gone = [], 0
    for row in committed:
        places = today.get(row[1:], [])
        gone += not places
        mutants += [one for one in places if one[0] == row[0]] or places
    progress = _WORK / "again.tsv"
    progress.unlink(missing_ok=True)
    try_all(mutants, workers, seconds, progress)
    then = {row[1:]: verdict[0] for row, verdict in committed.items()}
    lost = 0
    for row, (verdict, reason) in read_table(progress).items():
        if verdict != KILLED and then[row[1:]] == KILLED:
            lost += 1
            print("noticed no longer:", *row, verdict, reason, sep=" | ")
    print(f"{len(mutants)} mutants tried, {lost} noticed no longer; {gone} of the table are gone from the source")
    return min(lost, 1)


def summary(rows: Sequence[Row]) -> str:
    """Killed mutants of each room, as a Markdown table."""
    all_of, killed = Counter(row[0] for row in rows), Counter(row[0] for row in rows if row[4] == KILLED)
    lines = [f"| {room} | {killed[room]} of {count} |" for room, count in all_of.items()]
    return "\n".join(["| room | killed |", "| --- | --- |", *lines, f"| all | {killed.total()} of {len(rows)} |"])


def main() -> int:
    """Record, try or try again."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("reach", help="record which test reaches which function (one run of the tests)")
    recording.add_argument("words", nargs="*", help="further arguments of pytest, behind --")
    running = commands.add_parser("run", help="try mutants of each room and write tests/mutants.tsv; goes on")
    running.add_argument("rooms", nargs="*", help="rooms (default: all)")
    trying = commands.add_parser("again", help="try the mutants of tests/mutants.tsv again after a change")
    for one in (recording, running, trying):
        one.add_argument("--workers", type=int, default=2, help="processes")
    for one in (running, trying):
        one.add_argument("--seconds", type=float, default=30, help="longest time of the tests of one mutant")
    arguments = parser.parse_args()
    _WORK.mkdir(exist_ok=True)
    if arguments.command == "reach":
        with tempfile.TemporaryDirectory() as folder:
            words = ["-n", str(arguments.workers), "--dist", "worksteal", *arguments.words]
            record(copy_tree(Path(folder)), _REACH, words)
        return 0
    if arguments.command == "run":
        run(arguments.rooms, arguments.workers, arguments.seconds)
        return 0
    return again(arguments.workers, arguments.seconds)


if __name__ == "__main__":
    sys.exit(main())
