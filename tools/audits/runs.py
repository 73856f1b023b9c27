"""Trains with canaries, and audits what they saw."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dpbench import strategies
from dpbench.capabilities.auditing.audit import AuditResult, audit
from dpbench.capabilities.canaries.canaries import GradientCanaries
from dpbench.data import ImageDataModule, UserDataModule
from dpbench.models import MLP
from dpbench.modules.image_classifier import ImageClassifier
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.records import LocalTraining, Users
from tools.trainers import quiet, trainer_for

_DELTA = 1e-5


@dataclass(frozen=True)
class Setting:
    """A training that is audited.

    Attributes:
        name: Shown in the table.
        strategy: Makes the strategy, from the common options.
        unit: "example", "microbatch" or "user".
        sampling: Word for it.
        data: Name of the data set.
        lot: Expected batch size; with `full` sampling all that is kept of the data set.
        steps: Number of releases.
        canaries: Number of canaries.
        hidden: Width of the network's layer.
        options: Further ones of the strategy.
    """

    name: str
    strategy: Callable[..., strategies.PrivateStrategy] = strategies.DPSGD
    unit: str = "example"
    sampling: str = "poisson"
    data: str = "digits"
    lot: int = 64
    steps: int = 150
    canaries: int = 1000
    hidden: int = 64
    options: dict[str, Any] = field(default_factory=dict)

    def data_module(self) -> ImageDataModule | UserDataModule:
        """The data, with lots drawn by the seed."""
        full = self.sampling == "full"
        if self.unit == "user":
            return UserDataModule(self.data, expected_batch_size=self.lot, sampling=self.sampling)
        options: dict[str, Any] = {"image_size": 8, "val_size": 1437 - self.lot if full else 0, "split": "permutation"}
        if self.data == "mnist":  # 10,000 of its images
            options = {"val_size": 50_000, "split": "permutation"}
        return ImageDataModule(self.data, expected_batch_size=self.lot, sampling=self.sampling, **options)

    def strategy_for(self, epsilon: float, folder: Path, seed: int) -> strategies.PrivateStrategy:
        """The strategy that spends an epsilon (by RDP), with canaries."""
        units: dict[str, dict[str, Any]] = {
            "example": {},
            "microbatch": {"microbatch_size": 4},
            "user": {"records": Users(LocalTraining(lr=0.1, batch_size=20))},
        }
        return self.strategy(
            target_epsilon=epsilon,
            delta=_DELTA,
            seed=seed,
            ledger=str(folder / "ledger.jsonl"),
            audit=GradientCanaries(self.canaries, seed=seed),
            **units[self.unit],
            **self.options,
        )


def audited(
    setting: Setting, epsilon: float, seed: int = 0, broken: AbstractContextManager[Any] | None = None
) -> dict[str, Any]:
    """Train once and audit.

    Args:
        setting: What is trained.
        epsilon: That the run may spend.
        seed: Of everything.
        broken: Holds a mechanism broken while it trains and is audited.

    Returns:
        One line of a table.
    """
    quiet()
    with tempfile.TemporaryDirectory() as name:
        folder, data = Path(name), setting.data_module()
        torch.manual_seed(seed)
        facts = data.model_options()
        module = ImageClassifier(
            MLP(**facts, hidden=[setting.hidden]), partial(torch.optim.SGD, lr=0.2), facts["num_classes"]
        )
        strategy = setting.strategy_for(epsilon, folder, seed)
        began = time.process_time()
        # The audit too, since what is broken may be the accounting that it asks.
        with broken or nullcontext():
            trainer_for(folder, [strategy], setting.steps).fit(module, data)
            trained = time.process_time()
            canaries: Any = strategy._releases.hook
            result = audit(read_ledger(folder / "ledger.jsonl"), canaries.sums.scores())
    return {
        "name": setting.name,
        "asked": epsilon,
        **columns(result),
        "train_seconds": trained - began,
        "audit_seconds": time.process_time() - trained,
    }


def columns(result: AuditResult) -> dict[str, Any]:
    """What the tables show of an audit."""
    bounds = {bound.name: bound.epsilon for bound in result.bounds}
    return {
        "claimed": result.claimed,
        "sound": result.sound,
        "sound_by": result.sound_by,
        "one_run": bounds["one run, DP only"],
        "f_dp": bounds["one run, f-DP"],
        "family": bounds["family"],
        "game": bounds["release game"],
        "declared_mu": result.declared_mu,
        "measured_mu": result.measured_mu,
        "verdict": str(result.verdict),
        "violated": ", ".join(bound.name for bound in result.violations),
        "failed": ", ".join(check.name for check in result.checks if check.passed is False),
        "canaries": result.canaries,
        "releases": result.releases,
    }
