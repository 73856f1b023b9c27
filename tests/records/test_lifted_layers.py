"""Layers on what all records share: run with the lines of a module above, for each record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack

from dpbench.errors import UnsupportedModuleError
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.records.tagging import under_tags
from dpbench.strategies import ClipOnly
from tests.strategies.worlds import loader_of
from tests.support.one_by_one import BOUND, assert_releases_autograd, cross_entropy, data, fit, used

PLACES = torch.arange(5)
DISTANCES = PLACES[None] - PLACES[:, None] + 4


class Attended(nn.Module):
    """Scores of positions by their distance, beside a layer that is not shared."""

    def __init__(self, bias: nn.Module) -> None:
        super().__init__()
        self.bias = bias
        self.dropout = nn.Dropout(0.0)
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ x.mT + self.bias(DISTANCES)
        return self.out((self.dropout(scores.softmax(-1)) @ x).mean(1))


class Within(nn.Module):
    """A module around the network, that returns rows of the records."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([net])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x).tanh()


class Table(nn.Module):
    """Wraps the layer that has the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 1)

    def forward(self, distance: Tensor) -> Tensor:
        return self.table(distance).squeeze(-1)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9))

    def forward(self, distance: Tensor) -> Tensor:
        return self.table[distance]


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1), nn.LayerNorm(1))

    def forward(self, distance: Tensor) -> Tensor:
        return self.body(distance[..., None].float().to(self.body[0].weight.dtype)).squeeze(-1)


class Shifted(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens + 2)


class Prompted(nn.Module):
    """Learned rows in front of each record's own (prompt tuning), and positions that are averaged."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(PLACES)
        prompts = rows.expand(len(x), -1, -1)
        return self.out(torch.cat([prompts, x * rows.mean(0)], 1).tanh().mean(1))


class Folded(nn.Module):
    """Windows, with a bias of their positions (Swin)."""

    def __init__(self) -> None:
        super().__init__()
        self.window = Window()
        self.out = nn.Linear(30, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.window(x.reshape(-1, 6)[:, :, None]).reshape(len(x), -1))


class Window(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = Own()
        self.map = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.map(x)
        return (x @ x.mT + self.bias(torch.arange(6) % 3)).softmax(-1) @ x


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: Attended(Table()),
    "own table": lambda: Attended(Own()),
    "linear layers": lambda: Attended(Projected()),
    "deeper": lambda: Within(Attended(Table())),
    "prompts": lambda: Prompted(nn.Embedding(5, 6)),
    "subclass": lambda: Prompted(Shifted(7, 6)),
    "windows": Folded,
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("gradients", ["auto", "engine"])
def test_the_gradients_of_autograd_by_the_engine(tmp_path: Path, name: str, gradients: str) -> None:
    torch.manual_seed(1)
    strategy = ClipOnly(max_grad_norm=BOUND, gradients=gradients)  # type: ignore[arg-type]
    assert_releases_autograd(tmp_path, NETWORKS[name](), cross_entropy, strategy)
    assert used(strategy) == "engine"


@pytest.mark.parametrize("size", [5, 6, 7])
def test_later_lots_of_as_many_records_as_positions(tmp_path: Path, size: int) -> None:
    """Poisson lots around the numbers of positions and features, which are no records."""
    torch.manual_seed(1)
    strategy, weights, _ = fit(
        tmp_path, Prompted(nn.Embedding(5, 6)), gradients="auto", steps=12, loader=loader_of(data(40), size)
    )
    assert used(strategy) == "engine" and weights.isfinite().all()


class Given(nn.Module):
    """Positions are handed on to a module that owns a table beside a layer."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.inner = Scaled(places)
        self.out = nn.Linear(6, 4)
        self.places = places

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x, torch.arange(self.places)).mean(1))


class Scaled(nn.Module):
    def __init__(self, places: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(places, 6))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return self.dropout(x * self.table[places].mean(0))


@pytest.mark.parametrize("places", [4, 5, 12])
def test_arguments_of_as_many_rows_as_there_are_records(tmp_path: Path, places: int) -> None:
    torch.manual_seed(1)
    strategy = ClipOnly(max_grad_norm=BOUND)
    assert_releases_autograd(tmp_path, Given(places), cross_entropy, strategy)
    assert used(strategy) == "engine"


class Drawing(Attended):
    """Random numbers in the lines that are run again."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.2)


class Block(nn.Module):
    """Attention with a bias that all blocks and records share, as T5 has it; only the first one owns the bias."""

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.query = nn.Linear(6, 6)
        self.bias = Table() if is_first else None
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3))

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if bias is None:
            assert self.bias is not None
            bias = self.bias(DISTANCES)[None, None]
        heads = self.query(x)[:, None]
        attended = F.scaled_dot_product_attention(heads, heads, x[:, None], bias, dropout_p=0.3)
        return self.inner(x + attended[:, 0]), bias


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(True), Block(False)])
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias)
        return self.out(x.mean(1))


class Masked(nn.Module):
    """A function takes a layer's weights, and rows are masked by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.randn(6))})
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.rand(x.shape[:2], dtype=x.dtype) < 0.7
        x = F.dropout(F.linear(x, self.map.weight, self.map.bias), 0.2, self.training) * self.scales["a"]
        noise = torch.randn(6, dtype=x.dtype)  # for all records
        return self.out((F.gumbel_softmax(x) * kept[..., None] + noise).mean(1))


class Keyed(nn.Module):
    """Attention on keys that all records share, of fewer dimensions than the query, and a bias for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(6, 6)
        self.keys = nn.Parameter(torch.randn(1, 5, 6))
        self.bias = nn.Parameter(torch.randn(1, 5, 5))
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        query = F.dropout(self.query(x), 0.3)[:, None]
        heads = query.expand(-1, 4, -1, -1)
        attended = F.scaled_dot_product_attention(query, self.keys, x[:, None])
        biased = F.scaled_dot_product_attention(heads, heads, x[:, None].expand_as(heads), self.bias)
        return self.out((attended[:, 0] + biased.sum(1)).mean(1))


class Skipping(nn.Module):
    """Which layers are called is drawn for the lot, and an attribute says what a step has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(5, 6))
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.out = nn.Linear(6, 4)
        self.mean = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places
        self.scale = x.abs().mean().detach()
        for layer in self.layers:
            if torch.rand([]) < 0.3:
                continue
            x = F.dropout(layer(x), 0.2)
        return self.out(x.mean(1))


RANDOM: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: Drawing(Table()),
    "attention": Blocks,
    "masks": Masked,
    "keys": Keyed,
    "skipping": Skipping,
}


@pytest.mark.parametrize("size", [1, 4, 5, 6, 7])
@pytest.mark.parametrize("name", RANDOM)
def test_what_a_network_draws_is_not_drawn_again(name: str, size: int) -> None:
    """Lots of as many records as there are positions, too: against autograd on the graph of the same lot."""
    torch.manual_seed(1)
    net = RANDOM[name]().double()
    engine = PerRecordEngine(net)
    engine.follow_tags()
    x = torch.randn(size, 5, 6, dtype=torch.float64)
    y = torch.arange(size) % 4
    engine.expect(size)
    state = torch.get_rng_state()
    loss = under_tags(engine, lambda batch: F.cross_entropy(net(batch[0]), batch[1]), (x, y), size)
    gradients = engine.backward(loss, size, verify=True)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    with engine.paused():
        losses = F.cross_entropy(net(x), y, reduction="none")
    assert torch.equal(after, torch.get_rng_state())
    for parameter, computed in zip(engine.parameters, gradients, strict=True):
        for record in range(size):
            weights = F.one_hot(torch.tensor(record), size).double()
            (own,) = torch.autograd.grad(losses[record], parameter, retain_graph=True, allow_unused=True)
            own = torch.zeros_like(parameter) if own is None else own
            torch.testing.assert_close(computed.weighted_sum(weights), own, rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("one_key")
def test_layers_that_are_drawn_and_an_interrupted_run(tmp_path: Path) -> None:
    def net() -> nn.Module:
        torch.manual_seed(1)
        return Skipping()

    _, whole, _ = fit(tmp_path / "whole", net(), steps=12, gradients="auto")
    _, _, half = fit(tmp_path / "half", net(), steps=5, gradients="auto")
    half.save_checkpoint(tmp_path / "half.ckpt")
    _, resumed, _ = fit(tmp_path / "half", net(), steps=12, gradients="auto", start=tmp_path / "half.ckpt")
    assert torch.equal(whole, resumed)


@pytest.mark.parametrize("name", RANDOM)
def test_random_lines_stay_with_the_engine(tmp_path: Path, name: str) -> None:
    torch.manual_seed(1)
    strategy, weights, _ = fit(tmp_path, RANDOM[name](), gradients="auto", loader=loader_of(data(40), 10))
    assert used(strategy) == "engine" and weights.isfinite().all()


def test_functions_are_looked_at_while_a_module_runs() -> None:
    """Also where the network fails, or is left in the middle of a forward pass."""

    class Failing(Masked):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("of its own")

    net = Failing()
    engine = PerRecordEngine(net)
    engine.follow_tags()
    engine.expect(3)
    with pytest.raises(RuntimeError, match="of its own"):
        net(torch.randn(3, 5, 6))
    assert not _get_current_function_mode_stack()
    net.register_forward_pre_hook(lambda *_: next(iter(())))
    with pytest.raises(StopIteration):
        net(torch.randn(3, 5, 6))
    engine.expect(3)
    assert not _get_current_function_mode_stack()


class Written(Attended):
    """Random numbers that are drawn in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.empty(len(x), 1).bernoulli_(0.8)


def test_numbers_drawn_in_place(tmp_path: Path) -> None:
    torch.manual_seed(1)
    strategy, weights, _ = fit(tmp_path, Written(Table()), gradients="auto", loader=loader_of(data(40), 10))
    assert used(strategy) == "engine" and weights.isfinite().all()


class Answered(nn.Module):
    """Weights that a function takes, a parameter in a list, and attention with a bias that all records share."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.query = nn.Linear(6, 6)
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(6))])
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        query = F.linear(x, self.query.weight, self.query.bias)[:, None] * self.scales[0]
        attended = F.scaled_dot_product_attention(query, query, x[:, None], self.table(DISTANCES)[None, None])
        return self.out(attended[:, 0].mean(1))


@pytest.mark.usefixtures("one_key")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_physical_batch_size": 4},
        {"microbatch_size": 2},
        {"discretization_threshold": 0.01},
        {"clipping": "per_parameter"},
    ],
)
def test_the_releases_of_record_by_record(tmp_path: Path, options: dict[str, Any]) -> None:
    weights = []
    for gradients in ("auto", "one_by_one"):
        torch.manual_seed(1)
        strategy, released, _ = fit(
            tmp_path / gradients, Answered(), gradients=gradients, loader=loader_of(data(40), 10), **options
        )
        weights.append(released)
        assert used(strategy) == ("engine" if gradients == "auto" else "one_by_one")
    # Up to a step of the grid on which releases lie: which of two neighbors it is, rounding may decide.
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=5e-4)


class Coupled(nn.Module):
    """What looks shared is the mean over the records."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x - self.map(x.mean(0))).mean(1))


def test_statistics_of_the_lot_are_not_shared(tmp_path: Path) -> None:
    torch.manual_seed(1)
    with pytest.raises(UnsupportedModuleError):
        fit(tmp_path / "engine", Coupled(), gradients="engine", loader=loader_of(data(40), 10))
    assert not read_ledger(tmp_path / "engine" / "ledger.jsonl").releases
    strategy, _, _ = fit(tmp_path / "auto", Coupled(), gradients="auto", loader=loader_of(data(40), 10))
    assert used(strategy) == "one_by_one"
