"""Families of ledgers are computed once: a curve of one takes a tenth of a second, and an audit asks for a dozen."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import pytest

from dpbench.capabilities.auditing import audit, labels, report
from dpbench.capabilities.auditing.family import Family
from dpbench.privacy.events import Event


@pytest.fixture(scope="session", autouse=True)
def _equal_ledgers_have_one_family() -> Iterator[None]:
    kept = functools.cache(lambda events, delta: Family(dict(events), delta))

    def family_of(events: Mapping[Event, int], delta: float) -> Family:
        return kept(tuple(events.items()), delta)

    with pytest.MonkeyPatch.context() as patch:
        for module in (audit, labels, report):
            patch.setattr(module, "Family", family_of)
        yield
