"""`python -m benchmarks`: measure, and write tables and pictures.

python -m benchmarks                                      everything (under twenty minutes on two cores)
python -m benchmarks --workloads "mnist_cnn b256" --methods ours/flat,plain/channels_last
python -m benchmarks quick                                one workload, printed only: before and after a change
python -m benchmarks startup                              what a command takes before it does anything
python -m benchmarks growth                               against lot size and width (twelve minutes)
python -m benchmarks busy                                 a run beside other work (five minutes)
python -m benchmarks users                                a round of local training by users (twenty minutes)
python -m benchmarks networks                             T5, OPT, Swin, BERT with LoRA (two minutes)
python -m benchmarks gpu                                  on a GPU (ten minutes; tried by --device cpu)
python -m benchmarks report [--file PATH.json]            tables and pictures again, from what was measured
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import growth_report, quick, report, rows
from benchmarks.busy import report_busy, run_busy
from benchmarks.gpu import report as gpu_report
from benchmarks.gpu.measure import GPU_WORKLOADS
from benchmarks.gpu.measure import METHODS as GPU_METHODS
from benchmarks.gpu.run import PARTS as GPU_PARTS
from benchmarks.gpu.run import run as run_gpu
from benchmarks.growth import METHODS as GROWTH_METHODS
from benchmarks.growth import growth_workloads, skipped, workload_named
from benchmarks.measure import measure
from benchmarks.methods import METHODS, methods_for
from benchmarks.networks import write_page
from benchmarks.startup import STARTUP, measure_startup
from benchmarks.users import measure as by_users
from benchmarks.users import report as users_report
from benchmarks.users.tasks import TASKS
from benchmarks.workloads import WORKLOADS

_PARTS = ("steps", "quick", "startup", "growth", "busy", "users", "networks", "gpu", "report")
_STARTS = 3  # turns


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for."""
    options = _parser().parse_args(arguments)
    if refusal := _refusal(options):
        print(f"benchmarks: error: {refusal}", file=sys.stderr)
        return 2
    options.repeats, options.cpu_repeats = _turns(options)
    stem = options.out / rows.hardware(options.device or "cpu", options.threads)
    if options.what in ("steps", "growth", "startup", "users") and (refusal := _of_others(options, stem)):
        print(f"benchmarks: error: {refusal}", file=sys.stderr)
        return 2
    match options.what:
        case "busy":
            print(run_busy(options.repeats, options.wait, stem.with_name(stem.name + "-busy.json"), _say))
        case "gpu":
            return _gpu(options)
        case "networks":
            path = stem.with_name(stem.name + "-networks.md")
            write_page(path, options.repeats, options.wait, _say)
            print(path)
        case "users":
            print(_users(options, stem.with_name(stem.name + "-users")))
        case "quick":
            _quick(options)
        case "report":
            return _again(options.file or stem.with_suffix(".json"))
        case "growth":
            _measure(options, path := stem.with_name(stem.name + "-growth.json"))
            return _again(path)
        case _:
            _steps(options, path := stem.with_suffix(".json"))
            return _again(path)
    return 0


def _refusal(options: argparse.Namespace) -> str | None:
    """What is wrong with the options, in one line."""
    on_gpu = options.what == "gpu"
    if (options.device or "cuda" if on_gpu else options.device) == "cuda" and not torch.cuda.is_available():
        return f"there is no GPU: {'try all of it with --device cpu' if on_gpu else 'leave --device out'}."
    names = (TASKS, by_users.METHODS) if options.what == "users" else (WORKLOADS, METHODS)
    names = (GPU_WORKLOADS, GPU_METHODS) if on_gpu else names
    for kind, asked, known in (
        ("workload", options.workloads, names[0]),
        ("method", options.methods, names[1]),
        ("part", options.parts, GPU_PARTS),
    ):
        if unknown := [name for name in asked or () if name not in known]:
            return f"there is no {kind} {unknown[0]!r}; known: {'; '.join(known)}."
    return None


def _of_others(options: argparse.Namespace, stem: Path) -> str | None:
    """Why new rows cannot go into this machine's file."""
    endings = {"growth": "-growth.json", "users": "-users.json"}
    path = stem.with_name(stem.name + endings.get(options.what, ".json"))
    if (other := rows.of_another_processor(rows.read(path))) is None:
        return None
    return f"{path} holds times of another machine ({other}; this is {rows.processor()}): choose a folder with --out."


def _turns(options: argparse.Namespace) -> tuple[int, int]:
    """For wall and for CPU time."""
    usual = quick.REPEATS if options.what == "quick" else (5, 2)
    asked = options.repeats, options.cpu_repeats
    wall, cpu = (default if turns is None else turns for turns, default in zip(asked, usual, strict=True))
    return wall, cpu


def _again(path: Path) -> int:
    """Write the page or the picture of a file of rows, whatever its kind."""
    if not path.exists():
        print(f"benchmarks: error: there is no {path}: measure first, or name a file with --file.", file=sys.stderr)
        return 2
    stem, kept = path.with_suffix(""), json.loads(path.read_text(encoding="utf-8"))
    if stem.name.endswith("-growth"):
        growth_report.report(kept, stem)
    elif stem.name.endswith("-busy"):
        report_busy(path)
    elif stem.name.endswith("-users"):
        users_report.report(kept, stem)
    elif isinstance(kept, dict):
        gpu_report.report(kept, stem)
    else:
        report.report(kept, stem)
    print(stem.with_suffix(".png" if stem.name.endswith("-growth") else ".md"))
    return 0


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__, formatter_class=raw)

    def names(text: str) -> list[str]:
        return [name.strip() for name in text.split(";" if ";" in text else ",") if name.strip()]

    parser.add_argument(
        "what",
        nargs="?",
        choices=["steps", "quick", "startup", "growth", "busy", "users", "networks", "gpu", "report"],
        default="steps",
    )
    parser.add_argument(
        "--workloads",
        type=names,
        help="names with commas (with semicolons, also behind one name, where a name has a comma)",
    )
    parser.add_argument("--methods", type=names, help="names with commas")
    parser.add_argument(
        "--parts", type=names, default=list(GPU_PARTS), help=f"of gpu: {', '.join(GPU_PARTS)} (default: all)"
    )
    parser.add_argument(
        "--repeats", type=_from_one, help="turns for wall time, and for rounds (default: 5; of quick: 9)"
    )
    parser.add_argument("--cpu-repeats", type=int, help="turns for CPU time on one thread (default: 2; of quick: 5)")
    parser.add_argument("--threads", type=_from_one, default=2, help="for wall time (default: 2)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cpu; of gpu: cuda")
    parser.add_argument("--wait", type=float, default=60, help="seconds to wait for a quiet machine (default: 60)")
    parser.add_argument("--users", type=_from_one, default=100, help="in a round (default: 100)")
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers"), help="environment of pfl and flwr")
    parser.add_argument("--file", type=Path, help="of report: rows (default: this machine's in --out)")
    parser.add_argument("--out", type=Path, default=Path("results") / "benchmark", help="default: results/benchmark")
    return parser


def _from_one(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, not {text}")
    return int(text)


def _measure(options: argparse.Namespace, path: Path) -> None:
    """Workload by workload; what was measured is on disk after each."""
    origin = rows.origin()
    for name in growth_workloads() if options.what == "growth" else options.workloads or list(WORKLOADS):
        new = [{**row, **origin} for row in _workload(options, name, options.methods)]
        old = [row for row in rows.read(path) if options.methods or row["workload"] != name]  # all of it, or some
        table = rows.merged(old, new)
        rows.write(path, rows.with_ratios(table, _batches(table)))


def _workload(options: argparse.Namespace, name: str, only: Sequence[str] | None) -> list[rows.Row]:
    """Rows of a workload; says how long they took."""
    grows, workload = options.what == "growth", workload_named(name)
    methods = [m for m in GROWTH_METHODS if not skipped(name, m)] if grows else methods_for(workload)
    start = time.monotonic()
    new = measure(
        name,
        [method for method in methods if not only or method in only],
        options.device or "cpu",
        options.threads,
        (options.repeats, 0 if grows else options.cpu_repeats),
        options.wait,
        lambda what: _say(f"{name}: {what}, {time.monotonic() - start:.0f} s"),
    )
    for row in new:
        if row["error"]:
            _say(f"{name}: {row['method']} failed: {row['error']}")
    _say(f"{name}: done in {time.monotonic() - start:.0f} s")
    return [{**row, "records": workload.records} for row in new]


def _batches(table: list[rows.Row]) -> dict[str, int]:
    """Records in a lot, by workload."""
    return {name: workload_named(name).batch for name in {row["workload"] for row in table} - {STARTUP}}


def _steps(options: argparse.Namespace, path: Path) -> None:
    """All of `make bench`, or what was chosen of it."""
    if options.what == "steps":
        _measure(options, path)
    if options.what == "startup" or not (options.workloads or options.methods):
        _startup(options, path)


def _startup(options: argparse.Namespace, path: Path) -> None:
    start, origin = time.monotonic(), rows.origin()
    new = measure_startup(_STARTS, options.wait, lambda what: _say(f"{STARTUP}: {what}"))
    steps = [row for row in rows.read(path) if row["workload"] != STARTUP]
    table = [*steps, *({**row, **origin} for row in new)]
    rows.write(path, rows.with_ratios(table, _batches(table)))
    _say(f"{STARTUP}: done in {time.monotonic() - start:.0f} s")


def _quick(options: argparse.Namespace) -> None:
    """Measure little, print it and keep nothing."""
    measured = [
        row
        for name in options.workloads or quick.WORKLOADS
        for row in _workload(options, name, options.methods or quick.METHODS)
    ]
    print(quick.table(rows.with_ratios(measured, _batches(measured))))


def _gpu(options: argparse.Namespace) -> int:
    """On the GPU, unless --device says where else to try it."""
    device = options.device or "cuda"
    stem = options.out / rows.hardware(device, options.threads)
    stem = stem.with_name(stem.name + "-gpu") if device == "cpu" else stem
    few = (
        {"users": 10, "repeats": 1, "turn": 0.0}
        if device == "cpu"
        else {"users": options.users, "repeats": options.repeats}
    )
    print(run_gpu(device, stem, _say, options.parts, options.workloads, options.methods, **few))
    return 0


def _users(options: argparse.Namespace, stem: Path) -> Path:
    """Task by task; what was measured is on disk after each."""
    path, origin = stem.with_suffix(".json"), rows.origin()
    for task in options.workloads or list(TASKS):
        new = by_users.measure(
            task,
            options.users,
            options.repeats,
            options.methods or by_users.METHODS,
            options.peers,
            options.wait,
            lambda what, task=task: _say(f"{task}: {what}"),  # type: ignore[misc]
        )
        rows.write(path, rows.merged(rows.read(path), [{**row, **origin} for row in new]))
    users_report.report(rows.read(path), stem)
    return stem.with_suffix(".md")


if __name__ == "__main__":
    sys.exit(main())
