"""Trains a golden run: straight through, or killed and resumed, which must come to the same bits."""

from __future__ import annotations

import hashlib
import os
import signal
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

from dpbench import PrivateLoop
from dpbench.privacy import native
from tools.golden import worlds
from tools.golden.scenarios import SEED, STEPS, Scenario, fixed_keys
from tools.trainers import trainer_for

CHECKPOINT = 10
"""Steps after which a checkpoint is saved."""
DEATH = 14
"""Step in which a run dies; the releases since the checkpoint are made again."""
_LR = 0.2


@dataclass
class Outcome:
    """What a golden run left.

    Attributes:
        steps: A hash of the weights after each step.
        weights: At the end, as floats.
        ledger: Its bytes as text; "" for a reference.
        resumed: Whether the run died and went on from its checkpoint.
    """

    steps: list[str] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    ledger: str = ""
    resumed: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


class Died(Exception):
    """Stands for whatever ends a run."""


class _Trail(pl.Callback):
    """Notes the weights after each step."""

    def __init__(self, steps: list[str]) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.steps.append(weights_hash(pl_module))


class _Death(pl.Callback):
    """Ends the run after a step whose release is on disk, and whose update is in no checkpoint."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step < DEATH:
            return
        if self.how == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise Died


def weights_hash(module: nn.Module) -> str:
    """A hash of all parameters, to the bit."""
    weights = hashlib.sha256()
    for parameter in module.parameters():
        numbers = parameter.detach().cpu().contiguous().view(-1)
        weights.update(numbers.view(torch.uint8).numpy().tobytes())
    return weights.hexdigest()[:16]


def run(scenario: Scenario, folder: Path) -> Outcome:
    """Train a golden run to its end.

    Args:
        scenario: What to train. With two processes both call this.
        folder: For ledger and checkpoints; new.

    Raises:
        RuntimeError: A run that was to die did not, or not as it should have.
    """
    folder.mkdir(parents=True, exist_ok=True)
    has_kernels = scenario.tier == "kernels" and kernels_are_there()
    native.select("on" if has_kernels else "off")
    with fixed_keys():
        if scenario.way == "loop":
            outcome = _loop(scenario, folder)
        elif scenario.end == "straight":
            outcome = _fit(scenario, folder)
        else:
            outcome = _die_and_resume(scenario, folder)
    ledger = folder / "ledger.jsonl"
    outcome.ledger = ledger.read_text(encoding="utf-8") if ledger.exists() else ""
    return outcome


def kernels_are_there() -> bool:
    """Whether this machine has the kernels."""
    native.select("auto")
    return native.library() is not None


def _loop(scenario: Scenario, folder: Path) -> Outcome:
    model = worlds.network(scenario.network)
    optimizer = worlds.optimizer_of(model, _LR)
    strategy = scenario.make_strategy(folder / "ledger.jsonl")
    loader = worlds.lots_of(scenario.sampling, False, SEED)
    outcome = Outcome()
    for _ in PrivateLoop(model, optimizer, loader, strategy, worlds.mean_loss, STEPS):
        outcome.steps.append(weights_hash(model))
    outcome.weights = _weights(model)
    return outcome


def _fit(
    scenario: Scenario, folder: Path, more: tuple[pl.Callback, ...] = (), checkpoint: Path | None = None
) -> Outcome:
    model = worlds.network(scenario.network)
    module = worlds.Classifier(model, scenario.way == "manual", 1.0 if scenario.records == "users" else _LR)
    strategy = scenario.make_strategy(folder / "ledger.jsonl")
    loader = worlds.lots_of(scenario.sampling, scenario.records == "users", SEED)
    outcome = Outcome(resumed=checkpoint is not None)
    trainer = trainer_for(folder, (strategy, _Trail(outcome.steps), *more), STEPS, devices=int(scenario.processes))
    torch.manual_seed(1)  # of what has no key: training without privacy
    trainer.fit(module, loader, ckpt_path=checkpoint, weights_only=False)
    outcome.weights = _weights(model)
    return outcome


def _die_and_resume(scenario: Scenario, folder: Path) -> Outcome:
    saved = ModelCheckpoint(folder, filename="saved", every_n_train_steps=CHECKPOINT, save_top_k=1)
    last = (saved, _Death(scenario.end))
    if scenario.end == "sigkill":
        _in_a_fork(scenario, folder, last)
    else:
        try:
            _fit(scenario, folder, last)
        except Died:
            pass
        else:
            raise RuntimeError(f"{scenario.name} ended before its death.")
    return _fit(scenario, folder, checkpoint=folder / "saved.ckpt")


def _in_a_fork(scenario: Scenario, folder: Path, last: tuple[pl.Callback, ...]) -> None:
    child = os.fork()
    if not child:
        try:
            _fit(scenario, folder, last)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
        raise RuntimeError(f"{scenario.name} was to be killed, and ended with status {status}.")


def _weights(module: nn.Module) -> list[float]:
    return [float(value) for parameter in module.parameters() for value in parameter.detach().flatten()]
