"""Schedules of noise, bounds and lot sizes in a Trainer, in a plain loop and with whatever else a strategy has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from dpbench import LotLoader, PrivateLoop
from dpbench.callback.non_private import NonPrivate
from dpbench.data.lots import Lots, make_sampling
from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.composition import epsilon
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.mechanism.schedules import factors_of
from dpbench.strategies import (
    DPSGD,
    AdaptiveMeanClipping,
    AdaptiveQuantileClipping,
    AutomaticClipping,
    ClipOnly,
    DiscretizedDPSGD,
)
from tests.strategies.worlds import Classifier, pictures, trainer_for, weights_of

STEPS = 8
SCHEDULES: dict[str, Any] = {"noise_schedule": "linear:0.5", "max_grad_norm_schedule": "cosine:0.2"}


def loader(schedule: Any = "linear:2") -> LotLoader:
    data = pictures()
    return LotLoader.poisson(data, 12, seed=0, expected_batch_size_schedule=schedule)


def network() -> Classifier:
    torch.manual_seed(3)
    return Classifier()


def fit(folder: Path, strategy: DPSGD, steps: int = STEPS, lots: Any = None, module: Any = None) -> Classifier:
    module = module or network()
    trainer_for(folder, strategy, steps).fit(module, lots or loader())
    return module


def test_all_three_in_a_trainer(tmp_path: Path) -> None:
    strategy = DPSGD(noise_multiplier=2.0, max_grad_norm=0.5, delta=1e-3, seed=0, **SCHEDULES)
    fit(tmp_path, strategy)
    ledger = read_ledger(tmp_path / "ledger.jsonl")
    values = [(one.sampling.expected_batch_size, one.queries[0]) for _, one in ledger.releases]
    for (size, query), lot, z, bound in zip(
        values,
        *(factors_of("schedule", word, STEPS).values for word in ("linear:2", "linear:0.5", "cosine:0.2")),
        strict=True,
    ):
        assert size == pytest.approx(12 * lot)
        assert query.sensitivity == pytest.approx(0.5 * bound)
        assert query.noise_std / query.sensitivity == pytest.approx(2 * z)
    assert strategy.epsilon() == epsilon(ledger.events, 1e-3)


def test_a_loop_makes_the_releases_of_a_trainer(tmp_path: Path) -> None:
    options: dict[str, Any] = {"target_epsilon": 4.0, "delta": 1e-3, "seed": 0, **SCHEDULES}
    fit(tmp_path / "trainer", DPSGD(**options))
    model = Classifier()
    loop = PrivateLoop(
        model.net,
        torch.optim.SGD(model.net.parameters(), lr=0.5, momentum=0.9),
        loader(),
        DPSGD(**options, ledger=str(tmp_path / "loop.jsonl")),
        lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1]),
        steps=STEPS,
    )
    assert list(loop)[-1] == STEPS
    one, other = (read_ledger(tmp_path / name) for name in ("trainer/ledger.jsonl", "loop.jsonl"))
    assert [release.queries for _, release in one.releases] == [release.queries for _, release in other.releases]
    assert one.events == other.events and 4 * (1 - 1e-4) < loop.epsilon() <= 4


def test_a_run_that_is_resumed_ends_as_one_that_was_not(tmp_path: Path) -> None:
    def strategy() -> DPSGD:
        return DPSGD(noise_multiplier=2.0, delta=1e-3, seed=0, **SCHEDULES)

    straight = fit(tmp_path / "straight", strategy())

    class Stops(pl.Callback):
        observes_only = True

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "last.ckpt")
            if trainer.global_step == 5:
                raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        trainer_for(tmp_path / "resumed", strategy(), STEPS, more=[Stops()]).fit(network(), loader())
    module = network()
    trainer_for(tmp_path / "resumed", strategy(), STEPS).fit(module, loader(), ckpt_path=tmp_path / "last.ckpt")
    assert torch.equal(weights_of(module), weights_of(straight))
    one, other = ((tmp_path / name / "ledger.jsonl").read_bytes() for name in ("straight", "resumed"))
    assert one == other


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (AutomaticClipping, {}),
        (DiscretizedDPSGD, {}),
        (AdaptiveQuantileClipping, {"count_noise_std": 100.0}),
        (AdaptiveMeanClipping, {"initial_max_grad_norm": 1.0}),
    ],
)
def test_noise_moves_under_every_strategy(tmp_path: Path, make: Any, options: dict[str, Any]) -> None:
    strategy = make(noise_multiplier=3.0, delta=1e-3, seed=0, noise_schedule="exponential:0.5", **options)
    fit(tmp_path, strategy)
    ledger = read_ledger(tmp_path / "ledger.jsonl")
    found = sorted((event.queries[0].noise_std for event in ledger.events), reverse=True)
    assert found == pytest.approx([3 * factor for factor in factors_of("s", "exponential:0.5", STEPS).values], rel=1e-8)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (AdaptiveQuantileClipping, {"max_grad_norm_schedule": "linear:0.5"}, "adapt to the gradients"),
        (ClipOnly, {"noise_schedule": "linear:0.5"}, "is not private: leave out noise_schedule"),
        (DPSGD, {"noise_schedule": "falling"}, "noise_schedule must be constant, linear:END"),
        (DPSGD, {"noise_schedule": 3}, "noise_schedule must be"),
    ],
)
def test_schedules_that_are_refused(make: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make(noise_multiplier=1.0, delta=1e-3, **options)


def test_a_schedule_needs_an_end(tmp_path: Path) -> None:
    strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, noise_schedule="linear:0.5")
    with pytest.raises(ConfigurationError, match="noise_schedule needs a number of steps"):
        trainer_for(tmp_path, strategy, -1, max_time="00:00:01:00").fit(Classifier(), loader(None))


def test_microbatches_have_lots_of_one_size(tmp_path: Path) -> None:
    strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, microbatch_size=4)
    with pytest.raises(ConfigurationError, match="does not go with expected_batch_size_schedule"):
        fit(tmp_path, strategy)


def test_lots_move_without_privacy_too(tmp_path: Path) -> None:
    sizes: list[int] = []

    class Counts(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            sizes.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    trainer_for(tmp_path, NonPrivate(), 40).fit(Counts(), loader("step:4@0.5"))
    assert sum(sizes[20:]) > 2.5 * sum(sizes[:20])
    shuffled = Lots(make_sampling("shuffled", len(pictures()), 12), 0, "linear:2")
    with pytest.raises(ConfigurationError, match="have one size"):
        trainer_for(tmp_path, NonPrivate(), 4).fit(Classifier(), LotLoader(pictures(), shuffled))
