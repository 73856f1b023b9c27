"""Where a figure comes from, and under which settings a run may be taken up again."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import dpbench
from dpbench.code import COMPUTING, READING, code_hash, foreign_code, room_of
from dpbench.harness.runs.provenance import config_hash, fingerprint

PACKAGE = Path(dpbench.__file__).parent
SOURCES = sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".cpp"))
CONFIG = {
    "seed": 0,
    "data": {"_target_": "dpbench.data.ImageDataModule", "name": "digits", "root": "/a", "download": True},
    "strategy": {"noise_multiplier": 1.0},
    "trainer": {"max_steps": 5, "precision": "32-true"},
    "run": {"name": "x"},
}


def changed(group: str, **values: object) -> dict[str, object]:
    return {**CONFIG, group: {**CONFIG[group], **values}}  # type: ignore[dict-item]


OTHER = [
    changed("strategy", noise_multiplier=2.0),
    changed("trainer", precision="64"),
    {**CONFIG, "seed": 1},
    {**CONFIG, "a_group_of_the_future": {"x": 1}},
]


@pytest.mark.parametrize("hash_of", [config_hash, fingerprint])
def test_a_hash_differs_wherever_gradients_could(hash_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    base = hash_of(CONFIG)
    assert base == hash_of(changed("data", root="/b", download=False)) == hash_of(changed("run", name="y"))
    assert (base == hash_of(changed("trainer", max_steps=6))) == (hash_of is fingerprint)
    assert len({base, *map(hash_of, OTHER)}) == 5
    monkeypatch.setattr("dpbench.code.code_hash", lambda: "other")
    assert hash_of(CONFIG) == base  # it does not cover our own source


def test_a_reader_that_takes_part_in_a_run_is_hashed_with_it() -> None:
    """A callback that draws on the way could disturb the training."""
    drawing = {"callbacks": {"samples": {"_target_": "dpbench.harness.reports.plots.Picture"}}}
    assert set(foreign_code(drawing)) == {"dpbench.harness.reports.plots"}


def test_the_folder_of_peoples_own_files_is_part_of_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folds of equal size in two folders are other people; a data set of ours is the same wherever it lies."""

    def of(name: str, root: str | None) -> list[str]:
        data = {"_target_": "dpbench.data.UserDataModule", "name": name, "root": root}
        return [hash_of({**CONFIG, "data": data}) for hash_of in (fingerprint, config_hash)]

    for name in ("user_table", "a_plug_ins"):
        assert not {*of(name, "/fold1")} & {*of(name, "/fold2")}
    monkeypatch.setenv("DPBENCH_DATA", "/fold1")
    assert of("user_table", None) == of("user_table", "/fold1")
    assert of("mnist_writers", "/a") == of("mnist_writers", "/b")


@pytest.mark.parametrize("noise_multiplier", [None, 1.0])
def test_lengths_differ_where_noise_is_solved_for_them(noise_multiplier: float | None) -> None:
    strategy = {"noise_multiplier": noise_multiplier, "target_epsilon": 3.0}
    short, long = (fingerprint({**changed("trainer", max_steps=steps), "strategy": strategy}) for steps in (5, 6))
    assert (short != long) == (noise_multiplier is None)


def room(path: Path) -> str:
    return room_of(path.relative_to(PACKAGE).as_posix())


def test_the_code_hash_changes_with_what_computes_and_with_nothing_else(tmp_path: Path) -> None:
    """An edit of a plot's color leaves the noise of every seeded run as it was; one of a layer rule does not."""
    rooms = {room(path): path for path in SOURCES}
    assert rooms.keys() == {*COMPUTING, *READING} and not set(COMPUTING) & set(READING)
    copy = shutil.copytree(PACKAGE, tmp_path / "dpbench")
    base = code_hash.__wrapped__(copy)
    assert base == code_hash()
    for name, path in rooms.items():
        file = copy / path.relative_to(PACKAGE)
        before = file.read_bytes()
        file.write_bytes(before + b"\n")
        assert (code_hash.__wrapped__(copy) != base) == (name in COMPUTING), path
        file.write_bytes(before)


def test_what_computes_names_nothing_that_reads() -> None:
    """Neither by an import, lazy or not, nor as a string: else an edit would change results and not the hash."""
    names = [name.removesuffix(".py").replace("/", r"\.") for name in READING]
    readers = re.compile(rf"\bdpbench\.({'|'.join(names)})\b")
    for path in SOURCES:
        if room(path) in COMPUTING and path.name != "command.py":  # which starts what the others compute
            assert not readers.search(path.read_text(encoding="utf-8")), path
