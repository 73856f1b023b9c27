"""Results of a workflow: recalled labels, epsilons, the noise that is chosen, and a page of all that."""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from scipy import stats

from dpbench.capabilities.auditing.label_scores import label_scores
from dpbench.capabilities.auditing.report import audit_by_labels, audit_run
from dpbench.capabilities.workflow.plan import Plan
from dpbench.errors import ConfigurationError
from dpbench.files import write_atomically
from dpbench.harness.reports.figures import new_figure, write_figure
from dpbench.harness.reproduce.jobs import Job
from dpbench.harness.runs.numbers import ABSENT
from dpbench.harness.runs.readers import read_csv
from dpbench.templates import render

_FOLDER = Path(__file__).parent
POWER = 0.9
"""Share of the random labels that training without privacy has to recall: else the check could not see memorization."""
CONFIDENCE = 0.95
NOISE_RUNS = "noise.csv"
DATA_RUNS = "data.csv"
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
Row = Mapping[str, Any]
"""One line of noise.csv or data.csv."""


def upper_limit(recalled: float, records: int, guessed: float, others: int, confidence: float = CONFIDENCE) -> float:
    """Upper one-sided limit of the difference of two shares of independent records (normal approximation).

    Args:
        recalled: Share of the training records.
        records: Number of training records.
        guessed: Share of the other records.
        others: Number of other records.
        confidence: Probability that the limit is high enough.

    >>> round(upper_limit(0.167, 2000, 0.10, 2000), 3)
    0.085
    """
    variance = recalled * (1 - recalled) / records + guessed * (1 - guessed) / others
    return recalled - guessed + float(stats.norm.ppf(confidence)) * math.sqrt(variance)


def noise_row(job: Job, noise_multiplier: float | None) -> Row:
    """Measure how many random labels a finished run on noise recalls.

    Args:
        job: The run.
        noise_multiplier: z; None without privacy, where there is no ε to refute.

    Raises:
        DPBenchError: Its files are damaged.
    """
    record = job.result()
    assert record is not None
    scores = label_scores(job.run)
    audit = None if noise_multiplier is None else audit_by_labels(job.run, scores, CONFIDENCE).result
    return {
        "noise_multiplier": noise_multiplier,
        "epsilon_rdp": record["privacy"]["epsilon"].get("rdp"),
        "epsilon_pld": record["privacy"]["epsilon"].get("pld"),
        "recalled": scores.recalled,
        "guessed": scores.guessed,
        "limit": upper_limit(scores.recalled, len(scores.members), scores.guessed, len(scores.others)),
        "audited": audit and audit.audited,
        "verdict": audit and str(audit.verdict),
        "seconds": record["seconds"],
        "words": " ".join(job.words),
        "code_hash": job.code_hash,
    }


def data_row(job: Job, audited: Job | None, noise_multiplier: float | None) -> Row:
    """Read a finished run on the data.

    Args:
        job: The run.
        audited: The same training with canaries; None without privacy.
        noise_multiplier: z; None without privacy.

    Raises:
        DPBenchError: Files are damaged.
    """
    record = job.result()
    assert record is not None
    audit = None if audited is None else audit_run(audited.path, CONFIDENCE).result
    epsilon = record["privacy"]["epsilon"]
    return {
        "strategy": job.row,
        "noise_multiplier": noise_multiplier,
        "accuracy": record["metrics"].get("test/accuracy"),
        "claimed": epsilon.get("rdp"),
        "sound": epsilon.get("pld") or epsilon.get("rdp"),
        "audited": audit and audit.audited,
        "audited_sound": audit and audit.sound,  # of a run with more records
        "verdict": audit and str(audit.verdict),
        "seconds": record["seconds"],
        "words": " ".join(job.words),
        "code_hash": job.code_hash,
    }


@dataclass
class Results:
    """Results of a workflow so far.

    Attributes:
        plan: Its runs.
        margin: Share by which training labels may be recalled better than fresh ones.
        power: The run without privacy on noise.
        noise: The private runs on noise, by increasing noise.
        data: The runs on the data.
    """

    plan: Plan
    margin: float
    power: Row | None = None
    noise: list[Row] = field(default_factory=list)
    data: list[Row] = field(default_factory=list)

    @property
    def chosen(self) -> Row | None:
        """The run of the least noise that passes, as all with more noise do; None if that of the most does not."""
        chosen = None
        for run in reversed(self.noise):
            # A run of less noise that passes beside one that does not has passed by chance.
            if run["limit"] >= self.margin:
                break
            chosen = run
        return chosen

    def text(self, *steps: str) -> str:
        """Describe the results of some steps: "batch", "power", "noise", "chosen", "data"."""
        fill = partial(
            textwrap.fill,
            width=120,
            initial_indent="  note     ",
            subsequent_indent=" " * 11,
        )
        return self._rendered("steps.txt.jinja", steps=steps, least_power=POWER, fill=fill)

    def _rendered(self, template: str, **values: Any) -> str:
        text = render(
            _FOLDER / template,
            results=self,
            plan=self.plan,
            rendered=self._rendered,
            number=_number,
            caveats=_CAVEATS,
            **values,
        )
        return text.rstrip("\n")


def _number(value: float | None) -> str:
    return ABSENT if value is None or not math.isfinite(value) else f"{value:.2f}"


def refuse_other_results(folder: Path, jobs: Sequence[Job]) -> None:
    """Refuse to overwrite the page of a workflow with other settings or of other code.

    Args:
        folder: The folder of the page.
        jobs: All runs of this workflow on noise.

    Raises:
        ConfigurationError: It would be overwritten.
    """
    path = folder / NOISE_RUNS
    if not path.is_file():
        return
    stored = read_csv(path, ["words", "code_hash"], "restore {path}, or move it away", ("words", "code_hash", "*"))
    runs = [f"{' '.join(job.words)} {job.code_hash}" for job in jobs]
    if not (stored["words"].astype(str) + " " + stored["code_hash"].astype(str)).isin(runs).all():
        raise ConfigurationError(
            f"{folder} holds a workflow with other settings or of other code: --replace overwrites it, --out writes "
            "elsewhere."
        )


def write_page(folder: Path, results: Results) -> None:
    """Write noise.csv, data.csv, table.md, figure.png and README.md.

    Args:
        folder: The folder to write to; made if need be.
        results: Results, with a power check at least.
    """
    plan = results.plan
    folder.mkdir(parents=True, exist_ok=True)
    tables: dict[str, list[Any]] = {NOISE_RUNS: [results.power, *results.noise], DATA_RUNS: results.data}
    for name, rows in tables.items():
        if rows:
            write_atomically(folder / name, pd.DataFrame(rows).to_csv(index=False, lineterminator="\n"))
    if results.noise:
        _draw(folder / "figure.png", results)
    multipliers = ",".join(f"{z:g}" for z in plan.noise)
    options = f"seed={plan.seed} --margin {100 * results.margin:g} --noise-multipliers {multipliers}"
    command = f"dpbench workflow {shlex.join(plan.words)} {options}"
    write_atomically(folder / "table.md", results._rendered("tables.md.jinja") + "\n")
    write_atomically(folder / "README.md", results._rendered("page.md.jinja", command=command) + "\n")


def _draw(path: Path, results: Results) -> None:
    """Draw the share of random labels that are recalled over ε."""
    runs = pd.DataFrame(results.noise)
    epsilon = runs["epsilon_pld"].astype(float).fillna(runs["epsilon_rdp"].astype(float))
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    axes.plot(epsilon, 100 * runs["recalled"], marker="o", label="training labels")
    axes.plot(epsilon, 100 * runs["guessed"], marker="o", label="fresh labels")
    axes.plot(epsilon, 100 * runs["limit"], linestyle=":", label="95 % limit of the gap")
    axes.axhline(100 * results.margin, linestyle="--", label="margin: a limit below it passes")
    axes.set(xscale="log", xlabel="sound ε of the run", ylabel="random labels (%)")
    axes.legend(frameon=False, fontsize=8)
    write_figure(path, figure)
