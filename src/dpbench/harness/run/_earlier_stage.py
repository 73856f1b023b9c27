"""The earlier stage: a finished run with the weights and the ledger from which another run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dpbench.errors import ConfigurationError
from dpbench.harness.run.config import class_of
from dpbench.harness.run.saved_config import read_config
from dpbench.harness.run.saved_module import last_checkpoint
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.record import read_result
from dpbench.models import merged_state
from dpbench.privacy.accounting.seal import Seal, difference
from dpbench.strategies import PrivateStrategy


def with_earlier_stage(config: dict[str, Any]) -> dict[str, Any]:
    """Settings in which `after` is the path of a finished run from anywhere.

    Args:
        config: The configuration of the run that goes on.

    Raises:
        ConfigurationError: There is no such run, it has not ended, or only one of the two is private.
    """
    if config.get("after") is None:
        return config
    folder = RunFolder(Path(config["after"]).resolve())
    read_config(folder)
    if not folder.finished:
        raise ConfigurationError(f"after={folder}: that run is not finished: {folder.command('resume')}.")
    record = read_result(folder)
    seal = Seal.read(record["privacy"].get("ledger"))
    private = issubclass(class_of(config["strategy"], "strategy"), PrivateStrategy)
    if private and seal is None:
        raise ConfigurationError(
            f"after={folder}: that run has no ledger, and no epsilon would cover its weights: continue from a "
            "private run (public weights are loaded by the model's own class)."
        )
    if not private and seal is not None:
        raise ConfigurationError(
            f"after={folder}: continuing a private run without privacy would void its epsilon: choose a private "
            "strategy, or remove after."
        )
    other = None if seal is None else difference(folder.ledger, seal, witness=folder.result.name)
    if other is not None:
        raise ConfigurationError(f"after={folder}: its ledger has {other}. Restore it.")
    return {**config, "after": str(folder)}


def weights_before(config: Mapping[str, Any], trust: bool) -> dict[str, Tensor] | None:
    """Weights of the stage before, adapters merged; None where there is none.

    Args:
        config: The result of `with_earlier_stage`.
        trust: True if its checkpoint may hold objects; see `read_checkpoint`.
    """
    if config.get("after") is None:
        return None
    checkpoint = last_checkpoint(RunFolder(Path(config["after"])), trust)
    return merged_state(checkpoint["state_dict"])
