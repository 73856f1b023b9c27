"""Examples dealt to users who never were: seeded, public, and as uneven as wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dpbench.errors import ConfigurationError

Users = Annotated[int, Field(ge=1, le=10_000_000), "a whole number of users from 1 on"]
Seed = Annotated[int, Field(ge=0), "a whole number from 0 on"]
Concentration = Annotated[float, Field(gt=0, le=1e6), "a number above 0, at most 1e6"]


def uneven_sizes(
    examples: int,
    users: int,
    rng: np.random.Generator,
    evenness: float = 2.0,
) -> NDArray[np.int64]:
    """Number of examples of each user: at least one, the rest by a symmetric Dirichlet distribution.

    Raises:
        ConfigurationError: There are more users than examples.
    """
    if users > examples:
        raise ConfigurationError(f"data.options.users must be at most the number of examples, {examples}, not {users}.")
    rest = rng.multinomial(examples - users, rng.dirichlet(np.full(users, evenness)))
    return np.asarray(1 + rest, dtype=np.int64)


def allocate(
    labels: NDArray[np.int64],
    sizes: Sequence[int] | NDArray[np.int64],
    alpha: float,
    rng: np.random.Generator,
    coarse: NDArray[np.int64] | None = None,
    beta: float = 10.0,
) -> NDArray[np.int64]:
    """Deal examples to users whose classes differ, without replacement.

    This is the Pachinko allocation of Reddi et al. 2021 (Adaptive Federated Optimization, appendix).
    Each user draws its own distribution over the coarse classes from Dirichlet(α), and within each of these one over
    its fine classes from Dirichlet(β). Its examples are drawn one by one: a coarse class, a fine one, an example of it
    that is still there; a class that is used up is left out from then on, and the rest scaled up. Without coarse
    classes it is the allocation of Hsu et al. 2019.

    Args:
        labels: Of the examples, (N,), from 0 on.
        sizes: Number of examples of each user; at most N together.
        alpha: Concentration over the (coarse) classes; small: few classes a user.
        rng: Source of the draws.
        coarse: The coarse class of each fine class; None: each class by itself.
        beta: Concentration over the fine classes of a coarse one.

    Returns:
        The user of each example, (N,); −1 for those that nobody got.
    """
    classes = int(labels.max()) + 1
    coarse = np.arange(classes) if coarse is None else coarse
    children = [np.flatnonzero(coarse == one) for one in range(int(coarse.max()) + 1)]
    left = [rng.permutation(np.flatnonzero(labels == one)).tolist() for one in range(classes)]
    counts = np.array([len(one) for one in left])
    user_of = np.full(len(labels), -1, dtype=np.int64)
    for user, size in enumerate(sizes):
        top = rng.dirichlet(np.full(len(children), alpha))
        below = [rng.dirichlet(np.full(len(fine), beta)) for fine in children]
        uniform = rng.random((size, 2))
        for one, two in uniform:
            parent = _draw(top, np.array([counts[fine].sum() for fine in children]), one)
            label = children[parent][_draw(below[parent], counts[children[parent]], two)]
            user_of[left[label].pop()] = user
            counts[label] -= 1
    return user_of


def _draw(weights: NDArray[np.float64], left: NDArray[np.int64], uniform: float) -> int:
    """Position by weight among those of which something is left."""
    some = weights * (left > 0)
    if not some.sum() > 0:  # all weight lay on what is used up
        some = (left > 0).astype(float)
    ends = np.cumsum(some)
    return int(np.searchsorted(ends, uniform * ends[-1], side="right"))
