"""Runs of the command line that can be killed: ordinary processes, and forks of one that has imported everything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GONE = 3600.0  # seconds after which a process counts as hanging, on a busy machine too
_POLL = 0.002


def preload() -> None:
    """Import what a run imports, so that forks start in no time."""
    from hydra import compose, initialize_config_dir
    from matplotlib import pyplot  # noqa: F401

    import dpbench.cli
    import dpbench.harness.reports.plots
    import dpbench.harness.run.train  # noqa: F401
    from dpbench.harness.run.search_path import conf_dir

    with initialize_config_dir(str(conf_dir().resolve()), version_base="1.3"):
        compose("config", return_hydra_config=True)


@dataclass
class Process:
    """A `dpbench` command in a session of its own.

    Attributes:
        pid: Of its first process.
        log: What it prints.
    """

    pid: int
    log: Path
    begun: float
    status: int | None = None
    _nanoseconds: dict[str, int] = field(default_factory=dict)

    @classmethod
    def start(cls, words: Sequence[str], folder: Path, ordinary: bool) -> Process:
        """Start `dpbench WORDS` in a folder; not ordinary: as a fork of this process, without the imports."""
        log = folder / "output.log"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder)}
        if ordinary:
            with open(log, "a", encoding="utf-8") as file:
                command = [sys.executable, "-m", "dpbench", *words]
                popen = subprocess.Popen(command, cwd=folder, env=env, stdout=file, stderr=file, start_new_session=True)
            return cls(popen.pid, log, time.monotonic())
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            _become(words, folder, log, env)
        return cls(pid, log, time.monotonic())

    def poll(self) -> int | None:
        """Exit status (negative: the signal), or None while it runs."""
        if self.status is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if done else None
        return self.status

    def wait(self, seconds: float = float("inf")) -> int | None:
        """The same, when it and its workers have computed for so many seconds (of the processor), or hang."""
        while self.poll() is None and self.computed() < seconds and time.monotonic() - self.begun < GONE:
            time.sleep(_POLL)
        return self.status

    def computed(self) -> float:
        """Seconds of the processor, in main threads; other work on the machine does not change them."""
        with suppress(OSError):
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            for pid in (str(self.pid), *children):
                with suppress(OSError, IndexError):
                    self._nanoseconds[pid] = int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])
        return sum(self._nanoseconds.values()) / 1e9

    def workers(self) -> list[int]:
        """Other processes of its session (those of a training on several)."""
        return sorted(pid for pid, session in _sessions() if session == self.pid and pid != self.pid)

    def kill(self, whom: str, draw: float = 0.0) -> str:
        """SIGKILL to "all", to the "parent" alone, or to a "worker" (drawn by a number below 1); whom it hit."""
        workers = self.workers()
        if whom == "worker" and not workers:
            whom = "parent"
        with suppress(ProcessLookupError):
            if whom == "worker":
                os.kill(workers[int(draw * len(workers))], signal.SIGKILL)
            elif whom == "all":
                os.killpg(self.pid, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGKILL)
        return whom

    def ended(self) -> bool:
        """Wait until it and all its workers are gone; False: some hang (they are killed then)."""
        begun = time.monotonic()
        while self.poll() is None or self.workers():
            if time.monotonic() - begun > GONE:
                self.kill("all")
                return False
            time.sleep(_POLL)
        return True


def _become(words: Sequence[str], folder: Path, log: Path, env: dict[str, str]) -> None:
    status = 70
    try:
        os.setsid()
        os.chdir(folder)
        os.environ.update(env)
        with open(log, "a", encoding="utf-8") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        from dpbench.cli import main

        status = main(list(words))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _sessions() -> Iterable[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                state, _, _, session = (entry / "stat").read_text().rpartition(") ")[2].split()[:4]
                if state != "Z":
                    yield int(entry.name), int(session)


def append(log: Path, line: dict[str, Any]) -> None:
    """A line of a log that another call goes on with."""
    with open(log, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read(log: Path) -> list[dict[str, Any]]:
    """All whole lines of a log."""
    if not log.exists():
        return []
    lines = log.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]
