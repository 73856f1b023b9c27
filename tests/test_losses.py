"""`dpbench.losses`: exact means over records, by the engine; Hugging Face's own mean over tokens trains one by one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import dpbench
from dpbench import ClipOnly, PrivateDataLoader, PrivateLoop
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.losses import next_token, per_record
from tests.support.one_by_one import used

BOUND = 0.5


def test_they_are_the_mean_over_the_labels_of_each_record() -> None:
    logits = torch.randn(4, 5, 7, dtype=torch.double, requires_grad=True)
    labels = torch.randint(7, (4, 5))
    labels[1, 2:] = labels[2] = -100
    labels[3, 1:] = -100
    each = per_record(logits, labels)
    shifted = next_token(logits, labels)
    for record, row in enumerate(labels):
        if (row >= 0).any():
            torch.testing.assert_close(each[record], F.cross_entropy(logits[record], row))
        if (row[1:] >= 0).any():
            torch.testing.assert_close(shifted[record], F.cross_entropy(logits[record, :-1], row[1:]))
    assert each[2] == shifted[2] == shifted[3] == 0 and each.shape == shifted.shape == (4,)
    (gradient,) = torch.autograd.grad(each.sum() + shifted.sum(), logits)
    assert gradient.isfinite().all() and not gradient[2].any() and gradient[3, 0].any()


def test_of_classes_it_is_the_cross_entropy_and_of_no_records_nothing() -> None:
    logits, labels = torch.randn(6, 3), torch.randint(3, (6,))
    labels[0] = 1
    torch.testing.assert_close(per_record(logits, labels), F.cross_entropy(logits, labels, reduction="none"))
    assert per_record(logits, labels, ignore_index=1)[0] == 0
    for shape in ((0, 3), (0, 4, 3)):
        assert per_record(torch.zeros(shape), torch.zeros(shape[:-1], dtype=torch.long)).shape == (0,)
    assert dpbench.losses.per_record is per_record


class Texts(Dataset[Any]):
    """Texts of unlike length, one of them without a label."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths = [2, 9, 5, 1, 7, 3]
        self.tokens = [torch.randint(1, 20, (length,), generator=generator) for length in self.lengths]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, position: int) -> Tensor:
        return self.tokens[position]


def collate(texts: list[Tensor]) -> dict[str, Tensor]:
    """The batch that DataCollatorForLanguageModeling(mlm=False) makes, padded on the right."""
    tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=0)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, n_positions=16, vocab_size=20, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def each_text(model: Any, batch: Any) -> Tensor:
    labels = batch["labels"]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return next_token(logits, labels).mean()


def all_tokens(model: Any, batch: Any) -> Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


def clipped_mean(model: nn.Module, texts: Texts) -> list[Tensor]:
    """Mean of the clipped gradients of each text alone, in float64."""
    model = model.double()
    parameters = list(model.parameters())
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for text in texts.tokens:
        if len(text) > 1:
            logits = model(text[None]).logits[0]
            gradients = torch.autograd.grad(F.cross_entropy(logits[:-1], text[1:]), parameters)
            norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
            for total_, gradient in zip(total, gradients, strict=True):
                total_ += gradient * (BOUND / norm).clamp(max=1) / len(texts)
    return total


@pytest.mark.parametrize(("step", "method"), [(each_text, "engine"), (all_tokens, "one_by_one")])
def test_gpt2_gets_the_gradient_of_each_text(
    step: Callable[[Any, Any], Tensor], method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, texts = gpt2(), Texts()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    strategy = ClipOnly(max_grad_norm=BOUND, ledger=str(tmp_path / "ledger.jsonl"))
    loader = PrivateDataLoader(texts, PrivateBatchSampler(make_sampling("full", 6, 6), None), collate_fn=collate)
    with caplog.at_level(logging.INFO):
        list(PrivateLoop(model, torch.optim.SGD(model.parameters(), 1.0), loader, strategy, step, steps=1))
    assert used(strategy) == method
    hint = "dpbench.losses.next_token for causal language models, else per_record"
    assert (hint in caplog.text) == (method == "one_by_one")
    updates = [old - parameter.detach() for old, parameter in zip(before, model.parameters(), strict=True)]
    model = gpt2()
    for update, expected in zip(updates, clipped_mean(model, texts), strict=True):
        torch.testing.assert_close(update.double(), expected, rtol=1e-3, atol=1e-6)
