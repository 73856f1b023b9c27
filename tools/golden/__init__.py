"""Golden runs: small trainings whose weights, epsilons and ledgers may change only on purpose.

`python -m tools.golden compare` (`make golden`) trains them with this source and with the base revision;
`python -m tools.golden write` writes the committed values in `tests/golden/`, and `base` the hash of that revision.
"""
