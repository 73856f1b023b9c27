"""The table of what a round of users costs."""

from __future__ import annotations

from pathlib import Path

from benchmarks.goals import goal_row
from benchmarks.methods import MALLOC
from benchmarks.rows import Row
from benchmarks.users.measure import FLOWER, OURS, PFL
from dpbench.files import write_atomically
from dpbench.reports.markdown import markdown_rows

_FASTER = 2.0  # than a peer: the goal


def report(rows: list[Row], stem: Path) -> None:
    """Write STEM.md."""
    write_atomically(stem.with_suffix(".md"), markdown(rows, stem.name))


def markdown(rows: list[Row], name: str) -> str:
    """Goals, then a table for each task."""
    tasks = list(dict.fromkeys(row["workload"] for row in rows))
    origins = sorted({f"{row['commit']} ({row['date']})" for row in rows})
    peers = sorted({row["peer"] for row in rows if row["peer"]})
    loud = [] if all(row["quiet"] for row in rows) else ["Other work ran on the machine meanwhile.", ""]
    turns = sorted({row["turns"] for row in rows if row["turns"]})
    lines = [
        f"# A round of users: {name}",
        "",
        f"Made by `make bench-users` at {', '.join(origins)}, {rows[0]['hardware']['cpu']}, one thread"
        f"{', with ' + '; '.join(peers) if peers else ''}. CPU seconds of a round of users (emnist_cnn 5x20: "
        "5 local steps on 20 images each; char_lstm 5x4: 5 on 4 sequences of 80 characters; mlp_2nn: the network of "
        "`mnist_writers`): medians of "
        f"{' or '.join(map(str, turns))} turns, in each of which every method makes a round while the others wait; "
        "ratios are medians of those within a turn.",
        "",
        "- **limit**: gradients of the same rows at one point, without local steps, in the batch size and layout that "
        f"were fastest here ({'; '.join(_limits(rows))}).",
        "- **naive**: `copy.deepcopy` and a `torch.optim.SGD` for each user, clipped sum, noise, server SGD.",
        "- **ours**: a Lightning `Trainer` with `DPSGD(records=Users(...))`: lots, checks, clipping, noise, ledger.",
        "- **pfl**: pfl-research's simulation with its central Gaussian mechanism. *Users evaluated*: as in rounds in "
        "which pfl takes metrics of every user, before and after its training.",
        "- **flower**: Flower's simulation, one Ray worker on one core, clients in memory; it averages only, which is "
        "less than a private round. *Private*: clipped and noised by Flower, on the server. CPU time is that of the "
        "driver and of all processes below it, Ray's own included, from /proc.",
        f"- *{MALLOC}*: without what `dpbench train` sets; peers are judged as they come.",
        "",
        *loud,
        "## Goals",
        "",
        "| goal | asked | reached | |",
        "| --- | ---: | ---: | --- |",
        *(line for task in tasks for line in goals(task, [row for row in rows if row["workload"] == task])),
    ]
    for task in tasks:
        own = [row for row in rows if row["workload"] == task]
        lines += ["", f"## {task}, {own[0]['users']} users", "", _table(own)]
    return "\n".join(lines) + "\n"


def goals(task: str, rows: list[Row]) -> list[str]:
    """Lines of the goals' table."""
    at = {row["method"]: row for row in rows}
    lines = []
    if OURS in at and at[OURS]["asked_of_limit"] is not None:
        lines.append(goal_row(f"{task}: ours ÷ limit", at[OURS]["asked_of_limit"], at[OURS]["ratio_to_limit"]))
    for peer in (PFL, FLOWER):
        faster = at[peer]["ratio_to_ours"] if peer in at else None
        lines.append(goal_row(f"{task}: times faster than {peer.split()[0]}", _FASTER, faster, more=True))
    return lines


def _limits(rows: list[Row]) -> list[str]:
    return [f"{row['limit']} for the {row['workload']}" for row in rows if row["limit"]]


def _table(rows: list[Row]) -> str:
    lines = [["method", "CPU s", "least to most", "wall s", "CPU ÷ limit", "CPU ÷ ours"]]
    for row in rows:
        if row["error"] or not row["cpu_s"]:
            lines.append([row["method"], row["error"] or "–", *"–" * 4])
            continue
        least, most = row["cpu_s_range"]
        ratios = (row["ratio_to_limit"], row["ratio_to_ours"])
        cells = [f"{row['cpu_s']:.2f}", f"{least:.2f} – {most:.2f}", f"{row['wall_s']:.2f}"]
        lines.append([row["method"], *cells, *("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios)])
    return markdown_rows(lines)
