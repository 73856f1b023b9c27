"""Several seeds in one process: the runs of a sweep, to the last file, with keys and ledgers of their own."""

from __future__ import annotations

import csv
import functools
import json
import os
import random
import signal
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from dpbench_stacked.executor import Stacked

from dpbench.errors import DataError
from dpbench.harness.run import train
from dpbench.privacy.accounting.ledger import check_own_randomness, read_ledger
from tests.support.cli import PRIVATE, dpbench

SEEDS = (0, 1, 2)
STEPS = 5
SMALL = [
    *PRIVATE,
    "logger=none",
    "data.image_size=8",
    "data.expected_batch_size=24",
    f"trainer.max_steps={STEPS}",
    "run.checkpoint_every_n_steps=2",
    "trainer.log_every_n_steps=2",
]
MLP = [*SMALL, "model=mlp", "model.hidden=[8]"]
ONE_BY_ONE = "seed=" + ",".join(map(str, SEEDS))
AS_STACKED = f"strategy.executor=stack:{len(SEEDS)}"
LAUNCHED = ["-m", "hydra/launcher=dpbench_stacked"]
TOGETHER = [*LAUNCHED, AS_STACKED, ONE_BY_ONE]

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of runs that each stacked computation is for."""
    counts: list[int] = []
    own = Stacked._carry_out_together

    def carry_out(self: Stacked, group: dict[int, Any]) -> None:
        counts.append(len(group))
        own(self, group)

    monkeypatch.setattr(Stacked, "_carry_out_together", carry_out)
    return counts


def folder_of(sweep: str, seed: int) -> Path:
    (folder,) = Path(sweep).glob(f"*seed_{seed}")
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / "checkpoints/last.ckpt", weights_only=False)["state_dict"]
    return state


def metrics(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def alone(seed: int, name: str, *words: str) -> Path:
    dpbench(Path(), "train", *words, AS_STACKED, f"seed={seed}", f"hydra.run.dir={name}-{seed}")
    return Path(f"{name}-{seed}")


def assert_same_run(folder: Path, other: Path) -> None:
    """Equal to the last bit, in all that a run leaves."""
    assert metrics(folder) == metrics(other)
    assert_same_training(folder, other)


def assert_same_training(folder: Path, other: Path) -> None:
    """Equal to the last bit, but for the curve, on which an interrupted run is measured once more."""
    assert (folder / "ledger.jsonl").read_bytes() == (other / "ledger.jsonl").read_bytes()
    own, others = weights(folder), weights(other)
    assert own.keys() == others.keys() and all(torch.equal(own[name], others[name]) for name in own)
    results = [json.loads((one / "result.json").read_text()) for one in (folder, other)]
    for name in ("metrics", "privacy", "steps"):
        assert results[0][name] == results[1][name]


@pytest.mark.parametrize(
    "words",
    [
        ["model=mlp", "model.hidden=[8]"],
        ["model=mnist_cnn", "data.image_size=28"],
        ["model=mlp", "model.hidden=[8]", "strategy=automatic", "strategy.metrics={accuracy: 1}"],
        ["model=mlp", "model.hidden=[8]", "strategy=discretized", "data.sampling=fixed_size"],
    ],
)
def test_the_results_of_eager_runs_up_to_rounding(
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    counted: list[int],
) -> None:
    """With the keys of the reference, which the executor's name is otherwise part of."""
    monkeypatch.setattr("dpbench.session.session.keyed_by", lambda key, executor: key)
    command = ["train", *SMALL, *words, "trainer.precision=64-true"]
    dpbench(Path(), *command, *TOGETHER, "hydra.sweep.dir=together")
    assert counted.count(len(SEEDS)) >= STEPS - 1
    dpbench(Path(), *command, "-m", ONE_BY_ONE, "strategy.executor=eager", "hydra.sweep.dir=apart")
    for seed in SEEDS:
        folders = [folder_of(sweep, seed) for sweep in ("together", "apart")]
        own, others = map(weights, folders)
        for name in own:
            torch.testing.assert_close(own[name], others[name], rtol=1e-10, atol=1e-10)
        ledgers = [read_ledger(folder / "ledger.jsonl") for folder in folders]
        assert ledgers[0].header.noise_source == ledgers[1].header.noise_source
        releases = [[(one.sampling, one.queries) for _, one in ledger.releases] for ledger in ledgers]
        assert releases[0] == releases[1] and len(releases[0]) == STEPS
        for row, other_row in zip(metrics(folders[0]), metrics(folders[1]), strict=True):
            assert row.keys() == other_row.keys()
            for name, value in row.items():
                assert value == other_row[name] or float(value) == pytest.approx(float(other_row[name]), abs=1e-9)


class Drawing(pl.Callback):
    """Draws from the generators of the process in each step, and notes what it has drawn by the seed of the run."""

    observes_only = True
    drawn: ClassVar[dict[int, list[float]]] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        numbers = [float(torch.rand(())), float(np.random.rand()), random.random()]
        seed = int(os.environ["PL_GLOBAL_SEED"])
        self.drawn.setdefault(seed, []).extend(numbers)


def test_each_seed_is_the_run_that_it_is_alone(monkeypatch: pytest.MonkeyPatch, counted: list[int]) -> None:
    """With a ledger, noise, and random numbers of the process of its own."""
    monkeypatch.setattr(train, "train", functools.partial(train.train, observers=[Drawing()]))
    Drawing.drawn = together = {}
    dpbench(Path(), "train", *MLP, *TOGETHER, "hydra.sweep.dir=together")
    assert counted.count(len(SEEDS)) >= STEPS - 1
    Drawing.drawn = apart = {}
    ledgers = {}
    for seed in SEEDS:
        folder = folder_of("together", seed)
        assert_same_run(folder, alone(seed, "alone", *MLP))
        ledgers[str(seed)] = read_ledger(folder / "ledger.jsonl")
    assert together == apart and len(together) == len(SEEDS)
    check_own_randomness(ledgers)
    assert len({ledger.header.noise_source for ledger in ledgers.values()}) == len(SEEDS)
    assert len({ledger.header.replay for ledger in ledgers.values()}) == len(SEEDS)


class Failing(pl.Callback):
    """Fails in the run of one seed."""

    observes_only = True

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.default_root_dir.endswith("seed_1") and trainer.global_step == 2:
            raise DataError("the third batch is damaged.")


def test_the_others_go_on_where_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    own = train.train
    with monkeypatch.context() as patch:
        patch.setattr(train, "train", functools.partial(own, observers=[Failing()]))
        _, err = dpbench(Path(), "train", *MLP, *TOGETHER, "hydra.sweep.dir=together", status=1)
    assert "the third batch is damaged" in err
    assert not (folder_of("together", 1) / "result.json").exists()
    assert_same_run(folder_of("together", 2), alone(2, "alone", *MLP))
    assert json.loads((folder_of("together", 0) / "result.json").read_text())["steps"] == STEPS


def test_a_budget_ends_each_run(counted: list[int]) -> None:
    budget = ["strategy.target_epsilon=0.9", "strategy.noise_multiplier=1"]
    dpbench(Path(), "train", *MLP, *budget, "trainer.max_steps=50", *TOGETHER, "hydra.sweep.dir=together")
    steps = [json.loads((folder_of("together", seed) / "result.json").read_text())["steps"] for seed in SEEDS]
    assert len(set(steps)) == 1 and 1 < steps[0] < 50


class Signal(pl.Callback):
    """Interrupts the process at a step of one seed."""

    observes_only = True

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.default_root_dir.endswith("seed_1") and trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interruption_saves_all_runs_and_each_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = train.train
    command = ["train", *MLP, *TOGETHER]
    with monkeypatch.context() as patch:
        patch.setattr(train, "train", functools.partial(own, observers=[Signal()]))
        _, err = dpbench(Path(), *command, "hydra.sweep.dir=interrupted", status=130)
    for seed in SEEDS:
        assert f"dpbench resume {folder_of('interrupted', seed).absolute()}" in err
        assert weights(folder_of("interrupted", seed))
        assert len(metrics(folder_of("interrupted", seed))) < STEPS
    for seed in SEEDS:
        dpbench(Path(), "resume", str(folder_of("interrupted", seed)))
    dpbench(Path(), *command, "hydra.sweep.dir=whole")
    for seed in SEEDS:
        assert_same_training(folder_of("interrupted", seed), folder_of("whole", seed))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["strategy.gradients=one_by_one"], "not all layers"),
        (["strategy.max_physical_batch_size=8"], "batches go in pieces"),
    ],
)
def test_what_cannot_be_stacked_is_trained_run_by_run(words: list[str], reason: str, counted: list[int]) -> None:
    with pytest.warns(UserWarning, match=f"executor=stack.*{reason}"):
        dpbench(Path(), "train", *MLP, *words, *TOGETHER, "hydra.sweep.dir=together")
    assert not counted
    for seed in SEEDS:
        folder = folder_of("together", seed)
        assert json.loads((folder / "result.json").read_text())["steps"] == STEPS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["strategy.executor=stack:none", "seed=0,1"], "needs a number of runs"),
        (["strategy.executor=graph", "seed=0,1"], "needs strategy.executor=stack:N"),
        (["strategy.executor=stack:2", "seed=0,1", "logger=wandb"], "one run of wandb"),
    ],
)
def test_refusals(words: list[str], message: str) -> None:
    _, err = dpbench(Path(), "train", *MLP, *LAUNCHED, *words, "hydra.sweep.dir=together", status=1)
    assert message in err and len(err.strip().splitlines()) == 1
    assert not list(Path().rglob("ledger.jsonl"))
