"""What /proc says of this machine: its processor, who computes, and the memory and CPU time of processes.

Needs the standard library only. Where there is no /proc, nothing is busy and memory is without limit.
"""

from __future__ import annotations

import hashlib
import os
import resource
import time
from contextlib import suppress
from pathlib import Path

_BUSY_CORES = 0.10
_PROC = Path("/proc")


def _facts(name: str) -> dict[str, str]:
    """Lines KEY: VALUE of a file in /proc, up to the first blank line."""
    facts: dict[str, str] = {}
    with suppress(OSError):
        for line in (_PROC / name).read_text(encoding="utf-8").partition("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            facts[key.strip()] = value.strip()
    return facts


def processor() -> str | None:
    """What tells processors of one name apart: generation and features; None where the system does not say."""
    facts = _facts("cpuinfo")
    if not facts:
        return None
    generation = ", ".join(f"{key} {facts[key]}" for key in ("cpu family", "model", "stepping") if key in facts)
    features = hashlib.sha256(facts.get("flags", facts.get("Features", "")).encode()).hexdigest()[:8]
    return f"{generation}, features {features}"


def free_mb() -> float:
    """Memory that processes may still take."""
    available = _facts("meminfo").get("MemAvailable")
    return float(available.split()[0]) / 1024 if available else float("inf")


def resident_mb(key: str) -> float:
    """VmRSS, VmHWM or RssFile of this process."""
    facts = _facts("self/status")
    kilobytes = facts[key].split()[0] if key in facts else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(kilobytes) / 1024


def reset_peak() -> None:
    """Let VmHWM start again; where that cannot be, it stays that of the whole life of the process."""
    with suppress(OSError):
        (_PROC / "self/clear_refs").write_text("5")


def busy_cores(seconds: float = 0.5) -> float:
    """Cores that the machine used meanwhile."""
    before = _used_ticks()
    time.sleep(seconds)
    return (_used_ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds


def _used_ticks() -> int:
    try:
        fields = (_PROC / "stat").read_text(encoding="utf-8").split()[1:9]
    except OSError:
        return 0
    # Without the fourth and fifth, in which the machine was idle or waited for a disk.
    return sum(int(field) for field in (*fields[:3], *fields[5:]))


def wait_until_quiet(patience: float) -> bool:
    """Whether nobody else computes, waiting for it for so many seconds."""
    end = time.monotonic() + patience
    while busy_cores() > _BUSY_CORES:
        if time.monotonic() > end:
            return False
    return True


def cpu_of_tree() -> float:
    """CPU seconds of this process and of all below it, those that have ended included; in 10 ms."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in _PROC.glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(folder.name)] = int(fields[1])
        ticks[int(folder.name)] = sum(int(field) for field in fields[11:15])
    total = 0
    for process, used in ticks.items():
        ancestor = process
        while ancestor != os.getpid() and ancestor in parents:
            ancestor = parents[ancestor]
        if ancestor == os.getpid():
            total += used
    return total / os.sysconf("SC_CLK_TCK")
