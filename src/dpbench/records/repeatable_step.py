"""Training steps run again with the random numbers that no state holds: functional dropout, fresh generators."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

# Position and name of the argument that switches a function's dropout off, and its value then.
_OFF: dict[Callable[..., Any], tuple[int, str, Any]] = {
    F.scaled_dot_product_attention: (4, "dropout_p", 0.0),
    **dict.fromkeys(
        (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
        (2, "training", False),
    ),
    torch.dropout: (2, "train", False),
}


class _NoDropout(TorchFunctionMode):
    """Masks come in another order for another number of rows; without them, the gradients can be compared."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _OFF:
            place, name, value = _OFF[func]
            if len(args) > place:
                args = (*args[:place], value, *args[place + 1 :])
            else:
                kwargs[name] = value
        return func(*args, **kwargs)


@contextlib.contextmanager
def repeatable(seed: int | None) -> Iterator[None]:
    """Functional dropout is off, and `numpy.random.default_rng()` without a seed takes one from `seed`.

    Args:
        seed: Another one gives other random numbers.
    """
    fresh, calls = np.random.default_rng, itertools.count()

    def seeded(given: Any = None) -> np.random.Generator:
        return fresh([0 if seed is None else seed, next(calls)] if given is None else given)

    np.random.default_rng = seeded  # type: ignore[assignment]
    try:
        with _NoDropout():
            yield
    finally:
        np.random.default_rng = fresh
