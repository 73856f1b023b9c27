"""Networks as people have them: each way makes steps, and one that cannot says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import networks
from benchmarks.networks import Network, measure_network, write_page


class Shared(nn.Module):
    """Positions that all records share, and dropout by a function: ours stays with the engine, Opacus does not."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.places = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 10)
        self.dropout = dropout

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = x + self.places(torch.arange(5)).mean(0)
        logits: torch.Tensor = self.out(nn.functional.dropout(x, self.dropout).mean(1))
        return nn.functional.cross_entropy(logits, labels)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    lot = {"x": torch.randn(16, 5, 4), "labels": torch.arange(16) % 10}
    monkeypatch.setattr(networks, "NETWORKS", {"shared": Network(Shared, lambda: lot, 0.1)})


@pytest.mark.usefixtures("small")
def test_a_network() -> None:
    outcome = measure_network("shared", 1)
    assert outcome["plain"] > 0 and outcome["ours"] > 0
    assert isinstance(outcome["opacus"], float | str)


@pytest.mark.usefixtures("small")
def test_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "wait_until_quiet", lambda patience: True)
    threads = torch.get_num_threads()
    said: list[Any] = []
    try:
        write_page(tmp_path / "page.md", 1, 0.0, said.append)
    finally:
        torch.set_num_threads(threads)
    lines = (tmp_path / "page.md").read_text(encoding="utf-8").splitlines()
    assert said == ["shared"] and lines[-1].startswith("| shared | ") and lines[-1].count("|") == 5


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft, about transformers
def test_all_are_built() -> None:
    for network in networks.NETWORKS.values():
        assert sum(p.numel() for p in network.build(network.dropout).parameters()) > 1_000_000
        assert {len(tensor) for tensor in network.lot().values()} == {networks.RECORDS}
