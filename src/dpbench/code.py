"""Provenance of the code that a run executes: hashes of sources, and versions."""

from __future__ import annotations

import hashlib
import platform
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dpbench.errors import ConfigurationError

_PACKAGES = ("torch", "torchvision", "pytorch-lightning", "torchmetrics", "dp-accounting", "numpy")
_SOURCES = (".py", ".so", ".pyd", ".cpp", ".cu")
_KNOWN = {"builtins", "dpbench", "numpy", "pytorch_lightning", "torch", "torchmetrics", "torchvision"}
"""By `code_hash()` and `versions()`."""
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
    "__init__.py", "canonical.py", "code.py", "errors.py", "files.py", "locks.py", "losses.py", "names.py",
    "optimizers.py", "options.py",
    "callback", "data", "guards", "models", "modules", "privacy", "records", "session", "strategies",
    "harness/__init__.py", "harness/run", "harness/runs", "capabilities/__init__.py",
    *_rooms("dpbench.executors", "dpbench.features", "dpbench.images", "dpbench.moved", "dpbench.noises"),
    *_rooms("dpbench.records", "dpbench.user_data"), *(_rooms("dpbench") - {"harness/reports", "losses"}),
)  # fmt: skip
"""Rooms that compute inside a run, and import nothing of the rest: all that may change a result is hashed."""
READING = (
    "__main__.py", "templates", "cli", "harness/reports", "harness/reproduce",
    *(_rooms("dpbench.commands", "dpbench.computed_tables") - {*COMPUTING}),
)  # fmt: skip
"""Rooms that start runs and read them: an edit of them changes no result."""


@cache
def code_hash(package: Path = Path(__file__).parent) -> str:
    """Sixteen hexadecimal digits for the source that computes in a run: provenance, and no part of any key."""
    digest = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.cpp")]):
        name = path.relative_to(package)
        if room_of(name.as_posix()) in COMPUTING:
            digest.update(str(name).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def foreign_code(config: Mapping[str, Any]) -> dict[str, str]:
    """Package → sixteen hexadecimal digits for its source, of each that the configuration names and dpbench is not.

    The source of a package that is not installed includes the modules next to it that it imports.
    Modules of dpbench that only read runs are among them where they take part in one, such as a callback that draws.
    Noise is keyed by them: an edited model under the same seed must not get the noise of the model before.

    Raises:
        ConfigurationError: The source of one is not found.
    """
    packages = set()
    for target in targets_of(config):
        package, _, path = target.partition(".")
        is_reader = package == "dpbench" and room_of(path.replace(".", "/")) in READING
        packages.add(target.rpartition(".")[0] if is_reader else package)
    return {package: _source_hash(package) for package in sorted(packages - _KNOWN)}


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
    """Versions of the packages that compute the figures."""
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


def sources_of(packages: Iterable[str]) -> dict[str, str]:
    """Package → sixteen hexadecimal digits for its source, of each that has one.

    Code typed into an interpreter or a notebook has no source file; its functions are identified by their bytecode
    (`canonical`).
    """
    hashes = {}
    for package in sorted(packages):
        with suppress(ConfigurationError):
            hashes[package] = _source_hash(package)
    return hashes


def changed_sources(before: Mapping[str, str]) -> list[str]:
    """List the packages with sources that have changed on disk, whatever this process has imported of them.

    Args:
        before: Earlier result of `foreign_code`.
    """
    changed = []
    for package, source in before.items():
        now = None
        with suppress(ConfigurationError):
            now = _source_hash.__wrapped__(package)
        if now != source:
            changed.append(package)
    return changed


def sources_text(sources: Mapping[str, str]) -> str:
    """The result of `foreign_code`, in one word of a table."""
    return " ".join(f"{package}={source}" for package, source in sorted(sources.items()))


@cache
def _source_hash(package: str) -> str:
    """Hash of a package, or of a module that is one file, with the modules next to it that it imports."""
    sources = {package: _files_of(package)}
    folder = _folder_of(package)
    beside = set() if folder is None else {path.stem for path in folder.iterdir()} - _KNOWN
    pending = [package]
    while pending:
        text = b"\n".join(path.read_bytes() for _, path in sources[pending.pop()]).decode(errors="replace")
        # A word behind "import" in a comment or a string counts, too: better a module too many.
        statements = " ".join(re.findall(r"(?:import|from)(?:\\\n|.)*", text))
        for module in beside & {*re.findall(r"\w+", statements)} - sources.keys():
            files = _sources_in(module)
            if files and _folder_of(module) == folder:  # else an installed package takes precedence
                sources[module] = files
                pending.append(module)
    digest = hashlib.sha256()
    own = sources.pop(package)
    for module, files in [("", own), *sorted(sources.items())]:
        for name, path in files:
            digest.update(module.encode() + name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _folder_of(package: str) -> Path | None:
    """Folder from which a package is imported; None for installed packages, which their versions identify."""
    folders = {place.absolute().parent for place in _places_of(package)}
    for folder in folders:
        is_site = {"site-packages", "dist-packages"} & {*folder.parts} or folder == Path(sysconfig.get_path("stdlib"))
        if not is_site and len(folders) == 1 and not any(folder.glob("*.dist-info")):
            return folder
    return None


def _places_of(package: str) -> list[Path]:
    """Folders of a package, or the file of a module that is one file."""
    if package == "__main__":  # a script; a notebook has no file
        places = [getattr(sys.modules[package], "__file__", None)]
    else:
        try:
            spec = find_spec(package)
        except (ImportError, ValueError):
            spec = None
        places = [] if spec is None else list(spec.submodule_search_locations or [str(spec.origin)])
    return [Path(place) for place in places if place and Path(place).exists()]


def _sources_in(package: str) -> list[tuple[str, Path]]:
    """Name and place of all files that Python may execute of a package, or of a module that is one file."""
    files = []
    for place in _places_of(package):
        inside = [path for path in sorted(place.rglob("*")) if path.suffix in _SOURCES]
        files += [(package, place)] if place.is_file() else [(str(path.relative_to(place)), path) for path in inside]
    return files


def _files_of(package: str) -> list[tuple[str, Path]]:
    """Sources of a package that there are.

    Raises:
        ConfigurationError: There are none.
    """
    files = _sources_in(package)
    if not files:
        raise ConfigurationError(
            f"the source of {package} (a _target_) is not found, and noise keyed without it could repeat: move it into "
            "a file that can be imported."
        )
    return files
