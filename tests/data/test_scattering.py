"""Scattering features: what they see and what they do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

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
    images = torch.rand(110, 12, 12, 1)
    features = scattering(images)
    assert features.shape == (110, 3, 3, 81) and features.isfinite().all()
    torch.testing.assert_close(features[105:], scattering(images[105:]), rtol=1e-4, atol=1e-5)
    colors = scattering(images[:2].expand(-1, -1, -1, 3))
    assert colors.shape == (2, 3, 3, 243)
    assert torch.equal(scattering(images[:2].double()), scattering(images[:2]))


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


def test_brightness_and_colors_apart() -> None:
    grays = torch.rand(3, 32, 32, 1)
    features = color_scattering(grays.expand(-1, -1, -1, 3))
    assert features.shape == (3, 8, 8, 243)
    torch.testing.assert_close(features[..., :81], color_scattering(grays), rtol=1e-3, atol=1e-3)
    assert (features[..., 81:] - features[:1, :1, :1, 81:]).abs().max() < 0.05  # no color is seen in gray
    colored = torch.cat([grays, 0.5 - grays / 2, 0.5 - grays / 2], 3)
    assert color_scattering(colored)[..., 81:].abs().max() > 1


@pytest.mark.parametrize("spacing", [1, 2])
def test_averages_are_those_of_a_convolution(spacing: int) -> None:
    planes = torch.rand(2, 3, 16, 16)
    reach = 5 if spacing == 1 else 3
    bell = torch.exp(-torch.arange(-reach, reach + 1.0).square() / (2 * (1.6 / spacing) ** 2))
    bell = bell / bell.sum()
    flat = F.pad(planes.flatten(0, 1)[:, None], (reach,) * 4, mode="reflect")
    expected = F.conv2d(flat, torch.outer(bell, bell)[None, None], stride=4 // spacing).view(2, 3, 4 * spacing, -1)
    torch.testing.assert_close(_average(planes, spacing, 0.0), expected, rtol=1e-4, atol=1e-5)


def test_images_with_other_channels_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="1 or 3 channels, not 4: take data.features=scattering"):
        color_scattering(torch.rand(2, 16, 16, 4))


def test_a_mirror_image_has_the_same_mirrored_features() -> None:
    images = torch.rand(4, 32, 32, 3)
    here, there, other = (mirrored_scattering(x) for x in (images, images.flip(2), images.transpose(1, 2)))
    assert here.shape == (4, 8, 4, 243) and here.is_contiguous()
    fine = [color * 81 + k for color in range(3) for k in range(9)]  # pixels and finest wavelets: to the last digits
    torch.testing.assert_close(here[..., fine], there[..., fine], rtol=1e-3, atol=1e-3)
    assert (here - there).norm() < 0.3 * (here - other).norm()


def test_in_the_data_module() -> None:
    for features, shape in (("scattering", (81, 4, 4)), ("mirrored_scattering", (81, 4, 2))):
        data = ImageDataModule("digits", features=features, image_size=16)
        batch, labels = data.noise_batch(3, torch.Generator())
        assert data.input_shape == shape and batch.shape == (3, *shape) and labels.shape == (3,)
    for options, message in (
        ({"features": "scattering", "image_size": 18}, "sides from 12 on that 4 divides"),
        ({"features": "mirrored_scattering"}, "mirrored_scattering needs .* sides from 12 on that 8 divides"),
        ({"features": "scattering", "scale": "unit"}, "remove data.scale=unit"),
        ({"features": "sift"}, "null or one of scattering, .*, not 'sift'"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            ImageDataModule("digits", **options).setup()
