"""Claims of rules, compared with what changes when records of an operator's inputs are exchanged.

The inputs are PyTorch's own samples of each operator. Each dimension of each input is taken for that of the records,
with all ways to fold it; then one record is replaced, two are swapped, and only what the tags name may change.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dpbench.privacy.record_axis.host import watched
from dpbench.privacy.record_axis.tags import Axis, Mixed, Over, Rows, Total, arrangement, has_plain_memory, tag_of
from dpbench.privacy.record_axis.verdict import new_axis

Run = Callable[[Sequence[Any]], Any]
_SEED = 3
_MOST_RECORDS = 12


class Choice(NamedTuple):
    """Where inputs have their records.

    Attributes:
        records: R.
        axes: Position of an input among the leaves → its axis.
    """

    records: int
    axes: dict[int, Axis]


class Violation(NamedTuple):
    """A claim that does not hold.

    Attributes:
        operator: Name of the sample's operator.
        output: Position of the output.
        claim: What its tag says.
        choice: Where the inputs had their records.
        change: What was changed.
        shapes: Shapes of the inputs.
    """

    operator: str
    output: int
    claim: str
    choice: Choice
    change: str
    shapes: list[Any]


class Tally:
    """Counts of a run.

    Attributes:
        checked: Comparisons.
        claimed: Operators of which an output had an axis or a total at least once.
        violations: Claims that do not hold.
    """

    def __init__(self) -> None:
        self.checked = 0
        self.claimed: set[str] = set()
        self.violations: list[Violation] = []


def is_strided(x: Any) -> bool:
    return isinstance(x, Tensor) and has_plain_memory(x)


def copied(leaves: Sequence[Any], is_transposed: bool = False) -> list[Any]:
    """Copies of all tensors, perhaps with their dimensions in another order in memory."""
    copies = []
    for x in leaves:
        if not is_strided(x):
            copies.append(x)
        elif is_transposed and x.dim() > 1:
            copies.append(x.transpose(0, -1).contiguous().transpose(0, -1))
        else:
            copies.append(x.clone())
    return copies


def foldings(size: int) -> list[tuple[int, int, int]]:
    """All (outer, R, inner) with the product `size` and R from 2 on."""
    ways = []
    for records in range(2, min(size, _MOST_RECORDS) + 1):
        if size % records:
            continue
        rest = size // records
        for inner in range(1, rest + 1):
            if rest % inner == 0:
                ways.append((rest // inner, records, inner))
    return ways


def choices(leaves: Sequence[Any], rng: random.Random, most: int) -> list[Choice]:
    """Some of the ways to take dimensions of inputs for the records."""
    places = [i for i, x in enumerate(leaves) if is_strided(x) and x.dim() and x.numel()]
    made = []
    for i in places:
        for dim, size in enumerate(leaves[i].shape):
            for outer, records, inner in foldings(size):
                fold = (outer, inner)
                made.append(Choice(records, {i: Axis(dim, *fold)}))
                from_end = leaves[i].dim() - dim
                alike = {}
                first = {}
                for j in places:
                    other = leaves[j]
                    if other.dim() >= from_end and other.shape[other.dim() - from_end] == size:
                        alike[j] = Axis(other.dim() - from_end, *fold)
                    if other.dim() > dim and other.shape[dim] == size:
                        first[j] = Axis(dim, *fold)
                made += [Choice(records, together) for together in (alike, first) if len(together) > 1]
    unique = list({str(choice): choice for choice in made}.values())
    rng.shuffle(unique)
    # Plain axes are what steps have most; folded ones have their turn, too.
    unique.sort(key=lambda choice: any(axis[1:] != (1, 1) for axis in choice.axes.values()))
    plain = sum(all(axis[1:] == (1, 1) for axis in choice.axes.values()) for choice in unique)
    folded = unique[plain:]
    return unique[: min(plain, most)] + folded[: max(most // 3, 1)]


def by_record(t: Tensor, axis: Axis, records: int) -> Tensor:
    """A view with the records in dimension 0."""
    shape = [*t.shape[: axis.dim], axis.outer, records, axis.inner, *t.shape[axis.dim + 1 :]]
    return t.reshape(shape).movedim(axis.dim + 1, 0)


def with_records(
    leaves: Sequence[Any], choice: Choice, order: Sequence[int], replaced: Sequence[int] = ()
) -> list[Any]:
    """Copies of inputs with other records.

    Args:
        leaves: Inputs.
        choice: Where they have their records.
        order: Record that comes to each place.
        replaced: Places whose record is made another one.
    """
    changed = copied(leaves)
    for i, axis in choice.axes.items():
        original = by_record(leaves[i].contiguous(), axis, choice.records)
        rows = original[list(order)].clone()
        for k, place in enumerate(replaced):
            other = original[(place + 1) % choice.records]
            rows[place] = _other_record(rows[place], other, 0.02 * (k + 1))
        sizes = leaves[i].shape
        moved = rows.movedim(0, axis.dim + 1).reshape(sizes)
        changed[i] = moved.contiguous()
    return changed


def _other_record(own: Tensor, other: Tensor, shift: float) -> Tensor:
    if own.dtype.is_floating_point or own.dtype.is_complex:
        mean = 0.5 * other + 0.4 * own
        is_bounded = not own.dtype.is_complex and bool((own >= 0).all() and (own <= 1).all())
        return mean if is_bounded else mean + shift
    if own.dtype is torch.bool:
        return ~own
    return other


def outputs_of(run: Run, leaves: Sequence[Any]) -> list[Tensor]:
    torch.manual_seed(_SEED)
    return [t for t in tree_leaves(run(leaves)) if isinstance(t, Tensor)]


def claims_of(run: Run, leaves: Sequence[Any], choice: Choice, is_transposed: bool) -> list[Any] | None:
    """What tags say of each output; None where values are read, which nothing is claimed of."""
    axis = new_axis(choice.records)
    inputs = copied(leaves, is_transposed)
    for i, place in choice.axes.items():
        inputs[i] = inputs[i].contiguous() if not is_transposed else inputs[i]
        axis.tag(inputs[i], place)
        if axis.place_of(inputs[i]) != place:
            return None
    torch.manual_seed(_SEED)
    with watched(axis), axis:
        output = run(inputs)
    if axis.reads:
        return None
    return [_claim(axis.batch, t) for t in tree_leaves(output) if isinstance(t, Tensor)]


def _claim(batch: int, t: Tensor) -> Any:
    if not has_plain_memory(t):
        return "mixed"
    tag = tag_of(t)
    if isinstance(tag, Rows) and tag.is_private:
        if not t.numel():
            return "empty"
        return arrangement(t, tag) or "mixed"
    if isinstance(tag, Total):
        return tag.over
    return "mixed" if isinstance(tag, Mixed) else "public"


def check(
    name: str,
    run: Run,
    leaves: Sequence[Any],
    choice: Choice,
    tally: Tally,
    is_transposed: bool = False,
    draws: bool = False,
) -> None:
    """Compare the claims of one choice with what changes.

    Args:
        name: Of the operator.
        run: Leaves → outputs.
        leaves: Inputs.
        choice: Where they have their records.
        tally: Takes note.
        is_transposed: Whether the memory of inputs is in another order.
        draws: Whether the operator draws random numbers, which do not follow records.
    """
    try:
        plain = outputs_of(run, copied(leaves))
        claims = claims_of(run, leaves, choice, is_transposed)
    except Exception:
        return
    if claims is None or len(claims) != len(plain):
        return
    if any(isinstance(claim, (Axis, Over)) for claim in claims):
        tally.claimed.add(name)
    if all(claim in ("mixed", "empty") for claim in claims):
        return
    records = choice.records
    order = list(range(records))
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else x for x in leaves][:8]

    def compare(change: str, new: Sequence[Tensor], is_right: Callable[[Any, Tensor, Tensor], bool]) -> None:
        for k, (old, now, claim) in enumerate(zip(plain, new, claims, strict=False)):
            if isinstance(claim, str) and claim in ("mixed", "empty"):
                continue
            tally.checked += 1
            if old.shape != now.shape or not is_right(claim, old, now):
                tally.violations.append(Violation(name, k, str(claim), choice, change, shapes))

    for place in (0, records - 1):
        try:
            new = outputs_of(run, with_records(leaves, choice, order, [place]))
        except Exception:
            continue
        compare(
            f"record {place} is another",
            new,
            lambda claim, old, now, place=place: _only(claim, old, now, place, records),
        )
    if not draws:
        swapped = [*reversed(order)]
        try:
            new = outputs_of(run, with_records(leaves, choice, swapped))
        except Exception:
            return
        compare("reversed", new, lambda claim, old, now: _permuted(claim, old, now, swapped, records))
        _check_totals(name, run, leaves, choice, tally, plain, claims, shapes)


def _close(old: Tensor, now: Tensor) -> bool:
    if not has_plain_memory(old):
        return True
    exact = not (old.dtype.is_floating_point or old.dtype.is_complex)
    if exact:
        return torch.equal(old, now)
    kind = torch.complex128 if old.dtype.is_complex else torch.float64
    return torch.allclose(old.to(kind), now.to(kind), rtol=1e-4, atol=1e-5, equal_nan=True)


def _only(claim: Any, old: Tensor, now: Tensor, place: int, records: int) -> bool:
    """Nothing changed but what is claimed of the record at a place."""
    if isinstance(claim, Over):
        return True
    if claim == "public":
        return _close(old, now)
    others = [r for r in range(records) if r != place]
    return _close(by_record(old, claim, records)[others], by_record(now, claim, records)[others])


def _permuted(claim: Any, old: Tensor, now: Tensor, order: Sequence[int], records: int) -> bool:
    """Records have moved to their new places, and are treated as at their old ones."""
    if isinstance(claim, Over) or claim == "public":
        return _close(old, now)
    return _close(by_record(old, claim, records)[list(order)], by_record(now, claim, records))


def _check_totals(
    name: str,
    run: Run,
    leaves: Sequence[Any],
    choice: Choice,
    tally: Tally,
    plain: Sequence[Tensor],
    claims: Sequence[Any],
    shapes: list[Any],
) -> None:
    """A total is the mean, over records, of what it is if all records are that one."""
    if not any(isinstance(claim, Over) for claim in claims):
        return
    alone = []
    for record in range(choice.records):
        try:
            alone.append(outputs_of(run, with_records(leaves, choice, [record] * choice.records)))
        except Exception:
            return
    for k, claim in enumerate(claims):
        if isinstance(claim, Over) and plain[k].is_floating_point():
            mean = torch.stack([outputs[k].double() for outputs in alone]).mean(0)
            tally.checked += 1
            if not torch.allclose(mean, plain[k].double(), rtol=1e-3, atol=1e-4, equal_nan=True):
                tally.violations.append(Violation(name, k, str(claim), choice, "each alone", shapes))


def samples_of(entry: Any, device: str = "cpu") -> Iterator[tuple[Run, list[Any]]]:
    """PyTorch's samples of an operator, each a function of its leaves; in float64, where rounding changes nothing."""
    dtype = torch.float64 if torch.float64 in entry.dtypes else torch.float32
    for sample in entry.sample_inputs(device, dtype, requires_grad=False):
        leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))

        def run(values: Sequence[Any], spec: Any = spec) -> Any:
            value, args, kwargs = tree_unflatten(list(values), spec)
            return entry(value, *args, **kwargs)

        yield run, leaves


def with_backward(run: Run) -> Run:
    """The gradients of an operator's outputs, of which those with respect to floating-point inputs are returned."""

    def backward(values: Sequence[Any]) -> Any:
        values = [x.detach().requires_grad_() if is_strided(x) and x.is_floating_point() else x for x in values]
        wanted = [x for x in values if isinstance(x, Tensor) and x.requires_grad]
        with torch.enable_grad():
            outputs = [t for t in tree_leaves(run(values)) if isinstance(t, Tensor) and t.requires_grad]
            total = sum(t.square().sum() if not t.is_complex() else t.abs().square().sum() for t in outputs)
        gradients = torch.autograd.grad(total, wanted, allow_unused=True)  # type: ignore[arg-type]
        return [gradient for gradient in gradients if gradient is not None]

    return backward


def fuzz(entry: Any, tally: Tally, samples: int, most: int, backward: bool = False, seed: int = 0) -> None:
    """Check an operator on some of its samples.

    Args:
        entry: Of PyTorch's table of operators.
        tally: Takes note.
        samples: Most samples.
        most: Most choices of each sample.
        backward: Whether the gradients are checked, and not the outputs.
        seed: Of the choices.
    """
    rng = random.Random(f"{entry.formatted_name}{seed}")
    try:
        drawn = list(itertools.islice(samples_of(entry), 200))
    except Exception:
        return
    rng.shuffle(drawn)
    draws = "random" in entry.name or "dropout" in entry.name or entry.name in _DRAWING
    for run, leaves in drawn[:samples]:
        function = with_backward(run) if backward else run
        for k, choice in enumerate(choices(leaves, rng, most)):
            check(entry.formatted_name, function, leaves, choice, tally, is_transposed=k % 3 == 2, draws=draws)


_DRAWING = {
    "bernoulli",
    "cauchy",
    "exponential",
    "geometric",
    "log_normal",
    "multinomial",
    "nn.functional.rrelu",
    "nn.functional.scaled_dot_product_attention",
    "normal",
    "uniform",
}
