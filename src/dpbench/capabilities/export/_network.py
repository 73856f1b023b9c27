"""The network that a run has trained, without anything else that its checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch import Tensor, nn
from torchmetrics import Metric

from dpbench.harness.run.config import class_of
from dpbench.harness.run.saved_module import last_checkpoint, load_module
from dpbench.harness.runs.folder import RunFolder
from dpbench.models import merge_adapters
from dpbench.modules.image_generator import ImageGenerator
from dpbench.options import options_of

_INPUTS = ("name", "scale", "image_size", "features", "prior_sha256")


@dataclass(frozen=True)
class Network:
    """A network to be exported.

    Attributes:
        target: Import path of the class that builds it.
        arguments: Arguments of the class.
        part: Attribute of the object that is the network, such as the generator of a GAN; None for the object itself.
        weights: Parameters and buffers by name, without those of the training.
        config: Configuration of the run.
        checkpoint: The checkpoint as saved.
        export_to: Function that writes the network into a folder in another library's format, too; None: there is none.
        described: Preparation of inputs and names of classes, as the data module describes them.
    """

    target: str
    arguments: Mapping[str, Any]
    part: str | None
    weights: Mapping[str, Tensor]
    config: dict[str, Any]
    checkpoint: dict[str, Any]
    export_to: Callable[[Path], None] | None = None
    described: Mapping[str, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> dict[str, Any]:
        """Preparation of inputs and names of classes: options of the data, and what the data module describes."""
        data = self.config.get("data") or {}
        options = {name: data[name] for name in _INPUTS if data.get(name) is not None}
        if "features" in options:  # made of pixels as they are
            options.pop("scale", None)
        return {**options, **self.described}

    @property
    def ours(self) -> bool:
        """Return whether the class is one of dpbench."""
        return self.target.startswith("dpbench.")


def load_network(run: RunFolder, trust: bool = False) -> Network:
    """The network of a run's last checkpoint (never a better one).

    Args:
        run: Folder.
        trust: True if the checkpoint may hold objects; see `read_checkpoint`.

    Raises:
        ConfigurationError: It holds no run, no checkpoint, one of another architecture, or one that holds objects and
            is not trusted.
        DataError: The data, which determine the network's inputs, are not there.
    """
    trained = load_module(run, last_checkpoint(run, trust))
    config = trained.config
    merge_adapters(trained.module)  # the class that builds the network knows of none
    group, part, network = _chosen(config, trained.module)
    arguments = {name: value for name, value in config[group].items() if not name.startswith("_")}
    accepted = options_of(class_of(config[group], group))
    arguments |= {name: value for name, value in trained.model_options.items() if name in accepted}
    if "optimizer" in accepted:
        arguments["optimizer"] = None  # of the training
    return Network(
        target=str(config[group]["_target_"]),
        arguments=arguments,
        part=part,
        weights=_weights(network),
        config=config,
        checkpoint=trained.checkpoint,
        export_to=getattr(network, "export_to", None),
        described=trained.inputs,
    )


def _chosen(config: Mapping[str, Any], module: pl.LightningModule) -> tuple[str, str | None, nn.Module]:
    """Find the group of the configuration that describes the network, its part, and the network itself."""
    if isinstance(module, ImageGenerator):
        return "model", "generator", module.generator
    if config["model"].get("_target_") is not None:
        model = getattr(module, "model", None)
        if isinstance(model, nn.Module) and isinstance(model, class_of(config["model"], "model")):
            return "model", None, model
    return "module", None, module


def _weights(network: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers except those of metrics, which hold measurements; tied ones each by itself."""
    measured = tuple(f"{name}." for name, part in network.named_modules() if isinstance(part, Metric))
    return {
        name: value.detach().cpu().clone().contiguous()
        for name, value in network.state_dict().items()
        if not (measured and name.startswith(measured))
    }
