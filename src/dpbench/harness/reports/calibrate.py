"""`dpbench calibrate`: a budget solved backwards, as text or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from pathlib import Path
from typing import Any

from dpbench.errors import ConfigurationError
from dpbench.harness.runs.ledgers import read_one_ledger
from dpbench.harness.runs.numbers import epsilon_text, membership_text
from dpbench.privacy.accounting.accountants import ACCOUNTANTS
from dpbench.privacy.accounting.calibration import TrainingSetting, missing_in, solved
from dpbench.privacy.accounting.composition import doubts_about
from dpbench.privacy.accounting.tradeoff import (
    MembershipBound,
    MembershipTarget,
    curve_accountant,
    solved_within,
    trade_off,
)
from dpbench.privacy.events import Event, effective_noise_multiplier, record_changes
from dpbench.privacy.sampling import CyclicPoissonSampling, PoissonSampling, find_scheme
from dpbench.templates import render

_USUAL_DELTA = 1e-5  # as of a training, beside a membership risk


@dataclass(frozen=True)
class TrainingValues:
    """Values of a training that a user gives; None is solved for, or comes from a run.

    Attributes:
        noise_multiplier: Noise over the sensitivity of the sum.
        sample_rate: Probability of a record to be in a lot.
        batch_size: The same times the population; not both.
        population: Number of records.
        steps: Number of lots.
        epochs: The same in epochs, as a training counts them; not both.
        epsilon: ε.
        delta: δ.
        sampling: How lots are drawn, see `find_scheme`.
        advantage: Largest advantage of a membership test, in place of ε.
        tpr: "TPR@FPR", its largest true positive rate at a false positive rate, in place of ε.
        bands: Steps over which noise is correlated.
    """

    noise_multiplier: float | None = None
    sample_rate: float | None = None
    batch_size: float | None = None
    population: int | None = None
    steps: int | None = None
    epochs: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    sampling: str | None = None
    advantage: float | None = None
    tpr: str | None = None
    bands: int | None = None

    @property
    def target(self) -> MembershipTarget | None:
        """The membership risk that is the budget.

        Raises:
            ConfigurationError: It is stated twice, or is none.
        """
        if self.advantage is not None and self.tpr is not None:
            raise ConfigurationError("give --advantage or --tpr, not both.")
        if self.advantage is not None:
            return MembershipTarget(self.advantage)
        if self.tpr is None:
            return None
        limit, _, false_positive_rate = self.tpr.partition("@")
        try:
            rates = float(limit), float(false_positive_rate)
        except ValueError:
            raise ConfigurationError(
                "--tpr must be a true positive rate at a false positive rate, TPR@FPR such as 0.05@0.01, not "
                f"{self.tpr!r}."
            ) from None
        return MembershipTarget(*rates)

    def setting(self, spent: Mapping[Event, int]) -> TrainingSetting:
        """The setting that accountants take, after what was spent before.

        Raises:
            ConfigurationError: Two values say the same, or one is out of range.
        """
        return TrainingSetting(
            noise_multiplier=self.noise_multiplier,
            sample_rate=self._rate(),
            steps=self.steps,
            epochs=self.epochs,
            epsilon=self.epsilon,
            delta=self.delta,
            sampling=find_scheme(self.sampling or PoissonSampling.kind).kind,
            population=self.population,
            spent=spent,
            bands=1 if self.bands is None else self.bands,
        )

    def _rate(self) -> float | None:
        for name, other in (("sample_rate", "batch_size"), ("steps", "epochs")):
            if getattr(self, name) is not None and getattr(self, other) is not None:
                raise ConfigurationError(f"give {_flag(name)} or {_flag(other)}, not both.")
        if self.batch_size is None:
            return self.sample_rate
        if self.population is None:
            raise ConfigurationError("--batch-size requires --population: the sample rate is one over the other.")
        if not 0 < self.batch_size <= self.population:
            raise ConfigurationError(
                f"--batch-size must lie between 1 and the population, {self.population}, not {self.batch_size:g}."
            )
        return self.batch_size / self.population


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def request(
    values: TrainingValues,
    microbatch_size: int | None = None,
    ledger: Path | None = None,
) -> tuple[TrainingSetting, int]:
    """The setting that is to be solved, and the size of its microbatches.

    With a run, what is not given comes from its last release, as long as one value is left to solve for.

    Args:
        values: Values of the training.
        microbatch_size: μ; above 1 every neighbor moves a sum by two bounds. None takes the run's, else 1.
        ledger: A run to go on with: what it spent counts.

    Raises:
        LedgerError: The run's ledger is damaged or empty.
        ConfigurationError: Values contradict each other or the run.
    """
    if ledger is None:
        size = 1 if microbatch_size is None else microbatch_size
        if size < 1:
            raise ConfigurationError(f"microbatch_size must be at least 1, not {size}.")
        if values.target is not None and values.delta is None:
            values = replace(values, delta=_USUAL_DELTA)
        return values.setting({}), size
    run = read_one_ledger(ledger)
    last = run.releases[-1][1]
    sampling = last.sampling
    _ = sampling.relation  # refuses what no accountant covers
    stated = {
        "sampling": (sampling.kind, None if values.sampling is None else find_scheme(values.sampling).kind),
        "population": (sampling.population, values.population),
        "microbatch_size": (run.header.microbatch_size, microbatch_size),
    }
    for name, (recorded, requested) in stated.items():
        if requested not in (None, recorded):
            raise ConfigurationError(f"{ledger} has {name} {recorded}, not {requested}: remove {_flag(name)}.")
    setting = replace(values, population=sampling.population, sampling=sampling.kind).setting(run.events)
    of_run: dict[str, Any] = {
        "delta": run.header.delta,
        "sample_rate": sampling.rate,
        "noise_multiplier": effective_noise_multiplier(last.queries),
    }
    for name, value in of_run.items():
        # One value stays open: it is what is solved for. Beside a membership risk, ε is no value.
        if name in missing_in(setting) and len(missing_in(setting)) > (1 if values.target is None else 2):
            setting = replace(setting, **{name: value})
    return setting, run.header.microbatch_size


def calibrate(
    setting: TrainingSetting,
    microbatch_size: int,
    accountant: str,
    target: MembershipTarget | None = None,
) -> dict[str, Any]:
    """Solve for the missing value; the facts that `dpbench calibrate` prints.

    Args:
        setting: A setting that lacks one value.
        microbatch_size: μ.
        accountant: Name of the accountant.
        target: A membership risk that is the budget, in place of ε.

    Raises:
        DPBenchError: See `solved` and `solved_within`.
    """
    answer = solved(setting, accountant) if target is None else solved_within(setting, target, accountant)
    z = answer.noise_multiplier
    rate = answer.sample_rate
    steps = answer.steps
    assert z is not None
    assert rate is not None
    assert steps is not None
    sampling = answer.event.sampling
    facts: dict[str, Any] = {
        "solved_for": missing_in(setting)[0],
        "target": None if target is None else str(target),
        "epsilon": answer.epsilon,
        "epsilon_reached": answer.epsilon_by(accountant),
        "delta": answer.delta,
        "noise_multiplier": z,
        "sample_rate": rate,
        "steps": steps,
        "epochs": steps / answer.drawn.steps_per_epoch,
        "sampling": answer.sampling if answer.bands == 1 else CyclicPoissonSampling.kind,
        "neighbouring_relation": sampling.neighboring_relation,
        "accountant": accountant,
        "guarantee": ACCOUNTANTS[accountant].guarantee,
    }
    if answer.population is not None:
        facts["population"] = answer.population
        facts["batch_size"] = sampling.expected_batch_size / answer.bands
    if answer.bands > 1:
        facts["bands"] = answer.bands
    facts["membership"] = _membership(answer)
    if answer.spent:
        facts["steps_before"] = sum(answer.spent.values())
    facts["noise_std_over_max_grad_norm"] = z * record_changes(sampling, microbatch_size)
    facts["train"] = _training_command(answer) if microbatch_size == 1 else None
    assert answer.delta is not None
    facts["doubts"] = doubts_about(answer.delta, z, answer.population, "record")
    return facts


def _training_command(answer: TrainingSetting) -> str | None:
    """The command of a training as it was solved for.

    Noise is rounded up and the batch size down: what is trained costs at most what was asked for.

    Args:
        answer: The setting with all of its values, without microbatches.

    Returns:
        None where a command does not say it all: without the number of records, and after another run.
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


def _membership(answer: TrainingSetting) -> dict[str, Any]:
    """The rates of membership tests that the releases allow."""
    events = answer.events
    sampling = answer.event.sampling
    bound = MembershipBound(
        trade_off(events),
        accountant=curve_accountant(events),
        nominal=False,
        unit=sampling.unit,
        neighboring_relation=sampling.neighboring_relation,
    )
    return bound.facts()


def calibration_text(facts: dict[str, Any]) -> str:
    """Format the facts of a calibration for the terminal."""
    text = render(
        "calibrate.txt",
        **facts,
        accountant_title=ACCOUNTANTS[facts["accountant"]].title,
        epsilon_of=epsilon_text,
        membership_of=membership_text,
    )
    return text.rstrip("\n")
