"""Hugging Face: `dpbench.PrivateTrainer`, its Trainer with private updates, and its networks in the harness."""

from importlib.util import find_spec

from dpbench.errors import ConfigurationError

if find_spec("transformers") is None:
    raise ConfigurationError('networks of Hugging Face need transformers: pip install "dpbench-lightning[hf]".')
