"""A wrong value for any key of any configuration: it works, or one line says what is wrong; never a traceback."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

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
GAN = ["module=gan", "optimizer=adam"]
CHOICES = {  # of networks that are quick enough
    "model=mlp": ["model.hidden=[4]"],
    "model=mnist_cnn": [],
    "model=small_alexnet": ["model.channels=2"],
    "model=densenet40": ["model.depth=7", "model.growth=2"],
    "model=mlp_gan": GAN,
    "model=conv_gan": [*GAN, "model.width=8"],
}
VALUES: list[Any] = [
    float("nan"), float("inf"), -float("inf"), -1, 0, 1, 2, 0.5, 1.5, 1e30, -1e-30, 10**30, 2**53, "", " ", "abc", "1",
    "nan", "a/../b", "..", "é✓", "x" * 300, "null ", [], [1], [-1], [0.5], ["a"], [[]], {}, {"a": 1}, {"": {}},
    {"_target_": "os.getpid"}, True, False, None, {"a": {"b": {"c": [{"d": []}]}}}, "os.system", "torch.nn.Linear",
]  # fmt: skip


def quoted(value: Any) -> str:
    """A value in Hydra's grammar."""
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, dict):
        return "{" + ",".join(f"{quoted(key)}:{quoted(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(quoted, value)) + "]"
    return json.dumps(value).replace("NaN", "nan").replace("Infinity", "inf")


def leaves(node: Any, path: str = "") -> Iterator[str]:
    if path:
        yield path
    if isinstance(node, DictConfig):
        for key in node:
            if key != "hydra":
                yield from leaves(node._get_node(key), f"{path}.{key}" if path else str(key))


@cache
def situations() -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Words that compose, with every key that is there then, and (with a plus) every one that a class has beside."""
    more = [[f"{group}={name}"] for group in ("strategy", "optimizer", "schedule") for name in GROUPS[group]]
    more += [["diagnostics=gradients", "diagnostics.every_n_steps=1"], ["trainer=cpu"], ["ema_decay=0.9"]]
    worlds = [[choice, *words] for choice, words in CHOICES.items()]
    worlds += [["model=mlp", "model.hidden=[4]", *words] for words in more]
    found = []
    for words in worlds:
        cfg = composed(*words)
        keys = list(leaves(cfg))
        for group in TARGETS:
            if cfg[group].get("_target_"):
                names = sorted(options_of(class_of(cfg[group], group)))
                keys += [f"+{group}.{name}" for name in names if name not in cfg[group]]
        found.append((tuple(words), tuple(keys)))
    return found


DRAWN = st.deferred(lambda: st.sampled_from(situations())).flatmap(
    lambda world: st.tuples(st.just(world[0]), st.sampled_from(world[1]), st.sampled_from(VALUES))
)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two steps at most, whatever trainer.max_steps is, and no pictures; all else is as it is."""
    fit = pl.Trainer.fit

    def capped(self: pl.Trainer, *args: Any, **kwargs: Any) -> Any:
        most = self.max_steps
        self.fit_loop.epoch_loop.max_steps = 2 if most == -1 else min(most, 2)
        return fit(self, *args, **kwargs)

    monkeypatch.setattr(pl.Trainer, "fit", capped)
    monkeypatch.setattr("dpbench.harness.reports.plots.plot_curves", lambda *_: None)
    monkeypatch.setattr("dpbench.harness.reports.plots.plot_diagnostics", lambda *_: None)
    monkeypatch.setattr("dpbench.harness.run.logs.wandb_logger", lambda *_: pytest.fail("wandb was asked for"))
    monkeypatch.chdir(tmp_path)


number = iter(range(1_000_000))


def check(words: tuple[str, ...], key: str, value: Any) -> None:
    """The property."""
    command = ["train", *words, *SMALL, "logger=none", f"hydra.run.dir=runs/{next(number)}", f"{key}={quoted(value)}"]
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        status = main(command)
    told = [line for line in err.getvalue().splitlines() if line.strip()]
    assert status in (0, 1, 2), command
    if status:
        assert len(told) == 1 and told[0].startswith("dpbench: error: "), (command, told)
        assert len(told[0]) < 1500, command


CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # a user sees warnings; they are no errors
@settings(max_examples=8, deadline=None, suppress_health_check=CHECKS, derandomize=True)
@given(DRAWN)
def test_a_wrong_value_is_one_line(short: None, drawn: tuple[tuple[str, ...], str, Any]) -> None:
    check(*drawn)


@pytest.mark.long
@pytest.mark.filterwarnings("default")
@settings(max_examples=100, deadline=None, suppress_health_check=CHECKS, derandomize=True)
@given(DRAWN)
def test_a_hundred_wrong_values(short: None, drawn: tuple[tuple[str, ...], str, Any]) -> None:
    check(*drawn)
