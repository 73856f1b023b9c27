"""The probe of one lot: which runs are made of it, and what follows from gradients that differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import numpy as np

from dpbench.guards._altered_lots import AlteredLot, LotRows, Rows
from dpbench.guards._step_runs import ComparedRows, Gap, StepRun, StepRunner

FEWEST = 3  # records that say something of each other
_MOST_KEPT = 32  # records of a lot that are run without the others
_MOST_GROUPS = 8  # of records, more than half of which must differ where it is no rounding
_UNTRACKED = "training_step draws random numbers of which nobody knows which record they are for"


class Verdicts(Protocol):
    """What is done with what a probe has found."""

    def refuse(self, gap: Gap, what: str) -> None:
        """Raise UnsupportedModuleError: a record's gradient depends on something of the others."""

    def refuse_carried(self, gap: Gap) -> None:
        """Raise UnsupportedModuleError: a record's gradient depends on records of earlier lots."""

    def unsure(self, why: str) -> None:
        """Say once that there was no verdict."""

    def failed(self, what: str) -> None:
        """Say once that the step fails with lots that are made of a lot."""


class _Comparison(NamedTuple):
    """An altered lot whose run was compared with that of the whole lot.

    Attributes:
        lot: That was run.
        rows: Whose gradients were compared.
        gap: By how much they change.
        irregular: Whether random numbers did not follow the rows.
    """

    lot: AlteredLot
    rows: ComparedRows
    gap: Gap
    irregular: bool


class _NotFollowed(Exception):
    """Gradients differ, and random numbers did not follow the rows."""


class LotProbe:
    """Runs the step on the lot and on lots made of it, and compares gradients.

    Args:
        runner: In a session for this lot.
        verdicts: Take what is found.
        lot: Rows of it.
        release: Its number; a seed of what is chosen.
        floor: Norms of gradients below it count as it.
        rounding: Relative change of a gradient that rounding explains in lots of different shapes.
        exact: The same in lots of one shape.
    """

    def __init__(
        self,
        runner: StepRunner,
        verdicts: Verdicts,
        lot: LotRows,
        release: int,
        floor: float,
        rounding: float,
        exact: float,
    ) -> None:
        self._runner = runner
        self._verdicts = verdicts
        self._lot = lot
        self._seed = [release, len(lot.record_of)]
        self._floor = floor
        self._rounding = rounding
        self._exact = exact

    def verdict(self, repeats: bool) -> None:
        """Compare.

        Args:
            repeats: Whether lots are run twice, where the step keeps something for the next one: what is kept only
                weakly of one lot adds up.

        Raises:
            UnsupportedModuleError: A record's gradient depends on other records.
        """
        with suppress(_NotFollowed):
            self._compare(repeats)
            return
        self._runner.follows = True
        self._compare(repeats)

    def _compare(self, repeats: bool) -> None:
        reference = self._whole()
        if reference is None:
            return  # its own step says what is wrong
        carries = self._runner.changed()
        has_memories = carries and self._runner.has_memories()
        is_finite = reference.norms.isfinite().cpu().numpy()
        record_of = self._lot.record_of
        names = np.setdiff1d(record_of, record_of[~is_finite])
        if len(names) < FEWEST:
            return
        self._random = np.random.default_rng(self._seed)
        self._choose(names)
        kept_rows = self._lot.of(self._kept)
        other_rows = self._lot.of(names[names != self._victim])
        self._kept_rows = self._compared(reference, kept_rows)
        self._other_rows = self._compared(reference, other_rows)
        del reference  # and what its layers have kept
        # What a step carries from one lot to the next shows in a lot that is run after two different ones.
        first = None
        second = None
        if carries:
            first = self._after(self._lot.whole(), repeats)
        part = self._part()
        contents = self._contents()
        if carries or self._runner.changed():
            second = self._after_altered(contents.lot, repeats)
            if not carries:  # the step keeps only something of what is in the altered lot
                self._runner.run(self._lot.whole())
                first = self._after(self._lot.whole(), repeats)
        poisoned = self._poisoned()
        contents_gap = max(contents.gap, poisoned.gap)
        contents_matter = contents_gap.size > self._exact
        part_differs = part.gap.size > self._rounding
        if (contents_matter or part_differs) and self._is_repeatable():
            self._refuse_contents(contents, poisoned)
            self._refuse_part(part)
        if first is not None:
            self._refuse_carried(first, second)
            if has_memories:
                self._refuse_memory()
        elif carries:
            self._verdicts.failed("a part of")

    # ------------------------------------------------------------------------------------- runs

    def _whole(self) -> StepRun | None:
        """The run of the whole lot; of a step that draws, with random numbers that follow the rows."""
        lot = self._lot.whole()
        reference = self._runner.run(lot, whole=True)
        if reference is None or self._runner.follows or not self._runner.has_drawn():
            return reference
        self._runner.follows = True
        return self._runner.run(lot, whole=True)

    def _choose(self, names: Rows) -> None:
        """Choose the records that are kept, and the one that is poisoned."""
        order = self._random.permutation(names)
        # The longest come first: where they are kept, so is the length that the others are padded to.
        longest = self._lot.longest()[: len(names) // 2]
        is_long = np.isin(order, longest)
        order = np.concatenate([order[is_long], order[~is_long]])
        quarter = max(2, len(names) // 4)
        count = min(_MOST_KEPT, quarter)
        self._kept = self._random.permutation(order[:count])
        self._victim = int(order[-1])

    def _compared(self, run: StepRun, rows: Rows) -> ComparedRows:
        return ComparedRows(run, rows, self._random, self._floor)

    def _gap(self, rows: ComparedRows, lot: AlteredLot, run: StepRun | None) -> Gap:
        return rows.gap(run, lot.positions(rows.rows))

    def _comparison(
        self,
        rows: ComparedRows,
        lot: AlteredLot,
        run: StepRun | None,
    ) -> _Comparison:
        """Compare rows of the last run with those of the whole lot."""
        gap = self._gap(rows, lot, run)
        return _Comparison(lot, rows, gap, self._runner.irregular)

    def _part(self) -> _Comparison:
        """The kept records alone, in another order; in the old one where the step wants its rows sorted."""
        for names in (self._kept, np.sort(self._kept)):
            lot = self._lot.part(names)
            run = self._runner.run(lot)
            if run is not None:
                break
        return self._comparison(self._kept_rows, lot, run)

    def _contents(self) -> _Comparison:
        """Kept records in the place of all others, but of one, which is a million times as large.

        Where the step fails with such a record, it is replaced too.
        """
        replaced = self._lot.replaced(self._kept)
        lot = self._lot.extreme(replaced, self._victim)
        run = self._runner.run(lot, quiet=True)
        if run is None:
            lot = replaced
            run = self._runner.run(lot)
        return self._comparison(self._kept_rows, lot, run)

    def _poisoned(self) -> _Comparison:
        """One record without numbers; no change where the step refuses such a record."""
        if self._lot.has_floats():
            for exchanged in (True, False):
                lot = self._lot.without_numbers(self._victim, exchanged)
                run = self._runner.run(lot, quiet=True)
                if run is not None:
                    return self._comparison(self._other_rows, lot, run)
        return _Comparison(
            self._lot.whole(),
            self._other_rows,
            Gap(0.0),
            irregular=False,
        )

    def _after(self, lot: AlteredLot, repeats: bool) -> StepRun | None:
        """The kept records, from the state that the last run has left, which was one of `lot`."""
        if repeats:
            self._runner.run(lot, after=True, quiet=True)
        part = self._lot.part(np.sort(self._kept))
        return self._runner.run(part, after=True)

    def _after_altered(self, altered: AlteredLot, repeats: bool) -> StepRun | None:
        """The kept records, from the state that the last run has left, which was one of the altered lot."""
        run = self._after(altered, repeats)
        if run is not None:
            return run
        # What is kept of an extreme record may be what the step fails of.
        replaced = self._lot.replaced(self._kept)
        self._runner.run(replaced)
        return self._after(replaced, repeats)

    def _after_filled(self, lot: AlteredLot) -> StepRun | None:
        """The kept records, after a lot that has written all of the memories that it writes to; None without such."""
        self._runner.run(lot)
        if not self._runner.spread():
            return None
        part = self._lot.part(np.sort(self._kept))
        return self._runner.run(part, after=True)

    # ------------------------------------------------------------------------------------- what follows

    def _is_repeatable(self) -> bool:
        """Whether the whole lot gives the same gradients again; else there is no verdict.

        Raises:
            _NotFollowed: Random numbers do not follow the rows yet.
        """
        if not self._runner.follows:
            raise _NotFollowed
        lot = self._lot.whole()
        run = self._runner.run(lot)
        gap = max(
            self._gap(self._kept_rows, lot, run),
            self._gap(self._other_rows, lot, run),
        )
        if gap.size > self._exact:
            self._verdicts.unsure("training_step is random beyond the seeds of torch, numpy and random")
        return gap.size <= self._exact

    def _refuse_contents(self, contents: _Comparison, poisoned: _Comparison) -> None:
        """Refuse a step whose gradients depend on the contents of other records."""
        gap = max(contents.gap, poisoned.gap)
        # A step may draw as many numbers as its records ask for.
        irregular = contents.irregular or poisoned.irregular
        if irregular and self._exact < gap.size < math.inf:
            shared = self._largest_shared_gap([contents, poisoned])
            if shared is None:
                self._verdicts.unsure(_UNTRACKED)
                return
            gap = shared
        if math.isinf(gap.size):
            self._verdicts.failed("other records in")
        elif gap.size > self._exact:
            self._verdicts.refuse(gap, "contents")

    def _largest_shared_gap(self, comparisons: Sequence[_Comparison]) -> Gap | None:
        """The largest gap where all rows have the same random numbers; None where they have not."""
        reference = self._runner.run(self._lot.whole(), shared=True)
        if reference is None:
            return None
        drawn = self._runner.drawn
        rows_of_reference = []
        for comparison in comparisons:
            rows = comparison.rows.rows
            rows_of_reference.append(self._compared(reference, rows))
        del reference  # and what its layers have kept
        gaps = []
        for compared, comparison in zip(rows_of_reference, comparisons, strict=True):
            run = self._runner.run(comparison.lot, shared=True, quiet=True)
            gaps.append(self._gap(compared, comparison.lot, run))
            if self._runner.drawn != drawn:
                return None
        return max(gaps)

    def _refuse_part(self, part: _Comparison) -> None:
        """Refuse a step whose gradients depend on the order or number of records, by a part that differs.

        Where random numbers did not follow the rows of the part, all rows get the same ones.
        """
        gap = part.gap
        if math.isinf(gap.size):
            self._verdicts.failed("a part of")
            return
        if gap.size <= self._rounding:
            return
        shared = part.irregular
        reference = self._runner.run(self._lot.whole(), shared=shared)
        drawn = self._runner.drawn
        if reference is None:
            self._verdicts.failed("shared random numbers for")
            return
        rows = self._compared(reference, self._lot.of(self._kept))
        groups = self._groups(reference)
        del reference  # and what its layers have kept
        run = self._runner.run(part.lot, shared=shared)
        if shared:
            gap = self._gap(rows, part.lot, run)
            if gap.size <= self._rounding:
                return
            if self._runner.drawn != drawn or math.isinf(gap.size):
                self._verdicts.unsure(_UNTRACKED)
                return
        self._refuse_order(rows, shared)
        differing = 0
        for group in groups:
            gap_of_group = self._gap(group, part.lot, run)
            differing += gap_of_group.size > self._rounding
        if differing > len(groups) / 2:
            self._verdicts.refuse(gap, "number")

    def _refuse_order(self, rows: ComparedRows, shared: bool) -> None:
        """Refuse a step that handles records by their place; in a lot of the same shape no rounding crosses a kink."""
        records = np.unique(self._lot.record_of)
        moved = self._lot.part(self._random.permutation(records))
        run = self._runner.run(moved, shared=shared)
        if run is None:
            return
        gap = self._gap(rows, moved, run)
        if gap.size > self._exact:
            self._verdicts.refuse(gap, "order")

    def _groups(self, reference: StepRun) -> list[ComparedRows]:
        count = min(_MOST_GROUPS, len(self._kept))
        groups = []
        for names in np.array_split(self._kept, count):
            rows = self._lot.of(names)
            groups.append(self._compared(reference, rows))
        return groups

    def _refuse_memory(self) -> None:
        """Refuse a step that reads a few entries of a large memory, which two different lots have written."""
        first = self._after_filled(self._lot.whole())
        if first is None:
            return
        second = self._after_filled(self._lot.replaced(self._kept))
        if second is not None:
            self._refuse_carried(first, second)

    def _refuse_carried(self, first: StepRun, second: StepRun | None) -> None:
        """Refuse a step to whose next lot it matters which records were in this one."""
        rows = np.flatnonzero(first.norms.isfinite().cpu().numpy())
        if not len(rows):
            return
        gap = self._compared(first, rows).gap(second, rows)
        if math.isinf(gap.size):
            self._verdicts.failed("other records before")
        elif gap.size > self._exact:
            self._verdicts.refuse_carried(gap)
