"""What sections of a page are made of; how each looks is the template's business."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias


@dataclass(frozen=True)
class Words:
    """Paragraphs, or a list of them."""

    kind: ClassVar[str] = "words"
    lines: Sequence[str]
    listed: bool = False


@dataclass(frozen=True)
class Facts:
    """Names and what belongs to each."""

    kind: ClassVar[str] = "facts"
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Grid:
    """A table, the headings first; columns after the first `text` ones hold numbers, 0 for none."""

    kind: ClassVar[str] = "grid"
    rows: Sequence[Sequence[str]]
    text: int = 1


@dataclass(frozen=True)
class Picture:
    """A drawing; `by_epsilon` is the same over another axis, where it can be drawn over that."""

    title: str
    svg: str
    by_epsilon: str = ""
    note: str = ""


@dataclass(frozen=True)
class Pictures:
    """Drawings that share a legend: for each line its color, its dashes (numbers) and what it is."""

    kind: ClassVar[str] = "pictures"
    shown: Sequence[Picture]
    legend: Sequence[tuple[int, int, str]] = ()
    wide: bool = False


@dataclass(frozen=True)
class Image:
    """A picture of points, as a data URI."""

    kind: ClassVar[str] = "image"
    data: str
    words: str


@dataclass(frozen=True)
class Preformatted:
    """Text in columns."""

    kind: ClassVar[str] = "preformatted"
    text: str


@dataclass(frozen=True)
class Fold:
    """What is shown when somebody asks for it."""

    kind: ClassVar[str] = "fold"
    title: str
    blocks: Sequence[Block]
    open: bool = False


Block: TypeAlias = Words | Facts | Grid | Pictures | Image | Preformatted | Fold


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading; one without blocks is not shown."""

    name: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """The whole.

    Attributes:
        title: Of the page.
        subtitle: What it is about.
        doubts: What a reader has to know before anything else.
        tiles: The figures that matter most: a name, a figure, and what belongs to it.
        sections: In their order.
        axes: Whether drawings can be looked at over steps and over epsilon.
    """

    title: str
    subtitle: str
    doubts: Sequence[str]
    tiles: Sequence[tuple[str, str, str]]
    sections: Sequence[Section] = field(default_factory=list)
    axes: bool = False
