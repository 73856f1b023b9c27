"""Settings of the trainer that would break the guarantee silently, refused before training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from dpbench.data.lots import LotLoader, Lots
from dpbench.data.records import count_of
from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.composition import doubt_about_delta
from dpbench.privacy.mechanism.plan import ReleasePlan
from dpbench.privacy.randomness import seed_global_generators
from dpbench.privacy.sampling import Sampling
from dpbench.records.packages import classes, ddp_strategies, overrides
from dpbench.records.source import attached

PRIVATE_PAST = (
    "the checkpoint was made by a private strategy: going on without privacy would void its epsilon. Start a new run."
)
OTHERS_TOOK_LOTS = (
    "somebody else took lots of this LotLoader while it trains: measure on another DataLoader of the data set (one for "
    "training accuracy, say), since lots that are drawn and left out are not those that the ledger counts on."
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
            "leave it at 1. Large lots need no more memory than small ones where max_physical_batch_size is set, and "
            "where records are users, who are trained one by one."
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


def _is_supported(strategy: object) -> bool:
    known = classes("SingleDeviceStrategy", "strategies") + ddp_strategies()
    own_backward = classes("DeepSpeedStrategy", "strategies")  # though derived from DDPStrategy
    return isinstance(strategy, known) and not isinstance(strategy, own_backward)


def refuse_precision(precision: str | int | None) -> None:
    """Raise ConfigurationError for float16, whose loss scaling would make clipping wrong."""
    if str(precision) not in (*_PRECISIONS, "None", "32", "64", "bf16"):
        raise ConfigurationError(
            f"precision={precision} scales the loss, so that clipping is wrong: use {' or '.join(_PRECISIONS)}."
        )


def refuse_half_parameters(parameters: Sequence[Tensor]) -> None:
    """Raise ConfigurationError for trained parameters in float16, however they came to be so."""
    if any(parameter.dtype == torch.float16 for parameter in parameters):
        raise ConfigurationError(
            "trained parameters are in float16, where gradients and their squares overflow or vanish, so that clipping "
            f"is wrong: leave out half() and use precision={' or '.join(_PRECISIONS)} (frozen parameters may be in "
            "float16)."
        )


def clear_gradients(parameters: Sequence[Tensor]) -> None:
    """Begin a lot, of which hooks see nothing before its release.

    Raises:
        ConfigurationError: A hook has converted the parameters to float16.
    """
    refuse_half_parameters(parameters)
    for parameter in parameters:
        parameter.grad = None


def refuse_optimizer(optimizer: Optimizer, parameters: Sequence[Tensor], names: Sequence[str]) -> None:
    """Raise ConfigurationError for an optimizer that misses a trainable parameter, or has one that is not released."""
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    released = {id(p) for p in parameters}
    others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in released]
    if any(p.requires_grad for p in others):
        raise ConfigurationError(
            "the optimizer updates trainable parameters to which nothing is released: freeze them "
            "(requires_grad=False before training), or leave them out of it."
        )
    missed = [name for name, p in zip(names, parameters, strict=True) if id(p) not in updated]
    if missed:
        raise ConfigurationError(
            f"the optimizer does not update {', '.join(missed)}: pass all trainable parameters, or freeze these "
            "(requires_grad=False before training), else they spend budget for nothing."
        )


def require_lot_loader(trainer: pl.Trainer) -> LotLoader:
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
    if type(loader).__iter__ is not LotLoader.__iter__ or "__iter__" in vars(loader):
        raise ConfigurationError(
            f"{type(loader).__name__} hands out lots by an __iter__ of its own, which nobody checks: a lot must reach "
            "the training as it was drawn. Transform records in the data set or in a collate_fn."
        )
    if count_of(loader.dataset) != loader.lots.sampling.population:
        raise ConfigurationError(
            f"the data set has {count_of(loader.dataset)} records, but had {loader.lots.sampling.population} when its "
            "LotLoader was made: make a new one."
        )
    refuse_uncovered(loader.lots.sampling)
    if isinstance(trainer.limit_train_batches, int) or trainer.limit_train_batches != 1.0 or trainer.overfit_batches:  # type: ignore[attr-defined]
        raise ConfigurationError(
            "limit_train_batches, overfit_batches and fast_dev_run drop lots: set max_steps instead."
        )
    return loader


def require_same_loader(trainer: pl.Trainer, loader: LotLoader | None, releases: int) -> LotLoader:
    """The loader of the run, or a ConfigurationError if it was replaced in mid-run, or others took lots of it."""
    if attached(loader) is not trainer.train_dataloader:
        raise ConfigurationError(
            "the training loader was replaced in mid-run (reload_dataloaders_every_n_epochs?): its lots are not "
            "those that the ledger counts on; use one LotLoader throughout."
        )
    if attached(loader).lots.position != releases + 1:
        raise ConfigurationError(OTHERS_TOOK_LOTS)
    return attached(loader)


def refuse_uncovered(sampling: Sampling) -> None:
    """Raise ConfigurationError for sampling without a neighboring relation."""
    if sampling.record_changes == 0:
        raise ConfigurationError(
            f"no accountant covers {sampling.kind!r} sampling: draw lots with data.sampling=poisson (or fixed_size)."
        )


def refuse_other_unit(unit: str | None, sampling: Sampling) -> None:
    """Raise ConfigurationError where records are not what lots draw.

    Args:
        unit: What a source makes records of; None: whatever is drawn.
        sampling: How lots are drawn.
    """
    if unit not in (None, sampling.unit):
        raise ConfigurationError(
            f"a record is a {unit}, and the lots draw {sampling.unit}s: take a data set with one item for each {unit}, "
            f"and lots with unit={unit!r} (of users: UserDataset(examples, users), or data=mnist_writers and the like "
            "with data.unit=user); or leave out records= (records=examples), and what is drawn is a record."
        )


def warn_of_delta(delta: float, population: int, unit: str) -> None:
    """Warn of a δ that is too large to mean anything."""
    if (doubt := doubt_about_delta(delta, population, unit)) is not None:
        pl.utilities.rank_zero_warn(doubt)


def warn_of_split(plan: ReleasePlan) -> None:
    """Warn where statistics leave the gradients much more noise than was asked for."""
    if plan.gradient_multiplier > 1.5 * plan.noise_multiplier:
        pl.utilities.rank_zero_warn(
            f"the statistics beside the gradient cost so much that its own noise multiplier is "
            f"{plan.gradient_multiplier:.3g} instead of {plan.noise_multiplier:.3g}: give the statistics more noise "
            "(count_noise_std, norm_noise_multiplier), or clip fewer groups."
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
    """Put all random numbers that a step may take into states of one seed, of which all 256 bits count."""
    seed_global_generators((seed,), device)


def stop_gradient_averaging(trainer: pl.Trainer) -> None:
    """Keep DDP from averaging gradients among processes: sums are added when they are released."""
    if isinstance(trainer.strategy, ddp_strategies()):
        assert trainer.strategy.model is not None
        trainer.strategy.model.require_backward_grad_sync = False  # type: ignore[assignment]
