"""Tables: their definitions, which runs they take, a sweep that is killed and goes on, and what is written."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torchvision.utils import make_grid, save_image

from dpbench.cli import main
from dpbench.errors import ConfigurationError
from dpbench.reproduce import pictures
from dpbench.reproduce.command import WITHOUT_RUNS, request
from dpbench.reproduce.jobs import jobs_of
from dpbench.reproduce.logged import collect, read_logged, write_logged
from dpbench.reproduce.montage import strip, write_montage
from dpbench.reproduce.outputs import (
    cells,
    differences,
    finished_runs,
    latex,
    markdown,
    refuse_other_words,
    summary,
    unlike,
    write_outputs,
)
from dpbench.reproduce.refresh import refresh
from dpbench.reproduce.sweep import _watching
from dpbench.reproduce.tables import OTHERS, read_table, table_names
from dpbench.training.launch import conf_dir

TABLE = """
title: Digits
source: nowhere
metric: test/accuracy
seeds: 2
hours: 0.01
words: [data=digits, model=mlp, "model.hidden=[8]", data.expected_batch_size=64, engine.native=off]
rows:
  short: {label: 3 steps, words: [trainer.max_steps=3], epsilon: 1.5}
  long: {label: 6 steps, words: [trainer.max_steps=6]}
columns:
  private: {label: DP-SGD, words: [strategy=dpsgd]}
  plain: {label: not private, words: [strategy=none]}
difference: [private, plain]
paper:
  short: {private: [90.0, 0.1], plain: [95.0]}
notes: [a note]
"""


@pytest.fixture
def definition(tmp_path: Path) -> Path:
    path = tmp_path / "own" / "digits.yaml"
    path.parent.mkdir()
    path.write_text(TABLE)
    return path


def edited(path: Path, old: str, new: str) -> str:
    assert old in TABLE
    path.write_text(TABLE.replace(old, new))
    return str(path)


def test_progress_and_learning_curves_come_from_the_metrics(definition: Path, tmp_path: Path) -> None:
    table = read_table(str(definition), conf_dir())
    job = next(job for job in jobs_of(table, conf_dir(), tmp_path) if job.row == "long")
    assert job.steps_made() == 0
    job.path.mkdir(parents=True)
    lines = ["step,privacy/epsilon,test/accuracy", "2,0.5,", "2,,0.25", "3,,0.5", "4,0.75,0.625"]
    (job.path / "metrics.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert job.steps_made() == 4
    assert collect(table, [job]) == {}  # not finished
    (job.path / "result.json").write_text("{}", encoding="utf-8")
    assert job.steps_made() == job.steps == 6
    curves = collect(table, [job])["curves"]
    assert curves[["step", "value"]].to_numpy().tolist() == [[2, 0.25], [3, 0.5], [4, 0.625]]
    assert set(curves["row"]) == {"long"} and set(curves["seed"]) == {0}


def test_what_runs_logged_is_kept_and_drawn(definition: Path, tmp_path: Path) -> None:
    more = "histogram: true\nseries: [{name: bounds, metrics: privacy/bound/, label: clipping bound}]\nseeds: 2"
    table = read_table(edited(definition, "seeds: 2", more), conf_dir())
    jobs = [job for job in jobs_of(table, conf_dir(), tmp_path) if job.row == "long"]
    for job in jobs:
        job.path.mkdir(parents=True)
        (job.path / "result.json").write_text("{}", encoding="utf-8")
        lines = ["step,privacy/bound/a,privacy/bound/b.bias,test/accuracy", "1,0.5,2,", "2,0.25,,", "6,,,0.5"]
        (job.path / "metrics.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        histogram = "log10_from,log10_to,count\n-inf,-9,6\n-9,-8,3\n-8,inf,1\n"
        (job.path / "nonprivate_gradient_histogram.csv").write_text(histogram, encoding="utf-8")
    logged = collect(table, jobs)
    assert set(logged) == {"bounds", "gradient_values"}  # one evaluation is no curve
    assert set(logged["bounds"]["seed"]) == {0} and len(logged["bounds"]) == 2 * 3
    own = logged["bounds"][logged["bounds"]["column"] == "private"]
    assert own[["step", "name", "value"]].to_numpy().tolist() == [[1, "a", 0.5], [2, "a", 0.25], [1, "b.bias", 2]]
    assert logged["gradient_values"]["count"].sum() == 2 * 10
    assert write_logged(table, logged, tmp_path) == ["bounds.png", "gradient_values.png"]
    again = read_logged(table, tmp_path)
    assert again["bounds"]["value"].tolist() == logged["bounds"]["value"].tolist()
    assert write_logged(table, {}, tmp_path) == [] and not list(tmp_path.glob("*.png"))


def test_generators_are_evaluated_after_training(definition: Path, tmp_path: Path) -> None:
    asked = "evaluation/accuracy_cnn\nmore: [evaluation/coverage]"
    table = read_table(edited(definition, "test/accuracy", asked), conf_dir())
    job = jobs_of(table, conf_dir(), tmp_path)[0]
    train = ["train", *job.words, f"hydra.run.dir='{job.folder}'"]
    judge = ["evaluate", job.folder, "--n", "60000", "--on", "test"]
    assert job.commands() == [train, judge] and job.state() == "new"
    job.path.mkdir(parents=True)
    (job.path / "config.yaml").touch()
    assert job.commands() == [["resume", job.folder], judge] and job.state() == "begun"
    record = {
        "metrics": {},
        "config_hash": job.config_hash,
        "steps": 3,
        "seconds": 1.0,
        "commit": "abc",
        "versions": {},
    }
    record["privacy"] = {"epsilon": {}, "delta": None, "unit": None, "neighbouring_relation": None}
    record["hardware"] = {"cpu": "x", "threads": 2, "gpu": None}
    (job.path / "result.json").write_text(json.dumps(record), encoding="utf-8")
    assert job.commands() == [judge] and job.state() == "begun" and job.result() is None
    found = {"images": 200, "seed": 0, "features": "digits_cnn", "judged_on": "test"}
    found |= {"accuracy_cnn": 0.75, "coverage": 0.5}
    (job.path / "evaluation.json").write_text(json.dumps(found), encoding="utf-8")
    assert job.commands() == [judge]  # somebody looked at fewer images
    found["images"] = 60_000
    (job.path / "evaluation.json").write_text(json.dumps(found), encoding="utf-8")
    assert job.commands() == [] and job.state() == "done"
    done = finished_runs(table, [job])
    assert done["value"].tolist() == [0.75] and done["evaluation/coverage"].tolist() == [0.5]
    write_outputs(table, done, {}, tmp_path / "out")
    page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "Accuracy on real images of a CNN" in page and "| 3 steps | DP-SGD | 0.5 |" in page


def test_montage_shows_two_images_of_each_class(definition: Path, tmp_path: Path) -> None:
    table = read_table(edited(definition, "seeds: 2", "seeds: 2\nsamples: true"), conf_dir())
    job = jobs_of(table, conf_dir(), tmp_path)[0]
    write_montage(table, [job], tmp_path / "out")
    assert not (tmp_path / "out").exists()  # nothing is finished
    job.path.mkdir(parents=True)
    (job.path / "result.json").write_text('{"metrics": {}}', encoding="utf-8")
    images = torch.arange(30).div(30)[:, None, None, None].expand(-1, 3, 4, 4)  # three classes of ten
    save_image(make_grid(images, nrow=10, pad_value=1.0), job.path / "samples.png")
    shown = strip(job.path / "samples.png")
    centres = [round(float(shown[1, 4 * place + 1, 0]) / 255 * 30) for place in range(6)]
    assert centres == [0, 1, 10, 11, 20, 21]
    write_montage(table, [job], tmp_path / "out")
    assert (tmp_path / "out" / "samples.png").read_bytes()[:4] == b"\x89PNG"


def test_a_full_disk_is_told(
    definition: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dpbench.reproduce.command.sweep", full)
    assert main(["reproduce", str(definition), "--runs", str(tmp_path / "runs")]) == 1
    assert "Finished runs are kept: free some, and call the same command again" in capsys.readouterr().err


def test_words_may_follow_options(definition: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["reproduce", str(definition), "--status", "--runs", str(tmp_path / "runs"), "rows=short", "seeds=1"]
    assert main(words) == 0
    assert "0/2 done" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*words, "--statsu"])
    assert "unrecognized arguments: rows=short seeds=1 --statsu" in capsys.readouterr().err


@pytest.mark.parametrize("name", table_names(conf_dir()))
def test_every_table_of_the_project_composes(name: str, tmp_path: Path) -> None:
    table = read_table(name, conf_dir())
    jobs = jobs_of(table.selected((), (), 1), conf_dir(), tmp_path)
    assert len(jobs) == len(table.rows) * len(table.columns)
    assert len({job.config_hash for job in jobs}) == len(jobs)  # no cell is another one by mistake


def test_jobs_are_named_by_what_they_compute(definition: Path, tmp_path: Path) -> None:
    table = read_table(str(definition), conf_dir())
    jobs = jobs_of(table, conf_dir(), tmp_path)
    assert len(jobs) == 8 and len({job.folder for job in jobs}) == 8
    assert [job.seed for job in jobs] == [0] * 4 + [1] * 4  # an interrupted table has every cell
    assert [job.steps for job in jobs[:4]] == [3, 3, 6, 6]
    again = jobs_of(read_table(edited(definition, "[8]", "[9]"), conf_dir()), conf_dir(), tmp_path)
    assert not {job.folder for job in jobs} & {job.folder for job in again}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("metric: test/accuracy", "metric: best/test", "metric must be one of"),
        ("seeds: 2", "seeds: 0", "must not be empty"),
        ("title: Digits", "titel: Digits", "unknown fields titel"),
        ("source: nowhere\n", "", "'source' is missing"),
        ("  short: {private", "  shorter: {private", "which is no cell"),
        ("difference: [private, plain]", "difference: [private, none]", "must name two columns"),
        ("rows:", "rows: [", "defines no table"),
        ("label: 3 steps,", "label: 3,000 steps,", "short has unknown fields 000 steps"),
        ("epsilon: 1.5", "epsilon: three", "epsilon of short must be a number, not 'three'"),
        ("[strategy=none]", "strategy=none", "words must be a list"),
        ("plain: [95.0]", "plain: []", r"paper, short, plain must be \[mean\] or"),
    ],
)
def test_a_wrong_definition_is_one_clear_error(definition: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_table(edited(definition, old, new), conf_dir())


def test_choices_need_records_that_are_held_out(definition: Path, tmp_path: Path) -> None:
    table = read_table(edited(definition, "metric: test/accuracy", "metric: val/accuracy"), conf_dir())
    with pytest.raises(ConfigurationError, match="shows val/accuracy, and short-private-0 holds no records out"):
        jobs_of(table, conf_dir(), tmp_path)


def test_a_definition_in_this_folder_has_a_short_name(definition: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(definition.parent)
    table = read_table("digits.yaml", conf_dir())
    assert (table.name, table.folder, table.command) == ("digits", "digits", "digits.yaml")


def test_words_that_do_not_compose_name_the_cell(definition: Path, tmp_path: Path) -> None:
    table = read_table(edited(definition, "strategy=none", "strategy=nothing"), conf_dir())
    with pytest.raises(ConfigurationError, match="own/digits, short, plain: .*nothing"):
        jobs_of(table, conf_dir(), tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere/table9"], "there is no table 'nowhere/table9'.*Known: adaptive_quantile/figure2,.*claims"),
        (["gradient_compression/table2x"], "Did you mean gradient_compression/table"),
        (["gradient_compression/table1", "rows=sigma_9"], "has no row 'sigma_9'; known: sigma_0.7"),
        (["gradient_compression/table1", "columns=x"], "has no column 'x'"),
        (["gradient_compression/table1", "seed=1"], "'seed=1' is none of rows="),
        (["gradient_compression/table1", "seeds=0"], "leaves nothing to run"),
        (["gradient_compression/table1", "seeds=two"], "'seeds=two' is none of"),
        (["gradient_compression/table1", "launcher=slurm", "seeds=1"], "there is no launcher=slurm"),
        (["gradient_compression/table1", "rows=sigma_0.7", "rows=sigma_1.1"], "rows= is given twice: write rows=A,B"),
        (["gradient_compression/table1", "hydra.launcher.n_jobs=0"], "n_jobs=0 runs nothing: 2 runs two"),
    ],
)
def test_what_cannot_be_reproduced_is_one_clear_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *words]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("dpbench: error: ")
    assert re.search(message, error), error


def test_seeds_are_a_number_or_a_list() -> None:
    assert request(["seeds=3"]).seeds == 3
    assert request(["seeds=0,"]).seeds == (0,)
    assert request(["seeds=[4,5]"]).seeds == (4, 5)
    table = read_table("gradient_compression/table1", conf_dir())
    assert table.selected((), (), 2).seeds == (0, 1)
    assert table.selected((), (), 7).seeds == tuple(range(7))


def runs(values: dict[tuple[str, str, int], float], words: str = "") -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "row": row, "column": column, "seed": seed, "value": value, "epsilon_rdp": 1.25, "epsilon_pld": 1.125,
                "unit": "example" if column == "private" else None, "seconds": 2.0, "commit": "abc", "cpu": "x",
                "gpu": None, "torch": "2", "threads": 2, "code_hash": "other", "epsilon_microbatch_rdp": None,
                "neighbouring_relation": "add_or_remove_one" if column == "private" else None,
                "config_hash": f"{row}{column}{seed}", "words": f"{words} seed={seed}",
            }
            for (row, column, seed), value in values.items()
        ]
    )  # fmt: skip


def test_cells_show_mean_spread_and_paired_difference(definition: Path) -> None:
    table = read_table(str(definition), conf_dir())
    values = {("short", "private", 0): 0.80, ("short", "private", 1): 0.84, ("short", "plain", 0): 0.90}
    values |= {("short", "plain", 1): 0.92, ("short", "plain", 2): 0.10}
    measured = runs(values)
    line = summary(table, measured).iloc[0]
    assert line["mean"] == pytest.approx(82) and line["sd"] == pytest.approx(8**0.5)
    assert line["half"] == pytest.approx(12.706 * 8**0.5 / 2**0.5, rel=1e-3)  # Student's t, one degree of freedom
    gap = differences(table, measured)["short"]
    assert gap["mean"] == pytest.approx(-9) and gap["n"] == 2  # seed 2 has no partner
    head, short, long = cells(table, measured)
    assert short[:7] == ["3 steps", "82.00 ± 2.83", "2", "90.0 ± 0.1", "64.00 ± 46.78", "3", "95.0"]
    assert short[-3:] == ["1.5", "1.250", "1.125"]
    assert long == ["6 steps", "–", "0", "–", "–", "0", "–", "–", "–", "–", "–"] and len(head) == len(long)
    assert r"\toprule" in latex(table, measured) and "–" not in latex(table, measured)
    assert markdown(table, measured).count("\n") == 3


def test_files_are_written_and_written_again_the_same(definition: Path, tmp_path: Path) -> None:
    table = read_table(str(definition), conf_dir())
    measured = runs({("short", "private", 0): 0.80, ("short", "private", 1): 0.84})
    steps = {"row": "short", "column": "private", "seed": 0, "step": [1, 2, 3], "value": [0.2, 0.5, 0.8]}
    curves = pd.DataFrame(steps)
    write_outputs(table, measured, {"curves": curves}, tmp_path / "out")
    names = {"runs.csv", "table.md", "table.tex", "figure.png", "figure.pdf", "README.md", "curves.csv", "curves.png"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    read = pd.read_csv(tmp_path / "out" / "runs.csv")
    write_outputs(table, read, read_logged(table, tmp_path / "out"), tmp_path / "out")
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert unlike(tmp_path / "out", measured) == "runs of other code (abc)"
    write_outputs(table, measured, {}, tmp_path / "out")
    assert not list((tmp_path / "out").glob("curves.*"))  # nothing stays of another definition
    assert "curves" not in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_the_readme_shows_committed_tables(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "gradient_compression_table1"
    folder.mkdir(parents=True)
    table = read_table("gradient_compression/table1", conf_dir()).selected(["sigma_1.1"], ["dpsgd"], None)
    words = " ".join((*table.rows[0].words, *table.columns[0].words))
    values = {("sigma_1.1", "dpsgd", 0): 0.955, ("sigma_1.1", "dpsgd", 1): 0.957}
    runs(values, words).to_csv(folder / "runs.csv", index=False)
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- table gradient_compression_table1 -->\nold\n<!-- end -->\nafter\n")
    assert refresh(tmp_path) == ["gradient_compression/table1"]
    shown = readme.read_text()
    assert "95.60 ± 0.14" in shown and "old" not in shown and shown.endswith("<!-- end -->\nafter\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    refresh(tmp_path)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    readme.write_text("<!-- table nowhere -->\n<!-- end -->\n")
    with pytest.raises(ConfigurationError, match="README.md has a place for table nowhere, but there is no"):
        refresh(tmp_path)
    runs(values, words.replace("1.1", "1.2")).to_csv(folder / "runs.csv", index=False)
    with pytest.raises(ConfigurationError, match="sigma_1.1, dpsgd was run with other words.*restore the definition"):
        refresh(tmp_path)
    assert all(path.read_bytes() == old for path, old in before.items() if path.name not in ("README.md", "runs.csv"))


def test_runs_of_a_cell_that_is_no_more_are_not_shown(definition: Path) -> None:
    table = read_table(str(definition), conf_dir())
    with pytest.raises(ConfigurationError, match="'shorter'.*which own/digits does not have"):
        refuse_other_words(table, runs({("shorter", "private", 0): 0.5}))


def test_results_are_not_wiped_out_by_fewer_or_other_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpbench.reproduce.outputs.code_hash", lambda: "other")
    two = runs({("short", "private", 0): 0.80, ("short", "private", 1): 0.84})
    assert unlike(tmp_path, two) is None
    two.to_csv(tmp_path / "runs.csv", index=False)
    assert unlike(tmp_path, two) is None
    assert unlike(tmp_path, runs({("short", "private", seed): 0.8 for seed in range(3)})) is None
    assert re.match(r"1 run\(s\) that are not among these", unlike(tmp_path, two[:1]) or "")
    two.drop(columns="config_hash").to_csv(tmp_path / "runs.csv", index=False)
    assert unlike(tmp_path, two) == "a runs.csv without config_hash"


def test_the_readme_says_what_epsilon_is_for(definition: Path, tmp_path: Path) -> None:
    table = read_table(str(definition), conf_dir())
    measured = runs({("short", "private", 0): 0.80, ("short", "plain", 0): 0.84})
    measured["neighbouring_relation"] = measured["neighbouring_relation"].replace("add_or_remove_one", "replace_one")
    measured.loc[measured["column"] == "private", "epsilon_microbatch_rdp"] = 0.5
    write_outputs(table, measured, {}, tmp_path)
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "ε is for one example replaced" in text and "For the nominal ε a record is a fixed microbatch" in text
    head, short, long = cells(table, measured)
    assert head[-4:] == ["ε claimed", "ε nominal (RDP)", "ε (RDP)", "ε (PLD)"]
    assert short[-4:] == ["1.5", "0.500", "1.250", "1.125"] and len(long) == len(head)
    assert f"dpbench reproduce {definition}`" in text  # as it was called


def test_one_run_far_off_does_not_flatten_the_picture(definition: Path, tmp_path: Path) -> None:
    table = read_table(str(definition), conf_dir())
    measured = runs({("short", "private", seed): value for seed, value in enumerate((0.101, 0.873, 0.826))})
    seen: list[tuple[float, float]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "write_figure", lambda _, figure: seen.append(figure.axes[0].get_xlim()))
        pictures.draw_table(table, measured, summary(table, measured), tmp_path)
    assert all(0 <= left < 10.1 and 95 <= right <= 100 for left, right in seen) and len(seen) == 2


def test_without_a_terminal_each_run_that_ends_is_told(
    definition: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = jobs_of(read_table(str(definition), conf_dir()).selected(["short"], (), 1), conf_dir(), tmp_path)
    with _watching(jobs):
        jobs[0].path.mkdir(parents=True)
        (jobs[0].path / "result.json").write_text("{}")
    assert capsys.readouterr().err == "1/2 done, 0 running, 0 failed: short, private, seed 0 is done\n"
    (jobs[0].path / "result.json").write_text("{")
    with pytest.raises(ConfigurationError, match="result.json is damaged: delete"):
        jobs[0].result()


def reproduce(folder: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "dpbench", "reproduce", str(folder / "own" / "digits.yaml"), *words]


def results(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.parent.name: json.loads(path.read_text()) for path in folder.rglob("result.json")}


def test_a_table_that_is_killed_goes_on(definition: Path, tmp_path: Path) -> None:
    first = subprocess.run(
        reproduce(tmp_path, "rows=short", "seeds=1"), cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "2/2 done" in first.stdout
    done = {name: record["seconds"] for name, record in results(tmp_path).items()}
    assert len(done) == 2
    sweep = subprocess.Popen(reproduce(tmp_path, "seeds=1"), cwd=tmp_path, stdout=subprocess.DEVNULL)
    begun = time.monotonic()
    while len(list((tmp_path / "runs").rglob("config.yaml"))) < 3 and time.monotonic() - begun < 60:
        time.sleep(0.05)
    os.kill(sweep.pid, signal.SIGKILL)
    sweep.wait()
    last = subprocess.run(reproduce(tmp_path, "seeds=1"), cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "4/4 done" in last.stdout
    after = results(tmp_path)
    assert len(after) == 4 and {name: after[name]["seconds"] for name in done} == done  # not run again
    written = pd.read_csv(tmp_path / "results" / "own_digits" / "runs.csv")
    assert len(written) == 4 and set(written["steps"]) == {3, 6}


@pytest.mark.slow
def test_failed_runs_are_listed_and_tried_again(
    definition: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", edited(definition, "strategy=none", "'strategy=none', 'optimizer.lr=-1'"), "rows=short"]
    assert main([*words, "seeds=1"]) == 1
    shown = capsys.readouterr().out
    assert "1/2 done, 0 running, 1 failed" in shown and "output.log" in shown
    assert "short, plain, seed 0" in shown and "learning rate" in shown.partition("short, plain")[2]
    assert "–" in shown  # the missing cell stays
    folder = next((tmp_path / "runs").rglob("failed.json")).parent
    assert main([*words, "seeds=1", "--status"]) == 1
    modified = (folder / "failed.json").stat().st_mtime_ns
    assert main([*words, "seeds=1"]) == 1
    assert (folder / "failed.json").stat().st_mtime_ns > modified


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local", "ray"])
def test_other_launchers_give_the_same_figures(launcher: str, definition: Path, tmp_path: Path) -> None:
    if launcher == "ray" and find_spec("hydra_plugins.hydra_ray_launcher") is None:
        pytest.skip(
            "the ray launcher is not installed"
        )  # it wants an environment of its own, see conf/launcher/ray.yaml
    basic, other = tmp_path / "basic", tmp_path / "other"
    for folder, words in ((basic, ()), (other, (f"launcher={launcher}",))):
        command = [*reproduce(tmp_path, "rows=short", "seeds=1", *words), "--runs", str(folder)]
        subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    one, two = results(basic), results(other)
    assert set(one) == set(two) and len(one) == 2
    for name in one:
        assert one[name]["metrics"]["test/accuracy"] == pytest.approx(two[name]["metrics"]["test/accuracy"], abs=0.01)


def test_what_is_made_without_runs_is_known_too() -> None:
    assert set(OTHERS) == set(WITHOUT_RUNS)
