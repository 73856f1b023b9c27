"""The probe of a step that is run record by record: the gradient of a lot has to be the mean of those of its records.

Records that are run alone cannot reach into one another's gradients, unless the module keeps something of one for the
next. But a step that mixes the records of a lot (statistics over the lot, a maximum, pairs) is another function on one
record, and would be trained as that without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpbench.data.octaves import next_checked
from dpbench.data.separate_records import MOST_TOGETHER, SeparateRecords
from dpbench.errors import UnsupportedModuleError
from dpbench.guards._altered_lots import AlteredLot, LotRows, Rows
from dpbench.guards._step_runs import StepRun, StepRunner
from dpbench.privacy.gradients.method import GradientMethod
from dpbench.records.count import count_records
from dpbench.records.counters import Counters
from dpbench.records.source import Lot
from dpbench.records.training import Training

_MOST_CANDIDATES = 32
_TOLERANCE = 1e-3  # of the sum of the norms
_TOLERANCE_OF_MIXED = 5e-2
_MIXED = (
    "the gradient of a batch is not the {reduction} of those of its records, each run alone (it is off by {gap:.2g} "
    "of their norms): a layer or the loss mixes records (batch statistics, a maximum, pairs, a baseline of the batch, "
    "weights or ignored labels in a mean), so training record by record would optimize another function. Make each "
    "record's loss a function of that record alone, and the loss of a batch their {reduction}; if it is combined "
    "differently, set loss_reduction."
)
_ONLY_LOTS = (
    'training_step runs on a batch but fails on a single record: gradients="one_by_one" passes each record as '
    "a batch of one. (squeeze() without a dimension is a frequent cause.)"
)
_KEPT = (
    "a record's gradient depends on records before it, through state that training_step keeps (it changes by "
    "{gap:.2g} of its norm), so clipping does not bound the influence of one record: queues, centers, hidden states "
    "and histories of losses cannot be made private; derive them from released weights or constants."
)


class LoneRecordProbe:
    """Probes the first lot with records, and one lot of each octave. It changes nothing of a training.

    Args:
        training: Its step is probed.
        engine: Of single records.
        loss_reduction: What the loss is said to be; for the message.
    """

    def __init__(self, training: Training, engine: GradientMethod, loss_reduction: str) -> None:
        self._training = training
        self._engine = engine
        self._reduction = loss_reduction
        self._runner = StepRunner(training, engine)
        self._next = 0
        self._warned = False

    @property
    def rows(self) -> int:
        """That went through the model so far: what the probes cost."""
        return self._runner.rows

    def look(self, step: Callable[[Any], Any], batch: Any, lot: Lot) -> None:
        """Probe a lot if it is due.

        Raises:
            UnsupportedModuleError: The step is another function of a lot than of its records, or keeps something of a
                record for the next.
        """
        rows = count_records(batch)
        if lot.release < self._next or not rows:
            return
        record_of = np.arange(rows) if lot.record_of is None else lot.record_of
        names = self._finite(step, batch, lot, record_of)
        if not len(names):  # nothing can be said of them: the next lot has to do
            return
        self._next = next_checked(lot.release + 1) - 1
        piece = np.flatnonzero(np.isin(record_of, names))
        probed = LotRows(batch, rows, piece, record_of[piece], lot.row_index)
        together = probed.whole()
        if isinstance(batch, SeparateRecords):
            are_first = np.array_equal(names, np.arange(rows)[:MOST_TOGETHER])
            together = AlteredLot(batch.together if are_first else None, together.places)
        with self._runner.session(step, lot.recipe, len(piece)):
            self._verdict(probed, names, together)

    def _finite(self, step: Callable[[Any], Any], batch: Any, lot: Lot, record_of: Rows) -> Rows:
        """The first records whose gradients are finite, or fail: a comparison with NaN would say nothing."""
        candidates = np.unique(record_of)[:_MOST_CANDIDATES]
        rows = np.flatnonzero(np.isin(record_of, candidates))
        records = LotRows(batch, len(record_of), rows, record_of[rows], lot.row_index)
        finite = []
        with self._runner.session(step, lot.recipe, len(rows)):
            for name in candidates:
                run = self._runner.run(records.part(np.array([name])))
                if run is None or bool(_flat(run).isfinite().all()):
                    finite.append(name)
                if len(finite) == MOST_TOGETHER:
                    break
        return np.array(finite, dtype=candidates.dtype)

    def _verdict(self, lot: LotRows, names: Rows, together: AlteredLot) -> None:
        """Compare records alone with themselves behind others, and their sum with the gradient of all together.

        Args:
            lot: The records, whose gradients are finite.
            names: Theirs.
            together: All of them in one batch; of separate records perhaps without one.
        """
        counters = Counters(self._training.module)
        run_of_all = self._whole(together)
        runs = []
        for name in names:
            alone = lot.part(np.array([name]))
            run = self._runner.run(alone)
            if run is None and run_of_all is not None:
                raise UnsupportedModuleError(_ONLY_LOTS)
            if run is None:
                return  # its own step says what is wrong
            runs.append(run)
        irregular = self._runner.irregular
        fresh = self._runner.run(lot.part(names[:1]))
        if fresh is None or self._gap(fresh, _flat(runs[0])) > self._tolerance:
            self._unsure("training_step is random beyond the seeds of torch, numpy and random")
            return
        self._refuse_memory(lot, names, runs, counters)
        if run_of_all is None:
            if len(names) > 1:
                self._unsure("the step does not run on a batch of several records, or they cannot be collated together")
            return
        sums = [_flat(run) for run in runs]
        norms = torch.stack([record_sum.norm() for record_sum in sums])
        difference = _flat(run_of_all) - torch.stack(sums).sum(0)
        gap = float(difference.norm() / norms.sum().clamp(min=1e-12))
        if not gap > self._tolerance:
            return
        if irregular:
            self._unsure("training_step draws random numbers of which nobody knows which record they are for")
            return
        raise UnsupportedModuleError(_MIXED.format(gap=gap, reduction=self._reduction))

    def _refuse_memory(self, lot: LotRows, names: Rows, runs: list[StepRun], counters: Counters) -> None:
        """Run records behind others, with the random numbers that they had alone: what those left must not matter.

        Behind all before it; and behind an extreme one that is otherwise like it, of the same class say.

        Raises:
            UnsupportedModuleError: A record's gradient is another one then.
        """
        alone = [lot.part(names[place : place + 1]) for place in range(len(names))]
        for place, (record, run) in enumerate(zip(alone, runs, strict=True)):
            counters.before_record()
            self._compare(self._runner.run(record, after=place > 0), run)
        for name, record, run in zip(names, alone, runs, strict=True):
            self._runner.run(lot.extreme(record, int(name)), quiet=True)
            counters.before_record()
            self._compare(self._runner.run(record, after=True), run)

    def _compare(self, again: StepRun | None, run: StepRun) -> None:
        if again is None:
            return
        gap = self._gap(again, _flat(run))
        if not gap <= self._tolerance:
            raise UnsupportedModuleError(_KEPT.format(gap=gap))

    def _gap(self, run: StepRun, before: Tensor) -> float:
        difference = _flat(run) - before
        return float(difference.norm() / before.norm().clamp(min=1e-12))

    def _whole(self, together: AlteredLot) -> StepRun | None:
        """The run of all records at once; of a step that draws, with random numbers that follow the rows."""
        if together.batch is None:
            return None
        run_of_all = self._runner.run(together, whole=True)
        if run_of_all is None or self._runner.follows or not self._runner.has_drawn():
            return run_of_all
        self._runner.follows = True
        return self._runner.run(together, whole=True)

    @property
    def _tolerance(self) -> float:
        device = self._training.device.type
        is_half = any(parameter.dtype.itemsize < 4 for parameter in self._engine.parameters)
        if is_half or torch.is_autocast_enabled(device):
            return _TOLERANCE_OF_MIXED
        return _TOLERANCE * (10 if device == "cuda" else 1)

    def _unsure(self, why: str) -> None:
        """Say once that the mean over records could not be compared; the records are private all the same."""
        if not self._warned:
            self._warned = True
            self._training.warn(
                f"each record is run alone; whether the loss of a batch is the {self._reduction} of theirs could not "
                f"be checked: {why}."
            )


def _flat(run: StepRun) -> Tensor:
    """Sum over the rows of a run, all parameters in one, float64."""
    ones = torch.ones_like(run.norms)
    sums = []
    for gradients in run.gradients:
        total = gradients.weighted_sum(ones)
        sums.append(total.double().flatten())
    return torch.cat(sums)
