"""Capabilities, a folder for each: own data, recorded graphs, audits, attacks, synthetic data, export and more."""
