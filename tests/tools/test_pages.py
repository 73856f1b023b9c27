"""Pages that are made from the code are what the code makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import pages


@pytest.mark.filterwarnings("ignore")  # of layers that are tried
@pytest.mark.parametrize(
    "name",
    [
        "map",
        "guards",
        "layers",
        "audits",
        pytest.param("combinations", marks=pytest.mark.long),  # trains 1,872 combinations
    ],
)
def test_a_committed_page_is_up_to_date(name: str) -> None:
    assert pages.committed(name) == pages.up_to_date(name), f"run `make {name}`"


def test_marks_that_are_missing_or_doubled_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    path = tmp_path / pages.PAGES["guards"].file
    path.parent.mkdir()
    for text in ("no marks", "<!-- guards: written by `make guards` -->" * 2 + "<!-- end of guards -->"):
        path.write_text(text)
        with pytest.raises(ValueError, match="once each"):
            pages.up_to_date("guards")
    path.write_text("before <!-- guards: written by `make guards` --> old <!-- end of guards --> after")
    assert pages.main(["guards"]) == 0
    text = path.read_text()
    assert text.startswith("before <!--") and text.endswith("--> after") and "| guard | what" in text


def test_a_page_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert pages.main(["gaurds"]) == 2
    assert "map,guards,layers" in capsys.readouterr().err
