"""Canaries of an audited training: let in where it begins, and what they saw left where it ends."""

from __future__ import annotations

from dpbench.data.lots import Lots
from dpbench.errors import ConfigurationError
from dpbench.privacy.canaries.canaries import Canaries, GradientCanaries
from dpbench.privacy.canaries.file import FILE_NAME, write_scores
from dpbench.privacy.randomness import fresh_key
from dpbench.privacy.releases import ReleaseEngine, TrainableParameters

_OTHER_CANARIES = "the checkpoint is of a run with other canaries: resume it with its original audit."


def let_canaries_in(
    options: GradientCanaries | None,
    releases: ReleaseEngine,
    lots: Lots,
    trained: TrainableParameters,
) -> None:
    """Have canaries drawn like the records of the data set, after `ReleaseEngine.join`; none without options.

    Raises:
        ConfigurationError: There is no room for so many, or nothing to audit.
    """
    if releases.canaries is not None and releases.canaries.probe.observe in releases.observers:
        releases.observers.remove(releases.canaries.probe.observe)  # of an earlier training
    releases.canaries, lots.added = None, 0
    memory = releases.memory.get("canaries") or {}
    if options is None:
        if memory:
            raise ConfigurationError(_OTHER_CANARIES)
        return
    key = memory.get("key", fresh_key() if options.seed is None else options.seed)
    canaries = Canaries(
        options,
        releases.processes.broadcast(key),
        releases.recipe,
        lots,
        trained.names,
        trained.sizes,
        releases.processes,
    )
    if memory:
        try:
            canaries.sums.load_state_dict(memory["sums"])
        except ValueError:
            raise ConfigurationError(_OTHER_CANARIES) from None
    releases.canaries, lots.added = canaries, canaries.in_lots
    releases.observers.append(canaries.probe.observe)


def leave_scores(releases: ReleaseEngine) -> None:
    """Write what the canaries saw beside the ledger, on rank 0."""
    path, seal = releases.budget.path, releases.budget.seal
    first = releases.processes.rank == 0  # after a resume the others know the checkpoint's seal
    if first and releases.canaries is not None and releases.num_releases and path is not None and seal is not None:
        canaries = releases.canaries
        write_scores(path.with_name(FILE_NAME), canaries.sums.scores(), seal, canaries.left_out)
