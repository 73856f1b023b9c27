"""`python -m tools.correlated_gain`: what banded noise gains over independent noise at equal ε, as predicted.

Prints, for each ε and number of epochs, the expected root mean square error of the iterates of SGD with b bands and
cyclic Poisson batches, over that with independent noise and Poisson batches of the same expected size. It knows nothing
of a network: gradients are taken not to follow the noise.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpbench.privacy.accounting.calibration import TrainingSetting, solved
from dpbench.privacy.mechanism.factorization import (
    ErrorKind,
    Floats,
    bands_to_try,
    choose_bands,
    coefficients_for,
    expected_error,
    optimizer_workload,
)
from dpbench.reports.figures import new_figure, write_figure

_COLORS = ("#3060a8", "#508850", "#c04030", "#806090", "#a07020")
_ROW = re.compile(r"epoch_(?P<epochs>[\d.]+)_epsilon_(?P<epsilon>[\d.]+)")
_COLUMNS = ("population", "batch_size", "delta", "accountant", "momentum", "weight_decay", "learning_rate", "error")


@dataclass(frozen=True)
class Gain:
    """Prediction for one budget and duration.

    Attributes:
        epsilon: ε.
        epochs: Passes over the data.
        steps: Number of steps.
        noise_multipliers: z that meets ε, by bands.
        ratios: Expected error over that of independent noise, by bands.
        best: Bands of the least error.
    """

    epsilon: float
    epochs: float
    steps: int
    noise_multipliers: Mapping[int, float]
    ratios: Mapping[int, float]
    best: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write it and its picture where a folder is named."""
    options = _parser().parse_args(arguments)
    gains = []
    for epsilon in options.epsilon:
        for epochs in options.epochs:
            gain = predicted_gain(epsilon, epochs, options)
            gains.append(gain)
            print(_line(gain), flush=True)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        _write_table(options.output / "predicted.csv", gains, options)
        write_figure(options.output / "predicted.png", gain_figure(gains))
        if options.measured is not None:
            differences = measured_differences(options.measured)
            write_figure(options.output / "measured.png", measured_figure(gains, differences, options.bands))
            page = measured_page(gains, differences, options)
            (options.output / "README.md").write_text(page, encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tools.correlated_gain")
    parser.add_argument("--population", type=int, default=60_000)
    parser.add_argument("--batch-size", type=float, default=1024, help="expected")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 3.0, 8.0])
    parser.add_argument("--epochs", type=float, nargs="+", default=[1.0, 3.0, 5.0])
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--momentum", type=float, default=0.0, help="of SGD, also for the next two")
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--learning-rate", type=float, default=1.0, help="matters with weight decay only")
    parser.add_argument("--error", choices=get_args(ErrorKind), default="mean", help="over all iterates, or the last")
    parser.add_argument("--accountant", default="pld")
    parser.add_argument("--output", type=Path, help="folder for predicted.csv, pictures and the page")
    parser.add_argument("--measured", type=Path, help="results of a table with columns independent and banded")
    parser.add_argument("--bands", type=int, default=8, help="of the table")
    return parser


def predicted_gain(epsilon: float, epochs: float, options: argparse.Namespace) -> Gain:
    """The error with each number of bands, at equal ε.

    Args:
        epsilon: ε.
        epochs: Passes over the data.
        options: Of the command.
    """
    sample_rate = options.batch_size / options.population
    steps = max(1, round(epochs / sample_rate))
    workload = optimizer_workload(steps, options.learning_rate, options.momentum, options.weight_decay)
    noises = {}
    for bands in bands_to_try(min(steps, math.floor(1 / sample_rate))):
        # A record's group is sampled once in a round of b steps, at b times the rate.
        setting = TrainingSetting(
            sample_rate=min(1.0, bands * sample_rate),
            steps=math.ceil(steps / bands),
            epsilon=epsilon,
            delta=options.delta,
        )
        noise_multiplier = solved(setting, options.accountant).noise_multiplier
        assert noise_multiplier is not None
        noises[bands] = noise_multiplier
    best = choose_bands(noises.__getitem__, workload, list(noises), options.error)
    return Gain(
        epsilon=epsilon,
        epochs=epochs,
        steps=steps,
        noise_multipliers=noises,
        ratios=_ratios(noises, workload, options.error),
        best=best.bands,
    )


def _ratios(
    noises: Mapping[int, float],
    workload: Floats,
    error: ErrorKind,
) -> dict[int, float]:
    independent = expected_error(np.ones(1), workload, noises[1], error)
    ratios = {}
    coefficients = np.ones(1)
    for bands, noise_multiplier in noises.items():
        coefficients = coefficients_for(workload, bands, error, start=coefficients)
        ratios[bands] = expected_error(coefficients, workload, noise_multiplier, error) / independent
    return ratios


def _line(gain: Gain) -> str:
    ratios = [f"{bands}: {ratio:.3f}" for bands, ratio in gain.ratios.items()]
    return (
        f"ε={gain.epsilon:g} epochs={gain.epochs:g} steps={gain.steps}: ratio {gain.ratios[gain.best]:.3f} with "
        f"{gain.best} bands, noise_multiplier {gain.noise_multipliers[1]:.3f} → "
        f"{gain.noise_multipliers[gain.best]:.3f}; by bands {', '.join(ratios)}"
    )


def _write_table(path: Path, gains: Sequence[Gain], options: argparse.Namespace) -> None:
    """A line for each ε, number of epochs and bands, with the options that they are for."""
    shared = {name: getattr(options, name) for name in _COLUMNS}
    with path.open("w", encoding="utf-8", newline="") as file:
        columns = [*_COLUMNS, "epsilon", "epochs", "steps", "bands", "noise_multiplier", "ratio", "best"]
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for gain in gains:
            for bands, ratio in gain.ratios.items():
                row = {
                    "epsilon": gain.epsilon,
                    "epochs": gain.epochs,
                    "steps": gain.steps,
                    "bands": bands,
                    "noise_multiplier": f"{gain.noise_multipliers[bands]:.5g}",
                    "ratio": f"{ratio:.4f}",
                    "best": int(bands == gain.best),
                }
                writer.writerow(shared | row)


def gain_figure(gains: Sequence[Gain]) -> Figure:
    """A panel for each number of epochs: the ratio against the bands, a line for each ε, its best bands marked."""
    durations = sorted({gain.epochs for gain in gains})
    figure = new_figure(3 * len(durations), 3.4)
    panels = figure.subplots(1, len(durations), sharey=True, squeeze=False)[0]
    for axes, epochs in zip(panels, durations, strict=True):
        _draw(axes, [gain for gain in gains if gain.epochs == epochs])
        plural = "" if epochs == 1 else "s"
        axes.set_title(f"{epochs:g} epoch{plural}", fontsize=10)
    panels[0].set_ylabel("error ÷ that of independent noise")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return figure


def measured_differences(folder: Path) -> pd.DataFrame:
    """Accuracies with both kinds of noise, in percent.

    Args:
        folder: Results of a table with rows epoch_E_epsilon_X and columns independent and banded.

    Returns:
        A line for each epochs, epsilon and seed that has both, with independent, banded and their difference.
    """
    runs = pd.read_csv(folder / "runs.csv")
    settings = runs["row"].str.extract(_ROW).astype(float)
    accuracies = pd.concat([settings, runs[["column", "seed", "value"]]], axis=1)
    accuracies["value"] *= 100
    pairs = accuracies.pivot_table(index=["epochs", "epsilon", "seed"], columns="column", values="value")
    pairs = pairs.dropna(subset=["independent", "banded"])
    pairs["difference"] = pairs["banded"] - pairs["independent"]
    return pairs.reset_index()


def measured_page(
    gains: Sequence[Gain],
    differences: pd.DataFrame,
    options: argparse.Namespace,
) -> str:
    """The page of results: prediction and measurement in one table, in Markdown.

    Args:
        gains: Predictions for the settings of the table.
        differences: See `measured_differences`.
        options: Of the command.
    """
    bands = options.bands
    lines = [
        "# Correlated noise: predicted and measured",
        "",
        "Made by `python -m tools.correlated_gain` from",
        f"[{options.measured.name}](../{options.measured.name}/README.md):",
        f"batches of {options.batch_size:g} of {options.population:,} records, SGD without momentum.",
        "",
        f"| | noise multiplier, independent → {bands} bands | error of the iterates, {bands} bands | best bands | "
        "accuracy, independent | banded | paired difference | n |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for gain in gains:
        of_setting = (differences["epochs"] == gain.epochs) & (differences["epsilon"] == gain.epsilon)
        seeds = differences[of_setting]
        cells = [
            f"{gain.epochs:g} epoch{'' if gain.epochs == 1 else 's'}, ε = {gain.epsilon:g}",
            f"{gain.noise_multipliers[1]:.3f} → {gain.noise_multipliers[bands]:.3f}",
            f"× {gain.ratios[bands]:.2f}",
            f"{gain.best} (× {gain.ratios[gain.best]:.2f})",
            _spread(seeds["independent"]),
            _spread(seeds["banded"]),
            _spread(seeds["difference"], sign="+"),
            str(len(seeds)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Predicted: root mean square error that noise leaves in the iterates, over that of independent noise at the",
        f"same ε ({options.accountant}) and δ = {options.delta:g}, if gradients did not follow the noise.",
        "Measured: test accuracy in percent, mean ± standard deviation over n seeds; the learning rate of each cell",
        "was chosen on validation data.",
        "",
        "![predicted](predicted.png)",
        "",
        "![measured](measured.png)",
        "",
    ]
    return "\n".join(lines)


def _spread(values: pd.Series[float], sign: str = "") -> str:
    if values.empty:
        return "–"
    mean = f"{values.mean():{sign}.2f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {values.std():.2f}"


def measured_figure(
    gains: Sequence[Gain],
    differences: pd.DataFrame,
    bands: int,
) -> Figure:
    """Prediction on the left, measured differences on the right, against ε; a color for each number of epochs.

    Args:
        gains: Predictions for the settings of the table.
        differences: See `measured_differences`.
        bands: Of the table.
    """
    figure = new_figure(8, 3.6)
    predicted, measured = figure.subplots(1, 2)
    for number, epochs in enumerate(sorted({gain.epochs for gain in gains})):
        color = _COLORS[number % len(_COLORS)]
        of_epochs = [gain for gain in gains if gain.epochs == epochs]
        label = f"{epochs:g} epoch{'' if epochs == 1 else 's'}"
        budgets = [gain.epsilon for gain in of_epochs]
        ratios = [gain.ratios[bands] for gain in of_epochs]
        predicted.plot(budgets, ratios, "o-", color=color, label=label)
        of_seeds = differences[differences["epochs"] == epochs]
        measured.plot(of_seeds["epsilon"], of_seeds["difference"], ".", color=color, alpha=0.4)
        means = of_seeds.groupby("epsilon")["difference"].mean()
        measured.plot(means.index, means, "o-", color=color)
    predicted.axhline(1.0, color="#808080", linewidth=0.8, linestyle=":")
    predicted.set_ylabel(f"error with {bands} bands ÷ independent")
    predicted.set_title("predicted error of the iterates", fontsize=10)
    measured.axhline(0.0, color="#808080", linewidth=0.8, linestyle=":")
    measured.set_ylabel("banded − independent, points")
    measured.set_title("measured test accuracy (dots: seeds)", fontsize=10)
    budgets = sorted({gain.epsilon for gain in gains})
    for axes in (predicted, measured):
        axes.set_xscale("log")
        axes.set_xticks(budgets, [f"{epsilon:g}" for epsilon in budgets], minor=False)
        axes.minorticks_off()
        axes.set_xlabel("ε")
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = predicted.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return figure


def _draw(axes: Axes, gains: Sequence[Gain]) -> None:
    ticks: set[int] = set()
    for number, gain in enumerate(sorted(gains, key=lambda gain: gain.epsilon)):
        color = _COLORS[number % len(_COLORS)]
        bands = list(gain.ratios)
        ticks |= {value for value in bands if value & (value - 1) == 0}
        axes.plot(bands, list(gain.ratios.values()), "-", color=color, label=f"ε = {gain.epsilon:g}")
        axes.plot(gain.best, gain.ratios[gain.best], "o", color=color)
        axes.annotate(
            f"{gain.ratios[gain.best]:.2f}",
            (gain.best, gain.ratios[gain.best]),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=color,
        )
    axes.axhline(1.0, color="#808080", linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks), [str(tick) for tick in sorted(ticks)])
    axes.set_xlabel("bands (dot: the best)")
    axes.set_ylim(0.4, 1.4)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
