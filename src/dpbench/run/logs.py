"""Where a run's metrics go beside its own metrics.csv: wandb, and any of Lightning's loggers by its class.

wandb mirrors the local files, offline unless somebody is logged in. Every logger gets ε and learning rates at each
evaluation; those that keep a run's id get its name, too.
"""

from __future__ import annotations

import math
import os
import shlex
import time
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast, get_args

import pandas as pd
import pytorch_lightning as pl
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pytorch_lightning.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities import rank_zero_only
from yaml import YAMLError

from dpbench.callback.strategy import epsilon_here
from dpbench.errors import ConfigurationError, brief
from dpbench.files import typed, write_json
from dpbench.options import options_of
from dpbench.run.build import instantiate
from dpbench.run.config import LOGGER, other_loggers, uses_wandb
from dpbench.run.processes import is_first
from dpbench.run.search_path import installing
from dpbench.runs.command import key_of
from dpbench.runs.folder import Run, RunFolder
from dpbench.runs.metrics_log import MetricsCSV
from dpbench.runs.readers import read_json
from dpbench.runs.record import REPORTED, has_canaries
from dpbench.runs.sweep import JOB_TYPE
from dpbench.strategies import PrivateStrategy

Mode = Literal["online", "offline", "disabled", "shared"]
_STEPS = "trainer/global_step"  # as Lightning's loggers call the axis of all metrics
_WANDB = "wandb"
_TABLE = "sweep"
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
_PACKAGES: Mapping[type, tuple[str, tuple[str, ...]]] = {
    TensorBoardLogger: ("tensorboard", ("tensorboard", "tensorboardX")),
    MLFlowLogger: ("mlflow", ("mlflow",)),
}
"""Class → the extra that brings what it imports, and the packages of which it needs one."""


@dataclass(frozen=True)
class Origin:
    """The command that a run is of: what its name in a log service is made of.

    Attributes:
        overridden: Keys that the command line set.
        sweep: Name of the sweep, or None.
        swept: The words in which the runs of the sweep differ, as this one has them.
    """

    overridden: frozenset[str] = frozenset()
    sweep: str | None = None
    swept: tuple[str, ...] = ()


def origin_of(hydra: Any) -> Origin:
    """Origin of a job, by Hydra's own configuration or, below `wandb agent`, by the agent's.

    Args:
        hydra: `HydraConfig.get()`.
    """
    words = [str(word) for word in hydra.overrides.task]
    overridden = frozenset(key_of(word) for word in words)
    agent = os.environ.get("WANDB_SWEEP_ID")
    if agent:
        return Origin(overridden, agent, _words_of_keys(words, _parameters_of_agent() or overridden))
    if hydra.mode != RunMode.MULTIRUN:
        return Origin(overridden)
    swept = (hydra.callbacks.get("folders") or {}).get("swept") or ()
    folder = Path(str(hydra.sweep.dir)).absolute()
    # As a user sees the sweep: from here, or by the last two parts of its path.
    is_below = folder.is_relative_to(Path.cwd())
    sweep = folder.relative_to(Path.cwd()) if is_below else Path(*folder.parts[-2:])
    return Origin(overridden, sweep.as_posix(), _words_of_keys(words, swept))


def _words_of_keys(words: Sequence[str], keys: Collection[str]) -> tuple[str, ...]:
    return tuple(word.lstrip("+") for word in words if key_of(word) in keys)


def _parameters_of_agent() -> set[str]:
    """Names of what the agent has chosen; empty where it has not written them down."""
    with suppress(KeyError, OSError, YAMLError, OmegaConfBaseException):
        return set(map(str, OmegaConf.load(os.environ["WANDB_SWEEP_PARAM_PATH"]))) - {"wandb_version"}
    return set()


def run_names(config: Mapping[str, Any], origin: Origin, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What a run is called: words of the command line first, then the environment's, then our own.

    Args:
        config: Of the run.
        origin: Its command and sweep.
        environment: Its $WANDB_NAME, $WANDB_RUN_GROUP, $WANDB_TAGS and $WANDB_JOB_TYPE.

    Returns:
        name, which differs between the runs of a sweep, group, tags and job_type.
    """
    run = config["run"]

    def from_environment(key: str, variable: str) -> str | None:
        if f"run.{key}" in origin.overridden:
            return None
        return environment.get(variable) or None

    name = from_environment("name", "WANDB_NAME")
    group = from_environment("group", "WANDB_RUN_GROUP")
    if group is None and "run.group" not in origin.overridden:
        group = origin.sweep
    tags = list(run["tags"])
    if environment_tags := from_environment("tags", "WANDB_TAGS"):
        tags = [tag.strip() for tag in environment_tags.split(",") if tag.strip()]
    words = [word for word in origin.swept if not word.startswith("run.")]
    is_chosen = "run.name" in origin.overridden or name is not None
    names_seed = any(word.startswith("seed=") for word in words)
    if not names_seed and (origin.swept or not is_chosen):
        words.append(f"seed={config['seed']}")
    job_type = "audit" if has_canaries(config) else "train"
    return {
        "name": " ".join([name or run["name"], *words])[:_LONGEST_NAME],
        "group": (group or run["group"])[-_LONGEST_NAME:],
        "tags": tags,
        "job_type": environment.get("WANDB_JOB_TYPE") or job_type,
    }


def logger_state(folder: RunFolder, name: str) -> dict[str, Any]:
    """What a logger needs to go on with a run that is resumed, such as its id; empty if it has written nothing.

    Args:
        folder: Of the run.
        name: Of the logger.

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


def require_installed(config: Mapping[str, Any]) -> None:
    """Raise ConfigurationError, with the command that helps, where a logger's package is missing."""
    for name, options in other_loggers(config).items():
        cls = LOGGER.class_of(options, f"logger.{name}")
        for base, (extra, packages) in _PACKAGES.items():
            if issubclass(cls, base) and not any(find_spec(package) for package in packages):
                raise ConfigurationError(
                    f"logger={name} needs {packages[0]}, which is not installed: {installing(extra)}."
                )


def build_loggers(run: Run, origin: Origin) -> list[Logger]:
    """The run's own log first, then those that the configuration asks for.

    Args:
        run: Whose metrics they get.
        origin: What it is called by.

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
    """Make a logger; what its class takes of the run is filled in where the configuration leaves it open."""
    group = f"logger.{name}"
    cls = LOGGER.class_of(options, group)
    accepted = options_of(cls)
    resumed = run.config["run"]["resume"]
    defaults: dict[str, Any] = {"save_dir": str(run.folder), "name": name}
    if _RUN_ID in accepted:
        defaults["run_name"] = run_names(run.config, origin, {})["name"]
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


def environment_mode() -> Mode | None:
    """Value of $WANDB_MODE, if it is set.

    Raises:
        ConfigurationError: wandb knows no such mode.
    """
    mode = os.environ.get("WANDB_MODE")
    if mode and mode not in get_args(Mode):
        raise ConfigurationError(f"$WANDB_MODE must be {', '.join(get_args(Mode))}, or not be set, not {mode!r}.")
    return cast(Mode, mode) if mode else None


def wandb_mode(option: str) -> Mode:
    """Resolve "auto": $WANDB_MODE, else online where somebody is logged in, else offline (never a prompt)."""
    if option != "auto":
        return cast(Mode, option)
    if mode := environment_mode():
        return mode
    import wandb

    try:
        return "online" if wandb.login(prompt=False, verify=False) else "offline"
    except (wandb.Error, ValueError) as error:
        _warn_offline(error)
        return "offline"


def _warn_offline(error: Exception) -> None:
    warnings.warn(f"wandb cannot be reached, and logs offline: {brief(error)}", stacklevel=2)


class WandbRows(WandbLogger):
    """Lightning's logger, with all that is logged at one step in one row, whoever logs it.

    A row is written when a later one has begun, or in `flush`. Lightning counts one step less where it logs what a
    training step gave, and does so after the release of that step: so the last two rows wait.

    Args:
        experiment: wandb's run.
        continued: Whether it goes on with a run of another session, whose rows it must not write over.
    """

    def __init__(self, experiment: Any, continued: bool = False) -> None:
        super().__init__(experiment=experiment)
        self._rows: dict[int, dict[str, Any]] = {}
        self._continued = continued

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add to the row of a step."""
        if step is None:
            self.experiment.log(dict(metrics))
            return
        self._rows.setdefault(step, {}).update(metrics)
        self._write_rows(before=step - 1)

    @rank_zero_only
    def flush(self) -> None:
        """Write all rows."""
        self._write_rows(before=math.inf)

    def _write_rows(self, before: float) -> None:
        for step in sorted(self._rows):
            if step >= before:
                return
            row = {**self._rows.pop(step), _STEPS: step}
            if self._continued:
                # Offline, wandb numbers the rows of a resumed run from 0 again, and a server drops those that it has.
                self.experiment.log(row, step=max(step, self.experiment.step), commit=True)
                self._continued = False
            else:
                # No step: wandb would drop the row where users log to it, too, and so count its steps up.
                self.experiment.log(row)


def wandb_logger(run: Run, origin: Origin) -> WandbRows:
    """A run of wandb for this one: new, or that of the session before.

    Args:
        run: Its folder keeps the id.
        origin: What it is called by.
    """
    before = logger_state(run.folder, _WANDB) if run.config["run"]["resume"] else {}
    if before:
        time.sleep(_SESSION_APART)
    # A resumed run keeps its names, whatever the command that resumes it and its environment say.
    names = before or run_names(run.config, origin)
    experiment = _begin(run.config["logger"], names, run.folder.path, config=run.config)
    _save_logger_state(run.folder, _WANDB, {**names, "id": experiment.id})
    # Any metric can be drawn against epsilon; by themselves they are drawn against the releases.
    for axis in (_STEPS, "privacy/epsilon_rdp", "privacy/epsilon_pld"):
        experiment.define_metric(axis)
    experiment.define_metric("*", step_metric=_STEPS)
    return WandbRows(experiment, continued=bool(before))


def _begin(options: Mapping[str, Any], names: Mapping[str, Any], folder: Path, **more: Any) -> Any:
    """Start wandb's run; offline, where the server does not answer or does not know the key."""
    import wandb

    settings = wandb.Settings(silent=True, console="off")
    if "WANDB_INIT_TIMEOUT" not in os.environ:
        settings.init_timeout = _INIT_TIMEOUT
    arguments = {
        **names,
        "project": options["project"],
        "dir": str(folder.absolute()),  # wandb's service, which writes, may have been started elsewhere
        "settings": settings,
        **more,
    }
    for key in ("entity", "notes"):
        if options.get(key) is not None:
            arguments[key] = options[key]
    mode = wandb_mode(options["mode"])
    if mode != "offline":
        try:
            return wandb.init(mode=mode, resume="allow" if "id" in names else None, **arguments)
        except (wandb.Error, ValueError) as error:
            _warn_offline(error)
    return wandb.init(mode="offline", **arguments)


def _flush(loggers: Iterable[Logger]) -> None:
    """Write the rows that still wait."""
    for logger in loggers:
        if isinstance(logger, WandbRows):
            logger.flush()


def mirror_result(
    loggers: Iterable[Logger],
    record: Mapping[str, Any],
    pictures: Mapping[str, Path],
    best: Mapping[str, float],
) -> None:
    """Put the final figures and the pictures into the wandb run.

    Args:
        loggers: Of the run.
        record: The content of result.json.
        pictures: By the names that they get.
        best: Best values of metrics on validation data, by name.
    """
    import wandb

    if wandb.run is None:
        return
    _flush(loggers)
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


def finish_wandb(run: Run, loggers: Iterable[Logger], failed: bool = False) -> None:
    """End the run, else the next job of a sweep logs into it; its ledger and result go with it, whatever the end.

    Args:
        run: That ends.
        loggers: Of the run.
        failed: Whether by an error.
    """
    import wandb

    if wandb.run is None:
        return
    _flush(loggers)
    folder = run.folder
    if wandb.run.disabled is not True:
        _attach("run", [folder.ledger, folder.result, folder.partial_result], folder.finished)
        if run.config["logger"].get("checkpoint"):
            _attach("model", [folder.checkpoint], folder.finished)
    wandb.finish(exit_code=int(failed))


def _attach(kind: str, paths: Sequence[Path], final: bool) -> None:
    """Log an artifact of those files that exist; of a run that may go on, with copies of them."""
    import wandb

    assert wandb.run is not None
    files = [path for path in paths if path.is_file()]
    if not files:
        return
    artifact = wandb.Artifact(f"{kind}-{wandb.run.id}", type=kind)
    for path in files:
        artifact.add_file(str(path.absolute()), policy="immutable" if final else "mutable")
    wandb.run.log_artifact(artifact)


def how_to_open(folder: RunFolder) -> str:
    """Say what a user does to see the run in wandb."""
    import wandb

    if wandb.run is not None and not wandb.run.offline:
        return str(wandb.run.url)
    run_id = logger_state(folder, _WANDB).get("id", "")
    sessions = sorted(folder.wandb.glob(f"offline-run-*{run_id}"))
    if not sessions:
        return "not logged"
    return f"wandb sync {shlex.join(map(str, sessions))}"


def log_table(folder: Path, run: RunFolder, options: Mapping[str, Any], table: pd.DataFrame) -> str | None:
    """Log the table of a sweep: one more run in the group of its runs, which ends at once.

    Args:
        folder: Of the sweep; wandb's files go below it.
        run: One of the sweep's, whose group and tags the table gets.
        options: Of that run's logger.
        table: Numbers stay numbers.

    Returns:
        How to see it: the command that uploads it, or its address; None where wandb is disabled.
    """
    import wandb

    state = logger_state(run, _WANDB)
    group = state.get("group") or folder.name
    names = {"name": f"{group} table", "group": group, "tags": state.get("tags"), "job_type": JOB_TYPE}
    # JSON has no numbers for these: an absent figure is empty, an infinite one a word.
    cells = table.astype(object).replace([math.inf, -math.inf], "inf")
    cells = cells.where(table.notna(), None)
    experiment = _begin(options, names, folder)
    try:  # whatever happens, no later run of this process may log into this one
        if experiment.disabled is True:
            return None
        columns: list[str | int] = [str(name) for name in table]
        rows: list[Any] = cells.to_numpy().tolist()
        experiment.log({_TABLE: wandb.Table(columns=columns, data=rows, allow_mixed_types=True)})
        if not experiment.offline:
            return str(experiment.url)
        return f"wandb sync {typed(Path(experiment.dir).parent)}"
    finally:
        wandb.finish()


class EvaluationRow(pl.Callback):
    """Hands epsilon and learning rates to loggers at the step at which an evaluation is logged.

    RDP takes a millisecond; the other accountants take a second, and are asked at the first evaluation and whenever
    they have taken less than a tenth of the training's time. At the end of the run all are there.

    Warns of metrics from private training data whose name does not say that no ε covers them.

    Args:
        loggers: All but the run's own metrics.csv.
    """

    _QUICK = "rdp"
    _SHARE = 0.1  # of the training time that the other accountants may take
    _MARKED = ("nonprivate/", "privacy/", "private/", "val/", "test/", "gan/", "optimizer/", "evaluation/")

    def __init__(self, loggers: Sequence[Logger]) -> None:
        super().__init__()
        self._loggers = list(loggers)
        self._started = time.monotonic()
        self._spent = 0.0
        self._seen: set[str] = set()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The time of the training begins."""
        self._started = time.monotonic()
        self._spent = 0.0

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

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log beside what was measured."""
        self._seen |= trainer.callback_metrics.keys()
        if trainer.sanity_checking or trainer.state.fn != "fit" or not trainer.is_global_zero:
            return
        strategy = _private_strategy(trainer)
        values = {} if strategy is None else self._epsilons(strategy)
        values |= learning_rates(optimizer.param_groups for optimizer in trainer.optimizers)
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # by which Lightning logs the evaluation
        _log_values(self._loggers, values, step)

    def _epsilons(self, strategy: PrivateStrategy) -> dict[str, float]:
        epsilons = {self._QUICK: epsilon_here(strategy, self._QUICK)}
        if self._spent <= self._SHARE * (time.monotonic() - self._started):
            before = time.monotonic()
            for name in REPORTED:
                with suppress(ConfigurationError):  # it does not cover the sampling
                    epsilons[name] = epsilon_here(strategy, name)
            self._spent += time.monotonic() - before
        # An infinite epsilon is no point of a curve.
        finite = {name: value for name, value in epsilons.items() if math.isfinite(value)}
        return _prefixed("privacy/epsilon_", finite)


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


def log_end(loggers: Iterable[Logger], record: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> None:
    """Log the last epsilons and learning rates beside the last evaluation and the test.

    Args:
        loggers: All but the run's own metrics.csv.
        record: The content of result.json.
        checkpoint: The last one: optimizers may have been in another process.
    """
    values = learning_rates(state["param_groups"] for state in checkpoint["optimizer_states"])
    values |= _prefixed("privacy/epsilon_", record["privacy"]["epsilon"])
    _log_values(loggers, values, record["steps"])


def _log_values(loggers: Iterable[Logger], values: Mapping[str, float], step: int) -> None:
    if not values:
        return
    for logger in loggers:
        logger.log_metrics(dict(values), step=step)
        logger.save()
