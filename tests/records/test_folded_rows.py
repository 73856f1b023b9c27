"""Several rows of a record in dimension 0: tags tell which are whose, and nothing else is trained at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from dpbench.data.loader import PrivateDataLoader
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.errors import UnsupportedModuleError
from dpbench.guards.engine_trial import EngineTrial
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.strategies import ClipOnly
from tests.strategies.worlds import loader_of
from tests.support.one_by_one import (
    BOUND,
    assert_releases_autograd,
    cross_entropy,
    data,
    expected,
    fit,
    used,
)

Order = Callable[[Tensor, int], Tensor]


class Flat(nn.Module):
    """Positions are rows of the layers in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.map = nn.Linear(6, 8)
        self.out = nn.Linear(40, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows(self.norm(x.reshape(-1, 6)), len(x))
        return self.out(rows.view(len(x), -1))

    def rows(self, x: Tensor, records: int) -> Tensor:
        return self.map(x).tanh()


class Disordered(Flat):
    """Rows in an order of its own."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self._order = (order,)

    def rows(self, x: Tensor, records: int) -> Tensor:
        index = self._order[0](x, records)
        return super().rows(x[index], records)[index.argsort()]


def by_content(rows: Tensor, records: int) -> Tensor:
    return rows[:, 0].argsort()


def by_position(rows: Tensor, records: int) -> Tensor:
    """The rows of records alternate."""
    return torch.arange(len(rows)).view(records, -1).t().flatten()


def in_large_lots(rows: Tensor, records: int) -> Tensor:
    """The trial has seen nothing of it, and the batch itself shows it."""
    return torch.arange(len(rows)) if records <= 5 else by_content(rows, records)


class Chosen(Flat):
    """As many rows of a record as it has numbers above zero."""

    def rows(self, x: Tensor, records: int) -> Tensor:
        chosen = x[:, 0] > 0
        output = x.new_zeros(len(x), 8)
        output[chosen] = super().rows(x[chosen], records)
        return output


class ByPlace(Flat):
    """Another row of a shared table for each place in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)

    def rows(self, x: Tensor, records: int) -> Tensor:
        rows = super().rows(x, records).view(records, -1, 8)
        return (rows + self.table(torch.arange(records))[:, None]).flatten(0, 1)


class SharedWeights(Flat):
    """What a function makes of weights that all records share; a loss that is a function of each record alone."""

    def rows(self, x: Tensor, records: int) -> Tensor:
        return F.linear(x, self.map.weight.tanh()).tanh()


class Neighbors(SharedWeights):
    """Each record is given what the one before it makes of the shared weights."""

    def rows(self, x: Tensor, records: int) -> Tensor:
        return super().rows(x + (x * self.map.weight[0]).roll(5, 0), records)


MIXED: dict[str, Callable[[], nn.Module]] = {
    "by content": lambda: Disordered(by_content),
    "by position": lambda: Disordered(by_position),
    "in large lots": lambda: Disordered(in_large_lots),
    "chosen": Chosen,
    "by place": ByPlace,
    "neighbors": Neighbors,
}


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_rows_is_run_record_by_record(tmp_path: Path, name: str) -> None:
    """As the function of each record alone, and not at all by the engine alone."""
    strategy = ClipOnly(max_grad_norm=BOUND)
    assert_releases_autograd(tmp_path / "auto", MIXED[name](), cross_entropy, strategy)
    assert used(strategy) == "one_by_one"
    with pytest.raises(UnsupportedModuleError):
        fit(tmp_path, MIXED[name](), gradients="engine", loader=loader_of(data(40), 10))
    path = tmp_path / "ledger.jsonl"
    assert not path.exists() or not read_ledger(path).releases


def test_the_healthy_twin_stays_with_the_engine(tmp_path: Path) -> None:
    strategy = ClipOnly(max_grad_norm=BOUND)
    assert_releases_autograd(tmp_path, SharedWeights(), cross_entropy, strategy)
    assert used(strategy) == "engine"


def doubled(batch: Any) -> dict[str, Tensor]:
    """Two rows of each record."""
    x, y = batch
    rows = torch.arange(len(x)).repeat_interleave(2)
    return {"x": torch.stack([x, 2 * x], 1).flatten(0, 1), "y": y[rows], "record": rows}


@pytest.mark.parametrize("method", ["engine", "one_by_one"])
def test_several_rows_of_a_record_and_folded_rows(tmp_path: Path, method: str) -> None:
    """The mean over the rows of a record, clipped as one."""

    def step(net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch["x"]), batch["y"])

    net = Flat()
    wanted = expected(net, lambda net, batch: step(net, doubled(batch)), data())
    before = [p.detach().clone() for p in net.parameters()]
    everybody = PrivateBatchSampler(make_sampling("full", 12, 12), None)
    loader = PrivateDataLoader(data(), everybody, lambda items: doubled(default_collate(items)), record_of_row="record")
    options = {"max_grad_norm": BOUND, "loader": loader, "gradients": method, "seed": None}
    strategy, _, _ = fit(tmp_path, net, ClipOnly, 1, step, **options)
    assert used(strategy) == method
    for old, p, update in zip(before, net.parameters(), wanted, strict=True):
        torch.testing.assert_close((old - p).double(), update, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("other", [True, False])
def test_processes_of_which_one_needs_tags_do_not_agree(other: bool) -> None:
    class Two:
        """The trainings of two processes, as one that waits for the other sees them."""

        def __init__(self, of_other: list[int]) -> None:
            self.module = Flat()
            self.counts: list[int] = []
            self.of_other = iter(of_other)

        def largest(self, count: int) -> int:
            self.counts.append(count)
            return max(count, next(self.of_other, count))

    counts: list[int] = []
    agreements = []
    for needs_tags in (other, True):
        training: Any = Two(counts)
        engine = PerRecordEngine(training.module)
        engine.follow_tags(needs_tags)
        agreements.append(EngineTrial(training, engine).is_agreed())
        counts = training.counts
        engine.close()
    assert agreements == [True, other]
