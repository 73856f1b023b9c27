"""`launcher=ray`: the shell of `dpbench_ray`, where Hydra looks for launchers.

(hydra-ray-launcher asks for versions that the rest of our dependencies have left behind.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class RayConf:
    """Options, as `hydra.launcher.KEY=VALUE`."""

    # Hydra runs this file before it is a module: dataclasses cannot look up annotations that are strings.
    _target_: str = f"{__name__}.RayLauncher"
    address: str | None = None
    num_cpus: float = 1
    num_gpus: float = 0
    resources: dict[str, float] = field(default_factory=dict)
    max_retries: int = 3


ConfigStore.instance().store(group="hydra/launcher", name="dpbench_ray", node=RayConf, provider="dpbench")


class RayLauncher(Launcher):
    """Runs the jobs of a sweep as tasks of a Ray cluster, which starts a job again when its worker has died.

    Args:
        address: Address of the cluster; None takes $RAY_ADDRESS, else starts Ray on this machine for the sweep.
        task: Resources of each job: num_cpus, num_gpus, resources, and max_retries, how often a job continues
            after the death of its worker or node (-1: always).
    """

    def __init__(self, address: str | None = None, **task: Any) -> None:
        self._address = address
        self._task_options = task

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep the composed configuration."""
        from dpbench_ray import Sweep

        self._sweep = Sweep(hydra_context, task_function, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run a batch of jobs, see `run_jobs`."""
        from dpbench_ray import run_jobs

        return run_jobs(self._sweep, job_overrides, initial_job_idx, self._address, self._task_options)
