"""From a composed configuration to objects, with one clear error where something does not fit."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from omegaconf import DictConfig, OmegaConf

from dpbench.data.images import ImageDataModule
from dpbench.errors import ConfigurationError, DPBenchError, brief
from dpbench.modules.gan import GAN
from dpbench.modules.image_classifier import ImageClassifier
from dpbench.results.provenance import code_hash, config_hash, run_key, versions
from dpbench.strategies import PrivateStrategy
from dpbench.strategies.guards import refuse_precision, refuse_uncovered
from dpbench.training import processes
from dpbench.training.averaging import moving_average
from dpbench.training.checks import CLASSIFIER, OPTIMIZER, class_of, several
from dpbench.training.schema import STRATEGIES, options_of


def plain(cfg: DictConfig) -> dict[str, Any]:
    """The resolved configuration as plain data."""
    data = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(data, dict)
    return {str(key): value for key, value in data.items()}


def build_strategy(config: dict[str, Any], folder: Path) -> pl.Callback:
    """The strategy callback; checks every option before any data is loaded.

    Args:
        config: The whole resolved configuration.
        folder: The run's folder, where the ledger goes.

    Raises:
        ConfigurationError: An option is unknown or out of range.
    """
    options = dict(config["strategy"])
    cls = class_of(options, "strategy")
    del options["_target_"]
    secure = options.pop("secure", False)
    if issubclass(cls, PrivateStrategy):
        refuse_precision(config["trainer"].get("precision"))
        fingerprint = json.dumps([config_hash(config), code_hash(), versions()])
        options |= {
            "seed": None if secure else run_key(config),
            "ledger": str(folder / "ledger.jsonl"),
            "fingerprint": fingerprint,
        }
    else:  # of an experiment, perhaps: the baseline of a private run is that run with strategy=none
        known = {name for private in STRATEGIES.values() for name in options_of(private)}
        options = {name: value for name, value in options.items() if name not in known}
    strategy = _call(cls, options, "strategy")
    assert isinstance(strategy, pl.Callback)
    return strategy


def build_diagnostics(config: dict[str, Any], folder: Path) -> list[pl.Callback]:
    """The diagnostics that were asked for; they read private gradients without noise."""
    every = config["diagnostics"]["every_n_steps"]
    if every is None:
        return []
    from dpbench.training.diagnostics import GradientDiagnostics

    if config["strategy"].get("secure"):
        pl.utilities.rank_zero_warn(
            "diagnostics read private gradients without noise: never publish nonprivate/... with the model."
        )
    return [_call(GradientDiagnostics, {"every_n_steps": every, "folder": folder}, "diagnostics")]


def build_averaging(config: dict[str, Any]) -> list[pl.Callback]:
    """The moving average of the weights, if it was asked for."""
    decay = config.get("ema_decay")  # older runs know none
    return [] if decay is None else [moving_average(decay)]


def build_data(config: dict[str, Any], strategy: pl.Callback) -> ImageDataModule:
    """The data module, loaded, with the sampling that the strategy needs."""
    options = dict(config["data"])
    kind = options.get("sampling") or getattr(strategy, "default_sampling", "shuffled")
    secure = config["strategy"].get("secure", False)
    options |= {"sampling": kind, "seed": None if secure else run_key(config)}
    data = _made("data", options)
    assert isinstance(data, ImageDataModule)
    data.setup()
    if isinstance(strategy, PrivateStrategy):
        refuse_uncovered(data.sampling)
    return data


def build_module(config: dict[str, Any], data: ImageDataModule) -> ImageClassifier | GAN:
    """The LightningModule around the model, for the data's shape and classes."""
    return module_for(config, data.input_shape, data.num_classes, data.monitored)


def module_for(
    config: dict[str, Any], input_shape: tuple[int, int, int], num_classes: int, monitored: str = "val"
) -> ImageClassifier | GAN:
    """The same without the data."""
    options = dict(config["model"])
    shape = {"input_shape": input_shape, "num_classes": num_classes}
    model = _made("model", options | shape)
    optimizer = _later("optimizer", config["optimizer"])
    schedule = _later("schedule", config["schedule"]) if config["schedule"].get("_target_") else None
    around = dict(config.get("module", CLASSIFIER))  # older runs know no other
    refuse_other_networks(class_of(around, "module"), model, config["data"])
    if around.get("generator_optimizer") is not None:
        cls = class_of(around["generator_optimizer"], "module.generator_optimizer", OPTIMIZER)
        around["generator_optimizer"] = partial(cls, **_without_marks(around["generator_optimizer"]))
    common = {"model": model, "optimizer": optimizer, "num_classes": num_classes, "monitored": monitored}
    module = _made("module", {**around, **common, "schedule": schedule})
    assert isinstance(module, ImageClassifier | GAN)
    try:
        _try_schedule(module.configure_optimizers())
    except Exception as error:  # of PyTorch's or a user's own classes
        raise ConfigurationError(f"optimizer or schedule: {brief(error).rstrip('.')}.") from error
    return module


def refuse_other_networks(cls: type, model: Any, data: Mapping[str, Any]) -> None:
    """Raise ConfigurationError where module, model and the pixels of the data do not go together."""
    pair = hasattr(model, "generator")
    if issubclass(cls, GAN) and not pair:
        raise ConfigurationError("module=gan needs a generator and a discriminator: add model=mlp_gan or conv_gan.")
    if pair and not issubclass(cls, GAN):
        raise ConfigurationError("the model is a generator and a discriminator: add module=gan.")
    if pair and data.get("scale") != "symmetric":
        raise ConfigurationError("a generator's pixels lie in [-1, 1]: leave data.scale=symmetric.")
    if pair and data.get("features") is not None:
        raise ConfigurationError("a generator makes pixels: leave data.features=null.")


def _try_schedule(configured: Any) -> None:
    """Two steps of the schedule on an optimizer that is thrown away: what does not fit shows here."""
    if not isinstance(configured, tuple):
        return
    optimizers, schedules = configured
    for option in ("T_max", "total_iters"):
        if getattr(schedules[0]["scheduler"], option, 1) < 1:
            raise ValueError(f"{option} must be at least 1: set trainer.max_steps, or schedule.{option}")
    for _ in range(2):
        optimizers[0].step()
        schedules[0]["scheduler"].step()


def build_trainer(config: dict[str, Any], **extra: Any) -> pl.Trainer:
    """Lightning's trainer, without what this harness does itself."""
    options = {
        "use_distributed_sampler": False,  # the lots know their share of each rank
        "num_sanity_val_steps": 0,
        "enable_model_summary": False,
        "enable_checkpointing": True,
        **config["trainer"],
        **extra,
    }
    if several(options) and (options.get("strategy") or "auto") == "auto":
        options["strategy"] = "ddp_spawn"  # Lightning's choice starts the command again, once for each process
    trainer = _made("trainer", processes.with_launcher(options))
    assert isinstance(trainer, pl.Trainer)
    return trainer


def _made(group: str, options: Mapping[str, Any]) -> Any:
    """The object that a group describes."""
    return _call(class_of(options, group), _without_marks(options), group)


def _later(group: str, options: Mapping[str, Any]) -> partial[Any]:
    """What a group describes, but for its first argument."""
    return partial(class_of(options, group), **_without_marks(options))


def _without_marks(options: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name): value for name, value in options.items() if not str(name).startswith("_")}


def _call(cls: type, options: Mapping[str, Any], group: str) -> Any:
    try:
        inspect.signature(cls).bind(**options)
        return cls(**options)
    except DPBenchError:
        raise
    except Exception as error:  # of Lightning's, PyTorch's or a user's own classes
        raise ConfigurationError(f"{group}: {brief(error)}") from error
