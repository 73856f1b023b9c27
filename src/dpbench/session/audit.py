"""The seam of audits: the option `audit` of a strategy, which takes part in its releases."""

from __future__ import annotations

from abc import ABC, abstractmethod

from dpbench.data.sampler import PrivateBatchSampler
from dpbench.privacy.releases import ReleaseEngine, ReleaseHook, TrainableParameters


class Audit(ABC):
    """Options of an audit; its public attributes are part of the key of a seeded training."""

    @abstractmethod
    def hook(self, releases: ReleaseEngine, lots: PrivateBatchSampler, trained: TrainableParameters) -> ReleaseHook:
        """Make the hook of a training that begins or resumes from `releases.memory`, and add its records to batches.

        Args:
            releases: The training's release engine, after `ReleaseEngine.join`.
            lots: Batch sampler of the training data alone; `PrivateBatchSampler.added` says how many records join.
            trained: Parameters that are updated.

        Raises:
            ConfigurationError: The training cannot be audited like this.
        """
