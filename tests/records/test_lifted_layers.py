"""Layers on what all records share: run with the lines of a module above, for each record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dpbench.errors import UnsupportedModuleError
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.strategies import ClipOnly
from tests.records.test_auto_gradients import used
from tests.records.test_one_by_one import BOUND, assert_releases_autograd, cross_entropy, data, fit
from tests.strategies.worlds import loader_of

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
    """Random numbers in the lines that would be run again."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.2)


def test_random_lines_are_trained_record_by_record(tmp_path: Path) -> None:
    torch.manual_seed(1)
    strategy, weights, _ = fit(tmp_path, Drawing(Table()), gradients="auto", loader=loader_of(data(40), 10))
    assert used(strategy) == "one_by_one" and weights.isfinite().all()


class Coupled(nn.Module):
    """What looks shared is the mean over the records."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x - self.map(x.mean(0))).mean(1))


@pytest.mark.parametrize("gradients", ["auto", "engine"])
def test_statistics_of_the_lot_are_not_shared(tmp_path: Path, gradients: str) -> None:
    torch.manual_seed(1)
    with pytest.raises(UnsupportedModuleError):
        fit(tmp_path, Coupled(), gradients=gradients, loader=loader_of(data(40), 10))
    assert not read_ledger(tmp_path / "ledger.jsonl").releases


def test_the_message_is_that_of_the_network_as_it_is(tmp_path: Path) -> None:
    torch.manual_seed(1)
    with pytest.raises(
        UnsupportedModuleError, match=r"bias.table \(Embedding\) saw a tensor|the engine cannot be used"
    ):
        fit(tmp_path, Drawing(Table()), gradients="engine", loader=loader_of(data(40), 10))
