"""What an auditor saw of a run's canaries, and the bounds on epsilon and the checks of the declaration that follow."""

from dpbench.privacy.auditing.scores import Scores, ScoreSums

__all__ = ["ScoreSums", "Scores"]
