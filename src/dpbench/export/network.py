"""The network that a run has trained, without anything else that its checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
from torch import Tensor, nn
from torchmetrics import Metric

from dpbench.models import merge_adapters
from dpbench.modules.image_generator import SHAPE, ImageGenerator
from dpbench.options import options_of
from dpbench.run.build import instantiate
from dpbench.run.config import class_of
from dpbench.run.saved_config import read_config
from dpbench.run.saved_module import last_checkpoint, trained_module
from dpbench.runs.folder import RunFolder


@dataclass(frozen=True)
class Network:
    """What is exported.

    Attributes:
        target: Import path of the class that builds it.
        arguments: Of the class.
        part: Attribute of the object that is the network, such as the generator of a GAN; None for the object itself.
        weights: By name: parameters and buffers, nothing of the training.
        config: Of the run.
        checkpoint: As saved.
    """

    target: str
    arguments: Mapping[str, Any]
    part: str | None
    weights: Mapping[str, Tensor]
    config: dict[str, Any]
    checkpoint: dict[str, Any]

    @property
    def ours(self) -> bool:
        """Whether dpbench has the class."""
        return self.target.startswith("dpbench.")


def load_network(run: RunFolder, trust: bool = False) -> Network:
    """The network of a run's last checkpoint (never a better one).

    Args:
        run: Folder.
        trust: Whether the checkpoint may hold objects, see `read_checkpoint`.

    Raises:
        ConfigurationError: It holds no run, no checkpoint, one of another architecture, or one that holds objects and
            is not trusted.
        DataError: The data, which say what the network's inputs are, are not there.
    """
    config = read_config(run)
    state = last_checkpoint(run, trust)
    options = dict(state[SHAPE]) if SHAPE in state else _options_of_data(config)
    module = trained_module(run, config, options, state)
    merge_adapters(module)  # the class that builds the network knows of none
    group, part, network = _chosen(config, module)
    target, own = str(config[group]["_target_"]), {k: v for k, v in config[group].items() if not k.startswith("_")}
    taken = {name: value for name, value in options.items() if name in options_of(class_of(config[group], group))}
    return Network(target, own | taken, part, _weights(network), config, state)


def _options_of_data(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the data say of themselves, such as the shape of a record; of their records nothing is kept."""
    cls, options = class_of(config["data"], "data"), dict(config["data"])
    if "sampling" in options_of(cls) and options.get("sampling") is None:
        options["sampling"] = "shuffled"  # no lot is drawn
    data = instantiate(cls, {**options, "seed": None}, "data")
    data.prepare_data()
    data.setup("fit")
    return dict(data.model_options()) if hasattr(data, "model_options") else {}


def _chosen(config: Mapping[str, Any], module: pl.LightningModule) -> tuple[str, str | None, nn.Module]:
    """The group that describes what is exported, its part, and the network: the module itself where it has no model."""
    if isinstance(module, ImageGenerator):
        return "model", "generator", module.generator
    if config["model"].get("_target_") is not None:
        model = getattr(module, "model", None)
        if isinstance(model, nn.Module) and isinstance(model, class_of(config["model"], "model")):
            return "model", None, model
    return "module", None, module


def _weights(network: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, but for metrics, which hold what was measured; tied ones each by itself."""
    measured = tuple(f"{name}." for name, part in network.named_modules() if isinstance(part, Metric))
    return {
        name: value.detach().cpu().clone().contiguous()
        for name, value in network.state_dict().items()
        if not (measured and name.startswith(measured))
    }
