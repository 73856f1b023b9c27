"""Fixtures of dpbench's own tests."""

import os

import torch

# Where there is no GPU, numpy runs the kernels: Triton looks for this when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.conftest import *  # noqa: F403
from tests.conftest import _logging_as_it_was, _no_ink, _one_key, _quiet_and_seeded  # noqa: F401
from tests.harness.run.conftest import here  # noqa: F401
