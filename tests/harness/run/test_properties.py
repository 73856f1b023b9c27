"""A wrong value for any key of any configuration: it works, or one line says what is wrong; never a traceback."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import pytorch_lightning as pl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig

from dpbench.cli import main
from dpbench.harness.run.config import TARGETS, class_of
from dpbench.options import options_of
from tests.support.configs import GROUPS, composed

SMALL = [
    "data.image_size=16",
    "data.expected_batch_size=8",
    "trainer.max_steps=2",
    "strategy.delta=1e-4",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
]
NETWORKS = [  # that are quick enough
    "model=mnist_cnn",
    "model=small_alexnet model.channels=2",
    "model=densenet40 model.depth=7 model.growth=2",
    "model=mlp_gan module=gan optimizer=adam",
    "model=conv_gan module=gan optimizer=adam model.width=8",
]


VALUES = [  # in Hydra's grammar
    "nan", "inf", "-inf", "-1", "0", "1", "2", "0.5", "1.5", "1e30", "-1e-30", "1" + "0" * 30, "9007199254740992", '""',
    '" "', "abc", '"1"', '"nan"', "a/../b", "..", '"é✓"', "x" * 300, '"null "', "[]", "[1]", "[-1]", "[0.5]", "[a]",
    "[[]]", "{a:1}", '{"":{}}', "{_target_:os.getpid}", "true", "false", "null", "{a:{b:{c:[{d:[]}]}}}", "os.system",
    "torch.nn.Linear", "{}",
]  # fmt: skip


def leaves(node: Any, path: str = "") -> Iterator[str]:
    if path:
        yield path
    if isinstance(node, DictConfig):
        for key in node:
            if key != "hydra":
                yield from leaves(node._get_node(key), f"{path}.{key}" if path else str(key))


@cache
def situations() -> list[tuple[tuple[str, ...], str]]:
    """Words that compose, each with a key that is there then, or (with a plus) one that a class has beside."""
    more = [f"{group}={name}" for group in ("strategy", "optimizer", "schedule") for name in GROUPS[group]]
    more += ["diagnostics=gradients diagnostics.every_n_steps=1", "trainer=cpu", "ema_decay=0.9"]
    found = []
    for world in [*NETWORKS, *(f"model=mlp model.hidden=[4] {words}" for words in more)]:
        words = tuple(world.split())
        cfg = composed(*words)
        keys = set(leaves(cfg))
        for group in TARGETS:
            if cfg[group].get("_target_"):
                keys |= {
                    f"+{group}.{name}" for name in options_of(class_of(cfg[group], group)) if name not in cfg[group]
                }
        found += [(words, key) for key in sorted(keys)]
    return found


CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # a user sees warnings; they are no errors
@settings(max_examples=100, deadline=None, suppress_health_check=CHECKS, derandomize=True)
@given(st.deferred(lambda: st.sampled_from(situations())), st.sampled_from(VALUES))
def test_a_wrong_value_is_one_line(tmp_path: Path, situation: tuple[tuple[str, ...], str], value: str) -> None:
    words, key = situation
    fit = pl.Trainer.fit

    def two_steps(self: pl.Trainer, *args: Any, **kwargs: Any) -> Any:
        self.fit_loop.epoch_loop.max_steps = min(self.max_steps % 2**31, 2)  # whatever trainer.max_steps is
        return fit(self, *args, **kwargs)

    err = io.StringIO()
    with (
        mock.patch.object(pl.Trainer, "fit", two_steps),
        contextlib.chdir(tempfile.mkdtemp(dir=tmp_path)),
        contextlib.redirect_stderr(err),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        status = main(["train", *words, *SMALL, "logger=none", "hydra.run.dir=run", f"{key}={value}"])
    told = [line for line in err.getvalue().splitlines() if line.strip()]
    assert status in (0, 1, 2)
    if status:
        assert len(told) == 1 and told[0].startswith("dpbench: error: ") and len(told[0]) < 1500, told
