"""Noise of one's own, and lots whose steps differ: what enters by `Noise` and `Sampling`, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from dpbench.cli import main
from dpbench.errors import BudgetExhausted, ConfigurationError, LedgerError
from dpbench.privacy.accounting.composition import LedgerCost
from dpbench.privacy.accounting.ledger import Header, Ledger, read_ledger
from dpbench.privacy.accounting.stated_plan import StatedPlan
from dpbench.privacy.budget import Budget, TrainingLength
from dpbench.privacy.mechanism.adaptive import QuantileBounds
from dpbench.privacy.mechanism.noise_process import Gaussian, Noise, Scheduled
from dpbench.privacy.mechanism.recipe import Recipe
from dpbench.privacy.mechanism.schedules import Factors
from dpbench.privacy.mechanism.training_plan import TrainingPlan
from dpbench.privacy.sampling import CyclicPoissonSampling, PoissonSampling, Sampling
from tests.support.releases import SAMPLING, WIDTH, made, release, rows


@dataclass(frozen=True)
class Rising(Noise):
    """z·(t + 1), and it does not say that it moves."""

    noise_multiplier: float
    slope: float = 1.0

    def multiplier(self, step: int) -> float:
        return self.noise_multiplier * (1 + self.slope * step)


@dataclass(frozen=True)
class Chained(Gaussian):
    """It says that its steps depend on one another."""

    independent: ClassVar[bool] = False  # type: ignore[assignment]


@dataclass(frozen=True)
class Falling(Gaussian):
    """z, then less, and it does not say that it moves."""

    def multiplier(self, step: int) -> float:
        return self.noise_multiplier * (1 if step < 2 else 0.3)


class Restated(Gaussian):
    """Says itself what holds for its own methods."""

    constant = True
    independent = True

    def multiplier(self, step: int) -> float:
        return 2 * self.noise_multiplier

    def add_(self, total: torch.Tensor, *_: Any) -> torch.Tensor:
        return total


class FallingAgain(Restated):
    """Inherits these statements, and one of the methods."""

    def multiplier(self, step: int) -> float:
        return 1.0 / (step + 1)


@dataclass(frozen=True)
class Fixed(Gaussian):
    """It goes with whole lots only."""

    def check(self, plan: TrainingPlan) -> None:
        if plan.sampling.rate > 0.5:
            raise ConfigurationError("fixed noise takes small lots: lower the rate.")


TURNS = CyclicPoissonSampling(100, 0.1, cycle_length=2)


def plan_of(noise: Noise, sampling: Sampling = SAMPLING) -> TrainingPlan:
    recipe = Recipe()
    return TrainingPlan(recipe, sampling, noise, recipe.groups(["w"], [WIDTH]), (WIDTH,))


class Lowered(Gaussian):
    """Its noise is lowered while it is used."""

    factor: ClassVar[float] = 1.0

    def multiplier(self, step: int) -> float:
        return self.noise_multiplier * self.factor


def test_noise_that_does_not_say_that_it_moves_is_asked_at_each_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    releases = made(tmp_path, make_noise=lambda z, factors: Rising(z))
    for step in range(4):
        release(releases, rows(step))
    ledger = read_ledger(tmp_path / "ledger.jsonl")
    assert ledger.damage is None
    assert [release.queries[0].noise_std for _, release in ledger.releases] == [1.0, 2.0, 3.0, 4.0]
    assert main(["account", str(tmp_path / "ledger.jsonl")]) == 0
    assert "test_noise_process.Rising, not of dpbench" in capsys.readouterr().out


def test_a_target_is_kept_where_noise_moves_and_bounds_adapt(tmp_path: Path) -> None:
    """The budget counted each release as it did the first."""
    adaptive = Recipe(adaptation=QuantileBounds(count_noise_std=50.0))
    releases = made(tmp_path, None, 4.0, adaptive, horizon=TrainingLength(6), make_noise=lambda z, factors: Falling(z))
    while not releases.budget.exhausted:
        release(releases, rows(0))
    assert releases.num_releases == 6 and 3.9 < releases.epsilon() <= 4.0


def test_noise_that_is_lowered_while_it_is_used_does_not_exceed_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases = made(tmp_path, None, 4.0, horizon=TrainingLength(6), make_noise=lambda z, factors: Lowered(z))
    for step in range(3):
        release(releases, rows(step))
    monkeypatch.setattr(Lowered, "factor", 0.3)
    release(releases, rows(3))  # planned before
    with pytest.raises(BudgetExhausted, match="less noise than"):
        release(releases, rows(4))
    assert releases.epsilon() <= 4.0 and len(read_ledger(tmp_path / "ledger.jsonl").releases) == releases.num_releases


@pytest.mark.parametrize(
    ("noise", "constant", "independent"),
    [
        (Gaussian(1.0), True, True),
        (Scheduled(1.0, Factors((1.0, 0.5))), False, True),
        (Fixed(1.0), True, True),
        (Rising(1.0), False, True),
        (Chained(1.0), True, False),
        (Restated(1.0), True, True),
        (FallingAgain(1.0), False, True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Noise) else "",
)
def test_a_process_states_what_its_own_methods_do(noise: Noise, constant: bool, independent: bool) -> None:
    assert (noise.constant, noise.independent) == (constant, independent)


def test_noise_that_says_that_it_is_constant_is_so() -> None:
    class Mistaken(Gaussian):
        constant = True

        def multiplier(self, step: int) -> float:
            return self.noise_multiplier / (step + 1)

    plan = plan_of(Mistaken(1.0))
    assert plan.constant and plan.event(5) == plan.event(0) and plan.release(5).noise_multiplier == 1.0


def test_two_processes_share_no_key() -> None:
    """The same unit noise scaled in two ways would reveal the sum."""
    processes = [Gaussian(1.0), Gaussian(2.0), Rising(1.0), Rising(1.0, 2.0), Fixed(1.0)]
    assert len({plan_of(noise).digest for noise in processes}) == len(processes)
    with pytest.raises(ConfigurationError, match="takes small lots"):
        plan_of(Fixed(1.0), PoissonSampling(100, 0.9))


@dataclass(frozen=True)
class Whitened(Chained):
    """It says how."""

    whitening: ClassVar[tuple[float, ...]] = (0.8, 0.6)  # type: ignore[assignment]


@dataclass(frozen=True)
class Louder(Chained):
    """It says coefficients by which a record moves the whitened releases by more than the bound."""

    whitening: ClassVar[tuple[float, ...]] = (0.8, 0.7)  # type: ignore[assignment]


def test_noise_that_depends_on_earlier_steps_says_how() -> None:
    """Otherwise the difference of two releases may have any cost."""
    for noise in (Chained(1.0), Louder(1.0)):
        with pytest.raises(ConfigurationError, match="without stating how, so its cost is unknown"):
            plan_of(noise, TURNS)
    with pytest.raises(ConfigurationError, match="contain a record at most once in 2 steps"):
        plan_of(Whitened(1.0), PoissonSampling(100, 0.1))
    with pytest.raises(LedgerError, match="state the process by an entry point of dpbench.stated_noises"):
        StatedPlan.from_dict(plan_of(Whitened(1.0), TURNS).to_dict())


def test_the_word_of_a_foreign_class_is_no_guarantee() -> None:
    for noise, guarantee in ((Rising(1.0), False), (Gaussian(1.0), True)):
        stated = StatedPlan.from_dict(plan_of(noise).to_dict())
        header = Header("example", "add_or_remove_one", 100, 1e-4, plan=stated)
        assert LedgerCost([Ledger([header])], "rdp").basis["guarantee"] is guarantee


def test_noise_that_moves_without_an_end() -> None:
    budget = Budget(3.0, 1e-4, "rdp")
    with pytest.raises(ConfigurationError, match=r"known length.*max_steps"):
        budget.limit(plan_of(Rising(1.0)), 0, TrainingLength())


def test_a_round_is_not_begun_anew(tmp_path: Path) -> None:
    """Without the lots of its first step, the second one of a round would cost nothing and show a record once more."""
    crashed = made(tmp_path, sampling=TURNS)
    release(crashed, rows(0))
    state = crashed.state_dict()
    crashed.budget.close()
    goes_on = made(tmp_path, sampling=TURNS, start=state)
    release(goes_on, rows(1))
    goes_on.budget.close()
    with pytest.raises(ConfigurationError, match="only at a multiple of 2"):
        made(tmp_path, z=2.0, sampling=TURNS, start={**state, "noise_multiplier": 2.0})


def test_a_sum_of_a_round_is_not_released_twice(tmp_path: Path) -> None:
    crashed = made(tmp_path, sampling=TURNS)
    state = crashed.state_dict()
    release(crashed, rows(0))
    crashed.budget.close()
    again = made(tmp_path, sampling=TURNS, start=state)
    with (
        pytest.warns(UserWarning, match="differs from its record"),
        pytest.raises(ConfigurationError, match="cannot be repeated"),
    ):
        release(again, rows(9))
    assert len(read_ledger(tmp_path / "ledger.jsonl").releases) == 1
