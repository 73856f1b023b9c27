"""What golden runs must come to on every machine: epsilons, events, and runs that must agree with one another."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.composition import epsilon
from dpbench.privacy.accounting.ledger import Ledger, read_ledger
from dpbench.privacy.events import Event, SumQuery
from tools.golden.runs import CHECKPOINT
from tools.golden.scenarios import DELTA, Scenario

Values = dict[str, Any]
Outcomes = dict[str, dict[str, Any]]
"""Name of a scenario → the fields of its `Outcome`."""
_ROUNDING = 1e-3
"""Relative distance of the weights that one process and two may end with.

Rounding decides between neighbors on the grid of releases, at other places on other processors: 4e-7 on one, 2e-4 on
another.
"""


def significant(value: float, digits: int) -> float:
    """A number with so many significant digits; those of a committed value are the same on all machines."""
    return float(f"{value:.{digits - 1}e}")


def values_of(outcome: dict[str, Any]) -> Values:
    """What is committed of a run: epsilons to ten digits, and what its releases were; {} for a reference."""
    if not outcome["ledger"]:
        return {}
    ledger = ledger_of(outcome["ledger"])
    header = ledger.header
    _, first = ledger.releases[0]
    events = []
    for event, count in ledger.events.items():
        queries = _queries(event.queries, 10)
        events.append({"count": count, "sampling": event.sampling.to_dict(), "queries": queries})
    return {
        "unit": header.unit,
        "neighbouring_relation": header.neighboring_relation,
        "microbatch_size": header.microbatch_size,
        "phases": len(ledger.headers),
        "releases": len(ledger.releases),
        "events": events,
        "first_queries": _queries(first.queries, 6),
        "epsilon": epsilons(ledger, DELTA, ("rdp", "pld")),
    }


def epsilons(ledger: Ledger, delta: float, accountants: Iterable[str]) -> dict[str, float]:
    """Epsilons to ten digits, by those of the accountants that give one."""
    events = frozenset(ledger.events.items())
    by_accountant = {}
    for name in accountants:
        value = _epsilon(events, delta, name)
        if value is not None:
            by_accountant[name] = value
    return by_accountant


@cache
def _epsilon(events: frozenset[tuple[Event, int]], delta: float, accountant: str) -> float | None:
    """Epsilon to ten digits; None where the accountant does not cover the lots, or would take too long."""
    try:
        return significant(epsilon(dict(events), delta, accountant), 10)
    except ConfigurationError:
        return None


def _queries(queries: Iterable[SumQuery], digits: int) -> list[list[Any]]:
    rows = []
    for query in queries:
        sensitivity = significant(query.sensitivity, digits)
        noise_std = significant(query.noise_std, digits)
        rows.append([query.name, sensitivity, noise_std, query.unit])
    return rows


def ledger_of(text: str) -> Ledger:
    """The ledger that a file with this text is."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        path.write_text(text, encoding="utf-8")
        return read_ledger(path)


def wrong_values(chosen: Iterable[Scenario], outcomes: Outcomes, committed: dict[str, Values]) -> Iterator[str]:
    """Say which runs have other epsilons or events than the committed ones."""
    for name in (scenario.name for scenario in chosen):
        now = values_of(outcomes[name])
        then = committed[name]
        for part in sorted({*now, *then}):
            if not equal(now.get(part), then.get(part)):
                yield f"{name}: {part} is {now.get(part)}, and was {then.get(part)}"


def equal(now: Any, then: Any) -> bool:
    """Whether two values are equal; epsilons but for what another machine's Fourier transform rounds (pld)."""
    if isinstance(now, float) and isinstance(then, float):
        return math.isclose(now, then, rel_tol=1e-8)
    if isinstance(now, dict) and isinstance(then, dict):
        return now.keys() == then.keys() and all(equal(value, then[name]) for name, value in now.items())
    return bool(now == then)


def wrong_twins(chosen: Iterable[Scenario], outcomes: Outcomes) -> Iterator[str]:
    """Say which runs differ from the one that they must come to the same as.

    A run that died and was resumed: to the bit, ledger included. Two processes: up to rounding, with the same events.
    """
    for scenario in chosen:
        if scenario.twin is None:
            continue
        outcome = outcomes[scenario.name]
        twin = outcomes[scenario.twin.name]
        if scenario.end != "straight":
            if outcome["steps"] != twin["steps"][CHECKPOINT:] or outcome["weights"] != twin["weights"]:
                yield f"{scenario.name}: the resumed run ends with other weights than the uninterrupted one"
            if outcome["ledger"] != twin["ledger"]:
                yield f"{scenario.name}: the resumed run leaves another ledger than the uninterrupted one"
        else:
            if values_of(outcome) != values_of(twin):
                yield f"{scenario.name}: the releases of two processes are others than those of one"
            if _sums_alike(scenario) and not _close(outcome["weights"], twin["weights"]):
                yield f"{scenario.name}: two processes end with other weights than one"


def _sums_alike(scenario: Scenario) -> bool:
    """Whether two processes sum up what one does: not where each draws masks for its share, in another order."""
    return scenario.network != "dropout" or scenario.records == "users"


def _close(weights: list[float], expected: list[float]) -> bool:
    return math.dist(weights, expected) <= _ROUNDING * math.hypot(*expected)


def wrong_weights(chosen: Iterable[Scenario], outcomes: Outcomes, before: Outcomes) -> Iterator[str]:
    """Say from which step on runs have other weights than with the source before, to the bit."""
    for scenario in chosen:
        if scenario.name not in before:
            continue
        now = outcomes[scenario.name]["steps"]
        then = before[scenario.name]["steps"]
        if now == then:
            continue
        step: int | str = "the end"  # where one of them is shorter
        for number, (hash_now, hash_then) in enumerate(zip(now, then, strict=False)):
            if hash_now != hash_then:
                step = number
                break
        yield f"{scenario.name}: other weights than before from step {step} on"


def lines_of(values: dict[str, Any]) -> str:
    """JSON with a line for each entry, so that a diff shows which ones change."""
    rows = []
    for name, value in values.items():
        rows.append(f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n" + ",\n".join(rows) + "\n}\n"
