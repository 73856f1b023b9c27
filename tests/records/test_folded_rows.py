"""Several rows of a record in dimension 0: tags tell which are whose, and nothing else is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from dpbench.data.lots import LotLoader, Lots, make_sampling
from dpbench.errors import UnsupportedModuleError
from dpbench.guards.engine_trial import EngineTrial
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.records.tagging import under_tags
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
from tests.support.reference import mean_square, reference_gradients, relative_error


class Flat(nn.Module):
    """Positions are rows of the layers in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.map = nn.Linear(6, 8)
        self.out = nn.Linear(40, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.map(self.norm(x.reshape(-1, 6))).tanh().view(len(x), -1))


class Frames(nn.Module):
    """Convolutions, a normalization and a layer without a rule on each frame."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3)
        self.norm = nn.GroupNorm(2, 4)
        self.act = nn.PReLU(4)
        self.rnn = nn.GRU(16, 5, batch_first=True)
        self.out = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        frames = self.act(self.norm(self.conv(x.flatten(0, 1)[:, None])))
        return self.out(self.rnn(frames.reshape(*x.shape[:2], -1))[0][:, -1])


class Twins(nn.Module):
    """Two inputs of each record, one behind the other; a layer that sees both, and one that sees one."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.map(torch.cat([x[:, 0], x[:, 1]])).tanh().chunk(2)
        return self.out((first - second).square() + self.map(x[:, 2]))


class Windows(nn.Module):
    """A parameter beside dropout, in a module that sees windows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Window()
        self.out = nn.Linear(30, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x.flatten(0, 1)).view(len(x), -1))


class Window(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6))
        self.map = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.map(x * self.scale)) * self.scale


def tokens() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randint(7, (40, 5), generator=generator), torch.arange(40) % 4)


class Words(nn.Module):
    """An embedding of all tokens of the lot in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.out = nn.Linear(30, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x.reshape(-1)).view(len(x), -1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "flat": Flat,
    "frames": Frames,
    "twins": Twins,
    "windows": Windows,
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("gradients", ["auto", "engine"])
def test_the_gradients_of_autograd_by_the_engine(tmp_path: Path, name: str, gradients: Any) -> None:
    torch.manual_seed(1)
    strategy = ClipOnly(max_grad_norm=BOUND, gradients=gradients)
    assert_releases_autograd(tmp_path, NETWORKS[name](), cross_entropy, strategy)
    assert used(strategy) == "engine"


def test_tokens_in_a_row(tmp_path: Path) -> None:
    torch.manual_seed(1)
    strategy, _, _ = fit(tmp_path, Words(), gradients="auto", loader=loader_of(tokens(), 10), step=cross_entropy)
    assert used(strategy) == "engine"


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("records", [1, 3, 7])
def test_every_row_and_every_norm(name: str, records: int) -> None:
    """By tags the engine is right to the last digits, for lots of any size."""
    model = NETWORKS[name]().double()
    x = torch.randn(records, 5, 6, dtype=torch.float64)
    engine = PerRecordEngine(model)
    engine.follow_tags()
    engine.expect(records)
    loss = under_tags(engine, lambda x: mean_square(model, x), x, records)
    computed = engine.backward(loss, records, verify=True)
    wanted = reference_gradients(model, x)
    weights = torch.linspace(-1, 2, records, dtype=torch.float64)
    for gradients, rows in zip(computed, wanted.values(), strict=True):
        assert relative_error(gradients.per_record(), rows) < 1e-9
        assert relative_error(gradients.squared_norms(), rows.flatten(1).square().sum(1)) < 1e-9
        assert relative_error(gradients.weighted_sum(weights), torch.einsum("r,r...->...", weights, rows)) < 1e-9


def test_without_tags_nothing_is_guessed() -> None:
    model = Flat().double()
    engine = PerRecordEngine(model)
    engine.expect(4)
    loss = mean_square(model, torch.randn(4, 5, 6, dtype=torch.float64))
    with pytest.raises(UnsupportedModuleError, match=r"shape \(20, 6\) for a batch of 4 records"):
        engine.backward(loss, 4)


# ------------------------------------------------------------------------------------- what must not be accepted


class Disordered(nn.Module):
    """Rows in an order of its own."""

    def __init__(self, order: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.map = nn.Linear(6, 8)
        self.out = nn.Linear(40, 4)
        self._order = (order,)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 6)
        (order,) = self._order
        index = order(rows, len(x))
        back = index.argsort()
        return self.out(self.map(rows[index]).tanh()[back].view(len(x), -1))


def shuffled(rows: Tensor, records: int) -> Tensor:
    return torch.randperm(len(rows), generator=torch.Generator().manual_seed(7))


def reversed_(rows: Tensor, records: int) -> Tensor:
    return torch.arange(len(rows)).flip(0)


def sorted_(rows: Tensor, records: int) -> Tensor:
    return rows[:, 0].argsort()


def one_exchanged(rows: Tensor, records: int) -> Tensor:
    index = torch.arange(len(rows))
    if records < 2:
        return index
    index[[0, 5]] = index[[5, 0]]
    return index


def in_pairs(rows: Tensor, records: int) -> Tensor:
    """The rows of two records alternate."""
    index = torch.arange(len(rows)).view(records, -1)
    if records < 2:
        return index.flatten()
    even = records - records % 2
    pairs = index[:even].view(even // 2, 2, -1).transpose(1, 2)
    return torch.cat([pairs.flatten(), index[even:].flatten()])


ORDERS = [shuffled, reversed_, sorted_, one_exchanged, in_pairs]


@pytest.mark.parametrize("order", ORDERS)
def test_other_orders_are_trained_record_by_record(tmp_path: Path, order: Any) -> None:
    torch.manual_seed(1)
    strategy = ClipOnly(max_grad_norm=BOUND)
    assert_releases_autograd(tmp_path, Disordered(order), cross_entropy, strategy)
    assert used(strategy) == "one_by_one"


@pytest.mark.parametrize("order", ORDERS)
def test_other_orders_are_refused_by_the_engine_alone(tmp_path: Path, order: Any) -> None:
    torch.manual_seed(1)
    with pytest.raises(UnsupportedModuleError, match="picks records by an index|works along the records"):
        fit(tmp_path, Disordered(order), gradients="engine", loader=loader_of(data(40), 10))
    assert not read_ledger(tmp_path / "ledger.jsonl").releases


def in_small_lots(order: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Tensor]:
    """Row by row in lots as small as those that are tried."""

    def in_order(rows: Tensor, records: int) -> Tensor:
        return torch.arange(len(rows)) if records <= 5 else order(rows, records)

    return in_order


@pytest.mark.parametrize("order", [shuffled, reversed_, sorted_])
def test_an_order_that_shows_in_large_lots_only(tmp_path: Path, order: Any) -> None:
    """The trial has seen nothing of it, and the batch itself shows it."""
    torch.manual_seed(1)
    net = Disordered(in_small_lots(order))
    strategy, _, _ = fit(tmp_path, net, gradients="auto", loader=loader_of(data(40), 20))
    assert used(strategy) == "one_by_one"


class Masked(nn.Module):
    """As many rows of a record as it has numbers above zero."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, :, 0] > 0
        output = x.new_zeros(len(x), 5, 4)
        output[chosen] = self.map(x[chosen])
        return output.mean(1)


def test_rows_by_content_are_trained_record_by_record(tmp_path: Path) -> None:
    torch.manual_seed(1)
    strategy = ClipOnly(max_grad_norm=BOUND)
    assert_releases_autograd(tmp_path, Masked(), cross_entropy, strategy)
    assert used(strategy) == "one_by_one"


class Coupled(Flat):
    """The rows are in order, and each record sees the others."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


def contrasted(net: nn.Module, batch: Any) -> Tensor:
    hidden = F.normalize(net(batch[0]), dim=1)
    return F.cross_entropy(hidden @ hidden.t() / 0.5, torch.arange(len(hidden)).roll(1))


@pytest.mark.parametrize(("net", "step"), [(Coupled, cross_entropy), (Flat, contrasted)])
def test_records_that_are_coupled_are_run_alone(tmp_path: Path, net: Any, step: Any) -> None:
    torch.manual_seed(1)
    with pytest.raises(UnsupportedModuleError):
        fit(tmp_path / "engine", net(), step=step, gradients="engine", loader=loader_of(data(40), 10))
    assert not read_ledger(tmp_path / "engine" / "ledger.jsonl").releases
    strategy, _, _ = fit(tmp_path / "auto", net(), step=step, gradients="auto", loader=loader_of(data(40), 10))
    assert used(strategy) == "one_by_one"


def test_records_that_are_alike(tmp_path: Path) -> None:
    """Their places are known, whatever they say."""
    records = TensorDataset(torch.ones(40, 5, 6), torch.zeros(40, dtype=torch.long))
    torch.manual_seed(1)
    strategy, weights, _ = fit(tmp_path, Flat(), gradients="auto", loader=loader_of(records, 10))
    assert used(strategy) == "engine" and weights.isfinite().all()


# ------------------------------------------------------------------------------------- in trainings


@pytest.mark.parametrize(
    "options",
    [
        {"microbatch_size": 2},
        {"max_physical_batch_size": 4},
        {"max_physical_batch_size": 1},
        {"clipping": "per_layer"},
    ],
)
@pytest.mark.usefixtures("one_key")
@pytest.mark.parametrize("name", ["flat", "twins"])
def test_the_releases_of_records_one_by_one(tmp_path: Path, name: str, options: Any) -> None:
    weights = []
    for gradients in ("auto", "one_by_one"):
        torch.manual_seed(1)
        strategy, released, _ = fit(tmp_path / gradients, NETWORKS[name](), gradients=gradients, **options)
        weights.append(released)
        assert used(strategy) == (
            "engine" if gradients == "auto" and options != {"max_physical_batch_size": 1} else "one_by_one"
        )
    assert float((weights[0] - weights[1]).norm() / weights[0].norm()) < 2e-3


def test_several_rows_of_a_record_and_folded_rows(tmp_path: Path) -> None:
    from torch.utils.data import default_collate

    def doubled(items: Any) -> dict[str, Tensor]:
        x, y = default_collate(items)
        rows = torch.arange(len(x)).repeat_interleave(2)
        return {"x": torch.stack([x, 2 * x], 1).flatten(0, 1), "y": y[rows], "record": rows}

    def step(net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch["x"]), batch["y"])

    weights = []
    for gradients in ("auto", "one_by_one"):
        torch.manual_seed(1)
        loader = LotLoader(
            data(), Lots(make_sampling("full", 12, 12), None), collate_fn=doubled, record_of_row="record"
        )
        options = {"max_grad_norm": BOUND, "loader": loader, "gradients": gradients, "seed": None, "step": step}
        strategy, released, _ = fit(tmp_path / gradients, Flat(), ClipOnly, steps=3, **options)
        weights.append(released)
        assert used(strategy) == ("engine" if gradients == "auto" else "one_by_one")
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("other", [True, False])
def test_processes_of_which_one_needs_tags_do_not_agree(other: bool) -> None:
    class Two:
        """The trainings of two processes, as one that waits for the other sees them."""

        def __init__(self, module: nn.Module) -> None:
            self.module = module
            self.counts: list[int] = []
            self.of_other: list[int] = []

        def largest(self, count: int) -> int:
            self.counts.append(count)
            return max(self.counts[-1], self.of_other[len(self.counts) - 1]) if self.of_other else count

    agreements = []
    for mine in (True, other):
        trainings = []
        for needs_tags in (mine, True):
            model = Flat()
            engine = PerRecordEngine(model)
            engine.follow_tags(needs_tags)
            training: Any = Two(model)
            training.of_other = trainings[0].counts if trainings else []
            agreements.append(EngineTrial(training, engine).is_agreed())
            trainings.append(training)
            engine.close()
    assert agreements == [True, True, True, other]


@pytest.mark.usefixtures("one_key")
def test_an_interrupted_run(tmp_path: Path) -> None:
    def net() -> nn.Module:
        torch.manual_seed(1)
        return Flat()

    _, whole, _ = fit(tmp_path / "whole", net(), steps=8, gradients="auto")
    _, _, half = fit(tmp_path / "half", net(), steps=4, gradients="auto")
    half.save_checkpoint(tmp_path / "half.ckpt")
    strategy, resumed, _ = fit(tmp_path / "half", net(), steps=8, gradients="auto", start=tmp_path / "half.ckpt")
    assert torch.equal(whole, resumed) and used(strategy) == "engine"


def test_the_reference_of_these_tests_is_autograd() -> None:
    torch.manual_seed(1)
    assert all(update.isfinite().all() for update in expected(Flat(), cross_entropy, data()))
