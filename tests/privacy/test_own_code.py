"""Parameters that a module uses itself, beside layers that draw random numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from dpbench.errors import UnsupportedModuleError
from dpbench.privacy.gradients.engine import PerRecordEngine
from dpbench.records.tagging import under_tags
from tests.support.reference import relative_error

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

RECORDS = 5


def losses(output: Tensor) -> Tensor:
    flat = output.flatten(1)
    return flat.square().mean(1) + flat.sin().mean(1)


def check(model: nn.Module, inputs: Tensor, rtol: float = 1e-10) -> None:
    """One forward pass with its random numbers: the engine's gradients are those of each record's own loss in it."""
    model.train()
    records = len(inputs)
    engine = PerRecordEngine(model)
    torch.manual_seed(0)
    engine.expect(records)
    of_records = under_tags(engine, lambda x: losses(_logits(model(x))), inputs, records)
    with engine.paused():
        singly = [
            torch.autograd.grad(loss, engine.parameters, retain_graph=True, allow_unused=True) for loss in of_records
        ]
    computed = engine.backward(of_records.mean(), records, verify=True)
    engine.close()
    largest = max(float(g.norm()) for row in singly for g in row if g is not None)
    for position, (name, p) in enumerate(zip(engine.names, engine.parameters, strict=True)):
        rows = [torch.zeros_like(p) if row[position] is None else row[position] for row in singly]
        wanted = torch.stack(rows)
        got = computed[position].per_record()
        scale = max(float(wanted.norm()), 1e-4 * largest)
        assert float((got - wanted).norm()) <= rtol * scale, name
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())
    torch.manual_seed(0)
    assert torch.equal(losses(_logits(model(inputs))), of_records)  # nothing was changed for the engine


def _logits(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


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


class StochasticDepth(nn.Module):
    """Leaves out records, each by itself."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        ones = [1] * (x.dim() - 1)
        return x * torch.empty(len(x), *ones, dtype=x.dtype).bernoulli_(1 - self.p).div_(1 - self.p)


class Block(nn.Module):
    """A layer's scale that begins near zero, so that outputs say little, and a branch that is added in place."""

    def __init__(self, p: float, scale: float = 1e-6, width: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, width))
        self.scale = nn.Parameter(torch.full((width,), scale))
        self.depth = StochasticDepth(p)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.scale * self.body(x)
        branch = self.depth(branch)
        branch += x
        return branch


class Nested(nn.Module):
    """Modules with parameters within such modules, and one that is called twice."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(4))
        self.tokens = Tokens()
        self.block = Block(p, 0.5)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.tokens(x)) * self.shift
        return self.out(self.block(x) + self.shift)


class Pair(NamedTuple):
    hidden: Tensor
    gate: Tensor


class Several(nn.Module):
    """Returns several tensors, of which it uses one itself; its argument has a name only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
        self.inner = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.5)

    def forward(self, *, x: Tensor, factor: float) -> Pair:
        gate = (x * self.weight * factor).sigmoid()
        return Pair(self.dropout(self.inner(x * gate)) * gate, gate)


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.several = Several()
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden, gate = self.several(x=x, factor=0.5)
        return self.out(hidden + gate.square())


class Attending(nn.Module):
    """The same tensor twice, with dropout in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return self.attention(x, x, x)[0] + x


class InPlace(nn.Module):
    """Layers that write to what they are given are run again."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.relu(x * self.scale) * self.scale)


class Drawing(nn.Module):
    """Random numbers in the module's own lines."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.inner(x) * self.weight, 0.5)


class Hiding(nn.Module):
    """A layer that sees what it is not given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
        self.inner = Looking()

    def forward(self, x: Tensor) -> Tensor:
        self.inner.seen = [x * self.weight]
        return self.inner(x)


class Looking(nn.Module):
    seen: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.seen[0]


class Counting(nn.Module):
    """Calls a layer for each record."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
        self.inner = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        for _ in range(len(x)):
            x = self.inner(x)
        return x


@pytest.mark.parametrize("records", [1, RECORDS])
@pytest.mark.parametrize(
    "model",
    [
        Tokens(),
        nn.Sequential(nn.Linear(6, 4), Block(0.5)),
        nn.Sequential(nn.Linear(6, 4), Block(0.0)),
        Nested(0.5),
        Uses(),
        Attending(),
        InPlace(),
        Drawing(),
        Hiding(),
        Counting(),
    ],
    ids=[
        "tokens",
        "stochastic depth",
        "no depth",
        "nested",
        "several",
        "attending",
        "in place",
        "drawing",
        "hiding",
        "counting",
    ],
)
def test_against_autograd(model: nn.Module, records: int) -> None:
    torch.manual_seed(1)
    model = model.double()
    for _ in range(2):  # layers whose output is written to are known from the first time on
        check(model, torch.randn(records, 3, 6, dtype=torch.float64))


def test_an_empty_lot() -> None:
    model = Tokens()
    engine = PerRecordEngine(model)
    engine.expect(0)
    for gradients in engine.backward(model(torch.randn(0, 3, 6)).sum(), 0):
        assert gradients.per_record().shape[0] == 0


def test_half_precision() -> None:
    model = Nested(0.5)
    torch.manual_seed(1)
    x = torch.randn(RECORDS, 3, 6)
    engine = PerRecordEngine(model)
    engine.expect(RECORDS)
    with torch.autocast("cpu", torch.bfloat16):
        of_records = under_tags(engine, lambda x: losses(model(x).float()), x, RECORDS)
    singly = [torch.autograd.grad(loss, engine.parameters, retain_graph=True) for loss in of_records]
    for position, gradients in enumerate(engine.backward(of_records.mean(), RECORDS, verify=True)):
        wanted = torch.stack([row[position] for row in singly])
        assert relative_error(gradients.per_record(), wanted) < 0.05


class Mixing(nn.Module):
    """The mean over records, in the module's own lines."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner((x - x.mean(0)) * self.weight)


def test_what_mixes_records_is_refused() -> None:
    torch.manual_seed(1)
    model = Mixing()
    engine = PerRecordEngine(model)
    engine.expect(RECORDS)
    of_records = under_tags(engine, lambda x: losses(model(x)), torch.randn(RECORDS, 3, 6), RECORDS)
    with pytest.raises(UnsupportedModuleError, match="has no row of each record|no single record's are known"):
        engine.backward(of_records.mean(), RECORDS, verify=True)


def test_without_tags_nothing_is_known_of_a_modules_own_lines() -> None:
    model = Tokens()
    engine = PerRecordEngine(model)
    engine.expect(RECORDS)
    with pytest.raises(UnsupportedModuleError, match="where no tags tell them apart"):
        engine.backward(losses(model(torch.randn(RECORDS, 3, 6))).mean(), RECORDS)


def test_a_layer_that_fails_leaves_nothing_behind() -> None:
    model = Tokens()
    engine = PerRecordEngine(model)
    engine.expect(RECORDS)
    with pytest.raises(RuntimeError):
        model(torch.randn(RECORDS, 3, 5))
    engine.expect(RECORDS)
    x = torch.randn(RECORDS, 3, 6)
    of_records = under_tags(engine, lambda x: losses(model(x)), x, RECORDS)
    engine.backward(of_records.mean(), RECORDS, verify=True)
    assert engine.verified


def test_checkpointed() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nested = Nested(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.nested, x, use_reentrant=False)

    torch.manual_seed(1)
    check(Checkpointed().double(), torch.randn(RECORDS, 3, 6, dtype=torch.float64))


def _vision(name: str) -> nn.Module:
    if name.startswith("torchvision"):
        models = pytest.importorskip("torchvision").models
        if name.endswith("vit"):
            return models.VisionTransformer(8, 4, 2, 2, 8, 16, dropout=0.2, attention_dropout=0.2, num_classes=3)
        from torchvision.models.convnext import CNBlockConfig, ConvNeXt

        return ConvNeXt([CNBlockConfig(4, 8, 2), CNBlockConfig(8, None, 2)], 0.5, num_classes=3)
    transformers = pytest.importorskip("transformers")
    if name == "vit":
        config = transformers.ViTConfig(
            hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=8,
            patch_size=4, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2,
        )  # fmt: skip
        return transformers.ViTForImageClassification(config)
    config = transformers.ConvNextConfig(
        hidden_sizes=[4, 6, 8, 8], depths=[1, 1, 1, 2], drop_path_rate=0.5, num_stages=4
    )
    return transformers.ConvNextForImageClassification(config)


@pytest.mark.parametrize("name", ["vit", "convnext", "torchvision vit", "torchvision convnext"])
def test_networks_of_others(name: str) -> None:
    torch.manual_seed(0)
    size = 8 if name.endswith("vit") else 64
    check(_vision(name).double(), torch.randn(RECORDS, 3, size, size, dtype=torch.float64), rtol=1e-8)
