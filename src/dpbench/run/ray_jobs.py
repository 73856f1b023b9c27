"""The jobs of a sweep as tasks of a Ray cluster, by Ray's public API."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from dpbench.code import code_hash
from dpbench.errors import ConfigurationError, DPBenchError, brief
from dpbench.run.requeue import RAY_TASK
from dpbench.run.search_path import installing

_FORWARDED = ("DPBENCH_", "WANDB_", "MLFLOW_")  # variables that jobs have on other nodes too
_ANSWER = 10.0  # seconds that a cluster has to answer
_GRACE = 120.0  # seconds that interrupted jobs have to save what they have


@dataclass(frozen=True)
class Given:
    """What Hydra gives a launcher."""

    context: HydraContext
    task: TaskFunction
    config: DictConfig


@dataclass(frozen=True)
class _Place:
    """What a job has to find on its node.

    Attributes:
        folder: The working directory of who launches.
        seen: A file in the folder of the sweep.
        code: Hash of the code that launches.
    """

    folder: Path
    seen: Path
    code: str

    def check(self, node: str) -> None:
        """Whether it is there.

        Raises:
            ConfigurationError: It is not.
        """
        if not self.seen.exists():
            raise ConfigurationError(
                f"{node} does not see {self.seen.parent}: take a folder that all nodes share (hydra.sweep.dir)."
            )
        if code_hash() != self.code:
            raise ConfigurationError(
                f"{node} has other code of dpbench than {self.folder}: install the same everywhere."
            )


def run_jobs(
    sweep: Given, job_overrides: Sequence[Sequence[str]], first: int, address: str | None, options: Mapping[str, Any]
) -> list[JobReturn]:
    """Run a batch of jobs; all of them, also when some fail.

    Args:
        sweep: What Hydra gives a launcher.
        job_overrides: Words of each job.
        first: Number of the first job.
        address: Of the cluster; None takes $RAY_ADDRESS, else starts a Ray of this machine.
        options: What Ray is to give each job.

    Returns:
        What each job gave, in their order.

    Raises:
        ConfigurationError: Ray is not installed, or the cluster does not answer.
    """
    ray = _connected(address)
    setup_globals()
    configure_log(sweep.config.hydra.hydra_logging, sweep.config.hydra.verbose)
    seen = Path(str(sweep.config.hydra.sweep.dir)).resolve() / f".ray-{uuid4().hex}"
    seen.parent.mkdir(parents=True, exist_ok=True)
    seen.touch()
    # A process for each job: what a job leaves behind in memory, or on a GPU, is gone with it.
    remote = ray.remote(max_calls=1, **_checked(ray, options, address))(_job)
    place, shared = _Place(Path.cwd(), seen, code_hash()), ray.put((sweep, Singleton.get_state()))
    tasks = [
        remote.options(name=f"job {number}").remote(place, shared, list(words), number)
        for number, words in enumerate(job_overrides, first)
    ]
    try:
        return [_result(ray, task) for task in tasks]
    except BaseException:
        for task in tasks:
            ray.cancel(task)  # as a Ctrl-C in its process
        ray.wait(tasks, num_returns=len(tasks), timeout=_GRACE)
        raise
    finally:
        seen.unlink(missing_ok=True)


def _connected(address: str | None) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody
    try:
        ray: Any = import_module("ray")
    except ModuleNotFoundError:
        raise ConfigurationError(f"launcher=ray is not installed: {installing('ray')}.") from None
    if not ray.is_initialized():
        _answers(address)
        variables = {key: value for key, value in os.environ.items() if key.startswith(_FORWARDED)}
        try:
            ray.init(address, runtime_env={"env_vars": variables}, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = address or os.environ.get("RAY_ADDRESS", "this machine")
            raise ConfigurationError(f"no Ray at {where} (hydra.launcher.address): {brief(error)}") from error
    return ray


def _answers(address: str | None) -> None:
    """Whether somebody listens there: Ray itself tries for minutes."""
    host, _, port = (address or os.environ.get("RAY_ADDRESS", "")).rpartition("//")[2].rpartition(":")
    if port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=_ANSWER).close()
        except OSError as error:
            raise ConfigurationError(
                f"no Ray at {host}:{port} (hydra.launcher.address): {error.strerror or error}."
            ) from error


def _checked(ray: Any, options: Mapping[str, Any], address: str | None) -> dict[str, Any]:
    """Options of a task, for which there is a node: Ray lets a job for which there is none wait without a word."""
    own = {**options, "resources": dict(options["resources"])}  # Ray takes no DictConfig
    asked = {"CPU": own["num_cpus"], "GPU": own["num_gpus"], **own["resources"]}
    if negative := [name for name, amount in asked.items() if amount < 0]:
        raise ConfigurationError(f"hydra.launcher: {', '.join(negative)} must be a number from 0 on.")
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(node.get(name, 0) >= amount for name, amount in asked.items()) for node in nodes):
        told = ", ".join(f"{name} {amount:g}" for name, amount in asked.items() if amount)
        most = ", ".join(f"{name} {max(node.get(name, 0) for node in nodes):g}" for name in asked)
        message = f"no node of the Ray cluster has what hydra.launcher asks for a job: {told} (the most: {most})"
        if address is None and "RAY_ADDRESS" not in os.environ:
            raise ConfigurationError(f"{message}. Ask for less.")
        logging.getLogger(__name__).warning("%s: the sweep waits until one has.", message)
    return own


def _job(place: _Place, shared: tuple[Given, Any], words: list[str], number: int) -> JobReturn:
    """One job, in a worker of Ray."""
    ray: Any = import_module("ray")
    place.check(f"the Ray node {ray.util.get_node_ip_address()}")
    os.chdir(place.folder)
    # The same when Ray starts the job again; another Ray counts its tasks alike.
    os.environ[RAY_TASK] = f"{place.seen.name}-{ray.get_runtime_context().get_task_id()}"
    sweep, state = shared
    Singleton.set_state(state)
    setup_globals()
    config = sweep.context.config_loader.load_sweep_config(sweep.config, words)
    with open_dict(config):
        config.hydra.job.id = os.environ[RAY_TASK]
        config.hydra.job.num = number
    return run_job(
        hydra_context=sweep.context,
        task_function=sweep.task,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )


def _result(ray: Any, task: Any) -> JobReturn:
    """What a task gave; an error of it is raised by whoever wants its value, when all tasks have ended."""
    made = JobReturn(status=JobStatus.FAILED)
    try:
        made = ray.get(task)
    except ray.exceptions.RayTaskError as error:
        made.return_value = error.cause
    except ray.exceptions.RayError as error:
        made.return_value = DPBenchError(f"a job was given up by Ray: {brief(error)}")
    return made
