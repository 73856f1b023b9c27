"""`dpbench completion`: what a shell needs to complete commands, options and choices."""

from __future__ import annotations

import argparse
from typing import Any

from dpbench.cli.arguments import Answer, Commands, add_command

_EPILOG = """\
Completes commands, options and, for Hydra's commands, groups and their names.

examples:
  dpbench completion bash > ~/.local/share/bash-completion/completions/dpbench
  dpbench completion zsh >> ~/.zshrc
  source <(dpbench completion bash)                 for this shell alone
"""


def add_parsers(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "completion", "Completion for a shell.", _completion, epilog=_EPILOG)
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help="which")


def _completion(options: argparse.Namespace) -> Answer:
    from argcomplete.shell_integration import shellcode

    return Answer(shellcode(["dpbench"], shell=options.shell))


def add_overrides(parser: argparse.ArgumentParser, help: str) -> None:
    """Add words that Hydra reads; a shell completes them."""
    action = parser.add_argument("words", nargs="*", default=[], metavar="KEY=VALUE", help=help)
    action.completer = _overrides  # type: ignore[attr-defined]  # where argcomplete looks


def _overrides(prefix: str, **_: Any) -> list[str]:
    """The choices GROUP=NAME that a shell offers.

    Hydra's own completion composes the configuration at each TAB, which takes seconds.

    Args:
        prefix: Start of the word that is completed.
    """
    from dpbench.run.search_path import conf_dir, groups_of, plugin_dirs

    words = []
    for group, names in groups_of(conf_dir(), *plugin_dirs()).items():
        words += [f"{group}={name}" for name in names]
    return words
