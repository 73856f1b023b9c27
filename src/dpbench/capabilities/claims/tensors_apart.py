"""The ε = 20 of three_tools_2018: the accounting that it comes from, and limits of the cost of its noise.

Its program builds on that of Abadi et al. 2016, whose sanitizer is called once for each tensor and adds the moments
of each call, as if each tensor had drawn a batch of its own. That is not valid: the m tensors of a batch are clipped
apart and noised by σC each, so that a record moves all of them at once. They are one query, with a noise multiplier
of σ/√m.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from dp_accounting.pld import privacy_loss_distribution
from scipy import optimize

from dpbench.privacy.accounting.accountants import MIRONOV_2017, RenyiAccountant, rounding_of
from dpbench.privacy.accounting.calibration import TrainingSetting
from dpbench.privacy.events import Event

TENSORS_APART = "rdp-classic, each tensor apart"
"""Name in tables; no accountant of `dpbench account`, since it is not valid."""
_MOMENTS = RenyiAccountant(
    "moments λ = 1 to 32 of each tensor, added (Abadi et al. 2016's program)",
    guarantee=False,
    orders=tuple(map(float, range(2, 34))),
    conversion=MIRONOV_2017,
)
_LEAST_NOISE, _MOST_NOISE = 0.3, 100.0
_TAILS = 1e-15  # probability that dp_accounting cuts off, and takes for that of infinite losses


def nominal_epsilon(setting: TrainingSetting, tensors: int, noise_multipliers: Sequence[float]) -> float:
    """ε as that program accounts for it: nominal, and no bound.

    Args:
        setting: Its noise multiplier is not used.
        tensors: Number of tensors clipped and noised apart.
        noise_multipliers: σ of each tensor in units of its bound; further ones of statistics of each tensor.
    """
    assert setting.delta is not None
    steps = setting.number_of_steps
    events: Counter[Event] = Counter()
    for noise_multiplier in noise_multipliers:
        event = replace(setting, noise_multiplier=noise_multiplier).event
        events[event] += tensors * steps
    return _MOMENTS.epsilon(events, setting.delta)


def nominal_noise_multiplier(setting: TrainingSetting, tensors: int) -> float:
    """σ of each tensor that uses up the setting's ε, as that program accounts for it."""
    target = setting.epsilon
    assert target is not None
    open_setting = replace(setting, epsilon=None)

    def excess(noise_multiplier: float) -> float:
        return nominal_epsilon(open_setting, tensors, [noise_multiplier]) - target

    return float(optimize.brentq(excess, _LEAST_NOISE, _MOST_NOISE))


def epsilon_lower_bound(setting: TrainingSetting) -> float:
    """A lower bound of the ε that Poisson batches and Gaussian noise spend at δ: each privacy loss is rounded down.

    Args:
        setting: Noise multiplier, rate, number of steps and δ.
    """
    assert setting.noise_multiplier is not None
    assert setting.sample_rate is not None
    assert setting.delta is not None
    steps = setting.number_of_steps
    release = privacy_loss_distribution.from_gaussian_mechanism(
        setting.noise_multiplier,
        pessimistic_estimate=False,
        value_discretization_interval=min(1e-3, 2 / steps),  # so that all losses together lose 2 at most
        sampling_prob=setting.sample_rate,
        use_connect_dots=False,
    )
    composed = release.self_compose(steps)
    return float(composed.get_epsilon_for_delta(setting.delta + rounding_of(composed) + _TAILS))


def tensors_apart(setting: TrainingSetting, tensors: int, multipliers: Sequence[float]) -> dict[str, float | None]:
    """Account for a training in both ways.

    Args:
        setting: All but the noise.
        tensors: Number of tensors that are clipped and noised apart.
        multipliers: σ of each tensor, and of a statistic of each where there is one.

    Returns:
        The multipliers, ε with the moments of each tensor added, the noise multiplier of the batch with all queries of
        all tensors together, and bounds of the true ε.
    """
    # All queries of a batch are one: 1/z² is the sum of 1/σ² over them.
    precision = tensors * sum(multiplier**-2 for multiplier in multipliers)
    batch = replace(setting, noise_multiplier=precision**-0.5)
    return {
        "tensor_noise_multiplier": multipliers[0],
        "norm_noise_multiplier": multipliers[1] if len(multipliers) > 1 else None,
        "nominal_epsilon": nominal_epsilon(setting, tensors, multipliers),
        "noise_multiplier": batch.noise_multiplier,
        "lower_bound": epsilon_lower_bound(batch),
        "upper_bound": batch.epsilon_by("pld"),
    }
