"""Trainings that have diverged: messages on lots, and the end of a run, which depends on releases alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from dpbench.errors import Diverged
from dpbench.privacy.mechanism.mechanism import Mechanism
from dpbench.privacy.releases import ReleaseEngine
from dpbench.records.source import RecordsInTurn

LARGEST_WEIGHT = 1e10
"""Beyond, a network computes nothing: squares of its activations leave float32."""
EVERY = 50  # releases after which a loop without a logging interval looks at its weights
_NONE_FINITE = (
    "no record of a batch has a finite gradient (the learning rate is too large, or inputs are not finite), so its "
    "release is pure noise at full cost; nonprivate/nonfinite_records counts such records. Training continues, since "
    "stopping would reveal something about the records."
)


class LotsWithoutGradients:
    """Says once that a batch holds no record with a finite gradient, and logs how many have none: not private."""

    def __init__(self) -> None:
        self._warned = False

    def note(
        self,
        mechanism: Mechanism,
        source: object,
        log: Callable[..., object] | None = None,
    ) -> None:
        """Look at the batch that was released last.

        Args:
            mechanism: Counts records.
            source: The source of records; one that takes them in turn counts those that diverge itself.
            log: Function such as a LightningModule's `log`; None: nothing is logged.
        """
        records, finite = mechanism.records_of_lot
        if finite == records or isinstance(source, RecordsInTurn):
            return
        if log is not None:
            log("nonprivate/nonfinite_records", float(records - finite), batch_size=1)
        if not finite and not self._warned:
            self._warned = True
            pl.utilities.rank_zero_warn(_NONE_FINITE)


def refuse_diverged(
    module: nn.Module,
    releases: ReleaseEngine,
) -> None:
    """Stop a training with released weights that are not finite, or absurdly large.

    They are functions of releases, so that to stop by them releases nothing.

    Args:
        module: Its trainable parameters.
        releases: The releases, which know the ε spent.

    Raises:
        Diverged: States the ε spent, where it is recorded, and the remedy.
    """
    weights = {name: p for name, p in module.named_parameters() if p.requires_grad}
    name = _first_diverged(weights)
    if name is not None:
        raise Diverged(f"the released weights have diverged ({name}), {_spent(releases)}")


def _first_diverged(tensors: Mapping[str, Tensor]) -> str | None:
    """Name of the first floating tensor with an entry that is not finite, or absurdly large."""
    floating: dict[str, Tensor] = {}
    for name, x in tensors.items():
        if x.is_floating_point() and x.numel():
            floating[name] = x.detach()
    if not floating:
        return None
    norms: Sequence[Tensor] = torch._foreach_norm(list(floating.values()), float("inf"))
    device = norms[0].device
    values = torch.stack([norm.double().to(device) for norm in norms]).tolist()
    for name, value in zip(floating, values, strict=True):
        if not value <= LARGEST_WEIGHT:
            return name
    return None


def _spent(releases: ReleaseEngine) -> str:
    remedy = "lower the learning rate (or the clipping bound), and start a new run with a new ledger"
    if not releases.recipe.private:
        return f"after {releases.num_releases} steps: {remedy}."
    epsilon = releases.budget.epsilon_here()
    return (
        f"so the training stops after {releases.num_releases} releases, which cost epsilon = {epsilon:.4g} at delta = "
        f"{releases.budget.delta:g} ({releases.budget.path}): {remedy}. If both runs are published, their costs add up."
    )
