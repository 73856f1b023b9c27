"""`python -m tools.attack_runs`: the runs behind results/attack, below `attacks/` (two hours of CPU; goes on).

Of each setting the runs that are attacked, and one run with canaries, which is audited (results/attack/audits.json).
Learning rates are those of best mean accuracy on 1,000 held-out images, by two seeds that attack nothing
(results/attack/tuning.csv). In the end all are attacked (results/attack/attack.json, whose figures the page has).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from dpbench.files import write_json
from dpbench.harness.reports.figures import new_figure, write_figure

RESULTS = Path(__file__).parents[1] / "results" / "attack"
AUDITS = RESULTS / "audits.json"
RUNS = Path("attacks")
EPSILONS = (1, 2, 4, 8)
_TITLES = {"dpsgd": "DP-SGD", "automatic": "automatic clipping", "discretized": "discretized gradients"}
_RATES = {
    "none": 0.1,
    "dpsgd-1": 0.25,
    "dpsgd-2": 0.5,
    "dpsgd-4": 0.5,
    "dpsgd-8": 1,
    "automatic-1": 0.25,
    "automatic-2": 0.5,
    "automatic-4": 1,
    "automatic-8": 1,
    "discretized-1": 1,
    "discretized-2": 1,
    "discretized-4": 0.5,
    "discretized-8": 0.25,
    "adaptive_quantile-8": 0.1,
    "adaptive_mean-8": 0.25,
    "vector_groups-8": 2,
}
"""Strategy and target ε → learning rate."""
_DATA = (
    "data=mnist",
    "data.train_size=2000",
    "data.expected_batch_size=256",
    "data.eval_batch_size=2000",
    "trainer.max_steps=200",
)
_CIFAR10 = (
    "experiment=recipes/cifar10",
    "model=mlp",
    "model.hidden=[]",
    "optimizer.lr=4",
    "data.train_size=4000",
    "data.test_size=1000",
    "data.expected_batch_size=800",
    "trainer.max_steps=100",
    "strategy=none,dpsgd",
)


def main() -> None:
    """Train and audit what is not there yet, and attack it."""
    audits: dict[str, Any] = json.loads(AUDITS.read_text(encoding="utf-8")) if AUDITS.exists() else {}
    for name, rate in _RATES.items():
        strategy, _, epsilon = name.partition("-")
        words = [*_DATA, f"strategy={strategy}", f"optimizer.lr={rate}"]
        if epsilon:
            words.append(f"strategy.target_epsilon={epsilon}")
        runs = 64 if strategy in ("none", *_TITLES) else 16
        _dpbench("attack", "--train", str(runs), *words, "--out", str(RUNS / name))
        if epsilon and name not in audits:
            audits[name] = _audit(RUNS / "audits" / name, words)
            write_json(AUDITS, audits)
    _dpbench("attack", *(str(RUNS / name) for name in _RATES), "--out", str(RESULTS))
    cifar10 = str(RUNS / "cifar10")
    _dpbench("attack", "--train", "16", *_CIFAR10, "--out", cifar10)
    _dpbench("attack", cifar10, "--out", str(RESULTS / "cifar10"))
    draw(audits)


def _audit(folder: Path, words: list[str]) -> dict[str, Any]:
    """One run with canaries, on all candidates, and what its audit says."""
    if not (folder / "result.json").exists():
        _dpbench("train", "logger=none", "audit=gradient_canaries", *words, f"hydra.run.dir={folder}")
    facts = json.loads(_dpbench("audit", str(folder), "--json"))
    kept = ("verdict", "audited", "claimed", "sound", "sound_by", "delta", "canaries", "confidence")
    return {key: facts[key] for key in kept}


def _dpbench(*words: str) -> str:
    command = [sys.executable, "-m", "dpbench", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def draw(audits: dict[str, Any]) -> Path:
    """Draw attacked, audited and claimed ε by budget, a panel for each strategy.

    Args:
        audits: By setting ("dpsgd-1"): what an audit says, of a run with canaries.
    """
    settings: list[dict[str, Any]] = json.loads((RESULTS / "attack.json").read_text(encoding="utf-8"))
    # Settings are named by the folders of their runs, attacks/dpsgd-1/0-mnist-...
    attacked = {Path(setting["runs"][0]).parent.name: setting["audited"] for setting in settings}
    figure = new_figure(9, 3.4)
    panels = figure.subplots(1, len(_TITLES), sharex=True, sharey=True)
    for axes, (strategy, title) in zip(panels, _TITLES.items(), strict=True):
        names = [f"{strategy}-{epsilon}" for epsilon in EPSILONS]
        places = [str(epsilon) for epsilon in EPSILONS]
        claimed = [audits[name]["sound"] for name in names]
        axes.plot(places, claimed, "_", color="#c04030", markersize=26, label="claimed: upper bound, PLD")
        audited = [audits[name]["audited"] for name in names]
        axes.plot(places, audited, "^", color="#3060a8", label="audited: canaries, 95 %")
        of_attack = [attacked[name] for name in names]
        axes.plot(places, of_attack, "o", color="#508850", label="attacked: membership of real images, 95 %")
        axes.set(title=title, xlabel="target ε (RDP)")
        axes.margins(x=0.15)
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("ε")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return write_figure(RESULTS / "epsilon.png", figure)


if __name__ == "__main__":
    main()
