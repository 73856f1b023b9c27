"""Steps that couple records are never called separable; healthy steps of current research are."""

from __future__ import annotations

import copy
import inspect
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
        self.classify = nn.Linear(CLASSES, 1)
        self.by_place = nn.Parameter(torch.randn(R, C))
        self.shift = nn.Parameter(torch.randn(C))
        self.table = nn.Embedding(CLASSES, C)
        self.norm = nn.BatchNorm1d(C)
        self.frozen_norm = nn.BatchNorm1d(C).eval()
        self.instance_norm = nn.InstanceNorm1d(C, track_running_stats=True)
        self.rnn = nn.GRU(C, C, batch_first=True)
        self.along_records = nn.GRU(C, C)
        self.conv = nn.Conv1d(C, C, 3, padding=1)
        self.bilinear = nn.Bilinear(C, C, C)
        self.attention = nn.MultiheadAttention(C * HEADS, HEADS, batch_first=True)
        self.register_buffer("seen", torch.zeros(C))
        self.kept: list[Any] = []


Step = Callable[[Batch, Net], Tensor]
COUPLED: list[Step] = []
INDEPENDENT: list[Step] = []


def coupled(step: Step) -> Step:
    COUPLED.append(step)
    return step


def independent(step: Step) -> Step:
    INDEPENDENT.append(step)
    return step


def rows(batch: Batch, net: Net) -> Tensor:
    """A row of each record, (R, C)."""
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
    _, verdict = verdict_of_step(lambda batch: step(batch, net), a_batch(seed), R, net)
    return verdict


# ------------------------------------------------------------------------------------------- views and strides


@coupled
def overlapping_rows(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    return h.as_strided((R, C), (C - 1, 1)).exp().mean()


@coupled
def a_shifted_view(batch: Batch, net: Net) -> Tensor:
    h = torch.cat([rows(batch, net), torch.zeros(R, C)])
    return (h[1 : R + 1] * h[:R]).mean()


@coupled
def flipped_rows(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    return (h * h.flip(0)).mean()


@coupled
def rolled_rows(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    return (h * h.roll(1, 0)).mean()


@coupled
def windows_over_records(batch: Batch, net: Net) -> Tensor:
    return rows(batch, net).unfold(0, 2, 1).prod(-1).mean()


@coupled
def a_transposed_square(batch: Batch, net: Net) -> Tensor:
    s = batch["square"] * net.shift.sum()
    return (s * s.t()).mean()


@coupled
def a_diagonal_of_squares(batch: Batch, net: Net) -> Tensor:
    return (batch["square"] * net.shift.sum()).diagonal().exp().mean()


@coupled
def written_through_a_view(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net).clone()
    h[1:] += h[:-1].detach().clone()
    return h.pow(2).mean()


@coupled
def copied_to_another_layout(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    buffer = torch.zeros(C, R)
    buffer.view(-1).copy_(h.reshape(-1))
    return (buffer[:1] * h[:, :1].t()).mean()


@coupled
def an_output_of_another_layout(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    buffer = torch.empty(R * C)
    torch.exp(h.detach().reshape(-1), out=buffer)
    return (buffer.view(C, R).t() * h).mean()


@coupled
def an_output_in_part(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    buffer = torch.zeros(R + 1, C)
    torch.exp(h.detach(), out=buffer[1:])
    return (buffer[:R] * h).mean()


@coupled
def folded_and_unfolded_wrongly(batch: Batch, net: Net) -> Tensor:
    flat = net.linear(batch["t"]).reshape(R * T, C)
    return flat.view(T, R, C).softmax(0).pow(2).mean()


@coupled
def bytes_of_pairs(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    pairs = h.detach().t().contiguous().view(torch.float64)
    return (h.t() * pairs.isnan().logical_not().float().repeat_interleave(2, 1) * pairs.view(torch.float32)).mean() + (
        h.t() * pairs.abs().clamp(0, 1).float().repeat_interleave(2, 1)
    ).mean()


# ------------------------------------------------------------------------------------------- indices


@coupled
def a_table_by_place(batch: Batch, net: Net) -> Tensor:
    return (net.by_place[torch.arange(R), batch["y"] % C] * rows(batch, net)[:, 0]).mean()


@coupled
def a_table_of_places(batch: Batch, net: Net) -> Tensor:
    return (net.table(torch.arange(R)) * rows(batch, net)).mean()


@coupled
def places_in_reverse(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    return (h * h[torch.arange(R - 1, -1, -1)]).mean()


@coupled
def targets_that_are_records(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    return functional.cross_entropy(h @ h.detach().t(), torch.arange(R))


@coupled
def gathered_along_records(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    return (h * h.gather(0, (batch["y"] % R)[:, None].expand(R, C))).mean()


@coupled
def scattered_along_records(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    sums = torch.zeros(R, C).scatter_add(0, (batch["y"] % R)[:, None].expand(R, C), h)
    return (sums * h).mean()


@coupled
def put_at_places(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    buffer = torch.zeros(R, C).index_put((torch.tensor([0, 0, 1, 2]),), h, accumulate=True)
    return buffer.exp().mean()


@coupled
def records_as_a_table(batch: Batch, net: Net) -> Tensor:
    return functional.embedding(batch["y"] % R, rows(batch, net)).exp().mean()


@coupled
def some_records(batch: Batch, net: Net) -> Tensor:
    return rows(batch, net)[: R // 2].mean()


@coupled
def chosen_records(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    return h[h[:, 0] > h[:, 0].median()].mean()


# ------------------------------------------------------------------------------------------- constants by place


@coupled
def weights_by_place(batch: Batch, net: Net) -> Tensor:
    return (rows(batch, net) * torch.linspace(0, 1, R)[:, None]).mean()


@coupled
def a_cumulated_one(batch: Batch, net: Net) -> Tensor:
    return (rows(batch, net) * torch.ones(R).cumsum(0)[:, None]).mean()


@coupled
def a_unit_matrix(batch: Batch, net: Net) -> Tensor:
    return (batch["square"] * net.shift.sum() * torch.eye(R)).exp().mean()


@coupled
def a_triangle(batch: Batch, net: Net) -> Tensor:
    return (batch["square"] * net.shift.sum() * torch.ones(R, R).tril()).exp().mean()


@coupled
def an_interleaved_place(batch: Batch, net: Net) -> Tensor:
    place = torch.arange(R).repeat_interleave(T)[:, None]
    return (net.linear(batch["t"]).reshape(R * T, C) * place).mean()


@coupled
def a_parameter_by_place(batch: Batch, net: Net) -> Tensor:
    return (rows(batch, net) * net.by_place).mean()


@coupled
def a_constant_written_by_place(batch: Batch, net: Net) -> Tensor:
    weight = torch.zeros(R, 1)
    for i in range(R):
        weight[i] = float(i)
    return (rows(batch, net) * weight).mean()


@coupled
def a_constant_written_by_numpy(batch: Batch, net: Net) -> Tensor:
    weight = torch.zeros(R, 1)
    weight.numpy()[:, 0] = np.arange(R)
    return (rows(batch, net) * weight).mean()


@coupled
def a_constant_written_by_foreach(batch: Batch, net: Net) -> Tensor:
    weight = torch.zeros(R, 1)
    torch._foreach_add_(list(weight.unbind()), [float(i) for i in range(R)])
    return (rows(batch, net) * weight).mean()


@coupled
def a_constant_written_by_storage(batch: Batch, net: Net) -> Tensor:
    weight = torch.ones(R, 1)
    weight.untyped_storage()[3] = 0
    return (rows(batch, net) * weight).mean()


@coupled
def a_mask_by_place(batch: Batch, net: Net) -> Tensor:
    q = net.linear(batch["t"])[:, None]
    mask = torch.zeros(R, 1, T, T)
    mask[0] = -1e9
    mask[0, :, :, 0] = 0.0
    return functional.scaled_dot_product_attention(q, q, q, attn_mask=mask).pow(2).mean()


@coupled
def lengths_by_place(batch: Batch, net: Net) -> Tensor:
    log_probabilities = net.head(batch["t"]).log_softmax(-1).transpose(0, 1)
    targets = 1 + batch["tokens"] % (CLASSES - 1)
    losses = functional.ctc_loss(log_probabilities, targets, [T] * R, [1, 2, 3, 1], reduction="none")
    return losses.mean()


# ------------------------------------------------------------------------------------------- loops


@coupled
def a_loop_with_an_element_of_its_place(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    return torch.stack([h[i].exp()[i % C] for i in range(R)]).mean()


@coupled
def a_loop_with_numbers(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    return torch.stack([h[i] * torch.tensor(float(i)) for i in range(R)]).mean()


@coupled
def a_loop_with_ranges(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    return torch.stack([h[i] * torch.arange(i, i + C) for i in range(R)]).mean()


@coupled
def a_loop_with_one_argument_first(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    return torch.stack([h[i] - net.shift if i else net.shift - h[i] for i in range(R)]).exp().mean()


@coupled
def a_loop_with_one_part_first(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    parts = [torch.cat([h[i], net.shift]) if i else torch.cat([net.shift, h[i]]) for i in range(R)]
    return net.linear(torch.stack(parts)[:, :C]).exp().mean()


@coupled
def a_loop_over_two_tensors(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    other = h * 2
    return torch.stack([h[0], *(other[i] for i in range(1, R))]).exp().mean()


@coupled
def a_loop_over_new_tensors(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    return torch.stack([(h * float(i))[i] for i in range(R)]).exp().mean()


@coupled
def a_loop_with_noise_by_place(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    return torch.stack([h[i] + i * torch.randn(C) for i in range(R)]).exp().mean()


@coupled
def a_loop_with_several_draws(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    return torch.stack([h[i] + (torch.randn(C) if i else torch.randint(2, 5, (C,))) for i in range(R)]).exp().mean()


@coupled
def a_loop_that_overwrites_by_place(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net).detach()
    made = []
    for i in range(R):
        row = h[i].exp()
        row[i % C] = 0.0
        made.append(row)
    return net.linear(torch.stack(made)).mean()


@coupled
def a_loop_that_overwrites_a_sum(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net).detach().exp()
    total = h[0] + h[1]
    total[0] = 0.0
    for i in range(2, R):
        total = total + h[i]
    return (total * net.shift).sum() / R


@coupled
def a_loop_that_writes_twice(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net).detach().clone()
    written = torch.empty(R, C)
    for i in range(R):
        written[i] = h[i]
    h.mul_(2.0)
    written[0] = h[0]
    return net.linear(written).exp().mean()


@coupled
def a_loop_that_reads_before_it_writes(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net).detach()
    written = torch.zeros(R, C)
    read = []
    for i in range(R):
        if i == 2:
            read.append(written[i].exp())
        written[i] = h[i]
        if i != 2:
            read.append(written[i].exp())
    return net.linear(torch.stack(read)).mean()


@coupled
def a_loop_with_one_of_several_outputs(batch: Batch, net: Net) -> Tensor:
    parts = [x.max(0) for x in net.linear(batch["t"])]
    return torch.stack([part.values if i else part.indices.float() for i, part in enumerate(parts)]).mean()


@coupled
def a_loop_after_a_write(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net).detach().clone()
    first = h[0].exp()
    h[:, 1] = 5.0
    return net.linear(torch.stack([first, *(h[i].exp() for i in range(1, R))])).mean()


@coupled
def a_loop_that_transposes_one(batch: Batch, net: Net) -> Tensor:
    outer = [h[:, None] * net.shift for h in rows(batch, net)]
    return torch.stack([outer[0].t(), *outer[1:]]).matmul(net.shift)[:, 0].exp().mean()


@coupled
def a_running_state(batch: Batch, net: Net) -> Tensor:
    state = torch.zeros(C)
    losses = []
    for h in rows(batch, net):
        state = 0.5 * state + h
        losses.append(state.pow(2).mean())
    return torch.stack(losses).mean()


@coupled
def a_loop_in_another_order(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    return (h * torch.stack([h[i] for i in (1, 0, 2, 3)])).mean()


# ------------------------------------------------------------------------------------------- draws


@coupled
def a_permutation(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    order = torch.randperm(R)
    return (0.5 * h + 0.5 * h[order]).exp().mean()


@coupled
def draws_in_order(batch: Batch, net: Net) -> Tensor:
    return (rows(batch, net) * torch.rand(R, 1).sort(0).values).mean()


@coupled
def normalized_draws(batch: Batch, net: Net) -> Tensor:
    weight = torch.rand(R, 1)
    return (rows(batch, net) * (weight / weight.sum())).mean()


@coupled
def draws_less_the_first(batch: Batch, net: Net) -> Tensor:
    noise = torch.randn(R, C)
    return (rows(batch, net) + (noise - noise[0])).exp().mean()


@coupled
def draws_and_less_the_first(batch: Batch, net: Net) -> Tensor:
    noise = torch.randn(R, C)
    return (rows(batch, net) + noise - noise[:1]).exp().mean()


@coupled
def symmetric_draws(batch: Batch, net: Net) -> Tensor:
    noise = torch.randn(R, R)
    return (batch["square"] * net.shift.sum() + (noise + noise.t())).exp().mean()


@coupled
def draws_with_one_overwritten(batch: Batch, net: Net) -> Tensor:
    noise = torch.rand(R, 1)
    noise[0] = 0.0
    return (rows(batch, net) * noise).mean()


@coupled
def draws_by_chances_of_a_place(batch: Batch, net: Net) -> Tensor:
    chances = torch.linspace(0, 1, R)[:, None].expand(R, C)
    return (rows(batch, net) * torch.zeros(R, C).bernoulli_(chances)).mean()


@coupled
def draws_of_a_seeded_generator(batch: Batch, net: Net) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (rows(batch, net) + torch.randn(R, C, generator=generator)).exp().mean()


@coupled
def seeded_draws(batch: Batch, net: Net) -> Tensor:
    torch.manual_seed(3)
    return (rows(batch, net) + torch.randn(R, C)).exp().mean()


@coupled
def overlapping_draws(batch: Batch, net: Net) -> Tensor:
    return (rows(batch, net) + torch.randn(R * C).as_strided((R, C), (2, 1))).exp().mean()


@coupled
def draws_less_a_filled_mean(batch: Batch, net: Net) -> Tensor:
    noise = torch.randn(R, C)
    return (rows(batch, net) + noise - torch.zeros(R, C).fill_(noise.mean())).exp().mean()


# ------------------------------------------------------------------------------------------- sums used further


@coupled
def centered(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    return (h - h.mean(0)).pow(2).mean()


@coupled
def a_product_with_a_total(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    return (h @ h.sum(0)).mean()


@coupled
def a_total_beside_rows(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    return torch.cat([h, h.mean(0, keepdim=True).expand(R, C)], 1).prod(1).mean()


@coupled
def the_root_of_a_mean(batch: Batch, net: Net) -> Tensor:
    return rows(batch, net).pow(2).mean().sqrt()


@coupled
def a_rounded_mean(batch: Batch, net: Net) -> Tensor:
    mean = rows(batch, net).pow(2).mean()
    return mean + torch.div(mean, 0.25, rounding_mode="floor")


@coupled
def a_weighted_mean(batch: Batch, net: Net) -> Tensor:
    weight = batch["x"][:, 0].exp()
    return (rows(batch, net)[:, 0] * weight).sum() / weight.sum()


@coupled
def a_variance(batch: Batch, net: Net) -> Tensor:
    return rows(batch, net).var(0).mean()


@coupled
def the_hardest(batch: Batch, net: Net) -> Tensor:
    return rows(batch, net).pow(2).sum(1).topk(2).values.mean()


@coupled
def covariances(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    return (h.t() @ h / R - torch.eye(C)).pow(2).sum()


# ------------------------------------------------------------------------------------------- layers


@coupled
def a_batch_norm(batch: Batch, net: Net) -> Tensor:
    return net.norm(rows(batch, net)).exp().mean()


@coupled
def running_numbers_of_an_instance_norm(batch: Batch, net: Net) -> Tensor:
    h = net.instance_norm(batch["t"].transpose(1, 2))
    return (h * net.instance_norm.running_mean[:, None] * net.shift[:, None]).exp().mean()


@coupled
def a_recurrence_along_records(batch: Batch, net: Net) -> Tensor:
    return net.along_records(batch["t"])[0].pow(2).mean()


@coupled
def attention_along_records(batch: Batch, net: Net) -> Tensor:
    h = net.linear(batch["t"]).transpose(0, 1)
    return functional.scaled_dot_product_attention(h, h, h).pow(2).mean()


@coupled
def a_convolution_over_records(batch: Batch, net: Net) -> Tensor:
    return net.conv(rows(batch, net).t()[None]).pow(2).mean()


@coupled
def an_einsum_of_pairs(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    return torch.einsum("ic,jc->ij", h, h).logsumexp(1).mean()


@coupled
def distances_of_pairs(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    return torch.cdist(h, h.detach() + 1).mean()


@coupled
def a_bilinear_form_of_pairs(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    return net.bilinear(h, h.flip(0)).mean()


@coupled
def smoothed_classes_that_are_records(batch: Batch, net: Net) -> Tensor:
    logits = rows(batch, net)[:, 0]
    return functional.cross_entropy(logits, batch["x"].softmax(1)[:, 0], label_smoothing=0.1)


@coupled
def the_first_of_smoothed_losses(batch: Batch, net: Net) -> Tensor:
    losses = functional.cross_entropy(net.head(batch["x"]), batch["y"], label_smoothing=0.1, reduce=False)
    return losses[0]


@coupled
def ignored_targets(batch: Batch, net: Net) -> Tensor:
    tokens = batch["tokens"].clone()
    tokens[tokens == 0] = -100
    return functional.cross_entropy(net.head(batch["t"]).flatten(0, 1), tokens.flatten())


# ------------------------------------------------------------------------------------------- gradients


@coupled
def a_gradient_of_all(batch: Batch, net: Net) -> Tensor:
    loss = rows(batch, net).pow(2).mean()
    (gradient,) = torch.autograd.grad(loss, [net.linear.weight], create_graph=True)
    return loss + gradient.norm()


@coupled
def a_gradient_through_pairs(batch: Batch, net: Net) -> Tensor:
    x = batch["x"].requires_grad_()
    h = torch.tanh(net.linear(x))
    (gradient,) = torch.autograd.grad((h.sum(0) ** 2).sum(), [x], create_graph=True)
    return gradient.pow(2).mean()


class _MixedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient - gradient.mean(0)


class _FirstBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient[:1].expand_as(gradient)


@coupled
def a_backward_pass_that_mixes(batch: Batch, net: Net) -> Tensor:
    return _MixedBackward.apply(rows(batch, net)).exp().mean()


@coupled
def a_backward_pass_of_the_first(batch: Batch, net: Net) -> Tensor:
    return _FirstBackward.apply(batch["x"] + net.shift).exp().mean()


@coupled
def a_hook_that_mixes(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    h.register_hook(lambda gradient: gradient / gradient.norm())
    return h.exp().mean()


@coupled
def a_hook_on_several(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    torch.autograd.graph.register_multi_grad_hook([h], lambda gradients: gradients[0].mul_(gradients[0].norm()))
    return h.exp().mean()


@coupled
def a_hook_after_accumulation(batch: Batch, net: Net) -> Tensor:
    net.linear.weight.register_post_accumulate_grad_hook(lambda parameter: print(parameter.grad.norm()))
    return rows(batch, net).exp().mean()


@coupled
def saved_tensors_that_mix(batch: Batch, net: Net) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.flip(0) if t.shape == (R, C) else t):
        return rows(batch, net).exp().mean()


@coupled
def a_full_hook_that_mixes(batch: Batch, net: Net) -> Tensor:
    handle = net.head.register_full_backward_hook(lambda layer, gi, go: (gi[0] - gi[0].mean(0),))
    loss = net.head(rows(batch, net)).exp().mean()
    handle.remove()
    return loss


@coupled
def a_mapped_function_of_pairs(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    return torch.func.vmap(lambda row: (row * h).sum())(h).exp().mean()


@coupled
def a_mapped_place(batch: Batch, net: Net) -> Tensor:
    return torch.func.vmap(lambda row, i: row * i)(rows(batch, net), torch.arange(R)).exp().mean()


@coupled
def a_functional_gradient_of_pairs(batch: Batch, net: Net) -> Tensor:
    return torch.func.grad(lambda h: (h.sum(0) ** 2).sum())(rows(batch, net)).pow(2).mean()


@coupled
def a_tangent_of_pairs(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    return torch.func.jvp(lambda z: z - z.mean(0), (h,), (h * 2,))[1].pow(2).mean()


@coupled
def a_checkpoint_that_centers(batch: Batch, net: Net) -> Tensor:
    return checkpoint(lambda h: (h - h.mean(0)).pow(2).mean(), rows(batch, net), use_reentrant=False)


@coupled
def a_reentrant_checkpoint_that_centers(batch: Batch, net: Net) -> Tensor:
    return checkpoint(lambda h: (h - h.mean(0)).pow(2).mean(), rows(batch, net), use_reentrant=True)


# ------------------------------------------------------------------------------------------- kinds of tensors


@coupled
def a_spectrum_over_records(batch: Batch, net: Net) -> Tensor:
    return torch.fft.fft(rows(batch, net), dim=0).abs().mean()


@coupled
def any_of_all(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    return (h * (batch["x"] > 1).any()).mean()


@coupled
def counts_of_labels(batch: Batch, net: Net) -> Tensor:
    counts = torch.bincount(batch["y"], minlength=CLASSES)
    return (rows(batch, net)[:, 0] / counts[batch["y"]]).mean()


@coupled
def a_sparse_matrix(batch: Batch, net: Net) -> Tensor:
    graph = torch.ones(R, R).to_sparse()
    return torch.sparse.mm(graph, rows(batch, net)).exp().mean()


@coupled
def a_nested_tensor(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    nested = torch.nested.nested_tensor([h[:1].detach(), h[1:].detach()])
    return (nested.to_padded_tensor(0.0)[0, :1] * h).mean()


@coupled
def a_deep_copy(batch: Batch, net: Net) -> Tensor:
    x = copy.deepcopy(batch["x"])
    return (rows(batch, net) * x.flip(0)).mean()


class _Wrapped(Tensor):
    """A plain subclass."""


@coupled
def a_subclass(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net).as_subclass(_Wrapped)
    return (h * h.flip(0)).mean().as_subclass(Tensor)


@coupled
def a_storage_as_another_tensor(batch: Batch, net: Net) -> Tensor:
    other = torch.empty(0).set_(batch["x"].untyped_storage(), 0, (C, R), (R, 1))
    return (rows(batch, net) * other.t()).mean()


@coupled
def a_copied_storage(batch: Batch, net: Net) -> Tensor:
    storage = torch.UntypedStorage(R * C * 4)
    storage.copy_(batch["x"].untyped_storage())
    other = torch.empty(0).set_(storage, 0, (R, C), (C, 1))
    return (rows(batch, net) * other.flip(0)).mean()


@coupled
def replaced_data(batch: Batch, net: Net) -> Tensor:
    other = torch.zeros(R, C)
    other.data = batch["x"].flip(0)
    return (rows(batch, net) * other).mean()


@coupled
def a_resized_tensor(batch: Batch, net: Net) -> Tensor:
    x = batch["x"].clone()
    x.resize_(C, R)
    return (rows(batch, net) * x.t()).mean()


@coupled
def a_capsule(batch: Batch, net: Net) -> Tensor:
    other = torch.from_dlpack(to_dlpack(batch["x"]))
    return (rows(batch, net) * other.flip(0)).mean()


@coupled
def an_exchanged_tensor(batch: Batch, net: Net) -> Tensor:
    other = torch.from_dlpack(batch["x"])
    return (rows(batch, net) * other.flip(0)).mean()


@coupled
def an_array(batch: Batch, net: Net) -> Tensor:
    other = torch.from_numpy(np.flip(batch["x"].numpy(), 0).copy())
    return (rows(batch, net) * other).mean()


@coupled
def a_list(batch: Batch, net: Net) -> Tensor:
    other = torch.tensor(batch["x"].tolist())
    return (rows(batch, net) * other.flip(0)).mean()


@coupled
def a_new_tensor(batch: Batch, net: Net) -> Tensor:
    other = net.shift.new_tensor([row[0] for row in batch["x"]])
    return (rows(batch, net) * other.flip(0)[:, None]).mean()


@coupled
def a_tensor_of_floats(batch: Batch, net: Net) -> Tensor:
    other = torch.FloatTensor([row[0] for row in batch["x"]])
    return (rows(batch, net) * other.flip(0)[:, None]).mean()


@coupled
def an_item(batch: Batch, net: Net) -> Tensor:
    return (rows(batch, net) * batch["x"].sum().item()).mean()


@coupled
def a_function_of_elements(batch: Batch, net: Net) -> Tensor:
    seen = [0.0]

    def cumulate(value: float) -> float:
        seen[0] += value
        return seen[0]

    return (rows(batch, net) * batch["x"].clone().apply_(cumulate)).mean()


@coupled
def a_foreach_operator(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    sums = torch._foreach_add(list(h.unbind()), list(h.flip(0).unbind()))
    return torch.stack(list(sums)).exp().mean()


@torch.library.custom_op("dpbench_test::centered", mutates_args=())
def _custom_centered(x: Tensor) -> Tensor:
    return x - x.mean(0)


@torch.library.custom_op("dpbench_test::count_up", mutates_args=("x",))
def _custom_count(x: Tensor) -> None:
    x.copy_(torch.arange(x.numel()).view_as(x))


@coupled
def a_custom_operator(batch: Batch, net: Net) -> Tensor:
    return (torch.ops.dpbench_test.centered(rows(batch, net).detach()) * net.shift).exp().mean()


@coupled
def a_custom_operator_that_writes(batch: Batch, net: Net) -> Tensor:
    weight = torch.zeros(R, 1)
    torch.ops.dpbench_test.count_up(weight)
    return (rows(batch, net) * weight).mean()


@coupled
def a_condition(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    chosen = torch.cond(h.sum() > 0, lambda z: z.sin(), lambda z: z.cos(), (h.detach(),))
    return (chosen * net.shift).mean()


@coupled
def a_condition_that_sees_records(batch: Batch, net: Net) -> Tensor:
    x = batch["x"]
    is_true = net.shift.sum() > -1e9
    weight = torch.cond(is_true, lambda w: w * x.mean(0), lambda w: w * x.sum(0), (net.shift.detach(),))
    return (rows(batch, net) * weight).mean()


_COMPILED = torch.compile(lambda x, weight: (x @ weight).tanh().var(0).mean(), backend="aot_eager")


@coupled
def a_compiled_function(batch: Batch, net: Net) -> Tensor:
    return _COMPILED(batch["x"], net.linear.weight)


@coupled
def a_loss_that_unseen_code_writes(batch: Batch, net: Net) -> Tensor:
    loss = torch.empty(())
    with torch._C._DisableTorchDispatch():
        loss.copy_(rows(batch, net).detach().var(0).mean())
    return loss


# ------------------------------------------------------------------------------------------- memory of batches


@coupled
def a_buffer_that_keeps(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    assert isinstance(net.seen, Tensor)
    net.seen.mul_(0.9).add_(h.detach().mean(0))
    return (h - net.seen).pow(2).mean()


def an_earlier_batch(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    net.kept.append(h.detach())
    return (h * net.kept[0]).mean()


def a_derived_earlier_batch(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    net.kept.append(batch["x"].mean(0))
    return (h * net.kept[0].exp()).mean()


def noise_of_an_earlier_batch(batch: Batch, net: Net) -> Tensor:
    net.kept.append(torch.randn(R, C))
    return (rows(batch, net) + net.kept[0] * 1.0).exp().mean()


def noise_of_an_earlier_batch_in_place(batch: Batch, net: Net) -> Tensor:
    net.kept.append(torch.randn(R, C))
    return (rows(batch, net) + net.kept[0].mul_(0.9)).exp().mean()


def a_buffer_of_an_earlier_batch(batch: Batch, net: Net) -> Tensor:
    h = rows(batch, net)
    assert isinstance(net.seen, Tensor)
    loss = (h - net.seen).pow(2).mean()
    net.seen = h.detach().mean(0)
    return loss


KEPT: list[Step] = [
    an_earlier_batch,
    a_derived_earlier_batch,
    noise_of_an_earlier_batch,
    noise_of_an_earlier_batch_in_place,
    a_buffer_of_an_earlier_batch,
]


# ------------------------------------------------------------------------------------------- healthy steps


@independent
def classification(batch: Batch, net: Net) -> Tensor:
    return functional.cross_entropy(net.head(batch["x"]), batch["y"])


@independent
def label_smoothing(batch: Batch, net: Net) -> Tensor:
    return functional.cross_entropy(net.head(batch["x"]), batch["y"], label_smoothing=0.1)


@independent
def a_focal_loss(batch: Batch, net: Net) -> Tensor:
    losses = functional.cross_entropy(net.head(batch["x"]), batch["y"], reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


@independent
def hand_written_smoothing(batch: Batch, net: Net) -> Tensor:
    log_probabilities = net.head(batch["x"]).log_softmax(-1)
    targets = torch.full_like(log_probabilities, 0.1 / CLASSES).scatter_(1, batch["y"][:, None], 0.9)
    return -(targets * log_probabilities).sum(-1).mean()


@independent
def views_of_each_record(batch: Batch, net: Net) -> Tensor:
    views = torch.stack([batch["t"] + 0.1 * torch.randn_like(batch["t"]) for _ in range(2)], 1).mean(2)
    z = functional.normalize(net.linear(views), dim=-1)
    return -(z[:, 0] * z[:, 1].detach()).sum(-1).mean()


@independent
def contrast_within_a_record(batch: Batch, net: Net) -> Tensor:
    z = functional.normalize(net.linear(batch["t"]), dim=-1)
    logits = z @ z.transpose(1, 2) / 0.1
    targets = torch.arange(T).roll(1).expand(R, T)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@independent
def a_masked_language_model(batch: Batch, net: Net) -> Tensor:
    is_masked = torch.zeros(R, T, dtype=torch.bool)
    is_masked[:, 1::3] = True
    h = net.table(batch["tokens"].masked_fill(is_masked, 0))
    targets = batch["tokens"].masked_fill(~is_masked, -100)
    return functional.cross_entropy(net.head(h).flatten(0, 1), targets.flatten())


@independent
def next_tokens(batch: Batch, net: Net) -> Tensor:
    h = net.table(batch["tokens"])
    out, _ = net.rnn(h)
    logits = net.head(out[:, :-1])
    return functional.cross_entropy(logits.reshape(-1, CLASSES), batch["tokens"][:, 1:].reshape(-1))


@independent
def diffusion(batch: Batch, net: Net) -> Tensor:
    alphas = torch.linspace(0.99, 0.1, 10).cumprod(0)
    steps = torch.randint(0, 10, (R,))
    noise = torch.randn_like(batch["x"])
    a = alphas[steps][:, None]
    noised = a.sqrt() * batch["x"] + (1 - a).sqrt() * noise
    return functional.mse_loss(net.linear(noised) * (1 + a), noise)


@independent
def weighted_diffusion(batch: Batch, net: Net) -> Tensor:
    sigma = (torch.randn(R) * 1.2 - 1.2).exp()
    weight = (sigma**2 + 0.25) / (0.5 * sigma) ** 2
    noised = batch["x"] + sigma[:, None] * torch.randn_like(batch["x"])
    return (weight[:, None] * (net.linear(noised) - batch["x"]) ** 2).mean()


@independent
def flow_matching(batch: Batch, net: Net) -> Tensor:
    x1 = batch["x"]
    x0 = torch.randn_like(x1)
    t = torch.rand(R, 1)
    xt = (1 - t) * x0 + t * x1
    frequencies = torch.exp(torch.arange(C) * -0.5)
    v = net.linear(xt + torch.sin(t * frequencies))
    return functional.mse_loss(v, x1 - x0)


@independent
def an_autoencoder_of_distributions(batch: Batch, net: Net) -> Tensor:
    mean = net.linear(batch["x"])
    log_variance = net.linear(batch["x"].tanh())
    z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
    kl = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(1)
    return ((net.linear(z) - batch["x"]).pow(2).sum(1) + kl).mean()


@independent
def an_autoencoder_with_a_distribution(batch: Batch, net: Net) -> Tensor:
    posterior = torch.distributions.Normal(net.linear(batch["x"]), functional.softplus(net.linear(batch["x"])) + 0.1)
    z = posterior.rsample()
    prior = torch.distributions.Normal(torch.zeros(C), torch.ones(C))
    kl = torch.distributions.kl_divergence(posterior, prior).sum(-1)
    return (functional.mse_loss(net.linear(z), batch["x"], reduction="none").sum(-1) + kl).mean()


@independent
def a_masked_autoencoder(batch: Batch, net: Net) -> Tensor:
    order = torch.rand(R, T).argsort(1)
    restored = order.argsort(1)
    kept = order[:, : T // 2]
    h = net.linear(batch["t"].gather(1, kept[:, :, None].expand(-1, -1, C)))
    masked = net.shift.expand(R, T - T // 2, C)
    full = torch.cat([h, masked], 1).gather(1, restored[:, :, None].expand(-1, -1, C))
    mask = torch.ones(R, T)
    mask[:, : T // 2] = 0.0
    mask = mask.gather(1, restored)
    return ((full - batch["t"]).pow(2).mean(-1) * mask).sum(1).div(T - T // 2).mean()


@independent
def distillation(batch: Batch, net: Net) -> Tensor:
    with torch.no_grad():
        weight = 0.99 * net.head.weight.detach().clone() + 0.01 * net.head.weight
        teacher = functional.linear(batch["x"], weight).div(0.5).softmax(-1)
    student = net.head(batch["x"]).log_softmax(-1)
    return functional.kl_div(student, teacher, reduction="batchmean")


@independent
def rotated_positions(batch: Batch, net: Net) -> Tensor:
    h = functional.pad(net.linear(batch["t"]), (0, 1)).view(R, T, HEADS, 2).transpose(1, 2)
    angle = torch.arange(T)[:, None] * torch.tensor([1.0])
    cos, sin = angle.cos(), angle.sin()
    a, b = h.chunk(2, -1)
    q = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    return functional.scaled_dot_product_attention(q, q, h, is_causal=True).pow(2).mean()


@independent
def biased_attention(batch: Batch, net: Net) -> Tensor:
    h = functional.pad(net.linear(batch["t"]), (0, 1)).view(R, T, HEADS, 2).transpose(1, 2)
    slopes = torch.tensor([0.5, 0.25]).view(1, HEADS, 1, 1)
    distance = -(torch.arange(T)[None, :] - torch.arange(T)[:, None]).abs()
    scores = h @ h.transpose(-1, -2) + slopes * distance
    scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
    return (scores.softmax(-1) @ h).pow(2).mean()


@independent
def attention_of_a_layer(batch: Batch, net: Net) -> Tensor:
    h = torch.cat([batch["t"], net.linear(batch["t"])], -1)
    return net.attention(h, h, h, need_weights=False)[0].pow(2).mean()


@independent
def padded_attention(batch: Batch, net: Net) -> Tensor:
    is_pad = batch["tokens"] == 0
    h = net.linear(batch["t"])[:, None]
    mask = torch.zeros(R, 1, 1, T).masked_fill(is_pad[:, None, None], -1e4)
    out = functional.scaled_dot_product_attention(h, h, h, attn_mask=mask)[:, 0]
    kept = (~is_pad).float()[..., None]
    return ((out * kept).sum(1) / kept.sum(1).clamp(min=1)).pow(2).mean()


@independent
def splines(batch: Batch, net: Net) -> Tensor:
    grid = torch.linspace(-2, 2, CLASSES)
    basis = torch.exp(-((batch["x"][..., None] - grid) ** 2))
    return torch.einsum("bck,kc->b", basis, net.head.weight).tanh().mean()


@independent
def low_rank_weights(batch: Batch, net: Net) -> Tensor:
    delta = net.head.weight.t() @ net.head.weight
    return (functional.linear(batch["x"], net.linear.weight.detach() + 0.5 * delta)).logsumexp(-1).mean()


@independent
def dense_experts(batch: Batch, net: Net) -> Tensor:
    gates = net.head(batch["x"]).softmax(-1)
    experts = torch.einsum("bc,ec->be", batch["x"], net.table.weight).tanh()
    return (gates * experts).sum(-1).mean()


@independent
def the_best_experts(batch: Batch, net: Net) -> Tensor:
    scores, chosen = net.head(batch["x"]).topk(2, -1)
    weights = net.table.weight[chosen]
    return ((weights * batch["x"][:, None]).sum(-1) * scores.softmax(-1)).sum(-1).mean()


@independent
def weights_of_each_record(batch: Batch, net: Net) -> Tensor:
    made = torch.einsum("bc,kc->bk", batch["x"], net.table.weight)
    weight = made[:, :C, None] * net.linear(batch["x"])[:, None]
    return torch.bmm(weight, batch["t"].transpose(1, 2)).tanh().mean()


@independent
def a_differential_equation(batch: Batch, net: Net) -> Tensor:
    z = batch["x"]
    for step in range(4):
        k = torch.tanh(net.linear(z) + step / 4)
        z = z + 0.25 * torch.tanh(net.linear(z + 0.125 * k))
    return (z - batch["x"]).pow(2).mean()


def a_penalty_of_gradients(batch: Batch, net: Net) -> Tensor:
    x = batch["x"].detach().requires_grad_()
    out = net.head(torch.tanh(net.linear(x))).sum()
    (gradient,) = torch.autograd.grad(out, [x], create_graph=True)
    return (gradient.norm(dim=1) - 1).pow(2).mean()


@independent
def segmentation(batch: Batch, net: Net) -> Tensor:
    kernel = net.head.weight[:, None, None, :]
    logits = functional.conv2d(batch["image"], kernel, padding=(0, 1))
    targets = (batch["image"][:, 0] > 0).long()
    dice = (logits.softmax(1)[:, 1] * targets).sum((1, 2)) / (targets.sum((1, 2)) + 1)
    return functional.cross_entropy(logits, targets) - dice.mean()


def alignments(batch: Batch, net: Net) -> Tensor:
    log_probabilities = net.head(batch["t"]).log_softmax(-1).transpose(0, 1)
    targets = 1 + batch["tokens"][:, :2] % (CLASSES - 1)
    return functional.ctc_loss(log_probabilities, targets, [T] * R, [2] * R)


@independent
def alignments_of_lengths(batch: Batch, net: Net) -> Tensor:
    log_probabilities = net.head(batch["t"]).log_softmax(-1).transpose(0, 1)
    targets = 1 + batch["tokens"][:, :3] % (CLASSES - 1)
    lengths = torch.full((R,), T)
    return functional.ctc_loss(log_probabilities, targets, lengths, torch.full((R,), 3), zero_infinity=True)


@independent
def sequences_to_sequences(batch: Batch, net: Net) -> Tensor:
    _, state = net.rnn(net.table(batch["tokens"]))
    out, _ = net.rnn(net.table(batch["tokens"].roll(1, 1)), state)
    weights = (out @ net.linear(batch["t"]).transpose(1, 2)).softmax(-1)
    logits = net.head(weights @ batch["t"] + out)
    return functional.cross_entropy(logits.transpose(1, 2), batch["tokens"])


@independent
def dense_graphs(batch: Batch, net: Net) -> Tensor:
    edges = torch.sigmoid(batch["t"] @ batch["t"].transpose(1, 2)) + torch.eye(T)
    degrees = edges.sum(-1).rsqrt()
    normalized = degrees[:, :, None] * edges * degrees[:, None]
    return net.head(torch.relu(normalized @ net.linear(batch["t"])).mean(1)).logsumexp(-1).mean()


@independent
def augmented_images(batch: Batch, net: Net) -> Tensor:
    image = batch["image"]
    image = torch.where(torch.rand(R, 1, 1, 1) < 0.5, image.flip(-1), image)
    angle = torch.rand(R) * 0.5
    zero = torch.zeros(R)
    theta = torch.stack(
        [torch.stack([angle.cos(), -angle.sin(), zero], 1), torch.stack([angle.sin(), angle.cos(), zero], 1)], 1
    )
    image = functional.grid_sample(image, functional.affine_grid(theta, list(image.shape), align_corners=False))
    return (image.flatten(1)[:, :C] @ net.linear.weight).tanh().mean()


@independent
def cut_out_images(batch: Batch, net: Net) -> Tensor:
    centers = torch.randint(0, 8, (R, 2))
    rows_, columns = torch.arange(8).view(1, 8, 1), torch.arange(8).view(1, 1, 8)
    is_cut = ((rows_ - centers[:, :1, None]).abs() < 2) & ((columns - centers[:, 1:, None]).abs() < 2)
    image = batch["image"].masked_fill(is_cut[:, None], 0.0)
    return (image.flatten(1)[:, :C] @ net.linear.weight).tanh().mean()


@independent
def a_vision_transformer(batch: Batch, net: Net) -> Tensor:
    patches = functional.unfold(batch["image"], 4, stride=4).transpose(1, 2)[..., :C]
    tokens = torch.cat([net.shift.expand(R, 1, C), net.linear(patches)], 1)
    tokens = functional.layer_norm(tokens + torch.arange(5.0)[:, None], (C,))
    out = functional.scaled_dot_product_attention(tokens, tokens, tokens)
    return functional.cross_entropy(net.head(out[:, 0]), batch["y"])


@independent
def quantized_vectors(batch: Batch, net: Net) -> Tensor:
    z = net.linear(batch["t"])
    nearest = torch.cdist(z.flatten(0, 1), net.table.weight).argmin(-1)
    q = net.table(nearest).view_as(z)
    commitment = (q.detach() - z).pow(2).mean() + (q - z.detach()).pow(2).mean()
    return (z + (q - z).detach() - batch["t"]).pow(2).mean() + 0.25 * commitment


@independent
def straight_through(batch: Batch, net: Net) -> Tensor:
    chosen = functional.gumbel_softmax(net.head(batch["x"]), hard=True)
    return (chosen @ net.table.weight - batch["x"]).pow(2).mean()


@independent
def evidence_of_a_policy(batch: Batch, net: Net) -> Tensor:
    logits = net.head(batch["x"])
    action = torch.multinomial(logits.softmax(-1), 1)
    log_probability = logits.log_softmax(-1).gather(1, action)[:, 0]
    ratio = (log_probability - log_probability.detach()).exp()
    advantage = batch["x"].sum(1)
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


@independent
def preferences(batch: Batch, net: Net) -> Tensor:
    chosen = net.head(batch["t"][:, :3]).log_softmax(-1).gather(2, batch["tokens"][:, :3, None]).sum((1, 2))
    rejected = net.head(batch["t"][:, 3:]).log_softmax(-1).gather(2, batch["tokens"][:, 3:, None]).sum((1, 2))
    return -functional.logsigmoid(0.1 * (chosen - rejected)).mean()


@independent
def implicit_fields(batch: Batch, net: Net) -> Tensor:
    encoded = torch.cat([torch.sin(batch["t"] * 2.0**k) for k in range(2)], -1)[..., :C]
    density = functional.softplus(net.linear(encoded)[..., 0])
    through = torch.exp(-torch.cumsum(density, 1))
    color = (through[..., None] * (1 - torch.exp(-density))[..., None] * net.linear(encoded).sigmoid()).sum(1)
    return functional.mse_loss(color, batch["x"].sigmoid())


@independent
def state_spaces(batch: Batch, net: Net) -> Tensor:
    u = net.linear(batch["t"])
    decay = torch.sigmoid(net.shift)
    state = torch.zeros(R, C)
    outs = []
    for step in range(T):
        state = decay * state + u[:, step]
        outs.append(state)
    return torch.stack(outs, 1).pow(2).mean()


def physics(batch: Batch, net: Net) -> Tensor:
    x = batch["x"].requires_grad_()
    u = net.head(torch.tanh(net.linear(x)))[:, 0]
    (du,) = torch.autograd.grad(u.sum(), [x], create_graph=True)
    (ddu,) = torch.autograd.grad(du[:, 0].sum(), [x], create_graph=True)
    return (ddu[:, 0] + u.sin()).pow(2).mean()


def mapped_gradients(batch: Batch, net: Net) -> Tensor:
    def energy(x: Tensor) -> Tensor:
        return torch.tanh(net.linear.weight @ x).sum()

    forces = torch.func.vmap(torch.func.grad(energy))(batch["x"])
    return forces.pow(2).sum(-1).mean()


@independent
def regression_of_quantiles(batch: Batch, net: Net) -> Tensor:
    levels = torch.linspace(0.1, 0.9, CLASSES)
    error = batch["x"].sum(1, keepdim=True) - net.head(batch["x"])
    return torch.maximum(levels * error, (levels - 1) * error).sum(-1).mean()


def a_loop_over_records(batch: Batch, net: Net) -> Tensor:
    total = torch.zeros(())
    for x, y in zip(batch["x"], batch["y"], strict=True):
        total = total + functional.cross_entropy(net.head(x)[None], y[None])
    return total / R


def a_sum_of_a_list(batch: Batch, net: Net) -> Tensor:
    losses = [net.linear(functional.dropout(row, 0.5)).pow(2).mean() for row in batch["t"]]
    return torch.as_tensor(sum(losses)) / R


def a_loop_that_fills_rows(batch: Batch, net: Net) -> Tensor:
    filled = []
    for i in range(R):
        row = batch["t"][i].clone()
        row[0] = 0.0
        row[:, 1] *= 2
        filled.append(net.linear(row).max(0).values)
    return torch.stack(filled).mean()


@independent
def a_regularized_loss(batch: Batch, net: Net) -> Tensor:
    penalty = sum(p.pow(2).sum() for p in net.parameters())
    return functional.mse_loss(net.linear(batch["x"]), batch["x"].flip(1)) + 1e-3 * penalty


@independent
def a_checkpoint(batch: Batch, net: Net) -> Tensor:
    h = checkpoint(lambda x: torch.tanh(net.linear(x)), batch["x"], use_reentrant=False)
    return net.head(h).logsumexp(-1).mean()


def a_reentrant_checkpoint(batch: Batch, net: Net) -> Tensor:
    h = checkpoint(lambda x: torch.tanh(net.linear(x)), batch["x"].requires_grad_(), use_reentrant=True)
    return net.head(h).logsumexp(-1).mean()


@independent
def an_instance_norm(batch: Batch, net: Net) -> Tensor:
    h = functional.instance_norm(batch["t"].transpose(1, 2))
    return net.conv(h).pow(2).mean()


@independent
def a_frozen_batch_norm(batch: Batch, net: Net) -> Tensor:
    return net.frozen_norm(net.linear(batch["x"])).pow(2).mean()


@independent
def mixup_within_a_record(batch: Batch, net: Net) -> Tensor:
    share = torch.rand(R, 1)
    mixed = share * batch["t"][:, 0] + (1 - share) * batch["t"][:, 1]
    return (share * net.head(mixed).pow(2)).mean()


@independent
def written_positions(batch: Batch, net: Net) -> Tensor:
    positions = torch.empty(R, T)
    positions[:] = torch.arange(T)
    return (net.linear(batch["t"]) * positions[..., None]).tanh().mean()


@independent
def a_spectrum(batch: Batch, net: Net) -> Tensor:
    spectrum = torch.fft.rfft(net.linear(batch["t"]), dim=1)
    return torch.log1p(spectrum.abs()).mean()


def a_net(step: Callable[..., Any]) -> Net:
    """A network for a step, of layers that the engine takes, and the others that the step calls."""
    torch.manual_seed(0)
    net = Net()
    for name in ("norm", "instance_norm"):
        if f"net.{name}" not in inspect.getsource(step):
            delattr(net, name)
    return net


@pytest.mark.parametrize("step", COUPLED, ids=lambda step: step.__name__)
@pytest.mark.filterwarnings("ignore")
def test_a_coupled_step_is_not_separable(step: Step) -> None:
    assert not verdict_of(step, a_net(step)).is_separable


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("step", KEPT, ids=lambda step: step.__name__)
def test_an_earlier_batch_is_not_separable(step: Step, batches: int) -> None:
    net = a_net(step)
    for seed in range(batches):
        verdict_of(step, net, seed)
    assert not verdict_of(step, net, batches).is_separable


FALSE_ALARMS: dict[str, tuple[Step, str]] = {
    "lengths in a list, which C++ writes to a tensor": (alignments, "mixed"),
    "records one by one": (a_loop_over_records, "mixed"),
    "a sum over records, one by one": (a_sum_of_a_list, "mixed"),
    "records one by one, written to in part": (a_loop_that_fills_rows, "mixed"),
    "a gradient in the loss, of layers that are not linear in their weights": (a_penalty_of_gradients, "mixed"),
    "a mapped gradient": (mapped_gradients, "mixed"),
    "an equation of gradients": (physics, "mixed"),
    "a reentrant checkpoint": (a_reentrant_checkpoint, "mixed"),
}


@pytest.mark.parametrize(("step", "kind"), FALSE_ALARMS.values(), ids=FALSE_ALARMS)
def test_a_false_alarm(step: Step, kind: str) -> None:
    assert verdict_of(step, a_net(step)).kind == kind


@pytest.mark.parametrize("step", INDEPENDENT, ids=lambda step: step.__name__)
@pytest.mark.filterwarnings("ignore")
def test_a_healthy_step_is_separable(step: Step) -> None:
    assert verdict_of(step, a_net(step)).is_separable


Pairs = list[tuple[Tensor, Tensor]]


def pairs_in_their_order(batch: Pairs, net: Net) -> Tensor:
    return torch.stack([(net.linear(a) * b).sum() for a, b in batch]).mean()


def pairs_in_two_orders(batch: Pairs, net: Net) -> Tensor:
    return torch.stack([net.linear(pair[i % 2]).exp().sum() for i, pair in enumerate(batch)]).mean()


def pairs_beside_a_number(batch: Pairs, net: Net) -> tuple[Tensor, int]:
    h = net.linear(torch.stack([a for a, _ in batch]))
    return (h - h.mean(0)).pow(2).mean(), 1


@pytest.mark.parametrize("step", [pairs_in_their_order, pairs_in_two_orders, pairs_beside_a_number])
def test_lists_of_records(step: Callable[[Pairs, Net], Any]) -> None:
    net = a_net(step)
    batch = [(torch.randn(C), torch.randn(C)) for _ in range(R)]
    _, verdict = verdict_of_step(lambda pairs: step(pairs, net), batch, R, net)
    assert verdict.kind == "reads"


def test_a_hook_without_parameters() -> None:
    def step(batch: Batch) -> Tensor:
        h = batch["x"].requires_grad_() * 2
        h.register_hook(lambda gradient: gradient)
        return h.mean()

    _, verdict = verdict_of_step(step, a_batch(), R, nn.Linear(1, 1))
    assert verdict.is_separable
