"""The benchmark of rounds of users: the same round everywhere, its clocks, its rows, and a real measurement."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from benchmarks import pages, rounds
from benchmarks.__main__ import main
from benchmarks.machine import cpu_of_tree
from benchmarks.orders import Orders
from benchmarks.timing import Timed
from benchmarks.users import plain, tasks
from benchmarks.users.ours import fit

ROOT = Path(__file__).parents[2]
CNN, LSTM, _ = tasks.TASKS


def test_the_networks_are_those_of_the_paper() -> None:
    counts = [sum(p.numel() for p in task.model().parameters() if p.requires_grad) for task in tasks.TASKS.values()]
    assert counts == [1_206_590, 820_522, 784 * 200 + 200 * 200 + 200 * 62 + 462]
    assert [task.rows_of_user for task in tasks.TASKS.values()] == [100, 20, 100]


class Small(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)


SMALL = tasks.Task(
    "small",
    Small,
    lambda n, g: (torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g)),
    4,
    0.1,
    ((4, torch.contiguous_format), (6, torch.contiguous_format)),
    1.0,
    steps=1,  # so that the order of a user's rows does not matter
)


def test_the_first_version_and_ours_make_the_same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise: the clipped sum over the users of one round, after which the weights are the same."""
    monkeypatch.setattr(plain, "NOISE", 0.0)
    monkeypatch.setattr("benchmarks.users.ours.NOISE", 1e-9)
    monkeypatch.setattr("benchmarks.users.ours._POPULATION", 1)
    models: list[nn.Module] = []
    monkeypatch.setattr(tasks.Task, "model", lambda task: models.append(_seeded(task)) or models[-1])
    go = plain.naive(SMALL, 5)
    first = [p.detach().clone() for p in models[0].parameters()]
    go()
    fit(SMALL, 5, [], max_steps=1)
    for p, own, before in zip(models[0].parameters(), models[1].parameters(), first, strict=True):
        assert not torch.equal(p, before)
        torch.testing.assert_close(own, p, rtol=1e-5, atol=1e-7)


def _seeded(task: tasks.Task) -> nn.Module:
    torch.manual_seed(0)
    return task.build()


def test_the_limit_is_the_gradient_of_all_rows_whatever_the_batches() -> None:
    go, word = plain.limit(SMALL, 3)
    assert word in {"batches of 4, contiguous", "batches of 6, contiguous"}
    go()
    batches = 12 // int(word.split()[2].rstrip(","))
    for p, one in zip(_model_of(go).parameters(), _all_at_once(3), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad / batches, one)


def _model_of(go: Any) -> nn.Module:
    return next(cell.cell_contents for cell in go.__closure__ if isinstance(cell.cell_contents, nn.Module))


def _all_at_once(users: int) -> tuple[torch.Tensor, ...]:
    model = SMALL.model()
    x, y = (data.flatten(0, 1) for data in SMALL.data(users))
    return torch.autograd.grad(tasks.loss(model(x), y), list(model.parameters()))


def test_a_round_is_timed_by_the_clock_it_was_given() -> None:
    ticks = iter(range(100))
    here, there = multiprocessing.Pipe()
    orders = Orders(there, cpu_clock=lambda: float(next(ticks)))
    made: list[str] = []
    orders.functions["naive default malloc"] = lambda: made.append("naive")
    for method in ("naive default malloc", "ours", "ours"):
        here.send({"method": method, "steps": 1, "warm": 0, "threads": None})
    orders.advance()  # returns when the loop's own round is ordered
    assert made == ["naive"] and here.recv()["cpu"] == 1.0
    orders.advance()
    assert here.recv()["cpu"] == 1.0


def test_a_step_that_fails_leaves_the_others() -> None:
    here, there = multiprocessing.Pipe()
    orders = Orders(there)
    orders.functions["bad"] = lambda: 1 / 0
    for method in ("bad", "loop"):
        here.send({"method": method, "steps": 1, "warm": 0, "threads": None})
    orders.advance()
    assert here.recv() == {"error": "ZeroDivisionError: division by zero"}


def test_the_time_of_processes_below_counts() -> None:
    before, started = cpu_of_tree(), sum(os.times()[:4])
    burn = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nprint(flush=True)\n"
    child = subprocess.Popen([sys.executable, "-c", burn + "time.sleep(60)"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    alive = cpu_of_tree() - before
    child.kill()
    child.wait()
    child.stdout.close()
    assert 0.25 < alive < 5.0
    assert cpu_of_tree() - before >= alive - 0.02  # also after it has ended
    ended = (
        sum(os.times()[:4]) - started
    )  # of this process and of what it waited for; earlier tests may have left others
    assert cpu_of_tree() - before == pytest.approx(ended, abs=0.05)


class Silent:
    """Stands for a worker."""

    error = None

    def __init__(self, **facts: str) -> None:
        self.facts = facts


def timed(method: str, cpus: list[float], **facts: str) -> Timed:
    return Timed(method, Silent(**facts), walls=[1.0] * 3, cpus=cpus)  # type: ignore[arg-type]


def test_ratios_are_of_the_same_turn_and_failures_say_why(tmp_path: Path) -> None:
    results = {
        rounds.LIMIT: timed(rounds.LIMIT, [1.0, 2.0, 1.0], limit="batches of 20, contiguous"),
        rounds.OURS: timed(rounds.OURS, [1.2, 2.6, 1.1]),
        rounds.PFL: timed(rounds.PFL, [3.6, 5.2, 2.0], peer="pfl 0.6.0"),
    }
    missing = "not installed: `make bench-users` installs it into here"
    by_method = {method: rounds.row_of(CNN, 100, method, results, None, True) for method in results}
    by_method[rounds.FLOWER] = rounds.row_of(CNN, 100, rounds.FLOWER, results, missing, True)
    assert by_method[rounds.OURS]["ratio_to_limit"] == pytest.approx(1.2)
    assert by_method[rounds.PFL]["ratio_to_ours"] == pytest.approx(2.0)
    assert by_method[rounds.FLOWER]["cpu_s"] is None
    origin = {"commit": "abc", "date": "2026-01-01", "hardware": {"cpu": "a processor", "cores": 2}}
    path = tmp_path / "here-users.json"
    path.write_text(json.dumps([row | origin for row in by_method.values()]), encoding="utf-8")
    text = pages.write(path).read_text(encoding="utf-8")
    assert f"| {CNN}: ours ÷ limit | 1.25 | 1.20 | met |" in text
    assert f"| {CNN}: times faster than pfl | 2 | 2.00 | met |" in text
    assert f"| {CNN}: times faster than flower | 2 | – | not measured |" in text
    assert "| flower default malloc | not installed: `make bench-users` installs it into here | – |" in text
    assert "Other work" not in text and "pfl 0.6.0" in text


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["users", "--methods", "ours/flat"]) == 2
    assert "there is no method 'ours/flat'; known: limit; naive; ours" in capsys.readouterr().err


@pytest.mark.long
def test_a_real_measurement_goes_on_where_a_peer_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "users", "--workloads", LSTM, "--users", "2", "--repeats", "1"]
    options = ["--wait", "0", "--peers", str(tmp_path / "nowhere"), "--out", str(tmp_path)]
    chosen = ["--methods", f"naive,{rounds.PFL}"]
    done = subprocess.run([*command, *options, *chosen], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("*-users.json")
    table = {row["method"]: row for row in json.loads(file.read_text(encoding="utf-8"))}
    assert list(table) == ["limit", "naive", "ours", rounds.PFL]
    assert all(table[name]["cpu_s"] > 0 and table[name]["error"] is None for name in ("limit", "naive", "ours"))
    assert table["ours"]["ratio_to_limit"] > 0.5 and table["limit"]["limit"].startswith("batches of ")
    assert table[rounds.PFL]["error"].startswith("not installed: `make bench-users`")
    assert file.with_suffix(".md").read_text(encoding="utf-8").count("\n| ") > 8


PEERS = ROOT / ".venv-peers"


@pytest.mark.long
@pytest.mark.skipif(not (PEERS / "bin" / "python").exists(), reason="no environment of peers (make bench-users)")
def test_peers_make_rounds(tmp_path: Path) -> None:
    methods = [rounds.PFL, rounds.EVALUATED, rounds.FLOWER, rounds.PRIVATE]
    rows = rounds.measure(LSTM, 2, 1, methods, PEERS, 0.0, lambda what: None)
    table = {row["method"]: row for row in rows}
    assert [table[name]["error"] for name in methods] == [None] * 4
    assert all(table[name]["cpu_s"] > 0 for name in methods)


def test_our_round_is_of_a_fixed_number_of_users() -> None:
    class Cohorts(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            sizes.append(len(batch.positions))

    sizes: list[int] = []
    start = time.monotonic()
    trainer = fit(SMALL, 3, [Cohorts()], max_steps=5)
    assert trainer.global_step == 5 and sizes == [3] * 5 and time.monotonic() - start < 60
