"""`dpbench calibrate`: a budget solved backwards, as text or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import Any

from dpbench.errors import ConfigurationError
from dpbench.harness.runs.ledgers import read_one_ledger
from dpbench.harness.runs.numbers import epsilon_text, membership_text
from dpbench.privacy.accounting.accountants import ACCOUNTANTS
from dpbench.privacy.accounting.calibration import TrainingSetting, missing_in, solved, unknown_of
from dpbench.privacy.accounting.composition import doubts_about
from dpbench.privacy.accounting.tradeoff import MembershipBound, MembershipTarget, curve_accountant, trade_off
from dpbench.privacy.events import effective_noise_multiplier, record_changes
from dpbench.privacy.sampling import CyclicPoissonSampling, PoissonSampling, find_scheme
from dpbench.templates import render

_USUAL_DELTA = 1e-5  # as of a training, beside a membership risk
_VALUES = (
    "noise_multiplier",
    "sample_rate",
    "steps",
    "epochs",
    "epsilon",
    "delta",
    "sampling",
    "population",
    "bands",
)
"""Options that are values of `TrainingSetting`."""


def request(options: Mapping[str, Any]) -> tuple[TrainingSetting, int, MembershipTarget | None]:
    """The setting to be solved, the size of its microbatches, and the membership risk that is its budget, if any.

    With a run, missing values come from its last release, as long as one value is left to solve for.

    Args:
        options: The options of the command, by name; None where one is not given.

    Raises:
        LedgerError: The run's ledger is damaged or empty.
        ConfigurationError: Values contradict each other or the run.
    """
    for name, other in (("sample_rate", "batch_size"), ("steps", "epochs"), ("advantage", "tpr")):
        if options[name] is not None and options[other] is not None:
            raise ConfigurationError(f"give {_flag(name)} or {_flag(other)}, not both.")
    values = {name: options[name] for name in _VALUES if options[name] is not None}
    size = options["microbatch_size"]
    if size is not None and size < 1:
        raise ConfigurationError(f"microbatch_size must be at least 1, not {size}.")
    target = _target(options)
    if "sampling" in values:
        values["sampling"] = find_scheme(values["sampling"]).kind
    path = options["continue_from"]
    of_run: dict[str, Any] = {}
    if path is not None:
        run = read_one_ledger(path)
        _, last = run.releases[-1]
        sampling = last.sampling
        _ = sampling.relation  # refuses what no accountant covers
        recorded = {
            "sampling": (sampling.kind, values.get("sampling")),
            "population": (sampling.population, values.get("population")),
            "microbatch_size": (run.header.microbatch_size, size),
        }
        for name, (value, given) in recorded.items():
            if given not in (None, value):
                raise ConfigurationError(f"{path} has {name} {value}, not {given}: remove {_flag(name)}.")
        size = run.header.microbatch_size
        values |= {"sampling": sampling.kind, "population": sampling.population, "spent": run.events}
        of_run = {
            "delta": run.header.delta,
            "sample_rate": sampling.rate,
            "noise_multiplier": effective_noise_multiplier(last.queries),
        }
    elif target is not None:
        values.setdefault("delta", _USUAL_DELTA)
    if options["batch_size"] is not None:
        values["sample_rate"] = _rate(options["batch_size"], values.get("population"))
    setting = TrainingSetting(**values)
    unknowns = 1 if target is None else 2  # beside a membership risk, ε is no value
    for name, value in of_run.items():
        if name in missing_in(setting) and len(missing_in(setting)) > unknowns:
            setting = replace(setting, **{name: value})
    return setting, size or 1, target


def _target(options: Mapping[str, Any]) -> MembershipTarget | None:
    if options["advantage"] is not None:
        return MembershipTarget(options["advantage"])
    text = options["tpr"]
    if text is None:
        return None
    limit, _, false_positive_rate = text.partition("@")
    try:
        rates = float(limit), float(false_positive_rate)
    except ValueError:
        raise ConfigurationError(
            f"--tpr must be a true positive rate at a false positive rate, TPR@FPR such as 0.05@0.01, not {text!r}."
        ) from None
    return MembershipTarget(*rates)


def _rate(batch_size: float, population: int | None) -> float:
    if population is None:
        raise ConfigurationError("--batch-size requires --population: the sample rate is one over the other.")
    if not 0 < batch_size <= population:
        raise ConfigurationError(
            f"--batch-size must lie between 1 and the population, {population}, not {batch_size:g}."
        )
    return batch_size / population


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def calibrate(options: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Solve for the missing value.

    Args:
        options: The options of the command, by name; None where one is not given.

    Returns:
        Facts for JSON, and the same for the terminal.

    Raises:
        DPBenchError: See `request` and `solved`.
    """
    setting, microbatch_size, target = request(options)
    unknown = unknown_of(setting, target, _flag)
    accountant = options["accountant"]
    answer = solved(setting, accountant, target)
    z = answer.noise_multiplier
    assert z is not None
    assert answer.steps is not None
    assert answer.delta is not None
    sampling = answer.event.sampling
    events = answer.events
    facts: dict[str, Any] = {
        "solved_for": unknown,
        "target": None if target is None else str(target),
        "epsilon": answer.epsilon,
        "epsilon_reached": answer.epsilon_by(accountant),
        "delta": answer.delta,
        "noise_multiplier": z,
        "sample_rate": answer.sample_rate,
        "steps": answer.steps,
        "epochs": answer.steps / answer.drawn.steps_per_epoch,
        "sampling": answer.sampling if answer.bands == 1 else CyclicPoissonSampling.kind,
        "neighbouring_relation": sampling.neighboring_relation,
        "accountant": accountant,
        "guarantee": ACCOUNTANTS[accountant].guarantee,
        "membership": MembershipBound(trade_off(events), curve_accountant(events)).facts(),
        "noise_std_over_max_grad_norm": z * record_changes(sampling, microbatch_size),
        "train": _training_command(answer) if microbatch_size == 1 else None,
        "doubts": doubts_about(answer.delta, z, answer.population, "record"),
    }
    if answer.population is not None:
        facts["population"] = answer.population
        facts["batch_size"] = sampling.expected_batch_size / answer.bands
    if answer.bands > 1:
        facts["bands"] = answer.bands
    if answer.spent:
        facts["steps_before"] = sum(answer.spent.values())
    text = render(
        "calibrate.txt",
        **facts,
        accountant_title=ACCOUNTANTS[accountant].title,
        epsilon_of=epsilon_text,
        membership_of=membership_text,
    )
    return facts, text.rstrip("\n")


def _training_command(answer: TrainingSetting) -> str | None:
    """The command of a training as it was solved for.

    Noise is rounded up and the batch size down: the training costs at most the target.

    Args:
        answer: The setting with all of its values, without microbatches.

    Returns:
        The command; None if it would be incomplete: without the number of records, or when a run is continued.
    """
    if answer.population is None or answer.spent:
        return None
    sampling = answer.event.sampling
    assert answer.noise_multiplier is not None
    noise = answer.noise_multiplier * record_changes(sampling, 1)
    words = [
        "dpbench train",
        f"strategy.noise_multiplier={_rounded(noise, ROUND_CEILING)}",
        f"strategy.delta={answer.delta!r}",
        f"data.expected_batch_size={_rounded(sampling.expected_batch_size / answer.bands, ROUND_FLOOR)}",
        f"trainer.max_steps={answer.number_of_steps}",
    ]
    if answer.bands > 1:
        words += [
            "strategy.noise=banded",
            f"strategy.bands={answer.bands}",
            f"data.sampling={CyclicPoissonSampling.kind}",
        ]
    elif answer.sampling != PoissonSampling.kind:
        words.append(f"data.sampling={answer.sampling}")
    return " ".join(words)


def _rounded(value: float, direction: str) -> str:
    """A number with seven digits, rounded in a direction of `decimal`; one that has no more stays as it is."""
    return f"{float(Context(prec=7, rounding=direction).create_decimal(repr(value))):.7g}"
