"""The key of a seeded run: no two runs that differ in their sums share noise or lots, however they were started."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpbench import DPSGD, LotLoader, PrivateLoop
from dpbench.canonical import digest_of
from dpbench.data import ImageDataModule
from dpbench.harness.run.train import train
from dpbench.models import MLP
from dpbench.modules import ImageClassifier
from dpbench.privacy.accounting.ledger import Header, read_ledger
from tests.support.processes import config_of


def records(label: int = 0) -> TensorDataset:
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(3))
    y = (x[:, 0] > 0).long()
    y[0] = label
    return TensorDataset(x, y)


class Module(pl.LightningModule):
    def __init__(self, width: int = 8, rate: float = 0.1, weights: int = 0, smoothing: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(weights)
        self.model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, 2))
        self.rate, self.smoothing = rate, smoothing

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1], label_smoothing=self.smoothing)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class Scheduled(Module):
    gamma = 0.5

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, self.gamma)]


def header(
    folder: Path,
    module: pl.LightningModule | None = None,
    dataset: Any = None,
    strategy: dict[str, Any] | None = None,
    loader: dict[str, Any] | None = None,
    **trainer: Any,
) -> Header:
    """The ledger's header of two steps."""
    own = DPSGD(**{"noise_multiplier": 1.0, "delta": 1e-3, "seed": 7, "ledger": str(folder / "l"), **(strategy or {})})
    lots = LotLoader.poisson(records() if dataset is None else dataset, 12, **{"seed": 5, **(loader or {})})
    options: dict[str, Any] = {
        "max_steps": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": folder,
        "callbacks": [],
        **trainer,
    }
    options["callbacks"] = [own, *options["callbacks"]]
    pl.Trainer(accelerator="cpu", **options).fit(module or Module(), lots)
    return read_ledger(folder / "l").header


class Halves(pl.Callback):
    """A callback of a user that moves the learning rate."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


def collated(batch: Any) -> Any:
    return torch.utils.data.default_collate(batch)


OTHERS: dict[str, Callable[[Path], Header]] = {
    "rate": lambda p: header(p, Module(rate=0.2)),
    "width": lambda p: header(p, Module(width=9)),
    "first weights": lambda p: header(p, Module(weights=1)),
    "an attribute": lambda p: header(p, Module(smoothing=0.1)),
    "schedule": lambda p: header(p, Scheduled()),
    "one label": lambda p: header(p, dataset=records(1)),
    "collation": lambda p: header(p, loader={"collate_fn": collated}),
    "bound": lambda p: header(p, strategy={"max_grad_norm": 0.5}),
    "noise": lambda p: header(p, strategy={"noise_multiplier": 2.0}),
    "a step after clipping": lambda p: header(p, strategy={"correction_threshold": 1.0}),
    "precision": lambda p: header(p, precision="bf16-mixed"),
    "a callback": lambda p: header(p, callbacks=[Halves(0.5)]),
    "its option": lambda p: header(p, callbacks=[Halves(0.25)]),
    "seed": lambda p: header(p, strategy={"seed": 8}),
}


def test_runs_of_one_seed_that_differ_share_neither_noise_nor_lots(tmp_path: Path) -> None:
    first = header(tmp_path / "first")
    headers = {name: make(tmp_path / name) for name, make in OTHERS.items()}
    noise = [first.noise_source, *(one.noise_source for one in headers.values())]
    lots = [first.lot_source, *(one.lot_source for one in headers.values())]
    assert None not in {*noise, *lots}
    assert len(set(noise)) == len(noise) and len(set(lots)) == len(lots)


SAME: dict[str, Callable[[Path], Header]] = {
    "again": header,
    "a default in words": lambda p: header(p, strategy={"max_grad_norm": 1.0, "clipping": "flat"}),
    "pieces": lambda p: header(p, strategy={"max_physical_batch_size": 5}),
    "a budget": lambda p: header(p, strategy={"target_epsilon": 100.0}),
    "longer": lambda p: header(p, max_steps=3),
    "observed": lambda p: header(p, callbacks=[pl.callbacks.LambdaCallback()]),
    "two workers": lambda p: header(p, loader={"num_workers": 2}),
}


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_what_decides_no_sum_is_no_part_of_the_key(tmp_path: Path) -> None:
    first = header(tmp_path / "first")
    for name, make in SAME.items():
        other = make(tmp_path / name)
        assert (other.noise_source, other.lot_source) == (first.noise_source, first.lot_source), name


def test_our_own_source_is_no_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = header(tmp_path / "first")
    monkeypatch.setattr("dpbench.code.code_hash", lambda *_: "other")
    assert header(tmp_path / "edited").noise_source == first.noise_source
    monkeypatch.setattr("dpbench.callback.run_key.RANDOM_NUMBERS", 99)
    assert header(tmp_path / "numbers").noise_source != first.noise_source
    monkeypatch.undo()
    monkeypatch.setattr("dpbench.callback.run_key.versions", lambda: {"torch": "0"})
    assert header(tmp_path / "versions").noise_source != first.noise_source
    monkeypatch.undo()
    monkeypatch.setattr("dpbench.callback.run_key.sources_of", lambda classes: {"tests": "edited"})
    assert header(tmp_path / "source").noise_source != first.noise_source


def test_a_plain_loop_has_a_key_of_the_same_kind(tmp_path: Path) -> None:
    def noise(name: str, rate: float = 0.1, label: int = 0, smoothing: float = 0.0) -> str | None:
        module = Module()
        strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, seed=7, ledger=str(tmp_path / name))

        def loss(model: Any, batch: Any) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=smoothing)

        optimizer = torch.optim.SGD(module.model.parameters(), rate)
        lots = LotLoader.poisson(records(label), 12, seed=5)
        list(PrivateLoop(module.model, optimizer, lots, strategy, loss, 2))
        return read_ledger(tmp_path / name).header.noise_source

    first = noise("first")
    assert noise("again") == first
    others = [noise("rate", rate=0.2), noise("label", label=1), noise("loss", smoothing=0.1)]
    assert len({first, *others}) == 4


def test_one_edited_record_does_not_stand_bare_between_two_models(tmp_path: Path) -> None:
    """With shared noise the difference of the two first updates would be the record's own gradient."""

    def update(label: int) -> Tensor:
        module = Module()
        before = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
        header(tmp_path / str(label), module, records(label), max_steps=1)
        return nn.utils.parameters_to_vector(module.parameters()).detach() - before

    sums = (update(0) - update(1)) / 0.1 * 12  # of the lot
    assert float(sums.norm()) > 4.0  # √2 times the noise on 74 coordinates is 12


def test_the_hash_is_of_the_stored_bytes(tmp_path: Path) -> None:
    """An item may be augmented, and must not be asked for it."""

    class Augmented(TensorDataset):
        def __getitem__(self, i: Any) -> Any:
            x, y = super().__getitem__(i)
            return x + torch.randn(x.shape), y

    one, two = (header(tmp_path / name, dataset=Augmented(*records().tensors)) for name in "ab")
    assert one.noise_source == two.noise_source
    assert digest_of(records()) == digest_of(records()) != digest_of(records(1))


def test_a_run_by_command_has_the_key_of_the_same_objects_in_python(tmp_path: Path) -> None:
    train(config_of("model.hidden=[8]"), tmp_path / "command")
    data = ImageDataModule("digits", expected_batch_size=64, image_size=8, sampling="poisson", seed=0)
    data.prepare_data()
    data.setup("fit")
    pl.seed_everything(0, verbose=False)
    model = MLP(hidden=[8], **data.model_options())
    module = ImageClassifier(model, partial(torch.optim.SGD, lr=0.15), num_classes=10, monitored=data.monitored)
    strategy = DPSGD(noise_multiplier=1.1, delta=1e-4, seed=0, ledger=str(tmp_path / "python.jsonl"))
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=8,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        callbacks=[strategy],
        **options,
    )
    trainer.fit(module, datamodule=data)
    command = read_ledger(tmp_path / "command/ledger.jsonl")
    python = read_ledger(tmp_path / "python.jsonl")
    assert python.header.noise_source == command.header.noise_source is not None
    assert python.header.lot_source == command.header.lot_source is not None
    assert [one.checksum for _, one in python.releases] == [one.checksum for _, one in command.releases]
