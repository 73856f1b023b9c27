"""`python -m tools.correlated_gain RESULTS`: banded noise, predicted and measured, as a page with pictures.

Predicted for each row of the tables of correlated noise: the expected root mean square error of the iterates of SGD
with b bands and cyclic Poisson batches, over that with independent noise and Poisson batches of the same expected size,
at equal ε. It knows nothing of a network: gradients are taken not to follow the noise.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.signal import lfilter
from scipy.stats import t as student_t
from scipy.stats import ttest_1samp

from dpbench.files import write_atomically
from dpbench.harness.reports.figures import new_figure, write_figure
from dpbench.harness.reproduce.tables import Table, read_table, table_names
from dpbench.privacy.accounting.calibration import TrainingSetting, solved
from tools.factorization import Floats, coefficients_for, expected_error

_COLORS = ("#3060a8", "#508850", "#c04030", "#806090", "#a07020")
_GROUP = "correlated_noise/"
_FOLDER = "correlated_noise"
_LEVEL = 0.05  # of all tests of a table together
_EPSILON = re.compile(r"(, )?ε = [\d.]+")  # in a row's label


@dataclass(frozen=True)
class Setting:
    """What a prediction is for.

    Attributes:
        epsilon: ε.
        delta: δ.
        steps: Number of steps.
        population: Number of records.
        batch_size: Expected records in a batch.
        momentum: Of SGD, also the next two.
        weight_decay: λ.
        learning_rate: Matters with weight decay only.
        in_turn: Whether groups of records take turns and nothing is amplified (min_separation), with either noise.
    """

    epsilon: float
    delta: float
    steps: int
    population: int
    batch_size: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    learning_rate: float = 1.0
    in_turn: bool = False

    @property
    def epochs(self) -> float:
        """Passes over the data."""
        return round(self.steps * self.batch_size / self.population, 1)


@dataclass(frozen=True)
class Gain:
    """Prediction for one setting.

    Attributes:
        setting: What it is for.
        noise_multipliers: z that meets ε, by bands.
        ratios: Expected error over that of independent noise, by bands.
        best: Bands of the least error.
    """

    setting: Setting
    noise_multipliers: dict[int, float]
    ratios: dict[int, float]
    best: int


def predicted_gain(
    setting: Setting,
    bands_of_table: int,
) -> Gain:
    """The error with each number of bands, at equal ε.

    Args:
        setting: What it is for.
        bands_of_table: Shown whether or not it is a number that is tried.
    """
    sample_rate = setting.batch_size / setting.population
    groups = math.floor(1 / sample_rate + 1e-9)
    workload = _workload(setting)
    noises = {}
    for bands in sorted({*_bands_to_try(min(setting.steps, groups)), bands_of_table}):
        # A record's group is sampled once in a round: of b steps at b times the rate, or whole where none is amplified.
        round_steps = groups if setting.in_turn else bands
        training = TrainingSetting(
            sample_rate=1.0 if setting.in_turn else min(1.0, bands * sample_rate),
            steps=math.ceil(setting.steps / round_steps),
            epsilon=setting.epsilon,
            delta=setting.delta,
        )
        noise_multiplier = solved(training, "rdp").noise_multiplier
        assert noise_multiplier is not None
        noises[bands] = noise_multiplier
    independent = expected_error(np.ones(1), workload, noises[1])
    ratios = {}
    coefficients = np.ones(1)
    for bands, noise_multiplier in noises.items():
        coefficients = coefficients_for(workload, bands, start=coefficients)
        ratios[bands] = expected_error(coefficients, workload, noise_multiplier) / independent
    return Gain(setting, noises, ratios, min(ratios, key=lambda bands: ratios[bands]))


def _workload(setting: Setting) -> Floats:
    """How far a unit of gradient in one step has moved the parameters after this one and the following steps, (n,).

    For SGD at a constant learning rate, where the gradients of later steps are the same with and without it.
    """
    impulse = np.zeros(setting.steps)
    impulse[0] = setting.learning_rate
    decay = setting.learning_rate * setting.weight_decay
    # m_t = μ m_{t-1} + g_t + λ θ_{t-1}, and θ_t = θ_{t-1} - η m_t, as power series in the delay.
    moved: Floats = lfilter([1.0], [1.0, decay - 1.0 - setting.momentum, setting.momentum], impulse)
    return moved


def _bands_to_try(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... up to `most`, and that, which is the best where nothing is amplified."""
    tried = {1, most}
    power = 2
    while power <= most:
        tried |= {power, min(3 * power // 2, most)}
        power *= 2
    return sorted(tried)


def write_predictions(path: Path, gains_by_table: Mapping[str, Sequence[Gain]]) -> None:
    """A line for each table, setting and number of bands.

    Args:
        path: Of the file.
        gains_by_table: Predictions by the name of their table.
    """
    rows = []
    for table, gains in gains_by_table.items():
        for gain in gains:
            for bands, ratio in gain.ratios.items():
                row: dict[str, Any] = {
                    "table": table,
                    **asdict(gain.setting),
                    "bands": bands,
                    "noise_multiplier": f"{gain.noise_multipliers[bands]:.5g}",
                    "ratio": f"{ratio:.4f}",
                    "best": int(bands == gain.best),
                }
                rows.append(row)
    write_atomically(path, pd.DataFrame(rows).to_csv(index=False, lineterminator="\n"))


@dataclass(frozen=True)
class Comparison:
    """One row of a table: what is predicted, and what was measured.

    Attributes:
        label: Of the row.
        duration: What it says besides ε, such as "3 epochs"; empty where all rows are alike.
        bands: Of the column with banded noise.
        gain: The prediction.
        accuracies: Columns independent and banded, in percent; a line for each seed that has both.
    """

    label: str
    duration: str
    bands: int
    gain: Gain
    accuracies: pd.DataFrame

    @property
    def differences(self) -> pd.Series[float]:
        """Banded − independent, in points."""
        return self.accuracies["banded"] - self.accuracies["independent"]


def comparisons(table: Table, runs: pd.DataFrame) -> list[Comparison]:
    """Rows of a table with columns independent and banded, and what is predicted of each.

    Args:
        table: The definition.
        runs: As in its runs.csv.
    """
    compared = []
    for row in table.rows:
        of_row = runs[runs["row"] == row.name]
        accuracies = of_row.pivot_table(index="seed", columns="column", values="value") * 100
        accuracies = accuracies.reindex(columns=["independent", "banded"]).dropna()
        if accuracies.empty:
            continue
        run = of_row[of_row["column"] == "banded"].iloc[0]
        words = dict(word.split("=", 1) for word in run["words"].split())
        setting = Setting(
            epsilon=float(words["strategy.target_epsilon"]),
            delta=float(run["delta"]),
            steps=int(run["steps"]),
            population=int(run["population"]),
            batch_size=float(words["data.expected_batch_size"]),
            momentum=float(words.get("optimizer.momentum", 0)),
            in_turn=words["data.sampling"] == "min_separation",
        )
        bands = int(words["strategy.bands"])
        compared.append(
            Comparison(
                label=row.label,
                duration=_EPSILON.sub("", row.label),
                bands=bands,
                gain=predicted_gain(setting, bands_of_table=bands),
                accuracies=accuracies,
            )
        )
    return compared


def write_page(results: Path) -> None:
    """Write predictions beside the measurements of all tables of correlated noise: README.md, pictures, predicted.csv.

    Args:
        results: The folder of results.
    """
    folder = results / _FOLDER
    folder.mkdir(exist_ok=True)
    by_table = {}
    for name in table_names():
        table = read_table(name)
        path = results / table.folder / "runs.csv"
        # A table that only chooses has no pairs to show.
        if name.startswith(_GROUP) and table.chosen_from and path.is_file():
            compared = comparisons(table, pd.read_csv(path))
            if compared:  # a table may have runs of one column only, so far
                by_table[name] = compared
                write_figure(folder / f"{_picture(name)}.png", measured_figure(compared))
    gains_by_table = {name: [comparison.gain for comparison in compared] for name, compared in by_table.items()}
    write_predictions(folder / "predicted.csv", gains_by_table)
    write_atomically(folder / "README.md", measured_page(by_table))


def _picture(name: str) -> str:
    return name.removeprefix(_GROUP)


def measured_page(by_table: Mapping[str, Sequence[Comparison]]) -> str:
    """The page of results: prediction and measurement in one table for each of them, in Markdown.

    Args:
        by_table: Rows by the name of their table.
    """
    lines = [
        "# Correlated noise: predicted and measured",
        "",
        "Made by `make results` (`python -m tools.correlated_gain results`) from the runs of the tables.",
        "",
        "Predicted: root mean square error that noise leaves in the iterates, over that of independent noise at the",
        "same ε (by RDP), if gradients did not follow the noise. Measured: test accuracy in percent, mean ± standard",
        "deviation over n seeds, and of the paired difference half the 95 % interval of its mean; the settings of each",
        "cell were chosen on validation data.",
        "",
    ]
    for name, compared in by_table.items():
        table = read_table(name)
        setting = compared[0].gain.setting
        bands = compared[0].bands
        lines += [
            f"## {table.title}",
            "",
            f"[{table.folder}](../{table.folder}/README.md): batches of {setting.batch_size:g} of "
            f"{setting.population:,} records, δ = {setting.delta:g}.",
            "",
            f"| | noise multiplier, independent → {bands} bands | error of the iterates, {bands} bands | best bands | "
            "accuracy, independent | banded | paired difference | n |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        for comparison in compared:
            gain = comparison.gain
            cells = [
                comparison.label,
                f"{gain.noise_multipliers[1]:.3f} → {gain.noise_multipliers[bands]:.3f}",
                f"× {gain.ratios[bands]:.2f}",
                f"{gain.best} (× {gain.ratios[gain.best]:.2f})",
                _spread(comparison.accuracies["independent"]),
                _spread(comparison.accuracies["banded"]),
                _gap(comparison.differences),
                str(len(comparison.accuracies)),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", _tested_together(compared), "", f"![predicted and measured]({_picture(name)}.png)", ""]
    return "\n".join(lines)


def _tested_together(compared: Sequence[Comparison]) -> str:
    """A sentence on all differences of a table: their mean, and those that Holm's method tells from zero."""
    p_values = [(float(ttest_1samp(line.differences, 0.0).pvalue), line.label) for line in compared]
    different = []
    for place, (p_value, label) in enumerate(sorted(p_values)):
        if not p_value * (len(compared) - place) <= _LEVEL:
            break
        different.append(label)
    mean = np.mean([line.differences.mean() for line in compared])
    return (
        f"Mean of the differences: {mean:+.2f} points. Tested together at {100 * _LEVEL:g} % (Holm; smallest p: "
        f"{min(p_values)[0]:.3f}), told from zero: {'; '.join(different) or 'none'}."
    )


def _spread(values: pd.Series[float]) -> str:
    mean = f"{values.mean():.2f}"
    return mean if len(values) == 1 else f"{mean} ± {values.std():.2f}"


def _gap(differences: pd.Series[float]) -> str:
    """Their mean with half its 95 % interval, as the tables have it."""
    mean = f"{differences.mean():+.2f}"
    if len(differences) == 1:
        return mean
    half = student_t.ppf(0.975, len(differences) - 1) * differences.sem()
    return f"{mean} [± {half:.2f}]"


def measured_figure(compared: Sequence[Comparison]) -> Figure:
    """Prediction on the left, measured differences on the right, against ε; a color for each duration.

    Args:
        compared: Rows of one table.
    """
    figure = new_figure(8, 3.6)
    predicted, measured = figure.subplots(1, 2)
    for number, duration in enumerate(dict.fromkeys(comparison.duration for comparison in compared)):
        color = _COLORS[number % len(_COLORS)]
        lines = [comparison for comparison in compared if comparison.duration == duration]
        budgets = [comparison.gain.setting.epsilon for comparison in lines]
        ratios = [comparison.gain.ratios[comparison.bands] for comparison in lines]
        predicted.plot(budgets, ratios, "o-", color=color, label=duration)
        for comparison in lines:
            differences = comparison.differences
            seeds = [comparison.gain.setting.epsilon] * len(differences)
            measured.plot(seeds, differences, ".", color=color, alpha=0.4)
        measured.plot(budgets, [comparison.differences.mean() for comparison in lines], "o-", color=color)
    bands = compared[0].bands
    predicted.axhline(1.0, color="#808080", linewidth=0.8, linestyle=":")
    predicted.set_ylabel(f"error with {bands} bands ÷ independent")
    predicted.set_title("predicted error of the iterates", fontsize=10)
    measured.axhline(0.0, color="#808080", linewidth=0.8, linestyle=":")
    measured.set_ylabel("banded − independent, points")
    measured.set_title("measured test accuracy (dots: seeds)", fontsize=10)
    budgets = sorted({comparison.gain.setting.epsilon for comparison in compared})
    for axes in (predicted, measured):
        axes.set_xscale("log")
        axes.set_xticks(budgets, [f"{epsilon:g}" for epsilon in budgets], minor=False)
        axes.minorticks_off()
        axes.set_xlabel("ε")
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = predicted.get_legend_handles_labels()
    if any(labels):
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return figure


if __name__ == "__main__":
    write_page(Path(sys.argv[1]))
