"""Does the gradient of a record depend on the other records of its lot? Asked by running training steps again.

A clipped sum has the sensitivity that the ledger states only if each record's gradient is a function of that record
(and of random numbers) alone. No sum over a lot can show whether it is, so that some lots are run once more with half
of their records, and the gradients of these are compared. docs/guards.md says what this misses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from pytorch_lightning.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dpbench.data.octaves import next_checked
from dpbench.data.trees import unopened
from dpbench.errors import UnsupportedModuleError
from dpbench.privacy.gradients import tf32
from dpbench.privacy.gradients.engine import LossReduction, PerRecordEngine
from dpbench.privacy.gradients.parameter import ParameterGradients
from dpbench.privacy.mechanism.recipe import Recipe
from dpbench.records.count import count_records
from dpbench.records.physical_batches import select
from dpbench.records.repeatable_step import repeatable
from dpbench.records.step_state import StepState

Rows = NDArray[np.int64]

_LATER = 32  # records of a lot that is probed after the first one
_TOLERANCE, _MIXED = 1e-3, 5e-2  # relative change of a record's gradient; with 8 bits of mantissa
_FEWEST = 3  # records that say something of each other
_PATIENCE = 50  # lots that may hold fewer before that is said
_OTHER_SEED = 0x5EED_C0DE  # that nobody else takes
_DROPOUTS = nn.modules.dropout._DropoutNd, nn.RNNBase, nn.MultiheadAttention


class Lot(NamedTuple):
    """Facts of a lot that a probe of coupling needs.

    Attributes:
        release: Its number.
        record_of: Record (or microbatch) of each row, ascending; None where each row is a record.
        several: Whether the batch itself may hold `record_of`.
        limit: Most rows that fit into memory, or None.
        recipe: What becomes of a record's gradient.
        bound: Smallest bound of it.
    """

    release: int
    record_of: Rows | None
    several: bool
    limit: int | None
    recipe: Recipe
    bound: float


class _Run(NamedTuple):
    gradients: Sequence[ParameterGradients]
    norms: Tensor  # of each row, shape (R,)
    metrics: Tensor  # of each row, over their bounds; shape (R, number of values)
    finite: bool
    dtype: torch.dtype


class _Reached(BaseException):
    """The step has come to its backward pass."""

    def __init__(self, loss: Tensor) -> None:
        self.output = loss


class CouplingProbe:
    """Probes the first lot as a whole, and a few records of one lot of each octave. It changes nothing of a training.

    Args:
        trainer: Trains.
        module: Its `training_step` is probed, in automatic or manual optimization.
        engine: Attached to the module or its private part.
        loss_reduction: What the loss is said to be; for the message.
    """

    def __init__(
        self, trainer: pl.Trainer, module: pl.LightningModule, engine: PerRecordEngine, loss_reduction: LossReduction
    ) -> None:
        self._trainer, self._module, self._engine, self._reduction = trainer, module, engine, loss_reduction
        self._next, self._first, self._warned, self._small = 0, True, False, 0
        self.rows = 0
        """That went through the model so far: what the probes cost."""

    def before(self, training_step: Any, step: Any, lot: Callable[[], Lot]) -> Any:
        """`step`, with probes of `training_step` before it."""

        @functools.wraps(training_step)
        def probed(batch: Any, *args: Any, **kwargs: Any) -> Any:
            one = lot()
            if one.release >= self._next:
                self.check(lambda rows: training_step(rows, *args, **kwargs), batch, one)
            return step(batch, *args, **kwargs)

        return probed

    def check(self, step: Callable[[Any], Any], batch: Any, lot: Lot) -> None:
        """Probe one lot; one of less than three records says nothing, and the next has to do.

        Whatever `limit` says, three whole records are run, or pieces of fewer would never be probed.

        Raises:
            UnsupportedModuleError: A record's gradient depends on the contents or the number of the others.
        """
        rows = count_records(batch)
        record_of = np.arange(rows) if lot.record_of is None else lot.record_of
        chosen = self._chosen(record_of, lot)
        if len(np.unique(record_of[chosen])) < _FEWEST:
            self._small += 1
            if self._small == _PATIENCE:
                self.unsure(f"{_PATIENCE} lots held fewer than {_FEWEST} records each")
            return
        self._next = next_checked(lot.release + 1) - 1
        probe = _Probe(self, step, batch, record_of, chosen, lot)
        loggers = self._trainer.loggers
        self._trainer.loggers = [DummyLogger() for _ in loggers]
        self._state = StepState(self._trainer, self._module)
        try:
            self._first = not probe.says() and self._first
        finally:
            self._state.finish()
            del self._state  # copies of all that the module holds
            self._trainer.loggers = loggers

    def _chosen(self, record_of: Rows, lot: Lot) -> Rows:
        """Rows of the records that are probed, ascending."""
        names, rows = np.unique(record_of, return_counts=True)
        if not self._first and len(names) > _LATER:
            places = np.sort(np.random.default_rng(lot.release).choice(len(names), _LATER, replace=False))
            names, rows = names[places], rows[places]
        if lot.limit is not None:
            names = names[: max(_FEWEST, int((rows.cumsum() <= lot.limit).sum()))]
        return np.flatnonzero(np.isin(record_of, names))

    def run(
        self, step: Callable[[Any], Any], batch: Any, rows: int, lot: Lot, seed: int | None = None, after: bool = False
    ) -> _Run | None:
        """Per-row gradients and metrics, from the same state as each other run; None if there was no loss, or an error.

        With `after`, the state is what the last run has left behind; the random numbers are still the same.
        """
        if after:
            self._state.rewind()
        else:
            self._state.restore(seed)
        own = self._module.__dict__
        own |= {"log": _nothing, "log_dict": _nothing, "manual_backward": _stop}
        if self._trainer.world_size > 1:
            own["all_gather"] = self._gathered
        for module in self._module.modules():
            # Masks come in another order for another number of rows.
            if isinstance(module, _DROPOUTS) and getattr(module, "dropout", True):
                module.training = False
        self.rows += rows
        device = self._module.device.type
        torch.clear_autocast_cache()
        before = self._engine.records
        self._engine.expect(rows)
        try:
            with repeatable(seed), tf32.refused(device):
                output = _output(step, batch)
                loss = output["loss"] if isinstance(output, dict) else output
                if loss is None:
                    return None
                with torch.no_grad(), torch.autocast(device, enabled=False):
                    gradients = self._engine.backward(loss, rows)
            with torch.no_grad(), torch.autocast(device, enabled=False):
                squared = torch.stack([parameter.squared_norms() for parameter in gradients])
                metrics = lot.recipe.metrics_of(output, rows).to(squared.device)
            norms = squared.double().sum(0).sqrt()
            return _Run(gradients, norms, metrics, bool(norms.isfinite().all()), squared.dtype)
        except Exception:  # if the lot itself is to blame, its own step will say so
            return None
        finally:
            self._engine.discard()
            self._engine.records = before
            torch.clear_autocast_cache()

    def _gathered(self, data: Any, *_: Any, **__: Any) -> Any:
        """Stand in for `all_gather`: no process waits for another one's probe."""
        world = self._trainer.world_size
        return tree_map(lambda x: x.expand(world, *x.shape) if isinstance(x, Tensor) else x, data)

    def changed(self) -> bool:
        """Whether the last run left anything behind that a later lot could see."""
        return self._state.changed()

    def tolerance(self) -> float:
        """Largest relative change of a gradient that rounding explains."""
        device = self._module.device.type
        low = any(parameter.dtype.itemsize < 4 for parameter in self._engine.parameters)
        return _MIXED if low or torch.is_autocast_enabled(device) else _TOLERANCE * (10 if device == "cuda" else 1)

    def refuse(self, gap: float, what: str, subject: str) -> None:
        """Raise UnsupportedModuleError."""
        remedy = (
            f"is the loss the {self._reduction} over the records, as loss_reduction={self._reduction!r} says, with a "
            "divisor that does not count what the lot holds?"
            if what == "number"
            else "losses over pairs, negatives or the whole lot, class weights or ignored labels in a mean, and layers "
            "that sort, mix or normalize over dimension 0 cannot be made private: let each record's loss be a function "
            "of that record alone (several rows of one record: LotLoader(..., record_of_row=...))."
        )
        raise UnsupportedModuleError(
            f"a record's {subject} depends on the {what} of the other records in its lot "
            f"(it changes by {gap:.2g} of its norm), so that clipping does not bound what one record does: {remedy}"
        )

    def unsure(self, why: str) -> None:
        """Say once that there was no verdict."""
        if not self._warned:
            self._warned = True
            pl.utilities.rank_zero_warn(f"whether records are handled independently could not be checked: {why}.")


class _Probe:
    """Probe of one lot: the step is run on parts of it, and gradients are compared."""

    def __init__(
        self, probe: CouplingProbe, step: Callable[[Any], Any], batch: Any, record_of: Rows, chosen: Rows, lot: Lot
    ) -> None:
        self._probe, self._step, self._batch, self._lot = probe, step, batch, lot
        self._rows, self._chosen, self._record_of = len(record_of), chosen, record_of[chosen]
        self._random = np.random.default_rng([lot.release, len(chosen)])
        self._subject = "gradient"
        self._tolerance, self._floor = probe.tolerance(), lot.recipe.negligible_norm(lot.bound)

    def says(self) -> bool:
        """Whether a probe has come to a verdict.

        Raises:
            UnsupportedModuleError: It is a bad one.
        """
        whole = self._run(np.arange(len(self._chosen)))
        if whole is None:
            if len(self._chosen) < self._rows:  # else its own step says what is wrong
                self._failed()
            return False
        self._carries = self._probe.changed()
        names = self._finite(whole)
        if len(names) < 3:
            return False
        half = self._random.permutation(len(names)) < len(names) // 2
        gaps = []
        for kept in (names[half], names[~half]):  # a kink that rounding crossed is in one of the halves only
            rows = np.flatnonzero(np.isin(self._record_of, kept))
            gaps.append(self._gap(whole, rows, self._run(rows)))
            if gaps[-1] <= self._tolerance:
                self._refuse_carried(rows)
                return True
        return self._explained(whole, np.flatnonzero(np.isin(self._record_of, names[half])), min(gaps))

    def _explained(self, whole: _Run, kept: Rows, gap: float) -> bool:
        """Find out why halves of a lot differ from the whole: by chance, by contents or by number."""
        everything = np.arange(len(self._chosen))
        same = self._gap(whole, kept, self._run(everything), kept)
        if not same <= self._tolerance:
            self._probe.unsure("training_step is random beyond the seeds of torch, numpy and random")
            return True
        contents = self._gap(whole, kept, self._run(self._replaced(kept)), kept)
        if contents == float("inf"):
            self._failed("other records in")
        elif not contents <= self._tolerance:
            self._probe.refuse(contents, "contents", self._subject)
        chance = self._gap(whole, kept, self._run(everything, seed=_OTHER_SEED), kept)
        if not chance <= self._tolerance or chance >= gap / 3:
            self._refuse_proportional(whole)
        elif gap == float("inf"):
            self._failed()
        else:
            self._probe.refuse(gap, "number", self._subject)
        self._refuse_carried(kept)
        return True

    def _refuse_carried(self, kept: Rows) -> None:
        """Raise UnsupportedModuleError where it matters to the next lot which records were in this one."""
        if not self._carries:
            return
        following = []
        for lot in (np.arange(len(self._chosen)), self._replaced(kept)):
            self._run(lot)
            following.append(self._run(kept, after=True))
        first, second = following
        gap = 0.0 if first is None or second is None else self._gap(first, np.arange(len(kept)), second)
        if gap > self._tolerance:
            raise UnsupportedModuleError(
                "a record's gradient depends on records of earlier lots, through what training_step keeps "
                f"(it changes by {gap:.2g} of its norm), so that clipping does not bound what one record does: queues "
                "of negatives, centers, hidden states, thresholds and running means of losses that enter the loss "
                "cannot be made private; take them from released weights or constants."
            )

    def _failed(self, what: str = "a part of") -> None:
        """Say so; or raise UnsupportedModuleError where it is the batch that could not be cut."""
        whole = unopened(self._batch)
        if whole:
            raise UnsupportedModuleError(
                f"whether records are handled independently cannot be checked, for the batch holds a {whole}, whose "
                "tensors cannot be found and cut into records: let the collate_fn give tensors in dictionaries, lists, "
                "tuples or dataclasses."
            )
        self._probe.unsure(f"training_step fails with {what} a lot")

    def _refuse_proportional(self, whole: _Run) -> None:
        """Refuse a random step whose loss grows as the lot shrinks: the first rows may see the same random numbers."""
        names = np.unique(self._record_of)
        first = np.flatnonzero(self._record_of < names[(len(names) + 1) // 2])
        run, rows = self._run(first), first[: (len(first) + 1) // 2]
        if run is None:
            return
        ratio = float(run.norms[rows].sum() / whole.norms[rows].sum())
        scaled = self._gap(whole, rows, run, rows, 1 / ratio) if 0 < ratio < float("inf") else float("inf")
        if scaled <= self._tolerance < abs(ratio - 1):
            self._probe.refuse(abs(ratio - 1), "number", self._subject)

    def _finite(self, whole: _Run) -> Rows:
        """Records whose gradients are finite: others contribute zero."""
        finite = whole.norms.isfinite().cpu().numpy()
        return np.setdiff1d(self._record_of, self._record_of[~finite])

    def _replaced(self, kept: Rows) -> Rows:
        """Rows with one kept record in the place of all that are not kept."""
        one = kept[self._record_of[kept] == self._record_of[kept[0]]]
        index = np.arange(len(self._chosen))
        for name in np.setdiff1d(self._record_of, self._record_of[kept]):
            gone = np.flatnonzero(self._record_of == name)
            index[gone] = one[np.arange(len(gone)) % len(one)]
        return index

    def _run(self, rows: Rows, seed: int | None = None, after: bool = False) -> _Run | None:
        batch = select(self._batch, self._rows, self._chosen[rows])
        if self._lot.several:
            batch = self._numbered(batch, rows)
        return self._probe.run(self._step, batch, len(rows), self._lot, seed, after)

    def _numbered(self, batch: Any, rows: Rows) -> Any:
        """The batch with its entry of each row's record counted from 0 again."""
        old = torch.from_numpy(self._record_of[rows])
        own = self._record_of[rows if len(rows) < len(self._chosen) else np.arange(len(rows))]
        new = torch.from_numpy(np.unique(own, return_inverse=True)[1])

        def numbered(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.shape != old.shape or x.is_floating_point():
                return x
            return new.to(x) if torch.equal(x.cpu().long(), old) else x

        return tree_map(numbered, batch)

    def _gap(
        self, whole: _Run, rows: Rows, other: _Run | None, places: Rows | None = None, factor: float = 1.0
    ) -> float:
        """Root mean square over rows of the change of a gradient, relative to its norm; or of its metrics, if larger.

        Args:
            whole: The lot.
            rows: Compared, of the lot.
            other: Another run, or None, which is infinitely far.
            places: The same rows there; None: all.
            factor: Multiplies the other run.
        """
        if other is None:
            return float("inf")
        device = whole.norms.device
        mine, theirs = (
            torch.from_numpy(x).to(device) for x in (rows, np.arange(len(rows)) if places is None else places)
        )
        scales = 1 / whole.norms[mine].clamp(min=self._floor)
        signs = torch.from_numpy(self._random.choice([-1.0, 1.0], len(rows))).to(device)
        total = ((whole.norms[mine] - factor * other.norms[theirs]) * scales).square().sum()
        difference = torch.zeros_like(total)
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            for a, b in zip(whole.gradients, other.gradients, strict=True):
                one, two = (_signed(*it, signs * scales) for it in ((whole, a, mine), (other, b, theirs)))
                difference += (one - factor * two).square().sum()
        if whole.metrics.shape[1]:
            one, two = whole.metrics[mine], other.metrics[theirs]
            changes = torch.linalg.vector_norm(one - two, dim=1) / torch.linalg.vector_norm(one, dim=1).clamp(min=1e-2)
            if changes.square().sum() > torch.maximum(total, difference):
                self._subject, difference = "metric", changes.square().sum()
        gap = float((torch.maximum(total, difference) / len(rows)).sqrt())
        return gap if math.isfinite(gap) else 1.0  # of what was finite in the lot


def _signed(run: _Run, gradients: ParameterGradients, rows: Tensor, weights: Tensor) -> Tensor:
    """Σ of some rows' gradients with weights; with random signs, its square is on average that of the rows."""
    if run.finite:
        weights = torch.zeros_like(run.norms).index_copy_(0, rows, weights)
    else:
        gradients = gradients.select(rows)
    return gradients.weighted_sum(weights.to(run.dtype)).double()


def _output(step: Callable[[Any], Any], batch: Any) -> Any:
    try:
        return step(batch)
    except _Reached as reached:
        return reached.output


def _stop(loss: Tensor, *args: Any, **kwargs: Any) -> None:
    """Stand in for `manual_backward`: the loss is all that a probe wants."""
    raise _Reached(loss)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for `log`: a probe logs nothing."""
