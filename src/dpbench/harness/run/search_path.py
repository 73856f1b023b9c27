"""Folders of configuration files: dpbench's own, and those that installed packages name (docs/plugins.md)."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from dpbench.errors import ConfigurationError, DataError, brief
from dpbench.harness.runs.command import key_of

ENTRY_POINT_GROUP = "dpbench.conf"
_DISTRIBUTION = "dpbench-lightning"  # not "dpbench", which is another project on the package registry
_LONGEST_SETTINGS = 80  # letters in the name of a folder
_NO_CHOICES = ("table", "base", "hydra")  # definitions of tables, what files of several choices share, and Hydra's own


def conf_dir() -> Path:
    """Find the configuration files: inside the installed package, or at the top of the checkout."""
    package = Path(__file__).parents[2]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parents[1] / "conf"


def code_folder(config_dir: Path | None) -> Path | None:
    """Find the folder from which a user's own classes are imported, next to their configuration.

    It is the folder that holds `config_dir`; where that is a package itself, the one that holds the package, as pytest
    finds it.

    Args:
        config_dir: The folder that --config-dir names; None without it.

    Raises:
        ConfigurationError: It is no folder.
    """
    if config_dir is None:
        return None
    if not config_dir.is_dir():
        raise ConfigurationError(f"--config-dir {config_dir} is not a folder.")
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
    for folder in folders:
        for path in folder.glob("*/**/*.yaml"):
            group, *name = path.relative_to(folder).with_suffix("").parts
            if group not in _NO_CHOICES:
                groups.setdefault(group, set()).add("/".join(name))
    return {group: sorted(groups[group]) for group in sorted(groups)}


@cache
def plugin_dirs() -> tuple[Path, ...]:
    """Configuration folders of the installed packages that have an entry point in the group "dpbench.conf".

    Raises:
        ConfigurationError: One of them names no folder.
    """
    points = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: (point.name, point.value))
    return tuple(map(_folder_of, points))


def _folder_of(point: EntryPoint) -> Path:
    try:
        return Path(import_module(point.value).__path__[0])
    except Exception as error:  # whatever the import of the package may raise
        raise ConfigurationError(
            f"the plug-in {point.name} names {point.value} as its configuration ({ENTRY_POINT_GROUP}), which is not "
            f"a folder of an installed package: {brief(error)}. Fix or uninstall it."
        ) from error


class PluginSearchPath(SearchPathPlugin):
    """Hydra finds the choices of installed plug-ins behind those of dpbench, and last those of --config-dir.

    Attributes:
        own: The folder that --config-dir names.
    """

    own: ClassVar[Path | None] = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the folders of installed packages to Hydra's search path."""
        for folder in plugin_dirs():
            search_path.append("dpbench-plugin", f"file://{folder}")
        if self.own is not None:
            search_path.append("command-line", f"file://{os.path.abspath(self.own)}")


def _unless(value: Any, default: Any) -> Any:
    """The default of an option that another one replaces: none where that one has a value."""
    return default if value is None else None


def _swept_settings(*, _root_: DictConfig) -> str:
    """Settings of a job in which the sweep's jobs differ, for the name of its folder: "-lr_0.1-seed_3".

    It has letters, digits and ._+- only: nothing that a file system, a shell or Hydra's grammar minds. The end of a
    long text is cut off.
    """
    words = OmegaConf.to_container(_root_.hydra.overrides.task, resolve=False)
    swept = OmegaConf.select(_root_, "hydra.callbacks.folders.swept", default=None) or []
    assert isinstance(words, list)
    text = ""
    for word in map(str, words):
        key = key_of(word)
        if key in swept and not key.startswith("run."):
            value = re.sub(r"[^A-Za-z0-9.+-]+", "_", word.partition("=")[2]).strip("_")
            text += f"-{key.rpartition('.')[2]}_{value}"
    return text[:_LONGEST_SETTINGS].rstrip(".-_")


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
    """Add the configuration of installed plug-ins to all that this process composes.

    Raises:
        ConfigurationError: See `plugin_dirs`.
    """
    plugin_dirs()
    Plugins.instance().register(PluginSearchPath)
    sweepers = ConfigStore.instance().repo["hydra"]["sweeper"]
    for name in ("optuna.yaml", "sampler"):  # of hydra-optuna-sweeper, if it is there; ours are in conf/hydra
        sweepers.pop(name, None)
