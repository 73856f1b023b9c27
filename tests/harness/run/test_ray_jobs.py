"""What `launcher=ray` refuses before a job begins; a real Ray is in tests/cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from dpbench_ray import _Origin, _task_options

from dpbench.cli import main
from dpbench.code import code_hash
from dpbench.errors import ConfigurationError
from dpbench.harness.run._resume import RAY_TASK, job_name

SWEEP = ["train", "-m", "model=mlp", "trainer.max_steps=1", "hydra.sweep.dir=sweep", "launcher=ray"]


class _Ray:
    """A cluster of two nodes."""

    @staticmethod
    def nodes() -> list[dict[str, Any]]:
        alive = [{"Resources": {"CPU": 4.0}, "Alive": True}, {"Resources": {"CPU": 2.0, "GPU": 1.0}, "Alive": True}]
        return [*alive, {"Resources": {"CPU": 64.0}, "Alive": False}]


def options(cpus: float = 1, gpus: float = 0, **resources: float) -> dict[str, Any]:
    return {"num_cpus": cpus, "num_gpus": gpus, "resources": resources, "max_retries": 3}


@pytest.mark.parametrize("fits", [options(4), options(2, 1), options(0.5, 0.5)])
def test_a_job_that_a_node_has_room_for(fits: dict[str, Any]) -> None:
    assert _task_options(_Ray(), fits, None) == fits


@pytest.mark.parametrize("large", [options(5), options(3, 1), options(tape=1)])
def test_a_job_for_which_there_is_no_node(
    large: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigurationError, match="no node of the Ray cluster has what hydra.launcher asks for a job"):
        _task_options(_Ray(), large, None)
    assert _task_options(_Ray(), large, "somewhere:6379") == large  # a cluster may grow
    assert "the sweep waits until one has" in caplog.text


def test_less_than_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="CPU must be a number from 0 on"):
        _task_options(_Ray(), options(-1), None)


def test_a_node_must_see_the_folder_and_have_the_code(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    with pytest.raises(ConfigurationError, match=r"the node does not see .*take a folder that all nodes share"):
        _Origin(tmp_path, seen, code_hash()).check("the node")
    seen.touch()
    _Origin(tmp_path, seen, code_hash()).check("the node")
    with pytest.raises(ConfigurationError, match="the node has other code of dpbench"):
        _Origin(tmp_path, seen, "0123456789abcdef").check("the node")


def test_without_ray_the_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(SWEEP) == 1
    error = capsys.readouterr().err
    assert "launcher=ray needs Ray: pip install ./plugins/dpbench-ray" in error and "Traceback" not in error


def test_an_unknown_option_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*SWEEP, "hydra.launcher.num_cpu=1"]) == 1
    assert "num_cpu" in capsys.readouterr().err


def test_a_job_has_the_same_name_when_it_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RAY_TASK, "abc")
    assert job_name() == "Ray abc"


def test_a_cluster_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install -e plugins/dpbench-ray")
    monkeypatch.chdir(tmp_path)
    assert main([*SWEEP, "hydra.launcher.address=127.0.0.1:1"]) == 1
    assert "no Ray at 127.0.0.1:1 (hydra.launcher.address): Connection refused." in capsys.readouterr().err
