"""Mutants of our own source: changed comparisons, constants, signs and conditions, removed statements; who notices?

`python -m tools.mutants reach` records once which test reaches which function. `python -m tools.mutants run` draws
mutants of each room, tries each against the quick tests that reach its function, and writes `tests/mutants.tsv`.
`python -m tools.mutants again` tries the mutants of that table again, wherever their functions have moved since.
"""
