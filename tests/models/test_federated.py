"""The networks of the federated tasks: published sizes, first weights, per-record gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpbench.models import EMNISTCNN, Autoencoder, CharLSTM, ResNet18GN, TagRegression, WordLSTM
from dpbench.models.federated import lstm_with_one_bias
from dpbench.models.initialization import glorot_normal_, he_normal_
from dpbench.privacy.gradients.engine import PerRecordEngine
from tests.support.reference import reference_gradients, relative_error

IMAGE = (1, 28, 28)


def trained(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("make", "published"),
    [
        (lambda: ResNet18GN((3, 24, 24), 100), 11_227_812),
        (lambda: EMNISTCNN(IMAGE, 62), 1_206_590),
        (lambda: Autoencoder(IMAGE), 2_837_314),
        (lambda: CharLSTM(90), 820_522),
        (lambda: WordLSTM(10_004), 4_050_748),
        (lambda: TagRegression(10_000, 500), 5_000_500),
    ],
)
def test_published_sizes(make: Callable[[], nn.Module], published: int) -> None:
    assert trained(make()) == published


@pytest.mark.parametrize("records", [0, 3])
def test_shapes(records: int) -> None:
    tokens = torch.randint(7, (records, 5))
    for model in (CharLSTM(7, hidden=6), WordLSTM(7, hidden=6)):
        assert model(tokens).shape == (records, 5, 7)
    assert TagRegression(9, 4)(torch.rand(records, 9)).shape == (records, 4)
    made = Autoencoder((2, 5, 4), [6, 3])(torch.rand(records, 2, 5, 4))
    assert made.shape == (records, 40) and ((made > 0) & (made < 1)).all()
    for shape in ((1, 8, 8), (2, 17, 9)):
        images = torch.rand(records, *shape)
        assert EMNISTCNN(shape, 7)(images).shape == (records, 7)
        assert ResNet18GN(shape, 7)(images).shape == (records, 7)


def test_the_second_bias_is_zero_and_frozen() -> None:
    """Then the LSTM is the textbook's, which has one."""
    for model in (CharLSTM(9, hidden=5), WordLSTM(9, 6, 5), CharLSTM(9, hidden=5, initialization="torch")):
        second = [p for name, p in model.named_parameters() if "bias_hh" in name]
        assert len(second) == model.lstm.num_layers
        assert not any(p.requires_grad or p.any() for p in second)
    lstm = lstm_with_one_bias(3, 4)
    x, h, c = torch.rand(2, 1, 3), torch.zeros(2, 4), torch.zeros(2, 4)
    gates = x[:, 0] @ lstm.weight_ih_l0.T + h @ lstm.weight_hh_l0.T + lstm.bias_ih_l0
    i, f, g, o = gates.chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    torch.testing.assert_close(lstm(x)[0][:, 0], o.sigmoid() * c.tanh())


def test_published_first_weights() -> None:
    torch.manual_seed(0)
    for draw, variance in ((glorot_normal_, 2 / (300 * 9 + 200 * 9)), (he_normal_, 2 / (300 * 9))):
        weight = torch.empty(200, 300, 3, 3)
        draw(weight)
        assert float(weight.var()) == pytest.approx(variance, rel=0.02)
        assert float(weight.abs().max()) <= 2 * math.sqrt(variance) / 0.8796
    model = WordLSTM(50)
    lstm, size = model.lstm, 670
    assert float(model.embedding.weight.detach().abs().max()) <= 0.05 and not model.embedding.weight[0].any()
    assert torch.equal(lstm.bias_ih_l0, torch.cat([torch.zeros(size), torch.ones(size), torch.zeros(2 * size)]))
    torch.testing.assert_close(lstm.weight_hh_l0.T @ lstm.weight_hh_l0, torch.eye(size), rtol=0, atol=1e-4)
    assert float(lstm.weight_ih_l0.detach().var()) == pytest.approx(2 / 96, rel=0.05)
    assert not model.output.bias.any() and not model.projection.bias.any()
    net = ResNet18GN((3, 24, 24), 100)
    assert float(net.output.weight.detach().std()) == pytest.approx(0.01, rel=0.05)
    assert float(net.stem[0].weight.detach().var()) == pytest.approx(2 / (3 * 49), rel=0.1)
    assert EMNISTCNN(IMAGE, 62, "torch")[0].bias.any() and not EMNISTCNN(IMAGE, 62)[0].bias.any()


def spoken(model: nn.Module, tokens: Tensor) -> Tensor:
    """A loss of sequences without padding: its target is the next token, of the same row."""
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def test_per_record_gradients_with_a_frozen_bias() -> None:
    model = WordLSTM(11, 6, 5)
    tokens = torch.randint(11, (3, 7))
    tokens[1, 3:] = 0
    expected = reference_gradients(model, tokens, spoken)
    assert not any("bias_hh" in name for name in expected)
    engine = PerRecordEngine(model)
    gradients = dict(zip(engine.names, engine.backward(spoken(model, tokens), len(tokens), verify=True), strict=True))
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert relative_error(gradient.per_record(), expected[name]) < 1e-4, name


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EMNISTCNN((1, 5, 5), 10), r"emnist_cnn needs images of at least 6×6 pixels, not 1×5×5"),
        (lambda: ResNet18GN((3, 7, 24), 10), r"resnet18_gn needs images of at least 8×8 pixels, not 3×7×24"),
        (lambda: CharLSTM(90, initialization="zeros"), "model.initialization must be published or torch, not 'zeros'"),
    ],
)
def test_bad_options(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
