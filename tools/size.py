"""The size of the project and of its tests by room, beside the committed one: what is added is paid for by what goes.

`python -m tools.size` prints it, as `make check` does; `python -m tools.size write` commits to it. A node is a
statement or an expression of the syntax tree, strings left out: lines can be packed, and nodes cannot.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from dpbench.code import room_of
from dpbench.files import write_atomically

ROOT = Path(__file__).parents[1]
COMMITTED = Path(__file__).with_suffix(".tsv")
_PACKAGE = "dpbench-lightning"


def sizes() -> dict[str, int]:
    """Nodes by room, lines of what is no Python, hard dependencies and their installed megabytes."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [Path(name) for name in listing.split("\0") if name]
    counts: Counter[str] = Counter()
    for path in paths:
        if not (ROOT / path).is_file():
            continue
        text = (ROOT / path).read_text(encoding="utf-8") if path.suffix in (".py", ".ipynb", ".txt", ".cpp") else ""
        if "tests" in path.parts:
            if path.suffix == ".py":
                counts[f"tests: {room_of('/'.join(path.parts[1:-1])) or 'top'}"] += _nodes(text)
        elif path.suffix == ".py":
            folder = path.parent.as_posix()
            package = "src/dpbench/"
            room = room_of(folder.removeprefix(package)) if folder.startswith(package) else path.parts[0]
            counts[f"nodes: {room}"] += _nodes(text)
        elif path.suffix == ".ipynb":
            counts["nodes: notebooks"] += _nodes(_code_of(text))
        elif path.suffix == ".cpp" or path.parts[:3] == ("src", "dpbench", "templates"):
            counts["lines: templates and C++"] += len(text.splitlines())
    for kind in ("nodes", "tests"):
        counts[f"{kind}: all"] = sum(count for name, count in counts.items() if name.startswith(f"{kind}: "))
    dependencies = _requirements(_PACKAGE)
    counts["hard dependencies"] = len(dependencies)
    counts["installed MB"] = round(_installed_bytes(dependencies) / 1e6)
    return dict(sorted(counts.items()))


def _nodes(source: str) -> int:
    count = 0
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        count += isinstance(node, ast.stmt | ast.expr) and not is_text
    return count


def _code_of(notebook: str) -> str:
    """The code of a notebook, without lines that are no Python."""
    cells = [cell for cell in json.loads(notebook)["cells"] if cell["cell_type"] == "code"]
    lines = "\n".join("".join(cell["source"]) for cell in cells).splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith(("!", "%")))


def _requirements(package: str) -> list[str]:
    """Names of what a package requires without extras; none of one that is not installed."""
    try:
        requirements = distribution(package).requires or []
    except PackageNotFoundError:
        return []
    return [re.split(r"[^\w.-]", text, maxsplit=1)[0].lower() for text in requirements if "extra ==" not in text]


def _installed_bytes(packages: list[str]) -> int:
    """Bytes of packages and of all that they require."""
    pending = list(packages)
    seen: set[str] = set()
    total = 0
    while pending:
        package = pending.pop()
        if package in seen:
            continue
        seen.add(package)
        pending += _requirements(package)
        try:
            files = distribution(package).files or []
        except PackageNotFoundError:  # of another platform
            continue
        total += sum(file.size or 0 for file in files)
    return total


def main(words: list[str]) -> None:
    """Print the sizes, or write them."""
    now = sizes()
    if words == ["write"]:
        write_atomically(COMMITTED, "".join(f"{name}\t{value}\n" for name, value in now.items()))
        return
    lines = COMMITTED.read_text(encoding="utf-8").splitlines() if COMMITTED.exists() else []
    committed = {name: int(value) for name, _, value in (line.partition("\t") for line in lines)}
    for name in sorted({*now, *committed}):
        change = now.get(name, 0) - committed.get(name, 0)
        print(f"{name:32}{now.get(name, 0):9,}{change:+9,}" if change else f"{name:32}{now.get(name, 0):9,}")
    if any(now[total] > committed.get(total, 0) for total in ("nodes: all", "tests: all")):
        print("There are more nodes than committed: say in the message what paid for them, and write the new sizes.")


if __name__ == "__main__":
    main(sys.argv[1:])
