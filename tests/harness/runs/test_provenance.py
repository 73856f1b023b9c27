"""Where a figure comes from, and under which settings a run may be taken up again."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import dpbench
from dpbench.code import COMPUTING, READING, code_hash, foreign_code, room_of, versions
from dpbench.harness.runs.provenance import commit, config_hash, fingerprint, hardware

PACKAGE = Path(dpbench.__file__).parent
CONFIG = {
    "seed": 0,
    "data": {"_target_": "dpbench.data.ImageDataModule", "name": "digits", "root": "/a", "download": True},
    "model": {"hidden": [3]},
    "strategy": {"noise_multiplier": 1.0},
    "optimizer": {"lr": 0.1},
    "trainer": {"max_steps": 5, "precision": "32-true"},
    "run": {"name": "x"},
    "logger": {"wandb": False},
}


def changed(group: str, **values: object) -> dict[str, object]:
    return {**CONFIG, group: {**CONFIG[group], **values}}  # type: ignore[dict-item]


def test_config_hash_ignores_what_cannot_change_a_result() -> None:
    base = config_hash(CONFIG)
    assert base == config_hash(changed("data", root="/b", download=False)) == config_hash(changed("run", name="y"))
    assert (
        len(
            {
                base,
                *(
                    config_hash(c)
                    for c in (changed("optimizer", lr=0.2), changed("trainer", max_steps=6), {**CONFIG, "seed": 1})
                ),
            }
        )
        == 4
    )


def test_the_folder_of_peoples_own_files_is_part_of_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folds of equal size in two folders are other people; a data set of ours is the same wherever it lies."""

    def of(name: str, root: str | None) -> tuple[str, str]:
        data = {"_target_": "dpbench.data.UserDataModule", "name": name, "root": root}
        return fingerprint({**CONFIG, "data": data}), config_hash({**CONFIG, "data": data})

    for name in ("user_table", "tff_sqlite", "a_plug_ins"):
        assert not {*of(name, "/fold1")} & {*of(name, "/fold2")}
        monkeypatch.setenv("DPBENCH_DATA", "/fold1")
        assert of(name, None) == of(name, "/fold1")
    assert of("mnist_writers", "/a") == of("mnist_writers", "/b")


def test_the_fingerprint_differs_wherever_gradients_could() -> None:
    base = fingerprint(CONFIG)
    assert base == fingerprint(changed("data", root="/b")) == fingerprint(changed("trainer", max_steps=6))
    others = [changed("optimizer", lr=0.2), changed("strategy", noise_multiplier=2.0), changed("model", hidden=[4])]
    keys = {
        base,
        *(fingerprint(c) for c in others),
        fingerprint({**CONFIG, "seed": 1}),
        fingerprint(changed("trainer", precision="64")),
        fingerprint({**CONFIG, "schedule": {"T_max": 5}}),
        fingerprint({**CONFIG, "a_group_of_the_future": {"x": 1}}),
    }
    assert len(keys) == 8


def test_lengths_differ_where_noise_is_solved_for_them() -> None:
    solved = {"noise_multiplier": None, "target_epsilon": 3.0}
    short, long = ({**changed("trainer", max_steps=n), "strategy": solved} for n in (5, 6))
    assert fingerprint(short) != fingerprint(long)
    fixed = {"noise_multiplier": 1.0, "target_epsilon": 3.0}
    short, long = ({**changed("trainer", max_steps=n), "strategy": fixed} for n in (5, 6))
    assert fingerprint(short) == fingerprint(long)


def test_the_fingerprint_does_not_cover_our_own_source(monkeypatch: pytest.MonkeyPatch) -> None:
    base = fingerprint(CONFIG)
    monkeypatch.setattr("dpbench.code.code_hash", lambda: "other")
    assert fingerprint(CONFIG) == base


def room(path: Path) -> str:
    return room_of(path.relative_to(PACKAGE).as_posix())


SOURCES = sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".cpp"))


def test_every_room_computes_or_reads() -> None:
    assert {room(path) for path in SOURCES} == {*COMPUTING, *READING} and not set(COMPUTING) & set(READING)


def test_the_code_hash_changes_with_what_computes_and_with_nothing_else(tmp_path: Path) -> None:
    """An edit of a plot's color leaves the noise of every seeded run as it was; one of a layer rule does not."""
    copy = shutil.copytree(PACKAGE, tmp_path / "dpbench")
    base = code_hash.__wrapped__(copy)
    assert base == code_hash()
    for path in {room(path): path for path in SOURCES}.values():
        file = copy / path.relative_to(PACKAGE)
        before = file.read_bytes()
        file.write_bytes(before + b"\n")
        assert (code_hash.__wrapped__(copy) != base) == (room(path) in COMPUTING), path
        file.write_bytes(before)


def test_what_computes_names_nothing_that_reads() -> None:
    """Neither by an import, lazy or not, nor as a string: else an edit would change results and not the hash."""
    names = [name.removesuffix(".py").replace("/", r"\.") for name in READING]
    readers = re.compile(rf"\bdpbench\.({'|'.join(names)})\b")
    for path in SOURCES:
        if room(path) in COMPUTING and path.name != "command.py":  # which starts what the others compute
            assert not readers.search(path.read_text(encoding="utf-8")), path


def test_a_reader_that_takes_part_in_a_run_is_hashed_with_it() -> None:
    """A callback that draws on the way could disturb the training."""
    drawing = {"callbacks": {"samples": {"_target_": "dpbench.harness.reports.plots.Picture"}}}
    assert set(foreign_code(drawing)) == {"dpbench.harness.reports.plots"}
    assert foreign_code({"model": {"_target_": "dpbench.models.MLP"}, "strategy": {"_target_": "dpbench.DPSGD"}}) == {}


def test_provenance() -> None:
    assert len(code_hash()) == 16
    assert versions()["torch"]
    assert hardware()["threads"] >= 1
    found = commit()
    assert found is None or len(found.partition("+")[0]) == 40
