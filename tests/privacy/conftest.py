"""Both tiers of the engine: compiled kernels and pure PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dpbench.privacy import native


@pytest.fixture(scope="module", params=["native", "pure"])
def tier(request: pytest.FixtureRequest) -> Iterator[str]:
    """Use with `pytest.mark.usefixtures("tier")`: the test runs in both tiers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPBENCH_NATIVE", "auto")
        if request.param == "native" and native.library() is None:
            pytest.skip("no C++ compiler")  # CI insists on one
        patch.setenv("DPBENCH_NATIVE", "on" if request.param == "native" else "off")
        yield request.param
