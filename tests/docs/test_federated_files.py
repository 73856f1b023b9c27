"""The page on files of others reads them: its code and its configuration, as they stand there."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from dpbench.capabilities.own_data import read_user_table
from dpbench.capabilities.users.sources import USER_SOURCES, UserData, user_source
from dpbench.errors import ConfigurationError
from tests.support.cli import dpbench_in_a_process

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "federated_files.md").read_text(encoding="utf-8")
IMAGES = np.random.default_rng(0).random((7, 784), dtype=np.float32)
OWNERS = ["ann", "bob", "ann", "cat", "bob", "ann", "bob"]


def block(kind: str) -> str:
    (code,) = re.findall(rf"```{re.escape(kind)}\n(.*?)```", PAGE, re.S)
    return str(code)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Has the module of the page, and the same users in both formats; one of them has no example."""
    (tmp_path / "federated_files.py").write_text(block("python"), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    rows = {name: [i for i, owner in enumerate(OWNERS) if owner == name] for name in ("ann", "bob", "cat", "eve")}
    for folder, names in (("train", ["ann", "bob", "cat", "eve"]), ("test", ["bob"])):
        (tmp_path / folder).mkdir()
        for half in (0, 1):  # a user has parts in two files
            parts: dict[str, Any] = {
                name: {"x": IMAGES[rows[name][half::2]].tolist(), "y": rows[name][half::2]} for name in names
            }
            content = {"users": names, "num_samples": [len(parts[name]["y"]) for name in names], "user_data": parts}
            (tmp_path / folder / f"{half}.json").write_text(json.dumps(content))
        with h5py.File(tmp_path / f"{folder}.h5", "w") as file:
            for name in names:
                file[f"examples/{name}/pixels"] = IMAGES[rows[name]].reshape(-1, 28, 28)
                file[f"examples/{name}/label"] = np.array(rows[name], np.int32)
    yield tmp_path
    sys.modules.pop("federated_files", None)
    for name in ("leaf", "hdf5"):
        USER_SOURCES.pop(name, None)


def same_users(data: UserData) -> None:
    assert data.train.names == ["ann", "bob", "cat", "eve"] and data.train.sizes.tolist() == [3, 3, 1, 0]
    for position, name in enumerate(data.train.names[:3]):
        images, labels = data.train.batch(position, range(int(data.train.sizes[position])))
        assert images.shape[1:] == (1, 28, 28)
        order = labels.argsort()
        owned = [i for i, owner in enumerate(OWNERS) if owner == name]
        assert labels[order].tolist() == owned
        np.testing.assert_allclose(images[order].flatten(1), IMAGES[owned], rtol=1e-6)
    assert data.test_users is not None and data.test_users.names == ["bob"]
    assert data.model_options == {"input_shape": (1, 28, 28), "num_classes": 62}


def test_the_page_reads_both_formats(folder: Path) -> None:
    importlib.import_module("federated_files")
    same_users(user_source("leaf").read(folder, False, {}))
    same_users(user_source("hdf5").read(folder, False, {"train": "train.h5"}))
    assert user_source("leaf").options == {"train": "train", "test": "test"}


def test_the_program_of_the_page_makes_a_table_of_sqlite(tmp_path: Path) -> None:
    program = tmp_path / "tff_to_parquet.py"
    program.write_text(block("python title=tff_to_parquet.py"), encoding="utf-8")
    example = runpy.run_path(str(program))["Example"]

    def message(position: int) -> bytes:
        features = example()
        features.features.feature.add(key="pixels").value.floats.value.extend(IMAGES[position])
        features.features.feature.add(key="label").value.ints.value.append(position)
        features.features.feature.add(key="title").value.bytes.value.append(b"a picture")
        return bytes(features.SerializeToString())

    with sqlite3.connect(tmp_path / "emnist.sqlite") as database:
        database.execute("CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)")
        rows = [("train", owner, message(position)) for position, owner in enumerate(OWNERS)]
        database.executemany("INSERT INTO examples VALUES (?, ?, ?)", [*rows, ("test", "dan", message(0))])
    database.close()
    words = [sys.executable, program, "emnist.sqlite", "train", "train.parquet"]
    subprocess.run(words, cwd=tmp_path, check=True)
    users = read_user_table(tmp_path / "train.parquet", features={"pixels": [1, 28, 28], "label": []})
    assert users.names == ["ann", "bob", "cat"]
    images, labels = users.batch(0, [0, 1, 2])
    assert labels.tolist() == [0, 2, 5]
    np.testing.assert_allclose(images.flatten(1), IMAGES[[0, 2, 5]], rtol=1e-6)


@pytest.mark.long
def test_the_configuration_of_the_page_trains(folder: Path) -> None:
    (folder / "mine" / "data").mkdir(parents=True)
    (folder / "mine" / "data" / "leaf.yaml").write_text(block("yaml"), encoding="utf-8")
    words = ["--config-dir=mine", "data=leaf", f"data.root={folder}", "records=users", "model=mlp", "model.hidden=4"]
    words += ["data.expected_batch_size=2", "trainer.max_steps=1", "strategy.noise_multiplier=1", "logger=none"]
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    out, _ = dpbench_in_a_process(folder, "train", *words, f"hydra.run.dir={folder / 'run'}", PYTHONPATH=path)
    assert "epsilon" in out


@pytest.mark.parametrize("name", ["leaf_json", "tff_hdf5", "tff_sqlite"])
def test_the_old_names_lead_to_the_page(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"docs/howto/federated_files\.md"):
        user_source(name)
