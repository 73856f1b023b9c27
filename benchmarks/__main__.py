"""`python -m benchmarks`: measure, and write tables and pictures.

python -m benchmarks                                      everything (under twenty minutes on two cores)
python -m benchmarks gpu                                  the same on a GPU, with kernels in Triton and executor=graph
python -m benchmarks --workloads "mnist_cnn b256" --methods ours/flat,plain/channels_last
python -m benchmarks quick                                one workload, printed only: before and after a change
python -m benchmarks startup                              what a command takes before it does anything
python -m benchmarks users                                a round of local training by users (twenty minutes)
python -m benchmarks axis                                 share of a step that the record axis takes (three minutes)
python -m benchmarks networks                             GPT-2, T5, OPT, Swin, BERT beside Opacus (ten minutes)
python -m benchmarks accuracy                             CPU seconds to an accuracy, beside Opacus (an hour)
python -m benchmarks report [--file PATH.json]            tables and pictures again, from what was measured

What must hold on a GPU are tests: `python -m pytest -m gpu --device cuda tests/gpu`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from benchmarks import accuracy, axis, machine, pages, rounds, rows, startup
from benchmarks.methods import GPU_METHODS, METHODS, QUICK, methods_for
from benchmarks.rows import Row
from benchmarks.timing import measure_steps
from benchmarks.users.tasks import TASKS
from benchmarks.workloads import (
    FIRST_WORKLOAD,
    GPU_WORKLOADS,
    STARTUP,
    WORKLOADS,
)

_PARTS = ("steps", "gpu", "quick", "startup", "users", "networks", "accuracy", "axis", "report")
_WITH_OWN_PAGE = ("users", "networks", "accuracy")
_TURNS = (5, 2)  # for wall and for CPU time
_TURNS_OF_QUICK = (9, 5)  # more than in the whole benchmark, since one asks for small changes
_STARTS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for, keep its rows in a file, write their page and print where it is."""
    options = _parser().parse_args(arguments)
    if options.what == "gpu":
        options.what, options.device = "steps", "cuda"
    if options.device == "cuda" and not torch.cuda.is_available():
        return _refuse("there is no GPU: leave --device out.")
    name = rows.hardware(options.device, options.threads)
    path = options.out / (name + (f"-{options.what}.json" if options.what in _WITH_OWN_PAGE else ".json"))
    if options.what == "report" and options.file:
        path = options.file
    if refusal := _refusal(options, path):
        return _refuse(refusal)
    usual = _TURNS_OF_QUICK if options.what == "quick" else _TURNS
    options.repeats = options.repeats or usual[0]
    if options.cpu_repeats is None:
        options.cpu_repeats = usual[1]
    match options.what:
        case "quick":
            _quick(options)
            return 0
        case "axis":
            print("\n".join(axis.shares(options.workloads or axis.WORKLOADS)))
            return 0
        case "report":
            pass
        case "steps":
            all_workloads = GPU_WORKLOADS if options.device == "cuda" else WORKLOADS
            _measure(options, path, options.workloads or list(all_workloads))
            if options.device == "cpu" and not (options.workloads or options.methods):
                _startup(options, path)
        case part:
            _OWN[part](options, path)
    print(pages.write(path))
    return 0


def _refuse(message: str) -> int:
    print(f"benchmarks: error: {message}", file=sys.stderr)
    return 2


def _refusal(options: argparse.Namespace, path: Path) -> str | None:
    """What is wrong with the options, in one line."""
    workloads: Mapping[str, Any] = GPU_WORKLOADS
    methods: Sequence[str] = GPU_METHODS if options.device == "cuda" else METHODS
    match options.what:
        case "users":
            workloads = TASKS
            methods = rounds.METHODS
        case "networks":
            from benchmarks import networks

            workloads = networks.NETWORKS
            methods = networks.WAYS
        case "accuracy":
            workloads = accuracy.RECIPES
            methods = accuracy.METHODS
    for kind, names, choices in (("workload", options.workloads, workloads), ("method", options.methods, methods)):
        for name in names or ():
            if name not in choices:
                return f"there is no {kind} {name!r}; known: {'; '.join(choices)}."
    if options.what == "report":
        return None if path.exists() else f"there is no {path}: measure first, or name a file with --file."
    # Times of two machines do not compare, and their rows would stand in one table.
    other = rows.of_another_processor(rows.read(path))
    if other is None:
        return None
    return (
        f"{path} holds times of another machine ({other}; this is {machine.processor()}): choose a folder with --out."
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", nargs="?", choices=_PARTS, default="steps")
    parser.add_argument(
        "--workloads",
        type=_names,
        help="names with commas (with semicolons, also behind one name, where a name has a comma)",
    )
    parser.add_argument("--methods", type=_names, help="names with commas")
    parser.add_argument("--repeats", type=int, help="turns for wall time, and for rounds (default: 5; of quick: 9)")
    parser.add_argument("--cpu-repeats", type=int, help="turns for CPU time on one thread (default: 2; of quick: 5)")
    parser.add_argument("--threads", type=int, default=2, help="for wall time (default: 2)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of steps (default: cpu)")
    parser.add_argument("--wait", type=float, default=60, help="seconds to wait for a quiet machine (default: 60)")
    parser.add_argument("--users", type=int, default=100, help="in a round (default: 100)")
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers"), help="environment of pfl and flwr")
    parser.add_argument("--file", type=Path, help="of report: rows (default: this machine's in --out)")
    parser.add_argument("--out", type=Path, default=Path("results") / "benchmark", help="default: results/benchmark")
    return parser


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(";" if ";" in text else ",") if name.strip()]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _measure(options: argparse.Namespace, path: Path, workloads: Sequence[str]) -> None:
    """Workload by workload; what was measured is on disk after each."""
    for name in workloads:
        new = _steps_of(options, name, methods_for(name, options.device))
        # A whole measurement takes the place of all rows of its workload, so that methods that are gone go.
        old = [row for row in rows.read(path) if options.methods or row["workload"] != name]
        rows.write(path, rows.with_ratios(rows.merged(old, new)))


def _steps_of(options: argparse.Namespace, name: str, methods: Sequence[str]) -> list[Row]:
    """Rows of a workload; says how long they took."""
    start = time.monotonic()

    def say(text: str) -> None:
        _say(f"{name}: {text}, {time.monotonic() - start:.0f} s")

    new = measure_steps(
        name,
        [method for method in methods if not options.methods or method in options.methods],
        options.device,
        options.threads,
        (options.repeats, options.cpu_repeats),
        options.wait,
        say,
    )
    for row in new:
        if row["error"]:
            _say(f"{name}: {row['method']} failed: {row['error']}")
    say("done")
    common = {"records": GPU_WORKLOADS[name].records, **rows.origin()}
    return [row | common for row in new]


def _startup(options: argparse.Namespace, path: Path) -> None:
    origin = rows.origin()
    new = startup.measure(_STARTS, options.wait, lambda text: _say(f"{STARTUP}: {text}"))
    steps = [row for row in rows.read(path) if row["workload"] != STARTUP]
    rows.write(path, rows.with_ratios([*steps, *(row | origin for row in new)]))


def _quick(options: argparse.Namespace) -> None:
    """Measure little, print it and keep nothing."""
    measured: list[Row] = []
    for name in options.workloads or (FIRST_WORKLOAD,):
        measured += _steps_of(options, name, options.methods or QUICK)
    several = len({row["workload"] for row in measured}) > 1
    lines: dict[str, dict[str, str]] = {}
    for row in rows.with_ratios(measured):
        method = f"{row['workload']}: {row['method']}" if several else row["method"]
        if row["error"]:
            lines[f"{method}: {row['error']}"] = {}
            continue
        least, most = row["wall_ms_range"]
        lines[method] = {
            "÷ plain": _number(row["ratio_to_limit"]),
            "CPU ÷ plain": _number(row["cpu_ratio_to_limit"]),
            "wall ms": _number(row["wall_ms"]),
            "least to most": f"{least:.2f} to {most:.2f}",
            "CPU ms": _number(row["cpu_ms"]),
        }
    print(pd.DataFrame.from_dict(lines, orient="index").fillna("–").to_string())
    if not all(row["quiet"] for row in measured):
        print("\nThe machine was not quiet.")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _users(options: argparse.Namespace, path: Path) -> None:
    """Task by task; what was measured is on disk after each."""
    origin = rows.origin()
    for task in options.workloads or TASKS:
        new = rounds.measure(
            task,
            options.users,
            options.repeats,
            options.methods or rounds.METHODS,
            options.peers,
            options.wait,
            lambda text, task=task: _say(f"{task}: {text}"),  # type: ignore[misc]
        )
        rows.write(path, rows.merged(rows.read(path), [row | origin for row in new]))


def _networks(options: argparse.Namespace, path: Path) -> None:
    """Network by network; what was measured is on disk after each."""
    from benchmarks import networks, ways  # with libraries that take seconds

    origin = rows.origin()
    for name in options.workloads or networks.NETWORKS:
        new = ways.measure(
            name,
            options.methods or networks.WAYS,
            options.repeats,
            options.wait,
            lambda text, name=name: _say(f"{name}: {text}"),  # type: ignore[misc]
        )
        rows.write(path, rows.merged(rows.read(path), [row | origin for row in new]))


def _accuracy(options: argparse.Namespace, path: Path) -> None:
    """Run by run; those that are in the file are kept."""
    origin = rows.origin()
    names = options.workloads or list(accuracy.RECIPES)
    old = rows.read(path)
    for row in accuracy.measure(names, options.methods or accuracy.METHODS, accuracy.SEEDS, old, _say):
        rows.write(path, [*rows.read(path), row | origin])


_OWN = {"users": _users, "networks": _networks, "accuracy": _accuracy, "startup": _startup}


if __name__ == "__main__":
    sys.exit(main())
