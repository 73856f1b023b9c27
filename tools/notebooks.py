"""Executes the tutorials in `docs/tutorials/` and keeps what they print and draw.

`python -m tools.notebooks` executes all of them, each in an empty folder, and writes them back (`make notebooks`);
names behind it take some: `python -m tools.notebooks private_classifier`. A notebook that fails, or that prints what a
reader should not see, stays as it was.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from dpbench.files import replacing

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "tutorials"
LARGEST = 400_000
"""Bytes of a notebook with its pictures."""
_SECONDS = 600  # of a cell; all cells together take under a minute on one core
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}
_OF_THE_SHELL = ("DPBENCH_DATA", "MPLBACKEND", "PYTHONWARNINGS", "IPYTHONDIR")  # what a reader has not set
_LINK, _CODE, _FORMULA = r"\]\([^)]*\)", r"`[^`]*`", r"\$[^$]*\$"
_FIGURE = re.compile(r"[\d.,]*\d\s?%|\d[\d,]*\.\d+")
_TERMINAL = re.compile(r"\x1b|\r|\d+%\|")  # colors and bars


def tutorials() -> list[Path]:
    """All notebooks."""
    return sorted(FOLDER.glob("*.ipynb"))


def read(path: Path) -> NotebookNode:
    """A notebook as it lies in a file."""
    notebook: NotebookNode = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    return notebook


def executed(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """The same cells with the outputs that they have in a folder, on one thread.

    Args:
        notebook: Its outputs do not matter.
        folder: Where it runs; relative paths in it lead there.

    Raises:
        CellExecutionError: A cell failed.
    """
    clean: NotebookNode = nbformat.from_dict({**notebook, "metadata": _METADATA})  # type: ignore[no-untyped-call]
    for cell in clean.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    # The kernel gets its own copy of the environment.
    environment = {name: value for name, value in os.environ.items() if name not in _OF_THE_SHELL}
    commands = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PATH": commands}
    with tempfile.TemporaryDirectory() as profile:
        environment |= {"IPYTHONDIR": profile}
        where = {"metadata": {"path": str(folder)}}
        quietly = ["--log-level=ERROR"]  # it would warn of its own port on this machine
        client = NotebookClient(clean, timeout=_SECONDS, record_timing=False, resources=where, extra_arguments=quietly)
        client.execute(env=environment)
    clean.metadata = nbformat.from_dict(_METADATA)  # type: ignore[no-untyped-call]
    for cell in clean.cells:
        if cell.cell_type == "code":
            cell.outputs = _whole_streams(cell.outputs)
    return clean


def _whole_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Outputs in which text that arrived in pieces, as it happens to, is one again; a command's lines end in CR LF."""
    whole: list[NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream":
            output.text = output.text.replace("\r\n", "\n")
        if whole and output.output_type == "stream" == whole[-1].output_type and output.name == whole[-1].name:
            whole[-1].text += output.text
        else:
            whole.append(output)
    return whole


def problems(notebook: NotebookNode) -> list[str]:
    """What a reader of a notebook should not see, or could not rely on; none if it may be committed."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    found = list(_figures(notebook))
    if dict(notebook.metadata) != _METADATA:
        found.append("the metadata are of another tool: run make notebooks")
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        found.append("the cells were not executed from the first to the last: run make notebooks")
    for number, cell in enumerate(code, start=1):
        found += [f"cell {number}: {what}" for what in _wrong_outputs(cell)]
        found += ["execution times are kept"] if cell.metadata else []
    if not any(output.get("data", {}).get("image/png") for cell in code for output in cell.outputs):
        found.append("it draws nothing")
    text = nbformat.writes(notebook)  # type: ignore[no-untyped-call]
    if len(text.encode()) > LARGEST:
        found.append(f"it has {len(text.encode()):,} bytes, more than {LARGEST:,}: draw at fewer dots per inch")
    places = (str(ROOT), sys.prefix, str(Path.home()), tempfile.gettempdir() + "/", socket.gethostname())
    found += [f"it names {place}, of the machine that executed it" for place in places if _names(place, text)]
    return found


def _names(place: str, text: str) -> bool:
    return len(place) > 3 and re.search(rf"(?<![\w/.-]){re.escape(place)}(?![\w])", text) is not None


def _figures(notebook: NotebookNode) -> Iterator[str]:
    """Results in the prose, which would go stale: they belong in what a cell prints, or asserts."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            prose = re.sub("|".join((_LINK, _CODE, _FORMULA)), "", cell.source)
            for line in prose.splitlines():
                if figure := _FIGURE.search(line):
                    yield f"the prose says {figure.group()!r}: let a cell print it ({line.strip()[:60]}...)"


def _wrong_outputs(cell: NotebookNode) -> Iterator[str]:
    for output in cell.outputs:
        if output.output_type == "error":
            yield f"it failed: {output.ename}: {output.evalue}"
        if output.output_type == "stream" and output.name == "stderr":
            yield f"it says on stderr: {output.text.strip()[:300]}"
        text = str(output.get("text", "")) + str(output.get("data", {}).get("text/plain", ""))
        if debris := _TERMINAL.search(text):
            yield f"it prints what belongs on a terminal: {text[max(debris.start() - 40, 0) : debris.end() + 40]!r}"
        if "Warning" in text:
            yield f"it warns: {text[:300]}"


def main(names: list[str]) -> int:
    """Execute notebooks and write those that may be committed; 1 if one may not."""
    paths = [path for path in tutorials() if not names or path.stem in names]
    if unknown := set(names) - {path.stem for path in paths}:
        print(f"no tutorial is called {', '.join(sorted(unknown))}", file=sys.stderr)
        return 1
    return max((_execute(path) for path in paths), default=0)


def _execute(path: Path) -> int:
    begun = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as folder:
            notebook = executed(read(path), Path(folder))
    except CellExecutionError as error:
        print(f"{path.name} failed:\n{error}", file=sys.stderr)
        return 1
    if found := problems(notebook):
        print(f"{path.name} may not be committed:", *found, sep="\n  ", file=sys.stderr)
        return 1
    with replacing(path) as new:
        new.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")  # type: ignore[no-untyped-call]
    size = path.stat().st_size
    print(f"{path.name}: {time.monotonic() - begun:.0f} s, {size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
