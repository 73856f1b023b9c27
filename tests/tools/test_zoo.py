"""The zoo: some of its networks, that its check sees what is wrong, and that the page has all of the list."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.zoo import check
from tools.zoo.architectures import ARCHITECTURES, Architecture
from tools.zoo.attempts import builder_of
from tools.zoo.check import ENGINE, RECORD_BY_RECORD, REFUSED, TOLERANCE, WRONG, Outcome
from tools.zoo.network import Network

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"

SOME = {
    ("LlamaForCausalLM", "causal language modelling"): ENGINE,
    ("MixtralForCausalLM", "causal language modelling"): RECORD_BY_RECORD,
    ("UNetWithBatchNorm", "segmentation"): ENGINE,
    ("VAE", "evidence bound, noise in the records"): ENGINE,
    ("WassersteinCritic", "critic with gradient penalty"): RECORD_BY_RECORD,
    ("resnet18", "classification, BatchNorm as it is"): REFUSED,
    ("SimCLR", "contrast of the views of a batch"): RECORD_BY_RECORD,
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
@pytest.mark.parametrize("entry", SOME, ids=[name for name, _ in SOME])
def test_some_of_it(entry: tuple[str, str]) -> None:
    outcome = outcome_of(*entry)
    assert outcome.path == SOME[entry], outcome
    assert (outcome.reason == "") == (outcome.path == ENGINE)
    if outcome.path != REFUSED and listed(*entry).private:  # else a record alone is another function than among others
        assert outcome.error is not None and outcome.error <= TOLERANCE
    assert bool(outcome.fixes) == (entry[0] == "UNetWithBatchNorm")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", ["a bias", "a record"])
def test_a_wrong_reference_is_seen(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """One small parameter that is off by a thousandth, a record that is missing."""
    right = check.reference

    def wrong(network: Network) -> check.Reference:
        expected = right(network)
        if change == "a bias":
            expected.mean[-1] *= 1.001
        else:
            network.records = [*network.records[:-1], network.records[0]]
        return expected

    monkeypatch.setattr(check, "reference", wrong)
    outcome = outcome_of("VAE", "evidence bound, noise in the records")
    assert outcome.path == WRONG and outcome.error is not None and outcome.error > TOLERANCE


def test_the_page_has_all_of_the_list() -> None:
    """`make zoo` writes it."""
    text = PAGE.read_text(encoding="utf-8")
    for architecture in ARCHITECTURES:
        assert f"| {architecture.name} | {architecture.library} | {architecture.step} |" in text
    assert f"trains {len(ARCHITECTURES)} small networks" in text
