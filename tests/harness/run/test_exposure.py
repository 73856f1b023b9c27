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
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.accounting.tradeoff import membership_bound, reconstruction_bound
from tests.harness.run.test_training_records import ended, state
from tests.support.processes import TWO

ASKED = ["data.inserted.records=6", "data.inserted.copies=3", "data.inserted.references=100"]
ALLOWED, FIRST = "privacy/exposure_allowed", "privacy/first_rank_allowed"
MEAN, MOST = "nonprivate/exposure_mean", "nonprivate/exposure_max"
SMALL: dict[str, Any] = {"image_size": 8, "expected_batch_size": 64}


def test_exposure_by_hand() -> None:
    found = exposures(np.array([0.0, 1.0, 1.5, 9.0, np.nan]), np.array([1.0, 2.0, np.nan]))
    # a reference that is not finite, or as small, ranks before the record
    assert found.tolist() == pytest.approx((2 - np.log2([2, 3, 3, 4, 4])).tolist())
    assert exposure_by_chance(100) == pytest.approx(np.log2(101 / np.arange(1, 102)).mean())


def test_inserted_records_are_training_records_and_nothing_else() -> None:
    def made(**inserted: int) -> Any:
        return ImageDataModule("digits", inserted=Inserted(**inserted), **SMALL)

    plain, data = made(records=0), made(records=5, copies=3, references=7, seed=1)
    n = len(plain.train_set)
    assert len(data.train_set) == data.sampling.population == n + 15
    pixels, labels = data.train_set.pixels, data.train_set.labels[n:]
    assert torch.equal(pixels[:n], plain.train_set.pixels) and torch.equal(data.test_set.pixels, plain.test_set.pixels)
    assert torch.equal(pixels[n : n + 5], pixels[n + 5 : n + 10]) and torch.equal(labels[:5], labels[10:])
    assert len(torch.unique(pixels[n:].flatten(1), dim=0)) == 5
    other = made(records=5, references=9, seed=1).train_set.pixels[n:]  # the same whatever the number of references
    assert torch.equal(other, pixels[n : n + 5])


def test_an_image_is_compared_with_others_under_its_own_label() -> None:
    data = ImageDataModule("digits", inserted=Inserted(20, references=30, seed=1), **SMALL)
    trained = {image.numpy().tobytes() for image in data.train_set.pixels}
    total = 0
    for loaders in data.inserted_and_references():
        (images, labels), (others, same) = (next(iter(loader)) for loader in loaders)
        assert len(labels.unique()) == 1 and torch.equal(same, labels[:1].expand(30))
        pixels = torch.cat([images, others]).permute(0, 2, 3, 1)
        known = [image.contiguous().numpy().tobytes() in trained for image in pixels]
        assert known == [True] * len(images) + [False] * 30
        total += len(images)
    assert total == 20


@pytest.mark.parametrize("more", [["strategy=dpsgd", "ema_decay=0.5"], TWO])
def test_a_run_measures_what_its_final_weights_say(more: list[str], tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a")
    metrics = ended(run.path, *ASKED, *more)
    data = ImageDataModule("digits", inserted=Inserted(6, 3, 100, 0), **SMALL)
    w1, b1, w2, b2 = (value for name, value in state(run.path).items() if name.startswith("model."))
    found: list[float] = []
    for loaders in data.inserted_and_references():
        own, others = (
            F.cross_entropy((torch.relu(images.flatten(1) @ w1.T + b1) @ w2.T + b2).double(), labels, reduction="none")
            for images, labels in (next(iter(loader)) for loader in loaders)
        )
        found += (math.log2(101) - torch.log2(1 + (others <= own[:, None]).sum(1))).tolist()
    assert metrics[MEAN] == pytest.approx(np.mean(found), abs=0.02)  # a rank may differ by rounding
    assert metrics[MOST] == pytest.approx(max(found), abs=0.05)
    table = pd.read_csv(run.exposure)
    assert table["exposure"].tolist() == pytest.approx(found, abs=0.1) and set(table["references"]) == {100}
    ledger = read_ledger(run.ledger)
    assert ledger.header.population == 1437 + 18
    expected = reconstruction_bound(membership_bound([ledger], copies=3).curve, 101)
    assert metrics[ALLOWED] == pytest.approx(expected.exposure)
    assert metrics[FIRST] == pytest.approx(expected.probability)
    assert max(metrics[MEAN], exposure_by_chance(100)) < expected.exposure < math.log2(101)
    allowed = exposure_allowed_text(metrics)
    assert allowed is not None and allowed in summary(read_result(run), run, "")


def test_what_cannot_be_inserted(tmp_path: Path) -> None:
    for options, message in (
        ({"copies": 0}, r"data\.inserted\.copies must be a whole number of at least 1, not 0"),
        ({"records": 1_000_000, "copies": 11}, "take at most 10,000,000 copies in all"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            Inserted(**options)
    with pytest.raises(ConfigurationError, match=r"there is no key data\.inserted\.count\. Known: copies, rec"):
        ImageDataModule("digits", inserted={"count": 3})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="not GAN: remove"):
        ended(tmp_path, "module=gan", "model=mlp_gan", "data.inserted.records=3", model=[])
