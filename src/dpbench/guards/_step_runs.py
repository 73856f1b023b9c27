"""One training step run several times from one state, and what each run says of the gradients of its rows."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpbench.guards._altered_lots import AlteredLot, Rows
from dpbench.guards._repeatable_step import uncompiled, without_assertions, without_fused_dropout
from dpbench.guards.host_draws import FreshGenerators, following_host
from dpbench.guards.row_draws import FollowingDraws, RowDraws
from dpbench.guards.step_state import StepState
from dpbench.privacy.gradients import tf32
from dpbench.privacy.gradients.method import GradientMethod
from dpbench.privacy.gradients.parameter import ParameterGradients
from dpbench.privacy.mechanism.recipe import Recipe
from dpbench.records.stopped_step import output_of, stop
from dpbench.records.training import Training, gathered_alone, loss_of, nothing

_SMALLEST_METRIC = 1e-2  # metrics below it count as it, over their bound


class StepRun(NamedTuple):
    """Gradients of the rows of one run.

    Attributes:
        gradients: One for each parameter.
        norms: Of each row's gradient, shape (R,).
        metrics: Of each row, over their bounds, shape (R, number of values).
        dtype: Of norms, as they are computed.
    """

    gradients: Sequence[ParameterGradients]
    norms: Tensor
    metrics: Tensor
    dtype: torch.dtype

    def signed_sums(self, rows: Tensor, weights: Tensor) -> list[Tensor]:
        """Σ of some rows' gradients with weights; with random signs, its square is on average that of the rows."""
        device = self.norms.device.type
        with torch.no_grad(), torch.autocast(device, enabled=False):
            is_finite = self.norms.isfinite().all()
            if not is_finite:
                # A weight of 0 would not keep NaN of other rows out of the sum.
                weights = weights.to(self.dtype)
                selected = (gradients.select(rows) for gradients in self.gradients)
                return [gradients.weighted_sum(weights).double() for gradients in selected]
            zeros = torch.zeros_like(self.norms)
            weights = zeros.index_copy_(0, rows, weights).to(self.dtype)
            return [gradients.weighted_sum(weights).double() for gradients in self.gradients]


class Gap(NamedTuple):
    """Change of a record's gradient between runs.

    Attributes:
        size: Relative to its norm; infinite where a run failed.
        subject: Whether it is the gradient or a metric that changes.
    """

    size: float
    subject: str = "gradient"


class ComparedRows:
    """Some rows of one run, to be compared with the same rows of others; their gradients need not be kept.

    Args:
        run: Has them.
        rows: Which.
        random: Draws signs.
        floor: Norms below it count as it.
    """

    def __init__(
        self,
        run: StepRun,
        rows: Rows,
        random: np.random.Generator,
        floor: float,
    ) -> None:
        self.rows = rows
        device = run.norms.device
        positions = torch.from_numpy(rows).to(device)
        self._norms = run.norms[positions]
        self._metrics = run.metrics[positions]
        self._scales = 1 / self._norms.clamp(min=floor)
        signs = random.choice([-1.0, 1.0], len(rows))
        self._weights = self._scales * torch.from_numpy(signs).to(device)
        self._sums = run.signed_sums(positions, self._weights)

    def gap(self, other: StepRun | None, positions: Rows) -> Gap:
        """Root mean square over rows of the change of a gradient, relative to its norm; or of its metrics, if larger.

        Args:
            other: Another run.
            positions: Of the same rows there.
        """
        if other is None:
            return Gap(math.inf)
        rows = torch.from_numpy(positions).to(self._norms.device)
        changes = (self._norms - other.norms[rows]) * self._scales
        change_of_norms = changes.square().sum()
        change_of_sums = change_of_norms * 0
        sums = other.signed_sums(rows, self._weights)
        for ours, theirs in zip(self._sums, sums, strict=True):
            change_of_sums = change_of_sums + (ours - theirs).square().sum()
        change = torch.maximum(change_of_norms, change_of_sums)
        subject = "gradient"
        if self._metrics.shape[1]:
            difference = self._metrics - other.metrics[rows]
            distances = torch.linalg.vector_norm(difference, dim=1)
            sizes = torch.linalg.vector_norm(self._metrics, dim=1)
            changes = distances / sizes.clamp(min=_SMALLEST_METRIC)
            change_of_metrics = changes.square().sum()
            if change_of_metrics > change or not changes.isfinite().all():
                change = change_of_metrics
                subject = "metric"
        size = float((change / len(positions)).sqrt())
        if not math.isfinite(size):  # though the whole lot's is
            size = 1.0
        return Gap(size, subject)


class StepRunner:
    """Runs a training step without training: afterwards everything is as it was.

    Args:
        training: Its step is run.
        engine: Attached to the module or its private part.

    Attributes:
        rows: That went through the model so far: what the runs cost.
        follows: Whether random numbers follow the rows. Off until the step has drawn any: it costs time.
        irregular: Whether the last run drew other numbers than the whole lot.
        drawn: States of all random generators after the last run.
    """

    def __init__(self, training: Training, engine: GradientMethod) -> None:
        self._training = training
        self._engine = engine
        self.rows = 0
        self.follows = False
        self.irregular = False
        self.drawn = b""
        self._fresh = FreshGenerators()
        self._state: StepState | None = None

    @contextmanager
    def session(
        self,
        step: Callable[[Any], Any],
        recipe: Recipe,
        rows: int,
    ) -> Iterator[None]:
        """Run `step` on a lot of `rows` rows and on lots made of it; then put everything back."""
        with self._training.without_loggers():
            self._state = StepState(self._training)
            self._step = step
            self._recipe = recipe
            self._draws = RowDraws(rows)
            self._before = self._state.drawn()
            self._drawn_by_whole = self._before
            try:
                yield
            finally:
                self._state.finish()
                self._state = None  # copies of all that the module holds
                del self._step

    def run(
        self,
        lot: AlteredLot,
        whole: bool = False,
        shared: bool = False,
        after: bool = False,
        quiet: bool = False,
    ) -> StepRun | None:
        """Per-row gradients and metrics, from the same state as each other run; None if there was no loss, or an error.

        Args:
            lot: Run.
            whole: Whether it is the whole lot, whose random numbers others follow.
            shared: Whether all rows get the same random numbers.
            after: Whether the state is what the last run has left behind; the random numbers are still the same.
            quiet: Whether records may be out of any range: warnings of the step are ignored.
        """
        assert self._state is not None
        if after:
            self._state.rewind()
        else:
            self._state.restore()
        rows = len(lot.places)
        self.rows += rows
        self._draws.begin(lot.places, whole, shared)
        records = self._engine.records
        self._engine.expect(rows)
        torch.clear_autocast_cache()
        try:
            return self._gradients(lot.batch, rows, quiet)
        except Exception:  # if the lot itself is to blame, its own step will say so
            return None
        finally:
            self._engine.discard()
            self._engine.records = records
            torch.clear_autocast_cache()
            self._draws.finish()
            self.drawn = self._state.drawn()
            if whole:
                self._drawn_by_whole = self.drawn
            self.irregular = self._draws.irregular or self.drawn != self._drawn_by_whole

    def has_drawn(self) -> bool:
        """Whether the last run drew random numbers, as far as generators tell."""
        return self.drawn != self._before or self._fresh.count > 0

    def changed(self) -> bool:
        """Whether the last run left anything behind that a later lot could see."""
        assert self._state is not None
        return self._state.changed()

    def has_memories(self) -> bool:
        """Whether the last run has written to a part of something that has further entries."""
        assert self._state is not None
        return self._state.has_memories()

    def spread(self) -> bool:
        """Fill memories that the last run has written to with what it wrote; whether there are any."""
        assert self._state is not None
        return self._state.spread()

    def _gradients(self, batch: Any, rows: int, quiet: bool) -> StepRun | None:
        device = self._training.device.type
        stand_ins = {
            "log": nothing,
            "log_dict": nothing,
            "manual_backward": stop,
        }
        if self._training.world_size > 1:
            stand_ins["all_gather"] = functools.partial(gathered_alone, self._training.world_size)
        self._training.module.__dict__.update(stand_ins)  # `StepState` takes them out again
        with self._repeatable(device, quiet):
            output = output_of(self._step, batch)
            loss = loss_of(output)
            if loss is None:
                return None
            with torch.no_grad(), torch.autocast(device, enabled=False):
                gradients = self._engine.backward(loss, rows)
        with torch.no_grad(), torch.autocast(device, enabled=False):
            squares = torch.stack([parameter.squared_norms() for parameter in gradients])
            metrics = self._recipe.metrics_of(output, rows).to(squares.device)
        return StepRun(
            gradients,
            norms=squares.double().sum(0).sqrt(),
            metrics=metrics,
            dtype=squares.dtype,
        )

    @contextmanager
    def _repeatable(self, device: str, quiet: bool) -> Iterator[None]:
        assert self._state is not None
        draws = self._draws if self.follows else None
        with ExitStack() as stack:
            if quiet:
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                stack.enter_context(without_assertions(device))
            stack.enter_context(uncompiled())
            stack.enter_context(tf32.refused(device))
            stack.enter_context(self._fresh.repeated(draws))
            stack.enter_context(without_fused_dropout(self._training.module, device))
            if draws is not None:
                state = self._state
                stack.enter_context(following_host(draws, state.holders, state.sources))
                stack.enter_context(FollowingDraws(draws))
            yield
