"""A package of others adds a strategy, a model, a data set, a task and an experiment: tests/plugin, installed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from dpbench.code import _source_hash, foreign_code
from dpbench.errors import ConfigurationError
from dpbench.harness.run import search_path
from tests.support.cli import ROOT, dpbench, dpbench_in_a_process

PRIVATE = "0-waves-strategy_radius"
WAVES = ["experiment=waves", "logger=none", "run.checkpoint_every_n_steps=5"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the plug-in is installed, in front of what is installed already."""
    place = tmp_path_factory.mktemp("site")
    shutil.copytree(Path(__file__).parent / "plugin", place, dirs_exist_ok=True)
    metadata = place / "dpbench_waves-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dpbench-waves\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[dpbench.conf]\nwaves = waves.conf\n")
    return os.pathsep.join([str(place), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="module")
def runs(site: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two runs of the plug-in, private and the baseline of the same experiment; it stays installed in this process."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site.partition(os.pathsep)[0])
        search_path.plugin_dirs.cache_clear()
        dpbench(folder, "train", "-m", *WAVES, "strategy=radius,none", "hydra.sweep.dir=runs")
        yield folder / "runs"
    search_path.plugin_dirs.cache_clear()


def test_a_strategy_a_model_a_data_set_and_a_task(runs: Path) -> None:
    folders = [runs / PRIVATE, runs / "1-waves-strategy_none"]
    private, plain = (json.loads((folder / "result.json").read_text()) for folder in folders)
    assert 1 < private["privacy"]["epsilon"]["pld"] < private["privacy"]["epsilon"]["rdp"] < 10
    assert plain["privacy"]["delta"] is None
    assert plain["metrics"]["test/error"] < private["metrics"]["test/error"] < 2
    assert list(private["foreign_code"]) == ["waves"]
    assert (runs / PRIVATE / "curves.png").stat().st_size > 10_000


def test_its_runs_stand_in_tables(runs: Path) -> None:
    out, _ = dpbench(runs, "table", str(runs))
    assert "test/error" in out and "| radius |" in out and "| none |" in out


@pytest.mark.long
def test_its_tables_are_reproduced(runs: Path, site: str) -> None:
    out, _ = dpbench_in_a_process(runs, "reproduce", "waves/radius", PYTHONPATH=site)
    assert "2/2 done" in out and "radius 0.1" in out
    page = (runs / "results" / "waves_radius" / "README.md").read_text(encoding="utf-8")
    assert "test/error after the last step: mean" in page


def test_the_help_lists_its_files(runs: Path) -> None:
    out, _ = dpbench(runs, "train", "--help")
    for choice in ("| waves", "| readout", "| regressor", "| radius"):
        assert choice in out


REFUSED = {
    "strategy.radus=2": "there is no key strategy.radus. Did you mean strategy.radius?",
    "strategy.radius=wide": "strategy.radius must be a number, not 'wide'",
    "+model.length=3": "model.length cannot be set: the data set provides it",
    "schedule=cosine": "Regressor takes no schedule: choose schedule=constant",
    "model=mlp": "model.input_shape is missing: it cannot be left out. The data set provides length=",
}


def test_its_options_are_checked(runs: Path) -> None:
    for word, message in REFUSED.items():
        _, err = dpbench(runs, "train", *WAVES, word, status=1)
        assert err.startswith("dpbench: error: ") and message in err


@pytest.mark.long
def test_a_sweeper_chooses_on_records_that_are_held_out(runs: Path, site: str) -> None:
    words = ["train", "-m", *WAVES, "hydra/sweeper=better_of_two", "hydra.sweep.dir=chosen"]
    _, err = dpbench_in_a_process(runs, *words, status=1, PYTHONPATH=site)
    assert "these runs have only test data: hold out records" in err and err.count("\n") == 1
    assert not (runs / "chosen").exists()
    dpbench_in_a_process(runs, *words, "data.val_size=128", PYTHONPATH=site)
    results = [json.loads(path.read_text()) for path in sorted((runs / "chosen").glob("*/result.json"))]
    errors = [result["metrics"]["val/error"] for result in results]
    assert len(errors) == 2 and errors[1] < errors[0]
    assert (runs / "chosen" / "best.txt").read_text() == f"1 {errors[1]}"
    assert errors[1] != results[1]["metrics"]["test/error"]


def test_an_edit_of_its_code_gives_other_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the difference of two models' releases would be the difference of their private sums."""
    config = {"model": {"_target_": "nets.Net"}, "callbacks": {"a": {"_target_": "torch.nn.Linear"}}, "x": [{"y": 1}]}
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "nets.py").write_text("a = 1")
    before = foreign_code(config)
    assert list(before) == ["nets"]
    _source_hash.cache_clear()
    assert foreign_code(config) == before
    (tmp_path / "nets.py").write_text("a = 2")
    _source_hash.cache_clear()
    assert foreign_code(config) != before
    with pytest.raises(ConfigurationError, match="the source of sys .a _target_. is not found"):
        foreign_code({"model": {"_target_": "sys.Net"}})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("nosuch.conf", "the plug-in mine names nosuch.conf as its configuration .*No module named 'nosuch'"),
        ("json.decoder", "names json.decoder .*which is not a folder of an installed package"),
    ],
)
def test_a_broken_plugin_is_one_line(value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    points: Any = lambda group: [EntryPoint("mine", value, group)]  # noqa: E731
    monkeypatch.setattr(search_path, "entry_points", points)
    with pytest.raises(ConfigurationError, match=message):
        search_path.plugin_dirs.__wrapped__()


@pytest.mark.slow
def test_its_model_is_exported(runs: Path, tmp_path: Path) -> None:
    dpbench(tmp_path, "export", str(runs / PRIVATE), "--out", "model", "--insecure")
    built = json.loads((tmp_path / "model" / "config.json").read_text())
    assert built["target"].startswith("waves.") and "not a class of dpbench" in built["note"]
