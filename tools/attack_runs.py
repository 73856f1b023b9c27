"""`python -m tools.attack_runs`: the runs behind results/attack, below `attacks/` (hours of CPU; goes on).

For each setting: the learning rate of best accuracy on held-out images, over two seeds that attack nothing
(results/attack/tuning.csv); the runs that are attacked, at that rate; and one run with canaries, which is audited
(results/attack/audits.json). In the end all are attacked (results/attack/attack.json, whose figures the page has).
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from dpbench.files import replacing, write_json
from dpbench.reports.run_table import RunTable

RESULTS = Path(__file__).parents[1] / "results" / "attack"
TUNING = RESULTS / "tuning.csv"
AUDITS = RESULTS / "audits.json"
RUNS = Path("attacks")
EPSILONS = (1, 2, 4, 8)
_DATA = ("data=mnist", "data.expected_batch_size=256", "data.eval_batch_size=2000", "trainer.max_steps=200")
_CANDIDATES = "data.train_size=2000"
_HELD_OUT = ("data.train_size=3000", "data.val_size=1000")  # so that as many are left
_SEEDS = (1000, 1001)
_RATES = (0.1, 0.25, 0.5, 1, 2)
_RATES_WITHOUT_PRIVACY = (0.05, 0.1, 0.15, 0.25)


@dataclass(frozen=True)
class Setting:
    """One strategy at one budget.

    Attributes:
        strategy: Its name on the command line.
        epsilon: Target; None without privacy.
        runs: That are attacked.
        rates: Learning rates that are tried.
    """

    strategy: str
    epsilon: int | None
    runs: int
    rates: tuple[float, ...] = _RATES

    @property
    def name(self) -> str:
        """Of its folders and rows."""
        return self.strategy if self.epsilon is None else f"{self.strategy}-{self.epsilon}"

    @property
    def words(self) -> list[str]:
        """Its overrides."""
        if self.epsilon is None:
            return [f"strategy={self.strategy}"]
        return [f"strategy={self.strategy}", f"strategy.target_epsilon={self.epsilon}"]


SETTINGS = (
    Setting("none", None, 64, _RATES_WITHOUT_PRIVACY),
    *(Setting("dpsgd", epsilon, 64) for epsilon in EPSILONS),
    *(Setting("automatic", epsilon, 64) for epsilon in EPSILONS),
    *(Setting("discretized", epsilon, 64) for epsilon in EPSILONS),
    Setting("adaptive_quantile", 8, 16),
    Setting("adaptive_mean", 8, 16),
    Setting("vector_groups", 8, 16),
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
_RUNS_ON_CIFAR10 = 16


def main() -> None:
    """Tune, train and audit what is not there yet, and attack it."""
    for setting in SETTINGS:
        rate = _best_rate(setting)
        _dpbench("attack", "--train", str(setting.runs), *_training(setting, rate), "--out", f"{RUNS / setting.name}")
        if setting.epsilon is not None:
            _audit(setting, rate)
    _dpbench("attack", *(str(RUNS / setting.name) for setting in SETTINGS), "--out", str(RESULTS))
    cifar10 = RUNS / "cifar10"
    _dpbench("attack", "--train", str(_RUNS_ON_CIFAR10), *_CIFAR10, "--out", str(cifar10))
    _dpbench("attack", str(cifar10), "--out", str(RESULTS / "cifar10"))


def _training(setting: Setting, rate: float) -> list[str]:
    return [*_DATA, _CANDIDATES, *setting.words, f"optimizer.lr={rate:g}"]


def _best_rate(setting: Setting) -> float:
    """The learning rate of best mean accuracy on held-out images; they are no candidates of attacks."""
    tried = pd.read_csv(TUNING) if TUNING.exists() else pd.DataFrame({"setting": []})
    if setting.name not in set(tried["setting"]):
        tried = pd.concat([tried, _tune(setting)], ignore_index=True)
        with replacing(TUNING) as part:
            tried.to_csv(part, index=False, lineterminator="\n")
    means = tried[tried["setting"] == setting.name].groupby("lr")["val/accuracy"].mean()
    return float(means.index[int(means.argmax())])


def _tune(setting: Setting) -> pd.DataFrame:
    """Accuracy on held-out images by learning rate and seed."""
    folder = RUNS / "tuning" / setting.name
    if not folder.exists():
        rates = ",".join(f"{rate:g}" for rate in setting.rates)
        seeds = ",".join(map(str, _SEEDS))
        words = [*_DATA, *_HELD_OUT, *setting.words, f"seed={seeds}", f"optimizer.lr={rates}"]
        _dpbench("train", "-m", "data.membership=half", "logger=none", *words, f"hydra.sweep.dir={folder}")
    rows = []
    for row in RunTable.read([folder]).rows:
        rows.append(
            {
                "setting": setting.name,
                "lr": row.settings["optimizer.lr"],
                "seed": row.settings["seed"],
                "val/accuracy": row.metrics["val/accuracy"],
            }
        )
    return pd.DataFrame(rows).sort_values(["lr", "seed"])


def _audit(setting: Setting, rate: float) -> None:
    """One run with canaries, on all candidates, and what its audit says."""
    audits: dict[str, Any] = json.loads(AUDITS.read_text(encoding="utf-8")) if AUDITS.exists() else {}
    if setting.name in audits:
        return
    folder = RUNS / "audits" / setting.name
    if not (folder / "result.json").exists():
        words = ["logger=none", "audit=gradient_canaries", *_training(setting, rate), f"hydra.run.dir={folder}"]
        _dpbench("train", *words)
    command = [sys.executable, "-m", "dpbench", "audit", str(folder), "--json"]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    facts = json.loads(answer.stdout)
    kept = ("verdict", "audited", "claimed", "sound", "sound_by", "delta", "canaries", "confidence")
    audits[setting.name] = {key: facts[key] for key in kept}
    write_json(AUDITS, audits)


def _dpbench(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "dpbench", *words], check=True)


if __name__ == "__main__":
    main()
