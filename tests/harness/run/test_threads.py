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
