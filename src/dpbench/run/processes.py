"""Several processes of one training: those that torchrun or srun has launched, on one or several nodes.

Each of them runs the whole command. (How many the configuration asks for on this machine is checked here too;
`_spawned.py` starts these.)

Of launched processes the first one holds the run's folder and writes to it; they agree on everything before the first
step. No import of PyTorch here before it is needed: the command line asks whether this process is the first one.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dpbench.errors import ConfigurationError, DPBenchError, PeerLost, ReportedByAnotherRank
from dpbench.runs.provenance import available_cores

T = TypeVar("T")
_VISIBLE_WITHIN = 10.0  # seconds in which a file of one node must be seen on another


@dataclass(frozen=True)
class LaunchedProcess:
    """This process among all of its training.

    Attributes:
        rank: Its number, from 0.
        world: How many there are.
        local_rank: Its number on its node.
        nodes: How many nodes there are, with as many processes each.
    """

    rank: int
    world: int
    local_rank: int
    nodes: int


def launched_process() -> LaunchedProcess | None:
    """Which one of several processes this is that torchrun or srun has launched; None where it is alone.

    (The processes that we spawn ourselves, trainer.devices=2, are none of them.)
    """
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
    """Whether this process writes: it is alone, or the first of several."""
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
    try:
        dist.init_process_group(backend, rank=process.rank, world_size=process.world)
    except RuntimeError as error:
        raise PeerLost(process.rank, process.world, None) from error


def with_launched_processes(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with as many processes as were launched, whatever it asks for; it must be the same in all.

    Raises:
        ConfigurationError: The processes differ in what they would run.
    """
    process = launched_process()
    if process is None:
        return config
    _refuse_differences(config)
    trainer = {**config["trainer"], "devices": process.world // process.nodes, "num_nodes": process.nodes}
    return {**config, "trainer": trainer}


def trainer_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a trainer for processes that were launched."""
    from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
    from pytorch_lightning.strategies import DDPStrategy

    return {**options, "strategy": DDPStrategy(), "plugins": [TorchElasticEnvironment()]}


def _gather(value: Any) -> list[Any]:
    """The value of each process, by rank."""
    import torch.distributed as dist

    join_group()
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def together() -> Iterator[None]:
    """Refuse in all processes what one of them is refused: the first of those says why. No talk with others inside.

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


def _refuse_differences(config: Mapping[str, Any]) -> None:
    from dpbench.code import code_hash, foreign_code, versions

    facts: dict[str, Any] = {f"version of {name}": number for name, number in versions().items()}
    facts["code of dpbench (hash)"] = code_hash()[:12]
    for name, code in foreign_code(dict(config)).items():
        facts[f"code of {name} (hash)"] = code[:12]
    for group, options in config.items():
        if isinstance(options, Mapping):
            for key, value in options.items():
                facts[f"{group}.{key}"] = value
        else:
            facts[group] = options
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
        ConfigurationError: One of them does not see what the first one has written.
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
        command: How to go on.

    Raises:
        PeerLost: In place of the library's error.
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


def wants_several(trainer: Mapping[str, Any]) -> bool:
    """Whether a trainer's options ask for more than one process on this machine."""
    devices = _devices(trainer)
    if isinstance(devices, list):
        return len(devices) > 1
    if isinstance(devices, str):
        return "," in devices.strip(", ") or (devices == "auto" and trainer.get("accelerator") == "gpu")
    return bool(devices > 1 or devices == -1)


def check_processes(trainer: Mapping[str, Any]) -> None:
    """Refuse more processes than there can be.

    Args:
        trainer: Options of Lightning's trainer.

    Raises:
        ConfigurationError: Names the option and the remedy.
    """
    import torch

    from dpbench.options import shown

    if trainer.get("num_nodes", 1) > 1 and launched_process() is None:
        raise ConfigurationError(
            f"trainer.num_nodes={trainer['num_nodes']} needs a process on each node: start the command by torchrun or "
            "srun (docs/devices.md), or set it to 1."
        )
    strategy = trainer.get("strategy") or "auto"
    if strategy not in ("auto", "ddp_spawn", "ddp_fork"):
        raise ConfigurationError(
            f"trainer.strategy={shown(strategy)} cannot be used from the command line, where processes are spawned: "
            "leave it out, or take ddp_spawn (trainer=ddp_cpu, trainer=ddp_gpu)."
        )
    devices = _devices(trainer)
    cores = available_cores()
    limit = max(2, cores)  # two fit anywhere, to try how it goes
    accelerator = trainer.get("accelerator", "auto")
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available())
    if on_cpu and type(devices) is int and not 1 <= devices <= limit:
        raise ConfigurationError(
            f"trainer.devices must lie between 1 and {limit} on this machine's {cores} processor core(s), not "
            f"{devices}."
        )


def _devices(trainer: Mapping[str, Any]) -> Any:
    """How many devices, or which: a number may come as a word."""
    devices = trainer.get("devices", 1)
    if isinstance(devices, str) and devices.strip().lstrip("-").isdecimal():
        return int(devices)
    return devices
