"""Files that hold examples by user: each format written here and read back, and clear errors for what is damaged."""

from __future__ import annotations

import contextlib
import lzma
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from dpbench.data import UserDataModule, UserDataset, read_tff_sqlite, read_user_table
from dpbench.data.readers.table import read_table
from dpbench.data.readers.tff_sqlite import parse_example
from dpbench.data.texts import Sequences, labeled_words
from dpbench.data.user_data import UserData, load_user_data
from dpbench.errors import ConfigurationError, DataError


def example_class(packed: bool) -> Any:
    """tf.train.Example as Google's protobuf writes it."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name=f"example{packed}.proto", package=f"p{packed}", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, int, str]) -> Any:
        made = file.message_type.add(name=name)
        for label, number, kind, type_name in fields:
            added = made.field.add(name=label, number=number, type=kind, label=field.LABEL_REPEATED)
            if type_name:
                added.type_name = f".p{packed}.{type_name}"
            elif kind != field.TYPE_BYTES:
                added.options.packed = packed
        return made

    message("Bytes", ("value", 1, field.TYPE_BYTES, ""))
    message("Floats", ("value", 1, field.TYPE_FLOAT, ""))
    message("Ints", ("value", 1, field.TYPE_INT64, ""))
    feature = message("Feature")
    for number, (name, of) in enumerate([("bytes", "Bytes"), ("floats", "Floats"), ("ints", "Ints")], 1):
        feature.field.add(
            name=name, number=number, type=field.TYPE_MESSAGE, label=field.LABEL_OPTIONAL, type_name=f".p{packed}.{of}"
        )
    entry = message("Entry")
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    entry.field.add(
        name="value", number=2, type=field.TYPE_MESSAGE, label=field.LABEL_OPTIONAL, type_name=f".p{packed}.Feature"
    )
    message("Features", ("feature", 1, field.TYPE_MESSAGE, "Entry"))
    example = message("Example")
    example.field.add(
        name="features", number=1, type=field.TYPE_MESSAGE, label=field.LABEL_OPTIONAL, type_name=f".p{packed}.Features"
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"p{packed}.Example"))


EXAMPLES = {packed: example_class(packed) for packed in (True, False)}


def serialized(features: dict[str, list[Any]], packed: bool = True) -> bytes:
    made = EXAMPLES[packed]()
    for name, values in features.items():
        entry = made.features.feature.add(key=name)
        kind = "bytes" if isinstance(values[0], bytes) else "floats" if isinstance(values[0], float) else "ints"
        getattr(entry.value, kind).value.extend(values)
    return bytes(made.SerializeToString())


FLOATS = st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40)
INTS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40)
BYTES = st.lists(st.binary(max_size=300), min_size=1, max_size=4)


@given(st.dictionaries(st.text(max_size=200), st.one_of(FLOATS, INTS, BYTES), max_size=4), st.booleans())
def test_examples_are_read_as_protobuf_wrote_them(features: dict[str, list[Any]], packed: bool) -> None:
    found = parse_example(serialized(features, packed))
    assert {name: list(value) for name, value in found.items()} == features


@given(st.binary(max_size=60))
def test_what_is_no_example_is_a_value_error(message: bytes) -> None:
    with contextlib.suppress(ValueError):
        parse_example(message)


def test_a_message_cut_short_is_noticed() -> None:
    message = serialized({"pixels": [0.5] * 50, "label": [300]})
    for end in range(1, len(message)):
        with pytest.raises(ValueError):  # noqa: PT011  whichever part ends early
            parse_example(message[:end])


PIXELS = np.arange(7 * 4, dtype=np.float32).reshape(7, 2, 2) / 28
OWNERS = ["ann", "bob", "ann", "cat", "bob", "ann", "bob"]


def write_sqlite(path: Path, rows: list[tuple[str, str, bytes]], counts: dict[tuple[str, str], int]) -> Path:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)")
        database.execute("CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)")
        database.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
        database.executemany("INSERT INTO client_metadata VALUES (?, ?, ?)", [(*key, n) for key, n in counts.items()])
    database.close()
    return path


def digits_sqlite(path: Path) -> Path:
    rows = [
        ("train", owner, serialized({"pixels": PIXELS[i].ravel().tolist(), "label": [i]}))
        for i, owner in enumerate(OWNERS)
    ]
    rows.append(("test", "dan", serialized({"pixels": [1.0] * 4, "label": [9]})))
    counts = {("ann", "train"): 3, ("bob", "train"): 3, ("cat", "train"): 1, ("eve", "train"): 0, ("dan", "test"): 1}
    return write_sqlite(path, rows, counts)


PLAIN = {"pixels": [1, 2, 2], "label": []}


def same_users(users: UserDataset) -> None:
    for name in ("ann", "bob", "cat"):
        pixels, labels = users.batch(users.names.index(name), range(OWNERS.count(name)))
        own = [i for i, owner in enumerate(OWNERS) if owner == name]
        assert labels.tolist() == own and labels.dtype == torch.int64
        np.testing.assert_allclose(pixels.reshape(-1, 2, 2), PIXELS[own], rtol=1e-6)


def test_tff_sqlite(tmp_path: Path) -> None:
    path = digits_sqlite(tmp_path / "emnist.sqlite")
    users = read_tff_sqlite(path, features=PLAIN)
    assert users.names == ["ann", "bob", "cat", "eve"] and users.sizes.tolist() == [3, 3, 1, 0]
    same_users(users)
    assert users.batch(1, [0])[0].shape == (1, 1, 2, 2)
    (tmp_path / "emnist.sqlite.lzma").write_bytes(lzma.compress(path.read_bytes()))
    same_users(read_tff_sqlite(tmp_path / "emnist.sqlite.lzma", features=["pixels", "label"]))
    assert read_tff_sqlite(path, "test", features=PLAIN).names == ["dan"]
    assert [tuple(part.shape) for part in read_tff_sqlite(path).batch(0, [0])] == [(1,), (1, 4)]  # label, pixels


def test_tff_sqlite_of_texts(tmp_path: Path) -> None:
    texts = ["To be", "or not", "to be"]
    rows = [("train", "ham", serialized({"snippets": [text.encode()]})) for text in texts]
    path = write_sqlite(tmp_path / "s.sqlite", rows, {("ham", "train"): 3})
    assert read_tff_sqlite(path).batch(0, [0, 2]) == [("To be", "to be")]
    characters = read_tff_sqlite(path, text="characters", sequence_length=9)
    assert isinstance(characters.examples, Sequences)
    assert characters.batch(0, [0])[0].tolist() == [[88, *range_of("To be"), 89, 0, 0]]
    known = read_tff_sqlite(path, text="words", vocabulary=["be", "to"], sequence_length=3)
    assert known.batch(0, [0])[1].tolist() == [[2, 1, 10_003]]
    with pytest.raises(ConfigurationError, match="text=words needs a vocabulary"):
        read_tff_sqlite(path, text="words")


def test_tff_sqlite_of_texts_with_tags(tmp_path: Path) -> None:
    said = [("why hops hops", "Beer ?", "beer|hops"), ("malt", "x", "odd")]
    rows = [
        ("train", "ann", serialized({"tokens": [a.encode()], "title": [b.encode()], "tags": [c.encode()]}))
        for a, b, c in said
    ]
    path = write_sqlite(
        tmp_path / "so.sqlite", [*rows, ("train", "bob", rows[0][2])], {("ann", "train"): 2, ("bob", "train"): 1}
    )
    words = {"vocabulary": ["hops", "beer"], "tags": ["hops", "malt", "beer"]}
    users = read_tff_sqlite(path, text="tags", features=["tokens", "title", "tags"], **words)
    features, targets = users.batch(0, [0, 1])
    assert torch.allclose(features, torch.tensor([[2 / 5, 1 / 5], [0, 0]])) and targets.tolist() == [
        [1, 0, 1],
        [0, 0, 0],
    ]
    files = {name: str(tmp_path / name) for name in words}
    for name, known in words.items():
        (tmp_path / name).write_text("\n".join(known))
    data = load("tff_sqlite", tmp_path, path="so.sqlite", text="tags", features=["tokens", "title", "tags"], **files)
    assert data.model_options == {"num_features": 2, "num_tags": 3} and data.held_out == "users"
    with pytest.raises(ConfigurationError, match="text=tags needs a vocabulary, all tags, and features"):
        read_tff_sqlite(path, text="tags", vocabulary=["hops"])


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
    with pytest.raises(ConfigurationError, match="an empty list of columns"):
        read_user_table(tmp_path / "t.csv", "id", features=[[], "b"])
    monkeypatch.setattr(pd, "read_parquet", without_pyarrow)
    with pytest.raises(ConfigurationError, match=r'Parquet needs pyarrow: pip install "dpbench-lightning\[parquet\]"'):
        read_user_table(tmp_path / "t.parquet", user="writer")


def without_pyarrow(*_: Any, **__: Any) -> Any:
    raise ImportError("Unable to find a usable engine; tried using: 'pyarrow', 'fastparquet'.")


def test_images_of_whole_numbers(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 5, 3))
    rows = [("train", "ann", serialized({"image": own.ravel().tolist(), "label": [i]})) for i, own in enumerate(pixels)]
    path = write_sqlite(tmp_path / "c.sqlite", rows, {("ann", "train"): 2})
    last = read_tff_sqlite(path, features={"image": [4, 5, 3], "label": []}, images="channels_last").batch(0, [0, 1])[0]
    assert last.dtype == torch.float32 and last.shape == (2, 3, 4, 5)
    np.testing.assert_allclose(last.permute(0, 2, 3, 1) * 255, pixels, rtol=1e-5)
    first = read_tff_sqlite(path, features={"image": [3, 4, 5], "label": []}, images="channels_first")
    np.testing.assert_allclose(first.batch(0, [1])[0] * 255, pixels[1:].reshape(1, 3, 4, 5), rtol=1e-5)


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
    return load_user_data(name, root, False, options, "permutation")


def test_every_format_is_a_data_set_of_a_name(tmp_path: Path) -> None:
    digits_sqlite(tmp_path / "d.sqlite")
    data = load("tff_sqlite", tmp_path, path="d.sqlite", features=PLAIN)
    assert data.held_out == "users" and len(data.test) == 1  # type: ignore[arg-type]
    assert data.model_options == {"input_shape": (1, 2, 2), "num_classes": 10}
    same_users(data.train)
    write_sqlite(
        tmp_path / "test.sqlite",
        [("test", "bob", serialized({"pixels": [0.0] * 4, "label": [1]}))],
        {("bob", "test"): 1},
    )
    data = load("tff_sqlite", tmp_path, path="d.sqlite", test_path="test.sqlite", features=PLAIN, num_classes=12)
    assert data.held_out == "rows" and data.model_options == {"input_shape": (1, 2, 2), "num_classes": 12}
    assert data.test_users is not None and data.test_users.names == ["bob"]
    frame().to_parquet(tmp_path / "t.parquet")
    pd.DataFrame({"user": list("abc"), "x": [1, 2, 3], "y": [4.0, 5, 6], "label": [0, 1, 2]}).to_csv(tmp_path / "t.csv")
    data = load("user_table", tmp_path, path="t.csv", features=[["x", "y"], "label"])
    assert data.model_options == {"input_shape": (2,), "num_classes": 3, "num_targets": 1}
    data = load("user_table", tmp_path, path=str(tmp_path / "t.parquet"), user="writer", held_out=0.3)
    assert data.held_out == "users" and len(data.train) == 2 and data.test_users is not None
    assert not set(data.train.names) & set(data.test_users.names)
    assert len(data.test) == data.test_users.sizes.sum() == 7 - data.train.sizes.sum()  # type: ignore[arg-type]
    texts = [("train", name, serialized({"text": [b"abc"]})) for name in "aabbcc"]
    write_sqlite(tmp_path / "t.sqlite", texts, {(name, "train"): 2 for name in "abc"})
    data = load("tff_sqlite", tmp_path, path="t.sqlite", text="characters")
    assert data.model_options == {"vocabulary_size": 90} and data.train.batch(0, [0])[0].shape == (1, 80)


def test_rows_of_a_table_are_records_wherever_they_stand(tmp_path: Path) -> None:
    rows = [(i, i / 2, i % 3) for i in range(40)]
    table = pd.DataFrame(rows + rows[:2], columns=["a", "b", "label"])
    options = {"features": [["a", "b"], "label"], "ranges": {"a": [0, 20], "b": [-10, 10]}, "held_out": 0.3}
    held_out = []
    for order in (list(range(42)), [7, *range(41, 7, -1), *range(7)]):
        table.iloc[order].to_csv(tmp_path / "t.csv", index=False)
        data = load_user_data("table", tmp_path, False, {"path": "t.csv", **options})
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
    masks = [np.eye(4, dtype=np.int64) * 2] * 3
    pixels = [np.ones((4, 4)).tolist()] * 3
    nested = pd.DataFrame({"user": list("abc"), "pixels": pixels, "mask": [mask.tolist() for mask in masks]})
    nested.to_parquet(tmp_path / "m.parquet")
    data = load("user_table", tmp_path, path="m.parquet", images="gray", features=["pixels", "mask"])
    assert data.model_options == {"input_shape": (1, 4, 4), "num_classes": 3}


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
        read_tff_sqlite(tmp_path / "t.sqlite", text="labels")


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("tff_sqlite", {}, "data.options.path must say which file"),
        ("tff_sqlite", {"path": "none.sqlite"}, r"there is no file .*none\.sqlite"),
        ("user_table", {"path": "none.csv"}, r"there is no file .*none\.csv"),
        ("user_table", {"path": "one.txt"}, r"one\.txt is neither \.csv nor \.parquet"),
        ("user_table", {"path": "one.csv"}, r"one\.csv has one user: none can be held out"),
        ("user_table", {"path": "one.csv", "features": ["z"]}, r"has no column 'z'; it has user, a, b\."),
        ("user_table", {"path": "one.csv", "features": [["a", "z"], "b"]}, r"has no column 'z'; it has user, a, b\."),
        ("user_table", {"path": "one.csv", "features": [[], "b"]}, r"such as \[\[age, height\], label\], not"),
        ("user_table", {"path": "two.csv"}, r"has columns of single numbers beside 'user'.*features=\[\[age, height\]"),
        (
            "user_table",
            {"path": "two.csv", "features": [["user", "a"]]},
            r"column 'user' is not numeric \(row 0: '1'\)",
        ),
        ("user_table", {"path": "none.csv"}, r"no .*none\.csv: a relative path is looked for in the working directory"),
        ("user_table", {"path": "one.csv", "user": "who"}, r"has no column 'who' for the user; it has user, a, b\."),
        ("user_table", {"path": "one.csv", "images": "grey"}, "images must be channels_first, channels_last, gray"),
        ("user_table", {"path": "one.csv", "held_out": 1.0}, "held_out must be a share between 0 and 1"),
        ("user_table", {"path": "one.csv", "features": 3}, r"features must be names of features, or \{name: shape\}"),
        ("user_table", {"path": "one.csv", "text": "characters"}, r"feature 'a' of user '1' is no text, but int64"),
        ("user_table", {"path": "one.csv", "images": "gray"}, r"feature 'a' of user '1' is no image \(gray\)"),
        ("table", {"path": "cell.csv", "features": [["a"], "b"]}, r"column 'a' is not numeric \(row 1: 'abc'\)"),
        ("table", {"path": "cell.csv", "features": [["b"], "a"]}, r"column 'a' is not numeric \(row 1: 'abc'\)"),
        ("table", {"path": "cell.csv", "ranges": {"a": [0, 1]}}, r"column 'a' is not numeric \(row 1: 'abc'\)"),
        ("table", {"path": "cell.csv", "ranges": {"z": [0, 1]}}, r"has no column 'z'; it has a, b\."),
        ("table", {"path": "cell.csv", "ranges": {"b": [1, 1]}}, "range of 'b' must go up, not from 1 to 1"),
        ("table", {"path": "cell.csv", "ranges": {"b": [1]}}, r"ranges must be columns with their least and largest"),
        ("table", {"path": "cell.csv", "text": "labels", "features": ["b", "a"]}, "is no label but text: number the"),
        ("table", {"path": "two.csv", "features": [["a"], "b"], "num_classes": 2}, "labels run from 3 to 4, not from"),
        ("table", {"path": "words.csv", "text": "labels", "features": ["a", "b"]}, "feature 'b' is no label but"),
        ("table", {"path": "words.csv", "features": ["a", "b"]}, r"'x'\): .*; texts are read by data\.options"),
        ("table", {"path": "words.csv", "features": [["a"], "b"]}, "number its categories, or remove the column"),
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


def test_damaged_sqlite(tmp_path: Path) -> None:
    good = serialized({"pixels": [0.5] * 4, "label": [1]})
    ann = {("ann", "train"): 2}

    def reads(
        rows: list[tuple[str, str, bytes]], counts: dict[tuple[str, str], int], says: str, **reading: Any
    ) -> None:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.sqlite"
        write_sqlite(path, rows, counts)
        with pytest.raises(DataError, match=says):
            read_tff_sqlite(path, **reading)

    reads([("train", "ann", good), ("train", "ann", good[:-3])], ann, "example 1 of user 'ann' is no tf.train.Example")
    reads([("train", "ann", good)], ann, r"user 'ann' has 1 examples in split 'train', and 2 by client_metadata")
    reads([("train", "bob", good)], ann, "user 'bob' has examples in split 'train', but no client_metadata")
    reads([], {("ann", "test"): 0}, "has no split 'train'; it has test")
    reads([], {("ann", "train"): 0}, "contains no examples")
    reads(
        [("train", "ann", good)] * 2,
        ann,
        "user 'ann' have no feature 'image'; they have label, pixels",
        features=["image"],
    )
    reads(
        [("train", "ann", good)] * 2,
        ann,
        r"'pixels' of user 'ann' has shape \(4,\), which is not \(1, 3\)",
        features={"pixels": [1, 3]},
    )
    other = serialized({"pixels": [0.5] * 5, "label": [1]})
    reads(
        [("train", "ann", good), ("train", "ann", other)], ann, r"'pixels' of user 'ann', example 1 is .* shape \(4,\)"
    )
    bob = {("ann", "train"): 1, ("bob", "train"): 1}
    reads(
        [("train", "ann", good), ("train", "bob", other)],
        bob,
        r"user 'bob' have the shapes .*\(5,\), those of user 'ann' .*\(4,\)",
    )
    reads(
        [("train", "ann", good), ("train", "ann", serialized({"label": [1]}))],
        ann,
        "'ann', example 1 has no feature 'pixels'",
    )
    for name, content in {"a.sqlite": b"no database" * 100, "b.sqlite": b"", "c.sqlite.lzma": b"no archive"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"{name} cannot be read as an SQLite file of TensorFlow Federated"):
            read_tff_sqlite(tmp_path / name)
    whole = lzma.compress(digits_sqlite(tmp_path / "d.sqlite").read_bytes())
    (tmp_path / "cut.sqlite.lzma").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="cannot be read as an SQLite"):
        read_tff_sqlite(tmp_path / "cut.sqlite.lzma")


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
    with pytest.raises(DataError, match=r"'pixels' of row 6 is .*the first one has shape \(4,\)"):
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
        table = read_table(path, None, features=[["a", "b"], "label"])
        named.append(set(table.names))
    assert named[0] < named[1] and len(named[1] - named[0]) == 1
