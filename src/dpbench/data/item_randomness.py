"""Random numbers that a data set or a `collate_fn` draws (augmentation), where a private strategy watches."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from dpbench.privacy.randomness import seed_global_generators


class ItemRandomness:
    """Seeds the global generators for the items of lots, in this process and in the workers of a data loader.

    Which numbers an item gets depends on its place in a lot, and so on the other records: where everybody could know
    them, one record more would change the items of all others in sight.

    Args:
        worker_init_fn: Of the user, called afterwards in each worker; it stays at hand under that name.
    """

    def __init__(self, worker_init_fn: Callable[[int], object] | None) -> None:
        self.worker_init_fn = worker_init_fn
        self._key: tuple[int, ...] | None = None

    def begin(self, key: tuple[int, ...] | None) -> None:
        """Make all numbers from here on, and those of workers that are started from here on, a function of a key.

        Args:
            key: The same on all ranks, each of which draws other numbers; None leaves random numbers to others.
        """
        self._key = None
        if key is not None:
            self._key = *key, dist.get_rank() if dist.is_initialized() else 0
            seed_global_generators(self._key, torch.device("cpu"))

    def __call__(self, worker_id: int) -> None:
        """Stand in for the `worker_init_fn`: torch's seeds of workers have 32 bits that count."""
        if self._key is not None:
            seed_global_generators((*self._key, worker_id), torch.device("cpu"))
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)


def draws_nothing(dataset: object) -> bool:
    """Whether a data set is known to draw no random numbers when it makes an item: one of this package."""
    return type(dataset).__module__.startswith("dpbench.")
