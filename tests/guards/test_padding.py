"""Padding on the left moves the tokens of a text where its batch is wider."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from dpbench import DPSGD, LotLoader
from dpbench.errors import UnsupportedModuleError
from dpbench.guards._padding import pads_left

transformers = pytest.importorskip("transformers")
GUARANTEE = Path(__file__).parents[2] / "docs" / "guarantee.md"

TEXTS = [{"input_ids": [2 + (7 * i + k) % 40 for k in range(3 + i % 6)]} for i in range(24)]


def network(kind: str = "gpt2", words: int = 50) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": words, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 1}
    if kind == "gpt2":
        config = transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        return transformers.GPT2LMHeadModel(config)
    sizes["intermediate_size"] = 32
    if kind == "bert":
        config = transformers.BertConfig(**sizes, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
        return transformers.BertForMaskedLM(config)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2))


def tokenizer(side: str) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({"[PAD]": 0, **{f"w{i}": i for i in range(1, 50)}}, unk_token="w1"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", padding_side=side)


def positions_of(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


class Language(pl.LightningModule):
    def __init__(self, kind: str = "gpt2", gives_positions: bool = False, words: int = 50) -> None:
        super().__init__()
        self.network = network(kind, words)
        self.gives_positions = gives_positions

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mask = batch["attention_mask"]
        options = {"position_ids": positions_of(mask)} if self.gives_positions else {}
        logits = self.network(input_ids=batch["input_ids"], attention_mask=mask, **options).logits
        labels = batch["input_ids"].masked_fill(mask == 0, -100)
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return (losses * mask).sum(1).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(module: pl.LightningModule, collate_fn: Callable[[Any], Any], folder: Path) -> None:
    loader = LotLoader.poisson(TEXTS, 8, seed=0, collate_fn=collate_fn, data_id="texts")
    private = DPSGD(noise_multiplier=1.0, max_grad_norm=1.0, delta=1e-3, seed=0)
    pl.Trainer(
        max_steps=2,
        callbacks=[private],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    ).fit(module, loader)


def collator(side: str, **options: Any) -> Any:
    return transformers.DataCollatorWithPadding(tokenizer(side), **options)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_left_padding_without_positions_is_refused(kind: str, tmp_path: Path) -> None:
    module = Language(kind)
    with pytest.raises(UnsupportedModuleError, match="pads on the left, and .* counts positions .* position_ids"):
        train(module, collator("left"), tmp_path)
    assert not any(layer._forward_pre_hooks for layer in module.modules())


@pytest.mark.parametrize(
    ("module", "collate_fn"),
    [
        (partial(Language), partial(collator, "right")),
        (partial(Language, gives_positions=True), partial(collator, "left")),
        (partial(Language), partial(collator, "left", padding="max_length", max_length=16)),
        (partial(Language, "llama"), partial(collator, "left")),
        (partial(Language, "llama", words=64), partial(collator, "left")),
    ],
    ids=["right", "positions", "fixed width", "rotary", "rotary, as many words as positions"],
)
def test_padding_that_moves_nothing_is_trained(module: Any, collate_fn: Any, tmp_path: Path) -> None:
    train(module(), collate_fn(), tmp_path)


def test_the_tokenizer_is_found_wherever_the_collate_fn_has_it() -> None:
    left = tokenizer("left")
    holder = collator("left")

    class Module:
        words = None

        def __init__(self) -> None:
            self.words = left

        def collate(self, texts: Any) -> Any:
            return self.words.pad(texts)

    def pad(texts: Any, words: Any = None) -> Any:
        return words.pad(texts)

    for function in (holder, lambda texts: left.pad(texts), lambda texts: holder(texts), Module().collate):
        assert pads_left(function)

    def pad_by_default(texts: Any, words: Any = left) -> Any:
        return words.pad(texts)

    assert pads_left(partial(pad, words=left)) and pads_left(pad_by_default)
    by_name = {"words": left}
    assert pads_left(lambda texts: by_name["words"].pad(texts))
    for function in (None, collator("right"), pad, torch.stack, lambda texts: tokenizer("right").pad(texts)):
        assert not pads_left(function)


def moved(kind: str, side: str, gives_positions: bool = False) -> float:
    """Relative change of the gradient of a text where its batch is twice as wide."""
    module = network(kind).double()
    ids = torch.arange(6) + 2
    gradients = []
    for width in (8, 16):
        pad = width - len(ids)
        where = (pad, 0) if side == "left" else (0, pad)
        batch = torch.nn.functional.pad(ids, where)[None]
        mask = torch.nn.functional.pad(torch.ones_like(ids), where)[None]
        options = {"position_ids": positions_of(mask)} if gives_positions else {}
        logits = module(input_ids=batch, attention_mask=mask, **options).logits
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch, reduction="none")
        parts = torch.autograd.grad((losses * mask).sum(), list(module.parameters()), materialize_grads=True)
        gradients.append(torch.cat([part.flatten() for part in parts]))
    return float((gradients[0] - gradients[1]).norm() / gradients[0].norm())


def test_what_moves_a_gradient() -> None:
    page = GUARANTEE.read_text(encoding="utf-8")
    size = moved("gpt2", "left")
    assert size > 0.1 and f"by {100 * size:.0f} % " in page
    assert moved("gpt2", "right") < 1e-12 and moved("gpt2", "left", gives_positions=True) < 1e-12
    assert moved("llama", "left") < 1e-6
