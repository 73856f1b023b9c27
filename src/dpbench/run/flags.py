"""The flags of Hydra on a command line: in a file of its own, since a question (`--cfg job`) needs no PyTorch."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from dpbench.errors import ConfigurationError
from dpbench.runs.command import key_of

_QUESTIONS = ("help", "hydra_help", "cfg", "info", "shell_completion")


def asks(words: Sequence[str]) -> bool:
    """Whether a command line asks for something, such as its configuration, and runs nothing.

    Raises:
        ConfigurationError: See `flags_of`.
    """
    flags = flags_of(words)
    return any(getattr(flags, question) for question in _QUESTIONS)


def sweeps(words: Sequence[str]) -> bool:
    """Whether a command line asks for a sweep, however it is spelled.

    Raises:
        ConfigurationError: See `flags_of`.
    """
    flags = flags_of(words)
    mode = [word.partition("=")[2] for word in flags.overrides if key_of(word) == "hydra.mode"]
    return bool(flags.multirun) or "MULTIRUN" in map(str.upper, mode)


def flags_of(words: Sequence[str]) -> Namespace:
    """The words of a command line as Hydra will read them.

    Raises:
        ConfigurationError: There is a flag that it does not know, or a value is missing.
    """
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ConfigurationError(f"{message} (see dpbench train --help).")

    parser.error = refuse  # type: ignore[method-assign]
    flags = parser.parse_intermixed_args(list(words))
    if flags.cfg is None and flags.resolve:
        raise ConfigurationError("--resolve goes with --cfg job.")
    if flags.experimental_rerun is not None:
        raise ConfigurationError("--experimental-rerun would skip all checks: dpbench resume RUN continues a run.")
    chosen = [name for name in ("run", "multirun", "cfg", "info", "shell_completion") if getattr(flags, name)]
    if len(chosen) > 1:
        raise ConfigurationError(f"only one of --{' and --'.join(chosen)} can be asked for.")
    return flags


def in_order(words: Sequence[str]) -> list[str]:
    """Put the flags before the overrides: Hydra does not find overrides on both sides of a flag.

    Raises:
        ConfigurationError: See `flags_of`.
    """
    overrides = flags_of(words).overrides
    flags = list(words)
    for word in overrides:
        flags.remove(word)
    return [*flags, *overrides]
