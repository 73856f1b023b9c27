"""The command line on small runs on the digits, in this process or in one of its own."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch

from dpbench.cli import main
from tests.support import forks

# A small image keeps a step at a few milliseconds.
TINY = ["model=mlp", "model.hidden=[16]", "data.image_size=8", "logger=none", "data.expected_batch_size=64"]
PRIVATE = ["strategy.delta=1e-4", "strategy.noise_multiplier=1.0"]
FEW = [*TINY, "strategy.delta=1e-4", "trainer.max_steps=2", "hydra/job_logging=none", "hydra/hydra_logging=none"]
ROOT = Path(__file__).parents[2]
HANGS = 1200  # seconds; no test waits for a time


def start(folder: Path, *words: str, module: str = "dpbench", **env: str) -> forks.Fork:
    """Start a command in a process of its own."""
    # A run in the process of an earlier test leaves the address of wandb's service there, which has ended.
    inherited = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    env = {**inherited, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env}
    return forks.start(folder, module, list(words), env)


def dpbench(folder: Path, *words: str, status: int = 0) -> tuple[str, str]:
    """Standard output and error of a command, in this process: another one would import PyTorch for five seconds."""
    out = io.StringIO()
    err = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        # As a user has them: here they would be errors.
        warnings.simplefilter("default")
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        try:
            actual: Any = main(list(words))
        except SystemExit as ended:
            actual = ended.code
    assert (actual or 0) == status, f"{words}\n{out.getvalue()}\n{err.getvalue()}"
    return out.getvalue(), err.getvalue()


def dpbench_in_a_process(folder: Path, *words: str, status: int = 0, **env: str) -> tuple[str, str]:
    """The same in a process of its own."""
    process = start(folder, *words, **env)
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == status, f"{words}\n{out}\n{err}"
    return out, err


def signalled(folder: Path, number: signal.Signals, step: int, *words: str, times: int = 1) -> tuple[int, str]:
    """Exit status and standard error of a training that gets a signal right after a step."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    flags = [word for word in words if word.startswith("-")]
    command = [
        *map(str, (int(number), step, times)),
        "train",
        *flags,
        *TINY,
        *(word for word in words if word not in flags),
    ]
    process = start(folder, *command, module="tests.support.signalled", PYTHONPATH=path)
    _, err = process.communicate(timeout=HANGS)
    return process.returncode, err


def train(folder: Path, run: str, *words: str) -> Path:
    dpbench(folder, "train", *TINY, f"hydra.run.dir={run}", *words)
    return folder / run


def weights(run: Path) -> torch.Tensor:
    state = torch.load(run / "checkpoints/last.ckpt", weights_only=False)["state_dict"]
    return torch.cat([value.flatten().float() for value in state.values()])
