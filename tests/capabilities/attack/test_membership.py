"""Membership inference over many runs: attacks against closed forms and naive loops, claims against simulated runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy import special, stats
from sklearn.metrics import roc_auc_score

from dpbench.capabilities.attack.membership import (
    ATTACKS,
    MembershipGame,
    claim_groups,
    claim_test,
    lira_offline,
    lira_online,
    log_odds,
    loss_threshold,
    measure_attack,
    rmia,
    rmia_offline,
)
from dpbench.capabilities.auditing.one_run import Guesses, count_right, one_run, one_run_fdp
from dpbench.capabilities.canaries.scores import Floats
from dpbench.errors import ConfigurationError
from dpbench.harness.reports.roc import roc


def gaussian_game(
    runs: int, records: int, mu: float, offset: float = 2.0, references: int = 300, seed: int = 0
) -> MembershipGame:
    """Signals of an offset for each record, μ for members, and a standard Gaussian."""
    rng = np.random.default_rng(seed)
    members = rng.random((runs, records)) < 0.5
    signals = offset * rng.standard_normal(records) + mu * members + rng.standard_normal((runs, records))
    others = offset * rng.standard_normal(references) + rng.standard_normal((runs, references))
    return MembershipGame(signals, members, others)


def gaussian_curve(mu: float) -> Callable[[float], float]:
    """Trade-off curve of μ-GDP."""

    def trade_off(alpha: float) -> float:
        return float(special.ndtr(-special.ndtri(alpha) - mu))

    return trade_off


def naive_lira(game: MembershipGame) -> tuple[Floats, Floats]:
    """Both LiRAs by a loop over runs and records."""
    groups = game.group_of_run
    online = np.empty_like(game.signals)
    offline = np.empty_like(game.signals)
    for run in range(game.runs):
        others = groups != groups[run]
        kinds = []
        for record in range(game.signals.shape[1]):
            signals = game.signals[others, record]
            member = game.members[others, record]
            kinds.append((signals[member], signals[~member]))
        difference = np.mean([a.mean() - b.mean() for a, b in kinds if len(a) and len(b)])
        variances = []
        for kind in (0, 1):
            squares = sum(((pair[kind] - pair[kind].mean()) ** 2).sum() for pair in kinds if len(pair[kind]))
            variances.append(squares / sum(max(len(pair[kind]) - 1, 0) for pair in kinds))
        for record, pair in enumerate(kinds):
            inside, outside = (values.mean() if len(values) else None for values in pair)
            inside = outside + difference if inside is None else inside
            outside = inside - difference if outside is None else outside
            stds = [math.sqrt(variance) for variance in variances]
            if others.sum() >= 63:
                stds = [values.std(ddof=1) if len(values) > 1 else std for values, std in zip(pair, stds, strict=True)]
            signal = game.signals[run, record]
            online[run, record] = stats.norm.logpdf(signal, inside, stds[0])
            online[run, record] -= stats.norm.logpdf(signal, outside, stds[1])
            offline[run, record] = (signal - outside) / stds[1]
    return online, offline


@pytest.mark.parametrize(
    ("runs", "records", "groups"),
    [(4, 60, None), (64, 5, None), (9, 60, 2), (70, 5, 4)],
)
def test_lira_is_that_of_a_naive_loop(runs: int, records: int, groups: int | None) -> None:
    """Also where records lack in-runs or out-runs, and signals lie far from 0."""
    game = gaussian_game(runs, records, 1.0)
    if groups is not None:
        game = replace(game, groups=np.arange(runs) % groups)
    if runs == 4:
        game = replace(game, signals=game.signals + 1e5)
    if runs == 64:
        game.members[:, 0] = np.arange(64) < 2  # without one of the first two runs there is one in-run, and no variance
    online, offline = naive_lira(game)
    np.testing.assert_allclose(lira_online(game), online, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lira_offline(game), offline, rtol=1e-6, atol=1e-6)


def test_rmia_is_that_of_a_naive_loop() -> None:
    """Up to the rank among records that dominate the same references."""
    game = gaussian_game(4, 40, 1.0, references=30)
    assert game.references is not None
    p = special.expit(game.signals)
    q = special.expit(game.references)
    online = rmia(game)
    offline = rmia_offline(game)
    for run in range(4):
        others = np.arange(4) != run
        z = q[others].mean(axis=0)
        z_offline = (1.3 * z + 0.7) / 2
        for record in range(40):
            means = []
            for kind in (True, False):
                which = others & (game.members[:, record] == kind)
                means.append(p[which, record].mean() if which.any() else None)
            inside, outside = means
            usual = np.mean([mean for mean in means if mean is not None])
            dominated = ((p[run, record] / usual) / (q[run] / z) >= 1).sum()
            assert math.floor(online[run, record] * 31) == dominated
            usual = inside if outside is None else (1.3 * outside + 0.7) / 2
            dominated = ((p[run, record] / usual) / (q[run] / z_offline) >= 1).sum()
            assert math.floor(offline[run, record] * 31) == dominated


@pytest.mark.parametrize("groups", [claim_groups(9), np.arange(64)], ids=len)
@pytest.mark.parametrize("name", ATTACKS)
def test_scores_of_a_group_know_nothing_of_its_members(name: str, groups: np.ndarray) -> None:
    """To the bit, rounding included, for all of its runs: else the test of a claim would not be valid."""
    game = replace(gaussian_game(len(groups), 50, 1.0), groups=groups)
    scores = ATTACKS[name](game)
    assert np.isfinite(scores).all()
    for group in range(4):
        members = game.members.copy()
        members[groups == group] ^= True
        changed = ATTACKS[name](replace(game, members=members))
        np.testing.assert_array_equal(changed[groups == group], scores[groups == group])
        assert (changed != scores).any() == (name != "threshold")


@pytest.mark.parametrize("name", ATTACKS)
def test_scores_are_finite_where_signals_never_change(name: str) -> None:
    game = gaussian_game(64, 20, 1.0)
    assert game.references is not None
    signals = game.signals.copy()
    signals[:, :10] = 708.0
    signals[:, 0] = -708.0
    assert np.isfinite(ATTACKS[name](replace(game, signals=signals))).all()


def test_log_odds_are_exact_in_both_tails() -> None:
    losses = np.array([1e-300, 1e-12, 0.1, math.log(2), 5.0, 40.0, 700.0])
    exact = [690.7755, 27.6310, 2.2522, 0.0, -4.9932, -40.0, -700.0]
    np.testing.assert_allclose(log_odds(losses), exact, atol=1e-4)
    least, most = log_odds(np.array([np.inf, 0.0]))
    assert least == pytest.approx(-708.4, abs=0.1) and most == pytest.approx(708.4, abs=0.1)


def test_roc_with_ties_and_weights() -> None:
    rng = np.random.default_rng(0)
    members = rng.random((5, 200)) < 0.5
    scores = rng.integers(4, size=(5, 200)) + members.astype(float)
    curve = roc(scores, members)
    assert curve.auc == pytest.approx(roc_auc_score(members.ravel(), scores.ravel()))
    assert curve.advantage == (curve.tpr - curve.fpr).max()
    assert curve.true_positive_rates_at(np.array(0.3)) == curve.tpr[curve.fpr <= 0.3].max()
    weights = rng.integers(3, size=(5, 200))
    weighted = roc_auc_score(members.ravel(), scores.ravel(), sample_weight=weights.ravel())
    assert roc(scores, members, weights).auc == pytest.approx(weighted)


@pytest.mark.parametrize(("runs", "records", "varied"), [(12, 150, "runs"), (150, 12, "records")])
def test_intervals_cover_the_truth_where_runs_or_records_differ(runs: int, records: int, varied: str) -> None:
    """In some runs, or of some records, membership shows more: a bootstrap of the others alone would miss it."""
    covered = {"auc": 0, "tpr": 0}
    of_runs = float(varied != "records")
    of_records = float(varied != "runs")
    deviation = math.sqrt(1 + of_runs + of_records)  # of members
    area_of_all = stats.norm.cdf(1 / math.sqrt(1 + deviation**2))
    tpr_of_all = stats.norm.sf(stats.norm.isf(0.01) - 1, scale=deviation)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        members = rng.random((runs, records)) < 0.5
        shown = 1 + of_runs * rng.standard_normal((runs, 1)) + of_records * rng.standard_normal(records)
        scores = members * shown + rng.standard_normal((runs, records))
        result = measure_attack("loss", "simulated", scores, members, resamples=50, seed=seed)
        covered["auc"] += result.auc.low <= area_of_all <= result.auc.high
        covered["tpr"] += result.tpr[0.01].low <= tpr_of_all <= result.tpr[0.01].high
    assert covered["auc"] >= 15 and covered["tpr"] >= 14, covered


def test_runs_of_a_group_find_together_what_none_of_them_finds() -> None:
    """Half of the claimed noise, and records that differ, so that shadow models are needed."""
    game = gaussian_game(16, 1000, 2.0)
    groups = claim_groups(16)
    alone = claim_test(lira_online(game), game.members, np.arange(16), delta=1e-5)
    together = replace(game, groups=groups)
    test = claim_test(lira_online(together), game.members, groups, delta=1e-5)
    assert test.refutes(gaussian_curve(1.0)) and not alone.refutes(gaussian_curve(1.0))
    assert len(test.groups) == 4 and test.audited > alone.audited


def test_a_mechanism_of_two_thirds_of_its_noise_is_found_with_records_enough() -> None:
    groups = claim_groups(16)
    game = gaussian_game(16, 16_000, 1.5, offset=0.0)
    test = claim_test(loss_threshold(game), game.members, groups, delta=1e-5)
    assert test.refutes(gaussian_curve(1.0)) and not test.refutes(gaussian_curve(1.5))


def test_each_run_is_tested_at_its_share_of_the_level() -> None:
    """With the bounds of one run, whose tests are in `test_bounds`."""
    game = gaussian_game(5, 300, 1.5, offset=0.0)
    scores = loss_threshold(game)
    guesses = Guesses(32, 32)
    test = claim_test(scores, game.members, np.arange(5), delta=1e-5, level=0.1)
    right = [count_right(scores[run], game.members[run], guesses) for run in range(5)]
    assert [group.right for group in test.groups] == right
    assert test.audited == max(one_run(300, 64, number, 1e-5, 0.02) for number in right) > 0
    refuted = [one_run_fdp(300, 64, number, gaussian_curve(0.5), 0.02) for number in right]
    assert test.refutes(gaussian_curve(0.5)) == any(refuted)


def test_what_an_attack_cannot_be_measured_by_is_refused() -> None:
    game = gaussian_game(2, 40, 1.0)
    for signals in (game.signals[0], game.signals[:, 1:]):
        with pytest.raises(ConfigurationError, match="two runs or more"):
            replace(game, signals=signals)
    with pytest.raises(ConfigurationError, match="membership=half"):
        roc(game.signals, np.ones_like(game.members))
    for attack in (rmia, rmia_offline):
        with pytest.raises(ConfigurationError, match="test set"):
            attack(replace(game, references=None))
    with pytest.raises(ConfigurationError, match="cross-entropies"):
        log_odds(np.array([-1.0]))


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"delta": -1e-5}, "delta must be at least 0 and below 1, not -1e-05"),
        ({"delta": 1.0}, "delta must be at least 0 and below 1, not 1.0"),
        ({"delta": math.nan}, "delta must be at least 0 and below 1, not nan"),
        ({"delta": 1e-5, "level": 0.0}, "level must lie strictly between 0 and 1, not 0.0"),
        ({"delta": 1e-5, "level": 95.0}, "level must lie strictly between 0 and 1, not 95.0"),
    ],
)
def test_a_delta_or_level_of_no_claim_is_refused(given: dict[str, float], line: str) -> None:
    scores = np.arange(40.0).reshape(4, 10)
    with pytest.raises(ConfigurationError, match=line):
        claim_test(scores, scores >= 20, np.arange(4), **given)


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0, math.nan])
def test_rates_at_no_confidence_are_refused(confidence: float) -> None:
    scores = np.arange(40.0).reshape(4, 10)
    with pytest.raises(ConfigurationError, match=f"confidence must lie strictly between 0 and 1, not {confidence}"):
        measure_attack("loss", "LiRA", scores, scores % 2 == 0, confidence)
