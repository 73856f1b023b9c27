"""Settings of the trainer that would break the guarantee silently, refused before training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from dpbench.data.lots import LotLoader, Lots
from dpbench.data.records import count_of
from dpbench.errors import ConfigurationError, UnsupportedModuleError
from dpbench.privacy.plan import ReleasePlan
from dpbench.privacy.sampling import Sampling
from dpbench.strategies.attached import attached
from dpbench.strategies.packages import classes, overrides

PRIVATE_PAST = (
    "the checkpoint was made by a private strategy: going on without privacy would void its epsilon. Start a new run."
)
_PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")


def refuse_trainer_settings(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Refuse what Lightning would do to gradients behind the mechanism's back.

    Raises:
        ConfigurationError: Names the setting and the remedy.
    """
    if trainer.accumulate_grad_batches != 1:
        raise ConfigurationError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} rescales the loss, so that clipping is wrong: "
            "leave it at 1 and set max_physical_batch_size to train large lots in bounded memory."
        )
    if trainer.gradient_clip_val:
        raise ConfigurationError(
            "gradient_clip_val clips the released gradient, not each record: leave it out and set max_grad_norm."
        )
    refuse_precision(trainer.precision)
    if not _is_supported(trainer.strategy):
        raise ConfigurationError(
            f"{type(trainer.strategy).__name__} is not supported: per-record gradients need whole parameters on each "
            "device; use a single device or strategy=ddp."
        )
    if overrides(pl_module, "backward"):
        raise ConfigurationError(f"{type(pl_module).__name__} overrides backward, which the private strategy replaces.")
    if overrides(pl_module, "configure_gradient_clipping"):
        raise ConfigurationError(
            f"{type(pl_module).__name__} overrides configure_gradient_clipping: the strategy clips; remove it."
        )


def ddp_strategies() -> tuple[type, ...]:
    """Lightning's strategies that copy the model to each process."""
    return classes("DDPStrategy", "strategies")


def _is_supported(strategy: object) -> bool:
    known = classes("SingleDeviceStrategy", "strategies") + ddp_strategies()
    own_backward = classes("DeepSpeedStrategy", "strategies")  # though derived from DDPStrategy
    return isinstance(strategy, known) and not isinstance(strategy, own_backward)


def refuse_in_manual_optimization(pl_module: pl.LightningModule, **options: object) -> None:
    """Raise ConfigurationError for options that need automatic optimization, where the module has none."""
    for name, value in options.items():
        if value and not pl_module.automatic_optimization:
            raise ConfigurationError(
                f"{name} needs automatic optimization: in manual optimization training_step makes the update "
                "itself. Leave it out, or use automatic optimization."
            )


def refuse_precision(precision: str | int | None) -> None:
    """Raise ConfigurationError for float16, whose loss scaling would make clipping wrong."""
    if str(precision) not in (*_PRECISIONS, "None", "32", "64", "bf16"):
        raise ConfigurationError(
            f"precision={precision} scales the loss, so that clipping is wrong: use {' or '.join(_PRECISIONS)}."
        )


def refuse_optimizer(optimizer: Optimizer, parameters: Sequence[Tensor], names: list[str]) -> None:
    """Raise ConfigurationError for an optimizer that misses a trainable parameter."""
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missed = [name for name, p in zip(names, parameters, strict=True) if id(p) not in updated]
    if missed:
        raise ConfigurationError(
            f"the optimizer does not update {', '.join(missed)}: pass all trainable parameters, or freeze these "
            "(requires_grad=False before training), else they spend budget for nothing."
        )


def known_lots(trainer: pl.Trainer) -> LotLoader:
    """The training loader, if its sampling is one that the ledger knows.

    Raises:
        ConfigurationError: It is another loader, several loaders, or samples in a way that no accountant covers.
    """
    loader: Any = trainer.train_dataloader
    if not isinstance(loader, LotLoader) or loader.batch_sampler is not loader.lots:
        raise ConfigurationError(
            f"the sampling of the training data loader ({type(loader).__name__}) is unknown, so no epsilon holds for "
            "it: wrap it with dpbench.LotLoader.from_dataloader(loader) for Poisson lots, and with several processes "
            "pass use_distributed_sampler=False to the trainer."
        )
    if type(loader.lots) is not Lots or set(vars(loader.lots)) & set(dir(Lots)):
        raise ConfigurationError(
            "the lots of the training data loader are drawn by code that is not dpbench's (a subclass of Lots, or a "
            "replaced method), so no epsilon holds for them: use LotLoader.poisson or LotLoader.from_dataloader."
        )
    if count_of(loader.dataset) != loader.lots.sampling.population:
        raise ConfigurationError(
            f"the data set has {count_of(loader.dataset)} records, but had {loader.lots.sampling.population} when its "
            "LotLoader was made: make a new one."
        )
    refuse_uncovered(loader.lots.sampling)
    if isinstance(trainer.limit_train_batches, int) or trainer.limit_train_batches != 1.0 or trainer.overfit_batches:  # type: ignore[attr-defined]
        raise ConfigurationError("limit_train_batches and overfit_batches drop lots: set max_steps instead.")
    return loader


def same_loader(trainer: pl.Trainer, loader: LotLoader | None) -> LotLoader:
    """The loader of the run, or a ConfigurationError if it was replaced in mid-run."""
    if attached(loader) is not trainer.train_dataloader:
        raise ConfigurationError(
            "the training loader was replaced in mid-run (reload_dataloaders_every_n_epochs?): its lots are not "
            "those that the ledger counts on; use one LotLoader throughout."
        )
    return attached(loader)


def refuse_uncovered(sampling: Sampling) -> None:
    """Raise ConfigurationError for sampling without a neighbouring relation."""
    if sampling.record_changes == 0:
        raise ConfigurationError(
            f"no accountant covers {sampling.kind!r} sampling: draw lots with data.sampling=poisson (or fixed_size)."
        )


State = dict[str, tuple[Tensor, int]]


def _changed(before: State, after: State) -> list[str]:
    return [k for k, (x, version) in after.items() if before.get(k, (None,))[0] is not x or before[k][1] != version]


def refuse_early_gradients(before: State, after: State) -> None:
    """Raise UnsupportedModuleError where networks that are not private got gradients before the release."""
    early = _changed(before, after)
    if early:
        raise UnsupportedModuleError(
            f"gradients of {', '.join(early)} were computed before the release of the lot, perhaps from its records: "
            "call backward for other networks after the private optimizer's step."
        )


def count_records(batch: Any) -> int:
    """Number of records in a batch: the common first dimension of its tensors.

    Raises:
        ConfigurationError: There are no tensors, or they disagree.
    """
    sizes = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) != 1:
        raise ConfigurationError(
            f"the tensors of a batch must agree on dimension 0, the records; found {sorted(sizes) or 'no tensors'}."
        )
    return int(sizes.pop())


def refuse_other_rows(rows: int, records: int) -> None:
    """Raise ConfigurationError where a batch has other rows than its lot has records."""
    if rows != records:
        raise ConfigurationError(
            f"the batch has {rows} rows, its lot has {records} records: each row is clipped on its own, so that a "
            "record with several rows (augmented views, windows of a text) would count several times, and fewer rows "
            "cannot be told apart. Let the collate_fn make one row for each record, or say which rows belong together: "
            "LotLoader(..., record_of_row=...)."
        )


def refuse_skipped_lot(unreleased: bool) -> None:
    """Raise ConfigurationError where a lot was opened and never released."""
    if unreleased:
        raise ConfigurationError(
            "a lot was drawn, and never released (on_train_batch_start returned -1?): whether a lot is trained on must "
            "not depend on its records, so each one is released, also an empty one. To stop early, set "
            "trainer.should_stop from what is not private."
        )


def warn_of_delta(delta: float, population: int) -> None:
    """Warn of a δ that is too large to mean anything."""
    if delta >= 1 / population:
        pl.utilities.rank_zero_warn(
            f"delta={delta} is not below 1/{population} (the number of records): such a delta allows to publish one "
            "record outright; choose a smaller one."
        )


def warn_of_split(plan: ReleasePlan) -> None:
    """Warn where statistics leave the gradients much more noise than was asked for."""
    if plan.gradient_multiplier > 1.5 * plan.noise_multiplier:
        pl.utilities.rank_zero_warn(
            f"the statistics beside the gradient cost so much that its own noise multiplier is "
            f"{plan.gradient_multiplier:.3g} instead of {plan.noise_multiplier:.3g}: give the statistics more noise "
            "(count_noise_std, norm_noise_multiplier), or clip fewer groups."
        )


def refuse_second_release(released: bool) -> None:
    """Raise ConfigurationError if this lot was released already."""
    if released:
        raise ConfigurationError(
            "two optimizer steps were made on one lot, but the accounting holds for one: draw a new lot for each "
            "(optimizers that evaluate a closure several times, like LBFGS, are not supported)."
        )


def refuse_second_backward(called: bool) -> None:
    """Raise ConfigurationError if the records of this lot were clipped already."""
    if called:
        raise ConfigurationError(
            "backward was called twice for one lot, so that a record could count twice: add the losses up and call "
            "it once."
        )


def refuse_missing_release(released: bool) -> None:
    """Raise ConfigurationError at the end of a lot that was not released."""
    if not released:
        raise ConfigurationError(
            "no private update was made for this lot: call self.manual_backward(loss) and self.optimizers().step() "
            "exactly once for each lot, also an empty one (steps past Lightning's optimizer are not private)."
        )


def refuse_missing_loss(given: bool) -> None:
    """Raise ConfigurationError if a lot that is not empty had no loss."""
    if not given:
        raise ConfigurationError(
            "training_step gave no loss for a lot that is not empty: skipping lots by their contents is not private. "
            "Return the loss always."
        )


def refuse_early_step(unreleased: bool) -> None:
    """Raise ConfigurationError where an optimizer has stepped before the lot was released."""
    if unreleased:
        raise ConfigurationError(
            "an optimizer has stepped before the release of the lot: the first manual_backward of a lot is that of the "
            "private network and the first step its optimizer's, self.optimizers()….step() (past Lightning, as in "
            "optimizer.optimizer.step(), nothing is made private); update other networks after it. A subclass of the "
            "strategy that overrides a hook must call super()'s."
        )


def refuse_early_training(module: object) -> None:
    """Raise ConfigurationError where a network that is not private prepares a step before the lot was released."""
    if torch.is_grad_enabled():
        raise ConfigurationError(
            f"{type(module).__name__}, part of a network that is not private, ran with gradients before the release of "
            "the lot: its images would be as many as the records, which is private, and perhaps of their classes. Make "
            "images for the private step under torch.no_grad(), and train on new ones after the release, of a fixed "
            "number and of uniform classes."
        )


def refuse_unknown_past(private_past: bool | None, private: bool) -> None:
    """Raise ConfigurationError where a run would go on from a checkpoint of the other kind.

    Args:
        private_past: Whether a private strategy made the checkpoint; None: no strategy of this project did.
        private: Whether this one is private.
    """
    if private_past and not private:
        raise ConfigurationError(PRIVATE_PAST)
    if private and not private_past:
        raise ConfigurationError(
            "the checkpoint (or what this trainer trained before) was not made by a private strategy, so that its "
            "weights depend on the data in a way that no ledger knows: start a new run with a new trainer (to begin "
            "from public weights, load them into the module)."
        )


def seed_device(seed: int, device: torch.device) -> None:
    """`torch.manual_seed` for the CPU and the device of the model only.

    On machines without a GPU it would note a stack trace for the day that one is initialised: a millisecond a step, and
    a list that grows for ever.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)
