"""The short table at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from dpbench.harness.reports.end_of_run import summary
from dpbench.harness.runs.folder import RunFolder
from tests.support.configs import composed


def text_of(
    delta: float | None = 1e-5,
    epsilons: dict[str, float] | None = None,
    membership: dict[str, Any] | None = None,
    folder: Path = Path("run"),
    **config: Any,
) -> str:
    privacy = {"delta": delta, "epsilon": epsilons or {"rdp": 1.0}, "unit": "user", "membership": membership}
    record = {
        "privacy": privacy,
        "metrics": {},
        "steps": 3,
        "seconds": 1.0,
        "seconds_total": 2.0,
        "config": {"data": {}, **config},
    }
    return summary(record, RunFolder(folder), "not logged")


def test_it_says_who_is_held_out() -> None:
    for words, line in {
        "{val_size: 300, split: hash}": "300 records, in expectation: chosen by a hash of each",
        "{val_users: 20, split: hash}": "20 users, in expectation: chosen by a hash of each",
        "{val_size: 300, split: permutation}": "300 records, chosen by a permutation of all: epsilon covers",
        "{val_users: 5, split: hash, unit: user, options: {held_out: 0.1, test_path: null}}": (
            "5 users and a share of 0.1 of the users, for the test, in expectation"
        ),
        "{split: hash, unit: example, options: {held_out: 0.1, user: agent}}": "a share of 0.1 of the users",
        "{split: hash, unit: example, options: {held_out: 0.1}}": "a share of 0.1 of the records",
    }.items():
        assert line in text_of(data=yaml.safe_load(words))
    for words in (
        "{val_users: 0, split: hash, options: {held_out: 0.1, test_path: t.csv}}",
        "{val_size: 0, split: hash}",
        "{val_size: 300}",  # of a class that says nothing of it
    ):
        assert "held out" not in text_of(data=yaml.safe_load(words))


def test_it_says_what_a_membership_test_reaches() -> None:
    """Rounded up: what is printed is a bound, too."""
    facts = {"accountant": "pld", "nominal": False, "advantage": 0.12301, "true_positive_rates": {"0.01": 0.0730}}
    line = (
        "an attacker with a false positive rate of 1 % identifies at most 7.3 % of the members (advantage at most 0.124"
    )
    assert f"membership      {line})" in text_of(membership=facts)
    assert f"{line}; a loose bound, by RDP)" in text_of(membership={**facts, "accountant": "rdp"})
    assert "membership" not in text_of()  # a record of an older version


def test_it_says_that_the_training_ended_early() -> None:
    assert "steps           3 of 500\n" in text_of(trainer={"max_steps": 500})
    assert "steps           3\n" in text_of(trainer={"max_steps": 3})
    assert "steps           3\n" in text_of(trainer={"max_steps": -1})


def test_noise_that_nobody_chose_is_told(tmp_path: Path) -> None:
    """Hydra's file has the word of conf/base/strategy.yaml where nothing has replaced it."""
    (tmp_path / ".hydra").mkdir()
    for target, noise, is_told in ((None, 1.1, False), (None, "default", True), (2.0, "default", False)):
        words = [] if noise == "default" else [f"strategy.noise_multiplier={noise}"]
        (tmp_path / ".hydra" / "config.yaml").write_text(OmegaConf.to_yaml(composed(*words)), encoding="utf-8")
        text = text_of(folder=tmp_path, strategy={"target_epsilon": target})
        assert ("no epsilon was asked for" in text) is is_told
