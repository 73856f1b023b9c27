"""Synthetic data: sampled reproducibly with a card, judged by figures whose right value is known."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir

from dpbench.capabilities.synthesis._fidelity import (
    accuracies,
    density_and_coverage,
    fidelity,
    random_affine,
)
from dpbench.capabilities.synthesis.evaluate import evaluate
from dpbench.capabilities.synthesis.memorization import memorization
from dpbench.capabilities.synthesis.sample import sample
from dpbench.cli import main
from dpbench.errors import ConfigurationError
from dpbench.harness.run.build import plain
from dpbench.harness.run.search_path import conf_dir
from dpbench.harness.run.train import train as run_training
from tests.support.cli import dpbench
from tests.support.finished_runs import RUNS


@pytest.fixture(scope="module")
def run(trained: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private GAN after twelve lots of real digits."""
    return Path(shutil.copytree(trained("gan"), tmp_path_factory.mktemp("gan") / "run"))


@pytest.mark.slow
def test_train_sample_evaluate(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GAN from end to end."""
    assert (run / "samples.png").read_bytes()[:4] == b"\x89PNG"
    assert main(["sample", str(run), "--num-samples", "40", "--out", str(tmp_path / "out")]) == 0
    assert "ε = " in capsys.readouterr().out
    data = np.load(tmp_path / "out" / "images.npz")
    assert data["images"].shape == (40, 16, 16, 1) and data["images"].dtype == np.uint8
    assert np.bincount(data["labels"]).tolist() == [4] * 10
    card = json.loads((tmp_path / "out" / "privacy.json").read_text(encoding="utf-8"))
    record = json.loads((run / "result.json").read_text(encoding="utf-8"))
    assert card["epsilon"] == record["privacy"]["epsilon"] and card["delta"] == 1e-4
    assert card["training_data"] == "digits" and card["unit"] == "example"
    page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "- Membership inference: an attacker with a false positive rate of 1 % identifies at most " in page
    assert f"ε = {card['epsilon']['rdp']:.3f} (RDP)" in page and "strategy.secure=true before publishing" in page
    assert main(["evaluate", str(run), "--num-samples", "200"]) == 0
    shown = capsys.readouterr().out
    assert "Fréchet distance (digits_cnn features)" in shown and "logistic regression" in shown
    found = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    assert 0 <= found["accuracy_cnn"] <= 1 and 0 <= found["accuracy_cnn_augmented"] <= 1
    assert found["images"] == 200 and found["judged_on"] == "test"
    accuracies = {name: value for name, value in found.items() if name.startswith("accuracy")}
    monkeypatch.setattr("dpbench.capabilities.synthesis.evaluate.accuracies", lambda *_: accuracies)  # which takes long
    assert main(["evaluate", str(run), "--num-samples", "200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == found.keys()
    assert main(["evaluate", str(run), "--num-samples", "200", "--split", "val"]) == 1
    assert "held no records out" in capsys.readouterr().err


def test_sampling_is_reproducible_and_needs_no_data(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> None:
        raise AssertionError("the training data were read")

    monkeypatch.setattr("dpbench.data.images.ImageDataModule.setup", absent)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        sample(run, 20, tmp_path / name, seed)
    one, same, other = (np.load(tmp_path / name / "images.npz")["images"] for name in "abc")
    assert (one == same).all() and (one != other).any()


def test_a_cut_ledger_is_no_guarantee(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    lines = (other / "ledger.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for kept in (lines[:-2], [*lines[:3], "garbage\n", *lines[4:]]):
        (other / "ledger.jsonl").write_text("".join(kept), encoding="utf-8")
        with pytest.raises(ConfigurationError, match="missing, damaged or cut"):
            sample(other, 3, tmp_path / "none")
    (other / "ledger.jsonl").unlink()
    with pytest.raises(ConfigurationError, match="missing, damaged or cut"):
        sample(other, 3, tmp_path / "none")


@pytest.mark.parametrize("with_result", [True, False])
@pytest.mark.parametrize(
    "wrong",
    [('noise_std":', 'noise_std":1'), ('"checksum":"', '"checksum":"0'), ('"delta":0.0', '"delta":0.1')],
    ids=["noise", "sums", "delta"],
)
def test_an_edited_ledger_is_no_guarantee(run: Path, tmp_path: Path, wrong: tuple[str, str], with_result: bool) -> None:
    """The card said ε = 0.05 of a run whose noise somebody had multiplied by ten."""
    other = shutil.copytree(run, tmp_path / "other")
    text = (other / "ledger.jsonl").read_text(encoding="utf-8")
    assert wrong[0] in text
    (other / "ledger.jsonl").write_text(text.replace(*wrong), encoding="utf-8")
    if not with_result:
        (other / "result.json").unlink()
    with pytest.raises(ConfigurationError, match=r"(edited, or is of another run|damaged or cut).*restore the ledger"):
        sample(other, 3, tmp_path / "none")


def test_a_ledger_beside_a_checkpoint_without_privacy_is_no_guarantee(run: Path, tmp_path: Path) -> None:
    """Such as of a private run whose checkpoint was replaced."""
    other = shutil.copytree(run, tmp_path / "other")
    path = other / "checkpoints" / "last.ckpt"
    state = torch.load(path, weights_only=False)
    for callbacks in ({"dpbench.PrivateStrategy": {"private": False}}, {}):
        torch.save({**state, "callbacks": callbacks}, path)
        out = tmp_path / f"out {len(callbacks)}"
        assert "NOT private" in sample(other, 3, out)
        card = json.loads((out / "privacy.json").read_text(encoding="utf-8"))
        assert card["delta"] is None and set(card["epsilon"].values()) == {None}


def test_the_card_believes_the_ledger(run: Path, tmp_path: Path) -> None:
    """A run that began with secret noise may have been resumed with a seed."""
    other = shutil.copytree(run, tmp_path / "other")
    for name in ("config.yaml", "result.json"):
        text = (other / name).read_text(encoding="utf-8")
        changed = text.replace("secure: false", "secure: true").replace('"secure": false', '"secure": true')
        assert changed != text
        (other / name).write_text(changed, encoding="utf-8")
    sample(other, 3, tmp_path / "out")
    card = json.loads((tmp_path / "out" / "privacy.json").read_text(encoding="utf-8"))
    assert card["secure_randomness"] is False
    assert "can subtract it" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_an_audit_that_speaks_against_a_run_is_heard(run: Path, tmp_path: Path) -> None:
    other = shutil.copytree(run, tmp_path / "other")
    record = json.loads((other / "result.json").read_text(encoding="utf-8"))
    record["privacy"]["audit"] = {"verdict": "VIOLATED"}
    (other / "result.json").write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(ConfigurationError, match="VIOLATED; its epsilon is not a guarantee"):
        sample(other, 3, tmp_path / "out")


def test_a_full_disk_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(ConfigurationError, match="--out .*out cannot be written: No space left"):
        sample(run, 5, tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_a_diverged_generator_makes_no_images(run: Path, tmp_path: Path) -> None:
    other = shutil.copytree(run, tmp_path / "other")
    path = other / "checkpoints" / "last.ckpt"
    state = torch.load(path, weights_only=False)
    next(value for name, value in state["state_dict"].items() if name.startswith("generator")).fill_(torch.nan)
    torch.save(state, path)
    with pytest.raises(ConfigurationError, match="its training has diverged"):
        sample(other, 3, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_evaluation_of_other_data_than_trained_on(run: Path, tmp_path: Path) -> None:
    other = shutil.copytree(run, tmp_path / "other")
    config = (other / "config.yaml").read_text(encoding="utf-8")
    assert "image_size: 16" in config
    (other / "config.yaml").write_text(config.replace("image_size: 16", "image_size: 20"), encoding="utf-8")
    with pytest.raises(ConfigurationError, match="was trained on other data than its configuration says"):
        evaluate(other, 200)


@pytest.mark.slow
def test_bad_places_and_seeds(run: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(run, tmp_path / "broken")
    (broken / "config.yaml").write_text("a: [b", encoding="utf-8")
    lost = shutil.copytree(run, tmp_path / "lost")
    text = (lost / "config.yaml").read_text(encoding="utf-8")
    (lost / "config.yaml").write_text(text.replace("modules.GAN", "modules.Nope"), encoding="utf-8")
    with pytest.raises(ConfigurationError, match="is not an importable class: .*Nope"):
        sample(lost, 5, tmp_path / "out")
    cut = shutil.copytree(run, tmp_path / "cut")
    (cut / "result.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="result.json is damaged"):
        sample(cut, 5, tmp_path / "out")
    torch.save([1], cut / "checkpoints" / "last.ckpt")
    with pytest.raises(ConfigurationError, match="is no checkpoint"):
        sample(cut, 5, tmp_path / "out")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(ConfigurationError, match="config.yaml is damaged"):
        sample(broken, 5, tmp_path / "out")
    with pytest.raises(ConfigurationError, match="loop"):
        sample(run, 5, loop)
    with pytest.raises(ConfigurationError, match="--seed must lie between"):
        sample(run, 5, tmp_path / "out", seed=10**20)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="--out .*file/out cannot be written: Not a directory"):
        sample(run, 5, tmp_path / "file" / "out")


def test_bad_input(run: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious").touch()
    with pytest.raises(ConfigurationError, match="is not empty: choose another"):
        sample(run, 3, full)
    assert (full / "precious").exists()
    for number in (0, 10**11):
        with pytest.raises(ConfigurationError, match="--num-samples must lie between"):
            sample(run, number, tmp_path / "none")
    with pytest.raises(ConfigurationError, match="holds no run"):
        sample(tmp_path / "nowhere", 3, tmp_path / "none")
    other = tmp_path / "other"
    shutil.copytree(run, other)
    config = (other / "config.yaml").read_text(encoding="utf-8")
    (other / "config.yaml").write_text(config.replace("width: 8", "width: 16"), encoding="utf-8")
    with pytest.raises(ConfigurationError, match="of another architecture than .*config.yaml says"):
        sample(other, 3, tmp_path / "none")
    (other / "config.yaml").write_text(config.replace("modules.GAN", "modules.ImageClassifier"), encoding="utf-8")
    with pytest.raises(ConfigurationError, match="holds no generator"):
        sample(other, 3, tmp_path / "none")
    (other / "config.yaml").write_text(config, encoding="utf-8")
    (other / "checkpoints" / "last.ckpt").write_bytes(b"PK cut short")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        sample(other, 3, tmp_path / "none")
    (other / "checkpoints" / "last.ckpt").unlink()
    with pytest.raises(ConfigurationError, match="has no checkpoint"):
        sample(other, 3, tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.features=scattering"], "keep data.features=null"),
        (["module.generator_batch_size=2.5"], "generator_batch_size"),
        (["model.noise_size=0"], "noise_size must be a whole number from 1 on"),
        (["model=mnist_cnn"], "needs a generator and a discriminator"),
        (["module=classifier"], "there is no key module.discriminator_steps"),
        (["data.scale=standard"], "leave data.scale=symmetric"),
        (["module.discriminator_steps=0"], "discriminator_steps must be a whole number from 1 on"),
        (["data.image_size=18"], "sides that 4 divides"),
        (["module.generator_optimizer.lr=-1"], "generator_optimizer.lr must be a positive number"),
        (["strategy.max_physical_batch_size=8"], "needs automatic optimization"),
    ],
)
def test_bad_settings(tmp_path: Path, words: list[str], message: str) -> None:
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = plain(compose("config", ["experiment=digits_gan", "logger=none", "run.group=gan", *words]))
    with pytest.raises(ConfigurationError, match=message):
        run_training(config, tmp_path / "run")


@pytest.mark.slow
def test_not_private_says_so(tmp_path: Path) -> None:
    words = ["strategy=none", "trainer.max_steps=2", "model.conditional=false"]
    dpbench(tmp_path, "train", *RUNS["gan"], *words, "hydra.run.dir=run")
    folder = tmp_path / "run"
    assert "NOT private" in sample(folder, 5, tmp_path / "out")
    assert "NOT private" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "labels" not in np.load(tmp_path / "out" / "images.npz")


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


def test_augmented_images_are_moved_a_little() -> None:
    torch.manual_seed(0)
    image = torch.zeros(200, 1, 28, 28)
    image[:, :, 12:16, 6:22] = 1
    moved = random_affine(image)
    assert moved.shape == image.shape and moved.min() >= 0 and moved.max() <= 1
    assert not torch.equal(moved[0], moved[1])
    assert (moved - image).abs().amax((1, 2, 3)).min() > 0.1
    mass = moved.sum((1, 2, 3)) / image[0].sum()
    assert mass.min() > 0.7 and mass.max() < 1.5 and abs(float(mass.mean()) - 1) < 0.05
    torch.testing.assert_close(random_affine(torch.full((3, 2, 8, 8), 0.5)), torch.full((3, 2, 8, 8), 0.5))


@pytest.mark.long
def test_fidelity_of_the_same_and_of_other_images() -> None:
    one, two = blobs(300, 0)[0], blobs(300, 1)[0]
    same, other = (fidelity(images, two) for images in (one, 1 - one))
    assert same["features"] == "digits_cnn"
    assert float(same["frechet_distance_digits_cnn"]) < 0.1 * float(other["frechet_distance_digits_cnn"])
    assert 0.8 < float(same["density"]) < 1.2 and float(same["coverage"]) > 0.85
    assert float(other["coverage"]) < 0.1


def test_coverage_sees_a_mode_that_is_missing() -> None:
    generator = torch.Generator().manual_seed(0)
    real = torch.randn(400, 3, generator=generator) + 10 * (torch.arange(400) % 2)[:, None]
    half = torch.randn(400, 3, generator=generator)
    density, coverage = density_and_coverage(half, real)
    assert 0.4 < coverage < 0.5 and density > 0.8


def test_memorization_flags_a_generator_that_copies() -> None:
    generator = torch.Generator().manual_seed(0)
    train, test, fresh = (torch.rand(size, 4, 4, generator=generator) for size in (3000, 500, 500))
    copies = train[:500] + 0.02 * torch.randn(500, 4, 4, generator=generator)
    assert memorization(copies, train, test)["memorization_suspected"]
    one_in_ten = torch.where((torch.arange(500) % 10 == 0)[:, None, None], copies, fresh)
    found = memorization(one_in_ten, train, test)
    assert found["memorization_suspected"] and 0.09 < found["unusually_close"] < 0.15
    doubled = torch.cat([test[:480], train[:20]])  # test images that are training images say nothing of what is usual
    assert memorization(copies, train, doubled)["memorization_suspected"]
    few = copies[:5].repeat(100, 1, 1)  # a generator that knows five training images
    assert memorization(few, train, test)["memorization_suspected"]


@pytest.mark.parametrize("seed", range(20))
def test_memorization_does_not_flag_an_honest_generator(seed: int) -> None:
    """Fresh images, blurred ones, and a collapsed generator of few."""
    generator = torch.Generator().manual_seed(seed)
    train, test, fresh = (torch.rand(size, 4, 4, generator=generator) for size in (2000, 400, 500))
    collapsed = fresh[:8].repeat(60, 1, 1) + 0.01 * torch.randn(480, 4, 4, generator=generator)
    for images in (fresh, 0.5 + 0.1 * (fresh - 0.5), collapsed):
        assert not memorization(images, train, test)["memorization_suspected"]
