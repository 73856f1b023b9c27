"""Sampling schemes: the draws of a batch, and their accounting event."""

from dpbench.privacy.sampling.poisson import PoissonSampling, TruncatedPoissonSampling

# Schemes are listed in the order of their import: the usual ones first.
# isort: split
from dpbench.privacy.sampling.cyclic_poisson import CyclicPoissonSampling
from dpbench.privacy.sampling.fixed_size import FixedSizeSampling
from dpbench.privacy.sampling.full import FullParticipation
from dpbench.privacy.sampling.scheme import (
    Part,
    Positions,
    Sampling,
    find_scheme,
    sampling_from_dict,
    schemes,
)
from dpbench.privacy.sampling.separated import SeparatedSampling
from dpbench.privacy.sampling.shuffled import ShuffledEpochs

__all__ = [
    "CyclicPoissonSampling",
    "FixedSizeSampling",
    "FullParticipation",
    "Part",
    "PoissonSampling",
    "Positions",
    "Sampling",
    "SeparatedSampling",
    "ShuffledEpochs",
    "TruncatedPoissonSampling",
    "find_scheme",
    "sampling_from_dict",
    "schemes",
]
