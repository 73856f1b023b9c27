"""The reference of the configuration: every key of conf/ with its type, its default and what it means.

Types are the annotations that `dpbench train` checks values against, defaults those of the files, and the meaning is
what the class says of the option in its docstring, or the file in a comment. A key without a meaning fails the build.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from hydra.utils import get_class
from omegaconf import OmegaConf
from sphinx.application import Sphinx
from sphinx.util import logging

import dpbench.data.user_sources  # noqa: F401 (names the data sets by users)
from dpbench.data.images import ImageDataModule
from dpbench.data.inserted import Inserted
from dpbench.data.user_data import USER_SOURCES
from dpbench.data.user_module import UserDataModule
from dpbench.options import described, options_of
from dpbench.records.local_training import LocalTraining
from dpbench.reports.markdown import markdown_rows
from dpbench.run.config import TARGETS, Configuration, Wandb
from dpbench.run.search_path import conf_dir
from dpbench.strategies import PrivateStrategy
from tools.site.docstrings import arguments
from tools.site.foreign import MEANINGS
from tools.site.written import write

_LOG = logging.getLogger(__name__)
_LINE = re.compile(r"^(?P<indent> *)(?P<key>[\w@/]+):(?P<value>[^#]*?)(?: # (?P<comment>.*))?$")
_GROUPS = (
    "data",
    "model",
    "module",
    "strategy",
    "records",
    "audit",
    "optimizer",
    "schedule",
    "trainer",
    "diagnostics",
    "logger",
    "launcher",
    "callbacks",
)
_KEYS = get_type_hints(Configuration, include_extras=True)
_PLAIN: dict[str, Any] = {group: hint for group, hint in _KEYS.items() if is_dataclass(hint)} | {"logger": Wandb}
_BASES: dict[str, Callable[..., Any]] = {
    "strategy": PrivateStrategy,
    "images": ImageDataModule,
    "users": UserDataModule,
    "inserted": Inserted,
    "local": LocalTraining,
}
_SHARED = {
    "strategy": {"strategy": "Every private strategy"},
    "data": {"images": "Every data set of images", "users": "Every data set by users"},
}


@dataclass(frozen=True)
class Setting:
    """One key of a file.

    Attributes:
        key: As on the command line.
        type: For people; empty where nothing says it.
        default: As in the file.
        meaning: One line.
    """

    key: str
    type: str
    default: str
    meaning: str


def register(app: Sphinx) -> None:
    """Write the page before Sphinx looks for sources."""
    app.connect("builder-inited", lambda app: write("settings.md", page()))


def page() -> str:
    """The page: the top of the configuration, then each group with what its files have."""
    parts = ["# Every key of the configuration", _INTRODUCTION, "## Of every run", _table(_top())]
    for group in _GROUPS:
        parts += [f"## {group}", *_of_group(group)]
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = """\
What `dpbench train GROUP=NAME KEY=VALUE` takes; `dpbench train --cfg job` prints what a command composes. Types are
those that values are checked against before anything starts, and defaults those of the files in `conf/`. A group whose
classes come from PyTorch or Lightning takes their other options too, with a `+` in front:
`+optimizer.weight_decay=0.01`."""


def _of_group(group: str) -> Iterator[str]:
    for file, title in _SHARED.get(group, {}).items():
        yield f"### {title}"
        yield _table(_settings(conf_dir() / "base" / f"{file}.yaml", group, file))
    for path in sorted((conf_dir() / group).glob("*.yaml")):
        yield f"### {group}={path.stem}"
        if intro := _introduction(path):
            yield intro
        if settings := list(_settings(path, group, path.stem)):
            yield _table(settings)


def _table(settings: Iterable[Setting]) -> str:
    rows = [["key", "type", "default", "meaning"]]
    for one in settings:
        if not one.meaning:
            _LOG.warning("the key %s has no meaning: say it in a comment of its file", one.key, type="dpbench")
        cells = (one.key, one.type, one.default, one.meaning)
        rows.append([cell.replace("|", "\\|").replace("\n", " ") for cell in cells])
    return markdown_rows(rows, text=4)


def _top() -> Iterator[Setting]:
    for key, value, comment in _lines(conf_dir() / "config.yaml"):
        group, _, name = key.partition(".")
        if group in ("defaults", "hydra"):
            continue
        hint = _KEYS[group]
        if name:
            hint = get_type_hints(_PLAIN[group], include_extras=True)[name]
        yield Setting(_anchored(key, "run"), described(hint), _code(value), comment or MEANINGS.get(key, ""))


def _settings(path: Path, group: str, choice: str) -> Iterator[Setting]:
    """Keys that a file sets, with what its class and its comments say of them."""
    for key, value, comment in _lines(path):
        whole = key if "@package _global_" in path.read_text(encoding="utf-8") else f"{group}.{key}"
        if key.startswith("defaults"):
            continue
        owner, name = _owner(path, group, key)
        if name in ("_target_", "_partial_"):
            yield Setting(_anchored(whole, choice), "", _code(value), comment or MEANINGS[name])
            continue
        said = arguments(owner).get(name, "") if owner else ""
        said = said or MEANINGS.get(whole) or MEANINGS.get(name, "")
        meaning = re.sub(r"\bNone\b", "null", max(said, comment, key=len))
        yield Setting(_anchored(whole, choice), _type(owner, name, group), _code(value), meaning)


def _owner(path: Path, group: str, key: str) -> tuple[Callable[..., Any] | None, str]:
    """What takes the option of a key, and its name there."""
    above, _, name = key.rpartition(".")
    inner: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    if group == "data" and above == "options":
        return USER_SOURCES[inner["name"]].declaration, name
    for part in filter(None, above.split(".")):
        inner = inner[part]
    if target := inner.get("_target_"):
        return get_class(target), name
    place = above.rpartition(".")[2] if above else path.stem
    if place not in _BASES and group == "data":
        place = "users" if "/base/users" in path.read_text(encoding="utf-8") else "images"
    return _BASES.get(place) or _PLAIN.get(place if above else group), name


def _type(owner: Callable[..., Any] | None, name: str, group: str) -> str:
    if owner is None:
        return ""
    target = TARGETS.get(group)
    if target is not None and target.narrower and name in target.narrower:
        return described(target.narrower[name])
    if not isinstance(owner, type):
        return _described(get_type_hints(owner, include_extras=True).get(name, Any))
    if owner in _PLAIN.values():
        return _described(get_type_hints(owner, include_extras=True).get(name, Any))
    declared = options_of(owner)
    return _described(declared[name].annotation) if name in declared else ""


def _described(hint: Any) -> str:
    return "" if hint is Any else described(hint)


def _lines(path: Path) -> Iterator[tuple[str, str, str]]:
    """Dotted key, value and comment of each key that holds a value, in the file's order."""
    above: list[tuple[int, str]] = []
    before = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip().startswith("#"):
            before = f"{before} {line.strip(' #')}".strip()
            continue
        if found := _LINE.match(line):
            indent = len(found["indent"])
            above = [pair for pair in above if pair[0] < indent]
            key = ".".join([*(name for _, name in above), found["key"]])
            if value := found["value"].strip():
                yield key, value, found["comment"] or (before if above or indent else "")
            else:
                above.append((indent, found["key"]))
        before = ""


def _introduction(path: Path) -> str:
    """The comment at the top of a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    said = [line.strip("# ") for line in lines if line.startswith("#") and "@package" not in line]
    first = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return " ".join(line.strip("# ") for line in lines[:first] if "@package" not in line) if said else ""


def _anchored(key: str, choice: str) -> str:
    return f'<span id="{choice}.{key}"></span>`{key}`'


@cache
def _code(value: str) -> str:
    return f"`{value}`" if value != '""' else '`""`'
