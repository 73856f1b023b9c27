"""The catalogue of refusals: complete, and each entry is what its test sees."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from dpbench.errors import ConfigurationError
from tools import refusals
from tools.refusals import Refusal, difference

ROOT = Path(__file__).parents[2]
_OWN_NAME = "test_a_test_that_sees_another_refusal_fails"
TEST = "tests/x.py::test_negative[seed]"
LINE = "seed must not be negative, got -3: leave out the strategy's seed= or give a positive whole number."


def test_every_test_with_a_refusal_has_an_entry() -> None:
    missing = refusals.uncatalogued(refusals.read())
    assert not missing, f"run `python -m tools.refusals write`: {len(missing)} tests have no entry, {missing[0]} first."


def test_every_entry_has_its_test() -> None:
    gone = {refusals.function_of(test) for test in refusals.read()} - refusals.all_tests()
    assert not gone, f"these tests are gone: {sorted(gone)}; where that is meant, `python -m tools.refusals write`."


def test_the_catalogue_is_as_it_is_written() -> None:
    assert refusals.text_of(refusals.read()) == refusals.CATALOGUE.read_text(encoding="utf-8")


def test_most_refusals_name_a_remedy() -> None:
    entries = [one for every in refusals.read().values() for one in every if one.error != refusals.NOT_SEEN]
    assert len(entries) >= 300
    assert sum(bool(one.cause or one.remedy) for one in entries) >= 0.95 * len(entries)
    assert sum(bool(one.remedy) for one in entries) >= 0.3 * len(entries)
    kinds = Counter(one.error for one in entries)
    assert {"ConfigurationError", "DataError", "LedgerError", "UnsupportedModuleError"} <= {*kinds}


def test_words_are_names_and_long_words_without_paths_and_numbers() -> None:
    entry = Refusal.of("ConfigurationError", LINE)
    assert entry == Refusal("ConfigurationError", ("negative",), ("strategy", "seed=", "positive", "whole", "number"))
    assert Refusal.of("LedgerError", "/tmp/pytest-3/ledger.jsonl is damaged") == Refusal(
        "LedgerError", ("damaged",), ()
    )


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ([("ConfigurationError", LINE)], None),
        ([("ConfigurationError", LINE.replace("-3", "-7"))], None),
        ([("DataError", LINE)], "another line"),
        ([("ConfigurationError", LINE.replace("positive whole number", "better one"))], "another line"),
        ([], "sees 0 refusals"),
        ([("ConfigurationError", LINE)] * 2, "sees 2 refusals"),
    ],
)
def test_another_kind_another_remedy_and_none_are_said(seen: list[tuple[str, str]], said: str | None) -> None:
    catalogue = {TEST: [Refusal.of("ConfigurationError", LINE)]}
    line = difference(TEST, seen, catalogue)
    assert line is None if said is None else line is not None and said in line and "\n" not in line
    assert line is None or line.endswith("run `python -m tools.refusals write 'tests/x.py::test_negative'`.")
    case = difference("tests/x.py::test_negative[delta]", seen, catalogue)
    assert (case is not None and "no entry" in case) == bool(seen)
    assert difference("tests/x.py::test_new", seen, catalogue) is None  # another test names it
    unseen = {"tests/x.py::test_negative": [Refusal(refusals.NOT_SEEN, (), ())]}
    assert difference(TEST, seen, unseen) is None


def test_a_test_that_sees_another_refusal_fails(tmp_path: Path) -> None:
    """This test, when it is told to raise something else than what the catalogue has for it."""
    with pytest.raises(ConfigurationError, match="a scenario"):
        raise ConfigurationError(os.environ.get("DPBENCH_TEST_REFUSAL", "a scenario: with its familiar remedy."))
    if "DPBENCH_TEST_REFUSAL" in os.environ:
        return
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{__file__}::{_OWN_NAME}"]
    environment = {**os.environ, "DPBENCH_TEST_REFUSAL": "a scenario: without the old advice."}
    environment.pop(refusals.RECORD, None)
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "is refused by another line" in done.stdout and "python -m tools.refusals write" in done.stdout
