"""Links that pages do not write as Sphinx expects them: to Markdown files that are no pages."""

from __future__ import annotations

import posixpath
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

_ROOT = Path(__file__).parents[2]


def register(app: Sphinx) -> None:
    """Look at the links of every page."""
    app.connect("doctree-read", _resolve_other_markdown, priority=400)  # before Sphinx collects the files to download


def _resolve_other_markdown(app: Sphinx, document: nodes.document) -> None:
    """Let a link to a README lead to the index of its folder, and one to another file that is no page download it."""
    for node in list(document.findall(addnodes.pending_xref)):
        target = node["reftarget"]
        if node.get("reftype") != "myst" or node["refdomain"] != "doc" or target in app.env.found_docs:
            continue
        index = posixpath.join(posixpath.dirname(target), "index")
        if index in app.env.found_docs:
            node["reftarget"] = index
        elif (_ROOT / f"{target}.md").is_file():
            download = addnodes.download_reference("", "", *node.children, reftarget=f"/{target}.md", refdoc="")
            node.replace_self(download)
