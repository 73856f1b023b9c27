"""Arguments of a Hugging Face Trainer under which private training would be wrong, or would tell of its records."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import Trainer

from dpbench.data.records import count_of, shared_records
from dpbench.errors import ConfigurationError

_MEMORY = (
    "per_device_train_batch_size is the expected batch size, and max_physical_batch_size=ROWS of the strategy bounds "
    "memory"
)
_LOSS = "pass loss=, a function of the model and a batch that returns the mean of its records' losses"
_OWN_UPDATES = ("lomo", "layerwise")
"""Parts of the names of optimizers that update within the backward pass."""
_FOLLOWERS = ("reduce_lr_on_plateau", "greedy")
"""Learning rate schedules that follow a metric."""


class _Refusal(NamedTuple):
    """An argument that is refused.

    Attributes:
        name: Name of the argument.
        is_set: Function that tells whether its value is refused.
        reason: Reason and remedy.
    """

    name: str
    is_set: Callable[[Any], bool]
    reason: str


def _is_more_than_one(value: Any) -> bool:
    return int(value) > 1


_REFUSED = (
    _Refusal("gradient_accumulation_steps", _is_more_than_one, f"updates by several batches: {_MEMORY}"),
    _Refusal("auto_find_batch_size", bool, f"follows the memory that records take: {_MEMORY}"),
    _Refusal("fp16", bool, "scales the loss, so that clipping is wrong: use bf16=True"),
    _Refusal(
        "train_sampling_strategy",
        lambda value: value != "random",
        'changes how batches are drawn, and epsilon holds for Poisson sampling: leave it at "random"',
    ),
    _Refusal("group_by_length", bool, "draws batches by the lengths of records: leave it out"),
    _Refusal("label_smoothing_factor", bool, f"averages over the labels of all records: {_LOSS}"),
    _Refusal(
        "neftune_noise_alpha",
        bool,
        "scales by the longest record of a batch, so that records are not apart: leave it out",
    ),
    _Refusal("use_liger_kernel", bool, "replaces layers by kernels without per-record gradients: leave it out"),
    _Refusal("torch_compile", bool, "hides the layers from the engine: leave it out"),
    _Refusal("world_size", _is_more_than_one, "several processes: train in one, or with a Lightning Trainer"),
    _Refusal("n_gpu", _is_more_than_one, "splits a batch among GPUs: set CUDA_VISIBLE_DEVICES=0"),
    _Refusal("deepspeed", bool, "shards the model: train in one process, or with a Lightning Trainer"),
    _Refusal("fsdp", bool, "shards the model: train in one process, or with a Lightning Trainer"),
    _Refusal("parallelism_config", bool, "shards the model: train in one process, or with a Lightning Trainer"),
    _Refusal("load_best_model_at_end", bool, "chooses weights by a metric that no epsilon covers: choose in advance"),
    _Refusal("enable_jit_checkpoint", bool, "saves between a release and its update: leave it out, and set save_steps"),
    _Refusal(
        "include_num_input_tokens_seen",
        lambda value: value not in ("no", False),
        "logs the sizes of batches, which are private: leave it out",
    ),
    _Refusal(
        "skip_memory_metrics",
        lambda value: not value,
        "logs the memory of batches, whose sizes are private: leave it at True",
    ),
    _Refusal("debug", bool, "prints activations of records: leave it out"),
    _Refusal(
        "optim",
        lambda value: any(part in str(getattr(value, "value", value)) for part in _OWN_UPDATES),
        "updates weights before gradients are released: use adamw_torch, say",
    ),
)


def refuse_arguments(trainer: Trainer) -> None:
    """Refuse arguments, in one line with the remedy.

    Args:
        trainer: The trainer, whose records are not read.

    Raises:
        ConfigurationError: Names the argument.
    """
    args: Any = trainer.args
    for refusal in _REFUSED:
        value = getattr(args, refusal.name, None)
        if value is not None and refusal.is_set(value):
            raise ConfigurationError(f"{refusal.name}={getattr(value, 'value', value)!s} {refusal.reason}.")
    if trainer.accelerator.mixed_precision not in ("no", "bf16"):
        raise ConfigurationError(
            f"mixed precision {trainer.accelerator.mixed_precision} scales the loss, so that clipping is wrong: use "
            "bf16=True."
        )
    if trainer.compute_loss_func is not None:
        raise ConfigurationError(f"compute_loss_func gets the number of labels in a batch, of all records: {_LOSS}.")
    if os.environ.get("WANDB_WATCH") in ("gradients", "all") and "wandb" in args.report_to:
        raise ConfigurationError("WANDB_WATCH has wandb log gradients of records: unset it.")
    if args.push_to_hub and args.hub_strategy != "end":
        raise ConfigurationError(
            f"hub_strategy={args.hub_strategy.value} uploads files of an unfinished training, among them keys of its "
            'noise: set hub_strategy="end".'
        )
    if trainer.train_dataset is not None:
        count_of(trainer.train_dataset)
        _refuse_choices_by_training_records(trainer)


def _refuse_choices_by_training_records(trainer: Trainer) -> None:
    """Refuse a metric that decides, where records that it is computed of are trained on."""
    args: Any = trainer.args
    schedule = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    if args.metric_for_best_model is None and schedule not in _FOLLOWERS:
        return
    held_out = trainer.eval_dataset
    for dataset in held_out.values() if isinstance(held_out, dict) else [held_out]:
        shared = 0 if dataset is None else shared_records(dataset, trainer.train_dataset)
        if shared:
            raise ConfigurationError(
                f"a metric of eval_dataset decides (metric_for_best_model, lr_scheduler_type), but {shared} of its "
                "records are training records, so the metric is not private: hold records out, or decide in advance."
            )
