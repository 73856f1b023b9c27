"""The front pages of the project and of results/ say what the committed figures say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from dpbench.harness.reproduce._results import RUNS
from dpbench.harness.reproduce._summary import summary
from dpbench.harness.reproduce.tables import read_table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


@pytest.fixture(scope="module")
def text() -> str:
    page = (RESULTS / "README.md").read_text(encoding="utf-8").split("## Tables")[0]
    return " ".join(re.sub(r"\]\([^)]*\)", "]", page).split())


@pytest.fixture(scope="module")
def readme() -> str:
    return " ".join((ROOT / "README.md").read_text(encoding="utf-8").replace("**", "").split())


def _cell(name: str, row: str, column: str, what: str = "mean", digits: str = "1") -> str:
    table = read_table(name)
    runs = pd.read_csv(RESULTS / table.folder / RUNS)
    lines = summary(table, runs).set_index(["row", "column"])
    value = float(lines.loc[(row, column), what])
    return f"{value:.2f}" if what.startswith("epsilon") else f"{value:.{digits}f}"


def _fill(sentence: str) -> str:
    """{TABLE ROW COLUMN [WHAT [DIGITS]]} is the cell's figure."""
    return re.sub(r"\{([^}]+)\}", lambda found: _cell(*found[1].split()), sentence)


TOOLS, COMPRESSION, QUANTILE = "three_tools", "gradient_compression/tutorial", "adaptive_quantile"
MEDIAN, SCATTERING = "adaptive_quantile/mnist_median", "recipes/mnist_scattering"


@pytest.mark.parametrize(
    "sentence",
    [
        f"recalled in {{{TOOLS}/figure2 centralized_10 plain}} % without, "
        f"in {{{TOOLS}/figure2 centralized_10 private}} % with DP-FedAvg",
        f"({{{TOOLS}/figure4 adaptive sigma}} against {{{TOOLS}/figure4 constant sigma}} % at the paper's σ, "
        f"{{{TOOLS}/figure4 adaptive epsilon_20}} against {{{TOOLS}/figure4 constant epsilon_20}} % at its ε)",
        f"({{{TOOLS}/table1 batch_128 sigma}} % with 128, {{{TOOLS}/table1 batch_512 sigma}} % with 512, "
        f"{{{TOOLS}/table1 batch_1024 sigma}} % with 1,024; the paper: {{{TOOLS}/table1 batch_128 sigma paper}}, "
        f"{{{TOOLS}/table1 batch_512 sigma paper}} and {{{TOOLS}/table1 batch_1024 sigma paper}} %)",
        f"({{{TOOLS}/table1 batch_512 epsilon_20}} % with 512, {{{TOOLS}/table1 batch_1024 epsilon_20}} % with 1,024)",
        f"[recalls] {{{TOOLS}/figure1_small dpsgd accuracy}} % (three seeds)",
        f"[recalled] in {{{TOOLS}/figure1 noise sgd}} % by SGD and in {{{TOOLS}/figure1 noise dpsgd}} % by DP-SGD",
        "[reaches] {pyvacy/mnist epsilon_3 accuracy} % at the claimed ε = 3 (today's accountant: "
        "{pyvacy/mnist epsilon_3 accuracy epsilon_rdp}) and {pyvacy/mnist not_private accuracy} % without privacy; "
        "the paper: {pyvacy/mnist epsilon_3 accuracy paper} and {pyvacy/mnist not_private accuracy paper} %",
        "a CNN learns to read {pyvacy/gan epsilon_1 steps_1} % of real digits at ε = 1 (five seeds) and "
        "{pyvacy/gan epsilon_0.3 steps_1} % at ε = 0.3 ({pyvacy/gan epsilon_0.3 waits} % where the generator waits); "
        "with the paper's own networks {pyvacy/gan epsilon_1 mlp} % at ε = 1",
        "it [reads] {pyvacy/gan_augmented epsilon_10 steps_3600} % at ε = 10, and {pyvacy/gan epsilon_10 steps_1} % ",
        "[has] {recipes/random_prior both epsilon_1} % on CIFAR-10 at ε = 1 (three seeds) with the learning rate that "
        "a first grid gives on made-up images, {recipes/random_prior both_wide epsilon_1} % with that of a wider one, "
        "and {recipes/random_prior scattering epsilon_1} % without the latter",
        *(
            f"{{{COMPRESSION} sigma_0.7 {column}}}, {{{COMPRESSION} sigma_1.0 {column}}}, "
            f"{{{COMPRESSION} sigma_1.1 {column}}} and {{{COMPRESSION} sigma_1.3 {column}}} % {between}"
            f"{{{COMPRESSION} sigma_0.7 {column} paper}}, {{{COMPRESSION} sigma_1.0 {column} paper}}, "
            f"{{{COMPRESSION} sigma_1.1 {column} paper}} and {{{COMPRESSION} sigma_1.3 {column} paper}} %)"
            for column, between in (("dpsgd", "in the four rows (the paper: "), ("discretized", "("))
        ),
        "({gradient_compression/table2_small small discretized} and {gradient_compression/table2_small small dpsgd} %)",
        *(
            "(" + ", ".join(f"{{{name} {row} median}} against {{{name} {row} fixed}}" for row in rows[:2])
            + f" and {{{name} {rows[2]} median}} against {{{name} {rows[2]} fixed}} %"
            for name, rows in (
                (f"{QUANTILE}/stackexchange_tags", ("z_0.01", "z_0.03", "z_0.1")),
                (f"{QUANTILE}/mnist_writers", ("z_0.1", "z_0.3", "z_1")),
            )
        ),
        "(" + ", ".join(f"{{{MEDIAN} z_{z} median}} against {{{MEDIAN} z_{z} fixed}}" for z in (0.5, 0.8, 1.1))
        + f" and {{{MEDIAN} z_2 median}} against {{{MEDIAN} z_2 fixed}} % at z = 0.5, 0.8, 1.1 and 2; five seeds)",
        "{recipes/mnist cnn accuracy} % with a CNN and {recipes/mnist scattering accuracy} % on scattering features at "
        "ε = {recipes/mnist cnn accuracy epsilon_rdp}",
        f"[has] {{{SCATTERING} linear_1 accuracy}} % at ε = 1 and {{{SCATTERING} linear accuracy}} % at 2.93 "
        f"(by RDP {{{SCATTERING} linear_1 accuracy epsilon_rdp}} and {{{SCATTERING} linear accuracy epsilon_rdp}})",
        "[gets] {recipes/cifar10 linear accuracy} %, or {recipes/cifar10 linear_pld accuracy} % with noise by PLD, and "
        "a CNN on them {recipes/cifar10 cnn accuracy} %",
        "[has] {recipes/frozen mnist epsilon_1} % on MNIST at ε = 1 and {recipes/frozen mnist epsilon_3} % at 3 "
        "(one seed; {recipes/frozen mnist_writers epsilon_1} and {recipes/frozen mnist_writers epsilon_3} % where a "
        "record is a writer)",
    ],
)  # fmt: skip
def test_figures_are_those_of_the_tables(text: str, sentence: str) -> None:
    assert _fill(sentence) in text


@pytest.mark.parametrize(
    "sentence",
    [
        f"training accuracy {{{TOOLS}/figure1 noise sgd mean 0}} and {{{TOOLS}/figure1 noise dpsgd mean 0}} %",
        f"DP-SGD recalls {{{TOOLS}/figure1_small dpsgd accuracy mean 0}} % |",
        f"| yes: {{{TOOLS}/figure2 centralized_10 plain mean 0}} and "
        f"{{{TOOLS}/figure2 centralized_10 private mean 0}} |",
        f"({{{TOOLS}/figure4 adaptive epsilon_20 paper}}, {{{TOOLS}/figure4 constant epsilon_20 paper}}) | not seen: "
        f"{{{TOOLS}/figure4 adaptive epsilon_20}} and {{{TOOLS}/figure4 constant epsilon_20}} at ε = 20",
        f"({{{TOOLS}/table1 batch_128 sigma paper}} with 128, {{{TOOLS}/table1 batch_512 sigma paper}} with 512, "
        f"{{{TOOLS}/table1 batch_1024 sigma paper}} with 1,024) | yes, one seed: {{{TOOLS}/table1 batch_128 sigma}}, "
        f"{{{TOOLS}/table1 batch_512 sigma}} and {{{TOOLS}/table1 batch_1024 sigma}}; at a true ε of 20: "
        f"{{{TOOLS}/table1 batch_512 epsilon_20}} with 512, {{{TOOLS}/table1 batch_1024 epsilon_20}} with 1,024, none",
        "MNIST {pyvacy/mnist epsilon_3 accuracy paper} at ε = 3 | nearly: {pyvacy/mnist epsilon_3 accuracy}, at ε",
        f"{{{SCATTERING} linear accuracy}} at ε = 2.93, {{{SCATTERING} linear_1 accuracy}} at ε = 1]",
        "{recipes/cifar10 linear accuracy} with a linear model and {recipes/cifar10 cnn accuracy} with a CNN at ε = 3]",
    ],
)  # fmt: skip
def test_figures_of_the_readme_are_those_of_the_tables(readme: str, sentence: str) -> None:
    assert _fill(sentence) in readme


def test_gaps_claims_and_epsilons(text: str) -> None:
    figure = pd.read_csv(RESULTS / "three_tools_figure1" / RUNS).set_index(["row", "column"])["nonprivate/accuracy_gap"]
    gaps = [f"{100 * figure['cifar10', column]:.1f}" for column in ("sgd", "dpsgd")]
    assert f"on CIFAR-10 ({gaps[0]} and {gaps[1]} points; one seed)" in text
    claims = pd.read_csv(RESULTS / "claims" / "claims.csv")
    claims = claims[~claims["variant"]]  # readings that we add
    own = claims[
        (claims["paper"] == "adaptive_quantile_clipping_2021") & claims["source"].str.match(r"Table 1|Fig\. 2")
    ]
    assert f"all {len(own)} of its printed ε [match]" in text and own["verdict"].str.startswith("matches").all()
    known = pd.read_csv(RESULTS / "claims" / "identities.csv")
    general = known[known["paper"] == "general_approach_2018"]
    held = general["verdict"].isin(["matches", "holds"])
    assert f"[{held.sum()} of {len(general)} hold]" in text
    assert f"it is {general.loc[~held, 'recomputed'].iloc[0]:.2f} times" in text
    sigma = pd.read_csv(RESULTS / "three_tools_figure4" / RUNS).query("column == 'sigma'").iloc[0]
    assert f"costs ε = {sigma['epsilon_pld']:.0f} ({sigma['epsilon_rdp']:.0f} by RDP) and not 20" in text


def test_claims_of_the_readme(readme: str, text: str) -> None:
    claims = pd.read_csv(RESULTS / "claims" / "claims.csv")
    printed = claims[~claims["variant"] & claims["claim"].notna()]
    matching = printed["verdict"].str.startswith("matches").sum()
    assert f"{matching} of {len(printed)} [match]" in readme
    page = (RESULTS / "claims" / "table.md").read_text(encoding="utf-8")
    costs = {
        batch: _cost(page, row) for batch, row in {128: "| 128 | 0.7225 |", 512: "| 512 |", 1024: "| 1024 |"}.items()
    }
    assert f"their ε = 20 is about {costs[128]}" in readme
    assert f"costs about {costs[128]} with batches of 128, {costs[512]} with 512 and {costs[1024]} with 1,024" in text


def test_the_attack_of_the_readme(readme: str) -> None:
    settings = {entry["setting"]: entry for entry in json.loads((RESULTS / "attack" / "attack.json").read_text())}
    open_setting = settings["NonPrivate, lr=0.1"]
    private = settings["DPSGD, lr=1, target_epsilon=8"]
    best, best_private = (
        max((attack["tpr"]["0.01"] for attack in setting["attacks"]), key=lambda rate: float(rate["value"]))
        for setting in (open_setting, private)
    )
    low, high = (f"{100 * best_private[limit]:.2f}" for limit in ("low", "high"))
    assert (
        f"recognizes {100 * best['value']:.2f} % of the members without privacy "
        f"(test accuracy {100 * open_setting['accuracy']:.1f} %) and {100 * best_private['value']:.2f} % "
        f"({low} to {high}) at ε = 7.3 ({100 * private['accuracy']:.1f} %), "
        f"where {100 * private['allowed']['tpr']['0.01']:.1f} % are allowed"
    ) in readme


def test_the_audit_of_the_readme(readme: str) -> None:
    page = (RESULTS / "audit" / "README.md").read_text(encoding="utf-8")
    section = page.split("## Broken mechanisms")[1].split("\n\nOf ")[0]
    _, _, *rows = [line.split(" | ") for line in section.splitlines() if line.startswith("|")]
    assert all(row[4] != "CONSISTENT" and row[5].strip() for row in rows)
    assert f"It finds each of [{len(rows)} deliberately broken mechanisms]" in readme


def test_the_gpus_of_the_readme(readme: str) -> None:
    ratios: dict[str, list[float]] = {}
    for name in ("nvidia-h100-80gb-hbm3", "nvidia-h200"):
        page = (RESULTS / "benchmark" / f"{name}.md").read_text(encoding="utf-8")
        titles, _, *rows = [line for line in page.split("## ")[0].splitlines() if line.startswith("|")]
        for row in rows:
            if "microbatches" not in row:  # a network that Opacus does not train
                for title, cell in zip(titles.split("|"), row.split("|"), strict=True):
                    if re.fullmatch(r" [\d.]+ ", cell):
                        ratios.setdefault(title.strip(), []).append(float(cell))
    limits = {title: f"{min(values):.1f} to {max(values):.1f} times" for title, values in ratios.items()}
    assert f"On GPUs the engine takes {limits['ours ÷ plain']} as long as a plain step" in readme
    assert f"is {limits['× Opacus']} as fast as Opacus" in readme
    assert f"the whole harness takes {limits['harness ÷ plain']} as long" in readme
    assert f"`executor=graph` {limits['harness, executor=graph ÷ plain']}" in readme


def test_the_prior_stands_beside_others_at_their_epsilon_and_distance() -> None:
    page = " ".join((ROOT / "docs" / "random_prior.md").read_text(encoding="utf-8").split())
    assert (
        f"at ε = 1 by RDP, which is {_cell('recipes/frozen_mnist', 'cifar10', 'epsilon_1', 'epsilon_pld')} by PLD"
        in page
    )
    ours = [float(_cell("recipes/random_prior", row, "epsilon_1")) for row in ("both", "both_wide")]
    assert [round(70.4 - accuracy) for accuracy in ours] == [7, 10] and "it is seven to ten points away" in page
    assert [round(72.3 - accuracy) for accuracy in ours] == [9, 12] and "nine to twelve." in page


def test_correlated_noise_is_said_to_gain_what_is_told_from_zero() -> None:
    page = (RESULTS / "correlated_noise" / "README.md").read_text(encoding="utf-8")
    told = re.findall(r"told from zero: (.*)\.\n", page)
    assert told == ["none", "none", "none", "ε = 30"]  # CIFAR-10, MNIST, writers, roles
    gaps = {}
    for table in ("mnist_writers", "shakespeare_roles"):
        section = page.split(f"[correlated_noise_{table}]")[1].split("![")[0]
        gaps[table] = re.search(r"\| \+?(-?[\d.]+) \[± ([\d.]+)\]", section).groups()
    text = " ".join((ROOT / "docs" / "correlated_noise.md").read_text(encoding="utf-8").split())
    lead, half = (f"{float(figure):.1f}" for figure in gaps["mnist_writers"])
    loss, half_of_loss = (f"{abs(float(figure)):.1f}" for figure in gaps["shakespeare_roles"])
    assert f"(by {lead} ± {half} with the first five seeds" in text
    fresh = (RESULTS / "correlated_noise_mnist_writers_fresh" / "table.md").read_text(encoding="utf-8")
    differences = re.findall(r"[+-]([\d.]+) \[.*?Holm ± ([\d.]+)\]", fresh)
    ahead, behind = (f"{float(gain):.1f} ± {float(half):.1f}" for gain, half in differences)
    assert f"by {ahead} points" in text and f"of banded noise by {behind}" in text
    assert f"loses {loss} ± {half_of_loss} points at ε = 30" in text
    assert f"+{lead} ± {half} points at ε = 1" in (RESULTS / "README.md").read_text(encoding="utf-8")
    ratios = [float(ratio) for ratio in re.findall(r"\d+ epochs?, [^|]*\|[^|]*\| × ([\d.]+)", page)]
    assert f"is {min(ratios):.2f} to {max(ratios):.2f} of that of independent noise" in text


def _cost(page: str, row: str) -> str:
    """Middle of the limits of ε that a row of the claims' last table states."""
    (line,) = (line for line in page.splitlines() if line.startswith(row))
    low, high = line.rstrip(" |").split(" | ")[-2:]
    return f"{(float(low) + float(high)) / 2:.0f}"


def test_every_results_folder_is_named() -> None:
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    for folder in RESULTS.iterdir():
        assert not folder.is_dir() or f"({folder.name}/" in page, folder


def test_verdicts_do_not_go_beyond_the_figures() -> None:
    """Where the order of two figures is told, the table has it."""
    for name in ("gradient_compression/table1", "gradient_compression/tutorial"):
        table = read_table(name)
        lines = summary(table, pd.read_csv(RESULTS / table.folder / RUNS)).set_index(["row", "column"])["mean"]
        assert all(lines[row.name, "discretized"] < lines[row.name, "dpsgd"] for row in table.rows)
    readings = read_table("gradient_compression/table1_readings")
    assert len([row for row in readings.rows if row.name != "none"]) == 6
    small = read_table("three_tools/figure4")
    lines = summary(small, pd.read_csv(RESULTS / small.folder / RUNS)).set_index(["row", "column"])["mean"]
    assert all(lines["adaptive", column.name] < lines["constant", column.name] for column in small.columns)


def test_the_page_on_discretized_gradients_says_what_its_runs_logged() -> None:
    page = " ".join((ROOT / "docs" / "discretized_gradients.md").read_text(encoding="utf-8").split())
    logged = pd.read_csv(RESULTS / "gradient_compression_lost_class" / "transform.csv")
    logged = logged[(logged["row"] == "mean") & logged["step"].between(1000, 1999)]
    mean = logged.groupby("name")["value"].mean()
    assert f"in steps 1,000 to 2,000, {100 * mean['inflated']:.0f} % of the records" in page
    assert (
        f"is {mean['small_norm_before']:.2f} on average before discretization, and {mean['small_norm_after']:.1f} after"
    ) in page
    assert f"another {100 * mean['empty']:.0f} % nothing is beyond τ" in page
    recalls = pd.read_csv(RESULTS / "gradient_compression_lost_class" / "recalls.csv").query("row == 'intervals'")
    nine = recalls[recalls["name"] == 9].set_index("step")["value"]
    least = recalls[recalls["name"] != 9].groupby("step")["value"].min()[[2339, 2924, 3509]].min()
    assert f"a recall of {nine[2339]:.2f} at steps 2,339 and 2,924 and of {nine[3509]:.2f} at step 3,509" in page
    assert f"every other digit has {least:.2f} or more; at step 4,679 it has {nine[4679]:.2f}" in page
