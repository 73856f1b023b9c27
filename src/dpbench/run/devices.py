"""How many processes a trainer's options ask for, and whether there can be so many."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from dpbench.errors import ConfigurationError
from dpbench.options import shown
from dpbench.run.started import started


def several(trainer: Mapping[str, Any]) -> bool:
    """Whether a trainer's options ask for more than one process on this machine."""
    devices = trainer.get("devices", 1)
    if isinstance(devices, list):
        return len(devices) > 1
    if isinstance(devices, str):
        if devices.strip().lstrip("-").isdecimal():
            devices = int(devices)
        else:
            return "," in devices.strip(", ") or (devices == "auto" and trainer.get("accelerator") == "gpu")
    return bool(devices > 1 or devices == -1)


def check_processes(trainer: Mapping[str, Any]) -> None:
    """Refuse more processes than there can be.

    Args:
        trainer: Its options.

    Raises:
        ConfigurationError: Names the option and the remedy.
    """
    if trainer.get("num_nodes", 1) > 1 and started() is None:
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
    devices = trainer.get("devices", 1)
    if isinstance(devices, str) and devices.strip().isdecimal():
        devices = int(devices)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = max(2, cores)  # two fit anywhere, to try how it goes
    accelerator = trainer.get("accelerator", "auto")
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available())
    if on_cpu and type(devices) is int and not 1 <= devices <= most:
        raise ConfigurationError(
            f"trainer.devices must lie between 1 and {most} on this machine's {cores} processor core(s), not {devices}."
        )
