"""`dpbench completion`: what a shell offers at a TAB."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from dpbench.cli import main, parser

TRY = """
source "$1"; shift
COMP_LINE="$1"; COMP_POINT=${#COMP_LINE}; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_dpbench
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "dpbench.bash"
    with pytest.MonkeyPatch.context() as patch:
        text: list[str] = []
        patch.setattr("builtins.print", lambda *words, **_: text.extend(words))
        assert main(["completion", "bash"]) == 0
    path.write_text("".join(text))
    return path


def offered(script: Path, line: str) -> set[str]:
    """What bash offers behind a line, as it splits words (at = too)."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash on this machine")
    words = line.split(" ")
    parts = [part for word in words for part in (shlex.split(word.replace("=", " = ")) or [""])]
    done = subprocess.run([bash, "-c", TRY, "try", script, line, *parts], capture_output=True, text=True, check=True)
    assert not done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("line", "some", "none"),
    [
        ("dpbench re", {"report", "resume", "reproduce"}, {"train"}),
        ("dpbench ", {"train", "export", "--version"}, set()),
        ("dpbench report --", {"--out", "--force", "--accountant"}, {"--csv"}),
        ("dpbench compare runs --axis ", {"step", "epsilon"}, set()),
        ("dpbench completion ", {"bash", "zsh"}, set()),
        ("dpbench train strat", {"strategy=dpsgd", "strategy.max_grad_norm="}, {"model=mlp"}),
        ("dpbench train -m strategy=adaptive_", {"adaptive_quantile", "adaptive_mean"}, {"dpsgd"}),
        ("dpbench train trainer.max_", {"trainer.max_steps="}, set()),
        ("dpbench resume runs/demo trainer.max_s", {"trainer.max_steps="}, set()),
        ("dpbench train -m model=cnn_tanh,ml", {"cnn_tanh,mlp"}, {"mlp"}),
        ("dpbench compare runs --axis=e", {"epsilon"}, {"step"}),
        ("dpbench account runs --delta=1e", set(), {"--plot"}),
        ("dpbench train --config=tr", set(), {"trainer=cpu"}),
        ("dpbench table nothing-of-ours", set(), {"train"}),
    ],
)
def test_bash(script: Path, line: str, some: set[str], none: set[str]) -> None:
    found = offered(script, line)
    assert some <= found and not none & found


def test_every_command_and_option_is_known(script: Path) -> None:
    text = script.read_text()
    (commands,) = (action for action in parser()._actions if action.dest == "command")
    for name, command in (commands.choices or {}).items():  # type: ignore[union-attr]
        assert f" {name}" in text
        assert all(flag in text for action in command._actions for flag in action.option_strings)


def test_zsh_reads_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["completion", "zsh"]) == 0
    text = capsys.readouterr().out
    assert "bashcompinit" in text and "complete -o default -F _dpbench dpbench" in text
    if (zsh := shutil.which("zsh")) is not None:
        (tmp_path / "x").write_text(text)
        assert subprocess.run([zsh, "-n", tmp_path / "x"], check=False).returncode == 0
