"""The runs of a table: each in a folder that is named by what it computes, so that nothing is mixed or done twice."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dpbench.code import code_hash, foreign_code
from dpbench.errors import OUT_OF_TIME_STATUS, ConfigurationError, Interrupted, brief
from dpbench.files import write_json
from dpbench.reproduce.measures import MEASURES
from dpbench.reproduce.tables import Table, Variant
from dpbench.runs.folder import RunFolder
from dpbench.runs.provenance import config_hash
from dpbench.runs.readers import steps_logged
from dpbench.runs.record import read_result

if TYPE_CHECKING:
    from omegaconf import DictConfig

FAILED, LOG, _LOCK, _THREADS = "failed.json", "output.log", "lock", "threads.json"  # beside the run's own files
_IMAGES = 60_000  # made for an evaluation
_INTERRUPTED = {128 + number: number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
_PROGRAM = """\
import sys
if sys.platform == "linux":  # be told to stop, checkpoint and all, when whoever started this dies
    import ctypes, signal
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
from dpbench.cli import main
sys.exit(main(sys.argv[1:]))
"""
_HELD_OUT = {False: "val_size", True: "val_users"}
State = Literal["done", "running", "failed", "begun", "new"]


@dataclass(frozen=True)
class Job:
    """One run of a table.

    Attributes:
        row: Name.
        column: Name.
        seed: Of the run.
        words: After `dpbench train`.
        config_hash: Of the resolved configuration.
        code_hash: Of the source that runs it.
        steps: How many it makes.
        folder: Where it runs; named by cell, seed, and the hashes of configuration and code.
        evaluated: Data that `dpbench evaluate` judges it on afterwards, "test" or "val"; None: it is not.
        trial: Name, of tables whose cells choose among trials.
    """

    row: str
    column: str
    seed: int
    words: tuple[str, ...]
    config_hash: str
    code_hash: str
    steps: int
    folder: str
    evaluated: Literal["test", "val"] | None = None
    trial: str = ""

    @property
    def told(self) -> str:
        """Which run it is, in words."""
        return f"{self.row}, {self.column}, " + (f"{self.trial}, " if self.trial else "") + f"seed {self.seed}"

    @property
    def path(self) -> Path:
        """Where the job runs, as a path."""
        return Path(self.folder)

    @property
    def run(self) -> RunFolder:
        """The folder with the names of a run's files."""
        return RunFolder(self.path)

    def state(self) -> State:
        """How far the job is, by the files in its folder and the lock on it."""
        if self._complete():
            return "done"
        if _locked(self.path / _LOCK):
            return "running"
        if (self.path / FAILED).is_file():
            return "failed"
        return "begun" if self.run.begun else "new"

    def _complete(self) -> bool:
        return self.run.finished and (not self.evaluated or self._judged())

    def _judged(self) -> bool:
        """Whether the evaluation was made as `commands` asks for it, not with other options."""
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            found = json.loads(self.run.evaluation.read_text(encoding="utf-8"))
            told = [found[name] for name in ("images", "seed", "features", "judged_on", "steps")]
            made = json.loads(self.run.result.read_text(encoding="utf-8"))["steps"]
            return told == [_IMAGES, 0, "digits_cnn", self.evaluated, made]
        return False

    def commands(self) -> list[list[str]]:
        """Commands that are left to do, as words after `dpbench`."""
        if self._complete():
            return []
        judge = (
            [["evaluate", self.folder, "--num-samples", str(_IMAGES), "--split", self.evaluated]]
            if self.evaluated
            else []
        )
        if self.run.finished:
            return judge
        anew = ["train", *self.words, f"hydra.run.dir='{self.folder}'"]
        return [["resume", self.folder] if self.run.begun else anew, *judge]

    def steps_made(self) -> int:
        """Steps that were made, as far as the metrics tell."""
        return self.steps if self.run.finished else min(steps_logged(self.run.metrics), self.steps)

    def result(self) -> dict[str, Any] | None:
        """Its record, if it is finished.

        Raises:
            ConfigurationError: Its ledger is not intact: no table states its epsilon.
        """
        if not self._complete():
            return None
        record = read_result(self.run)
        if (damage := record["privacy"].get("damage")) is not None:
            raise ConfigurationError(
                f"{self.path}: {damage}. Restore the ledger, or delete this folder to run it again."
            )
        return record

    def failure(self) -> str:
        """The last line of a failed run's log, and where all of it lies."""
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            message = json.loads((self.path / FAILED).read_text(encoding="utf-8"))["message"]
            return f"{self.told}: {message} ({self.path / LOG})"
        return f"{self.told} ({self.path / LOG})"


def table_jobs(table: Table, conf: Path, root: Path, more: Sequence[str] = ()) -> list[Job]:
    """Every run of a table, seed by seed, so that an interrupted table has all cells with few seeds.

    Args:
        table: The definition.
        conf: The configuration's folder.
        root: Where runs are kept.
        more: Words for every run.

    Raises:
        ConfigurationError: The words of a cell do not compose.
    """
    from hydra import initialize_config_dir

    from dpbench.run.search_path import use_plugins

    use_plugins()
    cells = list(product(table.rows, table.columns, table.trials))
    composed: dict[tuple[Variant, ...], DictConfig] = {}
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        return [_job(table, cell, seed, root, more, composed) for seed in table.seeds for cell in cells]


def _job(
    table: Table,
    cell: tuple[Variant, Variant, Variant],
    seed: int,
    root: Path,
    more: Sequence[str],
    composed: dict[tuple[Variant, ...], DictConfig],
) -> Job:
    from dpbench.run.build import plain

    row, column, trial = cell
    name = "-".join([*(variant.name for variant in cell if variant.name), str(seed)])
    fixed = (f"seed={seed}", f"run.name={name}", f"run.group={table.folder}", "logger=none", *table.later)
    words = (*table.words_of(row, column, trial), *fixed, *more)
    if cell not in composed:  # which takes Hydra a quarter of a second
        composed[cell] = _composed(words, f"{table.name}, {row.name}, {column.name}")
    composed[cell].seed, composed[cell].run.name = seed, name
    config = plain(composed[cell])
    held_out = _HELD_OUT[by_users := "val_users" in config["data"]]
    if table.metric.startswith("val/") and not config["data"][held_out]:
        kind = "users" if by_users else "records"
        raise ConfigurationError(
            f"{table.name} shows {table.metric}, and {name} holds no {kind} out: data.{held_out}=0."
        )
    for shown in (table.metric, *table.more):
        key = MEASURES[shown].needs if shown in MEASURES else ""
        if key and not _looked_up(config, key):
            raise ConfigurationError(f"{table.name} shows {shown}, which {name} does not measure: set {key}.")
    digest, code = config_hash(config), code_hash()
    others = "".join(f"-{found[:8]}" for found in foreign_code(config).values())  # an edited plug-in is another job
    folder = (root / table.folder / f"{name}-{digest[:8]}-{code[:8]}{others}").resolve()
    judged_on: Literal["val", "test"] = "val" if config["data"][held_out] else "test"
    evaluated = judged_on if table.metric.startswith("evaluation/") else None
    steps = int(config["trainer"]["max_steps"])
    return Job(row.name, column.name, seed, words, digest, code, steps, str(folder), evaluated, trial.name)


def _composed(words: Sequence[str], cell: str) -> DictConfig:
    from hydra import compose
    from hydra.errors import HydraException

    try:
        return compose("config", list(words))
    except HydraException as error:
        raise ConfigurationError(f"{cell}: {brief(error)}") from error


def _looked_up(config: Any, key: str) -> Any:
    """The value of a dotted key; None where there is none."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def _locked(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def run_job(job: Job, threads: int | None) -> None:
    """Run a job in a process of its own, or continue it; does nothing if it is finished.

    The process holds the folder's lock also after the death of whoever started it: a table that is called again
    waits until it has saved what it has. A job is continued with as many threads as it began with: others may round
    otherwise, and repeat a release of the ledger with another sum.

    Args:
        job: What to run.
        threads: Of the process; None leaves the choice to PyTorch.

    Raises:
        Interrupted: The run was told to stop; it can be continued.
    """
    job.path.mkdir(parents=True, exist_ok=True)
    with open(job.path / _LOCK, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        commands = job.commands()
        if commands and code_hash.__wrapped__() != job.code_hash:
            message = "the source of dpbench has changed since this table began: call the command again"
            write_json(job.path / FAILED, {"status": None, "message": message})
            return
        threads = _threads_of(job, threads)
        for words in commands:
            (job.path / FAILED).unlink(missing_ok=True)
            status = _run(job, words, threads, lock.fileno())
            if status in _INTERRUPTED:
                raise Interrupted(_INTERRUPTED[status], "the same command")
            if status == OUT_OF_TIME_STATUS:
                return  # it waits for the next call
            if status:
                break
        if job.commands():
            with suppress(OSError):  # a full disk
                killed = f"killed by signal {-status} (9: out of memory, perhaps); " if status < 0 else ""
                write_json(job.path / FAILED, {"status": status, "message": killed + _last_line(job.path / LOG)})


def _threads_of(job: Job, threads: int | None) -> int | None:
    """Number of threads that a job began with; remembered for one that begins now."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        begun: int | None = json.loads((job.path / _THREADS).read_text(encoding="utf-8"))["threads"]
        return begun
    write_json(job.path / _THREADS, {"threads": threads})
    return threads


def _run(job: Job, words: Sequence[str], threads: int | None, lock: int) -> int:
    """One command in a process of its own, which holds the lock too; its exit status."""
    environment = dict(os.environ) | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    with open(job.path / LOG, "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            pass_fds=[lock],
            start_new_session=True,  # a Ctrl-C reaches it once, through us
        )
        return _wait(process)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """The exit status; a run that is interrupted with us gets the time to save what it has."""
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise


def _last_line(log: Path) -> str:
    with suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        told = [line for line in lines if line.startswith("dpbench: error")] or [line for line in lines if line.strip()]
        return told[-1].removeprefix("dpbench: error: ") if told else "no output"
    return "its log cannot be read"


def write_jobs(path: Path, jobs: Sequence[Job]) -> None:
    """A list of jobs as a file, for the processes of a sweep."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, [asdict(job) for job in jobs])


def read_jobs(path: Path) -> list[Job]:
    """The jobs of a file that `write_jobs` has written."""
    return [Job(**{**data, "words": tuple(data["words"])}) for data in json.loads(path.read_text(encoding="utf-8"))]
