"""That a private strategy is alone, inside a Lightning Trainer, and that its hooks run: else nothing is private."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytorch_lightning as pl

from dpbench.errors import ConfigurationError
from dpbench.guards.earlier_fits import refuse_unknown_training
from dpbench.privacy.accounting.seal import Seal
from dpbench.privacy.canaries.file import write_scores
from dpbench.privacy.canaries.scores import ScoreSums

STATE = "dpbench.PrivateStrategy"  # whatever strategy it is: none resumes without knowing what was released


def refuse_two(one: object, other: object) -> NoReturn:
    """Raise ConfigurationError: two strategies at once."""
    raise ConfigurationError(
        f"the trainer has two strategies, {type(one).__name__} and {type(other).__name__}, and a lot can be released "
        "once only: keep one of them."
    )


def refuse_others(trainer: pl.Trainer, strategy: object, kinds: tuple[type, ...]) -> None:
    """Raise ConfigurationError where another callback of some kinds wants to train, or this one is there twice."""
    found = [callback for callback in trainer.callbacks if isinstance(callback, kinds)]  # type: ignore[attr-defined]
    others = [callback for callback in found if callback is not strategy]
    if others or len(found) > 1:
        refuse_two(strategy, (others or found)[0])


class TrainerOnly(ABC):
    """Base of a callback that is of no use outside of a Lightning Trainer, and alone of its kind there."""

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint, one for all strategies."""
        return STATE

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write the state of the releases.

        Not by `state_dict`: a trainer with two strategies would be refused by Lightning, in words that do not say what
        is wrong, before `setup` can.

        Raises:
            ConfigurationError: The training ran in other processes, which alone know what was released.
        """
        refuse_unknown_training(trainer, self.trains_here)
        checkpoint["callbacks"][STATE] = self.state_of_releases()

    @property
    @abstractmethod
    def trains_here(self) -> bool:
        """Whether this process trains."""

    @abstractmethod
    def state_of_releases(self) -> dict[str, Any]:
        """What a resumed run needs to go on with the same releases."""

    def on_after_setup(self, **_: Any) -> None:
        """Lightning Fabric calls this once a model is set up, and none of the hooks that make training private.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(
            f"Lightning Fabric does not run the hooks of {type(self).__name__}, so that training would go on without "
            "privacy: use a Lightning Trainer with callbacks=[strategy] (manual optimization leaves the loop to you)."
        )

    def on_after_optimizer_step(self, **_: Any) -> None:
        """Lightning Fabric calls this after each step; as `on_after_setup`."""
        self.on_after_setup()

    def __iter__(self) -> NoReturn:
        raise ConfigurationError(f"give the trainer a list: callbacks=[{type(self).__name__}(...)].")


def refuse_unreleased_training(trainer: pl.Trainer, releases: int) -> None:
    """Raise ConfigurationError at the end of a training that has stepped, but made no release."""
    if trainer.global_step and not releases:
        raise ConfigurationError(
            f"training has made {trainer.global_step} steps, none of them private: hooks of the private strategy did "
            "not run. A subclass that overrides a hook must call super()'s. Do not publish this model."
        )


def keep_scores(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write what the canaries had seen at a checkpoint: a training that was killed behind its last step did not.

    Args:
        checkpoint: Of the last step.
        path: Of the scores.
    """
    state = checkpoint["callbacks"].get(STATE) or {}
    memory, seal = state.get("canaries"), Seal.read(state.get("ledger"))
    if memory and seal is not None:
        write_scores(path, ScoreSums.of(memory["sums"]).scores(), seal, memory.get("left_out"))
