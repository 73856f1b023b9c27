"""Lots that are no rows of one batch: each record is collated alone, and trained record by record."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from dpbench.callback.lightning_training import LightningTraining
from dpbench.callback.loop import PrivateLoop
from dpbench.data.loader import PrivateDataLoader
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.data.separate_records import SeparateRecords
from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.composition import ledger_epsilon
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.records.step_state import independent
from dpbench.strategies import DPSGD, ClipOnly
from tests.strategies.worlds import assert_same_training, clipped_sum, trainer_for, weights_of
from tests.support.loaders import reserved
from tests.support.one_by_one import BOUND, Module

pytestmark = pytest.mark.filterwarnings("ignore:each record is run alone. whether the loss of a batch")
RECORDS = 11


class Graph:
    """Nodes and edges, in the attributes of an object that torch's trees do not open, as in PyTorch Geometric."""

    def __init__(self, *parts: Tensor) -> None:
        self.x, self.edges, self.y, self.graph_of_node = parts

    def to(self, device: Any, **_: Any) -> Graph:
        return Graph(*(part.to(device) for part in vars(self).values()))


def batch_of_graphs(graphs: list[Graph]) -> Graph:
    """One graph of several that are not connected."""
    sizes = torch.tensor([len(graph.x) for graph in graphs])
    starts = sizes.cumsum(0) - sizes
    return Graph(
        torch.cat([graph.x for graph in graphs]),
        torch.cat([graph.edges + start for graph, start in zip(graphs, starts, strict=True)], 1),
        torch.cat([graph.y for graph in graphs]),
        torch.arange(len(graphs)).repeat_interleave(sizes),
    )


def graphs() -> list[Graph]:
    made = []
    for number, (x, label) in enumerate(texts()):
        edges = torch.randint(len(x), (2, 9), generator=torch.Generator().manual_seed(number))
        made.append(Graph(x, edges, torch.tensor([label]), torch.zeros(len(x), dtype=torch.long)))
    return made


def of_graphs(net: Any, graph: Graph) -> Tensor:
    """Of sums over neighbors, and over the nodes of each graph."""
    start, end = graph.edges
    nodes = net(graph.x.to(net.weight.dtype)).tanh()
    nodes = nodes.index_add(0, end, nodes[start])
    return F.cross_entropy(nodes.new_zeros(len(graph.y), 4).index_add(0, graph.graph_of_node, nodes), graph.y)


def texts() -> list[Any]:
    """Of many lengths: torch's own collate_fn fails on most lots."""
    generator = torch.Generator().manual_seed(6)
    return [(torch.randn(2 + number % 3, 6, generator=generator), number % 4) for number in range(RECORDS)]


def of_texts(net: Any, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0].mean(1).to(net.weight.dtype)), batch[1])


def of_list(net: Any, batch: Any) -> Tensor:
    return torch.stack([of_texts(net, (x[None], torch.tensor([label]))) for x, label in batch]).mean()


def rows() -> list[Any]:
    return [(x[0], label) for x, label in texts()]


def of_rows(net: Any, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0].to(net.weight.dtype)), batch[1])


def with_a_constant(items: list[Any]) -> Any:
    """Class weights beside the records."""
    x, y = default_collate(items)
    return {"x": x, "y": y, "weights": torch.tensor([1.0, 2.0, 3.0, 4.0])}


def of_weighted(net: Any, batch: Any) -> Tensor:
    losses = F.cross_entropy(net(batch["x"].to(net.weight.dtype)), batch["y"], reduction="none")
    return (losses * batch["weights"][batch["y"]]).mean()


def two_views(items: list[Any]) -> Any:
    """Two rows of each record."""
    x, y = default_collate(items)
    return torch.stack([x, x + 1], 1).flatten(0, 1), y.repeat_interleave(2)


WORLDS: dict[str, tuple[list[Any], Any, Any]] = {
    "graphs": (graphs(), batch_of_graphs, of_graphs),
    "ragged": (texts(), None, of_texts),
    "constants": (rows(), with_a_constant, of_weighted),
    "views": (rows(), two_views, of_rows),
}


def lots(items: list[Any], collate: Any, size: int | None = None, **options: Any) -> PrivateDataLoader:
    drawn = PrivateBatchSampler(make_sampling("full", len(items), len(items)), None)
    if size is not None:
        drawn = PrivateBatchSampler(make_sampling("poisson", len(items), size), seed=0)
    return PrivateDataLoader(items, drawn, collate_fn=collate, **options)


def linear() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(6, 4)


def clipped(items: list[Any], collate: Any, step: Any) -> Tensor:
    """The sum of the clipped gradients of each record alone, float64, by autograd."""
    net = linear().double()
    losses = (step(net, (collate or default_collate)([copy.deepcopy(item)])) for item in items)
    return torch.cat([part.flatten() for part in clipped_sum(losses, list(net.parameters()), BOUND)])


def released(folder: Path, items: list[Any], collate: Any, step: Any, **options: Any) -> Tensor:
    """The sum over all records in one release without noise."""
    net = linear()
    trainer_for(folder, ClipOnly(max_grad_norm=BOUND, **options), 1).fit(Module(net, step), lots(items, collate))
    return (weights_of(linear()) - weights_of(net)).double() * len(items)


def private(
    folder: Path, module: Any, loader: PrivateDataLoader, steps: int, *more: pl.Callback, **trainer: Any
) -> DPSGD:
    start = trainer.pop("start", None)
    strategy = DPSGD(noise_multiplier=0.5, delta=1e-3, seed=1, ledger=str(folder / "ledger.jsonl"))
    fitted = trainer_for(folder, strategy, steps, more=more, **trainer)
    fitted.fit(module, loader, ckpt_path=start, weights_only=False)
    if "devices" not in trainer:  # else this process does not know what was released
        fitted.save_checkpoint(folder / "last.ckpt")
    return strategy


@pytest.mark.parametrize("name", WORLDS)
def test_the_gradients_of_autograd(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(LightningTraining, "inform", lambda self, text: lines.append(text))
    ours = released(tmp_path, *WORLDS[name])
    torch.testing.assert_close(ours / RECORDS, clipped(*WORLDS[name]) / RECORDS, rtol=1e-4, atol=1e-6)
    assert len([line for line in lines if "was collated alone" in line]) == 1


def test_a_record_moves_the_sum_by_its_own_clipped_gradient(tmp_path: Path) -> None:
    items, collate, step = WORLDS["views"]
    whole, rest = (released(tmp_path, part, collate, step) for part in (items, items[:-1]))
    assert (whole - rest).norm() <= BOUND * 1.0001
    torch.testing.assert_close(whole - rest, clipped(items[-1:], collate, step), rtol=1e-3, atol=1e-5)


def test_lots_of_all_sizes(tmp_path: Path) -> None:
    """Empty ones too, by workers, and lots of as many records as a record has rows."""
    sizes = []

    class Sizes(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            assert isinstance(batch, SeparateRecords) and all(len(one) == 1 for one in batch)
            sizes.append(len(batch))

    strategy = private(tmp_path, Module(linear(), of_list), lots(texts(), list, 2, num_workers=1), 12, Sizes())
    assert {0, 1, 2} <= set(sizes)
    ledger = read_ledger(tmp_path / "ledger.jsonl")
    assert len(ledger.releases) == strategy.releases == 12
    assert ledger_epsilon(ledger, 1e-3) == pytest.approx(strategy.epsilon(), rel=1e-9)


def test_what_a_module_keeps_of_a_record_is_put_back(tmp_path: Path) -> None:
    """Python knows the shape of each without reading a value."""

    @independent("count")
    class Counting(Module):
        count = 0
        longest = 0
        last: Tensor | None = None

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert self.last is None
            self.last = batch[0].mean()
            self.count += 1
            self.longest = max(self.longest, batch[0].shape[1])
            return super().training_step(batch, batch_idx) * self.longest

    module = Counting(linear(), of_texts)
    trainer_for(tmp_path, ClipOnly(max_grad_norm=BOUND), 2).fit(module, lots(texts(), None))
    assert (module.longest, module.last, module.count) == (0, None, 2)


def test_what_is_no_batch_of_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="dimension 0 of each tensor of a batch must be its records"):
        released(tmp_path, *WORLDS["constants"], gradients="engine")
    with pytest.raises(ConfigurationError, match="fails on a list of one"):
        released(tmp_path, rows(), lambda items: [items[0][0], items[1][0]], of_rows)


def test_rows_then_ragged(tmp_path: Path) -> None:
    """The engine was chosen by a lot of equal lengths; the next one is run record by record."""
    items = [(torch.randn(2 + number % 2, 6), number % 4) for number in range(RECORDS)]
    loader = lots(items, None, 2)
    loader.prepare_collation(may_separate=True)
    assert {True, False} == {isinstance(batch, SeparateRecords) for batch in reserved(loader)}
    loader.lots.free()
    assert private(tmp_path, Module(linear(), of_texts), loader, 6).releases == 6


def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    weights = []
    for folder, steps, start in (("whole", 4, None), ("part", 2, None), ("part", 4, tmp_path / "part" / "last.ckpt")):
        net = linear()
        loader = lots(graphs(), batch_of_graphs, 4, data_id="graphs 1")
        private(tmp_path / folder, Module(net, of_graphs), loader, steps, start=start)
        weights.append(weights_of(net))
    assert torch.equal(weights[0], weights[2])


class Logging(Module):
    """Its log waits for the other processes, if it is called."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


def test_a_lot_logs_its_mean(tmp_path: Path) -> None:
    mean = torch.stack([of_graphs(linear(), batch_of_graphs([item])) for item in graphs()]).mean()
    trainer = trainer_for(tmp_path, ClipOnly(max_grad_norm=BOUND), 1)
    trainer.fit(Logging(linear(), of_graphs), lots(graphs(), batch_of_graphs))
    torch.testing.assert_close(trainer.logged_metrics["loss_step"], mean.detach())


@pytest.mark.slow
@pytest.mark.own_key  # other processes take the keys that users get
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:It is recommended to use `self.log"
)
def test_two_processes_agree_with_one(tmp_path: Path) -> None:
    """Also where one of them has fewer graphs, or none, and all log."""
    weights = []
    for name, options in (("one", {}), ("two", {"devices": 2, "strategy": "ddp_fork"})):
        net = linear()
        loader = lots(graphs(), batch_of_graphs, 2, data_id="graphs 1")
        private(tmp_path / name, Logging(net, of_graphs), loader, 8, **options)
        weights.append(weights_of(net))
    assert_same_training(weights[1], weights[0], noise_std=0.5, expected_batch_size=2)


def test_a_loop_without_a_trainer(tmp_path: Path) -> None:
    net = linear()
    strategy = ClipOnly(max_grad_norm=BOUND, ledger=str(tmp_path / "ledger.jsonl"))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    assert list(PrivateLoop(net, optimizer, lots(graphs(), batch_of_graphs), strategy, of_graphs, steps=1)) == [1]
    ours = (weights_of(linear()) - weights_of(net)).double()
    torch.testing.assert_close(ours, clipped(*WORLDS["graphs"]) / RECORDS, rtol=1e-4, atol=1e-6)
