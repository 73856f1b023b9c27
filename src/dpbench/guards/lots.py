"""Batches reach the training as they were drawn: every one of them, once, by a sampling that an accountant knows."""

from __future__ import annotations

from typing import Any

from dpbench.data.loader import PrivateDataLoader
from dpbench.data.records import count_of
from dpbench.data.sampler import PrivateBatchSampler
from dpbench.errors import ConfigurationError
from dpbench.guards.guard import Guard
from dpbench.privacy.sampling import Sampling

OTHERS_TOOK_LOTS = (
    "this PrivateDataLoader was iterated elsewhere during training: evaluate on another DataLoader of the data set "
    "(for example for training accuracy), since batches that are drawn but not trained on invalidate the accounting."
)


class DrawnLots(Guard):
    """Each batch of the training is the one that the ledger counts on."""

    name = "batches"
    prevents = "batches differ from those in the ledger: drawn by other code, skipped, or consumed elsewhere"

    def on_begin(self) -> None:
        """Refuse other loaders, and batches of something else than records are made of."""
        loader = require_lot_loader(self.session.loader)
        refuse_other_unit(self.session.source.unit, loader.lots.sampling)

    def on_open(self, batch: Any) -> None:
        """Refuse batches of which others were drawn in between."""
        if self.session.loader.lots.position != self.session.releases.num_releases + 1:
            raise ConfigurationError(OTHERS_TOOK_LOTS)


def require_lot_loader(loader: object) -> PrivateDataLoader:
    """A training loader, if its sampling is one that the ledger knows.

    Raises:
        ConfigurationError: It is another loader, several loaders, or samples in a way that no accountant covers.
    """
    if isinstance(loader, dict | list | tuple):
        raise ConfigurationError(
            f"the training data consist of several loaders ({type(loader).__name__}): train on the PrivateDataLoader "
            "alone, and read a public loader in an optimizer whose step() adds the gradient of the public loss to the "
            "released one (docs/module.md, Public data beside the private batches)."
        )
    if not isinstance(loader, PrivateDataLoader) or loader.batch_sampler is not loader.lots:
        raise ConfigurationError(
            f"the sampling of the training data loader ({type(loader).__name__}) is unknown, so no epsilon holds for "
            "it: wrap it with dpbench.PrivateDataLoader.from_dataloader(loader) for Poisson sampling, and with several "
            "processes pass use_distributed_sampler=False to the trainer."
        )
    replaced = set(vars(loader.lots)) & set(dir(PrivateBatchSampler))
    if type(loader.lots) is not PrivateBatchSampler or replaced:
        raise ConfigurationError(
            "the batches of the training data loader are drawn by code that is not dpbench's (a subclass of "
            "PrivateBatchSampler, or a replaced method), so no epsilon holds for them: use PrivateDataLoader.poisson "
            "or PrivateDataLoader.from_dataloader."
        )
    if type(loader).__iter__ is not PrivateDataLoader.__iter__:
        raise ConfigurationError(
            f"{type(loader).__name__} overrides __iter__, which cannot be checked: a batch must reach the training as "
            "it was drawn. Transform records in the data set or in a collate_fn."
        )
    if count_of(loader.dataset) != loader.lots.sampling.population:
        raise ConfigurationError(
            f"the data set has {count_of(loader.dataset)} records, but had {loader.lots.sampling.population} when its "
            "PrivateDataLoader was made: make a new one."
        )
    refuse_uncovered(loader.lots.sampling)
    return loader


def refuse_uncovered(sampling: Sampling) -> None:
    """Raise ConfigurationError for sampling without a neighboring relation."""
    if sampling.record_changes == 0:
        raise ConfigurationError(
            f"no accountant covers {sampling.kind!r} sampling: draw batches with data.sampling=poisson (or fixed_size)."
        )


def refuse_other_unit(unit: str | None, sampling: Sampling) -> None:
    """Raise ConfigurationError if records are of another unit than the one that batches draw.

    Args:
        unit: Unit of the source's records; None: the one that is drawn.
        sampling: How batches are drawn.
    """
    if unit not in (None, sampling.unit):
        raise ConfigurationError(
            f"a record is a {unit}, but batches are drawn from {sampling.unit}s: use a data set with one item per "
            f"{unit} and a loader with unit={unit!r} (on the command line data by {unit}s, with data.unit={unit}); or "
            "leave out records= (records=examples), so that each item drawn is a record."
        )
