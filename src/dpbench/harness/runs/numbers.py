"""Formatting of figures: one form for each kind, wherever it is printed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

ABSENT = "–"
"""Text in place of a figure that is missing."""

_LEVEL = 0.05  # of a test
_MEANINGLESS = 1e5  # an ε above which digits say nothing
MOST_AUDITED = 1000.0
"""An audited ε above which its figure says nothing."""


def epsilon_text(epsilon: float | None, significant: int | None = None) -> str:
    """Format an ε with three decimals, or two significant digits if it is too large to be meaningful.

    Args:
        epsilon: ε; None is infinite, as in files, and NaN means that there is none.
        significant: Number of significant digits instead, for comparisons of accountants.
    """
    if epsilon is None:
        return "inf"
    if math.isnan(epsilon):
        return ABSENT
    if significant is not None:
        return f"{epsilon:.{significant}g}"
    if _MEANINGLESS <= epsilon < math.inf:
        return f"{epsilon:.2g}"
    return f"{epsilon:.3f}"


def epsilons_text(epsilons: Mapping[str, float | None]) -> str:
    """Each finite ε with its accountant, such as "1.924 (RDP), 1.765 (PLD)"."""
    finite = []
    for name, value in epsilons.items():
        if value is not None:
            finite.append(f"{epsilon_text(value)} ({name.upper()})")
    return ", ".join(finite) or "none: no accountant gives a finite figure"


def guarantee_text(card: Mapping[str, Any]) -> str:
    """State the epsilon of a card in one line."""
    if card["delta"] is None:
        return "NOT private, it was trained without privacy"
    epsilons = []
    for name, epsilon in card["epsilon"].items():
        if epsilon is not None:
            epsilons.append(f"ε = {epsilon_text(epsilon)} ({name.upper()})")
    stated = ", ".join(epsilons) or "no finite ε"
    relation = str(card["neighbouring_relation"]).replace("_", " ")
    return f"{stated} at δ = {card['delta']:g}, unit: {card['unit']}, {relation}"


def audit_text(epsilon: float | None) -> str:
    """An ε next to lower bounds, with as many digits as these have; None or 0: no accountant covers the sampling."""
    if not epsilon:
        return "none"
    return "infinite" if math.isinf(epsilon) else f"{epsilon:.2f}"


def limit_text(epsilon: float | None) -> str:
    """A lower limit of ε, as audits give them; None is infinite."""
    if epsilon is None or epsilon > MOST_AUDITED:
        return f"> {MOST_AUDITED:.0f}"
    return f">= {epsilon:.2f}"


def limit_or_none(epsilon: float | None) -> str:
    """A lower limit of ε, where there may be none: then it is None or not a number."""
    return "none" if epsilon is None or math.isnan(epsilon) else limit_text(epsilon)


def range_text(value: float | Sequence[float], form: str = ".5g") -> str:
    """A figure, or the least and the largest of several: "0.1 to 0.25"."""
    ends = value if isinstance(value, Sequence) else [value]
    return " to ".join(dict.fromkeys(format(end, form) for end in ends))


def mean_text(
    mean: float | None,
    deviation: float | None = None,
    percent: bool = False,
    sign: str = "",
    digits: int = 2,
) -> str:
    """A mean and its standard deviation: "85.00 ± 7.07" in percent, or "0.1234 ± 0.012".

    Args:
        mean: The mean; None or NaN: there is none.
        deviation: The standard deviation; None or NaN for a single run.
        percent: True if the mean is in percent; otherwise four significant digits are shown, and two of the deviation.
        sign: "+" shows the sign of positive means, too.
        digits: Decimals of percentages.
    """
    if mean is None or math.isnan(mean):
        return ABSENT
    text = format(mean, f"{sign}.{digits}f" if percent else f"{sign}.4g")
    if deviation is None or math.isnan(deviation):
        return text
    spread = format(deviation, f".{digits}f" if percent else ".2g")
    return f"{text} ± {spread}"


def metric_text(name: str, value: float | None, deviation: float | None = None) -> str:
    """A metric as it was logged: accuracies, which are shares, in percent."""
    if "accuracy" not in name:
        return mean_text(value, deviation)
    if value is None or math.isnan(value):
        return ABSENT
    percents = None if deviation is None else 100 * deviation
    return f"{mean_text(100 * value, percents, percent=True)} %"


def seconds_text(seconds: float) -> str:
    """A time, in tenths of a second."""
    return f"{seconds:.1f}"


def noise_text(facts: Mapping[str, Any]) -> str:
    """Noise and batch size of a run in one line, for people.

    Args:
        facts: Result of `runs.ledgers.noise_of`, with the population.
    """
    noise = facts.get("noise_std_over_max_grad_norm", facts["noise_multiplier"])
    size = range_text(facts["expected_batch_size"])
    records = f"{facts['population']:,} {facts.get('unit') or 'record'}s"
    rate = range_text(facts["sample_rate"], ".3g")
    correlation = ""
    if "noise_bands" in facts:
        correlation = f" (correlated noise, {range_text(facts['noise_bands'])} bands)"
    return (
        f"noise multiplier {range_text(noise)}{correlation}, expected batch size {size} of {records} "
        f"(sampling rate {rate})"
    )


def membership_text(facts: Mapping[str, Any] | None) -> str | None:
    """Bound of the releases on membership tests, in one readable line; None if unknown.

    Figures are rounded up, so that they are bounds as they are printed.

    Args:
        facts: Result of `privacy.accounting.tradeoff.MembershipBound.facts`; None: there are none.
    """
    if facts is None:
        return None
    percent = _rounded_up(100 * facts["true_positive_rates"]["0.01"])
    notes = [f"advantage at most {_rounded_up(facts['advantage']):.3g}"]
    if facts["accountant"] != "pld":
        notes.append(f"a loose bound, by {facts['accountant'].upper()}")
    if facts["nominal"]:
        notes.append("nominal")
    return (
        f"an attacker with a false positive rate of 1 % identifies at most {percent:.3g} % of the members "
        f"({'; '.join(notes)})"
    )


def exposure_allowed_text(metrics: Mapping[str, float | None]) -> str | None:
    """Bound of a ledger on the exposure of inserted records, in one readable line; None if unknown.

    Figures are rounded up, so that they are bounds as they are printed.

    Args:
        metrics: Metrics of a run with data.inserted, as logged by `run.evaluation.Exposure`.
    """
    exposure = metrics.get("privacy/exposure_allowed")
    first = metrics.get("privacy/first_rank_allowed")
    if exposure is None or first is None:
        return None
    return (
        f"a mean exposure of at most {_rounded_up(exposure):.3g} bits in expectation; any one record ranks first with "
        f"a probability of at most {_rounded_up(100 * first):.3g} %"
    )


def extraction_text(metrics: Mapping[str, float | None], inserted: Mapping[str, Any]) -> str | None:
    """Secrets that came out of a language model, with the most that the ledger allows; None if none was inserted.

    Args:
        metrics: Metrics of a run with data.inserted, as logged by `run.evaluation.Exposure`.
        inserted: The options data.inserted.
    """
    parts = []
    is_above = False
    for name, way in (("greedy", "greedily"), ("sampled", f"by {inserted.get('samples')} samples each")):
        count = metrics.get(f"nonprivate/extracted_{name}")
        allowed = metrics.get(f"privacy/extracted_{name}_allowed")
        if count is None:
            return None
        if allowed is None:
            parts.append(f"{count:g} {way}")
        else:
            parts.append(f"{count:g} {way} (at most {_rounded_up(allowed):.3g} in expectation)")
            is_above |= count * _LEVEL / 2 > allowed  # Markov's inequality, for two numbers
    text = f"{' and '.join(parts)} of {inserted['records']} secrets"
    if is_above:
        return f"{text}: more than the ledger allows ({100 * (1 - _LEVEL):g} % confidence)"
    return text


def _rounded_up(value: float) -> float:
    """A positive number, rounded up to three digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return math.ceil(value / unit * (1 - 1e-9)) * unit


def uncovered_text(facts: Mapping[str, Any]) -> str | None:
    """Additional δ due to the bounded support of the noise, in one readable line; None if it is negligible.

    Args:
        facts: Result of `runs.ledgers.noise_of`.
    """
    beyond = facts.get("uncovered_delta")
    end = facts.get("noise_end")
    if beyond is None:
        return None
    if end is not None:
        return f"at most {beyond:.2g} in addition, for any epsilon: noise ends at {end:g} standard deviations"
    return (
        f"at least {beyond:.2g} in addition, for any epsilon, without compiled kernels: without them the noise of that "
        "version ended at 5.77 standard deviations"
    )
