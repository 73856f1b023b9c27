"""Device code: GroupNorm's gradients of scale and shift, record by record, without the normalized image in memory."""

from __future__ import annotations

from dpbench_triton._language import jit, tl


@jit
def group_norm(
    x: tl.tensor,
    g: tl.tensor,
    scale: tl.tensor,
    shift: tl.tensor,
    epsilon: tl.tensor,
    pixels: tl.tensor,
    width: tl.tensor,
    channels: tl.tensor,  # of a group
    x_image: tl.tensor,
    x_channel: tl.tensor,
    x_row: tl.tensor,
    x_column: tl.tensor,
    g_image: tl.tensor,
    g_channel: tl.tensor,
    g_row: tl.tensor,
    g_column: tl.tensor,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
) -> None:
    """Of one record and group: Σ_p g[c, p] (x[c, p] − μ) / σ, and Σ_p g[c, p].

    Grid: (records, groups). `scale` and `shift` are (records, groups · channels), float32.
    """
    record = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    member = tl.arange(0, CHANNELS)
    is_member = member < channels
    channel = group * channels + member
    of_x = x + record * x_image + (channel * x_channel)[:, None]
    of_g = g + record * g_image + (channel * g_channel)[:, None]
    # As distances from one pixel of the group, so that of numbers far from zero no digits are lost.
    origin = tl.load(x + record * x_image + group * channels * x_channel).to(tl.float32)
    total = tl.zeros((CHANNELS, PIXELS), tl.float32)
    for start in tl.range(0, pixels, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        is_inside = is_member[:, None] & (pixel < pixels)[None, :]
        at = of_x + (pixel // width * x_row + pixel % width * x_column)[None, :]
        total += tl.where(is_inside, tl.load(at, mask=is_inside, other=0.0).to(tl.float32) - origin, 0.0)
    numbers = channels * pixels
    mean = tl.sum(tl.sum(total, 1), 0) / numbers
    squares = tl.zeros((CHANNELS, PIXELS), tl.float32)
    products = tl.zeros((CHANNELS, PIXELS), tl.float32)
    gradients = tl.zeros((CHANNELS, PIXELS), tl.float32)
    for start in tl.range(0, pixels, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        is_inside = is_member[:, None] & (pixel < pixels)[None, :]
        at = of_x + (pixel // width * x_row + pixel % width * x_column)[None, :]
        distance = tl.load(at, mask=is_inside, other=0.0).to(tl.float32) - origin - mean
        distance = tl.where(is_inside, distance, 0.0)
        at = of_g + (pixel // width * g_row + pixel % width * g_column)[None, :]
        gradient = tl.load(at, mask=is_inside, other=0.0).to(tl.float32)
        squares += distance * distance
        products += gradient * distance
        gradients += gradient
    variance = tl.sum(tl.sum(squares, 1), 0) / numbers
    inverse = 1.0 / tl.sqrt(variance + epsilon)
    at = record * tl.num_programs(1) * channels + channel
    tl.store(scale + at, tl.sum(products, 1) * inverse, mask=is_member)
    tl.store(shift + at, tl.sum(gradients, 1), mask=is_member)
