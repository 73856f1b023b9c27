"""The cost of a run as it would be on more records.

Figures for planning: no guarantee of any run.
"""

from __future__ import annotations

from dataclasses import replace

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.ledger import Ledger, Release
from dpbench.privacy.sampling import Sampling


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
