"""One private training from its first lot to its last: the order of a step, whoever drives it.

A Lightning Trainer (`callback.strategy`) and a plain loop (`callback.loop`) are two drivers. Both call

    attach → begin → (open → release)* → end

and know nothing of what must happen between: a lot is opened once, released once, and the ledger is on disk before
anybody sees its sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from dpbench.callback import earlier_fits, guards
from dpbench.callback.audit import leave_scores, let_canaries_in
from dpbench.callback.released_gradients import ReleasedGradients
from dpbench.data.lots import LotLoader
from dpbench.errors import ConfigurationError
from dpbench.privacy.budget import Horizon
from dpbench.privacy.canaries.canaries import GradientCanaries
from dpbench.privacy.mechanism.adaptive import with_bounds
from dpbench.privacy.mechanism.clipping import VectorGroup
from dpbench.privacy.mechanism.mechanism import mean_norms
from dpbench.privacy.processes import Processes
from dpbench.privacy.randomness import Stream, keyed_generator, keyed_seed
from dpbench.privacy.releases import Releases
from dpbench.records.examples import SECOND_RELEASE
from dpbench.records.source import Attached, RecordSource, attached


class PrivateSession:
    """Lots in, private gradients in `p.grad` out, in the one order that is private.

    Args:
        releases: Makes the sums of a lot private.
        source: Turns lots into per-record gradients.
        audit: Canaries that join the lots, or None.
        delta: δ of the guarantee.

    Attributes:
        released: Whether the present lot was released.
    """

    def __init__(self, releases: Releases, source: RecordSource, audit: GradientCanaries | None, delta: float) -> None:
        self._releases, self._source = releases, source
        self._audit, self._delta = audit, delta
        self._attached: Attached | None = None
        self._loader: LotLoader | None = None
        self._holds_lots = False
        self._gradients = ReleasedGradients()
        self.released = False

    @property
    def attached(self) -> Attached:
        """Parameters and optimizer of this training; a ConfigurationError where `attach` did not run."""
        return attached(self._attached)

    @property
    def is_attached(self) -> bool:
        """Whether `attach` ran, and `end` did not."""
        return self._attached is not None

    @property
    def loader(self) -> LotLoader | None:
        """Draws the lots; None before `acquire`."""
        return self._loader

    def reset(self) -> None:
        """Forget an earlier training."""
        self._attached = self._loader = None

    def attach(self, trainer: Any, module: pl.LightningModule) -> None:
        """Let the source of records take over the module's training step and backward pass.

        Raises:
            ConfigurationError: The optimizer moves other parameters than those that are released.
        """
        found = self._attached = self._source.attach(trainer, module, self._releases)
        guards.refuse_optimizer(found.optimizer, found.trained.parameters, found.trained.names)
        self._gradients.follow(found.optimizer)

    def acquire(self, loader: LotLoader) -> None:
        """Take the lots of a loader, which no other training may draw meanwhile.

        Raises:
            ConfigurationError: Another training has them, or they draw something else than the source trains.
        """
        loader.lots.take_over()
        self._loader, self._holds_lots = loader, True
        guards.refuse_other_unit(self._source.unit, loader.lots.sampling)

    def begin(
        self,
        processes: Processes,
        key: int | None,
        ledger: Path,
        horizon: Horizon,
        metric_sizes: Mapping[str, int],
    ) -> None:
        """Fix the plan and open the ledger; everything can still be refused.

        Args:
            processes: All of this training.
            key: Of a seeded run; None takes the operating system's entropy.
            ledger: Its path.
            horizon: Planned and past steps.
            metric_sizes: Number of values of each metric that the module offers.

        Raises:
            ConfigurationError: The plan has no solution.
            BudgetExhausted: The target allows no release.
            LedgerError: The ledger cannot be continued.
        """
        releases, source, trained = self._releases, self._source, self.attached.trained
        lots = attached(self._loader).lots
        lot_sizes = lots.plan(horizon.planned)
        releases.take_part(processes, key)
        let_canaries_in(self._audit, releases, lots, trained)
        sampling = lots.sampling
        source.begin(attached(self._loader))
        if releases.recipe.private:
            guards.warn_of_delta(self._delta, sampling.population, sampling.unit)
        groups = self._first_groups()
        releases.begin(sampling, source.summands, trained, groups, metric_sizes, horizon, lot_sizes)
        guards.warn_of_split(releases.mechanism.plan)
        lots.start_at(releases.made, releases.lot_key)  # lot t belongs to release t
        releases.open_ledger(ledger, horizon, lots.source)
        lots.phase = releases.lot_phase

    def _first_groups(self) -> tuple[VectorGroup, ...]:
        """The partition of the parameters with the bounds of the first release, the same on all processes."""
        releases, trained = self._releases, self.attached.trained
        recipe = releases.recipe
        groups = recipe.groups(trained.names, trained.sizes)
        if recipe.bounds_from_noise is None or releases.memory.get("bounds") is not None:
            return groups
        piece = self._source.on_noise(keyed_generator((releases.key, Stream.NOISE_BATCH)))
        means = mean_norms(piece.gradients, piece.rows, piece.merge, recipe.transform, trained.sizes, groups)
        return with_bounds(groups, releases.processes.broadcast([recipe.bounds_from_noise * mean for mean in means]))

    def open(self, batch: Any, device: torch.device, rank: int) -> None:
        """Begin a lot: its release, its records, and the random numbers of the model.

        Args:
            batch: As the module sees it.
            device: Of the module.
            rank: Whose random numbers the module takes.
        """
        self.released = False
        guards.clear_gradients(self.attached.trained.parameters)
        self._releases.open_lot()
        self._source.open_lot(batch)
        # Dropout and the like: a function of (key, release, rank), so that replays repeat; without a seed, unknown.
        guards.seed_device(keyed_seed(self._releases.key_of(Stream.MODEL, rank)), device)

    def release(self) -> None:
        """Release the sums of the lot to `p.grad`.

        Raises:
            ConfigurationError: The lot was released already, or not all of it went through the module.
            BudgetExhausted: Nothing of the target is left.
        """
        if self.released:
            raise ConfigurationError(SECOND_RELEASE)
        self._releases.budget.refuse_overdraft()
        self._source.close_lot()
        parameters = self.attached.trained.parameters
        for parameter, gradient in zip(parameters, self._releases.release(), strict=True):
            parameter.grad = gradient.to(parameter.dtype) if parameter.requires_grad else None
        self._gradients.note(parameters)
        self.released = True

    def end(self, module: pl.LightningModule) -> None:
        """Give module and lots back as they were, also after an error."""
        releases = self._releases
        earlier_fits.note_training(module, releases.budget, releases.made if self.is_attached else 0)
        self._attached = None
        self._gradients.forget()
        if self._holds_lots:  # else they are another training's by now
            attached(self._loader).lots.give_back()
            self._holds_lots = False
        releases.budget.close()
        self._source.detach()
        leave_scores(releases)  # last: a full disk keeps neither the ledger's lock nor the module
