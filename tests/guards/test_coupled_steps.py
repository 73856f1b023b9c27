"""Steps by which one record changes the gradients of others: the record axis calls none of them separable."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpbench.errors import UnsupportedModuleError
from dpbench.strategies import DPSGD
from tests.guards.coupling_worlds import Steps, lots_of, positive, vectors, verdicts
from tests.strategies.worlds import loader_of, trainer_for

Loss = Callable[[Steps, Tensor, Tensor], Tensor]
COUPLED: dict[str, tuple[Loss, str]] = {}


def coupled(words: str) -> Callable[[Loss], Loss]:
    """Enter a loss into the table, with what makes it depend on others."""

    def enter(loss: Loss) -> Loss:
        COUPLED[loss.__name__] = (loss, words)
        return loss

    return enter


def each(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module.net(x), y, reduction="none")


def mean(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return each(module, x, y).mean()


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


CONTENTS, NUMBER, ORDER, EARLIER = "the contents of", "the number of", "the order of", "records of earlier batches"
ANY = f"{CONTENTS}|{NUMBER}|{ORDER}"
BY_NUMBER = ("scaled_by_the_number", "temperature_of_the_number")

# ------------------------------------------------------------------------------------------------- one record of a lot


@coupled(CONTENTS)
def over_the_maximum(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return mean(module, x / x.max(), y)


@coupled(CONTENTS)
def between_minimum_and_maximum(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return mean(module, (x - x.min()) / (x.max() - x.min()), y)


@coupled(CONTENTS)
def over_the_largest_of_each_column(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return mean(module, x / x.abs().amax(0), y)


@coupled(CONTENTS)
def over_the_largest_norm(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return mean(module, x / x.norm(dim=1).max().clamp(min=1), y)


@coupled(ANY)
def minus_the_first_row(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return mean(module, x - x[:1], y)


@coupled(ANY)
def minus_the_last_row(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return mean(module, x - x[-1:], y)


@coupled(ANY)
def minus_the_row_before(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return mean(module, x - 0.5 * x.roll(1, 0), y)


@coupled(ANY)
def minus_the_middle_row(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return mean(module, x - x[len(x) // 2], y)


@coupled(CONTENTS)
def weights_over_the_largest_loss(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    losses = each(module, x, y)
    return (losses * (1 - losses / losses.max()).detach()).mean()


@coupled(CONTENTS)
def clamped_mean(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return mean(module, x, y).clamp(max=20.0)


@coupled(CONTENTS)
def mean_without_nan(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return mean(module, x, y).nan_to_num(0.0)


@coupled(CONTENTS)
def huber_of_the_mean(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return F.smooth_l1_loss(mean(module, x, y), torch.zeros(()), beta=4.0) * 4


@coupled(CONTENTS)
def skipped_when_large(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    loss = mean(module, x, y)
    return loss if float(loss.detach()) < 50 else loss * 0


@coupled(CONTENTS)
def quantized_by_the_tensor(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    scale = x.abs().max() / 127
    return mean(module, (x / scale).round() * scale, y)


@coupled(CONTENTS)
def fake_quantized(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    hidden = module.net[0](x)
    scale = float((hidden.detach().abs().max() / 7).nan_to_num(1.0))
    hidden = torch.fake_quantize_per_tensor_affine(hidden, scale, 0, -8, 7)
    return F.cross_entropy(module.net[2](torch.tanh(hidden)), y)


@coupled(CONTENTS)
def branch_on_any(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return mean(module, x, y) * (2.0 if bool((x > 1e3).any()) else 1.0)


@coupled(CONTENTS)
def branch_on_nan(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return mean(module, x, y) * (0.0 if bool(x.isnan().any()) else 1.0)


@coupled(CONTENTS)
def smaller_where_the_maximum_is_large(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return mean(module, x.nan_to_num(), y) / torch.log10(x.nan_to_num().abs().max().clamp(min=10.0))


@coupled(CONTENTS)
def rescaled_gradient(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    losses = each(module, x, y)
    return (losses * (losses.detach().norm() / 10).clamp(min=1).reciprocal()).mean()


# ------------------------------------------------------------------------------------------------- statistics


@coupled(CONTENTS)
def centered(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return mean(module, x - x.mean(0), y)


@coupled(CONTENTS)
def standardized(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return mean(module, x / x.std(), y)


@coupled(CONTENTS)
def by_the_median(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    losses = each(module, x, y)
    return (losses * (losses > losses.detach().median())).mean()


@coupled(CONTENTS)
def softmax_over_records(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    losses = each(module, x, y)
    return (losses * losses.detach().softmax(0)).sum() / 8


@coupled(CONTENTS)
def batch_norm_by_hand(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    hidden = module.net[0](x)
    hidden = (hidden - hidden.mean(0)) / (hidden.var(0) + 1e-5).sqrt()
    return F.cross_entropy(module.net[2](hidden), y)


@coupled(ANY)
def group_norm_over_folded_batch(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    hidden = module.net[0](x)
    return F.cross_entropy(module.net[2](F.group_norm(hidden.t()[None], 4)[0].t()), y)


@coupled(CONTENTS)
def ghost_batch_norm(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    hidden = module.net[0](x)
    parts = [F.layer_norm(part.t(), part.t().shape[1:]).t() for part in hidden.split(4) if len(part)]
    return F.cross_entropy(module.net[2](torch.cat(parts)), y)


@coupled(CONTENTS)
def whitened(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    values = torch.linalg.svdvals(x.nan_to_num(0.0, 0.0, 0.0))
    return mean(module, x / values[0], y)


@coupled(CONTENTS)
def variance_floor(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return mean(module, x, y) + F.relu(1 - module.net(x).var(0)).mean()


@coupled(CONTENTS)
def global_gradient_penalty(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    losses = each(module, x, y)
    (gradient,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    return losses.mean() + 0.1 * (gradient.norm() - 1).square()


@coupled(CONTENTS)
def over_the_mean_loss(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    losses = each(module, x, y)
    return (losses / losses.mean().detach()).mean()


@coupled(ANY)
def over_the_mean_loss_of_large_lots(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    losses = each(module, x, y)
    return losses.mean() if len(x) < 64 else (losses / losses.mean().detach()).mean()


@coupled(CONTENTS)
def focal_weights_of_the_lot(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    losses = each(module, x, y)
    weights = (1 - (-losses.detach()).exp()).square()
    return (losses * weights / weights.mean()).mean()


@coupled(CONTENTS)
def class_weights_in_a_mean(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module.net(x), y, weight=torch.tensor([0.2, 1.0, 3.0]))


@coupled(CONTENTS)
def class_weights_of_the_lot(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    counts = torch.bincount(y, minlength=3).clamp(min=1)
    return (each(module, x, y) * (len(y) / counts)[y]).mean()


@coupled(CONTENTS)
def ignored_labels_in_a_mean(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module.net(x), y, ignore_index=0)


# ------------------------------------------------------------------------------------------------- choices


@coupled(CONTENTS)
def hard_examples(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    losses = each(module, x, y)
    return losses.topk(min(32, (len(x) + 1) // 2)).values.sum() / len(x)


@coupled(CONTENTS)
def trimmed(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    losses = each(module, x, y)
    return losses.sort().values[: len(x) - max(1, len(x) // 50)].sum() / len(x)


@coupled(CONTENTS)
def small_losses_only(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    losses = each(module, x, y)
    return (losses * (losses <= losses.detach().quantile(0.8))).mean()


@coupled(CONTENTS)
def largest_loss(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return each(module, x, y).max()


@coupled(ANY)
def sampled_by_losses(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    losses = each(module, x, y)
    chosen = torch.multinomial(losses.detach().nan_to_num(0.1).clamp(1e-3, 1e3), len(x), replacement=True)
    return losses[chosen].mean()


@coupled(ANY)
def a_random_half(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return each(module, x, y)[torch.randperm(len(x))[: len(x) // 2]].mean()


@coupled(CONTENTS)
def without_duplicates(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    inverse, counts = torch.unique(x, dim=0, return_inverse=True, return_counts=True)[1:]
    return (each(module, x, y) / counts[inverse]).mean()


@coupled(ANY)
def experts_with_capacity(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    expert = x[:, :3].argmax(1)
    place = F.one_hot(expert, 3).cumsum(0).gather(1, expert[:, None]).squeeze(1)
    return (each(module, x, y) * (place <= max(1, len(x) // 4))).mean()


# ------------------------------------------------------------------------------------------------- pairs and neighbors


@coupled(CONTENTS)
def mixup(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    order = torch.randperm(len(x))
    out = module.net(0.7 * x + 0.3 * x[order])
    return 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, y[order])


@coupled(CONTENTS)
def mixup_of_beta(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    weight = torch.distributions.Beta(0.4, 0.4).sample((len(x), 1))
    order = torch.randperm(len(x))
    return F.cross_entropy(module.net(weight * x + (1 - weight) * x[order]), y)


@coupled(CONTENTS)
def cutmix(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    order = torch.from_numpy(np.random.permutation(len(x)))
    return mean(module, torch.cat([x[:, :4], x[order][:, 4:]], 1), y)


@coupled(CONTENTS)
def contrastive(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(module.net(x), dim=1)
    return F.cross_entropy(z @ z.T / 0.5, torch.arange(len(x)))


@coupled(ANY)
def triplets(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    z = module.net(x)
    return F.triplet_margin_loss(z, z.roll(1, 0), z.roll(2, 0))


@coupled(CONTENTS)
def nearest_neighbors(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    nearest = (torch.cdist(x, x) + torch.eye(len(x)) * 1e9).argmin(1)
    return mean(module, x + 0.1 * x[nearest], y)


@coupled(CONTENTS)
def attention_over_the_lot(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return mean(module, F.scaled_dot_product_attention(x[None], x[None], x[None])[0], y)


@coupled(CONTENTS)
def shuffled_rows(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    order = torch.randperm(len(x))
    return mean(module, x[order], y)


@coupled(CONTENTS)
def sorted_into_buckets(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    order = x.sum(1).argsort()
    scale = torch.linspace(0.5, 1.5, len(x))[:, None]
    return mean(module, (x[order] * scale)[order.argsort()], y)


@coupled(CONTENTS)
def ranks(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    losses = each(module, x, y)
    return (losses * losses.detach().argsort().argsort() / len(x)).mean()


# ------------------------------------------------------------------------------------------------- number and order


@coupled(NUMBER)
def total(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return each(module, x, y).sum()


@coupled(NUMBER)
def over_a_fixed_size(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return each(module, x, y).sum() / 40


@coupled(NUMBER)
def scaled_by_the_number(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return mean(module, x, y) * math.sqrt(len(x))


@coupled(NUMBER)
def total_behind_noise(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module.net(x + 0.1 * torch.randn_like(x)), y, reduction="sum")


@coupled(NUMBER)
def temperature_of_the_number(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module.net(F.dropout(x, 0.3)) / math.log(len(x)), y)


@coupled(NUMBER)
def number_behind_random_numbers_of_half(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module.net(x) + torch.randn(len(x) // 2, 1)[0], y, reduction="sum")


@coupled(ORDER)
def weights_by_place(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return (each(module, x, y) * (1 + torch.arange(len(x)) % 2)).mean()


@coupled(ORDER)
def first_row_counts_twice(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return (each(module, x, y) * torch.ones(len(x)).index_fill(0, torch.tensor([0]), 2.0)).mean()


def noised(module: Steps, x: Tensor, y: Tensor, t: Tensor, noise: Tensor) -> Tensor:
    """A step of a diffusion model on vectors."""
    t = t[:, None]
    out = module.net((1 - t) * x + t * noise)
    return (out - noise[:, :3]).square().mean()


@coupled(ORDER)
def stratified_steps(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return noised(module, x, y, torch.arange(len(x)) / len(x), torch.randn_like(x))


@coupled(ORDER)
def stratified_random_steps(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return noised(module, x, y, (torch.arange(len(x)) + torch.rand(len(x))) / len(x), torch.randn_like(x))


@coupled(ORDER)
def one_offset_for_all_steps(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    t = (torch.rand(()) + torch.arange(len(x)) / len(x)) % 1
    return noised(module, x, y, t, torch.randn_like(x))


@coupled(ORDER)
def antithetic_noise(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    half = torch.randn((len(x) + 1) // 2, 6)
    return noised(module, x, y, torch.rand(len(x)), torch.cat([half, -half])[: len(x)])


@coupled(ORDER)
def antithetic_steps(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    t = torch.rand((len(x) + 1) // 2)
    return noised(module, x, y, torch.cat([t, 1 - t])[: len(x)], torch.randn_like(x))


@coupled(ORDER)
def sorted_steps(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return noised(module, x, y, torch.rand(len(x)).sort().values, torch.randn_like(x))


@coupled(ANY)
def noise_of_mean_zero(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    noise = torch.randn_like(x)
    return noised(module, x, y, torch.rand(len(x)), noise - noise.mean(0))


@coupled(CONTENTS)
def records_as_noise(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    return noised(module, x, y, torch.rand(len(x)), x[torch.randperm(len(x))])


@coupled(ANY)
def numpy_stratified(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    t = (np.arange(len(x)) + np.random.rand(len(x))) / len(x)
    return noised(module, x, y, torch.from_numpy(t).float(), torch.randn_like(x))


# ------------------------------------------------------------------------------------------------- earlier lots


@coupled(EARLIER)
def center_of_outputs(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    out = module.net(x)
    loss = (out - module.__dict__.get("center", 0)).square().sum(1).mean()
    module.center = 0.9 * module.__dict__.get("center", 0) + 0.1 * out.detach().mean(0)
    return loss


@coupled(EARLIER)
def queue_of_negatives(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(module.net(x), dim=1)
    bank = module.__dict__.setdefault("bank", deque(maxlen=64))
    loss = mean(module, x, y)
    if bank:
        loss = loss + (z @ torch.stack(list(bank)).T).logsumexp(1).mean()
    bank.extend(z.detach())
    return loss


@coupled(EARLIER)
def over_the_running_mean(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    loss = mean(module, x, y)
    before = module.__dict__.get("average", 1.0)
    module.average = 0.9 * before + 0.1 * loss.item()
    return loss / before


@coupled(EARLIER)
def threshold_of_earlier_losses(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    losses = each(module, x, y)
    weights = (losses.detach() + 1 - module.__dict__.get("level", 0.0)).sigmoid()
    module.level = float(losses.detach().median())
    return (losses * weights).mean()


@coupled(EARLIER)
def steps_drawn_by_losses(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    """Time steps from a history of losses that forgets nine tenths: importance sampling of a diffusion model."""
    history = module.__dict__.setdefault("history", torch.ones(10))
    t = torch.multinomial(history / history.sum(), len(x), replacement=True)
    noise = torch.randn_like(x)
    out = module.net(x * (1 - t[:, None] / 10) + noise * t[:, None] / 10)
    losses = (out - noise[:, :3]).square().mean(1)
    module.history = history.clone()
    module.history[t] = 0.9 * module.history[t] + 0.1 * losses.detach().nan_to_num(1.0)
    return losses.mean()


@coupled(EARLIER)
def steps_drawn_by_logarithms_of_losses(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    """The same where one loss, however large, moves the history little."""
    history = module.__dict__.setdefault("history", torch.ones(10))
    t = torch.multinomial(history / history.sum(), len(x), replacement=True)
    noise = torch.randn_like(x)
    out = module.net(x * (1 - t[:, None] / 10) + noise * t[:, None] / 10)
    losses = (out - noise[:, :3]).square().mean(1)
    module.history = history.clone()
    module.history[t] = 0.9 * module.history[t] + 0.1 * losses.detach().nan_to_num(1.0).log1p().clamp(max=3)
    return losses.mean()


@coupled(EARLIER)
def every_second_history(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    """What is learned of a lot is looked at two lots later."""
    pending, weight = module.__dict__.get("pending", (1.0, 1.0))
    loss = mean(module, x, y)
    module.pending = (float(loss.detach().nan_to_num(1.0)), pending)
    return loss * weight


@coupled(EARLIER)
def only_large_records_are_remembered(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    losses = each(module, x, y)
    weight = module.__dict__.get("weight", 1.0)
    if float(x.nan_to_num().abs().max()) > 100:
        module.weight = 0.5
    return losses.mean() * weight


@coupled(EARLIER)
def hidden_state_of_the_last_lot(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    hidden = module.net[0](x) + module.__dict__.get("hidden", 0)
    module.hidden = hidden.detach().mean(0)
    return F.cross_entropy(module.net[2](torch.tanh(hidden)), y)


def remembered(module: Steps, features: Tensor, entries: int = 2000) -> Tensor:
    """Write features into a large memory, one after the other; the memory as it was before."""
    if "memory" not in module.__dict__:
        module.memory = torch.ones(entries, features.shape[1])
        module.place = 0
    before = module.memory.clone()
    places = (module.place + torch.arange(len(features))) % entries
    module.memory[places] = features.detach().nan_to_num()
    module.place = int(places[-1]) + 1
    return before


@coupled(EARLIER)
def few_entries_of_a_large_memory(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    out = module.net(x)
    memory = remembered(module, out)
    negatives = memory[torch.randint(len(memory), (len(x), 2))]
    return F.cross_entropy(out, y) + (out[:, None] * negatives).sum(2).logsumexp(1).mean()


@coupled(EARLIER)
def replay_buffer(module: Steps, x: Tensor, y: Tensor) -> Tensor:
    buffer = module.__dict__.setdefault("buffer", deque([(torch.zeros(6), torch.tensor(0))] * 3000, maxlen=3000))
    chosen = [buffer[place] for place in torch.randint(len(buffer), (len(x),))]
    old_x, old_y = (torch.stack(column) for column in zip(*chosen, strict=True))
    losses = each(module, x, y) + each(module, x + old_x, old_y)
    buffer.extend(zip(x, y, strict=True))
    return losses.mean()


def kinds(name: str, seed: int, lots: int = 6) -> set[str]:
    """Kinds of the verdicts on some batches."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    sizes = np.random.default_rng(seed).integers(70, 90, lots).tolist()
    records: Any = positive if "maximum" in name and "large" not in name else vectors
    module = Steps(small_net(), lambda module, batch: COUPLED[name][0](module, *batch))
    return {verdict.kind for verdict in verdicts(module, lots_of(records, sizes, seed), sizes)}


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_steps_are_not_separable(name: str) -> None:
    seen = kinds(name, 0)
    if name in BY_NUMBER:
        assert seen == {"separable"}
    elif COUPLED[name][1] == EARLIER:
        assert seen & {"kept", "reads"}
    else:
        assert seen & {"mixed", "reads"}


@pytest.mark.parametrize("name", BY_NUMBER)
def test_the_number_of_records_is_asked_for(tmp_path: Path, name: str) -> None:
    """No number of a record is in `len(x)`: half a batch shows it."""

    class Trained(Steps):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Trained(small_net(), lambda module, batch: COUPLED[name][0](module, *batch))
    x, y = vectors(torch.Generator().manual_seed(0), 100)
    strategy = DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3)
    with pytest.raises(UnsupportedModuleError, match="depends on the number of records"):
        trainer_for(tmp_path, strategy, 2).fit(module, loader_of(TensorDataset(x, y), 40))


def test_there_are_many() -> None:
    assert len(COUPLED) >= 60
