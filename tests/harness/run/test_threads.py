"""Threads that wait for each other: what is set before PyTorch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dpbench.harness.run import runtime

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
    ("command", "name", "spins"),
    [
        ("priors strategy=discretized", "", runtime.SPINS),
        ("train", "GOMP_SPINCOUNT", "7"),
        ("train", "OMP_WAIT_POLICY", "None"),
    ],
)
def test_threads_wait_briefly_before_torch_is_loaded(command: str, name: str, spins: str) -> None:
    clean = {key: value for key, value in os.environ.items() if key not in runtime._WAITING}
    env = {**clean, name: "7"} if name else clean
    program = [sys.executable, "-c", AT_THE_IMPORT_OF_TORCH, *command.split()]
    out = subprocess.run(program, env=env, capture_output=True, text=True, check=True).stdout
    assert f"spins: {spins}\n" in out


def test_a_program_that_loaded_torch_before_is_not_promised_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in runtime._WAITING:
        monkeypatch.delenv(name, raising=False)
    runtime.wait_briefly()
    assert "GOMP_SPINCOUNT" not in os.environ
