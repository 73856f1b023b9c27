"""Rows of results: ratios, merging with what is there, the file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import processor
from benchmarks.methods import DRAWN, MALLOC
from benchmarks.workloads import GPU_WORKLOADS, STARTUP
from dpbench.code import versions
from dpbench.files import write_atomically
from dpbench.harness.runs import provenance

Row = dict[str, Any]


def with_ratios(rows: Iterable[Row]) -> list[Row]:
    """Rows with what follows from the rows of the same workload.

    The limit is the fastest step without privacy on lots of one size; Opacus is taken at its fastest mode with its
    defaults, that is, without our allocator setting. Times are compared after division by the reference's time in the
    same minutes.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    rows = [dict(row) for row in rows]
    for row in rows:
        groups.setdefault((row["workload"], row["device"]), []).append(row)
    for (workload, _), group in groups.items():
        batch = None if workload == STARTUP else GPU_WORKLOADS[workload].batch
        limits = [row for row in group if row["method"] != DRAWN]
        limit = least(limits, ("plain/",))
        cpu_limit = least(limits, ("plain/",), "cpu_ms")
        opacus = least([row for row in group if MALLOC in row["method"]], ("opacus/",))
        best_peer = least(group, ("opacus/", "jax/"))
        for row in group:
            row["batch"] = batch
            row["records_per_s"] = quotient(batch and 1e3 * batch, row["wall_ms"])
            row["ratio_to_limit"] = quotient(relative(row), limit)
            row["cpu_ratio_to_limit"] = quotient(relative(row, "cpu_ms"), cpu_limit)
            row["speedup_over_opacus"] = quotient(opacus, relative(row))
            row["speedup_over_best_peer"] = quotient(best_peer, relative(row))
    return rows


def relative(row: Row, key: str = "wall_ms") -> float | None:
    """A row's time over the reference's."""
    return quotient(row[key], row[f"reference_{key}"])


def least(rows: Iterable[Row], families: tuple[str, ...], key: str = "wall_ms") -> float | None:
    """The smallest time over the reference's in some families."""
    values = [relative(row, key) for row in rows if row["method"].startswith(families)]
    return min((value for value in values if value is not None), default=None)


def quotient(dividend: float | None, divisor: float | None) -> float | None:
    """Of what may not have been measured."""
    return None if not dividend or not divisor else dividend / divisor


def merged(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """New rows take the place of old ones with the same workload, method and device."""
    by_method = {(row["workload"], row["method"], row["device"]): row for row in (*old, *new)}
    return list(by_method.values())


def read(path: Path) -> list[Row]:
    """Rows of a file, none if it is not there."""
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return rows


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write rows, at once or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(rows, indent=1) + "\n")


def origin() -> Row:
    """What every row of a call shares: versions, commit, date."""
    peers = {name: _version(name) for name in ("opacus", "jax", "jax-privacy")}
    return {
        "commit": provenance.commit(),
        "date": date.today().isoformat(),
        "versions": {**versions(), **peers},
        "hardware": {**provenance.hardware(), "instructions": instructions(), "processor": processor()},
    }


def of_another_processor(rows: Iterable[Row]) -> str | None:
    """The processor of rows that may not stand beside new ones, since times of two machines do not compare."""
    processors = {row.get("hardware", {}).get("processor") for row in rows}
    return min(processors - {None, processor()}, default=None)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def instructions() -> str:
    """The widest vector instructions that PyTorch uses here, such as "AVX2"; two processors of one name may differ."""
    return str(torch.backends.cpu.get_cpu_capability())


def hardware(device: str, threads: int) -> str:
    """A name for the file: the GPU, or the processor with its instructions and the number of threads."""
    if device == "cuda":
        return _slug(f"gpu {torch.cuda.get_device_name()}")
    model = provenance.hardware()["cpu"]
    return _slug(f"cpu {model} {instructions()} {min(threads, os.cpu_count() or threads)} threads")


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
