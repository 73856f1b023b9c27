"""Random numbers that follow the records of a lot: a row draws the same ones whatever the size and order of the lot."""

from __future__ import annotations

import functools
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Places = NDArray[np.int64]
Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
"""Sizes and shapes of the arguments of one draw."""
# Draws of one kind before shared numbers change, since a loop may wait for others.
_DRAWS_PER_ROW = 16
_FEWEST_DRAWS = 256


class Axis(NamedTuple):
    """Where a tensor holds the rows of a lot.

    Attributes:
        dimension: That holds them.
        entries: Number of entries of each row along it.
    """

    dimension: int
    entries: int


class Placement(NamedTuple):
    """Where the rows of a draw lie in the draw of the whole lot.

    Attributes:
        shapes: Of sizes and arguments there.
        axes: Of the rows, for each shape; None: it has no rows.
        places: Of each row in the whole lot.
    """

    shapes: Shapes
    axes: tuple[Axis | None, ...]
    places: Places

    def entries(self, number: int) -> Places:
        """Entries of shape `number`, along its dimension of rows."""
        axis = self.axes[number]
        assert axis is not None
        first = self.places[:, None] * axis.entries
        return (first + np.arange(axis.entries)).ravel()


class _Draw(NamedTuple):
    """Name of a function that draws, and the sizes and shapes of arguments that it was called with."""

    name: str
    shapes: Shapes


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
        self._draws_of_whole: list[_Draw] = []
        self._placements: dict[int, Placement] = {}
        self._dimensions: dict[tuple[str, int], int] = {}
        self._repeats: Counter[str] = Counter()
        self.begin(np.arange(rows), whole=True, shared=False)

    def begin(self, places: Places, whole: bool, shared: bool) -> None:
        """Begin a run.

        Args:
            places: Of its rows in the whole lot.
            whole: Whether other runs follow its draws.
            shared: Whether all rows get the same numbers.
        """
        self.shared = shared
        self.irregular = False
        self._is_whole = whole
        self._places = places
        self._call = 0
        self._repeats.clear()
        if whole:
            self._draws_of_whole.clear()
            self._placements.clear()
            self._dimensions.clear()

    def finish(self) -> None:
        """End a run; it is irregular if it drew less often than the whole lot."""
        if not self.shared:
            self.irregular |= self._call != len(self._draws_of_whole)

    def placement(self, name: str, shapes: Shapes) -> Placement | None:
        """Where the next draw lies in that of the whole lot; None where it is made as it is asked for.

        Args:
            name: Of the function.
            shapes: Sizes and shapes of arguments that it is called with.
        """
        number = self._call
        self._call += 1
        if self._is_whole:
            self._draws_of_whole.append(_Draw(name, shapes))
            return None
        of_whole = self._draw_of_whole(number)
        if of_whole is None or of_whole.name != name:
            self.irregular = True
            return None
        if len(self._places) == self.rows:
            return self._in_other_order(number, shapes, of_whole.shapes)
        try:
            axes = self._axes(shapes, of_whole.shapes)
        except ValueError:
            self.irregular = True
            return None
        for shape, axis in zip(shapes, axes, strict=True):
            if axis is not None:
                self._dimensions[name, len(shape)] = axis.dimension
                self.irregular |= axis.entries > 1  # they may lie in any order
            elif shape:
                self.irregular |= shape[0] >= self.rows  # of which the first rows may be taken
        placement = Placement(of_whole.shapes, axes, self._places)
        self._placements[number] = placement
        return placement if any(axes) else None

    def _draw_of_whole(self, number: int) -> _Draw | None:
        """A draw of the whole lot; None if it has made fewer."""
        draws = self._draws_of_whole
        return draws[number] if number < len(draws) else None

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
        return count // (_DRAWS_PER_ROW * self.rows + _FEWEST_DRAWS)

    def _in_other_order(
        self,
        number: int,
        shapes: Shapes,
        whole: Shapes,
    ) -> Placement | None:
        """Where a draw for all rows lies, by where it lay in a run of a part of the lot."""
        if shapes != whole:
            self.irregular = True
        in_order = np.array_equal(self._places, np.arange(self.rows))
        if self.irregular or in_order:
            return None
        placement = self._placements.get(number)
        if placement is None or not any(placement.axes):
            return None
        return placement._replace(places=self._places)

    def _axes(self, shapes: Shapes, whole: Shapes) -> tuple[Axis | None, ...]:
        """Where the rows are, for each shape.

        Raises:
            ValueError: Some shape differs from that of the whole lot by something else.
        """
        pairs = zip(shapes, whole, strict=True)
        return tuple(self._axis(shape, whole_shape) for shape, whole_shape in pairs)

    def _axis(self, shape: Shape, whole: Shape) -> Axis | None:
        """Where the rows are, by the dimension in which a draw differs from that of the whole lot.

        Raises:
            ValueError: The shapes differ by something else.
        """
        differing = []
        for dimension, sizes in enumerate(zip(shape, whole, strict=True)):
            if sizes[0] != sizes[1]:
                differing.append(dimension)
        if not differing:
            return None
        (dimension,) = differing
        entries, remainder = divmod(whole[dimension], self.rows)
        size = entries * len(self._places)
        if remainder or not entries or shape[dimension] != size:
            raise ValueError
        return Axis(dimension, entries)


def _operators(*names: str) -> set[Any]:
    return {getattr(torch.ops.aten, name).default for name in names}


# They take as many random numbers for an entry as its value asks for: a row at a time.
_UNEVEN = _operators(
    "poisson",
    "_standard_gamma",
    "_sample_dirichlet",
    "binomial",
    "rrelu_with_noise",
)
# Their tensor says nothing but the shape.
_OF_SHAPE = _operators(
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
_OF_SHAPE.add(torch.ops.aten.bernoulli_.float)


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
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
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
        if placement is None:
            return call.drawn(seed)
        return call.placed(seed, placement)


Cut = tuple[int, Tensor]
"""A dimension, and the entries along it that are taken."""


class _Call:
    """One call of an operator that draws.

    Args:
        func: The operator.
        args: Of the call.
        kwargs: Of the call.
        generator: Draws the numbers.
    """

    def __init__(
        self,
        func: Any,
        args: list[Any],
        kwargs: dict[str, Any],
        generator: torch.Generator,
    ) -> None:
        self._func = func
        self._args = args
        self._kwargs = kwargs
        self._generator = generator
        self.name = str(func)
        # Positions of the arguments that say how much is drawn.
        self._sized = [i for i, x in enumerate(args) if _is_sized(x)]
        is_multinomial = func is torch.ops.aten.multinomial.default
        self._samples = is_multinomial and args[0].dim() == 1
        if self._samples:  # from one distribution, as many as there are rows
            self._sized.append(1)

    @property
    def shapes(self) -> Shapes:
        """Sizes and shapes of tensors that the operator is called with."""
        return tuple(_shape(self._args[i]) for i in self._sized)

    @property
    def _written(self) -> list[int]:
        """Positions of the arguments that the operator writes to."""
        arguments = self._func._schema.arguments[: len(self._args)]
        return [i for i, argument in enumerate(arguments) if _is_written(argument)]

    @property
    def _in_place(self) -> bool:
        returned = self._func._schema.returns
        return len(returned) == 1 and _is_written(returned[0])

    def drawn(self, seed: int) -> Any:
        """All entries, in the order of a contiguous tensor."""
        return self._drawn(seed, self._contiguous_args(), {})

    def placed(self, seed: int, placement: Placement) -> Any:
        """Rows of the draw that the whole lot makes from the same seed."""
        args = self._contiguous_args()
        cuts: dict[int, Cut] = {}
        for number, i in enumerate(self._sized):
            axis = placement.axes[number]
            if axis is not None:
                index = torch.from_numpy(placement.entries(number))
                cut = (axis.dimension, index.to(self._generator.device))
                args[i] = _enlarged(args[i], placement.shapes[number], *cut)
                cuts[i] = cut
        return self._drawn(seed, args, cuts)

    def by_rows(self, seed: int, placement: Placement | None) -> Any:
        """Each row of dimension 0 from a seed of its own."""
        places: Iterable[int] = range(self.shapes[0][0])
        axis = None if placement is None else placement.axes[0]
        if placement is not None and axis is not None:
            if axis.dimension != 0:
                return self.placed(seed, placement)
            places = placement.entries(0).tolist()
        return self._from_seeds([seed + place for place in places], 0)

    def shared(self, draws: RowDraws) -> Any:
        """The same numbers for each row."""
        seed = draws.shared_seed(self.name)
        if not self._sized or self._samples:
            return self._seeded(seed, self._args)
        shape = self.shapes[0]
        dimension = draws.shared_dimension(self.name, shape)
        return self._from_seeds([seed] * shape[dimension], dimension)

    def _contiguous_args(self) -> list[Any]:
        return [x.contiguous() if isinstance(x, Tensor) else x for x in self._args]

    def _drawn(self, seed: int, args: list[Any], cuts: Mapping[int, Cut]) -> Any:
        """Draw with other arguments in the place of the call's own.

        Args:
            seed: Of the draw.
            args: For each of the call's arguments the same, laid out otherwise or enlarged.
            cuts: What of the enlarged ones is the call's, by position; of the output it is the same as of the first.
        """
        output = self._seeded(seed, args)
        for i in self._written:
            written = args[i]
            if i in cuts:
                written = written.index_select(*cuts[i])
            if written is not self._args[i]:
                self._args[i].copy_(written)
        if self._in_place:
            return self._args[0]
        if not cuts:
            return output
        dimension, index = next(iter(cuts.values()))
        if isinstance(output, Tensor):
            return output.index_select(dimension, index)
        outputs = [x.index_select(dimension, index) for x in output]
        return type(output)(outputs)

    def _from_seeds(self, seeds: list[int], dimension: int) -> Any:
        """Draw each row along a dimension by itself, from its own seed."""
        # One row's draw is that of all from one seed, where no argument differs among rows.
        has_rows = any(isinstance(x, Tensor) for x in self._args)
        if self._func in _OF_SHAPE:
            has_rows = False
        is_repeated = len(set(seeds)) == 1 and not has_rows
        distinct = seeds[:1] if is_repeated else seeds
        outputs = []
        for row, seed in enumerate(distinct):
            args = [_row(x, row, dimension, len(seeds)) for x in self._args]
            outputs.append(self._seeded(seed, args))
        if self._in_place:
            target = self._args[0]
            if len(outputs) < len(seeds):
                row_of_all = outputs[0].clone()
                target.copy_(row_of_all.expand_as(target))
            return target
        if not outputs:
            return self._seeded(0, self._args)
        if is_repeated:
            outputs *= len(seeds)
        if isinstance(outputs[0], Tensor):
            return torch.cat(outputs, dimension)
        parts = [torch.cat(rows, dimension) for rows in zip(*outputs, strict=True)]
        return type(outputs[0])(parts)

    def _seeded(self, seed: int, args: Sequence[Any]) -> Any:
        """Call the operator from a seed; the generator is left as it was."""
        state = self._generator.get_state()
        self._generator.manual_seed(seed)
        try:
            return self._func(*args, **self._kwargs)
        finally:
            self._generator.set_state(state)


def _row(x: Any, row: int, dimension: int, count: int) -> Any:
    """One row of an argument: of a tensor that has `count` along the dimension, or of a size."""
    if isinstance(x, Tensor):
        has_rows = x.dim() > dimension and x.shape[dimension] == count
        return x.narrow(dimension, row, 1) if has_rows else x
    if _is_size(x) and len(x) > dimension:
        size = list(x)
        size[dimension] = 1
        return size
    return x


def _is_sized(x: Any) -> bool:
    """Whether an argument says how much is drawn."""
    if isinstance(x, Tensor):
        return x.dim() > 0
    return _is_size(x)


def _is_size(x: Any) -> bool:
    if not isinstance(x, list | tuple) or not x:
        return False
    return all(isinstance(n, int) for n in x)


def _is_written(value: Any) -> bool:
    """Whether an operator writes to an argument, or returns one that it has written to."""
    alias = value.alias_info
    return alias is not None and bool(alias.is_write)


def _shape(x: Any) -> Shape:
    if isinstance(x, Tensor):
        return tuple(x.shape)
    if isinstance(x, int):
        return (x,)
    return tuple(x)


def _enlarged(x: Any, shape: Shape, dimension: int, index: Tensor) -> Any:
    """An argument for the whole lot: rows at their places, and the first row in all others."""
    if isinstance(x, int):
        return shape[0]
    if not isinstance(x, Tensor):
        return list(shape)
    zeros = torch.zeros(shape[dimension], dtype=torch.long, device=x.device)
    enlarged = x.index_select(dimension, zeros)
    return enlarged.index_copy_(dimension, index.to(x.device), x)


def _generator(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Generator | None:
    """The generator that an operator draws from; None on devices whose generators are unknown."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, torch.Generator):
            return x
    devices = [x.device for x in args if isinstance(x, Tensor)]
    device = devices[0] if devices else torch.device(kwargs.get("device") or "cpu")
    if device.type == "cpu":
        return torch.default_generator
    if device.type != "cuda":
        return None
    number = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[number]


def _seed(generator: torch.Generator) -> int:
    number = torch.empty((), dtype=torch.int64, device=generator.device)
    return int(number.random_(generator=generator)) >> 1
