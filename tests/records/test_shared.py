"""What all records share, and several rows of a record: by tags, each gradient is that of autograd on one alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import _get_current_function_mode_stack

from dpbench.errors import UnsupportedModuleError
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.records.tagging import under_tags
from dpbench.strategies import ClipOnly
from tests.strategies.worlds import loader_of
from tests.support.one_by_one import BOUND, assert_releases_autograd, cross_entropy, data, fit, used
from tests.support.reference import mean_square, reference_gradients, relative_error

T = 5  # positions
D = 6  # width
PLACES = torch.arange(T)


class Net(nn.Module):
    """Parts, and a function of them and of records (R, T, D)."""

    def __init__(self, function: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any) -> Tensor:
        return self.function(self, *inputs)


def random(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def views(net: Any, x: Tensor) -> Tensor:
    """Rows that all records share are put before those of each."""
    prompt = net.prompt(torch.arange(3))[None].expand(len(x), -1, -1)
    return net.out(torch.cat([prompt, x], 1).tanh()).tanh()


def time_first(net: Any, x: Tensor) -> Tensor:
    """Records in dimension 1: layers, parameters of the module itself, relative positions that are expanded."""
    tokens = (x.sum(2).abs() * 3).long().clamp(max=6).t()
    h = net.norm(net.embedding(tokens)) + x.transpose(0, 1)
    query = torch.einsum("trd,dhk->trhk", h, net.query)
    positions = torch.linspace(0, 1, T, dtype=x.dtype)[:, None, None].expand(-1, len(x), D)
    relative = torch.einsum("srd,dhk->srhk", positions, net.query)
    scores = torch.einsum("trhk,srhk->rhts", query + net.bias, relative)
    return net.out(h).mean(0).tanh() + scores.softmax(-1)[:, 0, 0, :2]


def in_place(net: Any, x: Tensor) -> Tensor:
    """A layer that is called once for all, written into the records; and once for each record."""
    h = net.map(x).sin()
    h += net.map(net.table)
    h = h.tanh() * net.scale
    return h.mul_(net.scale.exp())


def masked(net: Any, x: Tensor) -> Tensor:
    """Attention of torch under a mask of each record's own, over positions that all share."""
    hidden = (x[..., 0] > 0.5) & (PLACES > 0)
    return net.encoder(x + net.positions(PLACES), src_key_padding_mask=hidden)[:, 0]


def frames(net: Any, x: Tensor) -> Tensor:
    """Convolutions, a normalization and a layer without a rule on each position."""
    rows = net.act(net.norm(net.conv(x.flatten(0, 1)[:, None])))
    return net.out(net.rnn(rows.reshape(len(x), T, -1))[0][:, -1])


def windows(net: Any, x: Tensor) -> Tensor:
    """Windows, with a bias of their positions (Swin)."""
    rows = net.map(x.reshape(-1, D, 1))
    attended = (rows @ rows.mT + net.bias[torch.arange(D) % 3]).softmax(-1) @ rows
    return net.out(attended.reshape(len(x), -1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "views": lambda: Net(views, prompt=nn.Embedding(3, D), out=nn.Linear(D, 2)),
    "time first": lambda: Net(
        time_first,
        embedding=nn.Embedding(7, D),
        norm=nn.LayerNorm(D),
        query=random(D, 2, 3),
        bias=random(2, 3),
        out=nn.Linear(D, 2),
    ),
    "in place": lambda: Net(in_place, table=random(1, T, D), scale=random(), map=nn.Linear(D, D)),
    "masked": lambda: Net(
        masked,
        positions=nn.Embedding(T, D),
        encoder=nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 12, dropout=0.0, batch_first=True), 1),
    ),
    "frames": lambda: Net(
        frames,
        conv=nn.Conv1d(1, 4, 3),
        norm=nn.GroupNorm(2, 4),
        act=nn.PReLU(4),
        rnn=nn.GRU(16, 5, batch_first=True),
        out=nn.Linear(5, 4),
    ),
    "windows": lambda: Net(windows, map=nn.Linear(1, 1), bias=random(3), out=nn.Linear(T * D, 4)),
}


def run(model: nn.Module, x: Tensor, loss: Callable[[nn.Module, Tensor], Tensor]) -> tuple[Tensor, PerRecordEngine]:
    """The loss of a batch under tags, and the engine that has watched."""
    engine = PerRecordEngine(model)
    engine.follow_tags()
    engine.expect(len(x))
    return under_tags(engine, lambda batch: loss(model, batch), x, len(x)), engine


@pytest.mark.parametrize("name", NETWORKS)
def test_each_record_is_that_of_autograd(name: str) -> None:
    """In lots of one, of as many as positions, and of another size."""
    model = NETWORKS[name]().double()
    for records in (1, T, 7):
        x = torch.randn(records, T, D, dtype=torch.float64)
        loss, engine = run(model, x, mean_square)
        gradients = engine.backward(loss, records, verify=True)
        engine.close()
        assert engine.verified
        weights = torch.linspace(-1, 2, records, dtype=torch.float64)
        for computed, (parameter, rows) in zip(gradients, reference_gradients(model, x).items(), strict=True):
            assert relative_error(computed.per_record(), rows) < 1e-9, (parameter, records)
            assert relative_error(computed.squared_norms(), rows.reshape(records, -1).square().sum(1)) < 1e-9
            assert relative_error(computed.weighted_sum(weights), torch.einsum("r,r...->...", weights, rows)) < 1e-9


# ------------------------------------------------------------------------------------- random numbers


def keyed(net: Any, x: Tensor) -> Tensor:
    """Attention on keys that all records share, of fewer dimensions than the query, and a bias for each head."""
    query = F.dropout(net.query(x), 0.3)[:, None]
    heads = query.expand(-1, 4, -1, -1)
    attended = F.scaled_dot_product_attention(query, net.keys, x[:, None], dropout_p=0.3)
    biased = F.scaled_dot_product_attention(heads, heads, x[:, None].expand_as(heads), net.bias)
    return net.out((attended[:, 0] + biased.sum(1)).mean(1))


def skipping(net: Any, x: Tensor) -> Tensor:
    """Which layers are called is drawn for the lot, rows for each record, and an attribute says what was seen."""
    x = x + net.places * torch.empty(len(x), 1, 1, dtype=x.dtype).bernoulli_(0.8)
    net.scale = x.abs().mean().detach()
    for layer in net.layers:
        if torch.rand([]) < 0.3:
            continue
        x = F.dropout(layer(x), 0.2)
    return net.out(x.mean(1))


RANDOM: dict[str, Callable[[], nn.Module]] = {
    "keyed": lambda: Net(keyed, query=nn.Linear(D, D), keys=random(1, T, D), bias=random(1, T, T), out=nn.Linear(D, 4)),
    "skipping": lambda: Net(
        skipping, places=random(T, D), layers=nn.ModuleList([nn.Linear(D, D) for _ in range(3)]), out=nn.Linear(D, 4)
    ),
}


@pytest.mark.parametrize("name", RANDOM)
def test_what_a_network_draws_is_not_drawn_again(name: str) -> None:
    """Against autograd on the graph of the same lot."""
    net = RANDOM[name]().double()
    for size in (1, T, 7):
        x, y = torch.randn(size, T, D, dtype=torch.float64), torch.arange(size) % 4
        state = torch.get_rng_state()
        loss, engine = run(net, x, lambda net, x, y=y: F.cross_entropy(net(x), y))
        gradients = engine.backward(loss, size, verify=True)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        with engine.paused():
            losses = F.cross_entropy(net(x), y, reduction="none")
        assert torch.equal(after, torch.get_rng_state())
        for record in range(size):
            own = torch.autograd.grad(losses[record], engine.parameters, retain_graph=True, materialize_grads=True)
            for computed, wanted in zip(gradients, own, strict=True):
                torch.testing.assert_close(computed.per_record()[record], wanted, rtol=1e-9, atol=1e-11)
        engine.close()


# ------------------------------------------------------------------------------------- in trainings


@pytest.mark.parametrize("places", [4, 12])
def test_arguments_of_as_many_rows_as_there_are_records(tmp_path: Path, places: int) -> None:
    """A module is given positions: as many as there are records in a trial, or in the batch."""
    inner = Net(lambda net, x, places: x * net.table[places].mean(0), table=random(places, D))
    net = Net(lambda net, x: net.out(net.inner(x, torch.arange(places)).mean(1)), inner=inner, out=nn.Linear(D, 4))
    strategy = ClipOnly(max_grad_norm=BOUND)
    assert_releases_autograd(tmp_path, net, cross_entropy, strategy)
    assert used(strategy) == "engine"


@pytest.mark.usefixtures("one_key")
@pytest.mark.parametrize(
    ("options", "method"),
    [
        ({"max_physical_batch_size": 4, "clipping": "per_parameter"}, "engine"),
        ({"max_physical_batch_size": 1}, "one_by_one"),
        ({"discretization_threshold": 0.01}, "engine"),
    ],
)
def test_the_releases_of_record_by_record(tmp_path: Path, options: dict[str, Any], method: str) -> None:
    weights = []
    for gradients in ("auto", "one_by_one"):
        torch.manual_seed(1)
        net = NETWORKS["windows"]()
        strategy, released, _ = fit(
            tmp_path / gradients, net, steps=3, gradients=gradients, loader=loader_of(data(40), 10), **options
        )
        weights.append(released)
        assert used(strategy) == (method if gradients == "auto" else "one_by_one")
    # Up to steps of the grid on which releases lie: which of two neighbors it is, rounding may decide.
    assert float((weights[0] - weights[1]).norm() / weights[0].norm()) < 2e-3


# ------------------------------------------------------------------------------------- without tags


class Halved(nn.Module):
    """A weight of two others."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x + y.tanh()) / 2

    def right_inverse(self, w: Tensor) -> tuple[Tensor, Tensor]:
        return w, w


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    ("layer", "computed"),
    [
        (nn.Linear(D, 3), parametrizations.weight_norm),
        (nn.Conv1d(T, 3, 2), lambda layer: parametrize.register_parametrization(layer, "weight", Halved())),
    ],
)
def test_weights_that_are_computed_of_several(layer: nn.Module, computed: Any) -> None:
    """Without tags: the layer's own rule, and the Jacobian of what computes the weight."""
    model = computed(layer).double()
    x = torch.randn(4, T, D, dtype=torch.float64)
    engine = PerRecordEngine(model)
    gradients = engine.backward(mean_square(model, x), 4, verify=True)
    for computed_rows, rows in zip(gradients, reference_gradients(model, x).values(), strict=True):
        assert relative_error(computed_rows.per_record(), rows) < 1e-9


def test_without_tags_it_is_refused() -> None:
    for name, message in (("views", "no tags"), ("windows", r"shape \(20, 6, 1\) for a batch of 4 records")):
        model = NETWORKS[name]()
        engine = PerRecordEngine(model)
        engine.follow_tags(name == "views")
        engine.expect(4)
        loss = mean_square(model, torch.randn(4, T, D))
        with pytest.raises(UnsupportedModuleError, match=message):
            engine.backward(loss, 4)


# ------------------------------------------------------------------------------------- losses


def test_a_mean_over_records_times_what_they_share_is_refused() -> None:
    """Its derivative is the mean of the losses, of which no record has a part of its own."""
    model = Net(lambda net, x: net.map(x).square().mean() * net.scale, map=nn.Linear(D, 2), scale=random())
    loss, engine = run(model, torch.randn(4, T, D), lambda net, x: net(x))
    with pytest.raises(UnsupportedModuleError, match="no row of each record"):
        engine.backward(loss, 4, verify=True)


def changing(net: Any, x: Tensor) -> Tensor:
    """Clears what a function was given."""
    h = net.map(x)
    scaled = h.detach() * net.scale + net.map(x)
    h.detach().zero_()
    return scaled


def test_what_was_changed_afterwards_is_refused() -> None:
    model = Net(changing, map=nn.Linear(D, D), scale=random())
    loss, engine = run(model, torch.randn(4, T, D), mean_square)
    with pytest.raises(UnsupportedModuleError, match="changed in place"):
        engine.backward(loss, 4)


def failing(net: Any, x: Tensor) -> Tensor:
    raise RuntimeError("of its own")


def test_functions_are_looked_at_while_a_module_runs() -> None:
    """And not after it has failed in the middle of a forward pass."""
    net = Net(failing, scale=random(D), map=nn.Linear(D, D))
    engine = PerRecordEngine(net)
    engine.follow_tags()
    engine.expect(3)
    with pytest.raises(RuntimeError, match="of its own"):
        net(torch.randn(3, T, D))
    engine.expect(3)
    assert not _get_current_function_mode_stack()
