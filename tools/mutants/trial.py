"""Trial of mutants: each in a copy of the tree, by the quick tests that reach it, in a process of their own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tools.mutants.mutation import Mutation
from tools.mutants.reached import RECORD, Reach, instrument

ROOT = Path(__file__).parents[2]
PACKAGE = Path("src/dpbench")
_QUICK = "not slow and not long and not cluster"
_SLACK = 90.0
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.M)

KILLED = "killed"
SURVIVES = "survives"
UNREACHED = "no quick test reaches it"


def copy_tree(folder: Path) -> Path:
    """Copy the tracked files of this checkout."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in names.rstrip("\0").split("\0"):
        source = ROOT / name
        if source.is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    return folder


def environment_of(tree: Path) -> dict[str, str]:
    """Environment in which a copy of the tree is what is imported, always from its sources."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree / "src"), str(tree)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }


def record(tree: Path, file: Path, words: Sequence[str]) -> None:
    """Run the quick tests in a copy of the tree whose functions say that they are reached.

    Args:
        tree: The copy.
        file: Where the record is written.
        words: Further arguments of pytest.
    """
    for path in (tree / PACKAGE).rglob("*.py"):
        instrument(path, tree / PACKAGE)
    file.unlink(missing_ok=True)
    environment = {**environment_of(tree), RECORD: str(file)}
    arguments = ["-m", _QUICK, "-q", "-p", "tools.mutants.reached", "-p", "no:cacheprovider", *words]
    subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=tree, env=environment, check=False)


class Trials:
    """Trials in one copy of the tree.

    Args:
        tree: The copy.
        reach: Which tests reach what.
        seconds: Longest time of the tests of one mutant, as they took when they were recorded.
    """

    def __init__(self, tree: Path, reach: Reach, seconds: float) -> None:
        self._tree = tree
        self._reach = reach
        self._seconds = seconds
        self._sound: set[str] = set()
        self._broken: set[str] = set()

    def verdict(self, mutation: Mutation) -> tuple[str, str]:
        """Try a mutant.

        A test that also fails without the mutation is left out from then on.

        Returns:
            The verdict; and the test that killed it, or how many survived in how many seconds.
        """
        file = mutation.path.relative_to(ROOT / PACKAGE)
        target = self._tree / PACKAGE / file
        reaching = self._reach.tests(file, mutation.function)
        while True:
            tests, seconds = self._within_time([test for test in reaching if test not in self._broken])
            if not tests:
                return UNREACHED, ""
            target.write_bytes(mutation.source())
            try:
                killer = self._killer(tests, seconds)
            finally:
                shutil.copyfile(mutation.path, target)
            if killer is None:
                return SURVIVES, f"{len(tests)} tests, {seconds:.0f} s"
            suspects = [killer] if killer in tests else tests
            failing = None if self._sound.issuperset(suspects) else self._killer(suspects, seconds)
            if failing is None:
                self._sound.update(suspects)
                return KILLED, killer.rpartition("::")[2].partition("[")[0]
            self._broken.update([failing] if failing in tests else suspects)

    def _within_time(self, tests: Sequence[str]) -> tuple[list[str], float]:
        chosen: list[str] = []
        total = 0.0
        for test in tests:
            cost = self._reach.seconds[test] + 0.01
            if chosen and total + cost > self._seconds:
                break
            chosen.append(test)
            total += cost
        return chosen, total

    def _killer(self, tests: Sequence[str], seconds: float) -> str | None:
        """First test that fails; "a crash" or "the time" where none can say so; None: all pass."""
        arguments = self._tree / "tests.txt"
        arguments.write_text("\n".join(tests), encoding="utf-8")
        words = ["-x", "-q", "-rfE", "-p", "no:cacheprovider", "-p", "no:xdist", f"@{arguments}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *words],
            cwd=self._tree,
            env=environment_of(self._tree),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=3 * seconds + _SLACK)
        except subprocess.TimeoutExpired:
            return "the time"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what the tests have left
            process.wait()
        if process.returncode == 0:
            return None
        failed = _FAILED.search(output)
        return "a crash" if failed is None else failed[1]
