"""Files, logs, pictures and provenance of runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pandas as pd
import pytest

from dpbench.results.curves import plot_curves
from dpbench.results.files import write_atomically, write_json
from dpbench.results.metrics_log import MetricsCSV
from dpbench.results.provenance import code_hash, commit, config_hash, hardware, run_key, versions

CONFIG = {
    "seed": 0,
    "data": {"name": "digits", "root": "/a", "download": True},
    "model": {"hidden": [3]},
    "strategy": {"noise_multiplier": 1.0},
    "optimizer": {"lr": 0.1},
    "trainer": {"max_steps": 5, "precision": "32-true"},
    "run": {"name": "x"},
    "logger": {"wandb": False},
}


def changed(group: str, **values: object) -> dict[str, object]:
    return {**CONFIG, group: {**CONFIG[group], **values}}  # type: ignore[dict-item]


def test_atomic_write_leaves_the_old_file_on_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    write_atomically(path, "old")

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_json_refuses_what_other_readers_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "f", {"x": float("nan")})
    write_json(tmp_path / "f", {"x": 1})
    assert json.loads((tmp_path / "f").read_text()) == {"x": 1}


def test_metrics_are_continued_and_merged_by_step(tmp_path: Path) -> None:
    first = MetricsCSV(tmp_path)
    first.log_metrics({"a": 1.0, "epoch": 0}, step=3)
    first.log_metrics({"b": 2.0}, step=3)
    first.save()
    second = MetricsCSV(tmp_path)
    second.log_metrics({"a": 5.0}, step=4)
    second.finalize("success")
    table = pd.read_csv(tmp_path / "metrics.csv", index_col="step")
    assert table.loc[3].to_dict() == {"a": 1.0, "b": 2.0}
    assert table.loc[4, "a"] == 5.0
    assert "epoch" not in table


def test_curves(tmp_path: Path) -> None:
    assert plot_curves(tmp_path, "t") is None
    pd.DataFrame({"step": [1, 2], "test/accuracy": [0.5, 0.6]}).to_csv(tmp_path / "metrics.csv", index=False)
    short = plot_curves(tmp_path, "without privacy")
    assert short is not None
    size = short.stat().st_size
    table = pd.DataFrame({"step": [1, 2, 3], "val/accuracy": [0.5, None, 0.6], "privacy/epsilon": [0.1, 0.2, None]})
    table.to_csv(tmp_path / "metrics.csv", index=False)
    tall = plot_curves(tmp_path, "private")
    assert tall is not None
    assert tall.stat().st_size != size


def test_config_hash_ignores_what_cannot_change_a_result() -> None:
    base = config_hash(CONFIG)
    assert base == config_hash(changed("data", root="/b", download=False)) == config_hash(changed("run", name="y"))
    assert (
        len(
            {
                base,
                *(
                    config_hash(c)
                    for c in (changed("optimizer", lr=0.2), changed("trainer", max_steps=6), {**CONFIG, "seed": 1})
                ),
            }
        )
        == 4
    )


def test_run_key_differs_wherever_gradients_could() -> None:
    base = run_key(CONFIG)
    assert base == run_key(changed("data", root="/b")) == run_key(changed("trainer", max_steps=6))
    others = [changed("optimizer", lr=0.2), changed("strategy", noise_multiplier=2.0), changed("model", hidden=[4])]
    keys = {
        base,
        *(run_key(c) for c in others),
        run_key({**CONFIG, "seed": 1}),
        run_key(changed("trainer", precision="64")),
        run_key({**CONFIG, "schedule": {"T_max": 5}}),
        run_key({**CONFIG, "a_group_of_the_future": {"x": 1}}),
    }
    assert len(keys) == 8


def test_run_key_changes_with_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    base = run_key(CONFIG)
    monkeypatch.setattr("dpbench.results.provenance.code_hash", lambda: "other")
    assert run_key(CONFIG) != base


def test_code_hash_is_of_what_a_run_executes(tmp_path: Path) -> None:
    def hash_with(changed: str | None) -> str:
        package = tmp_path / str(changed).replace("/", "-")
        for name in ("privacy/engine.py", "training/run.py", "reproduce/outputs.py", "cli.py"):
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            (package / name).write_text("changed" if name == changed else "", encoding="utf-8")
        return code_hash(package)

    base = hash_with(None)
    assert hash_with("reproduce/outputs.py") == hash_with("cli.py") == base
    assert len({base, hash_with("privacy/engine.py"), hash_with("training/run.py")}) == 3


def test_provenance() -> None:
    assert len(code_hash()) == 16
    assert versions()["torch"]
    assert hardware()["threads"] >= 1
    found = commit()
    assert found is None or len(found.partition("+")[0]) == 40
