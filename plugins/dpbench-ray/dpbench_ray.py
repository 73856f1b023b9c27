"""The jobs of a sweep as tasks of a Ray cluster, by Ray's public API (no import of Ray before a sweep wants it)."""

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
from dpbench.harness.run._resume import RAY_TASK
from dpbench.harness.run.search_path import installing

_FORWARDED = ("DPBENCH_", "WANDB_", "MLFLOW_")  # variables that jobs have on other nodes too
_ANSWER = 10.0  # seconds that a cluster has to answer
_GRACE = 120.0  # seconds that interrupted jobs have to save what they have


@dataclass(frozen=True)
class Sweep:
    """Context of a sweep, as Hydra passes it to a launcher."""

    context: HydraContext
    task: TaskFunction
    config: DictConfig


@dataclass(frozen=True)
class _Origin:
    """Requirements of a job on its node.

    Attributes:
        folder: Working directory of the launching process.
        token: A file in the folder of the sweep.
        code: Hash of the launching code.
    """

    folder: Path
    token: Path
    code: str

    def check(self, node: str) -> None:
        """Refuse a node that does not meet them.

        Raises:
            ConfigurationError: A requirement is not met.
        """
        if not self.token.exists():
            raise ConfigurationError(
                f"{node} does not see {self.token.parent}: take a folder that all nodes share (hydra.sweep.dir)."
            )
        if code_hash() != self.code:
            raise ConfigurationError(
                f"{node} has another version of dpbench than {self.folder}: install the same on all nodes."
            )


def run_jobs(
    sweep: Sweep,
    job_overrides: Sequence[Sequence[str]],
    first: int,
    address: str | None,
    options: Mapping[str, Any],
) -> list[JobReturn]:
    """Run a batch of jobs; all of them, also when some fail.

    Args:
        sweep: Context of the sweep.
        job_overrides: Words of each job.
        first: Number of the first job.
        address: Address of the cluster; None takes $RAY_ADDRESS, else starts Ray on this machine.
        options: Resources of each job.

    Returns:
        The result of each job, in their order.

    Raises:
        ConfigurationError: Ray is not installed, or the cluster does not answer.
    """
    ray = _connect(address)
    setup_globals()
    configure_log(sweep.config.hydra.hydra_logging, sweep.config.hydra.verbose)
    token = Path(str(sweep.config.hydra.sweep.dir)).resolve() / f".ray-{uuid4().hex}"
    token.parent.mkdir(parents=True, exist_ok=True)
    token.touch()
    # A process for each job: what a job leaves behind in memory, or on a GPU, is gone with it.
    remote = ray.remote(max_calls=1, **_task_options(ray, options, address))(_job)
    origin = _Origin(Path.cwd(), token, code_hash())
    shared = ray.put((sweep, Singleton.get_state()))
    tasks = []
    for number, words in enumerate(job_overrides, first):
        tasks.append(remote.options(name=f"job {number}").remote(origin, shared, list(words), number))
    try:
        return [_result(ray, task) for task in tasks]
    except BaseException:
        for task in tasks:
            ray.cancel(task)  # as a Ctrl-C in its process
        ray.wait(tasks, num_returns=len(tasks), timeout=_GRACE)
        raise
    finally:
        token.unlink(missing_ok=True)


def _connect(address: str | None) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage statistics
    try:
        ray: Any = import_module("ray")
    except ModuleNotFoundError:
        raise ConfigurationError(f"launcher=ray needs Ray: {installing('ray')}.") from None
    if not ray.is_initialized():
        _require_answer(address)
        variables = {key: value for key, value in os.environ.items() if key.startswith(_FORWARDED)}
        try:
            ray.init(address, runtime_env={"env_vars": variables}, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = address or os.environ.get("RAY_ADDRESS", "this machine")
            raise ConfigurationError(f"no Ray at {where} (hydra.launcher.address): {brief(error)}") from error
    return ray


def _require_answer(address: str | None) -> None:
    """Refuse an address that does not answer: Ray itself tries for minutes."""
    host, _, port = (address or os.environ.get("RAY_ADDRESS", "")).rpartition("//")[2].rpartition(":")
    if port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=_ANSWER).close()
        except OSError as error:
            raise ConfigurationError(
                f"no Ray at {host}:{port} (hydra.launcher.address): {error.strerror or error}."
            ) from error


def _task_options(ray: Any, options: Mapping[str, Any], address: str | None) -> dict[str, Any]:
    """Options of a task, for which a node must be large enough: Ray lets any other job wait without a word."""
    resources = dict(options["resources"])  # Ray takes no DictConfig
    needs = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], **resources}
    negative = [name for name, amount in needs.items() if amount < 0]
    if negative:
        raise ConfigurationError(f"hydra.launcher: {', '.join(negative)} must be a number of at least 0.")
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(node.get(name, 0) >= amount for name, amount in needs.items()) for node in nodes):
        listing = ", ".join(f"{name} {amount:g}" for name, amount in needs.items() if amount)
        most = ", ".join(f"{name} {max(node.get(name, 0) for node in nodes):g}" for name in needs)
        message = f"no node of the Ray cluster has the resources of hydra.launcher: {listing} (the most: {most})"
        if address is None and "RAY_ADDRESS" not in os.environ:
            raise ConfigurationError(f"{message}: lower them.")
        logging.getLogger(__name__).warning("%s: the sweep waits until one has.", message)
    return {**options, "resources": resources}


def _job(origin: _Origin, shared: tuple[Sweep, Any], words: list[str], number: int) -> JobReturn:
    """One job, in a worker of Ray."""
    ray: Any = import_module("ray")
    origin.check(f"the Ray node {ray.util.get_node_ip_address()}")
    os.chdir(origin.folder)
    # The same when Ray starts the job again; another Ray counts its tasks alike.
    os.environ[RAY_TASK] = f"{origin.token.name}-{ray.get_runtime_context().get_task_id()}"
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
    """Wait for a task; its error is raised when its value is read, after all tasks have ended."""
    failure = JobReturn(status=JobStatus.FAILED)
    try:
        return ray.get(task)  # type: ignore[no-any-return]
    except ray.exceptions.RayTaskError as error:
        failure.return_value = error.cause
    except ray.exceptions.RayError as error:
        failure.return_value = DPBenchError(f"Ray gave up a job: {brief(error)}")
    return failure
