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
    "noise on the weights": (vectors, Calls(lambda m, x: m.a(x @ (torch.eye(6) + torch.randn(6, 6))), a=last)),
    "bilinear": (vectors, Calls(lambda m, x: m.a(x, x.flip(1)), a=nn.Bilinear(6, 6, 3))),
    "rectifiers": (vectors, nn.Sequential(linear, nn.PReLU(6), nn.RReLU(), last)),
    "instance norm": (
        images,
        nn.Sequential(nn.Conv2d(1, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.ReLU(), nn.Conv2d(8, 3, 1), *head),
    ),
    "max-pooling": (
        images,
        nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
    ),
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
    "embedding bag": (tokens, nn.Sequential(nn.EmbeddingBag(20, 4, mode="mean"), nn.Linear(4, 3))),
    "LSTM": (
        sequences,
        Calls(
            lambda m, x: m.b(m.a(x)[0].mean(1)),
            a=nn.LSTM(6, 3, 2, batch_first=True, bidirectional=True, dropout=0.3),
            b=last,
        ),
    ),
    "GRU with time first": (
        sequences,
        Calls(lambda m, x: m.b(m.a(x.transpose(0, 1))[0][-1]), a=nn.GRU(6, 6, 2, dropout=0.4), b=last),
    ),
}
HEALTHY |= {
    name: Case(records, lambda net=net: copy.deepcopy(net), classified) for name, (records, net) in NETWORKS.items()
}
# mixed where draws for 6 features may be one for each of 6 records
HEALTHY["noise on the weights"] = HEALTHY["noise on the weights"]._replace(kinds="separable, mixed")
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


@of_mlp()
def pseudo_labels(module: Steps, batch: Batch) -> Tensor:
    out = module.net(batch[0])
    sure = out.softmax(1).amax(1).detach() > 0.4
    return (F.cross_entropy(out, out.argmax(1), reduction="none") * sure).mean()


@of_mlp()
def several_losses(module: Steps, batch: Batch) -> Tensor:
    out = module.net(batch[0])
    targets = out.detach().sigmoid()
    of_classes = F.binary_cross_entropy(out.sigmoid(), targets) + F.binary_cross_entropy_with_logits(out, targets)
    return F.multi_margin_loss(out, batch[1]) + of_classes + 0.5 * F.mse_loss(out[:, 0], batch[0][:, 0])


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
def memories_of_unusual_kinds(module: Steps, batch: Batch) -> Tensor:
    """They are written to, and not read."""
    out = module.net(batch[0])
    kinds = module.__dict__.setdefault("kinds", {"lots": 0.0})
    kinds["lots"] += float(out.detach().sum())
    for name, dtype in (("long", np.longdouble), ("swapped", ">f4"), ("half", np.float16)):
        memory = kinds.setdefault(name, np.zeros((300, 3), dtype))
        memory[:2] = out.detach().clamp(-1, 1).numpy()[:2]
    kinds["quantized"] = torch.quantize_per_tensor(torch.zeros(90, 3), kinds["lots"] % 1 + 0.1, 0, torch.qint8)
    kinds["sparse"] = torch.eye(3).to_sparse() * kinds["lots"]
    return F.cross_entropy(out, batch[1])


@of_mlp()
def noise_from_a_bank(module: Steps, batch: Batch) -> Tensor:
    """A memory of public numbers, some of which are renewed in each step."""
    bank = module.__dict__.setdefault("bank", torch.ones(500, 3))
    out = module.net(batch[0]) + bank[torch.randint(len(bank), (len(batch[0]),))]
    module.bank = bank.clone()
    module.bank[:20] = bank[:20] * 0.9
    return F.cross_entropy(out, batch[1])


@of_mlp("reads")
def average_that_is_only_looked_at(module: Steps, batch: Batch) -> Tensor:
    loss = each(module, *batch).mean()
    module.shown = 0.9 * module.__dict__.get("shown", 0.0) + 0.1 * loss.item()
    return loss


@of_mlp()
def teacher_of_released_weights(module: Steps, batch: Batch) -> Tensor:
    """An average of the weights themselves, which are public."""
    teacher = module.__dict__.setdefault("teacher", module.net[0].weight.detach().clone())
    module.teacher = 0.9 * teacher + 0.1 * module.net[0].weight.detach()
    return (module.net[0](batch[0]) - batch[0] @ module.teacher.T).square().mean()


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


@healthy(images, lambda: copy.deepcopy(convolution))
def one_augmentation_for_the_lot(module: Steps, batch: Batch) -> Tensor:
    x = batch[0].flip(-1) if random.random() < 0.5 else batch[0]
    return classified(module, (x.roll(int(torch.randint(3, ())), 2), batch[1]))


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


@of_mlp("mixed")
def as_many_numbers_as_the_records_ask_for(module: Steps, batch: Batch) -> Tensor:
    """Noise for some entries of each record."""
    x, y = batch
    noise = torch.zeros_like(x)
    noise[x > 0.5] = torch.randn(int((x > 0.5).sum()))
    return each(module, x + noise, y).mean()


@of_mlp()
def gumbel_softmax(module: Steps, batch: Batch) -> Tensor:
    return F.mse_loss(F.gumbel_softmax(module.net(batch[0]), 0.7, hard=True), F.one_hot(batch[1], 3).float())


@of_mlp()
def distributions(module: Steps, batch: Batch) -> Tensor:
    x, y = batch
    beta = torch.distributions.Beta(x[:, :1].abs().clamp(0.1, 5), torch.ones(len(x), 1)).sample()
    gamma = torch.distributions.Gamma(torch.ones(len(x), 1), 2.0).sample()
    kind = torch.distributions.Categorical(logits=x[:, :3]).sample()
    poisson = torch.poisson(x[:, 1:2].abs().clamp(max=9))
    losses = each(module, x * beta + gamma + kind[:, None] + 0.1 * poisson, y)
    return (losses * torch.bernoulli(losses.detach().sigmoid())).mean()


@healthy(images, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))
def masked_patches(module: Steps, batch: Batch) -> Tensor:
    """As a masked autoencoder does: half of each record's patches."""
    order = torch.rand(len(batch[0]), 64).argsort(1)
    mask = torch.ones(len(batch[0]), 64).scatter(1, order[:, :32], 0.0)
    return classified(module, (batch[0] * mask.view(-1, 1, 8, 8), batch[1]))


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


# ------------------------------------------------------------------------------------------------- texts

SIZES = {"vocab_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**SIZES, intermediate_size=16, num_labels=3)
    )


def gpt() -> nn.Module:
    """GPT-2 with LoRA, by peft."""
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, for what transformers is about to rename
        import peft

        options = peft.LoraConfig(r=2, lora_dropout=0.1, fan_in_fan_out=True, target_modules=["c_attn"])
        return peft.get_peft_model(transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES)), options)


@healthy(tokens, bert)
def masked_texts(module: Steps, batch: Batch) -> Tensor:
    """Masks are drawn in the step, as a collator of masked language models does."""
    ids, mask, y = batch
    hidden = torch.bernoulli(torch.full(ids.shape, 0.3)).bool()
    ids = torch.where(hidden, torch.randint(20, ids.shape), ids)
    return F.cross_entropy(module.net(ids, attention_mask=mask).logits, y)


@healthy(tokens, gpt)
def predicted_texts(module: Steps, batch: Batch) -> Tensor:
    ids, mask, _ = batch
    out = module.net(ids, attention_mask=mask).logits[:, :-1]
    losses = F.cross_entropy(out.transpose(1, 2), ids[:, 1:], reduction="none") * mask[:, 1:]
    return (losses.sum(1) / mask[:, 1:].sum(1)).mean()


def seen_are_as_expected(name: str, seed: int, size: int) -> None:
    """The verdicts on three batches."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    case = HEALTHY[name]
    sizes = np.random.default_rng(seed).integers(size - 4, size + 5, 3).tolist()
    batches = lots_of(case.records, sizes, seed)
    for verdict in verdicts(Steps(case.net(), case.step), batches, sizes, case.rows_of, case.autocast):
        assert verdict.kind in case.kinds.split(", ")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_steps_are_separable_or_run_record_by_record(name: str) -> None:
    seen_are_as_expected(name, 0, 24)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", HEALTHY)
def test_so_they_are_with_many_seeds(name: str) -> None:
    for seed in range(1, 11):
        seen_are_as_expected(name, seed, 4 + 12 * (seed % 4))
