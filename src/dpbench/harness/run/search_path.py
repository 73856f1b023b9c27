"""Folders of configuration files: dpbench's own, and those that installed packages name (docs/plugins.md)."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from dpbench.errors import ConfigurationError, DataError, brief
from dpbench.harness.runs.command import key_of

ENTRY_POINT_GROUP = "dpbench.conf"
_DISTRIBUTION = "dpbench-lightning"  # not "dpbench", which is another project on the package registry
_LONGEST_SETTINGS = 80  # letters in the name of a folder
_NO_CHOICES = ("table", "base")  # definitions of tables, and what files of several choices share


def conf_dir() -> Path:
    """Find the configuration files: inside the installed package, or at the top of the checkout."""
    package = Path(__file__).parents[2]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parents[1] / "conf"


def code_folder(config_dir: Path) -> Path:
    """Find the folder from which classes beside a configuration of one's own are imported.

    It is the folder that holds `config_dir`; where that is a package itself, the one that holds the package, as pytest
    finds it.

    Args:
        config_dir: The folder that --config-dir names.

    Raises:
        ConfigurationError: It is no folder.
    """
    if not config_dir.is_dir():
        raise ConfigurationError(f"--config-dir {config_dir} is no folder.")
    folder = Path(os.path.abspath(config_dir)).parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


@contextmanager
def imports_from(folder: Path | None) -> Iterator[None]:
    """Let Python look for modules in one more folder.

    It comes last: a file of a user's takes the place of no installed package, in none of the processes of a run.

    Args:
        folder: The result of `code_folder`; None changes nothing.
    """
    if folder is None or str(folder) in sys.path:
        yield
        return
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def installing(extra: str) -> str:
    """Command that installs an extra, or a plug-in of this repository."""
    if extra == "ray":  # a package of its own, which is on no registry
        return "pip install ./plugins/dpbench-ray (in a checkout of dpbench)"
    return f'pip install "{_DISTRIBUTION}[{extra}]"'


def groups_of(*folders: Path) -> dict[str, list[str]]:
    """List the names in each configuration group of some folders together."""
    groups: dict[str, set[str]] = {}
    for folder in filter(Path.is_dir, folders):
        for group in sorted(path for path in folder.iterdir() if path.is_dir() and path.name not in _NO_CHOICES):
            names = {path.relative_to(group).with_suffix("").as_posix() for path in group.rglob("*.yaml")}
            groups.setdefault(group.name, set()).update(names)
    return {group: sorted(names) for group, names in groups.items() if names}


@cache
def plugin_dirs() -> tuple[Path, ...]:
    """Configuration folders of the installed packages that have an entry point in the group "dpbench.conf".

    Raises:
        ConfigurationError: One of them names no folder.
    """
    points = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: (point.name, point.value))
    return tuple(map(_folder_of, points))


def _folder_of(point: EntryPoint) -> Path:
    why = "it is no folder of an installed package"
    places = None
    try:
        spec = find_spec(point.value)
        places = spec and spec.submodule_search_locations
    except Exception as error:  # whatever the import of the package may raise
        why = brief(error)
    if not places:
        raise ConfigurationError(
            f"the plug-in {point.name} names {point.value} as its configuration ({ENTRY_POINT_GROUP}): {why}. Mend or "
            "uninstall it."
        )
    return Path(places[0])


class PluginSearchPath(SearchPathPlugin):
    """Hydra finds the choices of installed plug-ins behind those of dpbench."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the folders of installed packages to Hydra's search path."""
        for folder in plugin_dirs():
            search_path.append("dpbench-plugin", f"file://{folder}")


def _unless(value: Any, default: Any) -> Any:
    """The default of an option that another one replaces: none where that one has a value."""
    return default if value is None else None


def _swept_settings(*, _root_: DictConfig) -> str:
    """Settings of a job in which the sweep's jobs differ, for the name of its folder: "-lr_0.1-seed_3".

    It has letters, digits and ._+- only: nothing that a file system, a shell or Hydra's grammar minds. A choice that is
    a part of the run's name already, such as the model, is not said twice; the end of a long text is cut off.
    """
    words: dict[str, str] = {}
    overrides = OmegaConf.to_container(_root_.hydra.overrides.task, resolve=False)
    assert isinstance(overrides, list)
    for word in map(str, overrides):
        words[key_of(word)] = word.partition("=")[2]
    swept = OmegaConf.select(_root_, "hydra.callbacks.folders.swept", default=None) or []
    settings = {key: words[key] for key in map(str, swept) if key in words and not key.startswith("run.")}
    ends = Counter(key.rpartition(".")[2] for key in settings)
    text = ""
    for key, word in settings.items():
        value = re.sub(r"[^A-Za-z0-9.+-]+", "_", _rounded(word)).strip("_")
        if key in _root_.hydra.runtime.choices and value in str(_root_.run.name).split("-"):
            continue
        end = key.rpartition(".")[2]
        name = re.sub(r"[^A-Za-z0-9.]+", "_", end if ends[end] == 1 else key)
        text += f"-{name}_{value}"
    return text[:_LONGEST_SETTINGS].rstrip(".-_")


def _rounded(value: str) -> str:
    """A number with six digits, as an optimizing sweeper does not give it."""
    try:
        return value if len(value) <= len("0.123456") else f"{float(value):.6g}"
    except ValueError:
        return value


def _prior_sha256(path: Any, root: str | None) -> str | None:
    """Of the file of `data.prior`; None without one, or where it is missing or no path: the data module refuses it."""
    if not isinstance(path, str):
        return None
    from dpbench.data.sources import data_root, find_file

    try:
        return hashlib.sha256(find_file(data_root(root), path).read_bytes()).hexdigest()
    except (DataError, OSError):
        return None


# Here, because whatever composes a configuration, or resolves one that another process has composed, imports this.
OmegaConf.register_new_resolver("unless", _unless, replace=True)
OmegaConf.register_new_resolver("prior_sha256", _prior_sha256, replace=True)
OmegaConf.register_new_resolver("swept_settings", _swept_settings, replace=True)


def use_plugins() -> None:
    """Let whatever this process composes find the configuration of installed plug-ins.

    Raises:
        ConfigurationError: See `plugin_dirs`.
    """
    plugin_dirs()
    Plugins.instance().register(PluginSearchPath)
