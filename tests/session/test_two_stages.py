"""Two trainings in one budget: the second one's ledger begins with the first one's, and its target is for both."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting.rdp import RdpAccountant
from torch import Tensor, nn

from dpbench.errors import BudgetExhausted, ConfigurationError, LedgerError
from dpbench.privacy.accounting.composition import ledger_epsilon
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.strategies import DPSGD, ClipOnly
from tests.session.test_trainable import RECORDS, Net, records
from tests.strategies.worlds import loader_of, pictures, trainer_for
from tests.support.cli import TINY, dpbench
from tests.support.finished_runs import STEPS

DELTA = 1e-3
FIRST_STEPS = 4


class Stage(Net):
    lr = 0.5

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def ledger_in(folder: Path) -> str:
    return str(folder / "ledger.jsonl")


def first_stage(folder: Path, module: Stage | None = None, **options: Any) -> Stage:
    """Four steps of the head on lots of 12."""
    module = module or Stage()
    options = {"noise_multiplier": 1.0, "delta": DELTA, "ledger": ledger_in(folder / "first"), **options}
    trainer_for(folder / "first", DPSGD(**options), FIRST_STEPS).fit(module, loader_of(records()))
    return module


def second_stage(folder: Path, module: Stage, steps: int = 5, **options: Any) -> DPSGD:
    """The backbone and a new head, on lots of 8, with another bound and rate."""
    module.backbone.requires_grad_(True)
    module.head = nn.Linear(8, 3)
    module.lr = 0.05
    options = {"noise_multiplier": 0.8, "max_grad_norm": 0.5, "expected": 8, **options}
    return later_stage(folder, module, steps, **options)


def later_stage(
    folder: Path, module: Stage, steps: int = 2, data: Any = None, expected: float = 12, **options: Any
) -> DPSGD:
    """A training after the first one."""
    paths = {"after": ledger_in(folder / "first"), "ledger": ledger_in(folder / "both")}
    strategy = DPSGD(**{"noise_multiplier": 1.0, "delta": DELTA, **paths, **options})
    trainer_for(folder / "both", strategy, steps).fit(module, loader_of(data or records(), expected))
    return strategy


def independent_epsilon(*stages: tuple[float, float, int]) -> float:
    """Epsilon of (sampling rate, noise multiplier, steps), composed by dp_accounting alone."""
    accountant = RdpAccountant()
    for rate, noise, steps in stages:
        gaussian = dp_accounting.GaussianDpEvent(noise)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, gaussian), steps)
    return float(accountant.get_epsilon(DELTA))


def test_epsilon_is_of_both_stages(tmp_path: Path) -> None:
    module = first_stage(tmp_path, seed=1)
    before = module.backbone.weight.detach().clone()
    strategy = second_stage(tmp_path, module, seed=1)
    assert not torch.equal(module.backbone.weight, before)
    both = tmp_path / "both" / "ledger.jsonl"
    assert both.read_text().startswith((tmp_path / "first" / "ledger.jsonl").read_text())
    ledger = read_ledger(both)
    assert ledger.damage is None
    assert [phase for phase, _ in ledger.releases] == [0] * 4 + [1] * 5
    expected = independent_epsilon((12 / RECORDS, 1.0, 4), (8 / RECORDS, 0.8, 5))
    # dpbench's grid of orders is finer than dp_accounting's own.
    assert expected * 0.98 < ledger_epsilon(ledger, DELTA) <= expected * (1 + 1e-9)
    assert strategy.epsilon() == pytest.approx(ledger_epsilon(ledger, DELTA), rel=1e-12)
    assert len({header.noise_source for header in ledger.headers}) == 2
    assert len({header.lot_source for header in ledger.headers}) == 2


def test_noise_is_found_for_what_is_left_of_the_target(tmp_path: Path) -> None:
    strategy = second_stage(tmp_path, first_stage(tmp_path), noise_multiplier=None, target_epsilon=6.0)
    assert strategy.releases == 5 and strategy.noise_multiplier is not None
    assert 6.0 * (1 - 1e-4) < strategy.epsilon() <= 6.0
    stages = [(12 / RECORDS, 1.0, 4), (8 / RECORDS, strategy.noise_multiplier, 5)]
    assert 6.0 * (1 - 1e-4) < independent_epsilon(*stages) < 6.0 * 1.02


def test_the_second_stage_stops_at_the_target_of_both(tmp_path: Path) -> None:
    module = first_stage(tmp_path)
    strategy = second_stage(tmp_path, module, steps=200, target_epsilon=6.0)
    epsilon = strategy.epsilon()
    one_more = independent_epsilon((12 / RECORDS, 1.0, 4), (8 / RECORDS, 0.8, strategy.releases + 1))
    assert 0 < strategy.releases < 200 and epsilon <= 6.0 < one_more


def test_in_the_same_file(tmp_path: Path) -> None:
    module = first_stage(tmp_path)
    strategy = later_stage(tmp_path, module, ledger=ledger_in(tmp_path / "first"))
    ledger = read_ledger(tmp_path / "first" / "ledger.jsonl")
    assert [phase for phase, _ in ledger.releases] == [0] * 4 + [1] * 2
    assert strategy.epsilon() == pytest.approx(ledger_epsilon(ledger, DELTA), rel=1e-12)


def test_a_second_stage_is_resumed(tmp_path: Path) -> None:
    """From its checkpoint, with the same weights and the same ledger as an uninterrupted one."""

    def run(folder: Path, *lengths: int) -> Tensor:
        torch.manual_seed(5)
        module = first_stage(folder, seed=1)
        start = None
        for length in lengths:
            paths = {"after": ledger_in(folder / "first"), "ledger": ledger_in(folder / "both")}
            trainer = trainer_for(folder, DPSGD(noise_multiplier=1.0, delta=DELTA, seed=1, **paths), length)
            trainer.fit(module, loader_of(records()), ckpt_path=start, weights_only=False)
            start = folder / "last.ckpt"
            trainer.save_checkpoint(start)
        assert len(read_ledger(folder / "both" / "ledger.jsonl").releases) == 4 + 4
        return module.head.weight.detach()

    assert torch.equal(run(tmp_path / "whole", 4), run(tmp_path / "resumed", 2, 4))


# ------------------------------------------------------------------------------------- refused


def test_what_is_spent(tmp_path: Path) -> None:
    module = first_stage(tmp_path)
    with pytest.raises(BudgetExhausted, match=r"target_epsilon=1.0 covers both trainings, and .* has already spent"):
        second_stage(tmp_path, module, noise_multiplier=None, target_epsilon=1.0)
    with pytest.raises(BudgetExhausted, match="allows no further step"):
        second_stage(tmp_path, module, target_epsilon=1.0)


def test_another_training_set(tmp_path: Path) -> None:
    module = first_stage(tmp_path)
    with pytest.raises(LedgerError, match="population 40, this run 60: a ledger describes one training set"):
        later_stage(tmp_path, module, data=pictures())


def test_another_ledger_in_its_place(tmp_path: Path) -> None:
    module = first_stage(tmp_path)
    first_stage(tmp_path / "other")
    (tmp_path / "other" / "first").rename(tmp_path / "both")
    with pytest.raises(LedgerError, match="does not continue .*after="):
        second_stage(tmp_path, module)


def test_a_ledger_that_is_not_that_of_the_model(tmp_path: Path) -> None:
    module = first_stage(tmp_path)
    first_stage(tmp_path / "other")
    with pytest.raises(ConfigurationError, match="was already trained in a private run.*after="):
        later_stage(tmp_path / "other", module)


def test_what_was_frozen_on_the_way_holds_releases_too(tmp_path: Path) -> None:
    """A backbone that was trained, and frozen before the end, under a new head."""

    class Freezing(Stage):
        def on_train_batch_start(self, *_: Any) -> None:
            if self.global_step == 2:
                self.backbone.requires_grad_(False)

    module = first_stage(tmp_path, Freezing(frozen=False))
    module.head = nn.Linear(8, 3)
    with pytest.raises(ConfigurationError, match="was already trained in a private run.*after="):
        later_stage(tmp_path, module, after=None)


def test_a_damaged_ledger(tmp_path: Path) -> None:
    module = Stage()
    first_stage(tmp_path)
    path = tmp_path / "first" / "ledger.jsonl"
    path.write_text(path.read_text().replace('"number":2', '"number":7'))
    with pytest.raises(LedgerError, match="cannot go on after"):
        second_stage(tmp_path, module)


def test_options_that_do_not_go_with_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is not a file: name the ledger of the earlier training"):
        DPSGD(noise_multiplier=1.0, after=ledger_in(tmp_path))
    first_stage(tmp_path)
    with pytest.raises(ConfigurationError, match="ClipOnly is not private"):
        ClipOnly(max_grad_norm=1.0, after=ledger_in(tmp_path / "first"))


# ------------------------------------------------------------------------------------- on the command line

WORDS = [*TINY, f"strategy.delta={DELTA}"]


@pytest.fixture
def runs(trained: Callable[[str], Path], tmp_path: Path) -> Path:
    """A finished first stage, and a run without privacy."""
    for name, kind in (("first", "seeded"), ("bare", "not_private")):
        shutil.copytree(trained(kind), tmp_path / name)
    return tmp_path


@pytest.mark.slow
def test_on_the_command_line(runs: Path) -> None:
    second = ["after=first", "optimizer.lr=0.02", "data.expected_batch_size=100", "trainable=lora:2+last_layer"]
    target = ["strategy.target_epsilon=3", "trainer.max_steps=5"]
    dpbench(runs, "train", *WORDS, *second, *target, "hydra.run.dir=both")
    privacy = json.loads((runs / "both" / "result.json").read_text())["privacy"]
    assert privacy["releases"] == STEPS + 5 and privacy["epsilon"]["rdp"] == pytest.approx(3.0, rel=1e-4)
    ledger = read_ledger(runs / "both" / "ledger.jsonl")
    noise = [header.plan.to_dict()["noise"]["noise_multiplier"] for header in ledger.headers if header.plan]
    assert 2.999 < independent_epsilon((64 / 1437, noise[0], STEPS), (100 / 1437, noise[1], 5)) < 3.1
    before, after = (
        torch.load(runs / name / "checkpoints" / "last.ckpt", weights_only=False)["state_dict"]
        for name in ("first", "both")
    )
    # What is frozen in the second stage is as the first one has left it.
    assert torch.equal(before["model.1.weight"], after["model.1.base.weight"])
    dpbench(runs, "resume", "both", "trainer.max_steps=6", "strategy.target_epsilon=4")
    assert len(read_ledger(runs / "both" / "ledger.jsonl").releases) == STEPS + 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["after=bare"], "that run has no ledger"),
        (["after=first", "strategy=none"], "continuing a private run without privacy"),
        (["after=first", "model.hidden=[12,7]"], "no weight of it matches"),
    ],
    ids=["no ledger", "not private", "other weights"],
)
def test_on_the_command_line_refused(runs: Path, words: list[str], message: str) -> None:
    private = [] if "strategy=none" in words else ["strategy.noise_multiplier=1"]
    own = TINY if "strategy=none" in words else WORDS
    _, err = dpbench(runs, "train", *own, "trainer.max_steps=2", *private, *words, "hydra.run.dir=no", status=1)
    assert message in err and err.count("\n") == 1
