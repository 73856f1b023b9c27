"""Strategies by name, for tests of what holds under each of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dpbench.strategies import (
    DPSGD,
    AdaptiveMeanClipping,
    AdaptiveQuantileClipping,
    AutomaticClipping,
    ClipOnly,
    DiscretizedDPSGD,
    NoiseOnly,
    PrivateStrategy,
    VectorGroups,
)

Make = Callable[..., PrivateStrategy]

PRIVATE: dict[str, Make] = {
    "dpsgd": DPSGD,
    "discretized": DiscretizedDPSGD,
    "threshold": partial(
        DiscretizedDPSGD,
        discretization_threshold=0.01,
        discretization_values="threshold",
        correction_threshold=0.1,
        correction_estimate="mean",
    ),
    "rescaled": partial(DiscretizedDPSGD, discretization_values="rescaled"),
    "kept": partial(DiscretizedDPSGD, discretization_threshold=1.0, discretization_values="kept"),
    "corrected": partial(DPSGD, correction_threshold=0.01, correction_hypotheses="uniform"),
    "quantile": partial(AdaptiveQuantileClipping, count_noise_std=3.0),
    "mean": AdaptiveMeanClipping,
    "automatic": AutomaticClipping,
}
"""One for each class that needs to know nothing of the network."""

EVERY: dict[str, Make] = {
    **PRIVATE,
    "layers": partial(DPSGD, clipping="per_parameter"),
    "groups": partial(VectorGroups, groups={"a": "*weight", "b": "*bias"}),
    "clip_only": ClipOnly,
    "noise_only": NoiseOnly,
}
"""Every class, for networks whose parameters are weights and biases."""
