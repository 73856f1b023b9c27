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
    identity_verdict,
    read_claims,
    recomputed,
    recomputed_identity,
    verdict,
)
from dpbench.capabilities.claims.tensors_apart import (
    TENSORS_APART,
    epsilon_lower_bound,
    nominal_epsilon,
    nominal_noise_multiplier,
)
from dpbench.cli import main
from dpbench.privacy.accounting.accountants import ACCOUNTANTS
from dpbench.privacy.accounting.calibration import TrainingSetting

DATA = read_claims()
CLAIMS = {(claim.paper, claim.source): claim for claim in claims_of(DATA)}
PAPERS = {
    "three_tools_2018",
    "general_approach_2018",
    "pyvacy_2019",
    "gradient_compression_denoising_2020",
    "adaptive_quantile_clipping_2021",
}


def claim(paper: str, source: str) -> Claim:
    return next(one for (p, s), one in CLAIMS.items() if p.startswith(paper) and s.startswith(source))


def test_every_paper_is_there() -> None:
    assert {row["paper"] for row in [*DATA["claim"], *DATA["identity"]]} == PAPERS
    assert len(CLAIMS) == len(DATA["claim"])  # no source twice
    for row in DATA["claim"]:
        assert {"delta", "delta_exponent"} & set(row)


@pytest.mark.parametrize(
    ("paper", "source", "classic"),
    [
        ("gradient_compression", "Table 1, row 1", 7.576),
        ("gradient_compression", "Table 1, row 2", 2.679),
        ("gradient_compression", "Table 1, row 3", 2.265),
        ("gradient_compression", "Table 1, row 4", 1.755),
        ("gradient_compression", "Table 2, row 2", 7.648),
        ("gradient_compression", "Table 2, row 3", 3.795),
        ("pyvacy", "Section 5.1", 3.009),
    ],
)
def test_what_matches_by_the_papers_conversion(paper: str, source: str, classic: float) -> None:
    one = claim(paper, source)
    found = recomputed(one)
    assert found["rdp-classic"] == pytest.approx(classic, abs=6e-4)
    assert found["pld"] < found["rdp-continuous"] <= found["rdp"] < found["rdp-classic"]
    assert verdict(one, found).startswith("matches (rdp-classic")


@pytest.mark.slow
def test_what_does_not_match() -> None:
    one = claim("gradient_compression", "Table 2, row 1")
    assert recomputed(one)["rdp-classic"] == pytest.approx(20.31, abs=0.01)
    assert verdict(one, recomputed(one)).startswith("does not match: more is spent than claimed (pld 17.6")
    one = claim("three_tools", "Section 2.1, σ as the noise of the whole gradient")
    found = recomputed(one)
    assert [found[name] for name in ("rdp-classic", "rdp", "pld")] == pytest.approx([5.71, 5.03, 4.52], abs=0.01)
    assert verdict(one, found).startswith("does not match: less is spent")


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
    assert nominal_epsilon(one.setting, 10, [0.725, 2.5]) == pytest.approx(20.05, abs=0.01)


def test_lower_limits_of_epsilon() -> None:
    setting = TrainingSetting(noise_multiplier=1.0, sample_rate=1.0, steps=1, delta=1e-5, population=100)
    exact = get_epsilon_gaussian(1.0, 1e-5)  # of one release in which every record is
    assert 0.999 * exact < epsilon_lower_bound(setting) <= exact
    for rate, steps, noise_multiplier in ((0.02, 100, 0.4), (0.1, 500, 1.0), (0.5, 20, 2.0)):
        setting = replace(setting, sample_rate=rate, steps=steps, noise_multiplier=noise_multiplier)
        upper = ACCOUNTANTS["pld"].epsilon(setting.events, 1e-5)
        assert 0.97 * upper < epsilon_lower_bound(setting) < upper


def test_population_figures_use_replace_one() -> None:
    counts = claim("adaptive_quantile", "Fig. 2")
    assert recomputed(counts)["rdp"] == pytest.approx(0.034, rel=0.01)
    for source in ("CIFAR-100", "EMNIST-CR", "EMNIST-AE", "SHAKESPEARE", "SO-NWP", "SO-LR"):
        one = claim("adaptive_quantile", f"Table 1, {source}")
        assert one.setting.sampling == "fixed_size"
        found = recomputed(one)
        assert found["rdp"] == pytest.approx(5.0, rel=0.01)
        assert found["rdp-analytical"] >= found["rdp"] * 0.99
        assert found["pld"] is None


def test_identities() -> None:
    found = {row["source"]: (recomputed_identity(row), row) for row in DATA["identity"]}
    values = {source: value for source, (value, _) in found.items()}
    theorem1 = next(value for source, value in values.items() if source.startswith("Theorem 1"))
    assert theorem1 == pytest.approx(1.005, abs=5e-4)
    combined = next(value for source, value in values.items() if "costs what σ = 0.7225 costs" in source)
    assert combined == pytest.approx(0.6963, abs=1e-4)
    verdicts = {source: identity_verdict(row, value) for source, (value, row) in found.items()}
    assert sum(word in ("matches", "holds") for word in verdicts.values()) == 6  # of 9
    table = identities_table(DATA["identity"])
    assert list(table["verdict"]) == list(verdicts.values())


def test_verdicts_are_computed() -> None:
    one = claim("pyvacy", "Section 5.1")
    names = dict.fromkeys(ACCOUNTANTS)
    assert verdict(one, {**names, "rdp": 3.02}) == "matches (rdp)"
    assert verdict(one, {**names, "rdp": 3.04}) == "does not match: more is spent than claimed (rdp 3.04)"
    assert (
        verdict(one, {**names, "rdp": 2.9, "gdp": 1.0}) == "does not match: less is spent, the claim is safe (rdp 2.9)"
    )


@pytest.mark.long
def test_the_whole_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "claims", "--out", str(tmp_path)]) == 0
    folder = tmp_path / "claims"
    assert {path.name for path in folder.iterdir()} == {"claims.csv", "identities.csv", "table.md", "figure.png"}
    assert (folder / "figure.png").read_bytes()[:4] == b"\x89PNG"
    table = pd.read_csv(folder / "claims.csv")
    assert len(table) == len(CLAIMS)
    committed = Path(__file__).parents[3] / "results" / "claims"
    for name in ("claims.csv", "identities.csv"):
        ours, theirs = pd.read_csv(folder / name), pd.read_csv(committed / name)
        pd.testing.assert_frame_equal(ours, theirs, rtol=1e-3)
    text = (folder / "table.md").read_text(encoding="utf-8")
    assert "one minimum, as the paper observed" in text
    assert "falls at every step" in text
    numbers = (committed / "table.md").read_text(encoding="utf-8").splitlines()
    assert [line.split("|")[:3] for line in text.splitlines()] == [line.split("|")[:3] for line in numbers]
    assert "matches (rdp-classic)" in capsys.readouterr().out
