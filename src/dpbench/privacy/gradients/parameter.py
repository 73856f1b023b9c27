"""Per-record gradients of one parameter, in the form that its layer gives them most cheaply.

Strategies are written against three questions only: `squared_norms`, `weighted_sum`, `per_record`. Clipping needs
the first two, which for many layers never build the (R, D) matrix of per-record gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor


class ParameterGradients(ABC):
    """Gradients of R records' losses with respect to one parameter."""

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """Squared l2 norm of each record's gradient, shape (R,)."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Sum of the records' gradients times `weights` (R,), in the parameter's shape."""

    def add_weighted_sum(self, weights: Tensor, total: Tensor) -> None:
        """Add `weighted_sum(weights)` to `total`, in place; without a temporary where that can be."""
        total.add_(self.weighted_sum(weights))

    @abstractmethod
    def per_record(self) -> Tensor:
        """All gradients, shape (R, *parameter.shape); costs R times the parameter's memory."""

    def select(self, records: Tensor) -> ParameterGradients:
        """Gradients of a subset of the records, given by their positions."""
        rows = self.per_record()[records]
        return InstantiatedGradients(lambda: rows)

    def merge(
        self,
        record_of: Tensor,
        records: int,
        factor: float,
    ) -> ParameterGradients:
        """Sum rows into larger records, such as examples into microbatches.

        Args:
            record_of: New record of each row, in 0 ... `records` - 1, shape (R,).
            records: Number of new records.
            factor: Multiplies every sum.
        """

        def compute() -> Tensor:
            rows = self.per_record()
            shape = rows.shape[1:]
            sums = rows.new_zeros(records, *shape)
            return sums.index_add_(0, record_of, rows, alpha=factor)

        return InstantiatedGradients(compute)

    def plus(self, others: Sequence[ParameterGradients]) -> ParameterGradients:
        """Gradients of a parameter that is used more than once (module called twice, tied weights): sums over its uses.

        Norms do not add up, so the sums are built, unless a layer knows better.

        Args:
            others: Further uses, over the same records.
        """

        def compute() -> Tensor:
            total = self.per_record()
            for use in others:
                total = total + use.per_record()
            return total

        return InstantiatedGradients(compute)


class OneRecord(ParameterGradients):
    """The gradient of a single record: no row of its own is built.

    Args:
        gradient: The gradient, in the parameter's shape.
        squared_norm: Its squared norm, (1,).
    """

    def __init__(self, gradient: Tensor, squared_norm: Tensor) -> None:
        self._gradient = gradient
        self._squared_norm = squared_norm

    @classmethod
    def of(cls, gradients: Sequence[Tensor]) -> tuple[list[OneRecord], Tensor]:
        """Gradients of all parameters, with norms that are computed in one call.

        Args:
            gradients: One for each parameter, in its shape.

        Returns:
            The gradients of each parameter, and their squared norms, shape (parameters,).
        """
        norms = torch._foreach_norm(list(gradients))
        squared_norms = torch.stack(norms).square()
        rows = torch.split(squared_norms, 1)
        by_parameter = []
        for gradient, squared_norm in zip(gradients, rows, strict=True):
            by_parameter.append(cls(gradient, squared_norm))
        return by_parameter, squared_norms

    def squared_norms(self) -> Tensor:
        return self._squared_norm

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self._gradient * weights[0]

    def add_weighted_sum(self, weights: Tensor, total: Tensor) -> None:
        total.addcmul_(self._gradient, weights[0])

    def per_record(self) -> Tensor:
        return self._gradient[None]


class InstantiatedGradients(ParameterGradients):
    """Gradients that are computed record by record, on first use.

    Args:
        compute: Returns the gradients, shape (R, *stored).
        order: The parameter's shape is `stored` permuted by this, such as (0, 3, 1, 2) where a kernel gives channels
            last; only sums are permuted, not every record. None: as stored.
    """

    def __init__(
        self,
        compute: Callable[[], Tensor],
        order: tuple[int, ...] | None = None,
    ) -> None:
        self._compute = compute
        self._order = order

    @cached_property
    def _stored(self) -> Tensor:
        rows = self._compute()
        # Half precision is too coarse for norms and sums.
        dtype = torch.promote_types(rows.dtype, torch.float32)
        return rows.to(dtype)

    def squared_norms(self) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(flat_rows(self._stored), dim=1)
        return norms.square()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        rows = self._stored
        flat = weights @ flat_rows(rows)
        total = flat.view(rows.shape[1:])
        if self._order is None:
            return total
        return total.permute(self._order)

    def add_weighted_sum(self, weights: Tensor, total: Tensor) -> None:
        rows = self._stored
        if rows.dim() == 2 and rows.dtype == total.dtype:
            # A parameter of one dimension, such as a bias: its sum is added without a temporary.
            total.addmv_(rows.t(), weights)
        else:
            super().add_weighted_sum(weights, total)

    def per_record(self) -> Tensor:
        if self._order is None:
            return self._stored
        # The records stay in dimension 0.
        dimensions = [1 + dimension for dimension in self._order]
        return self._stored.permute(0, *dimensions)

    def select(self, records: Tensor) -> ParameterGradients:
        rows = self._stored[records]
        return InstantiatedGradients(lambda: rows, self._order)


class ScaledGradients(ParameterGradients):
    """Each record's gradient times a number of its own.

    Args:
        gradients: Gradients of R records.
        scales: Shape (R,).
    """

    def __init__(self, gradients: ParameterGradients, scales: Tensor) -> None:
        self._gradients = gradients
        self._scales = scales

    def squared_norms(self) -> Tensor:
        norms = self._gradients.squared_norms()
        scales = self._scales.to(norms)
        return norms * scales.square()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self._gradients.weighted_sum(self._scaled(weights))

    def add_weighted_sum(self, weights: Tensor, total: Tensor) -> None:
        self._gradients.add_weighted_sum(self._scaled(weights), total)

    def _scaled(self, weights: Tensor) -> Tensor:
        return weights * self._scales.to(weights)

    def per_record(self) -> Tensor:
        rows = self._gradients.per_record()
        scales = self._scales.to(rows)
        return rows * per_row(scales, rows)


class OuterProductGradients(ParameterGradients):
    """Weight of a linear layer: the gradient of record r is Σ_t g_rt a_rtᵀ over its T positions.

    One position: ‖g aᵀ‖² = ‖g‖²‖a‖², and the weighted sum is one matrix product; nothing is built per record.

    Attributes:
        outputs: Gradients of the layer's outputs g, shape (R, T, out).
        inputs: The layer's inputs a, shape (R, T, in).
    """

    def __init__(self, outputs: Tensor, inputs: Tensor) -> None:
        self.outputs = outputs
        self.inputs = inputs

    def squared_norms(self) -> Tensor:
        squares = self.squares_of_positions()
        if squares.shape[1] == 1:
            return squares.squeeze(1)
        return _rounded_up(self.norms_by_products(), squares)

    def squares_of_positions(self) -> Tensor:
        """Squared norm of each position's part, shape (R, T)."""
        return self.squared_outputs * _squares(self.inputs)

    def norms_by_products(self) -> Tensor:
        """Squared norms of the sums over positions, as rounding leaves them, shape (R,)."""
        g = self.outputs
        a = self.inputs
        _, positions, n_out = g.shape
        n_in = a.shape[2]
        if positions * (n_in + n_out) < n_in * n_out:
            # ‖Σ_t g_t a_tᵀ‖² = Σ_st (g_s · g_t)(a_s · a_t): two T × T matrices instead of the gradient.
            return ((g @ g.mT) * (a @ a.mT)).sum((1, 2))
        return (g.mT @ a).square().sum((1, 2))

    @cached_property
    def squared_outputs(self) -> Tensor:
        """‖g_rt‖², shape (R, T)."""
        return _squares(self.outputs)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        g = _weighted(self.outputs, weights)
        a = self.inputs.flatten(0, 1)
        return g.t() @ a

    def add_weighted_sum(self, weights: Tensor, total: Tensor) -> None:
        if self.inputs.dtype != total.dtype:
            super().add_weighted_sum(weights, total)
            return
        g = _weighted(self.outputs, weights)
        a = self.inputs.flatten(0, 1)
        total.addmm_(g.t(), a)

    def per_record(self) -> Tensor:
        return self.outputs.mT @ self.inputs

    def select(self, records: Tensor) -> OuterProductGradients:
        outputs = self.outputs[records]
        inputs = self.inputs[records]
        return OuterProductGradients(outputs, inputs)

    def merge(
        self,
        record_of: Tensor,
        records: int,
        factor: float,
    ) -> OuterProductGradients:
        # Rows of one record become further positions of it: the gradient is a sum over both.
        outputs = _side_by_side(self.outputs * factor, record_of, records)
        inputs = _side_by_side(self.inputs, record_of, records)
        return OuterProductGradients(outputs, inputs)

    def plus(self, others: Sequence[ParameterGradients]) -> ParameterGradients:
        """Add further uses as further positions of each record, so that no gradient is built."""
        return _side_by_side_uses([self, *others]) or super().plus(others)

    def beside(self, uses: Sequence[OuterProductGradients]) -> OuterProductGradients:
        """The same with the positions of other uses of the weight."""
        outputs = torch.cat([use.outputs for use in (self, *uses)], 1)
        inputs = torch.cat([use.inputs for use in (self, *uses)], 1)
        return OuterProductGradients(outputs, inputs)


class OutputGradients(InstantiatedGradients):
    """Bias of a linear layer with one position: the gradients of its outputs, with norms that the weight needs too."""

    def __init__(self, weight: OuterProductGradients) -> None:
        super().__init__(lambda: weight.outputs.squeeze(1))
        self._weight = weight

    def squared_norms(self) -> Tensor:
        return self._weight.squared_outputs.squeeze(1)


def per_row(values: Tensor, rows: Tensor) -> Tensor:
    """One value a row (R,) in a shape that multiplies rows (R, ...)."""
    dimensions = rows.dim() - 1
    ones = [1] * dimensions
    return values.view(-1, *ones)


def _weighted(outputs: Tensor, weights: Tensor) -> Tensor:
    """Output gradients (R, T, out) times `weights` (R,), all positions in a row: (R·T, out)."""
    weighted = outputs * weights[:, None, None]
    return weighted.flatten(0, 1)


def _squares(rows: Tensor) -> Tensor:
    """Squared norms over the last dimension.

    Squares of numbers below 1e-19 are lost in float32; the slack counts them, or a tiny gradient could hide behind a
    huge input.
    """
    width = rows.shape[-1]
    slack = width * torch.finfo(rows.dtype).tiny
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    squares = norms.square_()
    return squares.add_(slack)


def _rounded_up(norms: Tensor, squares: Tensor) -> Tensor:
    """Squared norms that rounding cannot have made too small.

    Where the gradients of a record's positions cancel, a squared norm that is computed otherwise than the sum it
    bounds may come out as zero, so that an adversarial record would pass unclipped.

    Args:
        norms: Computed squared norms, shape (R,).
        squares: Squared norm of each position's part, shape (R, T).
    """
    largest = squares.sqrt().sum(1).square()
    positions = squares.shape[1]
    rounding = 16 * positions * torch.finfo(norms.dtype).eps
    slack = rounding * largest
    cancelled = norms < 1e-3 * largest
    with_slack = norms.clamp(min=0) + slack
    return torch.where(cancelled, with_slack, norms)


class EmbeddingGradients(ParameterGradients):
    """Weight of an embedding: row v gets the sum of the output gradients at the positions that hold token v.

    Args:
        outputs: Gradients of the layer's outputs, shape (R, T, width), zero at padding.
        tokens: Token of each position, shape (R, T).
        size: Number of rows of the weight.
    """

    def __init__(self, outputs: Tensor, tokens: Tensor, size: int) -> None:
        self.outputs = outputs
        self.tokens = tokens
        self._size = size

    def squared_norms(self) -> Tensor:
        return _rounded_up(self.norms_by_products(), self.squares_of_positions())

    def squares_of_positions(self) -> Tensor:
        """Squared norm of each position's part, shape (R, T)."""
        return self.outputs.square().sum(2)

    def norms_by_products(self) -> Tensor:
        """Squared norms of the sums over positions, as rounding leaves them, shape (R,)."""
        tokens = self.tokens
        g = self.outputs
        # Only positions with the same token meet in a row of the gradient.
        same_token = tokens[:, :, None] == tokens[:, None, :]
        return (g @ g.mT).mul_(same_token).sum((1, 2))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        g = _weighted(self.outputs, weights)
        width = g.shape[1]
        total = g.new_zeros(self._size, width)
        tokens = self.tokens.flatten()
        return total.index_add_(0, tokens, g)

    def per_record(self) -> Tensor:
        records, _, width = self.outputs.shape
        rows = self.outputs.new_zeros(records, self._size, width)
        index = self.tokens[:, :, None].expand_as(self.outputs)
        return rows.scatter_add_(1, index, self.outputs)

    def select(self, records: Tensor) -> EmbeddingGradients:
        outputs = self.outputs[records]
        tokens = self.tokens[records]
        return EmbeddingGradients(outputs, tokens, self._size)

    def merge(
        self,
        record_of: Tensor,
        records: int,
        factor: float,
    ) -> EmbeddingGradients:
        outputs = _side_by_side(self.outputs * factor, record_of, records)
        tokens = _side_by_side(self.tokens, record_of, records)
        return EmbeddingGradients(outputs, tokens, self._size)

    def plus(self, others: Sequence[ParameterGradients]) -> ParameterGradients:
        """Add further uses as further positions of each record, so that no gradient is built."""
        return _side_by_side_uses([self, *others]) or super().plus(others)

    def beside(self, uses: Sequence[EmbeddingGradients]) -> EmbeddingGradients:
        """The same with the positions of other uses of the table."""
        outputs = torch.cat([use.outputs for use in (self, *uses)], 1)
        tokens = torch.cat([use.tokens for use in (self, *uses)], 1)
        return EmbeddingGradients(outputs, tokens, self._size)


class TiedGradients(ParameterGradients):
    """Table of an embedding that is the weight of a linear layer, too: neither use builds a gradient per record.

    ‖a + b‖² = ‖a‖² + ‖b‖² + 2⟨a, b⟩. The embedding adds g_t to row v_t, the linear layer d_s x_sᵀ to all rows, so that
    ⟨a, b⟩ = Σ_ts d_s[v_t] (x_s · g_t).

    Args:
        embedding: The table's rows.
        linear: The layer's outer products, over the same records.
    """

    def __init__(self, embedding: EmbeddingGradients, linear: OuterProductGradients) -> None:
        self._embedding = embedding
        self._linear = linear

    def squared_norms(self) -> Tensor:
        embedding = self._embedding
        linear = self._linear
        positions = linear.outputs.shape[1]
        tokens = embedding.tokens[:, None].expand(-1, positions, -1)
        at_tokens = linear.outputs.gather(2, tokens)
        of_both = (at_tokens * (linear.inputs @ embedding.outputs.mT)).sum((1, 2))
        norms = embedding.norms_by_products() + linear.norms_by_products() + 2 * of_both
        squares = torch.cat([embedding.squares_of_positions(), linear.squares_of_positions()], 1)
        return _rounded_up(norms, squares)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = self._linear.weighted_sum(weights)
        return total.index_add_(0, self._embedding.tokens.flatten(), _weighted(self._embedding.outputs, weights))

    def per_record(self) -> Tensor:
        return self._embedding.per_record() + self._linear.per_record()


def _side_by_side_uses(uses: Sequence[ParameterGradients]) -> ParameterGradients | None:
    """Sums over uses of a parameter by embeddings and linear layers; None where there are others."""
    embeddings = [use for use in uses if isinstance(use, EmbeddingGradients)]
    products = [use for use in uses if isinstance(use, OuterProductGradients)]
    if len(embeddings) + len(products) < len(uses):
        return None
    if not embeddings:
        return products[0].beside(products[1:])
    if not products:
        return embeddings[0].beside(embeddings[1:])
    return TiedGradients(embeddings[0].beside(embeddings[1:]), products[0].beside(products[1:]))


def _side_by_side(rows: Tensor, record_of: Tensor, records: int) -> Tensor:
    """Concatenate the positions of the rows that belong together; zeros where a record has fewer rows than others.

    Args:
        rows: Shape (R, T, ...).
        record_of: New record of each row, shape (R,).
        records: Number of new records, M.

    Returns:
        Shape (M, L·T, ...), L the largest number of rows in a record.
    """
    counts = torch.bincount(record_of, minlength=records)
    starts = counts.cumsum(0) - counts
    order = torch.argsort(record_of, stable=True)
    sorted_record_of = record_of[order]
    place = torch.arange(len(order), device=order.device)
    place = place - starts[sorted_record_of]  # within its record
    longest = int(counts.max()) if len(order) else 0
    shape = rows.shape[1:]
    wide = rows.new_zeros(records, longest, *shape)
    wide[sorted_record_of, place] = rows[order]
    return wide.flatten(1, 2)


def flat_rows(rows: Tensor) -> Tensor:
    """Rows (R, size); a scalar has one element in each."""
    return rows.flatten(1) if rows.dim() > 1 else rows[:, None]


def zero_gradients(parameter: Tensor, records: int) -> ParameterGradients:
    """Gradients of a parameter that the loss of this batch does not depend on."""

    def compute() -> Tensor:
        return parameter.new_zeros(records, *parameter.shape)

    return InstantiatedGradients(compute)
