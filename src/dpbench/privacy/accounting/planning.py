"""The cost of a run as it would be on more records.

Figures for planning: no guarantee of any run.
"""

from __future__ import annotations

from dataclasses import replace

from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.ledger import Ledger


def at_population(ledger: Ledger, population: int, lot_size: float | None = None) -> Ledger:
    """A ledger as it would be over another population, with batches and noise grown by one factor.

    A sum over α times as many records with α times the noise is the same average with the same noise
    (adaptive_quantile_clipping_2021, section 4, step 3): so the training would learn the same, and each record is
    protected more, by more noise and perhaps a smaller rate.

    Args:
        ledger: Ledger of a run.
        population: Number of records.
        lot_size: Expected number of records in a batch; None: that of the run, so that α is 1.

    Raises:
        ConfigurationError: The batch does not fit the population, or the scheme is not described by a rate.
    """
    releases = []
    for phase, release in ledger.releases:
        drawn = release.sampling
        size = drawn.expected_batch_size if lot_size is None else lot_size
        if not drawn.known_by_rate:
            raise ConfigurationError(f"--population needs poisson or fixed_size batches, not {drawn.kind}.")
        if population < 1 or not 0 < size <= population:
            raise ConfigurationError(
                f"batches of {size:g} {drawn.unit}s cannot be drawn from a population of {population}."
            )
        sampling = type(drawn).at_rate(population, size / population, drawn.unit)
        factor = 1.0
        if lot_size is not None:
            factor = sampling.expected_batch_size / drawn.expected_batch_size
        queries = [query._replace(noise_std=query.noise_std * factor) for query in release.queries]
        releases.append((phase, replace(release, sampling=sampling, queries=tuple(queries))))
    # Plans describe the batches that were drawn, which these are not.
    headers = [replace(header, population=population, plan=None) for header in ledger.headers]
    return Ledger(headers, releases, ledger.damage, ledger.doubt)
