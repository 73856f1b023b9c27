"""The program beside the page on files of others reads them, as it stands there."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from dpbench.capabilities.users.sources import USER_SOURCES, user_source
from dpbench.errors import ConfigurationError

ROOT = Path(__file__).parents[2]
HOWTO = ROOT / "docs" / "howto"
IMAGES = np.random.default_rng(0).random((7, 784), dtype=np.float32)
ROWS = {"ann": [0, 2, 5], "bob": [1, 4, 6], "cat": [3], "eve": []}
"""Images of each user, one of whom has none."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Has the module of the page, and the same users in both formats."""
    shutil.copy(HOWTO / "federated_files.py", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for part, names in (("train", list(ROWS)), ("test", ["bob"])):
        (tmp_path / part).mkdir()
        for half in (0, 1):  # a user has parts in two files
            own = {name: ROWS[name][half::2] for name in names}
            data = {name: {"x": IMAGES[rows].tolist(), "y": rows} for name, rows in own.items()}
            content = {"users": names, "num_samples": list(map(len, own.values())), "user_data": data}
            (tmp_path / part / f"{half}.json").write_text(json.dumps(content))
        with h5py.File(tmp_path / f"{part}.h5", "w") as file:
            for name in names:
                file[f"examples/{name}/pixels"] = IMAGES[ROWS[name]].reshape(-1, 28, 28)
                file[f"examples/{name}/label"] = np.array(ROWS[name], np.int32)
    yield tmp_path
    sys.modules.pop("federated_files", None)
    for name in ("leaf", "hdf5"):
        USER_SOURCES.pop(name, None)


def test_the_page_reads_both_formats(folder: Path) -> None:
    importlib.import_module("federated_files")
    for name, options in (("leaf", {}), ("hdf5", {"train": "train.h5"})):
        data = user_source(name).read(folder, False, options)
        assert dict(zip(data.train.names, data.train.sizes, strict=True)) == {"ann": 3, "bob": 3, "cat": 1, "eve": 0}
        images, labels = data.train.batch(1, range(3))
        assert images.shape == (3, 1, 28, 28)
        assert sorted(labels.tolist()) == ROWS["bob"]
        np.testing.assert_allclose(images.flatten(1), IMAGES[labels], rtol=1e-6)
        assert data.test_users is not None
        assert data.test_users.names == ["bob"]
        assert data.model_options == {"input_shape": (1, 28, 28), "num_classes": 62}


def test_the_old_names_lead_to_the_page() -> None:
    for name in ("leaf_json", "tff_hdf5", "tff_sqlite"):
        with pytest.raises(ConfigurationError, match=r"docs/howto/federated_files\.md"):
            user_source(name)
