"""The command line of `dpbench train`: flags and overrides of Hydra, and one line for each error in them.

No import of PyTorch here: a question (`--cfg job`) needs none.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from dpbench.errors import ConfigurationError, did_you_mean, shown
from dpbench.harness.run.search_path import PluginSearchPath, conf_dir, installing, use_plugins

_LAUNCHERS = {"submitit": "submitit", "dpbench_ray": "ray"}
"""Launchers that are installed by themselves: beginning of their names in Hydra → here."""


def parse(words: Sequence[str]) -> Namespace:
    """Separate flags and overrides, in any order.

    Raises:
        ConfigurationError: There is a flag that is none, or a value is missing.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = _refuse_flag  # type: ignore[method-assign]
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-c", "--cfg", choices=("job", "hydra", "all"))
    parser.add_argument("-p", "--package")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("-cd", "--config-dir", type=Path)
    return parser.parse_intermixed_args(list(words))


@contextmanager
def hydra_for(config_dir: Path | None) -> Iterator[Any]:
    """Set Hydra up for our configuration and a folder of the user's; yields it."""
    use_plugins()
    before = HydraConfig.instance().cfg
    PluginSearchPath.own = config_dir
    try:
        with initialize_config_dir(str(conf_dir().resolve()), job_name="train", version_base="1.3"):
            yield GlobalHydra.instance().hydra
    finally:
        PluginSearchPath.own = None
        HydraConfig.instance().cfg = before


def without_hydra(cfg: DictConfig) -> DictConfig:
    """The settings of a run, without Hydra's own."""
    return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])


def _refuse_flag(message: str) -> NoReturn:
    raise ConfigurationError(f"{message} (see dpbench train --help).")


def explain(error: Exception) -> str:
    """Explain in one line an error of Hydra, OmegaConf or YAML, with the nearest name that exists."""
    if isinstance(error, MissingConfigException) and error.options is not None:
        return _unknown_choice(error)
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


def _unknown_choice(error: MissingConfigException) -> str:
    """One line on an unknown name, with those that Hydra knows."""
    group, _, choice = str(error.missing_cfg_file).rpartition("/")
    for beginning, name in _LAUNCHERS.items():
        if choice.startswith(beginning):
            return f"launcher={name} is not installed: {installing(name)}."
    names = error.options or ()
    hint = did_you_mean(choice, names, f"{group}=")
    known = f"Known: {', '.join(names) or 'none'}."
    return f"there is no {group}={choice}.{hint} {known} For a file of your own add --config-dir FOLDER."


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
    target = str(node.get("_target_", "dpbench."))
    if not hint and not target.startswith("dpbench."):  # files of ours list all options
        hint = f" Another option of {target} is added by a plus: +{key}=..."
    return f"there is no key {key}.{hint} Known: {', '.join(names) or 'none, it has no options'}."
