"""An extractor trained on random images: it learns, goes on where it was, and looks at each image alone."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

from dpbench.capabilities.prior import extractor, pretraining
from dpbench.capabilities.prior.extractor import Settings, load
from dpbench.capabilities.prior.pretraining import alignment_and_uniformity, pretrain
from dpbench.data.images import ImageDataModule
from dpbench.errors import ConfigurationError, DataError, Diverged
from dpbench.harness.run.search_path import _prior_sha256
from tests.support.cli import dpbench

SMALL = Settings(image_size=16, width=8, steps=4, batch_size=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("priors")


@pytest.fixture(autouse=True)
def few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretraining, "_STATISTICS_IMAGES", 400)


@pytest.fixture(scope="module")
def small(folder: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretraining, "_STATISTICS_IMAGES", 400)
        pretrain(folder / "small.pt", SMALL)
    return folder / "small.pt"


def _weights(path: Path) -> list[torch.Tensor]:
    return list(load(path).network.state_dict().values())


def test_the_same_settings_give_the_same_weights(small: Path, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    pretrain(tmp_path / "prior.pt", SMALL)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one, two) for one, two in zip(_weights(tmp_path / "prior.pt"), _weights(small), strict=True))
    pretrain(tmp_path / "other.pt", replace(SMALL, seed=1))
    assert not torch.equal(_weights(tmp_path / "other.pt")[0], _weights(small)[0])


def test_a_file_is_not_written_over(small: Path) -> None:
    before = small.read_bytes()
    with pytest.raises(ConfigurationError, match=r"small.pt exists: choose another --out, or remove it"):
        pretrain(small, SMALL)
    assert small.read_bytes() == before


def test_a_training_that_diverges_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretraining, "_LOGGED_EVERY", 1)
    real = pretraining._Training._step

    def diverging(self, step):
        if step == 1:
            with torch.no_grad():
                next(self.head.parameters()).fill_(math.inf)
        return real(self, step)

    monkeypatch.setattr(pretraining._Training, "_step", diverging)
    with pytest.raises(Diverged, match=r"is not finite at step 2: train with another --seed"):
        pretrain(tmp_path / "prior.pt", SMALL)
    assert not list(tmp_path.iterdir())


def test_loss_by_hand() -> None:
    points = torch.tensor([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]])
    alignment, uniformity = alignment_and_uniformity(points, points * 2)
    assert float(alignment) == pytest.approx(0.0, abs=1e-6)
    kernels = torch.tensor([-4.0, -8.0, -4.0]).exp().mean().log()  # squared distances 2, 4 and 2
    assert float(uniformity) == pytest.approx(float(kernels), rel=1e-4)
    turned, _ = alignment_and_uniformity(points, points[:, [1, 0]] * torch.tensor([1.0, -1.0]))
    assert float(turned) == pytest.approx(2.0, rel=1e-4)


def test_features_are_of_each_image_alone_and_of_its_mirror_image(small: Path) -> None:
    prior = load(small)
    images = torch.rand(5, 16, 16, 3, generator=torch.Generator().manual_seed(0))
    features = prior.features(images)
    assert features.shape == (5, 4, 4, 96) and features.is_contiguous()
    torch.testing.assert_close(features[3:], prior.features(images[3:]), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(features, prior.features(images.flip(2)), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(features.square().mean((1, 2, 3)), torch.ones(5))
    both = prior.features_and_scattering(images)
    learned, fixed = torch.split(both[:, 0, 0], [1536, 3888], 1)
    torch.testing.assert_close(learned.square().sum(1), fixed.square().sum(1))


def test_in_the_data_module(small: Path) -> None:
    options = {"root": str(small.parent), "prior": "small.pt", "train_size": 20, "test_size": 10, "image_size": 16}
    options["prior_sha256"] = load(small).sha256
    data = ImageDataModule("random_noise", features="random_prior", **options)
    assert data.model_options() == {"input_shape": (96, 4, 4), "num_classes": 10}
    images, _ = next(iter(data.test_dataloader()))
    assert images.shape == (10, 96, 4, 4)
    assert data.noise_batch(3, torch.Generator())[0].shape == (3, 96, 4, 4)


def test_refusals(small: Path, tmp_path: Path) -> None:
    whole = torch.load(small)
    own = load(small).sha256
    shutil.copy(small, tmp_path)
    (tmp_path / "text.pt").write_text("weights")
    torch.save({**whole, "format": "dpbench random prior 9"}, tmp_path / "version.pt")
    torch.save({"format": whole["format"]}, tmp_path / "without_keys.pt")
    (tmp_path / "a_folder").mkdir()
    for words, message in {
        "{features: random_prior}": "data.prior names the file of a trained network, .*: set both, or none",
        "{features: random_prior, prior: none.pt}": "no .*none.pt.* Train it: dpbench pretrain --out none.pt",
        "{features: random_prior, prior: /none.pt}": "/none.pt is not a file: train it with dpbench pretrain",
        "{features: random_prior, prior: text.pt}": "text.pt is damaged, or not from dpbench pretrain: train it again",
        "{features: random_prior, prior: without_keys.pt}": "without_keys.pt is damaged, or not from dpbench pret",
        "{features: random_prior, prior: version.pt}": "version.pt is from another version of dpbench pretrain",
        "{features: random_prior, prior: small.pt, prior_sha256: '00'}": (
            "data.prior=small.pt has changed: .* data.prior_sha256 is 00. Restore the original file"
        ),
        "{features: random_prior, prior: small.pt, prior_sha256: null}": (
            "data.prior_sha256=null would allow a run to continue with another data.prior: remove it, or set"
        ),
        "{features: random_prior, prior: a_folder}": "data.prior=.*a_folder is not a file: train it with",
        "{features: random_prior, prior: small.pt, image_size: 24}": (
            "trained on images of 16×16 pixels, and these have 24×24: set data.image_size=16"
        ),
        "{features: random_prior, prior: small.pt, like: mnist, image_size: 28}": (
            "trained on color images, and the number of channels here is 1, not 3: take data.features=scattering"
        ),
    }.items():
        options = {"root": str(tmp_path), "image_size": 16, "train_size": 4, "test_size": 4, "prior_sha256": own}
        with pytest.raises((ConfigurationError, DataError), match=message):
            ImageDataModule("random_noise", **(options | yaml.safe_load(words))).setup()


def test_command_refuses(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for words, message, status in (
        ("--out prior.pt --steps=0", "--steps must be at least 1, not 0", 1),
        ("--out prior.pt --device=nonsense", "--device=nonsense is not available: use --device=cpu", 1),
        ("--out .", "is a folder", 2),
        ("--out file/prior.pt", "cannot be written", 2),
    ):
        assert message in dpbench(tmp_path, "pretrain", *words.split(), status=status)[1]
    assert not (tmp_path / "prior.pt").exists()
    with pytest.raises(ConfigurationError, match=r"prior.pt cannot be written: "):
        pretrain(tmp_path / "file" / "prior.pt", SMALL)


def test_command_and_the_hash_in_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extractor, "Settings", partial(Settings, image_size=16, width=8, batch_size=8))
    answer, _ = dpbench(tmp_path, "pretrain", "--out", "prior.pt", "--steps=2")
    assert "trained on 16 random images (seed 0)" in answer
    sha256 = load(tmp_path / "prior.pt").sha256
    assert sha256 in answer
    assert _prior_sha256("prior.pt", str(tmp_path)) == sha256
    assert _prior_sha256(None, None) is None
    assert _prior_sha256("none.pt", str(tmp_path)) is None  # refused where the data are made


def test_a_run_goes_on_with_no_other_file(small: Path, tmp_path: Path) -> None:
    shutil.copy(small, tmp_path / "prior.pt")
    words = [
        "train",
        "data=random_noise",
        "data.image_size=16",
        "data.train_size=8",
        "data.test_size=4",
        "model=mlp",
        "logger=none",
        "data.features=random_prior",
        "data.prior=prior.pt",
        "strategy=none",
        "data.expected_batch_size=4",
        "trainer.max_epochs=-1",
        "trainer.max_steps=1",
        "hydra.run.dir=run",
    ]
    _, err = dpbench(tmp_path, *words, "data.prior_sha256=null", status=1)
    assert "data.prior_sha256=null would allow a run to continue" in err
    dpbench(tmp_path, *words)
    state = torch.load(small)
    state["network"]["stem.0.weight"] += 0.1
    torch.save(state, tmp_path / "prior.pt")
    for word in ([], [f"data.prior_sha256={load(tmp_path / 'prior.pt').sha256}"]):
        _, err = dpbench(tmp_path, "resume", "run", "trainer.max_steps=2", *word, status=1)
        assert "data.prior=prior.pt has changed" in err or "remove data.prior_sha256" in err
