"""What a shell offers at a TAB."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from argcomplete.shell_integration import shellcode

TRY = """
source "$1"; shift
COMP_LINE="$1"; COMP_POINT=${#COMP_LINE}; COMP_TYPE=9; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_python_argcomplete dpbench
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("line", "some", "none"),
    [
        ("dpbench ", "train export --version", ""),
        ("dpbench compare runs --axis ", "step epsilon", ""),
        ("dpbench workflow model=ml", "mlp", "mnist_cnn"),
        ("dpbench train strat", "strategy=dpsgd", "model=mlp"),
        ("dpbench train -m strategy=adaptive_", "adaptive_quantile adaptive_mean", "dpsgd"),
    ],
)
def test_bash(line: str, some: str, none: str, tmp_path: Path) -> None:
    """Behind a line, as bash splits words (at = too)."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash on this machine")
    (tmp_path / "dpbench").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dpbench "$@"\n')
    (tmp_path / "dpbench").chmod(0o755)
    (tmp_path / "dpbench.bash").write_text(shellcode(["dpbench"]))
    parts = [part for word in line.split(" ") for part in (shlex.split(word.replace("=", " = ")) or [""])]
    command = [bash, "-c", TRY, "try", str(tmp_path / "dpbench.bash"), line, *parts]
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    found = done.stdout.split()
    assert not done.stderr and {*some.split()} <= {*found} and not {*none.split()} & {*found}
