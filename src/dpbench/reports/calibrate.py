"""`dpbench calibrate`: a budget solved backwards, with its neighborhood, as text or JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dpbench.errors import ConfigurationError, LedgerError
from dpbench.privacy.accounting.accountants import ACCOUNTANTS
from dpbench.privacy.accounting.calibration import TrainingSetting, missing_in, solved
from dpbench.privacy.accounting.ledger import Ledger, check_one_population
from dpbench.privacy.events import Event, SumQuery, effective_noise_multiplier, record_changes
from dpbench.privacy.sampling import PoissonSampling, find_scheme
from dpbench.reports.nominal import sampling_at
from dpbench.runs.ledgers import find_ledgers, read_run_ledger
from dpbench.templates import render

FACTORS = (0.5, 0.8, 1.0, 1.25, 2.0)
_MOST_QUERIES = 12  # shown


@dataclass(frozen=True)
class QueryPattern:
    """Queries that are released from a lot beside one clipped gradient.

    Attributes:
        groups: Number of vector groups with equal bounds' share of the noise.
        statistics: Noise multiplier (noise over sensitivity) of counts, norms and metrics, by name.
        microbatch_size: μ; above 1 every neighbor moves a sum by two bounds.
        queries: Of an earlier run; scaled as a whole.
        elsewhere: Whether that run had another population.

    Raises:
        ConfigurationError: A number is below 1.
    """

    groups: int = 1
    statistics: Mapping[str, float] = field(default_factory=dict)
    microbatch_size: int = 1
    queries: tuple[SumQuery, ...] = ()
    elsewhere: bool = False

    def __post_init__(self) -> None:
        for name in ("groups", "microbatch_size"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1, not {getattr(self, name)}.")

    def facts(self, noise_multiplier: float) -> dict[str, Any]:
        """How the noise of the whole release is shared among its queries.

        Raises:
            ConfigurationError: The statistics alone cost more than the release may.
        """
        facts: dict[str, Any] = {}
        if self.groups > 1 or self.statistics:
            from dpbench.privacy.mechanism.clipping import VectorGroup  # brings torch
            from dpbench.privacy.mechanism.plan import ReleasePlan, Statistic

            statistics = tuple(Statistic(name, 1, 1.0, z) for name, z in self.statistics.items())
            gradient = (VectorGroup("gradient", (0,), 1.0),)
            plan = ReleasePlan(PoissonSampling(1, 1.0), gradient, noise_multiplier, (1,), statistics)
            facts["gradient_noise_multiplier"] = plan.gradient_multiplier
            facts["groups"] = self.groups
            facts["group_noise_multiplier"] = plan.gradient_multiplier * math.sqrt(self.groups)
            facts["statistics"] = dict(self.statistics)
        if self.queries:
            factor = noise_multiplier / effective_noise_multiplier(self.queries)
            facts["queries"] = [
                {"name": query.name, "sensitivity": query.sensitivity, "noise_std": query.noise_std * factor}
                for query in self.queries
            ]
        return facts


def read_one_ledger(path: Path) -> Ledger:
    """The intact ledger of one run.

    Raises:
        LedgerError: It is damaged, empty, or there are several.
    """
    places = list(find_ledgers([path]).values())
    if len(places) != 1:
        raise LedgerError(f"{path} holds {len(places)} ledgers: name one run.")
    ledger = read_run_ledger(places[0])
    check_one_population({str(path): ledger})
    if ledger.damage is not None:
        raise LedgerError(f"{path}: {ledger.damage}; what it cost is known only from below.")
    if ledger.doubt is not None:
        raise LedgerError(f"{path}: {ledger.doubt}; what it cost is not known. Restore the ledger.")
    if not ledger.releases:
        raise LedgerError(f"{path}: no release is recorded.")
    return ledger


@dataclass(frozen=True)
class TrainingValues:
    """Values of a training that a user gives; None is solved for, or comes from a run.

    Attributes:
        noise_multiplier: Noise over the sensitivity of the sum.
        sample_rate: Probability of a record to be in a lot.
        batch_size: The same times the population; not both.
        population: Number of records.
        steps: Number of lots.
        epochs: The same in passes over the data; not both.
        epsilon: ε.
        delta: δ.
        sampling: How lots are drawn, see `find_scheme`.
    """

    noise_multiplier: float | None = None
    sample_rate: float | None = None
    batch_size: float | None = None
    population: int | None = None
    steps: int | None = None
    epochs: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    sampling: str | None = None

    def setting(self, spent: Mapping[Event, int]) -> TrainingSetting:
        """The setting that accountants take, after what was spent before.

        Raises:
            ConfigurationError: Two values say the same, or one is out of range.
        """
        return TrainingSetting(
            noise_multiplier=self.noise_multiplier,
            sample_rate=self._rate(),
            steps=self.steps,
            epochs=self.epochs,
            epsilon=self.epsilon,
            delta=self.delta,
            sampling=PoissonSampling.kind if self.sampling is None else find_scheme(self.sampling).kind,
            population=self.population,
            spent=spent,
        )

    def _rate(self) -> float | None:
        for name, other in (("sample_rate", "batch_size"), ("steps", "epochs")):
            if getattr(self, name) is not None and getattr(self, other) is not None:
                raise ConfigurationError(f"give --{name.replace('_', '-')} or --{other.replace('_', '-')}, not both.")
        if self.batch_size is None:
            return self.sample_rate
        if self.population is None:
            raise ConfigurationError("--batch-size needs --population: the sample rate is one over the other.")
        if not 0 < self.batch_size <= self.population:
            raise ConfigurationError(
                f"--batch-size must lie between 1 and the population, {self.population}, not {self.batch_size:g}."
            )
        return self.batch_size / self.population


def request(
    given: TrainingValues,
    *,
    groups: int = 1,
    statistics: Sequence[str] = (),
    microbatch_size: int | None = None,
    ledger: Path | None = None,
    like: Path | None = None,
) -> tuple[TrainingSetting, QueryPattern]:
    """The setting that is to be solved, and the queries of its releases.

    With a run, what is not given comes from its last release, as long as one value is left to solve for.

    Args:
        given: Values of the training.
        groups: Number of vector groups.
        statistics: "NAME=Z" each: noise multipliers of counts, norms and metrics.
        microbatch_size: μ; None takes the run's, else 1.
        ledger: A run to go on with: what it spent counts.
        like: A run of which only the queries are taken; with another population, a plan for that one.

    Raises:
        LedgerError: The run's ledger is damaged or empty.
        ConfigurationError: Values contradict each other or the run.
    """
    source = ledger or like
    if source is None:
        size = 1 if microbatch_size is None else microbatch_size
        return given.setting({}), QueryPattern(groups, _statistics(statistics), size)
    run = read_one_ledger(source)
    last = run.releases[-1][1]
    _ = last.sampling.relation  # refuses what no accountant covers
    elsewhere = like is not None and given.population not in (None, last.sampling.population)
    if not elsewhere:
        _same(source, "population", given.population, last.sampling.population)
    named = None if given.sampling is None else find_scheme(given.sampling).kind
    _same(source, "sampling", named, last.sampling.kind)
    if groups > 1 or statistics:
        raise ConfigurationError(f"--groups and --statistic describe the queries, which {source} has already.")
    _same(source, "microbatch_size", microbatch_size, run.header.microbatch_size)
    sampling = last.sampling
    if elsewhere and given.population is not None:
        sampling = sampling_at(sampling, given.population, given.batch_size)
    setting = replace(given, population=sampling.population, sampling=sampling.kind).setting(
        run.events if ledger is not None else {}
    )
    of_run = {
        "delta": run.header.delta,
        "sample_rate": sampling.rate,
        "noise_multiplier": effective_noise_multiplier(last.queries),
    }
    for name, value in of_run.items():
        if getattr(setting, name) is None and len(missing_in(setting)) > 1:
            setting = replace(setting, **{name: value})  # type: ignore[arg-type]
    return setting, QueryPattern(microbatch_size=run.header.microbatch_size, queries=last.queries, elsewhere=elsewhere)


def _same(source: Path, name: str, given: object, recorded: object) -> None:
    if given is not None and given != recorded:
        raise ConfigurationError(f"{source} has {name} {recorded}, not {given}: leave --{name.replace('_', '-')} out.")


def _statistics(words: Sequence[str]) -> dict[str, float]:
    values: dict[str, float] = {}
    for word in words:
        name, _, number = word.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not 1e-10 <= value <= 1e10 or name in values or not name:
            raise ConfigurationError(f"--statistic must be NAME=Z, such as counts=20, each name once, not {word!r}.")
        values[name] = value
    return values


def neighborhood(setting: TrainingSetting, accountant: str) -> dict[str, list[dict[str, float | None]]]:
    """Epsilon if one value of a solved setting changes by some factors; None where there is none."""
    assert setting.noise_multiplier is not None and setting.sample_rate is not None and setting.steps is not None
    values = {
        "noise_multiplier": setting.noise_multiplier,
        "sample_rate": setting.sample_rate,
        "steps": float(setting.steps),
    }
    table: dict[str, list[dict[str, float | None]]] = {}
    for name, value in values.items():
        table[name] = []
        for factor in FACTORS:
            changed: float = value * factor
            if name == "steps":
                changed = max(1, round(changed))
            if name == "sample_rate" and setting.scheme.whole_lots and setting.population is not None:
                changed = max(1, round(changed * setting.population)) / setting.population
            table[name].append(
                {"factor": factor, name: changed, "epsilon": _epsilon(setting, name, changed, accountant)}
            )
    return table


def _epsilon(setting: TrainingSetting, name: str, value: float, accountant: str) -> float | None:
    try:
        reached = replace(setting, **{name: int(value) if name == "steps" else value}).epsilon_by(accountant)  # type: ignore[arg-type]
    except ConfigurationError:  # a rate above 1, or too large for pld
        return None
    return reached if math.isfinite(reached) else None


def calibrate(setting: TrainingSetting, pattern: QueryPattern, accountant: str) -> dict[str, Any]:
    """Solve for the missing value; the facts that `dpbench calibrate` prints.

    Args:
        setting: Lacks one value.
        pattern: Of the queries.
        accountant: Name.

    Raises:
        DPBenchError: See `solved`.
    """
    answer = solved(setting, accountant)
    z = answer.noise_multiplier
    rate = answer.sample_rate
    steps = answer.steps
    assert z is not None and rate is not None and steps is not None
    sampling = answer.event.sampling
    facts: dict[str, Any] = {
        "solved_for": missing_in(setting)[0],
        "epsilon": answer.epsilon,
        "epsilon_reached": answer.epsilon_by(accountant),
        "delta": answer.delta,
        "noise_multiplier": z,
        "sample_rate": rate,
        "steps": steps,
        "epochs": steps * rate,
        "sampling": answer.sampling,
        "neighbouring_relation": sampling.neighboring_relation,
        "accountant": accountant,
        "guarantee": ACCOUNTANTS[accountant].guarantee,
    }
    if answer.population is not None:
        facts |= {"population": answer.population, "batch_size": sampling.expected_batch_size}
    facts["nominal_population"] = pattern.elsewhere
    if answer.spent:
        facts |= {"steps_before": sum(answer.spent.values())}
    facts["noise_std_over_max_grad_norm"] = z * record_changes(sampling, pattern.microbatch_size)
    facts |= pattern.facts(z)
    facts["neighbourhood"] = neighborhood(answer, accountant)
    return facts


def calibration_text(facts: dict[str, Any]) -> str:
    """Format the facts of a calibration for the terminal."""
    title = ACCOUNTANTS[facts["accountant"]].title
    text = render("calibrate.txt", **facts, accountant_title=title, factors=FACTORS, most_queries=_MOST_QUERIES)
    return text.rstrip("\n")
