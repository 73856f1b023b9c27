"""One workload in two minutes, before and after a change: `python -m benchmarks quick`. It keeps nothing."""

from __future__ import annotations

from benchmarks.methods import DRAWN, FIRST_WORKLOAD, MALLOC, REFERENCE
from benchmarks.rows import Row

WORKLOADS = (FIRST_WORKLOAD,)
METHODS = (
    REFERENCE,
    DRAWN,
    *(f"ours/{kind}" for kind in ("flat", "adaptive_quantile", "discretized")),
    *(f"harness/{kind}" for kind in ("no privacy", "flat")),
    f"opacus/hooks {MALLOC}",  # its best mode there, as it comes
)
REPEATS = 9, 5  # turns for wall and for CPU time: more than in the whole benchmark, since one asks for small changes


def table(rows: list[Row]) -> str:
    """A table for the terminal: ratios, then milliseconds.

    Args:
        rows: With ratios.
    """
    lines = [["", "÷ plain", "CPU ÷ plain", "wall ms", "least to most", "CPU ms"]]
    for row in rows:
        name = row["method"] if len({r["workload"] for r in rows}) == 1 else f"{row['workload']}: {row['method']}"
        if row["error"]:
            lines.append([f"{name}: {row['error']}", *["–"] * 5])
            continue
        least, most = row["wall_ms_range"]
        lines.append(
            [
                name,
                *(_number(row[key]) for key in ("ratio_to_limit", "cpu_ratio_to_limit", "wall_ms")),
                f"{least:.2f} to {most:.2f}",
                _number(row["cpu_ms"]),
            ]
        )
    loud = "" if all(row["quiet"] for row in rows) else "\n\nThe machine was not quiet."
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    aligned = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
    return "\n".join("  ".join(line) for line in aligned) + loud


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
