"""Scattering features: what they see and what they do not."""

from __future__ import annotations

import pytest
import torch

from dpbench.data.images import ImageDataModule
from dpbench.data.scattering import _average, _modulus, _wavelets, scattering
from dpbench.errors import ConfigurationError


def test_shape_and_independence_of_images() -> None:
    images = torch.rand(120, 28, 28, 1, generator=torch.Generator().manual_seed(0))
    features = scattering(images)
    assert features.shape == (120, 7, 7, 81) and features.isfinite().all()
    torch.testing.assert_close(features[110:], scattering(images[110:]), rtol=1e-4, atol=1e-5)
    colors = scattering(images[:2].expand(-1, -1, -1, 3))
    assert colors.shape == (2, 7, 7, 243)


@pytest.mark.parametrize("scale", [0, 1])
def test_wavelets_see_waves_of_their_own_direction_and_no_constants(scale: int) -> None:
    bank = _wavelets(scale)
    assert _modulus(torch.ones(1, 1, 48, 48), bank, 1).abs().max() < 1e-5
    at = torch.arange(48.0)
    wave = torch.cos(2.3562 / 2**scale * at)  # the wavelet's own frequency
    along_x, along_y = wave.expand(48, 48), wave[:, None].expand(48, 48)
    answers = [_modulus(image[None, None], bank, 1)[0, :, 20:28, 20:28].mean((1, 2)) for image in (along_x, along_y)]
    assert [int(answer.argmax()) for answer in answers] == [0, 4]
    assert float(answers[0][0]) > 5 * float(answers[0][4])


def test_averages_keep_constants_and_little_shifts_hardly_matter() -> None:
    for spacing in (1, 2):
        torch.testing.assert_close(
            _average(torch.ones(1, 2, 16, 16), spacing), torch.ones(1, 2, 4 * spacing, 4 * spacing)
        )
    image = torch.zeros(1, 28, 28, 1)
    image[:, 8:20, 12:16] = 1.0
    moved, other = image.roll(1, 2), image.transpose(1, 2)
    here, near, far = (scattering(x) for x in (image, moved, other))
    assert float((here - near).norm()) < 0.5 * float((here - far).norm())


def test_in_the_data_module() -> None:
    data = ImageDataModule("digits", features="scattering")
    assert data.input_shape == (81, 7, 7)
    batch, labels = data.noise_batch(3, torch.Generator().manual_seed(0))
    assert batch.shape == (3, 81, 7, 7) and labels.shape == (3,)
    with pytest.raises(ConfigurationError, match="sides that 4 divides"):
        ImageDataModule("digits", features="scattering", image_size=18).setup()
    with pytest.raises(ConfigurationError, match="null or scattering, not 'sift'"):
        ImageDataModule("digits", features="sift")
