"""`python -m tests.support.signalled NUMBER STEP TIMES train …`: dpbench that gets a signal right after a step.

A test that watches a run from outside and sends the signal then may come too late on a busy machine.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import Any

import pytorch_lightning as pl

from dpbench.cli import main
from dpbench.harness.run import train
from dpbench.harness.run._checkpoint import LastCheckpoint


class Signals(pl.Callback):
    """Sends a signal to the process that made it, from whichever process trains."""

    observes_only = True  # else its process would be part of the key

    def __init__(self, number: int, step: int, times: int = 1) -> None:
        self._pid, self._number, self._step, self._times = os.getpid(), number, step, times

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == self._step:
            for _ in range(self._times):
                os.kill(self._pid, self._number)
            last: Any = next(each for each in trainer.callbacks if isinstance(each, LastCheckpoint))  # type: ignore[attr-defined]
            while os.getpid() != self._pid and not last.interrupted:
                time.sleep(0.01)


class Preempted(Signals):
    """Sends it where submitit made the process; elsewhere it is of the configuration only."""

    def on_train_batch_end(self, trainer: pl.Trainer, *more: Any) -> None:
        if "SUBMITIT_EXECUTOR" in os.environ:
            super().on_train_batch_end(trainer, *more)


if __name__ == "__main__":
    from tests.support import signalled  # spawned processes know this module by its name only

    observer = signalled.Signals(*map(int, sys.argv[1:4]))
    train.train = functools.partial(train.train, observers=[observer])
    sys.exit(main(sys.argv[4:]))
