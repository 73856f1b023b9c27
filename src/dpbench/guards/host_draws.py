"""Draws of NumPy and of Python's `random` that follow the records of a lot, as those of torch do in `row_draws`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dpbench.guards.row_draws import RowDraws, Shape

# Position of the size that is asked for.
_SIZES = {
    "random": 0,
    "random_sample": 0,
    "ranf": 0,
    "sample": 0,
    "standard_normal": 0,
    "standard_exponential": 0,
    "exponential": 1,
    "rayleigh": 1,
    "standard_t": 1,
    "poisson": 1,
    "geometric": 1,
    "choice": 1,
    "chisquare": 1,
    "pareto": 1,
    "power": 1,
    "weibull": 1,
    "standard_gamma": 1,
    "dirichlet": 1,
    "normal": 2,
    "uniform": 2,
    "integers": 2,
    "randint": 2,
    "random_integers": 2,
    "beta": 2,
    "binomial": 2,
    "gamma": 2,
    "gumbel": 2,
    "laplace": 2,
    "logistic": 2,
    "lognormal": 2,
    "multinomial": 2,
    "multivariate_normal": 2,
    "vonmises": 2,
    "triangular": 3,
}
_DIMENSIONS = ("rand", "randn")  # whose arguments are the size
_OTHERS = ("permutation", "permuted", "shuffle", "bytes")
_NAMES = (*_SIZES, *_DIMENSIONS, *_OTHERS)
_WHOLE = {"choice", "multinomial", "dirichlet", "multivariate_normal", *_OTHERS}  # whose arrays hold no rows
_HELD = ("random", "getrandbits", "gauss")  # methods of `random` that give the same number for all rows
_CONSTANT = 0.6  # that rejection samplers of `random` accept


class _Arguments(NamedTuple):
    """Arguments of a method that draws."""

    positional: tuple[Any, ...]
    named: dict[str, Any]

    def shapes_of_arrays(self) -> list[Shape]:
        """Of all arguments that are arrays with a dimension."""
        values = [*self.positional, *self.named.values()]
        return [x.shape for x in values if isinstance(x, np.ndarray) and x.ndim]

    def row(self, row: int, shape: Shape) -> _Arguments:
        """The same for one row of a draw of some shape."""
        return _Arguments(
            positional=tuple(_row(x, row, shape) for x in self.positional),
            named={name: _row(x, row, shape) for name, x in self.named.items()},
        )

    def size(self, position: int) -> Any:
        """The size that is asked for, None if none is.

        Args:
            position: Of the size, where it has no name.
        """
        default = None
        if len(self.positional) > position:
            default = self.positional[position]
        return self.named.get("size", default)

    def with_size(self, position: int, size: Shape) -> _Arguments:
        """The same for another size."""
        if len(self.positional) <= position:
            return _Arguments(self.positional, {**self.named, "size": size})
        positional = list(self.positional)
        positional[position] = size
        return _Arguments(tuple(positional), self.named)


def _row(x: Any, row: int, shape: Shape) -> Any:
    """One row of an argument, if it is an array with a row for each row of the draw."""
    if isinstance(x, np.ndarray) and x.ndim == len(shape) and len(x) == shape[0]:
        return x[row : row + 1]
    return x


@dataclass(frozen=True)
class _Method:
    """One method of a source of NumPy's: a draw that follows the rows.

    Attributes:
        name: Of the method.
        draws: Of the lot.
        seed: Draws a number from the source.
        fresh: Makes a source from a seed.
    """

    name: str
    draws: RowDraws
    seed: Callable[[], int]
    fresh: Callable[[int], Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = _Arguments(args, kwargs)
        arrays = arguments.shapes_of_arrays()
        shape = self._size(arguments)
        if not shape and arrays and self.name not in _WHOLE:
            shape = np.broadcast_shapes(*arrays)
        if self.draws.shared:
            seed = self.draws.shared_seed(self.name)
            if shape:
                return self._by_rows(arguments, shape, [seed] * shape[0])
            return self._call(self.fresh(seed), arguments)
        seed = self.seed()
        placement = self.draws.placement(f"numpy.{self.name}", (shape,))
        axis = None if placement is None else placement.axes[0]
        if arrays and shape:
            places: Iterable[int] = range(shape[0])
            if placement is not None and axis is not None and axis.dimension == 0:
                places = placement.entries(0).tolist()
            return self._by_rows(arguments, shape, [seed + place for place in places])
        source = self.fresh(seed)
        if placement is None:
            return self._call(source, arguments)
        assert axis is not None
        numbers = self._of_size(source, arguments, placement.shapes[0])
        return np.take(numbers, placement.entries(0), axis=axis.dimension)

    def _by_rows(
        self,
        arguments: _Arguments,
        shape: Shape,
        seeds: Sequence[int],
    ) -> Any:
        """Each row of dimension 0 from a seed of its own."""
        size = (1, *shape[1:])
        rows = []
        for row, seed in enumerate(seeds):
            source = self.fresh(seed)
            numbers = self._of_size(source, arguments.row(row, shape), size)
            rows.append(numbers)
        return np.concatenate(rows) if rows else np.empty(shape)

    def _size(self, arguments: _Arguments) -> Shape:
        """The size that is asked for; empty: a number, or the size of the arguments."""
        if self.name in _DIMENSIONS:
            return arguments.positional
        if self.name not in _SIZES:
            return ()
        size = arguments.size(_SIZES[self.name])
        if size is None:
            return ()
        if isinstance(size, list | tuple):
            return tuple(size)
        return (int(size),)

    def _call(self, source: Any, arguments: _Arguments) -> Any:
        method = getattr(source, self.name)
        return method(*arguments.positional, **arguments.named)

    def _of_size(self, source: Any, arguments: _Arguments, size: Shape) -> Any:
        """Draw from a source, with another size than the one that is asked for."""
        if self.name in _DIMENSIONS:
            return self._call(source, _Arguments(size, {}))
        position = _SIZES[self.name]
        return self._call(source, arguments.with_size(position, size))


class _Generator(np.random.Generator):
    """A generator whose draws follow the rows; its bits are those of another one."""

    def __init__(self, original: np.random.Generator, draws: RowDraws) -> None:
        super().__init__(original.bit_generator)

        def seed() -> int:
            return int(original.integers(1 << 62))

        vars(self).update(_methods_of(original, draws, seed, _fresh_generator))


def _fresh_generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


class _RandomState(np.random.RandomState):
    """The same for NumPy's older kind."""

    def __init__(self, original: np.random.RandomState, draws: RowDraws) -> None:
        super().__init__(original._bit_generator)
        vars(self).update(_methods_of_state(original, draws))


def _methods_of_state(state: np.random.RandomState, draws: RowDraws) -> dict[str, _Method]:
    def seed() -> int:
        return int(state.randint(1 << 31))

    return _methods_of(state, draws, seed, np.random.RandomState)


def _methods_of(
    source: Any,
    draws: RowDraws,
    seed: Callable[[], int],
    fresh: Callable[[int], Any],
) -> dict[str, _Method]:
    """Methods of a source, by name, whose draws follow the rows."""
    names = [name for name in _NAMES if hasattr(source, name)]
    return {name: _Method(name, draws, seed, fresh) for name in names}


class FreshGenerators:
    """`numpy.random.default_rng()` without a seed, which takes one from the operating system: here, from a counter.

    Attributes:
        count: How many a run has made.
    """

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def repeated(self, draws: RowDraws | None) -> Iterator[None]:
        """Have generators made from counted seeds; with `draws`, theirs and those of other seeds follow the rows."""
        self.count = 0
        default_rng = np.random.default_rng

        def seeded(seed: Any = None) -> np.random.Generator:
            if isinstance(seed, np.random.Generator):
                return seed
            if seed is None:
                self.count += 1
                is_shared = draws is not None and draws.shared
                seed = [0, 0 if is_shared else self.count]
            generator = default_rng(seed)
            return generator if draws is None else _Generator(generator, draws)

        np.random.default_rng = seeded
        try:
            yield
        finally:
            np.random.default_rng = default_rng


@contextmanager
def following_host(
    draws: RowDraws,
    holders: Iterable[tuple[dict[Any, Any], Any]],
    sources: Iterable[random.Random],
) -> Iterator[None]:
    """Let draws of NumPy follow the rows of a lot; those of `random` are the same for all rows where all are.

    Args:
        draws: Of the lot.
        holders: Dictionaries and keys by which generators of NumPy can be reached.
        sources: Generators of `random`, beside the global one.
    """
    with ExitStack() as stack:
        for name, method in _methods_of_state(np.random.mtrand._rand, draws).items():
            _exchange(stack, np.random.__dict__, name, method)
        for holder, key in holders:
            original = holder.get(key)
            if isinstance(original, np.random.Generator):
                _exchange(stack, holder, key, _Generator(original, draws))
            elif isinstance(original, np.random.RandomState):
                _exchange(stack, holder, key, _RandomState(original, draws))
        if draws.shared:
            global_source: Any = random._inst
            for source in (global_source, *sources):
                _hold(stack, source, draws)
            for name in _HELD:
                _exchange(stack, random.__dict__, name, getattr(global_source, name))
        yield


def _exchange(
    stack: ExitStack,
    holder: dict[Any, Any],
    key: Any,
    stand_in: Any,
) -> None:
    """Put a stand-in into a dictionary until the stack closes; what others put there meanwhile stays."""
    original = holder[key]
    holder[key] = stand_in

    def restore() -> None:
        if holder.get(key) is stand_in:
            holder[key] = original

    stack.callback(restore)


def _hold(stack: ExitStack, source: random.Random, draws: RowDraws) -> None:
    """Have a generator give the same number each time, until somebody has waited long for another one."""
    calls = itertools.count()

    def number() -> float:
        turn = draws.turn(next(calls))
        if not turn:
            return _CONSTANT
        return random.Random.random(random.Random(turn))

    def bits(count: int) -> int:
        return int(number() * (1 << count)) >> 1  # below any bound that has so many bits

    source.__dict__.update(random=number, getrandbits=bits, gauss=source.normalvariate)
    for name in _HELD:
        stack.callback(source.__dict__.pop, name, None)
