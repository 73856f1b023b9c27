"""Layers of Opacus, normalization in evaluation mode, embeddings of what all records share."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from dpbench.errors import UnsupportedModuleError
from dpbench.privacy.gradients.engine import PerRecordEngine
from tests.privacy.exact import Networks, assert_each_exact, assert_exact, assert_exact_in_its_pass
from tests.support.reference import mean_square

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from opacus.layers import DPLSTM, DPMultiheadAttention

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


class Sequences(nn.Module):
    """A layer of Opacus, with steps in dimension 0."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        given = (x, x, x) if isinstance(self.layer, DPMultiheadAttention) else (x,)
        return self.layer(*given)[0].transpose(0, 1)


class Pretrained(nn.Module):
    """Its statistics are those of other data."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)
        self.norm.requires_grad_(not frozen).eval()

    def train(self, mode: bool = True) -> Pretrained:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


NETWORKS: Networks = {
    "LSTM of Opacus": (lambda: Sequences(DPLSTM(3, 4, num_layers=2, bidirectional=True)), (6, 3)),
    "attention of Opacus": (lambda: Sequences(DPMultiheadAttention(4, 2, add_bias_kv=True)), (3, 4)),
    "instance norm": (lambda: nn.Sequential(nn.InstanceNorm1d(3, affine=True), nn.Tanh()), (3, 5)),
    "bag of sums": (lambda: nn.EmbeddingBag(6, 3, mode="sum"), (7,)),
    "bag of means": (lambda: nn.EmbeddingBag(6, 3, mode="mean", padding_idx=0), (7,)),
    "batch norm in evaluation mode": (lambda: Pretrained(frozen=False), (1, 6, 6)),
    "frozen batch norm": (lambda: Pretrained(frozen=True), (1, 6, 6)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str) -> None:
    assert_each_exact(NETWORKS, name, (5,), tags="Opacus" in name, dtypes=[torch.float64])


class Offsets(nn.EmbeddingBag):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, torch.arange(4))


def test_embedding_bags_with_offsets_are_left_to_autograd() -> None:
    """Also where there are as many tokens as bags."""
    bag = Offsets(6, 3)
    engine = PerRecordEngine(bag)
    with pytest.raises(UnsupportedModuleError, match="offsets|one row each|failed"):
        engine.backward(mean_square(bag, torch.tensor([1, 4, 2, 5])), 4, verify=True)


def test_batch_norm_that_is_put_into_training_mode_is_refused() -> None:
    model = Pretrained(False)
    engine = PerRecordEngine(model)
    model.norm.train()
    with pytest.raises(UnsupportedModuleError, match=r"BatchNorm2d was put into training mode.*eval\(\)"):
        model(torch.randn(5, 1, 6, 6))
    engine.close()
    model(torch.randn(5, 1, 6, 6))


class Positions(nn.Module):
    """A language model that looks up positions once for all records."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.tokens, self.positions, self.out = nn.Embedding(7, 4), nn.Embedding(9, 4), nn.Linear(4, 7)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1])
        if self.how == "row":
            where = self.positions(steps[None])
        elif self.how == "flat":
            where = self.positions(input=steps)
        else:
            where = self.positions(steps)[None]
        return self.out((self.tokens(x) + where).tanh())


@pytest.mark.parametrize("how", ["row", "flat", "unsqueezed"])
def test_embeddings_of_positions_that_all_records_share(how: str) -> None:
    for records, steps in ((1, 4), (5, 4), (8, 8), (12, 1)):
        x = torch.randint(0, 7, (records, steps))
        assert_exact(Positions(how), x, tags=True, dtypes=[torch.float64])


def test_a_model_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, n_positions=16, vocab_size=19)
    model = transformers.GPT2LMHeadModel(config).double()
    assert_exact_in_its_pass(model, torch.randint(0, 19, (4, 6)), tags=True)
