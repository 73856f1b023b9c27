"""The benchmark: arithmetic of its rows, its files, and one real measurement."""

from __future__ import annotations

import json
import multiprocessing
import re
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pandas as pd
import pytest
import torch

from benchmarks import axis, machine, optimizers, pages, rows, startup, timing
from benchmarks.__main__ import main
from benchmarks.methods import METHODS, QUICK, methods_for
from benchmarks.opacus_ import opacus
from benchmarks.orders import Orders
from benchmarks.ours import bare
from benchmarks.plain import DrawnSizes, plain
from benchmarks.timing import Timed
from benchmarks.workloads import FIRST_WORKLOAD, GPU_WORKLOADS, WORKLOADS

ROOT = Path(__file__).parents[2]


def row(
    method: str, wall: float | None, cpu: float | None = None, workload: str = "mnist_cnn b256", **more: Any
) -> rows.Row:
    common = {"device": "cpu", "threads": 2, "wall_ms_range": None, "peak_mb": 10.0, "quiet": True, "error": None}
    reference = {"reference_wall_ms": 10.0, "reference_cpu_ms": 15.0}
    return {"workload": workload, "method": method, "wall_ms": wall, "cpu_ms": cpu, **common, **reference, **more}


MEASURED = [
    row("plain/contiguous", 20.0, 30.0),
    row("plain/channels_last", 10.0, 15.0),
    row("ours/flat", 11.0, 18.0),
    row("harness/flat", 12.1, 20.0),
    row("opacus/hooks default malloc", 88.0, 60.0, reference_wall_ms=20.0),  # the machine was half as fast then
    row("opacus/ghost default malloc", 55.0, 60.0),
    row("opacus/hooks", 33.0, 60.0),
    row("jax/vmap", None, None, error="ImportError: no jax"),
    row("plain/contiguous", 1.0, 1.0, workload="mlp b256"),
]


def test_ratios_are_of_the_same_workload_and_to_opacus_as_it_comes() -> None:
    table = {(r["workload"], r["method"]): r for r in rows.with_ratios(MEASURED)}
    flat = table["mnist_cnn b256", "ours/flat"]
    assert flat["ratio_to_limit"] == pytest.approx(1.1)
    assert flat["cpu_ratio_to_limit"] == pytest.approx(1.2)
    assert flat["speedup_over_opacus"] == pytest.approx(4.0)
    assert flat["records_per_s"] == pytest.approx(256 / 0.011)
    assert table["mlp b256", "plain/contiguous"]["speedup_over_opacus"] is None
    assert table["mnist_cnn b256", "jax/vmap"]["ratio_to_limit"] is None


def page_of(table: list[rows.Row], folder: Path) -> str:
    path = folder / "here.json"
    rows.write(path, table)
    return pages.write(path).read_text(encoding="utf-8")


def lines_of(section: str, table: list[rows.Row]) -> list[str]:
    """Lines of a table of goals."""
    with TemporaryDirectory() as folder:
        return page_of(table, Path(folder)).split(f"# {section}\n")[1].split("\n#")[0].splitlines()


def test_goals_are_judged_by_the_worst_and_missing_ones_are_named() -> None:
    more = [row("ours/per_layer", 13.0), row("ours/flat pure", 18.0)]
    table = rows.with_ratios([*MEASURED, *more])
    lines = lines_of("Goals", table)
    assert "| mnist_cnn b256: the engine ÷ limit | 1.18 | 1.10 | 1.20 | met |" in lines  # by wall time
    assert "| mnist_cnn b256: the whole harness ÷ limit | 1.36 | 1.21 | 1.33 | met |" in lines
    assert sum("not measured" in x for x in lines) > 5
    lines = lines_of("Older goals", table)
    assert any("slowest of per-layer" in x and "| 1.15 | 1.30 | – | **not met** |" in x for x in lines)
    assert any("without a compiler" in x and "| 1.7 | 1.80 | – | **not met** |" in x for x in lines)
    assert any("times as fast as Opacus" in x and "| 3.5 | 4.00 | 3.33 | met |" in x for x in lines)


def test_new_rows_replace_old_ones_and_keep_the_rest() -> None:
    merged = rows.merged(MEASURED, [row("ours/flat", 9.0)])
    assert len(merged) == len(MEASURED)
    assert [r["wall_ms"] for r in merged if r["method"] == "ours/flat"] == [9.0]


def test_reports_are_written(tmp_path: Path) -> None:
    table = rows.with_ratios(MEASURED)
    table[0]["quiet"] = False
    text = page_of([{**r, **rows.origin()} for r in table], tmp_path)
    assert "not quiet when these began: mnist_cnn b256" in text
    assert "ImportError: no jax" in text
    assert rows.instructions() in text
    assert "| mnist_cnn b256 | 1 | 1.1 | 1.21 | 4.4 | – | 2.3 min | 2.8 min | 10 min |" in text  # 14,062.5 steps
    assert (tmp_path / "here.png").stat().st_size > 10_000


def test_minutes_are_told_where_all_three_are_known(tmp_path: Path) -> None:
    methods = {"plain/channels_last": 72.0, "harness/flat": 75.6, "opacus/ghost default malloc": 334.0}
    measured = [row(m, ms, workload="small_alexnet b128", reference_wall_ms=72.0) for m, ms in methods.items()]
    text = page_of(rows.with_ratios(measured), tmp_path)
    assert "60 epochs of small_alexnet b128 take 28 minutes without privacy, 30 with dpbench and 130 with Op" in text
    assert "minutes without privacy" not in page_of(rows.with_ratios(measured[:2]), tmp_path)


@pytest.mark.parametrize("names", ["cpu-*-threads", "cpu-*-users"])
def test_committed_pages_are_those_of_their_rows(
    names: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m benchmarks report --file` writes each again, as it lies in the repository."""
    for kept in (ROOT / "results" / "benchmark").glob(f"{names}.json"):
        copy = tmp_path / kept.name
        copy.write_bytes(kept.read_bytes())
        assert main(["report", "--file", str(copy)]) == 0
        page = Path(capsys.readouterr().out.strip())
        assert page.stem == kept.stem and page.exists()
        if page.suffix == ".md":
            assert page.read_text() == kept.with_suffix(".md").read_text(), "run `python -m benchmarks report --file`"


def test_a_missing_file_of_rows_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--file", str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err.endswith("none.json: measure first, or name a file with --file.\n")


def test_processors_of_one_name_have_files_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for instructions in ("AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda found=instructions: found)
        names.append(rows.hardware("cpu", 1))
        assert rows.origin()["hardware"]["instructions"] == instructions
    assert names[1] == names[0].replace("-avx2-1-threads", "-avx512-1-threads") != names[0]


def test_times_of_two_machines_do_not_share_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = rows.origin()["hardware"]
    assert mine["processor"] == machine.processor() != "other" and "features" in mine["processor"]
    path = tmp_path / f"{rows.hardware('cpu', 2)}.json"
    rows.write(path, [row("ours/flat", 1.0, hardware=mine), row("ours/flat", 1.0, hardware={})])
    assert rows.of_another_processor(rows.read(path)) is None
    rows.write(path, [row("ours/flat", 1.0, hardware={**mine, "processor": "other"})])
    for words in ([], ["startup"]):
        assert main([*words, "--out", str(tmp_path)]) == 2
        assert "holds times of another machine (other; this is" in capsys.readouterr().err


class Answers:
    """Stands for a worker."""

    error = None

    def ask(self, **order: Any) -> dict[str, Any]:
        return {"wall": 3.0, "cpu": 6.0, "records": 96}


def test_lots_that_differ_in_size_are_timed_by_their_records() -> None:
    one = Timed("harness/flat", Answers(), batch=64)  # type: ignore[arg-type]
    assert one.turn(threads=2) == (2.0, 4.0)


def test_sizes_are_met_again_with_another_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = multiprocessing.Pipe()
    orders = Orders(there, sizes=60)
    monkeypatch.setattr(orders, "_use", lambda threads: setattr(orders, "_threads", threads))
    made = []
    orders.functions["step"] = lambda: made.append(1)
    for threads in (2, 2, 1):
        here.send({"method": "step", "steps": 5, "warm": 1, "threads": threads})
    here.send({"method": "loop", "steps": 1, "warm": 0, "threads": None})
    orders.advance()
    assert len(made) == 66 + 6 + 66


def test_drawn_sizes_are_those_of_poisson_sampling() -> None:
    torch.manual_seed(0)
    step = DrawnSizes(GPU_WORKLOADS["mlp b256"], torch.channels_last, "cpu")
    losses, sizes = zip(*((float(step().detach()), step.records) for _ in range(100)), strict=True)
    assert 251 < statistics.mean(sizes) < 261 and 12 < statistics.stdev(sizes) < 20
    assert losses[-1] < losses[0]


def measured_as(milliseconds: float) -> Any:
    """Stands for `measure_steps`: every method as fast, but for those of Opacus."""

    def measure(workload: str, methods: list[str], *_: Any) -> list[rows.Row]:
        ranges = {"wall_ms_range": [milliseconds, milliseconds]}
        slow = [milliseconds * (4 if "opacus" in method else 1) for method in methods]
        return [row(m, ms, ms, workload=workload, **ranges) for m, ms in zip(methods, slow, strict=True)]

    return measure


def test_quick_prints_ratios_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.__main__.measure_steps", measured_as(10.0))
    assert main(["quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 + len(QUICK) and not list(tmp_path.iterdir())
    assert printed[-1].split() == [*QUICK[-1].split(), "4.00", "4.00", "40.00", "10.00", "to", "10.00", "40.00"]
    assert len({len(line) for line in printed}) == 1  # aligned
    assert set(QUICK) <= set(methods_for(FIRST_WORKLOAD))


def test_a_whole_measurement_forgets_methods_that_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.__main__.measure_steps", measured_as(10.0))
    monkeypatch.setattr("benchmarks.__main__.startup.measure", lambda *_: [row(startup.FIRST, 3e3, 4e3, "start-up")])
    path = tmp_path / f"{rows.hardware('cpu', 2)}.json"
    rows.write(path, [row("plain/gone", 5.0), row("plain/kept", 5.0, workload="lstm b128")])
    some = ["--workloads", "mnist_cnn b256", "--out", str(tmp_path)]
    assert main([*some, "--methods", "ours/flat"]) == 0
    assert {r["method"] for r in rows.read(path)} == {"plain/gone", "plain/kept", "ours/flat"}
    assert main(some) == 0
    assert "plain/gone" not in (kept := {r["method"] for r in rows.read(path)}) and "plain/kept" in kept
    assert main(["--out", str(tmp_path)]) == 0
    assert "plain/kept" not in {r["method"] for r in rows.read(path)}
    page = path.with_suffix(".md").read_text()
    assert "seconds from the start of the process | 4 | 3.00 | 4.00 | met |" in page


def test_start_up_tells_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def time(words: tuple[str, ...], folder: Path, ledger: Path | None) -> tuple[float, float] | int:
        if words[0] == "account":
            return 1
        return (2.0, 1.0) if ledger is None else (3.0, 4.0)

    monkeypatch.setattr(startup, "_time", time)
    found = {r["method"]: r for r in startup.measure(3, 0.0, lambda text: None)}
    assert found["dpbench account RUN"]["error"] == "dpbench account runs/made: exit status 1"
    assert (
        found["dpbench account RUN"]["cpu_ms"] is None
        and found["dpbench table RUNS"]["cpu_ms"] == 1000
        and found[startup.FIRST]["wall_ms"] == 3000
    )
    lines = lines_of("Goals", rows.with_ratios(found.values()))
    assert "| `dpbench table RUNS`, CPU seconds | 1.5 | 1.00 | 1.00 | met |" in lines
    assert "| `dpbench account RUN`, CPU seconds | 1.5 | – | – | not measured |" in lines


@pytest.mark.long
def test_start_up_is_measured() -> None:
    for one in startup.measure(1, 0.0, lambda text: None):
        assert one["error"] is None and one["wall_ms"] > 100 and one["cpu_ms"] > 100


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--methods", "ours/falt"], "there is no method 'ours/falt'"),
        (["--workloads", "mnist"], "there is no workload 'mnist'"),
    ],
)
def test_unknown_names_are_refused_in_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert says in error and "known: " in error and error.count("\n") == 1


def test_every_workload_has_a_limit() -> None:
    for workload in WORKLOADS.values():
        methods = methods_for(workload.name)
        assert set(methods) <= set(METHODS)
        assert "plain/channels_last" in methods and "ours/flat" in methods


@pytest.mark.filterwarnings("ignore")  # Opacus' own
@pytest.mark.parametrize(
    "name", ["mnist_cnn b256", pytest.param("small_alexnet b128", marks=pytest.mark.long), "lstm b128"]
)
def test_all_start_from_the_same_loss_and_move(name: str) -> None:
    """Same network, same records: what is timed is the same work."""
    workload = GPU_WORKLOADS[name]
    steps = [
        plain(workload, torch.channels_last, "cpu"),
        bare(workload, "flat", "cpu"),
        opacus(workload, "hooks", "cpu", torch.contiguous_format),
    ]
    first, second = ([float(torch.as_tensor(step())) for step in steps] for _ in range(2))
    assert first == pytest.approx([first[0]] * 3, rel=1e-5)
    assert all(before != after for before, after in zip(first, second, strict=True))


@pytest.mark.filterwarnings("ignore")
def test_attention_is_measured_against_that_of_opacus() -> None:
    """Whose DPMultiheadAttention with batch_first=True mixes heads and positions up: as much work, but another loss."""
    workload = GPU_WORKLOADS["attention b128"]
    steps = [
        make(workload) for make in (lambda w: bare(w, "flat", "cpu"), lambda w: plain(w, torch.channels_last, "cpu"))
    ]
    ours, alone, theirs = (
        float(torch.as_tensor(step())) for step in (*steps, opacus(workload, "hooks", "cpu", torch.contiguous_format))
    )
    assert ours == pytest.approx(alone, rel=1e-5) and theirs == pytest.approx(alone, rel=0.5)


@pytest.mark.long
def test_a_real_measurement(tmp_path: Path) -> None:
    ours = "ours/flat,ours/flat pure,harness/flat"
    chosen = f"plain/channels_last,plain/channels_last drawn,{ours},opacus/hooks default malloc"
    command = [sys.executable, "-m", "benchmarks", "--workloads", "mnist_cnn b256", "--methods", chosen]
    for methods in (chosen, "ours/discretized"):
        command[-1] = methods
        options = ["--repeats", "1", "--cpu-repeats", "1", "--wait", "0", "--out", str(tmp_path)]
        done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("*.json")
    table = json.loads(file.read_text())
    assert {r["method"] for r in table} == {*chosen.split(","), "ours/discretized"}
    for one in table:
        assert one["error"] is None and one["wall_ms"] > 0 and one["cpu_ms"] > 0 and one["ratio_to_limit"] > 0
    assert next(r for r in table if r["method"] == "plain/channels_last")["ratio_to_limit"] == 1


@pytest.mark.long
def test_a_worker_that_dies_ends_its_method_only() -> None:
    """In a process of its own, which takes the process that forks with it."""
    program = """
from benchmarks.processes import Worker
if __name__ == "__main__":
    worker = Worker(("steps", "there is none", "cpu", "ours/flat"))
    print(worker.facts["error"])
    worker.ask(method="ours/flat", steps=1, warm=0, threads=1)
    print(worker.error)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("KeyError: 'there is none'"), done.stderr
    assert "the process ended" in done.stdout


class Quiet:
    """Stands for a worker that has nothing to do."""

    error = None
    facts: ClassVar[dict[str, float]] = {"peak_mb": 4000.0}

    def close(self) -> None:
        pass


def test_what_does_not_fit_into_memory_is_measured_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same reference, which is there each time."""
    groups: list[list[str]] = []

    def start(words: tuple[str, ...]) -> Quiet:
        free.append(free[-1] - 5000)
        return Quiet()

    def alternate(timed: list[Timed], *_: object) -> None:
        groups.append([one.method for one in timed])
        free.append(30_000)
        for one in timed:
            one.walls.append(0.007)

    free = [30_000]
    monkeypatch.setattr(timing, "Worker", start)
    monkeypatch.setattr(timing, "free_mb", lambda: free[-1])
    monkeypatch.setattr(timing, "_alternate", alternate)
    names = ["plain/contiguous", "plain/channels_last", *(f"ours/{name}" for name in "abcd"), "opacus/hooks"]
    found = timing.measure_steps("mlp b256", names, "cpu", 2, (1, 1), 0.0, lambda _: None)
    assert [one["method"] for one in found] == ["plain/channels_last", "plain/contiguous", *names[2:]]
    assert groups[0] == ["plain/channels_last", "plain/contiguous", "ours/a", "ours/b"]
    assert groups[1:] == [["plain/channels_last", "ours/c", "ours/d"], ["plain/channels_last", "opacus/hooks"]]
    assert all(one["reference_wall_ms"] == 7.0 for one in found)


@pytest.mark.long
def test_optimizer_costs_are_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert optimizers.main(["--steps", "1", "--turns", "1", "--out", str(tmp_path)]) == 0
    table = pd.read_csv(tmp_path / "costs.csv")
    assert len(table) == 10 and (table["ratio"] > 0).all() and set(table["optimizer"]) >= {"SGD", "Adam"}
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| MNIST CNN | RMSprop |" in page and "1.83" in page
    assert page.strip() in capsys.readouterr().out


def test_the_share_of_the_record_axis() -> None:
    (line,) = axis.shares(["mlp b256"], seconds=0.5)
    found = re.fullmatch(r"mlp b256: (\S+) ms with the record axis, (\S+) ms without: \S+% of a step", line)
    assert found is not None and float(found[1]) > 0 and float(found[2]) > 0
