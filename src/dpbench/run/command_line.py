"""The command line of `dpbench train`: Hydra's flags and overrides, and one line for what is wrong with them.

No import of PyTorch here: a question (`--cfg job`) needs none.
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from hydra import version
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationKeyError

from dpbench.errors import ConfigurationError, brief
from dpbench.options import did_you_mean, shown
from dpbench.run._hydra_internals import Hydra, create_automatic_config_search_path, get_args_parser
from dpbench.run.search_path import groups_of, installing, plugin_dirs
from dpbench.runs.command import key_of

_QUESTIONS = ("help", "hydra_help", "cfg", "info", "shell_completion")
_COMMANDS = ("run", "multirun", "cfg", "info", "shell_completion")
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
            ConfigurationError: There is a flag that Hydra does not know or that makes no sense here, or a value is
                missing.
        """
        parser = get_args_parser()
        parser.error = _refuse_flag  # type: ignore[method-assign]
        flags = parser.parse_intermixed_args(list(words))
        if flags.experimental_rerun is not None:
            raise ConfigurationError("--experimental-rerun would skip all checks: dpbench resume RUN continues a run.")
        commands = [name for name in _COMMANDS if getattr(flags, name)]
        if len(commands) > 1:
            raise ConfigurationError(f"only one of --{' and --'.join(commands)} can be asked for.")
        options = list(words)
        for override in flags.overrides:
            options.remove(override)
        line = cls(tuple(flags.overrides), flags, (*options, *flags.overrides))
        if not line.is_question:
            line._refuse_without_effect()
        return line

    @property
    def is_question(self) -> bool:
        """True where the words ask for something, such as the configuration, and run nothing."""
        return any(getattr(self.flags, name) for name in _QUESTIONS)

    @property
    def mode(self) -> RunMode:
        """Of one run or of a sweep, as far as the words say so; a file of the configuration may say otherwise."""
        values = [word.partition("=")[2] for word in self.overrides if key_of(word) == "hydra.mode"]
        sweeps = self.flags.multirun or "MULTIRUN" in map(str.upper, values)
        return RunMode.MULTIRUN if sweeps else RunMode.RUN

    @contextmanager
    def loader(self, conf: Path) -> Iterator[ConfigLoader]:
        """Hydra, set up for a folder of configuration and the one that the command line adds."""
        version.setbase("1.3")
        path = create_automatic_config_search_path(None, None, str(conf.resolve()))
        folder = self.flags.config_dir
        if folder is not None:
            path.prepend("command-line", f"file://{os.path.abspath(folder)}", SearchPathQuery(provider="schema"))
        before = HydraConfig.instance().cfg
        try:
            yield Hydra.create_main_hydra2("train", path).config_loader
        finally:
            GlobalHydra.instance().clear()
            HydraConfig.instance().cfg = before

    def _refuse_without_effect(self) -> None:
        if self.flags.config_path is not None:
            raise ConfigurationError(
                "--config-path takes the place of all configuration: add your own with --config-dir."
            )
        if self.flags.package is not None:
            raise ConfigurationError("--package has no effect on a run: remove it.")


def without_hydra(cfg: DictConfig) -> DictConfig:
    """The settings of a run, without Hydra's own."""
    return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])


def _refuse_flag(message: str) -> NoReturn:
    raise ConfigurationError(f"{message} (see dpbench train --help).")


def read_overrides(words: Sequence[str], loader: ConfigLoader) -> list[Override]:
    """Parse overrides one by one, so that a message can name the word.

    Raises:
        ConfigurationError: A word is no override, or a range without end.
    """
    parser = OverridesParser.create(loader)
    return [_read_override(word, parser) for word in words]


def _read_override(word: str, parser: OverridesParser) -> Override:
    if "=" not in word and not word.startswith("~"):
        raise ConfigurationError(
            f"invalid override {word!r}: expected KEY=VALUE or GROUP=NAME (see dpbench train --help)."
        )
    try:
        (override,) = parser.parse_overrides([word])
    except HydraException as error:
        raise ConfigurationError(
            f"invalid override {shown(word)} ({brief(error)}): quote special characters, such as \"KEY='A=B'\", "
            "and leave no blanks around =."
        ) from error
    except ValueError as error:  # Python's, of a number with thousands of digits
        raise ConfigurationError(f"invalid override {shown(word)}: {brief(error)}.") from error
    value = override.value()
    if isinstance(value, RangeSweep) and not value.step:
        raise ConfigurationError(f"{shown(word)} has a step of 0, and would never end.")
    return override


def explain(error: Exception, line: CommandLine, conf: Path) -> str:
    """One line on what Hydra could not compose, with the nearest name that exists.

    Args:
        error: Hydra's or OmegaConf's.
        line: The command line.
        conf: Folder of the configuration.
    """
    if isinstance(error, MissingConfigException) and error.options is not None:
        return _unknown_choice(str(error.missing_cfg_file), error.options, line, conf)
    if isinstance(error.__cause__, ConfigAttributeError | ConfigKeyError):
        return _unknown_key(error.__cause__, line)
    where = getattr(error, "full_key", None)
    if isinstance(error, InterpolationKeyError):
        absent = re.search(r"Interpolation key '(.+?)' not found", str(error))
        if absent is not None:
            return f"{absent[1]} is missing: {where} takes its value from it."
    lines = [line.strip() for line in str(error.__cause__ or error).splitlines()]
    ornaments = ("object_type=", "reference_type=", "full_key:")
    cause = " ".join(line for line in lines if line and not line.startswith(ornaments))
    if where and "nterpolation" in cause:
        cause = f"{where}: {cause}"
    first = brief(error)
    return cause if first in cause else f"{first}: {cause}"


def _unknown_choice(path: str, options: Sequence[str], line: CommandLine, conf: Path) -> str:
    """One line on an unknown name, with those of Hydra's own groups and of the user's folders."""
    group = path.rpartition("/")[0]
    for word in line.overrides:  # a name may have slashes of its own
        if path.startswith(f"{key_of(word)}/"):
            group = key_of(word)
    choice = path.removeprefix(f"{group}/")
    for beginning, (extra, setting, plugin) in _EXTRAS.items():
        if path.startswith(beginning) and find_spec(plugin) is None:
            word = next((word for word in line.overrides if word.startswith(setting)), setting)  # submitit_local, too
            return f"{word} is not installed: {installing(extra)}."
    names = sorted({*options, *_names_in_groups(line, conf).get(group, [])})
    known = f" Known: {', '.join(names)}." if names else ""
    setting = f"{group}=" if group else ""
    return f"there is no {setting or 'configuration '}{choice}.{did_you_mean(choice, names, setting)}{known}"


def _names_in_groups(line: CommandLine, conf: Path) -> dict[str, list[str]]:
    """The names in each group: dpbench's, those of installed packages, and those of the folder that the line adds."""
    added = [] if line.flags.config_dir is None else [Path(line.flags.config_dir)]
    return groups_of(conf, *plugin_dirs(), *added)


def _unknown_key(error: ConfigAttributeError | ConfigKeyError, line: CommandLine) -> str:
    """One line on an unknown key, with those of its group."""
    path, _, leaf = str(error.full_key).rpartition(".")
    # OmegaConf ends at the first part that is missing.
    words = [key_of(word) for word in line.overrides if f"{key_of(word)}.".startswith(f"{error.full_key}.")]
    key = max([str(error.full_key), *words], key=len)
    if f"~{leaf}" in line.overrides and not path:
        return f"{key} cannot be set: another override (~{leaf}) removes it."
    node: Any = error.parent_node
    names = [str(option) for option in node if option not in ("_target_", "_partial_", "hydra")]
    hint = did_you_mean(leaf, names, f"{path}.") if path else _similar_setting(key, names, node)
    if path == "trainer" and not hint:
        hint = f" Another argument of Lightning's Trainer is added by a plus: +{key}=..."
    return f"there is no key {key}.{hint} Known: {', '.join(names) or 'none, it has no options'}."


def _similar_setting(key: str, names: Sequence[str], cfg: DictConfig) -> str:
    """The setting that a key without a group, or with an unknown one, may stand for."""
    groups = {name: list(map(str, cfg[name])) for name in names if isinstance(cfg[name], DictConfig)}
    if "." in key:
        return did_you_mean(key, [f"{group}.{option}" for group, options in groups.items() for option in options])
    for group, options in groups.items():
        if key in options:
            return f" Did you mean {group}.{key}?"
    hint = did_you_mean(key, names)
    strategy_first = sorted(groups, key=lambda group: group != "strategy")
    for group in strategy_first:
        hint = hint or did_you_mean(key, groups[group], f"{group}.")
    return hint
