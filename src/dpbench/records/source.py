"""The seam between a training and its releases: how a batch becomes the vectors that are clipped and added up.

The kind of record (an example, a microbatch, a user) is known here and nowhere else. A source hands every piece of a
batch to `ReleaseEngine.accumulate`; clipping, noise, ledger and budget do not know where the pieces come from. The
driver of the training is not known here, nor are the checks of a batch (`guards`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpbench.data.collation import RecordOfRow
from dpbench.data.loader import PrivateDataLoader
from dpbench.errors import ConfigurationError
from dpbench.privacy.events import Summands
from dpbench.privacy.gradients.engine import LossReduction
from dpbench.privacy.gradients.method import GradientMethod
from dpbench.privacy.gradients.parameter import ParameterGradients
from dpbench.privacy.mechanism.mechanism import Merge
from dpbench.privacy.processes import Processes
from dpbench.privacy.releases import ReleaseEngine, TrainableParameters
from dpbench.records.training import Training, TrainingStep

SECOND_RELEASE = (
    "the optimizer stepped twice on one batch, but only one release was accounted for: draw a new batch for each step "
    "(optimizers that evaluate a closure several times, like LBFGS, are not supported)."
)


class Piece(NamedTuple):
    """Per-record gradients of some rows of a batch.

    Attributes:
        gradients: Gradients of each parameter.
        rows: Their number.
        merge: How rows become records; None: each is one.
    """

    gradients: Sequence[ParameterGradients]
    rows: int
    merge: Merge | None


class Lot(NamedTuple):
    """Facts of a batch of examples, for code that runs its step again.

    Attributes:
        release: Its number.
        record_of: Record (or microbatch) of each row, ascending; None where each row is a record.
        row_index: Name of the entry, or function, that gives `record_of` of a batch; None: there is none.
        limit: Most rows that fit into memory, or None.
    """

    release: int
    record_of: NDArray[np.int64] | None
    row_index: RecordOfRow | None
    limit: int | None


@runtime_checkable
class RecordSource(Protocol):
    """Turns the batches of a training into per-record gradients.

    The session calls `check`, `attach`, `step` and `begin` once, then for each batch `open_lot` and `close_lot`, and
    `detach` at the end (also after an error, perhaps without `attach`). Between `open_lot` and `close_lot` the driver
    of the training calls the result of `step`, and `backward`, in the places of the module's own: these call
    `releases.accumulate` for each piece of the batch.

    A source is responsible for two properties of a private release, which nothing after it can check:

    * each unit of the sampling (each item of the data set) goes into at most one summand of a batch, and is accumulated
      once; all units of the batch are, whatever they hold, and an empty batch accumulates nothing;
    * a record's vector is a function of that record, of released weights and of random numbers alone.

    For all sources it is checked that nothing of a batch stays in the module (no statistics, no `p.grad`, no random
    state). `records.examples` shows how to compute the vectors.

    Attributes:
        summands: Units over which the released sums go, against the unit of the sampling.
        unit: Required unit of the data set's items, such as "user"; None: that of the sampling.
    """

    summands: Summands
    unit: str | None

    def check(self, training: Training) -> None:
        """Refuse settings that do not go with its records; there are no optimizers yet.

        Raises:
            ConfigurationError: Names the setting and the remedy.
        """

    def attach(self, training: Training, part: nn.Module, releases: ReleaseEngine) -> TrainableParameters:
        """Take note of the training.

        Args:
            training: Has the module.
            part: The module, or the part of it that sees private records.
            releases: Release engine that takes the gradients.

        Returns:
            The parameters that are trained privately, and their names.
        """

    def step(self, own: TrainingStep) -> TrainingStep:
        """Make the function that is called in place of the module's own training step."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run in place of the module's own backward pass."""

    def begin(self, loader: PrivateDataLoader) -> None:
        """Take note of how batches are drawn, before the first one is."""

    def open_lot(self, batch: Any) -> None:
        """Begin a batch that was drawn; the module is about to see it."""

    def close_lot(self) -> None:
        """Finish a batch of which everything was accumulated; its release follows.

        Raises:
            ConfigurationError: Something of the batch is missing.
        """

    def on_noise(self, generator: torch.Generator) -> Piece:
        """Gradients of a step on random noise, for first bounds that touch no private data.

        Raises:
            ConfigurationError: The source knows no such step.
        """

    def detach(self) -> None:
        """Let go of the module."""


@runtime_checkable
class RecordsInTurn(Protocol):
    """A source that trains on one record after the other, and tells itself of those that have diverged.

    Random numbers of a record are its own, whichever process trains on it.

    Attributes:
        in_turn: True.
    """

    in_turn: bool


@runtime_checkable
class PerRecordStep(Protocol):
    """A source with gradients of the module's own step as vectors; the step can be run again on parts of a batch."""

    loss_reduction: LossReduction
    engine: GradientMethod | None

    def lot(self) -> Lot:
        """Facts of the open batch."""


@runtime_checkable
class ChosenGradients(Protocol):
    """A source that computes gradients by another method where the engine does not know a network.

    Attributes:
        engine: The method that is used.
        method: Its name. With `is_chosen` it is set before `attach` where a training goes on.
        is_chosen: True if that is the method for all of the training.
        gradients: Name of the method that was asked for.
        limit: Reason why the engine could not be used for a batch since the method was chosen (that batch was run
            record by record); None: there was none.
    """

    engine: GradientMethod | None
    method: str | None
    is_chosen: bool
    gradients: str
    limit: str | None

    @property
    def next_method(self) -> str | None:
        """Name of the method of the next batch, also in a training that goes on from a checkpoint."""

    def watched(self, own: TrainingStep) -> TrainingStep:
        """Wrap the module's own step, to be judged in each batch of which the records are taken together."""

    def hide(self) -> None:
        """Have hooks before the backward pass see nothing that the step has made of values that it read."""

    def lot(self) -> Lot:
        """Facts of the open batch."""

    def end_lot(self) -> None:
        """Take note that the update of a batch is made."""

    def use(self, name: str, reason: str | None = None) -> None:
        """Compute gradients by the method of that name from now on, and say why."""


@runtime_checkable
class InPieces(Protocol):
    """A source that runs batches in pieces."""

    @property
    def physical_batch_size(self) -> int | None:
        """Most rows of a piece, as it was given; None: it was not."""

    def keep_sizes(self, folder: Path, processes: Processes, goes_on: bool) -> None:
        """Keep sizes that were found during the training, and are as secret as the records, in a folder.

        Args:
            folder: The run's folder.
            processes: All processes of the training.
            goes_on: True if the training continues a run of that folder.
        """


@runtime_checkable
class RepeatableSums(Protocol):
    """A source that makes the sums of a batch by the same operations as those of any other batch of its size.

    Attributes:
        obstacle: Why it never does; None: it does.
        is_settled: True if it does from the open batch on: the first one may be looked at more closely.
        padded_rows: Number of rows to which batches are padded, except a few large ones; None: results differ with the
            size.
    """

    @property
    def obstacle(self) -> str | None:
        """Why it never does; None: it does."""

    @property
    def is_settled(self) -> bool:
        """Return whether it does from the open batch on."""

    @property
    def padded_rows(self) -> int | None:
        """Rows that batches of all sizes, but for a few large ones, are padded to."""

    def settle(self) -> None:
        """Take note that an executor has looked at the open batch as closely as the first one has to be."""

    def rewind(self, padded_rows: int | None = None, counted: Tensor | None = None) -> None:
        """Let the open batch begin again: nothing was accumulated.

        Args:
            padded_rows: Number of rows that its step will be given; None: those of the batch.
            counted: Number of records among these, on the device, shape (); None: all rows are records.
        """

    def complete(self, rows: int) -> None:
        """Take note that so many rows of the open batch, all of it, were added to the sums.

        Raises:
            ConfigurationError: They were added before.
        """


def require_hook(has_run: bool) -> None:
    """Check that an earlier hook has run.

    Raises:
        ConfigurationError: It did not.
    """
    if not has_run:
        raise ConfigurationError(
            "a hook of the private strategy did not run, so that training would go on without privacy: a subclass that "
            "overrides a hook must call super()'s, and nothing else may replace hooks."
        )
