"""Scattering features: what they see and what they do not."""

from __future__ import annotations

import pytest
import torch

from dpbench.data.images import ImageDataModule
from dpbench.data.scattering import (
    _average,
    _modulus,
    _wavelets,
    color_scattering,
    mirrored_scattering,
    scattering,
)
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
            _average(torch.ones(1, 2, 16, 16), spacing, 0.0), torch.ones(1, 2, 4 * spacing, 4 * spacing)
        )
    image = torch.zeros(1, 28, 28, 1)
    image[:, 8:20, 12:16] = 1.0
    moved, other = image.roll(1, 2), image.transpose(1, 2)
    here, near, far = (scattering(x) for x in (image, moved, other))
    assert float((here - near).norm()) < 0.5 * float((here - far).norm())


def test_averages_stand_in_the_middle_of_blocks() -> None:
    line = torch.arange(32.0)[None, None, None].expand(1, 1, 32, 32)
    for spacing in (1, 2):
        found = _average(line[..., ::spacing, ::spacing], spacing, 1.5)[0, 0, 0]
        torch.testing.assert_close(found[2:6], torch.tensor([9.5, 13.5, 17.5, 21.5]), rtol=1e-3, atol=1e-3)


def test_brightness_and_colors_apart() -> None:
    grays = torch.rand(3, 32, 32, 1, generator=torch.Generator().manual_seed(0))
    features = color_scattering(grays.expand(-1, -1, -1, 3))
    assert features.shape == (3, 8, 8, 243)
    torch.testing.assert_close(features[..., :81], color_scattering(grays), rtol=1e-3, atol=1e-3)
    assert features[..., 81:].abs().max() < 0.05  # no color is seen in gray
    colored = torch.cat([grays, 0.5 - grays / 2, 0.5 - grays / 2], 3)
    assert color_scattering(colored)[..., 81:].abs().max() > 1


def test_a_mirror_image_has_the_same_mirrored_features() -> None:
    images = torch.rand(4, 32, 32, 3, generator=torch.Generator().manual_seed(0))
    here, there, other = (mirrored_scattering(x) for x in (images, images.flip(2), images.transpose(1, 2)))
    assert here.shape == (4, 8, 4, 243) and here.is_contiguous()
    fine = [color * 81 + k for color in range(3) for k in range(9)]  # pixels and finest wavelets: to the last digits
    torch.testing.assert_close(here[..., fine], there[..., fine], rtol=1e-3, atol=1e-3)
    assert (here - there).norm() < 0.3 * (here - other).norm()


def test_in_the_data_module() -> None:
    data = ImageDataModule("digits", features="scattering")
    assert data.input_shape == (81, 7, 7)
    batch, labels = data.noise_batch(3, torch.Generator().manual_seed(0))
    assert batch.shape == (3, 81, 7, 7) and labels.shape == (3,)
    with pytest.raises(ConfigurationError, match="sides that 4 divides"):
        ImageDataModule("digits", features="scattering", image_size=18).setup()
    with pytest.raises(ConfigurationError, match="mirrored_scattering needs images with sides that 8 divides"):
        ImageDataModule("digits", features="mirrored_scattering").setup()
    mirrored = ImageDataModule("digits", features="mirrored_scattering", image_size=32)
    assert mirrored.input_shape == (81, 8, 4)
    assert mirrored.noise_batch(3, torch.Generator().manual_seed(0))[0].shape == (3, 81, 8, 4)
    with pytest.raises(ConfigurationError, match="null or one of scattering, .*, not 'sift'"):
        ImageDataModule("digits", features="sift")
