"""The predicted gain of banded noise beside the measured one: page and pictures."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from dpbench.privacy.accounting.calibration import TrainingSetting, solved
from tools.correlated_gain import write_page

WORDS = "data.expected_batch_size=100 strategy.target_epsilon=8 strategy.bands=5 strategy.target_epsilon=8"


@pytest.mark.long
@pytest.mark.parametrize("sampling", ["cyclic_poisson", "min_separation"])
def test_the_page_pairs_the_seeds_of_a_table(sampling: str, tmp_path: Path) -> None:
    """A seed that has one of both only is left out; a row without pairs, too."""
    table = tmp_path / "correlated_noise_mnist"
    table.mkdir()
    lines = ["row,column,seed,metric,value,delta,population,steps,words"]
    banded = f"1e-3,1000,20,{WORDS} data.sampling={sampling}"
    for seed, of_independent, of_banded in ((1, 0.90, 0.92), (2, 0.91, 0.95)):
        lines.append(f"epoch_1_epsilon_8,independent,{seed},test/accuracy,{of_independent},1e-3,1000,20,{WORDS}")
        lines.append(f"epoch_1_epsilon_8,banded,{seed},test/accuracy,{of_banded},{banded}")
    lines.append(f"epoch_1_epsilon_8,banded,3,test/accuracy,0.5,{banded}")
    lines.append(f"epoch_1_epsilon_1,banded,3,test/accuracy,0.5,{banded}")
    (table / "runs.csv").write_text("\n".join(lines), encoding="utf-8")
    write_page(tmp_path)
    folder = tmp_path / "correlated_noise"
    (row,) = [line for line in (folder / "README.md").read_text(encoding="utf-8").splitlines() if "ε = " in line]
    assert row.startswith("| 1 epoch, ε = 8 |")
    assert row.endswith("| 90.50 ± 0.71 | 93.50 ± 2.12 | +3.00 [± 12.71] | 2 |")
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert "Mean of the differences: +3.00 points." in page and "told from zero: none." in page
    assert (folder / "mnist.png").stat().st_size > 1000
    predicted = pd.read_csv(folder / "predicted.csv").set_index("bands")
    noises = predicted["noise_multiplier"]
    if sampling == "min_separation":  # one cost for all bands: two participations of everybody
        expected = solved(TrainingSetting(sample_rate=1.0, steps=2, epsilon=8, delta=1e-3)).noise_multiplier
        assert noises.to_numpy() == pytest.approx(expected, rel=1e-4)
        assert (predicted["ratio"].diff().dropna() < 0).all()
    else:
        assert noises.loc[4] > 1.2 * noises.loc[1]
