"""What is refused of a step, a batch or an option says what it is, and the remedy that it names works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from dpbench.callback.lightning_training import LightningTraining
from dpbench.data.loader import PrivateDataLoader
from dpbench.errors import ConfigurationError, UnsupportedModuleError
from dpbench.strategies import DPSGD, AdaptiveQuantileClipping
from tests.strategies.worlds import fit, loader_of, update
from tests.support.one_by_one import Module, cross_entropy, data, penalized, plain


class Manual(Module):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return update(self, super().training_step(batch, batch_idx))


def train(folder: Path, module: Any, collate: Any = None, gradients: str = "engine") -> None:
    loader = PrivateDataLoader.poisson(data(40), 10, collate_fn=collate) if collate else loader_of(data(40), 10)
    fit(folder, module, 2, loader=loader, gradients=gradients)


def test_gradients_inside_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModuleError, match=r"gradients inside the loss, .* gradients=\"auto\""):
        train(tmp_path / "engine", Module(plain(), penalized))
    train(tmp_path / "manual", Manual(plain(), penalized), gradients="auto")
    lines: list[str] = []
    monkeypatch.setattr(LightningTraining, "inform", lambda self, text: lines.append(text))
    train(tmp_path / "auto", Module(plain(), penalized), gradients="auto")
    (line,) = [line for line in lines if "record by record" in line]
    assert "gradients inside the loss" in line and "off by" not in line


@pytest.mark.parametrize(("kind", "gradients"), [(Module, "engine"), (Manual, "auto")])
def test_losses_that_are_not_one_number(tmp_path: Path, kind: type[Module], gradients: str) -> None:
    def each(net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1], reduction="none")

    def detached(net: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(net, batch).detach()

    with pytest.raises(ConfigurationError, match="one number, not a tensor of shape .* return the mean"):
        train(tmp_path, kind(plain(), each), gradients=gradients)
    with pytest.raises(ConfigurationError, match=r"the loss has no gradient|depends on no trainable parameter"):
        train(tmp_path, kind(plain(), detached), gradients=gradients)


def test_losses_that_are_no_tensors(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="returned a list as its loss: return the loss tensor"):
        train(tmp_path, Module(plain(), lambda net, batch: [cross_entropy(net, batch)]), gradients="one_by_one")


MASK = torch.arange(30).view(5, 6) % 2


def shared_mask(records: Any) -> Any:
    return (*default_collate(records), MASK)


def expanded_mask(records: Any) -> Any:
    return (*default_collate(records), MASK.expand(len(records), 5, 6))


def test_entries_of_a_batch_that_are_no_records(tmp_path: Path) -> None:
    def masked(net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch[0] * batch[2]), batch[1])

    with pytest.raises(ConfigurationError, match=r"the shapes .*\(5, 6\).*: .*register_buffer"):
        train(tmp_path / "shared", Module(plain(), masked), shared_mask)
    train(tmp_path / "rows", Module(plain(), masked), expanded_mask)


def arrays(records: Any) -> Any:
    return np.stack([x.numpy() for x, _ in records]), np.array([int(y) for _, y in records])


def texts(records: Any) -> Any:
    return ["a" * int(y) for _, y in records]


def counted(records: Any) -> Any:
    return texts(records), torch.arange(len(records))


def of_texts(net: nn.Module, batch: Any) -> Tensor:
    lengths = torch.tensor([len(word) for word in batch[0]])
    return F.cross_entropy(net(lengths[:, None].expand(-1, 30).float()), lengths)


def test_batches_without_tensors(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"contains ndarray\): .*torch.from_numpy"):
        train(tmp_path / "arrays", Module(plain(), cross_entropy), arrays)
    with pytest.raises(ConfigurationError, match=r"contains str\): .* torch.arange"):
        train(tmp_path / "texts", Module(plain(), of_texts), texts)
    with pytest.raises(UnsupportedModuleError, match="contains a list of values of records"):
        train(tmp_path / "counted", Module(plain(), of_texts), counted)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("l2_norm_clip", "Did you mean max_grad_norm"),
        ("epochs", "Set the length in the Trainer: max_steps or max_epochs"),
        ("poisson_sampling", r"PrivateDataLoader.poisson\(dataset, expected_batch_size=...\)"),
        ("secure_mode", "noise comes from the operating system's entropy"),
    ],
)
def test_names_of_other_packages(name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"DPSGD has no option '{name}'\..*{message}"):
        DPSGD(noise_multiplier=1.0, **{name: 1})


def test_a_name_that_a_strategy_lacks_is_not_proposed() -> None:
    with pytest.raises(ConfigurationError, match="has no option 'l2_norm_clip'") as caught:
        AdaptiveQuantileClipping(noise_multiplier=1.0, l2_norm_clip=1.0)
    assert "mean max_grad_norm?" not in str(caught.value)
