"""Activation checkpointing: layers run again in the backward pass, where nothing of them may count twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dpbench.errors import UnsupportedModuleError
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.privacy.gradients.one_by_one import OneByOne
from dpbench.privacy.mechanism.clipping import clip_and_sum
from dpbench.privacy.mechanism.groups import flat_groups
from dpbench.records.tagging import under_tags
from tests.support.reference import mean_square, reference_gradients

RECORDS = 5
TOKENS = 4
WIDTH = 6
BOUND = 0.3


class OwnScale(nn.Module):
    """Uses a parameter itself, beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.linear(x)


class Places(nn.Module):
    """Embeddings of places, which all records share."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.embedding(torch.arange(TOKENS)[None])


class Recurrent(nn.Module):
    """Computed from its parts while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.lstm(x)[0]
        return output


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv1d(TOKENS, 4, 3, padding=1), nn.ReLU(), nn.GroupNorm(2, 4), nn.Conv1d(4, 4, 1))


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)


BODIES: dict[str, Callable[[], nn.Module]] = {
    "convolutions": convolutions,
    "transformer": transformer,
    "own parameter": OwnScale,
    "shared places": Places,
    "lstm": Recurrent,
}


class Network(nn.Module):
    """Runs its body with activation checkpointing or without it: once for the loss, and once more going back."""

    def __init__(self, body: nn.Module, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.body = body
        self.last = nn.Linear(WIDTH, 3)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.use_reentrant is None:
            hidden = self.body(hidden)
        else:
            hidden = checkpoint(self.body, hidden, use_reentrant=self.use_reentrant)
        output: Tensor = self.last(hidden)
        return output


def network(name: str, use_reentrant: bool | None) -> Network:
    torch.manual_seed(0)
    return Network(BODIES[name](), use_reentrant).double()


@pytest.mark.parametrize("name", BODIES)
def test_clipped_sums_are_those_of_each_record_alone(name: str) -> None:
    x = torch.randn(RECORDS, TOKENS, WIDTH, dtype=torch.float64)
    reference = reference_gradients(network(name, None), x)
    squares = sum(rows.flatten(1).square().sum(1) for rows in reference.values())
    factors = (BOUND / squares.sqrt()).clamp(max=1)
    assert (factors < 1).any()
    for use_reentrant in (None, False):
        model = network(name, use_reentrant)
        engine = PerRecordEngine(model)
        if name == "shared places":
            engine.follow_tags()
        groups = flat_groups(engine.names, [p.numel() for p in engine.parameters], BOUND)
        sums = [torch.zeros_like(p) for p in engine.parameters]
        for piece in (x[:3], x[3:]):  # a lot in two pieces, between which nothing is cleared
            loss = under_tags(engine, partial(mean_square, model), piece, len(piece))
            gradients = engine.backward(loss, len(piece), verify=len(piece) == 3)
            clip_and_sum(gradients, groups, into=sums)
        assert engine.verified
        for parameter, total in zip(engine.names, sums, strict=True):
            expected = torch.einsum("r,r...->...", factors, reference[parameter])
            torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-12)


def test_dropout_is_the_same_when_it_runs_again() -> None:
    body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(RECORDS, TOKENS, WIDTH)
    norms = []
    for use_reentrant in (None, False):
        model = Network(body, use_reentrant)
        torch.manual_seed(1)
        model.first.reset_parameters()
        model.last.reset_parameters()
        engine = PerRecordEngine(model)
        gradients = engine.backward(mean_square(model, x), RECORDS)
        norms.append(torch.stack([gradient.squared_norms() for gradient in gradients]))
        engine.close()
    torch.testing.assert_close(norms[0], norms[1], rtol=0, atol=0)


def test_nothing_is_kept_of_what_runs_again() -> None:
    model = network("convolutions", False)
    inputs: list[StorageWeakRef] = []

    def note(module: nn.Module, args: tuple[Tensor]) -> None:
        inputs.append(StorageWeakRef(args[0].untyped_storage()))

    model.body[2].register_forward_pre_hook(note)  # type: ignore[index]
    engine = PerRecordEngine(model)
    x = torch.randn(RECORDS, TOKENS, WIDTH, dtype=torch.float64)
    gradients = engine.backward(mean_square(model, x), RECORDS)
    first, again = inputs
    assert not first.expired(), gradients  # gradients are made of it
    assert again.expired()


@pytest.mark.parametrize("method", [PerRecordEngine, OneByOne])
def test_reentrant_checkpointing_is_refused(method: type[Any]) -> None:
    model = network("convolutions", True)
    x = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64)
    gradients = method(model)
    with pytest.raises(UnsupportedModuleError, match="use_reentrant=False"):
        gradients.backward(mean_square(model, x), 1)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_transformer_that_checkpoints_itself(use_reentrant: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=11,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=TOKENS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config).double().train()
    words = torch.randint(11, (RECORDS, TOKENS))
    labels = torch.arange(RECORDS) % 3

    def loss_of(lot: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(lot[0]).logits, lot[1])

    trainable = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for record in range(RECORDS):
        lot = words[record : record + 1], labels[record : record + 1]
        one = torch.autograd.grad(loss_of(lot), trainable, allow_unused=True)
        rows.append([torch.zeros_like(p) if grad is None else grad for p, grad in zip(trainable, one, strict=True)])
    name = "activation_checkpointing_enable"  # "gradient_..." before transformers 5
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})
    calls: list[bool] = []
    model.bert.encoder.layer[0].intermediate.dense.register_forward_pre_hook(lambda *_: calls.append(True))
    engine = PerRecordEngine(model)
    engine.follow_tags()
    engine.expect(RECORDS)
    loss = under_tags(engine, loss_of, (words, labels), RECORDS)
    if use_reentrant:
        with pytest.raises(UnsupportedModuleError, match="use_reentrant=False"):
            engine.backward(loss, RECORDS, verify=True)
        return
    gradients = engine.backward(loss, RECORDS, verify=True)
    assert len(calls) == 2
    for gradient, *of_records in zip(gradients, *rows, strict=True):
        torch.testing.assert_close(gradient.per_record(), torch.stack(of_records), rtol=1e-8, atol=1e-10)
