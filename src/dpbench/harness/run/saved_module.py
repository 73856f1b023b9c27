"""The module that a run trained, built again from the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

from dpbench.errors import ClassNotFound, ConfigurationError, brief
from dpbench.harness.run.build import instantiate, module_for
from dpbench.harness.run.config import class_of
from dpbench.harness.run.saved_config import read_config
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.readers import read_checkpoint
from dpbench.harness.runs.record import read_result
from dpbench.modules.image_generator import SHAPE
from dpbench.options import options_of


@dataclass(frozen=True)
class SavedModule:
    """Content of a run's checkpoint.

    Attributes:
        module: The module in evaluation mode, on the CPU.
        config: The run's configuration.
        checkpoint: The checkpoint as saved.
        model_options: Sizes that the data determine, such as the shape of a record.
        inputs: How the data module prepares inputs; empty where it does not describe that, or was not loaded.
    """

    module: Any  # a LightningModule, of the class that the configuration names
    config: dict[str, Any]
    checkpoint: dict[str, Any]
    model_options: Mapping[str, Any]
    inputs: Mapping[str, Any]


def last_checkpoint(run: RunFolder, trust: bool = False) -> dict[str, Any]:
    """Read the last checkpoint of a run (never a better one).

    Args:
        run: Folder.
        trust: True if the checkpoint may hold objects; see `read_checkpoint`.

    Raises:
        ConfigurationError: There is no run, no checkpoint, it is damaged, or holds objects and is not trusted.
    """
    read_config(run)  # a folder without a run is told apart from a run without a checkpoint
    if not run.checkpoint.is_file():
        raise ConfigurationError(f"{run} has no checkpoint yet: {run.checkpoint} is missing.")
    return read_checkpoint(run.checkpoint, trust=trust)


def final_checkpoint(run: RunFolder, trust: bool = False) -> dict[str, Any]:
    """Checkpoint of a finished run, with the weights of its result.

    Args:
        run: Folder.
        trust: See `last_checkpoint`.

    Raises:
        ConfigurationError: See `last_checkpoint`; or the run has gone on since, and was interrupted.
    """
    checkpoint = last_checkpoint(run, trust)
    recorded_steps = read_result(run)["steps"]
    if checkpoint["global_step"] != recorded_steps:
        raise ConfigurationError(
            f"{run} went on from {recorded_steps} to {checkpoint['global_step']} steps and was interrupted: "
            f"`{run.command('resume')}`."
        )
    return checkpoint


def require_module(run: RunFolder, config: Mapping[str, Any], kind: type, refusal: str) -> None:
    """Refuse a run of another kind of module, before its checkpoint or its data are read.

    Args:
        run: Folder, for the error.
        config: The run's configuration.
        kind: Base class of its module.
        refusal: Message about a run that has another one.

    Raises:
        ConfigurationError: The module is none of that kind, or the configuration names none.
    """
    try:
        module_class = class_of(config["module"], "module")
    except ClassNotFound:
        raise  # the file may be in order, and the code elsewhere
    except (ConfigurationError, AttributeError, KeyError) as error:
        raise ConfigurationError(f"{run.config} is damaged: {brief(error)}") from error
    if not issubclass(module_class, kind):
        raise ConfigurationError(f"{run} {refusal}")


def load_module(
    run: RunFolder,
    checkpoint: dict[str, Any],
    model_options: Mapping[str, Any] | None = None,
) -> SavedModule:
    """Build a run's module with the weights of a checkpoint.

    Args:
        run: Folder.
        checkpoint: Result of `last_checkpoint`.
        model_options: Options that the data provide, if they are loaded already. By default they come from the
            checkpoint (a generator's, so that it samples without its data) or the data.

    Raises:
        ConfigurationError: It holds no run, or the checkpoint is of another architecture.
        DataError: The data, which determine the network's inputs, are not there.
    """
    config = read_config(run)
    inputs: Mapping[str, Any] = {}
    if model_options is None:
        if SHAPE in checkpoint:
            model_options = checkpoint[SHAPE]
        else:
            data = _load_data(config)
            model_options = data.model_options() if hasattr(data, "model_options") else {}
            inputs = data.describe_inputs() if hasattr(data, "describe_inputs") else {}
    module = module_for(config, dict(model_options))
    try:
        module.load_state_dict(checkpoint["state_dict"])
    except (KeyError, TypeError, RuntimeError) as error:
        raise ConfigurationError(
            f"{run.checkpoint} is of another architecture than {run.config} says: "
            f"{shorten(str(error), 300, placeholder=' …')}"
        ) from error
    return SavedModule(module.eval(), config, checkpoint, model_options, inputs)


def _load_data(config: Mapping[str, Any]) -> Any:
    """Load the data for what they determine: the model's options, and how inputs are prepared."""
    cls = class_of(config["data"], "data")
    options = {**config["data"], "seed": None}
    if options.get("membership") is not None:
        options["membership"] = None  # which needs the seed, and changes nothing that a model is made by
    if "sampling" in options_of(cls) and options.get("sampling") is None:
        options["sampling"] = "shuffled"  # any will do: no lot is drawn
    data = instantiate(cls, options, "data")
    data.prepare_data()
    data.setup("fit")
    return data
