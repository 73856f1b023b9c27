"""Schedules of noise, bounds and lot sizes in a Trainer, and with whatever else a strategy has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dpbench.callback.non_private import NonPrivate
from dpbench.data.loader import PrivateDataLoader
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.composition import epsilon
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.mechanism.schedules import factors_of
from dpbench.strategies import DPSGD, AdaptiveQuantileClipping, ClipOnly
from tests.strategies.worlds import Classifier, crashed, fit, pictures, trainer_for, weights_of

STEPS = 5
SCHEDULES: dict[str, Any] = {
    "noise_multiplier": 2.0,
    "max_grad_norm": 0.5,
    "noise_schedule": "linear:0.5",
    "max_grad_norm_schedule": "cosine:0.2",
}


def loader(schedule: Any = "linear:2") -> PrivateDataLoader:
    return PrivateDataLoader.poisson(pictures(), 12, seed=0, expected_batch_size_schedule=schedule)


def network() -> Classifier:
    torch.manual_seed(3)
    return Classifier()


def test_all_three_and_a_run_that_is_resumed(tmp_path: Path) -> None:
    straight, resumed = network(), network()
    strategy = fit(tmp_path / "straight", straight, STEPS, loader=loader(), **SCHEDULES)
    ledger = read_ledger(tmp_path / "straight" / "ledger.jsonl")
    factors = [factors_of("schedule", word, STEPS).values for word in ("linear:2", "linear:0.5", "cosine:0.2")]
    for (_, release), lot, z, bound in zip(ledger.releases, *factors, strict=True):
        (query,) = release.queries
        assert release.sampling.expected_batch_size == pytest.approx(12 * lot)
        assert query.sensitivity == pytest.approx(0.5 * bound)
        assert query.noise_std / query.sensitivity == pytest.approx(2 * z)
    assert strategy.epsilon() == epsilon(ledger.events, 1e-3)
    start = crashed(tmp_path / "resumed", network(), STEPS, 3, loader=loader(), **SCHEDULES)
    fit(tmp_path / "resumed", resumed, STEPS, loader=loader(), start=start, **SCHEDULES)
    assert torch.equal(weights_of(resumed), weights_of(straight))
    one, other = ((tmp_path / name / "ledger.jsonl").read_bytes() for name in ("straight", "resumed"))
    assert one == other


def test_a_target_is_met_at_the_end_of_the_schedules(tmp_path: Path) -> None:
    options = {**SCHEDULES, "noise_multiplier": None, "target_epsilon": 4.0}
    assert 4 * (1 - 1e-4) < fit(tmp_path, network(), 2, loader=loader(), **options).epsilon() <= 4


def test_noise_moves_under_bounds_that_adapt(tmp_path: Path) -> None:
    options = {"noise_multiplier": 3.0, "noise_schedule": "exponential:0.5", "count_noise_std": 100.0}
    fit(tmp_path, network(), STEPS, AdaptiveQuantileClipping, **options)
    ledger = read_ledger(tmp_path / "ledger.jsonl")
    found = sorted((event.queries[0].noise_std for event in ledger.events), reverse=True)
    assert found == pytest.approx([3 * factor for factor in factors_of("s", "exponential:0.5", STEPS).values], rel=1e-8)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (AdaptiveQuantileClipping, {"max_grad_norm_schedule": "linear:0.5"}, "adapt to the gradients"),
        (ClipOnly, {"noise_schedule": "linear:0.5"}, "is not private: leave out noise_schedule"),
        (DPSGD, {"noise_schedule": "falling"}, "noise_schedule must be constant, linear:END"),
    ],
    ids=["adaptive", "not private", "unknown"],
)
def test_schedules_that_are_refused(make: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make(noise_multiplier=1.0, delta=1e-3, **options)


def test_a_schedule_needs_an_end(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="noise_schedule needs a number of steps"):
        fit(tmp_path, network(), -1, trainer={"max_time": "00:00:01:00"}, **SCHEDULES)


def test_microbatches_have_lots_of_one_size(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be combined with expected_batch_size_schedule"):
        fit(tmp_path, network(), loader=loader(), microbatch_size=4)


def test_lots_move_without_privacy_too(tmp_path: Path) -> None:
    sizes: list[int] = []

    class Counts(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            sizes.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    trainer_for(tmp_path, NonPrivate(), 12).fit(Counts(), loader("step:4@0.5"))
    assert sum(sizes[6:]) > 2.5 * sum(sizes[:6])
    shuffled = PrivateBatchSampler(make_sampling("shuffled", len(pictures()), 12), 0, "linear:2")
    with pytest.raises(ConfigurationError, match="have one size"):
        trainer_for(tmp_path, NonPrivate(), 4).fit(Classifier(), PrivateDataLoader(pictures(), shuffled))
