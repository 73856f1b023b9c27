"""Random numbers that follow the records of a lot: a row draws the same ones whatever the size and order of the lot."""

from __future__ import annotations

import functools
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Shape = tuple[int, ...]
_PER_ROW, _AT_LEAST = 16, 256  # draws of one kind before shared numbers change: a loop may wait for others


class Placement(NamedTuple):
    """Where the rows of a draw lie in the draw of the whole lot.

    Attributes:
        shapes: Of sizes and arguments there.
        rows: Dimension that holds the rows and number of entries of each row, for each shape; None: it has no rows.
        places: Of each row in the whole lot.
    """

    shapes: tuple[Shape, ...]
    rows: tuple[tuple[int, int] | None, ...]
    places: NDArray[np.int64]

    def entries(self, number: int) -> NDArray[np.int64]:
        """Entries of shape `number`, along its dimension of rows."""
        own = self.rows[number]
        assert own is not None
        count = own[1]
        return (self.places[:, None] * count + np.arange(count)).ravel()


class RowDraws:
    """What the runs of one lot know of their draws: those of the whole lot come first, and others follow them.

    A draw in a part of the lot is made as large as it was in the whole lot, from the same seed, and cut. So each row
    has its own numbers. Where the draws of a part do not correspond to those of the whole lot (a loop over records, a
    draw for half of the rows), `shared` numbers are the alternative: all rows of a draw, and all draws of a kind, get
    the same ones.

    Args:
        rows: Of the whole lot.

    Attributes:
        shared: Whether the present run has shared numbers.
        irregular: Whether a draw of the present run had no counterpart in the whole lot, or one of which nobody knows
            where the rows lie.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.shared = self.irregular = False
        self._places = np.arange(rows)
        self._whole: list[tuple[str, tuple[Shape, ...]]] = []
        self._placements: dict[int, Placement] = {}
        self._dimensions: dict[tuple[str, int], int] = {}
        self._first, self._call = True, 0
        self._repeats: Counter[str] = Counter()

    def begin(self, places: NDArray[np.int64], whole: bool, shared: bool) -> None:
        """Begin a run.

        Args:
            places: Of its rows in the whole lot.
            whole: Whether other runs follow its draws.
            shared: Whether all rows get the same numbers.
        """
        self._places, self._first, self.shared = places, whole, shared
        self.irregular, self._call = False, 0
        self._repeats.clear()
        if whole:
            self._whole.clear()
            self._placements.clear()
            self._dimensions.clear()

    def finish(self) -> None:
        """End a run; it is irregular if it drew less often than the whole lot."""
        self.irregular |= not self.shared and self._call != len(self._whole)

    def placement(self, name: str, shapes: tuple[Shape, ...]) -> Placement | None:
        """Where the next draw lies in that of the whole lot; None where it is made as it is asked for.

        Args:
            name: Of the function.
            shapes: Sizes and shapes of arguments that it is called with.
        """
        number, self._call = self._call, self._call + 1
        if self._first:
            self._whole.append((name, shapes))
            return None
        if number >= len(self._whole) or self._whole[number][0] != name:
            self.irregular = True
            return None
        whole = self._whole[number][1]
        if len(self._places) == self.rows:
            return self._in_other_order(number, shapes, whole)
        try:
            rows = tuple(self._rows_of(a, b) for a, b in zip(shapes, whole, strict=True))
        except ValueError:
            self.irregular = True
            return None
        # Several entries of a row may lie in any order, and of a large draw the first rows may be taken.
        self.irregular |= any(own is not None and own[1] > 1 for own in rows)
        self.irregular |= any(
            own is None and shape and shape[0] >= self.rows for own, shape in zip(rows, shapes, strict=True)
        )
        placement = Placement(whole, rows, self._places)
        self._placements[number] = placement
        for shape, own in zip(shapes, rows, strict=True):
            if own is not None:
                self._dimensions[name, len(shape)] = own[0]
        return placement if any(rows) else None

    def shared_seed(self, name: str) -> int:
        """Seed of a draw that is the same for all rows; it changes at last, for those who draw until it fits."""
        count = self._repeats[name]
        self._repeats[name] += 1
        return zlib.crc32(name.encode()) + self.turn(count)

    def shared_dimension(self, name: str, shape: Shape) -> int:
        """Along which all entries of a draw are the same: that of the rows in like draws, if known, else the first."""
        return self._dimensions.get((name, len(shape)), 0)

    def turn(self, count: int) -> int:
        """How often shared numbers have changed before draw `count` of a kind."""
        return count // (_PER_ROW * self.rows + _AT_LEAST)

    def _in_other_order(self, number: int, shapes: tuple[Shape, ...], whole: tuple[Shape, ...]) -> Placement | None:
        if shapes != whole:
            self.irregular = True
        known = self._placements.get(number)
        if self.irregular or known is None or not any(known.rows) or np.array_equal(self._places, np.arange(self.rows)):
            return None
        return known._replace(places=self._places)

    def _rows_of(self, shape: Shape, whole: Shape) -> tuple[int, int] | None:
        """Dimension of the rows, and entries of each.

        Raises:
            ValueError: The shapes differ by something else.
        """
        differing = [i for i, (a, b) in enumerate(zip(shape, whole, strict=True)) if a != b]
        if not differing:
            return None
        (dimension,) = differing
        entries, rest = divmod(whole[dimension], self.rows)
        if rest or not entries or shape[dimension] != entries * len(self._places):
            raise ValueError
        return dimension, entries


# They take as many random numbers for an entry as its value asks for: a row at a time.
_UNEVEN = {
    torch.ops.aten.poisson.default,
    torch.ops.aten._standard_gamma.default,
    torch.ops.aten._sample_dirichlet.default,
    torch.ops.aten.binomial.default,
    torch.ops.aten.rrelu_with_noise.default,
}


@functools.cache
def _is_random(operator: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operator.tags


class FollowingDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets the draws of torch follow the rows, those inside of layers (dropout, LSTM, attention) included.

    Each draw takes one number from its generator, as a seed, so that a generator is in the same state afterwards
    whatever the number of rows.

    Args:
        draws: Of the lot.
    """

    def __init__(self, draws: RowDraws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_random(func):
            return func(*args, **kwargs)
        generator = _generator(args, kwargs)
        if generator is None:
            return func(*args, **kwargs)
        call = _Call(func, list(args), kwargs, generator)
        if self._draws.shared:
            return call.shared(self._draws)
        seed = _seed(generator)
        placement = self._draws.placement(call.name, call.shapes)
        if func in _UNEVEN:
            return call.by_rows(seed, placement)
        return call.drawn(seed) if placement is None else call.placed(seed, placement)


class _Call:
    """One call of an operator that draws."""

    def __init__(self, func: Any, args: list[Any], kwargs: dict[str, Any], generator: torch.Generator) -> None:
        self._func, self._args, self._kwargs, self._generator = func, args, kwargs, generator
        self.name = str(func)
        self._sized = [i for i, x in enumerate(args) if (isinstance(x, Tensor) and x.dim()) or _is_size(x)]
        self._samples = func is torch.ops.aten.multinomial.default and args[0].dim() == 1
        if self._samples:  # from one distribution, as many as there are rows
            self._sized.append(1)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Sizes and shapes of tensors that the operator is called with."""
        return tuple(_shape(self._args[i]) for i in self._sized)

    @property
    def _written(self) -> list[int]:
        arguments = self._func._schema.arguments
        return [i for i in range(len(self._args)) if (alias := arguments[i].alias_info) is not None and alias.is_write]

    @property
    def _in_place(self) -> bool:
        returned = self._func._schema.returns
        return len(returned) == 1 and returned[0].alias_info is not None and returned[0].alias_info.is_write

    def drawn(self, seed: int) -> Any:
        """All entries, in the order of a contiguous tensor."""
        args = [x.contiguous() if isinstance(x, Tensor) else x for x in self._args]
        output = self._seeded(seed, args)
        for i in self._written:
            if args[i] is not self._args[i]:
                self._args[i].copy_(args[i])
        return self._args[0] if self._in_place else output

    def placed(self, seed: int, placement: Placement) -> Any:
        """Rows of the draw that the whole lot makes from the same seed."""
        args = list(self._args)
        cuts: dict[int, tuple[int, Tensor]] = {}
        device = self._generator.device
        for number, i in enumerate(self._sized):
            own = placement.rows[number]
            if own is not None:
                cuts[i] = own[0], torch.from_numpy(placement.entries(number)).to(device)
                args[i] = _enlarged(args[i], placement.shapes[number], *cuts[i])
            elif isinstance(args[i], Tensor):
                args[i] = args[i].contiguous()
        output = self._seeded(seed, args)
        for i in self._written:
            if i in cuts:
                self._args[i].copy_(args[i].index_select(*cuts[i]))
            elif args[i] is not self._args[i]:
                self._args[i].copy_(args[i])
        if self._in_place:
            return self._args[0]
        cut = next(iter(cuts.values()))
        if isinstance(output, Tensor):
            return output.index_select(*cut)
        return type(output)(x.index_select(*cut) for x in output)

    def by_rows(self, seed: int, placement: Placement | None) -> Any:
        """Each row of dimension 0 from a seed of its own."""
        count = self.shapes[0][0]
        places: Iterable[int] = range(count)
        if placement is not None and placement.rows[0] is not None:
            if placement.rows[0][0]:
                return self.placed(seed, placement)
            places = placement.entries(0).tolist()
        return self._rows([seed + place for place in places], 0)

    def shared(self, draws: RowDraws) -> Any:
        """The same numbers for each row."""
        seed = draws.shared_seed(self.name)
        if not self._sized or self._samples:
            return self._seeded(seed, self._args)
        dimension = draws.shared_dimension(self.name, self.shapes[0])
        return self._rows([seed] * self.shapes[0][dimension], dimension)

    def _rows(self, seeds: list[int], dimension: int) -> Any:
        outputs = []
        for row, seed in enumerate(seeds):
            outputs.append(self._seeded(seed, [self._row(x, row, dimension, len(seeds)) for x in self._args]))
            if len(outputs) == 1 and self._is_same_for_all(seeds):
                outputs *= len(seeds)
                break
        if self._in_place:
            target = self._args[0]
            if outputs and len(outputs) > 1 and outputs[0] is outputs[1]:
                target.copy_(outputs[0].clone().expand_as(target))
            return target
        if not outputs:
            return self._seeded(0, self._args)
        if isinstance(outputs[0], Tensor):
            return torch.cat(outputs, dimension)
        return type(outputs[0])(torch.cat(parts, dimension) for parts in zip(*outputs, strict=True))

    def _is_same_for_all(self, seeds: list[int]) -> bool:
        """Whether one row's draw is that of all: from one seed, with no argument that differs among rows."""
        tensors = [i for i, x in enumerate(self._args) if isinstance(x, Tensor)]
        alone = not tensors or self._func in _OF_SHAPE
        return alone and len(set(seeds)) == 1

    @staticmethod
    def _row(x: Any, row: int, dimension: int, count: int) -> Any:
        if isinstance(x, Tensor):
            return x.narrow(dimension, row, 1) if x.dim() > dimension and x.shape[dimension] == count else x
        if _is_size(x) and len(x) > dimension:
            return [*x[:dimension], 1, *x[dimension + 1 :]]
        return x

    def _seeded(self, seed: int, args: Sequence[Any]) -> Any:
        state = self._generator.get_state()
        self._generator.manual_seed(seed)
        try:
            return self._func(*args, **self._kwargs)
        finally:
            self._generator.set_state(state)


_OF_SHAPE = {  # whose tensor says nothing but the shape
    getattr(torch.ops.aten, name).default
    for name in (
        "rand_like",
        "randn_like",
        "normal_",
        "uniform_",
        "random_",
        "exponential_",
        "cauchy_",
        "geometric_",
        "log_normal_",
        "randint_like",
    )
} | {torch.ops.aten.bernoulli_.float}


def _is_size(x: Any) -> bool:
    return isinstance(x, list | tuple) and bool(x) and all(isinstance(n, int) for n in x)


def _shape(x: Any) -> Shape:
    if isinstance(x, Tensor):
        return tuple(x.shape)
    return (x,) if isinstance(x, int) else tuple(x)


def _enlarged(x: Any, shape: Shape, dimension: int, index: Tensor) -> Any:
    """An argument for the whole lot: rows at their places, and the first row in all others."""
    if isinstance(x, int):
        return shape[0]
    if not isinstance(x, Tensor):
        return list(shape)
    return x.index_select(dimension, torch.zeros(shape[dimension], dtype=torch.long, device=x.device)).index_copy_(
        dimension, index.to(x.device), x
    )


def _generator(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Generator | None:
    """The generator that an operator draws from; None on devices whose generators are unknown."""
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)]
    if given:
        return given[0]
    device = next((x.device for x in args if isinstance(x, Tensor)), None)
    device = torch.device(device or kwargs.get("device") or "cpu")
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator if device.type == "cpu" else None


def _seed(generator: torch.Generator) -> int:
    number = torch.empty((), dtype=torch.int64, device=generator.device)
    return int(number.random_(generator=generator)) >> 1
