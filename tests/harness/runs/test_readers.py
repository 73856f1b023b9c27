"""Damaged files of a run, in every command that reads them: one line that names the file and the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpbench.cli import main
from dpbench.errors import ConfigurationError
from dpbench.harness.reproduce.jobs import Job
from dpbench.harness.run._checkpoint import LastCheckpoint
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.metrics_log import MetricsCSV
from tests.support.finished_runs import finished

NO_JSON = [b"", b'{"metrics": {', b"[" * 100_000]
NO_RECORD = [b"[1, 2]", b'{"metrics": 5, "privacy": []}']
NO_TABLE = [b"", b"\xff\xfe\x00\x01", b"a,b\n1,2\n", b"step,test/accuracy\n1,abc\n", b"step,a\n1,2\n3,4,5\n"]
NO_CONFIG = [b"", b"5", b"a: ${b}", b"{}"]


def one_line(capsys: pytest.CaptureFixture[str], path: Path, *words: object) -> None:
    assert main([str(word) for word in words]) == 1
    err = capsys.readouterr().err
    assert err.startswith("dpbench: error: ") and err.count("\n") == 1
    assert str(path) in err


@pytest.mark.parametrize("content", [*NO_JSON, *NO_RECORD])
def test_results(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("result.json", "evaluation.json"):
        finished(tmp_path / name, 0.95, 1.5)
        path = tmp_path / name / name
        path.write_bytes(content)
        one_line(capsys, path, "table", path.parent)
        with pytest.raises(ConfigurationError, match=f"{path} is damaged: delete {path}, and `dpbench "):
            Job("r", "c", 0, (), "", "", 1, str(path.parent)).result()


@pytest.mark.parametrize(
    ("key", "value"),
    [("metrics", {"m": 1e999}), ("privacy", {"epsilon": {"rdp": -1}}), ("seconds", -1), ("steps", -1)],
)
def test_numbers_that_no_result_can_have(
    key: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished(tmp_path / "a", 0.95, 1.5)
    path = tmp_path / "a" / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    one_line(capsys, path, "table", tmp_path)


@pytest.mark.parametrize("content", NO_TABLE)
def test_metrics(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(tmp_path / "a", 0.95, 1.5)
    path = tmp_path / "a" / "metrics.csv"
    path.write_bytes(content)
    one_line(capsys, path, "compare", tmp_path, "--plot", tmp_path / "p.png")
    if content:  # else nothing was logged
        with pytest.raises(ConfigurationError, match="metrics.csv is damaged: move it away"):
            MetricsCSV(RunFolder(path.parent)).check()


@pytest.mark.parametrize("content", NO_CONFIG)
def test_configurations(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    one_line(capsys, path, "resume", tmp_path)


def test_what_was_logged_beside_a_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    last = LastCheckpoint(folder, 1)
    last.read_metrics()
    for content in (NO_JSON[1], b"[1]", b'{"a": "b"}'):
        folder.checkpoint_metrics.write_bytes(content)
        with pytest.raises(ConfigurationError, match="metrics.json is damaged: delete"):
            last.read_metrics()
