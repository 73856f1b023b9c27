"""The engine against per-record autograd in float64, for every kind of layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpbench.errors import ConfigurationError, UnsupportedModuleError
from dpbench.models.wide_resnet import WeightStandardization
from dpbench.privacy.gradients import layers
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.privacy.gradients.parameter import EmbeddingGradients, OuterProductGradients, TiedGradients
from tests.privacy.exact import (
    LOTS,
    Networks,
    assert_answers,
    assert_each_exact,
    assert_exact,
    assert_exact_in_its_pass,
)
from tests.support.reference import mean_square, reference_gradients, relative_error

few = settings(max_examples=20, deadline=None)


class Bounded(nn.Module):
    """Layers followed by a nonlinearity, so that the output gradient is not constant."""

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
    assert_exact(Bounded(nn.Linear(n_in, n_out, bias=bias)), torch.randn(records, *positions, n_in))


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
    assert_exact(Bounded(conv), x)


@pytest.mark.parametrize(
    ("im2col", "loop", "grouped"),
    [(0, 2**60, 2**60), (0, 2**60, 300), (0, 0, 2**60), (2**60, 2**60, 2**60)],
    ids=["grouped", "pieces", "loop", "im2col"],
)
def test_every_way_to_compute_a_convolution(
    im2col: int, loop: int, grouped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "_GROUPED_LIMIT", grouped)
    monkeypatch.setattr(layers, "_IM2COL_LIMIT", im2col)
    monkeypatch.setattr(layers, "_LOOP_LIMIT", loop)
    for groups, memory in ((1, torch.channels_last), (1, torch.contiguous_format), (2, torch.contiguous_format)):
        conv = nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 2), (2, 1), groups).to(memory_format=memory)
        assert_exact(Bounded(conv), torch.randn(7, 4, 9, 7).contiguous(memory_format=memory))


@few
@given(
    records=st.sampled_from(LOTS), positions=st.sampled_from([(1,), (5,), (2, 3)]), padding=st.sampled_from([None, 0])
)
def test_embedding(records: int, positions: tuple[int, ...], padding: int | None) -> None:
    assert_exact(Bounded(nn.Embedding(6, 3, padding_idx=padding)), torch.randint(0, 6, (records, *positions)))


@few
@given(
    records=st.sampled_from(LOTS),
    layer=st.sampled_from([nn.GroupNorm(1, 4), nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.LayerNorm((4, 2), bias=False)]),
    middle=st.sampled_from([(), (3,), (2, 3)]),
)
def test_normalization(records: int, layer: nn.Module, middle: tuple[int, ...]) -> None:
    shape = (4, *middle) if isinstance(layer, nn.GroupNorm) else (*middle, *layer.normalized_shape)  # type: ignore[misc]
    assert_exact(Bounded(layer), torch.randn(records, *shape))


# ------------------------------------------------------------------------------------------ small networks


class Softplus(nn.Module):
    """A weight that is positive, by an elementwise function without parameters of its own."""

    def forward(self, weight: Tensor) -> Tensor:
        return nn.functional.softplus(weight)


def computed(layer: nn.Module, computation: nn.Module, name: str = "weight") -> nn.Module:
    return nn.utils.parametrize.register_parametrization(layer, name, computation, unsafe=True)


def standardized(frozen: bool = False) -> nn.Module:
    conv = computed(nn.Conv2d(2, 2, 3, padding=1), WeightStandardization(2))
    conv.parametrizations.weight.original.requires_grad_(not frozen)  # type: ignore[union-attr]
    return conv


class Temperature(nn.Module):
    """A number that is learned, another one that is not used, and a layer whose output is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Parameter(torch.tensor(2.0))
        self.inner, self.ignored = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.ignored(x)
        return self.inner(x) / self.temperature.exp()


class Again(nn.Module):
    """One layer, several times: also on what it made itself."""

    def __init__(self, layer: nn.Module, flipped: int) -> None:
        super().__init__()
        self.layer, self.flipped = layer, flipped

    def forward(self, x: Tensor) -> Tensor:
        once = self.layer(x.flip(self.flipped))
        return self.layer(once.tanh()) + once.square()


class Tied(nn.Module):
    """A table that is an embedding, used twice, and the weight of the output layer, used twice, too."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 3, padding_idx=padding), nn.Linear(3, 5, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x).tanh() + self.embed(x.flip(1)[:, :2]).mean(1, keepdim=True)
        return self.out(hidden) + self.out(hidden.square().mean(1, keepdim=True))


def tied_linear() -> nn.Module:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    return nn.Sequential(Again(first, 1), nn.Tanh(), second)


def frozen() -> nn.Module:
    """The bias of one layer, and all of another."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].bias.requires_grad = False
    model[2].requires_grad_(False)
    return model


NETWORKS: Networks = {
    "computed weight and bias": (lambda: computed(standardized(), Softplus(), "bias"), (2, 6, 6)),
    "computed norm": (lambda: nn.Sequential(computed(nn.GroupNorm(2, 2), Softplus()), nn.Conv2d(2, 3, 1)), (2, 6, 6)),
    "standardized and used twice": (lambda: Again(standardized(), 3), (2, 5, 5)),
    "gain alone": (lambda: standardized(frozen=True), (2, 5, 5)),
    "no rule": (lambda: nn.PReLU(4), (4, 3)),
    "own number": (Temperature, (3,)),
    "convolution twice": (lambda: Again(nn.Conv2d(2, 2, 3, padding=1), 3), (2, 5, 4)),
    "linear tied": (tied_linear, (4,)),
    "embedding tied": (lambda: Tied(0), (4,)),
    "frozen": (frozen, (3,)),
    "in place": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(True), nn.Flatten(), nn.Linear(48, 2)), (2, 6, 6)),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str) -> None:
    assert_each_exact({name: (lambda: Bounded(NETWORKS[name][0]()), NETWORKS[name][1])}, name)


def test_a_gradient_that_the_standardization_annihilates_has_the_norm_of_what_is_released() -> None:
    """The output's gradient is the same everywhere, and enormous: what is left of it is rounding, whose norm is its."""
    conv = computed(nn.Conv2d(1, 1, 3), WeightStandardization(1))
    engine = PerRecordEngine(conv)
    x = torch.ones(3, 1, 6, 6) * 1e6
    gradients = engine.backward(conv(x).sum(), 3)
    sums = gradients[engine.names.index("parametrizations.weight.original")]
    one = sums.weighted_sum(torch.tensor([1.0, 0, 0]))
    torch.testing.assert_close(one.norm().square(), sums.squared_norms()[0])


# ------------------------------------------------------------------------------------------ tied embeddings


def test_microbatches_of_a_tied_embedding() -> None:
    model, x = Tied().double(), torch.randint(0, 5, (7, 4))
    engine = PerRecordEngine(model)
    (gradients,) = engine.backward(mean_square(model, x), 7, verify=True)
    record_of = torch.tensor([0, 0, 0, 1, 2, 2, 2])
    merged = gradients.merge(record_of, 3, 0.5)
    (rows,) = reference_gradients(model, x).values()
    wanted = torch.zeros(3, *rows.shape[1:], dtype=torch.float64).index_add_(0, record_of, rows, alpha=0.5)
    assert_answers(merged, wanted, float(wanted.norm()), torch.float64)


def test_uses_of_a_tied_embedding_that_cancel_are_not_hidden() -> None:
    """In float32 the squares of both uses cancel: what remains must not come out as less than it is."""
    rows = torch.randn(4, 3, 3)
    tokens = torch.arange(3).expand(4, 3)
    embedding = EmbeddingGradients(1e4 * rows, tokens, 5)
    linear = OuterProductGradients(torch.eye(5)[tokens], -1e4 * rows * (1 + 1e-5))
    tied = embedding.plus([linear])
    assert isinstance(tied, TiedGradients)
    wanted = (embedding.per_record().double() + linear.per_record().double()).flatten(1).square().sum(1)
    assert bool((tied.squared_norms() >= wanted).all())


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), r"1 \(BatchNorm1d\) mixes the records.*GroupNorm"),
        (nn.InstanceNorm1d(3, track_running_stats=True), "track_running_stats=False"),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), "parametrization|spectral"),
        (nn.Embedding(3, 3, max_norm=1.0), "max_norm"),
        (nn.LazyLinear(3), "not initialized"),
        (computed(nn.PReLU(), Softplus()), "has a weight that is computed from others"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_layers_that_mix_records_are_refused_by_name(model: nn.Module, message: str) -> None:
    with pytest.raises(UnsupportedModuleError, match=message):
        PerRecordEngine(model)


class Mixing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + nn.functional.linear(x, self.layer.weight)


class ChangesInput(Functional):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        y = self.layer(x)
        x.add_(1)
        return y


class Noisy(nn.Module):
    """A weight with noise, which is another one whenever it is computed."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * torch.rand_like(weight)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Mixing(3, 3), "depends on the other records"),
        (Functional(), "layer.weight do not add up"),
        (ChangesInput(), "changed in place"),
        (nn.Sequential(computed(nn.Linear(3, 3), Noisy()), nn.Tanh()), "weight"),
    ],
    ids=["mixing", "functional", "in place", "noisy weight"],
)
def test_what_cannot_be_exact_is_refused(model: nn.Module, message: str) -> None:
    engine = PerRecordEngine(model)
    with pytest.raises(UnsupportedModuleError, match=message):
        engine.backward(mean_square(model, torch.randn(4, 3)), 4, verify=message != "changed in place")


def test_nothing_to_train_and_unknown_reduction() -> None:
    with pytest.raises(ConfigurationError, match="no trainable"):
        PerRecordEngine(nn.ReLU())
    with pytest.raises(ConfigurationError, match="loss_reduction"):
        PerRecordEngine(nn.Linear(2, 2), "median")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ losses


def test_sum_reduction() -> None:
    model, x = nn.Linear(3, 2).double(), torch.randn(5, 3).double()
    engine = PerRecordEngine(model, "sum")
    loss = torch.stack([mean_square(model, x[i : i + 1]) for i in range(5)]).sum()
    with pytest.raises(UnsupportedModuleError, match="batch of 5 records"):
        engine.backward(loss, 5)
    got = engine.backward(mean_square(model, x) * 5, 5)
    for name, gradients in zip(engine.names, got, strict=True):
        assert relative_error(gradients.per_record(), reference_gradients(model, x)[name]) < 1e-10


def test_automatic_bfloat16() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.PReLU(), nn.Linear(8, 2))
    assert_exact_in_its_pass(model, torch.randn(16, 8), rtol=0.03, half=True)
