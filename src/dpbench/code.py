"""Provenance of the code that a run executes: hashes of sources, and versions."""

from __future__ import annotations

import ast
import hashlib
import platform
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
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


_ENTRY_POINTS = entry_points()  # once: each look at what is installed takes 15 ms


def room_of(path: str) -> str:
    """The room of a file or folder of this package: one of its folders, one in harness/ or capabilities/, or a file."""
    parts = path.split("/")
    return "/".join(parts[: 2 if parts[0] in ("harness", "capabilities") else 1])


def _rooms(*groups: str) -> set[str]:
    """Rooms of this package that entry points name."""
    modules = [entry.module for group in groups for entry in _ENTRY_POINTS.select(group=group)]
    return {room_of(name.removeprefix("dpbench.").replace(".", "/")) for name in modules if name.startswith("dpbench.")}


COMPUTING = (
    "__init__.py", "canonical.py", "code.py", "errors.py", "files.py", "locks.py", "names.py", "optimizers.py",
    "options.py",
    "callback", "data", "guards", "models", "modules", "privacy", "records", "session", "strategies",
    "harness/__init__.py", "harness/run", "harness/runs", "capabilities/__init__.py",
    *_rooms("dpbench.executors", "dpbench.features", "dpbench.images", "dpbench.moved", "dpbench.noises"),
    *_rooms("dpbench.records", "dpbench.user_data"),
)  # fmt: skip
"""What computes inside a run, and imports nothing of the rest: whatever may change a result is hashed."""
READING = (
    "__main__.py", "templates", "cli", "harness/reports", "harness/reproduce",
    *(_rooms("dpbench.commands", "dpbench.computed_tables") - {*COMPUTING}),
)  # fmt: skip
"""What starts runs and reads them: an edit of it changes no result."""


@cache
def code_hash(package: Path = Path(__file__).parent) -> str:
    """Sixteen hexadecimal digits for the source of what computes in a run: provenance, and no part of any key."""
    digest = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.cpp")]):
        name = path.relative_to(package)
        if room_of(name.as_posix()) in COMPUTING:
            digest.update(str(name).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def foreign_code(config: Mapping[str, Any]) -> dict[str, str]:
    """Package → sixteen hexadecimal digits for its source, of each that the configuration names and dpbench is not.

    To the source of a package that is not installed belong the modules beside it that it imports.
    Modules of dpbench that only read runs are among them where they take part in one, such as a callback that draws.
    Noise is keyed by them: an edited model under the same seed must not get the noise of the model before.

    Raises:
        ConfigurationError: The source of one is not found.
    """
    packages = {_holder(target) for target in targets_of(config)} - _KNOWN
    return {package: _source_hash(package) for package in sorted(packages)}


def _holder(target: str) -> str:
    """The package of a class, or the module of one of our own classes that `code_hash` leaves out."""
    package, _, path = target.partition(".")
    if package == "dpbench" and room_of(path.replace(".", "/")) in READING:
        return target.rpartition(".")[0]
    return package


def targets_of(node: Any) -> Iterator[str]:
    """List the import paths that a configuration names by `_target_`, wherever they stand."""
    if isinstance(node, Mapping):
        target = node.get("_target_")
        if isinstance(target, str):
            yield target
        for value in node.values():
            yield from targets_of(value)
    elif isinstance(node, list):
        for entry in node:
            yield from targets_of(entry)


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


def changed_sources(before: Mapping[str, str]) -> list[str]:
    """List the packages whose source is another one by now, whatever this process has imported of them.

    Args:
        before: From `foreign_code`.
    """
    changed = []
    for package, source in before.items():
        try:
            now = _source_hash.__wrapped__(package)
        except ConfigurationError:
            now = None
        if now != source:
            changed.append(package)
    return changed


def sources_text(sources: Mapping[str, str]) -> str:
    """What `foreign_code` gives, in one word of a table."""
    return " ".join(f"{package}={source}" for package, source in sorted(sources.items()))


@cache
def _source_hash(package: str) -> str:
    files = _files_of(package)
    digest = hashlib.sha256()
    for name, path in files:
        digest.update(name.encode() + path.read_bytes())
    for module, own_files in _imported_beside(package, files).items():
        for name, path in own_files:
            digest.update(module.encode() + name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _imported_beside(package: str, files: list[tuple[str, Path]]) -> dict[str, list[tuple[str, Path]]]:
    """Modules that lie in one folder with a package and that it imports, directly or by each other, with their files.

    By their import statements: a module that is imported by a name that is computed is not among them.

    Args:
        package: Or a module that is one file.
        files: Of it.
    """
    folder = _folder_of(package, files)
    if folder is None or _is_installation(folder):
        return {}
    beside: dict[str, list[tuple[str, Path]]] = {}
    waiting = list(files)
    while waiting:
        _, path = waiting.pop()
        for module in sorted(_imports_of(path) - {package} - _KNOWN - beside.keys()):
            if not (folder / module).is_dir() and not any(
                (folder / f"{module}{ending}").is_file() for ending in _SOURCES
            ):
                continue
            try:
                own_files = _files_of(module)
            except ConfigurationError:
                continue
            if _folder_of(module, own_files) == folder:  # else an installed package takes precedence
                beside[module] = own_files
                waiting += own_files
    return dict(sorted(beside.items()))


def _folder_of(package: str, files: list[tuple[str, Path]]) -> Path | None:
    """The folder from which a package is imported; None of one that is spread over several."""
    folders = set()
    for name, path in files:
        steps = 0 if name == package else len(Path(name).parts)
        folders.add(path.absolute().parents[steps])
    return folders.pop() if len(folders) == 1 else None


def _is_installation(folder: Path) -> bool:
    """Whether a folder holds installed packages, whose versions tell what they are."""
    if {"site-packages", "dist-packages"} & {*folder.parts} or folder == Path(sysconfig.get_path("stdlib")):
        return True
    return next(folder.glob("*.dist-info"), None) is not None


def _imports_of(path: Path) -> set[str]:
    """The first parts of the names that a file imports, wherever in it."""
    if path.suffix != ".py":
        return set()
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # nothing that this Python imports
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names.add(node.module.partition(".")[0])
    return names


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
