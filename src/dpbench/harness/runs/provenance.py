"""Provenance of a figure: configuration, code, versions, hardware."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

CHANGED = "+changes"
"""At the end of a commit: of a tree whose src or conf no commit holds."""

_NOT_HASHED = ("run", "logger", "launcher", "objective")
_NO_GRADIENTS = ("trainer", "diagnostics")  # of the trainer only the precision decides gradients
_LENGTH = ("max_steps", "max_epochs")
_NOT_HASHED_DATA = ("root", "download", "prior")  # where the data lie, which a name or a hash determines


def config_hash(config: dict[str, Any]) -> str:
    """Sixteen hexadecimal digits for everything in a resolved configuration that may change a result."""
    chosen = {key: value for key, value in config.items() if key not in _NOT_HASHED}
    chosen["data"] = _data_options(config)
    return _digest(chosen)[:16]


def _deciding(config: dict[str, Any]) -> dict[str, Any]:
    chosen = {key: value for key, value in config.items() if key not in (*_NOT_HASHED, *_NO_GRADIENTS)}
    chosen["data"] = _data_options(config)
    chosen["precision"] = config["trainer"].get("precision")
    strategy = config.get("strategy") or {}
    if strategy.get("noise_multiplier") is None and strategy.get("target_epsilon") is not None:  # solved for the length
        chosen["length"] = {name: config["trainer"].get(name) for name in _LENGTH}
    from dpbench.code import foreign_code  # which looks at all that is installed

    chosen["code"] = foreign_code(config)
    return chosen


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _data_options(config: dict[str, Any]) -> dict[str, Any]:
    """Those that determine the data, and the folder where another one may hold other people's records."""
    options: dict[str, Any] = dict(config.get("data", {}))
    for name in ("membership", "prior_sha256"):
        if options.get(name) is None:
            options.pop(name, None)  # as of runs that were made before there was this option
    inserted = options.get("inserted")
    if isinstance(inserted, dict) and "prefix" in inserted and not inserted.get("records"):
        del options["inserted"]  # texts, likewise
    target = str(options.get("_target_"))
    if not target.startswith("dpbench."):  # a plug-in's
        return options
    chosen = {key: value for key, value in options.items() if key not in _NOT_HASHED_DATA}
    for entry in entry_points(group="dpbench.data", name=target.rpartition(".")[2]):  # a capability's
        folder = entry.load().folder_of_own_files(options)
        if folder is not None:
            chosen["root"] = str(folder)
    return chosen


def fingerprint(config: dict[str, Any]) -> str:
    """Hash of the settings that determine the releases of a run, which may be resumed only with the same.

    The length of a run, and the number of its processes, decide none of them, but where noise is solved for a length.
    """
    return _digest(["fingerprint", _deciding(config)])


@cache
def commit() -> str | None:
    """Commit of the checkout as it is found first; None outside of one. With CHANGED at its end, src or conf differ."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        if not git("ls-files", str(Path(__file__).name)):
            return None  # installed somewhere below another project's checkout
        return git("rev-parse", "HEAD") + (CHANGED if git("status", "--porcelain", "--", ":/src", ":/conf") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def hardware() -> dict[str, Any]:
    """The machine: processor, cores, accelerator, and our kernels on it (they round otherwise), or None."""
    import torch

    from dpbench.privacy import kernels

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    machine = {"cpu": _processor(), "cores": available_cores(), "threads": torch.get_num_threads(), "gpu": gpu}
    device = torch.device("cpu" if gpu is None else "cuda")
    return {**machine, "kernels": kernels.signature(device) or None}


def available_cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
