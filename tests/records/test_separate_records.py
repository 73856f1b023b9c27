"""Lots that are no rows of one batch: each record is collated alone, and trained record by record."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

from dpbench.callback.lightning_training import LightningTraining
from dpbench.callback.loop import PrivateLoop
from dpbench.data.lots import LotLoader, Lots, make_sampling
from dpbench.data.separate_records import SeparateRecords
from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.composition import ledger_epsilon
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.records.step_state import independent
from dpbench.strategies import DPSGD, ClipOnly
from tests.strategies.worlds import assert_same_training, trainer_for, weights_of
from tests.support.one_by_one import Module

pytestmark = pytest.mark.filterwarnings("ignore:each record is run alone. whether the loss of a batch")
BOUND = 0.3
RECORDS = 11


class Items(Dataset[Any]):
    """Records in a list, each of its own shape."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Graph:
    """Nodes and edges, in the attributes of an object that torch's trees do not open, as in PyTorch Geometric."""

    def __init__(self, x: Tensor, edges: Tensor, y: Tensor, graph_of_node: Tensor | None = None) -> None:
        self.x = x
        self.edges = edges
        self.y = y
        self.graph_of_node = torch.zeros(len(x), dtype=torch.long) if graph_of_node is None else graph_of_node

    def to(self, device: Any, **_: Any) -> Graph:
        return Graph(self.x.to(device), self.edges.to(device), self.y.to(device), self.graph_of_node.to(device))


def batch_of_graphs(graphs: list[Graph]) -> Graph:
    """One graph of several that are not connected."""
    sizes = [len(graph.x) for graph in graphs]
    starts = [sum(sizes[:place]) for place in range(len(graphs))]
    return Graph(
        x=torch.cat([graph.x for graph in graphs]),
        edges=torch.cat([graph.edges + start for graph, start in zip(graphs, starts, strict=True)], dim=1),
        y=torch.cat([graph.y for graph in graphs]),
        graph_of_node=torch.repeat_interleave(torch.arange(len(graphs)), torch.tensor(sizes)),
    )


def graphs() -> list[Graph]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for number in range(RECORDS):
        nodes = 2 + number % 4
        edges = torch.randint(nodes, (2, 3 * nodes), generator=generator)
        made.append(Graph(torch.randn(nodes, 6, generator=generator), edges, torch.tensor([number % 4])))
    return made


class Convolution(nn.Module):
    """Sums over neighbors, and a mean over the nodes of each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(6, 8)
        self.neighbors = nn.Linear(6, 8, bias=False)
        self.out = nn.Linear(8, 4)

    def forward(self, graph: Graph) -> Tensor:
        start, end = graph.edges
        messages = torch.zeros(len(graph.x), 8).to(graph.x).index_add(0, end, self.neighbors(graph.x)[start])
        hidden = torch.relu(self.own(graph.x) + messages)
        count = len(graph.y)
        total = torch.zeros(count, 8).to(hidden).index_add(0, graph.graph_of_node, hidden)
        return self.out(total / torch.bincount(graph.graph_of_node, minlength=count)[:, None])


def of_graphs(net: nn.Module, graph: Graph) -> Tensor:
    return F.cross_entropy(net(graph), graph.y)


def pictures() -> list[Any]:
    """Images of three channels and of many sizes, with the boxes in them; as many in a lot as channels by chance."""
    generator = torch.Generator().manual_seed(4)
    made = []
    for number in range(RECORDS):
        image = torch.randn(3, 6 + number % 3, 7, generator=generator)
        boxes = torch.rand(1 + number % 3, 4, generator=generator)
        made.append((image, {"boxes": boxes, "name": f"image {number}"}))
    return made


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 4, 3)
        self.box = nn.Linear(4, 4)

    def forward(self, images: Any) -> list[Tensor]:
        return [self.box(self.features(image[None]).mean((2, 3))) for image in images]


def of_pictures(net: nn.Module, batch: Any) -> Tensor:
    images, targets = batch
    losses = [(box - target["boxes"]).abs().mean() for box, target in zip(net(images), targets, strict=True)]
    return torch.stack(losses).mean()


def texts() -> list[Any]:
    """Of many lengths: torch's own collate_fn fails on most lots."""
    generator = torch.Generator().manual_seed(6)
    return [(torch.randn(2 + number % 3, 6, generator=generator), number % 4) for number in range(RECORDS)]


def of_texts(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0].mean(1)), batch[1])


def with_a_constant(items: list[Any]) -> Any:
    """Class weights beside the records."""
    x = torch.stack([item[0] for item in items])
    y = torch.tensor([item[1] for item in items])
    return {"x": x, "y": y, "weights": torch.tensor([1.0, 2.0, 3.0, 4.0])}


def rows() -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(6, generator=generator), number % 4) for number in range(RECORDS)]


def of_weighted(net: nn.Module, batch: Any) -> Tensor:
    losses = F.cross_entropy(net(batch["x"]), batch["y"], reduction="none")
    return (losses * batch["weights"][batch["y"]]).mean()


def two_views(items: list[Any]) -> Any:
    """Two rows of each record."""
    x, y = default_collate(items)
    return torch.stack([x, x + 1]).transpose(0, 1).flatten(0, 1), y.repeat_interleave(2)


def of_rows(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


Make = Callable[[], nn.Module]
WORLDS: dict[str, tuple[Any, Any, Make, Any]] = {
    "graphs": (graphs, batch_of_graphs, Convolution, of_graphs),
    "pictures in lists": (pictures, lambda items: tuple(zip(*items, strict=True)), Detector, of_pictures),
    "records in a list": (pictures, list, Detector, lambda net, batch: of_pictures(net, zip(*batch, strict=True))),
    "ragged": (texts, None, lambda: nn.Linear(6, 4), of_texts),
    "constants": (rows, with_a_constant, lambda: nn.Linear(6, 4), of_weighted),
    "views": (rows, two_views, lambda: nn.Linear(6, 4), of_rows),
}


def lots(items: list[Any], collate: Any, size: int | None = None, **options: Any) -> LotLoader:
    drawn = Lots(make_sampling("full", len(items), len(items)), None)
    if size is not None:
        drawn = Lots(make_sampling("poisson", len(items), size), seed=0)
    return LotLoader(Items(items), drawn, collate_fn=collate, **options)


def clipped(net: nn.Module, step: Any, items: list[Any], collate: Any) -> list[list[Tensor]]:
    """Clipped gradients of each record alone, float64, by autograd."""
    net = copy.deepcopy(net).double()
    released = []
    for item in items:
        batch = doubled((collate or default_collate)([copy.deepcopy(item)]))
        gradients = torch.autograd.grad(step(net, batch), list(net.parameters()))
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        released.append([gradient * min(1.0, BOUND / float(norm)) for gradient in gradients])
    return released


def doubled(batch: Any) -> Any:
    if isinstance(batch, Graph):
        return Graph(batch.x.double(), batch.edges, batch.y)
    return torch.utils._pytree.tree_map(
        lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, batch
    )


def released(folder: Path, net: nn.Module, step: Any, loader: LotLoader, **options: Any) -> list[Tensor]:
    """What one release without noise subtracts from the weights."""
    net = copy.deepcopy(net)
    before = [p.detach().clone() for p in net.parameters()]
    trainer_for(folder, ClipOnly(max_grad_norm=BOUND, **options), 1).fit(Module(net, step), loader)
    return [(old - p.detach()).double() for old, p in zip(before, net.parameters(), strict=True)]


@pytest.mark.parametrize("gradients", ["auto", "one_by_one"])
@pytest.mark.parametrize("name", WORLDS)
def test_the_gradients_of_autograd(tmp_path: Path, name: str, gradients: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(LightningTraining, "inform", lambda self, text: lines.append(text))
    make_items, collate, make, step = WORLDS[name]
    items = make_items()
    torch.manual_seed(1)
    net = make()
    update = released(tmp_path, net, step, lots(items, collate), gradients=gradients)
    of_records = clipped(net, step, items, collate)
    for number, ours in enumerate(update):
        total = torch.stack([gradients[number] for gradients in of_records]).sum(0)
        torch.testing.assert_close(ours, total / RECORDS, rtol=1e-4, atol=1e-6)
    said = [line for line in lines if "was collated alone" in line]
    assert len(said) == int(gradients == "auto")


@pytest.mark.parametrize("name", WORLDS)
def test_a_record_moves_the_sum_by_its_own_clipped_gradient(tmp_path: Path, name: str) -> None:
    make_items, collate, make, step = WORLDS[name]
    items = make_items()
    torch.manual_seed(1)
    net = make()
    whole = released(tmp_path / "whole", net, step, lots(items, collate))
    rest = released(tmp_path / "rest", net, step, lots(items[:-1], collate))
    own = clipped(net, step, items[-1:], collate)[0]
    moved = [a * RECORDS - b * (RECORDS - 1) for a, b in zip(whole, rest, strict=True)]
    assert torch.stack([x.square().sum() for x in moved]).sum().sqrt() <= BOUND * 1.0001
    for ours, theirs in zip(moved, own, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("workers", [0, 2])
def test_lots_of_all_sizes(tmp_path: Path, workers: int) -> None:
    """Empty ones too, and lots of as many records as an image has channels."""
    items, collate, make, step = pictures(), list, Detector, WORLDS["records in a list"][3]
    torch.manual_seed(1)
    loader = lots(items, collate, 2, num_workers=workers)
    ledger = tmp_path / "ledger.jsonl"
    strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, seed=1, ledger=str(ledger))
    sizes = []

    class Sizes(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            assert isinstance(batch, SeparateRecords) and all(len(one) == 1 for one in batch)
            sizes.append(len(batch))

    trainer_for(tmp_path, strategy, 24, more=[Sizes()]).fit(Module(make(), step), loader)
    assert {0, 1, 3} <= set(sizes)
    assert len(read_ledger(ledger).releases) == strategy.releases == 24
    assert ledger_epsilon(read_ledger(ledger), 1e-3) == pytest.approx(strategy.epsilon(), rel=1e-9)


def test_hooks_see_each_record_as_a_batch(tmp_path: Path) -> None:
    """A module that moves its own kind of batch."""
    seen = []

    class Moving(Module):
        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            seen.append(type(batch))
            return batch.to(device)

    torch.manual_seed(1)
    strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, seed=1, ledger=str(tmp_path / "ledger.jsonl"))
    module = Moving(Convolution(), of_graphs)
    trainer_for(tmp_path, strategy, 3).fit(module, lots(graphs(), batch_of_graphs, 4))
    assert set(seen) == {Graph} and "transfer_batch_to_device" not in module.__dict__


def test_what_a_module_keeps_of_a_record_is_put_back(tmp_path: Path) -> None:
    """Python knows the shape of each without reading a value."""

    class Keeping(nn.Linear):
        last: Tensor | None = None
        longest = 0

        def forward(self, x: Tensor) -> Tensor:
            before, self.last = self.last, x.detach().mean()
            self.longest = max(self.longest, x.shape[1])
            assert before is None
            return super().forward(x) * self.longest

    @independent("count")
    class Counting(Module):
        count = 0
        other = 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.count += 1
            self.other += 1
            return super().training_step(batch, batch_idx)

    torch.manual_seed(1)
    module = Counting(Keeping(6, 4), of_texts)
    trainer_for(tmp_path, ClipOnly(max_grad_norm=BOUND), 2).fit(module, lots(texts(), None))
    assert module.net.longest == module.other == 0 and module.net.last is None
    assert module.count == 2


def test_the_engine_takes_rows_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="dimension 0 of each tensor of a batch must be its records"):
        released(tmp_path, nn.Linear(6, 4), of_weighted, lots(rows(), with_a_constant), gradients="engine")


def test_a_collate_fn_that_takes_no_single_record(tmp_path: Path) -> None:
    def pairs(items: list[Any]) -> Any:
        return [items[0][0], items[1][0]]

    with pytest.raises(ConfigurationError, match="fails on a list of one"):
        released(tmp_path, nn.Linear(6, 4), of_rows, lots(rows(), pairs))


def test_rows_then_ragged(tmp_path: Path) -> None:
    """The engine was chosen by a lot of equal lengths; the next one is run record by record."""
    items = [(torch.randn(2 + number % 2, 6), number % 4) for number in range(RECORDS)]
    torch.manual_seed(1)
    strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, seed=1, ledger=str(tmp_path / "ledger.jsonl"))
    kinds = []

    class Kinds(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            kinds.append(isinstance(batch, SeparateRecords))

    trainer = trainer_for(tmp_path, strategy, 16, more=[Kinds()])
    trainer.fit(Module(nn.Linear(6, 4), of_texts), lots(items, None, 2))
    assert {True, False} == set(kinds) and strategy.releases == 16


def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
    weights = []
    for stops in ((6,), (3, 6)):
        folder = tmp_path / str(len(stops))
        start = None
        for steps in stops:
            torch.manual_seed(1)
            net = Convolution()
            strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, seed=1, ledger=str(folder / "ledger.jsonl"))
            trainer = trainer_for(folder, strategy, steps)
            loader = lots(graphs(), batch_of_graphs, 4, data_id="graphs 1")
            trainer.fit(Module(net, of_graphs), loader, ckpt_path=start, weights_only=False)
            start = folder / "last.ckpt"
            trainer.save_checkpoint(start)
        weights.append(weights_of(net))
    assert torch.equal(*weights)


@pytest.mark.slow
@pytest.mark.own_key  # other processes take the keys that users get
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")
def test_two_processes_agree_with_one(tmp_path: Path) -> None:
    """Also where one of them has fewer graphs, or none, and all log."""
    weights = []
    for two in (False, True):
        torch.manual_seed(1)
        net = Convolution()
        folder = tmp_path / str(two)
        strategy = DPSGD(noise_multiplier=0.5, delta=1e-3, seed=1, ledger=str(folder / "ledger.jsonl"))
        options = {"devices": 2, "strategy": "ddp_fork"} if two else {}
        loader = lots(graphs(), batch_of_graphs, 2, data_id="graphs 1")
        trainer_for(folder, strategy, 8, **options).fit(Logging(net, of_graphs), loader)
        weights.append(weights_of(net))
    one, two = weights
    assert_same_training(two, one, noise_std=0.5, expected_batch_size=2)


class Logging(Module):
    """Its log waits for the other processes, if it is called."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


def test_a_lot_logs_its_mean(tmp_path: Path) -> None:
    items = graphs()
    torch.manual_seed(1)
    net = Convolution()
    mean = torch.stack([of_graphs(net, batch_of_graphs([item])) for item in items]).mean()
    trainer = trainer_for(tmp_path, ClipOnly(max_grad_norm=BOUND), 1)
    trainer.fit(Logging(net, of_graphs), lots(items, batch_of_graphs))
    torch.testing.assert_close(trainer.logged_metrics["loss_step"], mean.detach())


def test_a_loop_without_a_trainer(tmp_path: Path) -> None:
    items = graphs()
    torch.manual_seed(1)
    net = Convolution()
    of_records = clipped(net, of_graphs, items, batch_of_graphs)
    before = [p.detach().clone() for p in net.parameters()]
    loader = lots(items, batch_of_graphs)
    strategy = ClipOnly(max_grad_norm=BOUND, ledger=str(tmp_path / "ledger.jsonl"))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    assert list(PrivateLoop(net, optimizer, loader, strategy, of_graphs, steps=1)) == [1]
    for number, (old, p) in enumerate(zip(before, net.parameters(), strict=True)):
        total = torch.stack([gradients[number] for gradients in of_records]).sum(0)
        torch.testing.assert_close((old - p.detach()).double(), total / RECORDS, rtol=1e-4, atol=1e-6)
