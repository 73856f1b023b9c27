"""`dpbench report`: every kind of run has its page, and no name gets out of it."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from jinja2 import UndefinedError

from dpbench.cli import main
from dpbench.harness.runs.folder import Run, RunFolder
from dpbench.harness.runs.record import write_result
from dpbench.privacy.accounting.ledger import Header, Release
from dpbench.privacy.accounting.writer import LedgerWriter
from dpbench.privacy.events import SumQuery
from dpbench.privacy.sampling import PoissonSampling
from dpbench.templates import render
from tests.support.cli import dpbench

ALWAYS = {"guarantee", "curves", "settings", "provenance"}
EVIL = "<script>alert('$1')</script>\"'&{{ 7*7 }}"


def made(
    folder: Path,
    seed: int = 0,
    lr: float = 0.1,
    unit: str | None = "example",
    curves: bool = True,
    name: str = "x",
    **config: Any,
) -> Path:
    """A run as it lies on a disk, without a training."""
    folder.mkdir(parents=True)
    run = RunFolder(folder)
    strategy = {"_target_": "dpbench.strategies.DPSGD", "delta": 1e-5}
    own = {"run": {"name": name}, "seed": seed, "optimizer": {"lr": lr}, "data": {"name": "digits"}}
    settings = {**own, "strategy": strategy, "logger": {}, **config}
    run.config.write_text(yaml.safe_dump(settings))
    run.lock.touch()
    if unit is not None:
        sampling = PoissonSampling(1000, 0.05, unit=unit)
        writer = LedgerWriter(run.ledger, Header(unit, "add_or_remove_one", 1000, 1e-5), 0, False)
        for number in range(4):
            writer.append(Release(number, sampling, (SumQuery("all", 2.0, 3.0),), "0x1p0"))
        writer.close()
    if curves:
        names = "step,test/accuracy,nonprivate/train_loss,privacy/epsilon,privacy/bound/all"
        table = pd.read_csv(io.StringIO(f"{names}\n1,0.5{seed},2,0.1,2\n2,0.6{seed},1,0.2,3\n"))
        table.iloc[:, : 5 if unit else 3].to_csv(run.metrics, index=False)
    metrics = {"test/accuracy": 0.9 + 0.01 * seed} if curves else {}
    write_result(Run(run, settings, unit is not None), metrics, 4, 1.0, 1.5, finished=True)
    return folder


def page(out: Path, *sources: Path) -> str:
    assert main(["report", *map(str, sources), "--out", str(out)]) == 0
    return out.read_text(encoding="utf-8")


def sections(text: str) -> set[str]:
    return set(re.findall(r'<section id="(\w+)">', text))


class Closed(HTMLParser):
    """Fails at a script, and at what lies elsewhere."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "iframe")
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "srcset", "data", "action", "poster") and tag != "a":
                assert str(value).startswith(("data:", "#")), value


def is_closed(text: str) -> None:
    Closed().feed(text)
    assert not re.search(r"https?://|@import|url\((?!#)", text)
    ids = re.findall(r'\sid="(.*?)"', text)
    assert len(ids) == len(set(ids))


def test_a_run(tmp_path: Path) -> None:
    text = page(tmp_path / "new" / "r.html", made(tmp_path / "run"))
    assert "Membership inference: an attacker with a false positive rate of 1 % identifies at most " in text
    assert sections(text) == ALWAYS | {"results", "bounds"}
    is_closed(text)
    assert "90.00" in text and "The unit of privacy is one example, of 1,000" in text
    assert "Seeded noise" in text and "<dd>intact</dd>" in text
    assert text == page(tmp_path / "again.html", tmp_path / "run")


def test_runs_that_differ_by_their_seed_are_a_mean(tmp_path: Path) -> None:
    for seed, lr in ((0, 0.1), (1, 0.1), (0, 0.2)):
        made(tmp_path / "sweep" / f"{seed}-{lr}", seed, lr)
    text = page(tmp_path / "r.html", tmp_path / "sweep")
    assert sections(text) == ALWAYS | {"results", "bounds"}
    is_closed(text)
    assert "90.50 ± 0.71" in text and "x (n = 2)" in text
    assert "Choosing one of these 3 runs" in text and "a band of one standard deviation" in text
    assert "<title>sweep</title>" in text
    assert text.index("Choosing one of these 3 runs") < text.index("Everything released by one of these runs alone")


def test_a_template_names_every_fact() -> None:
    with pytest.raises(UndefinedError, match="is undefined"):  # an empty string would be a gap that nobody sees
        render("end_of_run.txt")


def test_other_runs_have_their_words(tmp_path: Path) -> None:
    text = page(tmp_path / "r.html", made(tmp_path / "public", unit=None))
    assert sections(text) == ALWAYS | {"results"}
    assert "trained without privacy" in text
    text = page(tmp_path / "r.html", made(tmp_path / "users", unit="user", curves=False))
    assert "one user, of 1,000" in text and "No run has logged curves." in text


def test_a_damaged_ledger(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    lines = (folder / "ledger.jsonl").read_text().splitlines(keepends=True)
    (folder / "ledger.jsonl").write_text("".join(lines[:-3]))
    text = page(tmp_path / "r.html", folder)
    assert "no ε here is proven" in text
    assert "NOT intact" in text


def test_names_are_text(tmp_path: Path) -> None:
    data = {"name": EVIL, "$x^2$": "</style><img src=http:x onerror=alert(1)>", "\ud800": "half"}
    folder = made(tmp_path / "run", name=EVIL, data={"name": EVIL})
    record = json.loads((folder / "result.json").read_text())
    record["config"]["data"] = data
    record["metrics"] = {f"test/{EVIL}": 0.5, "test/$\\frac$": 1.0}
    (folder / "result.json").write_text(json.dumps(record))
    (folder / "metrics.csv").write_text("step,test/$\\frac{$,test/<script>\n1,0.5,0.1\n2,0.7,0.2\n")
    for text in (page(tmp_path / "r.html", folder), page(tmp_path / "s.html", folder, made(tmp_path / "two", lr=9))):
        Closed().feed(text)
        assert "{{ 7*7 }}" in text
        assert "49" not in text[:600]


def test_a_file_of_somebody_else_stays(tmp_path: Path) -> None:
    made(tmp_path / "run")
    out = tmp_path / "report.html"
    out.write_text("<html>mine")
    assert "is not a dpbench report" in dpbench(tmp_path, "report", "run", status=1)[1]
    assert out.read_text() == "<html>mine"
    dpbench(tmp_path, "report", "run", "--force")
    dpbench(tmp_path, "report", "run")  # ours
