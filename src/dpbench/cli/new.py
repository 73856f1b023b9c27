"""`dpbench new`: a package of one's own to begin with, which trains and passes its test as it stands."""

from __future__ import annotations

import argparse
import re
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path

from dpbench.cli.arguments import Answer, Commands, add_command
from dpbench.errors import ConfigurationError
from dpbench.files import typed

_NEW = """\
The package has data, a module, a strategy, an experiment, a table and a test; replace them one by one. docs/plugins.md
describes each.

examples:
  dpbench new my_paper
  dpbench train --config-dir my_paper/my_paper/conf experiment=my_paper/demo
"""

_FILES = {
    "README.md": "README.md",
    "pyproject.toml": "pyproject.toml",
    "gitignore": ".gitignore",
    "init.py": "{name}/__init__.py",
    "data.py": "{name}/data.py",
    "module.py": "{name}/module.py",
    "strategy.py": "{name}/strategy.py",
    "data.yaml": "{name}/conf/data/{name}.yaml",
    "module.yaml": "{name}/conf/module/{name}.yaml",
    "strategy.yaml": "{name}/conf/strategy/{name}.yaml",
    "experiment.yaml": "{name}/conf/experiment/{name}/demo.yaml",
    "table.yaml": "{name}/conf/table/{name}/noise.yaml",
    "test.py": "tests/test_{name}.py",
}
"""Template in templates/package → file of the new package."""
_COMMON = {
    *("app", "apps", "benchmarks", "build", "conf", "config", "configs", "core", "data", "datasets", "dist", "docs"),
    *("examples", "experiments", "experiment", "lib", "main", "model", "models", "module", "modules", "multirun"),
    *("notebooks", "outputs", "plugins", "project", "results", "runs", "scripts", "src", "strategies", "strategy"),
    *("table", "tables", "tests", "tools", "train", "util", "utils"),
}
"""Names of folders and modules that many projects have: Python imports the one that it meets first."""


def add_parsers(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(commands, "new", "Create a small package to start from.", _new, epilog=_NEW)
    parser.add_argument("name", metavar="NAME", help="name of the package and of its folder")


def _new(options: argparse.Namespace) -> Answer:
    folder = write_package(options.name)
    conf = folder / folder.name / "conf"
    lines = [
        f"  written to      {typed(folder)}",
        f"  train           dpbench train --config-dir {typed(conf)} experiment={folder.name}/demo",
        f"  test            python -m pytest {typed(folder)}",
        f"  install         pip install -e {typed(folder)}",
    ]
    return Answer("\n".join(lines))


def write_package(name: str) -> Path:
    """Write the files of a package into a new folder of its name.

    Args:
        name: A word that Python can import.

    Returns:
        The folder.

    Raises:
        ConfigurationError: The name is none for a package, is taken, or the folder exists.
    """
    from dpbench.harness.run.search_path import conf_dir, groups_of, plugin_dirs
    from dpbench.templates import render

    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or iskeyword(name):
        raise ConfigurationError(
            f"{name!r} cannot name a package: take small letters, digits and single underscores, such as my_paper."
        )
    if name in _COMMON:
        raise ConfigurationError(
            f"many projects have a folder or module {name}, and Python would import whichever it finds first: choose "
            f"another name, such as my_{name}."
        )
    folder = Path(name)
    if folder.exists():
        raise ConfigurationError(f"{folder} exists already: choose another name, or another working directory.")
    if find_spec(name) is not None:
        raise ConfigurationError(f"a Python package {name} is installed already: choose another name.")
    groups = groups_of(conf_dir(), *plugin_dirs())
    for group in ("data", "module", "strategy"):
        if name in groups[group]:
            raise ConfigurationError(f"{group}={name} exists already: choose another name.")
    title = "".join(word.capitalize() for word in name.split("_"))
    for template, place in _FILES.items():
        file = folder / place.format(name=name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(render(f"package/{template}.jinja", name=name, title=title), encoding="utf-8")
    return folder
