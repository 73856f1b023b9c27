"""From a composed configuration to objects, with one clear error where something does not fit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from dpbench.data.lots import LotLoader, Lots
from dpbench.errors import ConfigurationError, DPBenchError, brief
from dpbench.guards.lots import refuse_uncovered
from dpbench.guards.precision import refuse_precision
from dpbench.models import train_only
from dpbench.privacy.canaries.canaries import GradientCanaries
from dpbench.records.source import RecordSource
from dpbench.run.averaging import moving_average
from dpbench.run.checks import CALLBACK, Kind, class_of, parts_made_later
from dpbench.run.exposure import Exposure
from dpbench.run.options import options_of
from dpbench.run.processes import launched_process, trainer_options, wants_several
from dpbench.run.search_path import choices_of
from dpbench.run.spawned import with_launcher
from dpbench.run.training_records import TrainingRecords
from dpbench.runs.folder import RunFolder
from dpbench.runs.provenance import fingerprint
from dpbench.strategies import FederatedAveraging, PrivateStrategy


def plain(cfg: DictConfig) -> dict[str, Any]:
    """The resolved configuration as plain data."""
    data = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(data, dict)
    return {str(key): value for key, value in data.items()}


def build_strategy(config: dict[str, Any], folder: RunFolder) -> pl.Callback:
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
    records = build_records(config)
    if records is not None and not issubclass(cls, PrivateStrategy):
        cls, options = FederatedAveraging, {}  # the same path, without clipping and noise
    if not issubclass(cls, PrivateStrategy) and config.get("audit", {}).get("_target_"):
        raise ConfigurationError("an audit asks what private releases show: choose a private strategy, or audit=none.")
    if issubclass(cls, PrivateStrategy):
        refuse_precision(config["trainer"].get("precision"))
        options |= {
            "seed": None if secure else config["seed"],
            "ledger": str(folder.ledger),
            "after": None if config.get("after") is None else str(RunFolder(Path(config["after"])).ledger),
            "fingerprint": fingerprint(config),
            "records": records,
            "audit": build_audit(config),
        }
    else:  # of an experiment, perhaps: the baseline of a private run is that run with strategy=none
        options = {name: value for name, value in options.items() if name in options_of(cls)}
    strategy: pl.Callback = _call(cls, options, "strategy")
    return strategy


def build_records(config: dict[str, Any]) -> RecordSource | None:
    """What a record is, where it is no example; checks every option.

    Raises:
        ConfigurationError: An option is out of range, or the class is no source of records.
    """
    if "records" not in config:  # of an older run
        return None
    source = _if_chosen("records", config, lambda cls, **own: _call(cls, own, "records"))
    if source is not None and not isinstance(source, RecordSource):
        raise ConfigurationError(
            f"records._target_={config['records']['_target_']} is no dpbench.records.source.RecordSource."
        )
    return source


def build_audit(config: dict[str, Any]) -> GradientCanaries | None:
    """The canaries of a run that is audited."""
    if "audit" not in config:  # of an older run
        return None
    audit: GradientCanaries | None = _if_chosen("audit", config, lambda cls, **own: _call(cls, own, "audit"))
    return audit


def build_diagnostics(config: dict[str, Any], folder: RunFolder) -> list[pl.Callback]:
    """The diagnostics that were asked for; they read private records without noise."""
    every = config["diagnostics"]["every_n_steps"]
    watchers = build_watchers(config, folder)
    if config["strategy"].get("secure") and (every is not None or watchers):
        pl.utilities.rank_zero_warn(
            "diagnostics read private records without noise: never publish nonprivate/... with the model."
        )
    if every is None:
        return watchers
    from dpbench.run.diagnostics import GradientDiagnostics

    return [_call(GradientDiagnostics, {"every_n_steps": every, "folder": folder}, "diagnostics"), *watchers]


def build_watchers(config: dict[str, Any], folder: RunFolder) -> list[pl.Callback]:
    """Those of the diagnostics that look on at the final test too, in whatever process that is."""
    most = config["diagnostics"].get("training_records")  # an older run has none
    inserted = config["data"].get("inserted")
    return [
        *([] if most is None else [_call(TrainingRecords, {"most": most}, "diagnostics")]),
        *([Exposure(folder)] if isinstance(inserted, dict) and inserted.get("records") else []),
    ]


def build_averaging(config: dict[str, Any]) -> list[pl.Callback]:
    """The moving average of the weights, if it was asked for."""
    decay = config["ema_decay"]
    return [] if decay is None else [moving_average(decay)]


def build_callbacks(config: dict[str, Any]) -> list[pl.Callback]:
    """The callbacks that the configuration adds to those of the harness, new ones at each call."""
    groups = {f"callbacks.{name}": options for name, options in config["callbacks"].items() if options is not None}
    return [_call(class_of(own, group, CALLBACK), _without_marks(own), group) for group, own in groups.items()]


def build_data(config: dict[str, Any], strategy: pl.Callback) -> pl.LightningDataModule:
    """The data module, loaded, with the sampling that the strategy needs.

    Raises:
        ConfigurationError: Its training data do not come in lots that the ledger knows, or in lots of another seed.
    """
    options = _without_marks(config["data"])
    cls = class_of(config["data"], "data")
    seed = None if config["strategy"].get("secure", False) else config["seed"]
    if "sampling" in options_of(cls) and options.get("sampling") is None:
        options["sampling"] = getattr(strategy, "default_sampling", "shuffled")
    data: pl.LightningDataModule = _call(cls, {**options, "seed": seed}, "data")
    data.prepare_data()
    data.setup("fit")
    lots = _lots_of(data)
    if lots.seed != seed:
        raise ConfigurationError(
            f"data: {cls.__name__} does not hand its seed to its lots, which would be others at each start (or be "
            "foretold): LotLoader.poisson(dataset, expected_batch_size, seed=seed)."
        )
    if isinstance(strategy, PrivateStrategy):
        refuse_uncovered(lots.sampling)
    return data


def _lots_of(data: pl.LightningDataModule) -> Lots:
    loader = data.train_dataloader()
    if not isinstance(loader, LotLoader):
        raise ConfigurationError(
            f"data: {type(data).__name__}.train_dataloader gives a {type(loader).__name__}, whose sampling no ledger "
            "knows: return dpbench.LotLoader.poisson(dataset, expected_batch_size, seed=seed), say."
        )
    return loader.lots


def build_module(
    config: dict[str, Any],
    data: pl.LightningDataModule,
    weights: Mapping[str, Tensor] | None = None,
) -> pl.LightningModule:
    """The LightningModule around the model, for what the data say of themselves.

    Args:
        config: The whole resolved configuration.
        data: Its `model_options()`, if there is one, are handed to the model and the module where they take them; its
            `monitored` says which data `val_dataloader` gives ("val", or "test").
        weights: Of the stage before, or None.

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
    """The LightningModule of a configuration, made without its data.

    Args:
        config: The whole resolved configuration.
        model_options: What the data say, such as input_shape and num_classes.
        monitored: Name of the data that the validation loop sees.
        weights: Of the stage before, or None.
    """
    for group in ("model", "module"):
        if given := [name for name in model_options if name in config[group]]:
            raise ConfigurationError(f"{group}.{given[0]} cannot be set: the data say it themselves.")
    made = partial(_made_for, model_options)
    model = _if_chosen("model", config, lambda cls, **own: made("model", cls, own | _taken(cls, model_options)))
    optimizer = _if_chosen("optimizer", config, partial)
    schedule = _if_chosen("schedule", config, partial)
    cls, own = class_of(config["module"], "module"), _without_marks(config["module"])
    for name, kind in parts_made_later(cls).items():
        if own.get(name) is not None:
            own[name] = _later(f"module.{name}", own[name], kind)
            _try_optimizer(own[name], None)
    _try_optimizer(optimizer, schedule)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "monitored": monitored}
    module: pl.LightningModule = made("module", cls, own | _taken(cls, {**model_options, **parts}))
    if weights is not None:
        _take_weights(module, weights, config["after"])
    _train_only(module if model is None else model, config)
    return module


def _take_weights(module: pl.LightningModule, weights: Mapping[str, Tensor], place: str) -> None:
    """Load what has the same name and shape, and say what is new.

    Args:
        module: Of the new stage, without adapters.
        weights: From `weights_before`.
        place: Where they come from, for messages.

    Raises:
        ConfigurationError: Nothing fits.
    """
    own = module.state_dict()
    taken = {name: value for name, value in weights.items() if name in own and own[name].shape == value.shape}
    if not taken:
        raise ConfigurationError(
            f"after={place}: none of its weights has name and shape of this model's: take its model=."
        )
    module.load_state_dict(taken, strict=False)
    new = [name for name in own if name not in taken]
    begun = f", and {', '.join(new)} begin anew" if new else ""
    pl.utilities.rank_zero_info(f"{len(taken)} tensors are those of {place}{begun}.")


def _train_only(network: nn.Module, config: Mapping[str, Any]) -> None:
    """Freeze what is not to be trained; an older run does not say."""
    parts = config.get("trainable")
    if parts is None:
        return
    if hasattr(network, "generator"):
        raise ConfigurationError("trainable: a GAN trains all of its two networks: leave it out (trainable=null).")
    _call(train_only, {"model": network, "parts": parts}, "trainable")


def _made_for(model_options: Mapping[str, Any], group: str, cls: type, options: Mapping[str, Any]) -> Any:
    """Make a model or module, and say what the data say of themselves where that is not what it needs."""
    try:
        inspect.signature(cls).bind(**options)
    except TypeError as error:
        groups = ("model", "module") if group == "model" else ("module",)
        words = [_or(f"{one}=", _choices_for(model_options, one)) for one in groups]
        words = words if all(words) else [f"another {group}"]
        raise ConfigurationError(
            f"{group}: {brief(error)} of {cls.__name__}; the data say {', '.join(model_options) or 'nothing'} of "
            f"themselves: choose {' with '.join(words)}."
        ) from error
    return _call(cls, options, group)


def _choices_for(model_options: Mapping[str, Any], group: str) -> list[str]:
    """Names of a group's choices that need something of what the data say, and nothing else of them."""
    found = []
    for name, own in choices_of(group):
        with suppress(ConfigurationError):  # no class, or one of a package that is not installed
            parameters = options_of(class_of(own, group)).values()
            needed = {one.name for one in parameters if one.default is one.empty} - {"model", "optimizer", *own}
            found += [name] if needed and needed <= model_options.keys() else []
    return found


def _or(before: str, names: Sequence[str]) -> str:
    *others, last = names or [""]
    return f"{before}{', '.join(others)}{' or ' if others else ''}{last}" if names else ""


def _if_chosen(group: str, config: Mapping[str, Any], make: Callable[..., Any]) -> Any:
    """Make what a group describes; None where it names no class, and the module does without."""
    options = config[group]
    return None if options.get("_target_") is None else make(class_of(options, group), **_without_marks(options))


def _taken(cls: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Keep those of some options that a class declares."""
    return {name: value for name, value in options.items() if name in options_of(cls)}


def _try_optimizer(optimizer: Callable[..., Any] | None, schedule: Callable[..., Any] | None) -> None:
    """Make an optimizer of one parameter and two steps of its schedule, and drop them: what does not fit shows here."""
    if optimizer is None:
        return
    try:
        made = optimizer([nn.Parameter(torch.zeros(1, 1))])
        if schedule is None:
            return
        moving = schedule(made)
        for option in ("T_max", "total_iters"):
            if getattr(moving, option, 1) < 1:
                raise ValueError(f"{option} must be at least 1: set trainer.max_steps, or schedule.{option}")
        for _ in range(2):
            made.step()
            moving.step()
    except Exception as error:  # of PyTorch's or a user's own classes
        raise ConfigurationError(f"optimizer or schedule: {brief(error).rstrip('.')}.") from error


def build_trainer(config: dict[str, Any], alone: bool = False, **extra: Any) -> pl.Trainer:
    """Lightning's trainer, without what this harness does itself.

    Args:
        config: The whole configuration.
        alone: Whether this process works by itself, whoever has started it.
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
    if launched_process() is not None and not alone:
        options = trainer_options(options)
    else:  # what Slurm says of a job's tasks is not about us
        options = {"plugins": [LightningEnvironment()], **options}
        if wants_several(options) and (options.get("strategy") or "auto") == "auto":
            options["strategy"] = "ddp_spawn"  # Lightning's choice starts the command again, once for each process
    options = with_launcher(options)
    # With trainer.deterministic PyTorch fills each new tensor, for those who would read it unwritten: nobody here.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    trainer: pl.Trainer = _call(class_of(options, "trainer"), _without_marks(options), "trainer")
    return trainer


def _later(group: str, options: Mapping[str, Any], kind: Kind | None = None) -> partial[Any]:
    """The class that a group describes with its options, still without its first argument."""
    return partial(class_of(options, group, kind), **_without_marks(options))


def made(make: Callable[..., Any], options: Mapping[str, Any], group: str) -> Any:
    """What a class makes of a group's options, or one line that names the group and says why it made nothing.

    Raises:
        ConfigurationError: It does not take them, or fails.
    """
    return _call(make, _without_marks(options), group)


def _without_marks(options: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name): value for name, value in options.items() if not str(name).startswith("_")}


def _call(cls: Callable[..., Any], options: Mapping[str, Any], group: str) -> Any:
    try:
        inspect.signature(cls).bind(**options)
        return cls(**options)
    except DPBenchError:
        raise
    except Exception as error:  # of Lightning's, PyTorch's or a user's own classes
        raise ConfigurationError(f"{group}: {brief(error)}") from error
