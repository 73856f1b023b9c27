"""What canaries add to a training: CPU time with 2,000 of them over that without, alternating."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from dpbench.data import ImageDataModule
from dpbench.models import MLP, MNISTCNN
from dpbench.modules.image_classifier import ImageClassifier
from dpbench.privacy.canaries.canaries import GradientCanaries
from dpbench.strategies import DPSGD
from tools.audits.runs import quiet, trainer

CANARIES = 2000
NETWORKS: Mapping[str, Callable[..., nn.Module]] = {
    "MLP, 784-256-10": partial(MLP, hidden=[256]),
    "MNIST CNN": MNISTCNN,
}
_LOT, _STEPS, _TIMES = 256, 60, 5


def overhead(network: str, lot: int = _LOT, steps: int = _STEPS, times: int = _TIMES) -> dict[str, Any]:
    """Train on 10,000 digits of MNIST with and without canaries, in turn, after one of each that is not counted.

    Args:
        network: One of `NETWORKS`.
        lot: Expected batch size.
        steps: Of each training.
        times: How many trainings of each kind.

    Returns:
        One line of a table: medians of CPU seconds, and their ratio.
    """
    with quiet():
        pairs = [
            [_seconds(NETWORKS[network], canaries, lot, steps) for canaries in (0, CANARIES)] for _ in range(times + 1)
        ]
    without, audited = (median(pair[which] for pair in pairs[1:]) for which in (0, 1))
    return {"network": network, "without": without, "audited": audited, "ratio": audited / without}


def _seconds(network: Callable[..., nn.Module], canaries: int, lot: int, steps: int) -> float:
    data = ImageDataModule("mnist", expected_batch_size=lot, val_size=50_000, split="permutation")
    torch.manual_seed(0)
    facts = data.model_options()
    module = ImageClassifier(network(**facts), partial(torch.optim.SGD, lr=0.1), facts["num_classes"])
    with tempfile.TemporaryDirectory() as name:
        audit = GradientCanaries(canaries, seed=0) if canaries else None
        ledger = str(Path(name) / "ledger.jsonl")
        strategy = DPSGD(noise_multiplier=1.0, delta=1e-5, seed=0, ledger=ledger, audit=audit)
        fit = trainer(strategy, Path(name), steps).fit
        data.setup()
        began = time.process_time()
        fit(module, data)
        return time.process_time() - began
