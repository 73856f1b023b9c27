"""The runs of a table: each in a folder that is named by its computation, so that nothing is mixed or done twice.

A table is a sweep: Hydra's launcher makes one job of each run that is missing. A job trains in a process of its own, so
that one that is killed for its memory ends no other, and one that is stopped has the time to save its state.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from filelock import FileLock
from pydantic import TypeAdapter

from dpbench.code import changed_sources, code_hash, foreign_code
from dpbench.errors import TIME_LIMIT_STATUS, ConfigurationError, Interrupted
from dpbench.files import write_json
from dpbench.harness.reports.run_rows import flat
from dpbench.harness.reproduce.tables import MEASURES, Table, Variant
from dpbench.harness.run.search_path import code_folder, conf_dir, groups_of, imports_from, plugin_dirs
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.provenance import available_cores, config_hash
from dpbench.harness.runs.record import read_result

if TYPE_CHECKING:
    from omegaconf import DictConfig

# Beside the run's own files.
ATTEMPT = "attempt.json"
LOG = "output.log"
_JOB = "job.json"
_LOCK = "lock"
_JUDGEMENT = {"images": 60_000, "seed": 0, "features": "digits_cnn"}
_STOPPING = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")  # Windows has the first two
_INTERRUPTED = {128 + getattr(signal, name): getattr(signal, name) for name in _STOPPING if hasattr(signal, name)}
_PROGRAM = """\
import sys
if sys.platform == "linux":  # be told to stop, checkpoint and all, when whoever started this dies
    import ctypes, signal
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
from dpbench.cli import main
sys.exit(main())
"""
State = Literal["done", "failed", "begun", "new"]
HeldOut = Literal["test", "val"]
Cell = tuple[Variant, Variant, Variant]
"""Row, column and trial."""


@dataclass(frozen=True)
class Job:
    """One run of a table.

    Attributes:
        row: Name.
        column: Name.
        seed: Seed of the run.
        words: Words after `dpbench train`.
        config_hash: Hash of the resolved configuration.
        code_hash: Hash of the source that runs it.
        steps: Number of steps.
        folder: Folder of the run, named by cell, seed, and the hashes of configuration and code.
        evaluated: Data that the command evaluate judges its images on afterwards, "test" or "val"; None: it is not.
        trial: Name of the trial, in tables with cells that choose among trials.
        foreign_code: Package → hash of its source, of those that are not dpbench.
        config_dir: Folder of further configuration, with classes next to it; None without one.
    """

    row: str
    column: str
    seed: int
    words: tuple[str, ...]
    config_hash: str
    code_hash: str
    steps: int
    folder: str  # a text: jobs travel to other machines as JSON
    evaluated: HeldOut | None = None
    trial: str = ""
    foreign_code: dict[str, str] = field(default_factory=dict)
    config_dir: str | None = None

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Row, column, trial and seed."""
        return self.row, self.column, self.trial, self.seed

    @property
    def name(self) -> str:
        """Name of the run, in words."""
        return ", ".join(filter(None, [self.row, self.column, self.trial, f"seed {self.seed}"]))

    @property
    def path(self) -> Path:
        """Path of the run's folder."""
        return Path(self.folder)

    @property
    def run(self) -> RunFolder:
        """The folder with the names of a run's files."""
        return RunFolder(self.path)

    @property
    def config_words(self) -> list[str]:
        """Words that name its further configuration."""
        return [] if self.config_dir is None else ["--config-dir", self.config_dir]

    def state(self) -> State:
        """How far the job is, by the files in its folder; one that is running has begun."""
        if not self.commands():
            return "done"
        if self.attempt().get("error"):
            return "failed"
        return "begun" if self.run.begun else "new"

    def attempt(self) -> dict[str, Any]:
        """How it was run last: the number of its threads, and how it failed (None where it did not)."""
        return _content(self.path / ATTEMPT)

    def commands(self) -> list[list[str]]:
        """Commands that are left to do, as words after `dpbench`."""
        commands = []
        if not self.run.finished and self.run.begun:
            commands.append(["resume", self.folder, *self.config_words])
        elif not self.run.finished:
            commands.append(["train", *self.config_words, *self.words, f"hydra.run.dir='{self.folder}'"])
        if self.evaluated:
            steps = _content(self.run.result).get("steps")
            evaluation = {**_JUDGEMENT, "judged_on": self.evaluated, "steps": steps}
            # Not one of fewer images, or of a checkpoint on the way.
            if not evaluation.items() <= _content(self.run.evaluation).items():
                how = ["--num-samples", str(_JUDGEMENT["images"]), "--split", self.evaluated]
                commands.append(["evaluate", self.folder, *self.config_words, *how])
        return commands

    def result(self) -> dict[str, Any] | None:
        """Its record, if it is finished.

        Raises:
            ConfigurationError: Its ledger is not intact: no table states its epsilon.
        """
        if self.commands():
            return None
        record = read_result(self.run)
        if damage := record["privacy"].get("damage"):
            raise ConfigurationError(
                f"{self.path}: {damage}. Restore the ledger, or delete this folder to run it again."
            )
        return record

    def failure(self) -> str:
        """The last line of a failed run's log, and where all of it lies."""
        return f"{self.name}: {self.attempt().get('error')} ({self.path / LOG})"


def _content(path: Path) -> dict[str, Any]:
    """A JSON file, which may be absent, torn or something else: then it says nothing."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


def table_jobs(
    table: Table,
    root: Path,
    more: Sequence[str] = (),
    config_dir: Path | None = None,
) -> list[Job]:
    """List every run of a table, seed by seed, so that an interrupted table has all cells with few seeds.

    Args:
        table: The definition.
        root: Folder of the runs.
        more: Words for every run.
        config_dir: Folder of further configuration, with classes next to it.

    Raises:
        ConfigurationError: The words of a cell do not compose, or its runs would not measure the table's metric.
    """
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf.errors import OmegaConfBaseException

    from dpbench.harness.run.command_line import explain, hydra_for, without_hydra

    composed = []
    cell_name = ""
    try:
        with hydra_for(config_dir) as hydra:
            for cell in product(table.rows, table.columns, table.trials):
                cell_name = ", ".join([table.name, cell[0].name, cell[1].name])
                words = list(_words_of(table, cell, 0, more))
                cfg = hydra.config_loader.load_configuration("config", words, RunMode.RUN)
                composed.append((cell, without_hydra(cfg)))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigurationError(f"{cell_name}: {explain(error)}") from error
    with imports_from(code_folder(config_dir)):
        seeded = product(table.seeds, composed)
        return [_job(table, cell, cfg, seed, root, more, config_dir) for seed, (cell, cfg) in seeded]


def _words_of(table: Table, cell: Cell, seed: int, more: Sequence[str]) -> tuple[str, ...]:
    """Words of a run: its cell's, those that name it, and those of options that its results do not name."""
    identity = [f"seed={seed}", f"run.name={_run_name(cell, seed)}", f"run.group={table.folder}", "logger=none"]
    return (*table.words_of(*cell), *identity, *table.later, *more)


def _run_name(cell: Cell, seed: int) -> str:
    return "-".join([*(variant.name for variant in cell if variant.name), str(seed)])


def _job(
    table: Table,
    cell: Cell,
    cfg: DictConfig,
    seed: int,
    root: Path,
    more: Sequence[str],
    config_dir: Path | None,
) -> Job:
    from omegaconf import OmegaConf

    row, column, trial = cell
    # Set in the composed configuration: Hydra would take minutes for a table of many seeds.
    cfg.seed = seed
    cfg.run.name = _run_name(cell, seed)
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    # No run of this configuration trains on these data.
    held_out: HeldOut = "val" if config["data"].get("val_size") or config["data"].get("val_users") else "test"
    _refuse_unmeasured(table, config, held_out)
    # An edited plug-in is another job.
    foreign = foreign_code(config)
    hashes = [config_hash(config), code_hash(), *foreign.values()]
    folder = root / table.folder / "-".join([cfg.run.name, *(text[:8] for text in hashes)])
    return Job(
        row=row.name,
        column=column.name,
        seed=seed,
        words=_words_of(table, cell, seed, more),
        config_hash=hashes[0],
        code_hash=hashes[1],
        steps=int(config["trainer"]["max_steps"]),
        folder=str(folder.resolve()),
        evaluated=held_out if table.metric.startswith("evaluation/") else None,
        trial=trial.name,
        foreign_code=foreign,
        config_dir=None if config_dir is None else str(config_dir.resolve()),
    )


def _refuse_unmeasured(table: Table, config: dict[str, Any], held_out: HeldOut) -> None:
    """Refuse a table of figures that its runs do not measure, before they train for hours."""
    settings = flat(config)
    name = settings["run.name"]
    if table.metric.startswith("val/") and held_out != "val":
        key = "data.val_users" if "data.val_users" in settings else "data.val_size"
        raise ConfigurationError(f"{table.name} shows {table.metric}, and {name} holds out no records: set {key}.")
    for metric in (table.metric, *table.more):
        needed = MEASURES[metric].needs if metric in MEASURES else ""
        if needed and not settings.get(needed):
            raise ConfigurationError(f"{table.name} shows {metric}, which {name} does not measure: set {needed}.")


def run_job(job: Job, threads: int | None) -> None:
    """Run a job in a process of its own, or continue it; does nothing if it is finished.

    A job is continued with as many threads as it began with: others may round otherwise, and repeat a release of the
    ledger with another sum.

    Args:
        job: The job.
        threads: Number of threads of the process; None leaves the choice to PyTorch.

    Raises:
        Interrupted: The run was told to stop; it can be continued.
    """
    with FileLock(job.path / _LOCK):
        # After the lock: whoever held it may have begun the run with another number, or ended it.
        threads = job.attempt().get("threads", threads)
        if job.run.begun:
            with FileLock(job.run.lock):
                pass  # a run whose table was killed has saved what it has
        commands = job.commands()
        changed = _changed_since(job) if commands else []
        if changed:
            names = ", ".join(changed)
            _note(job, threads, f"the source of {names} has changed since this table began: call the command again")
            return
        status = 0
        for command in commands:
            # Before the command: a run that is killed keeps its number of threads, and an old error is forgotten.
            _note(job, threads)
            status = _run(job, command, threads)
            if status in _INTERRUPTED:
                raise Interrupted(_INTERRUPTED[status], "the same command")
            if status == TIME_LIMIT_STATUS:
                return  # it waits for the next call
            if status:
                break
        # Not only after a bad status: a command may end well and leave a result that is not whole.
        if job.commands():
            killed = f"killed by signal {-status} (9: out of memory, perhaps); " if status < 0 else ""
            with suppress(OSError):  # a full disk
                _note(job, threads, killed + _last_line(job.path / LOG))


def _note(job: Job, threads: int | None, error: str | None = None) -> None:
    write_json(job.path / ATTEMPT, {"threads": threads, "error": error})


def _changed_since(job: Job) -> list[str]:
    """List the packages with files that have changed while the job waited for its turn."""
    changed = [] if code_hash.__wrapped__() == job.code_hash else ["dpbench"]
    with imports_from(None if job.config_dir is None else code_folder(Path(job.config_dir))):
        return changed + changed_sources(job.foreign_code)


def _run(job: Job, words: Sequence[str], threads: int | None) -> int:
    """Run a command in a process of its own; returns its exit status."""
    environment = dict(os.environ)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    # Appended: what an interrupted run said before it was continued stays.
    with open(job.path / LOG, "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,  # a Ctrl-C reaches it once, through us
        )
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            process.wait()  # while it saves what it has
            raise


def _last_line(log: Path) -> str:
    prefix = "dpbench: error: "
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "its log cannot be read"
    # Warnings at exit may follow the error.
    errors = [line for line in lines if line.startswith(prefix)] or [line for line in lines if line.strip()]
    return errors[-1].removeprefix(prefix) if errors else "no output"


_JOB_FILE = TypeAdapter(Job)


def sweep(jobs: Sequence[Job], words: Sequence[str]) -> None:
    """Run all jobs that are not finished, by a Hydra launcher; failed ones are tried again.

    Args:
        jobs: The runs of a table.
        words: Such as launcher=joblib, and settings of the launcher.

    Raises:
        ConfigurationError: The launcher is unknown or not installed, or its cluster does not answer.
        Interrupted: A signal stopped the sweep; finished runs stay.
    """
    from dpbench.harness.run.hydra_folder import quoted
    from dpbench.harness.run.jobs import launch
    from dpbench.harness.run.progress import counting

    missing = [job for job in jobs if job.commands()]
    if not missing:
        return
    for job in missing:  # where other machines of a cluster see it
        job.path.mkdir(parents=True, exist_ok=True)
        write_json(job.path / _JOB, asdict(job))
    folders = ",".join(quoted(job.folder) for job in missing)
    place = quoted(missing[0].path.parent / ".sweep")
    task = [*missing[0].config_words, "-m", f"job={folders}", f"hydra.sweep.dir={place}", *words]
    with counting(len(jobs), lambda: sum(not job.commands() for job in jobs)):
        launch(task, swept_job, "reproduce", checked=False)


def require_launcher(words: Sequence[str], config_dir: Path | None = None) -> None:
    """Raise ConfigurationError where a word names a launcher that there is not, before anything is written.

    Args:
        words: Hydra overrides.
        config_dir: Further configuration.
    """
    own = [] if config_dir is None else [config_dir]
    known = groups_of(conf_dir(), *plugin_dirs(), *own)["launcher"]
    for word in words:
        if word.startswith("launcher=") and word.removeprefix("launcher=") not in known:
            raise ConfigurationError(f"there is no {word}. Known: {', '.join(known)}.")


def swept_job(cfg: DictConfig) -> None:
    """Run one job of the sweep, with its share of the cores."""
    from hydra.core.hydra_config import HydraConfig

    # Only joblib has n_jobs: its jobs share the cores of this machine, and a run names the threads that it began with.
    workers = int(HydraConfig.get().launcher.get("n_jobs", 1) or 1)
    cores = available_cores()
    threads = None if workers == 1 else max(1, cores // (workers if workers > 0 else cores))
    run_job(_JOB_FILE.validate_json(Path(cfg.job, _JOB).read_bytes()), threads)


def status(jobs: Sequence[Job]) -> str:
    """Count the runs of a table by state, with a line for each failed one."""
    # Looked at once: a run may end between two looks, and would be counted twice.
    states = [job.state() for job in jobs]
    counts = f"{states.count('begun')} begun, {states.count('failed')} failed, {states.count('new')} to do"
    failures = [f"  failed: {job.failure()}" for job, state in zip(jobs, states, strict=True) if state == "failed"]
    return "\n".join([f"{states.count('done')}/{len(states)} done, {counts}", *failures])
