"""The ε = 20 of three_tools_2018: the accounting that it comes from, and limits of what its noise costs.

Its program builds on that of Abadi et al. 2016, whose sanitizer is called once for each tensor and adds the moments
of each call, as if each tensor had drawn a batch of its own. That is not valid: the m tensors of a batch are clipped
apart and noised by σC each, so that a record moves all of them at once. They are one query, with a noise multiplier
of σ/√m.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import optimize, stats

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.accountants import ACCOUNTANTS, MIRONOV_2017, RenyiAccountant
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
_THRESHOLDS = np.arange(1.0, 8.0, 0.05)  # of a projection, in standard deviations of its noise


def nominal_epsilon(setting: TrainingSetting, tensors: int, noise_multipliers: Sequence[float]) -> float:
    """ε as that program accounts for it: nominal, and no bound.

    Args:
        setting: Its noise multiplier is not used.
        tensors: That are clipped and noised apart.
        noise_multipliers: σ of each tensor in units of its bound; further ones of statistics of each tensor.
    """
    assert setting.delta is not None
    steps = replace(setting, noise_multiplier=1.0).number_of_steps
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
    """A lower bound of the ε that Poisson lots and Gaussian noise spend at δ, by an explicit test.

    A record that moves every sum by its bound, in one direction, is added. The adversary projects each release on that
    direction, and counts those above a threshold: a binomial count, whether the record is there or not. Whoever says
    "it is there" from so many counts on has true and false positive rates that obey TPR ≤ e^ε FPR + δ, so that
    ε ≥ ln((TPR − δ)/FPR). Exact tails; the best threshold and the best count are taken, which is allowed because
    none of the rates is estimated.

    Args:
        setting: With noise multiplier, rate, number of steps and δ.
    """
    assert setting.noise_multiplier is not None
    assert setting.sample_rate is not None
    assert setting.delta is not None
    steps = setting.number_of_steps
    best = 0.0
    for threshold in _THRESHOLDS:
        without = stats.norm.sf(threshold)
        shifted = stats.norm.sf(threshold - 1 / setting.noise_multiplier)
        with_record = (1 - setting.sample_rate) * without + setting.sample_rate * shifted
        middle = steps * with_record
        # Beyond, either nearly every count is as large, or nearly none.
        width = 12 * math.sqrt(middle) + 12
        counts = np.arange(max(0, int(middle - width)), min(steps, int(middle + width)))
        true_positive_rates = stats.binom.sf(counts, steps, with_record)
        possible = true_positive_rates > setting.delta
        logs = np.log(true_positive_rates[possible] - setting.delta)
        epsilons = logs - stats.binom.logsf(counts[possible], steps, without)
        finite = epsilons[np.isfinite(epsilons)]
        if len(finite):
            best = max(best, float(finite.max()))
    return best


@dataclass(frozen=True)
class TensorsApart:
    """One size of a batch, accounted for in both ways.

    Attributes:
        batch_size: Expected.
        tensor_noise_multiplier: σ of each tensor, in units of its bound.
        norm_noise_multiplier: σ of a norm of each tensor that is released beside it; None: none is.
        nominal_epsilon: With the moments of each tensor added.
        noise_multiplier: Of the batch, all queries of all tensors together.
        lower_bound: Of the true ε.
        upper_bound: Of the true ε.
        accountant: Which shows the upper bound.
    """

    batch_size: int
    tensor_noise_multiplier: float
    norm_noise_multiplier: float | None
    nominal_epsilon: float
    noise_multiplier: float
    lower_bound: float
    upper_bound: float
    accountant: str


def tensors_apart(setting: TrainingSetting, tensors: int, multipliers: Sequence[float]) -> TensorsApart:
    """Account for a training in both ways.

    Args:
        setting: All but the noise.
        tensors: That are clipped and noised apart.
        multipliers: σ of each tensor, and of a statistic of each where there is one.
    """
    assert setting.sample_rate is not None
    assert setting.population is not None
    assert setting.delta is not None
    # All queries of a batch are one: 1/z² is the sum of 1/σ² over them.
    precision = tensors * sum(multiplier**-2 for multiplier in multipliers)
    noise_multiplier = precision**-0.5
    batch = replace(setting, noise_multiplier=noise_multiplier)
    epsilons = {}
    for name in ("rdp-continuous", "pld"):
        try:
            epsilons[name] = ACCOUNTANTS[name].epsilon(batch.events, setting.delta)
        except ConfigurationError:  # PLD, of large ε
            continue
    tightest = min(epsilons, key=lambda name: epsilons[name])
    return TensorsApart(
        batch_size=round(setting.sample_rate * setting.population),
        tensor_noise_multiplier=multipliers[0],
        norm_noise_multiplier=multipliers[1] if len(multipliers) > 1 else None,
        nominal_epsilon=nominal_epsilon(setting, tensors, multipliers),
        noise_multiplier=noise_multiplier,
        lower_bound=epsilon_lower_bound(batch),
        upper_bound=epsilons[tightest],
        accountant=tightest,
    )
