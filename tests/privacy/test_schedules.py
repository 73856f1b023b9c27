"""Noise and bounds that move over the steps: what is released, what it costs, and what is refused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.rdp import rdp_privacy_accountant
from scipy import stats
from torch import Tensor, nn

from dpbench.data.lots import Lots, make_sampling
from dpbench.errors import BudgetExhausted, ConfigurationError
from dpbench.privacy import budget
from dpbench.privacy.accounting.composition import epsilon as ledger_epsilon_of
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.budget import TrainingLength
from dpbench.privacy.events import Event
from dpbench.privacy.mechanism.adaptive import Adaptation
from dpbench.privacy.mechanism.clipping import VectorGroup
from dpbench.privacy.mechanism.mechanism import Mechanism
from dpbench.privacy.mechanism.noise_process import Gaussian, Scheduled, noise_of
from dpbench.privacy.mechanism.plan import Statistic
from dpbench.privacy.mechanism.recipe import Recipe
from dpbench.privacy.mechanism.schedules import MOST_STAIRS, Factors, Schedules, factors_of
from dpbench.privacy.mechanism.training_plan import TrainingPlan
from dpbench.privacy.sampling import FixedSizeSampling, PoissonSampling
from tests.support.releases import SAMPLING, WIDTH, made, release, rows

STEPS = 12
NOISE = Schedules(noise_multiplier="linear:0.25")
BOUND = Schedules(max_grad_norm="exponential:0.1")
FALLING = factors_of("noise_schedule", NOISE.noise_multiplier, STEPS).values


def independent_epsilon(multipliers: Sequence[float], delta: float = 1e-4) -> float:
    """By dp_accounting, release by release."""
    accountant = rdp_privacy_accountant.RdpAccountant()
    for z in multipliers:
        accountant.compose(dp_event.PoissonSampledDpEvent(SAMPLING.rate, dp_event.GaussianDpEvent(z)))
    return float(accountant.get_epsilon(delta))


# ------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (None, ()),
        ("constant", ()),
        ("linear:3", (1.0, 2.0, 3.0)),
        ("exponential:0.25", (1.0, 0.5, 0.25)),
        ("cosine:0.5", (1.0, 0.75, 0.5)),
        ("step:0.5@0.5/2@0.9", (1.0, 0.5, 2.0)),
        ([1, 0.5, 0.1], (1.0, 0.5, 0.1)),
        (lambda share: 1 - share / 2, (1.0, 0.75, 0.5)),
    ],
)
def test_values(schedule: Any, expected: tuple[float, ...]) -> None:
    assert factors_of("noise_schedule", schedule, 3).values == pytest.approx(expected)


def test_long_schedules_move_in_stairs() -> None:
    values = factors_of("noise_schedule", "linear:0.5", 4001).values
    assert len(values) == 4001 and len(set(values)) == MOST_STAIRS
    assert values[0] == 1 and values[-1] == 0.5 and sorted(values, reverse=True) == list(values)
    assert factors_of("noise_schedule", "linear:0.5", 1).values == (1.0,)


def test_after_its_end_a_schedule_stays() -> None:
    assert Factors((1.0, 0.5)).at(7) == 0.5 and Factors().at(3) == 1.0


@pytest.mark.parametrize(
    ("schedule", "steps", "words"),
    [
        ("linear", 3, "must be constant, linear:END"),
        ("linear:0", 3, "must be constant, linear:END"),
        ("linear:-1", 3, "must be constant, linear:END"),
        ("sine:1", 3, "not 'sine:1'"),
        ("step:0.5", 3, "step:FACTOR@SHARE"),
        ("step:0.5@0.5/0.1@0.2", 3, "step:FACTOR@SHARE"),
        ("step:0.5@1.5", 3, "step:FACTOR@SHARE"),
        ("linear:0.5", math.inf, "set max_steps or max_epochs"),
        ([1.0, 0.5], 3, "has 2 factors, and the training 3 steps"),
        ([1.0, 0.0, 1.0], 3, "is 0.0 at step 1"),
        ([1.0, math.nan, 1.0], 3, "is nan at step 1"),
        ([1.0, "a", 1.0], 3, "is 'a' at step 1"),
        ([True, 1.0, 1.0], 3, "is True at step 0"),
        (lambda share: -1.0, 3, "is -1.0 at step 0"),
        (lambda share: 1 / 0, 3, "cannot be evaluated: ZeroDivisionError"),
    ],
)
def test_what_is_no_schedule(schedule: Any, steps: float, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        factors_of("noise_schedule", schedule, steps)


def test_noise_without_a_schedule_is_plain() -> None:
    assert noise_of(1.5, Factors()) == Gaussian(1.5) and Gaussian(1.5).constant
    scheduled = noise_of(2.0, Factors((1.0, 0.5)))
    assert isinstance(scheduled, Scheduled) and not scheduled.constant
    assert [scheduled.multiplier(step) for step in range(3)] == [2.0, 1.0, 1.0]


# ------------------------------------------------------------------------------- releases


def test_the_noise_of_each_release_is_the_scheduled_one(tmp_path: Path) -> None:
    releases, draws = made(tmp_path, horizon=TrainingLength(STEPS), schedules=NOISE), []
    for step in range(STEPS):
        lot = rows(step)
        draws.append((10 * release(releases, lot) - lot.sum(0)) / FALLING[step])
    noise = torch.cat(draws).double().numpy()
    for factor, fits in ((1.0, True), (2 / 3, False), (1.5, False)):
        assert (stats.kstest(noise / factor, "norm").pvalue > 1e-4) == fits
    constant = np.concatenate([draw.double().numpy() * z for draw, z in zip(draws, FALLING, strict=True)])
    assert stats.kstest(constant, "norm").pvalue < 1e-4  # it does move


def test_bounds_follow_their_schedule(tmp_path: Path) -> None:
    """The sum is that of gradients clipped at C·f_t, and a record moves it by no more, which the ledger states."""
    releases = made(tmp_path, z=1e-6, horizon=TrainingLength(STEPS), schedules=BOUND)
    factors = factors_of("max_grad_norm_schedule", BOUND.max_grad_norm, STEPS).values
    for step, factor in enumerate(factors):
        lot = 5 * rows(step).double()
        clipped = lot * (factor / lot.norm(dim=1, keepdim=True)).clamp(max=1)
        (query,) = releases.mechanism.queries
        assert query.sensitivity == pytest.approx(factor) and query.noise_std == pytest.approx(1e-6 * factor)
        torch.testing.assert_close(10 * release(releases, lot.float()).double(), clipped.sum(0), rtol=1e-4, atol=1e-4)
        moved = clipped.sum(0) - clipped[1:].sum(0)
        assert moved.norm() <= query.sensitivity * (1 + 1e-6)
    stated = [one.queries[0].sensitivity for _, one in read_ledger(tmp_path / "ledger.jsonl").releases]
    assert stated == pytest.approx(factors)


def test_the_ledger_costs_what_an_independent_accountant_says(tmp_path: Path) -> None:
    releases = made(tmp_path, z=0.8, horizon=TrainingLength(STEPS), schedules=NOISE)
    for step in range(STEPS):
        release(releases, rows(step))
        assert releases.epsilon() == pytest.approx(independent_epsilon([0.8 * f for f in FALLING[: step + 1]]), 1e-8)
    ledger = read_ledger(tmp_path / "ledger.jsonl")
    assert ledger_epsilon_of(ledger.events, 1e-4) == releases.epsilon()
    assert [one.queries[0].noise_std for _, one in ledger.releases] == pytest.approx([0.8 * f for f in FALLING])


def test_a_target_is_spent_in_the_planned_steps(tmp_path: Path) -> None:
    releases = made(tmp_path, z=None, target=2.0, horizon=TrainingLength(STEPS), schedules=NOISE)
    for step in range(STEPS):
        release(releases, rows(step))
    assert 2.0 * (1 - 1e-5) < releases.epsilon() <= 2.0
    assert releases.noise_multiplier is not None
    assert independent_epsilon([releases.noise_multiplier * f for f in FALLING]) <= 2.0
    with pytest.raises(BudgetExhausted):
        release(releases)


@pytest.mark.parametrize("schedule", ["linear:0.2", "linear:5", [1.0] * 9 + [0.01, 1.0, 1.0]])
def test_training_stops_before_the_release_that_would_exceed_the_target(tmp_path: Path, schedule: Any) -> None:
    """Whatever that costs: the last one may cost more than all before it."""
    factors = factors_of("noise_schedule", schedule, STEPS).values
    target = (independent_epsilon(factors[:9]) + independent_epsilon(factors[:10])) / 2
    releases = made(tmp_path, target=target, horizon=TrainingLength(STEPS), schedules=Schedules(schedule))
    count = 0
    while not releases.budget.exhausted:
        release(releases, rows(count))
        count += 1
    assert count == 9 and releases.epsilon() <= target


def test_a_resumed_run_goes_on_with_the_schedule(tmp_path: Path) -> None:
    both = Schedules("cosine:0.3", "linear:2")
    options: dict[str, Any] = {"horizon": TrainingLength(STEPS), "schedules": both, "target": 30.0}
    straight = made(tmp_path / "straight", **options)
    expected = [release(straight, rows(step)) for step in range(STEPS)]
    crashed = made(tmp_path / "crashed", **options)
    for step in range(5):
        release(crashed, rows(step))
    state = crashed.state_dict()
    for step in range(5, 8):
        release(crashed, rows(step))
    crashed.budget.close()
    resumed = made(tmp_path / "crashed", start=state, **{**options, "horizon": TrainingLength(STEPS, 5)})
    assert resumed.phase == 0 and resumed.budget.remaining == STEPS - 5
    for step in range(5, STEPS):
        assert torch.equal(release(resumed, rows(step)), expected[step])
    names = ("straight", "crashed")
    one, other = ((tmp_path / name / "ledger.jsonl").read_bytes() for name in names)
    assert one == other


def test_a_replay_that_differs_counts_again_at_its_own_cost(tmp_path: Path) -> None:
    options: dict[str, Any] = {"horizon": TrainingLength(STEPS), "schedules": NOISE, "target": 30.0}
    crashed = made(tmp_path, **options)
    release(crashed, rows(0))
    state = crashed.state_dict()
    for step in range(1, 4):
        release(crashed, rows(step))
    crashed.budget.close()
    resumed = made(tmp_path, start=state, **{**options, "horizon": TrainingLength(STEPS, 1)})
    with pytest.warns(UserWarning, match="differs from its record"):
        release(resumed, rows(50))
    assert resumed.phase == 1 and resumed.budget.remaining == STEPS - 2
    for step in range(2, STEPS):
        release(resumed, rows(step))
    assert len(read_ledger(tmp_path / "ledger.jsonl").releases) == 3 + STEPS


def test_other_schedules_have_other_noise(tmp_path: Path) -> None:
    """Also where the first release is the same."""
    digests = set()
    for number, schedules in enumerate((Schedules(), NOISE, BOUND, Schedules("cosine:0.25"), Schedules("linear:0.2"))):
        releases = made(tmp_path / str(number), horizon=TrainingLength(STEPS), schedules=schedules)
        digests.add(releases.mechanism.training_plan.digest)
    assert len(digests) == 5


# ------------------------------------------------------------------------------- sizes of lots


SIZES = factors_of("expected_batch_size_schedule", "linear:3", STEPS)


def test_lots_of_scheduled_sizes_are_divided_and_accounted_for_as_such(tmp_path: Path) -> None:
    releases = made(tmp_path, z=1e-6, horizon=TrainingLength(STEPS), size_factors=SIZES)
    for step in range(STEPS):
        expected = SAMPLING.expected_batch_size * SIZES.at(step)
        assert releases.mechanism.plan.denominator == pytest.approx(expected)
        lot = rows(step)
        torch.testing.assert_close(release(releases, lot), lot.sum(0) / expected, rtol=1e-4, atol=1e-4)
    rates = [one.sampling.rate for _, one in read_ledger(tmp_path / "ledger.jsonl").releases]
    assert rates == pytest.approx([SAMPLING.rate * factor for factor in SIZES.values])


def test_sizes_that_round_to_one_are_counted_as_often_as_they_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise was found for the steps of the last of them alone, so that the target was spent too early."""
    counted: list[int] = []

    def calibrate(with_noise: Callable[[float], Counter[Event]], *_: object) -> float:
        counted.append(with_noise(2.0).total())
        return 2.0

    monkeypatch.setattr(budget, "calibrate_scale", calibrate)
    plan = TrainingPlan(
        recipe=Recipe(),
        sampling=FixedSizeSampling(100, 10),
        noise=Gaussian(1.0),
        groups=(VectorGroup("all", (0,), 1.0),),
        sizes=(WIDTH,),
        size_factors=Factors((1.0, 1.01) * (STEPS // 2)),
    )
    budget.Budget(3.0, 1e-4, "rdp").calibrated(plan, TrainingLength(STEPS))
    assert counted == [STEPS]


def test_scheduled_sizes_cost_what_an_independent_accountant_says(tmp_path: Path) -> None:
    releases = made(tmp_path, z=None, target=3.0, horizon=TrainingLength(STEPS), schedules=NOISE, size_factors=SIZES)
    for step in range(STEPS):
        release(releases, rows(step))
    accountant = rdp_privacy_accountant.RdpAccountant()
    for step in range(STEPS):
        assert releases.noise_multiplier is not None
        gaussian = dp_event.GaussianDpEvent(releases.noise_multiplier * FALLING[step])
        accountant.compose(dp_event.PoissonSampledDpEvent(SAMPLING.rate * SIZES.at(step), gaussian))
    assert releases.epsilon() == pytest.approx(accountant.get_epsilon(1e-4), 1e-8)
    assert 3.0 * (1 - 1e-5) < releases.epsilon() <= 3.0


@pytest.mark.parametrize("kind", ["poisson", "fixed_size"])
def test_lots_have_their_scheduled_sizes(kind: str) -> None:
    lots = Lots(make_sampling(kind, 2000, 20), 1, "step:5@0.5")
    lots.plan(200)
    drawn = [len(lots.lot(step)) for step in range(200)]
    first, last = np.mean(drawn[:100]), np.mean(drawn[100:])
    if kind == "fixed_size":
        assert (first, last) == (20, 100)
    else:
        assert abs(first - 20) < 4 * math.sqrt(20 / 100) and abs(last - 100) < 4 * math.sqrt(100 / 100)
    lots.free()
    assert not lots.size_factors


def test_no_schedule_draws_the_lots_of_before() -> None:
    plain, constant = (Lots(make_sampling("poisson", 300, 20), 1, schedule) for schedule in (None, "constant"))
    assert not constant.plan(50)
    assert all(np.array_equal(plain.lot(step), constant.lot(step)) for step in range(50))


@pytest.mark.parametrize(
    ("kind", "size", "schedule", "words"),
    [
        ("poisson", 20, "linear:100", "gives batches of"),
        ("poisson", 20, "linear:0.01", "must hold between 1 and all 300"),
        ("full", 300, "linear:0.5", "'full' batches have one size"),
        ("shuffled", 20, "linear:0.5", "have one size"),
        ("poisson", 20, "linear:x", "expected_batch_size_schedule must be"),
        ("poisson", 20, True, "or a function, not True"),
        ("poisson", 20, 3, "or a function, not 3"),
        ("poisson", 20, {"kind": "linear"}, "or a function, not {'kind'"),
    ],
)
def test_sizes_that_no_lot_can_have(kind: str, size: int, schedule: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Lots(make_sampling(kind, 300, size), 1, schedule).plan(10)


# ------------------------------------------------------------------------------- an adaptation without statistics


@dataclass(frozen=True)
class Halving(Adaptation):
    """Bounds that follow from nothing but the number of releases."""

    def statistics(self, groups: Any, expected_records: float, noise_multiplier: float) -> tuple[Statistic, ...]:
        return ()

    def measure(self, squared_norms: Tensor, groups: Sequence[VectorGroup]) -> Tensor:
        return squared_norms.new_zeros(0)

    def next_bounds(self, groups: Sequence[VectorGroup], released: Sequence[float]) -> tuple[float, ...]:
        assert not released
        return tuple(group.max_grad_norm / 2 for group in groups)


def test_an_adaptation_without_statistics_works() -> None:
    """It was ignored."""
    groups = (VectorGroup("all", (0,), 1.0),)
    parameters = [nn.Parameter(torch.zeros(WIDTH))]
    plan = TrainingPlan(Recipe(adaptation=Halving()), PoissonSampling(100, 0.1), Gaussian(1.0), groups, (WIDTH,))
    mechanism = Mechanism(plan, parameters)
    bounds = []
    for step in range(4):
        mechanism.clear()
        bounds.append(mechanism.plan.groups[0].max_grad_norm)
        mechanism.add_noise(lambda number, step=step: (1, step))
        mechanism.post_process()
    assert bounds == [1.0, 0.5, 0.25, 0.125]
