"""What a workflow leaves: its steps in words, tables as CSV and Markdown, a picture and a page."""

from __future__ import annotations

import io
import math
import shlex
import textwrap
from dataclasses import asdict
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from dpbench.code import code_hash
from dpbench.errors import ConfigurationError
from dpbench.files import write_atomically
from dpbench.reports.figures import new_figure, write_figure
from dpbench.reports.markdown import markdown_rows
from dpbench.reproduce.workflow.measure import POWER, Outcome, Recall
from dpbench.reproduce.workflow.plan import Plan
from dpbench.runs.readers import read_csv

NOISE_RUNS, DATA_RUNS = "noise.csv", "data.csv"
_BLUE, _RED, _GRAY, _GREEN = "#3060a8", "#c04030", "#808080", "#508850"
_CAVEATS = (
    "Passing is no guarantee; ε is. The check shows what this network learned of random labels with this seed, and no "
    "attack that is better than looking at its outputs.",
    "That DP at ε = 20 prevents memorization (three_tools_2018, section 2.1) is a fact about one network: at ε = 20 a "
    "multilayer perceptron recalled 59 % of the random labels of 2,000 images.",
    "Choosing the noise on noise costs no privacy: it is public. Whatever is chosen by looking at runs on the private "
    "data (also at their accuracy) is not covered by the ε of one run.",
    "The limits cover which images were drawn, not other seeds, and each holds by itself.",
    "The audited ε of the runs on noise is of final weights, on noise; that of the runs on data is of other runs, "
    "with canaries, whose models learned from these. Audits are lower bounds with 95 % confidence.",
)  # fmt: skip


def head_text(plan: Plan) -> str:
    """What is trained, and step 0: the lot."""
    rate, epochs = plan.lot / plan.records, plan.steps * plan.lot / plan.records
    given = "as asked for" if plan.lot_given else f"as data={plan.data} has it"
    lines = [
        f"workflow: {plan.model} on {plan.data}, {plan.records:,} records, {plan.steps:,} steps, delta={plan.delta:g}, "
        f"seed {plan.seed}",
        f"0 lot      {plan.lot:g} expected records, {given} (rate {rate:.3g}, {epochs:.3g} epochs). The largest for",
        "           which there is time is best: less noise per record at equal epsilon; any fits into memory with",
        "           strategy.max_physical_batch_size. data.expected_batch_size sets it; scale optimizer.lr with it.",
    ]
    return "\n".join(lines)


def power_text(plan: Plan, power: Recall) -> str:
    """Step 1: whether the check could see memorization at all."""
    told = f"1 power    without privacy {_percent(power.recalled)} of the random labels are recalled"
    if power.recalled > POWER:
        return f"{told} (above {_percent(POWER)}): memorization can be seen"
    return (
        f"{told}, not above {_percent(POWER)}: the check could not see memorization, and proves nothing.\n"
        f"           Train longer (trainer.max_steps={2 * plan.steps}) or at a higher rate (optimizer.lr, "
        "optimizer=momentum, schedule=linear)."
    )


def noise_text(outcome: Outcome) -> str:
    """Step 2: the runs on noise."""
    head = "2 noise    a z passes if training labels are recalled less than"
    head += f" {_points(outcome.margin)} better than fresh ones (upper 95 % limit)"
    return "\n".join([head, *("           " + line for line in markdown_rows(_noise_cells(outcome), 0).splitlines())])


def chosen_text(outcome: Outcome) -> str:
    """Step 3: the noise that was chosen, or what to do."""
    chosen, least, most = outcome.chosen, outcome.noise[0], outcome.noise[-1]
    if chosen is None:
        return (
            f"3 chosen   none: at z = {most.noise_multiplier:g} the limit is {_points(most.limit)}, and it is the most "
            "that was tried.\n           Ask for more noise (--noise-multipliers), fewer steps, larger batches, or a "
            "wider --margin."
        )
    epsilon = _number(chosen.epsilon)
    told = f"3 chosen   z = {chosen.noise_multiplier:g}, epsilon {epsilon}: it passes, and so does all more noise"
    if chosen is least:
        return f"{told}; the least that was tried, and less may pass too (--noise-multipliers)"
    below = outcome.noise[: outcome.noise.index(chosen)]
    doubted = any(one.passes(outcome.margin) for one in below)
    return f"{told}; of less noise some passes and some does not, and is not trusted" if doubted else told


def data_text(outcome: Outcome) -> str:
    """Step 4: the runs on the data, and what all of this does not say."""
    lines = ["4 data     the same training on the data themselves"]
    lines += ["           " + line for line in markdown_rows(_data_cells(outcome), 1).splitlines()]
    if outcome.plan.dropped:
        lines.append(f"           adaptive_mean has no {', '.join(outcome.plan.dropped)}")
    notes = [textwrap.fill(line, 120, initial_indent="  note     ", subsequent_indent=" " * 11) for line in _CAVEATS]
    return "\n".join([*lines, *notes])


def _noise_cells(outcome: Outcome) -> list[list[str]]:
    head = [
        "z",
        "ε (RDP)",
        "ε (PLD)",
        "training labels (%)",
        "fresh (%)",
        "gap",
        "95 % limit",
        "ε ≥ (labels)",
        "passes",
    ]
    lines = [head]
    for one in [*([outcome.power] if outcome.power else []), *outcome.noise]:
        private = one.noise_multiplier is not None
        lines.append(
            [
                f"{one.noise_multiplier:g}" if private else "none",
                _number(one.epsilon_rdp) if private else "∞",
                _number(one.epsilon_pld) if private else "∞",
                f"{100 * one.recalled:.1f}",
                f"{100 * one.guessed:.1f}",
                f"{100 * (one.recalled - one.guessed):.1f}",
                f"{100 * one.limit:.1f}",
                (_number(one.audited) + (" !" if one.verdict != "CONSISTENT" else "")) if private else "–",
                ("chosen" if one is outcome.chosen else "yes" if one.passes(outcome.margin) else "no")
                if private
                else "–",
            ]
        )
    return lines


def _data_cells(outcome: Outcome) -> list[list[str]]:
    lines = [["strategy", "test accuracy (%)", "ε claimed (RDP)", "ε sound", "audited ε ≥", "of sound", "verdict"]]
    for one in outcome.data:
        private = one.noise_multiplier is not None
        lines.append(
            [
                one.strategy if private else "no privacy",
                "–" if one.accuracy is None else f"{100 * one.accuracy:.2f}",
                _number(one.claimed) if private else "∞",
                _number(one.sound) if private else "∞",
                _number(one.audited),
                _number(one.audited_sound),
                one.verdict or "–",
            ]
        )
    return lines


def _number(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _points(share: float) -> str:
    return f"{100 * share:.3g} points"


def conflicting(folder: Path, plan: Plan) -> str | None:
    """What a folder holds that this workflow would wipe out; None: nothing."""
    path = folder / NOISE_RUNS
    if not path.is_file():
        return None
    old = read_csv(path, ["words", "code_hash"], "restore {path}, or move it away", ("words", "code_hash", "*"))
    if set(old["code_hash"].astype(str)) != {code_hash()}:
        return "a workflow that other code has made"
    words = {" ".join(plan.on_noise().words_of(row, plan.on_noise().columns[0])) for row in plan.on_noise().rows}
    others = [text for text in old["words"].astype(str) if text.partition(" seed=")[0] not in words]
    return f"a workflow with other settings (such as {others[0]})" if others else None


def write_page(folder: Path, outcome: Outcome) -> None:
    """Write noise.csv, data.csv, table.md, figure.png and README.md.

    Args:
        folder: Where to; made.
        outcome: With a power check at least.
    """
    if outcome.power is None:
        raise ConfigurationError("there is nothing to write yet.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, found in ((NOISE_RUNS, [outcome.power, *outcome.noise]), (DATA_RUNS, outcome.data)):
        if found:
            text = io.StringIO()
            pd.DataFrame([asdict(one) for one in found]).to_csv(text, index=False, lineterminator="\n")
            write_atomically(folder / name, text.getvalue())
    tables = [markdown_rows(_noise_cells(outcome), 0)]
    tables += [markdown_rows(_data_cells(outcome), 1)] if outcome.data else []
    write_atomically(folder / "table.md", "\n\n".join(tables) + "\n")
    if outcome.noise:
        _draw(folder / "figure.png", outcome)
    write_atomically(folder / "README.md", _page(outcome, tables))


def _page(outcome: Outcome, tables: list[str]) -> str:
    plan = outcome.plan
    command = f"dpbench workflow {shlex.join(plan.words)}" + (f" seed={plan.seed}" if plan.seed else "")
    settings = f"--margin {100 * outcome.margin:g}"
    settings += " --noise-multipliers " + ",".join(f"{z:g}" for z in plan.noise)
    assert outcome.power is not None
    lines = [
        f"# Calibrated on noise, then trained: {plan.model} on {plan.data}",
        "",
        "three_tools_2018, section 3, as a command (docs/workflow.md):",
        "",
        f"```\n{command} {settings}\n```",
        "",
        "```",
        head_text(plan),
        power_text(plan, outcome.power),
        *([chosen_text(outcome)] if outcome.noise else []),
        "```",
        "",
        "On noise of the data's size and shape with random labels; the same lots, steps and model. Shares",
        "of labels that the final weights give, of training images and of fresh ones; ε ≥: audit by labels",
        "(docs/audit.md).",
        "",
        tables[0],
        "",
        *(["![figure](figure.png)", ""] if outcome.noise else []),
    ]
    if outcome.data:
        lines += ["On the data. Audited is another run of each, with canaries among its records:", "", tables[1], ""]
        lines += [f"adaptive_mean has no {', '.join(plan.dropped)}.\n"] if plan.dropped else []
    return "\n".join([*lines, "What this does not say:", "", *(f"* {line}" for line in _CAVEATS), ""])


def _draw(path: Path, outcome: Outcome) -> None:
    """Accuracies on noise over ε, with what passes; and the audit by labels under the sound ε."""
    found = [one for one in outcome.noise if one.epsilon is not None]
    figure = new_figure(11, 4.2)
    left, right = figure.subplots(1, 2)
    epsilons = [one.epsilon or math.nan for one in found]
    _draw_recall(left, outcome, found, epsilons)
    right.plot(epsilons, epsilons, color=_RED, label="sound ε")
    limits = [math.nan if one.audited is None else one.audited for one in found]
    right.plot(epsilons, limits, color=_BLUE, marker="o", label="audited by labels, at least")
    right.set(xscale="log", yscale="log", xlabel="sound ε", ylabel="ε")
    for axis in (left.xaxis, right.xaxis, right.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    for ax in (left, right):
        if outcome.chosen is not None and outcome.chosen.epsilon is not None:
            ax.axvline(
                outcome.chosen.epsilon,
                color=_GREEN,
                linewidth=1,
                label=f"chosen: z = {outcome.chosen.noise_multiplier:g}",
            )
        ax.legend(frameon=False, fontsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{outcome.plan.model}, noise of the size of {outcome.plan.data} ({outcome.plan.records:,} records)"
    )
    write_figure(path, figure)


def _draw_recall(ax: Axes, outcome: Outcome, found: list[Recall], epsilons: list[float]) -> None:
    assert outcome.power is not None
    fresh = [100 * one.guessed for one in found]
    ax.axhline(100 * outcome.power.recalled, color=_GRAY, linestyle="--", linewidth=1, label="without privacy")
    ax.plot(epsilons, [100 * one.recalled for one in found], color=_BLUE, marker="o", label="training labels")
    upper = [100 * (one.guessed + one.limit) for one in found]
    ax.plot(epsilons, upper, color=_BLUE, linestyle=":", label="95 % limit of the gap, on top of fresh ones")
    ax.plot(epsilons, fresh, color=_GRAY, marker="o", label="fresh labels")
    top = [value + 100 * outcome.margin for value in fresh]
    ax.fill_between(
        epsilons, fresh, top, color=_GREEN, alpha=0.15, linewidth=0, label="limit within the margin: passes"
    )
    ax.set(xscale="log", xlabel="sound ε of the run", ylabel="recalled random labels (%)", ylim=(0, 102))
