"""Draws of NumPy and of Python's `random` that follow the records of a lot, as those of torch do in `row_draws`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from dpbench.guards.row_draws import RowDraws

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
_CONSTANT = 0.6  # that rejection samplers of `random` accept


class _Method:
    """One method of a source of NumPy's: a draw that follows the rows.

    Args:
        name: Of the method.
        draws: Of the lot.
        seed: Draws a number from the source.
        fresh: Makes a source from a seed.
    """

    def __init__(self, name: str, draws: RowDraws, seed: Callable[[], int], fresh: Callable[[int], Any]) -> None:
        self._name, self._draws, self._seed, self._fresh = name, draws, seed, fresh

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        size = self._size(args, kwargs)
        arrays = [np.shape(x) for x in (*args, *kwargs.values()) if isinstance(x, np.ndarray) and x.ndim]
        shape = size or (np.broadcast_shapes(*arrays) if arrays and self._name not in _WHOLE else ())
        if self._draws.shared:
            seed = self._draws.shared_seed(self._name)
            if not shape:
                return getattr(self._fresh(seed), self._name)(*args, **kwargs)
            return self._by_rows(args, kwargs, shape, [seed] * shape[0])
        seed = self._seed()
        placement = self._draws.placement(f"numpy.{self._name}", (shape,))
        if arrays and shape:
            first = placement is not None and placement.rows[0] is not None and placement.rows[0][0] == 0
            places = placement.entries(0) if placement is not None and first else range(shape[0])
            return self._by_rows(args, kwargs, shape, [seed + int(place) for place in places])
        source = self._fresh(seed)
        if placement is None:
            return getattr(source, self._name)(*args, **kwargs)
        own = placement.rows[0]
        assert own is not None
        numbers = self._of_size(source, args, kwargs, placement.shapes[0])
        return np.take(numbers, placement.entries(0), axis=own[0])

    def _by_rows(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...], seeds: Sequence[int]
    ) -> Any:
        """Each row of dimension 0 from a seed of its own."""
        rows = []
        for number, seed in enumerate(seeds):

            def of(x: Any, number: int = number) -> Any:
                has_rows = isinstance(x, np.ndarray) and x.ndim == len(shape) and len(x) == shape[0]
                return x[number : number + 1] if has_rows else x

            own = {name: of(value) for name, value in kwargs.items()}
            rows.append(self._of_size(self._fresh(seed), tuple(map(of, args)), own, (1, *shape[1:])))
        return np.concatenate(rows) if rows else np.empty(shape)

    def _size(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
        """The size that is asked for; empty: a number, or the size of the arguments."""
        if self._name in _DIMENSIONS:
            return args
        if self._name not in _SIZES:
            return ()
        position = _SIZES[self._name]
        size = kwargs.get("size", args[position] if len(args) > position else None)
        if size is None:
            return ()
        return tuple(size) if isinstance(size, list | tuple) else (int(size),)

    def _of_size(self, source: Any, args: tuple[Any, ...], kwargs: dict[str, Any], size: tuple[int, ...]) -> Any:
        method = getattr(source, self._name)
        if self._name in _DIMENSIONS:
            return method(*size)
        position = _SIZES[self._name]
        if len(args) > position:
            return method(*args[:position], size, *args[position + 1 :], **kwargs)
        return method(*args, **{**kwargs, "size": size})


class _Generator(np.random.Generator):
    """A generator whose draws follow the rows; its bits are those of another one."""

    def __init__(self, original: np.random.Generator, draws: RowDraws) -> None:
        super().__init__(original.bit_generator)

        def seed() -> int:
            return int(original.integers(1 << 62))

        for name in _NAMES:
            if hasattr(original, name):
                setattr(self, name, _Method(name, draws, seed, _fresh_generator))


def _fresh_generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


class _RandomState(np.random.RandomState):
    """The same for NumPy's older kind."""

    def __init__(self, original: np.random.RandomState, draws: RowDraws) -> None:
        super().__init__(original._bit_generator)
        for name, method in _methods_of(original, draws).items():
            setattr(self, name, method)


def _methods_of(state: np.random.RandomState, draws: RowDraws) -> dict[str, _Method]:
    def seed() -> int:
        return int(state.randint(1 << 31))

    return {name: _Method(name, draws, seed, np.random.RandomState) for name in _NAMES if hasattr(state, name)}


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
        numpys, self.count = np.random.default_rng, 0

        def seeded(seed: Any = None) -> np.random.Generator:
            if isinstance(seed, np.random.Generator):
                return seed
            if seed is None:
                self.count += 1
                seed = [0, 0 if draws is not None and draws.shared else self.count]
            made = numpys(seed)
            return made if draws is None else _Generator(made, draws)

        np.random.default_rng = seeded
        try:
            yield
        finally:
            np.random.default_rng = numpys


@contextmanager
def following_host(
    draws: RowDraws, holders: Iterable[tuple[dict[Any, Any], Any]], sources: Iterable[random.Random]
) -> Iterator[None]:
    """Let draws of NumPy follow the rows of a lot; those of `random` are the same for all rows where all are.

    Args:
        draws: Of the lot.
        holders: Dictionaries and keys by which generators of NumPy can be reached.
        sources: Generators of `random`, beside the global one.
    """
    with ExitStack() as stack:
        for name, method in _methods_of(np.random.mtrand._rand, draws).items():
            _exchange(stack, np.random.__dict__, name, method)
        for holder, key in holders:
            original = holder.get(key)
            if isinstance(original, np.random.Generator):
                _exchange(stack, holder, key, _Generator(original, draws))
            elif isinstance(original, np.random.RandomState):
                _exchange(stack, holder, key, _RandomState(original, draws))
        if draws.shared:
            everywhere: Any = random._inst
            for source in (everywhere, *sources):
                _hold(stack, source, draws)
            own = {"random": everywhere.random, "getrandbits": everywhere.getrandbits, "gauss": everywhere.gauss}
            for name, function in own.items():
                _exchange(stack, random.__dict__, name, function)
        yield


def _exchange(stack: ExitStack, holder: dict[Any, Any], key: Any, stand_in: Any) -> None:
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
        return random.Random.random(random.Random(turn)) if turn else _CONSTANT

    def bits(count: int) -> int:
        return int(number() * (1 << count)) >> 1  # below any bound that has so many bits

    source.__dict__.update(random=number, getrandbits=bits, gauss=source.normalvariate)
    for name in ("random", "getrandbits", "gauss"):
        stack.callback(source.__dict__.pop, name, None)
