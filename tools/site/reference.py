"""A page made from the code before Sphinx looks for sources: every key of conf/.

Of a key, the type is the annotation that `dpbench train` checks values against, the default that of the file, and the
meaning what the class says of the option in its docstring, or the file in a comment. A key without a meaning fails the
build.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from hydra.utils import get_class
from omegaconf import OmegaConf
from sphinx.application import Sphinx
from sphinx.util import logging

from dpbench.capabilities.users.local_training import LocalTraining
from dpbench.capabilities.users.module import UserDataModule
from dpbench.capabilities.users.sources import user_source
from dpbench.data.images import ImageDataModule
from dpbench.data.inserted import InsertedTexts
from dpbench.harness.reports.markdown import markdown_rows
from dpbench.harness.run.config import TARGETS, Configuration, Wandb
from dpbench.harness.run.search_path import conf_dir
from dpbench.options import described, options_of
from dpbench.strategies import PrivateStrategy

_LOG = logging.getLogger(__name__)
_PAGE = "docs/reference/generated/settings.md"
_Owner = Callable[..., Any]


def register(app: Sphinx) -> None:
    """Write the page."""
    app.connect("builder-inited", _write_page)


def _write_page(app: Sphinx) -> None:
    path = Path(app.srcdir) / _PAGE
    path.parent.mkdir(parents=True, exist_ok=True)
    text = settings_page()
    # A page that is written again is read again, and so are all that show its title.
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


# ------------------------------------------------------------------------------------- settings

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
_ANNOTATIONS = get_type_hints(Configuration, include_extras=True)
_DATACLASSES: dict[str, Any] = {group: hint for group, hint in _ANNOTATIONS.items() if is_dataclass(hint)}
_DATACLASSES["logger"] = Wandb
_BASES: dict[str, _Owner] = {
    "strategy": PrivateStrategy,
    "images": ImageDataModule,
    "users": UserDataModule,
    "inserted": InsertedTexts,
    "local": LocalTraining,
}
_SHARED = {
    "strategy": {"strategy": "Every private strategy"},
    "data": {"images": "Every data set of images", "users": "Every data set by users"},
}
_INTRODUCTION = """\
What `dpbench train GROUP=NAME KEY=VALUE` takes; `dpbench train --cfg job` prints what a command composes. Types are
those that values are checked against before anything starts, and defaults those of the files in `conf/`. A group whose
classes come from PyTorch or Lightning takes their other options too, with a `+` in front:
`+optimizer.weight_decay=0.01`."""
_LINE = re.compile(r"^(?P<indent> *)(?P<key>[\w@/]+):(?P<value>[^#]*?)(?: # (?P<comment>.*))?$")


@dataclass(frozen=True)
class Setting:
    """One key of a file.

    Attributes:
        key: As on the command line.
        file: Where it is set: the name of a choice, or "run" for config.yaml. With the key an address in the page.
        type: For people; empty where nothing says it.
        default: As in the file.
        meaning: One line.
    """

    key: str
    file: str
    type: str
    default: str
    meaning: str


def settings_page() -> str:
    """The top of the configuration, then each group with what its files have."""
    parts = ["# Every key of the configuration", _INTRODUCTION, "## Of every run", _table(_top())]
    for group in _GROUPS:
        parts.append(f"## {group}")
        for file, title in _SHARED.get(group, {}).items():
            parts += [f"### {title}", _table(_settings(conf_dir() / "base" / f"{file}.yaml", group))]
        for path in sorted((conf_dir() / group).glob("*.yaml")):
            settings = list(_settings(path, group))
            parts += [f"### {group}={path.stem}", _introduction(path)]
            parts.append(_table(settings) if settings else "")
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(settings: Iterable[Setting]) -> str:
    rows = [["key", "type", "default", "meaning"]]
    for setting in settings:
        if not setting.meaning:
            _LOG.warning("the key %s has no meaning: say it in a comment of its file", setting.key, type="dpbench")
        anchor = f'<span id="{setting.file}.{setting.key}"></span>'
        row = [f"{anchor}`{setting.key}`", setting.type, f"`{setting.default}`", setting.meaning]
        rows.append([cell.replace("|", "\\|").replace("\n", " ") for cell in row])
    return markdown_rows(rows, text=range(4))


def _top() -> Iterator[Setting]:
    for key, value, comment in _lines(conf_dir() / "config.yaml"):
        group, _, name = key.partition(".")
        if group in ("defaults", "hydra"):
            continue
        hint = _ANNOTATIONS[group]
        if name:
            hint = get_type_hints(_DATACLASSES[group], include_extras=True)[name]
        yield Setting(key, "run", described(hint), value, comment or _meanings().get(key, ""))


def _settings(path: Path, group: str) -> Iterator[Setting]:
    """Keys that a file sets, with what its class and its comments say of them."""
    is_global = "@package _global_" in path.read_text(encoding="utf-8")
    for key, value, comment in _lines(path):
        if key.startswith("defaults"):
            continue
        full_key = key if is_global else f"{group}.{key}"
        owner, name = _owner(path, group, key)
        if name in ("_target_", "_partial_"):
            yield Setting(full_key, path.stem, "", value, comment or _meanings()[name])
            continue
        documented = _documented_arguments(owner).get(name, "") if owner else ""
        meaning = documented or _meanings().get(full_key) or _meanings().get(name, "")
        meaning = max(meaning, comment, key=len)  # the file may say more of it than the class
        meaning = re.sub(r"\bNone\b", "null", meaning)
        yield Setting(full_key, path.stem, _type(owner, name, group), value, meaning)


@cache
def _meanings() -> dict[str, str]:
    """What options of other packages mean."""
    text = (Path(__file__).parent / "meanings.yaml").read_text(encoding="utf-8")
    meanings: dict[str, str] = yaml.safe_load(text)
    return meanings


def _owner(path: Path, group: str, key: str) -> tuple[_Owner | None, str]:
    """What takes the option of a key, and its name there."""
    above, _, name = key.rpartition(".")
    section: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    if group == "data" and above == "options":
        return user_source(section["name"]).declaration, name
    for part in filter(None, above.split(".")):
        section = section[part]
    if target := section.get("_target_"):
        return get_class(target), name
    place = above.rpartition(".")[2] if above else path.stem
    if place not in _BASES and group == "data":
        place = "users" if "/base/users" in path.read_text(encoding="utf-8") else "images"
    return _BASES.get(place) or _DATACLASSES.get(place if above else group), name


def _type(owner: _Owner | None, name: str, group: str) -> str:
    if owner is None:
        return ""
    target = TARGETS.get(group)
    if target is not None and target.narrower and name in target.narrower:
        return described(target.narrower[name])
    if not isinstance(owner, type) or owner in _DATACLASSES.values():
        hint = get_type_hints(owner, include_extras=True).get(name, Any)
    else:
        options = options_of(owner)
        hint = options[name].annotation if name in options else Any
    return "" if hint is Any else described(hint)


def _lines(path: Path) -> Iterator[tuple[str, str, str]]:
    """Dotted key, value and comment of each key that holds a value, in the file's order."""
    sections: list[tuple[int, str]] = []
    comment_above = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip().startswith("#"):
            comment_above = f"{comment_above} {line.strip(' #')}".strip()
            continue
        match = _LINE.match(line)
        if match:
            indent = len(match["indent"])
            sections = [section for section in sections if section[0] < indent]
            value = match["value"].strip()
            if value:
                key = ".".join([*(name for _, name in sections), match["key"]])
                # The comment above the first key of a file is about the file.
                inherited = comment_above if sections or indent else ""
                yield key, value, match["comment"] or inherited
            else:
                sections.append((indent, match["key"]))
        comment_above = ""


def _introduction(path: Path) -> str:
    """The comment at the top of a file."""
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line:
            comment.append(line.strip("# "))
    return " ".join(comment)


# ------------------------------------------------------------------------------------- docstrings

_SECTION = re.compile(r"^(?:Args|Attributes):\n((?:(?: {4}.*)?\n)+)", re.M)
_ENTRY = re.compile(r"^ {4}(\w+)(?: \([^)]*\))?: ((?:.+\n?)(?:^ {8}.*\n?)*)", re.M)


@cache
def _documented_arguments(thing: _Owner) -> dict[str, str]:
    """Name → what the docstring of a function, or of a class and its bases, says of an argument, in one line."""
    meanings: dict[str, str] = {}
    for documented in thing.__mro__ if isinstance(thing, type) else (thing,):
        docstring = inspect.cleandoc(documented.__doc__ or "") + "\n"
        for section in _SECTION.findall(docstring):
            for name, text in _ENTRY.findall(section):
                meanings.setdefault(name, " ".join(text.split()))
    return meanings
