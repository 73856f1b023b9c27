"""Checks of a sweep's jobs before the first one starts: later ones would fail after others have spent their epsilon."""

from __future__ import annotations

from typing import Any

import torch

from dpbench.data.images import ImageDataModule
from dpbench.data.module import PrivateDataModule
from dpbench.errors import ConfigurationError
from dpbench.harness.run._earlier_stage import with_earlier_stage
from dpbench.harness.run.build import build_strategy, make_data, module_for
from dpbench.harness.run.config import class_of
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.record import is_audited


def check_job(config: dict[str, Any], folder: RunFolder) -> None:
    """Refuse a job that would fail, by building all parts that need no data; nothing is written.

    This finds options of a strategy that exclude each other, a membership experiment without members, and a network
    that does not take the images.

    Args:
        config: The whole resolved configuration.
        folder: The job's folder.

    Raises:
        ConfigurationError: The job would be refused when it is run.
    """
    strategy = build_strategy(with_earlier_stage(config), folder)
    if not issubclass(class_of(config["data"], "data"), PrivateDataModule):  # others may load what they are made of
        return
    data = make_data(config, strategy)
    assert isinstance(data, PrivateDataModule)
    data.check_membership()
    if config["data"].get("membership") is not None and is_audited(config):
        raise ConfigurationError(
            "an audit requires the full batch sizes, which data.membership halves: audit a run without it, or attack "
            "one without canaries (audit=none)."
        )
    if not isinstance(data, ImageDataModule):  # others know what they provide when they are loaded
        return
    options = data.model_options()
    try:
        with torch.device("meta"):  # no weights are made
            module_for(config, options)
    except ConfigurationError:
        module_for(config, options)  # a network may need its weights to be built
