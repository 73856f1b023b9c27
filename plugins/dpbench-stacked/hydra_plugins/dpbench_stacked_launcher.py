"""`hydra/launcher=dpbench_stacked`: the shell of `dpbench_stacked.jobs`, where Hydra looks for launchers."""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class StackedConf:
    """No options: the executor's name says how many runs make a stack."""

    # Hydra runs this file before it is a module: dataclasses cannot look up annotations that are strings.
    _target_: str = f"{__name__}.StackedLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="dpbench_stacked", node=StackedConf, provider="dpbench")


class StackedLauncher(Launcher):
    """Trains the jobs of a sweep that differ in their seeds alone together, in this process."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what Hydra has composed."""
        self._sweep = (config, hydra_context, task_function)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run a batch of jobs, see `launch_stacked`."""
        from dpbench_stacked.jobs import launch_stacked

        return launch_stacked(*self._sweep, job_overrides, initial_job_idx)
