"""A training step under the record axis: the verdict on its records, and the state that it leaves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpbench.errors import CarriedRecordsError, UnsupportedModuleError
from dpbench.privacy.record_axis.host import begin_training, end_training, watched
from dpbench.privacy.record_axis.mode import IN_BATCH, Event, RecordAxis
from dpbench.privacy.record_axis.tags import UNKNOWN, Axis, Mixed, Over
from dpbench.privacy.record_axis.verdict import Verdict, judge, new_axis
from dpbench.records.step_state import PublicState
from dpbench.records.tagging import tagged
from dpbench.records.training import Training, loss_of

_REASONS = {
    "mixed": "records are combined in {event}",
    "reads": "{event}, so one record may affect how others are treated",
    "kept": (
        "the loss depends on records of an earlier batch, in {event}: queues of negatives, centers, hidden states, and "
        "running means of losses cannot be made private; derive them from released weights or constants, and pass "
        "values that are only shown to self.log as tensors"
    ),
}

_PUT_BACK = (
    "{cause}. Attributes of the module that training_step changes after that are reset after each batch; decorate its "
    'class with @dpbench.independent("name") to keep an attribute that does not depend on records.'
)


class WatchedStep:
    """Runs training steps under a mode, and judges them.

    Records that the engine takes together have to be separable. Of records that are run alone, none may depend on
    memory written for an earlier one. Where Python got to know values of records, `put_back` undoes the step's changes
    of the module since then.
    """

    def __init__(self) -> None:
        self._training: Training | None = None
        self._state: PublicState | None = None
        self._earlier: PublicState | None = None
        self._as_left: PublicState | None = None
        self._axis: RecordAxis | None = None
        self._loss: Any = None
        self._rows = 0
        self._rows_of_record = 1
        self._index: object = None
        self._has_own_shape = False
        self._has_informed = False

    def begin(self, training: Training) -> None:
        """Begin with a training, whose steps are run.

        Args:
            training: The training.
        """
        if self._training is None:
            begin_training()
        self._training = training
        self._state = self._earlier = self._as_left = None
        self.open()

    def open(self) -> None:
        """Begin a batch; values set by the step of the last one are withheld until that of this one begins."""
        if self._state is not None:
            self._state.withhold()
            self._earlier = self._state
        self._state = self._as_left = None
        self._axis = self._loss = None
        self._rows = 0

    def expect(
        self,
        rows: int,
        record_of: NDArray[np.int64] | None,
        index: object,
        is_one: bool = False,
        has_own_shape: bool = False,
    ) -> None:
        """Take note of the rows that the step is about to be given.

        Args:
            rows: Number of rows; 0: the step is not to be watched.
            record_of: Record of each row, ascending; None if each row is one.
            index: Key of the batch's entry that says so, if there is one.
            is_one: True if all rows are one record's.
            has_own_shape: True if that record's shape is its own, which Python knows without reading a value.
        """
        self._axis = self._loss = None
        self._rows = rows
        self._rows_of_record = rows if is_one else even_rows(record_of, rows)
        self._index = index
        self._has_own_shape = has_own_shape

    def step(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """A training step that runs under a mode where rows are expected; `unwatched` is the step as it was."""

        @functools.wraps(own)
        def step(batch: Any, *arguments: Any, **options: Any) -> Any:
            rows, self._rows = self._rows, 0
            self.begin_step()
            if not rows or _is_capturing():
                return own(batch, *arguments, **options)  # recorded kernels: judged when they ran eagerly
            axis = self._axis = new_axis(rows // self._rows_of_record)
            axis.before_first_read = self._keep_state
            if self._has_own_shape:
                axis.note_read("shape", f"{IN_BATCH} a record of its own shape")
            batch = tagged(axis, batch, self._rows_of_record, self._index)
            with watched(axis), axis:
                output = own(batch, *arguments, **options)
            # What drives the training may make another tensor of it, where nothing is seen.
            self._loss = loss_of(output)
            return output

        step.unwatched = own  # type: ignore[attr-defined]
        return step

    def begin_step(self) -> None:
        """Give the module back the values set by the step of an earlier batch."""
        if self._earlier is not None:
            self._earlier.give_back()
            self._earlier = None

    def begin_again(self) -> None:
        """Forget a step that is run again, of which the caller has undone everything."""
        self._state = None
        self.open()

    def stop(self) -> None:
        """Look no longer at a step in manual optimization: its gradients are computed."""
        if self._axis is not None:
            self._axis.is_over = True

    def separable(
        self,
        loss: Tensor,
        over: Over,
        metrics: Callable[[], Tensor] | None,
    ) -> tuple[RecordAxis, int] | None:
        """The mode that the step ran under, and how many neighboring rows make a record; None if it was not watched.

        Args:
            loss: The loss that is differentiated.
            over: The declared combination of records in the loss.
            metrics: Function that computes each row's values of private metrics, shape (rows, values); or None.

        Raises:
            UnsupportedModuleError: Records are not separable in this batch.
            CarriedRecordsError: The loss depends on records of earlier batches.
        """
        judged = self._judged(loss, over)
        if judged is None:
            return None
        axis, verdict = judged
        if not verdict.is_separable:
            axis.is_over = True
            raise refusal(verdict)
        place = _place_of(axis, metrics)
        if place not in (None, 0 if axis.records == 1 else Axis(0, 1, self._rows_of_record)):
            raise refusal(Verdict("mixed", (_event_of(place),)))
        return axis, self._rows_of_record

    def refuse_carried(self, loss: Tensor, over: Over, metrics: Callable[[], Tensor] | None) -> None:
        """Refuse the loss of one record, or its metrics, that depend on records before it.

        Args:
            loss: The loss that is differentiated.
            over: The declared combination of rows in the loss.
            metrics: Function that computes the record's values of private metrics; or None.

        Raises:
            CarriedRecordsError: They do, by the memory of tensors.
        """
        judged = self._judged(loss, over)
        if judged is None:
            return
        axis, verdict = judged
        place = _place_of(axis, metrics)
        if isinstance(place, Mixed) and place.is_kept:
            verdict = Verdict("kept", (_event_of(place),))
        if verdict.kind == "kept":
            raise CarriedRecordsError(_REASONS["kept"].format(event=verdict.events[0]))
        if axis.reads:
            self._tell_of(axis.reads[0])

    def end(self) -> None:
        """Give the module back as it is to be left."""
        for state in (self._state, self._earlier):
            if state is not None:
                state.give_back()
        self._state = self._earlier = self._as_left = None
        if self._training is not None:
            end_training()
            self._training = None

    def put_back(self) -> None:
        """Undo a step's changes of the module since Python got to know a value of records."""
        if self._state is not None:
            self._state.put_back()

    def hide(self) -> None:
        """Have hooks between the step and its backward pass see the module as it was before a value was read."""
        if self._state is not None and self._training is not None:
            self._as_left = PublicState(self._training)
            self._state.put_back()
            self._state.withhold()

    def show(self) -> None:
        """Give the backward pass the module as the step has left it."""
        as_left, self._as_left = self._as_left, None
        if as_left is not None:
            as_left.put_back()

    def withhold(self) -> None:
        """Have values of records that the step has set raise an error where they are used, up to `give_back`."""
        if self._state is not None:
            self._state.withhold()

    def give_back(self) -> None:
        """Give back withheld values, as they were before the step."""
        if self._state is not None:
            self._state.give_back()

    def _judged(self, loss: Tensor, over: Over) -> tuple[RecordAxis, Verdict] | None:
        axis, self._axis = self._axis, None
        if axis is None:
            return None
        returned, self._loss = self._loss, None
        loss = loss if returned is None else returned  # in manual optimization the step has not returned yet
        return axis, judge(axis, loss, over)

    def _keep_state(self) -> None:
        if self._state is None and self._training is not None:
            self._state = PublicState(self._training)

    def _tell_of(self, event: Event) -> None:
        """Say once that attributes are put back; a step reads wherever its records are, so that it tells of none."""
        if not self._has_informed and self._training is not None:
            self._has_informed = True
            in_batch = event.reason.startswith(IN_BATCH)
            cause = event.reason if in_batch else f"training_step reads values of records: {event}"
            self._training.inform(_PUT_BACK.format(cause=cause))


def _is_capturing() -> bool:
    # Asking whether there is CUDA loads a library each time.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def _place_of(axis: RecordAxis, metrics: Callable[[], Tensor] | None) -> Any:
    """Place of the records in metrics, with which watching ends."""
    place = None
    if metrics is not None:
        with watched(axis), axis:
            values = metrics()
        place = axis.place_of(values) if values.numel() else None
    axis.is_over = True
    return place


def _event_of(place: object) -> Event:
    if isinstance(place, Mixed):
        return Event(place.place, place.operator, f"{place.reason}, in record_metrics")
    return Event(UNKNOWN, "record_metrics", "a metric without a row for each record")


def refusal(verdict: Verdict) -> UnsupportedModuleError:
    """Make the error of a step with records that are not separable, or depend on earlier ones.

    Args:
        verdict: Any but "separable".
    """
    event: object = verdict.events[0] if verdict.events else "an unknown line"
    if isinstance(event, Event) and event.reason.startswith(IN_BATCH):
        event = event.reason  # no line of the step
    reason = _REASONS[verdict.kind].format(event=event)
    kind = CarriedRecordsError if verdict.kind == "kept" else UnsupportedModuleError
    return kind(reason)


def even_rows(record_of: NDArray[np.int64] | None, rows: int) -> int:
    """Neighboring rows of each record if all have as many; else 1, since separable rows make separable records.

    Args:
        record_of: Record of each row; None if each row is one.
        rows: Number of rows.
    """
    if record_of is None or not rows:
        return 1
    _, counts = np.unique(record_of, return_counts=True)
    is_even = len(set(counts.tolist())) == 1 and bool((np.diff(record_of) >= 0).all())
    return int(counts[0]) if is_even else 1
