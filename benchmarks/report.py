"""The page of a file of rows: ratios and what they mean first, then goals, explanations, and every figure."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from benchmarks.goals import FOUR, goals, older_goals
from benchmarks.methods import DRAWN, MALLOC, PURE, REFERENCE
from benchmarks.picture import draw
from benchmarks.rows import Row
from benchmarks.startup import STARTUP
from benchmarks.workloads import WORKLOADS
from dpbench.files import write_atomically

_EPOCHS, _TOLD = 60, "small_alexnet b128"  # of which workload a sentence tells
_PROFILE = "[docs/engine.md](../../docs/engine.md#what-is-not-reached-and-where-the-time-goes)"
_ENGINE, _HARNESS = "ours/flat", "harness/flat"
_COMPARISONS = ("ratio_to_limit", "cpu_ratio_to_limit", "speedup_over_opacus", "speedup_over_best_peer")
_LABELS = {  # methods in the picture
    REFERENCE: "plain PyTorch",
    "harness/no privacy": "whole harness, no privacy",
    _ENGINE: "engine, flat clipping",
    "ours/adaptive_quantile": "engine, adaptive clipping",
    "ours/discretized": "engine, discretized",
    f"{_ENGINE} {PURE}": "engine, flat clipping, no compiler",
    f"ours/discretized {PURE}": "engine, discretized, no compiler",
    _HARNESS: "whole harness, flat clipping",
    **{f"opacus/{mode} {MALLOC}": f"Opacus, {mode}" for mode in ("hooks", "functorch", "ghost")},
    "jax/vmap": "JAX, vmap",
    "jax/jax_privacy": "JAX Privacy",
}
_PICTURED = (*FOUR, "lstm b128", "attention b128")
_METHODS = {
    "plain/contiguous, plain/channels_last": "a step of ordinary PyTorch: forward, backward, SGD; images laid out as "
    "(N, C, H, W) or as (N, H, W, C) in memory.",
    DRAWN: "the same on lots whose sizes differ as Poisson sampling draws them, which the harness has and the engine's "
    "row has not.",
    "ours/flat, per_layer, adaptive_quantile, adaptive_mean, discretized": "the engine alone: forward, per-record "
    "gradients, clipping, noise, SGD. *flat* clips a record's whole gradient to one norm, *per_layer* each layer's; "
    "the *adaptive* ones follow a quantile or the mean of the norms; *discretized* makes every entry −1, 0 or 1.",
    "harness/…": "all that `dpbench train` does: the same step in Lightning's loop, with Poisson lots, ledger, metrics "
    "and progress bar. *no privacy* is that loop with `strategy=none`.",
    "opacus/hooks": "Opacus' `GradSampleModule`, which computes per-record gradients in hooks; for an LSTM or "
    "attention, with its `DPLSTM` or `DPMultiheadAttention`.",
    "opacus/functorch": "the same by `torch.func` (`force_functorch=True`).",
    "opacus/ghost": "Opacus' fast gradient clipping: norms first, then a second, weighted backward pass.",
    "jax/vmap": "the same network in JAX: `jit(vmap(grad))`, clipped by hand.",
    "jax/jax_privacy": "the same with `clipped_grad` of JAX Privacy.",
    f"… {PURE}": "the engine in PyTorch alone (tier 1), as on a machine without a compiler for C++; without this word "
    "its own kernels are used (tier 2).",
    f"… {MALLOC}": "the C library's allocator as it comes. All others keep large blocks of memory, as `dpbench train` "
    "does.",
    "… compiled": "through `torch.compile`.",
}


def report(rows: list[Row], stem: Path) -> None:
    """Write STEM.md and STEM.png."""
    draw([row for row in rows if row["workload"] in _PICTURED], stem.with_suffix(".png"), _LABELS)
    write_atomically(stem.with_suffix(".md"), markdown(rows, stem.name))


def markdown(rows: list[Row], name: str) -> str:
    """What was measured, ratios and minutes, the picture, goals, explanations, a table for each workload."""
    lines = [
        f"# The time of a private step: {name}",
        "",
        "Training with differential privacy costs more than training without it: the gradient of every single record "
        "is clipped before the sum is noised. This page says how much more, in dpbench and elsewhere. "
        f"{_measured(rows)}",
        "",
        *_summary(rows),
        *([f"![Time relative to the limit]({name}.png)", ""] if any(_pictured(row) for row in rows) else []),
        "## Goals",
        "",
        *_goals_table(goals(rows)),
        "",
        f"Where the time goes that is missing: {_PROFILE}.",
        "",
        "### Older goals",
        "",
        "The goals above took the place of goals for flat clipping (1.15 × the limit for mnist_cnn, 1.3 for mlp, 1.1 "
        "for the others), for discretization without a compiler (1.4 × flat) and for the harness (1.1 × the engine on "
        "mnist_cnn).",
        "",
        *_goals_table(older_goals(rows)),
        "",
        *_explanations(rows),
        "## Every figure",
        "",
        "Ratios first: the less, the better for '÷', the more, the better for '×'.",
    ]
    for workload in [w for w in WORKLOADS if any(row["workload"] == w for row in rows)]:
        lines += ["", f"### {workload}", "", *table([row for row in rows if row["workload"] == workload])]
    startup = [row for row in rows if row["workload"] == STARTUP]
    return "\n".join([*lines, *(_startup(startup) if startup else [])]) + "\n"


def _pictured(row: Row) -> bool:
    return row["workload"] in _PICTURED and row["method"] in _LABELS and bool(row["ratio_to_limit"])


def _goals_table(lines: list[str]) -> list[str]:
    return [
        "| goal | asked | reached | the same in CPU time of one thread | |",
        "| --- | ---: | ---: | ---: | --- |",
        *lines,
    ]


def _measured(rows: list[Row]) -> str:
    """On what, with what, when, and whether in quiet."""
    machines = _several(_machine(row) for row in rows if row.get("hardware"))
    packages = {"PyTorch": "torch", "Opacus": "opacus", "JAX": "jax", "JAX Privacy": "jax-privacy"}
    found = {label: _several(row.get("versions", {}).get(key) for row in rows) for label, key in packages.items()}
    versions = ", ".join(f"{label} {version}" for label, version in found.items() if version)
    origins = _several(f"{_short(row['commit'])} ({row['date']})" for row in rows if row.get("commit"))
    loud = _several(row["workload"] for row in rows if not row["quiet"])
    facts = [f"on {machines}" if machines else "", f"with {versions}" if versions else ""]
    facts = [fact for fact in (*facts, f"at commit {origins}" if origins else "") if fact]
    return (
        f"`make bench` measured it {', '.join(facts)}. "
        + (
            f"The machine was not quiet when these began: {loud}. "
            if loud
            else "The machine was quiet whenever a measurement began. "
        )
        + "GPUs have pages of their own, by `python -m benchmarks gpu`."
    )


def _machine(row: Row) -> str:
    hardware = row["hardware"]
    instructions = f" with {hardware['instructions']}" if hardware.get("instructions") else ""
    return f"{hardware['cores']} cores of an {hardware['cpu']}{instructions}"


def _short(commit: str) -> str:
    """Its first digits, and whether something was changed."""
    number, plus, changes = commit.partition("+")
    return number[:10] + plus + changes


def _several(words: Iterable[str | None]) -> str:
    return "; ".join(sorted({word for word in words if word}))


def _summary(rows: list[Row]) -> list[str]:
    """Ratios, and minutes that follow from them, of the workloads that stand for all."""
    found = {name: costs for name in FOUR if (costs := _costs(name, rows)) is not None}
    if not found:
        return []
    lines = [
        "| time of a step ÷ plain | plain | engine | harness | Opacus | JAX "
        f"| {_EPOCHS} epochs: plain | dpbench | Opacus |",
        f"| --- |{' ---: |' * 8}",
    ]
    for name, (ratios, minutes) in found.items():
        cells = [*(_number(ratio, 3) for ratio in ratios), *(f"{time} min" if time else "–" for time in minutes)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    plain, ours, opacus = found[_TOLD][1] if _TOLD in found else ("", "", "")
    told = (
        f"{_EPOCHS} epochs of {_TOLD} take {plain} minutes without privacy, {ours} with dpbench and {opacus} "
        "with Opacus. "
    )
    explained = (
        "*Plain* is the fastest step of PyTorch without privacy, *engine* our private step alone (`ours/flat`), "
        "*harness* with all that `dpbench train` does around it (`harness/flat`), *Opacus* its fastest mode as it "
        "comes, *JAX* the faster of its two ways; b256 means lots of 256 records. Minutes are those of "
        f"{_EPOCHS} epochs of MNIST (60,000 records) or, for the last two networks, CIFAR-10 (50,000), without tests: "
        "measured milliseconds times steps. Those of dpbench are the harness's."
    )
    return [*lines, "", (told if plain and ours and opacus else "") + explained, ""]


def _costs(name: str, rows: list[Row]) -> tuple[list[float | None], list[str]] | None:
    """Times of a step relative to the limit, and minutes without privacy, with the harness and with Opacus."""
    own = [row for row in rows if row["workload"] == name]
    limit = min((row["wall_ms"] for row in own if row["ratio_to_limit"] == 1), default=None)
    if limit is None:
        return None
    ratios = [1.0, *(_best(own, method) for method in (_ENGINE, _HARNESS, "opacus/", "jax/"))]
    whole = limit * _EPOCHS * WORKLOADS[name].records / WORKLOADS[name].batch / 60_000
    return ratios, [_minutes(whole * ratio) if ratio else "" for ratio in (ratios[0], ratios[2], ratios[3])]


def _minutes(minutes: float) -> str:
    return f"{minutes:.1f}" if minutes < 10 else f"{minutes:,.0f}"


def _best(rows: list[Row], method: str) -> float | None:
    """Least ratio of a method or, where it ends in a slash, of a family: of Opacus at its defaults."""
    found = [
        row["ratio_to_limit"]
        for row in rows
        if (row["method"] == method or (method.endswith("/") and row["method"].startswith(method)))
        and (not method.startswith("opacus/") or MALLOC in row["method"])
    ]
    return min((ratio for ratio in found if ratio), default=None)


def _drawn_from(rows: list[Row]) -> str:
    """What the harness draws its lots from."""
    if all(row.get("records") for row in rows if row["method"].startswith("harness/")):
        return (
            "The harness draws its lots from as many records as MNIST (60,000) or CIFAR-10 (50,000) has, of noise in "
            "their shape, so that no files are needed."
        )
    return (
        "The harness drew its lots from 1,437 digits, whose epochs end after six steps, or from CIFAR-10; now it draws "
        "them from as many records as MNIST or CIFAR-10 has."
    )


def _sizes(rows: list[Row]) -> str:
    """What became of slow steps and of lots that differ in size."""
    if any(row["method"] == DRAWN for row in rows):
        return (
            "Steps of a second or more have three to five turns, of one step each: their ratios are good to a tenth. "
            "Where lots differ in size, time is taken in proportion to their records, after 60 lots (or 30 seconds) "
            "that do not count, for each number of threads: PyTorch prepares an operator anew for each size of a lot, "
            "and a run of minutes has met nearly all sizes."
        )
    return (
        "Steps of a second or more had two or three turns, of one step each: their ratios are good to a tenth or two, "
        "and those of the whole harness, whose lots differ in size, are the worst known (it warmed for three seconds "
        "and with one number of threads, in which few sizes occur)."
    )


def _explanations(rows: list[Row]) -> list[str]:
    return [
        "## What the methods are",
        "",
        *(f"- `{names}`: {what}" for names, what in _METHODS.items()),
        "",
        "## What the limit is",
        "",
        "The limit is the fastest step without privacy of the same network on the same lot, in whichever layout was "
        "fastest, and compiled where the table has that. A private step does all of its work (forward and backward "
        "pass, the sum of gradients, the optimizer's step) and more: norms, weights and noise. So it can hardly be "
        "faster, and what is above 1 is the price of privacy together with what our code leaves undone. Ratios "
        "slightly below 1 happen where our kernels sum gradients faster than PyTorch's.",
        "",
        "## How it was measured",
        "",
        "Wall time is of two threads, CPU time of one: medians of turns of about a quarter of a second, in which the "
        "methods, each in a process of its own, alternate while the others wait. "
        f"{_sizes(rows)} Peers are measured after ours, since "
        f"memory does not suffice for all at once; every ratio is of times over that of `{REFERENCE}` in the same "
        "minutes. Two processes of one method differ by up to 15 % on the small networks, by where their memory "
        "happens to lie. Memory is what the first two steps took beyond model and data. '× Opacus' is against its "
        f"best mode at its defaults, that is with `{MALLOC}`; '× best peer' against the best of Opacus and JAX with "
        f"either allocator, where both were measured. {_drawn_from(rows)} Start-up times are of processes from their "
        "start to their end, or to the first release in the ledger: medians of three, with the number of threads that "
        "a user has.",
        "",
    ]


def table(rows: list[Row]) -> list[str]:
    """Lines of a workload's table."""
    lines = [
        "| method | ÷ limit | CPU ÷ limit | × Opacus | × best peer | wall ms | CPU ms | records/s | memory MB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        cells = [
            row["method"],
            *(_number(row[key], 3) for key in _COMPARISONS),
            _number(row["wall_ms"], 4),
            _number(row["cpu_ms"], 4),
            _number(row["records_per_s"], 4),
            _number(row["peak_mb"], 3),
        ]
        lines.append(
            f"| {' | '.join(cells)} |" if not row["error"] else f"| {row['method']} | {row['error']} " + "| " * 7 + "|"
        )
    return lines


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 10**digits else f"{value:.{digits}g}"


def _startup(rows: list[Row]) -> list[str]:
    lines = ["", f"### {STARTUP}", "", "| command | CPU s | wall s |", "| --- | ---: | ---: |"]
    for row in rows:
        times = row["cpu_ms"], row["wall_ms"]
        cells = [row["error"], ""] if row["error"] else [f"{ms / 1e3:.2f}" if ms else "–" for ms in times]
        lines.append(f"| {row['method']} | {' | '.join(cells)} |")
    return lines
