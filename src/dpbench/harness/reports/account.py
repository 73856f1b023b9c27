"""`dpbench account`: the epsilon of ledgers, one by one, together, and of the best among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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
from dpbench.privacy.accounting.stated_plan import own_process
from dpbench.privacy.accounting.tradeoff import membership_bound
from dpbench.privacy.events import Event, effective_noise_multiplier
from dpbench.templates import render

_SHAPES = {"geometric": 1.0, "logarithmic": 0.0, "poisson": math.inf}
_DIGITS = 5  # of an ε: figures of accountants are compared with one another

Epsilons = dict[str, float | str | None]
"""By accountant: ε, None where it is infinite, or why there is none."""


@dataclass(frozen=True)
class AccountingRequest:
    """Accountants, δ and selection by which ledgers are accounted for.

    Attributes:
        accountants: Names.
        delta: δ; None takes the runs' own.
        nominal: Whether lots that an accountant does not cover are taken for lots that it covers.
        selection: Distribution of the number of trials of which only the best is published.
        population: Number of records of which the runs' lots are nominally drawn; None: their own.
        lot_size: Expected number of records in these lots, with noise grown alike; None: as in the runs.
        releases: Number of releases of each run, from its first one on, that are accounted for; None: all.
    """

    accountants: tuple[str, ...] = ("rdp",)
    delta: float | None = None
    nominal: bool = False
    selection: Selection | None = None
    population: int | None = None
    lot_size: float | None = None
    releases: int | None = None

    def __post_init__(self) -> None:
        if self.lot_size is not None and self.population is None:
            raise ConfigurationError("--batch-size requires --population.")
        if self.releases is not None and self.releases < 1:
            raise ConfigurationError(f"--releases must be a number of releases from 1 on, not {self.releases}.")


@dataclass
class AccountingReport:
    """The epsilons of ledgers.

    Attributes:
        facts: For JSON; None in place of infinite numbers.
        text: For people.
        damage: What is wrong with which ledger; empty if all are intact.
        doubts: Why δ is too large to mean anything, or the noise too small.
    """

    facts: dict[str, Any]
    text: str
    damage: dict[str, str]
    doubts: list[str]


def accountant_names(words: str) -> tuple[str, ...]:
    """Names from "rdp,pld" or "all".

    Raises:
        ConfigurationError: One is unknown.
    """
    names = tuple(ACCOUNTANTS) if words == "all" else tuple(word.strip() for word in words.split(","))
    for name in names:
        find_accountant(name)
    return names


def selection_named(shape: str | None, mean_trials: float | None) -> Selection | None:
    """The distribution of the number of trials, by name or by the shape η of a negative binomial one.

    Raises:
        ConfigurationError: One of both is missing or out of range.
    """
    if shape is None and mean_trials is None:
        return None
    if shape is None or mean_trials is None:
        raise ConfigurationError("the cost of selection needs both --selection and --mean-trials.")
    try:
        eta = _SHAPES[shape] if shape in _SHAPES else float(shape)
    except ValueError:
        raise ConfigurationError(f"--selection must be {', '.join(_SHAPES)} or a number, not {shape!r}.") from None
    return Selection(eta, mean_trials)


def account(paths: Sequence[Path], request: AccountingRequest) -> AccountingReport:
    """Epsilon of one run, or of several on the same data.

    Args:
        paths: Ledgers, folders of runs, folders of sweeps.
        request: Accountants and δ; which releases count, over what population; whether only the best run is published.

    Raises:
        DPBenchError: A ledger is unreadable or empty, the accountant or δ does not fit it, or the ledgers do not
            compose.
    """
    ledgers = {name: read_run_ledger(path) for name, path in find_ledgers(paths).items()}
    check_one_population(ledgers)
    check_own_randomness(ledgers)
    for name, ledger in ledgers.items():
        if request.releases is not None:
            ledgers[name] = _first_releases(name, ledger, request.releases)
        if request.population is not None:
            ledgers[name] = at_population(ledgers[name], request.population, request.lot_size)
    damage = {name: ledger.wrong for name, ledger in ledgers.items() if ledger.wrong is not None}
    if not any(ledger.releases for ledger in ledgers.values()):
        for name, wrong in damage.items():
            raise LedgerError(f"{name}: {wrong}, and no release can be read: what was published is unknown.")
        raise LedgerError(f"{', '.join(ledgers)}: no release is recorded; nothing of the data was published.")
    delta = request.delta
    if delta is None:
        deltas = sorted({ledger.header.delta for ledger in ledgers.values()})
        if len(deltas) > 1:
            raise ConfigurationError(f"the runs aim at different deltas ({', '.join(map(str, deltas))}): give --delta.")
        delta = deltas[0]
    unprotected = runs_without_privacy(paths)
    runs = list(ledgers.values())
    if len(runs) == 1 and request.selection is None and not unprotected:
        facts = _facts_of_one(runs[0], request, delta)
        text = _text_of_one(facts, runs[0])
    else:
        facts = _facts_of_several(ledgers, request, delta, unprotected)
        text = _text_of_several(facts, runs)
    header = runs[0].header
    least_noise = min(effective_noise_multiplier(queries) for run in runs for _, queries in run.events)
    doubts = doubts_about(delta, least_noise, header.population, header.unit)
    return AccountingReport(facts, text, damage, doubts)


def _first_releases(name: str, ledger: Ledger, releases: int) -> Ledger:
    """The ledger as it was after so many releases.

    Raises:
        ConfigurationError: It has fewer.
    """
    recorded = len(ledger.releases)
    if releases > recorded:
        raise ConfigurationError(f"--releases {releases}: {name} has {recorded}; give that number or a smaller one.")
    return ledger.prefix(releases)


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
                remedy = "--nominal shows what batches that it covers would cost"
                if alone:
                    remedy += ", or use another accountant."
                raise ConfigurationError(f"{name} does not cover {', '.join(_kinds(cost))} sampling: {remedy}")
            value = cost.epsilon(delta, selection)
        except ConfigurationError as error:
            if alone:
                raise
            values[name] = str(error)
        else:
            values[name] = value if math.isfinite(value) else None
    return values


def _kinds(cost: LedgerCost) -> list[str]:
    return sorted({sampling.kind for sampling in cost.samplings})


# Facts


def _common_facts(
    ledgers: Sequence[Ledger],
    request: AccountingRequest,
    delta: float,
    epsilons: Epsilons,
) -> dict[str, Any]:
    header = ledgers[0].header
    costs = {name: LedgerCost(ledgers, name) for name in request.accountants}
    bases = {name: cost.basis for name, cost in costs.items()}
    first = epsilons[request.accountants[0]]
    return {
        "epsilon": None if isinstance(first, str) else first,  # a text is why there is none
        "delta": delta,
        "accountant": request.accountants[0],
        "guarantee": request.population is None and all(basis["guarantee"] for basis in bases.values()),
        "bases": bases,
        "unit": header.unit,
        "neighbouring_relation": header.neighboring_relation,
        "population": header.population,
        "sampling": _kinds(costs[request.accountants[0]]),
        "nominal_population": request.population is not None,
        "membership": _membership(ledgers, request),
        "steps": sum(len(ledger.releases) for ledger in ledgers),
        "complete": all(ledger.wrong is None for ledger in ledgers),
    }


def _membership(ledgers: Sequence[Ledger], request: AccountingRequest) -> dict[str, Any] | None:
    """What all runs together allow a membership test; None where no accountant covers their lots."""
    try:
        facts = membership_bound(ledgers, request.nominal).facts()
    except ConfigurationError:
        return None
    facts["nominal"] |= request.population is not None
    return facts


def _facts_of_one(ledger: Ledger, request: AccountingRequest, delta: float) -> dict[str, Any]:
    values = _epsilons([ledger], request, delta)
    facts = _common_facts([ledger], request, delta, values)
    if len(values) > 1:
        facts["epsilons"] = values
    size = ledger.header.microbatch_size
    if size > 1:
        nominal = math.inf
        for name, basis in facts["bases"].items():
            if not basis["nominal"]:
                nominal = microbatch_epsilon(ledger, delta, name)
                break
        facts["epsilon_microbatch"] = nominal if math.isfinite(nominal) else None
        facts["microbatch_size"] = size
    return facts | noise_of(ledger)


def _facts_of_several(
    ledgers: dict[str, Ledger],
    request: AccountingRequest,
    delta: float,
    unprotected: list[str],
) -> dict[str, Any]:
    runs = []
    for name, ledger in ledgers.items():
        run: dict[str, Any] = {"run": name, "steps": len(ledger.releases)}
        if ledger.releases:
            run |= noise_of(ledger)
        run["epsilons"] = _epsilons([ledger], request, delta)
        run["complete"] = ledger.wrong is None
        runs.append(run)
    every = list(ledgers.values())
    infinite: Epsilons = dict.fromkeys(request.accountants)
    together = infinite if unprotected else _epsilons(every, request, delta)
    facts = _common_facts(every, request, delta, together)
    facts["epsilons"] = together
    if unprotected:
        facts["membership"] = None
    facts["charged_by"] = "composition"
    facts["runs"] = runs
    facts["without_privacy"] = unprotected
    selection = request.selection
    if selection is not None:
        facts["selection"] = {
            "shape": "poisson" if math.isinf(selection.shape) else selection.shape,
            "mean_trials": selection.mean_trials,
            "epsilons": infinite if unprotected else _epsilons(every, request, delta, selection),
        }
    return facts


# Text


def _figure(value: float | str | None) -> str:
    return ABSENT if isinstance(value, str) else epsilon_text(value, significant=_DIGITS)


def _note(name: str, basis: dict[str, Any]) -> str:
    """What has to be said of an accountant's figure; empty of a plain guarantee."""
    accountant = ACCOUNTANTS[name]
    notes = []
    if not accountant.guarantee:
        notes.append("an approximation, no bound")
    if basis["nominal"]:
        covered = accountant.nominal.kind
        notes.append(f"nominal: computed for {covered} sampling, which was not used")
        notes.append(basis["neighbouring_relation"])
    return "; ".join(notes)


def _text(template: str, facts: dict[str, Any], ledgers: Sequence[Ledger], **more: Any) -> str:
    """Facts for people, by a template."""
    distinct: set[Event] = set()
    for ledger in ledgers:
        for event in ledger.events:
            if not event.sampling.is_free:
                distinct.add(event)
    text = render(
        template,
        facts=facts,
        **facts,
        **more,
        notes={name: _note(name, basis) for name, basis in facts["bases"].items()},
        distinct_costs=len(distinct),
        most_costs=MOST_COSTS,
        figure=_figure,
        range=range_text,
        uncovered_of=uncovered_text,
        membership_of=membership_text,
    )
    return text.rstrip("\n")


def _text_of_one(facts: dict[str, Any], ledger: Ledger) -> str:
    processes = set()
    for header in ledger.headers:
        process = None if header.plan is None else own_process(header.plan.noise.to_dict())
        if process is not None:
            processes.add(str(process))
    return _text(
        "account_run.txt",
        facts,
        [ledger],
        damaged=bool(ledger.damage),
        cycle=max(event.sampling.cycle for event in ledger.events),
        rounds=sum(count for event, count in ledger.events.items() if not event.sampling.is_free),
        own_processes=sorted(processes),
    )


def _text_of_several(facts: dict[str, Any], ledgers: Sequence[Ledger]) -> str:
    reasons = dict(facts["epsilons"])
    if "selection" in facts:
        reasons |= facts["selection"]["epsilons"]
    return _text(
        "account_runs.txt",
        facts,
        ledgers,
        reasons={name: why for name, why in reasons.items() if isinstance(why, str)},
        cell=markdown_cell,
    )
