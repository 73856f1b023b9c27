"""Warnings about trainings that are private, and probably not what was meant."""

from __future__ import annotations

from torch.optim import Optimizer

from dpbench.optimizers import NoiseAware
from dpbench.privacy.accounting.stated_plan import own_process
from dpbench.privacy.budget import TrainingLength
from dpbench.privacy.mechanism.noise_process import Noise
from dpbench.privacy.mechanism.plan import ReleasePlan
from dpbench.privacy.mechanism.recipe import Recipe
from dpbench.privacy.mechanism.training_plan import TrainingPlan
from dpbench.privacy.releases import ReleaseEngine
from dpbench.records.source import require

_NEARLY_ALL = 0.99  # of a target


def doubt_about_noise(noise: Noise) -> str | None:
    """Say whose the noise is, where it is somebody's own."""
    process = own_process(noise.to_dict())
    if process is None:
        return None
    return (
        f"the noise is drawn by {process}, which is not dpbench's: nothing checks that its noise has the stated "
        "multiplier, on which epsilon depends (CONTRIBUTING.md: what every mechanism must show)."
    )


def doubt_about_length(releases: ReleaseEngine) -> str | None:
    """Say where noise was computed for more releases than were made, and how much would have been enough."""
    budget = releases.budget
    planned = releases.planned_releases
    made = releases.num_releases
    if planned is None or not 0 < made < planned:
        return None
    target = require(budget.target_epsilon)
    epsilon = budget.epsilon()
    if epsilon > _NEARLY_ALL * target:
        return None
    scale = budget.calibrated(releases.mechanism.training_plan, TrainingLength(made))
    z = require(releases.noise_multiplier)
    return (
        f"{made} of {planned} planned releases were made: epsilon is {epsilon:.4g} of target_epsilon={target:g}. "
        f"For {made}, noise_multiplier={scale * z:.4g} would have been enough instead of {z:.4g}."
    )


def doubt_about_correction(recipe: Recipe, optimizer: Optimizer) -> str | None:
    """Say that an optimizer knows the noise before its correction only."""
    if recipe.denoiser is None or not isinstance(optimizer, NoiseAware):
        return None
    return (
        f"{type(optimizer).__name__} expects all of the noise that was added to the gradients, and error correction "
        "removes a part of it: leave out correction_threshold, or use an optimizer that does not know the noise (adam)."
    )


def doubt_about_turns(plan: TrainingPlan) -> str | None:
    """Say where records take turns for nothing: their batches cost what those of banded noise do."""
    sampling = plan.sampling
    if sampling.kind != "cyclic_poisson" or not plan.noise.independent:
        return None
    return (
        f"records take turns in {sampling.cycle} groups: a round of batches costs what one Poisson batch "
        f"{sampling.cycle} times as large does, and only noise that is correlated among steps gains by it "
        "(strategy.noise=banded)."
    )


def doubt_about_statistics(plan: ReleasePlan) -> str | None:
    """Say where statistics leave the gradients much more noise than was asked for."""
    if plan.gradient_multiplier <= 1.5 * plan.noise_multiplier:
        return None
    return (
        f"the statistics beside the gradient cost so much that its own noise multiplier is "
        f"{plan.gradient_multiplier:.3g} instead of {plan.noise_multiplier:.3g}: give the statistics more noise "
        "(count_noise_std, norm_noise_multiplier), or clip fewer groups."
    )
