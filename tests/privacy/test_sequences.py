"""Recurrent layers, attention and transformers against per-record autograd in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from dpbench.errors import UnsupportedModuleError
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.records.tagging import under_tags
from tests.support.reference import reference_gradients, relative_error

LOTS = (0, 1, 5)
few = settings(max_examples=40, deadline=None)
RECURRENT: dict[str, Callable[..., nn.RNNBase]] = {"LSTM": nn.LSTM, "GRU": nn.GRU}


def mean_square(model: nn.Module, inputs: Any) -> Tensor:
    """Each record's own loss, averaged; batches are in dimension 0 of what the model returns."""
    outputs = model(inputs).flatten(1)
    return (outputs.square().mean(1) + outputs.sin().mean(1)).mean()


def check(model: nn.Module, inputs: Tensor, tags: bool = False) -> None:
    """The three answers equal the reference, and the forward pass what torch computes on its own."""
    model = model.double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    alone = model(inputs).detach()
    expected = reference_gradients(model, inputs, mean_square)
    engine = PerRecordEngine(model)
    if tags:
        engine.follow_tags()
    assert torch.allclose(model(inputs), alone, rtol=1e-9, atol=1e-12)
    engine.discard()
    loss = under_tags(engine, lambda x: mean_square(model, x), inputs, len(inputs))
    gradients = engine.backward(loss, len(inputs), verify=len(inputs) > 0)
    assert engine.names == list(expected)
    weights = torch.linspace(-1, 2, len(inputs), dtype=torch.float64)
    largest = max((float(e.norm()) for e in expected.values()), default=0.0) or 1.0
    for name, got in zip(engine.names, gradients, strict=True):
        want = expected[name]
        unit = max(float(want.norm()), 1e-3 * largest)
        for actual, wanted in (
            (got.per_record(), want),
            (got.squared_norms() / unit, want.flatten(1).square().sum(1) / unit),
            (got.weighted_sum(weights), torch.einsum("r,r...->...", weights, want)),
            *([(got.select(torch.tensor([0, len(inputs) - 1])).per_record(), want[[0, -1]])] if len(inputs) else []),
        ):
            assert actual.shape == wanted.shape, name
            assert float((actual - wanted).norm()) <= 1e-9 * unit, name
    engine.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.overrides._get_current_function_mode() is None


class Recurrent(nn.Module):
    """A recurrent layer in the middle of a network, records in dimension 0 outside."""

    def __init__(self, layer: nn.RNNBase, part: str, trained_below: bool, given_state: bool) -> None:
        super().__init__()
        self.below = nn.Linear(3, layer.input_size)
        self.below.requires_grad_(trained_below)
        self.layer, self.part, self.given = layer, part, given_state
        self.first = nn.Linear(3, layer.num_layers * (1 + layer.bidirectional) * layer.hidden_size)
        self.first.requires_grad_(given_state)

    def forward(self, x: Tensor) -> Tensor:
        layer, records = self.layer, len(x)
        below = self.below(x).tanh()
        state: Any = None
        if self.given:
            rows = layer.num_layers * (1 + layer.bidirectional)
            h = self.first(x[:, 0]).unflatten(1, (rows, -1)).transpose(0, 1).contiguous()
            state = (h, h.new_full((rows, records, layer.hidden_size), 0.3)) if isinstance(layer, nn.LSTM) else h
        out, last = layer(below if layer.batch_first else below.transpose(0, 1), state)
        states = last if isinstance(last, tuple) else (last,)
        parts = [out if layer.batch_first else out.transpose(0, 1), *(s.transpose(0, 1) for s in states)]
        chosen = {"output": parts[:1], "states": parts[1:], "last": parts[-1:], "all": parts}[self.part]
        return torch.cat([part.flatten(1) for part in chosen], 1)


@few
@given(
    kind=st.sampled_from(list(RECURRENT)),
    records=st.sampled_from(LOTS),
    steps=st.sampled_from([1, 2, 6]),
    depth=st.integers(1, 3),
    bidirectional=st.booleans(),
    bias=st.booleans(),
    batch_first=st.booleans(),
    part=st.sampled_from(["output", "states", "last", "all"]),
    trained_below=st.booleans(),
    given_state=st.booleans(),
)
def test_recurrent(
    kind: str,
    records: int,
    steps: int,
    depth: int,
    bidirectional: bool,
    bias: bool,
    batch_first: bool,
    part: str,
    trained_below: bool,
    given_state: bool,
) -> None:
    layer = RECURRENT[kind](3, 4, num_layers=depth, bidirectional=bidirectional, bias=bias, batch_first=batch_first)
    check(Recurrent(layer, part, trained_below, given_state), torch.randn(records, steps, 3))


@pytest.mark.parametrize(
    "frozen", ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0", "weight_hh_l1", "l0", ""]
)
@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_with_frozen_parameters(kind: str, frozen: str) -> None:
    layer = RECURRENT[kind](3, 4, num_layers=2, batch_first=True)
    for name, p in layer.named_parameters():
        p.requires_grad = not (frozen and frozen in name)
    check(Recurrent(layer, "all", False, False), torch.randn(4, 3, 3))


@pytest.mark.parametrize("kind", ["packed", "projected", "simple"])
def test_rare_recurrent_layers_are_left_to_autograd(kind: str) -> None:
    layer: nn.RNNBase = nn.LSTM(3, 4, batch_first=True, proj_size=2 if kind == "projected" else 0)
    if kind == "simple":
        layer = nn.RNN(3, 4, batch_first=True)
    x = torch.randn(5, 6, 3)
    given = pack_padded_sequence(x, torch.tensor([6, 4, 3, 3, 1]), batch_first=True) if kind == "packed" else x
    engine = PerRecordEngine(layer)
    with pytest.raises(UnsupportedModuleError, match="record by record"):
        layer(given)
    engine.close()
    assert torch.overrides._get_current_function_mode() is None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [*RECURRENT, "tanh", "relu"])
def test_cells(kind: str, bias: bool) -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            options: dict[str, Any] = {} if kind in ("LSTM", "GRU") else {"nonlinearity": kind}
            make = {"LSTM": nn.LSTMCell, "GRU": nn.GRUCell}.get(kind, nn.RNNCell)
            self.below, self.cell = nn.Linear(3, 3), make(3, 4, bias=bias, **options)

        def forward(self, x: Tensor) -> Tensor:
            state: Any = None
            for t in range(x.shape[1]):
                state = self.cell(self.below(x[:, t]), state)
            return torch.cat(state, 1) if kind == "LSTM" else state

    check(Steps(), torch.randn(5, 3, 3), tags=True)


class Attention(nn.Module):
    """Attention of a sequence to itself or to another, records in dimension 0 outside."""

    def __init__(self, layer: nn.MultiheadAttention, same: str, mask: str, weights: str, below: bool) -> None:
        super().__init__()
        self.below = nn.Linear(4, layer.embed_dim)
        self.key, self.value = nn.Linear(4, layer.kdim), nn.Linear(4, layer.vdim)
        for part in (self.below, self.key, self.value):
            part.requires_grad_(below)
        self.layer, self.same, self.mask, self.weights = layer, same, mask, weights

    def forward(self, x: Tensor) -> Tensor:
        layer, (records, steps, _) = self.layer, x.shape
        q = self.below(x).tanh()
        k = {"self": q, "memory": self.below(x[:, 1:]), "all": self.key(x[:, 1:])}[self.same]
        v = self.value(x[:, 1:]) if self.same == "all" else k
        options: dict[str, Any] = {"need_weights": self.weights != "no", "average_attn_weights": self.weights != "each"}
        if "causal" in self.mask:
            causal = torch.ones(steps, k.shape[1], dtype=torch.bool).triu(1)
            options |= {"attn_mask": causal, "is_causal": self.mask == "causal hint"}
        if "float" in self.mask:
            scores = x[:, :, :1] * torch.arange(k.shape[1])
            options["attn_mask"] = scores.repeat_interleave(layer.num_heads, 0)
        if "padding" in self.mask:
            padding = torch.zeros(records, k.shape[1], dtype=torch.bool)
            padding[:, 1:] = x[:, 0, :1] > 0
            options["key_padding_mask"] = padding.to(x.dtype) * -1e9 if "float" in self.mask else padding
        if not layer.batch_first:
            alike = k is q, v is k
            q = q.transpose(0, 1)
            k = q if alike[0] else k.transpose(0, 1)
            v = k if alike[1] else v.transpose(0, 1)
        out, weights = layer(q, k, value=v, **options)
        out = out if layer.batch_first else out.transpose(0, 1)
        return out.flatten(1) if weights is None else torch.cat([out.flatten(1), weights.flatten(1)], 1)


@few
@given(
    records=st.sampled_from(LOTS),
    steps=st.sampled_from([2, 5]),
    heads=st.sampled_from([1, 2, 3]),
    same=st.sampled_from(["self", "memory", "all"]),
    mask=st.sampled_from(["", "causal", "causal hint", "float", "padding", "causal padding", "float padding"]),
    weights=st.sampled_from(["no", "mean", "each"]),
    bias=st.booleans(),
    batch_first=st.booleans(),
    below=st.booleans(),
)
def test_attention(
    records: int,
    steps: int,
    heads: int,
    same: str,
    mask: str,
    weights: str,
    bias: bool,
    batch_first: bool,
    below: bool,
) -> None:
    layer = nn.MultiheadAttention(6, heads, bias=bias, batch_first=batch_first)
    for name, p in layer.named_parameters():
        if "bias" in name:
            nn.init.normal_(p)
    if records or "float" not in mask:  # torch itself cannot run that on an empty lot
        check(Attention(layer, same, mask, weights, below), torch.randn(records, steps, 4))


@pytest.mark.parametrize("option", [{"kdim": 5}, {"vdim": 5}, {"add_bias_kv": True}, {"add_zero_attn": True}])
def test_rare_attention_is_left_to_autograd(option: dict[str, Any]) -> None:
    layer = nn.MultiheadAttention(6, 2, batch_first=True, **option)
    engine = PerRecordEngine(layer)
    key = torch.randn(4, 3, layer.kdim)
    with pytest.raises(UnsupportedModuleError, match="record by record"):
        layer(torch.randn(4, 3, 6), key, torch.randn(4, 3, layer.vdim))
    engine.close()


@pytest.mark.parametrize("frozen", ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj", "in_proj"])
def test_attention_with_frozen_parameters(frozen: str) -> None:
    layer = nn.MultiheadAttention(6, 2, batch_first=True)
    for name, p in layer.named_parameters():
        p.requires_grad = not name.startswith(frozen)
    check(Attention(layer, "self", "", "no", False), torch.randn(4, 3, 4))


class Transformer(nn.Module):
    """A transformer from its parts, records in dimension 0 outside."""

    def __init__(self, body: nn.Module, batch_first: bool, masked: bool) -> None:
        super().__init__()
        self.below, self.body, self.head = nn.Linear(3, 4), body, nn.Linear(4, 2)
        self.batch_first, self.masked = batch_first, masked

    def forward(self, x: Tensor) -> Tensor:
        x = self.below(x)
        x = x if self.batch_first else x.transpose(0, 1)
        encoder = isinstance(self.body, nn.TransformerEncoder | nn.TransformerEncoderLayer)
        causal = nn.Transformer.generate_square_subsequent_mask(3, dtype=x.dtype)
        name = {"TransformerEncoderLayer": "src_mask", "TransformerEncoder": "mask"}.get(
            type(self.body).__name__, "tgt_mask"
        )
        options = {name: causal} if self.masked else {}
        out = self.body(x, **options) if encoder else self.body(x * 0.7, x, **options)
        return self.head(out if self.batch_first else out.transpose(0, 1))


def _transformer(kind: str, **options: Any) -> nn.Module:
    if kind == "whole":
        return nn.Transformer(4, 2, 1, 1, 5, **options)
    layer = nn.TransformerEncoderLayer if "encoder" in kind else nn.TransformerDecoderLayer
    one = layer(4, 2, 5, **options)
    if kind.endswith("layer"):
        return one
    norm = nn.LayerNorm(4)
    return (nn.TransformerEncoder if "encoder" in kind else nn.TransformerDecoder)(one, 2, norm)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("kind", ["encoder layer", "decoder layer", "encoder", "decoder", "whole"])
def test_transformers(kind: str, norm_first: bool, batch_first: bool) -> None:
    body = _transformer(kind, batch_first=batch_first, norm_first=norm_first, dropout=0.0, activation="gelu")
    for masked in (False, True):
        check(Transformer(copy.deepcopy(body), batch_first, masked), torch.randn(4, 3, 3), tags=not batch_first)


def test_dropout_is_that_of_the_forward_pass() -> None:
    """With random masks, each record's gradients are those of the loss that was computed: sums and parts agree."""
    torch.manual_seed(3)
    for body in (
        nn.TransformerEncoderLayer(4, 2, 5, dropout=0.4, batch_first=True),
        Recurrent(nn.LSTM(3, 4, num_layers=3, dropout=0.4, batch_first=True), "all", True, False),
        Attention(nn.MultiheadAttention(6, 2, dropout=0.4, batch_first=True), "self", "", "mean", True),
    ):
        model = body.double()
        x = torch.randn(5, 3, 3 if isinstance(body, Recurrent) else 4, dtype=torch.float64)
        engine = PerRecordEngine(model)
        outputs = model(x).flatten(1)
        losses = outputs.square().mean(1) + outputs.sin().mean(1)
        expected = [torch.autograd.grad(row, engine.parameters, retain_graph=True, allow_unused=True) for row in losses]
        gradients = engine.backward(losses.mean(), 5, verify=True)
        for i, (p, got) in enumerate(zip(engine.parameters, gradients, strict=True)):
            want = torch.stack([torch.zeros_like(p) if row[i] is None else row[i] for row in expected])
            assert relative_error(got.per_record(), want) < 1e-9 or float(want.norm()) < 1e-12
        engine.close()


def test_layers_called_twice_and_shared() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4, batch_first=True)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.lstm(self.lstm(x)[0])[0]
            x = self.attention(x, x, x)[0] + self.attention(x, x[:, 1:], x[:, 1:])[0]
            return self.attention(x, x, x[:, :].clone(), need_weights=False)[0]

    check(Twice(), torch.randn(4, 3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions(dtype: torch.dtype) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4, batch_first=True)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.lstm(x)[0]
            return self.attention(x, x, x)[0]

    model, x = Both(), torch.randn(6, 3, 4)
    expected = reference_gradients(model, x, mean_square)
    engine = PerRecordEngine(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = mean_square(model, x)
    for name, gradients in zip(engine.names, engine.backward(loss, 6, verify=True), strict=True):
        assert gradients.squared_norms().dtype == torch.float32
        tolerance = 1e-4 if dtype == torch.float32 else 0.1
        gap = float((gradients.per_record().double() - expected[name]).norm())
        assert gap < tolerance * max(float(e.norm()) for e in expected.values())


@pytest.mark.parametrize("layer", [nn.LSTM(3, 3), nn.GRU(3, 3), nn.MultiheadAttention(3, 1)])
def test_records_in_the_wrong_dimension_are_refused(layer: nn.Module) -> None:
    engine = PerRecordEngine(layer)
    x = torch.randn(4, 2, 3)
    output = layer(x, x, x) if isinstance(layer, nn.MultiheadAttention) else layer(x)
    with pytest.raises(UnsupportedModuleError, match="saw 2 records in a batch of 4.*batch_first=True"):
        engine.backward(output[0].square().mean(), 4)
    engine.close()


def test_subclasses_are_left_to_autograd() -> None:
    class Own(nn.LSTM):
        pass

    layer = Own(3, 3, batch_first=True)
    PerRecordEngine(layer)
    with pytest.raises(UnsupportedModuleError, match="record by record"):
        layer(torch.randn(2, 4, 3))


def test_a_subclass_of_attention_is_exact_by_its_function() -> None:
    class Own(nn.MultiheadAttention):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, x, x)[0]

    check(nn.Sequential(nn.Linear(3, 4), Own(4, 2, batch_first=True)), torch.randn(3, 5, 3), tags=True)


def test_a_failed_forward_pass_leaves_nothing_behind() -> None:
    layer = nn.LSTM(3, 3, batch_first=True)
    engine = PerRecordEngine(layer)
    with pytest.raises(RuntimeError):
        layer(torch.randn(4, 2, 5))
    assert torch.overrides._get_current_function_mode() is None
    engine.discard()
    loss = layer(torch.randn(4, 2, 3))[0].square().mean()
    assert engine.backward(loss, 4, verify=True)[0].squared_norms().shape == (4,)


def test_without_recording_torch_computes_the_layer_itself() -> None:
    layer = nn.LSTM(3, 3, batch_first=True)
    x = torch.randn(4, 2, 3)
    alone = layer(x)[0]
    engine = PerRecordEngine(layer)
    with engine.paused():
        assert torch.equal(layer(x)[0], alone)
    with torch.no_grad():
        layer(x)
    assert not engine._uses


def test_weights_that_one_layer_ties() -> None:
    """Which `named_parameters` lists once."""
    layer = nn.LSTM(4, 4, num_layers=2, batch_first=True)
    layer.weight_hh_l1 = layer.weight_hh_l0

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.layer(x)[0]
            return output

    check(Last(), torch.randn(5, 3, 4))
