"""Noise that is correlated over a few steps, the lots that it needs, and what the two cost together."""

from __future__ import annotations

import json
import math
import shutil
from importlib.metadata import EntryPoints
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import pld, rdp
from torch import Tensor

from dpbench.capabilities.correlated.banded import Banded, BandedNoise
from dpbench.data.sampler import PrivateBatchSampler
from dpbench.errors import ConfigurationError, LedgerError, UnknownNoise
from dpbench.privacy.accounting.accountants import DEFAULT_ORDERS
from dpbench.privacy.accounting.calibration import TrainingSetting, solved
from dpbench.privacy.accounting.composition import epsilon, ledger_epsilon
from dpbench.privacy.accounting.ledger import Ledger, check_own_randomness, read_ledger
from dpbench.privacy.accounting.stated_plan import StatedPlan
from dpbench.privacy.budget import TrainingLength
from dpbench.privacy.events import Summands
from dpbench.privacy.kept_keys import read_keys
from dpbench.privacy.mechanism.adaptive import MeanNormBounds
from dpbench.privacy.mechanism.denoising import ErrorCorrection
from dpbench.privacy.mechanism.groups import per_layer_groups
from dpbench.privacy.mechanism.noise_process import MakeNoise, noise_of
from dpbench.privacy.mechanism.plan import ReleasePlan
from dpbench.privacy.mechanism.recipe import Recipe
from dpbench.privacy.mechanism.schedules import Factors, Schedules
from dpbench.privacy.mechanism.training_plan import TrainingPlan
from dpbench.privacy.releases import ReleaseEngine
from dpbench.privacy.sampling import (
    CyclicPoissonSampling,
    PoissonSampling,
    Sampling,
    SeparatedSampling,
    sampling_from_dict,
)
from tests.privacy.conftest import tier  # noqa: F401 (a fixture)
from tests.support.checks import accepts_scale
from tests.support.releases import OPEN, WIDTH, made, release, rows

CYCLIC = CyclicPoissonSampling(100, 0.1)
BANDS = 4
FOUR = Banded(bands=BANDS)
C = FOUR.coefficients


def plan_of(noise: Any, sampling: Sampling | None = None, recipe: Recipe = Recipe(), **parts: Any) -> TrainingPlan:  # noqa: B008
    sampling = sampling or CYCLIC.in_groups(BANDS)
    return TrainingPlan(recipe, sampling, noise, recipe.groups(["w"], [WIDTH]), (WIDTH,), **parts)


def toeplitz(steps: int, coefficients: tuple[float, ...] = C) -> np.ndarray:
    """C."""
    matrix = np.zeros((steps, steps))
    for lag, value in enumerate(coefficients[:steps]):
        matrix += value * np.eye(steps, k=-lag)
    return matrix


def noise_of_steps(steps: int, width: int = 4000, key: int = 5) -> Tensor:
    """Noise alone, of standard deviation 1 before the correlation, one row a step."""
    noise = BandedNoise(1.0, C)
    plan = ReleasePlan(CYCLIC.in_groups(BANDS), per_layer_groups(["w"], [width], 1.0), 1.0, (width,))
    state = noise.init(width)
    sums = []
    for step in range(steps):
        total = torch.zeros(width)
        sums.append(noise.add_(total, plan, step, lambda at: (key, at), state))
    return torch.stack(sums)


def run(folder: Path, steps: int, **options: Any) -> ReleaseEngine:
    """A run of some steps on cyclic lots, with four bands; its ledger is closed."""
    releases = made(folder, **{"sampling": CYCLIC, "make_noise": FOUR, **options})
    for step in range(steps):
        release(releases, rows(step))
    releases.budget.close()
    return releases


# ------------------------------------------------------------------------------------- the noise


@pytest.mark.usefixtures("tier")
def test_whitened_noise_has_its_scale_and_no_other() -> None:
    noise = noise_of_steps(7).numpy().astype(np.float64)
    whitened = toeplitz(7) @ noise
    for row in whitened:
        assert accepts_scale(row, 1.0)
        assert not accepts_scale(row, 2 / 3)
        assert not accepts_scale(row, 3 / 2)
    assert not accepts_scale(noise[-1], 1.0)  # of a step by itself it is another one
    correlations = np.corrcoef(whitened) - np.eye(7)
    assert abs(correlations).max() < 6 / math.sqrt(4000)


def test_each_segment_has_its_own_scale() -> None:
    noise = BandedNoise(1.0, C)
    plan = ReleasePlan(CYCLIC, per_layer_groups(["a.w", "b.w"], [600, 400], 1.0), 1.0, (600, 400), (), "dimension")
    assert len({std for _, std in plan.segments}) == 2
    state = noise.init(1000)
    sums = torch.stack([noise.add_(torch.zeros(1000), plan, step, lambda at: (5, at), state) for step in range(6)])
    whitened = toeplitz(6) @ sums.numpy()
    start = 0
    for length, std in plan.segments:
        assert accepts_scale(whitened[:, start : start + length].flatten(), std)
        start += length


@pytest.mark.usefixtures("tier")
def test_the_cache_is_filled_again_from_keys() -> None:
    """A resumed run has the noise of the interrupted one, to the bit, also where it was killed inside a band."""
    whole = noise_of_steps(11, 700)
    noise = BandedNoise(1.0, C)
    plan = ReleasePlan(CYCLIC, per_layer_groups(["w"], [700], 1.0), 1.0, (700,))
    for start in (1, 2, 6, 9):
        state = noise.init(700)
        assert state.rows is None  # of a process that adds none
        for step in range(start, 11):
            assert torch.equal(noise.add_(torch.zeros(700), plan, step, lambda at: (5, at), state), whole[step])
        assert state.rows.nbytes == (BANDS - 1) * 700 * 4  # a vector less than there are bands


def test_a_neighbor_moves_whitened_releases_by_the_bound(tmp_path: Path) -> None:
    sums = []
    for extra in (False, True):
        releases = made(tmp_path / str(extra), z=1e-6, sampling=CYCLIC, make_noise=FOUR)
        seen = []
        for step in range(8):
            records = rows(step)
            if extra and step == 2:
                records = torch.cat([records, torch.ones(1, WIDTH)])
            seen.append(release(releases, records) * 10)
        sums.append(torch.stack(seen).double().numpy())
        releases.budget.close()
    moved = np.linalg.norm(toeplitz(8) @ (sums[1] - sums[0]))
    assert moved == pytest.approx(1.0, rel=1e-4)


# ------------------------------------------------------------------------------------- one band


def test_one_band_is_dp_sgd_to_the_bit(tmp_path: Path) -> None:
    ends = []
    for name, sampling, banded in (("plain", PoissonSampling(100, 0.1), noise_of), ("one", CYCLIC, Banded(bands=1))):
        releases = made(tmp_path / name, sampling=sampling, make_noise=banded)
        ends.append([release(releases, rows(step)) for step in range(4)])
        assert releases.lot_key is not None
        lots = PrivateBatchSampler(releases.mechanism.training_plan.sampling, 0)
        lots.start_at(0, releases.lot_key)
        ends[-1] += [torch.from_numpy(lots.lot(step)) for step in range(4)]
        releases.budget.close()
    assert all(map(torch.equal, *ends))
    books = [(tmp_path / name / "ledger.jsonl").read_bytes() for name in ("plain", "one")]
    assert books[0] == books[1]


# ------------------------------------------------------------------------------------- the lots


def test_a_records_group_is_its_own() -> None:
    """One record more moves no other one: their draws do not depend on it."""
    fewer, more = (PrivateBatchSampler(CyclicPoissonSampling(size, 0.05).in_groups(BANDS), 0) for size in (2000, 2001))
    first = fewer._group_of(fewer.sampling)
    second = more._group_of(more.sampling)
    assert (first == second[:2000]).all()


def test_draws_within_a_group_are_poisson() -> None:
    """Each record of the group at rate b·q, independently: its number of lots is binomial, and so is a lot's size."""
    sampling = CyclicPoissonSampling(4000, 0.1).in_groups(BANDS)
    lots = PrivateBatchSampler(sampling, 0)
    group = lots._group_of(sampling) == 0
    rounds = 100
    counts = np.zeros(4000)
    sizes = []
    for number in range(rounds):
        drawn = lots.lot(number * BANDS)
        counts[drawn] += 1
        sizes.append(len(drawn))
    rate = BANDS * 0.1
    assert not counts[~group].any()
    assert counts[group].mean() / rounds == pytest.approx(rate, abs=0.01)
    assert counts[group].var() == pytest.approx(rounds * rate * (1 - rate), rel=0.2)
    assert np.var(sizes) == pytest.approx(group.sum() * rate * (1 - rate), rel=0.5)


# ------------------------------------------------------------------------------------- cost


@pytest.mark.parametrize(("groups", "noise"), [(8, FOUR), (4, noise_of)])
def test_a_record_takes_part_once_a_round(tmp_path: Path, groups: int, noise: MakeNoise) -> None:
    """With more groups than bands, and with independent noise, a round of the groups costs one step at their rate."""
    releases = run(tmp_path, groups + 1, z=1.5, sampling=CYCLIC.in_groups(groups), make_noise=noise)
    step = dp_accounting.PoissonSampledDpEvent(0.1 * groups, dp_accounting.GaussianDpEvent(1.5))
    expected = rdp.RdpAccountant(DEFAULT_ORDERS).compose(step, 2).get_epsilon(1e-4)
    assert releases.epsilon() == pytest.approx(expected, rel=1e-9)


def test_the_ledger_agrees_with_dp_accounting(tmp_path: Path) -> None:
    """ε of n steps is that of ⌈n/b⌉ Poisson steps at b times the rate."""
    run(tmp_path, 10, z=1.3)
    ledger = read_ledger(tmp_path / "ledger.jsonl")
    assert ledger.damage is None and ledger.header.schema == 3
    step = dp_accounting.PoissonSampledDpEvent(0.1 * BANDS, dp_accounting.GaussianDpEvent(1.3))
    by_rdp = rdp.RdpAccountant(DEFAULT_ORDERS).compose(step, 3).get_epsilon(1e-4)
    by_pld = pld.PLDAccountant().compose(step, 3).get_epsilon(1e-4)
    assert ledger_epsilon(ledger, 1e-4, "rdp") == pytest.approx(by_rdp, rel=1e-9)
    assert ledger_epsilon(ledger, 1e-4, "pld") == pytest.approx(by_pld, rel=1e-9)
    stated = ledger.header.plan.events(10)  # without a line of a release
    assert epsilon(stated, 1e-4, "rdp") == ledger_epsilon(ledger, 1e-4, "rdp")
    with pytest.raises(ConfigurationError, match="does not cover 'cyclic_poisson'"):
        ledger_epsilon(ledger, 1e-4, "rdp-analytical")


def test_a_target_is_met(tmp_path: Path) -> None:
    releases = run(tmp_path, 10, z=None, target=2.0, horizon=TrainingLength(10))
    assert 1.99 < releases.epsilon() <= 2.0


@pytest.mark.parametrize("bands", [1, 5])
def test_separated_participations_are_one_gaussian(tmp_path: Path, bands: int) -> None:
    """μ = √k/z, whatever the noise, after every number of steps; exact by Gaussian DP."""
    sampling = SeparatedSampling(100, min_separation=5, max_participations=3, unit="user")
    banded = Banded(bands=bands)
    releases = made(tmp_path, z=2.0, sampling=sampling, make_noise=banded, horizon=TrainingLength(15))
    for step in range(12):
        release(releases, rows(step))
        participations = step // 5 + 1
        exact = dp_accounting.get_epsilon_gaussian(2.0 / math.sqrt(participations), 1e-4)
        assert releases.epsilon("gdp") == pytest.approx(exact)
    assert exact <= releases.epsilon("pld") <= 1.001 * exact <= releases.epsilon("rdp")
    releases.budget.close()
    ledger = read_ledger(tmp_path / "ledger.jsonl")
    assert ledger.damage is None and ledger.header.unit == "user"


def test_participations_are_as_far_apart_as_was_promised(tmp_path: Path) -> None:
    sampling = SeparatedSampling(500, min_separation=5, max_participations=3)
    lots = PrivateBatchSampler(sampling, 0)
    participations: dict[int, list[int]] = {position: [] for position in range(500)}
    for step in range(15):
        for position in lots.lot(step).tolist():
            participations[position].append(step)
    for steps in participations.values():
        assert len(steps) == 3 and set(np.diff(steps)) == {5}
    with pytest.raises(ConfigurationError, match="batch 15 .* more often than max_participations"):
        lots.lot(15)
    for steps_planned in (16, math.inf):
        with pytest.raises(ConfigurationError, match="max_participations allows only 15 steps"):
            made(tmp_path, sampling=sampling, make_noise=FOUR, horizon=TrainingLength(steps_planned))


def test_a_longer_ledger_than_was_promised_is_damage(tmp_path: Path) -> None:
    sampling = SeparatedSampling(100, min_separation=4, max_participations=1)
    releases = made(tmp_path, sampling=sampling, make_noise=FOUR, horizon=TrainingLength(4))
    for step in range(4):
        release(releases, rows(step))
    with pytest.raises(LedgerError, match="release 4 .from 0. exceeds the 4 that its plan allows"):
        release(releases, rows(4))
    releases.budget.close()
    path = tmp_path / "ledger.jsonl"
    lines = path.read_text().splitlines()
    again = lines[1].replace('"number":0', '"number":4')
    path.write_text("".join(f"{line}\n" for line in [*lines, again]))
    assert "release 4 (from 0) exceeds the 4" in str(read_ledger(path).damage)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SeparatedSampling(100, 101), "min_separation must be a whole number of steps from 1 to the 100"),
        (lambda: SeparatedSampling(100, 5, 0), "max_participations must be a whole number of at least 1"),
        (lambda: SeparatedSampling(100, 5, turn=5), "turn must lie from 0 to 4"),
        (lambda: SeparatedSampling.at_rate(100, 0.3), "expected_batch_size to 25 or 33.33333333"),
        (lambda: SeparatedSampling(100, 5).in_groups(6), "6 bands, but examples take part again after 5 steps"),
        (lambda: CyclicPoissonSampling(100, 0.1, 0), "cycle_length must be a whole number of steps"),
        (lambda: CyclicPoissonSampling(100, 0.1, 2, 2), "turn must lie from 0 to 1"),
    ],
)
def test_schemes_out_of_range(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


# ------------------------------------------------------------------------------------- resume


def test_without_a_seed_a_run_goes_on_by_its_keys(tmp_path: Path) -> None:
    """Killed behind its checkpoint, it repeats what is in the ledger, and goes on with the same noise."""
    keys = tmp_path / "noise_keys.json"
    first = made(tmp_path, sampling=CYCLIC, make_noise=FOUR, seed=None)
    assert keys.stat().st_mode & 0o777 == 0o600
    for step in range(5):
        release(first, rows(step))
    state = first.state_dict()
    assert not any(torch.is_tensor(value) for value in state.values())  # a checkpoint holds no noise
    behind = [release(first, rows(step)) for step in (5, 6)]
    first.budget.close()
    assert str(first.key) not in str(state) and f"{first.key:x}" not in str(state)
    ledger = read_ledger(tmp_path / "ledger.jsonl")
    assert ledger.secure and f"{first.key:x}" in keys.read_text()
    second = made(tmp_path, sampling=CYCLIC, make_noise=FOUR, seed=None, start=state)
    again = [release(second, rows(step)) for step in (5, 6)]
    release(second, rows(7))
    second.budget.close()
    assert all(map(torch.equal, behind, again))
    assert len(read_ledger(tmp_path / "ledger.jsonl").releases) == 8
    assert second.forget_keys(is_over=False) == keys and keys.exists()


def test_the_ledger_names_kept_keys_and_tells_nothing_of_them(tmp_path: Path) -> None:
    made(tmp_path, sampling=CYCLIC, make_noise=FOUR, seed=None).budget.close()
    header = read_ledger(tmp_path / "ledger.jsonl").header
    keys = read_keys(tmp_path / "noise_keys.json")
    for word in (header.noise_source, header.replay):
        assert word.startswith("kept:") and len(word) == len("kept:") + 16
        assert word.removeprefix("kept:") not in f"{keys.noise:x} {keys.lots:x}"


def test_two_sums_with_the_noise_of_one_kept_key_are_refused(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    first = made(here, sampling=CYCLIC, make_noise=FOUR, seed=None)
    release(first, rows(0))
    state = first.state_dict()
    first.budget.close()
    shutil.copytree(here, there)

    def ledger_after(folder: Path, *numbers: int) -> Ledger:
        releases = made(folder, sampling=CYCLIC, make_noise=FOUR, seed=None, start=state)
        for number in numbers:
            release(releases, rows(number))
        releases.budget.close()
        return read_ledger(folder / "ledger.jsonl")

    other = ledger_after(there, 1, 2)
    check_own_randomness({"here": ledger_after(here, 1), "there": other})  # a replay, and what one of both has
    with pytest.raises(LedgerError, match=r"their noise from the same kept key, .*without a seed, from the beginning"):
        check_own_randomness({"here": ledger_after(here, 1, 3), "there": other})


def test_without_its_keys_a_run_does_not_go_on(tmp_path: Path) -> None:
    keys = tmp_path / "noise_keys.json"
    first = made(tmp_path, sampling=CYCLIC, make_noise=FOUR, seed=None)
    release(first, rows(0))
    state = first.state_dict()
    first.budget.close()
    assert first.forget_keys(is_over=True) is None and not keys.exists()
    with pytest.raises(ConfigurationError, match="can only be continued with the seed.*noise_keys.json"):
        made(tmp_path, sampling=CYCLIC, make_noise=FOUR, seed=None, start=state)
    OPEN[-1].budget.close()
    keys.write_text('{"noise": 3}')
    with pytest.raises(ConfigurationError, match="does not hold the keys of a run's noise"):
        made(tmp_path, sampling=CYCLIC, make_noise=FOUR, seed=None, start=state)
    OPEN[-1].budget.close()
    other = made(tmp_path / "other", sampling=CYCLIC, make_noise=FOUR, seed=None)
    release(other, rows(0))
    other.budget.close()
    keys.write_bytes((tmp_path / "other/noise_keys.json").read_bytes())  # those of another run
    with pytest.raises(ConfigurationError, match="can only be continued with the seed"):
        made(tmp_path, sampling=CYCLIC, make_noise=FOUR, seed=None, start=state)


def test_keys_are_kept_where_noise_is_drawn_again_only(tmp_path: Path) -> None:
    for name, banded in (("plain", noise_of), ("seeded", FOUR)):
        seed = 3 if name == "seeded" else None
        releases = made(tmp_path / name, sampling=CYCLIC, make_noise=banded, seed=seed)
        release(releases, rows(0))
        releases.budget.close()
        assert not (tmp_path / name / "noise_keys.json").exists()


def test_a_sum_is_not_released_twice(tmp_path: Path) -> None:
    first = made(tmp_path, sampling=CYCLIC, make_noise=FOUR)
    state = first.state_dict()
    release(first, rows(0))
    first.budget.close()
    again = made(tmp_path, sampling=CYCLIC, make_noise=FOUR, start=state)
    with (
        pytest.warns(UserWarning, match="differs from its record"),
        pytest.raises(ConfigurationError, match="cannot be repeated"),
    ):
        release(again, rows(9))


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"sampling": CYCLIC.in_groups(2)}, "cycle_length=2 is below the 4 bands"),
        ({"recipe": Recipe(adaptation=MeanNormBounds())}, "bounds adapt: use a strategy with fixed bounds"),
        ({"bound_factors": Factors((1.0, 0.5))}, "leave out max_grad_norm_schedule"),
        ({"size_factors": Factors((1.0, 0.5))}, "leave out expected_batch_size_schedule"),
        ({"summands": Summands("microbatch", 4)}, "microbatch_size=1"),
    ],
    ids=["groups", "adaptive", "bounds", "sizes", "microbatches"],
)
def test_what_would_void_it_is_refused(parts: dict[str, Any], message: str) -> None:
    plan_of(BandedNoise(1.0, C))
    with pytest.raises(ConfigurationError, match=message):
        plan_of(BandedNoise(1.0, C), **parts)


def test_schedules_are_refused(tmp_path: Path) -> None:
    schedules = Schedules(noise_multiplier="linear:0.5", max_grad_norm=None)
    with pytest.raises(ConfigurationError, match="leave out noise_schedule, or set strategy.noise=gaussian"):
        made(
            tmp_path,
            sampling=CYCLIC,
            make_noise=FOUR,
            schedules=schedules,
            horizon=TrainingLength(10),
        )
    with pytest.raises(ConfigurationError, match="leave out noise_schedule and expected_batch"):
        made(tmp_path, sampling=CYCLIC.in_groups(BANDS), schedules=schedules, horizon=TrainingLength(10))
    with pytest.raises(ConfigurationError, match="leave out noise_schedule and expected_batch"):
        made(tmp_path, sampling=CYCLIC.in_groups(BANDS), size_factors=Factors((1.0, 2.0)))


def test_bands_out_of_range(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="4 bands are more than the 3 steps"):
        made(tmp_path, sampling=CYCLIC, make_noise=FOUR, horizon=TrainingLength(3))
    with pytest.raises(ConfigurationError, match=r"11 bands need batches of at most 9.09"):
        CYCLIC.in_groups(11)
    for bands in (0, 1.5):
        with pytest.raises(ConfigurationError, match="bands must be a whole number of at least 1"):
            Banded(bands=bands)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="cycle_length must be a whole number"):
        CYCLIC.in_groups(True)


def test_coefficients_are_those_of_the_square_root() -> None:
    expected = np.array([math.comb(2 * k, k) / 4**k for k in range(50)])
    np.testing.assert_allclose(Banded(50).coefficients, expected / np.linalg.norm(expected), rtol=1e-12)


# ------------------------------------------------------------------------------------- what a reader sees


def test_the_plan_is_read_as_it_was_written() -> None:
    plan = plan_of(BandedNoise(1.3, C))
    stated = StatedPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert stated.noise.coefficients == C and stated.noise.bands == BANDS
    assert stated.to_dict() == plan.to_dict()
    assert [stated.sampling_of(step) for step in range(6)] == [plan.sampling_of(step) for step in range(6)]
    assert plan.digest != plan_of(BandedNoise(1.3, C[:3])).digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise": {"coefficients": [0.8, 0.6, 0.1]}}, "norm at most 1"),
        ({"noise": {"coefficients": [0.5, math.nan]}}, "finite"),
        ({"noise": {"coefficients": [0.1] * 5}}, "5 bands, but batches contain a record again after 4"),
        ({"bound_factors": [[0.5, 3]]}, "constant bounds"),
        ({"size_factors": [[0.5, 3]]}, "cost the same in each step"),
    ],
    ids=["norm", "finite", "bands", "bounds", "sizes"],
)
def test_a_plan_that_would_count_too_little_is_none(change: dict[str, Any], message: str) -> None:
    data = plan_of(BandedNoise(1.3, C)).to_dict()
    for name, value in change.items():
        if isinstance(value, dict):
            data[name] |= value
        else:
            data[name] = value
    with pytest.raises(LedgerError, match=message):
        StatedPlan.from_dict(data)


def test_a_round_without_its_first_lot_is_damage(tmp_path: Path) -> None:
    """A step of a round that states no cost is believed behind its first one only."""
    run(tmp_path, 4)
    path = tmp_path / "ledger.jsonl"
    header, *lines = path.read_text().splitlines()
    other = json.dumps({**json.loads(header), "phase": 1})
    for text, message in (
        ([header, *lines, other, lines[2]], "release 2 begins a phase within a round of 4 batches"),
        ([header, lines[0], lines[1].replace('"turn":1', '"turn":3')], "batch of another step"),
        ([header, lines[1]], "release 1 follows release -1"),
    ):
        path.write_text("".join(f"{line}\n" for line in text))
        assert message in str(read_ledger(path).damage)
    path.write_text("".join(f"{line}\n" for line in [header, *lines, other, *lines]))
    assert read_ledger(path).damage is None
    assert sampling_from_dict(json.loads(lines[3])["sampling"]) == CYCLIC.in_groups(BANDS).at(3)


def test_without_the_capability_the_ledger_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, 1)
    monkeypatch.setattr("dpbench.privacy.accounting.stated_plan.entry_points", lambda **_: EntryPoints())
    with pytest.raises(UnknownNoise, match="^no installed package knows the noise process 'banded' of the ledger: .*$"):
        read_ledger(tmp_path / "ledger.jsonl")


# ------------------------------------------------------------------------------------- post-processing


def test_error_correction_knows_the_noise_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(denoiser=ErrorCorrection(0.5))
    releases = made(tmp_path, recipe=recipe, sampling=CYCLIC, make_noise=FOUR)
    seen = []
    monkeypatch.setattr(ErrorCorrection, "correct", lambda self, view, std, *others: seen.append(std) or view)
    for step in range(3):
        release(releases, rows(step))
    inverse = np.linalg.inv(toeplitz(3))
    assert seen == pytest.approx(np.sqrt((inverse**2).sum(1)))
    assert seen == pytest.approx([BandedNoise(1.0, C).relative_std(step) for step in range(3)])


class MovingBands(BandedNoise):
    """Correlated noise that moves."""

    def multiplier(self, step: int) -> float:
        return 1.0 / (step + 1)


def test_a_process_states_what_its_own_methods_do() -> None:
    assert (BandedNoise(1.0, C).constant, BandedNoise(1.0, C).independent) == (True, False)
    assert (MovingBands(1.0, C).constant, MovingBands(1.0, C).independent) == (False, False)


# ------------------------------------------------------------------------------------- calibration


@pytest.mark.parametrize("missing", ["noise_multiplier", "sample_rate", "steps"])
def test_whatever_is_missing_is_solved_for(missing: str) -> None:
    values: dict[str, Any] = {"sample_rate": 0.02, "steps": 203, "epsilon": 3.0, "delta": 1e-5, "noise_multiplier": 1.2}
    del values[missing]
    answer: Any = solved(TrainingSetting(**values, population=2000, bands=8))
    mechanism = dp_accounting.GaussianDpEvent(answer.noise_multiplier)
    step = dp_accounting.PoissonSampledDpEvent(8 * answer.sample_rate, mechanism)
    rounds = math.ceil(answer.steps / 8)
    reached = rdp.RdpAccountant(DEFAULT_ORDERS).compose(step, rounds).get_epsilon(answer.delta)
    assert reached == pytest.approx(answer.epsilon, rel=0.05 if missing == "steps" else 1e-3)
    if missing == "steps":
        assert answer.steps % 8 == 0 and reached <= answer.epsilon


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bands": 64}, "sample_rate must be at most 0.01562 for 64 bands"),
        ({"bands": 8, "sampling": "fixed_size"}, "banded noise needs cyclic_poisson batches, not fixed_size"),
        ({"bands": 8, "steps": 5}, "8 bands need at least as many steps, not 5"),
        ({"bands": 0}, "bands must be a number from 1"),
    ],
)
def test_settings_that_bands_do_not_go_with(values: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"sample_rate": 0.02, "steps": 203, "epsilon": 3.0, "delta": 1e-5, "population": 2000}
    with pytest.raises(ConfigurationError, match=message):
        TrainingSetting(**{**given, **values})
