"""The reference of the package, whose pages `sphinx.ext.apidoc` writes: what of a module is shown, and what fails.

Public is what has no underscore. Each public class, function, method and property needs a docstring, of its own or of
what it overrides; the build fails at one without.
"""

from __future__ import annotations

import importlib
import inspect
import re
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util import logging

_LOG = logging.getLogger(__name__)
_CODE_OR_SIGN = re.compile(r"(?P<code>``.+?``|`[^`]+`)|(?P<sign>\*(?!\s)|\|)")
_DESCRIBED = ("module", "class", "exception", "function", "method", "property")


def register(app: Sphinx) -> None:
    """Look at each member and each docstring."""
    app.connect("autodoc-skip-member", _skip_foreign)
    app.connect("autodoc-process-docstring", _refuse_undocumented)
    app.connect("autodoc-process-docstring", _escape_markup, priority=400)  # before napoleon, which writes markup
    app.connect("autodoc-process-docstring", _list_exports)
    app.connect("doctree-read", _unlink_foreign)


def _skip_foreign(app: Sphinx, what: str, name: str, member: Any, skip: bool, options: Any) -> bool | None:
    """Leave out what comes from elsewhere, and constants and fields, which the docstrings of their classes describe."""
    if isinstance(member, property | cached_property | classmethod | staticmethod):
        return None
    is_default_of_field = what == "class" and inspect.isfunction(member) and name not in member.__qualname__.split(".")
    is_described = inspect.isroutine(member) or inspect.isclass(member)
    package = str(getattr(member, "__module__", "")).partition(".")[0]
    if is_described and not is_default_of_field and package == app.config.project:
        return None
    return True


def _refuse_undocumented(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    if what in _DESCRIBED and not any(line.strip() for line in lines):
        _LOG.warning("the public name %s has no docstring", name, type="dpbench", subtype="undocumented")


def _escape_markup(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text with `code`, in which (R, *shape) and |x| are no markup."""
    is_formula = False
    for number, line in enumerate(lines):
        if line.lstrip().startswith(".. math::"):
            is_formula = True
        elif line and not line.startswith("  "):
            is_formula = False
        if not is_formula and not line.lstrip().startswith(">>>"):
            lines[number] = _CODE_OR_SIGN.sub(lambda match: match["code"] or f"\\{match['sign']}", line)


def _list_exports(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """List what `import dpbench` offers by short names; autodoc shows a name only where it is defined."""
    exports = getattr(thing, "__all__", None)
    if name != app.config.project or exports is None:
        return
    lines += ["", ".. autosummary::", "   :nosignatures:", ""]
    for export in sorted({*exports, *entry_points(group=name).names}):
        member = getattr(importlib.import_module(name), export)
        if not export.startswith("_") and not inspect.ismodule(member):  # a module has a page of its own
            full_name = f"{member.__module__}.{member.__qualname__}"
            lines.append(f"   ~{full_name.removeprefix(name + '.')}")
    lines.append("")


def _unlink_foreign(app: Sphinx, document: nodes.document) -> None:
    """Types of other packages are described elsewhere; looking for each of them here takes half of the build's time."""
    for node in list(document.findall(addnodes.pending_xref)):
        if node.get("refdomain") == "py" and not node["reftarget"].startswith("dpbench."):
            node.replace_self(node.children)
