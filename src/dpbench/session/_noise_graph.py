"""The noise of a release as one CUDA graph: the same numbers, to the last bit, or it is not used.

Noise takes some thirty kernels. A graph draws from a generator that is registered with it, whose state is set by the
key of each release. That this is so is compared with `add_gaussian_noise` for two keys before the first use: a graph
that repeated the noise of another release would reveal the difference of two sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from dpbench.privacy.mechanism.noise import (
    Segments,
    add_gaussian_noise,
    add_torch_noise,
    key_on_device,
    words_of,
)
from dpbench.privacy.randomness import fresh_key, set_keyed_state
from dpbench.session._recordings import aside

_MOST = 4
"""Plans with a graph of their own: noise that moves at each step is added eagerly."""

Replay = Callable[[Sequence[int]], object]
"""Adds the noise of a key to a fixed tensor."""


class NoiseGraphs:
    """Adds noise by graphs, one for each plan, where they give what `add_gaussian_noise` does."""

    uses = 0
    """Sums to which a graph has added noise."""

    def __init__(self) -> None:
        self._replays: dict[tuple[tuple[int, float], ...], tuple[Tensor, Replay | None]] = {}

    def add(self, total: Tensor, noise_stds: Segments, key: Sequence[int]) -> Tensor:
        """As `add_gaussian_noise`."""
        plan = tuple(noise_stds)
        if plan not in self._replays and len(self._replays) < _MOST:
            buffer = torch.zeros_like(total)
            self._replays[plan] = (buffer, self._checked(buffer, plan))
        buffer, replay = self._replays.get(plan, (total, None))
        if replay is None:
            return add_gaussian_noise(total, noise_stds, key)
        buffer.copy_(total)
        replay(key)
        self.uses += 1
        return total.copy_(buffer)

    def clear(self) -> None:
        """Let go of the graphs."""
        self._replays.clear()

    def _checked(self, buffer: Tensor, plan: Segments) -> Replay | None:
        """A graph of a plan that was seen to be a function of the key; None: there is none."""
        replay = None
        with suppress(RuntimeError):  # it cannot be captured
            replay = self._recorded(buffer, plan)
        if replay is None:
            return None
        # Keys of nobody: no noise that is released is seen here.
        for key in ((fresh_key(), 1), (fresh_key(), 2)):
            expected = add_gaussian_noise(torch.zeros_like(buffer), plan, key)
            buffer.zero_()
            replay(key)
            if not torch.equal(buffer, expected):
                return None
        return replay

    def _recorded(self, buffer: Tensor, plan: Segments) -> Replay:
        device = buffer.device
        if device.type != "cuda":
            return lambda key: add_gaussian_noise(buffer, plan, key)
        generator = torch.Generator(device)
        draw = words_of(generator)
        with aside(device):
            add_torch_noise(buffer, plan, draw)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(generator)
        with torch.cuda.graph(graph):
            add_torch_noise(buffer, plan, draw)

        def replay(key: Sequence[int]) -> None:
            set_keyed_state(generator, key_on_device(key))
            graph.replay()

        return replay
