"""Loggers of a run in addition to its own metrics.csv: wandb, and any of Lightning's loggers by its class.

wandb mirrors the local files, offline unless the user is logged in. Every logger gets ε and learning rates at each
evaluation; those that keep a run's id get its name, too.
"""

from __future__ import annotations

import math
import os
import shlex
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import pytorch_lightning as pl
from hydra.types import RunMode
from omegaconf import OmegaConf
from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.loggers.logger import Logger

from dpbench.callback.strategy import epsilon_here
from dpbench.errors import brief
from dpbench.files import from_here, write_json
from dpbench.harness.run.build import instantiate
from dpbench.harness.run.config import LOGGER, other_loggers, uses_wandb
from dpbench.harness.run.processes import is_first
from dpbench.harness.runs.command import key_of
from dpbench.harness.runs.folder import Run, RunFolder
from dpbench.harness.runs.metrics_log import MetricsCSV
from dpbench.harness.runs.readers import read_json
from dpbench.harness.runs.record import is_audited
from dpbench.options import checked_value, options_of
from dpbench.strategies import PrivateStrategy

_Mode = Literal["online", "offline", "disabled", "shared"]
_STEPS = "trainer/global_step"  # as Lightning's loggers call the axis of all metrics
_WANDB = "wandb"
_RUN_ID = "run_id"
_LONGEST_NAME = 128  # letters
_SESSION_APART = 1.0  # seconds: wandb names a session's files by that in which it begins, and overwrites older ones
_INIT_TIMEOUT = 30.0  # seconds for a server that does not answer, unless $WANDB_INIT_TIMEOUT says otherwise
_PRIVACY = (
    "noise_multiplier",
    "noise_std_over_max_grad_norm",
    "noise_bands",
    "sample_rate",
    "expected_batch_size",
    "delta",
    "unit",
    "neighbouring_relation",
)
_PROVENANCE = ("commit", "config_hash", "code_hash", "seed", "steps", "seconds", "seconds_total")
_VARIABLES = {
    "name": "WANDB_NAME",
    "group": "WANDB_RUN_GROUP",
    "tags": "WANDB_TAGS",
    "job_type": "WANDB_JOB_TYPE",
}


@dataclass(frozen=True)
class Origin:
    """The sweep of a run, from which log services get its group and its name.

    Attributes:
        sweep: Name of the sweep, or None.
        swept: Overrides in which the runs of the sweep differ, with this run's values.
    """

    sweep: str | None = None
    swept: tuple[str, ...] = ()


def origin_of(hydra: Any) -> Origin:
    """Origin of a job, by Hydra's own configuration or, below `wandb agent`, by the agent's.

    Args:
        hydra: `HydraConfig.get()`.
    """
    words = [str(word) for word in hydra.overrides.task]
    agent = os.environ.get("WANDB_SWEEP_ID")
    parameters = os.environ.get("WANDB_SWEEP_PARAM_PATH")
    if agent and parameters:
        chosen = OmegaConf.load(parameters)
        return Origin(agent, tuple(word.lstrip("+") for word in words if key_of(word) in chosen))
    if hydra.mode != RunMode.MULTIRUN:
        return Origin()
    keys = (hydra.callbacks.get("folders") or {}).get("swept") or ()
    swept = tuple(word.lstrip("+") for word in words if key_of(word) in keys)
    return Origin(from_here(Path(str(hydra.sweep.dir)).absolute()), swept)


def run_names(config: Mapping[str, Any], origin: Origin) -> dict[str, Any]:
    """Names of a run in a log service.

    Args:
        config: The run's configuration.
        origin: Its sweep.

    Returns:
        name, which differs between the runs of a sweep, group, tags and job_type.
    """
    run = config["run"]
    words = [word for word in origin.swept if not word.startswith("run.")]
    if not any(word.startswith("seed=") for word in words):
        words.append(f"seed={config['seed']}")
    return {
        "name": " ".join([run["name"], *words])[:_LONGEST_NAME],
        "group": (origin.sweep or run["group"])[-_LONGEST_NAME:],
        "tags": list(run["tags"]),
        "job_type": "audit" if is_audited(config) else "train",
    }


def logger_state(folder: RunFolder, name: str) -> dict[str, Any]:
    """State with which a logger goes on with a resumed run, such as its id; empty if it has written nothing.

    Args:
        folder: The run's folder.
        name: The logger's name.

    Raises:
        ConfigurationError: The file is damaged.
    """
    return _logger_states(folder).get(name, {})


def _logger_states(folder: RunFolder) -> dict[str, dict[str, Any]]:
    if not folder.loggers.is_file():
        return {}
    remedy = "delete {path}, and loggers begin a new run"
    return read_json(folder.loggers, dict[str, dict[str, Any]], remedy)


def _save_logger_state(folder: RunFolder, name: str, state: dict[str, Any]) -> None:
    write_json(folder.loggers, {**_logger_states(folder), name: state})


def build_loggers(run: Run, origin: Origin) -> list[Logger]:
    """The run's own log first, then those that the configuration asks for.

    Args:
        run: The run to log.
        origin: Its sweep.

    Raises:
        ConfigurationError: One cannot be made.
    """
    loggers: list[Logger] = [MetricsCSV(run.folder)]
    if not is_first():  # of several processes one logs: each would begin a run of its own in a service
        return loggers
    if uses_wandb(run.config):
        loggers.append(wandb_logger(run, origin))
    for name, options in other_loggers(run.config).items():
        loggers.append(_other_logger(run, origin, name, options))
    return loggers


def services(loggers: Sequence[Logger]) -> Sequence[Logger]:
    """Loggers that are shown ε and learning rates: all but the run's own metrics.csv, which has them."""
    return [logger for logger in loggers if not isinstance(logger, MetricsCSV)]


def _other_logger(run: Run, origin: Origin, name: str, options: Mapping[str, Any]) -> Logger:
    """Make a logger; facts of the run that its class takes are filled in if the configuration leaves them open."""
    group = f"logger.{name}"
    cls = LOGGER.class_of(options, group)
    accepted = options_of(cls)
    resumed = run.config["run"]["resume"]
    defaults: dict[str, Any] = {"save_dir": str(run.folder), "name": name}
    if _RUN_ID in accepted:
        defaults["run_name"] = run_names(run.config, origin)["name"]
        if resumed:
            defaults |= logger_state(run.folder, name)
    options = dict(options)
    for key, value in defaults.items():
        if key in accepted and options.get(key) is None:
            options[key] = value
    logger: Logger = instantiate(cls, options, group)
    if _RUN_ID in accepted:
        # Asking for the id begins the run in the service: where that fails, it is one line that names the group.
        run_id = instantiate(lambda: getattr(logger, _RUN_ID), {}, group)
        _save_logger_state(run.folder, name, {_RUN_ID: run_id})
    if not resumed:  # a service takes the settings of a run once, and refuses others
        logger.log_hyperparams(run.config)
    return logger


def wandb_mode(option: str) -> _Mode:
    """Resolve "auto": $WANDB_MODE, else online where a key is stored, else offline (never a prompt).

    Raises:
        ConfigurationError: wandb knows no such mode.
    """
    if option != "auto":
        return cast(_Mode, option)
    if os.environ.get("WANDB_MODE"):
        return cast(_Mode, checked_value(_Mode, os.environ["WANDB_MODE"], "$WANDB_MODE"))
    import wandb

    try:
        return "online" if wandb.login(prompt=False, verify=False) else "offline"
    except (wandb.Error, ValueError) as error:
        _warn_offline(error)
        return "offline"


def _warn_offline(error: Exception) -> None:
    warnings.warn(f"wandb cannot be reached and logs offline: {brief(error)}", stacklevel=2)


def wandb_logger(run: Run, origin: Origin) -> WandbLogger:
    """Lightning's logger on a run of wandb: a new one, or that of the session before.

    Args:
        run: The run; its folder keeps wandb's id.
        origin: Its sweep.
    """
    before = logger_state(run.folder, _WANDB) if run.config["run"]["resume"] else {}
    if before:
        time.sleep(_SESSION_APART)
    # A resumed run keeps its names, whatever the command that resumes it and its environment say.
    names = before or _without_environment(run_names(run.config, origin))
    experiment = _begin(run, names)
    state = {key: getattr(experiment, key) for key in ("id", *_VARIABLES)}
    _save_logger_state(run.folder, _WANDB, state)
    # Any metric can be drawn against epsilon; by themselves they are drawn against the releases.
    for axis in (_STEPS, "privacy/epsilon_rdp", "privacy/epsilon_pld"):
        experiment.define_metric(axis)
    experiment.define_metric("*", step_metric=_STEPS)
    if before:
        # Offline, wandb numbers the rows of a resumed run from 0 again, and a server drops those that it has.
        experiment.log({}, step=time.time_ns() // 10**6)
    return WandbLogger(experiment=experiment)


def _without_environment(names: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the names that wandb itself takes from the environment."""
    return {key: value for key, value in names.items() if not os.environ.get(_VARIABLES[key])}


def _begin(run: Run, names: Mapping[str, Any]) -> Any:
    """Start wandb's run; offline, where the server does not answer or does not know the key."""
    import wandb

    options = run.config["logger"]
    settings = wandb.Settings(silent=True, console="off")
    if "WANDB_INIT_TIMEOUT" not in os.environ:
        settings.init_timeout = _INIT_TIMEOUT
    arguments = {
        **names,
        "project": options["project"],
        "entity": options.get("entity"),
        "notes": options.get("notes"),
        "dir": str(run.folder.path.absolute()),  # wandb's service, which writes, may have been started elsewhere
        "settings": settings,
        "config": run.config,
    }
    mode = wandb_mode(options["mode"])
    if mode != "offline":
        try:
            return wandb.init(mode=mode, resume="allow" if "id" in names else None, **arguments)
        except (wandb.Error, ValueError) as error:
            _warn_offline(error)
    return wandb.init(mode="offline", **arguments)


def mirror_result(
    record: Mapping[str, Any],
    pictures: Mapping[str, Path],
    best: Mapping[str, float],
) -> None:
    """Put the final figures and the pictures into the wandb run.

    Args:
        record: The content of result.json.
        pictures: Paths of pictures, by their names in wandb.
        best: Best values of metrics on validation data, by name.
    """
    import wandb

    if wandb.run is None:
        return
    if pictures:
        wandb.run.log({name: wandb.Image(str(path)) for name, path in pictures.items()})
    privacy = record["privacy"]
    audit = privacy.get("audit") or {}
    limits = audit.get("audited", {})
    audited = {
        "epsilon": limits.get(str(audit.get("shown"))),
        "verdict": audit.get("verdict"),
        "confidence": audit.get("confidence"),
    }
    figures = {
        **_prefixed("privacy/", {name: privacy.get(name) for name in _PRIVACY}),
        **_prefixed("privacy/epsilon_", privacy["epsilon"]),
        **_prefixed("privacy/nominal_epsilon_microbatch_", privacy.get("epsilon_microbatch", {})),
        **_prefixed("privacy/audited_epsilon_", limits),
        **_prefixed("privacy/audited_", audited),
        **_prefixed("best/", best),
        **_prefixed("", {name: record.get(name) for name in _PROVENANCE}),
        **_prefixed("", record["metrics"]),
    }
    wandb.run.summary.update(figures)


def _prefixed(prefix: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Names below a prefix of those figures that there are."""
    return {f"{prefix}{name}": value for name, value in figures.items() if value is not None}


def finish_wandb(run: Run, failed: bool = False) -> None:
    """End the run in wandb, with its ledger and result; else the next job of a sweep would log into it.

    Args:
        run: The run that ends.
        failed: True if it ends by an error.
    """
    import wandb

    if wandb.run is None:
        return
    folder = run.folder
    if wandb.run.disabled is not True:
        _attach("run", [folder.ledger, folder.result, folder.partial_result])
        if run.config["logger"].get("checkpoint"):
            _attach("model", [folder.checkpoint])
    wandb.finish(exit_code=int(failed))


def _attach(kind: str, paths: Sequence[Path]) -> None:
    """Log an artifact of those files that exist."""
    import wandb

    assert wandb.run is not None
    files = [path for path in paths if path.is_file()]
    if not files:
        return
    artifact = wandb.Artifact(f"{kind}-{wandb.run.id}", type=kind)
    for path in files:
        artifact.add_file(str(path.absolute()))
    wandb.run.log_artifact(artifact)


def how_to_open(folder: RunFolder) -> str:
    """Say how to see the run in wandb."""
    import wandb

    if wandb.run is not None and not wandb.run.offline:
        return str(wandb.run.url)
    run_id = logger_state(folder, _WANDB).get("id", "")
    sessions = sorted(folder.wandb.glob(f"offline-run-*{run_id}"))
    if not sessions:
        return "not logged"
    return f"wandb sync {shlex.join(map(str, sessions))}"


class EvaluationRow(pl.Callback):
    """Hands epsilon and learning rates to loggers at the step at which an evaluation is logged.

    Epsilon is that by RDP, which takes a millisecond; at the end of the run all accountants' are there.

    Warns of metrics from private training data without a name that says that no ε covers them.

    Args:
        loggers: All loggers but the run's own metrics.csv.
    """

    _MARKED = ("nonprivate/", "privacy/", "private/", "val/", "test/", "gan/", "optimizer/", "evaluation/")

    def __init__(self, loggers: Sequence[Logger]) -> None:
        super().__init__()
        self._loggers = list(loggers)
        self._seen: set[str] = set()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Say once of each metric from private records that its name does not say so."""
        new = trainer.logged_metrics.keys() - self._seen
        self._seen |= new
        if _private_strategy(trainer) is None:
            return
        for name in sorted(new):
            if name != "epoch" and not name.startswith(self._MARKED):
                warnings.warn(
                    f"the metric {name} is logged from private training data and no epsilon covers it: rename it "
                    f"nonprivate/{name}, so that it is not published with the model.",
                    stacklevel=1,
                )

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log just before Lightning logs its measurements."""
        if trainer.sanity_checking or trainer.state.fn != "fit" or not trainer.is_global_zero:
            return
        values = learning_rates(optimizer.param_groups for optimizer in trainer.optimizers)
        strategy = _private_strategy(trainer)
        if strategy is not None:
            epsilon = epsilon_here(strategy, "rdp")
            if math.isfinite(epsilon):  # an infinite epsilon is no point of a curve
                values["privacy/epsilon_rdp"] = epsilon
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # by which Lightning logs the evaluation
        _log_values(self._loggers, values, step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Metrics of the evaluation are none of training data."""
        self._seen |= trainer.callback_metrics.keys()


def _private_strategy(trainer: pl.Trainer) -> PrivateStrategy | None:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, PrivateStrategy) and callback.private:
            return callback
    return None


def learning_rates(optimizers: Iterable[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Learning rate of each optimizer, by the name of its setting; of further ones with a number.

    Args:
        optimizers: Parameter groups of each; the first group counts.

    >>> learning_rates([[{"lr": 0.1}], [{"lr": 0.2}]])
    {'optimizer/lr': 0.1, 'optimizer/lr_2': 0.2}
    """
    rates: dict[str, float] = {}
    for groups in optimizers:
        if "lr" in groups[0]:
            suffix = f"_{len(rates) + 1}" if rates else ""
            rates[f"optimizer/lr{suffix}"] = float(groups[0]["lr"])
    return rates


def log_end(loggers: Sequence[Logger], record: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> None:
    """Log the last epsilons and learning rates with the last evaluation and the test.

    Args:
        loggers: All but the run's own metrics.csv.
        record: The content of result.json.
        checkpoint: The last one: optimizers may have been in another process.
    """
    values = learning_rates(state["param_groups"] for state in checkpoint["optimizer_states"])
    values |= _prefixed("privacy/epsilon_", record["privacy"]["epsilon"])
    _log_values(loggers, values, record["steps"])
    for logger in loggers:
        if isinstance(logger, WandbLogger):  # whose charts draw one figure against another of the same row
            logger.log_metrics(_prefixed("", record["metrics"]), step=record["steps"])


def _log_values(loggers: Iterable[Logger], values: Mapping[str, float], step: int) -> None:
    """Log values at a step; in wandb they join the row that is logged next."""
    if not values:
        return
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.log(dict(values), commit=False)
        else:
            logger.log_metrics(dict(values), step=step)
            logger.save()
