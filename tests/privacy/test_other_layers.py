"""Layers of Opacus, normalization in evaluation mode, embeddings of what all records share."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbench.errors import UnsupportedModuleError
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.records.tagging import under_tags
from tests.privacy.test_sequences import check, mean_square

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


def rows_of(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], inputs: Any, records: int, tags: bool = False
) -> list[Tensor]:
    """Per-record gradients by the engine, checked against the sum."""
    engine = PerRecordEngine(model)
    if tags:
        engine.follow_tags()
    engine.expect(records)
    value = under_tags(engine, lambda x: loss(model, x), inputs, records)
    gradients = engine.backward(value, records, verify=True)
    engine.close()
    return [g.per_record() for g in gradients]


# --------------------------------------------------------------------------------------------- Opacus


class Wrapped(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.layer, DPMultiheadAttention):
            x = x if self.layer.batch_first else x.transpose(0, 1)
            out = self.layer(x, x, x)[0]
        elif isinstance(self.layer, DPLSTM | DPGRU | DPRNN):
            x = x if self.layer.batch_first else x.transpose(0, 1)
            out = self.layer(x)[0]
        else:
            return self.layer(x).tanh()
        return out if self.layer.batch_first else out.transpose(0, 1)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", [DPLSTM, DPGRU, DPRNN])
def test_recurrent_layers_of_opacus(kind: Any, batch_first: bool) -> None:
    layer = kind(3, 4, num_layers=2, bidirectional=True, batch_first=batch_first)
    check(Wrapped(layer), torch.randn(5, 6, 3), tags=True)


@pytest.mark.parametrize("bias_kv", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_of_opacus(batch_first: bool, bias_kv: bool) -> None:
    check(
        Wrapped(DPMultiheadAttention(4, 2, add_bias_kv=bias_kv, batch_first=batch_first)),
        torch.randn(5, 3, 4),
        tags=True,
    )


@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.InstanceNorm1d(3, affine=True), (3, 5)), (nn.RMSNorm(5), (2, 5))], ids=["instance", "rms"]
)
def test_layers_of_torch_without_a_rule(layer: nn.Module, shape: tuple[int, ...]) -> None:
    check(Wrapped(layer), torch.randn(5, *shape))


# --------------------------------------------------------------------------------------------- bags


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding", [None, 0])
def test_embedding_bags(mode: str, padding: int | None) -> None:
    check(Wrapped(nn.EmbeddingBag(6, 3, mode=mode, padding_idx=padding)), torch.randint(0, 6, (5, 7)))


def test_embedding_bags_with_offsets_are_left_to_autograd() -> None:
    """Also where there are as many tokens as bags."""
    bag = nn.EmbeddingBag(6, 3)
    for tokens in (torch.tensor([1, 4, 2, 5]), torch.tensor([1, 4, 2, 5, 3, 0])):
        with pytest.raises(UnsupportedModuleError, match="offsets|one row each|failed"):
            rows_of(Offsets(bag), mean_square, tokens, 4)


class Offsets(nn.Module):
    def __init__(self, bag: nn.EmbeddingBag) -> None:
        super().__init__()
        self.bag = bag

    def forward(self, x: Tensor) -> Tensor:
        return self.bag(x, torch.arange(4))


# --------------------------------------------------------------------------------------------- batch norm


class Pretrained(nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        for norm in (self.body[1], self.head[1]):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            norm.requires_grad_(not frozen)
            norm.eval()

    def train(self, mode: bool = True) -> Pretrained:
        super().train(mode)
        self.body[1].eval()
        self.head[1].eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


@pytest.mark.parametrize("frozen", [True, False])
def test_batch_norm_in_evaluation_mode(frozen: bool) -> None:
    check(Pretrained(frozen), torch.randn(5, 1, 6, 6))


def test_batch_norm_that_is_put_into_training_mode_is_refused() -> None:
    model = Pretrained(False)
    engine = PerRecordEngine(model)
    model.body[1].train()
    with pytest.raises(UnsupportedModuleError, match=r"BatchNorm2d was put into training mode.*eval\(\)"):
        model(torch.randn(5, 1, 6, 6))
    model.body[1].eval()
    engine.close()
    model.body[1].train()
    model(torch.randn(5, 1, 6, 6))


def test_batch_norm_without_statistics_is_refused_in_evaluation_mode_too() -> None:
    with pytest.raises(UnsupportedModuleError, match="mixes the records"):
        PerRecordEngine(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False)).eval())


def test_a_network_of_many_batch_norms_is_refused_in_a_short_line() -> None:
    import torchvision

    with pytest.raises(UnsupportedModuleError) as error:
        PerRecordEngine(torchvision.models.resnet18())
    message = str(error.value)
    assert "(20 in all)" in message and "eval()" in message and "GroupNorm" in message
    assert len(message) < 400 and "\n" not in message


# --------------------------------------------------------------------------------------------- positions


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
@pytest.mark.parametrize(("records", "steps"), [(1, 4), (5, 4), (8, 8), (3, 8), (12, 1), (2, 6)])
def test_embeddings_of_positions_that_all_records_share(how: str, records: int, steps: int) -> None:
    check(Positions(how), torch.randint(0, 7, (records, steps)), tags=True)


def test_layers_may_be_called_by_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.prelu = nn.Linear(3, 3), nn.PReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.prelu(input=self.linear(input=x))

    check(Named(), torch.randn(5, 3))


# --------------------------------------------------------------------------------------------- Hugging Face


def _tiny(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    small: dict[str, Any] = {"vocab_size": 19}
    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, n_positions=16, **small)
        return transformers.GPT2LMHeadModel(config)
    if name == "bert":
        config = transformers.BertConfig(
            hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=16, **small,
        )  # fmt: skip
        return transformers.BertForSequenceClassification(config)
    config = transformers.DistilBertConfig(
        dim=8, n_layers=2, n_heads=2, hidden_dim=16, max_position_embeddings=16, **small
    )
    return transformers.DistilBertForSequenceClassification(config)


@pytest.mark.parametrize("name", ["bert", "distilbert", "gpt2"])
def test_hugging_face_models(name: str) -> None:
    torch.manual_seed(0)
    model = _tiny(name).double().eval()  # without dropout, to compare
    mask = torch.ones(4, 6, dtype=torch.long)
    mask[1, 4:] = 0
    lot = {"input_ids": torch.randint(0, 19, (4, 6)), "attention_mask": mask}

    def losses(network: nn.Module, rows: dict[str, Tensor]) -> Tensor:
        return network(**rows).logits.sin().flatten(1).mean(1)

    parameters = [p for p in model.parameters() if p.requires_grad]
    singly = [
        torch.autograd.grad(
            losses(model, {name: x[r : r + 1] for name, x in lot.items()}).sum(), parameters, allow_unused=True
        )
        for r in range(4)
    ]
    trained = copy.deepcopy(model)
    for got, p, rows in zip(
        rows_of(trained, lambda network, rows: losses(network, rows).mean(), lot, 4, tags=True),
        parameters, zip(*singly, strict=True), strict=True,
    ):  # fmt: skip
        want = torch.stack([torch.zeros_like(p) if row is None else row for row in rows])
        assert float((got - want).norm()) <= 1e-9 * max(float(want.norm()), 1e-3)
