"""A network for waves."""

from __future__ import annotations

from torch import Tensor, nn


class Readout(nn.Module):
    """One hidden layer.

    Args:
        length: Points of a wave, from the data.
        hidden: Units.
    """

    def __init__(self, length: int, hidden: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(length, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, waves: Tensor) -> Tensor:
        """Frequencies (N,) of waves (N, length)."""
        frequencies: Tensor = self.layers(waves)[:, 0]
        return frequencies
