"""What Sphinx is told beside docs/conf.py: pages made from the code, links, papers, formulas (`make site`)."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx

from tools.site import api, commands, files, mathml, notebooks, papers, results, settings

GENERATED = "docs/reference/generated"


def setup(app: Sphinx) -> dict[str, Any]:
    """Register every part."""
    for part in (api, commands, files, mathml, notebooks, papers, results, settings):
        part.register(app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
