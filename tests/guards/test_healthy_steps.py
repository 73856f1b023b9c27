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

from tests.guards.coupling_worlds import Batch, Step, Steps, images, lots_of, sequences, tokens, vectors, verdicts


class Case(NamedTuple):
    """A healthy step.

    Attributes:
        records: Makes some.
        net: Makes the network.
        step: What is computed from both.
        autocast: Whether it is done in bfloat16.
        rows_of: Rows of a record.
        kinds: Verdicts that it may have; with others than separable it runs record by record, or ("kept") is refused.
    """

    records: Callable[[torch.Generator, int], Batch]
    net: Callable[[], nn.Module]
    step: Step
    autocast: bool = False
    rows_of: int = 1
    kinds: str = "separable"


HEALTHY: dict[str, Case] = {}


def healthy(records: Any, net: Callable[[], nn.Module], kinds: str = "separable", rows_of: int = 1) -> Any:
    """Enter a step under its own name."""

    def enter(step: Step) -> Step:
        HEALTHY[step.__name__] = Case(records, net, step, rows_of=rows_of, kinds=kinds)
        return step

    return enter


def classified(module: Steps, batch: Batch) -> Tensor:
    x, *_, y = batch
    return F.cross_entropy(module.net(x).float(), y)


# ------------------------------------------------------------------------------------------------- networks


class Calls(nn.Module):
    """Named layers, and a function that calls them."""

    def __init__(self, forward: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *inputs: Any) -> Tensor:
        return self.function(self, *inputs)


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


linear = nn.Linear(6, 6)
last = nn.Linear(6, 3)
head = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
mlp = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
convolution = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))

NETWORKS: dict[str, tuple[Any, nn.Module]] = {
    "checkpoint with dropout": (
        vectors,
        Calls(
            lambda m, x: m.b(checkpoint(lambda v: F.dropout(torch.tanh(m.a(v)), 0.3), x, use_reentrant=False)),
            a=linear,
            b=last,
        ),
    ),
    "autograd function": (vectors, Calls(lambda m, x: m.b(Swish.apply(m.a(x))), a=linear, b=last)),
    "dropout everywhere": (
        images,
        nn.Sequential(
            nn.Dropout2d(0.2),
            nn.Conv2d(1, 8, 3),
            nn.Dropout(0.2),
            nn.Conv2d(8, 8, 3),
            nn.AlphaDropout(0.1),
            nn.Flatten(),
            nn.FeatureAlphaDropout(0.1),
            nn.Linear(128, 3),
        ),
    ),
    "LSTM": (
        sequences,
        Calls(
            lambda m, x: m.b(m.a(x)[0].mean(1)),
            a=nn.LSTM(6, 3, 2, batch_first=True, bidirectional=True, dropout=0.3),
            b=last,
        ),
    ),
}
HEALTHY |= {
    name: Case(records, lambda net=net: copy.deepcopy(net), classified) for name, (records, net) in NETWORKS.items()
}
HEALTHY["autocast"] = Case(images, lambda: copy.deepcopy(convolution), classified, autocast=True)


def recurrent() -> nn.Module:
    return Calls(lambda m, packed: m.b(m.a(packed)[1][0][-1]), a=nn.LSTM(6, 5, batch_first=True), b=nn.Linear(5, 3))


@healthy(sequences, recurrent, kinds="mixed")
def packed_sequences(module: Steps, batch: Batch) -> Tensor:
    x, lengths, y = batch
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return F.cross_entropy(module.net(packed), y)


@healthy(
    sequences,
    lambda: Calls(
        lambda m, x, padded: m.b(m.a(x, x, x, key_padding_mask=padded)[0].mean(1)),
        a=nn.MultiheadAttention(6, 2, batch_first=True),
        b=nn.Linear(6, 3),
    ),
)
def masked_attention(module: Steps, batch: Batch) -> Tensor:
    x, lengths, y = batch
    return F.cross_entropy(module.net(x, torch.arange(5) >= lengths[:, None]), y)


@healthy(sequences, lambda: nn.Linear(6, 3))
def labels_of_each_step_ignored_by_record(module: Steps, batch: Batch) -> Tensor:
    x, lengths, y = batch
    labels = torch.where(torch.arange(5) < lengths[:, None], y[:, None], -100)
    losses = F.cross_entropy(module.net(x).transpose(1, 2), labels, ignore_index=-100, reduction="none")
    return (losses.sum(1) / lengths).mean()


# ------------------------------------------------------------------------------------------------- losses


def of_mlp(kinds: str = "separable") -> Any:
    return healthy(vectors, lambda: copy.deepcopy(mlp), kinds)


def each(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module.net(x), y, reduction="none")


@of_mlp("reads")
def refuses_what_is_not_finite(module: Steps, batch: Batch) -> Tensor:
    loss = each(module, *batch).mean()
    if not loss.isfinite():
        raise FloatingPointError("the loss is not finite")
    return loss


@of_mlp("separable, kept")
def memory_of_each_record_by_itself(module: Steps, batch: Batch) -> Tensor:
    """Temporal ensembling: a record's earlier outputs are its targets."""
    targets = module.__dict__.setdefault("targets", torch.zeros(1_000_003, 3))
    out = module.net(batch[0])
    own = (batch[0].detach().double()[:, 0] * 7e6).long() % len(targets)
    loss = each(module, *batch).mean() + (out - targets[own]).square().sum(1).mean()
    targets[own] = 0.5 * targets[own] + 0.5 * out.detach()
    return loss


@of_mlp("reads")
def average_that_is_only_looked_at(module: Steps, batch: Batch) -> Tensor:
    loss = each(module, *batch).mean()
    module.shown = 0.9 * module.__dict__.get("shown", 0.0) + 0.1 * loss.item()
    return loss


# ------------------------------------------------------------------------------------------------- random numbers


@of_mlp()
def augmented_by_record(module: Steps, batch: Batch) -> Tensor:
    x, y = batch
    flip = torch.rand(len(x), 1) < 0.5
    return each(module, torch.where(flip, x.flip(1), x) * torch.empty(len(x), 1).uniform_(0.5, 1.5), y).mean()


@healthy(images, lambda: copy.deepcopy(convolution), kinds="mixed")
def augmented_in_a_loop(module: Steps, batch: Batch) -> Tensor:
    def augmented(image: Tensor) -> Tensor:
        if random.random() < 0.5 or float(torch.rand(())) < 0.3:
            image = image.flip(-1)
        left = int(torch.randint(0, 3, (1,)))
        return F.pad(image, (1, 1, 1, 1))[:, :8, left : left + 8] + 0.1 * np.random.normal()

    return classified(module, (torch.stack([augmented(image) for image in batch[0]]), batch[1]))


@of_mlp("mixed")
def noise_of_numpy_by_arrays(module: Steps, batch: Batch) -> Tensor:
    level = batch[0].detach().numpy()
    own = module.__dict__.setdefault("rng", np.random.default_rng(1))
    noise = (
        np.random.normal(level, 0.1)
        + own.normal(size=level.shape)
        + np.random.default_rng(3).binomial(1, 1 / (1 + np.exp(-level)))
    )
    return each(module, torch.from_numpy(noise).float(), batch[1]).mean()


@of_mlp()
def first_rows_of_a_large_draw(module: Steps, batch: Batch) -> Tensor:
    """Whole blocks are drawn, so that processes agree."""
    x, y = batch
    blocks = torch.randn(math.ceil(len(x) / 16) * 16, 6)[: len(x)]
    return each(module, x + blocks, y).mean()


@of_mlp("reads")
def generators_of_ones_own(module: Steps, batch: Batch) -> Tensor:
    own = module.__dict__.setdefault("drawn", torch.Generator().manual_seed(1))
    fresh = torch.Generator().manual_seed(7)
    noise = torch.randn(batch[0].shape, generator=own) + torch.randn(batch[0].shape, generator=fresh)
    return each(module, batch[0] + noise, batch[1]).mean()


@of_mlp()
def truncated_normal(module: Steps, batch: Batch) -> Tensor:
    """Drawn again until it fits, all records together."""
    noise = torch.randn(len(batch[0]))
    while bool((far := noise.abs() > 1.5).any()):
        noise = torch.where(far, torch.randn(len(batch[0])), noise)
    return each(module, batch[0] + noise[:, None], batch[1]).mean()


@of_mlp()
def distributions(module: Steps, batch: Batch) -> Tensor:
    x, y = batch
    beta = torch.distributions.Beta(x[:, :1].abs().clamp(0.1, 5), torch.ones(len(x), 1)).sample()
    gamma = torch.distributions.Gamma(torch.ones(len(x), 1), 2.0).sample()
    kind = torch.distributions.Categorical(logits=x[:, :3]).sample()
    poisson = torch.poisson(x[:, 1:2].abs().clamp(max=9))
    losses = each(module, x * beta + gamma + kind[:, None] + 0.1 * poisson, y)
    return (losses * torch.bernoulli(losses.detach().sigmoid())).mean()


# ------------------------------------------------------------------------------------------------- generative models


def denoiser() -> nn.Module:
    """Predicts the noise of images at a step of time."""
    return Calls(
        lambda m, x, t: m.up(F.silu(m.norm(m.down(x) + m.time(t)[:, :, None, None]))),
        time=nn.Embedding(100, 8),
        down=nn.Conv2d(1, 8, 3, padding=1),
        norm=nn.GroupNorm(2, 8),
        up=nn.Conv2d(8, 1, 3, padding=1),
    )


def denoised(module: Steps, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
    level = torch.cos(t / 100)[:, None, None, None]
    return (module.net(level * x + (1 - level.square()).sqrt() * noise, t) - noise).square().mean()


@healthy(images, denoiser)
def diffusion_with_one_step_for_the_lot(module: Steps, batch: Batch) -> Tensor:
    x, _ = batch
    return denoised(module, x, torch.randint(0, 100, (1,)).expand(len(x)), torch.randn_like(x))


def repeated_images(generator: torch.Generator, size: int) -> Batch:
    x, y = images(generator, size)
    return x.repeat_interleave(4, 0), y.repeat_interleave(4)


@healthy(repeated_images, denoiser, rows_of=4)
def diffusion_with_noises_of_a_record(module: Steps, batch: Batch) -> Tensor:
    """Antithetic ones, even: a record may do with its own rows what it likes."""
    x, _ = batch
    noise = torch.randn(len(x) // 4, 2, *x.shape[1:])
    return denoised(module, x, torch.randint(0, 100, (len(x),)), torch.stack([noise, -noise], 2).flatten(0, 2))


@healthy(images, lambda: nn.ModuleList([nn.Linear(64, 8), nn.Linear(4, 64)]))
def importance_weighted_autoencoder(module: Steps, batch: Batch) -> Tensor:
    """Five samples of a record in a dimension before its own."""
    x = batch[0].flatten(1)
    mu, log = module.net[0](x).chunk(2, 1)
    z = torch.distributions.Normal(mu, (0.5 * log).exp()).rsample((5,)).transpose(0, 1)
    return -torch.logsumexp(-(module.net[1](z) - x[:, None]).square().sum(2), 1).mean()


def gpt() -> nn.Module:
    """GPT-2 with LoRA, by peft."""
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, for what transformers is about to rename
        import peft

        sizes = {"vocab_size": 20, "n_layer": 2, "n_head": 2, "n_embd": 16}
        options = peft.LoraConfig(r=2, lora_dropout=0.1, fan_in_fan_out=True, target_modules=["c_attn"])
        return peft.get_peft_model(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)), options)


@healthy(tokens, gpt)
def predicted_texts(module: Steps, batch: Batch) -> Tensor:
    ids, mask, _ = batch
    out = module.net(ids, attention_mask=mask).logits[:, :-1]
    losses = F.cross_entropy(out.transpose(1, 2), ids[:, 1:], reduction="none") * mask[:, 1:]
    return (losses.sum(1) / mask[:, 1:].sum(1)).mean()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "predicted_texts" else []) for name in HEALTHY]
)
def test_healthy_steps_are_separable_or_run_record_by_record(name: str) -> None:
    case, sizes = HEALTHY[name], [26, 22, 21]
    seen = verdicts(Steps(case.net(), case.step), lots_of(case.records, sizes, 0), sizes, case.rows_of, case.autocast)
    assert {verdict.kind for verdict in seen} <= set(case.kinds.split(", "))
