"""The cost of trials before the first one: their releases, the noise for an ε, and that of looking at all of them."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl

from dpbench.capabilities.tune.space import Space, is_free
from dpbench.capabilities.tune.stated import BestOfTrials, Releases, Setting
from dpbench.capabilities.tune.trials import chance_of_at_most
from dpbench.data.module import PrivateDataModule
from dpbench.errors import ConfigurationError
from dpbench.harness.run.build import plain
from dpbench.harness.run.command_line import without_hydra
from dpbench.harness.run.jobs import check_run
from dpbench.harness.run.train import train
from dpbench.harness.runs.record import is_audited
from dpbench.privacy.accounting.accountants import ACCOUNTANTS, DEFAULT_ORDERS, RenyiAccountant
from dpbench.privacy.accounting.composition import Selection, check_delta, epsilon
from dpbench.privacy.accounting.stated_plan import StatedPlan
from dpbench.privacy.events import Event, SumQuery, effective_noise_multiplier
from dpbench.privacy.sampling import Sampling
from dpbench.strategies import PrivateStrategy

_DIGITS = 4  # of noise multipliers
_ROUNDING = 1e-9
_MOST_NOISE = 1e4
_OF_BATCHES = {"expected_batch_size", "expected_batch_size_schedule", "sampling"}
_QUANTILES = (0.1, 0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Request:
    """All that determines a tuning; public, and fixed before its first trial.

    Attributes:
        words: Options of the trials, some of them with several values.
        epsilon: Total ε.
        delta: δ.
        accountant: Accountant of ε, "pld" or "rdp".
        trials: Mean number of trials.
        shape: Shape of the negative binomial distribution of their number; None: Poisson.
        score: Name of the score.
        score_bound: Loss at which the score is 0.
        is_public: True if the score is measured on public records.
        config_dir: Folder of further configuration, with classes next to it; None: there is none.
    """

    words: tuple[str, ...]
    epsilon: float
    delta: float
    accountant: str
    trials: float
    shape: float | None
    score: str
    score_bound: float | None
    is_public: bool
    config_dir: str | None = None

    def __post_init__(self) -> None:
        check_delta(self.delta)
        if not 0 < self.epsilon < math.inf:
            raise ConfigurationError(f"--epsilon must be a positive number, not {self.epsilon}.")
        if self.score_bound is not None and not 0 < self.score_bound < math.inf:
            raise ConfigurationError(f"--score-bound must be a positive number, not {self.score_bound}.")
        _ = self.selection

    @property
    def selection(self) -> Selection:
        """The distribution of the number of trials."""
        return Selection(math.inf if self.shape is None else self.shape, self.trials)


@dataclass(frozen=True)
class LoadedData:
    """Data sets of the first trial, which others share if they differ in nothing but their batches.

    Attributes:
        options: Options of the data.
        module: Their data module.
    """

    options: Mapping[str, Any]
    module: PrivateDataModule[Any]

    def of(self, config: Mapping[str, Any]) -> PrivateDataModule[Any] | None:
        """The module whose data sets a trial shares; None: it loads its own."""
        for name in ("train_dataloader", "sampling"):
            if getattr(type(self.module), name) is not getattr(PrivateDataModule, name):
                return None  # a user's own batches may depend on other options
        return self.module if _without_batches(config["data"]) == _without_batches(self.options) else None


def _without_batches(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in _OF_BATCHES}


class PlanReady(Exception):
    """Ends a training before its first batch, when its plan is known."""


class PlanReader(pl.Callback):
    """Reads the releases of a training before its first batch.

    Args:
        expected: Releases that the ledger states, which are compared; None: the training ends here, with `PlanReady`.

    Attributes:
        events: Releases of the whole training, with their counts.
    """

    def __init__(self, expected: Setting | None = None) -> None:
        self.events: Counter[Event] = Counter()
        self._expected = expected

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read them from the strategy, which has fixed its plan."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        strategies = [callback for callback in callbacks if isinstance(callback, PrivateStrategy) and callback.private]
        if not strategies:
            raise ConfigurationError("a setting trains without privacy: remove its strategy from the list.")
        (strategy,) = strategies
        steps = trainer.estimated_stepping_batches
        if not math.isfinite(steps):
            raise ConfigurationError("the training has no end: set trainer.max_steps.")
        stated = StatedPlan.from_dict(strategy.mechanism.training_plan.to_dict())
        self.events = stated.events(int(steps))
        if self._expected is None:
            raise PlanReady
        if not _is_stated(self.events, Counter(self._expected.events)):
            raise ConfigurationError("a trial's releases are not those that the ledger states.")


def _is_stated(events: Counter[Event], stated: Counter[Event]) -> bool:
    """Return whether releases are among those that were stated: by increasing noise, each has as much as its own."""
    for sampling in {event.sampling for event in events}:
        made = _noise_multipliers(events, sampling)
        allowed = _noise_multipliers(stated, sampling)
        pairs = zip(made, allowed, strict=False)
        if len(made) > len(allowed) or any(z < planned * (1 - _ROUNDING) for z, planned in pairs):
            return False
    return True


def _noise_multipliers(events: Counter[Event], sampling: Sampling) -> list[float]:
    """Noise multipliers of all releases on batches of a sampling, increasing."""
    return sorted(
        effective_noise_multiplier(event.queries) for event in events.elements() if event.sampling == sampling
    )


@dataclass(frozen=True)
class Planned:
    """Releases of trials at a noise multiplier of 1.

    Attributes:
        words: Own options of the trials.
        releases: Their releases.
    """

    words: tuple[str, ...]
    releases: tuple[Releases, ...]

    def at(self, noise_multiplier: float, free: Sequence[str] = ()) -> Setting:
        """The setting with a noise multiplier."""
        releases = tuple(
            part._replace(noise_multiplier=part.noise_multiplier * noise_multiplier) for part in self.releases
        )
        return Setting((*self.words, *free, f"strategy.noise_multiplier={noise_multiplier:g}"), releases)


def compose(words: Sequence[str]) -> dict[str, Any]:
    """Compose and check the configuration of a trial.

    Raises:
        ConfigurationError: See `check_run`.
    """
    own = ["run.name=tuned", "run.group=tuned", "logger=none", "++trainer.limit_val_batches=0", "strategy.secure=true"]
    config: dict[str, Any] = plain(without_hydra(check_run([*words, *own])))
    data = config["data"]
    inserted = data.get("inserted")
    uncounted = {
        "after": config.get("after"),
        "audit": is_audited(config),
        "callbacks": {name for name, options in config["callbacks"].items() if options is not None},
        "diagnostics": {name for name, value in config["diagnostics"].items() if value is not None},
        "data.membership": data.get("membership"),
        "data.inserted": inserted.get("records") if isinstance(inserted, dict) else inserted,
        "run.max_time": config["run"].get("max_time"),
    }
    for name, value in uncounted.items():
        if value:
            raise ConfigurationError(f"dpbench tune does not account for {name}: remove it from the experiment.")
    return config


def swept_by(words: Sequence[str]) -> list[str]:
    """Lists and intervals of an experiment: its `hydra.sweeper.params`.

    Args:
        words: Options that are not drawn.
    """
    params = check_run([*words, "strategy.noise_multiplier=1.0"]).hydra.sweeper.get("params") or {}
    return [f"{key}={value}" for key, value in params.items()]


def planned(space: Space, delta: float, loaded: LoadedData) -> list[Planned]:
    """Read the releases of all trials that may differ in cost, by beginning each of them and ending before a batch.

    Args:
        space: Settings of the trials.
        delta: δ.
        loaded: Data sets that trials share.

    Raises:
        ConfigurationError: A setting is refused, or its releases cannot be accounted for in a tuning.
    """
    plans = []
    first = [option.draw(np.random.default_rng(0)) for option in space.options if is_free(option.key)]
    for words in space.plans():
        config = compose([*space.words, *words, *first, "strategy.noise_multiplier=1.0", f"strategy.delta={delta!r}"])
        reader = PlanReader()
        with tempfile.TemporaryDirectory() as folder, suppress(PlanReady):
            train(config, Path(folder) / "plan", [reader], show=False, loaded=loaded.of(config))
        releases = []
        for event, count in reader.events.items():
            is_other = event.sampling.neighboring_relation != BestOfTrials.neighboring_relation
            if is_other or event.sampling.cycle > 1:
                raise ConfigurationError(
                    f"{event.sampling.words[0]} batches: a tuning is accounted for Poisson sampling; set "
                    "data.sampling=poisson."
                )
            releases.append(Releases(event.sampling, effective_noise_multiplier(event.queries), count))
        plans.append(Planned(words, tuple(releases)))
    return plans


def calibrated(request: Request, plans: Sequence[Planned], free: tuple[str, ...] = ()) -> BestOfTrials:
    """Choose the noise of all trials, so that the best of them costs at most ε.

    Each setting has its noise as if it were the only one, times a factor for all. The noise on the score is the least
    whose divergence is below that of a training at each order: it costs nothing.

    Args:
        request: ε, the number of trials, and the score.
        plans: Releases of trials.
        free: Options that are drawn and cost nothing, for the statement.

    Raises:
        ConfigurationError: No noise suffices.
    """

    def cost_alone(plan: Planned, noise_multiplier: float) -> float:
        return _cost(_stated(request, [plan.at(_rounded_up(noise_multiplier))]), "rdp", request.delta)

    alone = [_solve(partial(cost_alone, plan), request.epsilon) for plan in plans]

    def stated(factor: float) -> BestOfTrials:
        pairs = zip(plans, alone, strict=True)
        return _stated(request, [plan.at(_rounded_up(factor * z), free) for plan, z in pairs])

    factor = _solve(lambda factor: _cost(stated(factor), request.accountant, request.delta), request.epsilon)
    return stated(factor)


def _stated(request: Request, settings: Sequence[Setting]) -> BestOfTrials:
    sampling = settings[0].releases[0].sampling
    best = BestOfTrials(
        population=sampling.population,
        unit=sampling.unit,
        mean_trials=request.trials,
        shape=request.shape,
        settings=tuple(settings),
        score=request.score,
        score_noise_multiplier=None,
    )
    if request.is_public:
        return best
    noise = np.sqrt(np.asarray(DEFAULT_ORDERS) / (2 * best.trial_curve(DEFAULT_ORDERS)))
    return replace(best, score_noise_multiplier=_rounded_up(float(noise.max())))


def _cost(best: BestOfTrials, accountant: str, delta: float) -> float:
    return epsilon({Event(best, (SumQuery(best.kind, 1.0, 1.0),)): 1}, delta, accountant)


def _solve(cost: Callable[[float], float], target: float) -> float:
    """The least number, to four digits, with at most a cost that falls with it."""
    low = high = 1.0
    while cost(high) > target:
        low, high = high, 1.2 * high
        if high > _MOST_NOISE:
            raise ConfigurationError(
                f"no noise gives epsilon={target:g} to the best of so many trials: lower --trials or raise --epsilon."
            )
    while low == high or cost(low) <= target:
        low, high = low / 1.2, low
    while high / low > 1 + 10.0**-_DIGITS:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if cost(middle) <= target else (middle, high)
    return high


def _rounded_up(number: float) -> float:
    unit = 10.0 ** (math.floor(math.log10(number)) - _DIGITS + 1)
    return float(f"{math.ceil(number / unit - _ROUNDING) * unit:.{_DIGITS}g}")


def costs_of_looking(best: BestOfTrials, delta: float) -> list[tuple[int, float, float]]:
    """Cost of seeing all trials: rows of (number, probability of at most so many, ε of all of them).

    Args:
        best: Statement of the tuning.
        delta: δ.
    """
    accountant = ACCOUNTANTS["rdp"]
    assert isinstance(accountant, RenyiAccountant)
    trial = best.trial_curve(accountant.orders)
    rows: list[tuple[int, float, float]] = []
    number = 1
    for quantile in _QUANTILES:
        while chance_of_at_most(best.selection, number) < quantile:
            number += 1
        if not rows or rows[-1][0] < number:
            of_all = float(accountant.epsilon_by_order(number * trial, delta).min())
            rows.append((number, chance_of_at_most(best.selection, number), of_all))
    return rows
