"""Every combination of pieces, trained for two steps: docs/combinations.md."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch.optim import SGD, Adagrad, Adam, RMSprop

from dpbench import strategies
from dpbench.data import ImageDataModule, UserDataModule
from dpbench.errors import DPBenchError
from dpbench.harness.reports.markdown import markdown_rows
from dpbench.models import MLP
from dpbench.modules.image_classifier import ImageClassifier
from dpbench.privacy.accounting.composition import ledger_epsilon
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.records import LocalTraining, Users
from dpbench.templates import render
from tools.trainers import quiet, trainer_for

_DELTA = 1e-4
_STEPS = 2
_BATCH = 32.0
_COHORT = 10.0

STRATEGIES: dict[str, Callable[..., strategies.PrivateStrategy]] = {
    "flat": strategies.DPSGD,
    "per layer": partial(strategies.DPSGD, clipping="per_layer"),
    "per parameter": partial(strategies.DPSGD, clipping="per_parameter"),
    "by dimension": partial(strategies.VectorGroups, split="dimension", allocation="dimension"),
    "joint": partial(
        strategies.VectorGroups,
        groups={"hidden": "model.1.*", "output": "model.3.*"},
        split="joint",
        scales={"hidden": 2.0, "output": 1.0},
    ),
    "adaptive quantile": partial(strategies.AdaptiveQuantileClipping, count_noise_std=4.0),
    "adaptive quantile per layer": partial(
        strategies.AdaptiveQuantileClipping, clipping="per_layer", count_noise_std=4.0
    ),
    "adaptive mean": partial(strategies.AdaptiveMeanClipping, norm_noise_multiplier=10.0),
    "automatic": strategies.AutomaticClipping,
    "flat, with private metrics": partial(strategies.DPSGD, metrics={"accuracy": 1.0, "loss": 3.0}),
    "clip only (reference)": strategies.ClipOnly,
    "noise only (reference)": strategies.NoiseOnly,
    "federated averaging (reference)": strategies.FederatedAveraging,
}
TRANSFORMS: dict[str, dict[str, Any]] = {"–": {}, "discretized": {"discretization_threshold": 1e-3}}
DENOISERS: dict[str, dict[str, Any]] = {"–": {}, "error correction": {"correction_threshold": 1e-2}}
SAMPLERS = ("poisson", "fixed_size", "full", "shuffled")
UNITS: dict[str, Callable[[], dict[str, Any]]] = {
    "example": dict,
    "microbatch": lambda: {"microbatch_size": 4},
    "user": lambda: {"records": Users(LocalTraining(lr=0.1, batch_size=10, epochs=2))},
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9),
    "Nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": partial(Adam, lr=0.01),
    "AdaGrad": partial(Adagrad, lr=0.01),
    "RMSprop": partial(RMSprop, lr=0.01),
}


@dataclass(frozen=True)
class Cell:
    """One combination, by the names of its pieces."""

    clipping: str
    transform: str
    denoiser: str
    sampler: str
    unit: str
    optimizer: str

    def strategy(self, folder: Path) -> strategies.PrivateStrategy:
        """The strategy of this combination."""
        return STRATEGIES[self.clipping](
            noise_multiplier=1.0,
            delta=_DELTA,
            seed=0,
            **UNITS[self.unit](),
            ledger=str(folder / "ledger.jsonl"),
            **TRANSFORMS[self.transform],
            **DENOISERS[self.denoiser],
        )


def cells() -> Iterator[Cell]:
    """All combinations."""
    axes = (STRATEGIES, TRANSFORMS, DENOISERS, SAMPLERS, UNITS, OPTIMIZERS)
    return (Cell(*names) for names in itertools.product(*axes))


@cache
def _digits(sampler: str, unit: str) -> ImageDataModule | UserDataModule:
    full = sampler == "full"  # each batch has all records: as many as a batch has elsewhere
    if unit == "user":
        users = 100 - int(_COHORT) if full else 0
        return UserDataModule(
            "digits_users", expected_batch_size=_COHORT, sampling=sampler, val_users=users, split="permutation"
        )
    held_out = 1437 - int(_BATCH) if full else 0
    return ImageDataModule(
        "digits", expected_batch_size=_BATCH, sampling=sampler, image_size=8, val_size=held_out, split="permutation"
    )


def try_cell(cell: Cell, folder: Path) -> str:
    """Train two steps.

    Args:
        cell: The combination.
        folder: New folder for the ledger.

    Returns:
        "", or the error that refuses this combination.
    """
    torch.manual_seed(0)
    data = _digits(cell.sampler, cell.unit)
    facts = data.model_options()
    module = ImageClassifier(MLP(**facts, hidden=[8]), OPTIMIZERS[cell.optimizer], facts["num_classes"])
    before = _weights(module)
    try:
        trainer_for(folder, [cell.strategy(folder)], _STEPS).fit(module, data)
    except DPBenchError as error:
        return str(error)
    after = _weights(module)
    if not after.isfinite().all() or torch.equal(before, after):
        raise AssertionError(f"{cell} did not train")
    _check_ledger(folder / "ledger.jsonl", private="reference" not in cell.clipping)
    return ""


def _check_ledger(path: Path, private: bool) -> None:
    if path.exists() != private:
        raise AssertionError(f"{path} should {'' if private else 'not '}be there")
    if private:
        book = read_ledger(path)
        if not (len(book.releases) == _STEPS and 0 < ledger_epsilon(book, _DELTA) < 100):
            raise AssertionError(f"{path} is not sound")


def _weights(module: pl.LightningModule) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in module.parameters()])


def outcomes(chosen: Iterable[Cell]) -> dict[Cell, str]:
    """Try combinations.

    Returns:
        For each cell "" (it trains), or the reason of its refusal.

    Raises:
        AssertionError: A combination is neither refused nor works.
    """
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        return {cell: try_cell(cell, Path(folder) / str(number)) for number, cell in enumerate(chosen)}


def page() -> str:
    """Try all combinations, and return the page."""
    return page_of(outcomes(cells()))


def page_of(outcomes: dict[Cell, str]) -> str:
    """The page: how many ways to release train for each way to draw, and a collapsed table by clipping."""
    draws = list(itertools.product(SAMPLERS, UNITS))
    releases = list(itertools.product(STRATEGIES, TRANSFORMS, DENOISERS))
    reasons = list(dict.fromkeys(reason for reason in outcomes.values() if reason))

    def marks(release: tuple[str, str, str], draw: tuple[str, str]) -> list[str]:
        cells = [outcomes[Cell(*release, *draw, optimizer)] for optimizer in OPTIMIZERS]
        return sorted({f"[{reasons.index(reason) + 1}]" if reason else "✓" for reason in cells})

    summary = [["sampling", *UNITS]]
    for sampler in SAMPLERS:
        summary.append([sampler, *(_counted([marks(one, (sampler, unit)) for one in releases]) for unit in UNITS)])
    table = [["clipping", "transform", "denoiser", *map(", ".join, draws)]]
    for clipping in STRATEGIES:
        rows = []
        for release in itertools.product([clipping], TRANSFORMS, DENOISERS):
            rows.append([*release, *(" ".join(marks(release, draw)) for draw in draws)])
        alike = all(row[3:] == rows[0][3:] for row in rows)
        table += [[clipping, "any", "any", *rows[0][3:]]] if alike else rows
    return render(
        Path(__file__).with_suffix(".md.jinja"),
        optimizers=list(OPTIMIZERS),
        summary=markdown_rows(summary, text=range(len(summary[0]))),
        table=markdown_rows(table, text=range(len(table[0]))),
        trained=Counter(cell.optimizer for cell, reason in outcomes.items() if not reason),
        tried=len(outcomes) // len(OPTIMIZERS),
        reasons=reasons,
    )


def _counted(marks: list[list[str]]) -> str:
    refusals = sorted({mark for one in marks for mark in one if mark != "✓"})
    trained = sum(one == ["✓"] for one in marks)
    return " ".join([f"{trained} of {len(marks)}" if trained else "refused", *refusals])
