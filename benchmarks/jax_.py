"""JAX: `jit(vmap(grad))` by hand, and jax_privacy, on the same networks written in jax.numpy (images channels-last)."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

from benchmarks.plain import Step
from benchmarks.workloads import Workload


def _conv(x: Any, layer: Any, stride: int, padding: Any) -> Any:
    import jax

    dimensions = ("NHWC", "HWIO", "NHWC")
    return (
        jax.lax.conv_general_dilated(x, layer["w"], (stride, stride), padding, dimension_numbers=dimensions)
        + layer["b"]
    )


def _max_pool(x: Any, size: int, stride: int, end: int) -> Any:
    import jax
    import jax.numpy as jnp

    pad = ((0, 0), (0, end), (0, end), (0, 0))
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, size, size, 1), (1, stride, stride, 1), pad)


def _normalize(x: Any) -> Any:
    """Local response normalization over 9 channels."""
    import jax.numpy as jnp

    index = jnp.arange(x.shape[-1])
    band = (jnp.abs(index[:, None] - index) <= 4).astype(x.dtype)
    return x * (1 + 1e-3 / 9 * (jnp.square(x) @ band)) ** -0.75


def _features(name: str, layers: Any, x: Any) -> Any:
    import jax

    relu = jax.nn.relu
    if name.startswith("mnist_cnn"):
        x = _max_pool(relu(_conv(x, layers[0], 2, ((3, 3), (3, 3)))), 2, 1, 0)
        return _max_pool(relu(_conv(x, layers[1], 2, "VALID")), 2, 1, 0)
    if name.startswith("small_alexnet"):
        x = x[:, 2:-2, 2:-2]
        for layer in layers[:2]:
            x = _normalize(_max_pool(relu(_conv(x, layer, 1, ((2, 2), (2, 2)))), 3, 2, 1))
    return x


_CONVOLUTIONS = {"mnist_cnn": [(8, 1, 16), (4, 16, 32)], "small_alexnet": [(5, 3, 64), (5, 64, 64)], "mlp": []}
_WIDTHS = {"mnist_cnn": (512, 32, 10), "small_alexnet": (3136, 384, 192, 10), "mlp": (784, 1000, 10)}


def jax_step(workload: Workload, way: str) -> Step:
    """Flat clipping at 1, noise multiplier 1, SGD, all in one compiled function.

    Args:
        workload: One of the three networks that are written here.
        way: "vmap" or "jax_privacy".

    Raises:
        NotImplementedError: Another network.
    """
    # Before the first import of jax, which chooses its platform then.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    import jax.numpy as jnp
    import numpy as np

    kind = workload.name.split()[0]
    if kind not in _WIDTHS:
        raise NotImplementedError(f"{kind} is not written in JAX")
    random = np.random.default_rng(0)

    def layer(*shape: int) -> Any:
        scale = 1 / np.sqrt(np.prod(shape[:-1]))
        return {"w": jnp.asarray(random.normal(0, scale, shape), jnp.float32), "b": jnp.zeros(shape[-1])}

    widths = _WIDTHS[kind]
    params = [layer(k, k, i, o) for k, i, o in _CONVOLUTIONS[kind]]
    params += [layer(i, o) for i, o in pairwise(widths)]
    convolutions = len(_CONVOLUTIONS[kind])

    def loss(params: Any, x: Any, y: Any) -> Any:
        x = _features(workload.name, params, x)
        x = x.reshape(len(x), -1)
        for number, dense in enumerate(params[convolutions:]):
            x = (jax.nn.relu(x) if number else x) @ dense["w"] + dense["b"]
        return -jax.nn.log_softmax(x)[jnp.arange(len(y)), y].mean()

    clipped = _by_hand(loss) if way == "vmap" else _by_jax_privacy(loss)

    @jax.jit
    def update(params: Any, x: Any, y: Any, key: Any) -> Any:
        leaves, tree = jax.tree.flatten(clipped(params, x, y))
        keys = jax.random.split(key, len(leaves))
        noised = [g + jax.random.normal(k, g.shape) for k, g in zip(keys, leaves, strict=True)]
        gradient = jax.tree.unflatten(tree, noised)
        return jax.tree.map(lambda p, g: p - 0.01 * g / len(x), params, gradient)

    records, labels = workload.data()
    x, y = jnp.asarray(records.permute(0, 2, 3, 1).numpy()), jnp.asarray(labels.numpy())
    # Arrays of JAX do not change: what a step makes is put in the place of what it was given.
    state: list[Any] = [params, jax.random.key(0)]
    # JAX returns before it has computed.
    wait: Any = jax.block_until_ready

    def step() -> None:
        state[1], key = jax.random.split(state[1])
        state[0] = wait(update(state[0], x, y, key))

    return step


def _by_hand(loss: Any) -> Any:
    import jax
    import jax.numpy as jnp

    def clipped(params: Any, x: Any, y: Any) -> Any:
        rows = jax.vmap(jax.grad(loss), (None, 0, 0))(params, x[:, None], y[:, None])
        squares = sum(jnp.square(leaf.reshape(len(x), -1)).sum(1) for leaf in jax.tree.leaves(rows))
        weights = jnp.minimum(1.0, 1.0 / jnp.sqrt(squares))
        return jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, 1), rows)

    return clipped


def _by_jax_privacy(loss: Any) -> Any:
    from jax_privacy.clipping import clipped_grad

    return clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2))
