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
from dpbench.reports.markdown import markdown_rows
from dpbench.reports.nominal import at_population
from dpbench.runs.ledgers import find_ledgers, noise_of, read_run_ledger, runs_without_privacy
from dpbench.runs.numbers import range_text, uncovered_text

_NOMINAL_POPULATION = "nominal: the runs had fewer or more; no guarantee of theirs"
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
        request: Accountants, δ, and whether only the best run is published.

    Raises:
        DPBenchError: A ledger is unreadable or empty, the accountant or δ does not fit it, or the ledgers do not
            compose.
    """
    ledgers = {name: read_run_ledger(path) for name, path in find_ledgers(paths).items()}
    check_one_population(ledgers)
    check_own_randomness(ledgers)
    if request.releases is not None:
        ledgers = {name: _first_releases(name, one, request.releases) for name, one in ledgers.items()}
    if request.population is not None:
        ledgers = {name: at_population(one, request.population, request.lot_size) for name, one in ledgers.items()}
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
    text = "\n".join([_text_of_several(facts), *_rounded(list(ledgers.values()))])
    return AccountingReport(facts, text, damage, doubt, ledgers)


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
    return {sampling for ledger in ledgers for sampling, _ in ledger.events}


def _kinds(ledgers: Sequence[Ledger]) -> list[str]:
    return sorted({sampling.kind for sampling in _samplings(ledgers)})


def _is_nominal(ledgers: Sequence[Ledger], accountant: str) -> bool:
    return not all(map(ACCOUNTANTS[accountant].covers, _samplings(ledgers)))


def _basis(ledgers: Sequence[Ledger], accountant: str) -> dict[str, Any]:
    """Say whether an accountant's figure is a guarantee, an approximation or nominal, and for which neighbors."""
    nominal, by = _is_nominal(ledgers, accountant), ACCOUNTANTS[accountant]
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
    }


def _facts_of_one(ledger: Ledger, request: AccountingRequest, delta: float) -> dict[str, Any]:
    values = epsilons([ledger], request, delta)
    first = values[request.accountants[0]]
    size = ledger.header.microbatch_size
    facts: dict[str, Any] = {"epsilon": None if isinstance(first, str) else first}
    if len(values) > 1:
        facts["epsilons"] = values
    if size > 1:
        covering = [name for name in request.accountants if not _is_nominal([ledger], name)]
        whole = microbatch_epsilon(ledger, delta, covering[0]) if covering else math.inf
        facts["epsilon_microbatch"] = whole if math.isfinite(whole) else None
    facts |= _common_facts([ledger], request, delta) | {"steps": len(ledger.releases)} | noise_of(ledger)
    if size > 1:
        facts["microbatch_size"] = size
    return facts | {"complete": ledger.wrong is None}


def _facts_of_several(
    ledgers: dict[str, Ledger], request: AccountingRequest, delta: float, unprotected: list[str]
) -> dict[str, Any]:
    runs = [
        {
            "run": name,
            "steps": len(ledger.releases),
            **(noise_of(ledger) if ledger.releases else {}),
            "epsilons": epsilons([ledger], request, delta),
            "complete": ledger.wrong is None,
        }
        for name, ledger in ledgers.items()
    ]
    all_ledgers = list(ledgers.values())
    together = dict.fromkeys(request.accountants) if unprotected else epsilons(all_ledgers, request, delta)
    first = together[request.accountants[0]]
    facts: dict[str, Any] = {
        "epsilon": None if isinstance(first, str) else first,
        "epsilons": together,
        "charged_by": "composition",
        **_common_facts(all_ledgers, request, delta),
        "steps": sum(run["steps"] for run in runs),
        "complete": all(run["complete"] for run in runs),
        "runs": runs,
        "without_privacy": unprotected,
    }
    if request.selection is not None:
        facts["selection"] = {
            "shape": "poisson" if math.isinf(request.selection.shape) else request.selection.shape,
            "mean_trials": request.selection.mean_trials,
            "epsilons": dict.fromkeys(request.accountants)
            if unprotected
            else epsilons(all_ledgers, request, delta, select=True),
        }
    return facts


def _cell(value: float | str | None) -> str:
    return "–" if isinstance(value, str) else "inf" if value is None else f"{value:.5g}"


def _label(basis: dict[str, Any], accountant: str) -> str:
    notes = [] if ACCOUNTANTS[accountant].guarantee else ["an approximation, no bound"]
    if basis["nominal"]:
        covered = ACCOUNTANTS[accountant].nominal.kind
        relation = basis["neighbouring_relation"]
        notes.append(f"nominal: as if lots had been drawn by {covered} sampling, which they were not; {relation}")
    return "; ".join(notes)


def _own_processes(ledger: Ledger) -> list[str]:
    """Noise processes that are somebody's own classes."""
    plans = [header.plan for header in ledger.headers if header.plan is not None]
    processes = [own_process(plan.noise.to_dict()) for plan in plans]
    return sorted({process for process in processes if process is not None})


def _rounded(ledgers: Sequence[Ledger]) -> list[str]:
    costs = len({event for ledger in ledgers for event in ledger.events})
    return [f"{costs} distinct costs, rounded to the costly side"] if costs > MOST_COSTS else []


def _text_of_one(facts: dict[str, Any], ledger: Ledger) -> str:
    values = facts.get("epsilons", {facts["accountant"]: facts["epsilon"]})
    lower = "" if facts["complete"] else " at least" if ledger.damage else " unproven"
    lines = {}
    for name, value in values.items():
        label = f"epsilon ({name})" if len(values) > 1 else "epsilon"
        note = _label(facts["bases"][name], name)
        why = f"   {value}" if isinstance(value, str) else lower + (f"   ({note})" if note else "")
        lines[label] = _cell(value) + why
    if "epsilon_microbatch" in facts:
        lines["epsilon microbatch"] = (
            f"{_cell(facts['epsilon_microbatch'])} nominal, for a fixed microbatch as the unit"
        )
    lines["noise multiplier"] = range_text(facts["noise_multiplier"])
    if "noise_std_over_max_grad_norm" in facts:
        lines["noise / max_grad_norm"] = range_text(facts["noise_std_over_max_grad_norm"])
    rate = f"rate {range_text(facts['sample_rate'])}"
    for process in _own_processes(ledger):
        lines["noise process"] = f"{process}, not dpbench's: its cost is what each line says, and nothing checks it"
    lines["lots"] = f"{range_text(facts['expected_batch_size'])} {facts['unit']}s, {rate}"
    for key in ("delta", "accountant", "steps", "unit", "microbatch_size", "neighbouring_relation", "population"):
        if key in facts and not (key == "accountant" and len(values) > 1):
            lines[key.replace("_", " ")] = str(facts[key])
    uncovered = uncovered_text(facts)
    if uncovered is not None:
        lines["uncovered delta"] = uncovered
    if facts["nominal_population"]:
        lines["population"] += f"   {_NOMINAL_POPULATION}"
    lines |= {"sampling": ", ".join(facts["sampling"]), "ledger intact": "yes" if facts["complete"] else "no"}
    costs = f"{len(ledger.events)} distinct costs"
    if len(ledger.events) == 1:
        costs = f"all {facts['steps']} releases cost the same"
    lines["releases"] = "; ".join(_rounded([ledger]) or [costs])
    return "\n".join(f"{name:<26} {value}" for name, value in lines.items())


_SELECTION_CONDITIONS = [
    "The cost of selection holds only if the number of trials was drawn from that distribution before anything",
    "was seen, each trial's settings were drawn independently at random, and all but the best are thrown away.",
    "A fixed number of trials is charged by composition.",
]


def _text_of_several(facts: dict[str, Any]) -> str:
    common = (
        f"delta {facts['delta']}, {facts['neighbouring_relation']}, unit {facts['unit']}, population "
        f"{facts['population']}" + (f" ({_NOMINAL_POPULATION})" if facts["nominal_population"] else "")
    )
    labels = {name: _label(basis, name) for name, basis in facts["bases"].items()}
    notes = ["", common + ".", *(f"{name}: {label}" for name, label in labels.items() if label)]
    uncovered = {run["run"]: uncovered_text(run) for run in facts["runs"]}
    notes += [f"{name}: uncovered delta {line}." for name, line in uncovered.items() if line is not None]
    if "selection" in facts:
        notes += _SELECTION_CONDITIONS
    if facts["without_privacy"]:
        notes.append("A run that trained without privacy has no epsilon, nor has anything published with it.")
    reasons = facts["epsilons"] | {
        name: why for name, why in facts.get("selection", {}).get("epsilons", {}).items() if isinstance(why, str)
    }
    notes += [f"{name}: {why}" for name, why in reasons.items() if isinstance(why, str)]
    return "\n".join([markdown_rows(_rows_of_several(facts)), *notes])


def _rows_of_several(facts: dict[str, Any]) -> list[list[str]]:
    """The table: a row for each run, one for all together, and one for the best where it alone is published."""
    names = list(facts["epsilons"])
    rows = [["run", "steps", "noise multiplier", *(f"epsilon ({name})" for name in names)]]
    rows += [_row_of_run(run, names) for run in facts["runs"]]
    rows += [[run, "–", "–", *("inf" for _ in names)] for run in facts["without_privacy"]]
    count = len(facts["runs"]) + len(facts["without_privacy"])
    lower = "" if facts["complete"] else ", unproven"
    everything = f"all {count} published (composition){lower}"
    rows.append([everything, str(facts["steps"]), "–", *map(_cell, facts["epsilons"].values())])
    if "selection" in facts:
        chosen = facts["selection"]
        drawn = f"{chosen['mean_trials']:g} trials on average ({_shape_name(chosen['shape'])})"
        rows.append([f"only the best published, {drawn}{lower}", "", "–", *map(_cell, chosen["epsilons"].values())])
    return rows


def _row_of_run(run: dict[str, Any], accountants: Sequence[str]) -> list[str]:
    mark = "" if run["complete"] else " (not intact)"
    noise = range_text(run["noise_multiplier"]) if "noise_multiplier" in run else "–"
    return [run["run"] + mark, str(run["steps"]), noise, *(_cell(run["epsilons"][name]) for name in accountants)]


def _shape_name(shape: float | str) -> str:
    names = {value: name for name, value in _SHAPES.items()}
    return shape if isinstance(shape, str) else names.get(shape, f"negative binomial, shape {shape:.4g}")
