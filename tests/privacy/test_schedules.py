"""Noise and bounds that move over the steps: what is released, what it costs, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.rdp import rdp_privacy_accountant
from scipy import stats

from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.errors import BudgetExhausted, ConfigurationError
from dpbench.privacy.accounting.composition import ledger_epsilon
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.budget import TrainingLength
from dpbench.privacy.mechanism.schedules import CONSTANT, Factors, Schedules, factors_of
from tests.support.releases import SAMPLING, ReleaseEngine, made, release, rows

STEPS = 6
NOISE = Schedules(noise_multiplier="linear:0.25")
SIZES = factors_of("expected_batch_size_schedule", "linear:3", STEPS)
BOUND = Schedules(max_grad_norm="exponential:0.1")
FALLING = factors_of("noise_schedule", NOISE.noise_multiplier, STEPS).values


def independent_epsilon(multipliers: Sequence[float], sizes: Factors = CONSTANT) -> float:
    """By dp_accounting, release by release."""
    accountant = rdp_privacy_accountant.RdpAccountant()
    for step, z in enumerate(multipliers):
        rate = SAMPLING.rate * sizes.at(step)
        accountant.compose(dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(z)))
    return float(accountant.get_epsilon(1e-4))


# ------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (None, ()),
        ("linear:3", (1.0, 2.0, 3.0)),
        ("exponential:0.25", (1.0, 0.5, 0.25)),
        ("cosine:0.5", (1.0, 0.75, 0.5)),
        ("step:0.5@0.5/2@0.9", (1.0, 0.5, 2.0)),
        ([1, 0.5, 0.1], (1.0, 0.5, 0.1)),
        (lambda share: 1 - share / 2, (1.0, 0.75, 0.5)),
    ],
)
def test_values(schedule: Any, expected: tuple[float, ...]) -> None:
    factors = factors_of("noise_schedule", schedule, 3)
    assert factors.values == pytest.approx(expected)
    assert factors.at(7) == factors.at(2)  # after its end it stays


def test_what_is_no_schedule() -> None:
    schedule: Any
    for schedule, steps, words in (
        ("linear", 3, "must be constant, linear:END"),
        ("linear:0", 3, "must be constant, linear:END"),
        ("linear:inf", 3, "must be constant, linear:END"),
        ("sine:1", 3, "not 'sine:1'"),
        ("step:0.5@0.5/0.1@0.2", 3, "step:FACTOR@SHARE"),
        ("step:0.5@1", 3, "step:FACTOR@SHARE"),
        ("step:0@0.5", 3, "step:FACTOR@SHARE"),
        ("linear:0.5", math.inf, "set max_steps or max_epochs"),
        ([1.0, 0.5], 3, "has 2 factors for 3 steps"),
        ([1.0, 0.0, 1.0], 3, "not 0.0 .step 1"),
        ([1.0, math.nan, 1.0], 3, "not nan .step 1"),
        ([1.0, "a", 1.0], 3, "not 'a' .step 1"),
        ([True, 1.0, 1.0], 3, "not True .step 0"),
        (lambda share: 1 / 0, 3, "cannot be evaluated: ZeroDivisionError"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            factors_of("noise_schedule", schedule, steps)


# ------------------------------------------------------------------------------- releases


def test_the_noise_of_each_release_is_the_scheduled_one(tmp_path: Path) -> None:
    releases, draws = made(tmp_path, horizon=TrainingLength(STEPS), schedules=NOISE), []
    for step in range(STEPS):
        lot = rows(step)
        draws.append((10 * release(releases, lot) - lot.sum(0)) / FALLING[step])
    noise = torch.cat(draws).double().numpy()
    for factor, fits in ((1.0, True), (2 / 3, False), (1.5, False)):
        assert (stats.kstest(noise / factor, "norm").pvalue > 1e-4) == fits


def test_bounds_follow_their_schedule(tmp_path: Path) -> None:
    """The sum is that of gradients clipped at C·f_t, which the ledger states as its sensitivity."""
    releases = made(tmp_path, z=1e-6, horizon=TrainingLength(STEPS), schedules=BOUND)
    factors = factors_of("max_grad_norm_schedule", BOUND.max_grad_norm, STEPS).values
    for step, factor in enumerate(factors):
        lot = 5 * rows(step)
        clipped = lot * (factor / lot.norm(dim=1, keepdim=True)).clamp(max=1)
        torch.testing.assert_close(10 * release(releases, lot), clipped.sum(0), rtol=1e-4, atol=1e-4)
    queries = [one.queries[0] for _, one in read_ledger(tmp_path / "ledger.jsonl").releases]
    assert [query.sensitivity for query in queries] == pytest.approx(factors)
    assert [query.noise_std for query in queries] == pytest.approx([1e-6 * factor for factor in factors])


def test_noise_and_sizes_cost_what_an_independent_accountant_says(tmp_path: Path) -> None:
    """A target is spent in the planned steps."""
    falling, growing = (factors_of("schedule", schedule, 3) for schedule in ("linear:0.25", "linear:3"))
    releases = made(tmp_path, z=None, target=3.0, horizon=TrainingLength(3), schedules=NOISE, size_factors=growing)
    multipliers = []
    for step in range(3):
        release(releases, rows(step))
        assert releases.noise_multiplier is not None
        multipliers.append(releases.noise_multiplier * falling.at(step))
    assert releases.epsilon() == pytest.approx(independent_epsilon(multipliers, growing), 1e-8)
    ledger = read_ledger(tmp_path / "ledger.jsonl")
    assert ledger_epsilon(ledger, 1e-4) == releases.epsilon()
    assert [one.queries[0].noise_std for _, one in ledger.releases] == pytest.approx(multipliers)
    assert 3.0 * (1 - 1e-5) < releases.epsilon() <= 3.0
    with pytest.raises(BudgetExhausted):
        release(releases)


def test_training_stops_before_the_release_that_would_exceed_the_target(tmp_path: Path) -> None:
    """Whatever that costs: the last one may cost more than all before it; also where those are repeated."""
    factors = [1.0] * 4 + [0.01, 1.0, 1.0]
    target = (independent_epsilon(factors[:4]) + independent_epsilon(factors[:5])) / 2
    schedules = Schedules(factors)
    releases = made(tmp_path, target=target, horizon=TrainingLength(7), schedules=schedules)
    release(releases, rows(0))
    state = releases.state_dict()
    while not releases.budget.exhausted:
        release(releases, rows(releases.num_releases))
    assert releases.num_releases == 4 and releases.epsilon() <= target
    releases.budget.close()
    resumed = made(tmp_path, target=target, horizon=TrainingLength(7, 1), schedules=schedules, start=state)
    assert resumed.budget.remaining == 3


def resumed_at_1(folder: Path, schedules: Schedules) -> ReleaseEngine:
    """From the state after one step of a run that died after four."""
    releases = made(folder, horizon=TrainingLength(STEPS), schedules=schedules, target=30.0)
    release(releases, rows(0))
    state = releases.state_dict()
    for step in range(1, 4):
        release(releases, rows(step))
    releases.budget.close()
    return made(folder, horizon=TrainingLength(STEPS, 1), schedules=schedules, target=30.0, start=state)


def test_a_resumed_run_goes_on_with_the_schedule(tmp_path: Path) -> None:
    both = Schedules("cosine:0.3", "linear:2")
    straight = made(tmp_path / "straight", horizon=TrainingLength(STEPS), schedules=both, target=30.0)
    expected = [release(straight, rows(step)) for step in range(STEPS)]
    resumed = resumed_at_1(tmp_path / "crashed", both)
    assert resumed.phase == 0 and resumed.budget.remaining == STEPS - 1
    for step in range(1, STEPS):
        assert torch.equal(release(resumed, rows(step)), expected[step])
    assert (tmp_path / "crashed/ledger.jsonl").read_bytes() == (tmp_path / "straight/ledger.jsonl").read_bytes()


def test_a_replay_that_differs_counts_again_at_its_own_cost(tmp_path: Path) -> None:
    resumed = resumed_at_1(tmp_path, NOISE)
    with pytest.warns(UserWarning, match="differs from its record"):
        release(resumed, rows(50))
    assert resumed.phase == 1
    while not resumed.budget.exhausted:
        release(resumed, rows(60))
    ledger = read_ledger(tmp_path / "ledger.jsonl")
    assert len(ledger.releases) == 3 + resumed.num_releases
    assert resumed.epsilon() == ledger_epsilon(ledger, 1e-4) <= 30.0
    ledger.events[resumed.mechanism.training_plan.event(STEPS)] += 1
    assert ledger_epsilon(ledger, 1e-4) > 30.0


# ------------------------------------------------------------------------------- sizes of lots


def test_lots_of_scheduled_sizes_are_divided_and_accounted_for_as_such(tmp_path: Path) -> None:
    releases = made(tmp_path, z=1e-6, horizon=TrainingLength(STEPS), size_factors=SIZES)
    for step in range(STEPS):
        expected = SAMPLING.expected_batch_size * SIZES.at(step)
        assert releases.mechanism.plan.denominator == pytest.approx(expected)
        lot = rows(step)
        torch.testing.assert_close(release(releases, lot), lot.sum(0) / expected, rtol=1e-4, atol=1e-4)
    rates = [one.sampling.rate for _, one in read_ledger(tmp_path / "ledger.jsonl").releases]
    assert rates == pytest.approx([SAMPLING.rate * factor for factor in SIZES.values])


def test_lots_have_their_scheduled_sizes() -> None:
    lots = PrivateBatchSampler(make_sampling("fixed_size", 2000, 20), 1, "step:5@0.5")
    lots.plan(4)
    assert [len(lots.lot(step)) for step in range(5)] == [20, 20, 100, 100, 100]
    lots.free()
    assert not lots.size_factors


def test_sizes_that_no_lot_can_have() -> None:
    schedule: Any
    for kind, size, schedule, words in (
        ("poisson", 20, "linear:100", "gives batches of"),
        ("poisson", 20, "linear:0.01", "must lie between 1 and 300"),
        ("full", 300, "linear:0.5", "'full' batches have one size"),
        ("shuffled", 20, "linear:0.5", "have one size"),
        ("poisson", 20, "linear:x", "expected_batch_size_schedule must be"),
        ("poisson", 20, True, "or a function, not True"),
        ("poisson", 20, {"kind": "linear"}, "or a function, not {'kind'"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            PrivateBatchSampler(make_sampling(kind, 300, size), 1, schedule).plan(10)


# ------------------------------------------------------------------------------- an adaptation without statistics
