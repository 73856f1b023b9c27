"""DP strategies as Lightning callbacks."""

from dpbench.callback.non_private import NonPrivate
from dpbench.callback.strategy import PrivateStrategy
from dpbench.strategies.adaptive_mean import AdaptiveMeanClipping
from dpbench.strategies.adaptive_quantile import AdaptiveQuantileClipping
from dpbench.strategies.automatic import AutomaticClipping
from dpbench.strategies.discretized import DiscretizedDPSGD
from dpbench.strategies.dpsgd import DPSGD
from dpbench.strategies.references import ClipOnly, FederatedAveraging, NoiseOnly
from dpbench.strategies.vector_groups import VectorGroups

__all__ = [
    "DPSGD",
    "AdaptiveMeanClipping",
    "AdaptiveQuantileClipping",
    "AutomaticClipping",
    "ClipOnly",
    "DiscretizedDPSGD",
    "FederatedAveraging",
    "NoiseOnly",
    "NonPrivate",
    "PrivateStrategy",
    "VectorGroups",
]
