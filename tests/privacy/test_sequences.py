"""Recurrent layers, attention and transformers against per-record autograd in float64."""

from __future__ import annotations

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
from tests.privacy.exact import LOTS, Networks, assert_each_exact, assert_exact, assert_exact_in_its_pass

few = settings(max_examples=20, deadline=None)
RECURRENT: dict[str, Callable[..., nn.RNNBase]] = {"LSTM": nn.LSTM, "GRU": nn.GRU}
FLOAT64 = [torch.float64]


class Recurrent(nn.Module):
    """A recurrent layer in the middle of a network, records in dimension 0 outside."""

    def __init__(self, layer: nn.RNNBase, parts: slice = slice(None), given_state: bool = False) -> None:
        super().__init__()
        self.below, self.first = nn.Linear(3, layer.input_size), nn.Linear(3, layer.hidden_size)
        self.layer, self.parts, self.given = layer, parts, given_state

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        below = self.below(x).tanh()
        state: Any = None
        if self.given:
            rows = torch.arange(layer.num_layers * (1 + layer.bidirectional))
            h = self.first(x[:, 0]) * (1 + rows[:, None, None])
            state = (h, torch.full_like(h, 0.3)) if isinstance(layer, nn.LSTM) else h
        out, last = layer(below if layer.batch_first else below.transpose(0, 1), state)
        states = last if isinstance(last, tuple) else (last,)
        parts = [out if layer.batch_first else out.transpose(0, 1), *(s.transpose(0, 1) for s in states)]
        return torch.cat([part.flatten(1) for part in parts[self.parts]], 1)


@few
@given(
    kind=st.sampled_from(list(RECURRENT)),
    records=st.sampled_from(LOTS),
    steps=st.sampled_from([1, 2, 6]),
    depth=st.integers(1, 3),
    bidirectional=st.booleans(),
    bias=st.booleans(),
    batch_first=st.booleans(),
    parts=st.sampled_from([slice(1), slice(1, None), slice(-1, None), slice(None)]),  # output, states, last
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
    parts: slice,
    given_state: bool,
) -> None:
    layer = RECURRENT[kind](3, 4, num_layers=depth, bidirectional=bidirectional, bias=bias, batch_first=batch_first)
    assert_exact(Recurrent(layer, parts, given_state), torch.randn(records, steps, 3), dtypes=FLOAT64)


class Attention(nn.Module):
    """Attention of a sequence to itself or to another, records in dimension 0 outside."""

    def __init__(self, layer: nn.MultiheadAttention, same: str = "self", mask: str = "", weights: str = "no") -> None:
        super().__init__()
        self.below, self.value = nn.Linear(4, layer.embed_dim), nn.Linear(4, layer.embed_dim)
        self.layer, self.same, self.mask, self.weights = layer, same, mask, weights

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        q = self.below(x).tanh()
        k = q if self.same == "self" else self.below(x[:, 1:])
        v = self.value(x[:, 1:]) if self.same == "none" else k
        steps = x.shape[1], k.shape[1]
        options: dict[str, Any] = {"need_weights": self.weights != "no", "average_attn_weights": self.weights != "each"}
        if "causal" in self.mask:
            options["attn_mask"] = torch.ones(steps, dtype=torch.bool).triu(1)
        if "float" in self.mask:
            scores = x[:, :, :1] * torch.arange(steps[1])
            options["attn_mask"] = scores.repeat_interleave(layer.num_heads, 0)
        if "padding" in self.mask:
            padding = (x[:, 0, :1] > 0) & (torch.arange(steps[1]) > 0)
            options["key_padding_mask"] = padding.to(x.dtype) * -1e9 if "float" in self.mask else padding
        if not layer.batch_first:
            turned = {given: given.transpose(0, 1) for given in (q, k, v)}
            q, k, v = (turned[given] for given in (q, k, v))
        out, weights = layer(q, k, value=v, **options)
        out = out if layer.batch_first else out.transpose(0, 1)
        return torch.cat([part.flatten(1) for part in (out, weights) if part is not None], 1)


@few
@given(
    records=st.sampled_from(LOTS),
    steps=st.sampled_from([2, 5]),
    heads=st.sampled_from([1, 2, 3]),
    same=st.sampled_from(["self", "memory", "none"]),
    mask=st.sampled_from(["", "causal", "float", "padding", "causal padding", "float padding"]),
    weights=st.sampled_from(["no", "mean", "each"]),
    bias=st.booleans(),
    batch_first=st.booleans(),
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
) -> None:
    layer = nn.MultiheadAttention(6, heads, bias=bias, batch_first=batch_first)
    for name, p in layer.named_parameters():
        if "bias" in name:
            nn.init.normal_(p)
    if records or mask in ("", "causal"):  # torch itself cannot run that on an empty lot
        assert_exact(Attention(layer, same, mask, weights), torch.randn(records, steps, 4), dtypes=FLOAT64)


@pytest.mark.parametrize(
    ("make", "frozen"),
    [
        *[
            (lambda kind=kind: Recurrent(RECURRENT[kind](3, 4, num_layers=2, batch_first=True)), frozen)
            for kind in RECURRENT
            for frozen in ("weight_hh_l0", "bias_ih_l0", "l0")
        ],
        *[
            (lambda: Attention(nn.MultiheadAttention(6, 2, batch_first=True)), frozen)
            for frozen in ("in_proj_weight", "in_proj_bias", "out_proj")
        ],
    ],
)
def test_frozen_parameters(make: Callable[[], Any], frozen: str) -> None:
    network = make()
    for name, p in network.layer.named_parameters():
        p.requires_grad = frozen not in name
    assert_exact(network, torch.randn(4, 3, network.below.in_features), dtypes=FLOAT64)


class Cell(nn.Module):
    """A cell, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.cell = nn.Linear(3, 3), nn.LSTMCell(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for row in x.unbind(1):
            state = self.cell(self.below(row), state)
        return torch.cat(state, 1)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lstm(self.lstm(x)[0])[0]
        x = self.attention(x, x, x)[0] + self.attention(x, x[:, 1:], x[:, 1:])[0]
        return self.attention(x, x, x[:, :].clone(), need_weights=False)[0]


def tied() -> nn.Module:
    """Weights that `named_parameters` lists once."""
    layer = nn.LSTM(3, 4, num_layers=2, batch_first=True)
    layer.weight_hh_l1 = layer.weight_hh_l0
    return Recurrent(layer)


NETWORKS: Networks = {
    "cell": (Cell, (3, 3)),
    "twice and shared": (Twice, (3, 4)),
    "tied": (tied, (3, 3)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str) -> None:
    assert_each_exact(NETWORKS, name, (4,), tags=name == "cell")


class OwnLSTM(nn.LSTM):
    pass


PACKED = pack_padded_sequence(torch.randn(5, 6, 3), torch.tensor([6, 4, 3, 3, 1]), batch_first=True)


@pytest.mark.parametrize(
    ("layer", "given"),
    [
        (nn.LSTM(3, 4, batch_first=True), (PACKED,)),
        (nn.LSTM(3, 4, batch_first=True, proj_size=2), (torch.randn(5, 6, 3),)),
        (nn.RNN(3, 4, batch_first=True), (torch.randn(5, 6, 3),)),
        (OwnLSTM(3, 4, batch_first=True), (torch.randn(5, 6, 3),)),
        (nn.MultiheadAttention(3, 1, batch_first=True, add_bias_kv=True), (torch.randn(4, 2, 3),) * 3),
    ],
    ids=["packed", "projected", "simple", "subclass", "bias of keys"],
)
def test_rare_layers_are_left_to_autograd(layer: nn.Module, given: Any) -> None:
    engine = PerRecordEngine(layer)
    with pytest.raises(UnsupportedModuleError, match="gradients=auto or one_by_one"):
        layer(*given)
    engine.close()
    assert torch.overrides._get_current_function_mode() is None


@pytest.mark.parametrize(
    ("layer", "width"),
    [
        (nn.TransformerEncoderLayer(4, 2, 5, dropout=0.4, batch_first=True), 4),
        (Recurrent(nn.LSTM(3, 4, num_layers=3, dropout=0.4, batch_first=True)), 3),
        (Attention(nn.MultiheadAttention(6, 2, dropout=0.4, batch_first=True), weights="mean"), 4),
    ],
    ids=["transformer", "recurrent", "attention"],
)
def test_dropout_is_that_of_the_forward_pass(layer: nn.Module, width: int) -> None:
    x = torch.randn(5, 3, width, dtype=torch.float64)
    assert_exact_in_its_pass(layer.double(), x, draws_as_alone=not isinstance(layer, Recurrent))


def test_automatic_bfloat16() -> None:
    assert_exact_in_its_pass(Twice(), torch.randn(6, 3, 4), rtol=0.05, half=True, draws_as_alone=False)


def test_records_in_the_wrong_dimension_are_refused() -> None:
    layer = nn.LSTM(3, 3)
    engine = PerRecordEngine(layer)
    output = layer(torch.randn(4, 2, 3))
    with pytest.raises(UnsupportedModuleError, match="saw 2 records in a batch of 4.*batch_first=True"):
        engine.backward(output[0].square().mean(), 4)
