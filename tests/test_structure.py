"""The packages, what each may import, and that nothing public is without a user."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "dpbench"
FILES = sorted(PACKAGE.rglob("*.py"))


WORD = re.compile(r"[A-Za-z_]\w*")
READERS = (
    "plugins",
    "conf",
    "docs",
    "benchmarks",
    "tools",
)  # whoever may use a public name, beside the package and its users
TEXTS = {".yaml", ".md", ".py", ".ipynb", ".toml"}


def test_every_public_name_has_a_user() -> None:
    """Named elsewhere in the package, in the configuration or in a page, or registered by a decorator."""
    sources = {path: path.read_text(encoding="utf-8") for path in FILES}
    named = Counter(word for text in sources.values() for word in WORD.findall(text))
    pages = [path for folder in READERS for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS]
    elsewhere = {word for path in [*pages, ROOT / "README.md", ROOT / "pyproject.toml"] for word in words_of(path)}
    unused = [
        f"{path.relative_to(PACKAGE)}: {node.name}"
        for path, text in sources.items()
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        if named[node.name] == 1 and node.name not in elsewhere and not node.decorator_list
    ]
    assert not unused


def words_of(path: Path) -> set[str]:
    return set(WORD.findall(path.read_text(encoding="utf-8")))


def test_a_private_module_is_imported_by_its_own_package_only() -> None:
    """A module whose name begins with an underscore is nobody else's: packages meet at the others."""
    for path in FILES:
        for owner in re.findall(
            r"^\s*from (dpbench[\w.]*)\._\w+[\w.]* import", path.read_text(encoding="utf-8"), re.MULTILINE
        ):
            assert PACKAGE.parent.joinpath(*owner.split(".")) in path.parents, (path, owner)
