"""Networks for own data: sizes, shapes, and per-record gradients against those of single records."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpbench.models import RegressionMLP, TextClassifier
from dpbench.privacy.gradients.engine import PerRecordEngine
from tests.support.reference import mean_square, reference_gradients, relative_error

NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor, tuple[int, ...]]] = {
    "regression_mlp": (lambda: RegressionMLP((3, 2), 2, [5, 4]), torch.rand(4, 3, 2), (2,)),
    "text_classifier": (
        lambda: TextClassifier(9, 3, 4, 5),
        torch.tensor([[1, 2, 2, 8], [3, 0, 0, 0], [0, 0, 0, 0], [4, 4, 4, 0]]),
        (3,),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_per_record_gradients(name: str) -> None:
    make, inputs, shape = NETWORKS[name]
    torch.manual_seed(0)
    network = make()
    assert network(inputs).shape == (4, *shape) and network(inputs[:0]).shape == (0, *shape)
    expected = reference_gradients(network, inputs)
    engine = PerRecordEngine(network)
    loss = mean_square(network, inputs)
    gradients = dict(zip(engine.names, engine.backward(loss, len(inputs), verify=True), strict=True))
    assert gradients.keys() == expected.keys()
    for parameter, gradient in gradients.items():
        assert relative_error(gradient.per_record(), expected[parameter]) < 1e-4, parameter


def test_sizes() -> None:
    padded = TextClassifier(9, 3)
    torch.testing.assert_close(padded(torch.tensor([[1, 2]])), padded(torch.tensor([[1, 2, 0, 0]])))
