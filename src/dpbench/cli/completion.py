"""`dpbench completion`: what a shell needs to complete commands, options and settings."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

from dpbench.cli.arguments import Answer, Commands, add_command

_EPILOG = """\
Completes commands, options and, for Hydra's commands, groups, their names and settings.

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
    """The words of Hydra that a shell offers: GROUP=NAME, and KEY= of every setting in a configuration file.

    Hydra's own completion composes the configuration at each TAB, which takes seconds; these are read from its files.

    Args:
        prefix: What the user has typed of the word.
    """
    if os.environ.get("COMP_LINE", "").rpartition(" ")[2].startswith("-"):
        return []  # the value of a flag of Hydra, which argcomplete does not know
    from dpbench.run.search_path import conf_dir, groups_of, plugin_dirs

    folders = (conf_dir(), *plugin_dirs())
    groups = groups_of(*folders)
    for internal in ("schema", "hydra"):
        groups.pop(internal, None)
    typed, comma, _last = prefix.rpartition(",")
    if comma:  # a sweep: model=cnn,mlp
        return [f"{typed},{name}" for name in groups.get(typed.partition("=")[0], [])]
    words = [f"{group}={name}" for group, names in groups.items() for name in names]
    keys: set[str] = set()
    for folder in folders:
        keys.update(_settings(folder, groups))
    return [*words, *(f"{key}=" for key in sorted(keys))]


def _settings(folder: Any, groups: Any) -> Iterator[str]:
    """Dotted keys of the settings in a folder of configuration files."""
    import yaml

    for path in sorted(folder.rglob("*.yaml")):
        group = path.relative_to(folder).parts[0]
        text = path.read_text(encoding="utf-8")
        if path.parent == folder or (group in groups and text.startswith("# @package _global_")):
            prefix = ""
        elif group in groups:
            prefix = f"{group}."
        else:  # what is left holds data, not settings
            continue
        settings = yaml.safe_load(text)
        if isinstance(settings, dict):
            yield from _dotted(prefix, settings)


def _dotted(prefix: str, settings: dict[Any, Any]) -> Iterator[str]:
    for key, value in settings.items():
        if not isinstance(key, str) or not key.isidentifier() or key.startswith("_") or key in ("defaults", "hydra"):
            continue
        if isinstance(value, dict):
            yield from _dotted(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}"
