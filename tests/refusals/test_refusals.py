"""The catalogue of refusals: each `raise` of the source has an entry, and the test that an entry names sees it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpbench.errors import ConfigurationError
from dpbench.options import require_group
from tests.refusals import recorder
from tools import refusals
from tools.refusals import UNSEEN, Refusal, Seen, carried, difference, outdated, updated

MOST_UNSEEN = 137
"""Refusals that no test sees: lower it where tests see more of them, and never raise it."""
TEST = "tests/x.py::test_negative[seed]"
SEED = Refusal("DPSGD.__init__", "ConfigurationError", "negative", "seed= positive whole number")
DELTA = Refusal("DPSGD.__init__", "ConfigurationError", "delta between", "")


def test_every_raise_has_an_entry_and_every_entry_its_test() -> None:
    line = outdated(refusals.read(), refusals.refusals(), refusals.all_tests())
    assert line is None, line


def test_every_case_of_an_entry_is_there() -> None:
    assert not recorder.gone, f"{recorder.gone[0]} is gone: run `python -m tools.refusals write` with its function."


def test_ever_fewer_refusals_are_unseen() -> None:
    unseen = [refusal for refusal, test in refusals.read().items() if test == UNSEEN]
    assert len(unseen) <= MOST_UNSEEN, f"{len(unseen)} refusals are seen by no test: write one for what is new."


def test_the_catalogue_is_as_it_is_written() -> None:
    assert refusals.text_of(refusals.read()) == refusals.CATALOGUE.read_text(encoding="utf-8")


def test_most_refusals_name_a_remedy() -> None:
    entries = refusals.refusals()
    assert sum(bool(one.cause or one.remedy) for one in entries) >= 0.9 * len(entries)
    assert sum(bool(one.remedy) for one in entries) >= 0.5 * len(entries)


SOURCE = """
from errors import ConfigurationError

REMEDY = "leave out seed="

class DPBenchError(Exception): ...
class ConfigurationError(DPBenchError, ValueError): ...

class Strategy:
    def __init__(self, seed):
        def check():
            raise ConfigurationError(f"a {'negative'} seed, {seed}: {REMEDY}, or give a {seed:05d} positive number")
        if not seed:
            raise ValueError("a bug")
        raise _too_long("seconds", 3)

def _too_long(unit, most) -> ConfigurationError:
    text = f"took too long; in /tmp/ledger.jsonl allow "
    return ConfigurationError(text + f"more {unit}")

def again():
    try:
        Strategy(0)
    except ConfigurationError as error:
        raise error from None
"""


def test_a_refusal_is_known_by_its_function_and_its_words(tmp_path: Path) -> None:
    (tmp_path / "strategy.py").write_text(SOURCE)
    assert refusals.refusals(tmp_path) == [
        Refusal("Strategy.__init__.check", "ConfigurationError", "negative", "seed= positive number"),
        Refusal("Strategy.__init__", "ConfigurationError", "seconds", "allow"),
    ]


def test_a_caught_error_leads_to_its_raise() -> None:
    with pytest.raises(ConfigurationError) as caught:
        require_group(3, "data")
    refusal = refusals.refusal_of(caught.value)
    assert refusal is not None
    assert refusal in refusals.refusals() and refusal[:2] == ("require_group", "ConfigurationError")
    with pytest.raises(ConfigurationError) as own:
        raise ConfigurationError("of a test")
    assert refusals.refusal_of(own.value) is None


@pytest.mark.parametrize(
    ("present", "tests", "said"),
    [
        ([SEED], {"tests/x.py::test_negative"}, None),
        ([SEED, DELTA], {"tests/x.py::test_negative"}, "no entry for DPSGD.__init__: ConfigurationError with 'delta"),
        ([SEED], {"tests/y.py::test_other"}, "is gone, the test of DPSGD.__init__"),
        ([], {"tests/x.py::test_negative"}, "no more DPSGD.__init__"),
    ],
)
def test_another_source_and_a_test_that_is_gone_are_one_line(
    present: list[Refusal],
    tests: set[str],
    said: str | None,
) -> None:
    line = outdated({SEED: TEST}, present, tests)
    assert line is None if said is None else line is not None and said in line and "\n" not in line


def test_what_moves_keeps_its_test_and_what_is_new_is_unseen() -> None:
    renamed = SEED._replace(function="Gaussian.check")
    reworded = SEED._replace(cause="below zero")
    tests = {"tests/x.py::test_negative"}
    assert carried({SEED: TEST}, [renamed, DELTA], tests) == {renamed: TEST, DELTA: UNSEEN}
    assert carried({SEED: TEST}, [reworded], tests) == {reworded: TEST}
    assert carried({SEED: TEST}, [SEED], {"tests/y.py::test_other"}) == {SEED: UNSEEN}


def test_a_test_that_did_not_see_its_refusal_gives_way() -> None:
    other = "tests/x.py::test_negative[long name]"
    ran = [Seen(TEST, False, frozenset()), Seen(other, False, frozenset({SEED}))]
    assert updated({SEED: TEST, DELTA: UNSEEN}, ran) == {SEED: other, DELTA: UNSEEN}
    assert updated({SEED: TEST}, ran[:1]) == {SEED: UNSEEN}
    assert updated({SEED: TEST}, []) == {SEED: TEST}  # it did not run, and may still see it


def test_a_test_that_misses_its_refusal_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError) as caught:
        require_group(3, "data")
    refusal = refusals.refusal_of(caught.value)
    assert refusal is not None
    monkeypatch.setattr(recorder, "_catalogue", {refusal: TEST})
    monkeypatch.setattr(recorder, "_witnesses", {TEST})
    monkeypatch.delenv(refusals.RECORD, raising=False)
    item: Any = SimpleNamespace(nodeid=TEST)
    with pytest.raises(pytest.fail.Exception, match="does not see .* require_group: .* if that is meant, run"):
        _run(recorder.pytest_runtest_call(item), lambda: None)
    _run(recorder.pytest_runtest_call(item), lambda: recorder._see(caught.value))
    assert difference("tests/x.py::test_new", [], {refusal: TEST}) is None


def _run(hook: Any, test: Any) -> None:
    next(hook)
    test()
    with suppress(StopIteration):
        hook.send(None)
