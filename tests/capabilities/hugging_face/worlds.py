"""Tiny models of Hugging Face with random weights, texts for them, and trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from dpbench import DPSGD, PrivateTrainer

TOKENS = 20


class Items(Dataset[Any]):
    """What is left of a data set library: a length and items."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, position: int) -> Any:
        return self.items[position]


def texts(count: int = 12) -> Items:
    """Texts of unlike length, the first of which has a single token; with a column that no model knows."""
    generator = torch.Generator().manual_seed(0)
    lengths = [1 + (5 * number) % 9 for number in range(count)]
    tokens = [torch.randint(1, TOKENS, (length,), generator=generator).tolist() for length in lengths]
    return Items([{"input_ids": ids, "source": "a web page"} for ids in tokens])


def collate(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The batch of DataCollatorForLanguageModeling(tokenizer, mlm=False)."""
    tokens = [torch.tensor(item["input_ids"]) for item in items]
    padded = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in tokens], batch_first=True)
    return {"input_ids": padded, "attention_mask": mask, "labels": padded.masked_fill(mask == 0, -100)}


def gpt2(**options: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 16, "vocab_size": TOKENS}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(**{**sizes, **dropouts, "bos_token_id": 0, "eos_token_id": 0, **options}))
    return model.eval()  # as from_pretrained leaves it


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    """SGD with a learning rate of 1, which shows each released gradient."""
    return TrainingArguments(
        str(folder),
        **{
            "per_device_train_batch_size": 4,
            "max_steps": 3,
            "learning_rate": 1.0,
            "lr_scheduler_type": "constant",
            "optim": "sgd",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            **options,
        },
    )


def trainer_of(
    folder: Path,
    strategy: Any = None,
    model: Any = None,
    kind: type[PrivateTrainer] = PrivateTrainer,
    parts: dict[str, Any] | None = None,
    **options: Any,
) -> PrivateTrainer:
    """A trainer.

    Args:
        folder: Its output_dir.
        strategy: None: one with noise.
        model: None: a tiny GPT-2.
        kind: Class of the trainer.
        parts: Its arguments.
        **options: Training arguments.
    """
    strategy = DPSGD(noise_multiplier=1.0, delta=1e-3) if strategy is None else strategy
    parts = {"train_dataset": texts(), "data_collator": collate, **(parts or {})}
    return kind(gpt2() if model is None else model, arguments(folder, **options), strategy=strategy, **parts)


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
