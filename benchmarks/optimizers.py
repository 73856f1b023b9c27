"""`python -m benchmarks.optimizers`: what privacy costs each optimizer (pyvacy_2019, the table of section 5.1).

The paper times `optimizer.step()`, which there holds clipping and noise. Clipping here is a part of the backward pass,
so whole training steps are compared: forward, backward, update; with and without clipping and noise, in turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import date
from pathlib import Path
from statistics import median

import pandas as pd
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from tqdm import tqdm

from benchmarks.machine import busy_cores
from benchmarks.ours import bare
from benchmarks.pages import render
from benchmarks.plain import MakeOptimizer, Step, plain
from benchmarks.workloads import WORKLOADS, Workload
from dpbench.code import versions
from dpbench.files import write_atomically
from dpbench.harness.run.runtime import keep_large_blocks
from dpbench.harness.run.search_path import conf_dir
from dpbench.harness.runs.provenance import commit, hardware

OPTIMIZERS = {"sgd": "SGD", "momentum": "momentum", "adam": "Adam", "adagrad": "AdaGrad", "rmsprop": "RMSprop"}
NETWORKS = {"mlp b256": "MLP 784-1000-10", "mnist_cnn b256": "MNIST CNN"}
_PAPER = 1.63e-3 / 8.93e-4  # of optimizer.step() alone, without a GPU
_WARM = 5


def optimizer_named(name: str) -> MakeOptimizer:
    """An optimizer of `conf/optimizer/` with its learning rate there."""
    make: MakeOptimizer = instantiate(OmegaConf.load(conf_dir() / "optimizer" / f"{name}.yaml"))
    return make


def milliseconds(step: Step, steps: int) -> float:
    """Of one step, the mean of some."""
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return 1000 * (time.perf_counter() - start) / steps


def costs(workload: Workload, name: str, steps: int, turns: int) -> dict[str, float]:
    """Medians over turns of both kinds of step, and of the turns' ratios."""
    make = optimizer_named(name)
    both = {
        "plain_ms": plain(workload, torch.channels_last, "cpu", make_optimizer=make),
        "private_ms": bare(workload, "flat", "cpu", make),
    }
    for step in both.values():
        milliseconds(step, _WARM)
    times = [{kind: milliseconds(step, steps) for kind, step in both.items()} for _ in range(turns)]
    ratios = sorted(turn["private_ms"] / turn["plain_ms"] for turn in times)
    medians = {kind: median(turn[kind] for turn in times) for kind in both}
    return {**medians, "ratio": median(ratios), "ratio_least": ratios[0], "ratio_most": ratios[-1]}


def main(arguments: list[str] | None = None) -> int:
    """Measure and write costs.csv and README.md."""
    parser = argparse.ArgumentParser("python -m benchmarks.optimizers")
    parser.add_argument("--steps", type=int, default=50, help="in a turn (default: 50)")
    parser.add_argument("--turns", type=int, default=9, help="of both kinds (default: 9)")
    parser.add_argument("--out", type=Path, default=Path("results") / "pyvacy_optimizer_cost")
    options = parser.parse_args(arguments)
    keep_large_blocks()
    machine = hardware()
    common = {"cpu": machine["cpu"], "threads": machine["threads"], "busy": busy_cores(), "torch": versions()["torch"]}
    common |= {"commit": commit(), "date": date.today().isoformat()}
    rows = []
    for workload, network in NETWORKS.items():
        for name, label in tqdm(OPTIMIZERS.items(), desc=network, disable=None):
            measured = costs(WORKLOADS[workload], name, options.steps, options.turns)
            rows.append({"network": network, "optimizer": label, **measured, **common})
    table = pd.DataFrame(rows)
    options.out.mkdir(parents=True, exist_ok=True)
    write_atomically(options.out / "costs.csv", table.to_csv(index=False))
    page = render("optimizers", options.out / "README.md", rows=rows, paper=_PAPER)
    print(page.read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
