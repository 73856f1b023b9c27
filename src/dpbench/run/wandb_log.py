"""wandb as a mirror of the local files."""

from __future__ import annotations

import os
import shlex
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast, get_args

from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities import rank_zero_only

from dpbench.errors import ConfigurationError, brief
from dpbench.run.kept_loggers import keep, kept
from dpbench.run.origin import Origin
from dpbench.runs.folder import Run, RunFolder
from dpbench.runs.record import is_audited

Mode = Literal["online", "offline", "disabled", "shared"]
RELEASES = "trainer/global_step"
KEPT = "wandb"  # in the file of what loggers keep
_LONGEST = 128  # letters of a name or a group
_SECOND = 1.0  # wandb names the files of a session by that in which it begins, and writes over those of another
_PATIENCE = 30.0  # seconds for a server that does not answer, unless $WANDB_INIT_TIMEOUT says otherwise
_PRIVACY = (
    "noise_multiplier", "noise_std_over_max_grad_norm", "sample_rate", "expected_batch_size", "delta", "unit",
    "neighbouring_relation",
)  # fmt: skip
_PROVENANCE = ("commit", "config_hash", "code_hash", "seed", "steps", "seconds", "seconds_total")


def environment_mode() -> Mode | None:
    """Value of $WANDB_MODE, if it is set.

    Raises:
        ConfigurationError: wandb knows no such mode.
    """
    mode = os.environ.get("WANDB_MODE")
    if mode and mode not in get_args(Mode):
        raise ConfigurationError(f"$WANDB_MODE must be {', '.join(get_args(Mode))}, or not be set, not {mode!r}.")
    return cast(Mode, mode) if mode else None


def wandb_mode(wanted: str) -> Mode:
    """Resolve "auto": $WANDB_MODE, else online where somebody is logged in, else offline (never a prompt)."""
    if wanted != "auto":
        return cast(Mode, wanted)
    if mode := environment_mode():
        return mode
    import wandb

    try:
        return "online" if wandb.login(prompt=False, verify=False) else "offline"
    except (wandb.Error, ValueError) as error:
        _fall_back(error)
        return "offline"


def named(config: Mapping[str, Any], origin: Origin, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What a run is called: words of the command line first, then the environment's, then our own.

    Args:
        config: Of the run.
        origin: Its command and sweep.
        environment: Its $WANDB_NAME, $WANDB_RUN_GROUP, $WANDB_TAGS and $WANDB_JOB_TYPE.

    Returns:
        name, which differs between the runs of a sweep, group, tags and job_type.
    """
    own, said = config["run"], origin.said

    def by(key: str, variable: str) -> str | None:
        return None if f"run.{key}" in said else environment.get(variable)

    words = [word for word in origin.swept if not word.startswith("run.")]
    chosen = "run.name" in said or by("name", "WANDB_NAME")
    if not any(word.startswith("seed=") for word in words) and not (chosen and not origin.swept):
        words.append(f"seed={config['seed']}")
    group = own["group"] if "run.group" in said else by("group", "WANDB_RUN_GROUP") or origin.sweep or own["group"]
    tags = by("tags", "WANDB_TAGS")
    return {
        "name": " ".join([by("name", "WANDB_NAME") or own["name"], *words])[:_LONGEST],
        "group": group[-_LONGEST:],
        "tags": [tag.strip() for tag in tags.split(",") if tag.strip()] if tags else list(own["tags"]),
        "job_type": environment.get("WANDB_JOB_TYPE") or ("audit" if is_audited({"config": config}) else "train"),
    }


class OneRowForEachStep(WandbLogger):
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
        self._continued, self._begun_in = continued, os.getpid()

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add to the row of a step."""
        if step is None:
            self.experiment.log(dict(metrics))
            return
        self._rows.setdefault(step, {}).update(metrics)
        for old in [one for one in sorted(self._rows) if one < step - 1]:
            self._write(old)

    @rank_zero_only
    def flush(self) -> None:
        """Write all rows."""
        for step in sorted(self._rows):
            self._write(step)

    def _write(self, step: int) -> None:
        # Offline, wandb counts the rows of a resumed run from 0 again, and a server drops what it has already.
        first = {"step": max(step, self.experiment.step), "commit": True} if self._continued else {}
        self._continued = False
        self.experiment.log({**self._rows.pop(step), RELEASES: step}, **first)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """In a spawned process its end; in the first one the final tests are still to come."""
        if os.getpid() != self._begun_in:
            self.flush()
        super().finalize(status)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        self._continued = False  # the process that gets this goes on
        return state


def wandb_logger(run: Run, origin: Origin) -> OneRowForEachStep:
    """A run of wandb for this one: new, or that of the session before.

    Args:
        run: Its folder keeps the id.
        origin: What it is called by.
    """
    options, before = run.config["logger"], kept(run.folder, KEPT) if run.config["run"]["resume"] else {}
    told = {key: options[key] for key in ("entity", "notes") if options.get(key) is not None}
    who = before or named(run.config, origin)
    if before:
        time.sleep(_SECOND)
    here = str(run.folder.path.absolute())  # wandb's service, which writes, may have been started elsewhere
    experiment = begin(
        wandb_mode(options["mode"]), {**who, **told}, project=options["project"], dir=here, config=run.config
    )
    keep(run.folder, KEPT, {**who, "id": experiment.id})
    # The axes. Any metric can be drawn against epsilon; against the releases they are drawn by themselves.
    for axis in (RELEASES, "privacy/epsilon_rdp", "privacy/epsilon_pld"):
        experiment.define_metric(axis)
    experiment.define_metric("*", step_metric=RELEASES)
    return OneRowForEachStep(experiment, continued=bool(before))


def begin(mode: Mode, who: dict[str, Any], **options: Any) -> Any:
    """Start wandb's run; offline, where the server does not answer or does not know the key."""
    import wandb

    settings = wandb.Settings(silent=True, console="off")
    if "WANDB_INIT_TIMEOUT" not in os.environ:
        settings.init_timeout = _PATIENCE
    if mode != "offline":
        try:
            return wandb.init(mode=mode, settings=settings, resume="allow" if "id" in who else None, **who, **options)
        except (wandb.Error, ValueError) as error:
            _fall_back(error)
    return wandb.init(mode="offline", settings=settings, **who, **options)


def _fall_back(error: Exception) -> None:
    warnings.warn(f"wandb cannot be reached, and logs offline: {brief(error)}", stacklevel=2)


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
    flush(loggers)
    folder = run.folder
    if wandb.run.disabled is not True:
        _attach("run", [folder.ledger, folder.result, folder.partial_result], folder.finished)
        if run.config["logger"].get("checkpoint"):
            _attach("model", [folder.checkpoint], folder.finished)
    wandb.finish(exit_code=int(failed))


def _attach(kind: str, files: list[Path], final: bool) -> None:
    """Log an artifact of those files that exist; of a run that may go on, with copies of them."""
    import wandb

    assert wandb.run is not None
    there = [path for path in files if path.is_file()]
    artifact = wandb.Artifact(f"{kind}-{wandb.run.id}", type=kind)
    for path in there:
        artifact.add_file(str(path.absolute()), policy="immutable" if final else "mutable")
    if there:
        wandb.run.log_artifact(artifact)


def flush(loggers: Iterable[Logger]) -> None:
    """Write the rows that still wait."""
    for logger in loggers:
        if isinstance(logger, OneRowForEachStep):
            logger.flush()


def mirror_result(
    loggers: Iterable[Logger], record: dict[str, Any], pictures: Mapping[str, Path], best: Mapping[str, float]
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
    flush(loggers)
    privacy, summary = record["privacy"], wandb.run.summary
    if pictures:
        wandb.run.log({name: wandb.Image(str(path)) for name, path in pictures.items()})
    found = {f"privacy/epsilon_{name}": value for name, value in privacy["epsilon"].items()}
    nominal = privacy.get("epsilon_microbatch", {})
    found |= {f"privacy/nominal_epsilon_microbatch_{name}": value for name, value in nominal.items()}
    found |= {f"privacy/{name}": privacy[name] for name in _PRIVACY if privacy.get(name) is not None}
    found |= {f"privacy/{name}": value for name, value in _audited(privacy.get("audit") or {}).items()}
    found |= {name: record[name] for name in _PROVENANCE if record.get(name) is not None}
    found |= {f"best/{name}": value for name, value in best.items()}
    summary.update(found)
    summary.update({key: value for key, value in record["metrics"].items() if value is not None})


def _audited(audit: Mapping[str, Any]) -> dict[str, Any]:
    """What canaries told of a run: each lower limit of epsilon, the one that tables show, and the verdict."""
    limits: Mapping[str, float | None] = audit.get("audited", {})
    named = {f"audited_epsilon_{name}": value for name, value in limits.items()}
    named |= {"audited_epsilon": limits.get(str(audit.get("shown")))}
    facts = {f"audited_{name}": audit.get(name) for name in ("verdict", "confidence")}
    return {name: value for name, value in {**named, **facts}.items() if value is not None}


def how_to_open(folder: RunFolder) -> str:
    """Say what a user does to see the run in wandb."""
    import wandb

    if wandb.run is not None and not wandb.run.offline:
        return str(wandb.run.url)
    offline = sorted(folder.wandb.glob("offline-run-*"))
    here = kept(folder, KEPT).get("id", "")
    if not offline:
        return "not logged"
    return f"wandb sync {shlex.join(str(path) for path in offline if path.name.endswith(here))}"
