"""Posts of a Stack Exchange site, from `Posts.xml` of its public dump."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from dpbench.data.texts import words
from dpbench.errors import DataError, brief

_MARKUP = re.compile(r"<[^>]*>")
_TAG = re.compile(r"<([^<>]+)>|([^|<>]+)")  # <a><b>, or |a|b| of newer dumps
_QUESTION = "1"


class Post(NamedTuple):
    """A post of a site.

    Attributes:
        user: Number of the author; None: an account that was deleted.
        words: Words of title and body, without markup.
        tags: Tags of a question; an answer has none.
    """

    user: str | None
    words: list[str]
    tags: list[str]


def read_posts(path: str | Path) -> Iterator[Post]:
    """Questions and answers of `Posts.xml`, one after the other; of any length.

    Raises:
        DataError: The file is absent or damaged.
    """
    path = Path(path)
    number = 0
    if not path.is_file():
        raise DataError(f"file not found: {path}. It is in the site's archive of the Stack Exchange data dump.")
    try:
        with path.open("rb") as file:
            events = ElementTree.iterparse(file, events=("start", "end"))
            _, root = next(events)
            if root.tag != "posts":
                raise DataError(f"{path} is not a Posts.xml: it begins with <{root.tag}>, not with <posts>.")
            for event, row in events:
                if event == "end" and row.tag == "row":
                    yield _post(row, number, path)
                    number += 1
                    root.clear()  # or the rows that were read stay in memory
    except ElementTree.ParseError as error:
        raise DataError(f"{path} is damaged after row {number} ({brief(error)}): get an intact copy.") from error


def _post(row: ElementTree.Element, number: int, path: Path) -> Post:
    for attribute in ("PostTypeId", "Body"):
        if row.get(attribute) is None:
            raise DataError(f"{path}: row {number} (Id {row.get('Id')}) has no {attribute}: get an intact copy.")
    text = html.unescape(_MARKUP.sub(" ", f"{row.get('Title', '')} {row.get('Body')}"))
    tags: list[str] = []
    if row.get("PostTypeId") == _QUESTION:
        tags = ["".join(match) for match in _TAG.findall(row.get("Tags", ""))]  # one of the two groups is empty
    return Post(row.get("OwnerUserId"), words(text), tags)


def questions_of(path: str | Path) -> tuple[list[Post], Counter[str]]:
    """Read the tagged questions of a site that have an owner, and how many questions have each tag.

    Of questions of deleted accounts, only the tags are counted.

    Raises:
        DataError: The file is absent or damaged, or holds no tagged question.
    """
    tags: Counter[str] = Counter()
    posts = []
    for post in read_posts(path):
        tags.update(post.tags)
        if post.tags and post.user is not None:
            posts.append(post)
    if not posts:
        raise DataError(f"{path} contains no tagged question of a user.")
    return posts, tags


def words_of_others(path: str | Path, users: Collection[str | None]) -> Counter[str]:
    """How often each word stands in the posts of a site that are of none of these users, nor of a deleted account."""
    counts: Counter[str] = Counter()
    for post in read_posts(path):
        if post.user is not None and post.user not in users:
            counts.update(post.words)
    return counts
