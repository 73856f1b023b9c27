"""Device code: Gaussian noise from ChaCha20, a function of a key and of a coordinate's place, whatever the grid is.

The stream is that of `native.cpp`, block for block and word for word. Numbers 256 q, ..., 256 q + 255 come from blocks
16 q, ..., 16 q + 15: of block 16 q + l, words i and 8 + i make the pair of numbers 16 i + l and 128 + 16 i + l.
"""

from __future__ import annotations

from dpbench_triton._language import jit, tl


@jit
def add_noise(
    total: tl.tensor,
    key: tl.tensor,
    scales: tl.tensor,
    start: tl.tensor,
    size: tl.tensor,
    GROUPS: tl.constexpr,
) -> None:
    """Total[j] becomes the multiple of h nearest to total[j] + σ · number (start + j), divided by the divisor.

    Args:
        total: float32, shape (size,).
        key: 256 bits as eight int32.
        scales: σ, h, 1 / h and the divisor as float64; h is a power of two, the divisor a float32 number.
        start: Place in the stream of total[0].
        size: Of the total.
        GROUPS: Of 256 numbers, in each program. Grid: (programs that cover the groups of the total,).
    """
    lane = tl.arange(0, 16 * GROUPS)
    first_group = start.to(tl.int64) // 256 + tl.program_id(0).to(tl.int64) * GROUPS
    group = first_group + lane // 16
    block = group * 16 + lane % 16
    std = tl.load(scales)
    spacing = tl.load(scales + 1)
    inverse = tl.load(scales + 2)
    divisor = tl.load(scales + 3)
    words = chacha20(key, block, 0)
    for i in tl.static_range(8):
        pair = i * 16 + lane % 16
        cosine, sine = _box_muller(key, words[i], words[8 + i], group * 128 + pair)
        at = group * 256 + pair - start.to(tl.int64)
        _add(total, at, size, cosine, std, spacing, inverse, divisor)
        _add(total, at + 128, size, sine, std, spacing, inverse, divisor)


@jit
def _add(
    total: tl.tensor,
    at: tl.tensor,
    size: tl.tensor,
    number: tl.tensor,
    std: tl.tensor,
    spacing: tl.tensor,
    inverse: tl.tensor,
    divisor: tl.tensor,
) -> None:
    """Sum and noise are added in float64, and only their rounded total is seen: see "Low bits" in `mechanism.noise`."""
    is_inside = (at >= 0) & (at < size)
    number_of_spacings = (tl.load(total + at, mask=is_inside, other=0.0).to(tl.float64) + std * number) * inverse
    released = (_round(number_of_spacings) * spacing).to(tl.float32)
    # Of two float32 numbers, so that rounding twice is rounding once: the quotient is that of a division on its own.
    tl.store(total + at, (released.to(tl.float64) / divisor).to(tl.float32), mask=is_inside)


@jit
def _round(x: tl.tensor) -> tl.tensor:
    """Nearest whole number, of two the even one; what is not finite, or beyond 2^52, stays."""
    # Below 2^52 the last digit of the sum is a one, so that the addition itself rounds.
    magic = 4503599627370496.0
    magnitude = tl.abs(x)
    rounded = (magnitude + magic) - magic
    rounded = tl.where(magnitude < magic, rounded, magnitude)
    return tl.where(x < 0, -rounded, rounded)


@jit
def _box_muller(key: tl.tensor, first: tl.tensor, second: tl.tensor, pair: tl.tensor) -> tl.tensor:
    """Two independent standard normal numbers in float64 from two words, one for the radius, one for the angle.

    The radius is that of the middle of one of 2^32 parts of (0, 1). Beyond 4.08 = √(24 log 2) such a part is divided by
    64 bits more, from a block of its own: the numbers end at 11.6.
    """
    part = first.to(tl.int64).to(tl.float64) + 0.5
    is_tail = first < 1048576
    if tl.max(is_tail.to(tl.int32), 0) > 0:
        tail = chacha20(key, pair, 1)
        high = tail[0].to(tl.int64).to(tl.float64) * 2.3283064365386963e-10
        low = (tail[1].to(tl.int64).to(tl.float64) + 0.5) * 5.421010862427522e-20
        part = tl.where(is_tail, first.to(tl.int64).to(tl.float64) + (high + low), part)
    radius = tl.sqrt(-2.0 * tl.log(part * 2.3283064365386963e-10))
    # The angle as a signed part of a turn: exact, and small where the number is nearly 0.
    angle = second.to(tl.int32, bitcast=True).to(tl.float64) * 1.4629180792671596e-09
    return radius * tl.cos(angle), radius * tl.sin(angle)


@jit
def blocks(key: tl.tensor, first: tl.tensor, words: tl.tensor, NONCE: tl.constexpr, BLOCKS: tl.constexpr) -> None:
    """Blocks `first`, `first` + 1, ... of ChaCha20, a row of sixteen words each; for tests against RFC 8439."""
    lane = tl.arange(0, BLOCKS)
    block = chacha20(key, first.to(tl.int64) + lane, NONCE)
    for i in tl.static_range(16):
        tl.store(words + lane * 16 + i, block[i].to(tl.int32, bitcast=True))


@jit
def chacha20(key: tl.tensor, counter: tl.tensor, nonce: tl.constexpr) -> tl.tensor:
    """Sixteen words of each block of ChaCha20 (RFC 8439, 2.3), as uint32.

    Args:
        key: 256 bits as eight int32.
        counter: Numbers of the blocks, 64 bits: words 12 and 13 of the state, as in Bernstein's original.
        nonce: Word 14; word 15 is zero.
    """
    zero = (counter * 0).to(tl.uint32)
    k0 = zero + tl.load(key).to(tl.uint32, bitcast=True)
    k1 = zero + tl.load(key + 1).to(tl.uint32, bitcast=True)
    k2 = zero + tl.load(key + 2).to(tl.uint32, bitcast=True)
    k3 = zero + tl.load(key + 3).to(tl.uint32, bitcast=True)
    k4 = zero + tl.load(key + 4).to(tl.uint32, bitcast=True)
    k5 = zero + tl.load(key + 5).to(tl.uint32, bitcast=True)
    k6 = zero + tl.load(key + 6).to(tl.uint32, bitcast=True)
    k7 = zero + tl.load(key + 7).to(tl.uint32, bitcast=True)
    c0 = zero + 0x61707865
    c1 = zero + 0x3320646E
    c2 = zero + 0x79622D32
    c3 = zero + 0x6B206574
    low = counter.to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    word = zero + nonce
    x0, x1, x2, x3 = c0, c1, c2, c3
    x4, x5, x6, x7 = k0, k1, k2, k3
    x8, x9, x10, x11 = k4, k5, k6, k7
    x12, x13, x14, x15 = low, high, word, zero
    for _ in tl.range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    return (
        x0 + c0,
        x1 + c1,
        x2 + c2,
        x3 + c3,
        x4 + k0,
        x5 + k1,
        x6 + k2,
        x7 + k3,
        x8 + k4,
        x9 + k5,
        x10 + k6,
        x11 + k7,
        x12 + low,
        x13 + high,
        x14 + word,
        x15,
    )


@jit
def _quarter(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor) -> tl.tensor:
    """A quarter round (RFC 8439, 2.1)."""
    a = a + b
    d = _rotated(d ^ a, 16)
    c = c + d
    b = _rotated(b ^ c, 12)
    a = a + b
    d = _rotated(d ^ a, 8)
    c = c + d
    b = _rotated(b ^ c, 7)
    return a, b, c, d


@jit
def _rotated(x: tl.tensor, bits: tl.constexpr) -> tl.tensor:
    """A word rotated to the left."""
    return (x << bits) | (x >> (32 - bits))
