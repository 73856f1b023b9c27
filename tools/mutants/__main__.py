"""`python -m tools.mutants [FOLDER ...]`; see CONTRIBUTING.md, "Mutants of the source"."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from dpbench.files import write_atomically
from tools.mutants.mutation import Mutation, mutations_of
from tools.mutants.trial import PACKAGE, ROOT, Trials, copy_tree

TABLE = ROOT / "tests" / "mutants.tsv"


class Row(NamedTuple):
    """A mutant that a test has noticed.

    Attributes:
        file: File below src/dpbench.
        function: Qualified name of the function.
        kind: Kind of the mutation.
        change: Old and new text.
        test: Name of a test that noticed it.
    """

    file: str
    function: str
    kind: str
    change: str
    test: str


def of_today(rows: Iterable[Row]) -> list[tuple[Row, Mutation]]:
    """The mutants that the source still has, in their own file or another one."""
    mutations: dict[tuple[str, ...], list[Mutation]] = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        for mutation in mutations_of(path):
            mutations.setdefault(mutation.name, []).append(mutation)
    pairs = []
    for row in rows:
        places = mutations.get((row.function, row.kind, row.change), [])
        own = [mutation for mutation in places if mutation.path == ROOT / PACKAGE / row.file]
        for mutation in (own or places)[:1]:
            file = mutation.path.relative_to(ROOT / PACKAGE).as_posix()
            pairs.append((row._replace(file=file), mutation))
    return pairs


def _try(mutants: Sequence[tuple[Row, Mutation]]) -> list[tuple[Row, str | None]]:
    """Try mutants in a copy of the tree; of each, a test that notices it."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(copy_tree(Path(folder)))
        for row, mutation in mutants:
            test = trials.killer(mutation, row.test)
            print(*row[:4], test or "NOTICED NO LONGER", sep=" | ", flush=True)
            results.append((row, test))
    return results


def main() -> int:
    """Try the mutants of the table, and write which tests notice them; 1 if one is noticed no longer."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("folders", nargs="*", default=[""], help="folders below src/dpbench (default: all)")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    options = parser.parse_args()
    rows = [Row(*line.split("\t")) for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]]
    chosen = [row for row in rows if row.file.startswith(tuple(options.folders))]
    mutants = of_today(chosen)
    parts = [mutants[worker :: options.workers] for worker in range(options.workers)]
    with ProcessPoolExecutor(options.workers) as pool:
        results = [result for part in pool.map(_try, parts) for result in part]
    lost = [row for row, test in results if test is None]
    noticed = [row._replace(test=test) for row, test in results if test is not None]
    lines = [Row._fields, *sorted([*(row for row in rows if row not in chosen), *noticed, *lost])]
    write_atomically(TABLE, "".join("\t".join(line) + "\n" for line in lines))
    gone = len(chosen) - len(mutants)
    print(f"{len(mutants)} mutants tried, {len(lost)} noticed no longer; {gone} are gone from the source")
    return bool(lost)


if __name__ == "__main__":
    sys.exit(main())
