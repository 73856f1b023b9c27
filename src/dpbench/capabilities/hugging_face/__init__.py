"""`dpbench.PrivateTrainer`: Hugging Face's Trainer with private updates."""

from importlib.util import find_spec

from dpbench.errors import ConfigurationError

if find_spec("transformers") is None:
    raise ConfigurationError('dpbench.PrivateTrainer needs transformers: pip install "dpbench-lightning[hf]".')
