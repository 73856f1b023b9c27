"""Which rows of a layer are a record's, where there are several: by what changes with which record.

Every assignment of rows to records gives the same sum over the lot, and a wrong one lets a record move more than its
bound. So none is guessed: one record after the other is replaced, and the rows of a layer's input and of its output's
gradient that change, by a bit, are that record's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpbench.privacy.gradients.folds import Fold, is_folded

LayerRows = tuple[nn.Module, list[Tensor]]
"""A layer, and what it saw in one call."""
_LEAST = 0.5  # of each record's rows that have to change with it


class RowEvidence:
    """What changed in the layers with which record of one lot.

    Args:
        calls: What each layer saw in that lot, in order.
        records: R.
    """

    def __init__(self, calls: Sequence[LayerRows], records: int) -> None:
        self._calls = calls
        self._records = records
        self._is_comparable = True
        # Of each tensor, whether its row changes with the record, shape (rows, R).
        self._changes = [
            [torch.zeros(len(x), records, dtype=torch.bool) if x.dim() else None for x in tensors]
            for _, tensors in calls
        ]

    def add(self, calls: Sequence[LayerRows], record: int | None) -> None:
        """Compare with another run.

        Args:
            calls: What each layer saw there.
            record: That another one stood in for; None: nothing was changed.
        """
        if [layer for layer, _ in calls] != [layer for layer, _ in self._calls]:
            self._is_comparable = False  # other layers ran, so that nothing can be compared
            return
        for (_, before), (_, after), changes in zip(self._calls, calls, self._changes, strict=True):
            if [x.shape for x in before] != [x.shape for x in after]:
                self._is_comparable = False
                return
            for one, other, changed in zip(before, after, changes, strict=True):
                if changed is None:
                    continue
                differs = _rows_that_differ(one, other).cpu()
                if record is not None:
                    # Gathered over all runs: one replacement may leave a row as it was by chance.
                    changed[:, record] |= differs
                elif bool(differs.any()):
                    self._is_comparable = False  # the same lot gives other numbers

    def folds(self) -> dict[nn.Module, set[Fold]]:
        """Of each layer that saw several rows of a record, the folds that all evidence allows."""
        allowed: dict[nn.Module, set[Fold]] = {}
        for (layer, tensors), changes in zip(self._calls, self._changes, strict=True):
            folded = [i for i, x in enumerate(tensors) if is_folded(x, self._records)]
            if not folded:
                continue
            of_layer = allowed.setdefault(layer, set(Fold))
            of_layer &= self._of_call([changes[i] for i in folded]) if self._is_comparable else set()
        return allowed

    def _of_call(self, changes: Sequence[Tensor | None]) -> set[Fold]:
        """Folds that the evidence of one call allows, none where there is too little."""
        of_call = set()
        sizes = {len(changed) for changed in changes if changed is not None}
        for fold in Fold:
            is_allowed = True
            # Input and gradient have the same rows: either may show a change that the other hides.
            for rows in sizes:
                of_size = [changed for changed in changes if changed is not None and len(changed) == rows]
                is_allowed &= self._is_allowed(fold, torch.stack(of_size).any(0))
            if is_allowed:
                of_call.add(fold)
        return of_call

    def _is_allowed(self, fold: Fold, changed: Tensor) -> bool:
        """Whether each row changes with its own record only, and enough of each record's rows do."""
        record_of = fold.record_of(len(changed), self._records, changed.device)
        own = torch.nn.functional.one_hot(record_of, self._records).bool()
        # One row that changes with another record refutes a fold; none that does confirms it only where enough change.
        if bool((changed & ~own).any()):
            return False
        shares = fold.by_record((changed & own).any(1), self._records).double().mean(1)
        return bool((shares >= _LEAST).all())


def agreed(lots: Sequence[dict[nn.Module, set[Fold]]]) -> dict[nn.Module, Fold]:
    """The fold of each layer; empty where one of them has none, or more than one that may be.

    Args:
        lots: What the evidence of each lot allows.
    """
    folds: dict[nn.Module, Fold] = {}
    for layer in {layer: None for allowed in lots for layer in allowed}:
        common = set.intersection(*(allowed.get(layer, set()) for allowed in lots))
        if len(common) != 1:
            return {}
        folds[layer] = common.pop()
    return folds


def _rows_that_differ(one: Tensor, other: Tensor) -> Tensor:
    """Which rows are not the same to the bit; NaN is itself."""
    differs = one != other
    if one.is_floating_point() or one.is_complex():
        differs &= ~(one.isnan() & other.isnan())
    return differs.flatten(1).any(1) if differs.dim() > 1 else differs
