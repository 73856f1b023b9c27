"""More steps for a finished run: its record stays until there is something to put in its place."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
from omegaconf import OmegaConf

from dpbench.errors import ConfigurationError
from dpbench.run.saved_config import with_later_options, write_config
from dpbench.runs.command import key_of
from dpbench.runs.folder import Run
from dpbench.runs.record import is_audited, read_result

# What decides nothing that a run with other steps would have had, and the budget, which may grow.
_OF_A_SESSION = ("trainer.", "run.", "logger.", "diagnostics.", "engine.", "objective", "strategy.target_epsilon")
_ENDS = ("trainer.max_steps", "trainer.max_epochs")


def _is_of_a_session(key: str) -> bool:
    return key.startswith(_OF_A_SESSION) and key != "trainer.precision"  # which decides gradients


def asks_for_more(words: Sequence[str], config: Mapping[str, Any]) -> bool:
    """Whether words of a command line set the end of a training, or a key that is none: Hydra asks what was meant.

    Args:
        words: Overrides.
        config: Of the run.
    """
    keys, known = set(map(key_of, words)), OmegaConf.create(dict(config))
    return any(key in _ENDS or OmegaConf.select(known, key, default=_ENDS) is _ENDS for key in keys)


def require_extendable(run: Run) -> None:
    """Check that a finished run can be made longer, and say what of it will not be as in a run of that length.

    Noise and lots go on as they were: noise that was solved for a budget is kept, and the budget ends the run.

    Args:
        run: With the settings of the longer run.

    Raises:
        ConfigurationError: It would not be longer, or other settings are asked for, or its audit was read.
    """
    record, folder = read_result(run.folder), run.folder
    made, before, asked = record["steps"], record["config"]["trainer"], run.config["trainer"]
    if (damage := record["privacy"].get("damage")) is not None:
        raise ConfigurationError(f"{folder}: {damage}. Restore the ledger, or train a new run.")
    if is_audited(record):
        raise ConfigurationError(
            f"{folder} was audited at its end: whoever reads an audit and goes on chooses what the next one shows. "
            "Train a new run of that many steps."
        )
    others = sorted(
        key for key in _changed(with_later_options(record["config"]), run.config) if not _is_of_a_session(key)
    )
    if others:
        raise ConfigurationError(
            f"{folder} is finished, and goes on with the settings that it had: leave out {', '.join(others)}, or train "
            "a new run."
        )
    if not folder.checkpoint.exists():
        raise ConfigurationError(f"{folder} has no checkpoint from which it could go on: train a new run.")
    by_epochs = _limit(before, "max_epochs") > -1 and made != _limit(before, "max_steps")
    if -1 < _limit(asked, "max_steps") <= made:
        raise ConfigurationError(f"{folder} has made {made} steps: ask for more of them (trainer.max_steps=...).")
    if by_epochs and -1 < _limit(asked, "max_epochs") <= _limit(before, "max_epochs"):
        raise ConfigurationError(
            f"{folder} ended with trainer.max_epochs={before['max_epochs']}: ask for more of them, too."
        )
    schedule = run.config.get("schedule") or {}
    if planned := [name for name, value in schedule.items() if type(value) is int and value == made]:
        warnings.warn(
            f"the learning rate was planned for {made} steps (schedule.{planned[0]}), and goes on as "
            f"{str(schedule['_target_']).rpartition('.')[2]} does behind them: this is no run of more steps from its "
            "beginning.",
            stacklevel=2,
        )


def _changed(before: Any, asked: Any, key: str = "") -> list[str]:
    """Dotted keys in which two configurations differ."""
    if isinstance(before, dict) and isinstance(asked, dict):
        names = {name: f"{key}.{name}" if key else str(name) for name in {**before, **asked}}
        return [found for name, own in names.items() for found in _changed(before.get(name), asked.get(name), own)]
    return [] if before == asked else [key]


def _limit(trainer: dict[str, Any], name: str) -> int:
    found = trainer.get(name)
    return -1 if found is None else int(found)


class Reopened(pl.Callback):
    """With the first lot that a finished run is given more, it is an interrupted run of the new length.

    Until then it can still be refused, and nothing of it has changed.

    Args:
        run: With the settings of the longer run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Keep the old record as that of a run that can be resumed, then the settings with which it will be."""
        folder = self._run.folder
        if trainer.is_global_zero and folder.result.exists():
            folder.result.replace(folder.partial_result)
            folder.evaluation.unlink(missing_ok=True)
            config = self._run.config
            write_config(Run(folder, {**config, "run": {**config["run"], "resume": False}}, self._run.private))
