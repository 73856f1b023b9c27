"""The reference of the package: a page for each room, in the order of the table of CONTRIBUTING.md.

Public is what has no underscore: each module of a room, and the classes, functions, methods and properties that are
defined in it. Each needs a docstring, of its own or of what it overrides; the build fails at one without.
"""

from __future__ import annotations

import importlib
import inspect
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util import logging

from tools.package_map import layers
from tools.site.written import ROOT, keep_only, write

_LOG = logging.getLogger(__name__)
_DESCRIBED = ("module", "class", "exception", "function", "method", "property")


def register(app: Sphinx) -> None:
    """Write the pages before Sphinx looks for sources, and look at each docstring."""
    app.connect("builder-inited", _write_pages)
    app.connect("doctree-read", _unlink_foreign)
    look_at_docstrings(app)


def look_at_docstrings(app: Sphinx) -> None:
    """Take what is public and ours, refuse what has no docstring, and let the others be read as they are meant."""
    app.connect("autodoc-skip-member", _skip_foreign)
    app.connect("autodoc-process-docstring", _refuse_undocumented)
    app.connect("autodoc-process-docstring", _plain_text, priority=900)  # after the sections became fields


def rooms() -> list[str]:
    """Full names of the rooms, from the top; instead of `privacy` what it consists of."""
    inside = [room for layer in layers("dpbench.privacy") for room in layer]
    every_room = [room for layer in layers() for room in layer]
    at = every_room.index("dpbench.privacy")
    return [*every_room[:at], *inside, *every_room[at + 1 :]]


def modules_of(room: str) -> list[str]:
    """Names of the public modules of a room, itself first."""
    path = ROOT / "src" / Path(*room.split("."))
    if not path.is_dir():
        return [room]
    modules = [".".join(file.relative_to(ROOT / "src").with_suffix("").parts) for file in sorted(path.rglob("*.py"))]
    named = [name.removesuffix(".__init__") for name in modules]
    return sorted(name for name in named if not any(part.startswith("_") for part in name.split(".")))


def _write_pages(app: Sphinx) -> None:
    pages = {"dpbench.md": _package()} | {f"{room}.md": _page(room) for room in rooms()}
    for name, text in pages.items():
        write(f"api/{name}", text)
    keep_only("api/*.md", {*pages, "index.md"})
    listed = "\n".join(name.removesuffix(".md") for name in pages)
    toctree = f"```{{toctree}}\n:maxdepth: 1\n\n{listed}\n```\n"
    write("api/index.md", f"# The package, room by room\n\n{_INTRODUCTION}\n\n{toctree}")


_INTRODUCTION = """\
A page for each room (subpackage) of `src/dpbench/`, in the order of the table in
[CONTRIBUTING.md](../../../../CONTRIBUTING.md): the command line at the top, and at the bottom what everything else
rests on. What `import dpbench` offers comes first.

Public is what has no underscore in its name. Every public module, class, function, method and property has a docstring
(a method that overrides another one inherits its docstring); the site is not built otherwise."""


def _package() -> str:
    exported = [name for name in importlib.import_module("dpbench").__all__ if not name.startswith("_")]
    lines = ["# `import dpbench`", "", "What most programs need, by short names:", ""]
    lines += [f"* {_where(name)}" for name in exported]
    return "\n".join([*lines, ""])


def _where(name: str) -> str:
    thing = getattr(importlib.import_module("dpbench"), name)
    summary = (inspect.getdoc(thing) or "").partition("\n")[0]
    return f"{{py:obj}}`dpbench.{name} <{thing.__module__}.{thing.__qualname__}>`: {summary}"


def _page(room: str) -> str:
    parts = [f"# {room.removeprefix('dpbench.')}", ""]
    for name in modules_of(room):
        if name != room:
            parts += [f"## {name.removeprefix(room + '.')}", ""]
        parts += [
            "```{eval-rst}",
            f".. automodule:: {name}",
            "   :members:",
            "   :undoc-members:",
            "   :ignore-module-all:",
            "```",
            "",
        ]
    return "\n".join(parts)


def _skip_foreign(app: Sphinx, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Leave out what comes from elsewhere, and constants and fields: the docstrings of their classes tell of them."""
    if isinstance(thing, property | cached_property | classmethod | staticmethod):
        return None
    if what == "class" and inspect.isfunction(thing) and f".{name}" not in f".{thing.__qualname__}":
        return True  # the default of a field that holds a function
    described = inspect.isroutine(thing) or inspect.isclass(thing)
    ours = str(getattr(thing, "__module__", "")).partition(".")[0] == app.config.project
    return None if described and ours else True


_LITERAL = re.compile(r"(``.+?``|:\w+:`.+?`|`[^`]+`)")
_EMPHASIS = re.compile(r"(\*{1,2}\w(?:[^*]*\w)?\*{1,2}(?!\w))")


def _plain_text(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Our docstrings are plain text with `code`; Sphinx would take a star or a bar in them for markup."""
    math = False
    for number, line in enumerate(lines):
        math = line.lstrip().startswith(".. math::") or (math and (not line.strip() or line.startswith("  ")))
        if not math and not line.lstrip().startswith(">>>"):
            lines[number] = "".join(map(_marked, _LITERAL.split(line)))


def _marked(part: str) -> str:
    if part.startswith("`") and not part.startswith("``"):
        return f"`{part}`"
    if _LITERAL.fullmatch(part):
        return part
    words = (w if _EMPHASIS.fullmatch(w) else re.sub(r"(?<!\\)\*(?!\s)", r"\\*", w) for w in _EMPHASIS.split(part))
    return "".join(words).replace("|", "\\|")


def _unlink_foreign(app: Sphinx, document: nodes.document) -> None:
    """Types of other packages are described elsewhere; looking for each of them here takes half of the build's time."""
    for node in list(document.findall(addnodes.pending_xref)):
        if node.get("refdomain") == "py" and not node["reftarget"].startswith("dpbench."):
            node.replace_self(node.children)


def _refuse_undocumented(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    if what in _DESCRIBED and not any(map(str.strip, lines)):
        _LOG.warning("the public name %s has no docstring", name, type="dpbench", subtype="undocumented")
