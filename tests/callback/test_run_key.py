"""The key of a seeded run: no two runs that differ in their sums share noise or lots, however they were started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.utilities.compile import from_compiled
from torch import Tensor

from dpbench import DPSGD, PrivateDataLoader, PrivateLoop
from dpbench.callback.run_key import _attributes_of
from dpbench.canonical import Canonical, digest_of
from dpbench.data import ImageDataModule
from dpbench.harness.run.train import train as run
from dpbench.models import MLP
from dpbench.modules import ImageClassifier
from dpbench.privacy.accounting.ledger import read_ledger
from tests.callback.test_keys_cases import Module, records, train
from tests.strategies.worlds import trainer_for, weights_of
from tests.support.processes import config_of


def test_runs_of_one_seed_that_differ_share_neither_noise_nor_lots(tmp_path: Path) -> None:
    """All that may not be shared: `test_keys_cases.py`."""
    headers = [
        train(tmp_path / "first").header,
        train(tmp_path / "record", dataset=records(byte=1)).header,
        train(tmp_path / "weights", Module(weights=1)).header,
        train(tmp_path / "bound", private={"max_grad_norm": 0.5}).header,
    ]
    for sources in ({header.noise_source for header in headers}, {header.lot_source for header in headers}):
        assert None not in sources and len(sources) == len(headers)


def test_our_own_source_is_no_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train(tmp_path / "first").header
    monkeypatch.setattr("dpbench.code.code_hash", lambda *_: "other")
    assert train(tmp_path / "edited").header.noise_source == first.noise_source
    monkeypatch.setattr("dpbench.callback.run_key.RANDOM_NUMBERS", 99)
    assert train(tmp_path / "numbers").header.noise_source != first.noise_source


def test_a_plain_loop_has_a_key_of_the_same_kind(tmp_path: Path) -> None:
    def noise(name: str, byte: int = 0, smoothing: float = 0.0) -> str | None:
        net = Module().net

        def loss(model: Any, batch: Any) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=smoothing)

        strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, seed=7, ledger=str(tmp_path / name))
        lots = PrivateDataLoader.poisson(records(byte), 12, seed=5)
        list(PrivateLoop(net, torch.optim.SGD(net.parameters(), 0.1), lots, strategy, loss, 2))
        return read_ledger(tmp_path / name).header.noise_source

    first = noise("first")
    assert noise("again") == first
    assert len({first, noise("record", byte=1), noise("loss", smoothing=0.1)}) == 3


def test_one_edited_record_does_not_stand_bare_between_two_models(tmp_path: Path) -> None:
    """With shared noise the difference of the two first updates would be the record's own gradient."""

    def update(byte: int) -> Tensor:
        module = Module(partial(torch.optim.SGD, lr=0.1))
        before = weights_of(module)
        train(tmp_path / str(byte), module, records(byte), max_steps=1)
        return weights_of(module) - before

    sums = (update(0) - update(1)) / 0.1 * 4  # of the lot
    assert float(sums.norm()) > 2.0  # √2 times the noise on 23 coordinates is 6.8


class Squares(pl.LightningModule):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch.square().mean()


def test_a_compiled_module_has_a_key_by_how_it_is_compiled() -> None:
    """The compiler's state has no bytes, and the random key that it had brought repeated nothing."""
    digests = []
    for backend in ("eager", "eager", "aot_eager", None):
        module = Squares()
        if backend is not None:
            from_compiled(torch.compile(module, backend=backend))
        canonical = Canonical({id(module): bytes(32)})
        digests.append(canonical.digest(_attributes_of(module)))
        assert canonical.gaps == []
    assert digests[0] == digests[1] and len(set(digests)) == 3


@contextmanager
def entered(with_what: str) -> Iterator[None]:
    yield


def test_a_class_with_a_decorated_method_has_a_key() -> None:
    """The decorator holds a generator that was never begun; what makes it is known."""
    digests = []
    for with_what in ("a", "a", "b"):
        canonical = Canonical()
        digests.append(canonical.digest([entered(with_what), ContextVar(with_what)]))
        assert canonical.gaps == []
    assert digests[0] == digests[1] != digests[2]


def test_compiled_networks_that_a_module_holds_are_known_by_their_weights() -> None:
    """With one key a run by each teacher would have the same noise."""
    teachers = [torch.compile(torch.nn.Linear(2, 2), backend="eager") for _ in range(2)]
    assert digest_of([teachers[0]]) != digest_of([teachers[1]])


def test_a_run_by_command_has_the_key_of_the_same_objects_in_python(tmp_path: Path) -> None:
    run(config_of("model.hidden=[8]", "trainer.max_steps=2"), tmp_path / "command")
    data = ImageDataModule("digits", expected_batch_size=64, image_size=8, sampling="poisson", seed=0)
    data.prepare_data()
    data.setup("fit")
    pl.seed_everything(0, verbose=False)
    model = MLP(hidden=[8], **data.model_options())
    module = ImageClassifier(model, partial(torch.optim.SGD, lr=0.15), num_classes=10, monitored=data.monitored)
    strategy = DPSGD(noise_multiplier=1.1, delta=1e-4, seed=0, ledger=str(tmp_path / "python.jsonl"))
    trainer_for(tmp_path, strategy, 2, num_sanity_val_steps=0).fit(module, datamodule=data)
    command = read_ledger(tmp_path / "command/ledger.jsonl")
    python = read_ledger(tmp_path / "python.jsonl")
    assert python.header.noise_source == command.header.noise_source is not None
    assert python.header.lot_source == command.header.lot_source is not None
    assert [one.checksum for _, one in python.releases] == [one.checksum for _, one in command.releases]
