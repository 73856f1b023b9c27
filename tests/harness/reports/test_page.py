"""`dpbench report`: every kind of run has its page, and no name gets out of it."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from jinja2 import UndefinedError

from dpbench.cli import main
from dpbench.harness.reports.run_table import RunTable
from dpbench.harness.runs.folder import Run, RunFolder
from dpbench.harness.runs.record import write_result
from dpbench.privacy.accounting.ledger import Header, Release
from dpbench.privacy.accounting.writer import LedgerWriter
from dpbench.privacy.events import SumQuery
from dpbench.privacy.sampling import PoissonSampling
from dpbench.templates import render

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c4944415408d763f8ffff3f0005fe02fedccc59e7"
    "0000000049454e44ae426082"
)
ALWAYS = {"guarantee", "curves", "settings", "provenance"}
EVIL = "<script>alert('$1')</script>\"'&{{ 7*7 }}"


def made(
    folder: Path,
    seed: int = 0,
    lr: float = 0.1,
    unit: str | None = "example",
    state: str = "finished",
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
        for number in range(20):
            writer.append(Release(number, sampling, (SumQuery("all", 1.0 + number, 1.5 * (1 + number)),), "0x1p0"))
        writer.close()
    if curves:
        rows = [(s, 0.5 + 0.02 * s + 0.01 * seed, 2 / s, 0.1 * s, 1.0 + s) for s in range(1, 21)]
        names = ["step", "test/accuracy", "nonprivate/train_loss", "privacy/epsilon", "privacy/bound/all"]
        pd.DataFrame(rows, columns=names).drop(columns=[] if unit else names[3:]).to_csv(run.metrics, index=False)
    if state != "begun":
        metrics = {"test/accuracy": 0.9 + 0.01 * seed} if curves else {}
        write_result(Run(run, settings, unit is not None), metrics, 20, 1.0, 1.5, finished=state == "finished")
    return folder


def page(out: Path, *sources: Path) -> str:
    assert main(["report", *map(str, sources), "--out", str(out)]) == 0
    return out.read_text(encoding="utf-8")


def sections(text: str) -> set[str]:
    return set(re.findall(r'<section id="(\w+)">', text))


class Seen(HTMLParser):
    """Elements and what they load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "action", "poster") and tag != "a":
                self.loaded.append(str(value))
            if name == "id":
                self.ids.append(str(value))
            assert not name.startswith("on"), (tag, name)


def is_closed(text: str) -> None:
    """No script, nothing that lies elsewhere."""
    seen = Seen(text)
    assert "script" not in seen.tags and "iframe" not in seen.tags
    assert all(place.startswith(("data:", "#")) for place in seen.loaded), seen.loaded
    assert "http://" not in text and "https://" not in text and "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert len(seen.ids) == len(set(seen.ids))


def test_a_run(tmp_path: Path) -> None:
    text = page(tmp_path / "new" / "r.html", made(tmp_path / "run"))
    assert "Membership inference: an attacker with a false positive rate of 1 % identifies at most " in text
    assert sections(text) == ALWAYS | {"results", "bounds"}
    is_closed(text)
    assert "90.00" in text and "The unit of privacy is one example, of 1,000" in text
    assert "Seeded noise" in text and "<dd>intact</dd>" in text
    assert text == page(tmp_path / "again.html", tmp_path / "run")


def test_runs_that_differ_by_their_seed_are_a_mean(tmp_path: Path) -> None:
    for seed in (0, 1):
        for lr in (0.1, 0.2):
            made(tmp_path / "sweep" / f"{seed}-{lr}", seed, lr)
    text = page(tmp_path / "r.html", tmp_path / "sweep")
    assert sections(text) == ALWAYS | {"results", "bounds"}
    is_closed(text)
    assert "90.50 ± 0.71" in text and "x (n = 2)" in text
    assert "Choosing one of these 4 runs" in text and "a band of one standard deviation" in text
    assert "<title>sweep</title>" in text
    assert text.index("Choosing one of these 4 runs") < text.index("Alone, everything that one of these trainings")
    one, two = RunTable.read([tmp_path / "sweep"], curves=True).over_seeds().rows
    assert one.n == two.n == 2 and one.bands["test/accuracy"].iloc[0] == pytest.approx(0.01 / 2**0.5)


def test_the_code_of_a_mean_is_one(tmp_path: Path) -> None:
    for seed in (0, 1):
        folder = made(tmp_path / str(seed), seed)
        record = json.loads((folder / "result.json").read_text())
        (folder / "result.json").write_text(json.dumps({**record, "code_hash": str(seed)}))
    assert [run.n for run in RunTable.read([tmp_path / "0", tmp_path / "1"]).over_seeds().rows] == [1, 1]


def test_a_template_names_every_fact() -> None:
    with pytest.raises(UndefinedError, match="is undefined"):  # an empty string would be a gap that nobody sees
        render("end_of_run.txt")


def test_a_run_by_users(tmp_path: Path) -> None:
    records = {"_target_": "dpbench.records.Users", "local": {"epochs": 3}}
    text = page(tmp_path / "r.html", made(tmp_path / "run", unit="user", records=records))
    assert "one user, of 1,000" in text and "records.local.epochs" in text


def test_a_gan(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    (folder / "samples.png").write_bytes(PIXEL)
    text = page(tmp_path / "r.html", folder)
    assert "samples" in sections(text) and '<img src="data:image/png;base64,iVBOR' in text
    is_closed(text)


def test_a_run_without_privacy(tmp_path: Path) -> None:
    text = page(tmp_path / "r.html", made(tmp_path / "run", unit=None))
    assert sections(text) == ALWAYS | {"results"} and "trained without privacy" in text


def test_a_run_without_metrics(tmp_path: Path) -> None:
    text = page(tmp_path / "r.html", made(tmp_path / "run", curves=False))
    assert sections(text) >= ALWAYS and "No run has logged any." in text
    assert page(tmp_path / "b.html", made(tmp_path / "bare", curves=False, unit=None))


def test_a_damaged_ledger(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    lines = (folder / "ledger.jsonl").read_text().splitlines(keepends=True)
    (folder / "ledger.jsonl").write_text("".join(lines[:-3]))
    text = page(tmp_path / "r.html", folder)
    assert "no ε here is proven" in text and "NOT intact" in text
    (folder / "ledger.jsonl").write_text(lines[0])
    text = page(tmp_path / "r.html", folder)
    assert "NOT intact" in text
    (folder / "ledger.jsonl").unlink()
    text = page(tmp_path / "r.html", folder)
    assert "no ε here is proven: ledger.jsonl is missing" in text


def test_names_are_text(tmp_path: Path) -> None:
    data = {"name": EVIL, "$x^2$": "</style><img src=http:x onerror=alert(1)>", "\ud800": "half"}
    folder = made(tmp_path / "run", name=EVIL, data={"name": EVIL})
    record = json.loads((folder / "result.json").read_text())
    record["config"]["data"] = data
    record["metrics"] = {f"test/{EVIL}": 0.5, "test/$\\frac$": 1.0}
    (folder / "result.json").write_text(json.dumps(record))
    (folder / "metrics.csv").write_text("step,test/$\\frac{$,test/<script>\n1,0.5,0.1\n2,0.7,0.2\n")
    for text in (page(tmp_path / "r.html", folder), page(tmp_path / "s.html", folder, made(tmp_path / "two", lr=9))):
        seen = Seen(text)
        assert (
            "script" not in seen.tags
            and "{{ 7*7 }}" in text
            and "49" not in re.sub(r"<svg.*?</svg>", "", text, flags=re.S)[:600]
        )
        assert all(place.startswith("data:image/svg+xml") for place in seen.loaded if place != "data:,")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", "nowhere is not there: name a folder"),
        ("file", "file is a file: name a folder"),
        ("empty", "no finished run (with a result.json) below empty"),
        ("begun", "no finished run (with a result.json) below begun"),
        ("damaged", "result.json is damaged"),
    ],
)
def test_nothing_to_report_is_one_clear_line(
    tmp_path: Path, source: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("empty").mkdir()
    (made(Path("damaged")) / "result.json").write_text("{")
    made(Path("begun"), state="begun")
    assert main(["report", source]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not Path("report.html").exists()


def test_a_file_of_somebody_else_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = made(tmp_path / "run"), tmp_path / "thesis.html"
    out.write_text("<html>mine")
    assert main(["report", str(folder), "--out", str(out)]) == 1
    assert "is not a dpbench report" in capsys.readouterr().err and out.read_text() == "<html>mine"
    assert main(["report", str(folder), "--out", str(out), "--force"]) == 0
    assert main(["report", str(folder), "--out", str(out)]) == 0  # ours


def test_twelve_runs_are_no_large_file(tmp_path: Path) -> None:
    for seed in range(12):
        folder = made(tmp_path / "runs" / str(seed), seed, lr=seed + 1)
        steps = range(1, 5001)
        noisy = [0.5 + 0.1 * ((s * 7919) % 101) / 101 for s in steps]
        table = {"step": steps, "nonprivate/train_loss": noisy, "privacy/epsilon": [0.001 * s for s in steps]}
        pd.DataFrame(table).to_csv(folder / "metrics.csv", index=False)
    assert len(page(tmp_path / "r.html", tmp_path / "runs")) < 3e6


@pytest.mark.long
def test_chromium_has_nothing_to_say_against_it(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no chromium on this machine")
    folder = made(tmp_path / "run", name=EVIL)
    (folder / "samples.png").write_bytes(PIXEL)
    page(tmp_path / "r.html", folder)
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path}/c",
    ]
    words = [browser, *options, "--dump-dom", (tmp_path / "r.html").as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert "</main>" in done.stdout, done.stderr
    assert "CONSOLE" not in done.stderr


def test_what_was_measured_once_is_drawn(tmp_path: Path) -> None:
    folder = made(tmp_path / "a")
    table = pd.read_csv(folder / "metrics.csv")
    table.tail(1).to_csv(folder / "metrics.csv", index=False)
    text = page(tmp_path / "r.html", folder)
    (drawing,) = re.findall('alt="Curves" src="data:image/svg.xml;base64,([^"]*)"', text)
    assert re.search("<text[^>]*>accuracy</text>", base64.b64decode(drawing).decode())
