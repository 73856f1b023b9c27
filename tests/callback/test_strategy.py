"""What hooks and losses could do between the drawing of a lot and its release."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dpbench.data.loader import PrivateDataLoader
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.errors import ConfigurationError
from dpbench.strategies import DPSGD, AutomaticClipping
from tests.records.test_source import Empty, TwoTensors, tensors
from tests.strategies.worlds import Classifier, loader_of, pictures, trainer_for


def fit(folder: Path, module: Classifier, **options: Any) -> DPSGD:
    strategy = DPSGD(**{"noise_multiplier": 1.0, "seed": 0, "delta": 1e-3, **options})
    trainer_for(folder, strategy, 5).fit(module, loader_of(pictures()))
    return strategy


def test_no_hook_sees_a_sum_before_its_noise(tmp_path: Path) -> None:
    class Curious(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            self.seen += [p.grad for p in self.parameters()]
            return super().training_step(batch, batch_idx)

        def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
            self.seen += [p.grad for p in self.parameters()]

        def on_train_batch_end(self, *_: Any) -> None:
            released = [p.grad for p in self.parameters() if p.grad is not None]
            self.kept += [(gradient, gradient.clone()) for gradient in released]

    module = Curious()
    module.seen, module.kept = [], []
    fit(tmp_path, module, max_physical_batch_size=4)
    assert module.seen and all(gradient is None for gradient in module.seen)
    assert module.kept and all(torch.equal(now, then) for now, then in module.kept)


@pytest.mark.filterwarnings("ignore:whether records are handled")  # the probe
def test_a_piece_may_not_count_twice(tmp_path: Path) -> None:
    class Twice(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            self.backward(self.loss(batch))
            return self.loss(batch)

    with pytest.raises(ConfigurationError, match="backward was called twice"):
        fit(tmp_path, Twice(), max_physical_batch_size=4)


def test_the_unit_is_that_of_the_lots(tmp_path: Path) -> None:
    source = TwoTensors()
    source.unit = "user"
    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3, records=source)
    trainer = trainer_for(tmp_path, strategy, 2)
    with pytest.raises(ConfigurationError, match="a record is a user, but batches are drawn from examples"):
        trainer.fit(Empty(), loader_of(tensors(), 8))
    again = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3, records=source)
    data: Any = tensors()
    data.unit = "user"
    users = PrivateDataLoader(data, PrivateBatchSampler(make_sampling("poisson", 40, 8, unit="user"), 0))
    trainer_for(tmp_path, again, 2).fit(Empty(), users)
    assert '"unit":"user"' in (tmp_path / "ledger.jsonl").read_text().splitlines()[0].replace(" ", "")


def test_options_are_fixed_when_the_strategy_is_made(tmp_path: Path) -> None:
    strategy = DPSGD(target_epsilon=8.0, seed=0, delta=1e-3)
    with pytest.raises(ConfigurationError, match="max_grad_norm cannot change after the DPSGD is made"):
        strategy.max_grad_norm = 0.1
    trainer_for(tmp_path, strategy, 1).fit(Classifier(), loader_of(pictures()))
    assert strategy.noise_multiplier is not None  # as it was solved for

    class Late(DPSGD):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.max_grad_norm = 0.5

    with pytest.raises(ConfigurationError, match="the Late is made.* by max_grad_norm_schedule, or make"):
        Late(noise_multiplier=1.0)


def test_a_unit_is_a_word() -> None:
    with pytest.raises(ConfigurationError, match="unit must be a word"):
        PrivateDataLoader.poisson(tensors(), 8, unit=" ")


def test_a_part_of_ones_own_and_the_option_for_it_contradict() -> None:
    class Own(AutomaticClipping):
        def design(self) -> Any:
            return replace(super().design(), transform=lambda gradients, records, sizes: gradients)

    Own(noise_multiplier=1.0)
    with pytest.raises(ConfigurationError, match="Own already has its own transform"):
        Own(noise_multiplier=1.0, discretization_threshold=0.1)
