"""Products of matrices, and distances."""

from __future__ import annotations

from torch import Tensor

from dpbench.privacy.record_axis.operators import Call, Mixes, Outcome, rule
from dpbench.privacy.record_axis.tags import Axis, Over

_FACTORS = {
    "mm": ("self", "mat2", None),
    "bmm": ("self", "mat2", None),
    "mv": ("self", "vec", None),
    "dot": ("self", "tensor", None),
    "vdot": ("self", "other", None),
    "addmm": ("mat1", "mat2", "self"),
    "_addmm_activation": ("mat1", "mat2", "self"),
    "addmv": ("mat", "vec", "self"),
    "baddbmm": ("batch1", "batch2", "self"),
}


@rule(*_FACTORS)
def product(call: Call) -> Outcome:
    """Records may run along the rows of the first factor, the columns of the second or a batch; not along the sum."""
    first_name, second_name, added_name = _FACTORS[call.operator.plain_name]
    a, b = call[first_name], call[second_name]
    added = None if added_name is None else call[added_name]
    is_batched = a.dim() == 3
    outcome = _factors(call, a, b, is_batched)
    if isinstance(outcome, Over):
        if added is not None:
            raise Mixes("a sum over records is added to something")
        return outcome
    if added is None:
        return outcome
    if outcome is None:
        own = call.axis(added)
        assert own is not None
        axis = own._replace(dim=own.dim + call.output.dim() - added.dim())
        rows = a.dim() - 2 if a.dim() > 1 else None
        columns = call.output.dim() - 1 if b.dim() > 1 else None
        if (is_batched and axis.dim == 0) or axis.dim == rows:
            call.require_exchangeable(a, axis.dim, axis)
        if (is_batched and axis.dim == 0) or axis.dim == columns:
            call.require_exchangeable(b, axis.dim, axis)
        return axis
    call.require_along(added, outcome, call.output.dim())
    return outcome


def _factors(call: Call, a: Tensor, b: Tensor, is_batched: bool) -> Outcome:
    of_a, of_b = call.axis(a), call.axis(b)
    first = 1 if is_batched else 0
    summed_of_a, summed_of_b = a.dim() - 1, first
    if of_a is not None and of_b is not None:
        if is_batched and of_a == of_b and of_a.dim == 0:
            return of_a
        is_summed = of_a.dim == summed_of_a and of_b.dim == summed_of_b
        if not is_batched and is_summed and of_a[1:] == of_b[1:]:
            return Over.SUM  # the gradient of a weight
        raise Mixes("a product of records with records")
    if of_a is not None:
        if is_batched and of_a.dim == 0:
            call.require_exchangeable(b, 0, of_a)
            return of_a
        if of_a.dim == first and a.dim() > 1:
            return of_a
        raise Mixes("a product sums over records")
    if of_b is not None:
        if is_batched and of_b.dim == 0:
            call.require_exchangeable(a, 0, of_b)
            return of_b
        if b.dim() > 1 and of_b.dim == b.dim() - 1:
            return of_b._replace(dim=call.output.dim() - 1)
        raise Mixes("a product sums over records")
    return None


@rule("_cdist_forward")
def cdist(call: Call) -> Axis:
    """Distances of records' rows to those of a public table."""
    x, table = call["x1"], call["x2"]
    if call.has_records(table) or x.dim() != table.dim():
        raise Mixes("distances between records")
    axis = call.common_axis(x)
    if axis.dim != x.dim() - 2:
        raise Mixes("distances over records")
    return axis


@rule("_trilinear")
def trilinear(call: Call) -> Axis:
    """Bilinear layers: rows of two tensors, and a weight that is one for all."""
    axis = call.common_axis(call["i1"], call["i3"])
    call.require_public(call["i2"])
    if axis.dim or 0 in (*call["expand1"], *call["expand3"], *call["sumdim"]) or 0 not in call["expand2"]:
        raise Mixes("a product of records with records")
    return axis


@rule(
    "triu tril _linalg_det linalg_inv_ex linalg_cholesky_ex linalg_qr _linalg_svd _linalg_eigh linalg_lu_factor_ex",
    "linalg_matrix_exp cholesky_inverse",
)
def matrices(call: Call) -> Axis:
    """Works on the matrices of the last two dimensions."""
    x = call.tensors[0]
    axis = call.common_axis(x)
    if axis.dim >= x.dim() - 2:
        raise Mixes("matrices that are made of several records")
    return axis
