"""Provenance of the code that a run executes: hashes of sources, and versions."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dpbench.errors import ConfigurationError

_PACKAGES = ("torch", "torchvision", "pytorch-lightning", "torchmetrics", "dp-accounting", "numpy")
_SOURCES = (".py", ".so", ".pyd", ".cpp", ".cu")
_KNOWN = {  # by code_hash() and versions()
    "builtins",
    "dpbench",
    "numpy",
    "pytorch_lightning",
    "torch",
    "torchmetrics",
    "torchvision",
}
COMPUTING = (
    "__init__.py", "canonical.py", "code.py", "errors.py", "files.py", "locks.py", "options.py", "renamed.py",
    "callback", "data", "guards", "models", "modules", "privacy", "records", "run", "runs", "session", "strategies",
)  # fmt: skip
"""What computes inside a run, and imports nothing of the rest: whatever may change a result is hashed."""
READING = ("__main__.py", "auditing", "cli", "export", "reports", "reproduce", "synthesis", "templates")
"""What starts runs and reads them: an edit of it changes no result."""


@cache
def code_hash(package: Path = Path(__file__).parent) -> str:
    """Sixteen hexadecimal digits for the source of what computes in a run: provenance, and no part of any key."""
    digest = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.cpp")]):
        name = path.relative_to(package)
        if name.parts[0] in COMPUTING:
            digest.update(str(name).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def foreign_code(config: Mapping[str, Any]) -> dict[str, str]:
    """Package → sixteen hexadecimal digits for its source, of each that the configuration names and dpbench is not.

    Modules of dpbench that only read runs are among them where they take part in one, such as a callback that draws.
    Noise is keyed by them: an edited model under the same seed must not get the noise of the model before.

    Raises:
        ConfigurationError: The source of one is not found.
    """
    packages = {_holder(target) for target in _targets(config)} - _KNOWN
    return {package: _source_hash(package) for package in sorted(packages)}


def _holder(target: str) -> str:
    """The package of a class, or the module of one of our own classes that `code_hash` leaves out."""
    package, _, path = target.partition(".")
    room = path.partition(".")[0]
    if package == "dpbench" and room in READING:
        return target.rpartition(".")[0]
    return package


def _targets(node: Any) -> Iterator[str]:
    """All that a configuration names by `_target_`."""
    if isinstance(node, Mapping):
        target = node.get("_target_")
        if isinstance(target, str):
            yield target
        for value in node.values():
            yield from _targets(value)
    elif isinstance(node, list):
        for entry in node:
            yield from _targets(entry)


def versions() -> dict[str, str]:
    """Versions of what computes the figures."""
    by_package = {
        "python": platform.python_version(),
        "dpbench": sys.modules["dpbench"].__version__,  # the distribution of this name is another project's
    }
    for package in _PACKAGES:
        try:
            by_package[package] = version(package)
        except PackageNotFoundError:
            continue
    return by_package


def sources_of(objects: Iterable[type | Callable[..., Any]]) -> dict[str, str]:
    """Package → sixteen hexadecimal digits for its source, of classes and functions that are not ours.

    What was typed into an interpreter or a notebook has no source file; its functions are known by their bytecode
    (`canonical`).
    """
    packages = set()
    for each in objects:
        module = getattr(each, "__module__", None) or "builtins"
        packages.add(str(module).partition(".")[0])
    hashes = {}
    for package in sorted(packages - _KNOWN):
        try:
            hashes[package] = _source_hash(package)
        except ConfigurationError:
            continue
    return hashes


@cache
def _source_hash(package: str) -> str:
    digest = hashlib.sha256()
    for name, path in _files_of(package):
        digest.update(name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _files_of(package: str) -> list[tuple[str, Path]]:
    """Name and place of whatever Python may execute of a package, or of a module that is one file."""
    if package == "__main__":  # a script
        script = getattr(sys.modules["__main__"], "__file__", None)
        if script is None or not Path(script).is_file():
            raise ConfigurationError("the main module has no source file.")
        return [(package, Path(script))]
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        spec = None
    files = []
    if spec is not None and spec.submodule_search_locations:
        for location in spec.submodule_search_locations:
            folder = Path(location)
            for path in sorted(folder.rglob("*")):
                if path.suffix in _SOURCES:
                    files.append((str(path.relative_to(folder)), path))
    elif spec is not None and spec.origin is not None and Path(spec.origin).is_file():
        files = [(package, Path(spec.origin))]
    if not files:
        raise ConfigurationError(
            f"the source of {package}, which _target_ names, is not found: noise that is keyed without it could repeat "
            "itself. Put it into a file that can be imported."
        )
    return files
