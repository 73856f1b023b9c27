"""The verdict on a training step without a training: are the records of a batch separable?

A Trainer sets everything up before the first epoch. Then the module's own step runs on two batches under the record
axis (`privacy.record_axis`), and the Trainer is left. Nothing is released or kept.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor

from dpbench.callback.lightning_training import LightningTraining
from dpbench.data.collation import RecordOfRow
from dpbench.data.loader import PrivateDataLoader
from dpbench.data.records import require_examples
from dpbench.data.separate_records import SeparateRecords
from dpbench.errors import ConfigurationError, UnsupportedModuleError, brief
from dpbench.guards.engine_trial import EngineTrial, loss_of_step, without_traces
from dpbench.guards.public_networks import private_part
from dpbench.options import checked_value
from dpbench.privacy.gradients.engine import LossReduction, PerRecordEngine
from dpbench.privacy.gradients.one_by_one import OneByOne
from dpbench.privacy.record_axis.mode import Event
from dpbench.privacy.record_axis.tags import Over, has_plain_memory, is_private, set_tag, tag_of
from dpbench.records.count import count_records
from dpbench.records.examples import Examples
from dpbench.records.grouping import counted_from_zero, places_of_index, rows_of_lot
from dpbench.records.physical_batches import select
from dpbench.records.source import RecordsInTurn, RecordSource
from dpbench.records.tagging import watch
from dpbench.records.watched_step import even_rows

Kind = Literal["separable", "limited", "mixed", "reads", "kept", "unchecked"]

_BATCHES = 2  # the second shows what is kept of the first
_RECORDS = 30
"""Number of records that go through the step, for any batch: no message can tell the size of a private batch."""
_MOST_DRAWS = 100  # of batches, for two that are not empty
_MOST_PLACES = 5
_SEVERITY = ("kept", "mixed", "reads", "limited", "separable")
_HEADLINES = {
    "separable": "records are separable: the engine computes all gradients of a batch together",
    "limited": "the engine cannot be used, so that training takes records one by one:",
    "mixed": "records are mixed, so that training takes them one by one:",
    "reads": (
        "records are separable in this batch, but their values are read into Python, where the step may branch on "
        "them; training takes records one by one:"
    ),
    "kept": "records of an earlier batch are used, so that training is refused:",
}
_COUNTS = "a weighted mean over the batch"
_BY_VALUES = (
    "this depends on values: where the same number of targets counts for each record, a batch without class weights is "
    "separable"
)
_IN_TURN = "not checked: {unit}s are trained one by one"
_OTHER_SOURCE = "not checked: {source} computes the gradient of each record itself"
_SEPARATE = "not checked: records cannot be rows of one batch, and training takes them one by one"
_WITHOUT_RECORDS = "not checked: the first loss that training_step differentiates depends on no record"


@dataclass(frozen=True)
class StepCheck:
    """The verdict on a training step.

    Attributes:
        kind: "separable", "mixed", "reads" or "kept", as for `Verdict`; "limited": records are separable, and the
            engine does not know the network; or "unchecked".
        events: The lines that are the reason, most telling first.
        reason: The reason of "limited" and "unchecked", in words.
    """

    kind: Kind
    events: tuple[Event, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        if self.kind == "unchecked":
            return self.reason
        lines = [_HEADLINES[self.kind]]
        lines += [f"  {reason}" for reason in self.events[:_MOST_PLACES] or [self.reason] if reason]
        if any(event.reason.startswith(_COUNTS) for event in self.events):
            lines.append(f"  {_BY_VALUES}")
        return "\n".join(lines)


def check(
    module: pl.LightningModule,
    loader: Any,
    records: RecordSource | None = None,
    loss_reduction: LossReduction = "mean",
    trainer: pl.Trainer | None = None,
) -> StepCheck:
    """Say of a training step if it keeps the records of a batch apart, and where it does not. Nothing is trained.

    The step runs on some records of two batches; in manual optimization up to its first backward pass. Hooks of the
    module up to `on_train_start` run as in a training. Changes by the step are undone: weights, buffers, attributes,
    random numbers. The verdict is on these batches alone; it is computed on records, and no epsilon
    covers it.

    Args:
        module: The module, as it would be trained.
        loader: A `PrivateDataLoader`, another data loader with records in dimension 0 of its batches, or a data module.
        records: The source of records of the strategy; None: each item that the loader draws is a record.
        loss_reduction: The way in which the step combines records: "mean" or "sum".
        trainer: A Trainer for this check alone, with the device and precision of the training; it loses its callbacks
            and loggers. None: one without any settings.

    Raises:
        ConfigurationError: A private training would not begin.
        UnsupportedModuleError: A layer keeps statistics of records, or mixes them.

    Example:
        >>> print(dpbench.check(module, loader))  # doctest: +SKIP
        records are separable: the engine computes all gradients of a batch together
    """
    if not isinstance(module, pl.LightningModule):
        raise ConfigurationError(f"dpbench.check takes a LightningModule, not a {type(module).__name__}.")
    if records is not None and not isinstance(records, RecordSource):
        raise ConfigurationError(f"records must be a source of records, such as Examples(), not {records!r}.")
    if records is not None and not isinstance(records, Examples):
        reason = _IN_TURN if isinstance(records, RecordsInTurn) else _OTHER_SOURCE
        reason = reason.format(unit=records.unit, source=type(records).__name__)
        return StepCheck("unchecked", reason=reason)
    if records is not None:
        loss_reduction = records.loss_reduction
    over = Over(checked_value(LossReduction, loss_reduction, "loss_reduction"))
    one = _OneCheck(over)
    device = module.device
    trainers = [(part, part._trainer) for part in module.modules() if isinstance(part, pl.LightningModule)]
    data = {"datamodule" if isinstance(loader, pl.LightningDataModule) else "train_dataloaders": loader}
    try:
        with isolate_rng(), warnings.catch_warnings(), suppress(_Checked):
            warnings.simplefilter("ignore")
            trainer = _plain_trainer(device) if trainer is None else trainer
            # Others would train, log or write files.
            trainer.callbacks = [one]  # type: ignore[attr-defined]
            trainer.loggers = []
            trainer.fit(module, **data)
    except MisconfigurationException as error:  # Lightning's, of settings that do not fit
        raise ConfigurationError(f"trainer: {brief(error)}") from error
    finally:
        for part, before in trainers:
            part._trainer = before
        module.to(device)
    if one.result is None:
        raise ConfigurationError("the Trainer would train on no batch: see its max_steps and limit_train_batches.")
    return one.result


def _plain_trainer(device: torch.device) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu" if device.type == "cpu" else "gpu",
        devices=1,
        max_epochs=1,
        logger=False,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


class _Checked(Exception):
    """The step was checked, and nothing is to be trained."""


class _OneCheck(pl.Callback):
    """Checks the step where the training would begin, and ends it there.

    Args:
        over: The declared combination of records in the loss.

    Attributes:
        result: The verdict; None until the training begins.
    """

    def __init__(self, over: Over) -> None:
        self.result: StepCheck | None = None
        self._over = over

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check, after the module's own `on_train_start`."""
        training = LightningTraining(trainer, pl_module)
        self.result = self._result(training, trainer.train_dataloader)
        raise _Checked

    def _result(self, training: LightningTraining, loader: Any) -> StepCheck:
        part = private_part(training)
        OneByOne(part, self._over.value).close()  # refuses what no training begins with
        checks: list[StepCheck] = []
        with _drawing(loader, training.automatic_optimization) as batches, without_traces(training) as state:
            try:
                for batch in batches:
                    checked = self._checked(training, part, loader, batch)
                    if checked is None:
                        continue
                    if checked.kind == "unchecked":
                        return checked
                    checks.append(checked)
                    if len(checks) == _BATCHES:
                        break
            finally:
                for t in state.tensors():
                    if has_plain_memory(t) and tag_of(t) is not None:
                        set_tag(t, None)
        if not checks:
            raise ConfigurationError("all batches that were drawn are empty: make batches larger.")
        kind = min((checked.kind for checked in checks), key=_SEVERITY.index)
        worst = [checked for checked in checks if checked.kind == kind]
        events = dict.fromkeys(event for checked in worst for event in checked.events)
        return StepCheck(kind, tuple(events), worst[0].reason)

    def _checked(
        self,
        training: LightningTraining,
        part: torch.nn.Module,
        loader: Any,
        batch: Any,
    ) -> StepCheck | None:
        """The verdict on one batch; None if it is empty."""
        if isinstance(batch, SeparateRecords):
            return StepCheck("unchecked", reason=_SEPARATE)
        batch = training.trainer.precision_plugin.convert_input(training.to_device(batch))
        rows = count_records(batch)
        if not rows:
            return None
        record_of = None
        if isinstance(loader, PrivateDataLoader):
            record_of = rows_of_lot(loader, loader.lots.position - 1, training, batch, rows)
        index = loader.record_of_row if isinstance(loader, PrivateDataLoader) else None
        rows_of_record = even_rows(record_of, rows)
        # The first records, from the beginning again where there are fewer.
        places = [] if index is None else places_of_index(batch, rows, index)
        batch = select(batch, rows, np.resize(np.arange(rows), _RECORDS * rows_of_record))
        batch = counted_from_zero(batch, places, np.repeat(np.arange(_RECORDS), rows_of_record))
        step = functools.partial(loss_of_step, training)
        loss, verdict = watch(step, batch, _RECORDS, rows_of_record, self._over, index)
        if not isinstance(loss, Tensor):
            raise ConfigurationError("training_step returns no loss for a batch that is not empty: always return it.")
        if has_plain_memory(loss) and not is_private(tag_of(loss)):
            return StepCheck("unchecked", reason=_WITHOUT_RECORDS)
        reason = None
        if verdict.is_separable:
            reason = _limit(training, part, self._over.value, batch, record_of, index)
        return StepCheck(verdict.kind, verdict.events) if reason is None else StepCheck("limited", reason=reason)


def _limit(
    training: LightningTraining,
    part: torch.nn.Module,
    loss_reduction: LossReduction,
    batch: Any,
    record_of: NDArray[np.int64] | None,
    index: RecordOfRow | None,
) -> str | None:
    """Why the engine cannot be used for records that are separable; None: it can."""
    try:
        engine = PerRecordEngine(part, loss_reduction)
    except UnsupportedModuleError as error:
        return str(error)
    with closing(engine):
        limit = EngineTrial(training, engine).limit(batch, record_of, index)
    return None if limit is None else limit.reason


@contextmanager
def _drawing(loader: Any, may_separate: bool) -> Iterator[Iterable[Any]]:
    """The first batches of a loader, which afterwards is as before.

    Args:
        loader: The loader.
        may_separate: True if training takes records that make no rows of one batch one by one.
    """
    if not isinstance(loader, PrivateDataLoader):
        yield _first_batches(loader)
        return
    require_examples(loader.dataset)
    lots = loader.lots
    lots.acquire()
    position = lots.position
    loader.prepare_collation(may_separate and loader.record_of_row is None)
    try:
        yield _first_batches(loader)
    finally:
        loader.prepare_collation()
        lots.free()
        lots.position = position


def _first_batches(loader: Iterable[Any]) -> Iterator[Any]:
    """Batches of one epoch after the other, a limited number."""
    epochs = itertools.repeat(loader, _MOST_DRAWS)
    return itertools.islice(itertools.chain.from_iterable(epochs), _MOST_DRAWS)
