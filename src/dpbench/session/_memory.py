"""Memory of a device: how much of it is free, how much something takes, and what an error says of it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_NOT_ALLOCATED = ("can't allocate memory", "not enough memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be allocated, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NOT_ALLOCATED)


def available(device: torch.device) -> int:
    """Bytes that this process could still allocate on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    return min(_free_on_host(), *_left_in_cgroups())


def peak_of(device: torch.device, run: Callable[[], object]) -> int:
    """Bytes that a function had allocated at most, beyond those that were there before.

    Args:
        device: On which it computes; on any but CUDA devices the host's memory is counted.
        run: The function.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return int(torch.cuda.max_memory_allocated(device) - before)
    allocations = _Allocations()
    with allocations:
        run()
    return int(allocations.peak)


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within, counts the bytes of all storages that operations return, for as long as these live.

    Attributes:
        peak: Most bytes at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._bytes = 0
        self._alive: dict[int, int] = {}  # bytes of each storage, by its address as an object of Python

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                with suppress(NotImplementedError):  # of tensors without memory of their own
                    self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        name = id(storage)
        if name in self._alive:
            return
        size = storage.nbytes()
        self._alive[name] = size
        self._bytes += size
        self.peak = max(self.peak, self._bytes)
        weakref.finalize(storage, self._free, name)

    def _free(self, name: int) -> None:
        self._bytes -= self._alive.pop(name)


def _free_on_host() -> int:
    """Bytes that the machine has left; where it does not say, all that it has."""
    with suppress(OSError):
        for line in _MEMINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_in_cgroups() -> Iterator[int]:
    """Bytes that are left to the control group of this process (a container, a job of a cluster) and to those above."""
    yield _free_on_host()
    with suppress(OSError, ValueError):
        own = _OWN_CGROUP.read_text().splitlines()[-1].rpartition(":")[2].lstrip("/")
        folder = _CGROUPS / own
        for group in (folder, *folder.parents):
            if _CGROUPS not in (group, *group.parents):
                return
            limit = _number(group / "memory.max")
            used = _number(group / "memory.current")
            if limit is not None and used is not None:
                yield max(limit - used + _cached(group / "memory.stat"), 0)


def _number(path: Path) -> int | None:
    """What a file of a control group says; None: nothing, or "max"."""
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _cached(path: Path) -> int:
    """Bytes of files in the page cache of a control group, which are given back when they are needed."""
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "inactive_file":
                return int(value)
    return 0
