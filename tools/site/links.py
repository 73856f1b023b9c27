"""Links that pages do not write as Sphinx expects them: to Markdown files that are no pages, and to papers.

A text that names a paper, by key or by authors and year, links to its entry in docs/papers.md.
"""

from __future__ import annotations

import posixpath
import re
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

_ROOT = Path(__file__).parents[2]
_PAGE = "docs/papers"
_ENTRY = re.compile(r"^### (\w+)\n\n\*\*(.+?)\*\*", re.M)
_WITHOUT_LINKS = (nodes.reference, nodes.literal, nodes.literal_block, nodes.title, nodes.raw, nodes.math)


def register(app: Sphinx) -> None:
    """Look at the links and at the text of every page."""
    app.connect("doctree-read", _resolve_other_markdown, priority=400)  # before Sphinx collects the files to download
    app.add_post_transform(_Papers)


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


@cache
def papers() -> dict[str, str]:
    """How each paper of docs/papers.md is named in a text, by key: such as van der Veen et al. 2018."""
    return dict(_ENTRY.findall((_ROOT / f"{_PAGE}.md").read_text(encoding="utf-8")))


@cache
def mention() -> re.Pattern[str]:
    """A key, or authors and year as people write them."""
    alternatives = [re.escape(key) for key in papers()]
    for name in papers().values():
        authors, _, year = name.rpartition(" ")
        first = re.escape(re.split(r" et al\.| and | & ", authors)[0])
        further = r"(?: et al\.|(?:, | and | & )[^\W\d][\w ,&-]{0,40}?)?"
        alternatives.append(rf"{first}{further} \(?{year}\)?")
    return re.compile(rf"\b({'|'.join(alternatives)})(?!\w)")


def paper_of(words: str) -> str:
    """Key of the paper that a mention means."""
    if words in papers():
        return words
    plain = words.replace("(", "").replace(")", "")
    key_of = {name: key for key, name in papers().items()}
    if plain in key_of:
        return key_of[plain]
    year = plain[-4:]
    author = re.split(r"[ ,]", plain)[0]
    return next(key for name, key in key_of.items() if name.startswith(author) and name.endswith(year))


class _Papers(SphinxPostTransform):
    """Mentions of papers become links."""

    default_priority = 900
    builders = ("html", "dummy")

    def run(self, **options: Any) -> None:
        if self.env.docname == _PAGE:
            return
        for text in list(self.document.findall(nodes.Text)):
            parts = mention().split(text)  # a text, a mention, a text, ...
            if len(parts) == 1 or _is_without_links(text):
                continue
            replacement: list[nodes.Node] = [nodes.Text(parts[0])]
            for words, following in zip(parts[1::2], parts[2::2], strict=True):
                replacement += [self._reference(words), nodes.Text(following)]
            text.parent.replace(text, replacement)

    def _reference(self, words: str) -> nodes.reference:
        key = paper_of(words)
        text = papers()[key] if words == key else words
        page = self.app.builder.get_relative_uri(self.env.docname, _PAGE)
        return nodes.reference("", text, refuri=f"{page}#{nodes.make_id(key)}", internal=True)


def _is_without_links(text: nodes.Text) -> bool:
    parent = text.parent
    while parent is not None and not isinstance(parent, _WITHOUT_LINKS):
        parent = parent.parent
    return parent is not None
