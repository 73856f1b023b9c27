"""Files that hold examples by user: each format written here and read back, and clear errors for what is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from PIL import Image

from dpbench.capabilities.own_data import read_frame, read_user_table
from dpbench.capabilities.own_data.texts import labeled_words
from dpbench.capabilities.users.sources import UserData, user_source
from dpbench.data import UserDataModule, UserDataset
from dpbench.data.sources import find_file
from dpbench.data.texts import CHARACTERS
from dpbench.errors import ConfigurationError, DataError

PIXELS = np.arange(7 * 4, dtype=np.float32).reshape(7, 2, 2) / 28
OWNERS = ["ann", "bob", "ann", "cat", "bob", "ann", "bob"]


def table(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame(columns)


def frame() -> pd.DataFrame:
    return table(writer=OWNERS, pixels=[row.tolist() for row in PIXELS], label=range(7))


def load(name: str, root: Path, **options: Any) -> UserData:
    return user_source(name).read(root, False, options, "permutation")


def same_users(users: UserDataset) -> None:
    for name in ("ann", "bob", "cat"):
        own = [i for i, owner in enumerate(OWNERS) if owner == name]
        pixels, labels = users.batch(users.names.index(name), range(len(own)))
        assert labels.tolist() == own and labels.dtype == torch.int64
        np.testing.assert_allclose(pixels.reshape(-1, 2, 2), PIXELS[own], rtol=1e-6)


def test_texts() -> None:
    spoken = table(user="ham", snippets=["To be", "or not", "to be"])
    characters = read_frame(spoken, text="characters", sequence_length=9).batch(0, [0])[0]
    assert characters.tolist() == [[88, *(CHARACTERS.index(sign) + 1 for sign in "To be"), 89, 0, 0]]
    known = read_frame(spoken, text="words", vocabulary=["be", "to"], sequence_length=3)
    assert known.batch(0, [0])[1].tolist() == [[2, 1, 10_003]]
    with pytest.raises(ConfigurationError, match="text=words needs a vocabulary"):
        read_frame(spoken, text="words")


def test_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame().to_parquet(tmp_path / "t.parquet")
    users = read_user_table(tmp_path / "t.parquet", user="writer", images="gray")
    assert users.batch(0, [0])[0].shape == (1, 1, 2, 2)
    same_users(users)
    path = tmp_path / "t.csv"
    table(id=["007", "7", "007"], a=[1.5, 2, 3], b=[4, 5, 6]).to_csv(path, index=False)
    users = read_user_table(path, user="id")
    assert users.names == ["007", "7"]
    assert [part.tolist() for part in users.batch(0, [0, 1])] == [[1.5, 3.0], [4, 6]]
    inputs, targets = read_user_table(path, "id", features=[["b", "a"], "b"]).batch(0, [0, 1])
    assert inputs.dtype == torch.float32 and inputs.tolist() == [[4, 1.5], [6, 3]]
    assert targets.dtype == torch.int64 and targets.tolist() == [4, 6]
    with pytest.raises(ConfigurationError, match="at least one column in each list"):
        read_user_table(path, "id", features=[[], "b"])

    def without_pyarrow(*_: Any, **__: Any) -> Any:
        raise ImportError("Unable to find a usable engine; tried using: 'pyarrow', 'fastparquet'.")

    monkeypatch.setattr(pd, "read_parquet", without_pyarrow)
    with pytest.raises(ConfigurationError, match=r'Parquet needs pyarrow: pip install "dpbench-lightning\[parquet\]"'):
        read_user_table(tmp_path / "t.parquet", user="writer")


def test_images_of_whole_numbers() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 5, 3))
    flat = table(user="ann", image=[own.ravel().tolist() for own in pixels], label=[0, 1])
    last, first = (
        read_frame(flat, features={"image": shape, "label": []}, images=layout).batch(0, [0, 1])[0]  # type: ignore[arg-type]
        for layout, shape in (("channels_last", [4, 5, 3]), ("channels_first", [3, 4, 5]))
    )
    np.testing.assert_allclose(last * 255, pixels.transpose(0, 3, 1, 2), rtol=1e-5)
    np.testing.assert_allclose(first * 255, pixels.reshape(2, 3, 4, 5), rtol=1e-5)


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    frame().to_json(path, orient="records", lines=True)
    same_users(read_user_table(path, user="writer"))
    data = load("table", tmp_path, path="t.jsonl", features=["pixels", "label"], images="gray", held_out=0.3)
    lines = path.read_text().splitlines()
    assert data.model_options["num_classes"] == 7 and set(data.train.names) < {f"({line!r},)" for line in lines}
    path.write_text(lines[0] + "\n{cut")
    with pytest.raises(DataError, match=r"t\.jsonl cannot be read as a table"):
        read_user_table(path, user="writer")
    path.write_text('{"user": 7, "t": "two\u2028lines"}\n{"user": 8.5, "t": "b"}', encoding="utf-8-sig")
    assert read_user_table(path, text="characters").names == ["7", "8.5"]


def test_classes_that_are_words(tmp_path: Path) -> None:
    table(user=list("abc"), x=[1, 2, 3], kind=["true", "01", "true"]).to_csv(tmp_path / "t.csv", index=False)
    options: dict[str, Any] = {"path": "t.csv", "features": [["x"], "kind"], "classes": ["01", "true"]}
    data = load("user_table", tmp_path, **options)
    assert data.model_options["num_classes"] == 2
    users = read_user_table(tmp_path / options.pop("path"), **options)
    assert [int(users.examples[row][1]) for row in range(3)] == [1, 0, 1]  # words are read as they are written
    with pytest.raises(DataError, match=r"row 1 has kind '01', which is not among classes=\['ok', 'true'\]"):
        load("user_table", tmp_path, path="t.csv", **{**options, "classes": ["ok", "true"]})
    with pytest.raises(ConfigurationError, match="requires a single column as the last feature"):
        load("user_table", tmp_path, path="t.csv", **{**options, "features": ["kind", ["x"]]})


def test_a_table_is_a_data_set_of_a_name(tmp_path: Path) -> None:
    frame().to_parquet(tmp_path / "d.parquet")
    frame()[1:2].to_parquet(tmp_path / "test.parquet")
    options = {"path": "d.parquet", "user": "writer", "features": {"pixels": [1, 2, 2], "label": []}}
    data = load("user_table", tmp_path, **options, test_path="test.parquet", num_classes=12)
    assert data.model_options == {"input_shape": (1, 2, 2), "num_classes": 12}
    assert data.test_users is not None and data.test_users.names == ["bob"]
    same_users(data.train)
    table(user=list("aabbcc"), text="abc").to_csv(tmp_path / "texts.csv", index=False)
    data = load("user_table", tmp_path, path="texts.csv", text="characters")
    assert data.model_options == {"vocabulary_size": 90} and data.train.batch(0, [0])[0].shape == (1, 80)


def test_rows_of_a_table_are_records_wherever_they_stand(tmp_path: Path) -> None:
    rows = [(i, i / 2, i % 3) for i in range(40)]
    copies = pd.DataFrame(rows + rows[:2], columns=["a", "b", "label"])
    options = {"features": [["a", "b"], "label"], "ranges": {"a": [0, 20], "b": [-10, 10]}, "held_out": 0.3}

    def read(frame: pd.DataFrame) -> Any:
        frame.to_csv(tmp_path / "t.csv", index=False)
        return user_source("table").read(tmp_path, False, {"path": "t.csv", **options})

    data, again = read(copies), read(copies[::-1])
    assert set(data.test_users.names) == set(again.test_users.names)
    assert data.train.sizes.tolist() == [1] * (42 - len(data.test_users))
    for row in range(3):
        a, b, label = (
            float(number.strip("()' ")) for number in str(data.train.names[row]).partition(")")[0].split(",")
        )
        features, labels = data.train.batch(row, [0])
        assert features[0].tolist() == pytest.approx([min(a, 20) / 10 - 1, min(b, 10) / 10], abs=1e-6)
        assert labels.tolist() == [label]
    assert data.model_options == {"input_shape": (2,), "num_classes": 3, "num_targets": 1}
    with pytest.raises(ConfigurationError, match=r"data=table has no users: set data\.unit=example"):
        UserDataModule("table", options={"path": str(tmp_path / "t.csv")})


def test_a_relative_path_is_that_of_the_working_directory_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, root = tmp_path / "own.csv", tmp_path / "root"
    root.mkdir()
    (root / "own.csv").touch()
    monkeypatch.chdir(tmp_path)
    assert find_file(root, "own.csv") == root / "own.csv"
    own.touch()
    assert find_file(root, "own.csv") == own


def test_tokens_of_files(tmp_path: Path) -> None:
    """Lines of a text file, and a data set that Hugging Face's datasets has saved."""
    (tmp_path / "t.txt").write_text("ab\n\nc\n")
    (tmp_path / "saved").mkdir()
    rows = pa.table({"text": ["ab", "c"]})
    with pa.ipc.new_stream(tmp_path / "saved/data-00000-of-00001.arrow", rows.schema) as file:
        file.write_table(rows)
    for path in ("t.txt", "saved"):
        users = read_user_table(tmp_path / path, None, text="tokens", sequence_length=3)
        assert users.examples.batch_of([0, 1]).batch[1].tolist() == [[99, 257, 0], [257, 0, 0]]
    (tmp_path / "more.txt").write_text("\n".join(map(str, range(40))))
    data = load("table", tmp_path, path="more.txt", text="tokens", sequence_length=3)
    assert data.model_options == {"vocabulary_size": 258} and data.inputs["tokenizer"] == "bytes"


def test_labeled_texts(tmp_path: Path) -> None:
    lines = ["Good, GOOD beer!", "?", "bad beer", "so-so"]
    table(text=lines, label=[1, 0, 0, 1]).to_csv(tmp_path / "t.csv", index=False)
    chosen = {"path": "t.csv", "text": "labels", "features": ["text", "label"], "sequence_length": 4}
    data = load("table", tmp_path, **chosen)
    assert data.model_options == {"vocabulary_size": 10_004, "num_classes": 2}
    tokens, _ = data.train.examples[0]
    encoded = labeled_words([*lines, ""], length=4)
    good, comma, again, beer = tokens.tolist()
    assert good == again != comma and encoded[2].tolist()[1:] == [beer, 0, 0] and not encoded[4].any()
    assert labeled_words(["good"]).tolist() == [[good, *[0] * 99]]  # in every process
    (tmp_path / "words").write_text("beer\ngood\n")
    by_list = load("table", tmp_path, vocabulary="words", **chosen)
    assert by_list.train.examples[0][0].tolist() == [2, 10_001, 2, 1]
    with pytest.raises(ConfigurationError, match="text=labels needs features: those that are texts, then"):
        read_user_table(tmp_path / "t.csv", None, text="labels", features=["text"])


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("table", {}, "data.options.path is missing"),
        ("user_table", {"path": "none.csv"}, r"no .*none\.csv: a relative path is looked for in the working directory"),
        ("user_table", {"path": "one.doc"}, r"one\.doc is neither \.csv, \.jsonl, \.txt nor \.parquet"),
        ("user_table", {"path": "one.csv"}, r"one\.csv has one user: none can be held out"),
        ("user_table", {"path": "one.csv", "features": [["a", "z"], "b"]}, r"has no column 'z'; it has user, a, b\."),
        ("user_table", {"path": "one.csv", "features": [[], "b"]}, r"such as \[\[age, height\], label\], not"),
        ("user_table", {"path": "two.csv"}, r"has only columns of single numbers.*features=\[\[age, height\]"),
        ("user_table", {"path": "two.csv", "features": [["user", "a"]]}, r"'user' is not numeric \(row 0: '1'\)"),
        ("user_table", {"path": "one.csv", "text": "characters"}, r"feature 'a' is not text"),
        (
            "user_table",
            {"path": "one.csv", "images": "gray"},
            r"feature 'a' has shape \(\), which is not an image \(gray\)",
        ),
        ("table", {"path": "cell.csv", "features": [["b"], "a"]}, r"column 'a' is not numeric \(row 1: 'abc'\)"),
        ("table", {"path": "cell.csv", "ranges": {"a": [0, 1]}}, r"column 'a' is not numeric \(row 1: 'abc'\)"),
        ("table", {"path": "cell.csv", "ranges": {"b": [1, 1]}}, "first end of 'b' must be below the second, not"),
        ("table", {"path": "cell.csv", "ranges": {"b": [1]}}, r"ranges must be columns with their least and largest"),
        (
            "table",
            {"path": "cell.csv", "text": "labels", "features": ["b", "a"]},
            r"is not a label: .*data.options.classes=\[",
        ),
        ("table", {"path": "two.csv", "features": [["a"], "b"], "num_classes": 2}, "labels run from 3 to 4, not from"),
    ],
)
def test_wrong_options(name: str, options: dict[str, Any], says: str, tmp_path: Path) -> None:
    files = {"one.doc": "", "one.csv": "user,a,b\n1,2,3\n", "two.csv": "user,a,b\n1,2,3\n2,3,4\n"}
    for file, content in {**files, "cell.csv": "a,b\n1,2\nabc,3\n4,5\n"}.items():
        (tmp_path / file).write_text(content)
    with pytest.raises((ConfigurationError, DataError), match=says):
        load(name, tmp_path, **options)


def test_a_folder_of_images(tmp_path: Path) -> None:
    for i in range(10):
        path = tmp_path / ("cat" if i % 2 else "dog") / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.random.default_rng(i).integers(0, 256, (8 + i % 3, 9, 3), dtype=np.uint8)).save(path)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    options = {"path": str(tmp_path), "image_size": 8, "held_out": 0.3}
    data = user_source("image_folder").read(tmp_path, False, options)
    assert data.model_options == {"input_shape": (3, 8, 8), "num_classes": 2}
    assert data.test_users is not None and len(data.train) + len(data.test_users) == 10
    (tmp_path / "dog" / "0.png").rename(tmp_path / "dog" / "z.png")  # names of files decide nothing
    (tmp_path / ".cache").mkdir()
    again = user_source("image_folder").read(tmp_path, False, {**options, "grayscale": True, "classes": ["dog", "cat"]})
    assert again.test_users is not None and set(again.test_users.names) == set(data.test_users.names)
    assert data.inputs["classes"] == ["cat", "dog"] and again.inputs["classes"] == ["dog", "cat"]
    assert data.inputs["image_size"] == 8 and again.inputs["grayscale"]
    image, label = again.train.examples[0]
    assert image.shape == again.model_options["input_shape"] == (1, 8, 8) and label == 0  # dog
    assert image.min() >= 0 and 0.1 < image.max() <= 1


def test_a_reader_of_the_inputs_prepares_the_same(tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text("text,label\n" + "It’s great!,good\nHow bad,bad\n" * 20)
    options = {"path": "texts.csv", "features": ["text", "label"], "text": "labels", "classes": ["bad", "good"]}
    data = user_source("table").read(tmp_path, False, options)
    stated = data.inputs
    assert {name: stated[name] for name in ("features", "classes")} == {
        "features": ["text", "label"],
        "classes": ["bad", "good"],
    }
    assert "BLAKE2b" in stated["preparation"]
    tokens = labeled_words(["It's great!"], length=stated["sequence_length"])
    assert any(row.tolist() == tokens[0].tolist() for row in data.train.examples.batch_of([0, 1]).batch[0])


def test_inputs_hold_nothing_of_the_table(tmp_path: Path) -> None:
    (tmp_path / "secret.csv").write_text("owner,age,price\n" + "".join(f"o{i},{i},{i * 7}\n" for i in range(50)))
    ranges = {"age": [0, 100], "price": [0, 999]}
    options = {"path": "secret.csv", "user": "owner", "features": [["age"], "price"], "ranges": ranges}
    stated = dict(user_source("user_table").read(tmp_path, False, options).inputs)
    assert "clipped" in stated.pop("preparation")
    assert stated == {"features": [["age"], "price"], "ranges": ranges}


@pytest.mark.parametrize(
    ("files", "options", "says"),
    [
        ([], {}, "there is no folder"),
        (["a/1.txt"], {}, "a folder of images for each class, two or more: it has 1"),
        (["a/1.txt", "b/1.txt"], {}, "contains no images"),
        (["a/1.png", "b/1.png"], {}, r"1\.png cannot be read as an image"),
        (
            ["a/deep.png", "b/deep.png"],
            {},
            "deep.png cannot be read as an image .mode I;16, more than 8 bits",
        ),
        (["a/1.png", "b/1.png"], {"classes": ["a", "c"]}, "classes and folders differ in b, c"),
        (["a/1.png", "b/1.png"], {"classes": ["a", "b", "a"]}, "names a folder twice"),
    ],
)
def test_damaged_folders_of_images(files: list[str], options: dict[str, Any], says: str, tmp_path: Path) -> None:
    for name in files:
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"cut")
        if path.stem == "deep":
            Image.fromarray(np.zeros((4, 4), np.uint16)).save(path)
    with pytest.raises(DataError, match=says):
        load("image_folder", tmp_path, path=str(tmp_path / "photos"), **options)


@pytest.mark.parametrize(
    ("name", "content", "options", "says"),
    [
        ("t.csv", "", {}, r"t\.csv cannot be read as a table"),
        ("t.parquet", "PAR1 and no more", {}, r"t\.parquet cannot be read as a table"),
        ("t.csv", "user,a\n", {"user": "user"}, "contains no rows"),
        ("t.csv", "user,a\nann,1\n,2\n", {"user": "user"}, "row 1 has no 'user'"),
        ("t.csv", "user,a\nann,1\nbob,\n", {"user": "user"}, "row 1 has no 'a'"),
        ("t.csv", "a,b,label\n1,2,0,9\n3,4,1,9\n", {}, "rows have more cells than the first line has names"),
        ("t.csv", "a,b\n1,2\n", {"features": [["a"], "a"]}, "names a feature twice"),
        ("t.csv", "a,b\n1,x\n", {"features": [["a"], "b"], "classes": ["x", "x"]}, "names a class twice"),
        ("t.jsonl", '{"a": 1}\n5\n', {}, "a line is not an object: 5"),
        ("t.jsonl", '{"a": [1, [2]]}\n', {}, "feature 'a' of row 0 is"),
        ("t.jsonl", '{"a": [1, 2]}\n{"a": [1]}\n', {}, "feature 'a' of row 1 is .*must be numbers of one shape"),
        ("t.jsonl", '{"a": [1, 2]}\n', {"features": {"a": [1, 3]}}, r"'a' has shape \(2,\), which is not \(1, 3\)"),
        ("t.jsonl", '{"user": "x"}\n', {"user": "user"}, "features must name at least one feature other than"),
    ],
)
def test_damaged_tables(tmp_path: Path, name: str, content: str, options: dict[str, Any], says: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises((ConfigurationError, DataError), match=says):
        read_user_table(tmp_path / name, **{"user": None, **options})


@pytest.mark.parametrize(("suffix", "cell"), [(".csv", ""), (".csv", "5.5"), (".csv", "many"), (".parquet", "")])
def test_no_row_of_a_table_changes_the_name_of_another(suffix: str, cell: str, tmp_path: Path) -> None:
    """By their names rows are held out: the neighbor with one row more holds out the same others."""
    rows = [f"{i},{2 * i},{i % 7},{i % 2}" for i in range(60)]
    named = []
    for number, first in enumerate(([], [f"5,1000,{cell},1"])):
        path = tmp_path / f"{number}.csv"
        path.write_text("\n".join(["a,b,visits,label", *first, *rows]) + "\n")
        if suffix == ".parquet":  # where a column has one type
            whole = pd.read_csv(path).astype({"visits": "Int64"})
            path = path.with_suffix(suffix)
            whole.to_parquet(path)
        named.append(set(read_user_table(path, None, features=[["a", "b"], "label"]).names))
    assert named[0] < named[1] and len(named[1] - named[0]) == 1


def test_names_of_long_rows_are_complete() -> None:
    pixels = np.zeros((3, 1500))
    pixels[:, 700] = [0.1, 0.2, 0.3]
    images = table(pixels=list(pixels), label=1)
    assert set(read_frame(images[1:], None).names) < set(read_frame(images, None).names)
    blank = table(x=[1.0, 2.0, 3.0], y=[0, 1, 0], z=[7, 7, None])
    every, fewer = (read_frame(rows, None, features=[["x"], "y"]).names for rows in (blank, blank[:2]))
    assert set(fewer) < set(every)
