"""Results of runs: records, logs, figures."""
