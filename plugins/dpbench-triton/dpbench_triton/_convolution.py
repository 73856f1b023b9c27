"""Device code: gradients of a convolution's weight, record by record, by an implicit matrix of patches.

The gradient of record r is a matrix product over the positions p of the output (and over the record's rows),

    W_r[o, (c, y, x)] = Σ_p g_r[o, p] · a_r[c, stride · p − padding + dilation · (y, x)],

of which a program computes a tile. Inputs are read where they lie: there are no patches in memory.
"""

from __future__ import annotations

from dpbench_triton._language import jit, tl


@jit
def convolution(  # noqa: PLR0915  a kernel calls nothing that has its tiles
    a: tl.tensor,
    g: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    weights: tl.tensor,
    squares: tl.tensor,
    factor: tl.tensor,
    threshold: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    out_width: tl.tensor,
    positions: tl.tensor,
    inputs: tl.tensor,  # of a group
    outputs: tl.tensor,  # of a group
    output_tiles: tl.tensor,
    input_tiles: tl.tensor,
    a_image: tl.tensor,
    a_channel: tl.tensor,
    a_row: tl.tensor,
    a_column: tl.tensor,
    g_image: tl.tensor,
    g_channel: tl.tensor,
    g_row: tl.tensor,
    g_column: tl.tensor,
    KERNEL_HEIGHT: tl.constexpr,
    KERNEL_WIDTH: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    STRIDE_X: tl.constexpr,
    PADDING_Y: tl.constexpr,
    PADDING_X: tl.constexpr,
    DILATION_Y: tl.constexpr,
    DILATION_X: tl.constexpr,
    STORED: tl.constexpr,
    DISCRETIZED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TAPS: tl.constexpr,
    POSITIONS: tl.constexpr,
) -> None:
    """A tile (OUTPUTS, TAPS) of one record's gradient: the sum of its squares, and the numbers or signs themselves.

    Grid: (records · output_tiles · input_tiles, groups). `squares` is (records, groups, output_tiles, input_tiles).
    """
    tile = tl.program_id(0)
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    tiles = output_tiles * input_tiles
    record = (tile // tiles).to(tl.int64)
    tile = tile % tiles
    o = tile // input_tiles * OUTPUTS + tl.arange(0, OUTPUTS)
    tap = tile % input_tiles * TAPS + tl.arange(0, TAPS)
    # Channels come first among taps, so that neighbors lie side by side in images that are channels-last.
    taps = KERNEL_HEIGHT * KERNEL_WIDTH * inputs
    channel = tap % inputs
    pixel = tap // inputs
    tap_y = pixel // KERNEL_WIDTH
    tap_x = pixel % KERNEL_WIDTH
    is_output = o < outputs
    is_tap = tap < taps
    a_of_tap = (group * inputs + channel) * a_channel
    g_of_output = (group * outputs + o) * g_channel

    gradient = tl.zeros((OUTPUTS, TAPS), tl.float32)
    largest = 0.0
    for place in tl.range(tl.load(starts + record), tl.load(starts + record + 1)):
        image = tl.load(order + place)
        for start in tl.range(0, positions, POSITIONS):
            position = start + tl.arange(0, POSITIONS)
            is_position = position < positions
            out_y = position // out_width
            out_x = position % out_width
            at_g = g + image * g_image + g_of_output[:, None] + (out_y * g_row + out_x * g_column)[None, :]
            of_outputs = tl.load(at_g, mask=is_output[:, None] & is_position[None, :], other=0.0)
            of_outputs = of_outputs.to(tl.float32)
            y = (out_y * STRIDE_Y - PADDING_Y)[:, None] + (tap_y * DILATION_Y)[None, :]
            x = (out_x * STRIDE_X - PADDING_X)[:, None] + (tap_x * DILATION_X)[None, :]
            is_inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
            at_a = a + image * a_image + a_of_tap[None, :] + y * a_row + x * a_column
            patches = tl.load(at_a, mask=is_inside & is_position[:, None] & is_tap[None, :], other=0.0)
            patches = patches.to(tl.float32)
            gradient = tl.dot(of_outputs, patches, gradient, input_precision="ieee")
            if not DISCRETIZED:
                largest += tl.sum(_norms(of_outputs, 0) * _norms(patches, 1), 0)
    gradient *= factor

    at_square = squares + ((record * groups + group) * output_tiles * input_tiles + tile)
    # In the parameter's order: (outputs, inputs, height, width).
    in_parameter = channel * (KERNEL_HEIGHT * KERNEL_WIDTH) + pixel
    row = (record * groups + group) * outputs + o
    at_weight = weights + row[:, None] * taps + in_parameter[None, :]
    is_weight = is_output[:, None] & is_tap[None, :]
    if DISCRETIZED:
        # 0 for what is not a number.
        signs = (gradient > threshold).to(tl.int8) - (gradient < -threshold).to(tl.int8)
        counts = tl.sum(tl.sum((signs != 0).to(tl.int32), 1), 0)
        tl.store(at_square, counts.to(tl.float32))
        if STORED:
            tl.store(at_weight, signs, mask=is_weight)
    else:
        square = tl.sum(tl.sum(gradient * gradient, 1), 0)
        if STORED:
            # What is clipped is what was measured.
            tl.store(at_weight, gradient, mask=is_weight)
        else:
            # The sum that this bounds is computed in another order. Where positions cancel, rounding may leave less
            # here than there: see `parameter._rounded_up`.
            largest *= tl.abs(factor)
            terms = positions * (tl.load(starts + record + 1) - tl.load(starts + record))
            bound = largest * largest
            slack = bound * (terms.to(tl.float32) * (16 * 1.1920929e-07))
            square = tl.where(square < 1e-3 * bound, square + slack, square)
        tl.store(at_square, square)


@jit
def _norms(rows: tl.tensor, dimension: tl.constexpr) -> tl.tensor:
    """Norms over a dimension; squares of what is below 1e-19 are lost in float32, which the slack counts."""
    return tl.sqrt(tl.sum(rows * rows, dimension) + 1e-36)


@jit
def weighted_signs(
    signs: tl.tensor,
    weights: tl.tensor,
    total: tl.tensor,
    records: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Sum over records of their weights times their signs (records, size), in the order of the records.

    Grid: (blocks of coordinates,).
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = at < size
    sums = tl.zeros((BLOCK,), tl.float32)
    row = signs
    for record in tl.range(records):
        weight = tl.load(weights + record).to(tl.float32)
        sums += weight * tl.load(row + at, mask=is_inside, other=0).to(tl.float32)
        row += size
    tl.store(total + at, sums, mask=is_inside)
