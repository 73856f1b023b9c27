"""`python -m tools.correlated_gain RESULTS`: banded noise, predicted and measured, as a page with pictures.

`python -m tools.correlated_gain --idea PNG` draws the noise that is left in a weight: docs/images/correlated_noise.png.

Predicted for each row of the tables of correlated noise: the expected root mean square error of the iterates of SGD
with b bands and cyclic Poisson batches, over that with independent noise and Poisson batches of the same expected size,
at equal ε. It knows nothing of a network: gradients are taken not to follow the noise.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.signal import lfilter

from dpbench.capabilities.correlated.banded import Banded
from dpbench.files import write_atomically
from dpbench.harness.reports.figures import new_figure, write_figure
from dpbench.harness.reports.markdown import markdown_rows
from dpbench.harness.reproduce._summary import LEVEL, differences
from dpbench.harness.reproduce.tables import Table, read_table, table_names
from dpbench.harness.runs.numbers import mean_text
from dpbench.privacy.accounting.calibration import TrainingSetting, solved
from dpbench.templates import render
from tools.factorization import Floats, coefficients_for, expected_error

_COLORS = ("#3060a8", "#508850", "#c04030", "#806090", "#a07020")
_GROUP = "correlated_noise/"
_FOLDER = "correlated_noise"
_PAIR = ("banded", "independent")  # columns whose difference is shown
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


def predictions(setting: Setting, bands_of_table: int) -> pd.DataFrame:
    """The error with each number of bands, at equal ε.

    Args:
        setting: What it is for.
        bands_of_table: Shown whether or not it is a number that is tried.

    Returns:
        By bands: the noise multiplier that meets ε, and the ratio of the expected error to that of independent noise.
    """
    sample_rate = setting.batch_size / setting.population
    groups = math.floor(1 / sample_rate + 1e-9)
    workload = _workload(setting)
    lines = {}
    coefficients = np.ones(1)
    for bands in sorted({*_bands_to_try(min(setting.steps, groups)), bands_of_table}):
        # A record's group is sampled once in a round: of b steps at b times the rate, or whole where none is amplified.
        training = TrainingSetting(
            sample_rate=1.0 if setting.in_turn else min(1.0, bands * sample_rate),
            steps=math.ceil(setting.steps / (groups if setting.in_turn else bands)),
            epsilon=setting.epsilon,
            delta=setting.delta,
        )
        noise_multiplier = solved(training, "rdp").noise_multiplier
        assert noise_multiplier is not None
        coefficients = coefficients_for(workload, bands, start=coefficients)
        lines[bands] = noise_multiplier, expected_error(coefficients, workload, noise_multiplier)
    frame = pd.DataFrame.from_dict(lines, orient="index", columns=["noise_multiplier", "ratio"])
    frame["ratio"] /= frame["ratio"][1]
    return frame.rename_axis("bands")


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


@dataclass(frozen=True)
class Comparison:
    """One row of a table: what is predicted, and what was measured.

    Attributes:
        label: Of the row.
        bands: Of the column with banded noise.
        setting: Of the row.
        predicted: See `predictions`.
        accuracies: Columns independent and banded, in percent; a line for each seed that has both.
        gap: Banded − independent, see `differences`.
    """

    label: str
    bands: int
    setting: Setting
    predicted: pd.DataFrame
    accuracies: pd.DataFrame
    gap: pd.Series[float]


def comparisons(table: Table, runs: pd.DataFrame) -> list[Comparison]:
    """Rows of a table with columns independent and banded, and what is predicted of each.

    Args:
        table: The definition.
        runs: As in its runs.csv.
    """
    gaps = differences(table.model_copy(update={"difference": (_PAIR,)}), runs)
    compared = []
    for row in table.rows:
        if (*_PAIR, row.name) not in gaps.index:
            continue
        of_row = runs[runs["row"] == row.name]
        accuracies = of_row.pivot_table(index="seed", columns="column", values="value")[list(_PAIR)] * 100
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
        predicted = predictions(setting, bands)
        gap: Any = gaps.xs((*_PAIR, row.name))
        compared.append(Comparison(row.label, bands, setting, predicted, accuracies.dropna(), gap))
    return compared


def write_page(results: Path) -> None:
    """Write predictions beside the measurements of all tables of correlated noise: README.md, pictures, predicted.csv.

    Args:
        results: The folder of results.
    """
    folder = results / _FOLDER
    folder.mkdir(exist_ok=True)
    sections = []
    lines = []
    for name in table_names():
        table = read_table(name)
        path = results / table.folder / "runs.csv"
        # A table that only chooses has no pairs to show.
        if not (name.startswith(_GROUP) and table.chosen_from and path.is_file()):
            continue
        compared = comparisons(table, pd.read_csv(path))
        if not compared:  # a table may have runs of one column only, so far
            continue
        picture = f"{name.removeprefix(_GROUP)}.png"
        write_figure(folder / picture, measured_figure(compared))
        for comparison in compared:
            frame = comparison.predicted.reset_index()
            frame["best"] = (frame["ratio"] == frame["ratio"].min()).astype(int)
            lines.append(frame.assign(table=name, **asdict(comparison.setting)))
        sections.append(
            {
                "table": table,
                "setting": compared[0].setting,
                "rows": _table_of(compared),
                "tests": _tested_together(compared),
                "picture": picture,
            }
        )
    predicted = pd.concat(lines)
    predicted["noise_multiplier"] = predicted["noise_multiplier"].map("{:.5g}".format)
    predicted["ratio"] = predicted["ratio"].map("{:.4f}".format)
    columns = ["table", *(field.name for field in fields(Setting)), "bands", "noise_multiplier", "ratio", "best"]
    write_atomically(folder / "predicted.csv", predicted.to_csv(columns=columns, index=False, lineterminator="\n"))
    write_atomically(folder / "README.md", render(Path(__file__).with_suffix(".md.jinja"), sections=sections))


def _table_of(compared: Sequence[Comparison]) -> str:
    bands = compared[0].bands
    rows = [
        [
            "",
            f"noise multiplier, independent → {bands} bands",
            f"error of the iterates, {bands} bands",
            "best bands",
            "accuracy, independent",
            "banded",
            "paired difference",
            "n",
        ]
    ]
    for comparison in compared:
        noises = comparison.predicted["noise_multiplier"]
        ratios = comparison.predicted["ratio"]
        spreads = comparison.accuracies.agg(["mean", "std"]).T.to_numpy()
        banded, independent = [mean_text(mean, deviation, percent=True) for mean, deviation in spreads]
        gap = comparison.gap
        rows.append(
            [
                comparison.label,
                f"{noises[1]:.3f} → {noises[bands]:.3f}",
                f"× {ratios[bands]:.2f}",
                f"{ratios.idxmin()} (× {ratios.min():.2f})",
                independent,
                banded,
                f"{gap['mean']:+.2f}" + (f" [± {gap['half']:.2f}]" if gap["n"] > 1 else ""),
                f"{gap['n']:.0f}",
            ]
        )
    return markdown_rows(rows)


def _tested_together(compared: Sequence[Comparison]) -> str:
    """A sentence on all differences of a table: their mean, and those that Holm's method tells from zero."""
    gaps = pd.DataFrame([line.gap for line in compared], [line.label for line in compared]).sort_values("p")
    different = gaps.index[gaps["p"] <= gaps["level"]]
    return (
        f"Mean of the differences: {gaps['mean'].mean():+.2f} points. Tested together at {100 * LEVEL:g} % (Holm; "
        f"smallest p: {gaps['p'].min():.3f}), told from zero: {'; '.join(different) or 'none'}."
    )


def measured_figure(compared: Sequence[Comparison]) -> Figure:
    """Prediction on the left, measured differences on the right, against ε; a color for each duration.

    Args:
        compared: Rows of one table.
    """
    figure = new_figure(8, 3.6)
    predicted, measured = figure.subplots(1, 2)
    bands = compared[0].bands
    by_duration: dict[str, list[Comparison]] = {}
    for comparison in compared:
        by_duration.setdefault(_EPSILON.sub("", comparison.label), []).append(comparison)
    for color, (duration, lines) in zip(cycle(_COLORS), by_duration.items(), strict=False):
        budgets = [comparison.setting.epsilon for comparison in lines]
        ratios = [comparison.predicted["ratio"][bands] for comparison in lines]
        predicted.plot(budgets, ratios, "o-", color=color, label=duration)
        for comparison in lines:
            gaps = comparison.accuracies["banded"] - comparison.accuracies["independent"]
            measured.plot([comparison.setting.epsilon] * len(gaps), gaps, ".", color=color, alpha=0.4)
        measured.plot(budgets, [comparison.gap["mean"] for comparison in lines], "o-", color=color)
    predicted.axhline(1.0, color="#808080", linewidth=0.8, linestyle=":")
    predicted.set_ylabel(f"error with {bands} bands ÷ independent")
    predicted.set_title("predicted error of the iterates", fontsize=10)
    measured.axhline(0.0, color="#808080", linewidth=0.8, linestyle=":")
    measured.set_ylabel("banded − independent, points")
    measured.set_title("measured test accuracy (dots: seeds)", fontsize=10)
    budgets = sorted({comparison.setting.epsilon for comparison in compared})
    for axes in (predicted, measured):
        axes.set_xscale("log")
        axes.set_xticks(budgets, [f"{epsilon:g}" for epsilon in budgets], minor=False)
        axes.minorticks_off()
        axes.set_xlabel("ε")
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    if any(by_duration):
        handles = predicted.get_lines()[: len(by_duration)]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(by_duration), frameon=False, fontsize=9)
    return figure


def idea_figure(bands: int = 8, steps: int = 293, population: int = 60_000, batch_size: float = 1024) -> Figure:
    """Noise in one weight of SGD, independent and banded, at ε = 3: that of one step, and of all.

    Args:
        bands: Number of bands.
        steps: Number of steps.
        population: Number of records.
        batch_size: Expected records in a batch.
    """
    predicted = predictions(Setting(3.0, 1e-5, steps, population, batch_size), bands)
    figure = new_figure(8, 3.2)
    one_step, all_steps = figure.subplots(1, 2)
    impulse = np.zeros(steps)
    impulse[0] = 1.0
    number = np.arange(1, steps + 1)
    for color, width in ((_COLORS[2], 1), (_COLORS[0], bands)):
        z = float(predicted["noise_multiplier"][width])
        label = f"{'independent' if width == 1 else f'{width} bands'}, noise multiplier {z:.2f}"
        # The noise of the steps is C⁻¹w, and a weight holds its running sum: one draw of w, so many steps later.
        remains = z * np.cumsum(lfilter([1.0], Banded(width).coefficients, impulse))
        one_step.plot(number[: 3 * bands] - 1, remains[: 3 * bands], "o-", markersize=3, color=color, label=label)
        all_steps.plot(number, np.sqrt(np.cumsum(remains**2)), color=color)
    one_step.set_title("noise of one step that is left in a weight", fontsize=10)
    one_step.set_ylabel("standard deviation, in clipping norms")
    one_step.set_xlabel("steps later")
    one_step.set_ylim(bottom=0)
    all_steps.set_title("noise of all steps in a weight", fontsize=10)
    all_steps.set_xlabel("step")
    all_steps.set_ylim(bottom=0)
    for axes in (one_step, all_steps):
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=one_step.get_lines(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


if __name__ == "__main__":
    if sys.argv[1] == "--idea":
        write_figure(Path(sys.argv[2]), idea_figure())
    else:
        write_page(Path(sys.argv[1]))
