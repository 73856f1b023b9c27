"""The page of what was measured on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.ways import SEEDS
from benchmarks.picture import draw
from benchmarks.report import table
from benchmarks.rows import Row, least, relative
from dpbench.files import write_atomically

_SUMMARY = {
    "plain (ms)": None,
    "ours ÷ plain": "ours/flat",
    "discretized ÷ plain": "ours/discretized",
    "harness ÷ plain": "harness/flat",
    "harness, executor=graph ÷ plain": "harness/flat graph",
    "bare graphs ÷ plain": "graph/flat",
    "bf16 private ÷ plain": "bf16/flat",
    f"{SEEDS} seeds at once, each ÷ plain": "seeds/flat",
}


def report(kept: Mapping[str, Any], stem: Path) -> None:
    """Write STEM.md and STEM.png."""
    draw(kept["steps"], stem.with_suffix(".png"))
    write_atomically(stem.with_suffix(".md"), markdown(kept, stem.name))


def markdown(kept: Mapping[str, Any], name: str) -> str:
    """Ratios first, then what holds, rounds of users, and every method."""
    steps: list[Row] = kept["steps"]
    everything = [*kept["checks"].values(), *steps, *kept["rounds"].values()]
    origins = sorted({f"{one['commit']} ({one['date']})" for one in everything if one.get("commit")})
    machines = sorted(
        {
            f"{one['hardware']['gpu'] or one['hardware']['cpu']}, PyTorch {one['versions'].get('torch')}"
            for one in everything
        }
    )
    lines = [
        f"# The time of a private step on a GPU: {name}",
        "",
        f"Made by `python -m benchmarks gpu` at {', '.join(origins)} on {'; '.join(machines)}. Medians of alternating "
        "turns of a fifth of a second, in one process, between synchronizations. 'Plain' is the fastest step without "
        "privacy that is neither a graph nor bf16. Precision is PyTorch's default: TF32 in convolutions, float32 in "
        "matrix products.",
        "",
        f"![Time relative to the fastest plain step]({name}.png)",
        "",
        *_summary(steps),
        "",
        "'Bare graphs' are two CUDA graphs (sums; noise and update) without lots, guards and ledger, over a lot that "
        "fills a buffer with masked rows: what there is to gain. `executor=graph` records the first of them, for each "
        "size of a lot; noise, ledger and update are as ever.",
        "",
        *(f"- {note}" for note in kept.get("notes", ())),
        "",
        "## What holds there",
        "",
        "| | holds | found |",
        "| --- | --- | --- |",
        *(
            f"| {one['about']} | {'yes' if one['holds'] else '**no**'} | {_cell(one['found'])} |"
            for one in kept["checks"].values()
        ),
        "",
        "## Rounds of users",
        "",
        *_rounds(kept["rounds"]),
    ]
    for workload in dict.fromkeys(row["workload"] for row in steps):
        lines += ["", f"## {workload}", "", *table([row for row in steps if row["workload"] == workload])]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "/")


def _summary(steps: Sequence[Row]) -> list[str]:
    lines = [f"| | {' | '.join([*_SUMMARY, '× Opacus'])} |", f"| --- |{' ---: |' * (len(_SUMMARY) + 1)}"]
    for workload in dict.fromkeys(row["workload"] for row in steps):
        own = [row for row in steps if row["workload"] == workload]
        limit = least(own, ("plain/",))
        fastest = [row["wall_ms"] for row in own if limit and relative(row) == limit]
        cells = [f"{fastest[0]:.2f}" if fastest else "–"]
        found = {row["method"]: row for row in own}
        cells += [_number(found.get(method, {}).get("ratio_to_limit")) for method in _SUMMARY.values() if method]
        cells.append(_number(found.get("ours/flat", {}).get("speedup_over_best_peer")))
        lines.append(f"| {workload} | {' | '.join(cells)} |")
    return lines


def _number(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else "–"


def _rounds(rounds: Mapping[str, Any]) -> list[str]:
    ways = list(dict.fromkeys(key for one in rounds.values() for key in one if "at once" in key or "after" in key))
    lines = [
        f"| task | users | {' | '.join(f'{way} (ms)' for way in ways)} |",
        f"| --- | ---: |{' ---: |' * len(ways)}",
    ]
    for name, one in rounds.items():
        cells = [
            f"{value:.0f}" if isinstance(value := one.get(way), float) else _cell(str(value or "–")) for way in ways
        ]
        lines.append(f"| {name} | {one['users']} | {' | '.join(cells)} |")
    return lines
