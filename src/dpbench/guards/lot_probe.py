"""The probe of one lot: which runs are made of it, and what follows from gradients that differ."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dpbench.guards.altered_lots import AlteredLot, LotRows
from dpbench.guards.step_runs import ComparedRows, Gap, StepRun, StepRunner

Rows = NDArray[np.int64]
FEWEST = 3  # records that say something of each other
_KEPT = 32  # records of a lot that are run without the others
_GROUPS = 8  # of records, more than half of which must differ where it is no rounding
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
        self._runner, self._verdicts, self._lot = runner, verdicts, lot
        self._seed = [release, len(lot.record_of)]
        self._floor, self._rounding, self._exact = floor, rounding, exact

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
        whole = self._whole()
        if whole is None:
            return  # its own step says what is wrong
        carries = self._runner.changed()
        finite = whole.norms.isfinite().cpu().numpy()
        names = np.setdiff1d(self._lot.record_of, self._lot.record_of[~finite])
        if len(names) < FEWEST:
            return
        self._random = np.random.default_rng(self._seed)
        self._choose(names)
        self._kept_rows = self._compared(whole, self._lot.of(self._kept))
        others = names[names != self._victim]
        self._other_rows = self._compared(whole, self._lot.of(others))
        del whole  # and what its layers have kept
        first = self._after(self._lot.whole(), repeats) if carries else None
        part, part_gap, part_irregular = self._part()
        contents, irregular = self._contents()
        second = None
        if carries or self._runner.changed():
            second = self._after_altered(repeats)
            if not carries:  # the step keeps only something of what is in the altered lot
                self._runner.run(self._lot.whole())
                first = self._after(self._lot.whole(), repeats)
        poisoned, poisoned_irregular = self._poisoned()
        contents, irregular = max(contents, poisoned), irregular or poisoned_irregular
        differs = contents.size > self._exact or part_gap.size > self._rounding
        if differs and self._is_repeatable():
            self._refuse_contents(contents, irregular)
            self._refuse_part(part, part_gap, part_irregular)
        if first is not None:
            self._refuse_carried(first, second)
        elif carries:
            self._verdicts.failed("a part of")

    # ------------------------------------------------------------------------------------- runs

    def _whole(self) -> StepRun | None:
        runner, lot = self._runner, self._lot.whole()
        whole = runner.run(lot, whole=True)
        if whole is None or runner.follows or not runner.has_drawn():
            return whole
        runner.follows = True
        return runner.run(lot, whole=True)

    def _choose(self, names: Rows) -> None:
        """Choose the records that are kept, and the one that is poisoned."""
        order = self._random.permutation(names)
        longest = np.isin(order, self._lot.longest()[: len(names) // 2])
        order = np.concatenate([order[longest], order[~longest]])
        count = min(_KEPT, max(2, len(names) // 4))
        self._kept, self._victim = self._random.permutation(order[:count]), int(order[-1])

    def _compared(self, run: StepRun, rows: Rows) -> ComparedRows:
        return ComparedRows(run, rows, self._random, self._floor)

    def _gap(self, rows: ComparedRows, lot: AlteredLot, run: StepRun | None) -> Gap:
        return rows.gap(run, lot.positions(rows.rows))

    def _part(self) -> tuple[AlteredLot, Gap, bool]:
        """The kept records alone, in another order; in the old one where the step wants its rows sorted."""
        for names in (self._kept, np.sort(self._kept)):
            part = self._lot.part(names)
            run = self._runner.run(part)
            if run is not None:
                break
        return part, self._gap(self._kept_rows, part, run), self._runner.irregular

    def _contents(self) -> tuple[Gap, bool]:
        """Kept records in the place of all others, but of one, which is a million times as large.

        Returns:
            Change of the kept ones, and whether random numbers did not follow.
        """
        replaced = self._lot.replaced(self._kept)
        self._altered = self._lot.extreme(replaced, self._victim)
        run = self._runner.run(self._altered, quiet=True)
        if run is None:
            self._altered = replaced
            run = self._runner.run(replaced)
        return self._gap(self._kept_rows, replaced, run), self._runner.irregular

    def _poisoned(self) -> tuple[Gap, bool]:
        """One record without numbers; no change where the step refuses such a record."""
        if self._lot.has_floats():
            for exchanged in (True, False):
                self._without = self._lot.without_numbers(self._victim, exchanged)
                run = self._runner.run(self._without, quiet=True)
                if run is not None:
                    return self._gap(self._other_rows, self._without, run), self._runner.irregular
        self._without = self._lot.whole()
        return Gap(0.0), False

    def _after(self, lot: AlteredLot, repeats: bool) -> StepRun | None:
        """The kept records, from the state that the last run has left, which was one of `lot`."""
        if repeats:
            self._runner.run(lot, after=True, quiet=True)
        return self._runner.run(self._lot.part(np.sort(self._kept)), after=True)

    def _after_altered(self, repeats: bool) -> StepRun | None:
        run = self._after(self._altered, repeats)
        if run is None:  # what is kept of an extreme record may be what the step fails of
            replaced = self._lot.replaced(self._kept)
            self._runner.run(replaced)
            run = self._after(replaced, repeats)
        return run

    # ------------------------------------------------------------------------------------- what follows

    def _is_repeatable(self) -> bool:
        """Whether the whole lot gives the same gradients again; else there is no verdict."""
        if not self._runner.follows:
            raise _NotFollowed
        whole = self._lot.whole()
        again = self._runner.run(whole)
        gap = max(self._gap(rows, whole, again) for rows in (self._kept_rows, self._other_rows))
        if gap.size > self._exact:
            self._verdicts.unsure("training_step is random beyond the seeds of torch, numpy and random")
        return gap.size <= self._exact

    def _refuse_contents(self, gap: Gap, irregular: bool) -> None:
        """Refuse a step whose gradients depend on the contents of other records.

        Args:
            gap: Largest change where other records are others.
            irregular: Whether random numbers did not follow then, in a step that draws as many as its records ask for.
        """
        if irregular and self._exact < gap.size < math.inf:
            shared = self._contents_of_shared()
            if shared is None:
                self._verdicts.unsure(_UNTRACKED)
                return
            gap = shared
        if math.isinf(gap.size):
            self._verdicts.failed("other records in")
        elif gap.size > self._exact:
            self._verdicts.refuse(gap, "contents")

    def _contents_of_shared(self) -> Gap | None:
        """The change of contents where all rows have the same random numbers; None where they have not."""
        whole = self._runner.run(self._lot.whole(), shared=True)
        if whole is None:
            return None
        drawn = self._runner.drawn
        compared = [(self._compared(whole, self._kept_rows.rows), self._altered)]
        compared.append((self._compared(whole, self._other_rows.rows), self._without))
        del whole
        gaps = []
        for rows, lot in compared:
            gaps.append(self._gap(rows, lot, self._runner.run(lot, shared=True, quiet=True)))
            if self._runner.drawn != drawn:
                return None
        return max(gaps)

    def _refuse_part(self, part: AlteredLot, gap: Gap, shared: bool) -> None:
        """Refuse a step whose gradients depend on the order or number of records, by a part that differs.

        Args:
            part: Of the lot.
            gap: How much it differs from the whole.
            shared: Whether its random numbers did not follow the records; then all records get the same ones.
        """
        if math.isinf(gap.size):
            self._verdicts.failed("a part of")
            return
        if gap.size <= self._rounding:
            return
        whole = self._runner.run(self._lot.whole(), shared=shared)
        drawn = self._runner.drawn
        if whole is None:
            self._verdicts.failed("shared random numbers for")
            return
        rows = self._compared(whole, self._lot.of(self._kept))
        groups = self._groups(whole)
        del whole
        alone = self._runner.run(part, shared=shared)
        if shared:
            gap = self._gap(rows, part, alone)
            if gap.size <= self._rounding:
                return
            if self._runner.drawn != drawn or math.isinf(gap.size):
                self._verdicts.unsure(_UNTRACKED)
                return
        # Rounding crosses no kink in a lot of the same shape.
        moved = self._lot.part(self._random.permutation(np.unique(self._lot.record_of)))
        run = self._runner.run(moved, shared=shared)
        if run is not None and self._gap(rows, moved, run).size > self._exact:
            self._verdicts.refuse(self._gap(rows, moved, run), "order")
        differing = [self._gap(group, part, alone).size > self._rounding for group in groups]
        if sum(differing) > len(differing) / 2:
            self._verdicts.refuse(gap, "number")

    def _groups(self, whole: StepRun) -> list[ComparedRows]:
        parts = np.array_split(self._kept, min(_GROUPS, len(self._kept)))
        return [self._compared(whole, self._lot.of(names)) for names in parts]

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
