"""Synthetic data: sampled reproducibly with a card, judged by figures whose right value is known."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpbench.capabilities.synthesis._fidelity import (
    accuracies,
    density_and_coverage,
    fidelity,
    random_affine,
)
from dpbench.capabilities.synthesis.evaluate import evaluate
from dpbench.capabilities.synthesis.memorization import memorization
from dpbench.capabilities.synthesis.sample import sample
from dpbench.errors import ConfigurationError
from tests.support.cli import dpbench


@pytest.fixture(scope="module")
def run(trained: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private GAN after twelve lots of real digits."""
    return Path(shutil.copytree(trained("gan"), tmp_path_factory.mktemp("gan") / "run"))


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def card_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "privacy.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_train_sample_evaluate(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GAN from end to end."""
    assert (copy / "samples.png").read_bytes()[:4] == b"\x89PNG"
    assert "ε = " in dpbench(tmp_path, *["sample", "copy", "--num-samples", "40", "--out", "out"])[0]
    data = np.load(tmp_path / "out" / "images.npz")
    assert data["images"].shape == (40, 16, 16, 1) and data["images"].dtype == np.uint8
    assert np.bincount(data["labels"]).tolist() == [4] * 10
    card = card_of(tmp_path / "out")
    record = json.loads((copy / "result.json").read_text(encoding="utf-8"))
    assert card["epsilon"] == record["privacy"]["epsilon"]
    assert (card["delta"], card["training_data"], card["unit"]) == (1e-4, "digits", "example")
    page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "- Membership inference: an attacker with a false positive rate of 1 % identifies at most " in page
    assert f"ε = {card['epsilon']['rdp']:.3f} (RDP)" in page
    words = ["evaluate", "copy", "--num-samples", "200"]
    assert "Fréchet distance (digits_cnn features)" in dpbench(tmp_path, *words)[0]
    found = json.loads((copy / "evaluation.json").read_text(encoding="utf-8"))
    assert (found["images"], found["judged_on"]) == (200, "test")
    assert "holds out 0 records" in dpbench(tmp_path, *words, "--split", "val", status=1)[1]


def test_sampling_is_reproducible(run: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        sample(run, 20, tmp_path / name, seed)
    one, same, other = (np.load(tmp_path / name / "images.npz")["images"] for name in "abc")
    assert (one == same).all()
    assert (one != other).any()


def test_a_cut_ledger_is_no_guarantee(copy: Path, tmp_path: Path) -> None:
    ledger = copy / "ledger.jsonl"
    lines = ledger.read_text(encoding="utf-8").splitlines(keepends=True)
    for kept in (lines[:-2], None):
        ledger.unlink()
        if kept is not None:
            ledger.write_text("".join(kept), encoding="utf-8")
        with pytest.raises(ConfigurationError, match="missing, damaged or cut"):
            sample(copy, 3, tmp_path / "none")


@pytest.mark.parametrize(
    ("old", "new", "with_result"),
    [
        ('noise_std":', 'noise_std":1', False),
        ('"checksum":"', '"checksum":"0', False),
        ('"delta":0.0', '"delta":0.1', True),
    ],
    ids=["noise alone", "sums", "delta"],
)
def test_an_edited_ledger_is_no_guarantee(copy: Path, tmp_path: Path, old: str, new: str, with_result: bool) -> None:
    """The card said ε = 0.05 of a run whose noise somebody had multiplied by ten."""
    edit(copy / "ledger.jsonl", old, new)
    if not with_result:
        (copy / "result.json").unlink()
    with pytest.raises(
        ConfigurationError, match=r"(edited, or belongs to another run|damaged or cut).*restore the ledger"
    ):
        sample(copy, 3, tmp_path / "none")


def test_a_ledger_beside_a_checkpoint_without_privacy_is_no_guarantee(copy: Path, tmp_path: Path) -> None:
    """Such as of a private run whose checkpoint was replaced."""
    path = copy / "checkpoints" / "last.ckpt"
    state = torch.load(path, weights_only=False)
    for callbacks in ({"dpbench.PrivateStrategy": {"private": False}}, {}):
        torch.save({**state, "callbacks": callbacks}, path)
        out = tmp_path / f"out {len(callbacks)}"
        assert "NOT private" in sample(copy, 3, out)
        card = card_of(out)
        assert card["delta"] is None
        assert set(card["epsilon"].values()) == {None}


def test_the_card_believes_the_ledger(copy: Path, tmp_path: Path) -> None:
    """A run that began with secret noise may have been resumed with a seed."""
    edit(copy / "config.yaml", "secure: false", "secure: true")
    edit(copy / "result.json", '"secure": false', '"secure": true')
    sample(copy, 3, tmp_path / "out")
    assert card_of(tmp_path / "out")["secure_randomness"] is False
    assert "can subtract it" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_a_full_disk_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(ConfigurationError, match="--out .*out cannot be written: No space left"):
        sample(run, 5, tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_a_diverged_generator_makes_no_images(copy: Path, tmp_path: Path) -> None:
    path = copy / "checkpoints" / "last.ckpt"
    state = torch.load(path, weights_only=False)
    next(value for name, value in state["state_dict"].items() if name.startswith("generator")).fill_(torch.nan)
    torch.save(state, path)
    with pytest.raises(ConfigurationError, match="the training has diverged"):
        sample(copy, 3, tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("result.json", '"privacy": {', '"privacy": {"audit": {"verdict": "VIOLATED"}, ', "VIOLATED; its epsilon"),
        ("config.yaml", "modules.GAN", "modules.ImageClassifier", "has no generator"),
        ("config.yaml", "width: 8", "width: 16", "of another architecture than .*config.yaml says"),
        ("checkpoints/last.ckpt", "", "PK cut short", "cannot be read"),
        ("checkpoints/last.ckpt", "", "gone", "has no checkpoint"),
    ],
    ids=["accused", "generator", "width", "cut", "gone"],
)  # fmt: skip
def test_a_damaged_run_is_not_sampled(copy: Path, tmp_path: Path, file: str, old: str, new: str, message: str) -> None:
    path = copy / file
    if new == "gone":
        path.unlink()
    elif old:
        edit(path, old, new)
    else:
        path.write_text(new)
    with pytest.raises(ConfigurationError, match=message):
        sample(copy, 3, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_evaluation_of_other_data_than_trained_on(copy: Path) -> None:
    edit(copy / "config.yaml", "image_size: 16", "image_size: 20")
    with pytest.raises(ConfigurationError, match="was trained on other data than its configuration says"):
        evaluate(copy, 200)


def test_bad_input(run: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for number, place, seed, message in (
        (3, "full", 0, "is not empty: choose another"),
        (3, "loop", 0, "loop"),
        (3, "none", 10**20, "--seed must lie between"),
        (0, "none", 0, "--num-samples must lie between"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            sample(run, number, tmp_path / place, seed)
    with pytest.raises(ConfigurationError, match="holds no run"):
        sample(tmp_path / "full", 3, tmp_path / "none")


def test_bad_settings(tmp_path: Path) -> None:
    for word, message in {
        "data.features=scattering": "keep data.features=null",
        "model=mnist_cnn": "needs a generator and a discriminator",
        "module=classifier": "there is no key module.discriminator_steps",
        "data.scale=standard": "leave data.scale=symmetric",
        "module.discriminator_steps=0": "discriminator_steps must be a whole number of at least 1",
        "data.image_size=18": "sides that 4 divides",
        "strategy.max_physical_batch_size=8": "needs automatic optimization",
    }.items():
        assert message in dpbench(tmp_path, "train", "experiment=digits_gan", "logger=none", word, status=1)[1]


def blobs(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images whose class is where they are bright."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (size,), generator=generator)
    images = torch.rand(size, 1, 16, 16, generator=generator) * 0.5
    for row, label in enumerate(labels):
        images[row, 0, 8 * (label // 2) : 8 * (label // 2) + 8, 8 * (label % 2) : 8 * (label % 2) + 8] += 0.4
    return images, labels


@pytest.mark.long
def test_classifiers_learn_from_synthetic_images_alone() -> None:
    found = accuracies(blobs(200, 0), blobs(100, 1), 4)
    assert min(found.values()) > 0.95
    images, labels = blobs(200, 2)
    wrong = accuracies((images, (labels + 1) % 4), blobs(100, 3), 4)
    assert max(wrong.values()) < 0.05


@pytest.mark.long
def test_fidelity_of_the_same_and_of_other_images() -> None:
    one, two = blobs(300, 0)[0], blobs(300, 1)[0]
    same, other = (fidelity(images, two) for images in (one, 1 - one))
    assert same["features"] == "digits_cnn"
    assert float(same["frechet_distance_digits_cnn"]) < 0.1 * float(other["frechet_distance_digits_cnn"])
    assert 0.8 < float(same["density"]) < 1.2
    assert float(same["coverage"]) > 0.85
    assert float(other["coverage"]) < 0.1


def test_augmented_images_are_moved_a_little() -> None:
    torch.manual_seed(0)
    image = torch.zeros(200, 1, 28, 28)
    image[:, :, 12:16, 6:22] = 1
    moved = random_affine(image)
    assert (moved - image).abs().amax((1, 2, 3)).min() > 0.1
    assert abs(float(moved.mean() / image.mean()) - 1) < 0.05
    gray = torch.full((3, 2, 8, 8), 0.5)
    torch.testing.assert_close(random_affine(gray), gray)


def test_coverage_sees_a_mode_that_is_missing() -> None:
    generator = torch.Generator().manual_seed(0)
    real = torch.randn(400, 3, generator=generator) + 10 * (torch.arange(400) % 2)[:, None]
    half = torch.randn(400, 3, generator=generator)
    density, coverage = density_and_coverage(half, real)
    assert 0.4 < coverage < 0.5
    assert density > 0.8


def test_memorization_flags_a_generator_that_copies() -> None:
    generator = torch.Generator().manual_seed(0)
    train, test, fresh = (torch.rand(size, 4, 4, generator=generator) for size in (3000, 500, 500))
    copies = train[:500] + 0.02 * torch.randn(500, 4, 4, generator=generator)
    assert memorization(copies, train, test)["memorization_suspected"]
    one_in_ten = torch.where((torch.arange(500) % 10 == 0)[:, None, None], copies, fresh)
    assert 0.09 < memorization(one_in_ten, train, test)["unusually_close"] < 0.15


def test_memorization_does_not_flag_an_honest_generator() -> None:
    """Fresh images, blurred ones, and a collapsed generator of few."""
    generator = torch.Generator().manual_seed(0)
    train, test, fresh = (torch.rand(size, 4, 4, generator=generator) for size in (2000, 400, 500))
    collapsed = fresh[:8].repeat(60, 1, 1) + 0.01 * torch.randn(480, 4, 4, generator=generator)
    for images in (fresh, 0.5 + 0.1 * (fresh - 0.5), collapsed):
        assert not memorization(images, train, test)["memorization_suspected"]
