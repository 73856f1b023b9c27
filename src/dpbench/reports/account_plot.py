"""`dpbench account --plot`: epsilon against steps, and against the order of the Rényi divergence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.accountants import ACCOUNTANTS, ContinuousRenyiAccountant, RenyiAccountant
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
from dpbench.reports.figures import new_figure, write_figure
from dpbench.runs.numbers import epsilon_text

_POINTS = {"pld": (12, 100), "rdp-continuous": (40, 400)}
"""Slow accountants: most points of a curve over steps, and most points times distinct costs."""
_COLORS = ("#3060a8", "#c04030", "#508850", "#a070b0", "#c09020", "#808080")


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
    """Draw how the epsilon of all releases grew, runs one after another, and from which order it comes.

    Args:
        ledgers: By name.
        delta: δ.
        accountants: Names; those that do not cover the sampling are left out.
        nominal: See `nominal_events`.
        slow_points: Most points of the curve of a slow accountant.

    Raises:
        ConfigurationError: No accountant covers the sampling.
    """
    figure = new_figure(11, 4)
    over_steps, over_orders = figure.subplots(1, 2)
    runs = list(ledgers.values())
    for name, color in zip(accountants, _COLORS, strict=False):
        events = _events(runs, name, nominal)
        try:
            composed = composable(Counter(events), name)
        except ConfigurationError:
            continue
        if not composed:
            raise ConfigurationError("nothing was released: there is no epsilon to draw.")
        note = "" if ACCOUNTANTS[name].guarantee else " (approximation)"
        if not LedgerCost(runs, name).covered:
            note += " (nominal)"
        most, work = _POINTS.get(name, (40, 40 * MOST_COSTS))
        if name in _POINTS:
            most = min(most, slow_points)
        # Each point composes all distinct costs once more.
        points = max(3, min(most, work // len(composed)))
        counts = np.unique(np.linspace(1, len(events), points).astype(int)).tolist()
        _draw_over_steps(over_steps, events, counts, delta, name, color, note)
        _draw_over_orders(over_orders, composed, delta, name, color, note)
    if not over_steps.lines:
        raise ConfigurationError("none of the accountants covers the sampling of these runs: there is nothing to draw.")
    ends = np.cumsum([len(ledger.releases) for ledger in runs])
    for end in ends[:-1]:
        over_steps.axvline(end, color="#808080", linewidth=0.6, linestyle=":")
    _finish(over_steps, f"steps of {len(runs)} runs, one after another" if len(runs) > 1 else "steps", delta)
    over_steps.set_ylim(bottom=0)
    over_orders.set_visible(bool(over_orders.lines))
    if over_orders.lines:
        over_orders.set_xscale("log")
        over_orders.set_yscale("log")
        _finish(over_orders, "order of the Rényi divergence", delta)
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


def _draw_over_steps(
    ax: Axes,
    events: list[Event],
    counts: Sequence[int],
    delta: float,
    name: str,
    color: str,
    note: str,
) -> None:
    values = []
    spent = Counter[Event]()
    before = 0
    for count in counts:
        spent.update(events[before:count])
        values.append(epsilon(spent, delta, name))
        before = count
    ax.plot(
        counts,
        values,
        color=color,
        label=f"{name}: {epsilon_text(values[-1], 5)}{note}",
        marker="." if len(counts) < 20 else None,
        linestyle="--" if name == "rdp-continuous" else "-",
    )


def _draw_over_orders(
    ax: Axes,
    events: Mapping[Event, int],
    delta: float,
    name: str,
    color: str,
    note: str,
) -> None:
    accountant = ACCOUNTANTS[name]
    if not isinstance(accountant, RenyiAccountant) or isinstance(accountant, ContinuousRenyiAccountant):
        return  # the latter's grid is that of rdp
    orders = np.asarray(accountant.orders)
    values = accountant.epsilon_by_order(accountant.curve(events), delta)
    best = float(np.where(values > 0, values, np.inf).min())
    near = (values > 0) & (values < 100 * best)
    if not near.any():
        return
    order = float(orders[near][values[near].argmin()])
    label = f"{name}: {epsilon_text(best, 5)} at order {order:g}{note}"
    ax.plot(orders[near], values[near], color=color, label=label)
    ax.plot(order, best, "o", color=color)


def _finish(ax: Axes, label: str, delta: float) -> None:
    ax.set_xlabel(label)
    ax.set_ylabel(f"ε at δ = {delta:g}")
    ax.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0.0, 1.0))  # above, where it covers nothing
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    ax.margins(x=0.1)
