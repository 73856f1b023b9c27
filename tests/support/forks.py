"""Commands as forks of one process that has imported everything: an import of PyTorch takes longer than most tests.

`python -m tests.support.forks` is that process. It reads requests from its standard input and answers each with a line,
which is the whole of its protocol; `start` makes it, one for each process of pytest.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import runpy
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
IMPORTED = (
    "dpbench.cli.train",
    "dpbench.capabilities.export",
    "dpbench.harness.reports.end_of_run",
    "dpbench.harness.reports.plots",
    "dpbench.harness.run.build",
    "dpbench.harness.run.jobs",
    "dpbench.harness.run.train",
    "hydra._internal.core_plugins.basic_launcher",
    "hydra._internal.core_plugins.file_config_source",
    "hydra_plugins.hydra_joblib_launcher.joblib_launcher",
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher",
    "pandas.io.formats.csvs",
    "pytorch_lightning.loggers",
    "sklearn.datasets",
    "sklearn.model_selection",
)
_POLL = 0.02  # seconds


class Fork:
    """A command that runs, with what tests use of `subprocess.Popen`."""

    def __init__(self, pid: int, pipes: list[int]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pipes = pipes

    def poll(self) -> int | None:
        """Exit status (negative: the signal), or None while it runs."""
        if self.returncode is None:
            self.returncode = _answer({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The same, when it has ended."""
        begun = time.monotonic()
        while (status := self.poll()) is None:
            if time.monotonic() - begun > timeout:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(_POLL)
        return status

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Standard output and error, when it has ended, and with it all processes that it has started."""
        begun = time.monotonic()
        texts = dict.fromkeys(self._pipes, b"")
        with selectors.DefaultSelector() as selector:
            for pipe in self._pipes:
                selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select(1):
                    piece = os.read(key.fd, 2**16)
                    texts[key.fd] += piece
                    if not piece:
                        selector.unregister(key.fd)
                        os.close(key.fd)
                if time.monotonic() - begun > timeout:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout)
        self.wait(timeout)
        out, err = (text.decode() for text in texts.values())
        return out, err

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def start(folder: Path, module: str, words: list[str], env: dict[str, str]) -> Fork:
    """Start `python -m MODULE WORDS` in a folder, or `python -c CODE`.

    Args:
        folder: Working directory.
        module: What runs as the main module; "-c": the first word is a program.
        words: Its arguments.
        env: The whole environment. Python reads its own variables (PYTHONHASHSEED, say) when it starts, so that here
            only PYTHONPATH has an effect.
    """
    pipes = []
    with tempfile.TemporaryDirectory() as place:
        for name in ("out", "err"):
            os.mkfifo(f"{place}/{name}")
            pipes.append(os.open(f"{place}/{name}", os.O_RDONLY | os.O_NONBLOCK))
        request = {"folder": str(folder.absolute()), "module": module, "words": words, "env": env}
        pid = _answer({"place": place, "command": request})
    return Fork(pid, pipes)


def _answer(request: dict[str, Any]) -> Any:
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())


@functools.cache
def _server() -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    command = [sys.executable, "-m", "tests.support.forks"]
    server = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)  # ends it: its input is closed
    return server


def _serve() -> None:
    """Answer requests until the other end is closed; a fork returns from here as the command that was asked for."""
    for name in IMPORTED:
        importlib.import_module(name)
    # Forks have other standard streams, and must not read a request or write into an answer.
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    while line := requests.readline():
        request = json.loads(line)
        if "poll" in request:
            done, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if done else None
        else:
            pipes = [os.open(f"{request['place']}/{name}", os.O_WRONLY) for name in ("out", "err")]
            answer = os.fork()
            if not answer:
                return _become(*pipes, **request["command"])
            for pipe in pipes:
                os.close(pipe)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return None


def _become(out: int, err: int, folder: str, module: str, words: list[str], env: dict[str, str]) -> None:
    """Be `python -m MODULE WORDS` from here on."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, target in enumerate((nothing, out, err)):
        os.dup2(target, number)
        os.close(target)
    os.chdir(folder)
    np.random.seed()  # forks would draw the same numbers; Python's own generator looks after itself
    os.environ.clear()
    os.environ.update(env)
    added = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry and entry not in sys.path]
    sys.path[:1] = [folder, *added]
    sys.argv = [module, *words]
    if module == "-c":
        program = sys.argv.pop(1)
        main = types.ModuleType("__main__")  # has no file, in which Python would look for the source of its classes
        sys.modules["__main__"] = main
        exec(compile(program, "<string>", "exec"), main.__dict__)
        return
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _status_of(ended: SystemExit) -> int:
    """Exit status of a command, as the interpreter would have it."""
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    print(ended.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    status = 0
    try:
        _serve()
    except SystemExit as ended:
        status = _status_of(ended)
    except Exception:
        sys.excepthook(*sys.exc_info())
        status = 1
    # The interpreter would take each object apart, seconds long, on pages that a fork has to copy first.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
