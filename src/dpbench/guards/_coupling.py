"""Does the gradient of a record depend on the other records of its lot? Asked by running training steps again.

A clipped sum has the sensitivity that the ledger states only if each record's gradient is a function of that record
(and of random numbers) alone. No sum over a lot can show whether it is, so that some lots are run again: with a part of
their records, with other records, with one that is extreme. docs/guards.md says what this misses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from dpbench.data.octaves import next_checked
from dpbench.data.trees import unopened
from dpbench.errors import UnsupportedModuleError
from dpbench.guards._altered_lots import LotRows, Rows
from dpbench.guards._lone_records import LoneRecordProbe
from dpbench.guards._lot_probe import FEWEST, LotProbe
from dpbench.guards._step_runs import Gap, StepRunner
from dpbench.guards.guard import Guard
from dpbench.privacy.gradients.engine import LossReduction
from dpbench.privacy.gradients.method import GradientMethod
from dpbench.records.count import count_records
from dpbench.records.physical_batches import batch_for_step, cuts
from dpbench.records.source import Lot, PerRecordStep
from dpbench.records.training import Training

# Relative change of a record's gradient that rounding explains.
_TOLERANCE = 1e-3
_TOLERANCE_OF_MIXED = 5e-2  # with 8 bits of mantissa
_PATIENCE = 50  # lots that may hold fewer than three records before that is said
_REMEDIES = {
    "number": (
        "check that the loss is the {reduction} over the records, as loss_reduction={reduction!r} states, and that no "
        "divisor counts the contents of the batch. Time steps and noise must be drawn for each record independently, "
        "too."
    ),
    "order": (
        "the treatment of a record must not depend on its position: no arange(n) / n, no first row as reference, no "
        "noise used with both signs in two halves of a batch. Draw time steps and noise for each record "
        "independently (torch.rand(n), torch.randn_like(x))."
    ),
    "contents": (
        "losses over pairs, negatives or the whole batch, a maximum, clamp or condition over the batch, class weights "
        "or ignored labels in a mean, and layers that sort, mix or normalize over dimension 0 cannot be made private: "
        "make each record's loss a function of that record alone (several rows of one record: LotLoader(..., "
        "record_of_row=...))."
    ),
}


class Coupling(Guard):
    """Probes the first lot and one lot of each octave of a source that runs the module's own step."""

    name = "coupling"
    prevents = (
        "a record's gradient depends on others in its batch or on earlier batches, so that clipping bounds nothing"
    )

    _probe: CouplingProbe | LoneRecordProbe | None = None
    _source: PerRecordStep | None = None

    def on_attach(self) -> None:
        """Take note of the engine."""
        self._look_anew()

    def on_change(self) -> None:
        """Probe the coming lot: what was frozen before had no gradients."""
        self._look_anew()

    def _look_anew(self) -> None:
        source = self.session.source
        if isinstance(source, PerRecordStep) and source.engine is not None:
            self._source = source
            probe = CouplingProbe if source.engine.at_once is None else LoneRecordProbe
            self._probe = probe(
                self.session.training,
                source.engine,
                source.loss_reduction,
            )

    def on_step(
        self,
        batch: Any,
        arguments: Sequence[Any],
        options: dict[str, Any],
    ) -> None:
        """Run the step on altered lots."""
        if self._probe is not None and self._source is not None:
            own_step = self.session.training.own_step

            def step(rows: Any) -> Any:
                return own_step(batch_for_step(rows), *arguments, **options)

            self._probe.look(step, batch, self._source.lot())

    @property
    def rows(self) -> int:
        """That went through the model for it so far: what the probes cost."""
        return 0 if self._probe is None else self._probe.rows


class CouplingProbe:
    """Probes the first lot, and one lot of each octave. It changes nothing of a training.

    Args:
        training: Its step is probed, in automatic or manual optimization.
        engine: Attached to the module or its private part.
        loss_reduction: What the loss is said to be; for the message.
    """

    def __init__(
        self,
        training: Training,
        engine: GradientMethod,
        loss_reduction: LossReduction,
    ) -> None:
        self._training = training
        self._engine = engine
        self._reduction = loss_reduction
        self._runner = StepRunner(training, engine)
        self._next = 0
        self._probes = 0
        self._warned = False
        self._small = 0

    @property
    def rows(self) -> int:
        """That went through the model so far: what the probes cost."""
        return self._runner.rows

    def look(self, step: Callable[[Any], Any], batch: Any, lot: Lot) -> None:
        """Probe a lot if it is due."""
        if lot.release >= self._next:
            self.check(step, batch, lot)

    def check(self, step: Callable[[Any], Any], batch: Any, lot: Lot) -> None:
        """Probe one lot; one of less than three records says nothing, and the next has to do.

        Whatever `limit` says, three whole records are run, or pieces of fewer would never be probed.

        Raises:
            UnsupportedModuleError: A record's gradient depends on the contents, number or order of the others, or on
                earlier lots.
        """
        rows = count_records(batch)
        record_of = lot.record_of
        if record_of is None:
            record_of = np.arange(rows)
        piece = _piece(record_of, lot)
        if len(np.unique(record_of[piece])) < FEWEST:
            self._small += 1
            if self._small == _PATIENCE:
                self.unsure(f"{_PATIENCE} batches held fewer than {FEWEST} records each")
            return
        self._next = next_checked(lot.release + 1) - 1
        self._probes += 1
        self._batch = batch
        probe = LotProbe(
            self._runner,
            self,
            LotRows(batch, rows, piece, record_of[piece], lot.row_index),
            release=lot.release,
            floor=lot.recipe.negligible_norm(lot.bound),
            rounding=self._tolerance(same_shape=False),
            exact=self._tolerance(same_shape=True),
        )
        try:
            with self._runner.session(step, lot.recipe, len(piece)):
                probe.verdict(repeats=self._probes % 2 == 0)
        finally:
            del self._batch

    def _tolerance(self, same_shape: bool) -> float:
        """Largest relative change of a gradient that rounding explains."""
        device = self._training.device.type
        if same_shape and device == "cpu":
            return _TOLERANCE
        is_half = any(parameter.dtype.itemsize < 4 for parameter in self._engine.parameters)
        if is_half or torch.is_autocast_enabled(device):
            return _TOLERANCE_OF_MIXED
        return _TOLERANCE * (10 if device == "cuda" else 1)

    def refuse(self, gap: Gap, what: str) -> None:
        """Raise UnsupportedModuleError.

        Args:
            gap: That was seen.
            what: Of the other records makes it: their contents, number or order.
        """
        remedy = _REMEDIES[what].format(reduction=self._reduction)
        cause = f"the {what} of the other records"
        if what == "order":
            cause = "the order of the records"
        raise UnsupportedModuleError(
            f"a record's {gap.subject} depends on {cause} in its batch "
            f"(it changes by {gap.size:.2g} of its norm), so clipping does not bound the influence of one record: "
            f"{remedy}"
        )

    def refuse_carried(self, gap: Gap) -> None:
        """Raise UnsupportedModuleError for what a step keeps of a lot."""
        raise UnsupportedModuleError(
            f"a record's {gap.subject} depends on records of earlier batches, through state that training_step keeps "
            f"(it changes by {gap.size:.2g} of its norm), so clipping does not bound the influence of one record: "
            "queues of negatives, centers, hidden states, thresholds, histories of losses from which time steps are "
            "drawn, and running means of losses in the loss cannot be made private; derive them from released weights "
            "or constants."
        )

    def failed(self, what: str) -> None:
        """Say that there was no verdict; or raise UnsupportedModuleError where it is the batch that cannot be cut."""
        closed = unopened(self._batch)
        if closed:
            raise UnsupportedModuleError(
                f"whether records are handled independently cannot be checked, because the batch contains a {closed}, "
                "whose tensors cannot be found and split into records: let the collate_fn return tensors in "
                "dictionaries, lists, tuples or dataclasses."
            )
        self.unsure(f"training_step fails on {what} a batch")

    def unsure(self, why: str) -> None:
        """Say once that there was no verdict."""
        if not self._warned:
            self._warned = True
            self._training.warn(f"whether records are handled independently could not be checked: {why}.")


def _piece(record_of: Rows, lot: Lot) -> Rows:
    """Rows that the probe runs: those of a piece that the step would run, if one holds three records."""
    if lot.limit is None:
        return np.arange(len(record_of))
    ends = [0, *cuts(len(record_of), lot.limit, lot.record_of)]
    pieces = []
    for start, end in pairwise(ends):
        if len(np.unique(record_of[start:end])) >= FEWEST:
            pieces.append(np.arange(start, end))
    if pieces:
        random = np.random.default_rng(lot.release)
        return pieces[int(random.integers(len(pieces)))]
    first = np.unique(record_of)[:FEWEST]
    return np.flatnonzero(np.isin(record_of, first))
