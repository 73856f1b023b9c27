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


@pytest.mark.parametrize(
    "sentence",
    [
        "recalled in {three_tools/figure2 centralized_10 plain} % without, in {three_tools/figure2 "
        "centralized_10 private} % with DP-FedAvg",
        "({three_tools/figure4 adaptive sigma} against {three_tools/figure4 constant sigma} % at the paper's "
        "σ, {three_tools/figure4 adaptive epsilon_20} against {three_tools/figure4 constant epsilon_20} % at "
        "its ε)",
        "({three_tools/table1 batch_128 sigma} % with 128, {three_tools/table1 batch_512 sigma} % with 512, "
        "{three_tools/table1 batch_1024 sigma} % with 1,024; the paper: {three_tools/table1 batch_128 sigma "
        "paper}, {three_tools/table1 batch_512 sigma paper} and {three_tools/table1 batch_1024 sigma paper} "
        "%)",
        "({three_tools/table1 batch_512 epsilon_20} % with 512, {three_tools/table1 batch_1024 epsilon_20} % "
        "with 1,024)",
        "[recalls] {three_tools/figure1_small dpsgd accuracy} % (three seeds)",
        "[recalled] in {three_tools/figure1 noise sgd} % by SGD and in {three_tools/figure1 noise dpsgd} % by"
        " DP-SGD",
        "[reaches] {pyvacy/mnist epsilon_3 accuracy} % at the claimed ε = 3 (today's accountant: "
        "{pyvacy/mnist epsilon_3 accuracy epsilon_rdp}) and {pyvacy/mnist not_private accuracy} % without "
        "privacy; the paper: {pyvacy/mnist epsilon_3 accuracy paper} and {pyvacy/mnist not_private accuracy "
        "paper} %",
        "a CNN learns to read {pyvacy/gan epsilon_1 steps_1} % of real digits at ε = 1 (five seeds) and "
        "{pyvacy/gan epsilon_0.3 steps_1} % at ε = 0.3 ({pyvacy/gan epsilon_0.3 waits} % where the generator "
        "waits); with the paper's own networks {pyvacy/gan epsilon_1 mlp} % at ε = 1",
        "it [reads] {pyvacy/gan_augmented epsilon_10 steps_3600} % at ε = 10, and {pyvacy/gan epsilon_10 "
        "steps_1} % ",
        "[has] {recipes/random_prior both epsilon_1} % on CIFAR-10 at ε = 1 (three seeds) with the learning "
        "rate that a first grid gives on made-up images, {recipes/random_prior both_wide epsilon_1} % with "
        "that of a wider one, and {recipes/random_prior scattering epsilon_1} % without the latter",
        "{gradient_compression/tutorial sigma_0.7 dpsgd}, {gradient_compression/tutorial sigma_1.0 dpsgd}, "
        "{gradient_compression/tutorial sigma_1.1 dpsgd} and {gradient_compression/tutorial sigma_1.3 dpsgd} "
        "% in the four rows (the paper: {gradient_compression/tutorial sigma_0.7 dpsgd paper}, "
        "{gradient_compression/tutorial sigma_1.0 dpsgd paper}, {gradient_compression/tutorial sigma_1.1 "
        "dpsgd paper} and {gradient_compression/tutorial sigma_1.3 dpsgd paper} %)",
        "{gradient_compression/tutorial sigma_0.7 discretized}, {gradient_compression/tutorial sigma_1.0 "
        "discretized}, {gradient_compression/tutorial sigma_1.1 discretized} and "
        "{gradient_compression/tutorial sigma_1.3 discretized} % ({gradient_compression/tutorial sigma_0.7 "
        "discretized paper}, {gradient_compression/tutorial sigma_1.0 discretized paper}, "
        "{gradient_compression/tutorial sigma_1.1 discretized paper} and {gradient_compression/tutorial "
        "sigma_1.3 discretized paper} %)",
        "({gradient_compression/table2_small small discretized} and {gradient_compression/table2_small small "
        "dpsgd} %)",
        "({adaptive_quantile/stackexchange_tags z_0.01 median} against {adaptive_quantile/stackexchange_tags "
        "z_0.01 fixed}, {adaptive_quantile/stackexchange_tags z_0.03 median} against "
        "{adaptive_quantile/stackexchange_tags z_0.03 fixed} and {adaptive_quantile/stackexchange_tags z_0.1 "
        "median} against {adaptive_quantile/stackexchange_tags z_0.1 fixed} %",
        "({adaptive_quantile/mnist_writers z_0.1 median} against {adaptive_quantile/mnist_writers z_0.1 "
        "fixed}, {adaptive_quantile/mnist_writers z_0.3 median} against {adaptive_quantile/mnist_writers "
        "z_0.3 fixed} and {adaptive_quantile/mnist_writers z_1 median} against "
        "{adaptive_quantile/mnist_writers z_1 fixed} %",
        "({adaptive_quantile/mnist_median z_0.5 median} against {adaptive_quantile/mnist_median z_0.5 fixed},"
        " {adaptive_quantile/mnist_median z_0.8 median} against {adaptive_quantile/mnist_median z_0.8 fixed},"
        " {adaptive_quantile/mnist_median z_1.1 median} against {adaptive_quantile/mnist_median z_1.1 fixed} "
        "and {adaptive_quantile/mnist_median z_2 median} against {adaptive_quantile/mnist_median z_2 fixed} %"
        " at z = 0.5, 0.8, 1.1 and 2; five seeds)",
        "{recipes/mnist cnn accuracy} % with a CNN and {recipes/mnist scattering accuracy} % on scattering "
        "features at ε = {recipes/mnist cnn accuracy epsilon_rdp}",
        "[has] {recipes/mnist_scattering linear_1 accuracy} % at ε = 1 and {recipes/mnist_scattering linear "
        "accuracy} % at 2.93 (by RDP {recipes/mnist_scattering linear_1 accuracy epsilon_rdp} and "
        "{recipes/mnist_scattering linear accuracy epsilon_rdp})",
        "[gets] {recipes/cifar10 linear accuracy} %, or {recipes/cifar10 linear_pld accuracy} % with noise by"
        " PLD, and a CNN on them {recipes/cifar10 cnn accuracy} %",
        "[has] {recipes/frozen mnist epsilon_1} % on MNIST at ε = 1 and {recipes/frozen mnist epsilon_3} % at"
        " 3 (one seed; {recipes/frozen mnist_writers epsilon_1} and {recipes/frozen mnist_writers epsilon_3} "
        "% where a record is a writer)",
    ],
)  # fmt: skip
def test_figures_are_those_of_the_tables(text: str, sentence: str) -> None:
    assert _fill(sentence) in text


@pytest.mark.parametrize(
    "sentence",
    [
        "training accuracy {three_tools/figure1 noise sgd mean 0} and {three_tools/figure1 noise dpsgd mean "
        "0} %",
        "DP-SGD recalls {three_tools/figure1_small dpsgd accuracy mean 0} %)",
        "yes, {three_tools/figure2 centralized_10 plain mean 0} and {three_tools/figure2 centralized_10 "
        "private mean 0}.",
        "({three_tools/figure4 adaptive epsilon_20 paper}, {three_tools/figure4 constant epsilon_20 paper}): "
        "not seen, {three_tools/figure4 adaptive epsilon_20} and {three_tools/figure4 constant epsilon_20} "
        "at ε = 20",
        "MNIST ({pyvacy/mnist epsilon_3 accuracy paper} at ε = 3): nearly, {pyvacy/mnist epsilon_3 accuracy}, "
        "at ε",
        "{recipes/mnist_scattering linear accuracy} at ε = 2.93, {recipes/mnist_scattering linear_1 accuracy}"
        " at ε = 1]",
        "{recipes/cifar10 linear accuracy} with a linear model and {recipes/cifar10 cnn accuracy} with a CNN "
        "at ε = 3]",
    ],
)  # fmt: skip
def test_figures_of_the_readme_are_those_of_the_tables(readme: str, sentence: str) -> None:
    assert _fill(sentence) in readme


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


def _cost(page: str, row: str) -> str:
    """Middle of the limits of ε that a row of the claims' last table states."""
    (line,) = (line for line in page.splitlines() if line.startswith(row))
    low, high = line.rstrip(" |").split(" | ")[-2:]
    return f"{(float(low) + float(high)) / 2:.0f}"


def test_every_results_folder_is_named() -> None:
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    for folder in RESULTS.iterdir():
        assert not folder.is_dir() or f"({folder.name}/" in page, folder
