"""Files that hold examples by user: each format written here and read back, and clear errors for what is damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from dpbench.capabilities.own_data import read_frame, read_user_table
from dpbench.capabilities.own_data.texts import labeled_words
from dpbench.capabilities.users.sources import UserData, user_source
from dpbench.data import UserDataModule, UserDataset
from dpbench.data.texts import Sequences
from dpbench.errors import ConfigurationError, DataError

PIXELS = np.arange(7 * 4, dtype=np.float32).reshape(7, 2, 2) / 28
OWNERS = ["ann", "bob", "ann", "cat", "bob", "ann", "bob"]
ROWS = list(enumerate(zip(OWNERS, PIXELS, strict=True)))


PLAIN = {"pixels": [1, 2, 2], "label": []}


def same_users(users: UserDataset) -> None:
    for name in ("ann", "bob", "cat"):
        pixels, labels = users.batch(users.names.index(name), range(OWNERS.count(name)))
        own = [i for i, owner in enumerate(OWNERS) if owner == name]
        assert labels.tolist() == own and labels.dtype == torch.int64
        np.testing.assert_allclose(pixels.reshape(-1, 2, 2), PIXELS[own], rtol=1e-6)


def table(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame(columns)


def test_texts() -> None:
    spoken = table(user="ham", snippets=["To be", "or not", "to be"])
    with pytest.raises(DataError, match="column 'snippets' is not numeric"):
        read_frame(spoken)
    characters = read_frame(spoken, text="characters", sequence_length=9)
    assert isinstance(characters.examples, Sequences)
    assert characters.batch(0, [0])[0].tolist() == [[88, *range_of("To be"), 89, 0, 0]]
    known = read_frame(spoken, text="words", vocabulary=["be", "to"], sequence_length=3)
    assert known.batch(0, [0])[1].tolist() == [[2, 1, 10_003]]
    with pytest.raises(ConfigurationError, match="text=words needs a vocabulary"):
        read_frame(spoken, text="words")


def range_of(text: str) -> list[int]:
    from dpbench.data.texts import CHARACTERS

    return [CHARACTERS.index(sign) + 1 for sign in text]


def frame() -> pd.DataFrame:
    return pd.DataFrame({"writer": OWNERS, "pixels": [row.ravel() for row in PIXELS], "label": range(7)})


def test_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame().to_parquet(tmp_path / "t.parquet")
    same_users(read_user_table(tmp_path / "t.parquet", user="writer"))
    nested = frame().assign(pixels=[row.tolist() for row in PIXELS])
    nested.to_parquet(tmp_path / "n.parquet")
    users = read_user_table(tmp_path / "n.parquet", user="writer", images="gray")
    assert users.batch(0, [0])[0].shape == (1, 1, 2, 2)
    same_users(users)
    flat = pd.DataFrame({"id": ["007", "7", "007"], "a": [1.5, 2, 3], "b": [4, 5, 6]})
    flat.to_csv(tmp_path / "t.csv", index=False)
    users = read_user_table(tmp_path / "t.csv", user="id")
    assert users.names == ["007", "7"] and users.sizes.tolist() == [2, 1]
    assert [part.tolist() for part in users.batch(0, [0, 1])] == [[1.5, 3.0], [4, 6]]
    assert read_user_table(tmp_path / "t.csv", "id", features=["b"]).batch(1, [0])[0].tolist() == [5]
    together = read_user_table(tmp_path / "t.csv", "id", features=[["b", "a"], "b"]).batch(0, [0, 1])
    assert together[0].dtype == torch.float32 and together[0].tolist() == [[4, 1.5], [6, 3]]
    assert together[1].dtype == torch.int64 and together[1].tolist() == [4, 6]
    with pytest.raises(ConfigurationError, match="of one column or more in a list"):
        read_user_table(tmp_path / "t.csv", "id", features=[[], "b"])
    monkeypatch.setattr(pd, "read_parquet", without_pyarrow)
    with pytest.raises(ConfigurationError, match=r'Parquet needs pyarrow: pip install "dpbench-lightning\[parquet\]"'):
        read_user_table(tmp_path / "t.parquet", user="writer")


def without_pyarrow(*_: Any, **__: Any) -> Any:
    raise ImportError("Unable to find a usable engine; tried using: 'pyarrow', 'fastparquet'.")


def test_images_of_whole_numbers() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 5, 3))
    flat = table(user="ann", image=[own.ravel().tolist() for own in pixels], label=[0, 1])
    shapes = {"image": [4, 5, 3], "label": []}
    last = read_frame(flat, features=shapes, images="channels_last").batch(0, [0, 1])[0]
    assert last.dtype == torch.float32 and last.shape == (2, 3, 4, 5)
    np.testing.assert_allclose(last.permute(0, 2, 3, 1) * 255, pixels, rtol=1e-5)
    first = read_frame(flat, features={"image": [3, 4, 5], "label": []}, images="channels_first")
    np.testing.assert_allclose(first.batch(0, [1])[0] * 255, pixels[1:].reshape(1, 3, 4, 5), rtol=1e-5)


def test_json_lines(tmp_path: Path) -> None:
    lines = [json.dumps({"writer": name, "pixels": row.tolist(), "label": i}) for i, (name, row) in ROWS]
    (tmp_path / "t.jsonl").write_text("\n".join([*lines, ""]))
    same_users(read_user_table(tmp_path / "t.jsonl", user="writer"))
    data = load("table", tmp_path, path="t.jsonl", features=["pixels", "label"], images="gray", held_out=0.3)
    assert data.model_options["num_classes"] == 7 and set(data.train.names) < {f"({line!r},)" for line in lines}
    (tmp_path / "t.jsonl").write_text(lines[0] + "\n{cut")
    with pytest.raises(DataError, match=r"t\.jsonl cannot be read as a table"):
        read_user_table(tmp_path / "t.jsonl", user="writer")


def test_classes_that_are_words(tmp_path: Path) -> None:
    words = table(user=list("abc"), x=[1.0, 2.0, 3.0], y=[4.0, 5.0, 6.0], kind=["good", "bad", "good"])
    options = {"features": [["x", "y"], "kind"], "classes": ["bad", "good"]}
    assert read_frame(words, **options).batch(0, [0])[1].tolist() == [1]
    assert read_frame(words, None, **options).names[1] == "('b', 2, 5, 'bad')"
    words.to_csv(tmp_path / "t.csv", index=False)
    data = load("user_table", tmp_path, path="t.csv", **options)
    assert data.model_options["num_classes"] == 2
    with pytest.raises(DataError, match=r"row 1 has kind 'bad', which is not among classes=\['ok', 'good'\]"):
        load("user_table", tmp_path, path="t.csv", **{**options, "classes": ["ok", "good"]})
    with pytest.raises(ConfigurationError, match="the words of the last feature, which is no column"):
        load("user_table", tmp_path, path="t.csv", **{**options, "features": ["kind", ["x", "y"]]})


class HuggingFace:
    """What `datasets.Dataset` is to us: rows as dictionaries, batches of them, and columns by name."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self._columns = columns
        self.column_names = list(columns)

    def __len__(self) -> int:
        return len(self._columns[self.column_names[0]])

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._columns[key]
        return {name: values[key] for name, values in self._columns.items()}

    def __getitems__(self, positions: list[int]) -> list[Any]:
        return [self[position] for position in positions]


def test_an_open_table_needs_no_reader() -> None:
    table: Any = HuggingFace({"user": OWNERS, "x": torch.from_numpy(PIXELS), "y": list(range(7))})  # type: ignore[dict-item]
    users = UserDataset(table, table["user"])
    assert users.names == ["ann", "bob", "cat"]
    batch = users.batch(1, [0, 2])
    assert batch["user"] == ["bob", "bob"] and batch["y"].tolist() == [1, 6] and batch["x"].shape == (2, 2, 2)


def load(name: str, root: Path, **options: Any) -> UserData:
    return user_source(name).read(root, False, options, "permutation")


def test_every_format_is_a_data_set_of_a_name(tmp_path: Path) -> None:
    frame().to_parquet(tmp_path / "d.parquet")
    frame()[OWNERS.index("bob") :][:1].to_parquet(tmp_path / "test.parquet")
    options = {"user": "writer", "features": PLAIN, "test_path": "test.parquet", "num_classes": 12}
    data = load("user_table", tmp_path, path="d.parquet", **options)
    assert data.model_options == {"input_shape": (1, 2, 2), "num_classes": 12}
    assert data.test_users is not None and data.test_users.names == ["bob"]
    same_users(data.train)
    frame().to_parquet(tmp_path / "t.parquet")
    pd.DataFrame({"user": list("abc"), "x": [1, 2, 3], "y": [4.0, 5, 6], "label": [0, 1, 2]}).to_csv(tmp_path / "t.csv")
    data = load("user_table", tmp_path, path="t.csv", features=[["x", "y"], "label"])
    assert data.model_options == {"input_shape": (2,), "num_classes": 3, "num_targets": 1}
    data = load("user_table", tmp_path, path=str(tmp_path / "t.parquet"), user="writer", held_out=0.3)
    assert len(data.train) == 2 and data.test_users is not None
    assert not set(data.train.names) & set(data.test_users.names)
    assert len(data.test) == data.test_users.sizes.sum() == 7 - data.train.sizes.sum()  # type: ignore[arg-type]
    table(user=list("aabbcc"), text="abc").to_csv(tmp_path / "texts.csv", index=False)
    data = load("user_table", tmp_path, path="texts.csv", text="characters")
    assert data.model_options == {"vocabulary_size": 90} and data.train.batch(0, [0])[0].shape == (1, 80)


def test_rows_of_a_table_are_records_wherever_they_stand(tmp_path: Path) -> None:
    rows = [(i, i / 2, i % 3) for i in range(40)]
    table = pd.DataFrame(rows + rows[:2], columns=["a", "b", "label"])
    options = {"features": [["a", "b"], "label"], "ranges": {"a": [0, 20], "b": [-10, 10]}, "held_out": 0.3}
    held_out = []
    for order in (list(range(42)), [7, *range(41, 7, -1), *range(7)]):
        table.iloc[order].to_csv(tmp_path / "t.csv", index=False)
        data = user_source("table").read(tmp_path, False, {"path": "t.csv", **options})
        assert len(data.train) + len(data.test) == 42 and data.train.sizes.tolist() == [1] * len(data.train)  # type: ignore[arg-type]
        assert data.test_users is not None
        held_out.append(set(data.test_users.names))
        features, labels = data.train.batch(0, [0])
        name = data.train.names[0]
        a, b, label = (float(number) for number in str(name).strip("()").replace("'", "").split(", "))
        assert features.tolist() == [[min(a, 20) / 10 - 1, min(b, 10) / 10]] and labels.tolist() == [label]
    assert held_out[0] == held_out[1]
    assert data.model_options == {"input_shape": (2,), "num_classes": 3, "num_targets": 1}
    with pytest.raises(ConfigurationError, match=r"data=table does not say whose a row is: set data\.unit=example"):
        UserDataModule("table", options={"path": str(tmp_path / "t.csv")})


def test_a_relative_path_is_that_of_the_working_directory_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    here = tmp_path / "here"
    for number, folder in enumerate((root, here)):
        folder.mkdir()
        (folder / "t.csv").write_text(f"user,a\n1,{number}\n2,{number}\n")
    monkeypatch.chdir(here)
    chosen = {"features": [["a"]], "held_out": 0.5}
    assert load("user_table", root, path="t.csv", **chosen).train.batch(0, [0])[0].tolist() == [[1.0]]
    (here / "t.csv").unlink()
    assert load("user_table", root, path="t.csv", **chosen).train.batch(0, [0])[0].tolist() == [[0.0]]


def test_targets_of_tables(tmp_path: Path) -> None:
    pd.DataFrame({"x": [1.5, 2, 3], "y": [-4, 5, 6], "z": [0.5, 1, 2]}).to_csv(tmp_path / "t.csv", index=False)
    for target, provides in {
        "y": {"num_targets": 1},  # below 0, so that it is no class
        "z": {"num_targets": 1},
        ("y", "z"): {"num_targets": 2},
    }.items():
        features = [["x"], target if isinstance(target, str) else list(target)]
        data = load("table", tmp_path, path="t.csv", features=features)
        assert data.model_options == {"input_shape": (1,), **provides}


def test_labeled_texts(tmp_path: Path) -> None:
    lines = ["Good, GOOD beer!", "", "bad beer", "so-so"]
    pd.DataFrame({"text": [*lines[:1], "?", *lines[2:]], "label": [1, 0, 0, 1]}).to_csv(tmp_path / "t.csv", index=False)
    chosen = {"path": "t.csv", "text": "labels", "features": ["text", "label"], "sequence_length": 4}
    data = load("table", tmp_path, **chosen)
    assert data.model_options == {"vocabulary_size": 10_004, "num_classes": 2}
    tokens, labels = data.train.examples[0]
    assert tokens.dtype == labels.dtype == torch.int64 and tokens.shape == (4,)
    encoded = labeled_words(lines, length=4)
    good, comma, again, beer = encoded[0]
    assert good == again != comma and encoded[2].tolist()[1:] == [beer, 0, 0] and not encoded[1].any()
    assert encoded[encoded > 0].min() > 0 and encoded.max() <= 10_000
    assert labeled_words(["good"]).tolist() == [[good, *[0] * 99]]  # in every process
    (tmp_path / "words").write_text("beer\ngood\n")
    by_list = load("table", tmp_path, vocabulary="words", **chosen)
    assert by_list.train.examples[0][0].tolist() == [2, 10_001, 2, 1]
    with pytest.raises(ConfigurationError, match="text=labels needs features: those that are texts, then"):
        read_user_table(tmp_path / "t.csv", None, text="labels", features=["text"])


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("table", {}, "data.options.path must say which file"),
        ("user_table", {"path": "none.csv"}, r"there is no file .*none\.csv"),
        ("user_table", {"path": "one.txt"}, r"one\.txt is neither \.csv, \.jsonl nor \.parquet"),
        ("user_table", {"path": "one.csv"}, r"one\.csv has one user: none can be held out"),
        ("user_table", {"path": "one.csv", "features": ["z"]}, r"has no column 'z'; it has user, a, b\."),
        ("user_table", {"path": "one.csv", "features": [["a", "z"], "b"]}, r"has no column 'z'; it has user, a, b\."),
        ("user_table", {"path": "one.csv", "features": [[], "b"]}, r"such as \[\[age, height\], label\], not"),
        ("user_table", {"path": "two.csv"}, r"has columns of single numbers.*features=\[\[age, height\]"),
        (
            "user_table",
            {"path": "two.csv", "features": [["user", "a"]]},
            r"column 'user' is not numeric \(row 0: '1'\)",
        ),
        ("user_table", {"path": "none.csv"}, r"no .*none\.csv: a relative path is looked for in the working directory"),
        ("user_table", {"path": "one.csv", "user": "who"}, r"has no column 'who'; it has user, a, b\."),
        ("user_table", {"path": "one.csv", "images": "grey"}, "images must be channels_first, channels_last, gray"),
        ("user_table", {"path": "one.csv", "held_out": 1.0}, "held_out must be a share between 0 and 1"),
        ("user_table", {"path": "one.csv", "features": 3}, r"features must be names of features, or \{name: shape\}"),
        ("user_table", {"path": "one.csv", "text": "characters"}, r"feature 'a' is no text"),
        ("user_table", {"path": "one.csv", "images": "gray"}, r"feature 'a' is no image \(gray\)"),
        ("table", {"path": "cell.csv", "features": [["a"], "b"]}, r"column 'a' is not numeric \(row 1: 'abc'\)"),
        ("table", {"path": "cell.csv", "features": [["b"], "a"]}, r"column 'a' is not numeric \(row 1: 'abc'\)"),
        ("table", {"path": "cell.csv", "ranges": {"a": [0, 1]}}, r"column 'a' is not numeric \(row 1: 'abc'\)"),
        ("table", {"path": "cell.csv", "ranges": {"z": [0, 1]}}, r"has no column 'z'; it has a, b\."),
        ("table", {"path": "cell.csv", "ranges": {"b": [1, 1]}}, "range of 'b' must go up, not from 1 to 1"),
        ("table", {"path": "cell.csv", "ranges": {"b": [1]}}, r"ranges must be columns with their least and largest"),
        ("table", {"path": "cell.csv", "text": "labels", "features": ["b", "a"]}, "is no label: number the"),
        ("table", {"path": "two.csv", "features": [["a"], "b"], "num_classes": 2}, "labels run from 3 to 4, not from"),
        ("table", {"path": "words.csv", "text": "labels", "features": ["a", "b"]}, "feature 'b' is no label"),
        ("table", {"path": "words.csv", "features": ["a", "b"]}, r"'x'\): .*; texts are read by data\.options"),
        ("table", {"path": "words.csv", "features": [["a"], "b"]}, "number its categories .*, or remove the column"),
    ],
)
def test_wrong_options(name: str, options: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("")
    (tmp_path / "one.csv").write_text("user,a,b\n1,2,3\n")
    (tmp_path / "two.csv").write_text("user,a,b\n1,2,3\n2,3,4\n")
    (tmp_path / "cell.csv").write_text("a,b\n1,2\nabc,3\n4,5\n")
    (tmp_path / "words.csv").write_text("a,b\nx,good\ny,bad\n")
    with pytest.raises((ConfigurationError, DataError), match=says):
        load(name, tmp_path, **options)


@pytest.mark.parametrize(
    ("columns", "reading", "says"),
    [
        ({"user": ["ann"], "label": [1]}, {"features": ["image"]}, "has no column 'image'; it has user, label"),
        (
            {"user": ["ann"], "pixels": [[0.5] * 4]},
            {"features": {"pixels": [1, 3]}},
            r"'pixels' has shape \(4,\), which is not \(1, 3\)",
        ),
        ({"user": ["ann"], "pixels": [[b"\xff"]]}, {}, "'pixels' of row 0 is"),
        ({"user": ["ann"], "text": [b"\xff"]}, {}, "'text' of row 0 is b'"),
    ],
)
def test_what_no_example_is_made_of(columns: Any, reading: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        read_frame(table(**columns), **reading)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Ten images of two classes, of several sizes."""
    rng = np.random.default_rng(0)
    for i in range(10):
        path = tmp_path / "photos" / ("cat" if i % 2 else "dog") / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8 + i % 3, 9, 3), dtype=np.uint8)).save(path)
    (tmp_path / "photos" / "cat" / "notes.txt").write_text("no image")
    return tmp_path / "photos"


def test_a_folder_of_images(photos: Path) -> None:
    options = {"path": str(photos), "image_size": 8, "held_out": 0.3}
    data = user_source("image_folder").read(photos, False, options)
    assert data.model_options == {"input_shape": (3, 8, 8), "num_classes": 2}
    assert data.test_users is not None and len(data.train) + len(data.test_users) == 10
    image, label = data.train.examples[0]
    assert image.shape == (3, 8, 8) and image.min() >= 0 and image.max() <= 1 and label in (0, 1)
    (photos / "dog" / "0.png").rename(photos / "dog" / "z.png")  # names of files decide nothing
    (photos / ".cache").mkdir()
    again = user_source("image_folder").read(photos, False, options)
    assert again.test_users is not None and set(again.test_users.names) == set(data.test_users.names)
    gray = user_source("image_folder").read(photos, False, {**options, "grayscale": True, "classes": ["dog", "cat"]})
    assert gray.model_options["input_shape"] == (1, 8, 8)
    assert gray.train.examples[0][0].shape == (1, 8, 8) and gray.train.examples[0][1] == 0


@pytest.mark.parametrize(
    ("spoil", "options", "says"),
    [
        (lambda photos: None, {"classes": ["dog", "bird"]}, "classes and folders differ in bird, cat"),
        (lambda photos: (photos / "dog" / "0.png").write_bytes(b"cut"), {}, r"0\.png cannot be read as an image"),
        (shutil.rmtree, {}, "there is no folder"),
        (lambda photos: None, {"classes": ["dog", "cat", "dog"]}, "names a folder twice"),
        (
            lambda photos: Image.fromarray(np.zeros((4, 4), np.uint16)).save(photos / "dog" / "deep.png"),
            {},
            "deep.png cannot be read as an image .mode I;16, more than 8 bits a channel",
        ),
        (lambda photos: shutil.rmtree(photos / "dog"), {}, "a folder of images for each class, two or more: it has 1"),
        (lambda photos: [path.unlink() for path in photos.rglob("*.png")], {}, "contains no images"),
    ],
)
def test_damaged_folders_of_images(photos: Path, spoil: Any, options: dict[str, Any], says: str) -> None:
    spoil(photos)
    with pytest.raises(DataError, match=says):
        user_source("image_folder").read(photos, False, {"path": str(photos), **options})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", r"t\.csv cannot be read as a table"),
        ("user,a\n", "contains no rows"),
        ("user,a\nann,1\n,2\n", "row 1 has no 'user'"),
        ("user,a\nann,1\nbob,\n", "row 1 has no 'a'"),
        ("user,a\nann,1\nann,1,2,3\n", "cannot be read as a table"),
    ],
)
def test_damaged_tables(content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(DataError, match=says):
        read_user_table(tmp_path / "t.csv")
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"t\.parquet cannot be read as a table"):
        read_user_table(tmp_path / "t.parquet")
    uneven = frame().assign(pixels=[np.zeros(4)] * 6 + [np.zeros(5)])
    uneven.to_parquet(tmp_path / "u.parquet")
    with pytest.raises(DataError, match=r"'pixels' of row 6 is .*must be numbers of one shape"):
        read_user_table(tmp_path / "u.parquet", user="writer")


@pytest.mark.parametrize(
    ("suffix", "cell"),
    [(".csv", ""), (".csv", "5.5"), (".csv", "many"), (".parquet", "")],  # a column of Parquet has one type
)
def test_no_row_of_a_table_changes_the_name_of_another(suffix: str, cell: str, tmp_path: Path) -> None:
    """By their names rows are held out: the neighbor with one row more holds out the same others."""
    rows = [f"{i},{2 * i},{i % 7},{i % 2}" for i in range(60)]
    header = "a,b,visits,label"
    more = [f"5,1000,{cell},1", *rows]
    named = []
    for number, lines in enumerate((rows, more)):
        path = tmp_path / f"{number}.csv"
        path.write_text("\n".join([header, *lines]) + "\n")
        if suffix == ".parquet":
            frame = pd.read_csv(path).astype({"visits": "Int64"})
            path = path.with_suffix(".parquet")
            frame.to_parquet(path)
        table = read_user_table(path, None, features=[["a", "b"], "label"])
        named.append(set(table.names))
    assert named[0] < named[1] and len(named[1] - named[0]) == 1


def test_names_of_rows_do_not_depend_on_other_rows(tmp_path: Path) -> None:
    pixels = np.zeros((3, 1500))
    pixels[:, 700] = [0.1, 0.2, 0.3]
    images = table(pixels=[row.tolist() for row in pixels], label=1)
    images.to_parquet(tmp_path / "all.parquet")
    images[1:].to_parquet(tmp_path / "fewer.parquet")
    every, fewer = (read_user_table(tmp_path / f"{name}.parquet", None).names for name in ("all", "fewer"))
    assert set(fewer) < set(every)
    blank = table(x=[1.0, 2.0, 3.0], y=[0, 1, 0], z=[7, 7, None])
    options = {"features": [["x"], "y"]}
    names = set(read_frame(blank, None, **options).names)
    assert set(read_frame(blank[:2], None, **options).names) < names


@pytest.mark.parametrize(
    ("name", "content", "options", "says"),
    [
        ("t.csv", "a,b,label\n1,2,0,9\n3,4,1,9\n", {}, "rows have more cells than the first line has names"),
        ("t.csv", "a,b\n1,2\n", {"features": [["a"], "a"]}, "names a feature twice"),
        ("t.csv", "a,b\n1,x\n", {"features": [["a"], "b"], "classes": ["x", "x"]}, "names a class twice"),
        ("t.jsonl", '{"a": 1}\n5\n', {}, "a line is no object: 5"),
        ("t.jsonl", '{"a": [1, [2]]}\n', {}, "feature 'a' of row 0 is"),
        ("t.jsonl", '{"user": "x"}\n', {"user": "user"}, "features must be the names of one feature or more beside"),
    ],
)
def test_rows_that_are_none(tmp_path: Path, name: str, content: str, options: dict[str, Any], says: str) -> None:
    (tmp_path / name).write_text(content)
    reading = {**options}
    with pytest.raises((ConfigurationError, DataError), match=says):
        read_user_table(tmp_path / name, reading.pop("user", None), **reading)


def test_words_are_read_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,label\n1,01\n2,true\n")
    users = read_user_table(tmp_path / "t.csv", None, features=[["a"], "label"], classes=["true", "01"])
    assert [int(users.examples[i][1]) for i in range(2)] == [1, 0]
    lines = ['{"user": 7, "t": "two\u2028lines"}', '{"user": 8.5, "t": "b"}']
    (tmp_path / "t.jsonl").write_text("\n".join(lines), encoding="utf-8-sig")
    assert read_user_table(tmp_path / "t.jsonl", text="characters").names == ["7", "8.5"]
