"""The table of guards in docs/guards.md, from the lists in `dpbench.guards`."""

from __future__ import annotations

from dpbench.guards import EVERY_TRAINING, LIGHTNING, Guard
from dpbench.harness.reports.markdown import markdown_rows

_MOMENTS = {
    "check": "before the training",
    "begin": "before the first batch",
    "open": "each batch",
    "step": "some batches",
    "stepped": "each batch",
    "release": "each release",
    "released": "each update",
    "public_loss": "each other network's step",
    "close": "the end of each batch",
}
_WHERE_SOURCE_ASKS = "some batches"
"""When a guard looks that has no moment of its own: the source of records asks it."""


def page() -> str:
    """A row for each guard, in the order in which they look."""
    rows = [["guard", "what it prevents", "looks at", "trainings"]]
    for guard in every_guard():
        moments = [_MOMENTS[moment] for moment in looks_at(guard) if moment in _MOMENTS]
        distinct = dict.fromkeys(moments or [_WHERE_SOURCE_ASKS])
        rows.append([guard.name, guard.prevents, ", ".join(distinct), _trainings(guard)])
    return markdown_rows(rows, text=range(4))


def every_guard() -> list[type[Guard]]:
    """Each guard of a list once."""
    return list(LIGHTNING)


def looks_at(guard: type[Guard]) -> list[str]:
    """Names of the moments at which a guard looks."""
    moments = []
    for name, default in vars(Guard).items():
        if name.startswith("on_") and getattr(guard, name) is not default:
            moments.append(name.removeprefix("on_"))
    return moments


def _trainings(guard: type[Guard]) -> str:
    return "all" if guard in EVERY_TRAINING else "Lightning"
