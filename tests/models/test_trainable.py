"""Parts of a network that are trained by themselves: last layer, biases, low-rank adapters."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpbench.cli import main
from dpbench.models import MLP, CharLSTM, LoRA, merge_adapters, merged_state, train_only
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.strategies import DPSGD, ClipOnly
from tests.strategies.worlds import clipped_sum, loader_of, trainer_for
from tests.support.cli import TINY
from tests.support.cli import dpbench as command

BOUND, RATE = 0.3, 0.5
PARTS = {
    "bias": ["0.bias", "2.bias", "3.bias"],
    "lora:2+last_layer": ["0.down.weight", "0.up.weight", "3.weight", "3.bias"],
}


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))


def records() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(40, 5, generator=generator), torch.arange(40) % 3)


class Watching(pl.LightningModule):
    """Keeps what a release, an update and an exact computation give."""

    def __init__(self, parts: str) -> None:
        super().__init__()
        self.model = network()
        self.names = [f"model.{name}" for name in train_only(self.model, parts)]
        self.updates: list[dict[str, Tensor]] = []
        self.releases: list[dict[str, Tensor]] = []
        self.expected: list[dict[str, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """All parameters, as most modules do it: those that are frozen stay all the same."""
        return torch.optim.SGD(self.parameters(), lr=RATE)

    def on_train_batch_start(self, *_: Any) -> None:
        self.before = {name: p.detach().clone() for name, p in self.named_parameters()}
        self.expected.append(clipped_mean(self.model))

    def on_train_batch_end(self, *_: Any) -> None:
        named = dict(self.named_parameters())
        self.updates.append({name: self.before[name] - p.detach() for name, p in named.items()})
        self.releases.append({name: p.grad.clone() for name, p in named.items() if p.grad is not None})


def clipped_mean(model: nn.Module) -> dict[str, Tensor]:
    """Mean of the records' clipped gradients over what is trainable, one by one in float64."""
    model = copy.deepcopy(model).double()
    x, y = records().tensors
    named = {f"model.{name}": p for name, p in model.named_parameters() if p.requires_grad}
    losses = nn.functional.cross_entropy(model(x.double()), y, reduction="none")
    total = clipped_sum(losses, list(named.values()), BOUND)
    return {name: part / len(x) for name, part in zip(named, total, strict=True)}


@pytest.mark.parametrize("parts", PARTS)
def test_only_these_parameters_move_and_by_the_release(tmp_path: Path, parts: str) -> None:
    module = Watching(parts)
    assert [name.removeprefix("model.") for name in module.names] == PARTS[parts]
    trainer = trainer_for(tmp_path, ClipOnly(max_grad_norm=BOUND, gradients="engine"), 2)
    trainer.fit(module, loader_of(records(), 40, kind="full"))
    assert len(module.updates) == 2
    for update, release, expected in zip(module.updates, module.releases, module.expected, strict=True):
        assert set(release) == set(expected) == set(module.names)
        for name, moved in update.items():
            if name not in release:
                assert not moved.any()
                continue
            torch.testing.assert_close(release[name].double(), expected[name], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(moved, RATE * release[name], rtol=1e-4, atol=1e-6)


def test_the_ledger_states_their_dimension(tmp_path: Path) -> None:
    parts = "lora:2+last_layer"
    strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, ledger=str(tmp_path / "ledger.jsonl"), clipping="per_parameter")
    trainer_for(tmp_path, strategy, 1).fit(Watching(parts), loader_of(records()))
    (header,) = read_ledger(tmp_path / "ledger.jsonl").headers
    assert header.plan is not None
    groups = {group["name"]: group["coordinates"] for group in header.plan.to_dict()["groups"]}
    assert set(groups) == {f"model.{name}" for name in PARTS[parts]} and sum(groups.values()) == 53


def test_two_seeded_runs_of_parts_of_one_size_share_no_noise(tmp_path: Path) -> None:
    """The plan knows sizes alone; the key of the noise knows the names."""
    sources = []
    for place in (0, 2):
        module = Watching("bias")
        for p in module.model.parameters():
            p.requires_grad_(False)
        module.model[place].bias.requires_grad_(True)
        path = tmp_path / str(place) / "ledger.jsonl"
        trainer_for(tmp_path, DPSGD(noise_multiplier=1.0, delta=1e-3, seed=1, ledger=str(path)), 2).fit(
            module, loader_of(records())
        )
        (header,) = read_ledger(path).headers
        assert header.plan is not None
        sources.append((header.plan.to_dict()["digest"], header.noise_source))
    assert sources[0][0] == sources[1][0] and sources[0][1] != sources[1][1]


def test_an_adapter_changes_nothing_until_it_is_trained_and_can_be_merged() -> None:
    plain = network()
    adapted = network()
    train_only(adapted, "lora:2")
    x = torch.randn(4, 5)
    assert torch.equal(plain(x), adapted(x))
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "up" in name:
                nn.init.normal_(p)
    expected = adapted(x)
    merged = network()
    merged.load_state_dict(merged_state(adapted.state_dict()))
    torch.testing.assert_close(merged(x), expected)
    layer = adapted[0]
    assert isinstance(layer, LoRA)
    torch.testing.assert_close(nn.functional.linear(x, layer.weight, layer.bias), layer(x))
    merge_adapters(adapted)
    assert list(adapted.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(adapted(x), expected)


def test_biases_of_recurrent_layers_and_of_attention() -> None:
    model = CharLSTM(vocabulary_size=20, embedding=4, hidden=6, layers=2)
    assert train_only(model, "bias") == ["lstm.bias_ih_l0", "lstm.bias_ih_l1", "output.bias"]  # the second ones stay
    attention = nn.MultiheadAttention(4, 2)
    assert train_only(attention, "bias") == ["in_proj_bias", "out_proj.bias"]


def test_norms_and_patterns_of_names() -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 2))

    assert train_only(model(), "norm") == ["1.weight", "1.bias"]
    assert train_only(model(), "norm+2.*") == ["1.weight", "1.bias", "2.weight", "2.bias"]
    assert train_only(model(), "0.weight+bias") == ["0.weight", "0.bias", "1.bias", "2.bias"]
    named = nn.ModuleDict({"body": nn.Linear(2, 2), "last_layer": nn.Linear(2, 2)})
    assert sum("down" in name for name in train_only(named, "lora:1+*last_layer.weight")) == 2  # both have adapters
    with pytest.raises(ValueError, match="no parameter has a name like"):
        train_only(model(), "*head*")


def test_what_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match=r"name like 'head' .* last_layer, bias, norm, lora:RANK"):
        train_only(network(), "head")
    with pytest.raises(ValueError, match="'lora:0' needs a rank of at least 1"):
        train_only(network(), "lora:0")
    with pytest.raises(TypeError, match="takes a torch.nn.Module"):
        train_only("bias", "bias")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="adapters need nn.Linear"):
        train_only(nn.Sequential(nn.Conv2d(1, 2, 3)), "lora:2")
    with pytest.raises(ValueError, match="has no parameters"):
        train_only(nn.Tanh(), "bias")
    with pytest.raises(ValueError, match="'norm' trains nothing"):
        train_only(nn.Sequential(nn.Linear(2, 2)), "bias+norm")
    twice = network()
    train_only(twice, "lora:2")
    with pytest.raises(ValueError, match="already has adapters.*merge_adapters"):
        train_only(twice, "lora:2")


def test_on_the_command_line_and_exported(tmp_path: Path) -> None:
    small = [*TINY, "trainer.max_steps=1", "strategy.noise_multiplier=1", "strategy.delta=1e-4"]
    command(tmp_path, "train", *small, "trainable=lora:2+last_layer", "hydra.run.dir=run")
    (header,) = read_ledger(tmp_path / "run" / "ledger.jsonl").headers
    assert header.plan is not None
    (group,) = header.plan.to_dict()["groups"]
    assert group["coordinates"] == 2 * (64 + 16) + 17 * 10
    command(tmp_path, "resume", "run", "trainer.max_steps=2")
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "model"), "--insecure"]) == 0
    built = json.loads((tmp_path / "model" / "config.json").read_text())
    model = MLP(**built["arguments"])
    model.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"))
    card = (tmp_path / "model" / "README.md").read_text()
    assert "Only a part of it was trained: lora:2+last_layer (330 numbers; the network has 1,210)." in card
