"""What `launcher=ray` refuses before a job begins; a real Ray is in tests/cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from dpbench_ray import _Origin, _task_options

from dpbench.code import code_hash
from dpbench.errors import ConfigurationError
from tests.support.cli import dpbench

SWEEP = ["train", "-m", "model=mlp", "trainer.max_steps=1", "hydra.sweep.dir=sweep", "launcher=ray"]


class _Ray:
    """A cluster of two nodes."""

    @staticmethod
    def nodes() -> list[dict[str, Any]]:
        alive = [{"Resources": {"CPU": 4.0}, "Alive": True}, {"Resources": {"CPU": 2.0, "GPU": 1.0}, "Alive": True}]
        return [*alive, {"Resources": {"CPU": 64.0}, "Alive": False}]


def options(cpus: float = 1, gpus: float = 0, **resources: float) -> dict[str, Any]:
    return {"num_cpus": cpus, "num_gpus": gpus, "resources": resources, "max_retries": 3}


def test_a_job_that_a_node_has_room_for() -> None:
    for fits in (options(4), options(2, 1), options(0.5, 0.5)):
        assert _task_options(_Ray(), fits, None) == fits
    with pytest.raises(ConfigurationError, match="CPU must be a number of at least 0"):
        _task_options(_Ray(), options(-1), None)


@pytest.mark.parametrize("large", [options(5), options(3, 1), options(tape=1)])
def test_a_job_for_which_there_is_no_node(
    large: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigurationError, match="no node of the Ray cluster has the resources of hydra.launcher"):
        _task_options(_Ray(), large, None)
    assert _task_options(_Ray(), large, "somewhere:6379") == large  # a cluster may grow
    assert "the sweep waits until one has" in caplog.text


def test_a_node_must_see_the_folder_and_have_the_code(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    with pytest.raises(ConfigurationError, match=r"the node does not see .*take a folder that all nodes share"):
        _Origin(tmp_path, seen, code_hash()).check("the node")
    seen.touch()
    _Origin(tmp_path, seen, code_hash()).check("the node")
    with pytest.raises(ConfigurationError, match="the node has another version of dpbench"):
        _Origin(tmp_path, seen, "0123456789abcdef").check("the node")


def test_without_ray_the_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    _, err = dpbench(tmp_path, *SWEEP, status=1)
    assert "launcher=ray needs Ray: pip install ./plugins/dpbench-ray" in err and "Traceback" not in err


def test_an_unknown_option_is_told(tmp_path: Path) -> None:
    assert "num_cpu" in dpbench(tmp_path, *SWEEP, "hydra.launcher.num_cpu=1", status=1)[1]
