"""Parameters that a module uses itself, beside layers that draw random numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpbench.errors import UnsupportedModuleError
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.records.tagging import under_tags
from tests.privacy.exact import assert_exact_in_its_pass, losses

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

RECORDS = 5


class Tokens(nn.Module):
    """A class token and positions, as ViT has them."""

    def __init__(self, width: int = 4, patches: int = 3) -> None:
        super().__init__()
        self.patches = nn.Linear(6, width)
        self.cls = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, patches + 1, width))
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        return self.dropout(x + self.positions)


class Block(nn.Module):
    """Leaves out records, each by itself, in a branch that is scaled and added in place."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, width))
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.empty(len(x), 1, 1, dtype=x.dtype).bernoulli_(0.5)
        branch = self.scale * self.body(x) * kept
        branch += x
        return branch


class Nested(nn.Module):
    """Modules with parameters within such modules, and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(4))
        self.tokens = Tokens()
        self.block = Block()
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.tokens(x)) * self.shift
        return self.out(self.block(x) + self.shift)


class InPlace(nn.Module):
    """Layers that write to what they are given are run again."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.relu(x * self.scale) * self.scale)


class Mixing(nn.Module):
    """The mean over records, in the module's own lines."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner((x - x.mean(0)) * self.weight)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "nested": Nested,
    "in place": InPlace,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_against_autograd(name: str) -> None:
    torch.manual_seed(1)
    model = NETWORKS[name]().double()
    for records in (RECORDS, RECORDS):  # layers whose output is written to are known from the first time on
        assert_exact_in_its_pass(model, torch.randn(records, 3, 6, dtype=torch.float64))


def test_automatic_bfloat16() -> None:
    torch.manual_seed(1)
    assert_exact_in_its_pass(Nested(), torch.randn(RECORDS, 3, 6), rtol=0.05, half=True)


def test_what_mixes_records_is_refused() -> None:
    torch.manual_seed(1)
    model = Mixing()
    engine = PerRecordEngine(model)
    engine.expect(RECORDS)
    of_records = under_tags(engine, lambda x: losses(model(x)), torch.randn(RECORDS, 3, 6), RECORDS)
    with pytest.raises(UnsupportedModuleError, match="has no row of each record|belong to no single record"):
        engine.backward(of_records.mean(), RECORDS, verify=True)


def test_what_is_not_known_and_what_failed_leaves_nothing_behind() -> None:
    model = Tokens()
    engine = PerRecordEngine(model)
    engine.expect(RECORDS)
    x = torch.randn(RECORDS, 3, 6)
    with pytest.raises(UnsupportedModuleError, match="where no tags tell them apart"):
        engine.backward(losses(model(x)).mean(), RECORDS)
    with pytest.raises(RuntimeError):
        model(torch.randn(RECORDS, 3, 5))
    engine.expect(RECORDS)
    of_records = under_tags(engine, lambda x: losses(model(x)), x, RECORDS)
    engine.backward(of_records.mean(), RECORDS, verify=True)
    assert engine.verified
