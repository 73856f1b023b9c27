"""What hooks and losses could do between the drawing of a lot and its release."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from dpbench.data.lots import LotLoader, Lots, make_sampling
from dpbench.errors import ConfigurationError
from dpbench.strategies import DPSGD, AutomaticClipping
from tests.records.test_source import Empty, TwoTensors, tensors
from tests.strategies.worlds import Classifier, loader_of, pictures, trainer_for


def fit(folder: Path, module: Classifier, **options: Any) -> DPSGD:
    strategy = DPSGD(**{"noise_multiplier": 1.0, "seed": 0, "delta": 1e-3, **options})
    trainer_for(folder, strategy, 5).fit(module, loader_of(pictures()))
    return strategy


@pytest.mark.parametrize("options", [{}, {"max_physical_batch_size": 4}], ids=["whole", "pieces"])
def test_no_hook_sees_a_sum_before_its_noise(tmp_path: Path, options: dict[str, Any]) -> None:
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
    fit(tmp_path, module, **options)
    assert module.seen and all(gradient is None for gradient in module.seen)
    assert module.kept and all(torch.equal(now, then) for now, then in module.kept)


@pytest.mark.filterwarnings("ignore:whether records are handled", "ignore:.training_step. returned .None.")
def test_a_piece_may_not_be_left_out(tmp_path: Path) -> None:
    class Picky(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            self.calls = getattr(self, "calls", 0) + 1
            return None if len(batch[0]) < 4 else super().training_step(batch, batch_idx)

    with pytest.raises(ConfigurationError, match="training_step returned no loss"):
        fit(tmp_path, Picky(), max_physical_batch_size=4)


@pytest.mark.filterwarnings("ignore:whether records are handled")  # the probe
def test_a_piece_may_not_count_twice(tmp_path: Path) -> None:
    class Twice(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            loss = self.loss(batch)
            self.backward(loss)
            return self.loss(batch)

    with pytest.raises(ConfigurationError, match="backward was called twice"):
        fit(tmp_path, Twice(), max_physical_batch_size=4)


def test_what_is_updated_is_released(tmp_path: Path) -> None:
    class More(Classifier):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            self.__dict__["hidden"] = nn.Parameter(torch.zeros(3))  # of nobody
            return torch.optim.SGD([*self.parameters(), self.hidden], lr=0.1)

    with pytest.raises(ConfigurationError, match="to which nothing is released"):
        fit(tmp_path, More())


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
    users = LotLoader(data, Lots(make_sampling("poisson", 40, 8, unit="user"), 0))
    trainer_for(tmp_path, again, 2).fit(Empty(), users)
    assert '"unit":"user"' in (tmp_path / "ledger.jsonl").read_text().splitlines()[0].replace(" ", "")


def test_options_are_fixed_when_the_strategy_is_made(tmp_path: Path) -> None:
    strategy = DPSGD(target_epsilon=8.0, seed=0, delta=1e-3)
    for name, value in (("noise_multiplier", 5.0), ("max_grad_norm", 0.1), ("target_epsilon", 1.0), ("seed", None)):
        with pytest.raises(ConfigurationError, match=f"{name} cannot change once the DPSGD is made"):
            setattr(strategy, name, value)
    trainer_for(tmp_path, strategy, 3).fit(Classifier(), loader_of(pictures()))
    assert strategy.noise_multiplier is not None  # as it was solved for

    class Late(DPSGD):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.max_grad_norm = 0.5

    with pytest.raises(ConfigurationError, match="the Late is made.* by max_grad_norm_schedule, or make"):
        Late(noise_multiplier=1.0)


def test_a_unit_is_a_word() -> None:
    with pytest.raises(ConfigurationError, match="unit must be a word"):
        LotLoader.poisson(tensors(), 8, unit=" ")


def test_a_part_of_ones_own_and_the_option_for_it_contradict() -> None:
    class Own(AutomaticClipping):
        def design(self) -> Any:
            from dataclasses import replace

            return replace(super().design(), transform=lambda gradients, records, sizes: gradients)

    Own(noise_multiplier=1.0)
    with pytest.raises(ConfigurationError, match="Own already has its own transform"):
        Own(noise_multiplier=1.0, discretization_threshold=0.1)


# ------------------------------------------------------------------------------------- planned and made


class StopAt(pl.Callback):
    observes_only = True

    def __init__(self, step: int, error: type[BaseException] | None = None) -> None:
        self.step, self.error = step, error

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/mid.ckpt")
            trainer.should_stop = True
            if self.error is not None:
                raise self.error("an error of another kind")


def planned_lines(folder: Path, strategy: DPSGD, *more: pl.Callback, steps: int = 8, **options: Any) -> list[str]:
    """What a training says of its plan."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer_for(folder, strategy, steps, more=list(more)).fit(Classifier(), loader_of(pictures()), **options)
    return [line for line in (str(warning.message) for warning in said) if "planned" in line]


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"accountant": "pld"}, marks=pytest.mark.long),
        pytest.param({"noise_schedule": "linear:0.5"}, marks=pytest.mark.long),
        {"after": "first/ledger.jsonl", "target_epsilon": 4.0},
    ],
    ids=["rdp", "pld", "schedule", "stage"],
)
def test_what_noise_would_have_been_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)

    def strategy() -> DPSGD:
        return DPSGD(**{"target_epsilon": 2.0, "delta": 1e-3, "seed": 0, **options})

    if "after" in options:
        fit(tmp_path / "first", Classifier(), noise_multiplier=2.0)
    early = strategy()
    (line,) = planned_lines(tmp_path / "early", early, StopAt(3))
    epsilon = early.epsilon(options.get("accountant", "rdp"))
    assert line.startswith(f"3 of 8 planned releases were made: epsilon is {epsilon:.4g} of target_epsilon=")
    match = re.search("noise_multiplier=([0-9.]+) would have been enough instead of (.*)\\.", line)
    assert match is not None
    enough, planned = map(float, match.groups())
    assert planned == pytest.approx(early.noise_multiplier, rel=1e-3)
    if "noise_schedule" in options:  # which goes further down within three steps of three than within three of eight
        assert enough < planned
        return
    short = strategy()
    assert planned_lines(tmp_path / "short", short, steps=3) == []
    assert enough == pytest.approx(short.noise_multiplier, rel=1e-3)


def test_who_hears_nothing_of_a_plan(tmp_path: Path) -> None:
    """A given noise, a training of full length, and one that was interrupted and is resumed."""
    target: dict[str, Any] = {"target_epsilon": 2.0, "delta": 1e-3, "seed": 0}
    assert planned_lines(tmp_path / "given", DPSGD(noise_multiplier=1.0, delta=1e-3), StopAt(3)) == []
    assert planned_lines(tmp_path / "both", DPSGD(noise_multiplier=9.0, **target), StopAt(3)) == []
    assert planned_lines(tmp_path / "whole", DPSGD(**target)) == []
    with pytest.raises(RuntimeError, match="another kind"):
        planned_lines(tmp_path / "crash", DPSGD(**target), StopAt(3, RuntimeError))
    resume: dict[str, Any] = {"ckpt_path": tmp_path / "crash/mid.ckpt", "weights_only": False}
    (line,) = planned_lines(tmp_path / "crash", DPSGD(**target), StopAt(5), **resume)
    assert line.startswith("5 of 8 planned")
    # The noise was computed for eight.
    (line,) = planned_lines(tmp_path / "crash", DPSGD(**target), steps=6, **resume)
    assert line.startswith("6 of 8 planned")
    assert planned_lines(tmp_path / "crash", DPSGD(**target), **resume) == []
