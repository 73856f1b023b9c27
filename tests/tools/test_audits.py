"""The runs of results/audit: correct ones pass, and broken ones are found by the test that the page names."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
from scipy.stats import binom

from tools.audits.__main__ import BROKEN, SETTINGS
from tools.audits.mutants import MUTANTS, NOISE_MUTANTS, RECORD_MUTANTS
from tools.audits.page import page_of
from tools.audits.runs import Setting, audited

SMALL = Setting("flat", steps=60, canaries=600, hidden=32)


def test_a_correct_run_is_consistent() -> None:
    row = audited(SMALL, 4.0)
    assert row["verdict"] == "CONSISTENT" and 0 < row["game"] < row["sound"] <= row["claimed"] <= 4
    assert row["measured_mu"] == pytest.approx(row["declared_mu"], rel=0.1)


@pytest.mark.parametrize("name", MUTANTS)
def test_what_is_broken_is_there(name: str) -> None:
    with MUTANTS[name]():
        pass


@pytest.mark.long
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_run_is_found(name: str) -> None:
    row = audited(BROKEN.get(name, Setting("flat")), 4.0, broken=MUTANTS[name]())
    assert row["verdict"] != "CONSISTENT"
    assert row["violated"] or row["failed"]


def test_each_of_the_new_mutants_has_a_cause_of_its_own() -> None:
    """Fourteen and more that no earlier audit saw, by what is broken."""
    assert len(NOISE_MUTANTS) + len(RECORD_MUTANTS) >= 14


RIGHT = [
    *[(f"{setting.name}, {epsilon:g}", setting, epsilon) for setting in SETTINGS for epsilon in (2.0, 8.0)],
    *[
        (f"{unit}, {sampling}", replace(Setting(""), unit=unit, sampling=sampling, **size), 4.0)
        for unit in ("example", "microbatch")
        for sampling, size in (
            ("fixed_size", {}),
            ("truncated_poisson", {}),
            ("full", {"lot": 512, "steps": 20, "canaries": 500}),
        )
    ],
    *[
        (f"adaptive, {sampling}", replace(SETTINGS[7], sampling=sampling), 4.0)
        for sampling in ("fixed_size", "truncated_poisson")
    ],
    ("pieces", Setting("", options={"max_physical_batch_size": 20}), 4.0),
    ("small lots", Setting("", lot=4, steps=300), 4.0),
]


def test_forty_right_runs_are_tried() -> None:
    assert len(RIGHT) >= 40


@pytest.mark.long  # ten seconds each
def test_few_right_runs_are_accused() -> None:
    """A verdict is wrong in one run of twenty at most; which ones changes with the code, which keys the noise."""
    accused = {}
    for seed, (name, setting, epsilon) in enumerate(RIGHT, start=1000):
        row = audited(setting, epsilon, seed=seed)
        if row["verdict"] != "CONSISTENT":
            accused[name] = (row["violated"], row["failed"])
    assert len(accused) <= binom.isf(0.001, len(RIGHT), 0.05), accused


def test_the_page() -> None:
    rows = []
    for table in ("strategies", "sizes", "mutants"):
        facts = {"table": table, "name": f"a {table}", "asked": 4.0, "claimed": 4.0, "sound": 3.4, "one_run": 1.0}
        bounds = {"f_dp": 1.5, "family": None, "game": 3.0, "declared_mu": 0.5, "measured_mu": 0.52}
        ending = {"verdict": "CONSISTENT", "violated": "", "failed": "", "train_seconds": 1.0, "audit_seconds": 2.0}
        rows.append({**facts, **bounds, **ending, "code": "abc", "canaries": 2000})
    rows[1]["name"] = "2,000 canaries"
    text = page_of(pd.DataFrame(rows))
    assert "| a strategies | 4.00 | 3.40 | 1.00 | 1.50 | – | 3.00 | 0.962 | CONSISTENT |" in text
    assert "| 2,000 canaries | 4.00 | 3.40 | 1.00 | – | 3.00 | 29 % | – | 88 % |" in text
    assert "Of 2 correct runs above 0 were called VIOLATED" in text
    assert "lie 0 of 2 (one run, DP only), 0 of 2 (one run, f-DP), 0 of 0 (family), 0 of 2 (release game)." in text


def test_every_strategy_and_kind_of_record_is_there() -> None:
    assert {setting.unit for setting in SETTINGS} == {"example", "microbatch", "user"}
    assert {setting.sampling for setting in SETTINGS} == {
        "poisson",
        "fixed_size",
        "truncated_poisson",
        "full",
        "cyclic_poisson",
    }
