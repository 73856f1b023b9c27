"""The program beside the page on files of others converts them, as it stands there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dpbench.capabilities.users.sources import user_source
from dpbench.errors import ConfigurationError

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
IMAGES = np.random.default_rng(0).random((7, 784), dtype=np.float32)
ROWS = {"ann": [0, 2, 5], "bob": [1, 4, 6], "cat": [3]}
"""Images of each user."""


def test_leaf_becomes_a_table_of_users(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for part, names in (("train", list(ROWS)), ("test", ["bob"])):
        (tmp_path / part).mkdir()
        for half in (0, 1):  # a user has parts in two files
            own = {name: ROWS[name][half::2] for name in names}
            data = {name: {"x": IMAGES[rows].tolist(), "y": rows} for name, rows in own.items()}
            content = {"users": names, "num_samples": list(map(len, own.values())), "user_data": data}
            (tmp_path / part / f"{half}.json").write_text(json.dumps(content))
        words = [HOWTO / "leaf_to_parquet.py", tmp_path / part, tmp_path / f"{part}.parquet"]
        subprocess.run([sys.executable, *map(str, words)], check=True)
    options = {
        "path": "train.parquet",
        "test_path": "test.parquet",
        "features": {"x": [28, 28], "y": []},
        "images": "gray",
        "num_classes": 62,
    }
    data = user_source("user_table").read(tmp_path, False, options)
    assert dict(zip(data.train.names, data.train.sizes, strict=True)) == {"ann": 3, "bob": 3, "cat": 1}
    images, labels = data.train.batch(1, range(3))
    assert images.shape == (3, 1, 28, 28)
    assert sorted(labels.tolist()) == ROWS["bob"]
    np.testing.assert_allclose(images.flatten(1), IMAGES[labels], rtol=1e-6)
    assert len(data.test) == 3


def test_the_old_names_lead_to_the_page() -> None:
    for name in ("leaf_json", "tff_hdf5", "tff_sqlite"):
        with pytest.raises(ConfigurationError, match=r"docs/howto/federated_files\.md"):
            user_source(name)
