"""Several processes of one training, on one or several nodes.

torchrun or srun has launched them, each with the whole command, or `run_in_processes` has started them for
`trainer.devices=2`, each with the whole run: from there on they are the same. The first one holds the run's folder and
writes to it; they agree on everything before the first step.

`run_in_processes` does not leave it to torchrun: a job of a sweep and a call of the library have no command line to run
again, and their observers are objects, which no file of a configuration holds.

No import of PyTorch here before it is needed: the command line asks whether this process is the first one.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import secrets
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, TypeVar

from dpbench.errors import (
    ConfigurationError,
    DPBenchError,
    Interrupted,
    PeerLost,
    ReportedByAnotherRank,
    WorkerDied,
    shown,
)
from dpbench.files import replacing
from dpbench.harness.run._signals import SIGNALS, StopSignals, end_with, handled_by, interrupted_at_once, stops_nothing
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.provenance import available_cores

T = TypeVar("T")
_VISIBLE_WITHIN = 10.0  # seconds in which a file of one node must be seen on another
_MAILBOX = "DPBENCH_MAILBOX"
"""Variable of started processes: the folder with the file by which they meet, and the report of each."""
_GRACE = 30.0  # seconds that others have to notice by themselves that one has failed: NCCL takes minutes


@dataclass(frozen=True)
class LaunchedProcess:
    """This process among all of its training.

    Attributes:
        rank: Its number, from 0.
        world: Number of processes.
        local_rank: Its number on its node.
        nodes: Number of nodes, with as many processes each.
    """

    rank: int
    world: int
    local_rank: int
    nodes: int


def launched_process() -> LaunchedProcess | None:
    """Place of this process among several, however they were launched; None if it is alone."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        process = LaunchedProcess(
            rank=_number("RANK", 0),
            world=_number("WORLD_SIZE", 1),
            local_rank=_number("LOCAL_RANK", 0),
            nodes=max(1, _number("WORLD_SIZE", 1) // _number("LOCAL_WORLD_SIZE", 1)),
        )
    else:  # of a step: in a job's script the number of tasks is what srun would start
        process = LaunchedProcess(
            rank=_number("SLURM_PROCID", 0),
            world=_number("SLURM_STEP_NUM_TASKS", 1),
            local_rank=_number("SLURM_LOCALID", 0),
            nodes=_number("SLURM_STEP_NUM_NODES", 1),
        )
    return process if process.world > 1 else None


def _number(variable: str, default: int) -> int:
    return int(os.environ.get(variable, default))


def is_first() -> bool:
    """Tell whether this process writes: it is alone, or the first of several."""
    process = launched_process()
    return process is None or process.rank == 0


def join_group() -> None:
    """Meet the other processes, if there are any; once."""
    import torch
    import torch.distributed as dist

    process = launched_process()
    if process is None or dist.is_initialized():
        return
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        from lightning_fabric.plugins.environments.slurm import SLURMEnvironment

        nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST", "127.0.0.1")
        job = os.environ.get("SLURM_JOB_ID", "")
        os.environ.setdefault("MASTER_ADDR", SLURMEnvironment.resolve_root_node_address(nodes))
        os.environ.setdefault("MASTER_PORT", str(15000 + int(job[-4:] or 0)))
        # From here on they are like torchrun's, for Lightning too.
        os.environ["RANK"] = str(process.rank)
        os.environ["WORLD_SIZE"] = str(process.world)
        os.environ["LOCAL_RANK"] = str(process.local_rank)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    # Where the parent is ours they meet at a file: a port that was free when it looked may be taken meanwhile.
    mailbox = _mailbox()
    place = "env://" if mailbox is None else f"file://{mailbox / 'meeting'}"
    try:
        dist.init_process_group(backend, place, rank=process.rank, world_size=process.world)
    except RuntimeError as error:
        raise PeerLost(process.rank, process.world, None) from error


def with_launched_processes(config: dict[str, Any]) -> dict[str, Any]:
    """Set the number of processes in a configuration to that of the launched ones; it must be the same in all.

    Raises:
        ConfigurationError: The processes have different configurations.
    """
    process = launched_process()
    if process is None or _mailbox() is not None:
        return config  # it says their number itself, and all of them have it from one process
    _refuse_differences(config)
    trainer = {**config["trainer"], "devices": process.world // process.nodes, "num_nodes": process.nodes}
    return {**config, "trainer": trainer}


def _gather(value: Any) -> list[Any]:
    """The value of each process, by rank."""
    import torch.distributed as dist

    join_group()
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def together() -> Iterator[None]:
    """Raise in all processes if one of them fails; the first that failed says why. No communication inside.

    Raises:
        ReportedByAnotherRank: Another process has failed.
    """
    process = launched_process()
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    failed: list[bool] = [] if process is None else _gather(error is not None)
    if error is not None and (process is None or failed.index(True) == process.rank):
        raise error
    if any(failed):
        raise ReportedByAnotherRank


def from_first_process(make: Callable[[], T]) -> T:
    """Make something in the first process, for all of them."""
    value: Any = None
    with together():
        if is_first():
            value = make()
    return value if launched_process() is None else _gather(value)[0]  # type: ignore[no-any-return]


def first_of_node_first(load: Callable[[], None]) -> None:
    """Do something in the first process of each node, then in the others: two downloads would write to one file."""
    process = launched_process()
    waits = process is not None and process.local_rank > 0
    with together():
        if not waits:
            load()
    if waits:
        load()


def _refuse_differences(config: Mapping[str, Any]) -> None:
    from dpbench.code import code_hash, foreign_code, versions

    facts = {"versions": versions(), "code of dpbench": code_hash(), "other code": foreign_code(dict(config)), **config}
    everybody = _gather((socket.gethostname(), facts))
    with together():
        node = socket.gethostname()
        first_node, expected = everybody[0]
        for name in {**expected, **facts}:
            if expected.get(name) != facts.get(name):
                raise ConfigurationError(
                    f"{node} has another {name} than {first_node}: {facts.get(name)}, not {expected.get(name)}. All "
                    "processes of a training need the same."
                )


def require_shared_folder(folder: Path) -> None:
    """Check that all processes see the same folder.

    Raises:
        ConfigurationError: One of them does not see the files of the first one.
    """
    if launched_process() is None:
        return
    token = folder / from_first_process(lambda: _write_token(folder))
    with together():
        limit = time.monotonic() + _VISIBLE_WITHIN
        while not token.exists():
            if time.monotonic() > limit:
                raise ConfigurationError(
                    f"{socket.gethostname()} does not see what another node has written to {folder}: a run on several "
                    "nodes needs a folder that they share (hydra.run.dir)."
                )
            time.sleep(0.1)
    if is_first():
        with suppress(OSError):
            token.unlink()


def _write_token(folder: Path) -> str:
    name = f".shared-{secrets.token_hex(8)}"
    (folder / name).touch()
    return name


@contextmanager
def losses_explained(command: Callable[[], str | None]) -> Iterator[None]:
    """Say in one line that another process is gone, where a talk with it breaks off.

    Args:
        command: The command with which the run goes on, if any.

    Raises:
        PeerLost: Another process has ended; raised in place of the library's error.
    """
    process = launched_process()
    if process is None:
        yield
        return
    import torch.distributed as dist

    try:
        yield
    except RuntimeError as error:
        # PyTorch has types for some of these errors only; gloo's are plain ones.
        backends = ("gloo", "Gloo", "NCCL", "Socket")
        is_loss = isinstance(error, dist.DistError) or any(word in str(error) for word in backends)
        if isinstance(error, DPBenchError) or not is_loss:
            raise
        raise PeerLost(process.rank, process.world, command()) from error


def leave_to_first() -> bool:
    """Leave the other processes after the last step; returns whether this one has more to do."""
    from dpbench.callback.process_group import leave_group

    if launched_process() is not None:
        leave_group()
    return is_first()


def processes_to_start(trainer: Mapping[str, Any]) -> int:
    """Number of processes that a trainer's options ask for on this machine; 1 where they are started already."""
    if launched_process() is not None:
        return 1
    devices = trainer.get("devices", 1)
    if devices in ("auto", -1):
        import torch

        on_gpu = trainer.get("accelerator", "auto") in ("auto", "gpu", "cuda")
        return max(1, torch.cuda.device_count()) if on_gpu else 1
    if isinstance(devices, list):
        return len(devices)
    return devices if isinstance(devices, int) else 1


def run_in_processes(run: Callable[[], T], count: int, strategy: str | None, folder: RunFolder) -> T:
    """Run a function in several new processes, which find one another as torchrun's do, and wait for them.

    Signals are handed on: the first of them has the training stop after its step, as in a single process.

    Args:
        run: Function of each process; it is pickled, unless they are forked.
        count: Number of processes.
        strategy: Lightning's word for it: ddp_fork, or any other to spawn them.
        folder: The run's folder.

    Returns:
        The first process's result.

    Raises:
        WorkerDied: A process ended without an error of its own (killed, or aborted).
        Interrupted: After a signal.
        Exception: The first error that one of them raised.
    """
    from torch.multiprocessing.spawn import ProcessExitedException, start_processes

    method = "fork" if strategy == "ddp_fork" else "spawn"
    if multiprocessing.get_start_method() not in multiprocessing.get_all_start_methods():
        # A worker of joblib has "loky", which processes that are spawned would be told to use, and do not know.
        multiprocessing.set_start_method(method, force=True)
    stops = StopSignals()
    with TemporaryDirectory(prefix="dpbench-") as name:
        mailbox = Path(name)
        # A Ctrl-C reaches every process of a terminal: those that are started here ignore it until they train.
        with handled_by(signal.SIG_IGN):
            arguments = (count, mailbox, run)
            context: Any = start_processes(_run_as, arguments, count, join=False, start_method=method)  # type: ignore[no-untyped-call]

        def pass_on(number: int, frame: FrameType | None) -> None:
            stops.hear(number)
            for process in context.processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGTERM if number == signal.SIGINT else number)

        try:
            with handled_by(pass_on):
                while not context.join(grace_period=_GRACE):
                    pass
        except KeyboardInterrupt as interruption:
            if not stops.number:
                raise
            raise interrupted_at_once(stops.number, folder) from interruption
        except ProcessExitedException as failure:
            error = _cause_of(failure, context.processes, mailbox, folder)
            if not (mailbox / "0.result").exists():
                raise _with_signal(error, stops.number, folder) from None
            warnings.warn(f"{error}, after the last line of the ledger: nothing is lost.", stacklevel=2)
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        result: T = pickle.loads((mailbox / "0.result").read_bytes())
        return result


def _mailbox() -> Path | None:
    name = os.environ.get(_MAILBOX)
    return None if name is None else Path(name)


def _run_as(rank: int, count: int, mailbox: Path, run: Callable[[], Any]) -> None:
    """Run as a started process: become one like torchrun's, run, and report."""
    for number in SIGNALS:
        if number != signal.SIGINT and not stops_nothing(number):
            signal.signal(number, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    end_with(parent.pid, signal.SIGKILL)
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "dpbench",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        _MAILBOX: str(mailbox),
    }
    import torch
    from pytorch_lightning.utilities import rank_zero_only

    from dpbench.callback.process_group import leave_group

    # Lightning, which may have been imported, has looked for it before it was set.
    rank_zero_only.rank = rank  # type: ignore[attr-defined]
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, available_cores() // count))
    try:
        _report(mailbox / f"{rank}.result", run())
    except Exception as error:
        error.add_note(f"in process {rank} of {count}:\n{traceback.format_exc()}")
        _report(mailbox / f"{rank}.error", error)
        sys.exit(1)
    finally:
        leave_group()


def _report(path: Path, value: Any) -> None:
    """Leave a result or an error for the parent, whole or not at all."""
    try:
        content = pickle.dumps(value)
        pickle.loads(content)
    except Exception:  # an error with arguments of its own may not come back
        stand_in = DPBenchError if isinstance(value, DPBenchError) else RuntimeError
        content = pickle.dumps(stand_in(str(value)))
    with replacing(path) as new:
        new.write_bytes(content)


def _cause_of(failure: Any, processes: Sequence[BaseProcess], mailbox: Path, folder: RunFolder) -> Exception:
    """The error that explains most: of a process that fails, those fail that wait for it.

    An error with a remedy explains more than the death of a process, and that more than an error of its peers, which
    may be no more than a lost connection.
    """
    command = folder.command("resume") if folder.trained else None
    reports = sorted(mailbox.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    errors: list[Exception] = [pickle.loads(path.read_bytes()) for path in reports]
    for rank, process in enumerate(processes):
        code = process.exitcode or 0
        is_first_or_apart = rank == failure.error_index or code != -signal.SIGTERM  # by which the others are ended
        if code and is_first_or_apart and not (mailbox / f"{rank}.error").exists():
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            errors.append(WorkerDied(rank, len(processes), how, command))
    return min(errors, key=_distance_from_cause)


def _distance_from_cause(error: Exception) -> int:
    if isinstance(error, PeerLost | ReportedByAnotherRank):
        return 3
    if isinstance(error, WorkerDied):
        return 1
    return 0 if isinstance(error, DPBenchError) else 2


def _with_signal(error: Exception, number: int, folder: RunFolder) -> Exception:
    """The error of processes to which this one has handed a signal on: it was that signal."""
    if number and isinstance(error, Interrupted) and not error.is_time_limit:
        return Interrupted(number, error.command, error.kept)
    if number and isinstance(error, WorkerDied):
        return interrupted_at_once(number, folder)
    return error


def check_processes(trainer: Mapping[str, Any]) -> None:
    """Refuse more processes than there can be.

    Args:
        trainer: Options of Lightning's trainer.

    Raises:
        ConfigurationError: Names the option and the remedy.
    """
    import torch

    if trainer.get("num_nodes", 1) > 1 and launched_process() is None:
        raise ConfigurationError(
            f"trainer.num_nodes={trainer['num_nodes']} needs a process on each node: start the command by torchrun or "
            "srun (docs/devices.md), or set it to 1."
        )
    strategy = trainer.get("strategy") or "auto"
    if strategy not in ("auto", "ddp_spawn", "ddp_fork"):
        raise ConfigurationError(
            f"trainer.strategy={shown(strategy)} cannot be used from the command line, where processes are spawned: "
            "remove it, or take ddp_spawn (trainer=ddp_cpu, trainer=ddp_gpu)."
        )
    devices = trainer.get("devices", 1)
    cores = available_cores()
    limit = max(2, cores)  # two fit anywhere, to try how it goes
    accelerator = trainer.get("accelerator", "auto")
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available())
    if on_cpu and type(devices) is int and devices > limit:
        raise ConfigurationError(
            f"trainer.devices={devices} is more than this machine's {cores} processor core(s) take: choose at most "
            f"{limit}."
        )
