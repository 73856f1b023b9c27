"""Executors are speed only: one plan, one epsilon, one name of a run, and no noise that two of them share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dpbench.capabilities.graphs.executor import Graphs
from dpbench.errors import ConfigurationError
from dpbench.privacy.accounting.composition import ledger_epsilon
from dpbench.privacy.accounting.ledger import check_own_randomness, read_ledger
from dpbench.session.executor import REFERENCE, Executor
from dpbench.session.executors import executor_of, keyed_by
from tests.strategies.worlds import Classifier, fit, weights_of

CPU = torch.device("cpu")


class Other(Executor):
    """Another executor, that happens to round as the reference does."""

    name = "other"


def trained(folder: Path, executor: str = "auto") -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = Classifier()
    fit(folder, module, seed=3, executor=executor)
    return read_ledger(folder / "ledger.jsonl"), weights_of(module)


def test_two_executors_share_no_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, weights = trained(tmp_path / "first")
    again, same_weights = trained(tmp_path / "again", "eager")
    monkeypatch.setattr("dpbench.session.session.executor_of", lambda name, device: Other())
    other, other_weights = trained(tmp_path / "other")
    assert torch.equal(weights, same_weights) and not torch.equal(weights, other_weights)
    assert first.header == again.header
    assert first.header.noise_source != other.header.noise_source
    assert first.header.replay != other.header.replay
    assert ledger_epsilon(first, 1e-3) == ledger_epsilon(other, 1e-3)
    check_own_randomness({"first": first, "other": other})


def test_auto_takes_graphs_on_a_gpu_and_the_reference_has_the_keys_of_the_seed() -> None:
    assert executor_of("auto", CPU).name == executor_of("eager", CPU).name == REFERENCE
    graphs = executor_of("auto", torch.device("cuda"))
    assert graphs.name == f"graph, {Graphs.name}"
    assert keyed_by(5, executor_of("auto", CPU)) == 5 != keyed_by(5, graphs)
    assert keyed_by(5, graphs) not in (None, keyed_by(6, graphs))


def test_graphs_take_no_options() -> None:
    with pytest.raises(ConfigurationError, match="executor=graph takes no options, such as '4'"):
        executor_of("graph:4", CPU)


def plugged(monkeypatch: pytest.MonkeyPatch, make: Callable[[str], Any]) -> None:
    entry = mock.Mock(load=lambda: make)
    plugins = mock.Mock(select=lambda name: [entry] if name == "mine" else [], names={"mine"})
    monkeypatch.setattr("dpbench.session.executors.entry_points", lambda group: plugins)


def test_an_executor_of_a_plug_in_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that does not say a name, or says that of the reference."""
    plugged(monkeypatch, lambda options: Executor())
    assert len({keyed_by(5, executor_of(name, CPU)) for name in ("eager", "mine", "mine:2")}) == 3
    with pytest.raises(ConfigurationError, match="known are auto, eager, mine"):
        executor_of("other:2", CPU)


def test_a_plug_in_without_an_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    plugged(monkeypatch, lambda options: None)
    with pytest.raises(ConfigurationError, match="must return an Executor, not None"):
        executor_of("mine", CPU)
