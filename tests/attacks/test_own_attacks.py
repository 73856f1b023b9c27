"""Attacks that are in no text: ways in which ordinary code of users broke the guarantee without a word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

from dpbench import DPSGD, PrivateDataLoader, PrivateLoop
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.errors import ConfigurationError, DPBenchError, LedgerError, UnsupportedModuleError
from dpbench.privacy.mechanism.mechanism import Mechanism
from tests.strategies.worlds import trainer_for

POPULATION = 60
TEMPERATURE = SimpleNamespace(value=1.0)


def records(size: int = POPULATION) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(size, 5, generator=generator), torch.randint(3, (size,), generator=generator))


def loader_of(data: Any = None, seed: int = 1) -> PrivateDataLoader:
    data = records() if data is None else data
    return PrivateDataLoader(data, PrivateBatchSampler(make_sampling("poisson", len(data), 12), seed))


def strategy_of(**options: Any) -> DPSGD:
    return DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, delta=1e-3, **{"seed": 1, **options})


class Module(pl.LightningModule):
    """Remembers of each lot its loss and its mean, as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(5, 3)
        self.register_buffer("mean", torch.zeros(5))
        self.seen = SimpleNamespace(loss=torch.zeros(()), mean=torch.zeros(5))

    def temperature(self) -> float:
        return 1.0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]) / self.temperature(), batch[1])
        self.seen = SimpleNamespace(loss=loss.detach(), mean=batch[0].sum(0))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: Path, module: pl.LightningModule, steps: int = 4, loader: Any = None, **options: Any) -> pl.Trainer:
    strategy = options.pop("strategy", None) or strategy_of()
    trainer = trainer_for(folder, strategy, steps, more=options.pop("callbacks", []), **options)
    trainer.fit(module, loader or loader_of())
    return trainer


# ------------------------------------------------------------------------------- between a release and its update


def scale_gradients(module: Module, optimizer: Any) -> None:
    for parameter in module.net.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(module.seen.loss)


def replace_gradients(module: Module, optimizer: Any) -> None:
    for parameter in module.net.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * module.seen.loss


def skip_lots(module: Module, optimizer: Any) -> None:
    for parameter in module.net.parameters():
        parameter.grad = None


def write_weights(module: Module, optimizer: Any) -> None:
    with torch.no_grad():
        module.net.weight.mul_(1 - 0.01 * module.seen.loss)


def write_buffer(module: Module, optimizer: Any) -> None:
    module.mean.lerp_(module.seen.mean, 0.1)


def set_learning_rate(module: Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 * float(module.seen.loss)


def only_look(module: Module, optimizer: Any) -> None:
    module.norm = sum(float(p.grad.norm()) for p in module.net.parameters() if p.grad is not None)  # type: ignore[assignment]


class Hook(pl.Callback):
    def __init__(self, act: Callable[[Any, Any], None]) -> None:
        self.act = act

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.act(pl_module, optimizer)


class OwnHook(Module):
    def __init__(self, act: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self.act = act

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.act(self, optimizer)


class Clipping(Module):
    """The hook of Lightning that runs last before an update."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        scale_gradients(self, optimizer)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (scale_gradients, "p.grad between the release and the update"),
        (replace_gradients, "let an optimizer do it"),
        (skip_lots, "p.grad between the release and the update"),
        (write_weights, "between the release of a batch and its update"),
        (write_buffer, "between the release of a batch and its update"),
        (set_learning_rate, "between the release of a batch and its update"),
    ],
)
def test_nothing_is_changed_between_release_and_update(tmp_path: Path, act: Any, says: str) -> None:
    with pytest.raises(DPBenchError, match=says):
        fit(tmp_path / "own", OwnHook(act))
    with pytest.raises(DPBenchError, match=says):
        fit(tmp_path / "callback", Module(), callbacks=[Hook(act)])


def test_gradients_are_not_clipped_after_their_release(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="configure_gradient_clipping"):
        fit(tmp_path, Clipping())


class ClippingByHand(Module):
    """In manual optimization the gradient is released within the step, so that there is nothing to clip before it."""

    automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, gradient_clip_val=1e-9)
        optimizer.step()


class Sparse(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(self.parameters())


@pytest.mark.parametrize(("module", "says"), [(ClippingByHand, "remove the call; max_"), (Sparse, "optim.Adam")])
def test_what_needs_other_gradients_is_told(tmp_path: Path, module: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        fit(tmp_path, module())


def test_looking_at_released_gradients_is_free(tmp_path: Path) -> None:
    module = OwnHook(only_look)
    fit(tmp_path, module, callbacks=[Hook(only_look)])
    assert module.norm > 0  # type: ignore[operator]


# ------------------------------------------------------------------------------- what names a seeded run


class Setting(Module):
    """Divides by a function of a temperature, which lies where a test has put it."""

    classwide = 1.0

    def __init__(self, temperature: Callable[[Setting], Any], **attributes: Any) -> None:
        super().__init__()
        self.of = temperature
        for name, value in attributes.items():
            setattr(self, name, value)

    def temperature(self) -> float:
        return float(self.of(self))


def teacher_of(value: float) -> nn.Module:
    teacher = nn.Linear(1, 1, bias=False)
    nn.init.constant_(teacher.weight, value)
    return teacher


PLACES: dict[str, Callable[[float], Setting]] = {
    "private": lambda value: Setting(lambda m: m._private, _private=value),
    "object": lambda value: Setting(lambda m: m.object.value, object=Holder(value)),
    "function": lambda value: Setting(lambda m: value),
    "teacher": lambda value: Setting(lambda m: m.teachers[0].weight, teachers=[teacher_of(value)]),  # no submodule
    "global": lambda value: vars(TEMPERATURE).update(value=value) or Setting(lambda m: TEMPERATURE.value),
    "class": lambda value: setattr(Setting, "classwide", value) or Setting(lambda m: m.classwide),
}


class Holder:
    def __init__(self, value: float) -> None:
        self.value = value


@pytest.mark.own_key
@pytest.mark.parametrize("place", PLACES)
def test_settings_are_part_of_the_key_wherever_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    keys: list[Any] = []
    monkeypatch.setattr(Mechanism, "add_noise", lambda self, of: keys.append(tuple(of(0))))
    monkeypatch.setattr(Setting, "classwide", 1.0)
    for name, value in (("one", 1.0), ("other", 3.0), ("again", 1.0)):
        fit(tmp_path / name, PLACES[place](value), 1)
    one, other, again = keys
    assert one == again
    assert one != other


# ------------------------------------------------------------------------------- what is saved


class Saving(Module):
    def __init__(self, x: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


class Bank(Module):
    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.register_buffer("bank", x.clone())


class Data(pl.LightningDataModule):
    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.mean: Any = None

    def train_dataloader(self) -> PrivateDataLoader:
        return loader_of()


def test_hyperparameters_hold_no_records(tmp_path: Path) -> None:
    data = records()
    for number, held in enumerate((data, data.tensors[0].numpy(), {"of": [data.tensors[1]]})):
        with pytest.raises(
            ConfigurationError, match=r"hparams contain training records in x .* save_hyperparameters\(ignore=\['x'\]\)"
        ):
            fit(tmp_path / str(number), Saving(held), loader=loader_of(data))
    with pytest.raises(ConfigurationError, match="hparams of the data module contain training records in x"):
        fit(tmp_path / "data", Module(), loader=Data(data.tensors[0]))
    fit(tmp_path / "weights", Saving(torch.ones(3)))  # of classes, say


def test_buffers_hold_no_records(tmp_path: Path) -> None:
    data = records()
    with pytest.raises(ConfigurationError, match="buffer bank contains training records"):
        fit(tmp_path, Bank(data.tensors[0]), loader=loader_of(data))
    fit(tmp_path / "public", Bank(torch.ones(POPULATION, 5)), loader=loader_of(data))


class Overriding(Module):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {**super().state_dict(*args, **kwargs), "seen": self.seen.mean}


class Hooked(Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(lambda module, state, *_: state.update(seen=self.seen.mean))


class Plain(Module):
    def state_dict(self) -> Any:  # type: ignore[override]
        return super().state_dict()


def test_a_state_dict_without_options_is_fine(tmp_path: Path) -> None:
    fit(tmp_path, Plain())


class OfData(Data):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.mean = batch[0].sum(0)
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}


@pytest.mark.parametrize("make", [Overriding, Hooked])
def test_state_dict_gains_nothing_of_a_lot(tmp_path: Path, make: Any) -> None:
    with pytest.raises(UnsupportedModuleError, match=r"state_dict\(\)\['seen'\]"):
        fit(tmp_path, make())


def test_the_data_modules_state_gains_nothing_of_a_lot(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModuleError, match="the data module's state_dict"):
        fit(tmp_path, Module(), loader=OfData(torch.ones(2)))


class Logging(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss


@pytest.mark.parametrize("word", ["{step}-{train_loss:.6f}", "{val_loss}-{nonprivate/loss}"])
def test_names_of_checkpoints_say_nothing_of_records(tmp_path: Path, word: str) -> None:
    callback = pl.callbacks.ModelCheckpoint(tmp_path, filename=word)
    with pytest.raises(ConfigurationError, match="filename of ModelCheckpoint watches"):
        fit(tmp_path, Logging(), callbacks=[callback], enable_checkpointing=True)


# ------------------------------------------------------------------------------- what is drawn


class Standardized(PrivateDataLoader):
    def __iter__(self) -> Any:
        for x, y in super().__iter__():
            yield [(x - x.mean(0)) / x.std(0), y]


def test_lots_reach_the_training_as_they_were_drawn(tmp_path: Path) -> None:
    data = records()
    with pytest.raises(ConfigurationError, match="overrides __iter__"):
        fit(tmp_path, Module(), loader=Standardized(data, loader_of(data).lots))


class Resampling(Module):
    def on_train_epoch_start(self) -> None:
        dataset = self.trainer.train_dataloader.dataset
        dataset.indices = torch.randint(POPULATION, (len(dataset.indices),)).tolist()


def test_indices_that_are_drawn_anew_repeat_no_record(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="training records are repeated"):
        fit(tmp_path, Resampling(), 20, loader=loader_of(Subset(records(), range(POPULATION))))


# ------------------------------------------------------------------------------- ledgers that were moved away


def test_a_ledger_that_was_moved_away_still_counts(tmp_path: Path) -> None:
    module, ledger = Module(), tmp_path / "ledger.jsonl"
    fit(tmp_path, module, strategy=strategy_of(ledger=str(ledger)))
    with pytest.raises(LedgerError, match="with a new model, move the file away"):
        fit(tmp_path, module, strategy=strategy_of(ledger=str(ledger)))
    ledger.rename(tmp_path / "old.jsonl")
    with pytest.raises(ConfigurationError, match="no longer has"):
        fit(tmp_path, module, strategy=strategy_of(ledger=str(ledger)))
    fit(tmp_path, Module(), strategy=strategy_of(ledger=str(ledger)))


def test_a_loop_says_that_an_earlier_ledger_counts_too(tmp_path: Path) -> None:
    model = nn.Linear(5, 3)

    def train(name: str) -> None:
        loop = PrivateLoop(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loader_of(),
            strategy_of(ledger=str(tmp_path / name)),
            lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            steps=3,
        )
        assert list(loop) == [1, 2, 3]

    train("one.jsonl")
    with pytest.warns(UserWarning, match=r"dpbench account .*one.jsonl .*two.jsonl"):
        train("two.jsonl")
