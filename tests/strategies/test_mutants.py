"""Broken mechanisms: each must fail the audit that the real one passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dpbench.errors import DPBenchError
from dpbench.privacy import releases
from dpbench.privacy.accounting.writer import LedgerWriter
from dpbench.privacy.mechanism import mechanism
from dpbench.privacy.mechanism.clipping import clip_and_sum, clip_factors
from dpbench.privacy.mechanism.noise_process import Keys, Noise
from dpbench.privacy.mechanism.plan import ReleasePlan
from dpbench.privacy.randomness import keyed_generator
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


def noise_divided_twice(patch: pytest.MonkeyPatch) -> None:
    def add_(self: Noise, total: Tensor, plan: ReleasePlan, step: int, keys: Keys, state: Any) -> Tensor:
        noise = torch.randn(total.shape, generator=keyed_generator(keys(step))) * plan.noise_stds[0]
        return total.add_(noise / plan.sampling.expected_batch_size)

    patch.setattr(Noise, "add_", add_)


def clips_the_mean(patch: pytest.MonkeyPatch) -> None:
    def clip_mean(gradients: list[Any], groups: list[Any], weights_of: Any, into: list[Tensor], *_: Any) -> Any:
        rows = torch.cat([g.per_record().flatten(1) for g in gradients], 1)
        total = rows.sum(0)
        weight = clip_factors((total / max(len(rows), 1)).square().sum()[None], groups[0].max_grad_norm)
        into[0].add_(total.mul(weight).view(1, -1))
        return into, rows.norm(dim=1)[None]

    patch.setattr(mechanism, "clip_and_sum", clip_mean)


def no_clipping(patch: pytest.MonkeyPatch) -> None:
    def clip(gradients: list[Any], groups: list[Any], weights_of: Any, into: list[Tensor], *_: Any) -> Any:
        return clip_and_sum(gradients, groups, lambda norms, bound: torch.ones_like(norms), into)

    patch.setattr(mechanism, "clip_and_sum", clip)


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


def wrong_sensitivity(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReleasePlan, "noise_stds", property(lambda self: (self.noise_multiplier / 3,)))


MUTANTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    no_noise,
    divided_twice,
    noise_divided_twice,
    clips_the_mean,
    no_clipping,
    reused_seed,
    skips_empty_lots,
    forgets_the_ledger,
    wrong_sensitivity,
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
