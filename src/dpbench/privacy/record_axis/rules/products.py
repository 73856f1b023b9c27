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
    """Distances between rows of two tensors."""
    a, b = call["x1"], call["x2"]
    of_a, of_b = call.axis(a), call.axis(b)
    axis = of_a or of_b
    assert axis is not None
    if of_a is not None and of_b is not None and (of_a != of_b or of_a.dim >= a.dim() - 2):
        raise Mixes("distances between records")
    t = a if of_a is not None else b
    other = b if of_a is not None else a
    if axis.dim == t.dim() - 1:
        raise Mixes("distances over records")
    if axis.dim < t.dim() - 2:
        if of_a is None or of_b is None:
            call.require_exchangeable(other, axis.dim, axis)
        return axis
    return axis if of_a is not None else axis._replace(dim=t.dim() - 1)


@rule("_trilinear")
def trilinear(call: Call) -> Axis:
    """The product of three tensors, each with new dimensions, summed over some."""
    axes = set()
    for name, expanded in (("i1", "expand1"), ("i2", "expand2"), ("i3", "expand3")):
        axis = call.axis(call[name])
        if axis is not None:
            axes.add(axis._replace(dim=_expanded(axis.dim, call[expanded])))
    if len(axes) != 1:
        raise Mixes("records are arranged in two ways")
    (axis,) = axes
    summed = call["sumdim"]
    if axis.dim in summed:
        raise Mixes("a product sums over records")
    for name, expanded in (("i1", "expand1"), ("i2", "expand2"), ("i3", "expand3")):
        t = call[name]
        if call.axis(t) is None:
            for dim in range(t.dim()):
                if _expanded(dim, call[expanded]) == axis.dim:
                    call.require_exchangeable(t, dim, axis)
    return axis._replace(dim=axis.dim - sum(dim < axis.dim for dim in summed))


def _expanded(dim: int, expanded: list[int]) -> int:
    for new in sorted(expanded):
        dim += new <= dim
    return dim


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


@rule("_linalg_solve_ex linalg_solve_triangular")
def solve(call: Call) -> Axis:
    """Solves linear systems, each of one matrix with its right side."""
    names = ("A", "B") if call.has("A") else ("self", "B")
    a, b = call[names[0]], call[names[1]]
    if a.dim() != b.dim():
        raise Mixes("right sides of another dimension")
    axis = call.common_axis(a, b)
    if axis.dim >= a.dim() - 2:
        raise Mixes("systems that are made of several records")
    return axis
