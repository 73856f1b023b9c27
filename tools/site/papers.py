"""Papers: a text that names one, by key or by authors and year, links to its entry in docs/papers.md."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

from tools.site.written import ROOT

PAGE = "docs/papers"
_ENTRY = re.compile(r"^### (\w+)\n\n\*\*(.+?)\*\*", re.M)
_NO_LINKS = (nodes.reference, nodes.literal, nodes.literal_block, nodes.title, nodes.raw, nodes.math)


def register(app: Sphinx) -> None:
    """Look at the text of every page."""
    app.add_post_transform(_Papers)


@cache
def papers() -> dict[str, str]:
    """How each paper of docs/papers.md is named in a text, by key: such as van der Veen et al. 2018."""
    return dict(_ENTRY.findall((ROOT / f"{PAGE}.md").read_text(encoding="utf-8")))


@cache
def mention() -> re.Pattern[str]:
    """A key, or authors and year as people write them."""
    written = [re.escape(key) for key in papers()]
    for name in papers().values():
        authors, _, year = name.rpartition(" ")
        first = re.escape(re.split(r" et al\.| and | & ", authors)[0])
        written.append(rf"{first}(?: et al\.|(?:, | and | & )[^\W\d][\w ,&-]{{0,40}}?)? \(?{year}\)?")
    return re.compile(rf"\b({'|'.join(written)})(?!\w)")


def paper_of(words: str) -> str:
    """Key of the paper that a mention means."""
    if words in papers():
        return words
    key_of = {name: key for key, name in papers().items()}
    plain = words.replace("(", "").replace(")", "")
    if plain in key_of:
        return key_of[plain]
    year, author = plain[-4:], re.split(r"[ ,]", plain)[0]
    return next(key for name, key in key_of.items() if name.startswith(author) and name.endswith(year))


class _Papers(SphinxPostTransform):
    """Mentions of papers become links."""

    default_priority = 900
    builders = ("html", "dummy")

    def run(self, **options: Any) -> None:
        if self.env.docname == PAGE:
            return
        for text in list(self.document.findall(nodes.Text)):
            if mention().search(text) and not _inside(text, _NO_LINKS):
                parts = mention().split(text)
                new = [self._node(part, number) for number, part in enumerate(parts) if part]
                text.parent.replace(text, new)

    def _node(self, part: str, number: int) -> nodes.Node:
        if number % 2 == 0:
            return nodes.Text(part)
        key = paper_of(part)
        text = papers()[key] if part == key else part
        uri = self.app.builder.get_relative_uri(self.env.docname, PAGE)
        return nodes.reference("", text, refuri=f"{uri}#{nodes.make_id(key)}", internal=True)


def _inside(node: nodes.Node, kinds: tuple[type[nodes.Node], ...]) -> bool:
    parent = node.parent
    while parent is not None:
        if isinstance(parent, kinds):
            return True
        parent = parent.parent
    return False
