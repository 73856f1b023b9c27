"""Mutants of our own source: changed comparisons, constants, signs and conditions, removed statements; who notices?

`tests/mutants.tsv` has mutants that a quick test noticed, drawn from every room by a hash. `python -m tools.mutants`
tries them again, wherever their functions have moved since, and says which ones no test notices any longer.
"""
