"""Trial of mutants: each in a copy of the tree, by the quick tests that reach it."""

from __future__ import annotations

import compileall
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.mutants.mutation import Mutation
from tools.mutants.reached import Reach

ROOT = Path(__file__).parents[2]
PACKAGE = Path("src/dpbench")
_QUICK = "not slow and not long and not cluster"
_SLACK = 60.0
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.M)

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
    """Environment in which a copy of the tree is what is imported."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree / "src"), str(tree)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }


def record(tree: Path, file: Path, instrument: Callable[[Path, Path], None], words: Sequence[str]) -> None:
    """Run the quick tests in a copy of the tree whose functions say that they are reached.

    Args:
        tree: The copy.
        file: Where the record is written.
        instrument: Rewriter of a file.
        words: Further arguments of pytest.
    """
    for path in (tree / PACKAGE).rglob("*.py"):
        instrument(path, tree / PACKAGE)
    file.unlink(missing_ok=True)
    environment = {**environment_of(tree), "DPBENCH_REACH_RECORD": str(file)}
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
        compileall.compile_dir(tree / PACKAGE, quiet=2)

    def verdict(self, mutation: Mutation) -> tuple[str, str]:
        """Try a mutant.

        A test that also fails without the mutation is left out from then on.

        Returns:
            The verdict; and the test that killed it, or how many survived in how many seconds.
        """
        file = mutation.path.relative_to(ROOT / PACKAGE)
        reaching = self._reach.tests(file, mutation.function)
        while True:
            tests, seconds = self._within_time([test for test in reaching if test not in self._broken])
            if not tests:
                return UNREACHED, ""
            target = self._tree / PACKAGE / file
            original = target.read_bytes()
            target.write_bytes(mutation.source())
            try:
                killer = self._killer(tests, 3 * seconds + _SLACK)
            finally:
                target.write_bytes(original)
            if killer is None:
                return SURVIVES, f"{len(tests)} tests, {seconds:.0f} s"
            suspects = [killer] if killer in tests else tests
            if self._sound.issuperset(suspects):
                break
            failing = self._killer(suspects, 3 * seconds + _SLACK)
            if failing is None:
                self._sound.update(suspects)
                break
            self._broken.update([failing] if failing in tests else suspects)
        return KILLED, killer.rpartition("::")[2].partition("[")[0]

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

    def _killer(self, tests: Sequence[str], limit: float) -> str | None:
        """First test that fails; "a crash" or "the time" where none can say so; None: all pass."""
        arguments = self._tree / "tests.txt"
        arguments.write_text("\n".join(tests), encoding="utf-8")
        words = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"@{arguments}"]
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=self._tree,
            env=environment_of(self._tree),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and what the tests have started
            process.communicate()
            return "the time"
        if process.returncode == 0:
            return None
        failed = _FAILED.search(printed)
        return failed[1] if failed else "a crash"
