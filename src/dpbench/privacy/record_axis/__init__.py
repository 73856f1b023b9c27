"""Tags that say which elements of each tensor of a training step belong to which record, by construction."""

from dpbench.privacy.record_axis.mode import Event, RecordAxis
from dpbench.privacy.record_axis.tags import Axis, Over
from dpbench.privacy.record_axis.verdict import Verdict, judge, new_axis

__all__ = ["Axis", "Event", "Over", "RecordAxis", "Verdict", "judge", "new_axis"]
