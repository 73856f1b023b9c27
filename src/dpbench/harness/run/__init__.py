"""Running of jobs: command line, configuration, training, processes, logs, evaluation."""
