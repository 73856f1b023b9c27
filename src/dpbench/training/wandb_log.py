"""wandb as a mirror of the local files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, cast, get_args

import pandas as pd
from pytorch_lightning.loggers import WandbLogger

from dpbench.errors import ConfigurationError, brief
from dpbench.results.compare import Compared
from dpbench.results.table import flat_settings

Mode = Literal["online", "offline", "disabled", "shared"]


def environment_mode() -> Mode | None:
    """$WANDB_MODE, if it is set.

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

    return "online" if wandb.login(prompt=False, verify=False) else "offline"


def wandb_logger(config: dict[str, Any], folder: Path) -> WandbLogger:
    """A run in the group, job type, tags and configuration of this one."""
    import wandb

    run, options = config["run"], config["logger"]
    experiment = wandb.init(
        name=run["name"],
        project=options["project"],
        dir=str(folder),
        mode=wandb_mode(options["mode"]),
        group=run["group"],
        job_type="train",
        tags=list(run["tags"]),
        config=config,
        settings=wandb.Settings(silent=True, console="off"),
    )
    return WandbLogger(experiment=experiment)


def finish_wandb(failed: bool = False) -> None:
    """End the run, else the next job of a sweep logs into it."""
    import wandb

    if wandb.run is not None:
        wandb.finish(exit_code=int(failed))


def mirror_result(record: dict[str, Any], picture: Path | None) -> None:
    """Put the final figures and the curves into the wandb run."""
    import wandb

    if wandb.run is None:
        return
    for name, value in record["privacy"]["epsilon"].items():
        wandb.run.summary[f"privacy/epsilon_{name}"] = value
    for name, value in record["privacy"].get("epsilon_microbatch", {}).items():
        wandb.run.summary[f"privacy/nominal_epsilon_microbatch_{name}"] = value
    for name in ("noise_multiplier", "noise_std_over_max_grad_norm", "sample_rate", "expected_batch_size", "delta"):
        if record["privacy"].get(name) is not None:
            wandb.run.summary[f"privacy/{name}"] = record["privacy"][name]
    wandb.run.summary.update({key: value for key, value in record["metrics"].items() if value is not None})
    if picture is not None:
        wandb.run.log({"curves": wandb.Image(str(picture))})


def recorded(place: str) -> list[Compared]:
    """Runs as wandb's public API gives them.

    Args:
        place: ENTITY/PROJECT or ENTITY/PROJECT:GROUP.

    Raises:
        ConfigurationError: There are none, or wandb does not answer.
    """
    import wandb

    project, _, group = place.partition(":")
    try:
        runs = list(wandb.Api().runs(project, filters={"group": group} if group else {}))
    except (ValueError, OSError, wandb.Error) as error:
        raise ConfigurationError(f"wandb cannot list {project}: {brief(error)}") from error
    if not runs:
        raise ConfigurationError(f"wandb has no runs in {project}{f', group {group}' if group else ''}.")
    found = []
    for run in runs:
        history = run.history(pandas=True)
        curves = history.set_index("_step") if "_step" in history else pd.DataFrame()
        summary = {key: value for key, value in dict(run.summary).items() if isinstance(value, int | float)}
        metrics = {key: value for key, value in summary.items() if not key.startswith("_")}
        found.append(Compared(run.name, flat_settings(dict(run.config)), metrics, curves))
    return found


def how_to_open(folder: Path) -> str:
    """What a user does to see the run in wandb."""
    import wandb

    if wandb.run is not None and not wandb.run.offline:
        return str(wandb.run.url)
    offline = sorted(folder.glob("wandb/offline-run-*"))
    return f"wandb sync {offline[-1]}" if offline else "not logged"
