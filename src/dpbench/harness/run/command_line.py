"""The command line of `dpbench train`: Hydra's flags and overrides, and one line for what is wrong with them.

No import of PyTorch here: a question (`--cfg job`) needs none.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from hydra import version
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from dpbench.errors import ConfigurationError
from dpbench.harness.run._hydra_internals import (
    ConfigLoaderImpl,
    Hydra,
    create_automatic_config_search_path,
    get_args_parser,
)
from dpbench.harness.run.search_path import installing
from dpbench.options import did_you_mean, shown

_QUESTIONS = ("help", "hydra_help", "cfg", "info", "shell_completion")
_WITHOUT_EFFECT = ("experimental_rerun", "config_path", "package")
_EXTRAS = {
    "hydra/launcher/submitit": ("submitit", "launcher=submitit", "hydra_plugins.hydra_submitit_launcher"),
    "hydra/launcher/dpbench_ray": ("ray", "launcher=ray", "hydra_plugins.dpbench_ray_launcher"),
    "hydra/sweeper/optuna": ("optuna", "hydra/sweeper=optuna", "hydra_plugins.hydra_optuna_sweeper"),
}
"""What Hydra looks for, by the beginning of its path: name of the extra, setting and plug-in."""


@dataclass(frozen=True)
class CommandLine:
    """The words of a command line.

    Attributes:
        overrides: Overrides such as `optimizer.lr=0.1`, in their order.
        flags: Hydra's, by their names in its parser.
        in_order: All words, flags first: Hydra does not find overrides on both sides of a flag.
    """

    overrides: tuple[str, ...]
    flags: Namespace
    in_order: tuple[str, ...]

    @classmethod
    def parse(cls, words: Sequence[str]) -> CommandLine:
        """Read the words.

        Raises:
            ConfigurationError: There is a flag that Hydra does not know or that has no effect here, or a value is
                missing.
        """
        parser = get_args_parser()
        parser.error = _refuse_flag  # type: ignore[method-assign]
        flags = parser.parse_intermixed_args(list(words))
        options = list(words)
        for override in flags.overrides:
            options.remove(override)
        line = cls(tuple(flags.overrides), flags, (*options, *flags.overrides))
        for flag in () if line.is_question else _WITHOUT_EFFECT:
            if getattr(flags, flag) is not None:
                raise ConfigurationError(
                    f"--{flag.replace('_', '-')} is no flag of a run: remove it (--config-dir adds configuration of "
                    "your own, dpbench resume RUN continues a run)."
                )
        return line

    @property
    def is_question(self) -> bool:
        """True where the words ask for something, such as the configuration, and run nothing."""
        return any(getattr(self.flags, name) for name in _QUESTIONS)

    @contextmanager
    def loader(self, conf: Path) -> Iterator[ConfigLoaderImpl]:
        """Hydra, set up for a folder of configuration and the one that the command line adds."""
        version.setbase("1.3")
        path = create_automatic_config_search_path(None, None, str(conf.resolve()))
        folder = self.flags.config_dir
        if folder is not None:
            path.prepend("command-line", f"file://{os.path.abspath(folder)}", SearchPathQuery(provider="schema"))
        before = HydraConfig.instance().cfg
        try:
            loader = Hydra.create_main_hydra2("train", path).config_loader
            assert isinstance(loader, ConfigLoaderImpl)
            yield loader
        finally:
            GlobalHydra.instance().clear()
            HydraConfig.instance().cfg = before


def without_hydra(cfg: DictConfig) -> DictConfig:
    """The settings of a run, without Hydra's own."""
    return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])


def _refuse_flag(message: str) -> NoReturn:
    raise ConfigurationError(f"{message} (see dpbench train --help).")


def explain(error: Exception, line: CommandLine) -> str:
    """One line on what Hydra could not compose, with the nearest name that exists.

    Args:
        error: The error of Hydra, OmegaConf or YAML.
        line: The command line.
    """
    if isinstance(error, MissingConfigException) and error.options is not None:
        return _unknown_choice(error, line)
    if isinstance(error.__cause__, ConfigAttributeError | ConfigKeyError):
        return _unknown_key(error.__cause__)
    texts = [str(error)]
    if error.__cause__ is not None and str(error.__cause__) not in texts[0]:
        texts.append(str(error.__cause__))
    lines = [text.strip() for text in "\n".join(texts).splitlines()]
    ornaments = ("object_type=", "reference_type=", "See https://")
    message = " ".join(text for text in lines if text and not text.startswith(ornaments))
    if isinstance(error, OverrideParseException):
        return (
            f"invalid override {shown(error.override)}: {message}. Write KEY=VALUE or GROUP=NAME; quote special "
            "characters, such as \"KEY='A=B'\"."
        )
    return message


def _unknown_choice(error: MissingConfigException, line: CommandLine) -> str:
    """One line on an unknown name, with those that Hydra knows."""
    path = str(error.missing_cfg_file)
    for beginning, (extra, setting, plugin) in _EXTRAS.items():
        if path.startswith(beginning) and find_spec(plugin) is None:
            word = next((word for word in line.overrides if word.startswith(setting)), setting)  # submitit_local, too
            return f"{word} is not installed: {installing(extra)}."
    group, _, choice = path.rpartition("/")
    names = error.options or ()
    hint = did_you_mean(choice, names, f"{group}=")
    return f"there is no {group}={choice}.{hint} Known: {', '.join(names) or 'none'}."


def _unknown_key(error: ConfigAttributeError | ConfigKeyError) -> str:
    """One line on an unknown key, with those of its group."""
    key = str(error.full_key)
    group, _, option = key.rpartition(".")
    node: Any = error.parent_node
    names = [str(name) for name in node if name not in ("_target_", "_partial_", "hydra")]
    hint = did_you_mean(option, names, f"{group}." if group else "")
    for name in names:
        if isinstance(node[name], DictConfig) and key in node[name]:  # a key without its group
            hint = f" Did you mean {name}.{key}?"
    if group == "trainer" and not hint:
        hint = f" Another argument of Lightning's Trainer is added by a plus: +{key}=..."
    return f"there is no key {key}.{hint} Known: {', '.join(names) or 'none, it has no options'}."
