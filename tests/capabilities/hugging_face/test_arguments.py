"""What a `PrivateTrainer` refuses, before it reads a record."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import IterableDataset, Subset
from transformers import GPT2Config, GPT2DoubleHeadsModel, TrainingArguments
from transformers.training_args import OptimizerNames

from dpbench import NonPrivate, PrivateTrainer
from dpbench.capabilities.hugging_face.arguments import refuse_arguments
from dpbench.errors import ConfigurationError
from tests.capabilities.hugging_face.worlds import Items, collate, texts, trainer_of


class Unread(Items):
    """Records that nobody may read."""

    def __getitem__(self, position: int) -> Any:
        raise AssertionError("a record was read")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "accumulation": ({"gradient_accumulation_steps": 2}, "max_physical_batch_size=ROWS"),
    "batch size": ({"auto_find_batch_size": True}, "follows the memory"),
    "lengths": ({"train_sampling_strategy": "group_by_length"}, "Poisson sampling"),
    "smoothing": ({"label_smoothing_factor": 0.1}, "pass loss="),
    "neftune": ({"neftune_noise_alpha": 5.0}, "longest record"),
    "compiled": ({"torch_compile": True}, "hides the layers"),
    "best": ({"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}, "choose in advance"),
    "tokens": ({"include_num_input_tokens_seen": "all"}, "sizes of batches"),
    "memory": ({"skip_memory_metrics": False}, "memory of batches"),
    "debug": ({"debug": "underflow_overflow"}, "activations"),
    "hub": ({"push_to_hub": True, "hub_strategy": "every_save"}, 'hub_strategy="end"'),
    "training records": ({"metric_for_best_model": "loss"}, "12 of its records are training records"),
    "plateau": ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}, "are training records"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_are_refused_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.Trainer.init_hf_repo", lambda self: None)
    options, message = REFUSED[name]
    records = Unread(texts().items)
    with pytest.raises(ConfigurationError, match=message):
        trainer_of(tmp_path, parts={"train_dataset": records, "eval_dataset": records}, **options)


def changed(**options: Any) -> SimpleNamespace:
    """Arguments that this machine could not have."""
    return SimpleNamespace(**{**vars(TrainingArguments("unused", use_cpu=True)), **options})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp16", True),
        ("world_size", 2),
        ("n_gpu", 2),
        ("deepspeed", {"zero_optimization": {"stage": 2}}),
        ("fsdp", "full_shard"),
        ("parallelism_config", object()),
        ("use_liger_kernel", True),
        ("enable_jit_checkpoint", True),
        ("group_by_length", True),
        ("optim", OptimizerNames.ADALOMO),
        ("optim", OptimizerNames.GALORE_ADAMW_LAYERWISE),
    ],
)
def test_arguments_of_other_machines_are_refused_by_name(name: str, value: Any) -> None:
    trainer: Any = SimpleNamespace(args=changed(**{name: value}))
    with pytest.raises(ConfigurationError, match=name):
        refuse_arguments(trainer)


def test_arguments_that_change_later_are_refused_too(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.args.gradient_accumulation_steps = 2
    with pytest.raises(ConfigurationError, match="gradient_accumulation_steps=2"):
        trainer.train()


def test_the_trainers_clipping_is_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert trainer_of(tmp_path).args.max_grad_norm == 0 and "is set to 0" in caplog.text


class OwnLoss(PrivateTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class OwnStep(PrivateTrainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().training_step(*args, **kwargs)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("a record was read")


def unlabeled(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch = collate(items)
    del batch["labels"]
    return batch


class SeededCollator:
    """As DataCollatorForLanguageModeling(tokenizer, seed=0)."""

    seed = 0

    def __call__(self, items: list[Any]) -> Any:
        raise AssertionError("a record was read")


LEFT = SimpleNamespace(padding_side="left", pad_token_id=0)
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "strategy": ({"strategy": NonPrivate()}, "not a private strategy"),
    "loss": ({"kind": OwnLoss}, "overrides compute_loss"),
    "step": ({"kind": OwnStep}, "overrides training_step"),
    "function": ({"parts": {"compute_loss_func": lambda *_, **__: None}}, "compute_loss_func"),
    "stream": ({"parts": {"train_dataset": Stream()}}, "not a map-style data set"),
    "left": ({"parts": {"processing_class": LEFT}}, 'padding_side = "right"'),
    "masks": ({"parts": {"data_collator": SeededCollator()}}, "draws masks by a known seed"),
    "model": ({"model": GPT2DoubleHeadsModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=20))}, "pass loss="),
}


@pytest.mark.parametrize("name", OTHERS)
def test_parts_are_refused_by_name(name: str, tmp_path: Path) -> None:
    options, message = OTHERS[name]
    with pytest.raises(ConfigurationError, match=message):
        trainer_of(tmp_path, **options)


def test_precision_and_watched_gradients_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(tmp_path)
    monkeypatch.setenv("WANDB_WATCH", "gradients")
    trainer.args.report_to = ["wandb"]
    with pytest.raises(ConfigurationError, match="WANDB_WATCH"):
        refuse_arguments(trainer)
    monkeypatch.setattr(type(trainer.accelerator), "mixed_precision", "fp16")
    with pytest.raises(ConfigurationError, match="mixed precision fp16"):
        refuse_arguments(trainer)


def test_batches_need_labels(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, parts={"data_collator": unlabeled})
    with pytest.raises(ConfigurationError, match="have no labels"):
        trainer.train()


def test_a_metric_of_held_out_records_may_decide(tmp_path: Path) -> None:
    records = texts(20)
    parts = {"train_dataset": Subset(records, range(12)), "eval_dataset": Subset(records, range(12, 20))}
    trainer_of(tmp_path, parts=parts, metric_for_best_model="loss", eval_strategy="steps").train()


def test_without_transformers_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigurationError, match=r"dpbench-lightning\[hf\]"):
        importlib.reload(importlib.import_module("dpbench.capabilities.hugging_face"))
