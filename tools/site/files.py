"""Links from pages to files of the repository that are no pages: each such file becomes a page that shows it."""

from __future__ import annotations

import html
import os
from collections.abc import Iterator
from pathlib import Path
from posixpath import normpath
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.osutil import relative_uri

from tools.site.written import ROOT

_PREFIX = "files/"
_TEXT = {".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".cpp", ".csv", ".json", ".cff", ".sh", ".tex", ""}
_INDEX = """\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>dpbench</title>
<meta http-equiv="refresh" content="0; url=docs/index.html"></head>
<body><a href="docs/index.html">dpbench</a></body></html>
"""


def register(app: Sphinx) -> None:
    """Show linked files, and let the folder itself open at the home page."""
    app.add_post_transform(_Files)
    app.connect("html-collect-pages", _pages)
    app.connect("env-purge-doc", lambda app, env, name: _linked(env).pop(name, None))
    app.connect("env-merge-info", lambda app, env, names, other: _linked(env).update(_linked(other)))
    app.connect("build-finished", _front_door)


def _linked(env: BuildEnvironment) -> dict[str, set[str]]:
    """Files by the page that links to them."""
    if not hasattr(env, "dpbench_files"):
        env.dpbench_files = {}  # type: ignore[attr-defined]
    linked: dict[str, set[str]] = env.dpbench_files  # type: ignore[attr-defined]
    return linked


def _reference(app: Sphinx, page: str, path: str, children: list[nodes.Node]) -> nodes.reference:
    """A link to the page that shows a file or folder."""
    _linked(app.env).setdefault(page, set()).add(path)
    target = app.builder.get_target_uri(page)
    node = nodes.reference("", "", refuri=relative_uri(target, f"{_PREFIX}{path}.html"), internal=True)
    node += children
    return node


class _Files(SphinxPostTransform):
    """Links to what is no page, before MyST looks for their targets."""

    default_priority = 5
    builders = ("html", "dummy")

    def run(self, **options: Any) -> None:
        folder = os.path.dirname(self.env.docname)
        for node in list(self.document.findall(addnodes.download_reference)):
            self._show(
                node, node["reftarget"] if node["reftarget"].startswith("/") else f"{folder}/{node['reftarget']}"
            )
        for node in list(self.document.findall(addnodes.pending_xref)):
            if node.get("reftype") != "myst":
                continue
            if node["refdomain"] == "doc" and node["reftarget"] not in self.env.found_docs:
                self._show(node, f"{node['reftarget']}.md")
            elif node["refdomain"] is None and (ROOT / folder / node["reftarget"]).is_dir():
                self._show(node, f"{folder}/{node['reftarget']}")

    def _show(self, node: nodes.Element, target: str) -> None:
        path = normpath(target.lstrip("/"))
        for index in ("README", "index"):
            if f"{path}/{index}" in self.env.found_docs:
                uri = self.app.builder.get_relative_uri(self.env.docname, f"{path}/{index}")
                node.replace_self(nodes.reference("", "", *node.children, refuri=uri, internal=True))
                return
        if not path.startswith("..") and (ROOT / path).exists() and Path(path).suffix in _TEXT:
            node.replace_self(_reference(self.app, self.env.docname, path, node.children))


def _pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for each linked file, and for each text file in a linked folder."""
    pages: set[str] = set()
    waiting = sorted(set().union(*_linked(app.env).values()))
    while waiting:
        path = waiting.pop()
        if path in pages:
            continue
        pages.add(path)
        body = _listing(path) if (ROOT / path).is_dir() else _source(ROOT / path)
        if (ROOT / path).is_dir():
            waiting += [f"{path}/{entry.name}" for entry in _entries(path)]
        yield f"{_PREFIX}{path}", {"title": path, "body": f"<h1>{html.escape(path)}</h1>{body}"}, "page.html"


def _entries(path: str) -> list[Path]:
    inside = sorted((ROOT / path).iterdir())
    return [e for e in inside if not e.name.startswith((".", "__pycache__")) and (e.is_dir() or e.suffix in _TEXT)]


def _listing(path: str) -> str:
    name = path.rpartition("/")[2]
    rows = (f'<li><a href="{name}/{entry.name}.html">{html.escape(entry.name)}</a></li>' for entry in _entries(path))
    return f"<ul>{''.join(rows)}</ul>"


def _source(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        lexer = get_lexer_for_filename(path.name)
    except ClassNotFound:
        lexer = TextLexer()
    return str(highlight(text, lexer, HtmlFormatter(cssclass="highlight")))


def _front_door(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        (Path(app.outdir) / "index.html").write_text(_INDEX, encoding="utf-8")
