"""Runs of dpbench on a cluster, and whether two of them are one and the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.record import read_result
from tests.cluster.slurm import wait
from tests.support import forks

SMALL = (
    "data=digits",
    "model=mlp",
    "model.hidden=[8]",
    "data.expected_batch_size=64",
    "engine.native=off",
    "logger=none",
)


def dpbench(
    *words: str, folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`dpbench WORDS` in a folder, on one thread; waits for its end."""
    process = forks.start(folder, "dpbench", list(words), alone(environment))
    out, err = process.communicate(timeout=900)
    return subprocess.CompletedProcess(words, process.wait(timeout=900), out, err)


def command(*words: str) -> list[str]:
    """The command line of `dpbench WORDS`, of this environment."""
    return [sys.executable, "-m", "dpbench", *words]


def alone(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables of a process on one thread, which rounds alike everywhere."""
    return {**os.environ, **(environment or {}), "OMP_NUM_THREADS": "1"}


def steps_of(run: Path) -> int:
    """Releases that a run has made so far."""
    ledger = RunFolder(run).ledger
    return max(0, len(ledger.read_bytes().splitlines()) - 1) if ledger.is_file() else 0


def begun(run: Path, steps: int) -> None:
    """Wait until a run has made some releases."""
    wait(lambda: steps_of(run) > steps, f"{run} does not train", 600)


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """The weights of a run's last checkpoint."""
    state: dict[str, torch.Tensor] = torch.load(RunFolder(run).checkpoint, weights_only=False)["state_dict"]
    return state


def sweep_is_as_on_one_machine(
    folder: Path, there: Sequence[str], environment: Mapping[str, str] | None = None
) -> None:
    """Make a sweep of two seeds on a cluster, and here: the same runs, bit by bit."""
    words = ("train", "-m", *SMALL, "trainer.max_steps=20", "seed=1,2")
    made = dpbench(*words, *there, "hydra.sweep.dir=there", folder=folder, environment=environment)
    assert made.returncode == 0, made.stderr
    assert dpbench(*words, "hydra.sweep.dir=here", folder=folder).returncode == 0
    for name in ("0-digits-mlp-dpsgd-seed_1", "1-digits-mlp-dpsgd-seed_2"):
        assert same(folder / "there" / name, folder / "here" / name)


def same(one: Path, other: Path) -> bool:
    """Whether two runs made the same releases, bit by bit, and have the same weights and figures."""
    runs = RunFolder(one), RunFolder(other)
    weights = weights_of(one), weights_of(other)
    figures = [read_result(run)["metrics"] for run in runs]
    return (
        runs[0].ledger.read_bytes() == runs[1].ledger.read_bytes()
        and figures[0] == figures[1]
        and weights[0].keys() == weights[1].keys()
        and all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    )
