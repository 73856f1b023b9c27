"""Steps whose records are independent, however unusual: none is refused, and few run record by record."""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.guards.coupling_worlds import (
    Batch,
    Step,
    Steps,
    images,
    lots_of,
    positive,
    sequences,
    tokens,
    vectors,
    verdicts,
)


class Case(NamedTuple):
    """A healthy step: its records, its network, and what is computed from both."""

    records: Callable[[torch.Generator, int], Batch]
    net: Callable[[], nn.Module]
    step: Step
    autocast: bool = False
    rows_of: int = 1


HEALTHY: dict[str, Case] = {}
ALONE: dict[str, set[str]] = {
    "packed_sequences": {"mixed"},
    "packed_sequences_in_order": {"mixed"},
    "refuses_what_is_not_finite": {"reads"},
    "memory_of_each_record_by_itself": {"separable", "kept"},
    "memories_of_unusual_kinds": {"reads"},
    "memory_that_is_only_looked_at": {"reads"},
    "average_that_is_only_looked_at": {"reads"},
    "augmented_in_a_loop": {"mixed"},
    "generators_of_ones_own": {"reads"},
    "noise_of_numpy": {"mixed"},
    "noise_of_numpy_by_arrays": {"mixed"},
    "as_many_numbers_as_the_records_ask_for": {"mixed"},
    "augmented_by_torchvision": {"mixed"},
    "attention with weights": {"mixed"},  # kdim and vdim
    "noise on the weights": {"separable", "mixed"},  # mixed where draws for 6 features may be one for each of 6 records
}
"""What sends a step record by record, or ("kept") is refused."""


def classified(module: Steps, batch: Batch) -> Tensor:
    x, *_, y = batch
    return F.cross_entropy(module.net(x).float(), y)


def enter(name: str, records: Any, net: Callable[[], nn.Module], step: Step = classified, **options: Any) -> None:
    HEALTHY[name] = Case(records, net, step, **options)


def healthy(records: Any, net: Callable[[], nn.Module], **options: Any) -> Callable[[Step], Step]:
    """Enter a step under its own name."""

    def decorate(step: Step) -> Step:
        enter(step.__name__, records, net, step, **options)
        return step

    return decorate


def layers(*modules: nn.Module) -> Callable[[], nn.Module]:
    return lambda: copy.deepcopy(nn.Sequential(*modules))


class Calls(nn.Module):
    """Named layers, and a function that calls them."""

    def __init__(self, forward: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *inputs: Any) -> Tensor:
        return self.function(self, *inputs)


def calls(forward: Callable[..., Tensor], **parts: nn.Module) -> Callable[[], nn.Module]:
    return lambda: copy.deepcopy(Calls(forward, **parts))


mlp = layers(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

# ------------------------------------------------------------------------------------------------- networks


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s + x * s * (1 - s))


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.curve = nn.Parameter(torch.ones(6)), nn.Parameter(torch.full((1,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.curve * x.square()


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    net[2].weight = net[0].weight
    return net


def tied_head() -> nn.Module:
    net = Calls(
        lambda m, x: m.head(torch.tanh(m.table(x))).mean(1),
        table=nn.Embedding(20, 4),
        head=nn.Linear(4, 20, bias=False),
    )
    net.head.weight = net.table.weight
    return net


def lazy() -> nn.Module:
    net = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 3))
    net(torch.zeros(2, 6))
    return net


def frozen_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8).eval(), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))


def channels_last() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Dropout2d(0.2), nn.Conv2d(16, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ).to(memory_format=torch.channels_last)


head = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
enter("linear", vectors, layers(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)))
enter("linear on sequences", sequences, layers(nn.Linear(6, 5), nn.Tanh(), nn.Flatten(), nn.Linear(25, 3)))
enter(
    "checkpoint with dropout",
    vectors,
    calls(
        lambda m, x: m.b(checkpoint(lambda v: F.dropout(torch.tanh(m.a(v)), 0.3), x, use_reentrant=False)),
        a=nn.Linear(6, 6),
        b=nn.Linear(6, 3),
    ),
)
enter("autograd function", vectors, calls(lambda m, x: m.b(Swish.apply(m.a(x))), a=nn.Linear(6, 6), b=nn.Linear(6, 3)))
enter("in place", vectors, calls(lambda m, x: m.b(F.silu(m.a(x)).add_(1.0)), a=nn.Linear(6, 6), b=nn.Linear(6, 3)))
enter("tied weights", vectors, tied)
enter("module twice", vectors, calls(lambda m, x: m.b(m.a(torch.tanh(m.a(x)))), a=nn.Linear(6, 6), b=nn.Linear(6, 3)))
enter(
    "convolution twice",
    images,
    calls(lambda m, x: m.b(m.a(torch.tanh(m.a(x))).flatten(1)), a=nn.Conv2d(1, 1, 3, padding=1), b=nn.Linear(64, 3)),
)
enter("frozen part", vectors, layers(nn.Linear(6, 6).requires_grad_(False), nn.Tanh(), nn.Linear(6, 3)))
enter(
    "grouped",
    images,
    layers(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 2, groups=2, dilation=2), *head, nn.Linear(6, 3)),
)
enter(
    "channels last",
    images,
    channels_last,
    lambda m, b: classified(m, (b[0].to(memory_format=torch.channels_last), b[1])),
)
enter(
    "circular padding",
    images,
    layers(nn.Conv2d(1, 8, 3, padding=1, padding_mode="circular"), nn.ReLU(), nn.Conv2d(8, 3, 1), *head),
)
enter(
    "convolution in 1 dimension",
    vectors,
    layers(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)),
)
enter(
    "convolution in 3 dimensions",
    images,
    layers(nn.Unflatten(1, (1, 1)), nn.Conv3d(1, 3, (1, 3, 3)), nn.AdaptiveAvgPool3d(1), nn.Flatten()),
)
enter(
    "transposed convolution",
    images,
    layers(nn.ConvTranspose2d(1, 4, 3, stride=2), nn.ReLU(), nn.Conv2d(4, 3, 1), *head),
)
enter(
    "max-pooling of ties",
    images,
    layers(nn.MaxPool2d(2), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 3)),
    lambda m, b: classified(m, ((b[0] > 0.5).float(), b[1])),
)
enter("bilinear", vectors, calls(lambda m, x: m.a(x, x.flip(1)), a=nn.Bilinear(6, 6, 3)))
enter("parametric ReLU", vectors, layers(nn.Linear(6, 6), nn.PReLU(6), nn.Linear(6, 3)))
enter("randomized ReLU", vectors, layers(nn.Linear(6, 6), nn.RReLU(), nn.Linear(6, 3)))
enter("group norm", images, layers(nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 3, 1), *head))
enter(
    "instance norm",
    images,
    layers(nn.Conv2d(1, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.ReLU(), nn.Conv2d(8, 3, 1), *head),
)
enter(
    "layer norm and RMS norm",
    sequences,
    layers(nn.Linear(6, 6), nn.LayerNorm(6), nn.RMSNorm(6), nn.Flatten(), nn.Linear(30, 3)),
)
enter("batch norm in eval mode", images, frozen_norm)
enter("embedding", tokens, layers(nn.Embedding(20, 4, padding_idx=0), nn.Flatten(), nn.Linear(32, 3)))
enter("sparse embedding", tokens, layers(nn.Embedding(20, 4, sparse=True), nn.Flatten(), nn.Linear(32, 3)))
enter("tied embedding", tokens, tied_head)
enter("embedding bag", tokens, layers(nn.EmbeddingBag(20, 4, mode="mean"), nn.Linear(4, 3)))
enter(
    "LSTM",
    sequences,
    calls(
        lambda m, x: m.b(m.a(x)[0].mean(1)),
        a=nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True, dropout=0.3),
        b=nn.Linear(10, 3),
    ),
)
enter(
    "GRU",
    sequences,
    calls(lambda m, x: m.b(m.a(x)[0][:, -1]), a=nn.GRU(6, 5, 2, batch_first=True, dropout=0.5), b=nn.Linear(5, 3)),
)
enter(
    "RNN cell",
    sequences,
    calls(lambda m, x: m.b(m.a(x[:, 1], m.a(x[:, 0]))), a=nn.RNNCell(6, 5, nonlinearity="relu"), b=nn.Linear(5, 3)),
)
enter(
    "LSTM with time first",
    sequences,
    calls(lambda m, x: m.b(m.a(x.transpose(0, 1))[0][-1]), a=nn.LSTM(6, 5, 2, dropout=0.4), b=nn.Linear(5, 3)),
)
enter(
    "transformer encoder",
    sequences,
    layers(nn.TransformerEncoderLayer(6, 2, 12, dropout=0.1, batch_first=True), nn.Flatten(), nn.Linear(30, 3)),
)
enter(
    "attention with weights",
    sequences,
    calls(
        lambda m, x: m.b(m.a(x, x, x)[0].mean(1)),
        a=nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True, add_bias_kv=True),
        b=nn.Linear(6, 3),
    ),
)
enter(
    "parameters of its own",
    vectors,
    calls(lambda m, x: m.b(m.g(torch.tanh(m.a(x)))), a=nn.Linear(6, 6), g=Gain(), b=nn.Linear(6, 3)),
)
enter("float64", vectors, lambda: mlp().double(), lambda m, b: classified(m, (b[0].double(), b[1])))
enter("bfloat16", vectors, lambda: mlp().bfloat16(), lambda m, b: classified(m, (b[0].bfloat16(), b[1])))
enter("float16", vectors, lambda: mlp().half(), lambda m, b: classified(m, (b[0].half(), b[1])))
enter(
    "autocast",
    sequences,
    layers(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(25, 3)),
    autocast=True,
)
enter(
    "autocast of convolutions", images, layers(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 3, 1), *head), autocast=True
)
enter("lazy", vectors, lazy)
enter(
    "mixture of experts",
    vectors,
    calls(
        lambda m, x: (torch.softmax(m.r(x), 1)[:, None] * torch.stack([m.a(x), m.b(x)], 2)).sum(2),
        a=nn.Linear(6, 3),
        b=nn.Linear(6, 3),
        r=nn.Linear(6, 2),
    ),
)
enter(
    "dropout everywhere",
    images,
    layers(
        nn.Dropout2d(0.2),
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Conv2d(8, 8, 3),
        nn.AlphaDropout(0.1),
        nn.Flatten(),
        nn.FeatureAlphaDropout(0.1),
        nn.Linear(128, 3),
    ),
)
enter("wide", positive, layers(nn.Linear(6, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 3)))


@healthy(
    sequences,
    calls(
        lambda m, x, n: m.b(
            m.a(nn.utils.rnn.pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False))[1][0][-1]
        ),
        a=nn.LSTM(6, 5, batch_first=True),
        b=nn.Linear(5, 3),
    ),
)
def packed_sequences(module: Steps, batch: Batch) -> Tensor:
    x, lengths, y = batch
    return F.cross_entropy(module.net(x, lengths), y)


def in_order_of_length(generator: torch.Generator, size: int) -> Batch:
    x, lengths, y = sequences(generator, size)
    order = lengths.argsort(descending=True)
    return x[order], lengths[order], y[order]


@healthy(
    in_order_of_length,
    calls(
        lambda m, x, n: m.b(m.a(nn.utils.rnn.pack_padded_sequence(x, n, batch_first=True))[1][0][-1]),
        a=nn.LSTM(6, 5, batch_first=True),
        b=nn.Linear(5, 3),
    ),
)
def packed_sequences_in_order(module: Steps, batch: Batch) -> Tensor:
    x, lengths, y = batch
    return F.cross_entropy(module.net(x, lengths), y)


@healthy(
    sequences,
    calls(
        lambda m, x, k: m.b(m.a(x, x, x, key_padding_mask=k)[0].mean(1)),
        a=nn.MultiheadAttention(6, 2, batch_first=True),
        b=nn.Linear(6, 3),
    ),
)
def masked_attention(module: Steps, batch: Batch) -> Tensor:
    x, lengths, y = batch
    return F.cross_entropy(module.net(x, torch.arange(5) >= lengths[:, None]), y)


@healthy(
    sequences,
    calls(
        lambda m, x: m.b(torch.softmax((m.a(x) @ x.mT).masked_fill((x.sum(2) > 2)[:, None], -1e9), -1) @ x).mean(1),
        a=nn.Linear(6, 6),
        b=nn.Linear(6, 3),
    ),
)
def masked_softmax(module: Steps, batch: Batch) -> Tensor:
    return classified(module, batch)


@healthy(sequences, calls(lambda m, x: m.b(m.a(x)), a=nn.Linear(6, 5), b=nn.Linear(5, 3)))
def labels_of_each_step_ignored_by_record(module: Steps, batch: Batch) -> Tensor:
    x, lengths, y = batch
    labels = torch.where(torch.arange(5) < lengths[:, None], y[:, None], -100)
    losses = F.cross_entropy(module.net(x).transpose(1, 2), labels, ignore_index=-100, reduction="none")
    return (losses.sum(1) / lengths).mean()


# ------------------------------------------------------------------------------------------------- losses


def each(module: Steps, batch: Batch) -> Tensor:
    return F.cross_entropy(module.net(batch[0]), batch[1], reduction="none")


@healthy(vectors, mlp)
def smoothed_labels(module: Steps, batch: Batch) -> Tensor:
    return F.cross_entropy(module.net(batch[0]), batch[1], label_smoothing=0.1)


@healthy(vectors, mlp)
def focal_loss(module: Steps, batch: Batch) -> Tensor:
    losses = each(module, batch)
    return ((1 - (-losses).exp()).square() * losses).mean()


@healthy(vectors, mlp)
def weights_by_class(module: Steps, batch: Batch) -> Tensor:
    return (each(module, batch) * torch.tensor([0.2, 1.0, 3.0])[batch[1]]).mean()


@healthy(vectors, mlp)
def clamped_losses(module: Steps, batch: Batch) -> Tensor:
    return each(module, batch).clamp(max=1.0).mean()


@healthy(vectors, mlp)
def records_without_numbers_count_zero(module: Steps, batch: Batch) -> Tensor:
    losses = each(module, (batch[0].nan_to_num(), batch[1]))
    return torch.where(losses.isfinite(), losses, 0).mean()


@healthy(vectors, mlp)
def pseudo_labels(module: Steps, batch: Batch) -> Tensor:
    out = module.net(batch[0])
    sure = out.softmax(1).amax(1).detach() > 0.4
    return (F.cross_entropy(out, out.argmax(1), reduction="none") * sure).mean()


@healthy(vectors, mlp)
def several_tasks(module: Steps, batch: Batch) -> Tensor:
    x, y = batch
    out = module.net(x)
    return F.cross_entropy(out, y) + 0.5 * F.mse_loss(out[:, 0], x[:, 0]) + 0.1 * out.square().sum(1).mean()


@healthy(vectors, mlp)
def tiny_losses(module: Steps, batch: Batch) -> Tensor:
    return 1e-12 * each(module, batch).mean()


@healthy(vectors, mlp)
def margin(module: Steps, batch: Batch) -> Tensor:
    return F.multi_margin_loss(module.net(batch[0]), batch[1])


@healthy(positive, lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Sigmoid()))
def cross_entropy_of_probabilities(module: Steps, batch: Batch) -> Tensor:
    """Which refuses what is no probability."""
    return F.binary_cross_entropy(module.net(batch[0]), batch[0].clamp(0, 1))


@healthy(vectors, mlp)
def refuses_what_is_not_finite(module: Steps, batch: Batch) -> Tensor:
    loss = each(module, batch).mean()
    if not loss.isfinite():
        raise FloatingPointError("the loss is not finite")
    return loss


@healthy(vectors, mlp)
def gradient_penalty_of_each_record(module: Steps, batch: Batch) -> Tensor:
    x = batch[0].detach().requires_grad_()
    losses = each(module, (x, batch[1]))
    return losses.mean() + 0.1 * x.square().sum(1).add(1).log().mean()


def own_entries(batch: Batch, entries: int) -> Tensor:
    """An entry of a memory for each record, by what it holds: no two records share one."""
    numbers = batch[0].detach().nan_to_num().double()[:, 0]
    return (numbers * 7e6).long() % entries


@healthy(vectors, mlp)
def memory_of_each_record_by_itself(module: Steps, batch: Batch) -> Tensor:
    """Temporal ensembling: a record's earlier outputs are its targets."""
    if "targets" not in module.__dict__:
        module.targets = torch.zeros(1_000_003, 3)
    out = module.net(batch[0])
    own = own_entries(batch, len(module.targets))
    loss = F.cross_entropy(out, batch[1]) + (out - module.targets[own]).square().sum(1).mean()
    module.targets[own] = 0.5 * module.targets[own] + 0.5 * out.detach().nan_to_num()
    return loss


@healthy(vectors, mlp)
def memories_of_unusual_kinds(module: Steps, batch: Batch) -> Tensor:
    """They are written to, and not read."""
    out = module.net(batch[0])
    kinds = module.__dict__.setdefault("kinds", {"lots": 0.0})
    kinds["lots"] += float(out.detach().sum().nan_to_num())
    for name, dtype in (("long", np.longdouble), ("swapped", ">f4"), ("half", np.float16)):
        memory = kinds.setdefault(name, np.zeros((300, 3), dtype))
        memory[:2] = out.detach().nan_to_num().clamp(-1, 1).numpy()[:2]
    kinds["quantized"] = torch.quantize_per_tensor(torch.zeros(90, 3), kinds["lots"] % 1 + 0.1, 0, torch.qint8)
    kinds["sparse"] = torch.eye(3).to_sparse() * kinds["lots"]
    return F.cross_entropy(out, batch[1])


@healthy(vectors, mlp)
def noise_from_a_bank(module: Steps, batch: Batch) -> Tensor:
    """A memory of public numbers, some of which are renewed in each step."""
    bank = module.__dict__.setdefault("bank", torch.ones(500, 3))
    out = module.net(batch[0]) + bank[torch.randint(len(bank), (len(batch[0]),))]
    module.bank = bank.clone()
    module.bank[:20] = bank[:20] * 0.9
    return F.cross_entropy(out, batch[1])


@healthy(vectors, mlp)
def memory_that_is_only_looked_at(module: Steps, batch: Batch) -> Tensor:
    """Features of the last lots, for a figure."""
    features = module.__dict__.setdefault("features", np.zeros((400, 3), np.float32))
    out = module.net(batch[0])
    features[: len(out)] = out.detach().numpy()
    return F.cross_entropy(out, batch[1])


@healthy(vectors, mlp)
def schedule_of_the_loss(module: Steps, batch: Batch) -> Tensor:
    module.warmth = min(1.0, module.__dict__.get("warmth", 0.1) + 0.1)
    return each(module, batch).mean() * module.warmth


@healthy(vectors, mlp)
def average_that_is_only_looked_at(module: Steps, batch: Batch) -> Tensor:
    loss = each(module, batch).mean()
    module.shown = 0.9 * module.__dict__.get("shown", 0.0) + 0.1 * loss.item()
    module.seen = module.__dict__.get("seen", 0) + len(batch[0])
    return loss


@healthy(vectors, mlp)
def teacher_of_released_weights(module: Steps, batch: Batch) -> Tensor:
    """An average of the weights themselves, which are public."""
    teacher = module.__dict__.setdefault("teacher", [p.detach().clone() for p in module.net.parameters()])
    module.teacher = [0.9 * a + 0.1 * b.detach() for a, b in zip(teacher, module.net.parameters(), strict=True)]
    w, b, v, c = module.teacher
    target = torch.tanh(batch[0] @ w.T + b) @ v.T + c
    return (module.net(batch[0]) - target).square().mean() + each(module, batch).mean()


# ------------------------------------------------------------------------------------------------- random numbers


@healthy(vectors, mlp)
def augmented_by_record(module: Steps, batch: Batch) -> Tensor:
    x, y = batch
    flip = torch.rand(len(x), 1) < 0.5
    return each(module, (torch.where(flip, x.flip(1), x) * torch.empty(len(x), 1).uniform_(0.5, 1.5), y)).mean()


@healthy(images, layers(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)))
def augmented_in_a_loop(module: Steps, batch: Batch) -> Tensor:
    def augmented(image: Tensor) -> Tensor:
        if random.random() < 0.5:
            image = image.flip(-1)
        if float(torch.rand(())) < 0.3:
            image = image * float(torch.empty(1).uniform_(0.8, 1.2))
        top, left = int(torch.randint(0, 3, (1,))), random.randint(0, 2)
        return F.pad(image, (1, 1, 1, 1))[:, top : top + 8, left : left + 8] + 0.1 * np.random.normal()

    return classified(module, (torch.stack([augmented(image) for image in batch[0]]), batch[1]))


@healthy(images, layers(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)))
def augmented_by_torchvision(module: Steps, batch: Batch) -> Tensor:
    transforms = pytest.importorskip("torchvision.transforms")
    augment = transforms.Compose(
        [transforms.RandomCrop(8, padding=1), transforms.RandomHorizontalFlip(), transforms.RandomErasing(0.5)]
    )
    return classified(module, (torch.stack([augment(image) for image in batch[0]]), batch[1]))


@healthy(images, layers(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)))
def one_augmentation_for_the_lot(module: Steps, batch: Batch) -> Tensor:
    x = batch[0].flip(-1) if random.random() < 0.5 else batch[0]
    return classified(module, (x.roll(int(torch.randint(3, ())), 2), batch[1]))


@healthy(vectors, mlp)
def noise_of_numpy(module: Steps, batch: Batch) -> Tensor:
    noise = np.random.normal(size=tuple(batch[0].shape)) + np.random.rand(len(batch[0]), 1)
    noise = noise + np.random.default_rng().uniform(-1, 1, (len(batch[0]), 1))
    own = module.__dict__.setdefault("rng", np.random.default_rng(1))
    noise = noise + own.normal(0, 1, size=tuple(batch[0].shape)) * own.integers(3, size=len(batch[0]))[:, None]
    return each(module, (batch[0] + 0.1 * torch.from_numpy(noise).float(), batch[1])).mean()


@healthy(vectors, mlp)
def first_rows_of_a_large_draw(module: Steps, batch: Batch) -> Tensor:
    """Whole blocks are drawn, so that processes agree."""
    x, y = batch
    blocks = torch.randn(math.ceil(len(x) / 16) * 16, 6)[: len(x)]
    return each(module, (x + blocks + torch.randn(100, 6)[: len(x)], y)).mean()


@healthy(vectors, mlp)
def generators_of_ones_own(module: Steps, batch: Batch) -> Tensor:
    own = module.__dict__.setdefault("drawn", torch.Generator().manual_seed(1))
    fresh = torch.Generator().manual_seed(7)
    noise = torch.randn(batch[0].shape, generator=own) + torch.randn(batch[0].shape, generator=fresh)
    return each(module, (batch[0] + 0.1 * noise, batch[1])).mean()


@healthy(vectors, mlp)
def truncated_normal(module: Steps, batch: Batch) -> Tensor:
    """Drawn again until it fits, all records together."""
    noise = torch.randn(len(batch[0]))
    while bool((far := noise.abs() > 1.5).any()):
        noise = torch.where(far, torch.randn(len(batch[0])), noise)
    return each(module, (batch[0] + noise[:, None], batch[1])).mean()


@healthy(vectors, mlp)
def noise_of_numpy_by_arrays(module: Steps, batch: Batch) -> Tensor:
    level = batch[0].detach().nan_to_num(0, 0, 0).numpy()
    noise = np.random.normal(level, 0.1) + np.random.default_rng(3).binomial(1, 1 / (1 + np.exp(-level)))
    noise = noise + np.random.default_rng().uniform(level[:, :1] - 1, level[:, :1] + 1, size=level.shape)
    return each(module, (torch.from_numpy(noise).float(), batch[1])).mean()


@healthy(vectors, mlp)
def as_many_numbers_as_the_records_ask_for(module: Steps, batch: Batch) -> Tensor:
    """Noise for some entries of each record."""
    x, y = batch
    chosen = x.nan_to_num(0, 0, 0) > 0.5
    noise = torch.zeros_like(x)
    noise[chosen] = torch.randn(int(chosen.sum()))
    return each(module, (x + noise, y)).mean()


@healthy(vectors, mlp)
def gumbel_softmax(module: Steps, batch: Batch) -> Tensor:
    return F.mse_loss(F.gumbel_softmax(module.net(batch[0]), 0.7), F.one_hot(batch[1], 3).float())


@healthy(vectors, mlp)
def bernoulli_of_each_record(module: Steps, batch: Batch) -> Tensor:
    losses = each(module, batch)
    return (losses * torch.bernoulli(losses.detach().nan_to_num().sigmoid().clamp(0, 1))).mean()


@healthy(vectors, mlp)
def distributions(module: Steps, batch: Batch) -> Tensor:
    x, y = batch
    beta = torch.distributions.Beta(x[:, :1].nan_to_num().abs().clamp(0.1, 5), torch.ones(len(x), 1)).sample()
    gamma = torch.distributions.Gamma(torch.ones(len(x), 1), 2.0).sample()
    kind = torch.distributions.Categorical(logits=x[:, :3].nan_to_num(0, 0, 0)).sample()
    poisson = torch.poisson(x[:, 1:2].nan_to_num(0, 0, 0).abs().clamp(max=9))
    return each(module, (x * beta + gamma + kind[:, None] + 0.1 * poisson, y)).mean()


@healthy(images, layers(nn.Flatten(), nn.Linear(64, 3)))
def masked_patches(module: Steps, batch: Batch) -> Tensor:
    """As a masked autoencoder does: half of each record's patches."""
    order = torch.rand(len(batch[0]), 64).argsort(1)
    mask = torch.ones(len(batch[0]), 64).scatter(1, order[:, :32], 0.0)
    return classified(module, (batch[0] * mask.view(-1, 1, 8, 8), batch[1]))


class Residual(nn.Module):
    """Stochastic depth of each record (Huang et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        keep = x.new_empty(len(x), *[1] * (x.dim() - 1)).bernoulli_(0.8)
        return x + keep / 0.8 * torch.tanh(self.layer(x))


enter("stochastic depth", vectors, layers(nn.Linear(6, 8), Residual(), Residual(), nn.Linear(8, 3)))


class NoisyLinear(nn.Module):
    """Noise on the weights, one for the lot."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x @ (torch.eye(6) + 0.1 * torch.randn(6, 6)))


enter("noise on the weights", vectors, NoisyLinear)

# ------------------------------------------------------------------------------------------------- generative models


class Denoiser(nn.Module):
    """Predicts the noise of images at a step of time."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.down, self.up = (
            nn.Embedding(100, 8),
            nn.Conv2d(1, 8, 3, padding=1),
            nn.Conv2d(8, 1, 3, padding=1),
        )
        self.norm, self.drop = nn.GroupNorm(2, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = self.down(x) + self.time(t)[:, :, None, None]
        return self.up(self.drop(F.silu(self.norm(x))))


def at_time(x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
    level = torch.cos(t / 100 * math.pi / 2)[:, None, None, None]
    return level * x + (1 - level.square()).sqrt() * noise


@healthy(images, Denoiser)
def diffusion(module: Steps, batch: Batch) -> Tensor:
    x, _ = batch
    t, noise = torch.randint(0, 100, (len(x),)), torch.randn_like(x)
    return (module.net(at_time(x, t, noise), t) - noise).square().mean()


@healthy(images, Denoiser)
def diffusion_with_noises_in_a_loop(module: Steps, batch: Batch) -> Tensor:
    return torch.stack([diffusion(module, batch) for _ in range(4)]).mean()


@healthy(images, Denoiser)
def diffusion_with_one_step_for_the_lot(module: Steps, batch: Batch) -> Tensor:
    x, _ = batch
    t, noise = torch.randint(0, 100, (1,)).expand(len(x)), torch.randn_like(x)
    return (module.net(at_time(x, t, noise), t) - noise).square().mean()


def repeated_images(generator: torch.Generator, size: int) -> Batch:
    x, y = images(generator, size)
    return x.repeat_interleave(4, 0), y.repeat_interleave(4)


@healthy(repeated_images, Denoiser, rows_of=4)
def diffusion_with_noises_of_a_record(module: Steps, batch: Batch) -> Tensor:
    """Antithetic ones, even: a record may do with its own rows what it likes."""
    x, _ = batch
    noise = torch.randn(len(x) // 4, 2, *x.shape[1:])
    noise = torch.stack([noise, -noise], 2).flatten(0, 2)
    t = torch.randint(0, 100, (len(x),))
    return (module.net(at_time(x, t, noise), t) - noise).square().mean()


@healthy(images, Denoiser)
def flow_matching(module: Steps, batch: Batch) -> Tensor:
    x, _ = batch
    t, noise = torch.randn(len(x)).sigmoid(), torch.randn_like(x)
    mixed = (1 - t)[:, None, None, None] * noise + t[:, None, None, None] * x
    return (module.net(mixed, (t * 99).long().clamp(0, 99)) - (x - noise)).square().mean()


@healthy(images, Denoiser)
def diffusion_without_conditions(module: Steps, batch: Batch) -> Tensor:
    """Classes are dropped by record, as classifier-free guidance does; losses are weighted by their time."""
    x, y = batch
    t, noise = torch.randint(0, 100, (len(x),)), torch.randn_like(x)
    label = torch.where(torch.rand(len(x)) < 0.1, 0, y)
    losses = (module.net(at_time(x, t, noise), (t + label).clamp(max=99)) - noise).square().mean((1, 2, 3))
    return (losses * (1 / (t + 1)).clamp(min=0.1)).mean()


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, 8), nn.Linear(4, 64)


@healthy(images, Autoencoder)
def variational_autoencoder(module: Steps, batch: Batch) -> Tensor:
    x = batch[0].flatten(1)
    mu, log = module.net.encoder(x).chunk(2, 1)
    out = module.net.decoder(mu + torch.randn_like(mu) * (0.5 * log).exp())
    kl = 0.5 * (mu.square() + log.exp() - log - 1).sum(1)
    return ((out - x).square().sum(1) + kl).mean()


@healthy(images, Autoencoder)
def importance_weighted_autoencoder(module: Steps, batch: Batch) -> Tensor:
    """Five samples of a record in a dimension before its own."""
    x = batch[0].flatten(1)
    mu, log = module.net.encoder(x).chunk(2, 1)
    normal = torch.distributions.Normal(mu, (0.5 * log).exp())
    z = normal.rsample((5,)).transpose(0, 1)
    errors = (module.net.decoder(z) - x[:, None]).square().sum(2)
    return -torch.logsumexp(-errors, 1).mean()


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.up, self.out = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(16, 1, 1)
        self.norm, self.drop = nn.GroupNorm(2, 8), nn.Dropout2d(0.1)

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.norm(self.a(x)))
        return self.out(torch.cat([first, self.up(self.drop(F.relu(self.b(first))))], 1))


@healthy(images, UNet)
def segmentation_by_a_unet(module: Steps, batch: Batch) -> Tensor:
    x, target = batch[0], (batch[0] > 0.5).float()
    out = module.net(x)
    losses = F.binary_cross_entropy_with_logits(out, target, reduction="none").mean((1, 2, 3))
    overlap = 2 * (out.sigmoid() * target).sum((1, 2, 3)) / (out.sigmoid() + target).sum((1, 2, 3)).add(1)
    return (losses + 1 - overlap).mean()


# ------------------------------------------------------------------------------------------------- texts


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, num_labels=3
    )
    return transformers.BertForSequenceClassification(config)


def gpt() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2, n_positions=8)
    )


class LowRank(nn.Module):
    """A frozen layer with a trained addition of rank 2 (Hu et al. 2021)."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(layer.in_features, 2, bias=False), nn.Linear(2, layer.out_features, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 4 * self.up(self.down(self.drop(x)))


def low_rank_bert() -> nn.Module:
    net = bert().requires_grad_(False)
    for name, layer in list(net.named_modules()):
        if name.endswith(("query", "value")):
            net.set_submodule(name, LowRank(layer))
    net.classifier.requires_grad_(True)
    return net


def peft_gpt() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, for what transformers is about to rename
        import peft

        options = peft.LoraConfig(r=2, lora_dropout=0.1, fan_in_fan_out=True, target_modules=["c_attn"])
        return peft.get_peft_model(gpt(), options)


def classified_texts(module: Steps, batch: Batch) -> Tensor:
    ids, mask, y = batch
    return F.cross_entropy(module.net(ids, attention_mask=mask).logits, y)


def predicted_texts(module: Steps, batch: Batch) -> Tensor:
    ids, mask, _ = batch
    out = module.net(ids, attention_mask=mask).logits[:, :-1]
    losses = F.cross_entropy(out.transpose(1, 2), ids[:, 1:], reduction="none") * mask[:, 1:]
    return (losses.sum(1) / mask[:, 1:].sum(1)).mean()


def masked_texts(module: Steps, batch: Batch) -> Tensor:
    """Masks are drawn in the step, as a collator of masked language models does."""
    ids, mask, y = batch
    hidden = torch.bernoulli(torch.full(ids.shape, 0.3)).bool()
    words = torch.randint(20, ids.shape)
    return classified_texts(module, (torch.where(hidden, words, ids), mask, y))


enter("BERT", tokens, bert, classified_texts)
enter("BERT with masked words", tokens, bert, masked_texts)
enter("GPT-2", tokens, gpt, predicted_texts)
enter("LoRA", tokens, low_rank_bert, classified_texts)
enter("LoRA by peft", tokens, peft_gpt, predicted_texts)


def kinds(name: str, seed: int, lots: int = 3, size: int = 24) -> set[str]:
    """Kinds of the verdicts on some batches."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    case = HEALTHY[name]
    sizes = np.random.default_rng(seed).integers(size - 4, size + 5, lots).tolist()
    module = Steps(case.net(), case.step)
    seen = verdicts(module, lots_of(case.records, sizes, seed), sizes, case.rows_of, case.autocast)
    return {verdict.kind for verdict in seen}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_steps_are_separable_or_run_record_by_record(name: str) -> None:
    assert kinds(name, 0) <= ALONE.get(name, {"separable"})


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", HEALTHY)
def test_so_they_are_with_many_seeds(name: str) -> None:
    for seed in range(1, 11):
        assert kinds(name, seed, size=4 + 12 * (seed % 4)) <= ALONE.get(name, {"separable"})


def test_there_are_many() -> None:
    assert len(HEALTHY) >= 90
