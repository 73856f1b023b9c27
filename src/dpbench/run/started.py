"""Processes of one training that torchrun or srun has started on one or several nodes, each with the whole command.

One of them, the first, holds the run's folder and writes to it; they agree on everything before the first step.
No import of PyTorch here before it is needed: the command line asks whether this process is the first one.
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

from dpbench.errors import ConfigurationError, DPBenchError, PeerLost, ToldElsewhere

T = TypeVar("T")
_SEEN_WITHIN = 10.0  # seconds in which a file of one node must be seen on another


@dataclass(frozen=True)
class Started:
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


def started() -> Started | None:
    """Which one of several processes this is that torchrun or srun has started; None where it is alone.

    (The processes that we start ourselves, trainer.devices=2, are none of them.)
    """
    asked = os.environ.get
    if "TORCHELASTIC_RUN_ID" in os.environ:
        world, local = int(asked("WORLD_SIZE", "1")), int(asked("LOCAL_WORLD_SIZE", "1"))
        found = Started(int(asked("RANK", "0")), world, int(asked("LOCAL_RANK", "0")), max(1, world // local))
    else:  # of a step: in a job's script the number of tasks is what srun would start
        world, nodes = int(asked("SLURM_STEP_NUM_TASKS", "1")), int(asked("SLURM_STEP_NUM_NODES", "1"))
        found = Started(int(asked("SLURM_PROCID", "0")), world, int(asked("SLURM_LOCALID", "0")), nodes)
    return found if found.world > 1 else None


def is_first() -> bool:
    """Whether this process writes: it is alone, or the first of several."""
    own = started()
    return own is None or own.rank == 0


def join() -> None:
    """Meet the other processes, if there are any; once."""
    import torch
    import torch.distributed as dist

    own = started()
    if own is None or dist.is_initialized():
        return
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        from lightning_fabric.plugins.environments.slurm import SLURMEnvironment

        asked = os.environ.get
        nodes, step = asked("SLURM_STEP_NODELIST") or asked("SLURM_NODELIST", "127.0.0.1"), asked("SLURM_JOB_ID", "")
        os.environ.setdefault("MASTER_ADDR", SLURMEnvironment.resolve_root_node_address(nodes))
        os.environ.setdefault("MASTER_PORT", str(15000 + int(step[-4:] or 0)))
        # From here on they are like torchrun's, for Lightning too.
        ranks = {"RANK": own.rank, "WORLD_SIZE": own.world, "LOCAL_RANK": own.local_rank}
        os.environ |= {name: str(number) for name, number in ranks.items()}
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend, rank=own.rank, world_size=own.world)
    except RuntimeError as error:
        raise PeerLost(own.rank, own.world, None) from error


def with_processes(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with as many processes as were started, whatever it asks for; it must be the same in all.

    Raises:
        ConfigurationError: The processes differ in what they would run.
    """
    own = started()
    if own is None:
        return config
    _refuse_differences(config)
    return {**config, "trainer": {**config["trainer"], "devices": own.world // own.nodes, "num_nodes": own.nodes}}


def options_of_started(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a trainer for processes that are there already."""
    from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
    from pytorch_lightning.strategies import DDPStrategy

    return {**options, "strategy": DDPStrategy(), "plugins": [TorchElasticEnvironment()]}


def _gathered(value: Any) -> list[Any]:
    import torch.distributed as dist

    join()
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@contextmanager
def together() -> Iterator[None]:
    """What one process is refused, all are: the first of those says why. No talk with others inside.

    Raises:
        ToldElsewhere: Another process has failed.
    """
    own, error = started(), None
    try:
        yield
    except Exception as caught:
        error = caught
    failed = [] if own is None else [rank for rank, bad in enumerate(_gathered(error is not None)) if bad]
    if error is not None and (own is None or own.rank == failed[0]):
        raise error
    if failed:
        raise ToldElsewhere


def of_first(make: Callable[[], T]) -> T:
    """What the first process makes, for all of them."""
    made: Any = None
    with together():
        if is_first():
            made = make()
    return made if started() is None else _gathered(made)[0]  # type: ignore[no-any-return]


def _refuse_differences(config: Mapping[str, Any]) -> None:
    from dpbench.code import code_hash, foreign_code, versions

    facts: dict[str, Any] = {f"version of {name}": found for name, found in versions().items()}
    facts |= {"code of dpbench (hash)": code_hash()[:12]}
    facts |= {f"code of {name} (hash)": found[:12] for name, found in foreign_code(dict(config)).items()}
    facts |= {group: own for group, own in config.items() if not isinstance(own, Mapping)}
    for group, own in config.items():
        facts |= {f"{group}.{key}": found for key, found in own.items()} if isinstance(own, Mapping) else {}
    everybody = _gathered((socket.gethostname(), facts))
    with together():
        (first, wanted), (node, other) = everybody[0], (socket.gethostname(), facts)
        for name in {**wanted, **other}:
            if wanted.get(name) != other.get(name):
                raise ConfigurationError(
                    f"{node} has another {name} than {first}: {other.get(name)}, not {wanted.get(name)}. All processes "
                    "of a training need the same."
                )


def require_shared(folder: Path) -> None:
    """Check that all processes see the same folder.

    Raises:
        ConfigurationError: One of them does not see what the first one has written.
    """
    own = started()
    if own is None:
        return
    token = of_first(lambda: _left_in(folder))
    with together():
        limit = time.monotonic() + _SEEN_WITHIN
        while not (folder / token).exists():
            if time.monotonic() > limit:
                raise ConfigurationError(
                    f"{socket.gethostname()} does not see what another node has written to {folder}: a run on several "
                    "nodes needs a folder that they share (hydra.run.dir)."
                )
            time.sleep(0.1)
    if own.rank == 0:
        with suppress(OSError):
            (folder / token).unlink()


def _left_in(folder: Path) -> str:
    token = f".shared-{secrets.token_hex(8)}"
    (folder / token).touch()
    return token


@contextmanager
def losses_explained(command: Callable[[], str | None]) -> Iterator[None]:
    """Say in one line that another process is gone, where a talk with it breaks off.

    Args:
        command: How to go on.

    Raises:
        PeerLost: In place of the library's error.
    """
    import torch.distributed as dist

    own = started()
    try:
        yield
    except RuntimeError as error:
        told = isinstance(error, dist.DistError) or any(
            word in str(error) for word in ("gloo", "Gloo", "NCCL", "Socket")
        )
        if own is None or isinstance(error, DPBenchError) or not told:
            raise
        raise PeerLost(own.rank, own.world, command()) from error


def leave_to_first() -> bool:
    """After the last step: leave the others; whether this process is the one that has more to do."""
    from dpbench.callback.process_group import leave_group

    if started() is not None:
        leave_group()
    return is_first()
