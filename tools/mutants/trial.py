"""Trial of mutants: each in a copy of the tree, by the quick tests that reach it.

The tests of a mutant run in a process that is forked from one with PyTorch and Lightning imported, and dpbench not.
"""

from __future__ import annotations

import compileall
import contextlib
import importlib
import importlib.util
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tools.mutants.mutation import Mutation
from tools.mutants.reached import Reach

ROOT = Path(__file__).parents[2]
PACKAGE = Path("src/dpbench")
_QUICK = "not slow and not long and not cluster"
_HEAVY = (
    "hydra",
    "matplotlib.pyplot",
    "pandas",
    "pytorch_lightning",
    "scipy.optimize",
    "sklearn.datasets",
    "torch.distributed",
    "torchvision",
    "dp_accounting",
)
"""Packages that nearly every test imports; none of them imports dpbench."""
_SLACK = 60.0

KILLED = "killed"
SURVIVES = "survives"
UNREACHED = "no quick test reaches it"


def copy_tree(folder: Path) -> Path:
    """Copy the tracked files of this checkout, with compiled modules that are never checked against their source."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in names.rstrip("\0").split("\0"):
        source = ROOT / name
        if source.is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(folder / PACKAGE, quiet=2, invalidation_mode=mode)
    return folder


def environment_of(tree: Path) -> dict[str, str]:
    """Environment in which a copy of the tree is what is imported."""
    return {
        "PYTHONPATH": os.pathsep.join([str(tree / "src"), str(tree)]),
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
    shutil.rmtree(tree / PACKAGE / "__pycache__", ignore_errors=True)
    for path in (tree / PACKAGE).rglob("*.py"):
        cached = Path(importlib.util.cache_from_source(str(path)))
        cached.unlink(missing_ok=True)
        instrument(path, tree / PACKAGE)
    file.unlink(missing_ok=True)
    environment = {**os.environ, **environment_of(tree), "DPBENCH_REACH_RECORD": str(file)}
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
        for name in _HEAVY:
            importlib.import_module(name)

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
            killer = self._killer_of(mutation, file, tests, seconds)
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

    def _killer_of(self, mutation: Mutation, file: Path, tests: Sequence[str], seconds: float) -> str | None:
        target = self._tree / PACKAGE / file
        cached = Path(importlib.util.cache_from_source(str(target)))
        original, compiled = target.read_bytes(), cached.read_bytes()
        try:
            cached.unlink()
            target.write_bytes(mutation.source())
            return self._killer(tests, 3 * seconds + _SLACK)
        finally:
            target.write_bytes(original)
            cached.write_bytes(compiled)

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
        answer = self._tree / "killer.txt"
        arguments = self._tree / "tests.txt"
        answer.unlink(missing_ok=True)
        arguments.write_text("\n".join(tests), encoding="utf-8")
        child = os.fork()
        if child == 0:
            self._run_tests(arguments, answer)
        end = time.monotonic() + limit
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended or time.monotonic() > end:
                break
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # and what the tests have left
        if not ended:
            os.waitpid(child, 0)
            return "the time"
        if os.waitstatus_to_exitcode(status) == 0:
            return None
        return answer.read_text(encoding="utf-8") if answer.exists() else "a crash"

    def _run_tests(self, arguments: Path, answer: Path) -> None:
        code = 1
        try:
            os.setsid()
            os.chdir(self._tree)
            os.environ.update(environment_of(self._tree))
            here = {str(ROOT), str(ROOT / "src"), ""}
            sys.path[:] = [
                str(self._tree / "src"),
                str(self._tree),
                *(place for place in sys.path if place not in here),
            ]
            with (self._tree / "tests.log").open("w", encoding="utf-8") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            # Packages that are imported already may be plugins of pytest.
            quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
            words = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *quiet, f"@{arguments}"]
            code = int(pytest.main(words, plugins=[_FirstFailure(answer)]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


class _FirstFailure:
    """Plugin that writes the name of the first test that fails."""

    def __init__(self, answer: Path) -> None:
        self._answer = answer

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._answer.exists():
            self._answer.write_text(report.nodeid, encoding="utf-8")
