"""The third column: what canaries told of the epsilon of finished runs, as tables and comparisons show it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dpbench.runs.record import is_audited

MEASURED = ("val/", "test/")  # on data that are not the training data
CONFIDENCE = 0.95  # of what runs keep, and tables show
LABEL = f"audited epsilon ({100 * CONFIDENCE:g} %)"
MOST = 1000.0  # above which figures of epsilon say nothing


def without_accuracy(record: Mapping[str, Any]) -> dict[str, float | None]:
    """Final figures of a run; where its model learned from canaries, none of how good it is."""
    metrics: Mapping[str, float | None] = record["metrics"]
    hidden = (*MEASURED, "evaluation/") if is_audited(record) else ()
    return {name: value for name, value in metrics.items() if not name.startswith(hidden)}


def audited_epsilon(privacy: Mapping[str, Any]) -> float:
    """The lower limit of epsilon that stands for all of a run; not a number where there is none.

    Args:
        privacy: Of the run's record.
    """
    audit = privacy.get("audit") or {}
    limits, name = audit.get("audited", {}), audit.get("shown")
    if name not in limits:
        return math.nan
    return math.inf if limits[name] is None else float(limits[name])


def verdict_of(privacy: Mapping[str, Any]) -> str | None:
    """The verdict on a run, or why there is none; None where it had no canaries."""
    audit = privacy.get("audit")
    if audit is None:
        return None
    return str(audit.get("verdict") or audit.get("damage") or f"none: {audit.get('why_not', '')}")


def limit(epsilon: float | None) -> str:
    """A lower limit of epsilon for people; None is infinite."""
    return f"> {MOST:.0f}" if epsilon is None or epsilon > MOST else f">= {epsilon:.2f}"
