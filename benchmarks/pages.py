"""Pages and figures of what was measured, each from a file of rows: `python -m benchmarks report` writes them again."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks import accuracy, figures
from benchmarks.methods import DRAWN, MALLOC, REFERENCE
from benchmarks.rows import Row, least, quotient, relative
from benchmarks.workloads import FOUR, GPU_WORKLOADS, STARTUP, WORKLOADS
from dpbench.files import write_atomically

_FOLDER = Path(__file__).parent
_EPOCHS = 60  # whose minutes the page tells
_FASTER_THAN_PEERS = 2.0  # the goal of a round of users


def write(path: Path) -> Path:
    """Write the page, the figure, or both, of a file of rows.

    Args:
        path: The rows; the end of its name and its form say of which part of the benchmark they are.

    Returns:
        The page, or the figure where there is no page.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    stem = path.with_suffix("")
    for ending, facts in (("users", _users), ("networks", _networks), ("accuracy", _accuracy)):
        if stem.name.endswith(f"-{ending}"):
            return render(ending, stem.with_suffix(".md"), **facts(data))
    figures.draw_ratios(data, stem.with_suffix(".png"))
    return render("steps", stem.with_suffix(".md"), **_steps(data))


def render(template: str, path: Path, **data: Any) -> Path:
    """Fill a template of `templates/` and write the page, at once or not at all.

    Args:
        template: Name of the template.
        path: Of the page.
        data: What the template names; `name` is that of the page.
    """
    environment = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "digits": _digits,
        "fixed": _fixed,
        "seconds": _seconds,
    }
    text = environment.get_template(f"{template}.md.j2").render(name=path.stem, **data)
    write_atomically(path, text.strip() + "\n")
    return path


def judged(goal: str, asked: float, reached: float | None, at_least: bool, beside: float | None = None) -> Row:
    """A line of a table of goals.

    Args:
        goal: What is asked.
        asked: The most it may be, or the least.
        reached: What was measured.
        at_least: Whether `asked` is the least.
        beside: Another number, which is not judged.
    """
    if reached is None:
        verdict = "not measured"
    else:
        # What is printed is what is judged: 1.184 is 1.18.
        rounded = round(reached, 2)
        met = rounded >= asked if at_least else rounded <= asked
        verdict = "met" if met else "**not met**"
    return {"goal": goal, "asked": asked, "reached": reached, "beside": beside, "verdict": verdict}


def goals(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Judge the goals of `goals.csv`: wall time, with CPU time beside it.

    Args:
        rows: With ratios.

    Returns:
        Lines of the table of each section.
    """
    measured = {(row["workload"], row["method"]): row for row in rows}
    sections: dict[str, list[Row]] = {"current": [], "older": [], "gpu": []}
    with (_FOLDER / "goals.csv").open(encoding="utf-8", newline="") as file:
        for goal in csv.DictReader(file):
            wall, cpu = _reached(goal, measured)
            line = judged(goal["goal"], float(goal["asked"]), wall, goal["sense"] == "least", cpu)
            sections[goal["section"]].append(line)
    return sections


def _reached(goal: Mapping[str, str], measured: Mapping[tuple[str, str], Row]) -> tuple[float | None, float | None]:
    """What was measured of a goal in wall time, or in memory, and in CPU time."""
    workload = goal["workload"]
    slowest: Row | None = None
    for method in goal["method"].split(";"):
        row = measured.get((workload, method))
        # Of several methods, the slowest is judged.
        if row and (slowest is None or (row["ratio_to_limit"] or 0) > (slowest["ratio_to_limit"] or 0)):
            slowest = row
    other = measured.get((goal["other_workload"] or workload, goal["other"]), {})
    if slowest is None:
        return None, None
    match goal["measure"]:
        case "limit":
            return slowest["ratio_to_limit"], slowest["cpu_ratio_to_limit"]
        case "ratio":
            wall = quotient(slowest["ratio_to_limit"], other.get("ratio_to_limit"))
            return wall, quotient(slowest["cpu_ratio_to_limit"], other.get("cpu_ratio_to_limit"))
        case "speedup":
            peers = [row for (name, method), row in measured.items() if name == workload and MALLOC in method]
            wall = quotient(least(peers, ("opacus/",)), relative(slowest))
            return wall, quotient(least(peers, ("opacus/",), "cpu_ms"), relative(slowest, "cpu_ms"))
        case "best_peer":
            return slowest["speedup_over_best_peer"], None
        case "memory":
            return quotient(slowest["peak_mb"], other.get("peak_mb")), None
        case "seconds":
            return quotient(slowest["wall_ms"], 1e3), quotient(slowest["cpu_ms"], 1e3)
        case "cpu_seconds":
            seconds = quotient(slowest["cpu_ms"], 1e3)
            return seconds, seconds
    raise ValueError(f"goals.csv: unknown measure {goal['measure']!r}")


def _steps(rows: list[Row]) -> dict[str, Any]:
    """What the page of `make bench` shows."""
    tables = _by_workload(rows)
    summary = {}
    for name in FOUR:
        costs = _costs(name, tables.get(name, []))
        if costs:
            summary[name] = costs
    return {
        "origin": _origin(rows),
        "loud": _list(row["workload"] for row in rows if not row["quiet"]),
        "summary": summary,
        "epochs": _EPOCHS,
        "has_figure": any(figures.is_pictured(row) for row in rows),
        "goals": goals(rows),
        "is_gpu": any(row["device"] == "cuda" for row in rows),
        "reference": REFERENCE,
        "has_drawn_sizes": any(row["method"] == DRAWN for row in rows),
        "has_record_numbers": all(row.get("records") for row in rows if row["method"].startswith("harness/")),
        "tables": {name: tables[name] for name in GPU_WORKLOADS if name in tables},
        "startup": tables.get(STARTUP),
    }


def _by_workload(rows: Iterable[Row]) -> dict[str, list[Row]]:
    tables: dict[str, list[Row]] = {}
    for row in rows:
        tables.setdefault(row["workload"], []).append(row)
    return tables


def _costs(name: str, rows: Sequence[Row]) -> Row | None:
    """Times of a step relative to the limit, and minutes without privacy, with the harness and with Opacus."""
    limit = min((row["wall_ms"] for row in rows if row["ratio_to_limit"] == 1), default=None)
    if limit is None:
        return None
    # The limit is the fastest plain step, whichever it is.
    ratios: dict[str, float] = {"plain": 1.0}
    for row in rows:
        kind = row["method"] if row["method"] in ("ours/flat", "harness/flat") else row["method"].partition("/")[0]
        ratio = row["ratio_to_limit"]
        # Opacus as it comes.
        if ratio and (kind != "opacus" or MALLOC in row["method"]):
            ratios[kind] = min(ratio, ratios.get(kind, ratio))
    workload = WORKLOADS[name]
    minutes = limit * _EPOCHS * workload.records / workload.batch / 60_000
    return {
        "workload": name,
        "ratios": [ratios.get(kind) for kind in ("plain", "ours/flat", "harness/flat", "opacus", "jax")],
        "minutes": [
            _minutes(minutes * ratios[kind]) if kind in ratios else "" for kind in ("plain", "harness/flat", "opacus")
        ],
    }


def _origin(rows: Sequence[Row]) -> str:
    """On what, with what, and at which commits rows were measured."""
    machines = []
    commits = []
    for row in rows:
        if hardware := row.get("hardware"):
            instructions = f" with {hardware['instructions']}" if hardware.get("instructions") else ""
            machines.append(f"{hardware['cores']} cores of an {hardware['cpu']}{instructions}")
        if row.get("commit"):
            number, plus, changes = row["commit"].partition("+")
            commits.append(f"{number[:10]}{plus}{changes} ({row['date']})")
    packages = []
    for label, key in {"PyTorch": "torch", "Opacus": "opacus", "JAX": "jax", "JAX Privacy": "jax-privacy"}.items():
        if versions := _list(row.get("versions", {}).get(key) for row in rows):
            packages.append(f"{label} {versions}")
    parts = {"on": _list(machines), "with": ", ".join(packages), "at commit": _list(commits)}
    return ", ".join(f"{word} {text}" for word, text in parts.items() if text)


def _users(rows: list[Row]) -> dict[str, Any]:
    """What the page of rounds of users shows."""
    tables = _by_workload(rows)
    lines = []
    for task, table in tables.items():
        by_method = {row["method"]: row for row in table}
        ours = by_method.get("ours")
        if ours and ours["asked_of_limit"] is not None:
            lines.append(judged(f"{task}: ours ÷ limit", ours["asked_of_limit"], ours["ratio_to_limit"], False))
        for peer in ("pfl", "flower"):
            faster = by_method.get(f"{peer} {MALLOC}", {}).get("ratio_to_ours")
            lines.append(judged(f"{task}: times faster than {peer}", _FASTER_THAN_PEERS, faster, True))
    return {
        "origins": _list((f"{row['commit']} ({row['date']})" for row in rows), ", "),
        "cpu": rows[0]["hardware"]["cpu"],
        "peers": _list(row["peer"] for row in rows),
        "turns": _list((str(row["turns"] or "") for row in rows), " or "),
        "limits": [row for row in rows if row["limit"]],
        "quiet": all(row["quiet"] for row in rows),
        "goals": lines,
        "tables": tables,
    }


def _networks(rows: list[Row]) -> dict[str, Any]:
    """What the page of networks shows."""
    lines = [
        judged("GPT-2 small with LoRA: engine ÷ plain", 1.1, _ratio(rows, "GPT-2 small with LoRA"), False),
        judged("small GPT, all weights: engine ÷ plain", 1.6, _ratio(rows, "small GPT"), False),
    ]
    return {
        "origin": _origin(rows),
        "loud": _list(row["workload"] for row in rows if not row["quiet"]),
        "turns": _list((str(row["turns"] or "") for row in rows), " or "),
        "goals": lines,
        "tables": {name: {row["method"]: row for row in table} for name, table in _by_workload(rows).items()},
    }


def _ratio(rows: Iterable[Row], workload: str) -> float | None:
    key = (workload, "engine")
    return next((row["ratio_to_plain"] for row in rows if (row["workload"], row["method"]) == key), None)


def _accuracy(rows: list[Row]) -> dict[str, Any]:
    """What the page of accuracies shows."""
    return {"origin": _origin(rows), "lines": accuracy.summary(rows), "errors": [row for row in rows if row["error"]]}


def _list(words: Iterable[str | None], separator: str = "; ") -> str:
    return separator.join(sorted({word for word in words if word}))


def _minutes(minutes: float) -> str:
    return f"{minutes:.1f}" if minutes < 10 else f"{minutes:,.0f}"


def _digits(value: float | None, digits: int) -> str:
    """So many significant digits, and no power of ten."""
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 10**digits else f"{value:.{digits}g}"


def _fixed(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _seconds(milliseconds: float | None) -> str:
    return f"{milliseconds / 1e3:.2f}" if milliseconds else "–"
