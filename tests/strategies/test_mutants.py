"""Broken mechanisms: each must fail the audit that the real one passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpbench.errors import DPBenchError
from dpbench.privacy import releases
from dpbench.privacy.accounting.writer import LedgerWriter
from dpbench.privacy.mechanism.noise_process import Noise
from dpbench.privacy.mechanism.plan import ReleasePlan
from dpbench.strategies import DPSGD
from tests.support.checks import audit


def strategy() -> DPSGD:
    return DPSGD(max_grad_norm=1.0, noise_multiplier=0.1, seed=0)


def test_the_real_mechanism_passes(tmp_path: Path) -> None:
    assert audit(tmp_path, strategy()) == []


def no_noise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Noise, "add_", lambda self, total, *others: total)


def divided_twice(patch: pytest.MonkeyPatch) -> None:
    denominator = ReleasePlan.denominator.fget  # type: ignore[attr-defined]
    patch.setattr(ReleasePlan, "denominator", property(lambda self: denominator(self) ** 2))


def reused_seed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(releases, "noise_key", lambda *facts: (0,))


def skips_empty_lots(patch: pytest.MonkeyPatch) -> None:
    release = DPSGD.on_before_optimizer_step

    def maybe(self: DPSGD, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._source._rows:
            release(self, trainer, pl_module, optimizer)

    patch.setattr(DPSGD, "on_before_optimizer_step", maybe)


def forgets_the_ledger(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LedgerWriter, "append", lambda self, release: None)


MUTANTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    no_noise,
    divided_twice,
    reused_seed,
    skips_empty_lots,
    forgets_the_ledger,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda f: f.__name__)
def test_mutants_are_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    try:
        problems = audit(tmp_path, strategy())
    except DPBenchError as error:  # noticed at run time already
        problems = [str(error)]
    assert problems
