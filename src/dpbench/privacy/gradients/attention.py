"""Per-record gradients of nn.MultiheadAttention: its projections are linear, so their gradients are outer products."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbench.privacy.gradients.interception import Interception, LayerGradients
from dpbench.privacy.gradients.parameter import (
    InstantiatedGradients,
    OuterProductGradients,
    ParameterGradients,
    StackedGradients,
)


class AttentionInterception(Interception):
    """Computes `torch.nn.functional.multi_head_attention_forward`; everything is (positions, records, width)."""

    targets = (F.multi_head_attention_forward,)

    def compute(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        query, key, value, _, num_heads = args[:5]  # the others are known from the layer
        return self._attend(query, key, value, num_heads, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        num_heads: int,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        need_weights: bool = True,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        single = query.dim() == 2
        if single:
            key = query if key is query else key
            query, key, value = _unsqueezed(query, key, value)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        records = query.shape[1]
        q, k, v = self._projected(query, key, value)
        k, v, added = self._extended(k, v)
        mask = _merged(attn_mask, key_padding_mask, records, num_heads, added)
        if is_causal and key_padding_mask is None and not need_weights:
            mask = None
        else:
            is_causal = False
        width = q.shape[2] // num_heads
        q, k, v = (x.reshape(len(x), records, num_heads, width).permute(1, 2, 0, 3) for x in (q, k, v))
        dropout = self.layer.dropout if self.layer.training else 0.0
        weights = None
        if need_weights:
            scores = (q * math.sqrt(1.0 / width)) @ k.mT
            weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
            weights = F.dropout(weights, dropout) if dropout else weights
            mixed = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        mixed = mixed.permute(2, 0, 1, 3).flatten(2)
        output = F.linear(mixed, self.layer.out_proj.weight, self.layer.out_proj.bias)
        inputs = [mixed.detach()]
        self.note([output], inputs, records, lambda grads: _of_output(grads[0], inputs[0]))
        if single:
            return output.squeeze(1), None if weights is None else weights.squeeze(0)
        return output, weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """q, k and v, by as few products as the layer itself makes."""
        layer, width = self.layer, self.layer.embed_dim
        bias = layer.in_proj_bias
        same = [query is key, key is value]
        if layer.in_proj_weight is None:
            inputs, weights = [query, key, value], [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]
            sizes = [width] * 3
        else:
            inputs = [query] if all(same) else [query, key] if same[1] else [query, key, value]
            sizes = {1: [3 * width], 2: [width, 2 * width], 3: [width] * 3}[len(inputs)]
            weights = list(torch.split(layer.in_proj_weight, sizes))
        biases = [None] * len(sizes) if bias is None else list(torch.split(bias, sizes))
        outputs = [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]
        seen = [x.detach() for x in inputs]
        packed = layer.in_proj_weight is not None
        self.note(outputs, seen, query.shape[1], lambda grads: _of_inputs(grads, seen, sizes, packed))
        return [part for y in outputs for part in torch.split(y, width, 2)]

    def _extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """Append the learned and the zero positions (`add_bias_kv`, `add_zero_attn`) to k and v; returns how many."""
        layer, added = self.layer, 0
        records = k.shape[1]
        if layer.bias_k is not None:
            rows = [bias.expand(1, records, -1) for bias in (layer.bias_k, layer.bias_v)]
            self.note(rows, [], records, _of_biases)
            k, v, added = torch.cat([k, rows[0]]), torch.cat([v, rows[1]]), 1
        if layer.add_zero_attn:
            k, v, added = F.pad(k, (0, 0, 0, 0, 0, 1)), F.pad(v, (0, 0, 0, 0, 0, 1)), added + 1
        return k, v, added


def _unsqueezed(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add the dimension of a single record; arguments that were one tensor stay one."""
    q = query.unsqueeze(1)
    k = q if key is query else key.unsqueeze(1)
    return q, k, k if value is key else value.unsqueeze(1)


def _merged(mask: Tensor | None, padding: Tensor | None, records: int, heads: int, added: int) -> Tensor | None:
    """What is added to the scores (R, heads, L, S): zero or minus infinity where a mask was boolean.

    Args:
        mask: (L, S) or (R · heads, L, S).
        padding: (R, S).
        records: R.
        heads: Number of heads.
        added: Number of positions at the end that no mask knows of.
    """
    if mask is not None:
        mask = mask[None, None] if mask.dim() == 2 else mask.reshape(records, heads, *mask.shape[1:])
    total = mask
    if padding is not None:
        rows = padding[:, None, None]
        total = rows if mask is None else mask + rows
    return F.pad(total, (0, added)) if total is not None and added else total


def _outer(grad: Tensor, x: Tensor) -> OuterProductGradients:
    return OuterProductGradients(grad.transpose(0, 1), x.transpose(0, 1).to(grad.dtype))


def _of_output(grad: Tensor | None, x: Tensor) -> LayerGradients:
    assert grad is not None
    return {"out_proj.weight": _outer(grad, x), "out_proj.bias": InstantiatedGradients(lambda: grad.sum(0))}


def _of_inputs(
    grads: Sequence[Tensor | None], inputs: Sequence[Tensor], sizes: Sequence[int], packed: bool
) -> LayerGradients:
    dtype = next(g for g in grads if g is not None).dtype
    full = [
        x.new_zeros((*x.shape[:2], size), dtype=dtype) if g is None else g
        for g, x, size in zip(grads, inputs, sizes, strict=True)
    ]
    weights: list[ParameterGradients] = [_outer(g, x) for g, x in zip(full, inputs, strict=True)]
    result: LayerGradients = {
        "in_proj_bias": InstantiatedGradients(lambda: torch.cat([g.sum(0) for g in full], 1)),
    }
    if packed:
        result["in_proj_weight"] = weights[0] if len(weights) == 1 else StackedGradients(weights)
        return result
    return result | {f"{name}_proj_weight": w for name, w in zip("qkv", weights, strict=True)}


def _of_biases(grads: Sequence[Tensor | None]) -> LayerGradients:
    named = zip(("bias_k", "bias_v"), grads, strict=True)
    return {name: _row(grad) for name, grad in named if grad is not None}


def _row(grad: Tensor) -> ParameterGradients:
    return InstantiatedGradients(lambda: grad[0][:, None, None])
