"""The optional second tier of the engine: kernels in C++ (`native.cpp`), compiled when they are first wanted.

Without a compiler, on another device or in another precision, the rules of `layers` are computed in pure PyTorch; the
kernels are tested against these, too.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, cast, get_args

from dpbench.errors import ConfigurationError, brief
from dpbench.privacy.native.known_answers import wrong_answers

Mode = Literal["auto", "on", "off"]
_VARIABLE = "DPBENCH_NATIVE"
_SOURCE = Path(__file__).with_name("native.cpp")
_KERNEL = re.compile(r'extern "C" void (\w+)\(([^)]*)\)')
_TYPES = {"int64_t": ctypes.c_int64, "float": ctypes.c_float, "double": ctypes.c_double}
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-std=c++17", "-Wno-psabi")


def select(wanted: Mode) -> None:
    """Choose for this process and those that it starts; without a call, the environment's DPBENCH_NATIVE, else "auto".

    Args:
        wanted: "auto" takes the kernels where they can be had, "on" insists on them, "off" takes none.

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
            f"engine.native=on, but the kernels cannot be used: {built}. Install g++, or set engine.native=auto to "
            "fall back to PyTorch."
        )
    return None


@cache
def warn_if_missing() -> None:
    """Warn once if kernels are requested but unavailable, with the reason."""
    built = None if mode() == "off" else _build()
    if isinstance(built, str) and is_first_process():
        warnings.warn(
            f"no compiled kernels ({built}): falling back to PyTorch, which is as private but slower. Set "
            "engine.native=off to use PyTorch without this warning.",
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
    """Load the library, after compiling it if missing; or return the reason of the failure in one line."""
    if sys.platform != "linux":
        return "they need Linux"
    try:
        library = _from_cache()
    except subprocess.CalledProcessError as error:
        message = error.stderr.strip() or "failed"
        return f"{error.cmd[0]}: {message.splitlines()[0]}"
    except (OSError, RuntimeError, AttributeError) as error:
        return brief(error)
    wrong = wrong_answers(library)
    if wrong is not None:
        return f"those in {cache_folder()} give wrong results ({wrong}): delete this folder"
    return library


def _from_cache() -> ctypes.CDLL:
    """The library of the cache, put there if need be; of a folder for this process alone where others may write there.

    Raises:
        OSError, RuntimeError, CalledProcessError: It cannot be compiled or loaded.
    """
    file = cache_folder() / "kernels.so"
    _make(file.parent)
    doubt = _mistrust(file)
    if doubt is not None:
        return _for_this_process(doubt)
    if file.exists():
        with suppress(OSError, AttributeError):  # damaged
            return _load(file)
    _compile(file)
    return _load(file)


def _make(folder: Path) -> None:
    """Make a folder and its missing parents, which no other user may read or write, whatever the umask."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)


def _mistrust(file: Path) -> str | None:
    """Say why another user could have put code into a file, or could do so; None if only the user and root could.

    Args:
        file: File in an existing folder. Parents of that may be writable for all if the sticky bit protects files.
    """
    for height, path in enumerate((file, *file.parents)):
        if not height and not os.path.lexists(file):
            continue
        status = path.lstat()
        if status.st_uid not in (0, os.geteuid()):
            return f"{path} belongs to another user (uid {status.st_uid})"
        is_writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        is_sticky = height > 1 and status.st_mode & stat.S_ISVTX
        if is_writable and not is_sticky:
            return f"{path} is writable by other users"
    return None


def _for_this_process(doubt: str) -> ctypes.CDLL:
    with TemporaryDirectory(prefix="dpbench-") as folder:
        file = Path(folder).resolve() / "kernels.so"
        elsewhere = _mistrust(file)
        if elsewhere is not None:
            raise OSError(f"{doubt}, {elsewhere}: set XDG_CACHE_HOME to a folder of your own")
        _compile(file)
        library = _load(file)
    if is_first_process():
        warnings.warn(
            f"the kernels were compiled for this process only, because {doubt}: to reuse them in later processes, "
            "change these permissions, or set XDG_CACHE_HOME to a folder of your own.",
            stacklevel=2,
        )
    return library


def is_first_process() -> bool:
    """Return whether this process speaks for all of several, by the variables of their launchers."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))


def _load(file: Path) -> ctypes.CDLL:
    """Load a library.

    Raises:
        OSError, AttributeError: It is damaged.
    """
    library = ctypes.CDLL(str(file))
    declare(library)
    return library


def declare(library: ctypes.CDLL) -> None:
    """State the types of the kernels' arguments as the source has them: without, ctypes cuts numbers off silently.

    Raises:
        AttributeError: The library lacks a kernel.
    """
    for name, arguments in _KERNEL.findall(_SOURCE.read_text(encoding="utf-8")):
        function = getattr(library, name)
        function.argtypes = [_type_of(argument) for argument in arguments.split(",")]
        function.restype = None


def _type_of(argument: str) -> type:
    """Type of an argument such as `const float* rows`."""
    if "*" in argument:
        return ctypes.c_void_p
    return _TYPES[argument.split()[-2]]


def cache_folder() -> Path:
    """Folder of the library, one for each processor and version of the kernels.

    Without links, so that the checked path is the one that is used.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches.resolve() / "dpbench" / _name()


def _compiler() -> str:
    installed = filter(shutil.which, ("g++", "clang++", "c++"))
    compiler = os.environ.get("CXX") or next(installed, None)
    if compiler is None:
        raise OSError("no C++ compiler was found (g++, clang++, c++, or the value of CXX)")
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
