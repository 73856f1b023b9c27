"""Training in several processes of this machine: started once, ended well, and their errors reported in one line."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from torch.multiprocessing.spawn import ProcessException

from dpbench.callback.process_group import leave_group
from dpbench.errors import DPBenchError, WorkerDied

_START_METHODS: dict[str, Literal["spawn", "fork"]] = {"ddp_spawn": "spawn", "ddp_fork": "fork"}


def with_launcher(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a trainer whose processes, if it starts several, are started by the launcher below."""
    method = _START_METHODS.get(str(options.get("strategy")))
    return {**options, "strategy": SpawnedDDP(start_method=method)} if method else dict(options)


class SpawnedDDP(DDPStrategy):
    """`ddp_spawn`, with the launcher below."""

    def _configure_launcher(self) -> None:
        self._launcher = _Launcher(self, start_method=self._start_method)  # type: ignore[arg-type]


class _Launcher(_MultiProcessingLauncher):
    """Lightning's launcher; workers leave their group before they exit, end with the parent, and report errors."""

    _reports: Path

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the processes and wait for them, as Lightning does; report the first error of all.

        Raises:
            WorkerDied: A process ended without an error of its own (killed, or aborted).
            Exception: The error that a process raised, as it raised it.
        """
        with TemporaryDirectory(prefix="dpbench-") as folder:
            self._reports = Path(folder)
            try:
                return super().launch(function, *args, trainer=trainer, **kwargs)
            except ProcessException as error:
                raise self._cause(error) from error

    def _cause(self, error: ProcessException) -> BaseException:
        """Find the error that came first: a process that fails or dies takes down the others, which wait for it."""
        reports = sorted(self._reports.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
        raised: list[BaseException] = [pickle.loads(path.read_bytes()) for path in reports]
        explained = [each for each in raised if isinstance(each, DPBenchError)]
        if explained:
            return explained[0]
        codes = [process.exitcode or 0 for process in self.procs]
        # SIGTERM is how torch ends the others.
        killed = [rank for rank, code in enumerate(codes) if code < 0 and code != -signal.SIGTERM]
        if not killed and raised:
            return raised[0]
        if not killed and not hasattr(error, "exit_code"):
            return error  # raised something that cannot be pickled: its traceback is in the message
        rank = killed[0] if killed else error.error_index
        return WorkerDied(rank, len(codes), _how(codes[rank]))

    def _wrapping_function(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        _end_with_parent()
        try:
            super()._wrapping_function(process_idx, *args, **kwargs)
        except Exception as error:
            self._report(process_idx, error)
            raise
        leave_group()

    def _report(self, rank: int, error: Exception) -> None:
        try:
            content = pickle.dumps(error)
            pickle.loads(content)  # an exception with arguments of its own may not come back
        except Exception:
            return
        temporary = self._reports / str(rank)
        temporary.write_bytes(content)
        temporary.replace(self._reports / f"{rank}.error")


def _how(code: int) -> str:
    try:
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"
    except ValueError:
        return f"signal {-code}"


def _end_with_parent() -> None:
    """Kill this process when its parent dies: an orphan would train on, beside whoever resumes the run.

    torch asks the kernel for a SIGINT then, which workers ignore (a Ctrl-C reaches them too, and is the parent's).
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True, name="dpbench-parent").start()
