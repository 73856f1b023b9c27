"""What a new strategy takes: a recipe with its docstring, and this test. Clipping by the l∞ norm, as an example."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.composition import epsilon
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.events import Event, SumQuery
from dpbench.privacy.gradients.parameter import ParameterGradients, ScaledGradients
from dpbench.privacy.mechanism.clipping import VectorGroup
from dpbench.privacy.mechanism.recipe import Recipe
from dpbench.strategies import PrivateStrategy
from tests.privacy.mechanisms import NAMES, SIZES, Case, audit
from tests.strategies.worlds import Classifier, Known, crashed, fit, loader_of, weights_of

# ------------------------------------------------------------------------------------------ all there is to write


class LargestCoordinateClipping(PrivateStrategy):
    r"""DP-SGD that bounds the largest coordinate of a record's gradient instead of its l2 norm.

    .. math:: \tilde g = \frac{1}{qN} \Big( \sum_i g_i \min(1, B / \|g_i\|_\infty) + \mathcal N(0, z^2 B^2 d I) \Big)

    Guarantee: that of `DPSGD` with the bound :math:`B \sqrt d`, for d coordinates.

    Args:
        max_coordinate: B > 0.
    """

    max_coordinate: float = 0.01

    def design(self) -> Recipe:
        if not self.max_coordinate > 0:
            raise ConfigurationError(f"max_coordinate must be positive, not {self.max_coordinate}.")
        bound = self.max_coordinate
        return Recipe(partial(one_group, bound=bound), transform=partial(bounded_coordinates, bound=bound))


def one_group(names: Sequence[str], sizes: Sequence[int], bound: float) -> tuple[VectorGroup, ...]:
    return (VectorGroup("all", tuple(range(len(names))), bound * math.sqrt(sum(sizes))),)


def bounded_coordinates(
    gradients: Sequence[ParameterGradients], records: int, sizes: Sequence[int], bound: float
) -> list[ParameterGradients]:
    largest = torch.stack([one.per_record().flatten(1).abs().amax(1) for one in gradients]).amax(0)
    return [ScaledGradients(one, (bound / largest).clamp(max=1)) for one in gradients]


# ------------------------------------------------------------------------------------------------------ its tests


def test_mechanism() -> None:
    recipe = LargestCoordinateClipping(max_coordinate=0.2, noise_multiplier=1.0).recipe
    assert audit(Case(recipe.groups(NAMES, SIZES), recipe)) == []


def test_update_against_the_formula(tmp_path: Path) -> None:
    data = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    module, loader = Known(30), loader_of(TensorDataset(data), 8)
    fit(tmp_path, module, 1, LargestCoordinateClipping, loader, max_coordinate=0.5, noise_multiplier=1e-9)
    lot = data[loader.lots.lot(0)]
    wanted = (lot * (0.5 / lot.abs().amax(1, keepdim=True)).clamp(max=1)).sum(0) / 8
    torch.testing.assert_close(weights_of(module), -wanted, atol=1e-6, rtol=1e-5)


def test_resume_and_ledger(tmp_path: Path) -> None:
    whole = Classifier()
    ended, resumed = copy.deepcopy(whole), copy.deepcopy(whole)
    strategy = fit(tmp_path / "whole", whole, 5, LargestCoordinateClipping)
    start = crashed(tmp_path / "parts", ended, 5, 2, make=LargestCoordinateClipping)
    fit(tmp_path / "parts", resumed, 5, LargestCoordinateClipping, start=start)
    assert torch.equal(weights_of(whole), weights_of(resumed))
    ledger = read_ledger(tmp_path / "parts/ledger.jsonl")
    independent = epsilon({Event(ledger.releases[0][1].sampling, (SumQuery("all", 1.0, 1.0),)): 5}, 1e-3)
    assert strategy.epsilon() == pytest.approx(independent, abs=1e-6)
