"""`dpbench attack` as a user runs it: runs with members of their own, attacked and held against their ledgers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from dpbench.capabilities.attack.attack import attack_runs
from dpbench.errors import ConfigurationError
from dpbench.privacy.mechanism.mechanism import Mechanism
from tests.support.cli import TINY, dpbench

MEMORIZING = [
    *TINY,
    "data=random_noise",
    "data.like=digits",
    "data.train_size=120",
    "data.test_size=120",
    "model.hidden=[128]",
    "optimizer.lr=0.5",
]
OVERFITTED = [*MEMORIZING, "strategy=none", "trainer.max_steps=70"]
PRIVATE = [*TINY, "strategy.delta=1e-4", "data.train_size=300", "trainer.max_steps=8"]


def facts_of(folder: Path, *words: str, status: int = 0) -> list[dict[str, Any]]:
    out, _ = dpbench(folder, "attack", "--json", *words, status=status)
    facts: list[dict[str, Any]] = json.loads(out)
    return facts


@pytest.fixture(scope="module")
def overfitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("overfitted")
    facts_of(folder, "--train", "8", "--out", "runs", *OVERFITTED)
    return folder


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("private")
    dpbench(folder, "attack", "--train", "4", "--out", "runs", *PRIVATE, "strategy.noise_multiplier=1")
    return folder


def test_an_overfitted_network_is_an_open_book(overfitted: Path) -> None:
    facts = json.loads((overfitted / "runs" / "attack.json").read_text())
    (setting,) = facts
    by_name = {entry["name"]: entry for entry in setting["attacks"]}
    assert by_name["LiRA"]["auc"]["value"] > 0.9
    assert by_name["RMIA"]["auc"]["value"] > 0.9
    assert by_name["LiRA"]["tpr"]["0.01"]["value"] > 0.2
    assert setting["verdict"] is None
    assert setting["epsilon"] == {"rdp": None, "pld": None}
    assert len(setting["worst_records"]) == 16
    assert "LiRA on loss" in (overfitted / "runs" / "attack.md").read_text()


def test_private_runs_stay_below_what_their_ledgers_allow(private: Path) -> None:
    (setting,) = json.loads((private / "runs" / "attack.json").read_text())
    assert setting["verdict"] == "CONSISTENT"
    assert setting["allowed"]["tpr"]["0.01"] > 0.01
    proved = setting["audited_curve"]
    assert proved is None or all(np.array(proved) <= setting["allowed"]["curve"])
    assert " (PLD)" in (private / "runs" / "attack.md").read_text()
    assert (private / "runs" / "attack.png").stat().st_size > 10_000


@pytest.mark.long
def test_a_mechanism_without_noise_is_refuted_by_its_members(tmp_path: Path) -> None:
    """The ledger says noise that nobody adds: the whole pipeline, down to the exit status, sees it."""
    words = [
        "--train",
        "6",
        "--out",
        "runs",
        *MEMORIZING,
        "trainer.max_steps=120",
        "strategy=dpsgd",
        "strategy.target_epsilon=0.2",
    ]
    with mock.patch.object(Mechanism, "add_noise", return_value=None):
        (setting,) = facts_of(tmp_path, *words, "strategy.delta=1e-5", status=3)
    assert setting["verdict"] == "VIOLATED"
    assert setting["audited"] > setting["epsilon"]["rdp"]
    assert all(np.array(setting["audited_curve"])[:-1] > setting["allowed"]["curve"][:-1])
    assert "VIOLATED" in (tmp_path / "runs" / "attack.md").read_text()


def test_the_report_of_a_sweep_shows_the_attack(private: Path, tmp_path: Path) -> None:
    dpbench(tmp_path, "report", str(private / "runs"), "--out", "sweep.html")
    assert "members that dpbench attack recognized" in (tmp_path / "sweep.html").read_text()


@pytest.mark.long
def test_a_folder_of_other_settings_is_left_alone(private: Path) -> None:
    words = ["--train", "4", "--out", "runs", *PRIVATE, "optimizer.lr=0.3", "strategy.noise_multiplier=1"]
    _, err = dpbench(private, "attack", *words, status=1)
    assert "holds a run with other settings: choose another folder" in err


@pytest.mark.long
def test_users_are_recognized_by_all_their_examples(tmp_path: Path) -> None:
    words = ["data=digits_users", "records=users", "model=mlp", "model.hidden=[16]", "data.expected_batch_size=5"]
    words += ["strategy.delta=5e-3", "trainer.max_steps=3", "logger=none"]
    (setting,) = facts_of(tmp_path, "--train", "4", *words)
    assert setting["unit"] == "user"
    assert setting["verdict"] == "CONSISTENT"
    assert setting["candidates"] < 200


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name the sweep to attack, or train one"),
        (["--train", "2"], "--train must be at least 4"),
        (["--train", "4", "seed=7"], "decides seeds, members and folders"),
        (["nowhere"], "there is no folder nowhere"),
        (["runs", "--signal", "los"], "--signal must be one or both of loss, samples, not los"),
        (["runs/0-digits-mlp-dpsgd"], "at least 4 runs of a setting"),
    ],
)
def test_clear_errors(private: Path, words: list[str], message: str) -> None:
    place = next((private / "runs").glob("0-*")).name
    words = [word.replace("0-digits-mlp-dpsgd", place) for word in words]
    _, err = dpbench(private, "attack", *words, status=1)
    assert message in err
    assert "Traceback" not in err


def test_runs_on_all_records_are_no_game(tmp_path: Path) -> None:
    dpbench(tmp_path, "train", *PRIVATE, "strategy.noise_multiplier=1", "hydra.run.dir=run")
    _, err = dpbench(tmp_path, "attack", "run", status=1)
    assert "was trained on all records" in err
    assert "dpbench attack --train 16" in err


def changed(folder: Path, **entries: Any) -> None:
    path = folder / "result.json"
    record = json.loads(path.read_text())
    record.update(entries)
    path.write_text(json.dumps(record))


def test_runs_of_two_codes_are_not_compared(overfitted: Path, tmp_path: Path) -> None:
    shutil.copytree(overfitted / "runs", tmp_path / "runs")
    for folder in sorted(path.parent for path in (tmp_path / "runs").glob("*/result.json"))[:6]:
        changed(folder, code_hash="another")
    with pytest.raises(ConfigurationError, match="at least 4 runs of a setting, .*, not 2"):
        attack_runs([tmp_path / "runs"])


def test_other_members_are_refused(overfitted: Path, tmp_path: Path) -> None:
    shutil.copytree(overfitted / "runs", tmp_path / "runs")
    changed(min(path.parent for path in (tmp_path / "runs").glob("*/result.json")), members="0" * 16)
    with pytest.raises(ConfigurationError, match="the data have changed since it was trained"):
        attack_runs([tmp_path / "runs"])


def test_one_seed_twice_is_one_run(overfitted: Path, tmp_path: Path) -> None:
    shutil.copytree(overfitted / "runs", tmp_path / "again")
    with pytest.raises(ConfigurationError, match="two runs of a setting have seed 0"):
        attack_runs([overfitted / "runs", tmp_path / "again"])


def test_canaries_and_members_do_not_go_together(tmp_path: Path) -> None:
    words = [*PRIVATE, "strategy.noise_multiplier=1", "data.membership=half", "audit=gradient_canaries"]
    _, err = dpbench(tmp_path, "train", *words, status=1)
    assert "which data.membership halves" in err


def test_an_experiment_is_not_exported(private: Path) -> None:
    run = next((private / "runs").glob("0-*"))
    _, err = dpbench(private, "export", str(run), "--out", "model", "--insecure", status=1)
    assert "was trained with data.membership" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*PRIVATE, "strategy.secure=true"], "remove strategy.secure=true"),
        ([*PRIVATE, "data.sampling=fixed_size"], "draw them with data.sampling=poisson"),
        ([*PRIVATE, "audit=gradient_canaries"], "attack one without canaries"),
        ([*PRIVATE, "data.inserted.records=3"], "remove one of the two"),
    ],
)
def test_what_is_no_game_is_refused_before_any_run_starts(tmp_path: Path, words: list[str], message: str) -> None:
    _, err = dpbench(tmp_path, "attack", "--train", "4", "--out", "runs", *words, status=1)
    assert message in err
    assert "failed" not in err  # as of runs that were started
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_a_generator_that_draws_its_records_gives_them_away(
    tmp_path: Path,
    overfitted: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its samples alone; one that knows of none gives nothing away, and a classifier draws none."""
    words = ["experiment=digits_gan", "model=mlp_gan", "strategy=none", "trainer.max_steps=1", "logger=none"]
    dpbench(tmp_path, "attack", "--train", "4", "--out", "runs", *words, "data.train_size=100", "data.test_size=100")
    (setting,) = attack_runs([tmp_path / "runs"], ["samples"])
    assert max(attack.auc.value for attack in setting.summary.attacks) < 0.65
    training_sets = [setting.candidates.train_set.pixels[members] for members in setting.members]

    def copies(module: Any, number: int, seed: int) -> tuple[torch.Tensor, None]:
        images = (training_sets.pop(0).permute(0, 3, 1, 2) + 1) / 2
        return (255 * images).round().byte(), None

    monkeypatch.setattr("dpbench.capabilities.attack.signals.sample_images", copies)
    (setting,) = attack_runs([tmp_path / "runs"], ["samples"])
    assert {attack.name: attack.auc.value for attack in setting.summary.attacks}["threshold"] > 0.95
    _, err = dpbench(overfitted, "attack", "runs", "--signal", "samples", "--out", "samples", status=1)
    assert "attack a GAN" in err
