"""The papers' claims as a page and a picture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from dpbench.files import write_atomically
from dpbench.privacy.accounting.accountants import ACCOUNTANTS, Array, RenyiAccountant
from dpbench.privacy.accounting.calibration import TrainingSetting, solved
from dpbench.reports.figures import new_figure, write_figure
from dpbench.reports.markdown import markdown_rows
from dpbench.reproduce.claims import claims_of, claims_table, delta_in, identities_table, read_claims

_COLORS = {"rdp-classic": "#c04030", "rdp": "#3060a8", "pld": "#508850"}


_COLUMNS = [*_COLORS, *(name for name in ACCOUNTANTS if name not in _COLORS)]  # those of the figure first
Row = dict[Any, Any]

_INTRODUCTION = """\
# The papers' privacy claims, recomputed

Written by `dpbench reproduce claims` from `src/dpbench/reproduce/claims.toml`; do not edit. A verdict names the
accountants within 1 % of the printed figure: `rdp-classic` is the papers' conversion, `rdp` today's, `pld` the tightest
bound, `gdp` an approximation and no bound (docs/epsilon.md). "–": not covered, or above 100, where `pld` is not
computed. σ is noise over sensitivity.

![claims](figure.png)
"""


@dataclass(frozen=True)
class FigureValues:
    """What the two recomputed figures show.

    Attributes:
        orders: Orders of pyvacy's Fig. 3, from a fine grid.
        classic: ε at each, with the papers' conversion.
        today: The same with today's.
        grid_best: (order, ε) of the best of the 72 orders, with the papers' conversion.
        real_best: The same of the best real order.
        batch_sizes: Of three_tools' Fig. 5.
        noise: σ that uses each budget up, (budgets, batch sizes).
        budgets: ε.
    """

    orders: Array
    classic: Array
    today: Array
    grid_best: tuple[float, float]
    real_best: tuple[float, float]
    batch_sizes: list[int]
    noise: Array
    budgets: list[float]


def figure_values(figures: dict[str, Any]) -> FigureValues:
    """Recompute pyvacy_2019's Fig. 3 and three_tools_2018's Fig. 5."""
    row = figures["pyvacy_2019"]["fig3"]
    setting = TrainingSetting(
        noise_multiplier=row["noise_multiplier"], sample_rate=row["sample_rate"], steps=row["steps"]
    )
    orders = np.arange(1.5, 40, 0.1)
    curves = {}
    for name in ("rdp-classic", "rdp"):
        accountant = ACCOUNTANTS[name]
        assert isinstance(accountant, RenyiAccountant)
        curve = accountant.divergences(setting.event, tuple(orders)) * row["steps"]
        curves[name] = accountant.conversion.epsilon(orders, curve, row["delta"])
        if name == "rdp-classic":
            grid = accountant.epsilon_by_order(accountant.curve(setting.events), row["delta"])
            best = int(grid.argmin())
            grid_best = (accountant.orders[best], float(grid[best]))
    finest = int(curves["rdp-classic"].argmin())
    fig5 = figures["three_tools_2018"]["fig5"]
    return FigureValues(
        orders,
        curves["rdp-classic"],
        curves["rdp"],
        grid_best,
        (float(orders[finest]), float(curves["rdp-classic"][finest])),
        fig5["batch_sizes"],
        np.array([[_noise(fig5, budget, size) for size in fig5["batch_sizes"]] for budget in fig5["epsilons"]]),
        fig5["epsilons"],
    )


def _noise(row: dict[str, Any], budget: float, batch_size: int) -> float:
    rate = batch_size / row["population"]
    setting = TrainingSetting(sample_rate=rate, epochs=row["epochs"], epsilon=budget, delta=delta_in(row))
    z = solved(setting, "rdp-classic").noise_multiplier
    assert z is not None
    return z


def reproduce_claims(folder: Path) -> str:
    """Compute all claims, and write claims.csv, identities.csv, table.md and figure.png.

    Args:
        folder: Where to; made.

    Returns:
        A summary for the terminal.
    """
    data = read_claims()
    claims = claims_table(claims_of(data))
    identities = identities_table(data["identity"])
    figures = figure_values(data["figures"])
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "claims.csv", claims.to_csv(index=False, float_format="%.8g"))
    write_atomically(folder / "identities.csv", identities.to_csv(index=False, float_format="%.8g"))
    write_atomically(folder / "table.md", report(claims, identities, figures, data["open"]))
    draw(folder / "figure.png", claims, figures)
    return _summary(claims, identities, folder)


def _summary(claims: pd.DataFrame, identities: pd.DataFrame, folder: Path) -> str:
    both = pd.concat([claims[["paper", "source", "verdict"]], identities[["paper", "source", "verdict"]]])
    width = int(both["source"].str.len().max())
    lines = [f"{row.paper:<36} {row.source:<{width}}  {row.verdict}" for row in both.itertuples()]
    return "\n".join(
        [
            *lines,
            "",
            count_of(claims, identities),
            f"Written to {folder}: table.md, figure.png, claims.csv, identities.csv.",
        ]
    )


def _number(value: float | None, form: str = ".4g") -> str:
    return "–" if value is None or math.isnan(value) else format(value, form)


def report(claims: pd.DataFrame, identities: pd.DataFrame, figures: FigureValues, left_open: list[Row]) -> str:
    """Write the page of the claims in Markdown."""
    checks = []
    for row in identities.to_dict("records"):
        numbers = [_number(row["claim"]), _number(row["recomputed"], ".5g")]
        checks.append([row["paper"], row["source"], *numbers, row["verdict"], row["note"]])
    reasons = [list(map(str, row.values())) for row in left_open]
    text = [
        _INTRODUCTION,
        f"{count_of(claims, identities)}",
        "",
        _claims_table(claims[~claims["variant"]]),
        "",
        "## The same figures under readings that we add",
        "",
        _claims_table(claims[claims["variant"]]),
        "",
        "## Figures that need no accountant",
        "",
        markdown_rows([["paper", "claim", "printed", "recomputed", "verdict", "note"], *checks], text=6),
        "",
        "## Figures that cannot be recomputed",
        "",
        markdown_rows([["paper", "where", "printed", "why not"], *reasons], text=4),
        "",
        "## Figures",
        "",
        *_figure_notes(figures),
    ]
    return "\n".join(text) + "\n"


def count_of(claims: pd.DataFrame, identities: pd.DataFrame) -> str:
    """Count the printed figures that come out."""
    printed = claims[~claims["variant"] & claims["claim"].notna()]
    good = int(printed["verdict"].str.startswith("matches").sum())
    held = int(identities["verdict"].isin(["matches", "holds"]).sum())
    return (
        f"{good} of {len(printed)} printed epsilons and multipliers match, and {held} of {len(identities)} statements "
        "that need no accountant."
    )


def _claims_table(claims: pd.DataFrame) -> str:
    header = ["paper", "where", "setting", "printed", *_COLUMNS, "verdict", "note"]
    return markdown_rows([header, *map(_claim_cells, claims.to_dict("records"))], text=len(header))


def _claim_cells(row: Row) -> list[str]:
    given = f"σ={row['sigma']:.4g}" if row["quantity"] == "epsilon" else f"ε={row['epsilon']:g}"
    kind = "" if row["sampling"] == "poisson" else ", fixed size"
    setting = f"{given}, q={row['q']:.4g}{kind}, T={row['T']}, δ={row['delta']:.3g}"
    printed = f"{'ε' if row['quantity'] == 'epsilon' else 'σ'}={_number(row['claim'])}"
    cells = [_number(row[name]) for name in _COLUMNS]
    return [row["paper"], row["source"], setting, printed, *cells, row["verdict"], row["note"]]


def _figure_notes(values: FigureValues) -> list[str]:
    per_example = values.noise / np.asarray(values.batch_sizes)
    falls = bool((np.diff(per_example, axis=1) < 0).all())
    changes = int((np.diff(np.sign(np.diff(values.classic))) != 0).sum())
    gain = 100 * (1 - values.real_best[1] / values.grid_best[1])
    shape = (
        "one minimum, as the paper observed" if changes == 1 else f"{changes} turning points, the paper observed one"
    )
    ratio = per_example[:, 0] / per_example[:, -1]
    ends = f"batch {values.batch_sizes[0]} to {values.batch_sizes[-1]}"
    return [
        f"- pyvacy_2019, Fig. 3 (q=0.005, σ=1.1, 2,500 steps, δ=1e-5): {shape}. The best of the 72 orders is "
        f"{values.grid_best[0]:g} with ε={values.grid_best[1]:.5f}, the best real order {values.real_best[0]:.1f} with "
        f"ε={values.real_best[1]:.5f}: {gain:.2f} % lower.",
        f"- three_tools_2018, Fig. 5 (10 epochs of 60,000, δ=N^-1.1; the paper does not print its budget): σ per "
        f"example {'falls at every step' if falls else 'does not always fall'} from {ends}, by factors of "
        f"{', '.join(f'{one:.0f} (ε={budget:g})' for one, budget in zip(ratio, values.budgets, strict=True))}.",
    ]


def draw(path: Path, claims: pd.DataFrame, values: FigureValues) -> Path:
    """Printed and recomputed epsilons beside each other, with the two figures."""
    figure = new_figure(14, 9)
    grid = figure.add_gridspec(2, 2, width_ratios=[1.5, 1])
    _draw_claims(figure.add_subplot(grid[:, 0]), claims[claims["quantity"] == "epsilon"])
    _draw_orders(figure.add_subplot(grid[0, 1]), values)
    _draw_noise(figure.add_subplot(grid[1, 1]), values)
    return write_figure(path, figure)


def _draw_claims(ax: Axes, claims: pd.DataFrame) -> None:
    rows = claims.reset_index(drop=True)
    for name, color in _COLORS.items():
        ax.plot(rows[name], rows.index, "o", color=color, label=name, markersize=5, alpha=0.85)
    ax.plot(rows["claim"], rows.index, "x", color="black", label="printed", markersize=8, markeredgewidth=1.6)
    labels = [
        f"{paper.rsplit('_', 1)[0]}: {source}" for paper, source in zip(rows["paper"], rows["source"], strict=True)
    ]
    ax.set_yticks(rows.index, labels, fontsize=7)
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.set_xlabel("ε")
    ax.set_title("printed and recomputed", fontsize=10)
    ax.legend(frameon=False, fontsize=8)
    _finish(ax)


def _draw_orders(ax: Axes, values: FigureValues) -> None:
    ax.plot(values.orders, values.classic, color=_COLORS["rdp-classic"], label="papers' conversion")
    ax.plot(values.orders, values.today, color=_COLORS["rdp"], label="today's conversion")
    ax.plot(*values.real_best, "o", color=_COLORS["rdp-classic"])
    label = f"{values.real_best[1]:.3f} at {values.real_best[0]:.1f}"
    ax.annotate(label, values.real_best, xytext=(-14, -14), textcoords="offset points", fontsize=8)
    ax.set(xlabel="order α", ylabel="ε", xlim=(1, 20), ylim=(0, 10))
    ax.set_title("pyvacy, Fig. 3: q=0.005, σ=1.1, 2,500 steps", fontsize=10)
    ax.legend(frameon=False, fontsize=8)
    _finish(ax)


def _draw_noise(ax: Axes, values: FigureValues) -> None:
    for budget, noise in zip(values.budgets, values.noise, strict=True):
        ax.plot(values.batch_sizes, noise / np.asarray(values.batch_sizes), marker=".", label=f"ε={budget:g}")
    ax.set(xscale="log", yscale="log", xlabel="batch size", ylabel="σ / batch size")
    ax.set_title("three_tools, Fig. 5: noise per example, 10 epochs", fontsize=10)
    ax.legend(frameon=False, fontsize=8)
    _finish(ax)


def _finish(ax: Axes) -> None:
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
