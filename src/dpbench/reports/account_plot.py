"""`dpbench account --plot`: ε against steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.accountants import ACCOUNTANTS
from dpbench.privacy.accounting.composition import (
    MOST_COSTS,
    LedgerCost,
    coarser_costs,
    composable,
    epsilon,
    nominal_events,
)
from dpbench.privacy.accounting.ledger import Ledger, counted_event
from dpbench.privacy.events import Event
from dpbench.reports.figures import GRAY, new_panels, write_figure
from dpbench.runs.numbers import epsilon_text

_POINTS = {"pld": (12, 100), "rdp-continuous": (40, 400)}
"""Slow accountants: most points of a curve, and most points times distinct costs."""


def plot_epsilon(
    path: Path,
    ledgers: Mapping[str, Ledger],
    delta: float,
    accountants: Sequence[str],
    nominal: bool = False,
) -> Path:
    """Write the picture of `epsilon_figure`.

    Raises:
        ConfigurationError: No accountant covers the sampling.
    """
    return write_figure(path, epsilon_figure(ledgers, delta, accountants, nominal))


def epsilon_figure(
    ledgers: Mapping[str, Ledger],
    delta: float,
    accountants: Sequence[str],
    nominal: bool = False,
    slow_points: int = 40,
) -> Figure:
    """Draw how the ε of all releases grew, runs one after another.

    Args:
        ledgers: Ledgers by name.
        delta: δ.
        accountants: Names of accountants; those that do not cover the sampling are left out.
        nominal: See `nominal_events`.
        slow_points: Most points of the curve of a slow accountant.

    Raises:
        ConfigurationError: No accountant covers the sampling.
    """
    figure, (axes,) = new_panels(1, 1, 8, 4)
    runs = list(ledgers.values())
    for number, name in enumerate(accountants):
        events = _events(runs, name, nominal)
        try:
            composed = composable(Counter(events), name)
        except ConfigurationError:
            continue
        if not composed:
            raise ConfigurationError("nothing was released: there is no epsilon to draw.")
        most, work = _POINTS.get(name, (40, 40 * MOST_COSTS))
        if name in _POINTS:
            most = min(most, slow_points)
        # Each point composes all distinct costs once more.
        points = max(3, min(most, work // len(composed)))
        counts = np.unique(np.linspace(1, len(events), points).astype(int)).tolist()
        values = []
        spent = Counter[Event]()
        for count in counts:
            spent.update(events[spent.total() : count])
            values.append(epsilon(spent, delta, name))
        label = f"{name}: {epsilon_text(values[-1], 5)}"
        if not ACCOUNTANTS[name].guarantee:
            label += " (approximation)"
        if not LedgerCost(runs, name).covered:
            label += " (nominal)"
        style = "--" if name == "rdp-continuous" else "-"  # which mostly lies on rdp
        axes.plot(counts, values, style, color=f"C{number}", marker="." if len(counts) < 20 else None, label=label)
    if not axes.lines:
        raise ConfigurationError("none of the accountants covers the sampling of these runs: there is nothing to draw.")
    for end in np.cumsum([len(ledger.releases) for ledger in runs])[:-1]:
        axes.axvline(end, color=GRAY, linewidth=0.6, linestyle=":")
    axes.set_xlabel(f"steps of {len(runs)} runs, one after another" if len(runs) > 1 else "steps")
    axes.set_ylabel(f"ε at δ = {delta:g}")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    return figure


def _events(ledgers: Sequence[Ledger], accountant: str, nominal: bool) -> list[Event]:
    """All releases in their order, as the accountant takes them, at most about a hundred distinct."""
    events: list[Event] = []
    for ledger in ledgers:
        charged = {event: event for event in ledger.events}
        if nominal:
            for event in ledger.events:
                (charged[event],) = nominal_events({event: 1}, accountant, ledger.header.microbatch_size)
        for _, release in ledger.releases:
            events.append(charged[counted_event(release)])
    coarser = coarser_costs(set(events))
    return [coarser[event] for event in events]
