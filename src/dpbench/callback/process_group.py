"""The end of a process among several: out of their group before the interpreter goes."""

from __future__ import annotations

import atexit

import torch.distributed as dist


def leave_group() -> None:
    """Destroy the process group: its threads would otherwise meet the end of the interpreter.

    Gloo's threads let go of Python objects; one that asks for the interpreter's lock while the interpreter is ending is
    unwound by Python, through C++ code that must not throw: "terminate called without an active exception" (SIGABRT).
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def leave_group_at_exit() -> None:
    """Leave the process group when this process ends, however it was started: Lightning does so for NCCL only."""
    atexit.unregister(leave_group)
    atexit.register(leave_group)
