"""The mode that tags the tensors which a training step computes from the records of a batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves

from dpbench.errors import ConfigurationError
from dpbench.privacy.record_axis import rules as _rules  # noqa: F401  (enters the rules)
from dpbench.privacy.record_axis.harmless import harmless_function
from dpbench.privacy.record_axis.operators import Call, Mixes, Operator, Outcome, is_among, tensors_among
from dpbench.privacy.record_axis.public import is_one_place, make, make_local, make_public, public_axis
from dpbench.privacy.record_axis.tags import (
    Axis,
    Exchangeable,
    Joint,
    Local,
    Lone,
    Mixed,
    Over,
    Place,
    Rows,
    Tag,
    Total,
    Unwritten,
    arrangement,
    calling_line,
    covers_storage,
    has_plain_memory,
    is_of_records,
    is_private,
    overlaps_itself,
    rows_of,
    set_tag,
    tag_of,
    whole,
)

_LINEAR = frozenset(
    [
        "add",
        "sub",
        "rsub",
        "neg",
        "mul",
        "div",
        "_to_copy",
        "clone",
        "copy",
        "sum",
        "mean",
        "cat",
        "stack",
        "mm",
        "bmm",
        "mv",
        "select_backward",
        "slice_backward",
        "embedding_dense_backward",
        "constant_pad_nd",
    ]
)
"""Operators that make a total of totals."""
_OVERWRITES = frozenset(["copy_", "fill_", "zero_"])
"""Operators that do not read the tensors that they write to."""

SEEDED = "random numbers are seeded: they may repeat at each step, and differ by position in the batch"

IN_BATCH = "the batch contains"
"""Beginning of reasons that lie in the batch, which explain all that is mixed."""


class Event(NamedTuple):
    """Something that a step did.

    Attributes:
        place: The line.
        operator: Name of the operator or function.
        reason: Reason in words.
    """

    place: Place
    operator: str
    reason: str

    def __str__(self) -> str:
        if not self.place.line:  # of the step as a whole
            return f"{self.operator or 'training_step'}: {self.reason}"
        return f"{self.place} ({self.operator}): {self.reason}"


class RecordAxis(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells, for the memory of every tensor that a step makes, which elements belong to which record.

    Guarantee: an element that is tagged as record r's is a function of record r, of public numbers and of draws, and of
    the same function at each place. An operator without a rule mixes, so that this holds by the rules alone; they are
    proven by fuzzing. Code outside of PyTorch's dispatcher is not seen (docs/guards.md).

    Args:
        records: Number of records in the batch, R ≥ 1.
        batch: A number that no other batch of the process has.

    Attributes:
        records: R.
        batch: The batch's number.
        reads: Values of records that Python got to know, outside of functions from which nothing comes back.
        kept: Values of records of earlier batches that Python got to know.
        has_hooks: True if the step has functions of its own in the backward pass.
        before_first_read: Called once, before Python gets to know a value of records; None: nothing is.
        refusal: Message of `{event}` for the use of records after the step is over; None: they may be used.
        is_over: True once the loss was judged; the rest of a step in manual optimization is not tracked.
        is_in_backward: True while the gradient of the loss is computed, in which 1/R is the mean's own.
    """

    supports_higher_order_operators = True
    _operators: ClassVar[dict[Any, Operator]] = {}

    def __init__(self, records: int, batch: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records = records
        self.batch = batch
        self.reads: list[Event] = []
        self.kept: list[Event] = []
        self.has_hooks = False
        self.is_in_backward = False
        self.is_over = False
        self.refusal: str | None = None
        self.before_first_read: Callable[[], None] | None = None
        self._quiet = 0

    # ------------------------------------------------------------------------------------- tags of tensors

    def tag(self, t: Tensor, axis: Axis) -> None:
        """Tag a tensor's memory as having its records along an axis; where there is one record, all of it is its own.

        Args:
            t: A tensor of the batch.
            axis: The axis.
        """
        self._give(t, axis if self.records > 1 else Lone(self.batch))

    def place_of(self, t: Tensor) -> Axis | int | Tag | None:
        """The axis of a tensor's records; 0 for the only record; None if public; else its tag."""
        if not has_plain_memory(t) or torch._C._functorch.is_functorch_wrapped_tensor(t):
            return Mixed(self.batch, calling_line(), "", "a tensor without rows in its memory")
        tag = tag_of(t)
        if tag is None or not is_private(tag):
            return None
        if tag.batch != self.batch:
            return Mixed(self.batch, calling_line(), "", "records of an earlier batch", is_kept=True)
        if isinstance(tag, Rows):
            return arrangement(t, tag) or Mixed(self.batch, calling_line(), "", "a part of the batch")
        if isinstance(tag, Lone):
            return 0
        result: Tag = tag
        return result

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Within, values that are read go nowhere: a log, a metric that is only looked at."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Within, the gradient of the loss is computed under the mode."""
        self.is_in_backward = True
        is_over, self.is_over = self.is_over, False
        try:
            is_active = any(mode is self for mode in _get_current_dispatch_mode_stack())
            with nullcontext() if is_active else self:
                yield
        finally:
            self.is_in_backward = False
            self.is_over = is_over

    def note_read(self, name: str, reason: str = "a value is read into Python", is_kept: bool = False) -> None:
        """Take note of a value of records, perhaps of an earlier batch's, that Python gets to know."""
        if self._quiet > 0 or harmless_function(sys._getframe(1)) is not None:
            return
        if self.refusal is not None:
            raise ConfigurationError(self.refusal.format(event=Event(calling_line(), name, reason)))
        if reason != SEEDED and self.before_first_read is not None:
            before, self.before_first_read = self.before_first_read, None
            with _disable_current_modes():
                before()
        place = calling_line()
        if is_kept:
            _note(self.kept, Event(place, name, "a value of an earlier batch is read into Python"))
        _note(self.reads, Event(place, name, reason))

    def _look_at(self, generator: torch.Generator) -> None:
        """Take note of a generator that was seeded just now: its draws may be the same at each step, by place."""
        new = torch.Generator(generator.device).manual_seed(generator.initial_seed())
        if torch.equal(new.get_state(), generator.get_state()):
            self.note_read("Generator", SEEDED)

    # ------------------------------------------------------------------------------------- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_over and self.refusal is None:
            return func(*args, **kwargs)
        operator = self._operators.get(func)
        if operator is None:
            if not isinstance(func, torch._ops.OpOverload):
                return self._unknown(func, args, kwargs)
            operator = self._operators[func] = Operator(func)
        if self.is_over:
            return self._withhold(operator, func, args, kwargs)
        if kwargs.get("generator") is not None:
            self._look_at(kwargs["generator"])
        tensors = tensors_among(args, kwargs)
        if not all(map(has_plain_memory, tensors)):
            return self._foreign(func, operator, args, kwargs)
        if operator.is_view:
            return func(*args, **kwargs)
        call = Call(operator, args, kwargs, tensors, self.batch, self.records)
        output = call.output = func(*args, **kwargs)
        outputs = call.outputs = [output] if isinstance(output, Tensor) else tensors_among((output,), {})
        for t in outputs:
            if not has_plain_memory(t):
                return self._foreign_output(call)
        if operator.makes is not None and make(call):
            return output
        for tag in call.tags:
            if tag is not None and type(tag) is not Local:
                self._tag_outputs(call)
                return output
        make_local(call)
        return output

    def _withhold(self, operator: Operator, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that may be given no records; memory that is only shown still has theirs."""
        if operator.is_view or not any(map(is_of_records, tensors_among(args, kwargs))):
            return func(*args, **kwargs)
        self.note_read(operator.name, "a tensor of records is used")
        output = func(*args, **kwargs)
        for t in filter(has_plain_memory, tensors_among((output,), {})):
            set_tag(t, self.mix(operator.name, "a value that is shown"))
        return output

    def _tag_outputs(self, call: Call) -> None:
        """Tag the results of an operator on tagged memory."""
        operator = call.operator
        shared = [call.shares(t) for t in call.outputs]
        if shared and all(shared) and not operator.written:
            return  # a view by another name
        try:
            outcome = self._judge(call)
        except Mixes as error:
            outcome = self.mix(operator.name, str(error))
        except Exception as error:  # a rule that does not know this form of its operator
            outcome = self.mix(operator.name, f"its rule fails ({type(error).__name__})")
        if outcome is None:
            make_public(call)
            return
        for target in call.written:
            self._write(operator.name, target, outcome)
        for place, t in enumerate(call.outputs):
            if shared[place]:
                continue
            if type(outcome) is not list:
                self._give(t, outcome)
            else:
                self._give(t, outcome[place] if place < len(outcome) else None)

    def mix(self, name: str, reason: str) -> Mixed:
        """Tag of the results of an operator that mixes records."""
        return Mixed(self.batch, calling_line(), name, reason)

    def _unknown(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a higher-order operator; its functions are not seen, and may use any tensor."""
        output = func(*args, **kwargs)
        mixed = self.mix(str(func), "an operator without a rule")
        for t in tree_leaves(output):
            if isinstance(t, Tensor) and has_plain_memory(t):
                set_tag(t, mixed)
        return output

    def _foreign(self, func: Any, operator: Operator, args: Any, kwargs: Any) -> Any:
        """Run an operator on tensors with elements that are no bytes of a storage: sparse, nested, wrapping ones."""
        output = func(*args, **kwargs)
        mixed = self.mix(operator.name, "a sparse, nested or wrapping tensor")
        for t in tensors_among((output,), {}):
            if has_plain_memory(t):
                set_tag(t, mixed)
        values = operator.bound(args, kwargs)
        for name in operator.written:
            target = values.get(name)
            if isinstance(target, Tensor) and has_plain_memory(target):
                set_tag(target, mixed)
        return output

    def _foreign_output(self, call: Call) -> Any:
        """Note an operator that makes such a tensor: all that is computed from it is mixed."""
        if any(map(is_private, call.tags)):
            mixed = self.mix(call.operator.name, "a sparse, nested or wrapping tensor")
            for t in call.outputs:
                if has_plain_memory(t):
                    set_tag(t, mixed)
        return call.output

    # ------------------------------------------------------------------------------------- records

    def _judge(self, call: Call) -> Any:
        """The outcome of an operator: as a rule says, or a tag; None if its output is public."""
        inputs = _Inputs(self, call)
        totals, mixed = inputs.totals, inputs.mixed
        operator = call.operator
        if operator.is_like or not (call.axes or inputs.is_lone or totals or mixed):
            return None
        if operator.reads or _picks_by_mask(call):
            self.note_read(operator.name, is_kept=any(tag.is_kept for tag in mixed))
            return Mixed(self.batch, calling_line(), operator.name, "a value or a shape that depends on records")
        if self.records == 1:  # nothing can be mixed but with records of earlier batches
            kept = [tag for tag in mixed if tag.is_kept]
            return kept[0] if kept else Lone(self.batch)
        if mixed:
            return max(mixed, key=lambda tag: tag.is_kept)
        if inputs.has_joint or (inputs.has_one_place and call.axes):
            raise Mixes("numbers that were drawn for the batch together")
        if totals:
            return self._of_totals(call, totals)
        if operator.rule is None:
            raise Mixes("an operator without a rule")
        call.is_in_backward = self.is_in_backward
        return operator.rule(call)

    def _of_totals(self, call: Call, totals: Sequence[Total]) -> Total:
        """Tag of an operator's results on sums over records: a sum again, if it is linear."""
        name = call.operator.plain_name
        is_product = name in ("mul", "div", "mm", "bmm", "mv")
        is_divisor = name == "div" and not isinstance(call.tags[0], Total)
        is_rounded = call["rounding_mode"] is not None
        if call.axes or name not in _LINEAR or is_rounded or (is_product and (len(totals) > 1 or is_divisor)):
            raise Mixes("a sum over the records is used further")
        kinds = {total.over for total in totals}
        if len(kinds) > 1:
            raise Mixes("sums and means over the records are added")
        (over,) = kinds
        if name == "div" and over is Over.SUM and self._is_multiple(call["other"]):
            over = Over.MEAN
        return Total(self.batch, over)

    def _is_multiple(self, divisor: Any) -> bool:
        """True for a multiple of the number of records."""
        if isinstance(divisor, Tensor):
            if divisor.numel() != 1:
                return False
            divisor = divisor.item()
        return bool(divisor) and float(divisor) % self.records == 0

    def _give(self, t: Tensor, outcome: Outcome | Tag) -> None:
        """Tag new memory."""
        set_tag(t, self._tag_for(t, outcome))

    def _tag_for(self, t: Tensor, outcome: Outcome | Tag) -> Tag:
        if outcome is None:
            return Local(self.batch)
        if isinstance(outcome, Over):
            return Total(self.batch, outcome)
        if not isinstance(outcome, Axis):
            return outcome
        if not t.numel():
            return Rows(self.batch, 1, self.records, 0)
        rows = rows_of(t, outcome, self.batch, self.records)
        if rows is None:
            return Mixed(self.batch, calling_line(), "", f"an output that does not have its records along {outcome}")
        return rows

    def _write(self, name: str, target: Any, outcome: Any) -> None:
        """Tag memory that was written to."""
        if isinstance(target, (list, tuple)):
            for t in target:
                set_tag(t, self.mix(name, "records are written to a list of tensors"))
            return
        if not isinstance(target, Tensor) or not target.numel():
            return
        new = outcome[0] if isinstance(outcome, list) else outcome
        old = tag_of(target)
        if old is None or old.batch != self.batch:
            set_tag(target, self.mix(name, "records are written to what outlives the step"))
            return
        if isinstance(new, Mixed):
            set_tag(target, new)
        elif covers_storage(target):
            self._give(target, new)
        else:
            set_tag(target, self._written_in_part(name, target, old, new))

    def _written_in_part(self, name: str, target: Tensor, old: Any, new: Any) -> Tag:
        """The tag of memory of which a part is overwritten."""
        if isinstance(old, Mixed):
            return old
        if self.records == 1:
            return Lone(self.batch)
        if isinstance(new, Axis):
            if isinstance(old, Rows) and arrangement(target, old) == new and old.records == self.records:
                return old._replace(is_private=True)
            if isinstance(old, (Exchangeable, Unwritten)):
                rows = rows_of(target, new, self.batch, self.records)
                if rows is not None:
                    return whole(rows)
        if old == new:
            return old  # type: ignore[no-any-return]
        return self.mix(name, "written into other records or public numbers")


class _Inputs:
    """Sort the inputs of a call by their tags, and enter the axes along which they have records into it.

    Args:
        axis: The mode.
        call: The call.

    Attributes:
        is_lone: True if some depend on the only record.
        totals: Tags of sums over all records.
        mixed: Tags of inputs in which records cannot be told apart.
        has_joint: True if some public numbers were drawn for the batch together.
        has_one_place: True if some are those of one place, of draws that may be one for each record.
    """

    def __init__(self, axis: RecordAxis, call: Call) -> None:
        self.is_lone = False
        self.totals: list[Total] = []
        self.mixed: list[Mixed] = []
        self.has_joint = False
        self.has_one_place = False
        self._axis = axis
        self._call = call
        overwritten = _overwritten(call) if call.operator.written else []
        for t, tag in zip(call.tensors, call.tags, strict=True):
            if tag is None or type(tag) is Local or (overwritten and is_among(t, overwritten)):
                continue
            if is_private(tag):
                self._add(t, tag)
            else:
                self._add_public(t, tag)

    def _add(self, t: Tensor, tag: Tag) -> None:
        if tag.batch != self._axis.batch:
            mixed = self._axis.mix(self._call.operator.name, "records of an earlier batch")
            self.mixed.append(mixed._replace(is_kept=True))
        elif isinstance(tag, Rows):
            self._add_rows(t, tag)
        elif isinstance(tag, Lone):
            self.is_lone = True
        elif isinstance(tag, Total):
            self.totals.append(tag)
        elif isinstance(tag, Mixed):
            self.mixed.append(tag)

    def _add_public(self, t: Tensor, tag: Tag) -> None:
        call = self._call
        if isinstance(tag, Unwritten):
            if t.numel() and not is_among(t, call.written):
                self.mixed.append(self._axis.mix(call.operator.name, "memory that unseen code wrote"))
            call.exchangeable[id(t)] = None
            return
        if tag.batch != self._axis.batch:
            return  # by now these are numbers by place
        self.has_one_place |= is_one_place(t, tag, call.records)
        self.has_joint |= isinstance(tag, Joint) or (getattr(tag, "is_random", False) and overlaps_itself(t))
        if isinstance(tag, Exchangeable):
            call.exchangeable[id(t)] = None
        elif isinstance(tag, Rows):
            public = public_axis(t, tag, call.records)
            if public is not None:
                call.exchangeable[id(t)] = public

    def _add_rows(self, t: Tensor, rows: Rows) -> None:
        if not t.numel():
            return
        place = arrangement(t, rows)
        if place is None:
            self.mixed.append(self._axis.mix(self._call.operator.name, "a part of the batch"))
        else:
            self._call.axes[id(t)] = place


def _picks_by_mask(call: Call) -> bool:
    """True if values of records say how many rows an operator picks."""
    if call.operator.plain_name not in ("index", "_unsafe_index"):
        return False
    indices = zip(call.tensors[1:], call.tags[1:], strict=True)
    return any(t.dtype in (torch.bool, torch.uint8) and is_private(tag) for t, tag in indices)


def _overwritten(call: Call) -> list[Any]:
    """The tensors that an operator writes to without a look.

    Not a part of records' memory: that has to be the same part of each record.
    """
    if call.operator.name in _OVERWRITES:
        target = call["self"]
        return [target] if covers_storage(target) or not is_private(tag_of(target)) else []
    return [call.values[name] for name in call.operator.written if name.startswith("out") and name in call.values]


def _note(events: list[Event], event: Event) -> None:
    if event not in events:
        events.append(event)
