"""Kernels in Triton against references in float64: by Triton's interpreter where there is no GPU, else on the GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from dpbench_triton import _known_answers, kernels, plugin
from dpbench_triton._known_answers import CHECKS, wrong_answers
from dpbench_triton.convolution_gradients import TritonConvolutionGradients
from dpbench_triton.kernels import Geometry
from torch import Tensor, nn

from dpbench.errors import ConfigurationError
from dpbench.privacy.gradients._convolution import ConvolutionGradients
from dpbench.privacy.gradients.discretization import Discretization, DiscretizedGradients, DiscretizedOuterProduct
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.privacy.gradients.parameter import InstantiatedGradients, OuterProductGradients
from dpbench.privacy.kernels import signature, suited
from dpbench.privacy.mechanism.clipping import VectorGroup, clip_and_sum
from dpbench.privacy.mechanism.noise import add_gaussian_noise
from dpbench.privacy.native.known_answers import DIGEST, SPACING, START, digest_of_numbers
from dpbench.privacy.randomness import digest_of
from tests.support.chacha import KEY, normal_numbers
from tests.support.reference import mean_square, reference_gradients, relative_error

pytestmark = [
    # Numbers that are not finite are meant: numpy, which runs the kernels here, speaks of them.
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FINE = 2.0**-30
"""Spacing of a grid that hides nothing of a number."""


@dataclass(frozen=True)
class Case:
    """A convolution and its batch.

    Attributes:
        geometry: Of the convolution.
        records: In the batch.
        inputs: Channels in.
        outputs: Channels out.
        image: Height and width.
        channels_last: Of the inputs, and of the gradients of outputs.
    """

    geometry: Geometry
    records: int
    inputs: int
    outputs: int
    image: tuple[int, int]
    channels_last: tuple[bool, bool]

    def layer(self) -> nn.Conv2d:
        kernel, stride, padding, dilation, groups = self.geometry
        return nn.Conv2d(self.inputs, self.outputs, kernel, stride, padding, dilation, groups).to(DEVICE)

    def tensors(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Inputs and gradients of outputs."""
        torch.manual_seed(1)
        a = torch.randn(self.records, self.inputs, *self.image, device=DEVICE)
        g = torch.randn_like(self.layer()(a))
        formats = (torch.channels_last if last else torch.contiguous_format for last in self.channels_last)
        a, g = (x.to(dtype, memory_format=memory_format) for x, memory_format in zip((a, g), formats, strict=True))
        return a, g

    def truth(self, a: Tensor, g: Tensor) -> Tensor:
        """Record by record, by autograd in float64."""
        layer = self.layer().double()
        rows = []
        for x, y in zip(a.double(), g.double(), strict=True):
            rows.append(torch.autograd.grad(layer(x[None]), layer.weight, y[None])[0])
        return torch.stack(rows)


def cases(count: int) -> Iterator[Case]:
    """Small convolutions of every kind."""
    chance = random.Random(0)
    while count:
        kernel = (chance.randint(1, 4), chance.randint(1, 4))
        stride = (chance.randint(1, 3), chance.randint(1, 3))
        padding = (chance.randint(0, 2), chance.randint(0, 2))
        dilation = (chance.randint(1, 2), chance.randint(1, 2))
        groups = chance.choice([1, 1, 1, 2, 3])
        image = (chance.randint(3, 9), chance.randint(3, 9))
        sides = zip(image, padding, dilation, kernel, strict=True)
        if any(side + 2 * pad < step * (taps - 1) + 1 for side, pad, step, taps in sides):
            continue
        yield Case(
            Geometry(kernel, stride, padding, dilation, groups),
            chance.randint(1, 3),
            groups * chance.choice([1, 2, 3, 5, 17]),
            groups * chance.choice([1, 2, 4, 7, 20]),
            image,
            (chance.random() < 0.5, chance.random() < 0.5),
        )
        count -= 1


def members(records: int) -> tuple[Tensor, Tensor]:
    return kernels.each_alone(records, DEVICE)


def squared(rows: Tensor) -> Tensor:
    return rows.flatten(1).double().square().sum(1)


def check(case: Case) -> None:
    """Compare gradients, norms, signs and their sums with float64."""
    a, g = case.tensors()
    expected = case.truth(a, g)
    rows = kernels.convolution(case.geometry, a, g, members(case.records))
    assert rows.weights is not None
    assert relative_error(rows.weights, expected) < 1e-6
    assert relative_error(rows.squared_norms, squared(expected)) < 1e-5
    norms = kernels.convolution(case.geometry, a, g, members(case.records), stored=False)
    assert norms.weights is None
    # Tiles of a few numbers may cancel: then they are rounded up, by less than this.
    assert relative_error(norms.squared_norms, squared(expected)) < 1e-4

    threshold = float(expected.abs().median())
    signs = kernels.convolution(case.geometry, a, g, members(case.records), threshold=threshold).weights
    assert signs is not None
    expected_signs = expected.sign() * (expected.abs() > threshold)
    is_clear = (expected.abs() - threshold).abs() > 1e-5
    assert torch.equal(signs[is_clear].double(), expected_signs[is_clear])
    counts = kernels.convolution(case.geometry, a, g, members(case.records), threshold=threshold, stored=False)
    assert torch.equal(counts.squared_norms.double(), squared(signs))
    weights = torch.linspace(-1, 2, case.records, device=DEVICE)
    total = kernels.weighted_signs(signs, weights)
    assert torch.allclose(total.double(), torch.tensordot(weights.double(), signs.double(), 1), atol=1e-6)


@pytest.mark.parametrize("case", list(cases(60)))
def test_convolutions_of_every_kind(case: Case) -> None:
    check(case)


def test_half_precision_is_summed_in_float32() -> None:
    case = Case(Geometry((3, 3), padding=(1, 1)), 2, 3, 4, (9, 9), (False, False))
    a, g = case.tensors(torch.bfloat16)
    expected = case.truth(a, g)
    rows = kernels.convolution(case.geometry, a, g, members(2))
    assert rows.weights is not None
    assert rows.weights.dtype == torch.float32
    assert relative_error(rows.weights, expected) < 1e-6
    norms = kernels.convolution(case.geometry, a, g, members(2), stored=False).squared_norms
    assert relative_error(norms, squared(expected)) < 1e-4


def test_tiles_change_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient of several tiles and several steps over positions."""
    case = Case(Geometry((3, 3)), 1, 9, 40, (8, 8), (False, False))
    a, g = case.tensors()
    monkeypatch.setattr(kernels, "_MOST_OUTPUTS", 16)
    monkeypatch.setattr(kernels, "_MOST_TAPS", 16)
    monkeypatch.setattr(kernels, "_POSITIONS", 16)
    rows = kernels.convolution(case.geometry, a, g, members(1))
    assert rows.weights is not None
    assert relative_error(rows.weights, case.truth(a, g)) < 1e-6
    assert relative_error(rows.squared_norms, squared(case.truth(a, g))) < 1e-5


@pytest.fixture
def engine_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes the kernels for tensors of this machine's device."""
    monkeypatch.setattr(plugin, "DEVICE", DEVICE.type)
    monkeypatch.setenv("DPBENCH_KERNELS", "triton")
    monkeypatch.setenv("DPBENCH_NATIVE", "off")


def network() -> nn.Module:
    """All but the last convolution, which has more weights than inputs and outputs, store their gradients."""
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False),
        nn.ReLU(),
        nn.Conv2d(6, 20, 2),
        nn.Flatten(),
        nn.Linear(20, 3),
    )
    return nn.Sequential(*layers).to(DEVICE)


@pytest.mark.usefixtures("engine_with_kernels")
def test_engine_takes_the_kernels() -> None:
    net = network()
    inputs = torch.randn(3, 1, 5, 5, device=DEVICE)
    expected = reference_gradients(net, inputs)
    engine = PerRecordEngine(net)
    gradients = engine.backward(mean_square(net, inputs), 3, verify=True)
    by_name = dict(zip(engine.names, gradients, strict=True))
    convolutions = [part for part in gradients if isinstance(part, TritonConvolutionGradients)]
    assert [part._is_stored() for part in convolutions] == [True, True, False]
    weights = torch.tensor([0.5, -1.0, 2.0], device=DEVICE)
    for name, part in by_name.items():
        assert relative_error(part.squared_norms(), squared(expected[name])) < 1e-4
        total = torch.tensordot(weights.double(), expected[name], 1)
        assert relative_error(part.weighted_sum(weights), total) < 1e-5
        assert relative_error(part.per_record(), expected[name]) < 1e-5


def pair(case: Case) -> tuple[TritonConvolutionGradients, InstantiatedGradients]:
    """The kernels' answer, and the truth as float32."""
    a, g = case.tensors()
    layer = case.layer()
    rows = case.truth(a, g).float()
    return TritonConvolutionGradients(layer, a, g, case.geometry.padding), InstantiatedGradients(lambda: rows)


STORED = Case(Geometry((2, 2)), 6, 2, 3, (4, 4), (False, False))
NOT_STORED = Case(Geometry((2, 2)), 6, 4, 30, (2, 3), (False, False))


@pytest.mark.parametrize("case", [STORED, NOT_STORED], ids=["stored", "not stored"])
def test_records_of_several_rows(case: Case) -> None:
    ours, rows = pair(case)
    record_of = torch.tensor([2, 0, 1, 0, 2, 2], device=DEVICE)
    weights = torch.tensor([3.0, -1.0, 0.5], device=DEVICE)
    positions = torch.tensor([2, 0], device=DEVICE)
    for ours_of, rows_of, factors in (
        (ours.merge(record_of, 3, 0.25), rows.merge(record_of, 3, 0.25), weights),
        (
            ours.merge(record_of, 3, 0.25).select(positions),
            rows.merge(record_of, 3, 0.25).select(positions),
            weights[:2],
        ),
    ):
        assert isinstance(ours_of, TritonConvolutionGradients)
        assert relative_error(ours_of.squared_norms(), rows_of.squared_norms()) < 1e-4
        assert relative_error(ours_of.weighted_sum(factors), rows_of.weighted_sum(factors)) < 1e-5
        assert relative_error(ours_of.per_record(), rows_of.per_record()) < 1e-5
    assert isinstance(ours, ConvolutionGradients)
    assert torch.allclose(ours.bias(), ours._outputs.sum((2, 3)))


@pytest.mark.parametrize("case", [STORED, NOT_STORED], ids=["stored", "not stored"])
def test_uses_of_a_layer_add_up(case: Case) -> None:
    a, g = case.tensors()
    layer = case.layer()
    first = TritonConvolutionGradients(layer, a, g, (0, 0))
    second = TritonConvolutionGradients(layer, a.flip(0), g, (0, 0))
    both = first.plus([second])
    expected = case.truth(a, g) + case.truth(a.flip(0), g)
    assert relative_error(both.squared_norms(), squared(expected)) < 1e-4
    weights = torch.linspace(-1, 1, len(a), device=DEVICE)
    assert relative_error(both.weighted_sum(weights), torch.tensordot(weights.double(), expected, 1)) < 1e-5


@pytest.mark.parametrize("case", [STORED, NOT_STORED], ids=["stored", "not stored"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_a_record_that_is_not_finite_contributes_nothing(case: Case, bad: float) -> None:
    a, g = case.tensors()
    good = TritonConvolutionGradients(case.layer(), a[1:], g[1:], (0, 0))
    groups = (VectorGroup("all", (0,), 1.0),)
    (expected,), _ = clip_and_sum([good], groups)
    g[0, 0, 0, 0] = bad
    (total,), norms = clip_and_sum([TritonConvolutionGradients(case.layer(), a, g, (0, 0))], groups)
    assert norms.shape == (1, len(a) - 1)
    assert torch.allclose(total, expected, atol=1e-6)


def test_a_record_whose_positions_cancel_is_clipped() -> None:
    """Norms that are not of the sum itself may be too small where large parts cancel: rounded down, it would pass."""
    layer = nn.Conv2d(3, 40, 1, bias=False).to(DEVICE)
    positions = 64
    for seed in range(5):
        torch.manual_seed(seed)
        a = torch.randn(1, 3, 1, positions, device=DEVICE)
        g = 1e7 * torch.randn(1, 40, 1, positions, device=DEVICE)
        # What is left is what rounding leaves.
        a[..., positions // 2 :] = a[..., : positions // 2].flip(-1)
        g[..., positions // 2 :] = -g[..., : positions // 2].flip(-1)
        gradients = TritonConvolutionGradients(layer, a, g, (0, 0))
        gradients._is_stored = lambda: False  # type: ignore[method-assign]
        (total,), _ = clip_and_sum([gradients], (VectorGroup("all", (0,), 1e-3),))
        assert float(total.double().norm()) < 1e-3 * (1 + 1e-5)


def test_signs_are_those_of_pure_torch() -> None:
    ours, rows = pair(STORED)
    size = rows.per_record()[0].numel()
    signs = ours.discretize(0.7)
    pure = DiscretizedGradients(rows, 0.7, 6, size)
    weights = torch.linspace(-1, 1, 6, device=DEVICE)
    assert torch.equal(signs.squared_norms(), pure.squared_norms())
    assert torch.allclose(signs.weighted_sum(weights), pure.weighted_sum(weights), atol=1e-6)
    assert torch.equal(signs.per_record().float(), pure.per_record())
    selected = signs.select(torch.tensor([4, 1], device=DEVICE))
    assert torch.equal(selected.per_record().float(), pure.per_record()[[4, 1]])


OUTER = [(3, 20, 150), (4, 33, 5)]


@pytest.mark.usefixtures("engine_with_kernels")
@pytest.mark.parametrize(("records", "outputs", "inputs"), OUTER)
def test_signs_of_linear_layers(records: int, outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    g = torch.randn(records, outputs, device=DEVICE)
    a = torch.randn(records, inputs, device=DEVICE)
    g[0, 0] = float("inf")
    product = OuterProductGradients(g[:, None], a[:, None])
    (ours,) = Discretization(0.5)([product], records, [outputs * inputs])
    assert isinstance(ours, DiscretizedOuterProduct)
    pure = DiscretizedGradients(product, 0.5, records, outputs * inputs)
    weights = torch.linspace(-1, 2, records, device=DEVICE)
    assert torch.equal(ours.squared_norms(), pure.squared_norms())
    assert torch.allclose(ours.weighted_sum(weights), pure.weighted_sum(weights), atol=1e-6)


SHAPES = [(2, 4, 3, 5, 2), (3, 5, 1, 1, 5), (2, 6, 10, 7, 6)]


@pytest.mark.parametrize(("records", "channels", "height", "width", "groups"), SHAPES)
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_group_norm(records: int, channels: int, height: int, width: int, groups: int, offset: float) -> None:
    torch.manual_seed(0)
    layer = nn.GroupNorm(groups, channels)
    x = offset + torch.randn(records, channels, height, width, device=DEVICE)
    x = x.contiguous(memory_format=torch.channels_last)
    g = torch.randn(records, channels, height, width, device=DEVICE)
    scale, shift = kernels.group_norm(layer, x, g)
    normalized = torch.nn.functional.group_norm(x.double(), groups, eps=layer.eps)
    assert relative_error(scale, (normalized * g).sum((2, 3))) < (1e-5 if offset == 0 else 1e-3)
    assert relative_error(shift, g.double().sum((2, 3))) < 1e-6


# ---------------------------------------------------------------------------------------------- noise


def noise(size: int, start: int = 0, std: float = 1.0, spacing: float = FINE) -> Tensor:
    total = torch.zeros(size, device=DEVICE)
    kernels.add_noise(total, start, std, spacing, KEY)
    return total


def test_noise_is_box_muller_of_chacha20(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_NOISE_GROUPS", 32)
    expected = normal_numbers(96)
    pairs = expected.reshape(-1, 2, 128)
    assert (np.hypot(pairs[:, 0], pairs[:, 1]) > 4.08).sum() > 0
    numbers = noise(len(expected)).cpu().double().numpy()
    # Of numbers in float32, on a grid of 2^-30.
    assert np.abs(numbers - expected).max() < 3e-7


def test_numbers_on_the_grid_are_those_of_the_native_kernels() -> None:
    numbers = noise(256, START, 1.0, SPACING)
    assert digest_of_numbers(numbers.cpu().numpy()) == DIGEST


def test_noise_does_not_depend_on_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    start = 2**40 + 77
    whole = noise(600, start)
    for groups in (1, 8):
        monkeypatch.setattr(kernels, "_NOISE_GROUPS", groups)
        assert torch.equal(noise(600, start), whole)
    parts = [noise(size, start + at) for at, size in ((0, 1), (1, 300), (301, 299))]
    assert torch.equal(torch.cat(parts), whole)


def test_noise_is_added_rounded_and_divided() -> None:
    torch.manual_seed(0)
    total = torch.randn(600, device=DEVICE)
    expected = normal_numbers(3)[:600]
    released = total.clone()
    kernels.add_noise(released, 0, 3.0, 2.0**-7, KEY)
    units = (total.cpu().double().numpy() + 3 * expected) * 2**7
    is_clear = np.abs(units - np.floor(units) - 0.5) > 1e-6
    assert is_clear.mean() > 0.99
    assert np.array_equal((released.cpu().numpy() * 2.0**7)[is_clear], np.rint(units)[is_clear])
    divided = total.clone()
    kernels.add_noise(divided, 0, 3.0, 2.0**-7, KEY, divisor=0.1)
    assert torch.equal(divided, released / 0.1)


def test_what_is_not_finite_stays() -> None:
    total = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30], device=DEVICE)
    kernels.add_noise(total, 0, 1.0, SPACING, KEY)
    assert torch.equal(total.isnan(), torch.tensor([True, False, False, False], device=DEVICE))
    assert total[1:].tolist() == [float("inf"), -float("inf"), pytest.approx(1e30)]


@pytest.mark.usefixtures("engine_with_kernels")
def test_the_mechanism_takes_the_noise_of_the_kernels() -> None:
    key = (3, 1, 4)
    total = add_gaussian_noise(torch.zeros(700, device=DEVICE), [(300, 1.0), (400, 5.0)], key)
    expected = torch.zeros(700, device=DEVICE)
    kernels.add_noise(expected[:300], 0, 1.0, 2.0**-8, digest_of(key))
    kernels.add_noise(expected[300:], 300, 5.0, 2.0**-6, digest_of(key))
    assert torch.equal(total, expected)
    assert total.unique().numel() > 400


# ---------------------------------------------------------------------------------------------- choice and trust


def test_nothing_is_taken_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "DEVICE", DEVICE.type)
    monkeypatch.setenv("DPBENCH_NATIVE", "off")
    monkeypatch.delenv("DPBENCH_KERNELS", raising=False)
    x = torch.zeros(1, device=DEVICE)
    assert suited(x) is None
    assert signature(DEVICE) == ""
    monkeypatch.setenv("DPBENCH_KERNELS", "triton")
    assert suited(x) is plugin
    assert signature(DEVICE).startswith("triton-")
    assert suited(x.double()) is None
    assert suited(x, x.half()) is None
    monkeypatch.setattr(plugin, "DEVICE", "other")
    assert suited(x) is None


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Answers are looked at anew, and forgotten afterwards."""
    monkeypatch.setattr(plugin, "DEVICE", DEVICE.type)
    monkeypatch.setenv("DPBENCH_KERNELS", "triton")
    plugin._fault.cache_clear()
    yield monkeypatch
    plugin._fault.cache_clear()


@pytest.mark.parametrize(
    ("name", "instead", "what"),
    [
        ("add_noise", lambda *_, **__: None, "noise"),
        ("count_outer", lambda g, a, threshold: torch.zeros(len(g)), "signs of a linear layer"),
        ("group_norm", lambda layer, x, g: (g.sum((2, 3)), g.sum((2, 3))), "gradients of GroupNorm"),
        ("weighted_signs", lambda signs, weights: signs.sum(0).float(), "gradients of a convolution"),
    ],
)
def test_kernels_that_compute_wrongly_are_not_used(
    name: str, instead: object, what: str, faulty: pytest.MonkeyPatch
) -> None:
    assert CHECKS[what](DEVICE)
    faulty.setattr(kernels, name, instead)
    assert not CHECKS[what](DEVICE)
    faulty.setattr(_known_answers, "CHECKS", {what: CHECKS[what]})
    assert wrong_answers(DEVICE) == what


def test_wrong_answers_are_refused(faulty: pytest.MonkeyPatch) -> None:
    faulty.setattr(plugin, "wrong_answers", lambda device: "noise")
    with pytest.raises(ConfigurationError, match=r"cannot be used: they compute wrongly on .* \(noise\)"):
        signature(DEVICE)
