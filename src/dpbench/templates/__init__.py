"""Templates of pages, cards and terminal texts, and one way to fill them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


def render(name: str | Path, /, **facts: Any) -> str:
    """Fill a template.

    In an .html template all values are text: names of runs and metrics cannot become markup. In other
    templates everything stands as it is.

    Args:
        name: Name of a file in this folder, or the path of another one.
        **facts: Values of the template's names; a missing one is an error, and not an empty string.
    """
    if isinstance(name, Path):
        return _environment().from_string(name.read_text(encoding="utf-8")).render(**facts)
    return _environment().get_template(name).render(**facts)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape  # late: `dpbench --help` is quick

    return Environment(
        loader=PackageLoader("dpbench", "templates"),
        extensions=["jinja2.ext.do"],
        autoescape=select_autoescape(["html"], default_for_string=False),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
