"""Run folders are exclusive: however many runs start at once, and whichever of them are refused."""

from __future__ import annotations

import errno
import re
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from dpbench.errors import ConfigurationError, DiskFull
from dpbench.harness.run.jobs import check_run, launch
from dpbench.harness.runs.claim import full_disk_explained, locked, make_new
from dpbench.harness.runs.folder import RunFolder
from dpbench.locks import open_locked
from dpbench.privacy.accounting.ledger import read_ledger
from tests.support.cli import PRIVATE, TINY, dpbench, signalled, start
from tests.support.processes import files_of


@pytest.fixture
def one_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where all that starts starts in the same second."""

    class Stopped(datetime):
        @classmethod
        def now(cls, tz: object = None) -> Stopped:
            return cls(2026, 11, 22, 7, 30, 0)

    monkeypatch.setattr("hydra.core.utils.datetime", Stopped)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_new_folder_is_nobody_elses(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(make_new, [tmp_path / "deep" / "run.x"] * 40))
    assert {path.name for path in made} == {"run.x", *(f"run.x-{number}" for number in range(2, 41))}


def test_sweeps_of_one_second_have_folders_of_their_own(one_second: Path) -> None:
    seen: list[str] = []

    def job(cfg: DictConfig) -> None:
        folder = Path(HydraConfig.get().runtime.output_dir)
        assert not list(folder.iterdir())  # nothing is written before the job holds its folder
        seen.append(str(folder.relative_to(one_second)))

    for seed in (1, 2):
        launch(["-m", *TINY, f"seed={seed}", 'run.name="it\'s"'], task=job)
    assert seen == ["multirun/2026-11-22/07-30-00/0-it's", "multirun/2026-11-22/07-30-00-2/0-it's"]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (
            "strategy=dpsgd,automatic optimizer.lr=0.1",
            "0-digits-mlp-dpsgd-strategy_dpsgd 1-digits-mlp-automatic-str",
        ),
        (f"run.name=a model.hidden=[{','.join(['1000'] * 30)}],[7]", f"0-a-hidden{'_1000' * 14}_10 1-a-hidden_7"),
        # One value is swept over by no one, and a number is not found in the name.
        (
            "seed=1 run.name=trial-1 strategy.noise_multiplier=1,2",
            "0-trial-1-noise_multiplier_1 1-trial-1-noise_mult",
        ),
        ("run.name=a run.tags=[b],[c]", "0-a 1-a"),
    ],
)
def test_folders_of_a_sweep_say_what_differs(words: str, names: str, one_second: Path) -> None:
    seen: list[str] = []
    launch(
        ["-m", *TINY, *words.split()],
        task=lambda cfg: seen.append(Path(HydraConfig.get().runtime.output_dir).name),
    )
    assert " ".join(seen).startswith(names)
    assert all(re.fullmatch(r"[\w.+-]{1,200}", name) for name in seen)
    assert check_run([*TINY, f"after=runs/{seen[-1]}"]).after == f"runs/{seen[-1]}"  # without quotes


def test_a_refused_run_takes_its_own_folder_away_only(one_second: Path) -> None:
    """It used to delete the configuration of the run that trained in the folder of the same second."""
    launch(TINY, task=lambda cfg: (Path(HydraConfig.get().runtime.output_dir) / "config.yaml").touch())
    (one_second / "mine").mkdir()
    before = files_of(one_second)
    for words in ([], ["hydra.run.dir=mine"], ["hydra.run.dir=new"]):
        _, err = dpbench(one_second, "train", *TINY, "data.val_size=5000", *words, status=1)
        assert "leaves none of 1437" in err  # found in the job, not before it
    assert files_of(one_second) == before and before
    assert len(list(one_second.glob("outputs/*/*"))) == 1
    assert (one_second / "mine").exists() and not (one_second / "new").exists()


def test_a_folder_in_use_is_refused_and_left_alone(trained: Callable[[str], Path], tmp_path: Path) -> None:
    """The second of two `dpbench resume` of one run, and whoever else comes."""
    run = RunFolder(Path(shutil.copytree(trained("seeded"), tmp_path / "run")))
    run.result.unlink()
    with open_locked(run.path / RunFolder.lock):
        before = files_of(tmp_path)
        for words in (["train", *TINY, "hydra.run.dir=run"], ["resume", "run"]):
            _, err = dpbench(tmp_path, *words, status=1)
            assert err.count("\n") == 1 and "another process trains in" in err and "wait until it ends" in err
            assert files_of(tmp_path) == before


def refuse(folder: Path, *names: str, error: BaseException | None = None) -> None:
    with locked(RunFolder(folder), loggers=["csv"]):
        for name in names:
            (folder / name).touch()
        raise error or ConfigurationError("foo")


def test_what_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    (tmp_path / "wandb").mkdir()
    with pytest.raises(ConfigurationError, match="foo"):
        refuse(tmp_path, "checkpoints", ".hydra", "config.yaml", "other.txt")
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "wandb", "other.txt"}
    new = tmp_path / "new"
    with pytest.raises(KeyboardInterrupt):
        refuse(new, "config.yaml", "csv", "loggers.json", error=KeyboardInterrupt())
    assert not new.exists()
    with pytest.raises(ConfigurationError, match="foo"):
        refuse(new, "config.yaml", "ledger.jsonl")
    assert {path.name for path in new.iterdir()} == {"config.yaml", "ledger.jsonl", RunFolder.lock}


def test_which_disk_is_full(tmp_path: Path) -> None:
    """The system's temporary folder, through which Lightning saves, or any other; what was on disk goes on."""
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    for number, target, message in (
        (errno.EDQUOT, "/to/there", "of /to/there: .*there is no checkpoint yet"),
        (errno.ENOSPC, None, f"no space left on the disk of .*temporary files.* kept.*dpbench resume {tmp_path}$"),
    ):
        with pytest.raises(DiskFull, match=message), full_disk_explained(folder):
            raise OSError(number, "No space left on device", target)
        folder.checkpoint.touch()
    with pytest.raises(PermissionError), full_disk_explained(folder):
        raise PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.slow
def test_two_resumes_at_once(tmp_path: Path) -> None:
    """Both ended with 0 and had spent ε = 7.57 of a target of 6."""
    words = ["hydra.run.dir=run", *PRIVATE, "trainer.max_steps=60", "run.checkpoint_every_n_steps=10", "seed=5"]
    signalled(tmp_path, signal.SIGKILL, 25, *words)
    both = [start(tmp_path, "resume", "run") for _ in range(2)]
    told = [process.communicate(timeout=500) for process in both]
    assert sorted(process.returncode for process in both) == [0, 1], told
    refusal = next(err for process, (_, err) in zip(both, told, strict=True) if process.returncode)
    assert "another process trains in" in refusal or "holds a finished run" in refusal
    book = read_ledger(tmp_path / "run/ledger.jsonl")
    assert (len(book.headers), len(book.releases), book.damage) == (1, 60, None)
