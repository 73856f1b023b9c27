"""Images of random processes: dead leaves, 1/f noise in color, random shaders; nothing real is in them.

Dead leaves and noise share with photographs the occlusions and the spectrum (Lee, Mumford and Huang 2001; Baradad et
al. 2021, "Learning to See by Looking at Noise"); shaders are small random networks of a pixel's place. All images of a
call are made at once, and are a function of the generator and the sizes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LEAVES = 48
"""Number of leaves of an image; uncovered pixels show a shader or noise."""
SHAPES = 10
"""Classes of `labeled_shapes`: an object with 0, 2, 3, 4 or 5 lobes, filled or as a ring."""
_TYPES = 3  # of leaves: ellipse, rectangle, diamond
_WIDTH = 12  # of a shader's layers
_INPUTS = 6  # of a shader: place, distance, a constant, and two fields of noise
# Red, green and blue of brightness and two differences of colors, which are fainter, as in photographs.
_TO_RGB = ((1.0, 0.6, 0.4), (1.0, -0.4, 0.4), (1.0, -0.2, -1.0))
_CHROMA = 0.35
_LOBES = (0, 2, 3, 4, 5)


def noise_images(count: int, side: int, generator: torch.Generator) -> Tensor:
    """1/f^a noise in color: a, direction, saturation, contrast and a fold of each image are drawn, too.

    Args:
        count: Number of images.
        side: Side of an image, in pixels.
        generator: Gives all random numbers, on the device of the images.

    Returns:
        (count, 3, side, side) in [0, 1].
    """
    fields = _fields(count, 3, side, generator)
    folded = _uniform(generator, count, 1, 1, 1) < 0.3
    fields = torch.where(folded, fields.abs() - 0.8, fields)  # ridges
    return _toned(_colored(fields), generator)


def shader_images(count: int, side: int, generator: torch.Generator) -> Tensor:
    """Colors as a random network of a pixel's place and of noise there; each image has weights of its own.

    Args:
        count: Number of images.
        side: Side of an image, in pixels.
        generator: Gives all random numbers, on the device of the images.

    Returns:
        (count, 3, side, side) in [0, 1].
    """
    x, y = _grid(side, generator.device)
    angle = _uniform(generator, count, 1, 1) * 2 * math.pi
    along = angle.cos() * x + angle.sin() * y
    across = angle.cos() * y - angle.sin() * x
    distance = ((x - _normal(generator, count, 1, 1)).square() + (y - _normal(generator, count, 1, 1)).square()).sqrt()
    warp = _fields(count, 2, side, generator) * _uniform(generator, count, 1, 1, 1)
    planes = [along, across, distance, torch.ones_like(along), warp[:, 0], warp[:, 1]]
    values = torch.stack(planes, 1).flatten(2)
    frequency = torch.exp(_uniform(generator, count, 1, 1) * 2.0)  # of the first layer's waves
    first = _normal(generator, count, _WIDTH, _INPUTS) * frequency / math.sqrt(_INPUTS) * 1.5
    values = torch.sin(first @ values)
    second = _normal(generator, count, _WIDTH, _WIDTH) * 2.0 / math.sqrt(_WIDTH)
    values = torch.tanh(second @ values)
    last = _normal(generator, count, 3, _WIDTH) / math.sqrt(_WIDTH)
    colors = (last @ values).view(count, 3, side, side)
    return _toned(_colored(colors * 1.5), generator)


def dead_leaves(count: int, side: int, generator: torch.Generator, textures: Tensor) -> Tensor:
    """Ellipses, rectangles and diamonds that cover one another, with radii of density r^-3, each of its own color.

    Args:
        count: Number of images.
        side: Side of an image, in pixels.
        generator: Gives all random numbers, on the device of the images.
        textures: (count, 3, side, side) in [0, 1]: texture of the leaves, which each mixes with its color to its own
            extent, and of uncovered pixels.

    Returns:
        (count, 3, side, side) in [0, 1].
    """
    x, y = _grid(side, generator.device)
    x, y = x[:1], y[:, :1]
    smallest = (3.0 + 9.0 * _uniform(generator, count, 1)) / side
    largest = 1.0
    quantile = _uniform(generator, count, LEAVES)
    # The inverse of the distribution function of density r^-3.
    radius = (smallest**-2 - quantile * (smallest**-2 - largest**-2)).rsqrt()
    aspect = torch.exp(_uniform(generator, count, LEAVES) - 0.5)
    angle = _uniform(generator, count, LEAVES) * math.pi
    center = 2.4 * _uniform(generator, count, LEAVES, 2) - 1.2
    top = torch.zeros(count, side, side, dtype=torch.long, device=generator.device)
    for leaf in range(LEAVES):
        cosine = angle[:, leaf].cos()
        sine = angle[:, leaf].sin()
        width = radius[:, leaf] * aspect[:, leaf]
        height = radius[:, leaf] / aspect[:, leaf]
        dx = x - center[:, leaf, 0, None, None]
        dy = y - center[:, leaf, 1, None, None]
        along = _scaled(cosine / width) * dx + _scaled(sine / width) * dy
        across = _scaled(cosine / height) * dy - _scaled(sine / height) * dx
        covered = _covered(along, across, leaf % _TYPES)
        top.masked_fill_(covered, leaf + 1)
    colors = _palette(count, LEAVES + 1, generator)
    extent = _uniform(generator, count, LEAVES + 1, 1) * 0.8
    extent[:, 0] = 1.0  # the ground is all texture
    pixels = top.flatten(1)[..., None]
    chosen = colors.gather(1, pixels.expand(-1, -1, 3)).transpose(1, 2).view_as(textures)
    shown = extent.gather(1, pixels).transpose(1, 2).view(count, 1, side, side)
    return torch.where(shown == 1.0, textures, chosen + shown * (textures - 0.5)).clamp(0, 1)


def mixed_images(count: int, side: int, generator: torch.Generator) -> Tensor:
    """Half dead leaves, a quarter noise and a quarter shaders; leaves show shaders and noise.

    Args:
        count: Number of images; a multiple of four.
        side: Side of an image, in pixels.
        generator: Gives all random numbers, on the device of the images.

    Returns:
        (count, 3, side, side) in [0, 1].
    """
    noise = noise_images(count // 4, side, generator)
    shaders = shader_images(count // 4, side, generator)
    plain = torch.cat([noise, shaders])
    leaves = dead_leaves(count // 2, side, generator, plain[:, [1, 2, 0]])
    return torch.cat([leaves, plain])


def labeled_shapes(count: int, side: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """An object before a random ground, labeled by its shape: a task on which settings can be chosen without data.

    The object has 0, 2, 3, 4 or 5 lobes, is filled or a ring (`SHAPES` classes), and has a place, size, direction and
    texture that are drawn.

    Args:
        count: Number of images.
        side: Side of an image, in pixels.
        generator: Gives all random numbers, on the device of the images.

    Returns:
        (count, 3, side, side) in [0, 1], and labels (count,).
    """
    labels = torch.randint(SHAPES, (count,), generator=generator, device=generator.device)
    ground = mixed_images(math.ceil(count / 4) * 4, side, generator)[:count]
    order = torch.randperm(count, generator=generator, device=generator.device)
    texture = noise_images(count, side, generator)
    x, y = _grid(side, generator.device)
    center = 0.6 * _uniform(generator, 2, count, 1, 1) - 0.3
    dx, dy = x - center[0], y - center[1]
    lobes = torch.tensor(_LOBES, device=generator.device)[labels % len(_LOBES)][:, None, None]
    turn = _uniform(generator, count, 1, 1) * 2 * math.pi
    outline = 1 + 0.35 * (lobes > 0) * torch.cos(lobes * torch.atan2(dy, dx) + turn)
    size = 0.4 + 0.3 * _uniform(generator, count, 1, 1)
    depth = (dx.square() + dy.square()).sqrt() / (size * outline)
    ring = (labels >= len(_LOBES))[:, None, None]
    inside = (depth < 1) & (~ring | (depth > 0.55))
    colors = _palette(count, 1, generator)[:, 0, :, None, None]
    extent = 0.8 * _uniform(generator, count, 1, 1, 1)
    filled = (colors + extent * (texture - 0.5)).clamp(0, 1)
    return torch.where(inside[:, None], filled, ground[order]), labels


def _covered(along: Tensor, across: Tensor, kind: int) -> Tensor:
    if kind == 0:
        return along.square() + across.square() < 1
    if kind == 1:
        return torch.maximum(along.abs(), across.abs()) < 0.9
    return along.abs() + across.abs() < 1.25


def _scaled(values: Tensor) -> Tensor:
    return values[:, None, None]


def _palette(count: int, colors: int, generator: torch.Generator) -> Tensor:
    """Colors (count, colors, 3) of each image around one of its own."""
    spread = 0.1 + 0.25 * _uniform(generator, count, 1, 1)
    offsets = _normal(generator, count, colors, 3) * spread
    common = 0.15 * _normal(generator, count, 1, 3)
    saturation = 2 * _uniform(generator, count, 1, 1)
    colored = (offsets + common) * torch.cat([torch.ones_like(saturation), saturation.expand(-1, -1, 2) * _CHROMA], 2)
    return (0.5 + colored @ torch.tensor(_TO_RGB, device=generator.device).mT).clamp(0, 1)


def _fields(count: int, channels: int, side: int, generator: torch.Generator) -> Tensor:
    """Gaussian fields of spectrum 1/f^a, stretched, of mean 0 and deviation 1, (count, channels, side, side)."""
    vertical = torch.fft.fftfreq(side, device=generator.device)[:, None]
    horizontal = torch.fft.rfftfreq(side, device=generator.device)
    angle = _uniform(generator, count, 1, 1) * math.pi
    stretch = torch.exp(_uniform(generator, count, 1, 1) - 0.5)
    along = (angle.cos() * horizontal + angle.sin() * vertical) * stretch
    across = (angle.cos() * vertical - angle.sin() * horizontal) / stretch
    frequency = torch.hypot(along, across).clamp(min=0.5 / side)
    exponent = 0.6 + 1.6 * _uniform(generator, count, 1, 1)
    amplitude = frequency**-exponent
    amplitude[:, 0, 0] = 0.0
    waves = torch.randn(
        count,
        channels,
        side,
        side // 2 + 1,
        2,
        generator=generator,
        device=generator.device,
    )
    fields: Tensor = torch.fft.irfft2(torch.view_as_complex(waves) * amplitude[:, None], s=(side, side))
    return fields / fields.std((2, 3), keepdim=True)


def _colored(fields: Tensor) -> Tensor:
    """Three fields as brightness and two fainter differences of colors, in red, green and blue."""
    scales = torch.tensor((1.0, _CHROMA, _CHROMA), device=fields.device)
    return torch.einsum("oc,nchw->nohw", torch.tensor(_TO_RGB, device=fields.device) * scales, fields)


def _toned(colors: Tensor, generator: torch.Generator) -> Tensor:
    """Values around 0 as an image in [0, 1], with a contrast, saturation and brightness that are drawn."""
    count = len(colors)
    gray = colors.mean(1, keepdim=True)
    saturation = 2 * _uniform(generator, count, 1, 1, 1)
    contrast = 0.1 + 0.25 * _uniform(generator, count, 1, 1, 1)
    tint = 0.06 * _normal(generator, count, 3, 1, 1)
    brightness = 0.35 + 0.3 * _uniform(generator, count, 1, 1, 1)
    return (brightness + tint + contrast * (gray + saturation * (colors - gray))).clamp(0, 1)


def _grid(side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Places x and y of each pixel in [−1, 1], (side, side) each."""
    line = (torch.arange(side, device=device) + 0.5) * 2 / side - 1
    return line.expand(side, side), line[:, None].expand(side, side)


def _uniform(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=generator, device=generator.device)


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)
