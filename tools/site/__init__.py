"""What Sphinx is told beside docs/conf.py: the package's docstrings, formulas, links and settings."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

from tools.site import api, links, reference


def setup(app: Sphinx) -> dict[str, Any]:
    """Register every part."""
    for part in (api, links, reference):
        part.register(app)
    # Browsers draw MathML by themselves: MathJax, which Sphinx brings, would come from another host.
    app.add_html_math_renderer("mathml", (_inline_formula, None), (_displayed_formula, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _inline_formula(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _displayed_formula(translator: HTML5Translator, node: nodes.math_block) -> None:
    translator.body.append(convert(node.astext(), display="block"))
    raise nodes.SkipNode
