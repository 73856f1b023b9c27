"""The optional second tier of the engine: kernels in C++ (`native.cpp`), compiled when they are first wanted.

Without a compiler, on another device or in another precision, the rules of `layers` are computed in pure PyTorch; these
are also what the kernels are tested against.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, cast, get_args

from dpbench.errors import ConfigurationError, brief
from dpbench.privacy.native._signatures import declare
from dpbench.privacy.native._trust import make_folder, mistrust, mistrusted_folder
from dpbench.privacy.native.known_answers import wrong_answers

Mode = Literal["auto", "on", "off"]
_VARIABLE = "DPBENCH_NATIVE"
_SOURCE = Path(__file__).with_name("native.cpp")
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-std=c++17", "-Wno-psabi")


def select(wanted: Mode) -> None:
    """Choose for this process and those that it starts; without a call, the environment's DPBENCH_NATIVE, else "auto".

    Args:
        wanted: "auto" takes the kernels where they can be had and are faster, "on" wherever they can compute, "off"
            never.

    Raises:
        ConfigurationError: The mode is unknown, or it is "on" and the kernels cannot be compiled.
    """
    _check(wanted)
    os.environ[_VARIABLE] = wanted
    if wanted == "on":
        library()


def _check(wanted: str) -> None:
    if wanted not in get_args(Mode):
        raise ConfigurationError(f"engine.native (or {_VARIABLE}) must be auto, on or off, not {wanted!r}.")


def mode() -> Mode:
    """The tier that `select` chose, or the environment: "auto", "on" or "off"."""
    chosen = os.environ.get(_VARIABLE, "auto")
    _check(chosen)
    return cast(Mode, chosen)


def library() -> ctypes.CDLL | None:
    """The kernels, compiled if need be (a few seconds, once for each machine); None where they are absent.

    Raises:
        ConfigurationError: engine.native is "on" and they cannot be compiled.
    """
    choice = mode()
    if choice == "off":
        return None
    built = _build()
    if isinstance(built, ctypes.CDLL):
        return built
    if choice == "on":
        raise ConfigurationError(
            f"engine.native=on, but the kernels cannot be used: {built}. Install g++, or "
            "set engine.native=auto for pure PyTorch where they are missing."
        )
    return None


@cache
def warn_if_missing() -> None:
    """Say once, where kernels are wanted and there are none, that it will be slower, and why."""
    built = None if mode() == "off" else _build()
    if isinstance(built, str) and is_first_process():
        warnings.warn(
            f"there are no compiled kernels ({built}): pure PyTorch computes, as privately, but more slowly. "
            "engine.native=off says that this is meant.",
            stacklevel=2,
        )


def signature() -> str:
    """Names the kernels that this process computes with, "" for none: they round differently from PyTorch."""
    return "" if library() is None else _name()


@cache
def _name() -> str:
    """Name made of source, flags and processor: a library made for one processor must not run on another."""
    text = repr((_SOURCE.read_text(encoding="utf-8"), _FLAGS, _processor()))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"native-{digest[:12]}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.node()}"
    keys = ("model name", "flags", "Features", "CPU part")
    described = {line for line in lines if line.startswith(keys)}
    return " ".join(sorted(described))


@cache
def _build() -> ctypes.CDLL | str:
    """Load the library, compiled first if it is not there; or return one line that says why there is none."""
    if sys.platform != "linux":
        return "they are made for Linux"
    try:
        library = _from_cache()
    except subprocess.CalledProcessError as error:
        message = error.stderr.strip() or "failed"
        return f"{error.cmd[0]}: {message.splitlines()[0]}"
    except (OSError, RuntimeError) as error:
        return brief(error)
    wrong = wrong_answers(library)
    if wrong is not None:
        return f"those of {cache_folder()} compute wrongly ({wrong}): delete this folder"
    return library


def _from_cache() -> ctypes.CDLL:
    """The library of the cache, put there if need be; of a folder for this process alone where others may write there.

    Raises:
        OSError, RuntimeError, CalledProcessError: It cannot be compiled or loaded.
    """
    folder = cache_folder()
    file = folder / "kernels.so"
    try:
        make_folder(folder)
        doubt = mistrusted_folder(folder, own=2)
        if doubt is None:
            library = _load(file)
            if library is not None:
                return library
            _compile(file)
    except _Mistrusted as error:
        doubt = str(error)
    if doubt is not None:
        return _for_this_process(doubt)
    return _require(_load(file))


def _for_this_process(doubt: str) -> ctypes.CDLL:
    with TemporaryDirectory(prefix="dpbench-") as name:
        private = Path(name).resolve()
        elsewhere = mistrusted_folder(private, own=1)
        if elsewhere is not None:
            raise OSError(f"{doubt}, {elsewhere}: set XDG_CACHE_HOME to a folder of your own")
        _compile(private / "kernels.so")
        library = _require(_load(private / "kernels.so"))
    if is_first_process():
        warnings.warn(
            f"the kernels were compiled for this process alone, because {doubt}: let nobody else write there, or set "
            "XDG_CACHE_HOME to a folder of your own, so that the next process need not compile them again.",
            stacklevel=2,
        )
    return library


def is_first_process() -> bool:
    """Whether this process is the one of several that speaks for all, by the variables of their starters."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))


class _Mistrusted(Exception):
    """A file that somebody else may have written."""


def _load(file: Path) -> ctypes.CDLL | None:
    """Load a library that only the user or root can have written; None where there is none, or a damaged one.

    What was checked is what is loaded: by its descriptor, which stays open, because the loader knows libraries by name,
    and would take the next one with this number for the same.

    Raises:
        _Mistrusted: It could be somebody else's.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _Mistrusted(f"{file} is no file that can be read ({error.strerror})") from None
    status = os.fstat(descriptor)
    doubt = mistrust(status) if stat.S_ISREG(status.st_mode) else "is no file"
    if doubt is not None:
        os.close(descriptor)
        raise _Mistrusted(f"{file} {doubt}")
    try:
        library = ctypes.CDLL(f"/proc/self/fd/{descriptor}")
        declare(library)
    except (OSError, AttributeError):
        return None
    return library


def _require(library: ctypes.CDLL | None) -> ctypes.CDLL:
    if library is None:
        raise OSError("what was compiled cannot be loaded")
    return library


def cache_folder() -> Path:
    """Folder of the library and of the choices timed with it, one for each processor and version of the kernels.

    Without links, so that what is checked is what is used.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches.resolve() / "dpbench" / _name()


def _compiler() -> str:
    installed = filter(shutil.which, ("g++", "clang++", "c++"))
    compiler = os.environ.get("CXX") or next(installed, None)
    if compiler is None:
        raise OSError("no C++ compiler was found (g++, clang++, c++, or what the variable CXX names)")
    return compiler


def _compile(file: Path) -> None:
    """Compile the library; the last step is an atomic rename, so that a killed process leaves nothing behind.

    Not by `torch.utils.cpp_extension.load`: importing that takes seconds, and it waits for ever on the lock of a
    process that was killed while it compiled.
    """
    compiler = _compiler()
    with TemporaryDirectory(dir=file.parent) as folder:
        target = Path(folder) / file.name
        command = [*compiler.split(), *_FLAGS, "-shared", "-fPIC", "-o", str(target), str(_SOURCE)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        target.chmod(0o700)  # whatever the umask is
        target.replace(file)
