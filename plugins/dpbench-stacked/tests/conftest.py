"""Fixtures of dpbench's own tests."""

from tests.conftest import *  # noqa: F403
from tests.conftest import _logging_as_it_was, _no_ink, _one_key, _quiet_and_seeded  # noqa: F401
from tests.harness.run.conftest import here  # noqa: F401
