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
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, cast, get_args

from dpbench.errors import ConfigurationError, brief

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
    wanted = mode()
    if wanted == "off":
        return None
    built = _build()
    if isinstance(built, ctypes.CDLL):
        return built
    if wanted == "on":
        raise ConfigurationError(
            f"engine.native=on, but the kernels could not be compiled: {built}. Install g++, or "
            "set engine.native=auto for pure PyTorch where they are missing."
        )
    return None


def signature() -> str:
    """Names the kernels that this process computes with, "" for none: they round differently from PyTorch."""
    return "" if library() is None else _name()


@cache
def _name() -> str:
    """Name made of source, flags and processor: a library made for one processor must not run on another."""
    text = repr((_SOURCE.read_text(encoding="utf-8"), _FLAGS, _processor()))
    return "native-" + hashlib.sha256(text.encode()).hexdigest()[:12]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.node()}"
    return " ".join(
        sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    )


@cache
def _build() -> ctypes.CDLL | str:
    """Load the library, compiled first if it is not there; or return one line that says why there is none."""
    if sys.platform != "linux":
        return "they are made for Linux"
    try:
        file = cache_folder() / "kernels.so"
        if file.is_file():
            with suppress(OSError):  # damaged
                return ctypes.CDLL(str(file))
        _compile(file)
        return ctypes.CDLL(str(file))
    except subprocess.CalledProcessError as error:
        return f"{error.cmd[0]}: {(error.stderr.strip() or 'failed').splitlines()[0]}"
    except (OSError, RuntimeError) as error:
        return brief(error)


def cache_folder() -> Path:
    """Folder of the library and of the choices timed with it, one for each processor and version of the kernels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dpbench" / _name()


def _compile(file: Path) -> None:
    """Compile the library; the last step is an atomic rename, so that a killed process leaves nothing behind.

    Not by `torch.utils.cpp_extension.load`: importing that takes seconds, and it waits for ever on the lock of a
    process that was killed while it compiled.
    """
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    if compiler is None:
        raise OSError("no C++ compiler was found (g++, clang++, c++, or what the variable CXX names)")
    file.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        command = [*compiler.split(), *_FLAGS, "-shared", "-fPIC", "-o", str(made), str(_SOURCE)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        made.replace(file)
