"""Refusals of all that would break the guarantee silently, a guard for each."""

from dpbench.guards._module_writes import Writes
from dpbench.guards._number_of_records import NumberOfRecords
from dpbench.guards._released_gradients import ReleasedGradients
from dpbench.guards._saved_records import SavedRecords
from dpbench.guards._trainer_settings import TrainerSettings
from dpbench.guards.choices import Choices
from dpbench.guards.earlier_fits import EarlierFits
from dpbench.guards.guard import Guard
from dpbench.guards.lots import DrawnLots
from dpbench.guards.parameters import Parameters
from dpbench.guards.public_networks import PublicNetworks

__all__ = ["EVERY_TRAINING", "LIGHTNING", "Guard"]

EVERY_TRAINING: tuple[type[Guard], ...] = (
    Parameters,
    DrawnLots,
    SavedRecords,
    NumberOfRecords,
    PublicNetworks,  # before `Writes`, which looks once the lot is back in its place
    Writes,
    ReleasedGradients,
    EarlierFits,
)
"""Of every private training, a plain loop's too, in the order in which they look."""

LIGHTNING: tuple[type[Guard], ...] = (Choices, TrainerSettings, *EVERY_TRAINING)
"""Of a Trainer's training."""
