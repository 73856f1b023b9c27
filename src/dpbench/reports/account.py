"""`dpbench account`: the epsilon of ledgers, one by one, together, and of the best among them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpbench.errors import ConfigurationError, LedgerError
from dpbench.privacy.accounting.accountants import ACCOUNTANTS
from dpbench.privacy.accounting.composition import (
    MOST_COSTS,
    Selection,
    doubt_about_delta,
    epsilon,
    find_accountant,
    microbatch_epsilon,
    nominal_events,
    selection_epsilon,
)
from dpbench.privacy.accounting.ledger import Ledger, check_one_population, check_own_randomness
from dpbench.privacy.accounting.stated_plan import own_process
from dpbench.privacy.events import Event
from dpbench.privacy.sampling import Sampling
from dpbench.reports.nominal import at_population
from dpbench.runs.ledgers import find_ledgers, noise_of, read_run_ledger, runs_without_privacy
from dpbench.runs.numbers import ABSENT, epsilon_text, range_text, uncovered_text
from dpbench.templates import render

_SHAPES = {"geometric": 1.0, "logarithmic": 0.0, "poisson": math.inf}


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
            raise ConfigurationError("--batch-size needs --population: lots of another size are of other records.")
        if self.releases is not None and self.releases < 1:
            raise ConfigurationError(f"--releases must be a number of releases from 1 on, not {self.releases}.")


@dataclass
class AccountingReport:
    """The epsilons of ledgers.

    Attributes:
        facts: For JSON; None in place of infinite numbers.
        text: For people.
        damage: What is wrong with which ledger; empty if all are intact.
        doubt: None, or why δ is too large to mean anything.
        ledgers: By name, in the order of the runs.
    """

    facts: dict[str, Any]
    text: str
    damage: dict[str, str]
    doubt: str | None
    ledgers: dict[str, Ledger] = field(repr=False)


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
        return Selection(_SHAPES[shape] if shape in _SHAPES else float(shape), mean_trials)
    except ValueError as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"--selection must be {', '.join(_SHAPES)} or a number, not {shape!r}.") from None


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
    if not any(ledger.releases for ledger in ledgers.values()):
        if broken := next((f"{name}: {ledger.wrong}" for name, ledger in ledgers.items() if ledger.wrong), None):
            raise LedgerError(f"{broken}, and no release can be read: what was published is unknown.")
        raise LedgerError(f"{', '.join(ledgers)}: no release is recorded; nothing of the data was published.")
    deltas = {ledger.header.delta for ledger in ledgers.values()}
    if request.delta is None and len(deltas) > 1:
        raise ConfigurationError(
            f"the runs aim at different deltas ({', '.join(map(str, sorted(deltas)))}): give --delta."
        )
    delta = deltas.pop() if request.delta is None else request.delta
    damage = {name: ledger.wrong for name, ledger in ledgers.items() if ledger.wrong is not None}
    header = next(iter(ledgers.values())).header
    doubt = doubt_about_delta(delta, header.population, header.unit)
    unprotected = runs_without_privacy(paths)
    if len(ledgers) == 1 and request.selection is None and not unprotected:
        (ledger,) = ledgers.values()
        facts = _facts_of_one(ledger, request, delta)
        return AccountingReport(facts, _text_of_one(facts, ledger), damage, doubt, ledgers)
    facts = _facts_of_several(ledgers, request, delta, unprotected)
    return AccountingReport(facts, _text_of_several(facts, list(ledgers.values())), damage, doubt, ledgers)


def _first_releases(name: str, ledger: Ledger, releases: int) -> Ledger:
    """The ledger as it was after so many releases.

    Raises:
        ConfigurationError: It has fewer.
    """
    recorded = len(ledger.releases)
    if releases > recorded:
        raise ConfigurationError(f"--releases {releases}: {name} has {recorded}; give that number or a smaller one.")
    return ledger.prefix(releases)


def epsilons(
    runs: Sequence[Ledger], request: AccountingRequest, delta: float, select: bool = False
) -> dict[str, float | str | None]:
    """By accountant: ε of all runs together (or of the best of them), None if infinite, or why there is none."""
    values: dict[str, float | str | None] = {}
    for name in request.accountants:
        if not request.nominal and _is_nominal(runs, name):
            kinds = ", ".join(_kinds(runs))
            values[name] = (
                f"{name} does not cover {kinds} sampling: --nominal shows what lots that it covers would cost"
            )
            if len(request.accountants) == 1:
                raise ConfigurationError(f"{values[name]}, or use another accountant.")
            continue
        try:
            events = [_events(run, name, request.nominal) for run in runs]
            if select and request.selection is not None:
                value = selection_epsilon(events, request.selection, delta, name)
            else:
                value = epsilon(sum(events, Counter[Event]()), delta, name)
        except ConfigurationError as error:
            if len(request.accountants) == 1:
                raise
            values[name] = str(error)
        else:
            values[name] = value if math.isfinite(value) else None
    return values


def _events(ledger: Ledger, accountant: str, nominal: bool) -> Counter[Event]:
    size = ledger.header.microbatch_size
    return nominal_events(ledger.events, accountant, size) if nominal else ledger.events


def _samplings(ledgers: Sequence[Ledger]) -> set[Sampling]:
    return {event.sampling for ledger in ledgers for event in ledger.events}


def _kinds(ledgers: Sequence[Ledger]) -> list[str]:
    return sorted({sampling.kind for sampling in _samplings(ledgers)})


def _is_nominal(ledgers: Sequence[Ledger], accountant: str) -> bool:
    return not all(map(ACCOUNTANTS[accountant].covers, _samplings(ledgers)))


# Facts


def _basis(ledgers: Sequence[Ledger], accountant: str) -> dict[str, Any]:
    """Say whether an accountant's figure is a guarantee, an approximation or nominal, and for which neighbors."""
    nominal = _is_nominal(ledgers, accountant)
    by = ACCOUNTANTS[accountant]
    relation = by.nominal.neighboring_relation if nominal else ledgers[0].header.neighboring_relation
    return {"guarantee": by.guarantee and not nominal, "nominal": nominal, "neighbouring_relation": relation}


def _common_facts(ledgers: Sequence[Ledger], request: AccountingRequest, delta: float) -> dict[str, Any]:
    header = ledgers[0].header
    bases = {name: _basis(ledgers, name) for name in request.accountants}
    return {
        "delta": delta,
        "accountant": request.accountants[0],
        "guarantee": request.population is None and all(basis["guarantee"] for basis in bases.values()),
        "bases": bases,
        "unit": header.unit,
        "neighbouring_relation": header.neighboring_relation,
        "population": header.population,
        "sampling": _kinds(ledgers),
        "nominal_population": request.population is not None,
        "steps": sum(len(ledger.releases) for ledger in ledgers),
        "complete": all(ledger.wrong is None for ledger in ledgers),
    }


def _facts_of_one(ledger: Ledger, request: AccountingRequest, delta: float) -> dict[str, Any]:
    values = epsilons([ledger], request, delta)
    size = ledger.header.microbatch_size
    facts: dict[str, Any] = {"epsilon": _number(values[request.accountants[0]])}
    if len(values) > 1:
        facts["epsilons"] = values
    if size > 1:
        covering = [name for name in request.accountants if not _is_nominal([ledger], name)]
        nominal = microbatch_epsilon(ledger, delta, covering[0]) if covering else math.inf
        facts["epsilon_microbatch"] = nominal if math.isfinite(nominal) else None
        facts["microbatch_size"] = size
    return facts | _common_facts([ledger], request, delta) | noise_of(ledger)


def _facts_of_several(
    ledgers: dict[str, Ledger], request: AccountingRequest, delta: float, unprotected: list[str]
) -> dict[str, Any]:
    runs = []
    for name, ledger in ledgers.items():
        run: dict[str, Any] = {"run": name, "steps": len(ledger.releases)}
        if ledger.releases:
            run |= noise_of(ledger)
        runs.append(run | {"epsilons": epsilons([ledger], request, delta), "complete": ledger.wrong is None})
    every = list(ledgers.values())
    infinite: dict[str, float | str | None] = dict.fromkeys(request.accountants)
    together = infinite if unprotected else epsilons(every, request, delta)
    facts: dict[str, Any] = {
        "epsilon": _number(together[request.accountants[0]]),
        "epsilons": together,
        "charged_by": "composition",
        **_common_facts(every, request, delta),
        "runs": runs,
        "without_privacy": unprotected,
    }
    selection = request.selection
    if selection is not None:
        facts["selection"] = {
            "shape": "poisson" if math.isinf(selection.shape) else selection.shape,
            "mean_trials": selection.mean_trials,
            "epsilons": infinite if unprotected else epsilons(every, request, delta, select=True),
        }
    return facts


def _number(value: float | str | None) -> float | None:
    """Without the reason why there is none."""
    return None if isinstance(value, str) else value


# Text


def _figure(value: float | str | None) -> str:
    """Five digits in all: figures of accountants are compared with one another."""
    return ABSENT if isinstance(value, str) else epsilon_text(value, significant=5)


def _note(basis: dict[str, Any], accountant: str) -> str:
    notes = [] if ACCOUNTANTS[accountant].guarantee else ["an approximation, no bound"]
    if basis["nominal"]:
        covered = ACCOUNTANTS[accountant].nominal.kind
        relation = basis["neighbouring_relation"]
        notes.append(f"nominal: as if lots had been drawn by {covered} sampling, which they were not; {relation}")
    return "; ".join(notes)


def _text(template: str, facts: dict[str, Any], ledgers: Sequence[Ledger], **more: Any) -> str:
    """Facts for people, by a template."""
    costs = len({event for ledger in ledgers for event in ledger.events})
    text = render(
        template,
        **facts,
        **more,
        notes={name: _note(basis, name) for name, basis in facts["bases"].items()},
        distinct_costs=costs,
        rounded=f"{costs} distinct costs, rounded to the costly side" if costs > MOST_COSTS else "",
        figure=_figure,
        range=range_text,
    )
    return text.rstrip("\n")


def _text_of_one(facts: dict[str, Any], ledger: Ledger) -> str:
    plans = [header.plan for header in ledger.headers if header.plan is not None]
    processes = {own_process(plan.noise.to_dict()) for plan in plans} - {None}
    return _text(
        "account_run.txt",
        facts,
        [ledger],
        damaged=bool(ledger.damage),
        own_processes=sorted(map(str, processes)),
        uncovered=uncovered_text(facts),
    )


def _text_of_several(facts: dict[str, Any], ledgers: Sequence[Ledger]) -> str:
    reasons = facts["epsilons"] | facts.get("selection", {}).get("epsilons", {})
    shape = facts.get("selection", {}).get("shape")
    names = {value: name for name, value in _SHAPES.items()}
    return _text(
        "account_runs.txt",
        facts,
        ledgers,
        shape=shape if isinstance(shape, str | None) else names.get(shape, f"negative binomial, shape {shape:.4g}"),
        uncovered={run["run"]: uncovered_text(run) for run in facts["runs"]},
        reasons={name: why for name, why in reasons.items() if isinstance(why, str)},
    )
