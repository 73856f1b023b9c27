"""Device code: discretized gradients g aᵀ of a linear layer with one position, which are never stored."""

from __future__ import annotations

from dpbench_triton._language import jit, tl


@jit
def count_outer(
    g: tl.tensor,
    a: tl.tensor,
    counts: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    threshold: tl.tensor,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    """How many coordinates of some rows of g aᵀ are beyond ±τ.

    Grid: (records, tiles of OUTPUTS rows). `counts` is (records, tiles), int64.
    """
    record = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    o = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    of_outputs = tl.load(g + record * outputs + o, mask=o < outputs, other=0.0).to(tl.float32)
    count = tl.zeros((), tl.int64)
    for start in tl.range(0, inputs, INPUTS):
        i = start + tl.arange(0, INPUTS)
        of_inputs = tl.load(a + record * inputs + i, mask=i < inputs, other=0.0).to(tl.float32)
        products = of_outputs[:, None] * of_inputs[None, :]
        # No product beyond the layer's edge counts: zero is not beyond τ, and neither is what is not a number.
        is_beyond = (products > threshold) | (products < -threshold)
        count += tl.sum(tl.sum(is_beyond.to(tl.int32), 1), 0)
    tl.store(counts + record * tl.num_programs(1) + tile, count)


@jit
def sum_outer(
    g: tl.tensor,
    a: tl.tensor,
    weights: tl.tensor,
    total: tl.tensor,
    records: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    threshold: tl.tensor,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    """A tile of Σ_r w_r sign_τ(g_r a_rᵀ), in the order of the records.

    Grid: (tiles of outputs, tiles of inputs).
    """
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    i = tl.program_id(1) * INPUTS + tl.arange(0, INPUTS)
    is_output = o < outputs
    is_input = i < inputs
    sums = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    for record in tl.range(records):
        of_outputs = tl.load(g + o, mask=is_output, other=0.0).to(tl.float32)
        of_inputs = tl.load(a + i, mask=is_input, other=0.0).to(tl.float32)
        g += outputs
        a += inputs
        products = of_outputs[:, None] * of_inputs[None, :]
        weight = tl.load(weights + record).to(tl.float32)
        # Never the weight times a product: that may be infinite, and the sum would not be bounded.
        sums += tl.where(products > threshold, weight, 0.0) - tl.where(products < -threshold, weight, 0.0)
    at = total + o.to(tl.int64)[:, None] * inputs + i[None, :]
    tl.store(at, sums, mask=is_output[:, None] & is_input[None, :])
