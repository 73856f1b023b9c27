"""`dpbench account --plot`: ε against steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.accountants import ACCOUNTANTS
from dpbench.privacy.accounting.composition import LedgerCost, coarser_costs, composable, epsilon, nominal_events
from dpbench.privacy.accounting.ledger import Ledger, counted_event
from dpbench.privacy.events import Event
from dpbench.reports.figures import new_panels
from dpbench.runs.numbers import epsilon_text

_POINTS = 40  # of a curve
_SLOW = {"pld": 6, "rdp-continuous": 40}  # points of accountants that take a second for each, with few distinct costs


def epsilon_figure(
    ledgers: Mapping[str, Ledger],
    delta: float,
    accountants: Sequence[str],
    nominal: bool = False,
) -> Figure:
    """Draw how the ε of all releases grew, runs one after another.

    Args:
        ledgers: Ledgers by name.
        delta: δ.
        accountants: Names of accountants; those that do not cover the sampling are left out.
        nominal: See `nominal_events`.

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
        points = _POINTS
        if name in _SLOW:
            points = max(3, min(_SLOW[name], 100 // len(composed)))
        counts = np.unique(np.linspace(1, len(events), points).astype(int)).tolist()
        values = [epsilon(Counter(events[:count]), delta, name) for count in counts]
        label = f"{name}: {epsilon_text(values[-1], 5)}"
        if not ACCOUNTANTS[name].guarantee:
            label += " (approximation)"
        if not LedgerCost(runs, name).covered:
            label += " (nominal)"
        axes.plot(counts, values, color=f"C{number}", marker=".", label=label)
    if not axes.lines:
        raise ConfigurationError("none of the accountants covers the sampling of these runs: there is nothing to draw.")
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
