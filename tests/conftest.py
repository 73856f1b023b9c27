"""Fixtures for all tests."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from absl import logging as absl_logging
from matplotlib.figure import Figure
from PIL import Image

from dpbench.privacy.releases import ReleaseEngine
from tests.refusals.recorder import pytest_collection_modifyitems, pytest_runtest_call  # noqa: F401  pytest finds them
from tests.support import caches, finished_runs

torch.set_num_threads(1)  # also for fixtures of modules, which are made before those of a test
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")

# A shell that starts tests in its background has them ignore Ctrl-C, and so would the processes that tests send one to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# absl's handler closes the stream that it found, which here is pytest's, when Hydra sets up logging below a capsys.
absl_logging.get_absl_handler().python_handler.stream = sys.__stderr__

# A machine that is there for its GPU may have no hypothesis; nothing of tests/gpu needs it.
with suppress(ModuleNotFoundError):
    from hypothesis import settings

    # The same examples in each run of CI; HYPOTHESIS_PROFILE=explore looks for new ones.
    settings.register_profile("same", derandomize=True)
    settings.register_profile("explore", max_examples=300)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=("cpu", "cuda"), default="cpu", help="of the tests in tests/gpu (default: cpu)"
    )


caches.install()


def pytest_collection_finish() -> None:
    """Keep a million objects of modules and tests, which live to the end, out of each collection of garbage."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let them go at the end: what stays, Triton reports as leaked, after pytest's last line."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _quiet_and_seeded() -> None:
    """Few threads, so that parallel test processes do not fight, and fixed seeds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Hydra's handlers write to the files and streams of a test that has ended, and fail in whichever comes next."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in root.handlers[:]:
        if handler not in before and not type(handler).__module__.startswith("_pytest."):
            root.removeHandler(handler)
            handler.close()
    root.setLevel(level)


ROOT = Path(__file__).parent
COMPARED = (
    "callback/test_loop.py",
    "capabilities/canaries/",
    "capabilities/correlated/test_training.py",
    "capabilities/users/",
    "harness/run/test_diagnostics.py",
    "modules/",
    "records/",
    "session/test_physical_batch.py",
    "strategies/",
)
"""Tests of trainings that differ in their objects (a record more, a layer by hand) and are compared by number."""


@pytest.fixture(autouse=True)
def _one_key(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """There noise and lots come from the seed alone, but where a test is marked `own_key`."""
    inside = request.path.is_relative_to(ROOT) and str(request.path.relative_to(ROOT)).startswith(COMPARED)
    if not inside or request.node.get_closest_marker("own_key"):
        return
    monkeypatch.setattr("dpbench.callback.run_key.run_key", lambda secret, _: secret)
    monkeypatch.setattr(ReleaseEngine, "lot_key", None)


UNSEEN = (
    "capabilities/export/",
    "capabilities/users/",
    "cli/",
    "harness/reproduce/",
    "harness/run/",
    "harness/runs/",
    "session/",
)
"""Tests in which runs draw their curves, and nobody looks at them."""


@pytest.fixture(autouse=True)
def _no_ink(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a picture is put together, and one of a single pixel written: ink is a fifth of a small run's time."""
    if not request.path.is_relative_to(ROOT) or not str(request.path.relative_to(ROOT)).startswith(UNSEEN):
        return
    if request.node.get_closest_marker("drawn"):
        return
    save = Figure.savefig

    def without_ink(figure: Figure, file: Any, **options: Any) -> None:
        if isinstance(file, Path):
            Image.new("RGB", (1, 1)).save(file, "PNG")  # wandb reads it
        else:
            save(figure, file, **options)

    monkeypatch.setattr(Figure, "savefig", without_ink)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that trains a run of a kind once for all processes of the tests, see `finished_runs.RUNS`."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    return lambda kind: finished_runs.trained(kind, folder / "trained")


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Real image data; a machine that declares DPBENCH_DATA may not skip."""
    folder = os.environ.get("DPBENCH_DATA")
    if folder is None:
        pytest.skip("needs $DPBENCH_DATA")
    return Path(folder)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device of --device."""
    name = str(request.config.getoption("--device"))
    if name == "cuda" and not torch.cuda.is_available():
        pytest.fail("there is no GPU here: leave --device out")
    return name
