"""`python -m tools.mutants [ROOM ...]`; see CONTRIBUTING.md, "Mutants of the source"."""

from __future__ import annotations

import argparse
import compileall
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tools.mutants.mutation import Mutation, mutations_of

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "mutants.tsv"
PACKAGE = Path("src/dpbench")
_SECONDS = 300.0
_TEST = re.compile(r"def (test_\w+)\(")


class Known(NamedTuple):
    """A line of the table.

    Attributes:
        room: Where the mutant lay when it was drawn.
        function: Qualified name of the function.
        kind: See `Mutation`.
        change: Likewise.
        verdict: "killed", "survives" or "no quick test reaches it".
        by: Name of the test that killed it; or how many it survived.
    """

    room: str
    function: str
    kind: str
    change: str
    verdict: str
    by: str


def read_table() -> list[Known]:
    """Mutants that were tried."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()[1:]
    return [Known(*line.split("\t")) for line in lines]


def files_of_tests() -> dict[str, list[str]]:
    """Name of a test → files that have one of that name."""
    files: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in _TEST.findall(path.read_text(encoding="utf-8")):
            files.setdefault(name, []).append(path.relative_to(ROOT).as_posix())
    return files


def copy_tree(folder: Path) -> Path:
    """Copy the tracked files of this checkout, and compile them."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in names.rstrip("\0").split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    compileall.compile_dir(folder / PACKAGE, quiet=2)
    return folder


def is_noticed(mutation: Mutation, test: str, files: Sequence[str], tree: Path) -> bool:
    """Run the test of a name in a copy of the tree that has a mutation; one that takes too long has noticed it.

    Args:
        mutation: Of the source.
        test: Name of the test.
        files: Those that have a test of this name.
        tree: The copy.
    """
    target = tree / PACKAGE / mutation.path.relative_to(ROOT / PACKAGE)
    original = target.read_bytes()
    target.write_bytes(mutation.source())
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree / "src"), str(tree)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    words = ["-m", "pytest", "-x", "-q", "-m", "", "-n", "0", "-p", "no:cacheprovider", "-k", test, *files]
    try:
        done = subprocess.run(
            [sys.executable, *words], cwd=tree, env=environment, capture_output=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    finally:
        target.write_bytes(original)
    return done.returncode != 0


def try_again(known: Sequence[Known], workers: int) -> list[str]:
    """Try killed mutants wherever they lie today, and say which are noticed no longer.

    Args:
        known: Lines of the table.
        workers: Number of copies of the tree that are used at once.
    """
    today: dict[tuple[str, str, str], Mutation] = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        for mutation in mutations_of(path):
            today.setdefault(mutation.name, mutation)
    files = files_of_tests()

    def work(worker: int) -> list[str]:
        lost = []
        with tempfile.TemporaryDirectory() as folder:
            tree = copy_tree(Path(folder))
            for one in known[worker::workers]:
                mutation = today.get((one.function, one.kind, one.change))
                if mutation is None:
                    verdict = "gone from the source"
                elif one.by not in files:
                    verdict = "its test is gone"
                elif is_noticed(mutation, one.by, files[one.by], tree):
                    verdict = "noticed"
                else:
                    verdict = "noticed no longer"
                    lost.append(f"{one.room}: {one.function}: {one.change}")
                print(one.room, one.function, one.change, one.by, verdict, sep=" | ", flush=True)
        return lost

    with ThreadPoolExecutor(workers) as pool:
        return [line for lines in pool.map(work, range(workers)) for line in lines]


def main() -> int:
    """Try again; 1 if a mutant is noticed no longer."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("rooms", nargs="*", help="rooms (default: all)")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    known = [one for one in read_table() if one.verdict == "killed" and one.room in (arguments.rooms or [one.room])]
    lost = try_again(known, arguments.workers)
    print(f"{len(known)} mutants, {len(lost)} noticed no longer", *lost, sep="\n")
    return min(len(lost), 1)


if __name__ == "__main__":
    sys.exit(main())
