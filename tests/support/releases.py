"""A release by itself, without Trainer and module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpbench.privacy.budget import Budget, TrainingLength
from dpbench.privacy.events import UNITS, Summands
from dpbench.privacy.gradients.parameter import InstantiatedGradients
from dpbench.privacy.mechanism.noise_process import MakeNoise, noise_of
from dpbench.privacy.mechanism.recipe import Recipe
from dpbench.privacy.mechanism.schedules import CONSTANT, UNSCHEDULED, Factors, Schedules
from dpbench.privacy.processes import ALONE, Processes
from dpbench.privacy.releases import ReleaseEngine, TrainableParameters
from dpbench.privacy.sampling import PoissonSampling, Sampling

SAMPLING = PoissonSampling(100, 0.1)
WIDTH = 500
OPEN: list[ReleaseEngine] = []


def made(
    folder: Path,
    z: float | None = 1.0,
    target: float | None = None,
    recipe: Recipe = Recipe(),  # noqa: B008
    processes: Processes = ALONE,
    start: dict[str, Any] | None = None,
    horizon: TrainingLength = TrainingLength(),  # noqa: B008
    sampling: Sampling = SAMPLING,
    summands: Summands = UNITS,
    schedules: Schedules = UNSCHEDULED,
    size_factors: Factors = CONSTANT,
    make_noise: MakeNoise = noise_of,
    seed: int | None = 3,
) -> ReleaseEngine:
    releases = ReleaseEngine(recipe, Budget(target, 1e-4, "rdp"), z, seed, "a run", schedules, make_noise)
    OPEN.append(releases)
    folder.mkdir(exist_ok=True)
    if start is not None:
        releases.load_state_dict(start)
    releases.join(processes, seed)
    trained = TrainableParameters([nn.Parameter(torch.zeros(WIDTH))], ["w"])
    groups = recipe.groups(trained.names, trained.sizes)
    sampling = sampling.in_groups(releases.unit_noise.bands)
    releases.keep_keys(folder / "ledger.jsonl", are_lots_seeded=True)
    releases.begin(sampling, summands, trained, groups, {}, horizon, size_factors)
    releases.open_ledger(folder / "ledger.jsonl", horizon)
    return releases


def release(releases: ReleaseEngine, rows: Tensor | None = None) -> Tensor:
    releases.open_lot()
    if rows is not None:
        releases.accumulate([InstantiatedGradients(lambda: rows)], len(rows))
    return releases.release()[0].clone()


def rows(seed: int, size: int = 7) -> Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(seed)) / WIDTH**0.5 / 2  # norms of a half
