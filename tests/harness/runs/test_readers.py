"""Damaged files of a run, in every command that reads them: one line that names the file and the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from dpbench.cli import main
from dpbench.data import sources
from dpbench.errors import ConfigurationError, DataError, brief
from dpbench.harness.reproduce.jobs import ATTEMPT, Job
from dpbench.harness.run._checkpoint import LastCheckpoint
from dpbench.harness.run.build import plain
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.ledgers import find_ledgers
from dpbench.harness.runs.metrics_log import MetricsCSV
from dpbench.privacy.accounting.ledger import read_ledger
from tests.support.configs import composed
from tests.support.finished_runs import finished

NO_JSON = [b"", b'{"metrics": {', b"\xff\xfe\x00\x01", b"[" * 100_000]
RECORD = b'{"config": {"run": {"name": "a"}}, "metrics": {"m": %s}, "privacy": {"epsilon": {"rdp": %s}, "delta": %s}, '
RECORD += b'"seed": 0, "seconds": %s, "steps": %s}'
NO_RUN = [  # shapes that are right, of numbers that nothing can have
    RECORD % values
    for values in [
        (b"NaN", b"1", b"0.1", b"1", b"1"),
        (b"1e999", b"1", b"0.1", b"1", b"1"),
        (b"1", b"-1", b"0.1", b"1", b"1"),
        (b"1", b"1", b"7", b"1", b"1"),
        (b"1", b"1", b"0.1", b"-1", b"1"),
        (b"1", b"1", b"0.1", b"1", b"-1"),
    ]
]
NO_RECORD = [b"{}", b"[1, 2]", b"5", b"null", b'"abc"', b'{"metrics": 5, "privacy": []}']
NO_TABLE = [
    b"",
    b"\xff\xfe\x00\x01",
    b"a,b\n1,2\n",
    b"step,test/accuracy\n1,abc\n",
    b'step,"a\n1',
    b"step,a\n1,2\n3,4,5\n",
]
NO_CHECKPOINT = [b"", b"PK\x03\x04 cut", b"\x80\x04]\x94.", b"abc"]
NO_CONFIG = [b"", b"\xff\xfe\x00\x01", b"[1, 2]", b"5", b"a: [", b"a: ${b}", b"abc", b"{}"]


def one_line(capsys: pytest.CaptureFixture[str], path: Path, *words: str) -> None:
    assert main([str(word) for word in words]) == 1
    err = capsys.readouterr().err
    assert err.startswith("dpbench: error: ")
    assert err.count("\n") == 1
    assert str(path) in err


@pytest.mark.parametrize("content", [*NO_JSON, *NO_RECORD])
@pytest.mark.parametrize("name", ["result.json", "evaluation.json"])
def test_results(content: bytes, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(tmp_path / "a", 0.95, 1.5)
    finished(tmp_path / "b", 0.95, 1.5)
    path = tmp_path / "b" / name
    path.write_bytes(content)
    one_line(capsys, path, "table", tmp_path)
    one_line(capsys, path, "compare", tmp_path, "--plot", tmp_path / "p.png")
    with pytest.raises(ConfigurationError, match=f"{path} is damaged: delete {path}, and `dpbench "):
        Job("r", "c", 0, (), "", "", 1, str(path.parent)).result()


@pytest.mark.parametrize("content", NO_TABLE)
def test_metrics(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(tmp_path / "a", 0.95, 1.5)
    path = tmp_path / "a" / "metrics.csv"
    path.write_bytes(content)
    one_line(capsys, path, "compare", tmp_path, "--plot", tmp_path / "p.png")
    if content not in (b"", NO_TABLE[4]):  # in which nothing was logged
        with pytest.raises(ConfigurationError, match="metrics.csv is damaged: move it away"):
            MetricsCSV(RunFolder(path.parent)).check()


def unfinished(run: Path, *words: str) -> None:
    (run / "checkpoints").mkdir(parents=True)
    cfg = composed("logger=none", "run.name=x", "run.group=x", *words)
    config = plain(OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"]))
    (run / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))


QUIET = ["hydra/job_logging=none", "hydra/hydra_logging=none"]


@pytest.mark.parametrize("content", NO_CONFIG)
def test_configurations(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    one_line(capsys, path, "resume", tmp_path)
    one_line(capsys, path, "sample", tmp_path, "--num-samples", "1", "--out", tmp_path / "out")
    one_line(capsys, path, "evaluate", tmp_path, "--num-samples", "100")


@pytest.mark.parametrize("content", NO_CHECKPOINT)
def test_checkpoints(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["module=gan", "model=conv_gan", "data.image_size=8", "model.width=8", "data.scale=symmetric"]
    unfinished(tmp_path / "run", *words)
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    path.write_bytes(content)
    one_line(capsys, path, "resume", tmp_path / "run", *QUIET)
    one_line(capsys, path, "sample", tmp_path / "run", "--num-samples", "1", "--out", tmp_path / "out")
    one_line(capsys, path, "evaluate", tmp_path / "run", "--num-samples", "100")


def test_checkpoints_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unfinished(tmp_path, "model=mlp", "model.hidden=[4]", "data.image_size=8")
    path = tmp_path / "checkpoints" / "last.ckpt"
    for content in ({}, [1, 2], {"state_dict": {}}, torch.zeros(2)):
        torch.save(content, path)
        one_line(capsys, path, "resume", tmp_path, *QUIET)


def test_what_was_logged_beside_a_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    last = LastCheckpoint(folder, 1)
    last.read_metrics()
    for content in [*NO_JSON, b"[1]", b'{"a": "b"}']:
        folder.checkpoint_metrics.write_bytes(content)
        with pytest.raises(ConfigurationError, match="metrics.json is damaged: delete"):
            last.read_metrics()


@pytest.mark.parametrize(
    "line", [b"{}", b"[1]", b"5", b"null", b'"a"', b"[" * 100_000, b'{"record":"release"}', b"\xff"]
)
def test_lines_of_a_ledger(line: bytes, tmp_path: Path) -> None:
    head = {"record": "header", "schema": 1, "unit": "example", "neighbouring_relation": "add_or_remove_one"}
    path = tmp_path / "ledger.jsonl"
    first = json.dumps({**head, "population": 10, "delta": 1e-5}).encode() + b"\n"
    path.write_bytes(first + line + b"\n")
    assert str(read_ledger(path).damage).startswith("line 2 is damaged")
    release = {"record": "release", "number": 0, "sampling": "abc", "queries": [{"name": "a"}]}
    path.write_bytes(
        json.dumps({**head, "population": 10, "delta": 1e-5}).encode() + b"\n" + json.dumps(release).encode()
    )
    assert find_ledgers([tmp_path])
    assert read_ledger(path).damage is not None


def test_threads_and_failures_of_a_table(tmp_path: Path) -> None:
    job = Job("r", "c", 0, (), "", "", 1, str(tmp_path))
    for content in (*NO_JSON, *NO_RECORD):
        (tmp_path / ATTEMPT).write_bytes(content)
        assert job.failure().startswith("r, c, seed 0")


def test_an_error_that_says_nothing() -> None:
    assert brief(IndexError()) == "IndexError"
    assert brief(ValueError("\n  two\nlines")) == "two"

    def damaged(download: bool) -> None:
        raise IndexError

    with pytest.raises(DataError, match=r"incomplete or damaged \(IndexError\)"):
        sources._open(damaged, "MNIST", Path("/"), False)


@pytest.mark.parametrize("content", NO_RUN)
def test_numbers_that_no_result_can_have(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(content)
    one_line(capsys, path, "table", tmp_path)
    path.write_bytes(RECORD % (b"1", b"1", b"0.1", b"1", b"1"))
    assert main(["table", str(tmp_path)]) == 0


@pytest.mark.parametrize("values", ["1e308,-1e308", "inf,-inf", "3e38,-3e38"])
def test_numbers_that_no_picture_can_show(values: str, tmp_path: Path) -> None:
    finished(tmp_path / "a", 0.95, 1.5)
    first, second = values.split(",")
    (tmp_path / "a" / "metrics.csv").write_text(f"step,test/accuracy\n1,{first}\n2,{second}\n3,0.5\n")
    assert main(["compare", str(tmp_path), "--plot", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").is_file()
