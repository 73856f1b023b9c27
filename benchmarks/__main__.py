"""`python -m benchmarks`: measure, and write tables and pictures.

python -m benchmarks                                      everything (twenty minutes on two cores)
python -m benchmarks --workloads "mnist_cnn b256" --methods ours/flat,plain/channels_last
python -m benchmarks growth                               against lot size and width (twelve minutes)
python -m benchmarks busy                                 a run beside other work (five minutes)
python -m benchmarks users                                a round of local training by users (twenty minutes)
python -m benchmarks gpu                                  on a GPU (ten minutes; tried by --device cpu)
python -m benchmarks report                               tables and pictures again, from what was measured
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks import growth_report, report, rows
from benchmarks.busy import run_busy
from benchmarks.gpu.measure import GPU_WORKLOADS
from benchmarks.gpu.measure import METHODS as GPU_METHODS
from benchmarks.gpu.run import PARTS as GPU_PARTS
from benchmarks.gpu.run import run as run_gpu
from benchmarks.growth import METHODS as GROWTH_METHODS
from benchmarks.growth import growth_workloads, skipped, workload_named
from benchmarks.measure import measure
from benchmarks.methods import METHODS, methods_for
from benchmarks.users import measure as by_users
from benchmarks.users import report as users_report
from benchmarks.users.tasks import TASKS
from benchmarks.workloads import WORKLOADS


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for."""
    options = _parser().parse_args(arguments)
    remedy = "leave --device out" if options.what != "gpu" else "try all of it with --device cpu"
    if (
        "cuda" in (options.device, options.what == "gpu" and (options.device or "cuda"))
        and not torch.cuda.is_available()
    ):
        print(f"benchmarks: error: there is no GPU: {remedy}.", file=sys.stderr)
        return 2
    by_user, on_gpu = options.what == "users", options.what == "gpu"
    names = (TASKS, by_users.METHODS) if by_user else (GPU_WORKLOADS, GPU_METHODS) if on_gpu else (WORKLOADS, METHODS)
    unknown = [
        f"there is no {kind} {name!r}; known: {'; '.join(known)}."
        for kind, names, known in (
            ("workload", options.workloads, names[0]),
            ("method", options.methods, names[1]),
            ("part", options.parts, GPU_PARTS),
        )
        for name in names or ()
        if name not in known
    ]
    if unknown:
        print(f"benchmarks: error: {unknown[0]}", file=sys.stderr)
        return 2
    stem = options.out / rows.hardware(options.device or "cpu", options.threads)
    if options.what == "busy":
        print(run_busy(options.repeats, options.wait, stem.with_name(stem.name + "-busy.json"), _say))
        return 0
    if on_gpu:
        return _gpu(options)
    if by_user:
        print(_users(options, stem.with_name(stem.name + "-users")))
        return 0
    grows = options.what == "growth"
    if grows:
        stem = stem.with_name(stem.name + "-growth")
    if options.what != "report":
        _measure(options, stem.with_suffix(".json"))
    (growth_report.report if grows else report.report)(rows.read(stem.with_suffix(".json")), stem)
    print(stem.with_suffix(".md" if not grows else ".png"))
    return 0


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__, formatter_class=raw)

    def names(text: str) -> list[str]:
        return [name.strip() for name in text.split(";" if ";" in text else ",") if name.strip()]

    parser.add_argument(
        "what", nargs="?", choices=["steps", "growth", "busy", "users", "gpu", "report"], default="steps"
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
    parser.add_argument("--repeats", type=int, default=5, help="turns for wall time, and for rounds (default: 5)")
    parser.add_argument("--cpu-repeats", type=int, default=2, help="turns for CPU time on one thread (default: 2)")
    parser.add_argument("--threads", type=int, default=2, help="for wall time (default: 2)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cpu; of gpu: cuda")
    parser.add_argument("--wait", type=float, default=60, help="seconds to wait for a quiet machine (default: 60)")
    parser.add_argument("--users", type=int, default=100, help="in a round (default: 100)")
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers"), help="environment of pfl and flwr")
    parser.add_argument("--out", type=Path, default=Path("results") / "benchmark", help="default: results/benchmark")
    return parser


def _measure(options: argparse.Namespace, path: Path) -> None:
    """Workload by workload; what was measured is on disk after each."""
    grows = options.what == "growth"
    origin = rows.origin()
    bar = tqdm(growth_workloads() if grows else options.workloads or list(WORKLOADS), disable=None)
    start = time.monotonic()
    for name in bar:
        workload = workload_named(name)
        methods = [m for m in GROWTH_METHODS if not skipped(name, m)] if grows else methods_for(workload)
        chosen = [method for method in methods if not options.methods or method in options.methods]
        repeats = options.repeats, 0 if grows else options.cpu_repeats
        new = measure(
            name,
            chosen,
            options.device or "cpu",
            options.threads,
            repeats,
            options.wait,
            lambda what, name=name: bar.set_description(f"{name}: {what}"),  # type: ignore[misc]
        )
        if bar.disable:
            print(f"{name}: {time.monotonic() - start:.0f} s since the start", flush=True)
        table = rows.merged(rows.read(path), [{**row, **origin} for row in new])
        rows.write(path, rows.with_ratios(table, {w: workload_named(w).batch for w in {r["workload"] for r in table}}))


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
