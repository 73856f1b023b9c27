"""Networks on graphs, of PyTorch Geometric: a record is a graph, and a lot of them one large graph."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.zoo.network import CLASSES, RECORDS, Network, label

_NODES = 5
_WIDTH = 8


def build(name: str) -> Network:
    """A network of two layers of that name, a mean over nodes, and a linear classifier."""
    from torch_geometric.data import Batch

    if name == "DenseGCNConv":
        return _padded()
    records = [_graph() for _ in range(RECORDS)]
    return Network(_OfGraphs(name), records, _loss, collate=Batch.from_data_list)


def _graph() -> Any:
    from torch_geometric.data import Data

    nodes = _NODES + int(torch.randint(0, 4, ()))
    start = torch.arange(nodes)
    others = torch.randint(0, nodes, (nodes,))
    edges = torch.cat([torch.stack([start, (start + 1) % nodes]), torch.stack([start, others])], 1)
    return Data(
        x=torch.randn(nodes, _WIDTH),
        edge_index=edges,
        edge_attr=torch.randn(edges.shape[1], 3),
        y=label(CLASSES).view(1),
    )


class _OfGraphs(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.first = _layer(name)
        self.second = _layer(name)
        self.out = nn.Linear(_WIDTH, CLASSES)
        self.pool = _layer("pool") if name == "TopKPooling" else None
        self.takes_edges = name == "NNConv"

    def forward(self, batch: Any) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        x = batch.x
        edges = batch.edge_index
        graph_of = batch.batch
        extra = (batch.edge_attr,) if self.takes_edges else ()
        x = self.first(x, edges, *extra).relu()
        if self.pool is not None:
            x, edges, _, graph_of, *_ = self.pool(x, edges, None, graph_of)
        x = self.second(x, edges, *extra)
        output: Tensor = self.out(global_mean_pool(x, graph_of, len(batch.y)))
        return output


def _layer(name: str) -> nn.Module:
    import torch_geometric.nn as graphs

    mlp = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH))
    if name == "GINConv":
        return graphs.GINConv(mlp, train_eps=True)
    if name == "NNConv":
        return graphs.NNConv(_WIDTH, _WIDTH, nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, _WIDTH * _WIDTH)))
    if name == "PNAConv":
        return graphs.PNAConv(_WIDTH, _WIDTH, ["mean", "max", "std"], ["identity", "attenuation"], deg=torch.ones(6))
    if name == "pool":
        return graphs.TopKPooling(_WIDTH, ratio=0.8)
    kind = graphs.GraphConv if name == "TopKPooling" else getattr(graphs, name)
    made: nn.Module = kind(_WIDTH, _WIDTH)
    return made


def _loss(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch), batch.y)


class _Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import DenseGCNConv

        self.first = DenseGCNConv(_WIDTH, _WIDTH)
        self.second = DenseGCNConv(_WIDTH, _WIDTH)
        self.out = nn.Linear(_WIDTH, CLASSES)

    def forward(self, x: Tensor, adjacency: Tensor, mask: Tensor) -> Tensor:
        x = self.first(x, adjacency, mask).relu()
        x = self.second(x, adjacency, mask)
        output: Tensor = self.out(x.sum(1) / mask.sum(1, keepdim=True))
        return output


def _padded() -> Network:
    from torch_geometric.utils import to_dense_adj

    records = []
    most = _NODES + 4
    for _ in range(RECORDS):
        graph = _graph()
        nodes = len(graph.x)
        adjacency = to_dense_adj(graph.edge_index, max_num_nodes=most)[0]
        x = F.pad(graph.x, (0, 0, 0, most - nodes))
        records.append((x, adjacency, torch.arange(most) < nodes, graph.y[0]))

    def step(net: nn.Module, batch: Any) -> Tensor:
        x, adjacency, mask, y = batch
        return F.cross_entropy(net(x, adjacency, mask), y)

    return Network(_Dense(), records, step)
