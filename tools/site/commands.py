"""The reference of the command line: each command with its help, as the parsers print it."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
from unittest import mock

from sphinx.application import Sphinx

from dpbench.cli import main, parser
from tools.site.written import write

_WIDTH = "100"


def register(app: Sphinx) -> None:
    """Write the page before Sphinx looks for sources."""
    app.connect("builder-inited", lambda app: write("commands.md", page()))


def helps() -> dict[str, str]:
    """Help of each command, by name."""
    command_line = parser()
    (commands,) = (action for action in command_line._actions if isinstance(action, argparse._SubParsersAction))
    with mock.patch.dict(os.environ, {"COLUMNS": _WIDTH}):
        return {name: _help(name, command) for name, command in commands.choices.items()}


def _help(name: str, command: argparse.ArgumentParser) -> str:
    if command.add_help:
        return command.format_help()
    printed = io.StringIO()  # of a command whose words Hydra reads
    with contextlib.redirect_stdout(printed):
        main([name, "--help"])
    return printed.getvalue()


def page() -> str:
    """The page, from the top of the list that `dpbench --help` prints."""
    with mock.patch.dict(os.environ, {"COLUMNS": _WIDTH}):
        parts = ["# The command line", "", "What each `--help` prints.", "", *_block("dpbench", parser().format_help())]
    for name, text in helps().items():
        parts += _block(f"dpbench {name}", text)
    return "\n".join(parts)


def _block(title: str, text: str) -> list[str]:
    return [f"## {title}", "", "```text", text.rstrip(), "```", ""]
