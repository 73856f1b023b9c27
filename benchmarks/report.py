"""The tables and pictures of a file of rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.methods import MALLOC, PURE, REFERENCE
from benchmarks.rows import Row
from benchmarks.workloads import WORKLOADS
from dpbench.files import write_atomically
from dpbench.reports.figures import new_figure, write_figure

_COLORS = {"plain": "#7f7f7f", "ours": "#1f77b4", "harness": "#17becf", "opacus": "#d62728", "jax": "#ff7f0e"}
_OTHER = "#9467bd"
_KINDS = ("mnist_cnn b256", "small_alexnet b128", "densenet40 b64", "mlp b256")
_CLIPPING = ("flat", "per_layer", "adaptive_quantile", "adaptive_mean")
_WIDE = 15  # times the limit: from here on the axis is logarithmic
_COMPARISONS = ("ratio_to_limit", "cpu_ratio_to_limit", "speedup_over_opacus", "speedup_over_best_peer")
_TIERS = {"tier 1 (pure)": f" {PURE}", "tier 2 (native)": ""}
_RATIOS = {"tier 1 (pure)": (1.7, 1.3, 1.4, 1.45), "tier 2 (native)": (1.15, 1.10, 1.10, 1.3)}
_OPACUS = {"tier 1 (pure)": (2.3, 2.8, 1.6, 1.5), "tier 2 (native)": (3.5, 3.5, 2, 1.8)}
_DISCRETIZED = {"tier 1 (pure)": 1.4, "tier 2 (native)": 1.25}
_MICRO = {"tier 1 (pure)": 1.1, "tier 2 (native)": 1.05}
_MEMORY = {"tier 1 (pure)": 2.2, "tier 2 (native)": 1.4}


def report(rows: list[Row], stem: Path) -> None:
    """Write STEM.md and STEM.png."""
    draw(rows, stem.with_suffix(".png"))
    write_atomically(stem.with_suffix(".md"), markdown(rows, stem.name))


def markdown(rows: list[Row], name: str) -> str:
    """Goals, then a table for each workload."""
    gpu = [] if any(row["device"] == "cuda" for row in rows) else ["No GPU was measured: none was available."]
    loud = [f"The machine was not quiet for: {', '.join(names)}."] if (names := _loud(rows)) else []
    origins = sorted({f"{row['commit']} ({row['date']})" for row in rows if row.get("commit")})
    lines = [
        f"# {name}",
        "",
        f"Made by `make bench` at {', '.join(origins)}. Milliseconds a step: wall time on two threads and CPU time on "
        "one, medians of alternating turns. "
        "The limit is the fastest step without privacy. Memory is what the first two steps took beyond model and data. "
        f"Every process keeps large blocks of memory as `dpbench train` does, unless it says `{MALLOC}`; "
        "Opacus at its defaults does not. Peers are measured after ours, and all ratios are of times over the "
        f"time of `{REFERENCE}` in the same minutes. Two processes of one method differ by up to 15 % on the small "
        "networks, by where their memory happens to lie; and 'x Opacus' is against its best mode at its defaults.",
        "",
        *gpu,
        *loud,
        "",
        f"![Time relative to the limit]({name}.png)",
        "",
        "## Goals",
        "",
        "| goal | asked | reached | |",
        "| --- | ---: | ---: | --- |",
        *goals(rows),
    ]
    for workload in [w for w in WORKLOADS if any(row["workload"] == w for row in rows)]:
        lines += ["", f"## {workload}", "", *table([row for row in rows if row["workload"] == workload])]
    return "\n".join(lines) + "\n"


def _loud(rows: list[Row]) -> list[str]:
    return sorted({row["workload"] for row in rows if not row["quiet"]})


def table(rows: list[Row]) -> list[str]:
    """Lines of a workload's table."""
    lines = [
        "| method | wall ms | CPU ms | records/s | memory MB | ÷ limit | CPU ÷ limit | × Opacus | × best peer |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        cells = [
            row["method"],
            _number(row["wall_ms"], 4),
            _number(row["cpu_ms"], 4),
            _number(row["records_per_s"], 4),
            _number(row["peak_mb"], 3),
            *(_number(row[key], 3) for key in _COMPARISONS),
        ]
        lines.append(
            f"| {' | '.join(cells)} |" if not row["error"] else f"| {row['method']} | {row['error']} " + "| " * 7 + "|"
        )
    return lines


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 10**digits else f"{value:.{digits}g}"


def goals(rows: list[Row]) -> list[str]:
    """Lines of the goals' table: asked, reached, met or not."""

    def at(workload: str, method: str, key: str) -> float | None:
        found = [r[key] for r in rows if (r["workload"], r["method"]) == (workload, method)]
        return found[0] if found else None

    def worst(workload: str, methods: list[str], key: str, pick: Callable[[list[float]], float]) -> float | None:
        values = [value for method in methods if (value := at(workload, method, key)) is not None]
        return pick(values) if values else None

    lines = []
    for tier, suffix in _TIERS.items():
        kinds = _CLIPPING if not suffix else ("flat",)
        methods = [f"ours/{kind}{suffix}" for kind in kinds]
        for workload, ratio, speed in zip(_KINDS, _RATIOS[tier], _OPACUS[tier], strict=True):
            of = "worst of flat, per-layer, adaptive clipping" if not suffix else "flat clipping"
            lines.append(
                goal_row(f"{tier}: {workload}, {of} ÷ limit", ratio, worst(workload, methods, "ratio_to_limit", max))
            )
            flat = at(workload, f"ours/flat{suffix}", "speedup_over_opacus")
            lines.append(goal_row(f"{tier}: {workload}, times faster than Opacus", speed, flat, more=True))
        for workload in ("mnist_cnn b256", "small_alexnet b128"):
            signs = _over(*(at(workload, f"ours/{kind}{suffix}", "ratio_to_limit") for kind in ("discretized", "flat")))
            lines.append(goal_row(f"{tier}: {workload}, discretized ÷ flat clipping", _DISCRETIZED[tier], signs))
        micro = [
            at(f"densenet40 b64{kind}", f"ours/flat{suffix}", "ratio_to_limit") for kind in (", microbatches of 8", "")
        ]
        lines.append(goal_row(f"{tier}: densenet40, microbatches of 8 ÷ examples", _MICRO[tier], _over(*micro)))
        plain = at("small_alexnet b128", "plain/channels_last", "peak_mb")
        memory = _over(at("small_alexnet b128", f"ours/flat{suffix}", "peak_mb"), plain)
        lines.append(goal_row(f"{tier}: small_alexnet b128, memory ÷ plain", _MEMORY[tier], memory))
    for workload in ("lstm b128", "attention b128"):
        times = at(workload, "ours/flat", "speedup_over_opacus")
        lines.append(goal_row(f"{workload}, times faster than Opacus' layer", 2.0, times, more=True))
        memory = _over(at(workload, "ours/flat", "peak_mb"), at(workload, f"opacus/hooks {MALLOC}", "peak_mb"))
        lines.append(goal_row(f"{workload}, memory ÷ Opacus' layer", 1.0, memory))
    harness = _over(*(at("mnist_cnn b256", f"{kind}/flat", "ratio_to_limit") for kind in ("harness", "ours")))
    return [*lines, goal_row("mnist_cnn b256, whole harness ÷ bare engine", 1.10, harness)]


def _over(a: float | None, b: float | None) -> float | None:
    return None if not a or not b else a / b


def goal_row(what: str, asked: float, reached: float | None, more: bool = False) -> str:
    """A line of a goals' table."""
    if reached is None:
        return f"| {what} | {asked:g} | – | not measured |"
    met = round(reached, 2) >= asked if more else round(reached, 2) <= asked
    return f"| {what} | {asked:g} | {reached:.2f} | {'met' if met else '**not met**'} |"


def draw(rows: list[Row], path: Path) -> None:
    """Bars of wall time relative to the limit, a panel for each workload."""
    shown = [r for r in rows if r["ratio_to_limit"] and (MALLOC not in r["method"] or "opacus" in r["method"])]
    workloads = list(dict.fromkeys(r["workload"] for r in shown))
    if not workloads:
        return
    columns = 2 if len(workloads) > 1 else 1
    lines = -(-len(workloads) // columns)
    figure = new_figure(14, 4.6 * lines)
    for number, workload in enumerate(workloads, 1):
        axes = figure.add_subplot(lines, columns, number)
        own = sorted((r for r in shown if r["workload"] == workload), key=lambda r: r["ratio_to_limit"], reverse=True)
        ratios = [r["ratio_to_limit"] for r in own]
        axes.barh(range(len(own)), ratios, color=[_COLORS.get(r["method"].split("/")[0], _OTHER) for r in own])
        axes.set_yticks(range(len(own)), [r["method"] for r in own], fontsize=8)
        for at, ratio in enumerate(ratios):
            axes.text(ratio, at, f" {ratio:.2f}", va="center", fontsize=8)
        axes.axvline(1, color="black", linewidth=0.8)
        if max(ratios) > _WIDE:
            axes.set_xscale("log")
            axes.set_xlim(0.5, max(ratios) * 2)
        else:
            axes.set_xlim(0, max(ratios) * 1.12)
        axes.set_title(workload)
        axes.set_xlabel("wall time of a step ÷ the fastest step without privacy")
    write_figure(path, figure)
