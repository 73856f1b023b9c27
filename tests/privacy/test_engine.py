"""The engine against per-record autograd in float64, for every kind of layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpbench.errors import ConfigurationError, UnsupportedModuleError
from dpbench.models import MLP, MNISTCNN, DenseNet, SmallAlexNet, WideResNet
from dpbench.models.wide_resnet import WeightStandardization
from dpbench.privacy.gradients import layers
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.privacy.gradients.parameter import EmbeddingGradients, OuterProductGradients, TiedGradients
from dpbench.records.tagging import under_tags
from tests.support.reference import Loss, mean_square, reference_gradients, relative_error

pytestmark = pytest.mark.usefixtures("tier")

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
DTYPES = list(TOLERANCE)
LOTS = (0, 1, 7)
few = settings(max_examples=40, deadline=None)


def check(model: nn.Module, inputs: Tensor, loss: Loss = mean_square) -> None:
    """All three answers of the engine equal the reference, in both precisions."""
    for dtype in DTYPES:
        check_in(copy.deepcopy(model).to(dtype), inputs, dtype, loss)


def check_in(model: nn.Module, inputs: Tensor, dtype: torch.dtype, loss: Loss) -> None:
    expected = reference_gradients(model, inputs, loss)
    engine = PerRecordEngine(model)
    x = inputs.to(dtype) if inputs.is_floating_point() else inputs
    of_batch = under_tags(engine, lambda batch: loss(model, batch), x, len(x))
    gradients = engine.backward(of_batch, len(x), verify=True)
    assert engine.names == list(expected)
    weights = torch.linspace(-1, 2, len(x), dtype=dtype)
    largest = max((float(e.norm()) for e in expected.values()), default=1.0)
    for name, got in zip(engine.names, gradients, strict=True):
        want = expected[name]
        scale = max(float(want.norm()), 1e-3 * largest) or 1.0  # a gradient that cancels to zero has no relative error

        def close(actual: Tensor, wanted: Tensor, unit: float, name: str = name) -> None:
            assert actual.shape == wanted.shape, name
            assert float((actual.double() - wanted.double()).norm()) <= TOLERANCE[dtype] * unit, name

        close(got.per_record(), want, scale)
        close(got.squared_norms(), torch.einsum("r...,r...->r", want, want), scale**2)
        summed = torch.einsum("r,r...->...", weights.double(), want)
        close(got.weighted_sum(weights), summed, 2 * scale)
        for other in (dtype, torch.float64):  # the running sum may be more precise than a parameter
            total = torch.zeros(summed.shape, dtype=other)
            got.add_weighted_sum(weights, total)
            got.add_weighted_sum(weights, total)
            close(total, 2 * summed, 4 * scale)
        if len(x) > 1:
            keep = torch.tensor([0, len(x) - 1])
            close(got.select(keep).per_record(), want[keep], scale)
    engine.close()
    assert not any(module._forward_hooks for module in model.modules())


class Flat(nn.Module):
    """A layer followed by a fixed nonlinearity, so that the output gradient is not constant."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).tanh()


@few
@given(
    records=st.sampled_from(LOTS),
    n_in=st.integers(1, 5),
    n_out=st.integers(1, 5),
    positions=st.sampled_from([(), (1,), (3,), (2, 2), (9,)]),
    bias=st.booleans(),
)
def test_linear(records: int, n_in: int, n_out: int, positions: tuple[int, ...], bias: bool) -> None:
    check(Flat(nn.Linear(n_in, n_out, bias=bias)), torch.randn(records, *positions, n_in))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@few
@given(
    records=st.sampled_from(LOTS),
    dims=st.sampled_from([1, 2, 3]),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.sampled_from([0, 1, 2, "same", "valid"]),
    dilation=st.integers(1, 2),
    groups=st.sampled_from([1, 2]),
    bias=st.booleans(),
    mode=st.sampled_from(["zeros", "reflect", "circular"]),
    last=st.booleans(),
)
def test_convolution(
    records: int,
    dims: int,
    kernel: int,
    stride: int,
    padding: Any,
    dilation: int,
    groups: int,
    bias: bool,
    mode: str,
    last: bool,
) -> None:
    if padding == "same":
        stride = 1
    if dims == 3 and mode == "reflect":
        mode = "replicate"
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    conv = layer(2, 4, kernel, stride, padding, dilation, groups, bias, mode)
    x = torch.randn(records, 2, *range(6, 6 + dims))
    if dims == 2 and last:
        x = x.contiguous(memory_format=torch.channels_last)
        conv = conv.to(memory_format=torch.channels_last)
    check(Flat(conv), x)


class Softplus(nn.Module):
    """A weight that is positive, by an elementwise function without parameters of its own."""

    def forward(self, weight: Tensor) -> Tensor:
        return nn.functional.softplus(weight)


def computed(layer: nn.Module, computation: nn.Module, name: str = "weight") -> nn.Module:
    return nn.utils.parametrize.register_parametrization(layer, name, computation, unsafe=True)


@pytest.mark.parametrize("records", LOTS)
@pytest.mark.parametrize(
    "make",
    [
        lambda: computed(nn.Conv2d(2, 4, 3, 2, 1), WeightStandardization(4)),
        lambda: computed(nn.Conv2d(2, 4, 3, bias=False, groups=2), WeightStandardization(4)),
        lambda: computed(computed(nn.Conv2d(2, 4, 3), WeightStandardization(4)), Softplus()),
        lambda: computed(computed(nn.Conv2d(2, 4, 3), WeightStandardization(4)), Softplus(), "bias"),
        lambda: nn.Sequential(nn.Flatten(), computed(nn.Linear(72, 3), WeightStandardization(3))),
        lambda: nn.Sequential(computed(nn.GroupNorm(2, 2), Softplus()), nn.Conv2d(2, 3, 1)),
    ],
    ids=["strided", "grouped", "twice", "bias", "linear", "norm"],
)
def test_weights_that_are_computed_from_another_tensor(make: Any, records: int) -> None:
    torch.manual_seed(records)
    check(Flat(make()), torch.randn(records, 2, 6, 6))


def test_a_computed_weight_used_twice_and_one_that_is_frozen() -> None:
    torch.manual_seed(0)
    conv = computed(nn.Conv2d(3, 3, 3, padding=1), WeightStandardization(3))
    check(nn.Sequential(conv, nn.Tanh(), conv), torch.randn(4, 3, 5, 5))
    conv.parametrizations.weight.original.requires_grad_(False)  # type: ignore[union-attr]
    check(nn.Sequential(conv, nn.Tanh()), torch.randn(4, 3, 5, 5))  # the gain alone


def test_a_gradient_that_the_standardization_annihilates_has_the_norm_of_what_is_released() -> None:
    """The output's gradient is the same everywhere, and enormous: what is left of it is rounding, whose norm is its."""
    conv = computed(nn.Conv2d(1, 1, 3), WeightStandardization(1))
    engine = PerRecordEngine(conv)
    x = torch.ones(3, 1, 6, 6) * 1e6
    gradients = engine.backward(conv(x).sum(), 3)
    sums = gradients[engine.names.index("parametrizations.weight.original")]
    one = sums.weighted_sum(torch.tensor([1.0, 0, 0]))
    torch.testing.assert_close(one.norm().square(), sums.squared_norms()[0])


class Noisy(nn.Module):
    """A weight with noise, which is another one whenever it is computed."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * torch.rand_like(weight)


def test_computed_weights_that_are_refused() -> None:
    model = computed(nn.Linear(4, 3), Noisy())
    engine = PerRecordEngine(model)
    with pytest.raises(UnsupportedModuleError, match="weight"):
        engine.backward(mean_square(nn.Sequential(model, nn.Tanh()), torch.randn(5, 4)), 5, verify=True)
    with pytest.raises(UnsupportedModuleError, match="has a weight that is computed from others"):
        PerRecordEngine(computed(nn.PReLU(), Softplus()))


@pytest.mark.parametrize(
    ("im2col", "loop", "grouped"),
    [(0, 2**60, 2**60), (0, 2**60, 300), (0, 0, 2**60), (2**60, 2**60, 2**60)],
    ids=["grouped", "pieces", "loop", "im2col"],
)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_every_way_to_compute_a_convolution(
    im2col: int,
    loop: int,
    grouped: int,
    groups: int,
    memory: torch.memory_format,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layers, "_GROUPED_LIMIT", grouped)
    monkeypatch.setattr(layers, "_IM2COL_LIMIT", im2col)
    monkeypatch.setattr(layers, "_LOOP_LIMIT", loop)
    conv = nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 2), (2, 1), groups).to(memory_format=memory)
    for records in LOTS:
        check(Flat(conv), torch.randn(records, 4, 9, 7).contiguous(memory_format=memory))


@few
@given(
    records=st.sampled_from(LOTS), positions=st.sampled_from([(1,), (5,), (2, 3)]), padding=st.sampled_from([None, 0])
)
def test_embedding(records: int, positions: tuple[int, ...], padding: int | None) -> None:
    check(Flat(nn.Embedding(6, 3, padding_idx=padding)), torch.randint(0, 6, (records, *positions)))


@few
@given(records=st.sampled_from(LOTS), groups=st.sampled_from([1, 2, 4]), shape=st.sampled_from([(), (3,), (3, 2)]))
def test_group_norm(records: int, groups: int, shape: tuple[int, ...]) -> None:
    if not shape and groups == 4:
        return  # torch refuses to normalize single values
    check(Flat(nn.GroupNorm(groups, 4)), torch.randn(records, 4, *shape))


@few
@given(records=st.sampled_from(LOTS), shape=st.sampled_from([(4,), (2, 4)]), middle=st.sampled_from([(), (3,), (2, 3)]))
def test_layer_norm(records: int, shape: tuple[int, ...], middle: tuple[int, ...]) -> None:
    check(Flat(nn.LayerNorm(shape)), torch.randn(records, *middle, *shape))
    check(Flat(nn.LayerNorm(shape, bias=False)), torch.randn(records, *middle, *shape))


class Scale(nn.Module):
    """A layer of the user's own, with a parameter and a child."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, -1.0, 2.0]))
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale) * self.scale


class Temperature(nn.Module):
    """A number that is learned, and another one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Parameter(torch.tensor(2.0))
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) / self.temperature.exp()


torch.manual_seed(0)  # the layers below are made when the file is read


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("records", LOTS)
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.PReLU(4), (4, 3)),
        (nn.ConvTranspose2d(2, 3, 3, stride=2), (2, 4, 4)),
        (nn.InstanceNorm2d(4, affine=True), (4, 3, 3)),
        (nn.RMSNorm(5), (2, 5)),
        (nn.Bilinear(3, 3, 2), (3,)),
        (Scale(), (3,)),
        (Temperature(), (3,)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_layers_without_a_rule(layer: nn.Module, shape: tuple[int, ...], records: int) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x, x.flip(1)) if isinstance(self.layer, nn.Bilinear) else self.layer(x)).tanh()

    if records or not isinstance(layer, nn.InstanceNorm2d):  # torch itself cannot run that on an empty lot
        check(Wrapper(), torch.randn(records, *shape))


@pytest.mark.parametrize("records", LOTS)
def test_module_used_twice_and_tied_weights_are_exact(records: int) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.conv = (
                nn.Linear(4, 4),
                nn.Linear(4, 4, bias=False),
                nn.Conv1d(1, 1, 3, padding=1),
            )
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(self.first(x).tanh())
            x = self.conv(self.conv(x[:, None]).relu())[:, 0]
            return self.second(x).tanh()

    check(Shared(), torch.randn(records, 4))


@pytest.mark.parametrize("records", LOTS)
def test_a_convolution_used_thrice_is_exact(records: int) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return (self.conv(self.conv(x).tanh()) + self.conv(x.flip(3))).tanh()

    check(Again(), torch.randn(records, 2, 5, 4))


class Tied(nn.Module):
    """A table that is an embedding, used twice, and the weight of the output layer, used twice, too."""

    def __init__(self, padding: int | None = None, again: bool = False) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 3, padding_idx=padding), nn.Linear(3, 5, bias=False)
        self.out.weight = self.embed.weight
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x).tanh()
        if self.again:
            hidden = hidden + self.embed(x.flip(1)[:, :2]).mean(1, keepdim=True)
            return self.out(hidden) + self.out(hidden.square().mean(1, keepdim=True))
        return self.out(hidden)


@pytest.mark.parametrize("records", LOTS)
@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("again", [False, True])
def test_tied_embedding(records: int, padding: int | None, again: bool) -> None:
    check(Tied(padding, again), torch.randint(0, 5, (records, 4)))


def test_an_embedding_used_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return (self.embed(x) + self.embed(x.flip(1)[:, :1])).tanh()

    check(Twice(), torch.randint(0, 5, (6, 4)))


def test_microbatches_of_a_tied_embedding() -> None:
    model, x = Tied(again=True).double(), torch.randint(0, 5, (7, 4))
    engine = PerRecordEngine(model)
    (gradients,) = engine.backward(mean_square(model, x), 7, verify=True)
    record_of = torch.tensor([0, 0, 0, 1, 2, 2, 2])
    merged = gradients.merge(record_of, 3, 0.5)
    (rows,) = reference_gradients(model, x).values()
    wanted = torch.zeros(3, *rows.shape[1:], dtype=torch.float64).index_add_(0, record_of, rows, alpha=0.5)
    assert relative_error(merged.per_record(), wanted) < 1e-10
    assert relative_error(merged.squared_norms(), wanted.flatten(1).square().sum(1)) < 1e-10
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    assert relative_error(merged.weighted_sum(weights), torch.einsum("r,r...->...", weights, wanted)) < 1e-10


@pytest.mark.parametrize("again", [False, True])
def test_a_tied_embedding_builds_no_gradient_of_a_record(again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Any) -> Tensor:
        raise AssertionError("a gradient for each record and row of the table")

    for form in (EmbeddingGradients, OuterProductGradients, TiedGradients):
        monkeypatch.setattr(form, "per_record", refused)
    model, x = Tied(again=again), torch.randint(0, 5, (7, 4))
    engine = PerRecordEngine(model)
    (gradients,) = engine.backward(mean_square(model, x), 7, verify=True)
    assert gradients.squared_norms().shape == (7,)
    total = torch.zeros(5, 3)
    gradients.add_weighted_sum(torch.ones(7), total)
    assert torch.allclose(total, gradients.weighted_sum(torch.ones(7)))


def test_uses_of_a_tied_embedding_that_cancel_are_not_hidden() -> None:
    """In float32 the squares of both uses cancel: what remains must not come out as less than it is."""
    rows = torch.randn(4, 3, 3)
    tokens = torch.arange(3).expand(4, 3)
    one_hot = torch.eye(5)[tokens]
    embedding = EmbeddingGradients(1e4 * rows, tokens, 5)
    linear = OuterProductGradients(one_hot, -1e4 * rows * (1 + 1e-5))
    tied = embedding.plus([linear])
    assert isinstance(tied, TiedGradients)
    wanted = (embedding.per_record().double() + linear.per_record().double()).flatten(1).square().sum(1)
    assert bool((tied.squared_norms() >= wanted).all())


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "2"])
def test_frozen_parameters(frozen: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    for name, p in model.named_parameters():
        p.requires_grad = not name.startswith(frozen)
    check(model, torch.randn(5, 3))


def test_unused_and_partly_used_layers_get_zeros() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.ignored = (nn.Linear(3, 3) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            self.ignored(x)
            return self.used(x).tanh()

    check(Partly(), torch.randn(4, 3))


@pytest.mark.parametrize(
    "model",
    [
        MNISTCNN((1, 16, 16), 4),
        MLP((1, 5, 5), 4, [7]),
        SmallAlexNet((3, 9, 9), 4, channels=6),
        WideResNet((3, 8, 8), 4, depth=10, width=1, groups=4),
        DenseNet((2, 6, 6), 4, 10, 4),
    ],
    ids=lambda m: type(m).__name__,
)
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_our_models(model: nn.Module, memory: torch.memory_format) -> None:
    shape = {
        MNISTCNN: (1, 16, 16),
        MLP: (1, 5, 5),
        SmallAlexNet: (3, 9, 9),
        WideResNet: (3, 8, 8),
        DenseNet: (2, 6, 6),
    }[type(model)]
    inputs = torch.randn(4, *shape).contiguous(memory_format=memory)
    check(model.to(memory_format=memory), inputs)
    check(model, inputs[:0])


def test_in_place_activations_are_exact() -> None:
    check(
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(48, 2)),
        torch.randn(3, 2, 6, 6),
    )


def test_sum_reduction() -> None:
    model, x = nn.Linear(3, 2).double(), torch.randn(5, 3).double()
    engine = PerRecordEngine(model, "sum")
    loss = torch.stack([mean_square(model, x[i : i + 1]) for i in range(5)]).sum()
    with pytest.raises(UnsupportedModuleError, match="batch of 5 records"):
        engine.backward(loss, 5)
    got = engine.backward(mean_square(model, x) * 5, 5)
    for name, gradients in zip(engine.names, got, strict=True):
        assert relative_error(gradients.per_record(), reference_gradients(model, x)[name]) < 1e-10


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), r"1 \(BatchNorm1d\) mixes the records.*GroupNorm"),
        (nn.Sequential(nn.SyncBatchNorm(3), nn.Linear(3, 3)), r"0 \(SyncBatchNorm\)"),
        (nn.InstanceNorm1d(3, track_running_stats=True), "track_running_stats=False"),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), "parametrization|spectral"),
        (nn.Embedding(3, 3, max_norm=1.0), "max_norm"),
        (nn.LazyLinear(3), "not initialized"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_layers_that_mix_records_are_refused_by_name(model: nn.Module, message: str) -> None:
    with pytest.raises(UnsupportedModuleError, match=message):
        PerRecordEngine(model)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) * self.weight


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + nn.functional.linear(x, self.layer.weight)


class Transposing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


class ChangesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        y = self.layer(x)
        x.add_(1)
        return y


@pytest.mark.parametrize(
    ("model", "shape", "message"),
    [
        (Mixing(), (4, 3), "depends on the other records"),
        (Functional(), (4, 3), "layer.weight do not add up"),
        (Transposing(), (4, 2, 3), "batch of 4 records"),
        (ChangesInput(), (4, 3), "changed in place"),
    ],
    ids=["mixing", "functional", "transposing", "in place"],
)
def test_what_cannot_be_exact_is_refused(model: nn.Module, shape: tuple[int, ...], message: str) -> None:
    engine = PerRecordEngine(model)
    x = torch.randn(*shape)
    with pytest.raises((UnsupportedModuleError, RuntimeError), match=message):
        engine.backward(mean_square(model, x), len(x), verify=message != "changed in place")


def test_nothing_to_train_and_unknown_reduction() -> None:
    with pytest.raises(ConfigurationError, match="no trainable"):
        PerRecordEngine(nn.ReLU())
    with pytest.raises(ConfigurationError, match="loss_reduction"):
        PerRecordEngine(nn.Linear(2, 2), "median")  # type: ignore[arg-type]


def test_bfloat16_sums_in_float32() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.PReLU(), nn.Linear(8, 2)), torch.randn(16, 8)
    expected = reference_gradients(model, x)
    engine = PerRecordEngine(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = mean_square(model, x)
    for name, gradients in zip(engine.names, engine.backward(loss, 16, verify=True), strict=True):
        assert gradients.squared_norms().dtype == torch.float32
        assert relative_error(gradients.per_record(), expected[name]) < 0.03


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_against_opacus() -> None:
    """Another implementation gives the same gradients on one of our networks."""
    from opacus.grad_sample import GradSampleModule

    model = MNISTCNN((1, 16, 16), 4)
    x = torch.randn(5, 1, 16, 16)
    engine = PerRecordEngine(model)
    ours = engine.backward(mean_square(model, x), 5)
    engine.close()
    wrapped = GradSampleModule(copy.deepcopy(model))
    mean_square(wrapped, x).backward()
    for gradients, theirs in zip(ours, wrapped.parameters(), strict=True):
        assert relative_error(gradients.per_record(), theirs.grad_sample) < 1e-5


def test_hooks_of_parameters_see_no_sum_of_records() -> None:
    """Such as those of `wandb.watch`: the ordinary backward pass of the first lot is nobody's."""
    model, seen = nn.Linear(3, 2), []
    handle = model.weight.register_hook(lambda grad: seen.append(grad))
    engine, x = PerRecordEngine(model), torch.randn(5, 3)
    engine.backward(model(x).square().mean(), 5, verify=True)
    assert engine.verified and not seen
    engine.close()
    model(x).sum().backward()
    assert len(seen) == 1
    handle.remove()
    model(x).sum().backward()
    assert len(seen) == 1
