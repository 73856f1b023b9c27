"""Accounting from Python: `dpbench.calibrate` and `dpbench.epsilon`, like the commands `calibrate` and `account`."""

from __future__ import annotations

import math
import warnings
from os import PathLike
from pathlib import Path

from dpbench.errors import ConfigurationError, LedgerError
from dpbench.harness.reports.account import AccountingRequest, account
from dpbench.options import Positive, PositiveInt, Share, check_options
from dpbench.privacy.accounting.calibration import TrainingSetting, solved
from dpbench.privacy.accounting.composition import doubts_about, find_accountant


def calibrate(
    *,
    noise_multiplier: Positive | None = None,
    sample_rate: Positive | None = None,
    batch_size: Positive | None = None,
    steps: PositiveInt | None = None,
    epochs: Positive | None = None,
    epsilon: Positive | None = None,
    delta: Share | None = None,
    population: PositiveInt | None = None,
    accountant: str = "rdp",
) -> TrainingSetting:
    """Solve for whichever of noise, rate, duration, ε and δ is left out; batches are Poisson samples.

    `dpbench calibrate` also takes batches of a fixed size, microbatches, bands, and a run to continue.

    Args:
        noise_multiplier: Standard deviation of the noise over max_grad_norm, as strategies take it.
        sample_rate: Probability that a record is in a batch.
        batch_size: Expected number of records in a batch, in place of the rate; requires `population`.
        steps: Number of batches.
        epochs: Number of steps in epochs, in place of `steps`.
        epsilon: ε.
        delta: δ.
        population: Number of records.
        accountant: Name of the accountant, such as "rdp" or "pld".

    Returns:
        The complete setting.

    Raises:
        ConfigurationError: A value is no number in its range, not exactly one is missing, or none is within reach.

    >>> setting = calibrate(epsilon=3.0, delta=1e-5, population=60_000, batch_size=256, epochs=60)
    >>> round(setting.noise_multiplier, 4), setting.steps
    (1.0135, 14040)
    """
    check_options(calibrate, dict(locals()))
    if batch_size is not None:
        if population is None or sample_rate is not None:
            raise ConfigurationError("batch_size requires population, and replaces sample_rate: give one of them.")
        sample_rate = batch_size / population
    setting = solved(
        TrainingSetting(
            noise_multiplier=noise_multiplier,
            sample_rate=sample_rate,
            steps=steps,
            epochs=epochs,
            epsilon=epsilon,
            delta=delta,
            population=population,
        ),
        accountant,
    )
    assert setting.delta is not None
    assert setting.noise_multiplier is not None
    for doubt in doubts_about(setting.delta, setting.noise_multiplier, population, "record"):
        warnings.warn(doubt, stacklevel=2)
    return setting


def epsilon(
    *sources: str | PathLike[str],
    delta: float | None = None,
    accountant: str = "rdp",
) -> float:
    """Compute the ε of everything that the ledgers record, together.

    Args:
        sources: Ledgers, or folders of runs or sweeps, on the same data.
        delta: δ; None takes the runs' own.
        accountant: Name of the accountant, such as "rdp" or "pld".

    Returns:
        ε; infinity where a run without privacy is among them.

    Raises:
        LedgerError: A ledger is missing or damaged.
        ConfigurationError: The accountant does not cover the sampling, or the ledgers do not compose.
    """
    if not sources:
        raise ConfigurationError("name at least one ledger, or the folder of a run.")
    find_accountant(accountant)  # one, not a list of several
    report = account([Path(source) for source in sources], AccountingRequest(accountant, delta))
    for name, damage in report.damage.items():
        raise LedgerError(f"{name}: {damage}; the epsilon of the rest is not a guarantee.")
    for doubt in report.doubts:
        warnings.warn(doubt, stacklevel=2)
    if not report.facts["guarantee"]:
        warnings.warn(f"the epsilon of {accountant} is not a proven bound for these ledgers.", stacklevel=2)
    value = report.facts["epsilon"]
    return math.inf if value is None else float(value)
