"""The benchmark: arithmetic of its rows, its files, and one real measurement."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from benchmarks import accuracy, pages, rows
from benchmarks.__main__ import main
from benchmarks.opacus_ import opacus
from benchmarks.ours import bare
from benchmarks.plain import plain
from benchmarks.workloads import GPU_WORKLOADS
from dpbench.harness.run.search_path import conf_dir

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


def test_committed_pages_are_those_of_their_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m benchmarks report --file` writes each again, as it lies in the repository."""
    folder = ROOT / "results" / "benchmark"
    for kept in (path for kind in ("users", "networks", "accuracy") for path in folder.glob(f"cpu-*-{kind}.json")):
        copy = tmp_path / kept.name
        copy.write_bytes(kept.read_bytes())
        assert main(["report", "--file", str(copy)]) == 0
        page = Path(capsys.readouterr().out.strip())
        assert page.stem == kept.stem and page.exists()
        if page.suffix == ".md":
            assert page.read_text() == kept.with_suffix(".md").read_text(), "run `python -m benchmarks report --file`"


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


@pytest.mark.filterwarnings("ignore")  # Opacus' own
@pytest.mark.parametrize("name", ["mnist_cnn b256", pytest.param("lstm b128", marks=pytest.mark.long)])
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


@pytest.mark.parametrize("way", ["engine", "hooks", "ghost"])
@pytest.mark.filterwarnings("ignore")  # Opacus' own
def test_ways_of_a_gpt_make_the_same_sum_of_clipped_gradients(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise, one step of each way ends in the same weights."""
    from benchmarks import networks

    settings = {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 128, "vocab_size": 30}
    built: list[torch.nn.Module] = []

    def build(dropout: float) -> torch.nn.Module:
        built.append(networks._gpt(dropout, **settings, tie_word_embeddings=False))
        return built[-1]

    texts = networks.partial(networks._gpt_texts, vocabulary=30)
    network = networks.Network(build, texts, networks.next_token, records=3)
    monkeypatch.setattr("dpbench.privacy.mechanism.mechanism.Mechanism.add_noise", lambda self, key: None)
    for name in ("optimizer", "optimizer_fast_gradient_clipping"):
        monkeypatch.setattr(f"opacus.optimizers.{name}._generate_noise", lambda **more: 0, raising=False)
    (networks._engine(network) if way == "engine" else networks._opacus(network, way))()
    expected = network.model()
    gradients = []
    for loss in network.losses(expected, network.data()):
        gradients.append(torch.autograd.grad(loss, list(expected.parameters()), retain_graph=True))
    factors = [min(1.0, 1.0 / float(torch.cat([part.flatten() for part in g]).norm())) for g in gradients]
    for index, (weights, was) in enumerate(zip(built[0].parameters(), expected.parameters(), strict=True)):
        step = sum(factor * g[index] for factor, g in zip(factors, gradients, strict=True)) / 3
        assert torch.allclose(weights, was - 0.01 * step, atol=1e-6)


def test_runs_to_an_accuracy_that_are_there_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, float | None]] = []

    def run(recipe: accuracy.Recipe, seed: int, noise_multiplier: float | None) -> rows.Row:
        made.append((seed, noise_multiplier))
        return {"cpu_s": 2.0 if noise_multiplier else 1.0, "accuracy": 0.96, "epsilon": 3.0, "noise_multiplier": 0.8}

    monkeypatch.setattr(accuracy, "run", run)
    name = "MNIST 95 %"

    def measure(old: list[rows.Row]) -> list[rows.Row]:
        return [*old, *accuracy.measure([name], accuracy.METHODS, (1, 2), old, lambda text: None)]

    table = measure([])
    assert made == [(1, None), (1, 0.8), (2, None), (2, 0.8)]
    assert measure(table[:3]) == table and made[4:] == [(2, 0.8)]
    line = next(line for line in accuracy.summary(table) if line["name"] == name)
    assert line["dpbench"] == {"n": 2, "accuracy": 96.0, "deviation": 0.0, "cpu_s": 1.0, "reached": True}
    assert not accuracy.summary([row | {"accuracy": 0.94} for row in table])[0]["dpbench"]["reached"]


def test_recipes_of_an_accuracy_are_words_of_the_command_line() -> None:
    from hydra import compose, initialize_config_dir

    for recipe in accuracy.RECIPES.values():
        with initialize_config_dir(str(conf_dir().resolve()), version_base="1.3"):
            config = compose("config", list(recipe.words))
        assert config.data.expected_batch_size == recipe.batch and config.trainer.max_steps == recipe.steps
        assert config.strategy.target_epsilon == recipe.epsilon and config.data.features == recipe.features
