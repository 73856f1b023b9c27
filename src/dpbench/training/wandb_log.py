"""wandb as a mirror of the local files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, cast, get_args

from pytorch_lightning.loggers import WandbLogger

from dpbench.errors import ConfigurationError
from dpbench.runs.folder import Run, RunFolder

Mode = Literal["online", "offline", "disabled", "shared"]


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

    return "online" if wandb.login(prompt=False, verify=False) else "offline"


def wandb_logger(run: Run) -> WandbLogger:
    """A run in the group, job type, tags and configuration of this one."""
    import wandb

    named, options = run.config["run"], run.config["logger"]
    experiment = wandb.init(
        name=named["name"],
        project=options["project"],
        dir=str(run.folder),
        mode=wandb_mode(options["mode"]),
        group=named["group"],
        job_type="train",
        tags=list(named["tags"]),
        config=run.config,
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


def how_to_open(folder: RunFolder) -> str:
    """Say what a user does to see the run in wandb."""
    import wandb

    if wandb.run is not None and not wandb.run.offline:
        return str(wandb.run.url)
    offline = sorted(folder.wandb.glob("offline-run-*"))
    return f"wandb sync {offline[-1]}" if offline else "not logged"
