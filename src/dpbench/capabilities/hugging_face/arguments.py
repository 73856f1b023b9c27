"""Arguments of a Hugging Face Trainer under which private training would be wrong, or would tell of its records."""

from __future__ import annotations

import os
from typing import Any

from transformers import Trainer

from dpbench.data.records import count_of, shared_records
from dpbench.errors import ConfigurationError

_MEMORY = (
    "per_device_train_batch_size is the expected batch size, and max_physical_batch_size=ROWS of the strategy bounds "
    "memory"
)
_LOSS = "pass loss=, a function of the model and a batch that returns the mean of its records' losses"
_ONE_PROCESS = "shards the model or its batches: train in one process, or with a Lightning Trainer"
_REFUSED = {
    "gradient_accumulation_steps": f"updates by several batches: {_MEMORY}",
    "auto_find_batch_size": f"follows the memory that records take: {_MEMORY}",
    "fp16": "scales the loss, so that clipping is wrong: use bf16=True",
    "train_sampling_strategy": "draws batches otherwise than epsilon is computed for, Poisson sampling: leave it out",
    "group_by_length": "draws batches by the lengths of records: leave it out",
    "label_smoothing_factor": f"averages over the labels of all records: {_LOSS}",
    "neftune_noise_alpha": "adds noise that depends on the longest record of a batch: leave it out",
    "use_liger_kernel": "replaces layers by kernels without per-record gradients: leave it out",
    "torch_compile": "hides the layers from the engine: leave it out",
    "world_size": _ONE_PROCESS,
    "deepspeed": _ONE_PROCESS,
    "fsdp": _ONE_PROCESS,
    "parallelism_config": _ONE_PROCESS,
    "n_gpu": "splits batches among GPUs: set CUDA_VISIBLE_DEVICES=0",
    "load_best_model_at_end": "chooses weights by a metric that no epsilon covers: choose in advance",
    "enable_jit_checkpoint": "saves between a release and its update: leave it out, and set save_steps",
    "include_num_input_tokens_seen": "logs the sizes of batches, which are private: leave it out",
    "skip_memory_metrics": "logs the memory of batches, whose sizes are private: leave it at True",
    "debug": "prints activations of records: leave it out",
}
"""Name of an argument → reason and remedy where it is set."""
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "gradient_accumulation_steps": (1,),
    "world_size": (1,),
    "n_gpu": (0, 1),
    "train_sampling_strategy": ("random",),
    "include_num_input_tokens_seen": ("no", False),
    "skip_memory_metrics": (True,),
}
"""Values that count as not set, where these are not the empty ones."""


def refuse_arguments(trainer: Trainer) -> None:
    """Refuse arguments, in one line with the remedy.

    Args:
        trainer: The trainer, whose records are not read.

    Raises:
        ConfigurationError: Names the argument.
    """
    args: Any = trainer.args
    for name, reason in _REFUSED.items():
        value = getattr(args, name, None)
        if value is not None and (value not in _ALLOWED[name] if name in _ALLOWED else value):
            raise ConfigurationError(f"{name}={value} {reason}.")
    if "lomo" in args.optim or "layerwise" in args.optim:
        raise ConfigurationError(
            f"optim={args.optim.value} updates weights before gradients are released: use adamw_torch, say."
        )
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
    if args.metric_for_best_model is None and args.lr_scheduler_type not in ("reduce_lr_on_plateau", "greedy"):
        return
    held_out = trainer.eval_dataset
    for dataset in held_out.values() if isinstance(held_out, dict) else [held_out]:
        shared = 0 if dataset is None else shared_records(dataset, trainer.train_dataset)
        if shared:
            raise ConfigurationError(
                f"a metric of eval_dataset decides (metric_for_best_model, lr_scheduler_type), but {shared} of its "
                "records are training records, so the metric is not private: hold records out, or decide in advance."
            )
