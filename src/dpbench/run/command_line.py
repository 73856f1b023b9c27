"""The command line of `dpbench train`: Hydra's flags and overrides, and one line for what is wrong with them.

No import of PyTorch here: a question (`--cfg job`) needs none.
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

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
_NOW_A_HOWTO = {"data/leaf_json": "docs/howto/federated_files.md", "data/tff_hdf5": "docs/howto/federated_files.md"}
"""Choices of earlier releases, and the page that says how to do without."""
_SWEEPERS = {"ax": "hydra-ax-sweeper", "nevergrad": "hydra-nevergrad-sweeper"}
"""Hydra's other sweepers, with their packages."""


@dataclass(frozen=True)
class CommandLine:
    """The words of a command line.

    Attributes:
        overrides: Such as `optimizer.lr=0.1`, in their order.
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
        if flags.cfg is None and flags.resolve:
            raise ConfigurationError("--resolve goes with --cfg job.")
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
        """Whether the words ask for something, such as the configuration, and run nothing."""
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
        key, _, text = word.partition("=")
        if key != key.rstrip():
            raise ConfigurationError(
                f"invalid override {shown(word)}: remove the blanks around =, as in {key.strip()}={text.strip()}."
            ) from error
        raise ConfigurationError(
            f"invalid override {shown(word)} ({brief(error)}): quote special characters, such as \"KEY='A=B'\"."
        ) from error
    except ValueError as error:  # Python's, of a number with thousands of digits
        raise ConfigurationError(f"invalid override {shown(word)}: {brief(error)}.") from error
    value = override.value()
    if isinstance(value, RangeSweep) and not value.step:
        raise ConfigurationError(f"{shown(word)} has a step of 0, and would never end.")
    return override


def explain(error: Exception, line: CommandLine, conf: Path, name: str) -> str:
    """One line on what Hydra could not compose, with the nearest name that exists.

    Args:
        error: Hydra's or OmegaConf's.
        line: The command line.
        conf: Folder of the configuration.
        name: Primary configuration in it.
    """
    if isinstance(error, MissingConfigException) and error.options is not None:
        return _unknown_choice(str(error.missing_cfg_file), error.options, line, conf)
    if isinstance(error.__cause__, ConfigAttributeError | ConfigKeyError):
        missing = str(error.__cause__.full_key)
        keys = [key_of(word) for word in line.overrides if f"{key_of(word)}.".startswith(f"{missing}.")]
        key = max([missing, *keys], key=len)  # OmegaConf ends at the first part that is missing
        return _unknown_key(key, line, conf, name)
    text = str(error)
    where = getattr(error, "full_key", None)
    if isinstance(error, InterpolationKeyError):
        absent = re.search(r"Interpolation key '(.+?)' not found", text)
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
    """Which names there are instead: of Hydra's own groups and of a user's folders too."""
    group = path.rpartition("/")[0]
    for word in line.overrides:  # a name may have slashes of its own
        if path.startswith(f"{key_of(word)}/"):
            group = key_of(word)
    choice = path.removeprefix(f"{group}/")
    for beginning, (extra, setting, plugin) in _EXTRAS.items():
        if path.startswith(beginning) and find_spec(plugin) is None:
            word = next((word for word in line.overrides if word.startswith(setting)), setting)  # submitit_local, too
            return f"{word} is not installed: {installing(extra)}."
    if path in _NOW_A_HOWTO:
        return f"{group}={choice} is read by a few lines of your own now: see {_NOW_A_HOWTO[path]}."
    if group == "hydra/sweeper" and choice in _SWEEPERS:
        return f"{group}={choice} is not installed: pip install {_SWEEPERS[choice]}."
    names = sorted({*options, *_names_in_groups(line, conf).get(group, [])})
    known = f" Known: {', '.join(names)}." if names else ""
    setting = f"{group}=" if group else ""
    return f"there is no {setting or 'configuration '}{choice}.{did_you_mean(choice, names, setting)}{known}"


def _names_in_groups(line: CommandLine, conf: Path) -> dict[str, list[str]]:
    """The names in each group: dpbench's, those of installed packages, and those of the folder that the line adds."""
    added = [] if line.flags.config_dir is None else [Path(line.flags.config_dir)]
    return groups_of(conf, *plugin_dirs(), *added)


def _unknown_key(key: str, line: CommandLine, conf: Path, name: str) -> str:
    """Which keys there are instead, for the groups that the command line chose."""
    groups = _names_in_groups(line, conf)
    choices = []
    for word in line.overrides:
        group, _, choice = word.partition("=")
        if choice in groups.get(group, []):
            choices.append(word)
    with line.loader(conf) as loader:
        cfg = without_hydra(loader.load_configuration(name, choices, RunMode.RUN))
    path, _, leaf = key.rpartition(".")
    node = OmegaConf.select(cfg, path) if path else cfg
    if not isinstance(node, DictConfig):
        known_keys = [f"{group}.{option}" for group, options in _option_groups(cfg).items() for option in options]
        return f"there is no key {key}.{did_you_mean(key, known_keys)} `dpbench train --cfg job` prints all keys."
    names = [str(option) for option in node if option not in ("_target_", "_partial_")]
    if leaf in names:
        return f"{key} cannot be set: another override (such as ~{path.partition('.')[0]}) removes it."
    hint = did_you_mean(leaf, names, f"{path}.") if path else _similar_setting(leaf, names, cfg)
    known = ", ".join(names) or "none, it has no options"
    if path == "trainer" and not hint:
        hint = f" Another argument of Lightning's Trainer is added by a plus: +{key}=..."
    return f"there is no key {key}.{hint} Known: {known}."


def _option_groups(cfg: Mapping[str, object]) -> dict[str, list[str]]:
    """The options of each part of a configuration that has some."""
    groups = {str(group): part for group, part in cfg.items() if isinstance(part, DictConfig)}
    return {group: [str(option) for option in part] for group, part in groups.items()}


def _similar_setting(name: str, names: Sequence[str], cfg: Mapping[str, object]) -> str:
    """What a word without its group may stand for: the setting of that name in a group, or a name that is close."""
    groups = _option_groups(cfg)
    for group, options in groups.items():
        if name in options:
            return f" Did you mean {group}.{name}?"
    hint = did_you_mean(name, names)
    strategy_first = sorted(groups, key=lambda group: group != "strategy")
    for group in strategy_first:
        hint = hint or did_you_mean(name, groups[group], f"{group}.")
    return hint
