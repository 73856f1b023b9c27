"""A round of DP-FedAvg against the limit, a first version, pfl-research and Flower: `python -m benchmarks users`."""
