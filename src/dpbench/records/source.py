"""The seam between a training loop and its releases: how a lot becomes the vectors that are clipped and added up.

What a record is (an example, a microbatch, a user) is known here and nowhere else. A source hands every piece of a lot
to `Releases.accumulate`; clipping, noise, ledger and budget know nothing of where the pieces come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import pytorch_lightning as pl
import torch
from torch.optim import Optimizer

from dpbench.data.lots import LotLoader
from dpbench.errors import ConfigurationError
from dpbench.privacy.events import Summands
from dpbench.privacy.gradients.parameter import ParameterGradients
from dpbench.privacy.mechanism.mechanism import Merge
from dpbench.privacy.releases import Releases, Trained

T = TypeVar("T")


class Attached(NamedTuple):
    """Parameters of a module that a source has found to train privately, with their optimizer.

    Attributes:
        trained: Parameters to which the released gradients go.
        optimizer: Updates them.
    """

    trained: Trained
    optimizer: Optimizer


class Piece(NamedTuple):
    """Per-record gradients of some rows of a batch.

    Attributes:
        gradients: Of each parameter.
        rows: Their number.
        merge: How rows become records; None: each is one.
    """

    gradients: Sequence[ParameterGradients]
    rows: int
    merge: Merge | None


@runtime_checkable
class RecordSource(Protocol):
    """Turns the lots of a training into per-record gradients.

    The strategy calls `check`, `attach` and `begin` once, then for each lot `open_lot` and `close_lot`, and `detach` at
    the end (also after an error, perhaps without `attach`). Between `open_lot` and `close_lot` Lightning calls the
    module's `training_step` and `backward`, which the source has replaced by its own: these call
    `releases.accumulate` for each piece of the lot.

    A source answers for what makes a release private, since nothing after it can see:

    * each unit of the sampling (each item of the data set) goes into at most one summand of a lot, and is accumulated
      once; all of the lot's are, whatever they hold, and an empty lot accumulates nothing;
    * a record's vector is a function of that record, of released weights and of random numbers alone;
    * nothing of a lot stays in the module: no statistics, no `p.grad`, no random state.

    `records.examples` shows how to check these where code of users computes the vectors.

    Attributes:
        summands: What the released sums are over, against the unit of the sampling.
        unit: What the items of the data set have to be, such as "user"; None: whatever the sampling says.
    """

    summands: Summands
    unit: str | None

    def check(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse settings under which records are not what they should be.

        Raises:
            ConfigurationError: Names the setting and the remedy.
        """

    def attach(self, trainer: pl.Trainer, pl_module: pl.LightningModule, releases: Releases) -> Attached:
        """Take over the module's training step and backward pass."""

    def begin(self, loader: LotLoader) -> None:
        """Take note of how lots are drawn, before the first one is."""

    def open_lot(self, batch: Any) -> None:
        """Take note of a lot that was drawn, whose batch the module is about to see."""

    def close_lot(self) -> None:
        """Finish a lot of which everything was accumulated; its release follows.

        Raises:
            ConfigurationError: Something of the lot is missing.
        """

    def finish_epoch(self) -> None:
        """Refuse a lot that was opened and never released."""

    def on_noise(self, generator: torch.Generator) -> Piece:
        """Gradients of a step on random noise, for first bounds that touch no private data.

        Raises:
            ConfigurationError: The source knows no such step.
        """

    def detach(self) -> None:
        """Give the module back as it was."""


def attached(part: T | None) -> T:
    """Unwrap what an earlier hook should have set.

    Raises:
        ConfigurationError: That hook did not run.
    """
    if part is None:
        raise ConfigurationError(
            "a hook of the private strategy did not run, so that training would go on without privacy: a subclass that "
            "overrides a hook must call super()'s, and nothing else may replace hooks."
        )
    return part
