"""Tries the networks of the list, each in a process of its own: one that hangs or dies is a line of the table."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection

import torch

from tools.zoo.architectures import Architecture
from tools.zoo.check import FAILED, Outcome, check
from tools.zoo.network import Network
from tools.zoo.page import Result

LIMIT = 120.0
"""Seconds of one network."""
_BUILDERS = {
    "transformers": "transformers_networks:build",
    "torchvision": "image_networks:build_torchvision",
    "timm": "image_networks:build_timm",
    "torch_geometric": "graph_networks:build",
    "peft": "peft_networks:build",
    "own": "own_networks:build",
}
"""Library → function of (name, step, whether to keep dropout), imported when it is called."""


def try_all(architectures: Iterable[Architecture]) -> list[Result]:
    """Try networks, and print a line for each on standard error."""
    _prepare()
    results = []
    for architecture in architectures:
        outcome = attempt(architecture)
        results.append((architecture, outcome))
        error = "" if outcome.error is None else f" {outcome.error:.1e}"
        name = f"{architecture.name} ({architecture.library}, {architecture.step})"
        print(f"{len(results)}. {name}: {outcome.path}{error} {outcome.reason}", file=sys.stderr, flush=True)
    return results


def _prepare() -> None:
    """Import what all networks need once, before processes are forked; show no warnings of libraries."""
    warnings.simplefilter("ignore")
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
    return outcome


def _work(architecture: Architecture, sender: Connection) -> None:
    warnings.simplefilter("ignore")
    for handler in logging.getLogger("pytorch_lightning").handlers:
        handler.setLevel(logging.WARNING)
    sender.send(check(builder_of(architecture), private=architecture.private))


def builder_of(architecture: Architecture) -> Callable[[], Network]:
    """What makes a network of the list; its library is imported when it is called."""
    return partial(_build, architecture)


def _build(architecture: Architecture) -> Network:
    kind = "peft" if architecture.family == "peft" else architecture.library
    build = pkgutil.resolve_name(f"tools.zoo.{_BUILDERS[kind]}")
    network: Network = build(architecture.name, architecture.step, architecture.family == "with dropout")
    return network
