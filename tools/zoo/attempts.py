"""Each network is tried in a process of its own: one that hangs, or brings its process down, is a line of the table."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import time
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from tools.zoo.architectures import Architecture
from tools.zoo.builders import builder_of
from tools.zoo.check import FAILED, Outcome, check

LIMIT = 120.0
"""Seconds of one network."""


def import_libraries() -> None:
    """Import what all networks need once, before processes are forked."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in ("torchvision", "transformers", "peft", "timm", "torch_geometric"):
        with suppress(ImportError):  # its networks say so
            importlib.import_module(name)
    torch.set_num_threads(1)


def attempt(architecture: Architecture, limit: float = LIMIT) -> Outcome:
    """Check a network of the list in a process that is forked, so that libraries are imported once."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(architecture, sender))
    start = time.perf_counter()
    process.start()
    sender.close()
    outcome: Outcome
    try:
        outcome = receiver.recv() if receiver.poll(limit) else Outcome(FAILED, f"not done after {limit:.0f} seconds")
    except EOFError:
        process.join()
        outcome = Outcome(FAILED, f"its process ended with status {process.exitcode}")
    process.kill()
    process.join()
    receiver.close()
    return outcome._replace(seconds=time.perf_counter() - start)


def _work(architecture: Architecture, sender: Connection) -> None:
    warnings.simplefilter("ignore")
    for handler in logging.getLogger("pytorch_lightning").handlers:
        handler.setLevel(logging.WARNING)
    sender.send(check(builder_of(architecture), private=architecture.private))
