"""The release by itself: no Trainer, no module; ranks and broadcast are handed in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import Tensor

from dpbench.errors import BudgetExhausted, ConfigurationError
from dpbench.privacy.accounting.composition import ledger_epsilon
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.accounting.writer import LedgerWriter
from dpbench.privacy.budget import Budget, TrainingLength
from dpbench.privacy.events import Summands
from dpbench.privacy.gradients.parameter import InstantiatedGradients
from dpbench.privacy.mechanism.clipping import unclipped_factors
from dpbench.privacy.mechanism.noise import checksum, grid_spacing
from dpbench.privacy.mechanism.recipe import Recipe
from dpbench.privacy.processes import Processes
from dpbench.privacy.releases import ReleaseEngine
from tests.support.releases import OPEN, SAMPLING, made, release, rows


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Ledgers are let go at the end of each test."""
    yield
    while OPEN:
        OPEN.pop().budget.close()


def test_a_release_is_the_sum_with_noise_over_the_expected_lot(tmp_path: Path) -> None:
    releases, draws = made(tmp_path), []
    for step in range(20):
        lot = rows(step)
        draws.append(10 * release(releases, lot) - lot.sum(0))
    noise = torch.cat(draws).double().numpy()
    for factor, fits in ((1.0, True), (2 / 3, False), (1.5, False)):
        assert (stats.kstest(noise / factor, "norm").pvalue > 1e-4) == fits
    ledger = read_ledger(tmp_path / "ledger.jsonl")
    assert len(ledger.releases) == 20 and ledger.header.unit == SAMPLING.unit
    assert releases.epsilon() == ledger_epsilon(ledger, 1e-4)


def test_an_empty_lot_is_noise_alone(tmp_path: Path) -> None:
    releases = made(tmp_path)
    release(releases, rows(0))
    noise = 10 * release(releases)  # nothing of the lot before
    assert 0.8 < float(noise.std()) < 1.2 and abs(float(noise @ rows(0).sum(0))) < 5 * float(rows(0).sum(0).norm())


def test_the_line_is_on_disk_before_the_sum_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    releases = made(tmp_path)

    def fails(self: LedgerWriter, line: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(LedgerWriter, "append", fails)
    with pytest.raises(OSError, match="full"):
        release(releases, rows(0))
    assert releases.num_releases == 0


def test_pieces_are_one_lot(tmp_path: Path) -> None:
    whole, pieces = made(tmp_path / "a"), made(tmp_path / "b")
    lot = rows(1)
    pieces.open_lot()
    for piece in (lot[:3], lot[3:3], lot[3:]):
        pieces.accumulate([InstantiatedGradients(lambda piece=piece: piece)], len(piece))
    torch.testing.assert_close(pieces.release()[0], release(whole, lot))


def test_two_processes_release_what_one_does(tmp_path: Path) -> None:
    """The sum of both is on the grid: a share without noise that joined after it would show its low bits."""
    sent: list[Tensor] = []

    def broadcast(value: object) -> object:
        if isinstance(value, Tensor):
            sent.append(value.clone())
        return value

    def receive(value: object) -> object:
        return sent[-1] if isinstance(value, Tensor) else value

    lot = rows(2)
    first = made(tmp_path / "two", processes=Processes(0, 2, broadcast, lambda total: total.add_(lot[4:].sum(0))))
    given = release(first, lot[:4])
    torch.testing.assert_close(given, release(made(tmp_path / "one"), lot))
    (line,) = [line for _, line in read_ledger(tmp_path / "two/ledger.jsonl").releases]
    cells = sent[-1].double() / grid_spacing(line.queries[0].noise_std)
    assert torch.equal(cells, cells.round())
    assert checksum(sent[-1]) == line.checksum
    second = made(tmp_path / "none", processes=Processes(1, 2, receive, lambda total: None))
    assert torch.equal(release(second, lot[4:]), given)
    assert not (tmp_path / "none/ledger.jsonl").exists()


def test_a_resumed_run_repeats_what_is_on_disk_and_pays_once(tmp_path: Path) -> None:
    releases = made(tmp_path)
    release(releases, rows(0))
    state = releases.state_dict()
    crashed = [release(releases, rows(step)) for step in (1, 2)]
    releases.budget.close()
    again = made(tmp_path, start=state)
    repeated = [release(again, rows(step)) for step in (1, 2)]
    assert all(torch.equal(a, b) for a, b in zip(crashed, repeated, strict=True))
    assert len(read_ledger(tmp_path / "ledger.jsonl").releases) == 3 == again.num_releases
    assert again.epsilon() == releases.epsilon()


def test_target(tmp_path: Path) -> None:
    releases = made(tmp_path / "a", z=None, target=2.0, horizon=TrainingLength(5))
    for step in range(5):
        release(releases, rows(step))
    assert 1.99 < releases.epsilon() <= 2.0 and releases.budget.exhausted
    with pytest.raises(BudgetExhausted, match="is spent"):
        release(releases)
    with pytest.raises(ConfigurationError, match="needs a training of known length"):
        made(tmp_path / "b", z=None, target=2.0)


def test_a_denominator_of_weights(tmp_path: Path) -> None:
    """General_approach_2018, 2.1: a sum of weighted records is divided by q·W."""
    exact = Recipe(noise=False, private=False)
    half = release(made(tmp_path, recipe=exact, summands=Summands(total_weight=200.0)), rows(0))
    torch.testing.assert_close(half * 0.1 * 200, rows(0).sum(0))


def test_references(tmp_path: Path) -> None:
    exact = made(tmp_path, recipe=Recipe(noise=False, private=False))
    seen: list[float] = []
    exact.watchers.append(lambda mechanism: seen.append(float(mechanism.total.sum())))
    torch.testing.assert_close(release(exact, rows(0)), rows(0).sum(0) / 10)
    assert len(seen) == 1 and exact.epsilon() == float("inf") and not (tmp_path / "ledger.jsonl").exists()
    private = made(tmp_path / "private")
    private.watchers.append(lambda mechanism: None)
    with pytest.raises(ConfigurationError, match="may not be watched"):
        release(private, rows(0))
    with pytest.raises(ValueError, match="without noise is not private"):
        Recipe(noise=False)


def test_before_a_training() -> None:
    with pytest.raises(ConfigurationError, match="nothing has been trained yet"):
        ReleaseEngine(Recipe(), Budget(None, 1e-4, "rdp"), 1.0).epsilon()


def test_a_lot_is_released_once(tmp_path: Path) -> None:
    releases = made(tmp_path)
    for act in (lambda: releases.release(), lambda: releases.accumulate([InstantiatedGradients(lambda: rows(0))], 7)):
        with pytest.raises(ConfigurationError, match="no batch is open"):
            act()
    release(releases, rows(0))
    with pytest.raises(ConfigurationError, match="no batch is open"):
        releases.release()
    assert releases.num_releases == len(read_ledger(tmp_path / "ledger.jsonl").releases) == 1


def test_nothing_is_released_without_a_ledger(tmp_path: Path) -> None:
    releases = made(tmp_path)
    releases.budget.close()
    with pytest.raises(ConfigurationError, match="the ledger is not open"):
        release(releases, rows(0))


def test_the_key_without_a_seed_is_nobodys() -> None:
    keys = {ReleaseEngine(Recipe(), Budget(None, 1e-4, "rdp"), 1.0).key for _ in range(3)}
    assert len(keys) == 3 and min(keys) > 2**64


def test_what_is_not_private_is_no_private_recipe() -> None:
    with pytest.raises(ValueError, match="without clipping is not private"):
        Recipe(clip_factors=unclipped_factors)
    for wrong in (4, 0):
        with pytest.raises(ValueError, match="exactly if|whole number of at least 1"):
            Summands(per_summand=wrong)
    for weight in (0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="total_weight must be a positive number"):
            Summands(total_weight=weight)
