"""Run folders are exclusive: however many runs start at once, and whichever of them are refused."""

from __future__ import annotations

import errno
import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest
import pytorch_lightning as pl
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from dpbench.cli import main
from dpbench.errors import ConfigurationError, DiskFull
from dpbench.harness.reports.end_of_run import EndOfRun
from dpbench.harness.run._checkpoint import LastCheckpoint
from dpbench.harness.run.build import plain
from dpbench.harness.run.jobs import check_run, launch
from dpbench.harness.run.progress import RunProgress
from dpbench.harness.run.search_path import conf_dir
from dpbench.harness.run.train import train as run_training
from dpbench.harness.runs.claim import full_disk_explained, locked, make_new
from dpbench.harness.runs.folder import RunFolder
from dpbench.locks import open_locked
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.strategies import DPSGD
from tests.strategies.worlds import Classifier, loader_of, pictures, trainer_for
from tests.support.cli import PRIVATE, TINY, signalled, start


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


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_new_folder_is_nobody_elses(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(make_new, [tmp_path / "deep" / "run.x"] * 40))
    assert len(set(made)) == 40
    assert {path.name for path in made} == {"run.x", *(f"run.x-{number}" for number in range(2, 41))}


@pytest.mark.long
def test_runs_and_sweeps_of_one_second(one_second: Path) -> None:
    seen: list[str] = []

    def job(cfg: DictConfig) -> None:
        folder = Path(HydraConfig.get().runtime.output_dir)
        assert not list(folder.iterdir())  # nothing is written before the job holds its folder
        (folder / "config.yaml").touch()
        seen.append(f"{folder.relative_to(one_second)} {cfg.seed}")

    for seed in (1, 2):
        launch([*TINY, f"seed={seed}"], task=job)
    for seeds in ("3,4", "5,6"):
        launch(["-m", *TINY, f"seed={seeds}", 'run.name="it\'s"'], task=job)
    assert seen == [
        "outputs/2026-11-22/07-30-00-digits-mlp-dpsgd 1",
        "outputs/2026-11-22/07-30-00-digits-mlp-dpsgd-2 2",
        "multirun/2026-11-22/07-30-00/0-it's-seed_3 3",
        "multirun/2026-11-22/07-30-00/1-it's-seed_4 4",
        "multirun/2026-11-22/07-30-00-2/0-it's-seed_5 5",
        "multirun/2026-11-22/07-30-00-2/1-it's-seed_6 6",
    ]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (
            ["strategy=dpsgd,automatic", "optimizer.lr=0.1,0.3"],
            [f"mlp-{name}-strategy_{name}-lr_{lr}" for name in ("dpsgd", "automatic") for lr in (0.1, 0.3)],
        ),
        (["model=mlp", "model.hidden=[16,8],[32]"], ["mlp-dpsgd-hidden_16_8", "mlp-dpsgd-hidden_32"]),
        (  # one value is swept over by no one, and a number is not found in the name
            ["seed=1", "run.name=trial-1,trial-2", "strategy.noise_multiplier=1,2"],
            [f"trial-{trial}-noise_multiplier_{number}" for trial in (1, 2) for number in (1, 2)],
        ),
        (["run.name=a", "run.tags=[b],[c]"], ["a", "a"]),
        (["run.name=a", f"model.hidden=[{','.join(['1000'] * 30)}],[7]"], [f"a-hidden{'_1000' * 14}_10", "a-hidden_7"]),
    ],
)
def test_folders_of_a_sweep_say_what_differs(words: list[str], names: list[str], one_second: Path) -> None:
    seen: list[str] = []
    launch(
        ["-m", *TINY, *words],
        task=lambda cfg: seen.append(Path(HydraConfig.get().runtime.output_dir).name),
    )
    expected = []
    for number, name in enumerate(names):
        expected.append(f"{number}-{name}" if name[0] in "at" else f"{number}-digits-{name}")
    assert seen == expected
    assert all(re.fullmatch(r"[\w.+-]{1,200}", name) for name in seen)
    assert check_run([*TINY, f"after=runs/{seen[-1]}"]).after == f"runs/{seen[-1]}"  # without quotes


def test_a_refused_run_takes_its_own_folder_away_only(
    one_second: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to delete the configuration of the run that trained in the folder of the same second."""
    launch(TINY, task=lambda cfg: (Path(HydraConfig.get().runtime.output_dir) / "config.yaml").touch())
    before = contents(one_second)
    assert main(["train", *TINY, "data.val_size=5000"]) == 1  # found in the job, not before it
    assert "leaves nothing of 1437" in capsys.readouterr().err
    assert contents(one_second) == before and before
    assert len(list(one_second.glob("outputs/*/*"))) == 1


def test_a_log_that_nobody_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *TINY, "trainer.max_steps=2", "hydra/job_logging=disabled", "hydra.run.dir=run"]) == 0
    assert main(["resume", "run", "trainer.max_steps=3", "hydra/job_logging=disabled"]) == 0
    assert not RunFolder(tmp_path / "run").log.exists()


@pytest.mark.parametrize("words", [["train", *TINY, "hydra.run.dir=run"], ["resume", "run"]], ids=["train", "resume"])
def test_a_folder_in_use_is_refused_and_left_alone(
    one_second: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """The second of two `dpbench resume` of one run, and whoever else comes."""
    config: list[str] = []
    launch([*TINY, "hydra.run.dir=run"], task=lambda cfg: config.append(OmegaConf.to_yaml(cfg, resolve=True)))
    (one_second / "run").mkdir()
    (one_second / "run" / "config.yaml").write_text(config[0])
    with open_locked(one_second / "run" / RunFolder.lock):
        before = contents(one_second)
        assert main(words) == 1
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "another process trains in" in err and "wait until it ends" in err
        assert contents(one_second) == before


def refuse(folder: Path, *names: str, error: BaseException | None = None) -> None:
    with locked(RunFolder(folder)):
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
        refuse(new, "config.yaml", error=KeyboardInterrupt())
    assert not new.exists()
    with pytest.raises(ConfigurationError, match="foo"):
        refuse(new, "config.yaml", "ledger.jsonl")
    assert {path.name for path in new.iterdir()} == {"config.yaml", "ledger.jsonl", RunFolder.lock}


def test_a_folder_of_the_users_stays_though_it_is_empty(one_second: Path) -> None:
    (one_second / "mine").mkdir()
    assert main(["train", *TINY, "hydra.run.dir=mine", "data.val_size=5000"]) == 1
    assert not list((one_second / "mine").iterdir())
    assert main(["train", *TINY, "hydra.run.dir=new", "data.val_size=5000"]) == 1
    assert not (one_second / "new").exists()


@pytest.mark.slow
def test_a_full_disk_says_what_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's temporary folder, through which Lightning saves, or any other; what was on disk goes on."""
    words = [*TINY, "strategy.delta=1e-4", "strategy.target_epsilon=4"]
    saved, run = LastCheckpoint._save, tmp_path / "run"

    def full(self: LastCheckpoint, trainer: pl.Trainer) -> None:
        if trainer.global_step > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        saved(self, trainer)

    monkeypatch.setattr(LastCheckpoint, "_save", full)
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = plain(
            compose(
                "config", [*words, "trainer.max_steps=8", "run.checkpoint_every_n_steps=4", "run.name=x", "run.group=y"]
            )
        )
    with pytest.raises(DiskFull, match=r"no space left on the disk of .*temporary files") as told:
        run_training(config, run, show=False)
    assert "ledger and last checkpoint are kept" in str(told.value)
    assert str(told.value).endswith(f"dpbench resume {run}")
    monkeypatch.undo()
    config["run"]["resume"] = True
    run_training(config, run, show=False, reporter=EndOfRun())
    privacy = json.loads((run / "result.json").read_text())["privacy"]
    assert privacy["releases"] == 8 and 3.99 < privacy["epsilon"]["rdp"] <= 4
    shown = f"noise multiplier {privacy['noise_multiplier']:.5g}, expected batch size 64 of 1,437 examples"
    assert shown in capsys.readouterr().out


def test_which_disk_is_full(tmp_path: Path) -> None:
    error = OSError(errno.EDQUOT, "Disk quota exceeded", "/from/here", None, "/to/there")
    with (
        pytest.raises(DiskFull, match=r"of /to/there: .*there is no checkpoint yet"),
        full_disk_explained(RunFolder(tmp_path)),
    ):
        raise error
    with pytest.raises(PermissionError), full_disk_explained(RunFolder(tmp_path)):
        raise PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.long
def test_the_first_line_tells_the_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strategy = DPSGD(target_epsilon=3.0, seed=0, delta=1e-3)
    trainer = trainer_for(tmp_path, strategy, 3, more=[RunProgress()], enable_progress_bar=True)
    trainer.fit(Classifier(), loader_of(pictures()))
    first = capsys.readouterr().err.strip().splitlines()[0]
    assert first.startswith(f"noise multiplier {strategy.noise_multiplier:.5g} for epsilon 3, expected batch size ")


SHARED = "hydra.run.dir='outputs/${now:%Y}/run'"  # whenever in the year they begin


def intact(run: Path, seed: int, steps: int) -> None:
    names = {path.name for path in run.iterdir()}
    assert {".hydra", "config.yaml", "ledger.jsonl", "metrics.csv", "checkpoints", "curves.png"} <= names
    assert f"seed={seed}" in OmegaConf.load(run / ".hydra" / "overrides.yaml")
    assert OmegaConf.load(run / "config.yaml").seed == seed
    book = read_ledger(run / "ledger.jsonl")
    assert (len(book.headers), len(book.releases), book.damage) == (1, steps, None)
    assert "damage" not in json.loads((run / "result.json").read_text())["privacy"]


@pytest.mark.long
def test_six_at_once_and_one_with_a_typo(tmp_path: Path) -> None:
    words = [*TINY, *PRIVATE, "trainer.max_steps=15", SHARED]
    started = [start(tmp_path, "train", *words, f"seed={seed}") for seed in range(5)]
    started.append(start(tmp_path, "train", *words, "seed=5", "data.val_size=5000"))
    told = [process.communicate(timeout=500) for process in started]
    assert [process.returncode for process in started] == [0] * 5 + [1], told
    assert "leaves nothing of 1437" in told[5][1]
    runs = sorted((tmp_path / "outputs").glob("*/*"))
    seeds = {run: json.loads((run / "result.json").read_text())["seed"] for run in runs}
    assert sorted(seeds.values()) == list(range(5))
    for run, seed in seeds.items():
        intact(run, seed, 15)
        assert f"{run.relative_to(tmp_path)}\n" in told[seed][0]  # each says which is its own


@pytest.mark.long
def test_sweeps_at_once(tmp_path: Path) -> None:
    words = [*TINY, *PRIVATE, "trainer.max_steps=10", "hydra.sweep.dir='multirun/${now:%Y}'", "launcher=joblib"]
    started = [start(tmp_path, "train", "-m", *words, f"seed={seeds}") for seeds in ("0,1", "2,3")]
    told = [process.communicate(timeout=500) for process in started]
    assert [process.returncode for process in started] == [0, 0], told
    results = [json.loads(path.read_text()) for path in (tmp_path / "multirun").glob("*/*/result.json")]
    assert sorted(result["seed"] for result in results) == [0, 1, 2, 3]
    for path in (tmp_path / "multirun").glob("*/*/result.json"):
        intact(path.parent, json.loads(path.read_text())["seed"], 10)


@pytest.mark.slow
def test_two_resumes_at_once(tmp_path: Path) -> None:
    """Both ended with 0 and had spent ε = 7.57 of a target of 6."""
    words = ["hydra.run.dir=run", *PRIVATE, "trainer.max_steps=150", "run.checkpoint_every_n_steps=20", "seed=5"]
    signalled(tmp_path, signal.SIGKILL, 70, *words)
    both = [start(tmp_path, "resume", "run") for _ in range(2)]
    told = [process.communicate(timeout=500) for process in both]
    assert sorted(process.returncode for process in both) == [0, 1], told
    refusal = next(err for process, (_, err) in zip(both, told, strict=True) if process.returncode)
    assert "another process trains in" in refusal or "holds a finished run" in refusal
    intact(tmp_path / "run", 5, 150)
