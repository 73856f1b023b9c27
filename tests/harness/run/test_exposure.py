"""Exposure of records that were inserted into the training data: by hand, by chance, and of a model that knows them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from dpbench.data.images import ImageDataModule
from dpbench.data.inserted import Inserted
from dpbench.errors import ConfigurationError
from dpbench.harness.reports.end_of_run import summary
from dpbench.harness.run.evaluation import exposure_by_chance, exposures
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.numbers import exposure_allowed_text
from dpbench.harness.runs.record import read_result
from dpbench.models import CharLSTM
from dpbench.modules import NextToken
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.accounting.tradeoff import membership_bound, reconstruction_bound
from tests.harness.run.test_training_records import ended, state
from tests.modules.test_supervised import SGD, TOKENS, sequences, stepping
from tests.support.processes import TWO

ASKED = ["data.inserted.records=6", "data.inserted.copies=3", "data.inserted.references=100"]
ALLOWED, FIRST = "privacy/exposure_allowed", "privacy/first_rank_allowed"
MEAN, MOST = "nonprivate/exposure_mean", "nonprivate/exposure_max"
SMALL: dict[str, Any] = {"image_size": 8, "expected_batch_size": 64}


def test_exposure_by_hand() -> None:
    found = exposures(np.array([0.0, 1.0, 1.5, 9.0, np.nan]), np.array([1.0, 2.0, np.nan]))
    # a reference that is not finite, or as small, ranks before the record
    assert found.tolist() == pytest.approx([math.log2(4 / rank) for rank in (2, 3, 3, 4, 4)])
    ranks = np.arange(1, 102)
    assert exposure_by_chance(100) == pytest.approx(np.mean(np.log2(101) - np.log2(ranks)))
    assert exposure_by_chance(10**6) == pytest.approx(math.log2(math.e), abs=1e-4)


def test_records_that_nobody_trained_on_have_the_exposure_of_chance() -> None:
    rng = np.random.default_rng(0)
    found = exposures(rng.normal(size=4000), rng.normal(size=4000))
    assert found.mean() == pytest.approx(exposure_by_chance(4000), abs=5 * 1.44 / 4000**0.5)


def test_inserted_records_are_training_records_and_nothing_else() -> None:
    plain = ImageDataModule("digits", val_size=200, **SMALL)
    data = ImageDataModule("digits", val_size=200, inserted=Inserted(5, copies=3, references=7, seed=1), **SMALL)
    n = len(plain.train_set)
    assert len(data.train_set) == data.sampling.population == n + 15
    assert torch.equal(data.train_set.pixels[:n], plain.train_set.pixels)
    pixels, labels = data.train_set.pixels[n:], data.train_set.labels[n:]
    assert torch.equal(pixels[:5], pixels[5:10]) and torch.equal(labels[:5], labels[10:])
    assert len(torch.unique(pixels.flatten(1), dim=0)) == 5
    assert data.val_set is not None and plain.val_set is not None
    assert torch.equal(data.val_set.pixels, plain.val_set.pixels)
    assert torch.equal(data.test_set.pixels, plain.test_set.pixels)
    more = ImageDataModule("digits", val_size=200, inserted=Inserted(5, references=9, seed=1), **SMALL)
    assert torch.equal(more.train_set.pixels[n:], pixels[:5])  # whatever the number of copies and references
    other = ImageDataModule("digits", val_size=200, inserted=Inserted(5, seed=2), **SMALL)
    assert not torch.equal(other.train_set.pixels[n:], pixels[:5])


def test_an_image_is_compared_with_others_under_its_own_label() -> None:
    data = ImageDataModule("digits", inserted=Inserted(20, references=30, seed=1), **SMALL)
    trained = {image.numpy().tobytes() for image in data.train_set.pixels}
    total = 0
    for inserted, references in data.inserted_and_references():
        (images, labels), (others, same) = (next(iter(loader)) for loader in (inserted, references))
        assert len(labels.unique()) == 1 and torch.equal(same, labels[:1].expand(30))
        assert all(image.permute(1, 2, 0).contiguous().numpy().tobytes() in trained for image in images)
        assert not any(image.permute(1, 2, 0).contiguous().numpy().tobytes() in trained for image in others)
        assert abs(float(images.mean() - others.mean())) < 0.5  # drawn alike
        total += len(labels)
    assert total == 20


@pytest.mark.parametrize("more", [["strategy=dpsgd", "ema_decay=0.5"], ["strategy=none"], TWO])
def test_a_run_measures_what_its_final_weights_say(more: list[str], tmp_path: Path) -> None:
    metrics = ended(tmp_path / "a", *ASKED, *more)
    data = ImageDataModule("digits", inserted=Inserted(6, 3, 100, 0), **SMALL)
    (w1, b1), (w2, b2) = ((value[0], value[1]) for value in _pairs(state(tmp_path / "a")))
    found = []
    for inserted, references in data.inserted_and_references():
        losses = []
        for images, labels in (next(iter(loader)) for loader in (inserted, references)):
            logits = torch.relu(images.flatten(1) @ w1.T + b1) @ w2.T + b2
            losses.append(F.cross_entropy(logits.double(), labels, reduction="none").numpy())
        found += [math.log2(101) - math.log2(1 + int((losses[1] <= own).sum())) for own in losses[0]]
    assert metrics[MEAN] == pytest.approx(np.mean(found), abs=0.02)  # a rank may differ by rounding
    assert metrics[MOST] == pytest.approx(max(found), abs=0.05)
    table = pd.read_csv(RunFolder(tmp_path / "a").exposure)
    assert table["exposure"].tolist() == pytest.approx(found, abs=0.1) and set(table["references"]) == {100}
    if "strategy=none" not in more:
        assert read_ledger(RunFolder(tmp_path / "a").ledger).header.population == 1437 + 18


def _pairs(weights: dict[str, torch.Tensor]) -> list[list[torch.Tensor]]:
    values = [value for name, value in weights.items() if name.startswith("model.")]
    return [values[:2], values[2:]]


def test_a_model_that_learned_them_by_heart_has_the_largest_exposure(tmp_path: Path) -> None:
    words = ["strategy=none", "optimizer.lr=0.2", "trainer.max_steps=60", "data.inserted.copies=30", *ASKED[::2]]
    metrics = ended(tmp_path / "a", *words, model=["model=mlp", "model.hidden=[64]", "data.image_size=8"])
    assert metrics[MEAN] == pytest.approx(math.log2(101), abs=0.3)


@pytest.mark.parametrize("copies", [1, 3])
def test_what_the_ledger_allows_stands_beside(copies: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["strategy=dpsgd", "data.inserted.records=6", f"data.inserted.copies={copies}"]
    metrics = ended(tmp_path / "a", *words, "data.inserted.references=100")
    curve = membership_bound([read_ledger(RunFolder(tmp_path / "a").ledger)]).curve
    expected = reconstruction_bound(curve, 101, copies)
    assert metrics[ALLOWED] == pytest.approx(expected.exposure)
    assert metrics[FIRST] == pytest.approx(expected.probability)
    assert 1 / 101 < expected.probability < 1 and exposure_by_chance(100) < expected.exposure < math.log2(101)
    assert metrics[MEAN] < metrics[ALLOWED]
    record = read_result(RunFolder(tmp_path / "a"))
    allowed = exposure_allowed_text(metrics)
    assert allowed is not None
    assert allowed in summary(record, RunFolder(tmp_path / "a"), "")


def test_without_a_ledger_nothing_is_allowed(tmp_path: Path) -> None:
    metrics = ended(tmp_path / "a", *ASKED, "strategy=none")
    assert MEAN in metrics and ALLOWED not in metrics and FIRST not in metrics


def test_losses_of_sequences_are_those_that_are_trained_on() -> None:
    torch.manual_seed(0)
    module = stepping(NextToken(CharLSTM(TOKENS, hidden=5), SGD, TOKENS))
    expected = module.training_step(sequences(), 0)["record_metrics"]["loss"]()
    torch.testing.assert_close(module.losses(sequences()).float(), expected)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["data.inserted.records=-1"], "data.inserted.records must be a whole number from 0 on"),
        (["data.inserted.copies=0"], "data.inserted.copies must be a whole number from 1 on"),
        (["+data.inserted.count=3"], "there is no key data.inserted.count"),
        (["module=gan", "model=mlp_gan", "data.inserted.records=3"], "GAN has no losses"),
    ],
)
def test_what_cannot_be_inserted_is_one_line(words: list[str], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=told):
        ended(tmp_path / "a", *words, model=[])


def test_python_says_the_same() -> None:
    with pytest.raises(ConfigurationError, match=r"data\.inserted\.copies must be a whole number from 1 on, not 0"):
        Inserted(copies=0)
    with pytest.raises(ConfigurationError, match="take at most 10,000,000 copies in all"):
        Inserted(1_000_000, copies=11)
    assert Inserted(1_000_000, copies=10).copies == 10  # nothing is drawn yet
    with pytest.raises(ConfigurationError, match=r"there is no key data\.inserted\.count\. Known: copies, rec"):
        ImageDataModule("digits", inserted={"count": 3})  # type: ignore[arg-type]
