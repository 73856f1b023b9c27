"""`dpbench reproduce claims`: every epsilon that the five papers print, computed again with each accountant."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import pandas as pd
from dp_accounting import get_epsilon_gaussian
from tqdm import tqdm

from dpbench.errors import ConfigurationError
from dpbench.models.mnist_cnn import MNISTCNN
from dpbench.privacy.accounting.accountants import ACCOUNTANTS
from dpbench.privacy.accounting.calibration import TrainingSetting, solved
from dpbench.privacy.accounting.composition import delta_of
from dpbench.privacy.events import effective_noise_multiplier
from dpbench.privacy.mechanism.clipping import VectorGroup
from dpbench.privacy.mechanism.plan import NoiseAllocation, ReleasePlan, Statistic
from dpbench.privacy.sampling import PoissonSampling

TOLERANCE = 0.01
_IDENTITY_TOLERANCE = 1e-3
_SIDES = {
    "epsilon": ("less is spent, the claim is safe", "more is spent than claimed"),
    "noise_multiplier": ("less noise is enough, the claim is safe", "more noise is needed"),
}


@dataclass(frozen=True)
class Claim:
    """One figure that a paper prints.

    Attributes:
        paper: Name of its text.
        source: Where it stands.
        quantity: What it is: "epsilon" or "noise_multiplier".
        setting: All else.
        value: What is printed; None where the paper leaves it open.
        note: What is known of a difference, or had to be assumed.
        variant: Whether the paper prints the figure for another setting than this, which we add.
    """

    paper: str
    source: str
    quantity: str
    setting: TrainingSetting
    value: float | None = None
    note: str = ""
    variant: bool = False


def read_claims() -> dict[str, Any]:
    """The data file, as it is."""
    return tomllib.loads(files("dpbench.reproduce").joinpath("claims.toml").read_text(encoding="utf-8"))


def claims_of(data: dict[str, Any]) -> list[Claim]:
    """The claims about training settings."""
    return [
        Claim(
            row["paper"],
            row["source"],
            row["quantity"],
            setting_of(row),
            row.get("value"),
            row.get("note", ""),
            row.get("variant", False),
        )
        for row in data["claim"]
    ]


def setting_of(row: dict[str, Any]) -> TrainingSetting:
    """A setting from the fields of the data file."""
    population = row["population"]
    return TrainingSetting(
        noise_multiplier=row.get("noise_multiplier"),
        sample_rate=row["batch_size"] / population,
        steps=row.get("steps"),
        epochs=row.get("epochs"),
        epsilon=row.get("epsilon"),
        delta=delta_in(row),
        sampling=row.get("sampling", "poisson"),
        population=population,
    )


def delta_in(row: dict[str, Any]) -> float:
    """δ, printed or as a power of the population."""
    return float(row["delta"] if "delta" in row else row["population"] ** -row["delta_exponent"])


def recomputed(claim: Claim) -> dict[str, float | None]:
    """The claimed quantity by each accountant; None where one does not cover the sampling or shows nothing finite."""
    values: dict[str, float | None] = {}
    for name in ACCOUNTANTS:
        try:
            values[name] = float(getattr(solved(claim.setting, name), claim.quantity))
        except ConfigurationError:
            values[name] = None
    return values


def verdict(claim: Claim, found: dict[str, float | None]) -> str:
    """Which accountants come within 1 % of the printed figure; if none, on which side the tightest bound lies."""
    if claim.value is None:
        return "not printed"
    values = {name: number for name, number in found.items() if number is not None}
    distances = {name: abs(number / claim.value - 1) for name, number in values.items()}
    matching = [name for name in sorted(distances, key=distances.__getitem__) if distances[name] <= TOLERANCE]
    if matching:
        return f"matches ({', '.join(matching)})"
    best = min((name for name in values if ACCOUNTANTS[name].guarantee), key=values.__getitem__)
    words = _SIDES[claim.quantity][values[best] > claim.value]
    return f"does not match: {words} ({best} {values[best]:.3g})"


def recomputed_identity(row: dict[str, Any]) -> float:
    """A figure that no accountant enters."""
    quantity = row["quantity"]
    if quantity == "combined_noise_multiplier":
        return float((row["gradient"] ** -2 + row["statistic"] ** -2) ** -0.5)
    if quantity == "statistic_noise_multiplier":
        return float((row["whole"] ** -2 - row["gradient"] ** -2) ** -0.5)
    if quantity == "gradient_noise_multiplier":
        statistics = (Statistic("counts", 1, 1.0, row["statistic"]),)
        group = (VectorGroup("gradient", (0,), 1.0),)
        return ReleasePlan(PoissonSampling(1, 1.0), group, row["whole"], (1,), statistics).gradient_multiplier
    if quantity == "allocation":
        return _allocated(row["value"], row["allocation"])
    if quantity == "replacement_factor":
        z, delta = row["noise_multiplier"], row["delta"]
        return float(get_epsilon_gaussian(z / 2, delta) / get_epsilon_gaussian(z, delta))
    if quantity == "joint_noise":
        sampling, joint = PoissonSampling(10_000, 0.01), VectorGroup("joint", (0, 1), 1.0, (1.0, 100.0))
        plan = ReleasePlan(sampling, (joint,), 1.0, (1, 1))  # σ̃ = qnσ_g = 100 · 0.01
        return float(plan.parameter_stds[row["vector"]] / sampling.expected_batch_size)
    z = math.sqrt(2 * math.log(1.25 / row["delta"])) / row["epsilon"]
    rate = row["sample_rate"]
    event = TrainingSetting(noise_multiplier=z, sample_rate=rate, population=1).event
    return delta_of({event: 1}, rate * row["epsilon"], "pld")


def _allocated(noise_multiplier: float, allocation: NoiseAllocation) -> float:
    """The multiplier of a release with a group for each parameter of the MNIST network, bounds all different."""
    sizes = tuple(parameter.numel() for parameter in MNISTCNN((1, 28, 28), 10).parameters())
    groups = tuple(VectorGroup(str(position), (position,), 0.1 * (position + 1)) for position in range(len(sizes)))
    plan = ReleasePlan(PoissonSampling(60_000, 0.004), groups, noise_multiplier, sizes, (), allocation)
    return effective_noise_multiplier(plan.queries)


def identity_verdict(row: dict[str, Any], found: float) -> str:
    """Whether an identity or inequality holds."""
    if row["quantity"] == "delta_at_most":
        return "holds" if found <= row["value"] else "does not hold"
    return "matches" if abs(found / row["value"] - 1) <= _IDENTITY_TOLERANCE else "does not match"


def claims_table(claims: Sequence[Claim]) -> pd.DataFrame:
    """One line for each claim: source, setting, figure printed, figures found, verdict."""
    lines = []
    for claim in tqdm(claims, desc="claims", disable=None):
        found = recomputed(claim)
        setting = claim.setting
        lines.append(
            {
                "paper": claim.paper,
                "source": claim.source,
                "quantity": claim.quantity,
                "sigma": setting.noise_multiplier,
                "epsilon": setting.epsilon,
                "sampling": setting.sampling,
                "q": setting.sample_rate,
                "T": _steps(setting),
                "delta": setting.delta,
                "claim": claim.value,
                **found,
                "variant": claim.variant,
                "verdict": verdict(claim, found),
                "note": claim.note,
            }
        )
    return pd.DataFrame(lines)


def _steps(setting: TrainingSetting) -> int:
    return replace(setting, noise_multiplier=1.0).number_of_steps


def identities_table(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """One line for each identity."""
    lines = []
    for row in rows:
        found = recomputed_identity(row)
        names = {"paper": row["paper"], "source": row["source"], "claim": row["value"], "recomputed": found}
        lines.append({**names, "verdict": identity_verdict(row, found), "note": row.get("note", "")})
    return pd.DataFrame(lines)
