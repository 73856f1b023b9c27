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
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from dpbench.files import replacing

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "tutorials"
_SECONDS = 600
"""Limit of a cell; all cells together take under a minute on one core."""
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}
_SHELL_VARIABLES = ("DPBENCH_DATA", "MPLBACKEND", "PYTHONWARNINGS", "IPYTHONDIR")
"""What the shell of a developer may set, and that of a reader does not."""
_LINK_CODE_OR_FORMULA = re.compile(r"\]\([^)]*\)|`[^`]*`|\$[^$]*\$")
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
            cell.outputs = []
            cell.execution_count = None
    with tempfile.TemporaryDirectory() as profile:
        client = NotebookClient(
            clean,
            timeout=_SECONDS,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(folder)}},
            extra_arguments=["--log-level=ERROR"],  # the kernel would warn of its own port on this machine
        )
        client.execute(env=_environment(profile))
    clean.metadata = nbformat.from_dict(_METADATA)  # type: ignore[no-untyped-call]
    for cell in clean.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                output.text = output.text.replace("\r\n", "\n")  # a command's lines
    return clean


def _environment(profile: str) -> dict[str, str]:
    """What the kernel sees: one thread, no GPU, this environment's commands, and nothing of the developer's shell."""
    environment = {name: value for name, value in os.environ.items() if name not in _SHELL_VARIABLES}
    commands = Path(sys.executable).parent
    environment["PATH"] = os.pathsep.join([str(commands), environment.get("PATH", "")])
    environment["OMP_NUM_THREADS"] = "1"
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["IPYTHONDIR"] = profile
    return environment


def problems(notebook: NotebookNode) -> list[str]:
    """What a reader of a notebook should not see, or could not rely on; none if it may be committed."""
    complaints = list(_figures_in_prose(notebook))
    if dict(notebook.metadata) != _METADATA:
        complaints.append("the metadata are of another tool: run make notebooks")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        complaints.append("the cells were not executed from the first to the last: run make notebooks")
    for number, cell in enumerate(code, start=1):
        for complaint in _wrong_outputs(cell):
            complaints.append(f"cell {number}: {complaint}")
    text = nbformat.writes(notebook)  # type: ignore[no-untyped-call]
    for place in (str(ROOT), sys.prefix, str(Path.home()), tempfile.gettempdir() + "/", socket.gethostname()):
        # A home such as / is in every path, and no name of anything.
        if len(place) > 3 and re.search(rf"(?<![\w/.-]){re.escape(place)}(?![\w])", text):
            complaints.append(f"it names {place}, of the machine that executed it")
    return complaints


def _figures_in_prose(notebook: NotebookNode) -> Iterator[str]:
    """Results in the prose, which would go stale: they belong in what a cell prints, or asserts."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for line in _LINK_CODE_OR_FORMULA.sub("", cell.source).splitlines():
                figure = _FIGURE.search(line)
                if figure:
                    yield f"the prose says {figure.group()!r}: let a cell print it ({line.strip()[:60]}...)"


def _wrong_outputs(cell: NotebookNode) -> Iterator[str]:
    for output in cell.outputs:
        if output.output_type == "error":
            yield f"it failed: {output.ename}: {output.evalue}"
        if output.output_type == "stream" and output.name == "stderr":
            yield f"it says on stderr: {output.text.strip()[:300]}"
        text = str(output.get("text", "")) + str(output.get("data", {}).get("text/plain", ""))
        debris = _TERMINAL.search(text)
        if debris:
            around = text[max(debris.start() - 40, 0) : debris.end() + 40]
            yield f"it prints what belongs on a terminal: {around!r}"
        if "Warning" in text:
            yield f"it warns: {text[:300]}"


def main(names: list[str]) -> int:
    """Execute notebooks and write those that may be committed; 1 if one may not."""
    paths = [path for path in tutorials() if not names or path.stem in names]
    unknown = set(names) - {path.stem for path in paths}
    if unknown:
        print(f"no tutorial is called {', '.join(sorted(unknown))}", file=sys.stderr)
        return 1
    status = 0
    for path in paths:
        status = max(status, _execute(path))
    return status


def _execute(path: Path) -> int:
    try:
        with tempfile.TemporaryDirectory() as folder:
            notebook = executed(read(path), Path(folder))
    except CellExecutionError as error:
        print(f"{path.name} failed:\n{error}", file=sys.stderr)
        return 1
    complaints = problems(notebook)
    if complaints:
        print(f"{path.name} may not be committed:", *complaints, sep="\n  ", file=sys.stderr)
        return 1
    with replacing(path) as new:
        new.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")  # type: ignore[no-untyped-call]
    print(path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
