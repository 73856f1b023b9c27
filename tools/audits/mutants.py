"""Mechanisms that are broken, each in one way, while a context is open.

`MUTANTS` has all of them: by their noise, by how they treat records, and by how they draw lots. Some break canaries
as they break records; those of `RECORD_MUTANTS` treat canaries as declared, so that only records show what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from dpbench.capabilities.canaries.canaries import SparseGradients
from dpbench.capabilities.correlated.banded import Banded, BandedNoise
from dpbench.capabilities.users.cohorts import Users
from dpbench.data.sampler import PrivateBatchSampler
from dpbench.privacy import releases
from dpbench.privacy.accounting.accountants import RenyiAccountant
from dpbench.privacy.mechanism import mechanism
from dpbench.privacy.mechanism.clipping import clip_and_sum
from dpbench.privacy.mechanism.mechanism import Mechanism
from dpbench.privacy.mechanism.noise_process import Gaussian, Noise
from dpbench.privacy.mechanism.plan import ReleasePlan
from dpbench.privacy.randomness import digest_of, noise_key
from dpbench.privacy.releases import ReleaseEngine
from dpbench.privacy.sampling import CyclicPoissonSampling, PoissonSampling

Mutant = Callable[[], AbstractContextManager[Any]]

# As they are before any of them is broken: what is broken calls them.
_add_noise = Noise.add_
_draw_all = PrivateBatchSampler._lot
_draw = PrivateBatchSampler.lot
_add_banded = BandedNoise.add_

# ------------------------------------------------------------------------------------- noise

NoiseOf = Callable[[list[Tensor], ReleasePlan], Tensor]
"""Takes the right noise of all releases so far, the present one last, and gives what is released instead of it."""


def _with_noise(noise_of: NoiseOf) -> Mutant:
    @contextmanager
    def broken() -> Iterator[None]:
        noises: list[Tensor] = []

        def add(self: Noise, total: Tensor, plan: ReleasePlan, *arguments: Any) -> Tensor:
            exact = total.clone()
            noises.append(_add_noise(self, total, plan, *arguments) - exact)
            return total.copy_(exact + noise_of(noises, plan))

        with mock.patch.object(Noise, "add_", add):
            yield

    return broken


def _scaled(factor: float) -> Mutant:
    return _with_noise(lambda noises, plan: factor * noises[-1])


def _noise_of_mean(noises: list[Tensor], plan: ReleasePlan) -> Tensor:
    return noises[-1] / plan.denominator


def _opposite_after_five(noises: list[Tensor], plan: ReleasePlan) -> Tensor:
    """The noise of five releases is followed by its opposite."""
    is_opposite = (len(noises) - 1) // 5 % 2
    return -noises[-6] if is_opposite else noises[-1]


def _random_signs(noises: list[Tensor], plan: ReleasePlan) -> Tensor:
    """The noise of seven releases comes again, each with a sign of its own."""
    release = len(noises) - 1
    if release // 7 % 2 == 0:
        return noises[-1]
    sign = np.random.default_rng(release).choice([-1.0, 1.0])
    return float(sign) * noises[-8]


def _taken_back(noises: list[Tensor], plan: ReleasePlan) -> Tensor:
    """Each tenth noise takes a third of the nine before back."""
    return noises[-1] if len(noises) % 10 else -torch.stack(noises[-10:-1]).sum(0) / 3


def _moving_average(noises: list[Tensor], plan: ReleasePlan) -> Tensor:
    """The variance of the sum of all releases, and of consecutive ones, is as it should be."""
    if len(noises) < 5:
        return noises[-1]
    return (2 * noises[-1] + 2 * noises[-3] - noises[-5]) / 3


def _cut_tails(noises: list[Tensor], plan: ReleasePlan) -> Tensor:
    """Noise ends at three standard deviations, and is scaled to the right variance."""
    lost_variance = 6 * math.exp(-4.5) / math.sqrt(2 * math.pi) / math.erf(3 / math.sqrt(2))
    noise = noises[-1]
    inside = torch.where(noise.abs() <= 3 * noise.std(), noise, noise / 3)
    return inside / math.sqrt(1 - lost_variance)


def _loud_and_quiet(noises: list[Tensor], plan: ReleasePlan) -> Tensor:
    """Every other release has 0.7 of the noise, and the others as much more."""
    return noises[-1] * (0.7 if len(noises) % 2 else math.sqrt(2 - 0.7**2))


def _shared_by_neighbors(noises: list[Tensor], plan: ReleasePlan) -> Tensor:
    """Each second coordinate has the noise of the one before it."""
    shared = noises[-1].clone()
    pairs = len(shared) // 2
    shared[1 : 2 * pairs : 2] = shared[0 : 2 * pairs : 2]
    return shared


def _for_statistics(factor: float) -> NoiseOf:
    """The statistics beside the gradients get less noise; an adaptive bound moves by them."""

    def noise(noises: list[Tensor], plan: ReleasePlan) -> Tensor:
        less = noises[-1].clone()
        less[sum(plan.sizes) :] *= factor
        return less

    return noise


def _same_noise() -> AbstractContextManager[Any]:
    """Every release gets the same noise."""
    return mock.patch.object(releases, "noise_key", return_value=(0,))


def _ten_bits() -> AbstractContextManager[Any]:
    """The key of the noise has ten bits."""

    def short_key(*facts: int) -> tuple[int, ...]:
        return (int.from_bytes(digest_of(noise_key(*facts))[:2], "big") % 1024,)

    return mock.patch.object(releases, "noise_key", short_key)


# ------------------------------------------------------------------------------------- clipping

Clip = Callable[[Any, Any, Any, Any], Any]
"""As `clip_and_sum`: gradients, groups, clip factors and the sums that it adds to."""


def _with_clipping(clip: Clip, of_canaries: bool) -> Mutant:
    """Clip records by another function; canaries too, or by the right one."""

    def clip_other(gradients: Any, groups: Any, factors_of: Any, into: Any, *_: Any) -> Any:
        is_canary = any(isinstance(gradient, SparseGradients) for gradient in gradients)
        right = clip_and_sum if is_canary and not of_canaries else clip
        return right(gradients, groups, factors_of, into)

    return lambda: mock.patch.object(mechanism, "clip_and_sum", clip_other)


def _no_clipping(gradients: Any, groups: Any, factors_of: Any, into: Any) -> Any:
    return clip_and_sum(gradients, groups, lambda norms, bound: torch.ones_like(norms), into)


def _clip_the_mean(gradients: Any, groups: Any, factors_of: Any, into: list[Tensor]) -> Any:
    """Not each record but the mean of a piece of the lot is clipped."""
    squares = torch.stack([gradient.squared_norms() for gradient in gradients]).sum(0)
    count = max(len(squares), 1)
    shares = torch.full((len(squares),), 1 / count, dtype=squares.dtype)
    means = [gradient.weighted_sum(shares) for gradient in gradients]
    norm = math.sqrt(sum(float(mean.square().sum()) for mean in means))
    factor = min(1.0, groups[0].max_grad_norm / norm) if norm else 0.0
    for total, mean in zip(into, means, strict=True):
        total.add_(mean, alpha=factor)
    return into, squares[None]


def _clip_at_ten_bounds(gradients: Any, groups: Any, factors_of: Any, into: Any) -> Any:
    wide = tuple(replace(group, max_grad_norm=10 * group.max_grad_norm) for group in groups)
    return clip_and_sum(gradients, wide, factors_of, into)


def _clip_each_parameter(gradients: Any, groups: Any, factors_of: Any, into: Any) -> Any:
    """Each parameter is clipped at the bound of all together; a canary has coordinates in one of them only."""
    alone = []
    for group in groups:
        alone += [replace(group, parameters=(position,), scales=()) for position in group.parameters]
    sums, norms = clip_and_sum(gradients, tuple(alone), factors_of, into)
    return sums, norms.sum(0, keepdim=True)


def _clip_by_largest_coordinate(gradients: Any, groups: Any, factors_of: Any, into: Any) -> Any:
    """The largest coordinate of a record is clipped, not its norm: the same for a canary, which has only one."""
    rows = torch.cat([gradient.per_record().flatten(1) for gradient in gradients], 1)
    squares = rows.abs().amax(1).square()
    return _weighted(gradients, factors_of(squares, groups[0].max_grad_norm), squares, into)


def _clip_without_first_layer(gradients: Any, groups: Any, factors_of: Any, into: Any) -> Any:
    """The norm of a record leaves out the first layer."""
    squares = torch.stack([gradient.squared_norms() for gradient in gradients[2:]]).sum(0)
    return _weighted(gradients, factors_of(squares, groups[0].max_grad_norm), squares, into)


def _weighted(gradients: Any, factors: Tensor, squares: Tensor, into: Any) -> Any:
    for total, gradient in zip(into, gradients, strict=True):
        gradient.add_weighted_sum(factors, total)
    return into, squares[None]


def _count_large_records_twice(gradients: Any, groups: Any, factors_of: Any, into: Any) -> Any:
    """After clipping, records whose norm is above the median of their lot count twice."""

    def doubled(squares: Tensor, bound: float) -> Tensor:
        right: Tensor = factors_of(squares, bound)
        return torch.where(squares > squares.median(), 2 * right, right) if len(squares) > 1 else right

    return clip_and_sum(gradients, groups, doubled, into)


@contextmanager
def _leftovers() -> Iterator[None]:
    """A tenth of the sum of a lot, before noise, stays in the sums of the next one."""
    exact: list[Tensor] = []
    clear = Mechanism.clear
    add_noise = Mechanism.add_noise

    def keep_sum(self: Mechanism, *arguments: Any) -> None:
        exact[:] = [self.total.clone()]
        add_noise(self, *arguments)

    def clear_nine_tenths(self: Mechanism, into: Tensor | None = None) -> None:
        clear(self, into)
        for total in exact:
            self.total.add_(total, alpha=0.1)

    with (
        mock.patch.object(Mechanism, "clear", clear_nine_tenths),
        mock.patch.object(Mechanism, "add_noise", keep_sum),
    ):
        yield


@contextmanager
def _users_weighted_by_examples() -> Iterator[None]:
    """A user's update counts as often as it has examples, after clipping."""
    accumulate = ReleaseEngine.accumulate
    train = Users._train

    def train_weighted(self: Users, local_step: Any) -> None:
        sizes = iter([len(self._dataset.rows(user)) for user in self._users])  # type: ignore[union-attr]

        def accumulate_often(engine: ReleaseEngine, *arguments: Any, **options: Any) -> None:
            for _ in range(next(sizes)):
                accumulate(engine, *arguments, **options)

        with mock.patch.object(ReleaseEngine, "accumulate", accumulate_often):
            train(self, local_step)

    with mock.patch.object(Users, "_train", train_weighted):
        yield


# ------------------------------------------------------------------------------------- lots


def _with_lots(draw: Callable[[PrivateBatchSampler, Any], Any], method: str = "_lot") -> Mutant:
    return lambda: mock.patch.object(PrivateBatchSampler, method, draw)


def _double_rate(self: PrivateBatchSampler, step: int) -> Any:
    """Lots hold twice as many records as declared."""
    sampling = self.sampling
    rng = self.generator(step)
    size = int(rng.binomial(sampling.population, 2 * sampling.rate))
    return rng.choice(sampling.population, size, replace=False)


def _shuffled(self: PrivateBatchSampler, step: int) -> Any:
    """Lots are pieces of a shuffled data set, as data loaders make them, and are accounted for as Poisson lots."""
    pieces = max(1, round(1 / self.sampling.rate))
    order = self.generator(step // pieces).permutation(self.sampling.population)
    return np.array_split(order, pieces)[step % pieces]


def _each_lot_twice(self: PrivateBatchSampler, step: int) -> Any:
    return _draw_all(self, step // 2)


def _fixed_size(self: PrivateBatchSampler, step: int) -> Any:
    """Lots have a fixed size, and are accounted for as Poisson lots."""
    size = round(self.sampling.expected_batch_size)
    return self.generator(step).choice(self.sampling.population, size, replace=False)


def _with_replacement(self: PrivateBatchSampler, step: int) -> Any:
    """Records are drawn with replacement, so that one may be twice in a lot; canaries are not."""
    records = max(1, self.sampling.population - self.added)
    drawn = np.random.default_rng(step).integers(0, records, len(_draw(self, step)))
    return np.sort(drawn)


# ------------------------------------------------------------------------------------- correlated noise


def _with_banded(noise_of: Callable[[BandedNoise], Noise]) -> Mutant:
    """Add other noise than the banded one that is declared."""

    def add(self: BandedNoise, *arguments: Any) -> Tensor:
        other = noise_of(self)
        adds = _add_banded if isinstance(other, BandedNoise) else _add_noise
        return adds(other, *arguments)  # type: ignore[arg-type]

    return lambda: mock.patch.object(BandedNoise, "add_", add)


def _norm_above_one(noise: BandedNoise) -> Noise:
    """C is divided by its first coefficient instead of its norm: as much less noise."""
    return replace(noise, coefficients=tuple(value / noise.coefficients[0] for value in noise.coefficients))


def _of_two_bands(noise: BandedNoise) -> Noise:
    """Coefficients of two bands only."""
    return replace(noise, coefficients=Banded(bands=2).coefficients)


def _empty_cache() -> AbstractContextManager[Any]:
    """In the middle the noise of earlier steps is forgotten, as by a resume that does not draw it again."""

    def add(self: BandedNoise, total: Tensor, plan: ReleasePlan, step: int, keys: Any, state: Any) -> Tensor:
        if step == _RESUMED and state.rows is not None:
            state.rows.zero_()
        return _add_banded(self, total, plan, step, keys, state)

    return mock.patch.object(BandedNoise, "add_", add)


_RESUMED = 41  # the step from which it is


def _poisson_lots(self: PrivateBatchSampler, step: int) -> Any:
    """Poisson lots of the same size from all records: one may come twice in a band."""
    is_drawn = self.generator(step).random(self.sampling.population) < self.sampling.rate
    return np.flatnonzero(is_drawn)


@contextmanager
def _rate_of_all() -> Iterator[None]:
    """A round is accounted for at the rate of a lot among all records, not among those of a group."""

    def cost(self: CyclicPoissonSampling) -> PoissonSampling:
        return PoissonSampling(self.population, self.sample_rate)

    def draw(self: CyclicPoissonSampling, rng: np.random.Generator) -> Any:
        return PoissonSampling(self.population, self.group_rate).draw(rng)

    with (
        mock.patch.object(CyclicPoissonSampling, "round", property(cost)),
        mock.patch.object(CyclicPoissonSampling, "draw", draw),
    ):
        # Divergences are remembered by what a release is.
        RenyiAccountant.divergences.cache_clear()
        yield
    RenyiAccountant.divergences.cache_clear()


def _dealt_groups(self: PrivateBatchSampler, sampling: Any) -> Any:
    """Records are dealt to groups in turn: one that comes or goes moves all that follow to other groups."""
    return np.arange(sampling.population) % sampling.cycle


def _sorted_groups(self: PrivateBatchSampler, sampling: Any) -> Any:
    """Groups are pieces of the data set in its order."""
    return np.arange(sampling.population) * sampling.cycle // sampling.population


# ------------------------------------------------------------------------------------- all of them

NOISE_MUTANTS: dict[str, Mutant] = {
    "noise opposite to that of five releases before": _with_noise(_opposite_after_five),
    "noise of seven releases before, with random signs": _with_noise(_random_signs),
    "each tenth noise takes back the nine before": _with_noise(_taken_back),
    "a moving average of the noise": _with_noise(_moving_average),
    "noise that ends at three deviations": _with_noise(_cut_tails),
    "loud and quiet releases": _with_noise(_loud_and_quiet),
    "neighboring coordinates with the same noise": _with_noise(_shared_by_neighbors),
    "noise with a key of ten bits": _ten_bits,
    "half of the noise for statistics": _with_noise(_for_statistics(0.5)),
}
"""Noise that has the declared variance, and is neither fresh nor Gaussian."""

RECORD_MUTANTS: dict[str, Mutant] = {
    "records clipped at ten bounds, canaries at one": _with_clipping(_clip_at_ten_bounds, of_canaries=False),
    "each parameter clipped by itself": _with_clipping(_clip_each_parameter, of_canaries=True),
    "clipping by the largest coordinate": _with_clipping(_clip_by_largest_coordinate, of_canaries=True),
    "norms without the first layer": _with_clipping(_clip_without_first_layer, of_canaries=False),
    "large records twice": _with_clipping(_count_large_records_twice, of_canaries=False),
    "a tenth of each sum stays for the next lot": _leftovers,
    "each lot twice": _with_lots(_each_lot_twice),
    "lots of a fixed size as Poisson lots": _with_lots(_fixed_size),
    "records drawn with replacement": _with_lots(_with_replacement, "lot"),
}
"""What happens to records otherwise than declared, and otherwise than to canaries."""

BANDED_MUTANTS: dict[str, Mutant] = {
    "independent noise as banded": _with_banded(lambda noise: Gaussian(noise.noise_multiplier)),
    "coefficients of a norm above one": _with_banded(_norm_above_one),
    "coefficients of two bands": _with_banded(_of_two_bands),
    "noise of earlier steps forgotten by a resume": _empty_cache,
    "Poisson lots in banded noise": _with_lots(_poisson_lots),
    "a round at the rate of a lot": _rate_of_all,
    "groups dealt in turn": _with_lots(_dealt_groups, "_group_of"),
    "groups by the order of the data": _with_lots(_sorted_groups, "_group_of"),
}
"""Banded noise and its lots, otherwise than declared."""

MUTANTS: dict[str, Mutant] = {
    "no noise": _scaled(0.0),
    "half of the noise": _scaled(0.5),
    "0.8 of the noise": _scaled(0.8),
    "0.9 of the noise": _scaled(0.9),
    "noise of two processes": _scaled(math.sqrt(2)),
    "noise of the mean on the sum": _with_noise(_noise_of_mean),
    "the same noise in every step": _same_noise,
    "no clipping": _with_clipping(_no_clipping, of_canaries=True),
    "clipping of the mean": _with_clipping(_clip_the_mean, of_canaries=True),
    "lots at twice the rate": _with_lots(_double_rate),
    "shuffled lots": _with_lots(_shuffled),
    "counts without noise": _with_noise(_for_statistics(0.0)),
    "users weighted by examples": _users_weighted_by_examples,
    **NOISE_MUTANTS,
    **RECORD_MUTANTS,
    **BANDED_MUTANTS,
}
