"""`python -m tools.audits`: all runs, a line of results/audit/runs.csv each (`make audits` then writes the page).

With `--only NAME` all other lines are kept, of whichever code.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pandas as pd
from tqdm import tqdm

from dpbench import strategies
from dpbench.code import code_hash
from dpbench.files import replacing
from tools.audits.mutants import BANDED_MUTANTS, MUTANTS
from tools.audits.page import FOLDER, read_runs
from tools.audits.runs import Setting, audited

EPSILONS = (1.0, 2.0, 4.0, 8.0, 10.0)
SETTINGS = (
    Setting("flat"),
    Setting("flat, discretized", options={"discretization_threshold": 1e-3}),
    Setting("flat, error correction", options={"correction_threshold": 1e-2}),
    Setting("flat, private metrics", options={"metrics": {"accuracy": 1.0, "loss": 3.0}}),
    Setting("per layer", partial(strategies.DPSGD, clipping="per_layer"), canaries=600),
    Setting("per parameter", partial(strategies.DPSGD, clipping="per_parameter"), canaries=600),
    Setting("by dimension", partial(strategies.VectorGroups, split="dimension", allocation="dimension")),
    Setting("adaptive quantile", partial(strategies.AdaptiveQuantileClipping, count_noise_std=4.0)),
    Setting("adaptive mean", partial(strategies.AdaptiveMeanClipping, norm_noise_multiplier=20.0), canaries=600),
    Setting("automatic", strategies.AutomaticClipping),
    Setting("microbatches of four", unit="microbatch"),
    Setting("lots of a fixed size", sampling="fixed_size"),
    Setting("truncated Poisson lots", sampling="truncated_poisson"),
    Setting("every record in every lot", sampling="full", lot=512, steps=20, canaries=500),
    Setting("users", unit="user", data="mnist_writers", lot=20, steps=60, canaries=500),
    Setting("correlated noise", sampling="cyclic_poisson", options={"noise": "banded", "bands": 4}),
)
SIZES = tuple(
    Setting(f"{count:,} canaries", data="mnist", lot=1000, steps=200, canaries=count) for count in (2000, 10_000)
)
BROKEN = {
    "counts without noise": Setting("", partial(strategies.AdaptiveQuantileClipping, count_noise_std=4.0)),
    "half of the noise for statistics": Setting("", partial(strategies.AdaptiveQuantileClipping, count_noise_std=4.0)),
    "users weighted by examples": Setting("", unit="user", data="mnist_writers", lot=20, steps=40, canaries=500),
    **dict.fromkeys(BANDED_MUTANTS, SETTINGS[-1]),
}

Row = dict[str, Any]


def jobs() -> Iterator[tuple[str, str, float, Callable[[], Row]]]:
    """(table, name, epsilon, what computes the line)."""
    for table, settings in (("strategies", SETTINGS), ("sizes", SIZES)):
        for number, setting in enumerate(settings):
            for epsilon in EPSILONS:
                yield table, setting.name, epsilon, partial(audited, setting, epsilon, seed=number)
    for name, mutant in MUTANTS.items():
        setting = BROKEN.get(name, Setting(""))
        yield "mutants", name, 4.0, lambda setting=setting, mutant=mutant: audited(setting, 4.0, broken=mutant())  # type: ignore[misc]


def main(only: str | None = None) -> None:
    """Run all, or the lines of one name."""
    path = FOLDER / "runs.csv"
    kept = pd.DataFrame() if only is None else read_runs(path)
    rows: list[Any] = []
    for table, name, epsilon, compute in tqdm(list(jobs()), disable=None):
        if only in (None, name):
            rows.append({"table": table, **compute(), "name": name, "code": code_hash()})
        else:
            is_line = (kept["table"] == table) & (kept["name"] == name) & (kept["asked"] == epsilon)
            rows += kept[is_line].to_dict("records")
    with replacing(path) as new:
        pd.DataFrame(rows).to_csv(new, index=False)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", metavar="NAME", help="such as 'lots of a fixed size'")
    main(**vars(arguments.parse_args()))
