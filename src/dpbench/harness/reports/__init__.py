"""Reading of runs: tables, comparisons, curves, ε, audits, pages. Nothing here changes a run."""
