"""`python -m tools.results.tracking`: bounds that track quantiles of known data, by noisy counts alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from scipy import stats

from dpbench.files import write_atomically
from dpbench.harness.reports.figures import new_figure, write_figure
from dpbench.privacy.mechanism.adaptive import QuantileBounds, with_bounds
from dpbench.privacy.mechanism.clipping import VectorGroup
from dpbench.templates import render

QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
ROUNDS = 200
RECORDS = 100
FIRST_BOUND = 0.1
_SETTLED = ROUNDS // 2
_NEAR = 0.1  # of the true quantile
_SEED = 0


@dataclass(frozen=True)
class Source:
    """Norms that are the exponential of a normal variable.

    Attributes:
        label: Shown.
        mean: Of the normal variable.
        std: Of the normal variable.
    """

    label: str
    mean: float
    std: float

    def quantile(self, share: float) -> float:
        """The true quantile, from the distribution of the norms."""
        return float(stats.lognorm.ppf(share, self.std, scale=torch.tensor(self.mean).exp().item()))


SOURCES = (
    Source("exp N(0, 1)", 0.0, 1.0),
    Source("exp N(0, 0.1)", 0.0, 0.1),
    Source("exp N(log 10, 1)", 2.302585, 1.0),
)


def track(source: Source, quantile: float, generator: torch.Generator) -> list[float]:
    """Follow bounds round by round, of the very adaptation that training uses, with the paper's settings.

    Args:
        source: Where norms come from, new ones in every round.
        quantile: γ.
        generator: Of data and noise.
    """
    adaptation = QuantileBounds(quantile)  # η_C = 0.2, geometric, σ_b = m/20
    groups: tuple[VectorGroup, ...] = (VectorGroup("all", (0,), FIRST_BOUND),)
    (statistic,) = adaptation.statistics(groups, RECORDS, 1.0)
    bounds = []
    for _ in range(ROUNDS):
        bounds.append(groups[0].max_grad_norm)
        norms = (
            torch.randn(
                1,
                RECORDS,
                generator=generator,
                dtype=torch.float64,
            )
            * source.std
            + source.mean
        ).exp()
        count = adaptation.measure(norms.square(), groups)
        noise = statistic.noise_std * torch.randn(1, generator=generator, dtype=torch.float64)
        released = (count + noise) / RECORDS
        groups = with_bounds(groups, adaptation.next_bounds(groups, released.tolist()))
    return bounds


def reproduce_tracking(folder: Path) -> str:
    """Simulate adaptive_quantile_clipping_2021, Fig. 2, and write bounds.csv, README.md and figure.png.

    Args:
        folder: Where to; made.

    Returns:
        A summary for the terminal.
    """
    generator = torch.Generator().manual_seed(_SEED)
    frames = []
    for source in SOURCES:
        for quantile in QUANTILES:
            frame = pd.DataFrame({"round": range(ROUNDS), "bound": track(source, quantile, generator)})
            frame.insert(0, "data", source.label)
            frame.insert(1, "quantile", quantile)
            frame.insert(2, "true", source.quantile(quantile))
            frames.append(frame)
    lines = []
    for frame in frames:
        late = frame["bound"][_SETTLED:]
        is_far = (frame["bound"] / frame["true"] - 1).abs() >= _NEAR
        near_from = int(frame["round"][is_far].max()) + 1 if is_far.any() else 0
        lines.append({**frame.iloc[0], "mean": late.mean(), "std": late.std(), "near_from": near_from})
    table = pd.concat(frames)
    page = render(
        Path(__file__).with_name("tracking.md.jinja"),
        lines=lines,
        records=RECORDS,
        rounds=ROUNDS,
        first_bound=FIRST_BOUND,
        settled=_SETTLED,
        near=_NEAR,
    )
    folder.mkdir(parents=True, exist_ok=True)
    _draw(table, folder / "figure.png")
    write_atomically(folder / "bounds.csv", table.to_csv(index=False, float_format="%.6g"))
    write_atomically(folder / "README.md", page)
    return f"{page}\nWritten to {folder}: README.md, figure.png, bounds.csv."


def _draw(table: pd.DataFrame, path: Path) -> None:
    figure = new_figure(13.0, 4.0)
    for axes, (label, part) in zip(figure.subplots(1, len(SOURCES)), table.groupby("data", sort=False), strict=True):
        for number, (quantile, line) in enumerate(part.groupby("quantile")):
            axes.plot(
                line["round"],
                line["bound"],
                color=f"C{number}",
                label=f"γ = {quantile}",
                linewidth=1.2,
            )
            axes.axhline(
                line["true"].iloc[0],
                color=f"C{number}",
                linestyle="--",
                linewidth=0.9,
            )
        axes.set(
            yscale="log",
            xlabel="round",
            ylabel="bound (dashed: true quantile)",
            title=f"norms: {label}",
        )
        axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    write_figure(path, figure)


if __name__ == "__main__":
    print(reproduce_tracking(Path("results/adaptive_quantile_figure2")))
