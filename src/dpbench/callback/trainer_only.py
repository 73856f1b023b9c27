"""That a private strategy is alone, inside a Lightning Trainer, and that its hooks run: else nothing is private."""

from __future__ import annotations

from typing import Any, NoReturn

import pytorch_lightning as pl

from dpbench.callback.earlier_fits import refuse_unknown_training
from dpbench.errors import ConfigurationError

STATE = "dpbench.PrivateStrategy"  # whatever strategy it is: none resumes without knowing what was released


class StateKey(str):
    """The key of a strategy's state in checkpoints, which no two strategies of a trainer share.

    Lightning compares the keys when a trainer is made, and would say that a callback "does not support being saved
    alongside other instances of the same type".
    """

    owner: object

    def __new__(cls, text: str, owner: object) -> StateKey:
        key = super().__new__(cls, text)
        key.owner = owner
        return key

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StateKey) and other.owner is not self.owner:
            refuse_two(self.owner, other.owner)
        return str.__eq__(self, other)

    __hash__ = str.__hash__

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


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


class TrainerOnly:
    """Base of a callback that is of no use outside of a Lightning Trainer, and alone of its kind there."""

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint, one for all strategies."""
        return StateKey(STATE, self)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write the keys of callbacks as plain text, which is all that `torch.load(weights_only=True)` reads.

        Raises:
            ConfigurationError: The training ran in other processes, which alone know what was released.
        """
        refuse_unknown_training(trainer, getattr(self, "_admitted", True) is not None)
        checkpoint["callbacks"] = {str(key): state for key, state in checkpoint["callbacks"].items()}

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
