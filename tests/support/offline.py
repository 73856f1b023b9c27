"""What wandb wrote down of an offline run: its .wandb file, read as `wandb sync` reads it."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from wandb.proto.wandb_internal_pb2 import Record

from dpbench.harness.run.build import plain
from dpbench.harness.run.search_path import conf_dir

SMALL = [
    *("model=mlp", "model.hidden=[4]", "data.image_size=4", "data.expected_batch_size=300", "data.val_size=200"),
    *("strategy.delta=1e-4", "trainer.log_every_n_steps=2", "hydra/job_logging=none", "hydra/hydra_logging=none"),
]
_BLOCK, _HEADER = 32768, 7  # of LevelDB's log format
_PATIENCE = 300  # tenths of a second
_START = 7  # of the file: its own mark, before the first record of the first block


@dataclass
class Offline:
    """A run in an offline file."""

    run: Any = None
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, list[str]] = field(default_factory=dict)

    def at(self, name: str) -> list[dict[str, Any]]:
        """Rows with a metric."""
        return [row for row in self.rows if name in row]


def read_offline(folder: Path) -> list[Offline]:
    """Each session of a run, in order of time."""
    sessions = sorted(path for path in folder.glob("wandb/offline-run-*") if path.is_dir())
    return [_read(_whole(path)) for path in sessions]


def _whole(session: Path) -> list[Record]:
    """All records of a session; wandb's service may still be writing the last when the run has ended."""
    for _ in range(_PATIENCE):
        for path in session.glob("*.wandb"):
            records = list(_records(path.read_bytes()))
            if any(record.WhichOneof("record_type") == "exit" for record in records):
                return records
        time.sleep(0.1)
    raise AssertionError(f"{session} has no end")


def _records(data: bytes) -> Iterator[Record]:
    place, parts = _START, b""
    while place + _HEADER <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + _HEADER])
        if place + _HEADER + size > len(data):
            return
        parts += data[place + _HEADER : place + _HEADER + size]
        place += _HEADER + size
        if kind in (1, 4):  # the whole of a record, or its last part
            yield Record.FromString(parts)
            parts = b""


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def _read(records: Iterable[Record]) -> Offline:
    found = Offline()
    for record in records:
        kind = record.WhichOneof("record_type")
        if kind == "run" and found.run is None:
            found.run = record.run
            found.config = _items(record.run.config.update)
        elif kind == "history":
            found.rows.append(_items(record.history.item))
        elif kind == "summary":
            found.summary |= _items(record.summary.update)
        elif kind == "metric":
            name = record.metric.name or record.metric.glob_name
            found.axes[name] = record.metric.step_metric
        elif kind == "artifact":
            found.artifacts[record.artifact.type] = [entry.path for entry in record.artifact.manifest.contents]
    return found


def config_of(*words: str) -> dict[str, Any]:
    """The resolved configuration of a run."""
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = compose("config", [word for word in words if "hydra/" not in word], return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    return plain(OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"]))


def only(folder: str) -> Offline:
    """The one session of a run."""
    (found,) = read_offline(Path(folder))
    return found
