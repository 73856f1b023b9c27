"""Trial of mutants: each in a copy of the tree, by tests in a process of their own."""

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
from tools.refusals import all_tests

ROOT = Path(__file__).parents[2]
PACKAGE = Path("src/dpbench")
_QUICK = "not slow and not long and not cluster"
_SECONDS = 600.0
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.M)


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


class Trials:
    """Trials in one copy of the tree.

    Args:
        tree: The copy.
    """

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._nodes = all_tests()
        self._sound: set[str] = set()

    def killer(self, mutation: Mutation, test: str) -> str | None:
        """Name of a test that fails with a mutation and passes without it; None if there is none.

        Args:
            mutation: The mutation.
            test: Name of the test that noticed it before. If that does not, all quick tests of its room are tried.
        """
        file = mutation.path.relative_to(ROOT / PACKAGE)
        named = sorted(node for node in self._nodes if node.endswith(f"::{test}"))
        folders = [Path("tests") / folder for folder in file.parents]
        room = next(folder for folder in folders if (self._tree / folder).is_dir())
        for words in filter(None, (named, [str(room)])):
            target = self._tree / PACKAGE / file
            target.write_bytes(mutation.source())
            try:
                failure = self._failure(words)
            finally:
                shutil.copyfile(mutation.path, target)
            if failure is not None and self._is_sound(failure):
                return failure.rpartition("::")[2].partition("[")[0]
        return None

    def _is_sound(self, test: str) -> bool:
        if test not in self._sound and self._failure([test]) is None:
            self._sound.add(test)
        return test in self._sound

    def _failure(self, words: Sequence[str]) -> str | None:
        """Node of the first test that fails, or the tests' words where none can say so; None: all pass."""
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self._tree / "src"), str(self._tree)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        options = ["-x", "-q", "-rfE", "-m", _QUICK, "-p", "no:cacheprovider", "-p", "no:xdist"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *words],
            cwd=self._tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        output = ""
        try:
            output, _ = process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            return words[0]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what the tests have left
            process.wait()
        if process.returncode == 0:
            return None
        failed = _FAILED.search(output)
        return words[0] if failed is None else failed[1]
