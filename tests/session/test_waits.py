"""How often a private step waits for its device: counted where a tensor's number comes to the host, on the CPU.

Copies of numbers of the host to a device are not seen here; `tests/gpu` counts what a GPU is waited for.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from torch.utils._python_dispatch import TorchDispatchMode

from dpbench.privacy.mechanism import noise
from dpbench.privacy.native import kernels
from dpbench.session.executor import Executor
from dpbench.strategies import DPSGD
from tests.session.test_graphs import Recorder, classifier, loader
from tests.strategies.worlds import trainer_for

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")

STEPS = 20
READS = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2", "bincount"}
"""Operations whose result, or its size, the host waits for."""


class Waits(TorchDispatchMode):
    """Counts reads by the number of the step that they are made in."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.of_step: Counter[int] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__.partition(".")[0]
        if name in READS:
            self.of_step[self.step] += 1
        return function(*args, **(kwargs or {}))


class Steps(Callback):
    """Before the strategy, so that nothing of a step is counted in another one."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._waits.step = trainer.global_step + 1

    def on_train_epoch_end(self, *_: Any) -> None:
        self._waits.step = 0


@pytest.mark.parametrize("executor", [Executor, Recorder])
def test_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: Any) -> None:
    """Whether all records are finite, and the checksum of the ledger."""
    monkeypatch.setattr(kernels, "suits", lambda *tensors: False)
    numbers = noise.normal_numbers
    monkeypatch.setattr(noise, "normal_numbers", lambda size, draw: numbers(size, draw, counts_tail=False))
    monkeypatch.setattr("dpbench.session.session.executor_of", lambda name, device: executor())
    waits = Waits()
    strategy = DPSGD(noise_multiplier=0.5, delta=1e-3, seed=3, ledger=str(tmp_path / "ledger.jsonl"))
    trainer = trainer_for(tmp_path, strategy, STEPS, log_every_n_steps=1000)
    trainer.callbacks.insert(0, Steps(waits))
    with waits:
        trainer.fit(classifier(), loader())
    counts = [waits.of_step[step] for step in range(1, STEPS + 1)]
    assert median(counts) == 2
    assert counts[0] > 2  # of the first lot, as of one of each octave, more is looked at
