"""Steps that couple records are never called separable; healthy steps of current research are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dpbench.privacy.record_axis.verdict import Verdict
from tests.support.verdicts import verdict_of_step

R = 4
T = 6
C = 3
CLASSES = 5
HEADS = 2

Batch = dict[str, Tensor]


class Net(nn.Module):
    """Some layers and numbers for all steps.

    Attributes:
        kept: What a step keeps for a later batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.head = nn.Linear(C, CLASSES)
        self.by_place = nn.Parameter(torch.randn(R, C))
        self.shift = nn.Parameter(torch.randn(C))
        self.table = nn.Embedding(CLASSES, C)
        self.batch_norm = nn.BatchNorm1d(C)
        self.frozen_norm = nn.BatchNorm1d(C).eval()
        self.along_records = nn.GRU(C, C)
        self.conv = nn.Conv1d(C, C, 3, padding=1)
        self.register_buffer("seen", torch.zeros(C))
        self.kept: list[Any] = []


Step = Callable[[Tensor, Batch, Net], Any]
"""A step: a row of each record that a layer made (R, C), the batch, and the network → loss."""


def rows(batch: Batch, net: Net) -> Tensor:
    return torch.tanh(net.linear(batch["x"]))


def a_batch(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(R, C, generator=generator),
        "t": torch.randn(R, T, C, generator=generator),
        "square": torch.randn(R, R, generator=generator),
        "y": torch.randint(CLASSES, (R,), generator=generator),
        "tokens": torch.randint(CLASSES, (R, T), generator=generator),
        "image": torch.randn(R, 1, 8, 8, generator=generator),
    }


def verdict_of(step: Step, net: Net, seed: int = 0) -> Verdict:
    _, verdict = verdict_of_step(lambda batch: step(rows(batch, net), batch, net), a_batch(seed), R, net)
    return verdict


class MixedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient - gradient.mean(0)


class Wrapped(Tensor):
    """A plain subclass."""


COMPILED = torch.compile(lambda x, weight: (x @ weight).tanh().var(0).mean(), backend="aot_eager")


def centered(h: Tensor) -> Tensor:
    return h - h.mean(0)


COUPLED: dict[str, Step] = {
    # views and strides
    "overlapping_rows": lambda h, b, net: h.as_strided((R, C), (C - 1, 1)).exp().mean(),
    "a_shifted_view": lambda h, b, net: (torch.cat([h, torch.zeros(R, C)])[1 : R + 1] * h).mean(),
    "bytes_of_pairs": lambda h, b, net: (h.t() * b["x"].t().contiguous().view(torch.float64).abs()[:, :1]).mean(),
    # indices
    "targets_that_are_records": lambda h, b, net: functional.cross_entropy(h @ h.t(), torch.arange(R)),
    "scattered_along_records": lambda h, b, net: (
        h * torch.zeros(R, C).scatter_add(0, (b["y"] % R)[:, None].expand(R, C), h)
    ).mean(),
    "records_as_a_table": lambda h, b, net: functional.embedding(b["y"] % R, h).exp().mean(),
    "some_records": lambda h, b, net: h[: R // 2].mean(),
    "chosen_records": lambda h, b, net: h[h[:, 0] > 0].mean(),
    # numbers by place, of which test_public_numbers.py has more
    "a_parameter_by_place": lambda h, b, net: (h * net.by_place).mean(),
    "a_mask_by_place": lambda h, b, net: functional.scaled_dot_product_attention(
        *[net.linear(b["t"])] * 3, attn_mask=torch.eye(R, T)[:, None].expand(R, T, T)
    ).mean(),
    "lengths_by_place": lambda h, b, net: functional.ctc_loss(
        net.head(b["t"]).log_softmax(-1).transpose(0, 1), b["tokens"].clamp(min=1), [T] * R, [1, 2, 3, 1]
    ),
    "draws_of_a_seeded_generator": lambda h, b, net: (
        (h + torch.randn(R, C, generator=torch.Generator().manual_seed(1))).exp().mean()
    ),
    # sums used further
    "a_product_with_a_total": lambda h, b, net: (h @ h.sum(0)).mean(),
    "the_root_of_a_mean": lambda h, b, net: h.pow(2).mean().sqrt(),
    # layers
    "a_batch_norm": lambda h, b, net: net.batch_norm(h).exp().mean(),
    "a_recurrence_along_records": lambda h, b, net: net.along_records(b["t"])[0].pow(2).mean(),
    "attention_along_records": lambda h, b, net: (
        functional.scaled_dot_product_attention(*[net.linear(b["t"]).transpose(0, 1)] * 3).pow(2).mean()
    ),
    "a_convolution_over_records": lambda h, b, net: net.conv(h.t()[None]).pow(2).mean(),
    "distances_of_pairs": lambda h, b, net: torch.cdist(h, h.detach() + 1).mean(),
    "the_first_of_smoothed_losses": lambda h, b, net: functional.cross_entropy(
        net.head(h), b["y"], label_smoothing=0.1, reduce=False
    )[0],
    "ignored_targets": lambda h, b, net: functional.cross_entropy(
        net.head(b["t"]).flatten(0, 1), b["tokens"].flatten(), ignore_index=0
    ),
    # gradients
    "a_backward_pass_that_mixes": lambda h, b, net: MixedBackward.apply(h).exp().mean(),
    # kinds of tensors
    "a_sparse_matrix": lambda h, b, net: torch.sparse.mm(torch.ones(R, R).to_sparse(), h).exp().mean(),
    "a_deep_copy": lambda h, b, net: (h * copy.deepcopy(b["x"]).flip(0)).mean(),
    "a_subclass": lambda h, b, net: (h * h.as_subclass(Wrapped).flip(0)).mean().as_subclass(Tensor),
    "an_exchanged_tensor": lambda h, b, net: (h * torch.from_dlpack(b["x"]).flip(0)).mean(),
    "an_array": lambda h, b, net: (h * torch.from_numpy(np.flip(b["x"].numpy(), 0).copy())).mean(),
    "a_list": lambda h, b, net: (h * torch.tensor(b["x"].tolist()).flip(0)).mean(),
    "a_tensor_of_floats": lambda h, b, net: (h * torch.FloatTensor([row[0] for row in b["x"]])[:, None]).mean(),
    "an_item": lambda h, b, net: (h * b["x"].sum().item()).mean(),
    "a_foreach_operator": lambda h, b, net: torch.stack(torch._foreach_add([*h], [*h.flip(0)])).exp().mean(),
    "a_custom_operator": lambda h, b, net: (torch.ops.dpbench_test.centered(h.detach()) * net.shift).exp().mean(),
    "a_condition": lambda h, b, net: (net.shift * torch.cond(h.sum() > 0, torch.sin, torch.cos, (h.detach(),))).mean(),
    "a_compiled_function": lambda h, b, net: COMPILED(b["x"], net.linear.weight),
}


def coupled(step: Step) -> Step:
    COUPLED[step.__name__] = step
    return step


@coupled
def written_through_a_view(h: Tensor, batch: Batch, net: Net) -> Tensor:
    h = h.clone()
    h[1:] += h[:-1].detach().clone()
    return h.pow(2).mean()


@coupled
def an_output_in_part(h: Tensor, batch: Batch, net: Net) -> Tensor:
    buffer = torch.zeros(R + 1, C)
    torch.exp(h.detach(), out=buffer[1:])
    return (buffer[:R] * h).mean()


@coupled
def seeded_draws(h: Tensor, batch: Batch, net: Net) -> Tensor:
    torch.manual_seed(3)
    return (h + torch.randn(R, C)).exp().mean()


@coupled
def a_hook_that_mixes(h: Tensor, batch: Batch, net: Net) -> Tensor:
    h.register_hook(lambda gradient: gradient / gradient.norm())
    return h.exp().mean()


@coupled
def a_hook_after_accumulation(h: Tensor, batch: Batch, net: Net) -> Tensor:
    net.linear.weight.register_post_accumulate_grad_hook(lambda parameter: print(parameter.grad.norm()))
    return h.exp().mean()


@coupled
def saved_tensors_that_mix(h: Tensor, batch: Batch, net: Net) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.flip(0)):
        return h.exp().mean()


@coupled
def a_full_hook_that_mixes(h: Tensor, batch: Batch, net: Net) -> Tensor:
    handle = net.head.register_full_backward_hook(lambda layer, gi, go: (centered(gi[0]),))
    loss = net.head(h).exp().mean()
    handle.remove()
    return loss


@coupled
def a_copied_storage(h: Tensor, batch: Batch, net: Net) -> Tensor:
    storage = torch.UntypedStorage(R * C * 4)
    storage.copy_(batch["x"].untyped_storage())
    return (h * torch.empty(0).set_(storage, 0, (R, C), (C, 1)).flip(0)).mean()


@torch.library.custom_op("dpbench_test::centered", mutates_args=())
def _custom_centered(x: Tensor) -> Tensor:
    return x - x.mean(0)


@coupled
def a_loss_that_unseen_code_writes(h: Tensor, batch: Batch, net: Net) -> Tensor:
    loss = torch.empty(())
    with torch._C._DisableTorchDispatch():
        loss.copy_(h.detach().var(0).mean())
    return loss


# ------------------------------------------------------------------------------------------- memory of batches


def kept(net: Net, value: Tensor) -> Tensor:
    """What was kept of the first batch."""
    net.kept.append(value)
    return net.kept[0]


def a_buffer_of_an_earlier_batch(h: Tensor, batch: Batch, net: Net) -> Tensor:
    loss = (h - net.seen).pow(2).mean()
    net.seen = h.detach().mean(0)
    return loss


KEPT: dict[str, Step] = {
    "a_derived_earlier_batch": lambda h, b, net: (h * kept(net, b["x"].mean(0)).exp()).mean(),
    "noise_of_an_earlier_batch_in_place": lambda h, b, net: (h + kept(net, torch.randn(R, C)).mul_(0.9)).exp().mean(),
    "a_buffer_of_an_earlier_batch": a_buffer_of_an_earlier_batch,
}


# ------------------------------------------------------------------------------------------- healthy steps


def log_probabilities(batch: Batch, net: Net) -> Tensor:
    """Of classes, (T, R, CLASSES)."""
    return net.head(batch["t"]).log_softmax(-1).transpose(0, 1)


INDEPENDENT: dict[str, Step] = {
    "alignments_of_lengths": lambda h, b, net: functional.ctc_loss(
        log_probabilities(b, net), b["tokens"][:, :3].clamp(min=1), torch.full((R,), T), torch.full((R,), 3)
    ),
    "an_instance_norm": lambda h, b, net: net.conv(functional.instance_norm(b["t"].transpose(1, 2))).pow(2).mean(),
    "a_frozen_batch_norm": lambda h, b, net: net.frozen_norm(h).pow(2).mean(),
    "a_checkpoint": lambda h, b, net: checkpoint(net.head, h, use_reentrant=False).logsumexp(-1).mean(),
}


def independent(step: Step) -> Step:
    INDEPENDENT[step.__name__] = step
    return step


@independent
def diffusion(h: Tensor, batch: Batch, net: Net) -> Tensor:
    alphas = torch.linspace(0.99, 0.1, 10).cumprod(0)
    a = alphas[torch.randint(0, 10, (R,))][:, None]
    noise = torch.randn_like(batch["x"])
    return functional.mse_loss(net.linear(a.sqrt() * batch["x"] + (1 - a).sqrt() * noise), noise)


@independent
def distillation(h: Tensor, batch: Batch, net: Net) -> Tensor:
    with torch.no_grad():
        weight = 0.99 * net.head.weight.detach().clone() + 0.01 * net.head.weight
        teacher = functional.linear(batch["x"], weight).softmax(-1)
    return functional.kl_div(net.head(batch["x"]).log_softmax(-1), teacher, reduction="batchmean")


@independent
def augmented_images(h: Tensor, batch: Batch, net: Net) -> Tensor:
    image = torch.where(torch.rand(R, 1, 1, 1) < 0.5, batch["image"].flip(-1), batch["image"])
    angle = torch.rand(R) * 0.5
    theta = torch.stack([angle.cos(), -angle.sin(), angle, angle.sin(), angle.cos(), angle], 1).view(R, 2, 3)
    image = functional.grid_sample(image, functional.affine_grid(theta, list(image.shape), align_corners=False))
    return (image.flatten(1)[:, :C] @ net.linear.weight).tanh().mean()


@independent
def a_vision_transformer(h: Tensor, batch: Batch, net: Net) -> Tensor:
    patches = functional.unfold(batch["image"], 4, stride=4).transpose(1, 2)[..., :C]
    tokens = torch.cat([net.shift.expand(R, 1, C), net.linear(patches)], 1)
    tokens = functional.layer_norm(tokens + torch.arange(5.0)[:, None], (C,))
    out = functional.scaled_dot_product_attention(tokens, tokens, tokens)
    return functional.cross_entropy(net.head(out[:, 0]), batch["y"])


@independent
def written_positions(h: Tensor, batch: Batch, net: Net) -> Tensor:
    positions = torch.empty(R, T)
    positions[:] = torch.arange(T)
    return (net.linear(batch["t"]) * positions[..., None]).tanh().mean()


# ------------------------------------------------------------------------------------------- false alarms


def physics(h: Tensor, batch: Batch, net: Net) -> Tensor:
    x = batch["x"].requires_grad_()
    u = net.head(torch.tanh(net.linear(x)))[:, 0]
    (du,) = torch.autograd.grad(u.sum(), [x], create_graph=True)
    (ddu,) = torch.autograd.grad(du[:, 0].sum(), [x], create_graph=True)
    return (ddu[:, 0] + u.sin()).pow(2).mean()


def mapped_gradients(h: Tensor, batch: Batch, net: Net) -> Tensor:
    energy = torch.func.grad(lambda x: torch.tanh(net.linear.weight @ x).sum())
    return torch.func.vmap(energy)(batch["x"]).pow(2).sum(-1).mean()


FALSE_ALARMS: dict[str, Step] = {
    "lengths in a list, which C++ writes to a tensor": lambda h, b, net: functional.ctc_loss(
        log_probabilities(b, net), b["tokens"][:, :2].clamp(min=1), [T] * R, [2] * R
    ),
    "a sum over records, one by one": lambda h, b, net: (
        torch.as_tensor(sum(net.linear(row).pow(2).mean() for row in b["t"])) / R
    ),
    "a mapped gradient": mapped_gradients,
    "an equation of gradients": physics,
}


def a_net(name: str = "") -> Net:
    """A network of layers that the engine takes, and those that a step is about."""
    torch.manual_seed(0)
    net = Net()
    if name != "a_batch_norm":
        del net.batch_norm
    return net


@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.filterwarnings("ignore")
def test_a_coupled_step_is_not_separable(name: str) -> None:
    assert not verdict_of(COUPLED[name], a_net(name)).is_separable


@pytest.mark.parametrize("name", KEPT)
def test_an_earlier_batch_is_not_separable(name: str) -> None:
    net = a_net()
    verdict_of(KEPT[name], net)
    for seed in (1, 2, 3):
        assert not verdict_of(KEPT[name], net, seed).is_separable


@pytest.mark.parametrize("name", FALSE_ALARMS)
def test_a_false_alarm(name: str) -> None:
    assert verdict_of(FALSE_ALARMS[name], a_net()).kind == "mixed"


@pytest.mark.parametrize("name", INDEPENDENT)
@pytest.mark.filterwarnings("ignore")
def test_a_healthy_step_is_separable(name: str) -> None:
    assert verdict_of(INDEPENDENT[name], a_net()).is_separable


PAIRS: dict[str, Callable[[list[tuple[Tensor, Tensor]], Net], Any]] = {
    "in their order": lambda pairs, net: torch.stack([(net.linear(a) * b).sum() for a, b in pairs]).mean(),
    "beside a number": lambda pairs, net: (centered(net.linear(torch.stack([a for a, _ in pairs]))).pow(2).mean(), 1),
}


@pytest.mark.parametrize("name", PAIRS)
def test_lists_of_records(name: str) -> None:
    net = a_net()
    batch = [(torch.randn(C), torch.randn(C)) for _ in range(R)]
    _, verdict = verdict_of_step(lambda pairs: PAIRS[name](pairs, net), batch, R, net)
    assert verdict.kind == "reads"
