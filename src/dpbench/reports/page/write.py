"""`dpbench report`: the page as a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from dpbench import __version__
from dpbench.errors import ConfigurationError
from dpbench.files import write_atomically
from dpbench.reports.page.blocks import Page
from dpbench.reports.page.sections import page_of
from dpbench.reports.page.subject import read_subject

_MARK = '<meta name="generator" content="dpbench report'
_HEAD = 4096  # bytes, in which it stands


def write_report(sources: Sequence[Path], out: Path, accountants: Sequence[str], force: bool = False) -> Path:
    """Write the page of runs.

    Args:
        sources: Folders of runs, of sweeps, or of the results of tables.
        out: The file, which appears when it is complete.
        accountants: Whose ε over the steps of a run is drawn.
        force: Replace a file that is no such page.

    Raises:
        ConfigurationError: There is no run, a file of one is damaged, or something else is at `out`.
    """
    _refuse_other(out, force)
    text = render(page_of(read_subject(sources), accountants))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, text.encode("utf-8", "replace").decode("utf-8"))  # half of a surrogate pair is no text
    return out


def _refuse_other(out: Path, force: bool) -> None:
    if force or not out.exists():
        return
    with out.open("rb") as file:
        ours = _MARK.encode() in file.read(_HEAD)
    if not ours:
        raise ConfigurationError(f"{out} is no report of ours: choose another name, or replace it with --force.")


def render(page: Page) -> str:
    """HTML without anything that lies elsewhere; whatever a run is called, it is text."""
    environment = Environment(
        loader=PackageLoader("dpbench.reports.page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template("report.html").render(page=page, version=__version__)
