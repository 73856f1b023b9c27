"""What a training would cost elsewhere: with another noise, rate or length, or on more records than a run had.

Figures for planning: no guarantee of any run.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.calibration import TrainingSetting
from dpbench.privacy.accounting.ledger import Ledger, Release
from dpbench.privacy.sampling import Sampling

FACTORS = (0.5, 0.8, 1.0, 1.25, 2.0)
"""By which `neighborhood` changes a value."""


def neighborhood(setting: TrainingSetting, accountant: str) -> dict[str, list[dict[str, float | None]]]:
    """Compute ε where one value of a complete setting changes by each of `FACTORS`.

    Args:
        setting: Complete, as `calibration.solved` returns it.
        accountant: Name.

    Returns:
        For noise multiplier, sample rate and steps: factor, changed value and its ε (None: none is finite).
    """
    table: dict[str, list[dict[str, float | None]]] = {}
    for name in ("noise_multiplier", "sample_rate", "steps"):
        table[name] = []
        for factor in FACTORS:
            value = _changed(setting, name, factor)
            changes: dict[str, Any] = {name: value}
            try:
                epsilon = replace(setting, **changes).epsilon_by(accountant)
            except ConfigurationError:  # a rate above 1, or too large for pld
                epsilon = math.inf
            table[name].append(
                {
                    "factor": factor,
                    name: value,
                    "epsilon": epsilon if math.isfinite(epsilon) else None,
                }
            )
    return table


def _changed(setting: TrainingSetting, name: str, factor: float) -> float:
    """A value of a setting times a factor; steps, and lots of a fixed size, stay whole."""
    value: float = factor * getattr(setting, name)
    if name == "steps":
        return max(1, round(value))
    if name == "sample_rate" and setting.scheme.whole_lots and setting.population is not None:
        return max(1, round(value * setting.population)) / setting.population
    return value


def sampling_at(sampling: Sampling, population: int, lot_size: float | None) -> Sampling:
    """The same scheme over another population.

    Args:
        sampling: Of a run.
        population: Number of records (users, where the unit is one).
        lot_size: Expected number of them in a lot; None: as in the run.

    Raises:
        ConfigurationError: The lot does not fit the population, or the scheme is not described by a rate.
    """
    size = sampling.expected_batch_size if lot_size is None else lot_size
    if not sampling.known_by_rate:
        raise ConfigurationError(
            f"--population needs batches that a rate describes (poisson, fixed_size), not {sampling.kind}."
        )
    if population < 1 or not 0 < size <= population:
        raise ConfigurationError(f"batches of {size:g} {sampling.unit}s do not fit a population of {population}.")
    return type(sampling).at_rate(population, size / population, sampling.unit)


def at_population(ledger: Ledger, population: int, lot_size: float | None = None) -> Ledger:
    """A ledger as it would be over another population, with lots and noise grown by one factor.

    A sum over α times as many records with α times the noise is the same average with the same noise
    (adaptive_quantile_clipping_2021, section 4, step 3): so what was learned would be, and each record is protected
    more, by more noise and perhaps a smaller rate.

    Args:
        ledger: Of a run.
        population: Number of records.
        lot_size: Expected number of records in a lot; None: that of the run, so that α is 1.
    """
    releases = []
    for phase, release in ledger.releases:
        sampling = sampling_at(release.sampling, population, lot_size)
        factor = 1.0
        if lot_size is not None:
            factor = sampling.expected_batch_size / release.sampling.expected_batch_size
        queries = []
        for query in release.queries:
            noise_std = query.noise_std * factor
            queries.append(query._replace(noise_std=noise_std))
        grown = Release(release.number, sampling, tuple(queries), release.checksum)
        releases.append((phase, grown))
    # Plans describe the lots that were drawn, which these are not.
    headers = [replace(header, population=population, plan=None) for header in ledger.headers]
    return Ledger(headers, releases, ledger.damage, ledger.doubt)
