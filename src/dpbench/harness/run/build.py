"""Construction of objects from a checked configuration, with one clear error where something does not fit.

Options were checked by `run.config`; refusals here need the data, or the objects themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn

from dpbench.data.loader import PrivateDataLoader
from dpbench.data.module import PrivateDataModule
from dpbench.data.sampler import PrivateBatchSampler
from dpbench.errors import ConfigurationError, DPBenchError, brief
from dpbench.guards.lots import refuse_uncovered
from dpbench.guards.precision import refuse_precision
from dpbench.harness.run.config import CALLBACK, PART, class_of, parts_of_module
from dpbench.harness.run.evaluation import Exposure, TrainingRecords
from dpbench.harness.run.processes import first_of_node_first, launched_process
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.provenance import fingerprint
from dpbench.harness.runs.record import is_audited
from dpbench.models import train_only
from dpbench.options import check_options, options_of
from dpbench.records.source import RecordSource
from dpbench.strategies import FederatedAveraging, PrivateStrategy


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Convert a composed configuration to plain data, with its interpolations resolved."""
    data = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(data, dict)
    return {str(key): value for key, value in data.items()}


def build_strategy(config: dict[str, Any], folder: RunFolder) -> pl.Callback:
    """Make the strategy, before any data are loaded.

    Args:
        config: The whole resolved configuration.
        folder: The run's folder, where the ledger goes.

    Raises:
        ConfigurationError: Options do not go together.
    """
    cls = class_of(config["strategy"], "strategy")
    options = _options(config["strategy"])
    secure = options.pop("secure", False)
    records: RecordSource | None = _build("records", config)
    if not issubclass(cls, PrivateStrategy):
        if is_audited(config):
            raise ConfigurationError(
                "an audit requires private releases: choose a private strategy, or set audit=none."
            )
        if records is None:
            # The options are those of an experiment: the baseline of a private run is that run with strategy=none.
            baseline: pl.Callback = _instance(cls, _accepted(cls, options), "strategy")
            return baseline
        # The same path through the sessions, without clipping and noise.
        cls = FederatedAveraging
        options = {}
    refuse_precision(config["trainer"].get("precision"))
    after = config.get("after")
    options |= {
        "seed": None if secure else config["seed"],
        "ledger": str(folder.ledger),
        "after": None if after is None else str(RunFolder(Path(after)).ledger),
        "fingerprint": fingerprint(config),
        "records": records,
        "audit": _build("audit", config),
    }
    strategy: PrivateStrategy = _instance(cls, options, "strategy")
    return strategy


def build_diagnostics(config: dict[str, Any], folder: RunFolder) -> list[pl.Callback]:
    """Make the diagnostics that were asked for; they read private records without noise."""
    every = config["diagnostics"]["every_n_steps"]
    watchers = build_watchers(config, folder)
    if config["strategy"].get("secure") and (every is not None or watchers):
        pl.utilities.rank_zero_warn(
            "diagnostics read private records without noise: never publish nonprivate/... with the model."
        )
    if every is None:
        return watchers
    from dpbench.harness.run._diagnostics import GradientDiagnostics

    return [_instance(GradientDiagnostics, {"every_n_steps": every, "folder": folder}, "diagnostics"), *watchers]


def build_watchers(config: dict[str, Any], folder: RunFolder) -> list[pl.Callback]:
    """Make the diagnostics that observe the final test, too, in any process."""
    watchers: list[pl.Callback] = []
    most = config["diagnostics"].get("training_records")  # an older run has none
    if most is not None:
        watchers.append(_instance(TrainingRecords, {"most": most}, "diagnostics"))
    inserted = config["data"].get("inserted")
    if isinstance(inserted, dict) and inserted.get("records"):
        watchers.append(Exposure(folder))
    return watchers


def build_callbacks(config: dict[str, Any]) -> list[pl.Callback]:
    """Make the callbacks that the configuration adds to those of the harness, new ones at each call."""
    callbacks = []
    for name, options in config["callbacks"].items():
        if options is not None:
            group = f"callbacks.{name}"
            callbacks.append(instantiate(CALLBACK.class_of(options, group), options, group))
    return callbacks


def make_data(config: dict[str, Any], strategy: pl.Callback) -> pl.LightningDataModule:
    """Make the data module, with the sampling that the strategy needs; nothing is loaded."""
    cls = class_of(config["data"], "data")
    options = {**config["data"], "seed": _seed_of_lots(config)}
    if "sampling" in options_of(cls) and options.get("sampling") is None:
        options["sampling"] = getattr(strategy, "default_sampling", "shuffled")
    data: pl.LightningDataModule = instantiate(cls, options, "data")
    return data


def _seed_of_lots(config: dict[str, Any]) -> int | None:
    seed: int = config["seed"]
    return None if config["strategy"].get("secure", False) else seed


def build_data(
    config: dict[str, Any],
    strategy: pl.Callback,
    loaded: PrivateDataModule[Any] | None = None,
) -> pl.LightningDataModule:
    """Make and load the data module, with the sampling that the strategy needs.

    Args:
        config: The whole resolved configuration.
        strategy: Its strategy.
        loaded: A data module whose data sets it shares (`PrivateDataModule.with_batches_of`); None: it loads its own.

    Raises:
        ConfigurationError: The training loader is not a PrivateDataLoader, or has another seed.
    """
    data = make_data(config, strategy)
    if loaded is not None:
        assert isinstance(data, PrivateDataModule)
        data = loaded.with_batches_of(data)

    def load() -> None:
        data.prepare_data()
        data.setup("fit")

    first_of_node_first(load)
    lots = _lots_of(data)
    if lots.seed != _seed_of_lots(config):
        raise ConfigurationError(
            f"data: {type(data).__name__} does not pass its seed to its PrivateDataLoader, so batches would differ at "
            "each start (or be predictable): PrivateDataLoader.poisson(dataset, expected_batch_size, seed=seed)."
        )
    if isinstance(strategy, PrivateStrategy):
        refuse_uncovered(lots.sampling)
    return data


def _lots_of(data: pl.LightningDataModule) -> PrivateBatchSampler:
    loader = data.train_dataloader()
    if not isinstance(loader, PrivateDataLoader):
        raise ConfigurationError(
            f"data: {type(data).__name__}.train_dataloader gives a {type(loader).__name__}, whose sampling no ledger "
            "knows: return dpbench.PrivateDataLoader.poisson(dataset, expected_batch_size, seed=seed), say."
        )
    return loader.lots


def build_module(
    config: dict[str, Any],
    data: pl.LightningDataModule,
    weights: Mapping[str, Tensor] | None = None,
) -> pl.LightningModule:
    """Make the LightningModule around the model, for the sizes that the data set provides.

    Args:
        config: The whole resolved configuration.
        data: Its `model_options()`, if there is one, are handed to the model and the module where they take them; its
            `monitored` says which data `val_dataloader` gives ("val", or "test").
        weights: Weights of the stage before, or None.

    Raises:
        ConfigurationError: They do not go together, by the module's `check_data(data)` if there is one.
    """
    options: Mapping[str, Any] = data.model_options() if hasattr(data, "model_options") else {}
    module = module_for(config, options, getattr(data, "monitored", "val"), weights)
    check: Callable[[pl.LightningDataModule], None] | None = getattr(module, "check_data", None)
    if check is not None:
        check(data)
    return module


def module_for(
    config: dict[str, Any],
    model_options: Mapping[str, Any],
    monitored: str = "val",
    weights: Mapping[str, Tensor] | None = None,
) -> pl.LightningModule:
    """Make the LightningModule of a configuration without its data.

    Args:
        config: The whole resolved configuration.
        model_options: Sizes that the data set provides, such as input_shape and num_classes.
        monitored: Name of the data that the validation loop sees.
        weights: Weights of the stage before, or None.
    """
    for group in ("model", "module"):
        for name in model_options:
            if name in config[group]:
                raise ConfigurationError(f"{group}.{name} cannot be set: the data set provides it.")
    model = None
    if _names_class(config["model"]):
        model = _model_or_module("model", config, model_options, {})
    parts: dict[str, Any] = {"model": model, "monitored": monitored}
    for group in ("optimizer", "schedule"):
        parts[group] = None
        if _names_class(config[group]):
            parts[group] = partial(class_of(config[group], group), **_options(config[group]))
    _try_optimizer(parts["optimizer"], parts["schedule"])
    for name, options in parts_of_module(config["module"]).items():
        parts[name] = partial(PART.class_of(options, f"module.{name}"), **_options(options))
        _try_optimizer(parts[name], None)
    module: pl.LightningModule = _model_or_module("module", config, model_options, parts)
    if weights is not None:
        _take_weights(module, weights, config["after"])
    _train_only(module if model is None else model, config)
    return module


def _take_weights(module: pl.LightningModule, weights: Mapping[str, Tensor], place: str) -> None:
    """Load the weights of the same name and shape, and report new ones.

    Args:
        module: The module of the new stage, without adapters.
        weights: The result of `weights_before`.
        place: The folder that they come from, for messages.

    Raises:
        ConfigurationError: Nothing fits.
    """
    state = module.state_dict()
    fitting = {}
    for name, value in weights.items():
        if name in state and state[name].shape == value.shape:
            fitting[name] = value
    if not fitting:
        raise ConfigurationError(
            f"after={place}: no weight of it matches this model's by name and shape: set its model=."
        )
    module.load_state_dict(fitting, strict=False)
    new = [name for name in state if name not in fitting]
    anew = f"; newly initialized: {', '.join(new)}" if new else ""
    pl.utilities.rank_zero_info(f"loaded {len(fitting)} tensors from {place}{anew}.")


def _train_only(network: nn.Module, config: Mapping[str, Any]) -> None:
    """Freeze the parameters that are not to be trained; an older run does not say which."""
    parts = config.get("trainable")
    if parts is None:
        return
    if hasattr(network, "generator"):
        raise ConfigurationError("trainable: a GAN trains both of its networks entirely: set trainable=null.")
    _instance(train_only, {"model": network, "parts": parts}, "trainable")


def _model_or_module(
    group: str,
    config: Mapping[str, Any],
    model_options: Mapping[str, Any],
    parts: Mapping[str, Any],
) -> Any:
    """Make a model or module; if an argument is missing, the error lists the arguments that the data set provides."""
    cls = class_of(config[group], group)
    options = {name: value for name, value in _options(config[group]).items() if name not in parts}
    options |= _accepted(cls, model_options)
    try:
        check_options(cls, options, group, reserved=parts, is_complete=True)
    except ConfigurationError as error:
        provided = ", ".join(f"{name}={value}" for name, value in model_options.items()) or "nothing"
        raise ConfigurationError(
            f"{error} The data set provides {provided}: choose a model and module for such data."
        ) from None
    return _instance(cls, options | _accepted(cls, parts), group)


def _try_optimizer(optimizer: Callable[..., Any] | None, schedule: Callable[..., Any] | None) -> None:
    """Make an optimizer of one parameter and two steps of its schedule, and drop them: wrong options fail here."""
    if optimizer is None:
        return
    try:
        trial = optimizer([nn.Parameter(torch.zeros(1, 1))])
        if schedule is None:
            return
        moving = schedule(trial)
        for option in ("T_max", "total_iters"):
            if getattr(moving, option, 1) < 1:
                raise ValueError(f"{option} must be at least 1: set trainer.max_steps, or schedule.{option}")
        for _ in range(2):
            trial.step()
            moving.step()
    except Exception as error:  # of PyTorch's or a user's own classes
        raise ConfigurationError(f"optimizer or schedule: {brief(error).rstrip('.')}.") from error


def build_trainer(config: dict[str, Any], alone: bool = False, **extra: Any) -> pl.Trainer:
    """Make Lightning's trainer, without the parts that this harness replaces.

    Args:
        config: The whole configuration.
        alone: True if this process works alone, whatever launched it and however many are asked for.
        extra: Options that the configuration does not have.
    """
    options = {
        "use_distributed_sampler": False,  # the lots know their share of each rank
        "num_sanity_val_steps": 0,
        "enable_model_summary": False,
        "enable_checkpointing": True,
        **config["trainer"],
        **extra,
    }
    if alone:
        options |= {"devices": 1, "num_nodes": 1}
    if alone or launched_process() is None:  # what Slurm says of a job's tasks is not about us
        options |= {"strategy": "auto", "plugins": [LightningEnvironment()]}
    else:
        options |= {"strategy": DDPStrategy(), "plugins": [TorchElasticEnvironment()]}
    # With trainer.deterministic PyTorch fills each new tensor, for those who would read it unwritten: nobody here.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    trainer: pl.Trainer = instantiate(class_of(options, "trainer"), options, "trainer")
    if isinstance(options.get("profiler"), str):
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        # Into a file: a log is what it takes otherwise, and Lightning's is silent here.
        profiler.dirpath = trainer.default_root_dir
        profiler.filename = "profile"
    return trainer


def build_trial_trainer(config: Mapping[str, Any], folder: str, callbacks: Sequence[pl.Callback]) -> pl.Trainer:
    """Make a trainer that logs, saves and evaluates nothing, for a command that makes no run.

    Args:
        config: The whole configuration.
        folder: A temporary folder.
        callbacks: All callbacks of the trainer.
    """
    trainer = {**config["trainer"], "enable_checkpointing": False}
    return build_trainer(
        {**config, "trainer": trainer},
        alone=True,
        logger=False,
        callbacks=list(callbacks),
        default_root_dir=folder,
        limit_val_batches=0,
    )


def instantiate(make: Callable[..., Any], options: Mapping[str, Any], group: str) -> Any:
    """Call a class with a group's options.

    Raises:
        ConfigurationError: It does not take them, or fails; one line names the group and says why.
    """
    return _instance(make, _options(options), group)


def _instance(make: Callable[..., Any], options: Mapping[str, Any], group: str) -> Any:
    try:
        return make(**options)
    except DPBenchError:
        raise
    except Exception as error:  # of Lightning's, PyTorch's or a user's own classes
        remedy = " Choose trainer=cpu." if "gpu backend" in str(error) else ""
        raise ConfigurationError(f"{group}: {brief(error)}{remedy}") from error


def _build(group: str, config: Mapping[str, Any]) -> Any:
    """Make the object of a group; None where it names no class, or the run is older than the group."""
    options = config.get(group)
    if options is None or not _names_class(options):
        return None
    return instantiate(class_of(options, group), options, group)


def _names_class(options: Mapping[str, Any]) -> bool:
    return options.get("_target_") is not None


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group without `_target_` and `_partial_`."""
    return {str(name): value for name, value in options.items() if not str(name).startswith("_")}


def _accepted(cls: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of some options that a class declares."""
    return {name: value for name, value in options.items() if name in options_of(cls)}
