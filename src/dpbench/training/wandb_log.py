"""wandb as a mirror of the local files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, cast

from pytorch_lightning.loggers import WandbLogger

Mode = Literal["online", "offline", "disabled", "shared"]


def wandb_mode(wanted: str) -> Mode:
    """Resolve "auto": $WANDB_MODE, else online where somebody is logged in, else offline (never a prompt)."""
    if wanted != "auto":
        return cast(Mode, wanted)
    if mode := os.environ.get("WANDB_MODE"):
        return cast(Mode, mode)
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
    wandb.run.summary.update({key: value for key, value in record["metrics"].items() if value is not None})
    if picture is not None:
        wandb.run.log({"curves": wandb.Image(str(picture))})


def how_to_open(folder: Path) -> str:
    """What a user does to see the run in wandb."""
    import wandb

    if wandb.run is not None and not wandb.run.offline:
        return str(wandb.run.url)
    offline = sorted(folder.glob("wandb/offline-run-*"))
    return f"wandb sync {offline[-1]}" if offline else "not logged"
