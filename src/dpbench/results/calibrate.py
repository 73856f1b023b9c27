"""`dpbench calibrate`: a budget solved backwards, with its neighbourhood, as text or JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dpbench.errors import ConfigurationError, LedgerError
from dpbench.privacy.accountants import ACCOUNTANTS, FIXED_SIZE, POISSON, relation_of
from dpbench.privacy.calibration import Setting, solved
from dpbench.privacy.clipping import VectorGroup
from dpbench.privacy.ledger import Ledger, check_one_population, read_ledger
from dpbench.privacy.plan import ReleasePlan, Statistic, SumQuery, effective_noise_multiplier
from dpbench.privacy.sampling import PoissonSampling
from dpbench.results.account import find_ledgers

FACTORS = (0.5, 0.8, 1.0, 1.25, 2.0)
_SHOWN_QUERIES = 12
_MAIN = ("epsilon", "delta", "noise_multiplier", "sample_rate", "batch_size", "steps")


@dataclass(frozen=True)
class Pattern:
    """What else is released from a lot, beside one clipped gradient.

    Attributes:
        groups: Number of vector groups with equal bounds' share of the noise.
        statistics: Noise multiplier (noise over sensitivity) of counts, norms and metrics, by name.
        queries: Of an earlier run; scaled as a whole.
    """

    groups: int = 1
    statistics: Mapping[str, float] = field(default_factory=dict)
    queries: tuple[SumQuery, ...] = ()

    def facts(self, noise_multiplier: float) -> dict[str, Any]:
        """How the noise of the whole release is shared among its queries.

        Raises:
            ConfigurationError: The statistics alone cost more than the release may.
        """
        facts: dict[str, Any] = {}
        if self.groups > 1 or self.statistics:
            statistics = tuple(Statistic(name, 1, 1.0, z) for name, z in self.statistics.items())
            whole = (VectorGroup("gradient", (0,), 1.0),)
            plan = ReleasePlan(PoissonSampling(1, 1.0), whole, noise_multiplier, (1,), statistics)
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
    found = find_ledgers([path])
    if len(found) != 1:
        raise LedgerError(f"{path} holds {len(found)} ledgers: name one run.")
    (ledger,) = (read_ledger(one) for one in found.values())
    check_one_population({str(path): ledger})
    if ledger.damage is not None:
        raise LedgerError(f"{path}: {ledger.damage}; what it cost is known only from below.")
    if not ledger.releases:
        raise LedgerError(f"{path}: no release is recorded.")
    return ledger


def setting_of(options: Any) -> Setting:
    """The setting that the command line's options describe.

    Raises:
        ConfigurationError: Options contradict each other.
    """
    for one, other in (("sample_rate", "batch_size"), ("steps", "epochs")):
        if getattr(options, one) is not None and getattr(options, other) is not None:
            raise ConfigurationError(f"give --{one.replace('_', '-')} or --{other.replace('_', '-')}, not both.")
    rate = options.sample_rate
    if options.batch_size is not None:
        if options.population is None:
            raise ConfigurationError("--batch-size needs --population: the sample rate is one over the other.")
        if not 0 < options.batch_size <= options.population:
            raise ConfigurationError(
                f"--batch-size must lie between 1 and the population, {options.population}, not {options.batch_size:g}."
            )
        rate = options.batch_size / options.population
    return Setting(
        noise_multiplier=options.noise_multiplier,
        sample_rate=rate,
        steps=options.steps,
        epochs=options.epochs,
        epsilon=options.epsilon,
        delta=options.delta,
        sampling=FIXED_SIZE if options.sampling == "fixed" else POISSON,
        population=options.population,
    )


def pattern_of(groups: int, statistics: Sequence[str]) -> Pattern:
    """The pattern that the command line's options describe.

    Args:
        groups: Number of groups.
        statistics: NAME=NOISE_MULTIPLIER.

    Raises:
        ConfigurationError: Something else.
    """
    if groups < 1:
        raise ConfigurationError(f"--groups must be at least 1, not {groups}.")
    values = {}
    for word in statistics:
        name, _, number = word.partition("=")
        try:
            values[name] = float(number)
        except ValueError:
            raise ConfigurationError(f"--statistic must be NAME=Z, such as counts=20, not {word!r}.") from None
    return Pattern(groups, values)


def from_ledger(path: Path, setting: Setting, pattern: Pattern, again: bool) -> tuple[Setting, Pattern]:
    """Fill in what a run's last release says.

    Args:
        path: Run or ledger.
        setting: What the user gave.
        pattern: The same.
        again: Whether this is about a new run of the same kind, rather than about going on with this one.

    Raises:
        LedgerError: See `read_one_ledger`.
        ConfigurationError: Nothing is left to solve for, or the sampling is another one.
    """
    ledger = read_one_ledger(path)
    last = ledger.releases[-1][1]
    relation_of(last.sampling)
    if setting.population not in (None, last.sampling.population):
        raise ConfigurationError(f"{path} has a population of {last.sampling.population}, not {setting.population}.")
    rate = last.sampling.expected_batch_size / last.sampling.population
    noise = effective_noise_multiplier(last.queries)
    both = setting.epsilon is not None and (setting.steps is not None or setting.epochs is not None)
    filled = replace(
        setting,
        sampling=last.sampling.kind,
        population=last.sampling.population,
        sample_rate=setting.sample_rate or rate,
        noise_multiplier=setting.noise_multiplier or (None if both else noise),
        delta=setting.delta or ledger.header.delta,
        spent={} if again else ledger.events,
    )
    return filled, replace(pattern, queries=last.queries)


def neighbourhood(setting: Setting, accountant: str) -> dict[str, list[dict[str, float | None]]]:
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
            changed: float = value * factor if name != "steps" else max(1, round(value * factor))
            table[name].append(
                {"factor": factor, name: changed, "epsilon": _epsilon(setting, name, changed, accountant)}
            )
    return table


def _epsilon(setting: Setting, name: str, value: float, accountant: str) -> float | None:
    try:
        reached = replace(setting, **{name: int(value) if name == "steps" else value}).epsilon_by(accountant)  # type: ignore[arg-type]
    except ConfigurationError:  # a rate above 1, or too large for pld
        return None
    return reached if math.isfinite(reached) else None


def calibrate(setting: Setting, pattern: Pattern, accountant: str, as_json: bool) -> str:
    """Solve for what is missing.

    Args:
        setting: Lacks one value.
        pattern: Of the queries.
        accountant: Name.
        as_json: JSON instead of text.

    Raises:
        DPBenchError: See `solved`.
    """
    answer = solved(setting, accountant)
    z, rate, steps = answer.noise_multiplier, answer.sample_rate, answer.steps
    assert z is not None and rate is not None and steps is not None
    sampling = answer.event[0]
    facts: dict[str, Any] = {
        "solved_for": _missing(setting),
        "epsilon": answer.epsilon,
        "epsilon_reached": answer.epsilon_by(accountant),
        "delta": answer.delta,
        "noise_multiplier": z,
        "sample_rate": rate,
        "steps": steps,
        "epochs": steps * rate,
        "sampling": answer.sampling,
        "neighbouring_relation": sampling.neighbouring_relation,
        "accountant": accountant,
        "guarantee": ACCOUNTANTS[accountant].guarantee,
    }
    if answer.population is not None:
        facts |= {"population": answer.population, "batch_size": sampling.expected_batch_size}
    if answer.spent:
        facts |= {"steps_before": sum(answer.spent.values())}
    if answer.sampling == FIXED_SIZE:
        facts["noise_std_over_max_grad_norm"] = z * sampling.record_changes
    facts |= pattern.facts(z)
    facts["neighbourhood"] = neighbourhood(answer, accountant)
    return json.dumps(facts, indent=2, allow_nan=False) if as_json else _text(facts)


def _missing(setting: Setting) -> str:
    for name in ("noise_multiplier", "sample_rate", "epsilon", "delta"):
        if getattr(setting, name) is None:
            return name
    return "steps"


def _line(label: str, value: str, note: str = "") -> str:
    return f"{label:<24} {value:<12} {note}".rstrip()


def _text(facts: dict[str, Any]) -> str:
    sought = facts["solved_for"]
    notes = {sought: "<- solved for"}
    if sought == "sample_rate":
        notes["batch_size"] = "<- solved for"
    if sought in ("steps", "sample_rate"):
        notes["epsilon"] = f"target; {facts['epsilon_reached']:.6g} is reached"
    passes = f"{facts['epochs']:.4g} passes over the data"
    passes += f", after {facts['steps_before']} steps in the ledger" if "steps_before" in facts else ""
    notes["steps"] = "   ".join([notes["steps"], passes] if "steps" in notes else [passes])
    names = [name for name in _MAIN if name in facts]
    lines = [_line(name.replace("_", " "), f"{facts[name]:.7g}", notes.get(name, "")) for name in names]
    lines.append(f"{'sampling':<24} {facts['sampling']}, {facts['neighbouring_relation']}")
    lines.append(f"{'accountant':<24} {facts['accountant']}: {ACCOUNTANTS[facts['accountant']].title}")
    return "\n".join(lines + _pattern_lines(facts) + ["", *_neighbourhood_lines(facts)])


def _pattern_lines(facts: dict[str, Any]) -> list[str]:
    lines = []
    if "noise_std_over_max_grad_norm" in facts:
        why = "strategy.noise_multiplier: a replaced record moves a clipped sum by twice the bound"
        lines.append(_line("noise / max_grad_norm", f"{facts['noise_std_over_max_grad_norm']:.7g}", why))
    if "group_noise_multiplier" in facts:
        beside = ", ".join(f"{name} {z:g}" for name, z in facts["statistics"].items())
        beside = f"beside {beside}" if beside else ""
        lines.append(_line("of which gradient", f"{facts['gradient_noise_multiplier']:.7g}", beside))
    if facts.get("groups", 1) > 1:
        share = f"noise / sensitivity, {facts['groups']} groups of equal cost"
        lines.append(_line("each of the groups", f"{facts['group_noise_multiplier']:.7g}", share))
    queries = facts.get("queries", [])
    lines += ["queries of the release, their noise scaled together:"] if queries else []
    for query in queries[:_SHOWN_QUERIES]:
        numbers = f"sensitivity {query['sensitivity']:.4g}, noise std {query['noise_std']:.4g}"
        lines.append(f"  {query['name']:<30} {numbers}")
    if len(queries) > _SHOWN_QUERIES:
        lines.append(f"  ... {len(queries) - _SHOWN_QUERIES} more queries")
    return lines


def _neighbourhood_lines(facts: dict[str, Any]) -> list[str]:
    lines = [f"{'epsilon if this changes':<24}" + "".join(f"{f'x {factor:g}':>11}" for factor in FACTORS)]
    for name, cells in facts["neighbourhood"].items():
        shown = ["–" if cell["epsilon"] is None else f"{cell['epsilon']:.4g}" for cell in cells]
        lines.append(f"{name.replace('_', ' '):<24}" + "".join(f"{value:>11}" for value in shown))
    return lines
