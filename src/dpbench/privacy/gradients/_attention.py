"""Per-record gradients of nn.MultiheadAttention: its projections are linear, so their gradients are outer products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbench.errors import UnsupportedModuleError
from dpbench.privacy.gradients._interception import Interception, LayerGradients, TorchFunction
from dpbench.privacy.gradients.parameter import InstantiatedGradients, OuterProductGradients

_RARE = (
    "the engine does not support nn.MultiheadAttention with kdim, vdim, add_bias_kv or add_zero_attn, or without a "
    "dimension of records: leave these out, or set gradients=auto or one_by_one."
)


class AttentionInterception(Interception):
    """Computes `torch.nn.functional.multi_head_attention_forward`; everything is (positions, records, width)."""

    targets = (F.multi_head_attention_forward,)

    def compute(self, func: TorchFunction, *args: Any, **kwargs: Any) -> Any:
        layer = self.layer
        query, key, value = args[:3]  # the others are known from the layer
        is_rare = layer.in_proj_weight is None or layer.bias_k is not None or layer.add_zero_attn
        if is_rare or query.dim() == 2:
            raise UnsupportedModuleError(_RARE)
        return self._attend(query, key, value, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        need_weights: bool = True,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention from its parts, of the arguments that torch's function has.

        Args:
            query: Shape (L, R, width).
            key: Shape (S, R, width).
            value: Shape (S, R, width).
            key_padding_mask: Added to the scores of a record's keys, (R, S).
            attn_mask: Added to the scores, (L, S) or (R · heads, L, S).
            need_weights: True to return the weights.
            average_attn_weights: True to average them over the heads.
            is_causal: True if the mask is the causal one.

        Returns:
            Output (L, R, width), and weights (R, L, S), (R, heads, L, S) or None.
        """
        layer = self.layer
        heads = layer.num_heads
        q, k, v = (_split_heads(x, heads) for x in self._projected(query, key, value))
        dropout = layer.dropout if layer.training else 0.0
        weights = None
        if need_weights:
            mask = _merged(attn_mask, key_padding_mask, heads)
            weights = _attention_weights(q, k, mask, dropout)
            mixed = weights @ v
            if average_attn_weights:
                weights = weights.mean(1)
        elif is_causal and key_padding_mask is None:
            # The fused function makes the causal mask itself.
            mixed = F.scaled_dot_product_attention(q, k, v, None, dropout, is_causal=True)
        else:
            mask = _merged(attn_mask, key_padding_mask, heads)
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        mixed = mixed.permute(2, 0, 1, 3).flatten(2)
        projection = layer.out_proj
        return self._product("out_proj.", mixed, projection.weight, projection.bias), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """q, k and v, by as few products as the layer itself makes."""
        layer = self.layer
        width = layer.embed_dim
        # One weight holds all three; torch multiplies by as much of it as goes with one input, and so does this: in
        # other products the sums would round differently.
        if query is key and key is value:
            inputs = [query]
            sizes = [3 * width]
        elif key is value:
            inputs = [query, key]
            sizes = [width, 2 * width]
        else:
            inputs = [query, key, value]
            sizes = [width] * 3
        weights = torch.split(layer.in_proj_weight, sizes)
        biases: Sequence[Tensor | None] = [None] * len(sizes)
        if layer.in_proj_bias is not None:
            biases = torch.split(layer.in_proj_bias, sizes)
        projected: list[Tensor] = []
        for x, weight, bias in zip(inputs, weights, biases, strict=True):
            before = len(projected) * width
            output = self._product("in_proj_", x, weight, bias, (before, 3 * width - before - len(weight)))
            projected.extend(torch.split(output, width, 2))
        return projected

    def _product(
        self,
        name: str,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        others: tuple[int, int] = (0, 0),
    ) -> Tensor:
        """A linear projection.

        Args:
            name: Common prefix of its parameters' names, before "weight" and "bias".
            x: Input, (positions, R, width).
            weight: Some rows of the layer's parameter.
            bias: The same of the bias, if there is one.
            others: Rows of the parameter before and after these, for which other products answer.
        """
        output = F.linear(x, weight, bias)
        inputs = x.detach()  # read after the backward pass, which frees the graph: nothing here may hold it

        def gradients(grads: Sequence[Tensor | None]) -> LayerGradients:
            (grad,) = grads
            assert grad is not None
            if any(others):
                grad = F.pad(grad, others)
            g = grad.transpose(0, 1)
            a = inputs.transpose(0, 1).to(g.dtype)
            return {
                f"{name}weight": OuterProductGradients(g, a),
                f"{name}bias": InstantiatedGradients(lambda: g.sum(1)),
            }

        self.note(outputs=[output], inputs=[inputs], records=x.shape[1], gradients=gradients)
        return output


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """From (positions, R, heads · width) to (R, heads, positions, width)."""
    positions, records, width = x.shape
    x = x.reshape(positions, records, heads, width // heads)
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


def _merged(mask: Tensor | None, padding: Tensor | None, heads: int) -> Tensor | None:
    """Additive mask of the scores (R, heads, L, S): zero or minus infinity for a boolean mask.

    Args:
        mask: (L, S) or (R · heads, L, S).
        padding: (R, S).
        heads: Number of heads.
    """
    if mask is not None and mask.dim() == 3:
        mask = mask.unflatten(0, (-1, heads))  # type: ignore[no-untyped-call]
    if padding is None:
        return mask
    rows = padding[:, None, None]
    return rows if mask is None else mask + rows
