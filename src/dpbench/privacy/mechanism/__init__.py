"""From per-record gradients to a private sum: clip, sum, add noise, denoise, adapt."""

from dpbench.privacy.mechanism.clipping import VectorGroup
from dpbench.privacy.mechanism.mechanism import Mechanism, Merge
from dpbench.privacy.mechanism.metrics import PrivateMetrics, Value
from dpbench.privacy.mechanism.plan import NoiseAllocation, ReleasePlan
from dpbench.privacy.mechanism.recipe import Recipe
from dpbench.privacy.mechanism.training_plan import TrainingPlan

__all__ = [
    "Mechanism",
    "Merge",
    "NoiseAllocation",
    "PrivateMetrics",
    "Recipe",
    "ReleasePlan",
    "TrainingPlan",
    "Value",
    "VectorGroup",
]
