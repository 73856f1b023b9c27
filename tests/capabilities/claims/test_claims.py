"""The papers' claims: the data file, the verdicts, and facts that were computed independently."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from dp_accounting import get_epsilon_gaussian

from dpbench.capabilities.claims.table import (
    Claim,
    claims_of,
    identities_table,
    read_claims,
    recomputed,
    verdict,
)
from dpbench.capabilities.claims.tensors_apart import (
    TENSORS_APART,
    epsilon_lower_bound,
    nominal_epsilon,
    nominal_noise_multiplier,
)
from dpbench.privacy.accounting.accountants import ACCOUNTANTS
from dpbench.privacy.accounting.calibration import TrainingSetting
from tests.support.cli import dpbench

DATA = read_claims()
CLAIMS = {(claim.paper, claim.source): claim for claim in claims_of(DATA)}


def claim(paper: str, source: str) -> Claim:
    return next(one for (p, s), one in CLAIMS.items() if p.startswith(paper) and s.startswith(source))


def test_every_paper_is_there() -> None:
    papers = "three_tools_2018 general_approach_2018 pyvacy_2019 gradient_compression_denoising_2020"
    papers += " adaptive_quantile_clipping_2021"
    assert {row["paper"] for row in [*DATA["claim"], *DATA["identity"]]} == set(papers.split())
    assert len(CLAIMS) == len(DATA["claim"])  # no source twice
    assert all({"delta", "delta_exponent"} & set(row) for row in DATA["claim"])


def test_what_matches_by_the_papers_conversion() -> None:
    one = claim("pyvacy", "Section 5.1")
    found = recomputed(one)
    assert found["rdp-classic"] == pytest.approx(3.009, abs=6e-4)
    assert found["pld"] < found["rdp-continuous"] <= found["rdp"] < found["rdp-classic"]
    assert verdict(one, found).startswith("matches (rdp-classic")


def test_epsilon_20_is_the_sum_over_ten_tensors() -> None:
    one = claim("three_tools", "Section 2.1, σ = 0.7225 as the noise of each of ten tensors")
    found = recomputed(one)
    assert found[TENSORS_APART] == pytest.approx(19.87, abs=0.01)
    assert found["rdp-continuous"] > 400  # what the noise costs: that accounting is no bound
    assert verdict(one, found) == f"matches ({TENSORS_APART})"
    inverse = claim("three_tools", "Section 2.1 and Table 1, batch 128")
    assert nominal_noise_multiplier(inverse.setting, 10) == pytest.approx(0.7211, abs=1e-4)
    for tensors in (9, 11):  # of no other number
        assert nominal_epsilon(one.setting, tensors, [0.7225]) != pytest.approx(20, rel=0.05)


def test_lower_limits_of_epsilon() -> None:
    setting = TrainingSetting(noise_multiplier=1.0, sample_rate=1.0, steps=1, delta=1e-5, population=100)
    exact = get_epsilon_gaussian(1.0, 1e-5)  # of one release in which every record is
    assert 0.999 * exact < epsilon_lower_bound(setting) <= exact
    setting = replace(setting, sample_rate=0.5, steps=20, noise_multiplier=2.0)
    upper = ACCOUNTANTS["pld"].epsilon(setting.events, 1e-5)
    assert 0.97 * upper < epsilon_lower_bound(setting) < upper


def test_population_figures_use_replace_one() -> None:
    assert recomputed(claim("adaptive_quantile", "Fig. 2"))["rdp"] == pytest.approx(0.034, rel=0.01)
    one = claim("adaptive_quantile", "Table 1, CIFAR-100")
    assert one.setting.sampling == "fixed_size"
    found = recomputed(one)
    assert found["rdp"] == pytest.approx(5.0, rel=0.01)
    assert found["rdp-analytical"] >= found["rdp"] * 0.99
    assert found["pld"] is None


def test_identities() -> None:
    table = identities_table(DATA["identity"]).set_index("source")
    values = table["recomputed"]
    assert values[values.index.str.startswith("Theorem 1")].iloc[0] == pytest.approx(1.005, abs=5e-4)
    assert values[values.index.str.contains("costs what σ = 0.7225 costs")].item() == pytest.approx(0.6963, abs=1e-4)
    assert table["verdict"].isin(["matches", "holds"]).sum() == 6  # of 9


def test_verdicts_are_computed() -> None:
    one = claim("pyvacy", "Section 5.1")
    for found, words in (
        ({"rdp": 3.02}, "matches (rdp)"),
        ({"rdp": 3.04}, "does not match: more is spent than claimed (rdp 3.04)"),
        ({"rdp": 2.9, "gdp": 1.0}, "does not match: less is spent, the claim is safe (rdp 2.9)"),
    ):
        assert verdict(one, dict.fromkeys(ACCOUNTANTS) | found) == words


@pytest.mark.long
def test_the_whole_command(tmp_path: Path) -> None:
    assert "matches (rdp-classic)" in dpbench(tmp_path, "reproduce", "claims", "--out", ".")[0]
    folder = tmp_path / "claims"
    assert sorted(path.name for path in folder.iterdir()) == ["claims.csv", "figure.png", "identities.csv", "table.md"]
    committed = Path(__file__).parents[3] / "results" / "claims"
    for name in ("claims.csv", "identities.csv"):
        ours, theirs = pd.read_csv(folder / name), pd.read_csv(committed / name)
        pd.testing.assert_frame_equal(ours, theirs, rtol=1e-3)
    text = (folder / "table.md").read_text(encoding="utf-8")
    assert "one minimum, as the paper observed" in text and "falls at every step" in text
