"""`dpbench account`: the epsilon of ledgers, one by one, together, and of the best among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dpbench.errors import ConfigurationError, LedgerError
from dpbench.harness.reports.markdown import markdown_cell
from dpbench.harness.runs.ledgers import find_ledgers, noise_of, read_run_ledger, runs_without_privacy
from dpbench.harness.runs.numbers import ABSENT, epsilon_text, membership_text, range_text, uncovered_text
from dpbench.privacy.accounting.accountants import ACCOUNTANTS
from dpbench.privacy.accounting.composition import (
    MOST_COSTS,
    LedgerCost,
    Selection,
    doubts_about,
    find_accountant,
    microbatch_epsilon,
)
from dpbench.privacy.accounting.ledger import Ledger, check_one_population, check_own_randomness
from dpbench.privacy.accounting.planning import at_population
from dpbench.privacy.accounting.tradeoff import membership_bound
from dpbench.privacy.events import effective_noise_multiplier
from dpbench.templates import render

_SHAPES = {"geometric": 1.0, "logarithmic": 0.0, "poisson": math.inf}
_DIGITS = 5  # of an ε: figures of accountants are compared with one another

Epsilons = dict[str, float | str | None]
"""Accountant → ε, None if it is infinite, or the reason why there is none."""


@dataclass(frozen=True)
class AccountingRequest:
    """Options of `dpbench account`: accountants, δ, and selection of a best run.

    Attributes:
        accountant: Names, separated by commas, or "all".
        delta: δ; None takes the runs' own.
        nominal: True to take sampling that an accountant does not cover for one that it covers.
        selection: Distribution of the number of trials of which only the best is published: a name, or the shape η of
            a negative binomial one.
        mean_trials: Mean of that distribution.
        population: Nominal number of records; None: that of the runs.
        batch_size: Nominal expected batch size, with noise scaled in proportion; None: that of the runs.
        releases: Number of releases of each run, from its first one on, that are accounted for; None: all.
    """

    accountant: str = "rdp"
    delta: float | None = None
    nominal: bool = False
    selection: str | None = None
    mean_trials: float | None = None
    population: int | None = None
    batch_size: float | None = None
    releases: int | None = None

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.population is None:
            raise ConfigurationError("--batch-size requires --population.")
        if self.releases is not None and self.releases < 1:
            raise ConfigurationError(f"--releases must be a number of releases of at least 1, not {self.releases}.")
        for name in self.accountants:
            find_accountant(name)

    @property
    def accountants(self) -> tuple[str, ...]:
        """Names of the accountants."""
        if self.accountant == "all":
            return tuple(ACCOUNTANTS)
        return tuple(word.strip() for word in self.accountant.split(","))

    @cached_property
    def distribution(self) -> Selection | None:
        """The distribution of the number of trials.

        Raises:
            ConfigurationError: Name or mean is missing or out of range.
        """
        shape = self.selection
        if shape is None and self.mean_trials is None:
            return None
        if shape is None or self.mean_trials is None:
            raise ConfigurationError("the cost of selection needs both --selection and --mean-trials.")
        try:
            eta = _SHAPES[shape] if shape in _SHAPES else float(shape)
        except ValueError:
            raise ConfigurationError(f"--selection must be {', '.join(_SHAPES)} or a number, not {shape!r}.") from None
        return Selection(eta, self.mean_trials)


@dataclass
class AccountingReport:
    """The epsilons of ledgers.

    Attributes:
        facts: Facts for JSON; None in place of infinite numbers.
        text: Text for the terminal.
        damage: Ledger → its damage; empty if all are intact.
        doubts: Warnings of a δ that is too large, or of noise that is too small, to be meaningful.
    """

    facts: dict[str, Any]
    text: str
    damage: dict[str, str]
    doubts: list[str]


def account(paths: Sequence[Path], request: AccountingRequest) -> AccountingReport:
    """Epsilon of one run, or of several on the same data.

    Args:
        paths: Ledgers, folders of runs, folders of sweeps.
        request: Accountants and δ, the releases that count, their population, and a selection of the best run.

    Raises:
        DPBenchError: A ledger is unreadable or empty, the accountant or δ does not fit it, or the ledgers do not
            compose.
    """
    ledgers = {name: read_run_ledger(path) for name, path in find_ledgers(paths).items()}
    check_one_population(ledgers)
    check_own_randomness(ledgers)
    for name, ledger in ledgers.items():
        if request.releases is not None:
            recorded = len(ledger.releases)
            if request.releases > recorded:
                raise ConfigurationError(
                    f"--releases {request.releases}: {name} has {recorded}; give that number or a smaller one."
                )
            ledgers[name] = ledger.prefix(request.releases)
        if request.population is not None:
            ledgers[name] = at_population(ledgers[name], request.population, request.batch_size)
    damage = {name: ledger.wrong for name, ledger in ledgers.items() if ledger.wrong is not None}
    if not any(ledger.releases for ledger in ledgers.values()):
        for name, wrong in damage.items():
            raise LedgerError(f"{name}: {wrong}, and no release can be read: what was published is unknown.")
        raise LedgerError(f"{', '.join(ledgers)}: no release is recorded: nothing about the data was published.")
    delta = request.delta
    if delta is None:
        deltas = sorted({ledger.header.delta for ledger in ledgers.values()})
        if len(deltas) > 1:
            raise ConfigurationError(f"the runs have different deltas ({', '.join(map(str, deltas))}): give --delta.")
        delta = deltas[0]
    facts = _facts(ledgers, request, delta, runs_without_privacy(paths))
    runs = list(ledgers.values())
    header = runs[0].header
    least_noise = min(effective_noise_multiplier(queries) for run in runs for _, queries in run.events)
    doubts = doubts_about(delta, least_noise, header.population, header.unit)
    return AccountingReport(facts, _text(facts), damage, doubts)


def _epsilons(
    ledgers: Sequence[Ledger],
    request: AccountingRequest,
    delta: float,
    selection: Selection | None = None,
) -> Epsilons:
    """ε of all runs together, or of the best of them, by each accountant; with a single one its refusal is raised."""
    alone = len(request.accountants) == 1
    values: Epsilons = {}
    for name in request.accountants:
        cost = LedgerCost(ledgers, name, request.nominal)
        try:
            if not request.nominal and not cost.covered:
                remedy = "--nominal reports the cost for sampling that it covers"
                if alone:
                    remedy += ", or use another accountant."
                raise ConfigurationError(f"{name} does not cover {', '.join(_kinds(ledgers))} sampling: {remedy}")
            value = cost.epsilon(delta, selection)
        except ConfigurationError as error:
            if alone:
                raise
            values[name] = str(error)
        else:
            values[name] = value if math.isfinite(value) else None
    return values


def _kinds(ledgers: Sequence[Ledger]) -> list[str]:
    return sorted({sampling.kind for ledger in ledgers for sampling, _ in ledger.events})


def _facts(
    ledgers: dict[str, Ledger],
    request: AccountingRequest,
    delta: float,
    unprotected: list[str],
) -> dict[str, Any]:
    """Collect the facts: the noise of one run; for several runs, those of each and their joint cost."""
    every = list(ledgers.values())
    header = every[0].header
    infinite: Epsilons = dict.fromkeys(request.accountants)
    epsilons = infinite if unprotected else _epsilons(every, request, delta)
    bases = {name: LedgerCost(every, name).basis for name in request.accountants}
    first = epsilons[request.accountants[0]]
    costs = [(event, count) for run in every for event, count in run.events.items() if not event.sampling.is_free]
    facts: dict[str, Any] = {
        "epsilon": None if isinstance(first, str) else first,  # a text is why there is none
        "epsilons": epsilons,
        "delta": delta,
        "accountant": request.accountants[0],
        "guarantee": request.population is None and all(basis["guarantee"] for basis in bases.values()),
        "bases": bases,
        "unit": header.unit,
        "neighbouring_relation": header.neighboring_relation,
        "population": header.population,
        "sampling": _kinds(every),
        "nominal_population": request.population is not None,
        "membership": None if unprotected else _membership(every, request),
        "steps": sum(len(run.releases) for run in every),
        "rounds": sum(count for _, count in costs),
        "distinct_costs": len({event for event, _ in costs}),
        "complete": all(run.wrong is None for run in every),
    }
    selection = request.distribution
    if len(every) == 1 and selection is None and not unprotected:
        return facts | _facts_of_one(every[0], bases, delta)
    runs = []
    for name, ledger in ledgers.items():
        run: dict[str, Any] = {
            "run": name,
            "steps": len(ledger.releases),
            "epsilons": _epsilons([ledger], request, delta),
            "complete": ledger.wrong is None,
        }
        if ledger.releases:
            run |= noise_of(ledger)
        runs.append(run)
    facts |= {"charged_by": "composition", "runs": runs, "without_privacy": unprotected}
    if selection is not None:
        facts["selection"] = {
            "shape": "poisson" if math.isinf(selection.shape) else selection.shape,
            "mean_trials": selection.mean_trials,
            "epsilons": infinite if unprotected else _epsilons(every, request, delta, selection),
        }
    return facts


def _membership(ledgers: Sequence[Ledger], request: AccountingRequest) -> dict[str, Any] | None:
    """Bound of all runs together on membership tests; None if no accountant covers their sampling."""
    try:
        facts = membership_bound(ledgers, request.nominal).facts()
    except ConfigurationError:
        return None
    facts["nominal"] |= request.population is not None
    return facts


def _facts_of_one(ledger: Ledger, bases: dict[str, Any], delta: float) -> dict[str, Any]:
    facts = noise_of(ledger)
    plans = [header.plan for header in ledger.headers if header.plan is not None]
    facts["own_processes"] = sorted({plan.noise.process for plan in plans if plan.noise.described is False})
    size = ledger.header.microbatch_size
    if size > 1:
        nominal = math.inf
        covering = [name for name, basis in bases.items() if not basis["nominal"]]
        if covering:
            nominal = microbatch_epsilon(ledger, delta, covering[0])
        facts["epsilon_microbatch"] = nominal if math.isfinite(nominal) else None
        facts["microbatch_size"] = size
    return facts


def _figure(value: float | str | None) -> str:
    return ABSENT if isinstance(value, str) else epsilon_text(value, significant=_DIGITS)


def _note(name: str, basis: dict[str, Any]) -> str:
    """Note on an accountant's figure; empty for a plain guarantee."""
    accountant = ACCOUNTANTS[name]
    notes = []
    if not accountant.guarantee:
        notes.append("an approximation, no bound")
    elif not basis["guarantee"] and not basis["nominal"]:
        notes.append("unproven: the noise is not a class of dpbench")
    if basis["nominal"]:
        covered = accountant.nominal.kind
        notes.append(f"nominal: computed for {covered} sampling, which was not used")
        notes.append(basis["neighbouring_relation"])
    return "; ".join(notes)


def _text(facts: dict[str, Any]) -> str:
    """Facts for people, by a template."""
    text = render(
        "account_runs.txt" if "runs" in facts else "account_run.txt",
        facts=facts,
        **facts,
        notes={name: _note(name, basis) for name, basis in facts["bases"].items()},
        most_costs=MOST_COSTS,
        figure=_figure,
        range=range_text,
        uncovered_of=uncovered_text,
        membership_of=membership_text,
        cell=markdown_cell,
    )
    return text.rstrip("\n")
