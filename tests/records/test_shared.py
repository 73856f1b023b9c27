"""What all records share, by tags: each gradient is that of autograd on a record alone, and couplings are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from dpbench.errors import UnsupportedModuleError
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.records.tagging import under_tags
from tests.strategies.worlds import loader_of
from tests.support.one_by_one import data, fit, used
from tests.support.reference import mean_square, reference_gradients, relative_error

T = 5  # positions
D = 6  # width


class Prompted(nn.Module):
    """Rows that all records share are put before those of each, as views or as copies."""

    def __init__(self, copies: bool, computed: bool = False) -> None:
        super().__init__()
        self.copies = copies
        self.prompt = nn.Embedding(3, D)
        self.mlp = nn.Sequential(nn.Linear(D, D), nn.Tanh()) if computed else nn.Identity()
        self.out = nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        prompt = self.mlp(self.prompt(torch.arange(3))[None])
        prompt = prompt.repeat(len(x), 1, 1) if self.copies else prompt.expand(len(x), -1, -1)
        return self.out(torch.cat([prompt, x], 1).tanh()).tanh()


class Computed(nn.Module):
    """Weights that are computed of others, and taken by functions."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ParameterDict({"a": nn.Parameter(torch.randn(4, 2))})
        self.right = nn.ParameterDict({"a": nn.Parameter(torch.randn(2, D))})
        self.bias = nn.Parameter(torch.randn(4))
        self.kernel = nn.Parameter(torch.randn(3, T, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, (self.left["a"] @ self.right["a"]).tanh(), self.bias)
        h = F.conv1d(h.sigmoid(), self.kernel.exp() / 3)
        return torch.einsum("rct,tk->rk", h, self.left["a"][:3])


class TimeFirst(nn.Module):
    """Records in dimension 1: layers, parameters of the module itself, relative positions that are expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, D)
        self.norm = nn.LayerNorm(D)
        self.query = nn.Parameter(torch.randn(D, 2, 3))
        self.bias = nn.Parameter(torch.randn(2, 3))
        self.out = nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.sum(2).abs() * 3).long().clamp(max=6).t()
        h = self.norm(self.embedding(tokens)) + x.transpose(0, 1)
        query = torch.einsum("trd,dhk->trhk", h, self.query)
        positions = torch.linspace(0, 1, T, dtype=x.dtype)[:, None, None].expand(-1, len(x), D)
        relative = torch.einsum("srd,dhk->srhk", positions, self.query)
        scores = torch.einsum("trhk,srhk->rhts", query + self.bias, relative)
        return self.out(h).mean(0).tanh() + scores.softmax(-1)[:, 0, 0, :2]


class Rows(nn.Module):
    """A layer that is called once for all, written into the records in place; and once for each record."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, T, D))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.map = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.map(x).sin()
        h += self.map(self.table)
        h = h.tanh() * self.scale
        return h.mul_(self.scale.exp())


class Attending(nn.Module):
    """Attention with a bias for all records, and with keys for all, beside frames that are rows of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(T, T)
        self.keys = nn.Parameter(torch.randn(1, 2, T, 3))
        self.map = nn.Linear(D, D)
        self.conv = nn.Conv1d(1, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        frames = self.conv(x.reshape(-1, 1, D)).view(len(x), T, -1)
        heads = self.map(x).view(len(x), T, 2, 3).transpose(1, 2)
        keys = self.keys.expand_as(heads)
        attended = F.scaled_dot_product_attention(heads, keys, heads, self.bias.weight[None, None])
        attended = attended + F.scaled_dot_product_attention(heads, heads, heads, self.bias.weight.t())
        return attended.flatten(1)[:, :8] + frames.flatten(1)[:, :8]


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "views": lambda: Prompted(copies=False),
    "copies": lambda: Prompted(copies=True),
    "computed prompts": lambda: Prompted(copies=True, computed=True),
    "computed weights": Computed,
    "time first": TimeFirst,
    "in place": Rows,
    "attention": Attending,
}
Loss = Callable[[nn.Module, Tensor], Tensor]


def run(model: nn.Module, x: Tensor, loss: Loss) -> tuple[Tensor, PerRecordEngine]:
    """The loss of a batch under tags, and the engine that has watched."""
    engine = PerRecordEngine(model)
    engine.follow_tags()
    engine.expect(len(x))
    return under_tags(engine, lambda batch: loss(model, batch), x, len(x)), engine


@pytest.mark.parametrize("records", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("name", NETWORKS)
def test_each_record_is_that_of_autograd(name: str, records: int) -> None:
    torch.manual_seed(1)
    model = NETWORKS[name]().double()
    x = torch.randn(records, T, D, dtype=torch.float64)
    loss, engine = run(model, x, mean_square)
    gradients = engine.backward(loss, records, verify=True)
    assert engine.verified
    weights = torch.linspace(-1, 2, records, dtype=torch.float64)
    for computed, (parameter, rows) in zip(gradients, reference_gradients(model, x).items(), strict=True):
        assert relative_error(computed.per_record(), rows) < 1e-9, parameter
        assert relative_error(computed.squared_norms(), rows.reshape(records, -1).square().sum(1)) < 1e-9
        assert relative_error(computed.weighted_sum(weights), torch.einsum("r,r...->...", weights, rows)) < 1e-9


class Halved(nn.Module):
    """A weight of two others."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x + y.tanh()) / 2

    def right_inverse(self, w: Tensor) -> tuple[Tensor, Tensor]:
        return w, w


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("layer", [lambda: nn.Linear(D, 3), lambda: nn.Conv1d(T, 3, 2)])
@pytest.mark.parametrize(
    "computed",
    [
        parametrizations.weight_norm,
        lambda layer: parametrizations.weight_norm(layer, dim=1),
        lambda layer: parametrize.register_parametrization(layer, "weight", Halved()),
    ],
)
@pytest.mark.parametrize("records", [1, 4])
def test_weights_that_are_computed_of_several(
    layer: Callable[[], nn.Module],
    computed: Callable[[nn.Module], nn.Module],
    records: int,
) -> None:
    """Without tags: the layer's own rule, and the Jacobian of what computes the weight."""
    torch.manual_seed(1)
    model = computed(layer()).double()
    x = torch.randn(records, T, D, dtype=torch.float64)
    engine = PerRecordEngine(model)
    gradients = engine.backward(mean_square(model, x), records, verify=True)
    for computed_rows, rows in zip(gradients, reference_gradients(model, x).values(), strict=True):
        assert relative_error(computed_rows.per_record(), rows) < 1e-9


class Penalized(nn.Module):
    """Returns a loss with a penalty on weights, or times what all records share."""

    def __init__(self, is_scaled: bool = False) -> None:
        super().__init__()
        self.map = nn.Linear(D, 2)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.is_scaled = is_scaled

    def forward(self, x: Tensor) -> Tensor:
        loss = self.map(x).square().mean()
        return loss * self.scale if self.is_scaled else loss + 0.3 * self.scale.square()


def test_a_penalty_on_weights_is_of_each_record() -> None:
    torch.manual_seed(1)
    model = Penalized().double()
    x = torch.randn(3, T, D, dtype=torch.float64)
    loss, engine = run(model, x, lambda net, x: net(x))
    gradients = engine.backward(loss, 3, verify=True)
    for record in range(3):
        own = torch.autograd.grad(model(x[record : record + 1]), list(model.parameters()))
        for computed, wanted in zip(gradients, own, strict=True):
            torch.testing.assert_close(computed.per_record()[record], wanted, rtol=1e-9, atol=1e-11)


def test_a_mean_over_records_times_what_they_share_is_refused() -> None:
    """Its derivative is the mean of the losses, of which no record has a part of its own."""
    loss, engine = run(Penalized(is_scaled=True), torch.randn(4, T, D), lambda net, x: net(x))
    with pytest.raises(UnsupportedModuleError, match="no row of each record"):
        engine.backward(loss, 4, verify=True)


def test_without_tags_it_is_refused() -> None:
    model = Prompted(copies=False)
    engine = PerRecordEngine(model)
    engine.follow_tags()
    engine.expect(4)
    loss = mean_square(model, torch.randn(4, T, D))
    with pytest.raises(UnsupportedModuleError, match="no tags"):
        engine.backward(loss, 4)


class Changing(Rows):
    """Clears what a function was given."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.map(x)
        scaled = h.detach() * self.scale + self.map(x)
        h.detach().zero_()
        return scaled


def test_what_was_changed_afterwards_is_refused() -> None:
    loss, engine = run(Changing(), torch.randn(4, T, D), mean_square)
    with pytest.raises(UnsupportedModuleError, match="changed in place"):
        engine.backward(loss, 4)


# ------------------------------------------------------------------------------------- what must not be accepted


class Classifier(nn.Module):
    """Rows and weights that all records share."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, D)
        self.weight = nn.Parameter(torch.randn(4, D))

    def rows(self, x: Tensor) -> Tensor:
        return self.table(torch.arange(T))

    def weights(self, x: Tensor) -> Tensor:
        return self.weight.tanh()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear((x + self.rows(x)).tanh(), self.weights(x)).mean(1)


class RowsByPlace(Classifier):
    """Another row of the table for each place in the batch."""

    def rows(self, x: Tensor) -> Tensor:
        return self.table(torch.arange(len(x)))[:, None]


class RowsOfAll(Classifier):
    """Rows that are moved by the mean over the records."""

    def rows(self, x: Tensor) -> Tensor:
        return super().rows(x) + x.mean(0)


class WeightsOfAll(Classifier):
    """Weights that are computed with the records."""

    def weights(self, x: Tensor) -> Tensor:
        return super().weights(x) * x.std((0, 1))


class Neighbors(Classifier):
    """Each record is given what the one before it makes of the shared weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + (x * self.weight[0]).roll(1, 0))


def test_the_healthy_twin_stays_with_the_engine(tmp_path: Path) -> None:
    torch.manual_seed(1)
    strategy, weights, _ = fit(tmp_path, Classifier(), gradients="auto", loader=loader_of(data(40), 10))
    assert used(strategy) == "engine" and weights.isfinite().all()


@pytest.mark.parametrize("network", [RowsByPlace, RowsOfAll, WeightsOfAll, Neighbors])
def test_a_coupled_twin_is_not_accepted(network: type[Classifier], tmp_path: Path) -> None:
    torch.manual_seed(1)
    with pytest.raises(UnsupportedModuleError):
        fit(tmp_path, network(), gradients="engine", loader=loader_of(data(40), 10))
