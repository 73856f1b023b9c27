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
from torch.utils.dlpack import to_dlpack

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
        self.running_norm = nn.InstanceNorm1d(C, track_running_stats=True)
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
    "flipped_rows": lambda h, b, net: (h * h.flip(0)).mean(),
    "windows_over_records": lambda h, b, net: h.unfold(0, 2, 1).prod(-1).mean(),
    "a_transposed_square": lambda h, b, net: (b["square"] * b["square"].t() * net.shift[0]).mean(),
    "folded_and_unfolded_wrongly": lambda h, b, net: net.linear(b["t"]).view(T, R, C).softmax(0).pow(2).mean(),
    "bytes_of_pairs": lambda h, b, net: (h.t() * b["x"].t().contiguous().view(torch.float64).abs()[:, :1]).mean(),
    # indices
    "a_table_by_place": lambda h, b, net: (net.by_place[torch.arange(R), b["y"] % C] * h[:, 0]).mean(),
    "places_in_reverse": lambda h, b, net: (h * h[torch.arange(R - 1, -1, -1)]).mean(),
    "targets_that_are_records": lambda h, b, net: functional.cross_entropy(h @ h.t(), torch.arange(R)),
    "gathered_along_records": lambda h, b, net: (h * h.gather(0, (b["y"] % R)[:, None].expand(R, C))).mean(),
    "scattered_along_records": lambda h, b, net: (
        h * torch.zeros(R, C).scatter_add(0, (b["y"] % R)[:, None].expand(R, C), h)
    ).mean(),
    "put_at_places": lambda h, b, net: (
        torch.zeros(R, C).index_put((torch.tensor([0, 0, 1, 2]),), h, accumulate=True).exp().mean()
    ),
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
    "a_rounded_mean": lambda h, b, net: torch.div(h.mean(), 0.25, rounding_mode="floor"),
    "a_weighted_mean": lambda h, b, net: h.sum() / b["x"].exp().sum(),
    # layers
    "a_batch_norm": lambda h, b, net: net.batch_norm(h).exp().mean(),
    "running_numbers_of_an_instance_norm": lambda h, b, net: (
        (net.running_norm(b["t"].transpose(1, 2)) * net.running_norm.running_mean[:, None]).exp().mean()
    ),
    "a_recurrence_along_records": lambda h, b, net: net.along_records(b["t"])[0].pow(2).mean(),
    "attention_along_records": lambda h, b, net: (
        functional.scaled_dot_product_attention(*[net.linear(b["t"]).transpose(0, 1)] * 3).pow(2).mean()
    ),
    "a_convolution_over_records": lambda h, b, net: net.conv(h.t()[None]).pow(2).mean(),
    "an_einsum_of_pairs": lambda h, b, net: torch.einsum("ic,jc->ij", h, h).logsumexp(1).mean(),
    "distances_of_pairs": lambda h, b, net: torch.cdist(h, h.detach() + 1).mean(),
    "smoothed_classes_that_are_records": lambda h, b, net: functional.cross_entropy(
        h[:, 0], b["x"].softmax(1)[:, 0], label_smoothing=0.1
    ),
    "the_first_of_smoothed_losses": lambda h, b, net: functional.cross_entropy(
        net.head(h), b["y"], label_smoothing=0.1, reduce=False
    )[0],
    "ignored_targets": lambda h, b, net: functional.cross_entropy(
        net.head(b["t"]).flatten(0, 1), b["tokens"].flatten(), ignore_index=0
    ),
    # gradients
    "a_backward_pass_that_mixes": lambda h, b, net: MixedBackward.apply(h).exp().mean(),
    "a_mapped_function_of_pairs": lambda h, b, net: torch.func.vmap(lambda row: (row * h).sum())(h).exp().mean(),
    "a_tangent_of_pairs": lambda h, b, net: torch.func.jvp(centered, (h,), (h * 2,))[1].pow(2).mean(),
    "a_checkpoint_that_centers": lambda h, b, net: checkpoint(centered, h, use_reentrant=False).exp().mean(),
    "a_reentrant_checkpoint_that_centers": lambda h, b, net: checkpoint(centered, h, use_reentrant=True).exp().mean(),
    # kinds of tensors
    "a_spectrum_over_records": lambda h, b, net: torch.fft.fft(h, dim=0).abs().mean(),
    "counts_of_labels": lambda h, b, net: (h / torch.bincount(b["y"], minlength=CLASSES)[b["y"], None]).mean(),
    "a_sparse_matrix": lambda h, b, net: torch.sparse.mm(torch.ones(R, R).to_sparse(), h).exp().mean(),
    "a_nested_tensor": lambda h, b, net: (
        h * torch.nested.nested_tensor([b["x"][:1], b["x"][1:]]).to_padded_tensor(0.0)[0, :1]
    ).mean(),
    "a_deep_copy": lambda h, b, net: (h * copy.deepcopy(b["x"]).flip(0)).mean(),
    "a_subclass": lambda h, b, net: (h * h.as_subclass(Wrapped).flip(0)).mean().as_subclass(Tensor),
    "a_storage_as_another_tensor": lambda h, b, net: (
        h * torch.empty(0).set_(b["x"].untyped_storage(), 0, (C, R), (R, 1)).t()
    ).mean(),
    "a_capsule": lambda h, b, net: (h * torch.from_dlpack(to_dlpack(b["x"])).flip(0)).mean(),
    "an_exchanged_tensor": lambda h, b, net: (h * torch.from_dlpack(b["x"]).flip(0)).mean(),
    "an_array": lambda h, b, net: (h * torch.from_numpy(np.flip(b["x"].numpy(), 0).copy())).mean(),
    "a_list": lambda h, b, net: (h * torch.tensor(b["x"].tolist()).flip(0)).mean(),
    "a_new_tensor": lambda h, b, net: (h * h.new_tensor([row[0] for row in b["x"]]).flip(0)[:, None]).mean(),
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
def copied_to_another_layout(h: Tensor, batch: Batch, net: Net) -> Tensor:
    buffer = torch.zeros(C, R)
    buffer.view(-1).copy_(h.reshape(-1))
    return (buffer[:1] * h[:, :1].t()).mean()


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
def a_running_state(h: Tensor, batch: Batch, net: Net) -> Tensor:
    states = [torch.zeros(C)]
    for row in h:
        states.append(0.5 * states[-1] + row)
    return torch.stack(states).pow(2).mean()


@coupled
def a_gradient_through_pairs(h: Tensor, batch: Batch, net: Net) -> Tensor:
    x = batch["x"].requires_grad_()
    (gradient,) = torch.autograd.grad((net.linear(x).sum(0) ** 2).sum(), [x], create_graph=True)
    return gradient.pow(2).mean()


@coupled
def a_hook_that_mixes(h: Tensor, batch: Batch, net: Net) -> Tensor:
    h.register_hook(lambda gradient: gradient / gradient.norm())
    return h.exp().mean()


@coupled
def a_hook_on_several(h: Tensor, batch: Batch, net: Net) -> Tensor:
    torch.autograd.graph.register_multi_grad_hook([h], lambda gradients: gradients[0].mul_(gradients[0].norm()))
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


@coupled
def replaced_data(h: Tensor, batch: Batch, net: Net) -> Tensor:
    other = torch.zeros(R, C)
    other.data = batch["x"]
    return (h * other.flip(0)).mean()


@coupled
def a_resized_tensor(h: Tensor, batch: Batch, net: Net) -> Tensor:
    x = batch["x"].clone()
    x.resize_(C, R)
    return (h * x.t()).mean()


@coupled
def a_function_of_elements(h: Tensor, batch: Batch, net: Net) -> Tensor:
    seen = [0.0]

    def cumulate(value: float) -> float:
        seen[0] += value
        return seen[0]

    return (h * batch["x"].clone().apply_(cumulate)).mean()


@torch.library.custom_op("dpbench_test::centered", mutates_args=())
def _custom_centered(x: Tensor) -> Tensor:
    return x - x.mean(0)


@torch.library.custom_op("dpbench_test::count_up", mutates_args=("x",))
def _custom_count(x: Tensor) -> None:
    x.copy_(torch.arange(x.numel()).view_as(x))


@coupled
def a_custom_operator_that_writes(h: Tensor, batch: Batch, net: Net) -> Tensor:
    weight = torch.zeros(R, 1)
    torch.ops.dpbench_test.count_up(weight)
    return (h * weight).mean()


@coupled
def a_condition_that_sees_records(h: Tensor, batch: Batch, net: Net) -> Tensor:
    x = batch["x"]
    weight = net.shift.detach()
    weight = torch.cond(weight.sum() > -1e9, lambda w: w * x.mean(0), lambda w: w * x.sum(0), (weight,))
    return (h * weight).mean()


@coupled
def a_loss_that_unseen_code_writes(h: Tensor, batch: Batch, net: Net) -> Tensor:
    loss = torch.empty(())
    with torch._C._DisableTorchDispatch():
        loss.copy_(h.detach().var(0).mean())
    return loss


@coupled
def a_buffer_that_keeps(h: Tensor, batch: Batch, net: Net) -> Tensor:
    net.seen.mul_(0.9).add_(h.detach().mean(0))
    return (h - net.seen).pow(2).mean()


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
    "an_earlier_batch": lambda h, b, net: (h * kept(net, h.detach())).mean(),
    "a_derived_earlier_batch": lambda h, b, net: (h * kept(net, b["x"].mean(0)).exp()).mean(),
    "noise_of_an_earlier_batch": lambda h, b, net: (h + kept(net, torch.randn(R, C)) * 1.0).exp().mean(),
    "noise_of_an_earlier_batch_in_place": lambda h, b, net: (h + kept(net, torch.randn(R, C)).mul_(0.9)).exp().mean(),
    "a_buffer_of_an_earlier_batch": a_buffer_of_an_earlier_batch,
}


# ------------------------------------------------------------------------------------------- healthy steps


def log_probabilities(batch: Batch, net: Net) -> Tensor:
    """Of classes, (T, R, CLASSES)."""
    return net.head(batch["t"]).log_softmax(-1).transpose(0, 1)


INDEPENDENT: dict[str, Step] = {
    "label_smoothing": lambda h, b, net: functional.cross_entropy(net.head(h), b["y"], label_smoothing=0.1),
    "alignments_of_lengths": lambda h, b, net: functional.ctc_loss(
        log_probabilities(b, net), b["tokens"][:, :3].clamp(min=1), torch.full((R,), T), torch.full((R,), 3)
    ),
    "a_regularized_loss": lambda h, b, net: (
        functional.mse_loss(h, b["x"].flip(1)) + 1e-3 * sum(p.pow(2).sum() for p in net.parameters())
    ),
    "regression_of_quantiles": lambda h, b, net: (
        torch.maximum(torch.linspace(0.1, 0.9, CLASSES) * (error := net.head(h)), error * -0.1).sum(-1).mean()
    ),
    "integrals_along_a_ray": lambda h, b, net: (
        (torch.exp(-torch.cumsum(functional.softplus(net.linear(b["t"])), 1)) * b["t"].sigmoid()).sum(1).mean()
    ),
    "an_instance_norm": lambda h, b, net: net.conv(functional.instance_norm(b["t"].transpose(1, 2))).pow(2).mean(),
    "a_frozen_batch_norm": lambda h, b, net: net.frozen_norm(h).pow(2).mean(),
    "a_spectrum": lambda h, b, net: torch.log1p(torch.fft.rfft(net.linear(b["t"]), dim=1).abs()).mean(),
    "a_checkpoint": lambda h, b, net: checkpoint(net.head, h, use_reentrant=False).logsumexp(-1).mean(),
}


def independent(step: Step) -> Step:
    INDEPENDENT[step.__name__] = step
    return step


@independent
def contrast_within_a_record(h: Tensor, batch: Batch, net: Net) -> Tensor:
    z = functional.normalize(net.linear(batch["t"]), dim=-1)
    logits = z @ z.transpose(1, 2) / 0.1
    targets = torch.arange(T).roll(1).expand(R, T)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@independent
def a_masked_language_model(h: Tensor, batch: Batch, net: Net) -> Tensor:
    is_masked = torch.zeros(R, T, dtype=torch.bool)
    is_masked[:, 1::3] = True
    logits = net.head(net.table(batch["tokens"].masked_fill(is_masked, 0)))
    targets = batch["tokens"].masked_fill(~is_masked, -100)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@independent
def diffusion(h: Tensor, batch: Batch, net: Net) -> Tensor:
    alphas = torch.linspace(0.99, 0.1, 10).cumprod(0)
    a = alphas[torch.randint(0, 10, (R,))][:, None]
    noise = torch.randn_like(batch["x"])
    return functional.mse_loss(net.linear(a.sqrt() * batch["x"] + (1 - a).sqrt() * noise), noise)


@independent
def an_autoencoder_with_a_distribution(h: Tensor, batch: Batch, net: Net) -> Tensor:
    posterior = torch.distributions.Normal(h, functional.softplus(h) + 0.1)
    prior = torch.distributions.Normal(torch.zeros(C), torch.ones(C))
    kl = torch.distributions.kl_divergence(posterior, prior).sum(-1)
    return (functional.mse_loss(net.linear(posterior.rsample()), batch["x"], reduction="none").sum(-1) + kl).mean()


@independent
def distillation(h: Tensor, batch: Batch, net: Net) -> Tensor:
    with torch.no_grad():
        weight = 0.99 * net.head.weight.detach().clone() + 0.01 * net.head.weight
        teacher = functional.linear(batch["x"], weight).softmax(-1)
    return functional.kl_div(net.head(batch["x"]).log_softmax(-1), teacher, reduction="batchmean")


@independent
def biased_attention(h: Tensor, batch: Batch, net: Net) -> Tensor:
    q = functional.pad(net.linear(batch["t"]), (0, 1)).view(R, T, HEADS, 2).transpose(1, 2)
    distance = -(torch.arange(T)[None, :] - torch.arange(T)[:, None]).abs()
    scores = q @ q.transpose(-1, -2) + torch.tensor([0.5, 0.25]).view(1, HEADS, 1, 1) * distance
    scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
    return (scores.softmax(-1) @ q).pow(2).mean()


@independent
def the_best_experts(h: Tensor, batch: Batch, net: Net) -> Tensor:
    scores, chosen = net.head(h).topk(2, -1)
    return ((net.table.weight[chosen] * h[:, None]).sum(-1) * scores.softmax(-1)).sum(-1).mean()


@independent
def dense_graphs(h: Tensor, batch: Batch, net: Net) -> Tensor:
    edges = torch.sigmoid(batch["t"] @ batch["t"].transpose(1, 2)) + torch.eye(T)
    edges = edges.sum(-1).rsqrt()[:, :, None] * edges
    return net.head(torch.relu(edges @ net.linear(batch["t"])).mean(1)).logsumexp(-1).mean()


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
def quantized_vectors(h: Tensor, batch: Batch, net: Net) -> Tensor:
    z = net.linear(batch["t"])
    q = net.table(torch.cdist(z.flatten(0, 1), net.table.weight).argmin(-1)).view_as(z)
    return (z + (q - z).detach() - batch["t"]).pow(2).mean() + (q - z.detach()).pow(2).mean()


@independent
def evidence_of_a_policy(h: Tensor, batch: Batch, net: Net) -> Tensor:
    logits = net.head(h).log_softmax(-1)
    chosen = logits.gather(1, torch.multinomial(logits.exp(), 1))[:, 0]
    ratio = (chosen - chosen.detach()).exp()
    return -torch.min(ratio * batch["x"].sum(1), ratio.clamp(0.8, 1.2) * batch["x"].sum(1)).mean()


@independent
def preferences(h: Tensor, batch: Batch, net: Net) -> Tensor:
    likelihood = net.head(batch["t"]).log_softmax(-1).gather(2, batch["tokens"][:, :, None])[..., 0]
    return -functional.logsigmoid(0.1 * (likelihood[:, :3].sum(1) - likelihood[:, 3:].sum(1))).mean()


@independent
def written_positions(h: Tensor, batch: Batch, net: Net) -> Tensor:
    positions = torch.empty(R, T)
    positions[:] = torch.arange(T)
    return (net.linear(batch["t"]) * positions[..., None]).tanh().mean()


# ------------------------------------------------------------------------------------------- false alarms


def a_loop_that_fills_rows(h: Tensor, batch: Batch, net: Net) -> Tensor:
    filled = []
    for record in batch["t"]:
        row = record.clone()
        row[:, 1] *= 2
        filled.append(net.linear(row).max(0).values)
    return torch.stack(filled).mean()


def a_penalty_of_gradients(h: Tensor, batch: Batch, net: Net) -> Tensor:
    x = batch["x"].detach().requires_grad_()
    (gradient,) = torch.autograd.grad(torch.tanh(net.linear(x)).sum(), [x], create_graph=True)
    return (gradient.norm(dim=1) - 1).pow(2).mean()


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
    "records one by one, written to in part": a_loop_that_fills_rows,
    "a gradient in the loss, of layers that are not linear in their weights": a_penalty_of_gradients,
    "a mapped gradient": mapped_gradients,
    "an equation of gradients": physics,
    "a reentrant checkpoint": lambda h, b, net: (
        checkpoint(net.head, b["x"].requires_grad_(), use_reentrant=True).logsumexp(-1).mean()
    ),
}


def a_net(name: str = "") -> Net:
    """A network of layers that the engine takes, and those that a step is about."""
    torch.manual_seed(0)
    net = Net()
    if name != "a_batch_norm":
        del net.batch_norm
    if name != "running_numbers_of_an_instance_norm":
        del net.running_norm
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


def test_a_hook_without_parameters() -> None:
    def step(batch: Batch) -> Tensor:
        h = batch["x"].requires_grad_() * 2
        h.register_hook(lambda gradient: gradient)
        return h.mean()

    _, verdict = verdict_of_step(step, a_batch(), R, nn.Linear(1, 1))
    assert verdict.is_separable
