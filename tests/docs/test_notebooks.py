"""The tutorials run as they stand there, and say nothing that a reader should not see."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("nbclient", reason='needs pip install "dpbench-lightning[docs]"')

from nbformat import NotebookNode

from tools.notebooks import FOLDER, executed, problems, read, tutorials


def test_what_is_committed_may_be_read() -> None:
    assert {path.stem: problems(read(path)) for path in tutorials()} == {path.stem: [] for path in tutorials()}


@pytest.mark.long  # each takes a minute or two
@pytest.mark.parametrize("path", tutorials(), ids=lambda path: path.stem)
def test_tutorial_runs(path: Path, tmp_path: Path) -> None:
    """From an empty folder; an error of a cell, also of what it asserts, ends it."""
    written = read(path)
    anew = executed(copy.deepcopy(written), tmp_path)
    assert problems(anew) == []
    assert [len(cell.get("outputs", [])) for cell in anew.cells] == [
        len(cell.get("outputs", [])) for cell in written.cells
    ]


def _in_prose(text: str) -> Callable[[NotebookNode], None]:
    def spoil(notebook: NotebookNode) -> None:
        next(cell for cell in notebook.cells if cell.cell_type == "markdown").source += text

    return spoil


def _in_output(**changes: str) -> Callable[[NotebookNode], None]:
    def spoil(notebook: NotebookNode) -> None:
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        next(output for output in outputs if output.output_type == "stream").update(changes)

    return spoil


def _not_executed(notebook: NotebookNode) -> None:
    next(cell for cell in notebook.cells if cell.cell_type == "code").execution_count = 7


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_in_prose("\nIt recognizes 93.4 % of them."), "the prose says '93.4 %'"),
        (_in_prose("\nAn epsilon of 2.71 is enough."), "the prose says '2.71'"),
        (_in_output(name="stderr"), "it says on stderr"),
        (_in_output(text="UserWarning: beware"), "it warns"),
        (_in_output(text=" 12%|███  | 3/25"), "belongs on a terminal"),
        (_in_output(text=f"written to {FOLDER}/x"), "of the machine that executed it"),
        (_not_executed, "were not executed"),
    ],
)
def test_what_a_reader_should_not_see_is_found(spoil: Callable[[NotebookNode], None], why: str) -> None:
    notebook = read(tutorials()[0])
    spoil(notebook)
    (found,) = problems(notebook)
    assert why in found
