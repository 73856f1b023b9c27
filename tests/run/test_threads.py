"""Threads that wait for each other: what is set before PyTorch is loaded, and who is warned."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest

from dpbench.run import runtime

# The setting has to be there when PyTorch's libraries are loaded, whatever the command.
AT_THE_IMPORT_OF_TORCH = """
import os, sys

class Look:
    def find_spec(self, name, *_):
        if name == "torch":
            print("spins:", os.environ.get("GOMP_SPINCOUNT"))
            os._exit(0)

sys.meta_path.insert(0, Look())
from dpbench.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("command", "env", "spins"),
    [
        (["train", "trainer.max_steps=1"], {}, runtime.SPINS),
        (["priors", "strategy=discretized"], {}, runtime.SPINS),
        (["train"], {"GOMP_SPINCOUNT": "7"}, "7"),
        (["train"], {"OMP_WAIT_POLICY": "ACTIVE"}, "None"),
    ],
)
def test_threads_wait_briefly_before_torch_is_loaded(command: list[str], env: dict[str, str], spins: str) -> None:
    clean = {name: value for name, value in os.environ.items() if name not in runtime._WAITING}
    program = [sys.executable, "-c", AT_THE_IMPORT_OF_TORCH, *command]
    out = subprocess.run(program, env={**clean, **env}, capture_output=True, text=True, check=True).stdout
    assert f"spins: {spins}\n" in out


def test_a_program_that_loaded_torch_before_is_not_promised_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in runtime._WAITING:
        monkeypatch.delenv(name, raising=False)
    runtime.wait_briefly()
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.parametrize(
    ("env", "number", "load", "warned"),
    [
        ({}, 2, 1.0, True),  # a busy process beside
        ({}, 2, 0.1, False),
        ({}, 1, 2.0, False),  # one thread waits for nobody
        ({"OMP_WAIT_POLICY": "ACTIVE"}, 2, 1.0, True),
        ({"OMP_WAIT_POLICY": "passive"}, 2, 1.0, False),
        ({"GOMP_SPINCOUNT": runtime.SPINS}, 2, 1.0, False),
        ({"GOMP_SPINCOUNT": "300000", "OMP_WAIT_POLICY": "PASSIVE"}, 2, 1.0, True),  # the count has the last word
        ({"GOMP_SPINCOUNT": "INFINITY"}, 2, 1.0, True),
    ],
)
def test_threads_that_spin_beside_other_work_are_named_with_the_remedy(
    env: dict[str, str], number: int, load: float, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in runtime._WAITING:
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runtime.warn_of_spinning(number)
    assert bool(caught) == warned
    assert not warned or "GOMP_SPINCOUNT=3000 or OMP_NUM_THREADS=1" in str(caught[0].message)
