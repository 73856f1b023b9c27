"""Mutants of our own source: changed comparisons, constants, signs and conditions, removed statements; who notices?

`tests/mutants.tsv` has some of each room with the test that noticed each; `python -m tools.mutants` tries them again,
wherever their functions have moved since.
"""
