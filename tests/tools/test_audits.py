"""The runs of results/audit: correct ones pass, and broken ones are found by the test that the page names."""

from __future__ import annotations

import pandas as pd
import pytest

from tools.audits.__main__ import BROKEN
from tools.audits.mutants import MUTANTS
from tools.audits.page import page_of
from tools.audits.runs import Setting, audited

SMALL = Setting("flat", steps=30, canaries=300, hidden=32)


def test_a_correct_run_is_consistent() -> None:
    row = audited(SMALL, 4.0)
    assert row["verdict"] == "CONSISTENT" and 0 < row["game"] < row["sound"] <= row["claimed"] <= 4
    assert row["measured_mu"] == pytest.approx(row["declared_mu"], rel=0.2)


@pytest.mark.long
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_run_is_found(name: str) -> None:
    row = audited(BROKEN.get(name, Setting("flat")), 4.0, broken=MUTANTS[name]())
    assert row["verdict"] != "CONSISTENT"
    assert row["violated"] or row["failed"]


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
