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

from dpbench.cli import parser

TRY = """
source "$1"; shift
COMP_LINE="$1"; COMP_POINT=${#COMP_LINE}; COMP_TYPE=9; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_python_argcomplete dpbench
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    (folder / "dpbench").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dpbench "$@"\n')
    (folder / "dpbench").chmod(0o755)
    (folder / "dpbench.bash").write_text(shellcode(["dpbench"]))
    return folder / "dpbench.bash"


def offered(script: Path, line: str) -> set[str]:
    """What bash offers behind a line, as it splits words (at = too)."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash on this machine")
    words = line.split(" ")
    parts = [part for word in words for part in (shlex.split(word.replace("=", " = ")) or [""])]
    done = subprocess.run(
        [bash, "-c", TRY, "try", script, line, *parts],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PATH": f"{script.parent}{os.pathsep}{os.environ['PATH']}"},
    )
    assert not done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("line", "some", "none"),
    [
        ("dpbench re", {"report", "resume", "reproduce"}, {"train"}),
        ("dpbench ", {"train", "export", "--version"}, set()),
        ("dpbench report --", {"--out", "--force"}, {"--csv"}),
        ("dpbench compare runs --axis ", {"step", "epsilon"}, set()),
        ("dpbench evaluate runs/gan --", {"--num-samples", "--split"}, {"--n", "--on"}),
        ("dpbench workflow model=ml", {"mlp"}, {"mnist_cnn"}),
        ("dpbench train strat", {"strategy=dpsgd"}, {"model=mlp"}),
        ("dpbench train -m strategy=adaptive_", {"adaptive_quantile", "adaptive_mean"}, {"dpsgd"}),
        ("dpbench compare runs --axis=e", {"epsilon"}, {"step"}),
        ("dpbench account runs --delta=1e", set(), {"--json"}),
        ("dpbench table nothing-of-ours", set(), {"train"}),
    ],
)
def test_bash(script: Path, line: str, some: set[str], none: set[str]) -> None:
    found = offered(script, line)
    assert some <= found and not none & found


def test_every_command_and_option_is_offered(script: Path) -> None:
    (commands,) = (action for action in parser()._actions if action.dest == "command")
    assert set(commands.choices or ()) <= offered(script, "dpbench ")
    for name, command in list((commands.choices or {}).items())[5:8]:  # type: ignore[union-attr]
        flags = {flag for action in command._actions for flag in action.option_strings if flag.startswith("--")}
        assert flags <= offered(script, f"dpbench {name} --")
