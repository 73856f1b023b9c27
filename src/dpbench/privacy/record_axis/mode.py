"""The mode that tags what a training step computes of the records of a batch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves

from dpbench.privacy.record_axis import rules as _rules  # noqa: F401  (enters the rules)
from dpbench.privacy.record_axis.harmless import harmless_function
from dpbench.privacy.record_axis.operators import Call, Mixes, Operator, Outcome
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
    Subtotal,
    Tag,
    Total,
    Unwritten,
    arrangement,
    covers_storage,
    has_plain_memory,
    history_of,
    is_private,
    is_unwritten,
    layout_of,
    new_number,
    overlaps_itself,
    rows_of,
    seen_through,
    set_tag,
    tag_of,
)

_HIDDEN = tuple(
    folder + os.sep
    for folder in (
        os.path.dirname(torch.__file__),
        os.path.dirname(os.path.abspath(__file__)),
    )
)
"""Folders whose lines are not named: the line that called them is."""

_CONSTANT = frozenset(
    [
        "zeros",
        "ones",
        "full",
        "new_zeros",
        "new_ones",
        "new_full",
        "zeros_like",
        "ones_like",
        "full_like",
        "zero",
        "fill",
        "scalar_tensor",
    ]
)
_ZEROS = frozenset(["zeros", "new_zeros", "zeros_like", "zero"])
_OF_ZEROS = 1
"""The history of memory that is zero."""
_DRAWN = frozenset(
    [
        "rand",
        "randn",
        "randint",
        "rand_like",
        "randn_like",
        "randint_like",
        "uniform",
        "normal",
        "bernoulli",
        "exponential",
        "random",
        "cauchy",
        "geometric",
        "log_normal",
    ]
)
_EMPTY = frozenset(["empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"])
_FACTORIES = _CONSTANT | _DRAWN | _EMPTY
_LIKE = frozenset(name for name in _FACTORIES if name.startswith("new_") or name.endswith("_like"))
"""Factories that take a tensor for its shape, and read none of its numbers."""
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
"""Operators that do not read what they write to."""
_SMALL = 1024
"""Elements of public memory up to which loops compare its numbers, and not its address."""

SEEDED = "random numbers are seeded: they may be the same at each step, and others for each place"

IN_BATCH = "the batch contains"
"""The beginning of reasons that lie in the batch, which explain whatever is mixed."""


class Event(NamedTuple):
    """Something that a step did.

    Attributes:
        place: The line.
        operator: Name of the operator or function.
        reason: In words.
    """

    place: Place
    operator: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place} ({self.operator}): {self.reason}"


def calling_line() -> Place:
    """The line of code, outside of torch and this package, that runs now."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_HIDDEN) and not file.startswith("<"):
            break
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno)


class RecordAxis(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells, for the memory of every tensor that a step makes, which elements belong to which record.

    Guarantee: an element that is tagged as record r's is a function of record r, of public numbers and of draws, and of
    the same function at each place. An operator without a rule mixes, so that this holds by the rules alone; they are
    proven by fuzzing. What runs outside of PyTorch's dispatcher is not seen (docs/guards.md).

    Args:
        records: Number of records in the batch, R ≥ 1.
        batch: A number that no other batch of the process has.

    Attributes:
        records: R.
        batch: The batch's number.
        mixed: Operators that mixed records.
        reads: Values of records that Python got to know.
        harmless_reads: Those within functions from which nothing comes back to the step.
        writes: Records that were written to memory that is older than the step.
        kept: Values of records of earlier batches that Python got to know.
        hooks: Functions of the step's own in the backward pass.
        before_first_read: Called once, before Python gets to know a value of records; None: nothing is.
        is_over: True once the loss was judged: a step in manual optimization goes on, and is no longer looked at.
        is_in_backward: True while the gradient of the loss is computed, in which 1/R is the mean's own.
    """

    supports_higher_order_operators = True
    _operators: ClassVar[dict[Any, Operator]] = {}

    def __init__(self, records: int, batch: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records = records
        self.batch = batch
        self.mixed: list[Event] = []
        self.reads: list[Event] = []
        self.harmless_reads: list[Event] = []
        self.writes: list[Event] = []
        self.kept: list[Event] = []
        self.hooks: list[Event] = []
        self.is_in_backward = False
        self.is_over = False
        self.before_first_read: Callable[[], None] | None = None
        self._quiet = 0
        self._compared: list[Any] = []  # memory that is compared by its address, which no other may have by then

    # ------------------------------------------------------------------------------------- tags of tensors

    def tag(self, t: Tensor, place: Axis | int) -> None:
        """Tag a tensor's memory as having its records along an axis, or as one record's.

        Args:
            t: A tensor of the batch.
            place: The axis, or the position of the record in the batch.
        """
        self._give(t, Lone(self.batch, place) if isinstance(place, int) else place)

    def place_of(self, t: Tensor) -> Axis | int | Tag | None:
        """The axis of a tensor's records, or the position of its only record; None if public; else its tag."""
        if not has_plain_memory(t):
            return Mixed(self.batch, calling_line(), "", "a tensor without rows in its memory")
        tag = tag_of(t)
        if tag is None or not is_private(tag):
            return None
        if tag.batch != self.batch:
            return Mixed(self.batch, calling_line(), "", "records of an earlier batch", is_kept=True)
        if isinstance(tag, Rows):
            place = arrangement(t, tag)
            if place is None or is_unwritten(tag, place):
                return Mixed(self.batch, calling_line(), "", "a part of the batch")
            return place
        if isinstance(tag, Lone):
            return tag.record
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
        is_harmless = self._quiet > 0 or harmless_function(sys._getframe(1)) is not None
        if not is_harmless and reason != SEEDED and self.before_first_read is not None:
            before, self.before_first_read = self.before_first_read, None
            with _disable_current_modes():
                before()
        if is_kept and not is_harmless:
            _note(self.kept, Event(calling_line(), name, "a value of an earlier batch is read into Python"))
        _note(self.harmless_reads if is_harmless else self.reads, Event(calling_line(), name, reason))

    def _look_at(self, generator: torch.Generator) -> None:
        """Take note of a generator that was seeded just now: its draws may be the same at each step, by place."""
        new = torch.Generator(generator.device).manual_seed(generator.initial_seed())
        if torch.equal(new.get_state(), generator.get_state()):
            self.note_read("Generator", SEEDED)

    def note_hook(self, name: str) -> None:
        """Take note of a function that may change gradients."""
        _note(self.hooks, Event(calling_line(), name, "a function of its own in the backward pass"))

    # ------------------------------------------------------------------------------------- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_over:
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            self._look_at(kwargs["generator"])
        operator = self._operators.get(func)
        if operator is None:
            if not isinstance(func, torch._ops.OpOverload):
                return self._unknown(func, args, kwargs)
            operator = self._operators[func] = Operator(func)
        inputs = tensors_among(args, kwargs)
        if not all(map(has_plain_memory, inputs)):
            return self._foreign(func, operator, args, kwargs)
        if operator.is_view:
            return func(*args, **kwargs)
        tags = [tag_of(t) for t in inputs]
        output = func(*args, **kwargs)
        outputs = [output] if isinstance(output, Tensor) else tensors_among((output,), {})
        if not all(map(has_plain_memory, outputs)):
            return self._foreign_output(operator, tags, output, outputs)
        plain_name = operator.name.rstrip("_")
        if plain_name in _FACTORIES and self._make(operator, args, kwargs, inputs, tags, output):
            return output
        if all(tag is None or isinstance(tag, Local) for tag in tags):
            self._make_local(operator, args, kwargs, inputs, tags, output, outputs)
            return output
        self._tag_outputs(operator, operator.bound(args, kwargs), inputs, tags, output, outputs)
        return output

    def _tag_outputs(
        self,
        operator: Operator,
        values: dict[str, Any],
        inputs: Sequence[Tensor],
        tags: Sequence[Any],
        output: Any,
        outputs: Sequence[Tensor],
    ) -> None:
        """Tag what an operator has made of tagged memory."""
        shared = [t.untyped_storage() for t in inputs]
        if not operator.written and outputs and all(_is_among(t.untyped_storage(), shared) for t in outputs):
            return  # a view by another name
        try:
            outcome = self._judge(operator, values, inputs, tags, output)
        except Mixes as error:
            outcome = self.mix(operator.name, str(error))
        except Exception as error:  # a rule that does not know this form of its operator
            outcome = self.mix(operator.name, f"its rule fails ({type(error).__name__})")
        if outcome is None:
            self._make_public(operator, values, inputs, tags, output, outputs)
            return
        for place, name in enumerate(operator.written):
            self._write(operator, values.get(name), _of_output(outcome, place))
        self._give_all(outputs, outcome, shared)

    def mix(self, name: str, reason: str) -> Mixed:
        """Take note that an operator mixes records."""
        place = calling_line()
        _note(self.mixed, Event(place, name, reason))
        return Mixed(self.batch, place, name, reason)

    def _unknown(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a higher-order operator, of whose functions nothing is seen: they may use any tensor."""
        output = func(*args, **kwargs)
        mixed = self.mix(str(func), "an operator without a rule")
        for t in tree_leaves(output):
            if isinstance(t, Tensor) and has_plain_memory(t):
                set_tag(t, mixed)
        return output

    def _foreign(self, func: Any, operator: Operator, args: Any, kwargs: Any) -> Any:
        """Run an operator on tensors whose elements are no bytes of a storage: sparse, nested, wrapping ones."""
        output = func(*args, **kwargs)
        mixed = self.mix(operator.name, "a sparse, nested or wrapping tensor")
        for t in tensors_among((output,), {}):
            if has_plain_memory(t):
                set_tag(t, mixed)
        for name in operator.written:
            target = operator.bound(args, kwargs).get(name)
            if isinstance(target, Tensor) and has_plain_memory(target):
                set_tag(target, mixed)
        return output

    def _foreign_output(self, operator: Operator, tags: Sequence[Any], output: Any, outputs: Sequence[Tensor]) -> Any:
        """Take note of an operator that makes such a tensor: whatever comes out of that is mixed."""
        mixed = Mixed(self.batch, calling_line(), operator.name, "a sparse, nested or wrapping tensor")
        if any(tag is not None and is_private(tag) for tag in tags):
            mixed = self.mix(operator.name, mixed.reason)
            for t in outputs:
                if has_plain_memory(t):
                    set_tag(t, mixed)
        return output

    # ------------------------------------------------------------------------------------- public memory

    def _make(
        self,
        operator: Operator,
        args: Any,
        kwargs: Any,
        inputs: Sequence[Tensor],
        tags: Sequence[Any],
        output: Any,
    ) -> bool:
        """Tag what a factory makes, or writes to memory that has no records; False if it is an operator like others."""
        name = operator.name.rstrip("_")
        if operator.written:
            old = tags[0] if tags else None
            if old is None or is_private(old) or any(isinstance(tag, Joint) or is_private(tag) for tag in tags[1:]):
                return False
            if name in _DRAWN and len(inputs) > 1:
                return False  # drawn by numbers that may be by place
            if old.batch != self.batch or not covers_storage(inputs[0]):
                return isinstance(old, Local) and old.batch == self.batch
        elif name not in _LIKE and inputs:
            return False
        if not isinstance(output, Tensor):
            return False
        if name in _EMPTY and output.numel():
            set_tag(output, Unwritten(self.batch))
        elif name in _DRAWN:
            set_tag(output, Exchangeable(self.batch, True, _history_of_draws(operator, operator.bound(args, kwargs))))
        else:
            set_tag(output, Exchangeable(self.batch, history=_OF_ZEROS if name in _ZEROS else 0))
        return True

    def _make_local(
        self,
        operator: Operator,
        args: Any,
        kwargs: Any,
        inputs: Sequence[Tensor],
        tags: Sequence[Any],
        output: Any,
        outputs: Sequence[Tensor],
    ) -> None:
        """Tag what is made of public memory."""
        spread = operator.name == "repeat" or any(_is_expanded(t, self.records) for t in inputs)
        if spread and not operator.written:
            self._make_public(operator, operator.bound(args, kwargs), inputs, tags, output, outputs)
            return
        for t in outputs:
            if tag_of(t) is None:
                older = any(t is x for x in inputs)
                if not older:
                    set_tag(t, Local(self.batch))

    def _make_public(
        self,
        operator: Operator,
        values: dict[str, Any],
        inputs: Sequence[Tensor],
        tags: Sequence[Any],
        output: Any,
        outputs: Sequence[Tensor],
    ) -> None:
        """Tag what is made of public memory of which some is exchangeable along the records."""
        outcome: Any = None
        records = self.records
        plain_name = operator.name.rstrip("_")
        random = operator.draws or any(getattr(tag, "is_random", False) for tag in tags)
        pointwise = operator.rule is not None and operator.rule.__name__ in ("pointwise", "copy")
        uniform = all(
            (isinstance(tag, (Exchangeable, Unwritten)) and tag.batch == self.batch)
            or (not isinstance(tag, (Rows, Joint)) and t.numel() == 1)
            for t, tag in zip(inputs, tags, strict=True)
        )
        if uniform and pointwise:
            history = hash((operator.name, self._described(operator, values, inputs, tags))) if random else 0
            outcome = self._of_draws(inputs, tags, Exchangeable(self.batch, random, history))
        elif plain_name == "repeat" and not isinstance(tags[0], Rows):
            outcome, records = self._repeated(values, inputs[0], tags[0], output)
        else:
            outcome, records = self._exchangeable_outcome(operator, values, inputs, tags, output)
        shared = [t.untyped_storage() for t in inputs]
        per_output = isinstance(outcome, (list, tuple)) and not isinstance(outcome, (Axis, Exchangeable, Joint))
        for i, t in enumerate(outputs):
            one = outcome
            if per_output:
                one = outcome[i] if i < len(outcome) else None
            if not _is_among(t.untyped_storage(), shared):
                set_tag(t, self._public_tag(t, one, records, random))
            elif operator.written:
                self._overwrite(t, one, records, random)
        for name in operator.written:
            written = values.get(name)
            for x in written if isinstance(written, (list, tuple)) else [written]:
                if isinstance(x, Tensor) and not any(x is t for t in outputs):
                    self._overwrite(x, None, records, random)

    def _of_draws(self, inputs: Sequence[Tensor], tags: Sequence[Any], outcome: Exchangeable) -> Exchangeable | Joint:
        """What is made of draws and constants, element by element: joint if one draw is used at several places."""
        drawn = [t for t, tag in zip(inputs, tags, strict=True) if getattr(tag, "is_random", False)]
        parts = [self.is_one_place(t, tag_of(t)) for t in drawn]
        if (any(parts) and not all(parts)) or any(map(overlaps_itself, drawn)):
            return Joint(self.batch)
        for t in drawn[1:]:
            if t.untyped_storage() is drawn[0].untyped_storage() and layout_of(t) != layout_of(drawn[0]):
                return Joint(self.batch)
        return outcome._replace(is_part=any(parts))

    def is_one_place(self, t: Tensor, tag: Any) -> bool:
        """True for a part of draws that may be those of one record."""
        if is_private(tag) or not getattr(tag, "is_random", False) or not t.numel():
            return False
        if getattr(tag, "is_part", False):
            return True
        if covers_storage(t) or t.untyped_storage().nbytes() < self.records * t.element_size():
            return False
        return not any(size % self.records == 0 and stride for size, stride in zip(t.shape, t.stride(), strict=True))

    def _public_tag(self, t: Tensor, outcome: Any, records: int, random: bool) -> Tag:
        """The tag of new public memory."""
        if isinstance(outcome, (Exchangeable, Joint)):
            return outcome
        if isinstance(outcome, Axis) and t.numel():
            rows = rows_of(t, outcome, self.batch, records)
            if rows is not None:
                return rows._replace(is_private=False, is_random=random)
        return Joint(self.batch) if random and outcome is not None else Local(self.batch)

    def _overwrite(self, t: Tensor, outcome: Any, records: int, random: bool) -> None:
        """Tag public memory to which public numbers were written."""
        old = tag_of(t)
        if old is None:
            return
        if covers_storage(t):
            set_tag(t, self._public_tag(t, outcome, records, random))
            return
        if isinstance(old, (Local, Joint, Mixed)):
            return
        by_place: Tag = Joint(self.batch) if random else Local(self.batch)
        if is_private(old):
            reason = "numbers that differ by the place in the batch are written beside records"
            by_place = Mixed(self.batch, calling_line(), "", reason)
        rows = old
        if is_private(old) and not isinstance(old, Rows):
            set_tag(t, by_place)
            return
        if not isinstance(old, Rows):  # one constant, draws, or nothing yet: may be rows of all records
            axis = outcome
            if isinstance(outcome, Exchangeable):
                axis = next(iter(self._exchangeable_axis(t, outcome) or ()), None)
            first = rows_of(t, axis, self.batch, records) if isinstance(axis, Axis) else None
            if first is None:
                set_tag(t, by_place)
                return
            rows = _whole(first)._replace(is_private=False, is_random=random)
        place = arrangement(t, rows)
        is_alike = isinstance(place, Axis) and rows.records == records
        is_alike = is_alike and (isinstance(outcome, Exchangeable) or place == outcome)
        if not is_alike:
            set_tag(t, by_place)
        else:
            is_random = not rows.is_private and (rows.is_random or random)
            set_tag(t, rows._replace(is_random=is_random, number=new_number()))

    def _repeated(self, values: dict[str, Any], x: Tensor, tag: Any, output: Tensor) -> tuple[Any, int]:
        """The dimension along which a public tensor was repeated a multiple of R times."""
        times = values["repeats"]
        for dim, count in enumerate(times):
            if count > 1 and count % self.records == 0 and output.shape[dim]:
                return Axis(dim, 1, output.shape[dim] // count), count
        if isinstance(tag, Exchangeable):
            return Exchangeable(self.batch) if not tag.is_random else Joint(self.batch), self.records
        return None, self.records

    def _exchangeable_outcome(
        self,
        operator: Operator,
        values: dict[str, Any],
        inputs: Sequence[Tensor],
        tags: Sequence[Any],
        output: Any,
    ) -> tuple[Any, int]:
        """Ask the rule of an operator where its public output is exchangeable."""
        is_copy = operator.name == "copy_" and inputs[1].dim() <= inputs[0].dim()
        if is_copy and (tags[1] is None or isinstance(tags[1], Local)):
            repeated = self._exchangeable_axis(inputs[1].expand(inputs[0].shape), tags[1])
            if repeated is not None:
                return repeated  # the same numbers in each row
        axes: dict[int, Axis] = {}
        records = 0
        is_random = False
        spread: dict[int, tuple[Axis, int] | None] = {}
        for t, tag in zip(inputs, tags, strict=True):
            if isinstance(tag, Exchangeable) and tag.batch == self.batch:
                spread[id(t)] = None
            candidate = self._exchangeable_axis(t, tag)
            if candidate is None:
                continue
            axis, count = candidate
            if records in (0, count) or (count == self.records != records):
                if count != records:
                    axes.clear()
                records = count
                axes[id(t)] = axis
                is_random |= getattr(tag, "is_random", False)
        if any(isinstance(tag, Joint) for tag in tags):
            return Joint(self.batch), self.records
        if not axes or operator.rule is None:
            return (Joint(self.batch) if is_random and axes else None), self.records
        call = Call(operator, values, output, records, axes, spread, lambda reason: None)
        try:
            outcome = operator.rule(call)
        except Exception:  # along the records: numbers by place, or of all draws together
            return (Joint(self.batch) if is_random else None), records
        if isinstance(outcome, Over):
            return (Joint(self.batch) if is_random else None), records
        return outcome, records

    def _exchangeable_axis(self, t: Tensor, tag: Any) -> tuple[Axis, int] | None:
        """The axis along which a public tensor is exchangeable, and over how many."""
        if not t.numel() or (isinstance(tag, (Exchangeable, Rows)) and tag.batch != self.batch):
            return None
        if isinstance(tag, Rows):
            return self.public_axis(t, tag)
        candidates = []
        for dim, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
            if size > 1 and size % self.records == 0 and (isinstance(tag, Exchangeable) or stride == 0):
                candidates.append((size != self.records, dim, size))
        if not candidates:
            return None
        _, dim, size = min(candidates)
        return Axis(dim), size

    def public_axis(self, t: Tensor, rows: Rows) -> tuple[Axis, int] | None:
        """The axis along which a public tensor with rows is exchangeable, and over how many.

        Blocks of rows that are exchangeable are so, too, where the rows are spread over two dimensions by now.
        """
        place = arrangement(t, rows)
        if isinstance(place, Axis):
            return place, rows.records
        blocks, rest = divmod(rows.records, self.records)
        if rest or blocks < 2:
            return None
        place = arrangement(t, rows._replace(run=rows.run * blocks, records=self.records))
        return (place, self.records) if isinstance(place, Axis) else None

    # ------------------------------------------------------------------------------------- records

    def _judge(
        self,
        operator: Operator,
        values: dict[str, Any],
        inputs: Sequence[Tensor],
        tags: Sequence[Any],
        output: Any,
    ) -> Any:
        """The outcome of an operator: as a rule says, or a tag; None if its output is public."""
        by_tag = _ByTag(self, operator, values)
        overwritten = _overwritten(operator, values)
        for t, tag in zip(inputs, tags, strict=True):
            if tag is not None and not isinstance(tag, Local) and not _is_among(t, overwritten):
                by_tag.add(t, tag)
        axes, parts, totals, mixed = by_tag.axes, by_tag.parts, by_tag.totals, by_tag.mixed
        if operator.name in _LIKE or not (axes or parts or totals or mixed):
            return None
        if operator.reads:
            self.note_read(operator.name, is_kept=any(tag.is_kept for tag in mixed))
            return Mixed(self.batch, calling_line(), operator.name, "a value or a shape that depends on records")
        if self.records == 1:  # nothing can be mixed but with records of earlier batches
            kept = [tag for tag in mixed if tag.is_kept]
            return kept[0] if kept else Lone(self.batch, 0)
        if mixed:
            return max(mixed, key=lambda tag: tag.is_kept)
        if by_tag.has_joint or (by_tag.has_one_place and axes):
            raise Mixes("numbers that were drawn for the batch together")
        if totals:
            return self._of_totals(operator, values, inputs, totals, bool(axes or parts))
        if parts:
            return self._of_parts(operator, values, inputs, tags, parts, bool(axes), output)
        if operator.rule is None:
            raise Mixes("an operator without a rule")
        read = partial(self.note_read, operator.name)
        call = Call(operator, values, output, self.records, axes, by_tag.exchangeable, read)
        call.is_in_backward = self.is_in_backward
        return operator.rule(call)

    def _of_totals(
        self,
        operator: Operator,
        values: dict[str, Any],
        inputs: Sequence[Tensor],
        totals: Sequence[Total],
        has_records: bool,
    ) -> Total:
        """What an operator makes of sums over records: a sum again, if it is linear."""
        name = operator.name.rstrip("_")
        is_product = name in ("mul", "div", "mm", "bmm", "mv")
        is_divisor = name == "div" and not isinstance(tag_of(inputs[0]), Total)
        is_rounded = values.get("rounding_mode") is not None
        if has_records or name not in _LINEAR or is_rounded or (is_product and (len(totals) > 1 or is_divisor)):
            raise Mixes("a sum over the records is used further")
        kinds = {total.over for total in totals}
        if len(kinds) > 1:
            raise Mixes("sums and means over the records are added")
        (over,) = kinds
        if name == "div" and over is Over.SUM and self._is_multiple(values["other"]):
            over = Over.MEAN
        return Total(self.batch, over)

    def _is_multiple(self, divisor: Any) -> bool:
        """True for a multiple of the number of records."""
        if isinstance(divisor, Tensor):
            if divisor.numel() != 1:
                return False
            divisor = divisor.item()
        return bool(divisor) and float(divisor) % self.records == 0

    def _of_parts(
        self,
        operator: Operator,
        values: dict[str, Any],
        inputs: Sequence[Tensor],
        tags: Sequence[Any],
        parts: Sequence[Lone | Subtotal],
        has_records: bool,
        output: Any,
    ) -> Any:
        """The outcome of an operator on tensors of single records."""
        if has_records:
            raise Mixes("one record is combined with all")
        name = operator.name.rstrip("_")
        if name == "add" and len(parts) == 1 and _adds_zero(values, tags, output):
            return parts[0]
        if all(isinstance(part, Lone) for part in parts) and len({part.record for part in parts}) == 1:  # type: ignore[union-attr]
            own = parts[0]
            assert isinstance(own, Lone)
            histories = tuple(part.history for part in parts)
            made = (operator.name, histories, self._described(operator, values, inputs, tags))
            return Lone(self.batch, own.record, hash(made))
        if name in ("cat", "stack"):
            return self._joined(values, name, parts)
        if name == "add" and len(parts) == 2 and values.get("alpha", 1) == 1:
            return self._added(parts)
        raise Mixes("records are combined")

    def _added(self, parts: Sequence[Lone | Subtotal]) -> Total | Subtotal:
        """A sum of terms of records, each of which counts once and came about as the others."""
        masks = [part.mask if isinstance(part, Subtotal) else 1 << part.record for part in parts]
        if masks[0] & masks[1]:
            raise Mixes("a record is added twice")
        if parts[0].history != parts[1].history:
            raise Mixes("records are treated by their places")
        mask = masks[0] | masks[1]
        if mask == (1 << self.records) - 1:
            return Total(self.batch, Over.SUM)
        return Subtotal(self.batch, mask, parts[0].history)

    def _described(
        self,
        operator: Operator,
        values: dict[str, Any],
        inputs: Sequence[Tensor],
        tags: Sequence[Any],
    ) -> str:
        """A description of what an operator is given, in its order, in which records stand for any."""
        described: list[Any] = _numbers_among(values)
        overwritten = _overwritten(operator, values)
        for t, tag in zip(inputs, tags, strict=True):
            what: Any = "records"
            if _is_among(t, overwritten):
                what = "overwritten"
            elif isinstance(tag, Exchangeable) and tag.batch == self.batch:
                constant = t.flatten()[0].item() if t.numel() and not tag.is_random and not t.is_meta else None
                what = ("drawn", tag.history) if tag.is_random else constant
            elif isinstance(tag, Unwritten):
                what = "unwritten"
            elif not is_private(tag):
                what = self._identity(t)
            described.append(
                (what, t.dtype, () if is_private(tag) and not _is_among(t, overwritten) else tuple(t.shape))
            )
        return repr(described)

    def _identity(self, t: Tensor) -> Any:
        """Numbers of a small public tensor, or where in memory a large one lies."""
        if t.numel() <= _SMALL and not t.is_meta:
            return t.tolist()
        storage = t.untyped_storage()
        self._compared.append(storage)
        return storage._cdata, t.storage_offset(), t.stride(), t._version

    def _joined(self, values: dict[str, Any], name: str, parts: Sequence[Lone | Subtotal]) -> Axis:
        """Tensors of single records, in their order, become rows."""
        tensors = values["tensors"]
        order = [part.record if isinstance(part, Lone) else -1 for part in parts]
        if len(tensors) != self.records or order != list(range(self.records)):
            raise Mixes("some records, or records in another order, are joined")
        if len({part.history for part in parts}) > 1:
            raise Mixes("records are treated by their places")
        dims = tensors[0].dim() + (name == "stack")
        dim = values.get("dim", 0) % dims
        sizes = {t.shape[dim] for t in tensors} if name == "cat" else {1}
        if len(sizes) > 1:
            raise Mixes("records of several lengths are joined")
        return Axis(dim, 1, sizes.pop())

    # ------------------------------------------------------------------------------------- what is given

    def _give_all(self, outputs: Sequence[Tensor], outcome: Any, shared: Sequence[Any]) -> None:
        per_output = isinstance(outcome, list)
        for i, t in enumerate(outputs):
            if _is_among(t.untyped_storage(), shared):
                continue
            one = outcome
            if per_output:
                one = outcome[i] if i < len(outcome) else None
            self._give(t, _of_output(one, i))

    def _give(self, t: Tensor, outcome: Outcome | Tag) -> None:
        """Tag new memory."""
        set_tag(t, self._tag_for(t, outcome))

    def _tag_for(self, t: Tensor, outcome: Outcome | Tag) -> Tag:
        if outcome is None:
            return Local(self.batch)
        if isinstance(outcome, Over):
            return Total(self.batch, outcome)
        if isinstance(outcome, (Lone, Subtotal)):
            return outcome._replace(layout=layout_of(t))
        if not isinstance(outcome, Axis):
            return outcome
        if not t.numel():
            return Rows(self.batch, 1, self.records, 0)
        rows = rows_of(t, outcome, self.batch, self.records)
        if rows is None:
            return Mixed(self.batch, calling_line(), "", f"an output that does not have its records along {outcome}")
        return rows

    def _write(self, operator: Operator, target: Any, outcome: Any) -> None:
        """Tag memory that was written to."""
        if isinstance(target, (list, tuple)):
            for t in target:
                set_tag(t, self.mix(operator.name, "records are written to a list of tensors"))
            return
        if not isinstance(target, Tensor) or not target.numel():
            return
        new = outcome[0] if isinstance(outcome, list) else outcome
        old = tag_of(target)
        if old is None or old.batch != self.batch:
            event = Event(calling_line(), operator.name, "records are written to what outlives the step")
            _note(self.writes, event)
            set_tag(target, Mixed(self.batch, *event))
            return
        if isinstance(new, Mixed):
            set_tag(target, new)
        elif covers_storage(target):
            self._give(target, new)
        else:
            set_tag(target, self._written_in_part(operator, target, old, new))

    def _written_in_part(self, operator: Operator, target: Tensor, old: Any, new: Any) -> Tag:
        """The tag of memory of which a part is overwritten."""
        if isinstance(old, Mixed):
            return old
        if self.records == 1:
            return Lone(self.batch, 0)
        if isinstance(old, Lone) and isinstance(new, Lone) and old.record == new.record:
            return new._replace(layout=old.layout)  # its history has the old one, as the target was an input
        if isinstance(old, Rows):
            place = arrangement(target, old)
            if isinstance(new, Axis) and place == new and (old.is_private or old.records == self.records):
                return old._replace(is_private=True, number=new_number())
            if isinstance(new, Lone) and place == new.record and old.history == self._written_history(target, new, old):
                return old._replace(unwritten=old.unwritten & ~(1 << new.record))
        if isinstance(old, (Exchangeable, Unwritten)):
            if isinstance(new, Axis):
                rows = rows_of(target, new, self.batch, self.records)
                if rows is not None:
                    return _whole(rows)
            if isinstance(new, Lone):
                run, rest = divmod(target.untyped_storage().nbytes(), self.records)
                rows = Rows(self.batch, max(run, 1), self.records, 0, number=new_number())
                if not rest and arrangement(target, rows) == new.record:
                    return rows._replace(
                        history=self._written_history(target, new, rows),
                        unwritten=((1 << self.records) - 1) & ~(1 << new.record),
                    )
        if old == new:
            return old  # type: ignore[no-any-return]
        return self.mix(operator.name, "written beside other records or public numbers")

    def _written_history(self, target: Tensor, new: Lone, rows: Rows) -> int:
        """How a record's part of memory came about, and where in it that lies."""
        return hash((new.history, history_of(target, rows._replace(history=None, number=0))))


class _ByTag:
    """Inputs of an operator by what their tags say.

    Args:
        axis: The mode.
        operator: The operator.
        values: Arguments by name.

    Attributes:
        axes: id of an input → where it has its records.
        exchangeable: id of a public input → the axis along which it is exchangeable, and over how many; None for each.
        parts: Tags of inputs that belong to single records.
        totals: Tags of sums over all records.
        mixed: Tags of inputs in which records cannot be told apart.
        has_joint: True if some public numbers were drawn for the batch together.
        has_one_place: True if some are those of one place, of draws that may be one for each record.
    """

    def __init__(self, axis: RecordAxis, operator: Operator, values: dict[str, Any]) -> None:
        self.axes: dict[int, Axis] = {}
        self.exchangeable: dict[int, tuple[Axis, int] | None] = {}
        self.parts: list[Lone | Subtotal] = []
        self.totals: list[Total] = []
        self.mixed: list[Mixed] = []
        self.has_joint = False
        self.has_one_place = False
        self._axis = axis
        self._operator = operator
        self._written = [values.get(name) for name in operator.written]

    def add(self, t: Tensor, tag: Tag) -> None:
        """Add an input."""
        if not is_private(tag):
            self._add_public(t, tag)
        elif tag.batch != self._axis.batch:
            event = Event(calling_line(), self._operator.name, "records of an earlier batch")
            self.mixed.append(Mixed(self._axis.batch, *event, is_kept=True))
        elif isinstance(tag, Rows):
            self._add_rows(t, tag)
        elif isinstance(tag, (Lone, Subtotal)):
            self.parts.append(seen_through(t, tag))
        elif isinstance(tag, Total):
            self.totals.append(tag)
        elif isinstance(tag, Mixed):
            self.mixed.append(tag)

    def _add_public(self, t: Tensor, tag: Tag) -> None:
        if isinstance(tag, Unwritten):
            if t.numel() and not _is_among(t, self._written):
                self.mixed.append(self._axis.mix(self._operator.name, "memory that unseen code wrote"))
            self.exchangeable[id(t)] = None
            return
        if tag.batch != self._axis.batch:
            return  # by now these are numbers by place
        self.has_one_place |= self._axis.is_one_place(t, tag)
        self.has_joint |= isinstance(tag, Joint) or (getattr(tag, "is_random", False) and overlaps_itself(t))
        if isinstance(tag, Exchangeable):
            self.exchangeable[id(t)] = None
        elif isinstance(tag, Rows):
            public = self._axis.public_axis(t, tag)
            if public is not None:
                self.exchangeable[id(t)] = public

    def _add_rows(self, t: Tensor, rows: Rows) -> None:
        if not t.numel():
            return
        place = arrangement(t, rows)
        if place is None or is_unwritten(rows, place):
            self.mixed.append(self._axis.mix(self._operator.name, "a part of the batch"))
        elif isinstance(place, Axis):
            self.axes[id(t)] = place
        else:
            self.parts.append(Lone(self._axis.batch, place, history_of(t, rows)))


def _overwritten(operator: Operator, values: dict[str, Any]) -> list[Any]:
    """The tensors that an operator writes to without a look.

    Not a part of records' memory: that has to be the same part of each record, or one record's by a loop.
    """
    if operator.name in _OVERWRITES:
        target = values["self"]
        tag = tag_of(target)
        if covers_storage(target) or not is_private(tag):
            return [target]
        is_by_loop = isinstance(tag, Rows) and isinstance(arrangement(target, tag), int)
        source = values.get("src")
        return [target] if is_by_loop and source is not None and is_private(tag_of(source)) else []
    return [values[name] for name in operator.written if name.startswith("out") and name in values]


def _whole(rows: Rows) -> Rows:
    """The tag of a part of memory for all of it."""
    start = rows.base % (rows.run * rows.records)
    return rows._replace(base=start if start >= rows.run else 0)


def _of_output(outcome: Any, place: int) -> Any:
    """The outcome of one of several outputs, of which each has its own history."""
    if isinstance(outcome, Lone) and place:
        return outcome._replace(history=hash((outcome.history, place)))
    return outcome


def _numbers_among(values: dict[str, Any]) -> list[Any]:
    """Arguments that are no tensors, by name."""
    numbers = []
    for name, value in values.items():
        listed = value if isinstance(value, (list, tuple)) else [value]
        numbers += [(name, repr(x)) for x in listed if not isinstance(x, Tensor)]
    return numbers


def _history_of_draws(operator: Operator, values: dict[str, Any]) -> int:
    """A hash of a distribution, whatever the shape."""
    numbers = [entry for entry in _numbers_among(values) if entry[0] not in ("size", "generator")]
    return hash((operator.name, repr(numbers)))


def _adds_zero(values: dict[str, Any], tags: Sequence[Any], output: Any) -> bool:
    """True if a tensor of records is added to nothing, as Python's `sum` does with the first."""
    given = [values["self"], values["other"]]
    if any(not isinstance(x, Tensor) and x != 0 for x in given):
        return False
    for t, tag in zip([x for x in given if isinstance(x, Tensor)], tags, strict=True):
        if not is_private(tag):
            if not isinstance(tag, Exchangeable) or tag.history != _OF_ZEROS:
                return False
        elif t.shape != output.shape or t.dtype != output.dtype:
            return False
    return True


def _note(events: list[Event], event: Event) -> None:
    if event not in events:
        events.append(event)


def _is_among(storage: Any, storages: Sequence[Any]) -> bool:
    return any(storage is other for other in storages)


def _is_expanded(t: Tensor, records: int) -> bool:
    """True if a public tensor is repeated along a dimension that may run over the records."""
    for size, stride in zip(t.shape, t.stride(), strict=True):
        if stride == 0 and size > 1 and size % records == 0:
            return True
    return False


def tensors_among(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Tensors among the arguments of an operator, those in lists included."""
    tensors = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += [x for x in value if isinstance(x, Tensor)]
    return tensors
