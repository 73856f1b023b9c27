"""Stack Exchange's Posts.xml: bags of words with tags by who asks, and clear errors."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

import pytest
import torch

from dpbench.capabilities.own_data.posts import questions_of, read_posts, words_of_others
from dpbench.capabilities.own_data.texts import bags_of_words
from dpbench.capabilities.users.sources import UserData, user_source
from dpbench.errors import DataError


def row(number: int, user: str, body: str, title: str = "", tags: str = "", kind: int = 1) -> str:
    said = {"Id": number, "PostTypeId": kind, "Body": body, "Title": title, "Tags": tags, "OwnerUserId": user}
    return "<row " + " ".join(f"{k}={quoteattr(str(v))}" for k, v in said.items() if v) + " />\n"


POSTS = [
    row(1, "7", "<p>Hops, hops &amp; malt?</p>", "What are hops", "<hops><malt>"),
    row(2, "9", "<p>Malt is roasted. Malt is food.</p>", kind=2),
    row(3, "7", "<a href='malt'>Yeast</a>", "Which yeast", "|yeast|"),
    row(4, "8", "Where is the malt", "Malt", "<malt>"),
    row(5, "8", "secret answer", kind=2),
    row(6, "", "Who was I", "deleted", "<deleted>"),
    row(7, "10", "no tags", "none"),
]


def site(root: Path, rows: list[str] = POSTS) -> Path:
    path = root / "stackexchange" / "beer" / "Posts.xml"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(rows)
    path.write_text(f'\ufeff<?xml version="1.0" encoding="utf-8"?>\n<posts>\n{content}</posts>', encoding="utf-8")
    return path


def test_posts_are_words_and_tags(tmp_path: Path) -> None:
    posts = list(read_posts(site(tmp_path)))
    assert [post.user for post in posts] == ["7", "9", "7", "8", "8", None, "10"]
    assert posts[0].words == ["what", "are", "hops", "hops", ",", "hops", "&", "malt", "?"]
    assert posts[2].words == ["which", "yeast", "yeast"]  # markup is no word
    assert [post.tags for post in posts[:4]] == [["hops", "malt"], [], ["yeast"], ["malt"]]


def test_the_vocabulary_is_of_people_who_asked_nothing_with_a_tag(tmp_path: Path) -> None:
    posts, tags = questions_of(site(tmp_path))
    assert [post.user for post in posts] == ["7", "7", "8"]  # a question of a deleted account is nobody's
    assert tags == {"deleted": 1, "hops": 1, "malt": 2, "yeast": 1}
    others = words_of_others(site(tmp_path), {"7", "8"})
    assert others["malt"] == 2 and "none" in others
    assert not {"secret", "hops", "yeast", "deleted"} & set(others)  # of users 7 and 8, who ask


def test_bags_of_words(tmp_path: Path) -> None:
    posts, _ = questions_of(site(tmp_path))
    words, tags = [post.words for post in posts[:2]], [post.tags for post in posts[:2]]
    examples: Any = bags_of_words(words, tags, ["malt", "hops", "yeast"], ["deleted", "hops", "malt", "yeast"], 5, 6)
    features, targets = examples.__getitems__([0, 1]).batch
    assert features.dtype == targets.dtype == torch.float32
    assert torch.allclose(features, torch.tensor([[1 / 9, 3 / 9, 0, 0, 0], [0, 0, 2 / 3, 0, 0]]))
    assert targets.tolist() == [[0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0]]


def load(root: Path, **options: Any) -> UserData:
    return user_source("stackexchange_tags").read(root, False, options, "permutation")


def test_held_out_users(tmp_path: Path) -> None:
    site(tmp_path, [row(i, str(i % 10), f"word{i}", "title", "<t>") for i in range(1, 31)])
    data = load(tmp_path, num_features=7, num_tags=3, held_out=0.3)
    assert data.test_users is not None and not set(data.train.names) & set(data.test_users.names)
    assert (len(data.train), len(data.test)) == (7, 9)  # type: ignore[arg-type]
    assert data.model_options == {"num_features": 7, "num_tags": 3}
    assert "beer.stackexchange.com" in data.attribution and "CC BY-SA" in data.attribution
    shares, tags = data.noise_batch(4, torch.Generator().manual_seed(0))  # type: ignore[misc]
    assert torch.allclose(shares.sum(1), torch.ones(4)) and tags.shape == (4, 3)
    (tmp_path / "words").write_text("word0\nword3\n")
    given = load(tmp_path, path="stackexchange/beer/Posts.xml", vocabulary=str(tmp_path / "words"), num_tags=0)
    assert given.model_options == {"num_features": 10_000, "num_tags": 1}
    given.train.watch()  # who looks on must not take SciPy's matrices, which have no length, for data sets
    assert given.train.batch(0, [0])[0].shape == (1, 10_000)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([*POSTS[:2], '<row Id="3" Body="cut'], r"Posts\.xml is damaged after row 2 \("),
        (["<row Id='77' PostTypeId='1' />"], r"row 0 \(Id 77\) has no Body"),
        ([POSTS[1]], "contains no tagged question of a user"),
        ([POSTS[0]], "has one user: none can be held out"),
    ],
)
def test_damaged_posts(rows: list[str], says: str, tmp_path: Path) -> None:
    site(tmp_path, rows)
    with pytest.raises(DataError, match=says):
        load(tmp_path)


def test_other_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"file not found: .*wine.Posts\.xml\. It is in the site's archive"):
        load(tmp_path, site="wine")
    for content, says in {"<users></users>": "begins with <users>", "": "is damaged after row 0"}.items():
        (tmp_path / "Posts.xml").write_text(content)
        with pytest.raises(DataError, match=says):
            load(tmp_path, path="Posts.xml")


def test_a_long_file_is_read_without_holding_it(tmp_path: Path) -> None:
    path = site(tmp_path, [row(i, "1", "word " * 200, kind=2) for i in range(2_000)])
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_posts(path)) == 2_000
        assert tracemalloc.get_traced_memory()[1] < 1e6 < path.stat().st_size
    finally:
        tracemalloc.stop()
