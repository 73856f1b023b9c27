"""`dpbench reproduce claims`: every epsilon that the five papers print, computed again with each accountant."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from dp_accounting import get_epsilon_gaussian
from tqdm import tqdm

from dpbench.capabilities.claims.tensors_apart import (
    TENSORS_APART,
    nominal_epsilon,
    nominal_noise_multiplier,
    tensors_apart,
)
from dpbench.errors import ConfigurationError
from dpbench.files import write_atomically
from dpbench.harness.reports.figures import new_figure, write_figure
from dpbench.harness.runs.numbers import ABSENT
from dpbench.models.mnist_cnn import MNISTCNN
from dpbench.privacy.accounting.accountants import ACCOUNTANTS, CANONNE_2020, MIRONOV_2017, RenyiAccountant
from dpbench.privacy.accounting.calibration import TrainingSetting, solved
from dpbench.privacy.accounting.composition import delta_of
from dpbench.privacy.events import effective_noise_multiplier
from dpbench.privacy.mechanism.clipping import VectorGroup
from dpbench.privacy.mechanism.plan import NoiseAllocation, ReleasePlan
from dpbench.privacy.sampling import PoissonSampling
from dpbench.templates import render

TOLERANCE = 0.01
_IDENTITY_TOLERANCE = 1e-3
_SIDES = {
    "epsilon": ("less is spent, the claim is safe", "more is spent than claimed"),
    "noise_multiplier": ("less noise is enough, the claim is safe", "more noise is needed"),
}
_ACCOUNTANTS = list(dict.fromkeys(("rdp-classic", "rdp", "pld", TENSORS_APART, *ACCOUNTANTS)))
_FORMS = {"rdp-classic": "o", "rdp": "o", "pld": "o", TENSORS_APART: "o", "claim": "kx"}
"""Columns of the figure, and how matplotlib draws them."""


@dataclass(frozen=True)
class Claim:
    """One figure that a paper prints.

    Attributes:
        paper: Name of its text.
        source: Place in the paper.
        quantity: "epsilon" or "noise_multiplier".
        setting: All else.
        value: Printed value; None where the paper leaves it open.
        note: Cause of a difference, as far as known, or an assumption.
        variant: True for a setting that we add; the paper prints the figure for another one.
        tensors: Number of tensors clipped and noised apart; a printed noise multiplier is that of each.
    """

    paper: str
    source: str
    quantity: str
    setting: TrainingSetting
    value: float | None = None
    note: str = ""
    variant: bool = False
    tensors: int = 1


def read_claims() -> dict[str, Any]:
    """Read the data file, as it is."""
    return tomllib.loads(Path(__file__).with_name("claims.toml").read_text(encoding="utf-8"))


def claims_of(data: Mapping[str, Any]) -> list[Claim]:
    """The claims about training settings."""
    claims = []
    for row in data["claim"]:
        texts = {name: row[name] for name in Claim.__dataclass_fields__ if name in row}
        claims.append(Claim(**texts, setting=_setting(row, row["batch_size"])))
    return claims


def _setting(row: Mapping[str, Any], batch_size: int) -> TrainingSetting:
    """The setting of a training; δ is printed, or a power of the population."""
    return TrainingSetting(
        noise_multiplier=row.get("noise_multiplier"),
        sample_rate=batch_size / row["population"],
        steps=row["steps"] if "steps" in row else _steps(row, batch_size),
        epsilon=row.get("epsilon"),
        delta=row["delta"] if "delta" in row else row["population"] ** -row["delta_exponent"],
        sampling=row.get("sampling", "poisson"),
        population=row["population"],
    )


def _steps(row: Mapping[str, Any], batch_size: int) -> int:
    """Steps of a number of epochs as the papers' programs count them: whole batches in all passes together."""
    return int(row["epochs"] * row["population"]) // batch_size


def recomputed(claim: Claim) -> dict[str, float | None]:
    """Compute the claimed quantity by each accountant; None where it is not covered, or not finite."""
    values: dict[str, float | None] = {}
    # All tensors of a batch are one query, with σ/√m where each of m has σ.
    of_each = claim.tensors**0.5
    scale = of_each if claim.quantity == "noise_multiplier" else 1.0
    for name in ACCOUNTANTS:
        try:
            values[name] = scale * float(getattr(solved(claim.setting, name), claim.quantity))
        except ConfigurationError:
            values[name] = None
    values[TENSORS_APART] = None
    if claim.tensors > 1 and claim.quantity == "noise_multiplier":
        values[TENSORS_APART] = nominal_noise_multiplier(claim.setting, claim.tensors)
    elif claim.tensors > 1:
        assert claim.setting.noise_multiplier is not None
        multipliers = [of_each * claim.setting.noise_multiplier]
        values[TENSORS_APART] = nominal_epsilon(claim.setting, claim.tensors, multipliers)
    return values


def verdict(claim: Claim, values: Mapping[str, float | None]) -> str:
    """Say which accountants come within 1 % of the printed figure; if none, on which side the tightest bound lies."""
    if claim.value is None:
        return "not printed"
    ratios = pd.Series(values, dtype=float).dropna() / claim.value
    distances = (ratios - 1).abs().sort_values(kind="stable")
    matching = distances.index[distances <= TOLERANCE]
    if len(matching):
        return f"matches ({', '.join(matching)})"
    bounds = [name for name in ratios.index if name in ACCOUNTANTS and ACCOUNTANTS[name].guarantee]
    best = str(ratios[bounds].idxmin())
    words = _SIDES[claim.quantity][bool(ratios[best] > 1)]
    return f"does not match: {words} ({best} {values[best]:.3g})"


def recomputed_identity(row: Mapping[str, Any]) -> float:
    """Compute a figure that no accountant enters."""
    quantity = row["quantity"]
    if quantity.endswith("_noise_multiplier"):
        # Two sums over one lot are one release: 1/z² = 1/z_gradient² + 1/z_statistic². Any of the three is asked for.
        parts = [row[part] ** -2 for part in ("gradient", "statistic") if part in row]
        precision = row["whole"] ** -2 - sum(parts) if "whole" in row else sum(parts)
        return float(precision**-0.5)
    if quantity == "allocation":
        return _allocated(row["value"], row["allocation"])
    if quantity == "replacement_factor":
        # To replace a record moves a sum by twice the bound: by as much as half the noise would.
        z = row["noise_multiplier"]
        replaced = get_epsilon_gaussian(z / 2, row["delta"])
        return float(replaced / get_epsilon_gaussian(z, row["delta"]))
    if quantity == "joint_noise":
        # Two vectors under one bound, with α = (1, 100): the second gets 100 times the noise of the first.
        sampling = PoissonSampling(10_000, 0.01)
        joint = VectorGroup("joint", (0, 1), 1.0, (1.0, 100.0))
        # σ̃ = qnσ_g = 100 · 0.01 of the sum; of the mean, which the paper prints, qn times less.
        plan = ReleasePlan(sampling, (joint,), 1.0, (1, 1))
        return float(plan.parameter_stds[row["vector"]] / sampling.expected_batch_size)
    # The classical Gaussian mechanism, σ = √(2 ln(1.25/δ))/ε, amplified by sampling: is it (qε, δ)-DP?
    z = math.sqrt(2 * math.log(1.25 / row["delta"])) / row["epsilon"]
    rate = row["sample_rate"]
    event = TrainingSetting(noise_multiplier=z, sample_rate=rate, population=1).event
    return delta_of({event: 1}, rate * row["epsilon"], "pld")


def _allocated(noise_multiplier: float, allocation: NoiseAllocation) -> float:
    """The multiplier of a release with a group for each parameter of the MNIST network, bounds all different."""
    sizes = tuple(parameter.numel() for parameter in MNISTCNN((1, 28, 28), 10).parameters())
    groups = tuple(VectorGroup(str(place), (place,), 0.1 * (place + 1)) for place in range(len(sizes)))
    plan = ReleasePlan(PoissonSampling(60_000, 0.004), groups, noise_multiplier, sizes, (), allocation)
    return effective_noise_multiplier(plan.queries)


def identity_verdict(row: Mapping[str, Any], value: float) -> str:
    """Say whether an identity or inequality holds."""
    if row["quantity"] == "delta_at_most":
        return "holds" if value <= row["value"] else "does not hold"
    return "matches" if abs(value / row["value"] - 1) <= _IDENTITY_TOLERANCE else "does not match"


def claims_table(claims: Sequence[Claim]) -> pd.DataFrame:
    """One line for each claim: source, setting, figure printed, figures computed, verdict."""
    lines = []
    for claim in tqdm(claims, desc="claims", disable=None):
        values = recomputed(claim)
        setting = claim.setting
        line = {
            "paper": claim.paper,
            "source": claim.source,
            "quantity": claim.quantity,
            "sigma": setting.noise_multiplier,
            "epsilon": setting.epsilon,
            "sampling": setting.sampling,
            "q": setting.sample_rate,
            "T": setting.number_of_steps,
            "delta": setting.delta,
            "claim": claim.value,
            **values,
            "variant": claim.variant,
            "verdict": verdict(claim, values),
            "note": claim.note,
        }
        lines.append(line)
    return pd.DataFrame(lines)


def identities_table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One line for each identity."""
    table = pd.DataFrame(rows).fillna({"note": ""})
    table["claim"] = table["value"]
    table["recomputed"] = [recomputed_identity(row) for row in rows]
    table["verdict"] = [identity_verdict(row, value) for row, value in zip(rows, table["recomputed"], strict=True)]
    return table[["paper", "source", "claim", "recomputed", "verdict", "note"]]


def limits_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Account for the noise behind the ε = 20 of three_tools_2018 as that paper does, and with limits of the truth."""
    lines = []
    for size in row["rows"]:
        setting = _setting(row, size["batch_size"])
        limits = tensors_apart(setting, row["tensors"], size["noise_multipliers"])
        lines.append({"batch_size": size["batch_size"], **limits})
    return lines


def epsilons_by_order(row: Mapping[str, Any]) -> tuple[pd.DataFrame, tuple[float, float]]:
    """Recompute pyvacy_2019's Fig. 3: ε over the order of the Rényi divergence.

    Returns:
        ε by order, with the papers' conversion and with today's; and (order, ε) of the best of the papers' 72 orders.
    """
    setting = TrainingSetting(
        noise_multiplier=row["noise_multiplier"], sample_rate=row["sample_rate"], steps=row["steps"]
    )
    papers = ACCOUNTANTS["rdp-classic"]
    assert isinstance(papers, RenyiAccountant)
    orders = np.arange(1.5, 40, 0.1)
    divergences = papers.divergences(setting.event, tuple(orders)) * row["steps"]
    epsilons = {
        "papers' conversion": MIRONOV_2017.epsilon(orders, divergences, row["delta"]),
        "today's conversion": CANONNE_2020.epsilon(orders, divergences, row["delta"]),
    }
    grid = papers.epsilon_by_order(papers.curve(setting.events), row["delta"])
    best = (papers.orders[int(grid.argmin())], float(grid.min()))
    return pd.DataFrame(epsilons, index=orders), best


def noise_per_example(row: Mapping[str, Any]) -> pd.DataFrame:
    """Recompute three_tools_2018's Fig. 5: σ per example that uses up a budget ε, by batch size."""
    shares = pd.DataFrame(index=row["batch_sizes"], columns=row["epsilons"], dtype=float)
    for epsilon, batch_size in itertools.product(row["epsilons"], row["batch_sizes"]):
        setting = replace(_setting(row, batch_size), epsilon=epsilon)
        shares.loc[batch_size, epsilon] = solved(setting, "rdp-classic").noise_multiplier / batch_size
    return shares


def reproduce_claims(folder: Path) -> str:
    """Compute all claims, and write claims.csv, identities.csv, table.md and figure.png.

    Args:
        folder: Folder of the results; made.

    Returns:
        A summary for the terminal.
    """
    data = read_claims()
    claims = claims_table(claims_of(data))
    identities = identities_table(data["identity"])
    by_order, grid_best = epsilons_by_order(data["figures"]["pyvacy_2019"]["fig3"])
    papers = by_order["papers' conversion"]
    real_best = (papers.idxmin(), papers.min())
    noise = noise_per_example(data["figures"]["three_tools_2018"]["fig5"])
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "claims.csv", claims.to_csv(index=False, float_format="%.8g"))
    write_atomically(folder / "identities.csv", identities.to_csv(index=False, float_format="%.8g"))
    count = _count(claims, identities)
    page = render(
        Path(__file__).with_name("page.md.jinja"),
        printed=claims[~claims["variant"]],
        variants=claims[claims["variant"]],
        identities=identities,
        left_open=data["open"],
        accountants=_ACCOUNTANTS,
        apart=TENSORS_APART,
        limits=limits_of(data["tensors_apart"]),
        count=count,
        number=_number,
        grid_best=grid_best,
        real_best=real_best,
        turning_points=int((np.diff(np.sign(np.diff(papers))) != 0).sum()),
        noise=noise,
    )
    write_atomically(folder / "table.md", page)
    _draw(folder / "figure.png", claims[claims["quantity"] == "epsilon"], by_order, noise)
    every = pd.concat([claims, identities])
    width = int(every["source"].str.len().max())
    lines = [f"{row.paper:<36} {row.source:<{width}}  {row.verdict}" for row in every.itertuples()]
    written = f"Written to {folder}: table.md, figure.png, claims.csv, identities.csv."
    return "\n".join([*lines, "", count, written])


def _count(claims: pd.DataFrame, identities: pd.DataFrame) -> str:
    """Count the printed figures that come out."""
    # Readings that we add are no figures of the papers.
    printed = claims[~claims["variant"] & claims["claim"].notna()]
    matching = int(printed["verdict"].str.startswith("matches").sum())
    holding = int(identities["verdict"].isin(["matches", "holds"]).sum())
    return (
        f"{matching} of {len(printed)} printed epsilons and multipliers match, and {holding} of {len(identities)} "
        "statements that need no accountant."
    )


def _number(value: float | None, form: str = ".4g") -> str:
    return ABSENT if value is None or math.isnan(value) else format(value, form)


def _draw(path: Path, claims: pd.DataFrame, by_order: pd.DataFrame, noise: pd.DataFrame) -> None:
    """Draw printed and recomputed epsilons, and the two figures of papers."""
    figure = new_figure(14, 9)
    grid = figure.add_gridspec(2, 2, width_ratios=[1.5, 1])
    axes = figure.add_subplot(grid[:, 0])
    labels = claims["paper"].str.rsplit("_", n=1).str[0] + ": " + claims["source"]
    for name, form in _FORMS.items():
        axes.plot(claims[name], labels, form, label=name)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.set(xscale="log", xlabel="ε", title="printed (claim) and recomputed")
    axes.legend(fontsize=8)
    title = "pyvacy, Fig. 3: q=0.005, σ=1.1, 2,500 steps"
    axes = figure.add_subplot(grid[0, 1])
    by_order.plot(ax=axes, xlim=(1, 20), ylim=(0, 10), xlabel="order α", ylabel="ε", title=title)
    title = "three_tools, Fig. 5: noise per example, 10 epochs"
    axes = figure.add_subplot(grid[1, 1])
    noise.add_prefix("ε=").plot(ax=axes, loglog=True, xlabel="batch size", ylabel="σ / batch size", title=title)
    write_figure(path, figure)
