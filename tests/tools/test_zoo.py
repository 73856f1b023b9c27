"""The zoo: a dozen of its networks, that its check sees what is wrong, and that the page has all of the list."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from dpbench.strategies import ClipOnly
from tools.zoo import attempts, check
from tools.zoo.architectures import ARCHITECTURES, Architecture
from tools.zoo.attempts import builder_of
from tools.zoo.check import BROKEN, ENGINE, FAILED, RECORD_BY_RECORD, REFUSED, TOLERANCE, WRONG, Outcome
from tools.zoo.network import Network, cross_entropy
from tools.zoo.page import page_of

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"

DOZEN = {
    ("BertForSequenceClassification", "classification"): ENGINE,
    ("LlamaForCausalLM", "causal language modelling"): ENGINE,
    ("MixtralForCausalLM", "causal language modelling"): RECORD_BY_RECORD,
    ("MambaForCausalLM", "causal language modelling"): ENGINE,
    ("ViTForImageClassification", "classification"): ENGINE,
    ("WhisperForConditionalGeneration", "sequence to sequence"): ENGINE,
    ("swin_t", "classification"): ENGINE,
    ("LoraConfig", "on GPT-2"): ENGINE,
    ("UNetWithBatchNorm", "segmentation"): ENGINE,
    ("VAE", "evidence bound, noise in the records"): ENGINE,
    ("PINN", "residual of a differential equation"): RECORD_BY_RECORD,
    ("WassersteinCritic", "critic with gradient penalty"): RECORD_BY_RECORD,
    ("resnet18", "classification, BatchNorm as it is"): REFUSED,
    ("SimCLR", "contrast of the views of a lot"): RECORD_BY_RECORD,
}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def listed(name: str, step: str) -> Architecture:
    (architecture,) = [
        one for one in ARCHITECTURES if (one.name, one.step) == (name, step) and one.family != "with dropout"
    ]
    return architecture


def outcome_of(name: str, step: str) -> Outcome:
    architecture = listed(name, step)
    return check.check(builder_of(architecture), architecture.private)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry", DOZEN, ids=[name for name, _ in DOZEN])
def test_a_dozen(entry: tuple[str, str]) -> None:
    outcome = outcome_of(*entry)
    assert outcome.path == DOZEN[entry], outcome
    assert (outcome.reason == "") == (outcome.path == ENGINE)
    if outcome.path != REFUSED and listed(*entry).private:  # else a record alone is another function than among others
        assert outcome.error is not None and outcome.error <= TOLERANCE
    assert bool(outcome.fixes) == (entry[0] == "UNetWithBatchNorm")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", ["a bias", "the bound", "a record"])
def test_a_wrong_reference_is_seen(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """One small parameter that is off by a thousandth, another bound, a record that is missing."""
    right = check.reference

    def wrong(network: Network) -> check.Reference:
        expected = right(network)
        if change == "a bias":
            expected.mean[-1] *= 1.001
        elif change == "the bound":
            return expected._replace(bound=0.99 * expected.bound)
        else:
            network.records = [*network.records[:-1], network.records[0]]
        return expected

    monkeypatch.setattr(check, "reference", wrong)
    outcome = outcome_of("VAE", "evidence bound, noise in the records")
    assert outcome.path == WRONG and outcome.error is not None and outcome.error > TOLERANCE


def test_what_is_not_a_number_is_wrong() -> None:
    zero = [torch.zeros(2)]
    assert check.largest_error(zero, zero) == 0
    assert not check.largest_error([torch.tensor([0.0, float("nan")])], zero) <= TOLERANCE


def a_network(loss_of_more: bool = False) -> Network:
    """Four records; the step draws random numbers where it is told to."""
    records = [(torch.randn(3), torch.tensor(number % 2)) for number in range(4)]

    def step(net: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return cross_entropy(net, batch) * (1 + float(torch.rand(())) if loss_of_more else 1)

    return Network(nn.Linear(3, 2), records, step)


def test_a_random_step_has_no_reference() -> None:
    outcome = check.check(lambda: a_network(loss_of_more=True))
    assert outcome.path == BROKEN and "random" in outcome.reason


def test_an_error_of_another_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: ClipOnly, *_: object) -> None:
        raise RuntimeError("no more memory")

    monkeypatch.setattr(ClipOnly, "on_train_start", fails)
    outcome = check.check(a_network)
    assert outcome.path == FAILED and outcome.reason == "RuntimeError: no more memory"


@pytest.mark.parametrize(("end", "reason"), [(lambda: time.sleep(60), "not done"), (lambda: os._exit(3), "status 3")])
def test_a_network_that_takes_the_process_with_it(monkeypatch: pytest.MonkeyPatch, end: object, reason: str) -> None:
    monkeypatch.setattr(attempts, "builder_of", lambda _: end)
    outcome = attempts.attempt(ARCHITECTURES[0], limit=2)
    assert outcome.path == FAILED and reason in outcome.reason


def test_the_list() -> None:
    assert len(ARCHITECTURES) >= 80
    assert len(set(ARCHITECTURES)) == len(ARCHITECTURES)


def test_the_page_has_all_of_the_list() -> None:
    """`make zoo` writes it."""
    text = PAGE.read_text(encoding="utf-8")
    for architecture in ARCHITECTURES:
        assert f"| {architecture.name} | {architecture.library} | {architecture.step} |" in text
    assert f"builds {len(ARCHITECTURES)} small networks" in text


def test_counts_of_the_page() -> None:
    results = [
        (Architecture("One", "of two", "own", "step"), Outcome(ENGINE, error=1e-9)),
        (Architecture("Two", "of two", "own", "step"), Outcome(WRONG, error=0.5)),
        (Architecture("Three", "mixing", "own", "step", private=False), Outcome(REFUSED, "a | b")),
    ]
    text = page_of(results)
    assert "| trained | 1 of 2 (50%) |" in text
    assert "| of the family that mixes records, refused | 1 of 1 |" in text
    assert "| largest error of those | 1.0e-09 |" in text
    assert "**WRONG**" in text and r"a \| b" in text
