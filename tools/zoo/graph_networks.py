"""Networks on graphs, of PyTorch Geometric: a record is a graph, and a batch of them is one large graph."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from torch import Tensor, nn

from tools.zoo.architectures import ZOO
from tools.zoo.network import CLASSES, RECORDS, Network, label

_NODES = 5
_WIDTH = 8


def build(name: str, *_: object) -> Network:
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
        self.pool = instantiate(ZOO["pool"]) if name == "TopKPooling" else None
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
    plain = {"_target_": f"torch_geometric.nn.{name}", "in_channels": _WIDTH, "out_channels": _WIDTH}
    layer: nn.Module = instantiate(ZOO["built"].get(name, plain), _convert_="all")
    return layer


def _loss(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch), batch.y)


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

    def step(net: Any, batch: Any) -> Tensor:
        x, adjacency, mask, y = batch
        x = net.second(net.first(x, adjacency, mask).relu(), adjacency, mask)
        return F.cross_entropy(net.out(x.sum(1) / mask.sum(1, keepdim=True)), y)

    layers = {"first": _layer("DenseGCNConv"), "second": _layer("DenseGCNConv"), "out": nn.Linear(_WIDTH, CLASSES)}
    return Network(nn.ModuleDict(layers), records, step)
