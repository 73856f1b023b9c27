"""docs/crash.md and docs/two_processes.md: what the logs say."""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from tests.endurance.runs import read

_HEAD = """\
# Killed at any moment

`make crash` kills `dpbench train` and `dpbench resume` with SIGKILL at random moments, resumes them, kills them again,
and lets them end. The run must then equal an undisturbed one: weights, optimizer state and ledger to the last byte, and
every metric and epsilon of result.json. All choices follow from the seed in `runs/endurance/crash.jsonl`.

Configurations: DP-SGD with momentum; adaptive quantile clipping with a private metric; discretized gradients with error
correction and Adam; a target epsilon with averaged weights; microbatches in pieces. The first two also on two
processes.
"""


def crash_page(folder: Path) -> str:
    """Runs that were killed, in Markdown.

    Args:
        folder: Of crash.jsonl.
    """
    return "\n".join([_HEAD, _crash(read(folder / "crash.jsonl")), _where()])


def two_processes_page(folder: Path) -> str:
    """Runs on two processes beside busy ones, in Markdown.

    Args:
        folder: Of two_processes.jsonl.
    """
    return "\n".join([_two_processes(read(folder / "two_processes.jsonl")), _where()])


def _where() -> str:
    from dpbench.code import versions
    from dpbench.harness.runs.provenance import commit, hardware

    machine, packages = hardware(), versions()
    return (
        f"Machine: {machine['cpu']}, {machine['cores']} cores; PyTorch {packages['torch']}, "
        f"Lightning {packages['pytorch-lightning']}; commit {(commit() or 'unknown')[:12]}.\n"
    )


def _crash(lines: list[dict[str, Any]]) -> str:
    ended = [line for line in lines if "differences" in line]
    runs = {line["run"] for line in ended}
    kills = [line for line in lines if "phase" in line and line["run"] in runs]
    good = sum(not line["differences"] for line in ended)
    phases = Counter((kill["phase"], kill["two"]) for kill in kills)
    ordinary = sum(kill["ordinary"] for kill in kills)
    whom = Counter(kill["whom"] for kill in kills if kill["two"])
    often = statistics.median(line["kills"] for line in ended) if ended else 0
    rows = [
        f"| {phase} | {phases[phase, False]} | {phases[phase, True]} |"
        for phase in sorted({phase for phase, _ in phases})
    ]
    return f"""\
## Figures

{len(kills)} kills in {len(ended)} runs (median {often:g} a run): **{good} of {len(ended)} runs ended identical.**

| killed in (as the folder shows) | one process | two processes |
| --- | --- | --- |
{chr(10).join(rows)}

{ordinary} kills hit ordinary processes, {len(kills) - ordinary} forks of one process that had imported everything.
On two processes the signal went to the parent {whom["parent"]} times, to a worker {whom["worker"]} times,
to all at once {whom["all"]} times.
"""


def _two_processes(lines: list[dict[str, Any]]) -> str:
    lost, died = sum(line["lost"] for line in lines), sum(line["died"] for line in lines)
    beside = "/".join(str(number) for number in sorted({line["beside"] for line in lines}))
    return f"""\
# Two processes on a busy machine

`make two-processes`: {len(lines)} trainings on two processes (`trainer=ddp_cpu`) beside {beside} busy ones.
**{lost} were lost**; in {died} a process died at its end, when nothing was left to lose.
"""
