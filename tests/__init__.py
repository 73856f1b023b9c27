"""All tests."""

import os

import torch

# Where there is no GPU, numpy runs the kernels in Triton: it looks for this when some test is the first to import it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
