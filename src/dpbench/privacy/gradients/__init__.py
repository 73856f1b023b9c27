"""Per-record gradients of a network from one backward pass."""

from dpbench.privacy.gradients.engine import LossReduction, PerRecordEngine
from dpbench.privacy.gradients.parameter import InstantiatedGradients, ParameterGradients

__all__ = ["InstantiatedGradients", "LossReduction", "ParameterGradients", "PerRecordEngine"]
