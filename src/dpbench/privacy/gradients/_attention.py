"""Per-record gradients of nn.MultiheadAttention: its projections are linear, so their gradients are outer products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbench.privacy.gradients._interception import Interception, LayerGradients, TorchFunction
from dpbench.privacy.gradients.parameter import (
    InstantiatedGradients,
    OuterProductGradients,
    ParameterGradients,
    StackedGradients,
)


class AttentionInterception(Interception):
    """Computes `torch.nn.functional.multi_head_attention_forward`; everything is (positions, records, width)."""

    targets = (F.multi_head_attention_forward,)

    def compute(self, func: TorchFunction, *args: Any, **kwargs: Any) -> Any:
        query, key, value, _, num_heads = args[:5]  # the others are known from the layer
        return self._attend(
            query,
            key,
            value,
            num_heads,
            **kwargs,
        )

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
        """Attention from its parts, of the arguments that torch's function has.

        Args:
            query: Shape (L, R, width), or (L, width) of a single record, as key and value.
            key: Shape (S, R, key width).
            value: Shape (S, R, value width).
            num_heads: Number of heads.
            key_padding_mask: Added to the scores of a record's keys, (R, S).
            attn_mask: Added to the scores, (L, S) or (R · heads, L, S).
            need_weights: Whether weights are returned.
            average_attn_weights: Whether they are averaged over the heads.
            is_causal: Whether the mask is the causal one.

        Returns:
            Output (L, R, width), and weights (R, L, S), (R, heads, L, S) or None.
        """
        single = query.dim() == 2
        if single:
            query, key, value = _unsqueezed(query, key, value)
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask[None]
        records = query.shape[1]
        q, k, v = self._projected(query, key, value)
        k, v, added = self._extended(k, v)
        mask = _merged(
            attn_mask,
            key_padding_mask,
            records,
            num_heads,
            added,
        )
        if is_causal and key_padding_mask is None and not need_weights:
            mask = None  # the fused function makes the causal mask itself
        else:
            is_causal = False
        q = _split_heads(q, num_heads)
        k = _split_heads(k, num_heads)
        v = _split_heads(v, num_heads)
        dropout = self.layer.dropout if self.layer.training else 0.0
        weights = None
        if need_weights:
            weights = _attention_weights(q, k, mask, dropout)
            mixed = weights @ v
            if average_attn_weights:
                weights = weights.mean(1)
        else:
            mixed = F.scaled_dot_product_attention(
                q,
                k,
                v,
                mask,
                dropout,
                is_causal,
            )
        mixed = mixed.permute(2, 0, 1, 3)
        output = self._output(mixed.flatten(2))
        if single:
            output = output.squeeze(1)
            if weights is not None:
                weights = weights.squeeze(0)
        return output, weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """q, k and v, by as few products as the layer itself makes."""
        layer = self.layer
        width = layer.embed_dim
        # One weight holds all three where query, key and value have one width; torch multiplies by as much of it as
        # goes with one input, and so does this: in other products the sums would round differently.
        packed = layer.in_proj_weight is not None
        if packed and query is key and key is value:
            inputs = [query]
            sizes = [3 * width]
        elif packed and key is value:
            inputs = [query, key]
            sizes = [width, 2 * width]
        else:
            inputs = [query, key, value]
            sizes = [width] * 3
        if packed:
            weights = list(torch.split(layer.in_proj_weight, sizes))
        else:
            weights = [
                layer.q_proj_weight,
                layer.k_proj_weight,
                layer.v_proj_weight,
            ]
        biases: Sequence[Tensor | None] = [None] * len(sizes)
        if layer.in_proj_bias is not None:
            biases = torch.split(layer.in_proj_bias, sizes)
        outputs = []
        for x, weight, bias in zip(inputs, weights, biases, strict=True):
            outputs.append(F.linear(x, weight, bias))

        # The gradients are computed after the backward pass, which frees the graph: nothing here may hold it.
        detached = [x.detach() for x in inputs]
        self.note(
            outputs=outputs,
            inputs=detached,
            records=query.shape[1],
            gradients=lambda grads: _input_gradients(grads, detached, sizes, packed),
        )
        projected: list[Tensor] = []
        for output in outputs:
            projected.extend(torch.split(output, width, 2))
        return projected

    def _extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """Append the learned and the zero positions (`add_bias_kv`, `add_zero_attn`) to k and v; returns how many."""
        layer = self.layer
        records = k.shape[1]
        added = 0
        if layer.bias_k is not None:
            bias_k = layer.bias_k.expand(1, records, -1)
            bias_v = layer.bias_v.expand(1, records, -1)
            self.note(
                outputs=[bias_k, bias_v],
                inputs=[],
                records=records,
                gradients=_bias_gradients,
            )
            k = torch.cat([k, bias_k])
            v = torch.cat([v, bias_v])
            added += 1
        if layer.add_zero_attn:
            end_of_positions = (0, 0, 0, 0, 0, 1)
            k = F.pad(k, end_of_positions)
            v = F.pad(v, end_of_positions)
            added += 1
        return k, v, added

    def _output(self, mixed: Tensor) -> Tensor:
        """The output projection of (positions, records, width)."""
        projection = self.layer.out_proj
        output = F.linear(mixed, projection.weight, projection.bias)
        inputs = mixed.detach()
        self.note(
            outputs=[output],
            inputs=[inputs],
            records=mixed.shape[1],
            gradients=lambda grads: _output_gradients(grads[0], inputs),
        )
        return output


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """From (positions, R, heads · width) to (R, heads, positions, width)."""
    positions, records, width = x.shape
    head_width = width // heads
    x = x.reshape(positions, records, heads, head_width)
    return x.permute(1, 2, 0, 3)


def _attention_weights(q: Tensor, k: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """Weights (R, heads, L, S) of the values, rounded as torch rounds them: q is scaled, not the scores."""
    head_width = q.shape[3]
    scale = math.sqrt(1.0 / head_width)
    scores = (q * scale) @ k.mT
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1)
    if dropout:
        weights = F.dropout(weights, dropout)
    return weights


def _unsqueezed(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add the dimension of a single record; arguments that were one tensor stay one."""
    q = query.unsqueeze(1)
    k = q if key is query else key.unsqueeze(1)
    v = k if value is key else value.unsqueeze(1)
    return q, k, v


def _merged(
    mask: Tensor | None,
    padding: Tensor | None,
    records: int,
    heads: int,
    added: int,
) -> Tensor | None:
    """What is added to the scores (R, heads, L, S): zero or minus infinity where a mask was boolean.

    Args:
        mask: (L, S) or (R · heads, L, S).
        padding: (R, S).
        records: R.
        heads: Number of heads.
        added: Number of positions at the end that no mask knows of.
    """
    total = None
    if mask is not None:
        is_shared = mask.dim() == 2
        if is_shared:
            total = mask[None, None]
        else:
            positions = mask.shape[1:]
            total = mask.reshape(records, heads, *positions)
    if padding is not None:
        rows = padding[:, None, None]
        total = rows if total is None else total + rows
    # Every query sees the positions that were appended.
    if total is not None and added:
        total = F.pad(total, (0, added))
    return total


def _outer(grad: Tensor, x: Tensor) -> OuterProductGradients:
    """Gradients of a projection's weight, by those of its output (positions, R, out) and its input."""
    g = grad.transpose(0, 1)
    a = x.transpose(0, 1)
    a = a.to(grad.dtype)
    return OuterProductGradients(g, a)


def _output_gradients(grad: Tensor | None, x: Tensor) -> LayerGradients:
    """Gradients of the output projection, by those of its output (positions, R, out) and its input."""
    assert grad is not None
    return {
        "out_proj.weight": _outer(grad, x),
        "out_proj.bias": InstantiatedGradients(lambda: grad.sum(0)),
    }


def _input_gradients(
    grads: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    sizes: Sequence[int],
    packed: bool,
) -> LayerGradients:
    """Gradients of the input projections.

    Args:
        grads: Of the products' outputs, (positions, R, size) each; None where nothing depends on one.
        inputs: Of the products, (positions, R, width) each.
        sizes: Widths of the outputs.
        packed: Whether the weights are rows of one parameter.
    """
    dtype = next(grad for grad in grads if grad is not None).dtype
    outputs = []
    for grad, x, size in zip(grads, inputs, sizes, strict=True):
        if grad is not None:
            outputs.append(grad)
            continue
        positions, records = x.shape[:2]
        shape = (positions, records, size)
        outputs.append(x.new_zeros(shape, dtype=dtype))
    weights: list[ParameterGradients] = []
    for grad, x in zip(outputs, inputs, strict=True):
        weights.append(_outer(grad, x))

    def bias() -> Tensor:
        sums = [grad.sum(0) for grad in outputs]
        return torch.cat(sums, 1)

    result: LayerGradients = {"in_proj_bias": InstantiatedGradients(bias)}
    if not packed:
        result["q_proj_weight"] = weights[0]
        result["k_proj_weight"] = weights[1]
        result["v_proj_weight"] = weights[2]
    elif len(weights) == 1:
        result["in_proj_weight"] = weights[0]
    else:
        result["in_proj_weight"] = StackedGradients(weights)
    return result


def _bias_gradients(grads: Sequence[Tensor | None]) -> LayerGradients:
    """Gradients of the learned positions of k and v, by those of their copies for each record (1, R, width)."""
    result: LayerGradients = {}
    names = ("bias_k", "bias_v")  # in the order in which `_extended` noted them
    for name, grad in zip(names, grads, strict=True):
        if grad is not None:
            result[name] = _bias_gradient(grad)
    return result


def _bias_gradient(grad: Tensor) -> ParameterGradients:
    # (1, R, width) → (R, 1, 1, width), since the parameter is (1, 1, width).
    return InstantiatedGradients(lambda: grad[0][:, None, None])
