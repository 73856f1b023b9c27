"""A Hydra sweeper that chooses: it runs two values of a key, and writes down which returned less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class BetterOfTwo(Sweeper):
    """Runs both.

    Args:
        key: Of the configuration.
        values: Two of them.
        direction: "minimize".
    """

    def __init__(self, key: str, values: list[Any], direction: str) -> None:
        self.key, self.values = key, values

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Hydra's."""
        self.folder = config.hydra.sweep.dir
        self.launcher = Plugins.instance().instantiate_launcher(
            config=config, hydra_context=hydra_context, task_function=task_function
        )

    def sweep(self, arguments: list[str]) -> None:
        """Launch, and choose by what the runs return."""
        jobs = [[*arguments, f"{self.key}={value}"] for value in self.values]
        returned = [job.return_value for job in self.launcher.launch(jobs, initial_job_idx=0)]
        best = min(range(len(jobs)), key=returned.__getitem__)
        (Path(self.folder) / "best.txt").write_text(f"{best} {returned[best]}")


OPTIONS = {"key": "optimizer.lr", "values": [0.001, 0.3], "direction": "minimize"}
ConfigStore.instance().store(
    group="hydra/sweeper",
    name="better_of_two",
    node={"_target_": f"{BetterOfTwo.__module__}.{BetterOfTwo.__name__}", **OPTIONS},
)
