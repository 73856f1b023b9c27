"""`dpbench compare`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dpbench.cli import main
from dpbench.harness.reports.markdown import markdown_rows
from dpbench.harness.reports.plots import draw_comparison
from dpbench.harness.reports.run_rows import RunRow
from dpbench.harness.reports.run_table import RunTable


def run(folder: Path, seed: int, lr: float, accuracy: float) -> Path:
    folder.mkdir(parents=True)
    data = {"name": "digits", "inserted": {"seed": seed}}
    config = {"run": {"name": folder.name}, "seed": seed, "optimizer": {"lr": lr}, "data": data}
    record = {"config": config, "seed": seed, "seconds": 2.5, "steps": 2, "metrics": {"test/accuracy": accuracy}}
    (folder / "result.json").write_text(
        json.dumps({**record, "privacy": {"epsilon": {"rdp": 1.5, "pld": None}, "unit": "example"}})
    )
    (folder / "metrics.csv").write_text(f"step,val/accuracy\n1,0.1\n2,{accuracy}\n")
    return folder


def test_runs_are_shown_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = run(tmp_path / "a", 0, 0.1, 0.8), run(tmp_path / "b", 0, 0.2, 0.9)
    assert main(["compare", str(one), str(two), "--plot", str(tmp_path / "new" / "both.png")]) == 0
    shown = capsys.readouterr().out
    assert "| optimizer.lr | 0.1 | 0.2 |" in shown and "data.name" not in shown
    assert "| test accuracy (%) | 80.00 | 90.00 |" in shown
    assert "| epsilon (PLD) | – | – |" in shown
    assert (tmp_path / "new" / "both.png").read_bytes().startswith(b"\x89PNG")
    assert main(["compare", str(tmp_path)]) == 0  # below a folder


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for number, lr in enumerate((0.1, 0.2)):
        folder = run(tmp_path / str(number) / "same", 0, lr, 0.5)
        folder.rename(tmp_path / f"{number}_lr={lr}")
    run(tmp_path / "other", 0, 0.3, 0.5)
    names = [one.name for one in RunTable.read([tmp_path]).rows]
    assert names == [
        f"same, seed 0 ({tmp_path / '0_lr=0.1'})",
        f"same, seed 0 ({tmp_path / '1_lr=0.2'})",
        "other, seed 0",
    ]


def test_runs_of_several_seeds_are_a_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, accuracy in ((0, 0.8), (1, 0.9)):
        run(tmp_path / f"a{seed}", seed, 0.1, accuracy)
    run(tmp_path / "b", 0, 0.2, 0.5)
    (tmp_path / "a0" / "metrics.csv").write_text("step,val/accuracy,privacy/epsilon\n1,0.1,0.5\n2,0.8,1.5\n")
    picture = tmp_path / "mean.png"
    assert main(["compare", str(tmp_path), "--mean", "--axis", "epsilon", "--plot", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert "85.00 ± 7.07" in shown and "| optimizer.lr | 0.1 | 0.2 |" in shown and "| seed | 0, 1 | 0 |" in shown
    mean, other = RunTable.read([tmp_path], curves=True).over_seeds().rows
    assert mean.n == 2 and mean.curves["val/accuracy"].to_dict() == {1: 0.1, 2: pytest.approx(0.85)}
    assert mean.bands["val/accuracy"][2] == pytest.approx(0.1 / 2**0.5) and other.n == 1
    assert "none of these logged any" in shown  # one of them does not tell its epsilon, so the mean does not
    assert main(["compare", str(tmp_path / "a0"), "--axis", "epsilon", "--plot", str(picture)]) == 0
    assert picture.is_file()


def test_a_legend_says_what_differs(tmp_path: Path) -> None:
    for name, seed, lr in (("a", 0, 0.1), ("b", 1, 0.1), ("c", 0, 0.2)):
        run(tmp_path / name, seed, lr, 0.5)
    runs = RunTable.read([tmp_path])
    assert runs.labels() == ["lr=0.1, seed=0", "lr=0.1, seed=1", "lr=0.2, seed=0"]
    assert runs.over_seeds().labels() == ["lr=0.1 (n = 2)", "lr=0.2"]
    assert RunTable(runs.rows[:2]).labels() == ["seed=0", "seed=1"] and RunTable(runs.rows[:1]).labels() == [
        "a, seed 0"
    ]


def test_nothing_to_compare_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "nowhere"]) == 1
    error = capsys.readouterr().err
    assert "nowhere is not there: name a folder" in error and error.count("\n") == 1


def test_the_picture_is_a_png_or_a_pdf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", str(run(tmp_path / "a", 0, 0.1, 0.8)), "--plot", "x.jpg"])
    assert "should end in .png or .pdf" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "a"), "--plot", str(tmp_path / "x.pdf")]) == 0
    assert (tmp_path / "x.pdf").read_bytes().startswith(b"%PDF")


def test_what_nobody_set_and_what_stands_there_already_is_left_out(tmp_path: Path) -> None:
    """The seed of made-up records follows the run's; ε by RDP is what was logged last."""
    for seed in (0, 1):
        folder = run(tmp_path / str(seed), seed, 0.1, 0.5)
        record = json.loads((folder / "result.json").read_text())
        record["metrics"]["privacy/epsilon"] = 1.5
        (folder / "result.json").write_text(json.dumps(record))
    text = RunTable.read([tmp_path]).compare()
    assert "| seed | 0 | 1 |" in text and "data.inserted.seed" not in text
    assert "| epsilon (RDP) | 1.500 | 1.500 |" in text and "| privacy/epsilon |" not in text


def test_many_runs_stand_below_one_another_in_their_natural_order(tmp_path: Path) -> None:
    for number in range(11):
        run(tmp_path / f"{number}-x", number, 0.1, 0.5)
    rows = RunTable.read([tmp_path]).compare().splitlines()
    assert rows[0].startswith("| run | seed |") and len(rows) == 13
    assert [row.split(",")[0] for row in rows[2:]] == [f"| {number}-x" for number in range(11)]


def test_a_line_in_a_name_stays_in_its_cell(tmp_path: Path) -> None:
    run(tmp_path / "a|b", 0, 0.1, 0.5)
    run(tmp_path / "c", 0, 0.2, 0.5)
    heading = RunTable.read([tmp_path]).compare().splitlines()[0]
    assert heading == "| run | a\\|b, seed 0 | c, seed 0 |"
    assert markdown_rows([["x|y", "z"], ["1", "2\n3"]]).splitlines()[::2] == ["| x\\|y | z |", "| 1 | 2 3 |"]


def test_the_legend_covers_nothing_and_one_point_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    monkeypatch.setattr(
        "dpbench.harness.reports.plots.write_figure", lambda path, figure: figures.append(figure) or path
    )
    for number in range(24):
        folder = run(tmp_path / str(number), number, 0.1, 0.5)
        (folder / "metrics.csv").write_text("step,val/accuracy\n40,0.5\n")
    draw_comparison(RunTable.read([tmp_path], curves=True), tmp_path / "x.png")
    (figure,) = figures
    figure.canvas.draw()
    (panel,) = figure.axes
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 24
    frame = legend.get_window_extent()
    assert frame.x0 >= panel.get_tightbbox().x1 and frame.y0 >= 0 and frame.x1 <= figure.bbox.x1
    assert {line.get_marker() for line in panel.lines} == {"o"} and panel.get_xlim()[0] == 0


def test_an_option_without_a_value_is_like_none_at_all() -> None:
    settings = [{"strategy._target_": "DPSGD", "strategy.priors": None}, {"strategy._target_": "NonPrivate"}]
    rows = tuple(RunRow(name="run", settings=one, metrics={}) for one in settings)
    assert RunTable(rows).differing() == ["strategy._target_"]
    given = replace(rows[0], settings={**settings[0], "strategy.priors": 0.5})
    assert RunTable((given, rows[1])).differing() == ["strategy._target_"]  # the other one has no such option
    assert RunTable((given, rows[0])).differing() == ["strategy.priors"]


def test_a_seed_that_equals_the_runs_by_chance_is_a_setting() -> None:
    """Data dealt to users by an allocation of seed 0: the run of seed 0 is no other setting than that of seed 1."""
    settings = [{"seed": seed, "data.options.seed": 0, "data.inserted.seed": seed} for seed in (0, 1)]
    rows = tuple(RunRow(name="run", settings=one, metrics={}) for one in settings)
    (group,) = RunTable(rows).groups_of_seeds()
    assert len(group) == 2
    assert RunTable(rows).differing() == ["seed"]
