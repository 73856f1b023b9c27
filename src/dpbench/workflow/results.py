"""What a workflow has found: labels that are recalled, epsilons, the noise that is chosen, and a page of all that."""

from __future__ import annotations

import json
import math
import shlex
import textwrap
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from scipy import stats

from dpbench.code import code_hash
from dpbench.files import write_atomically, write_json
from dpbench.privacy.canaries.labels import LabelScores
from dpbench.reports.audit import audit_by_labels, audit_run
from dpbench.reports.figures import new_figure, write_figure
from dpbench.reproduce.jobs import Job
from dpbench.run.label_scores import label_scores
from dpbench.runs.numbers import ABSENT
from dpbench.runs.readers import read_csv
from dpbench.templates import render
from dpbench.workflow.plan import Plan

_FOLDER = Path(__file__).parent
POWER = 0.9
"""Share of the random labels that training without privacy has to recall: else the check could not see memorization."""
CONFIDENCE = 0.95
NOISE_RUNS = "noise.csv"
DATA_RUNS = "data.csv"
_SCORES = "label_scores.json"  # in the folder of a run on noise
_BLUE = "#3060a8"
_RED = "#c04030"
_GRAY = "#808080"
_GREEN = "#508850"
_CAVEATS = (
    "Passing is not a guarantee; ε is. The check shows what this network learned of random labels with this seed, as "
    "far as its outputs reveal it.",
    "That DP at ε = 20 prevents memorization (three_tools_2018, section 2.1) is a fact about one network: at ε = 20 a "
    "multilayer perceptron recalled 59 % of the random labels of 2,000 images.",
    "Choosing the noise on noise costs no privacy: it is public. Whatever is chosen by looking at runs on the private "
    "data (also at their accuracy) is not covered by the ε of one run.",
    "The limits cover which images were drawn, not other seeds, and each holds separately.",
    "The audited ε of the runs on noise is of final weights, on noise; that of the runs on data is of other runs, "
    "with canaries, whose models learned from these. Audits are lower bounds with 95 % confidence.",
)  # fmt: skip


@dataclass(frozen=True)
class Recall:
    """What a run on noise shows.

    Attributes:
        noise_multiplier: z; None without privacy.
        epsilon_rdp: ε by RDP; None without privacy, or where it is not computed.
        epsilon_pld: The same by privacy loss distributions.
        recalled: Share of the training labels that the final weights give.
        guessed: The same of fresh noise.
        limit: Upper confidence limit of the difference; see `upper_limit`.
        audited: Lower limit of ε by labels.
        verdict: Of that audit.
        seconds: Of the training.
        words: After `dpbench train`.
        code_hash: Of the source that ran it.
    """

    noise_multiplier: float | None
    epsilon_rdp: float | None
    epsilon_pld: float | None
    recalled: float
    guessed: float
    limit: float
    audited: float | None
    verdict: str | None
    seconds: float
    words: str
    code_hash: str

    def passes(self, margin: float) -> bool:
        """Whether the training labels are recalled less than `margin` better than fresh ones, with confidence."""
        return self.limit < margin

    @property
    def epsilon(self) -> float | None:
        """The tighter ε that there is."""
        return self.epsilon_rdp if self.epsilon_pld is None else self.epsilon_pld


def upper_limit(recalled: float, records: int, guessed: float, others: int, confidence: float = CONFIDENCE) -> float:
    """Upper one-sided limit of the difference of two shares of independent records (normal approximation).

    Args:
        recalled: Share of the training records.
        records: How many there are.
        guessed: Share of the others.
        others: How many there are.
        confidence: That the limit is none too low.

    >>> round(upper_limit(0.167, 2000, 0.10, 2000), 3)
    0.085
    """
    variance = recalled * (1 - recalled) / records + guessed * (1 - guessed) / others
    return recalled - guessed + float(stats.norm.ppf(confidence)) * math.sqrt(variance)


def recall_of(job: Job, noise_multiplier: float | None) -> Recall:
    """Measure what a finished run on noise shows.

    Raises:
        DPBenchError: Its files are damaged.
    """
    record = job.result()
    assert record is not None
    scores = _scores_of(job)
    # Without privacy there is no ε to refute.
    audit = None if noise_multiplier is None else audit_by_labels(job.run, scores, CONFIDENCE).result
    return Recall(
        noise_multiplier=noise_multiplier,
        epsilon_rdp=record["privacy"]["epsilon"].get("rdp"),
        epsilon_pld=record["privacy"]["epsilon"].get("pld"),
        recalled=scores.recalled,
        guessed=scores.guessed,
        limit=upper_limit(scores.recalled, len(scores.members), scores.guessed, len(scores.others)),
        audited=audit.audited if audit else None,
        verdict=str(audit.verdict) if audit else None,
        seconds=record["seconds"],
        words=" ".join(job.words),
        code_hash=job.code_hash,
    )


def _scores_of(job: Job) -> LabelScores:
    """Scores by a run's final weights, cached in its folder, whose name holds the hash of what computes them."""
    path = job.path / _SCORES
    with suppress(OSError, ValueError, TypeError):
        content = json.loads(path.read_text(encoding="utf-8"))
        arrays: dict[str, Any] = {name: np.array(content.pop(name)) for name in ("members", "others")}
        return LabelScores(**arrays, **content)
    scores = label_scores(job.run)
    write_json(path, {name: np.asarray(value).tolist() for name, value in vars(scores).items()})
    return scores


def choose(recalls: Sequence[Recall], margin: float) -> Recall | None:
    """Choose the run of the least noise that passes, and all with more noise too; None if that of the most does not.

    Args:
        recalls: Private runs on noise, in any order.
        margin: See `Recall.passes`.
    """
    chosen = None
    for recall in sorted(recalls, key=lambda recall: recall.noise_multiplier or 0.0, reverse=True):
        # A run of less noise that passes beside one that does not has passed by chance.
        if not recall.passes(margin):
            break
        chosen = recall
    return chosen


@dataclass(frozen=True)
class Trained:
    """A run on the data themselves, with the audit of another one like it.

    Attributes:
        strategy: Its name.
        noise_multiplier: z; None without privacy.
        accuracy: On test data.
        claimed: ε of its ledger by RDP, nominal where that does not cover the lots; None without privacy.
        sound: The tightest ε that covers its lots.
        audited: Lower limit of ε of a run with canaries.
        audited_sound: The sound ε of that run, which has more records.
        verdict: Of that audit.
        seconds: Of the training.
        words: After `dpbench train`.
        code_hash: Of the source that ran it.
    """

    strategy: str
    noise_multiplier: float | None
    accuracy: float | None
    claimed: float | None
    sound: float | None
    audited: float | None
    audited_sound: float | None
    verdict: str | None
    seconds: float
    words: str
    code_hash: str


def trained(job: Job, audited: Job | None, noise_multiplier: float | None) -> Trained:
    """Read a finished run on data, with what the finished run with canaries shows, where there is one.

    Raises:
        DPBenchError: Files are damaged.
    """
    record = job.result()
    assert record is not None
    audit = None if audited is None else audit_run(audited.path, CONFIDENCE).result
    epsilons: dict[str, Any] = record["privacy"]["epsilon"]
    sound = epsilons.get("pld")
    return Trained(
        strategy=job.row,
        noise_multiplier=noise_multiplier,
        accuracy=record["metrics"].get("test/accuracy"),
        claimed=epsilons.get("rdp"),
        sound=epsilons.get("rdp") if sound is None else sound,
        audited=audit.audited if audit else None,
        audited_sound=audit.sound if audit else None,
        verdict=str(audit.verdict) if audit else None,
        seconds=record["seconds"],
        words=" ".join(job.words),
        code_hash=job.code_hash,
    )


@dataclass
class Outcome:
    """What a workflow has found so far.

    Attributes:
        plan: What it trains.
        margin: See `Recall.passes`.
        power: The run without privacy on noise.
        noise: The private runs on noise, by increasing noise.
        chosen: Of these.
        data: The runs on the data.
    """

    plan: Plan
    margin: float
    power: Recall | None = None
    noise: list[Recall] = field(default_factory=list)
    chosen: Recall | None = None
    data: list[Trained] = field(default_factory=list)

    @property
    def is_doubtful(self) -> bool:
        """Whether a run of less noise than the chosen one passes, too, although one between them does not."""
        chosen = self.chosen
        if chosen is None:
            return False
        less_noise = self.noise[: self.noise.index(chosen)]
        return any(recall.passes(self.margin) for recall in less_noise)


def steps_text(outcome: Outcome, *steps: str) -> str:
    """Say what some steps have found.

    Args:
        outcome: With what they have found.
        steps: Of "lot", "power", "noise", "chosen" and "data".
    """
    text = render(
        _FOLDER / "steps.txt.jinja",
        outcome=outcome,
        steps=steps,
        power=POWER,
        noise_table=_noise_table(outcome),
        data_table=_data_table(outcome),
        caveats=_CAVEATS,
        number=_number,
        fill=partial(
            textwrap.fill,
            width=120,
            initial_indent="  note     ",
            subsequent_indent=" " * 11,
        ),
    )
    return text.rstrip("\n")


def _noise_table(outcome: Outcome) -> str:
    runs = [outcome.power, *outcome.noise] if outcome.power else []
    return render(
        _FOLDER / "noise.md.jinja",
        outcome=outcome,
        runs=runs,
        number=_number,
    ).rstrip()


def _data_table(outcome: Outcome) -> str:
    return render(_FOLDER / "data.md.jinja", outcome=outcome, number=_number).rstrip()


def _number(value: float | None) -> str:
    return ABSENT if value is None or not math.isfinite(value) else f"{value:.2f}"


def conflicting(folder: Path, plan: Plan) -> str | None:
    """What a folder holds that this workflow would wipe out; None: nothing."""
    path = folder / NOISE_RUNS
    if not path.is_file():
        return None
    old = read_csv(path, ["words", "code_hash"], "restore {path}, or move it away", ("words", "code_hash", "*"))
    if set(old["code_hash"].astype(str)) != {code_hash()}:
        return "a workflow that other code has made"
    table = plan.on_noise()
    words = {" ".join(table.words_of(row, table.columns[0])) for row in table.rows}
    for text in old["words"].astype(str):
        if text.partition(" seed=")[0] not in words:
            return f"a workflow with other settings (such as {text})"
    return None


def write_page(folder: Path, outcome: Outcome) -> None:
    """Write noise.csv, data.csv, table.md, figure.png and README.md.

    Args:
        folder: Where to; made.
        outcome: With a power check at least.
    """
    plan = outcome.plan
    assert outcome.power is not None
    folder.mkdir(parents=True, exist_ok=True)
    _write_runs(folder / NOISE_RUNS, [outcome.power, *outcome.noise])
    _write_runs(folder / DATA_RUNS, outcome.data)
    noise_table = _noise_table(outcome)
    data_table = _data_table(outcome)
    tables = [noise_table, data_table] if outcome.data else [noise_table]
    write_atomically(folder / "table.md", "\n\n".join(tables) + "\n")
    if outcome.noise:
        _draw(folder / "figure.png", outcome)
    seed = f" seed={plan.seed}" if plan.seed else ""
    multipliers = ",".join(f"{z:g}" for z in plan.noise)
    options = f"--margin {100 * outcome.margin:g} --noise-multipliers {multipliers}"
    command = f"dpbench workflow {shlex.join(plan.words)}{seed} {options}"
    page = render(
        _FOLDER / "page.md.jinja",
        outcome=outcome,
        command=command,
        steps=steps_text(outcome, "lot", "power", "chosen"),
        noise_table=noise_table,
        data_table=data_table,
        caveats=_CAVEATS,
    )
    write_atomically(folder / "README.md", page)


def _write_runs(path: Path, runs: Collection[Recall | Trained]) -> None:
    if runs:
        write_atomically(path, pd.DataFrame([vars(run) for run in runs]).to_csv(index=False, lineterminator="\n"))


def _draw(path: Path, outcome: Outcome) -> None:
    """Accuracies on noise over ε, with what passes; and the audit by labels under the sound ε."""
    recalls = pd.DataFrame(
        [{**vars(recall), "epsilon": recall.epsilon} for recall in outcome.noise if recall.epsilon is not None]
    )
    figure = new_figure(11, 4.2)
    recall_axes, audit_axes = figure.subplots(1, 2)
    _draw_recall(recall_axes, outcome, recalls)
    audit_axes.plot(
        recalls["epsilon"],
        recalls["epsilon"],
        color=_RED,
        label="sound ε",
    )
    audited = recalls["audited"].astype(float)
    audit_axes.plot(
        recalls["epsilon"],
        audited,
        color=_BLUE,
        marker="o",
        label="audited by labels, at least",
    )
    audit_axes.set(
        xscale="log",
        yscale="log",
        xlabel="sound ε",
        ylabel="ε",
    )
    for axis in (recall_axes.xaxis, audit_axes.xaxis, audit_axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    chosen = outcome.chosen
    for axes in figure.axes:
        if chosen is not None and chosen.epsilon is not None:
            label = f"chosen: z = {chosen.noise_multiplier:g}"
            axes.axvline(
                chosen.epsilon,
                color=_GREEN,
                linewidth=1,
                label=label,
            )
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    plan = outcome.plan
    figure.suptitle(f"{plan.model}, noise of the size of {plan.data} ({plan.records:,} records)")
    write_figure(path, figure)


def _draw_recall(axes: Axes, outcome: Outcome, recalls: pd.DataFrame) -> None:
    assert outcome.power is not None
    epsilons = recalls["epsilon"]
    fresh = 100 * recalls["guessed"]
    axes.axhline(
        100 * outcome.power.recalled,
        color=_GRAY,
        linestyle="--",
        linewidth=1,
        label="without privacy",
    )
    axes.plot(
        epsilons,
        100 * recalls["recalled"],
        color=_BLUE,
        marker="o",
        label="training labels",
    )
    limit = fresh + 100 * recalls["limit"]
    axes.plot(
        epsilons,
        limit,
        color=_BLUE,
        linestyle=":",
        label="95 % limit of the gap, on top of fresh ones",
    )
    axes.plot(
        epsilons,
        fresh,
        color=_GRAY,
        marker="o",
        label="fresh labels",
    )
    axes.fill_between(
        epsilons,
        fresh,
        fresh + 100 * outcome.margin,
        color=_GREEN,
        alpha=0.15,
        linewidth=0,
        label="limit within the margin: passes",
    )
    axes.set(
        xscale="log",
        xlabel="sound ε of the run",
        ylabel="recalled random labels (%)",
        ylim=(0, 102),
    )
