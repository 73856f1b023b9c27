"""Simulated mechanisms of known noise, lots and sensitivity, correct or broken, as an auditor sees them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpbench.capabilities.canaries.scores import Scores, ScoreSums
from dpbench.privacy.accounting.ledger import Header, Ledger, Release
from dpbench.privacy.events import SumQuery
from dpbench.privacy.sampling import PoissonSampling, Sampling


@dataclass(frozen=True)
class World:
    """What is declared (z, rate, releases), and how what happens differs from it.

    Attributes:
        noise, move, drawn_rate: Factors on noise, sensitivity and rate.
        reach: As declared to the auditor.
        shuffled, same_noise, shared_noise: Shuffled epochs for Poisson lots; one noise for all releases; one for all
            canaries of a release.
    """

    z: float = 1.0
    rate: float = 0.05
    releases: int = 200
    canaries: int = 2000
    replace_one: bool = False
    noise: float = 1.0
    move: float = 1.0
    drawn_rate: float = 1.0
    reach: float = 1.0
    shuffled: bool = False
    same_noise: bool = False
    shared_noise: bool = False

    def lots(self, rng: np.random.Generator) -> NDArray[np.bool_]:
        """(releases, canaries) who is drawn."""
        if not self.shuffled:
            return rng.random((self.releases, self.canaries)) < self.rate * self.drawn_rate
        epoch = round(1 / self.rate)
        turns = [rng.integers(epoch, size=self.canaries) for _ in range(-(-self.releases // epoch))]
        return np.concatenate([np.arange(epoch)[:, None] == turn for turn in turns])[: self.releases]

    def seen(self, seed: int) -> tuple[NDArray[np.bool_], NDArray[np.float64], NDArray[np.bool_]]:
        """Members (canaries,), observations and draws (releases, canaries)."""
        rng = np.random.default_rng(seed)
        member, drawn = rng.random(self.canaries) < 0.5, self.lots(rng)
        shape = (1 if self.same_noise else self.releases, 1 if self.shared_noise else self.canaries)
        noise = rng.standard_normal(shape)
        if self.replace_one:
            clean = np.where(drawn, np.where(member, 0.5, -0.5), 0.0)
        else:
            drawn &= member
            clean = drawn.astype(float)
        return member, self.move * clean + self.z * self.noise * noise, drawn

    def sums(self, seed: int = 0) -> ScoreSums:
        """What an auditor adds up."""
        member, observed, drawn = self.seen(seed)
        sums = ScoreSums(member, self.replace_one, self.reach)
        for x, there in zip(observed, drawn, strict=True):
            sums.add(x, there, self.z, self.rate)
        return sums

    def scores(self, seed: int = 0) -> Scores:
        return self.sums(seed).scores()


def ledger_of(world: World, sampling: Sampling | None = None, delta: float = 1e-5) -> Ledger:
    """What such a run declares: one query of sensitivity 1; Poisson lots of 5,000 records by default."""
    sampling = sampling or PoissonSampling(5000, world.rate)
    header = Header(sampling.unit, sampling.neighboring_relation, sampling.population, delta)
    release = (SumQuery("all", 1.0, world.z),)
    return Ledger([header], [(0, Release(number, sampling, release)) for number in range(world.releases)])


NOISE = {1: 2.1423, 4: 0.9395, 10: 0.6349}
"""Noise multipliers by ε at δ = 1e-5, of 100 releases at a rate of 5 %, by privacy loss distributions."""
