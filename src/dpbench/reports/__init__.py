"""What reads runs: tables, curves, comparisons, epsilons. Nothing here changes a run."""
