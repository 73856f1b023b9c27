"""The options that all private strategies have, and the recipe that they make with a strategy's own."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from importlib.metadata import entry_points
from inspect import Parameter
from typing import Annotated, Any, ClassVar, Literal, dataclass_transform

from pydantic import AfterValidator, Field

from dpbench.errors import ConfigurationError
from dpbench.options import Count, PositiveInt, Share, check_options, options_of
from dpbench.privacy.gradients.discretization import Discretization, Values
from dpbench.privacy.gradients.engine import LossReduction
from dpbench.privacy.gradients.method import GradientsName
from dpbench.privacy.mechanism.denoising import ErrorCorrection, Estimate, Hypotheses, Scale
from dpbench.privacy.mechanism.metrics import PrivateMetrics
from dpbench.privacy.mechanism.noise_process import MakeNoise, Noise, noise_of
from dpbench.privacy.mechanism.recipe import Recipe
from dpbench.privacy.mechanism.schedules import FORMS, Factors, Schedule, Schedules, check_schedule
from dpbench.records.examples import Examples
from dpbench.records.source import RecordSource
from dpbench.session.audit import Audit

_NOISES = "dpbench.noises"
"""Group of entry points: name of a noise process → function of the number of bands, None where none was given."""
_SCHEDULES = {"noise_multiplier": "noise_schedule", "max_grad_norm": "max_grad_norm_schedule"}
"""Option → the one by which it moves over the steps."""
_OF_EXAMPLES = ("loss_reduction", "max_physical_batch_size", "microbatch_size", "gradients")


@dataclass_transform(eq_default=False)
class CheckedOptions:
    """Base of dataclasses with options that are checked by their annotations before `__init__` runs.

    A subclass is made a dataclass by itself; one that has written an `__init__` keeps it.

    Raises:
        ConfigurationError: An option is unknown, or does not fit its annotation.
    """

    _has_own_init: ClassVar[bool] = False

    def __init_subclass__(cls, kw_only: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        inherits = any(vars(base).get("_has_own_init", False) for base in cls.__mro__[1:])
        cls._has_own_init = "__init__" in vars(cls)
        dataclass(eq=False, repr=False, kw_only=kw_only, init=not inherits)(cls)
        if "__init__" in vars(cls):
            setattr(cls, "__init__", _checking(vars(cls)["__init__"]))  # noqa: B010 (an assignment is not typed)

    def __repr__(self) -> str:
        options = [f"{name}={value!r}" for name, value in vars(self).get("_given_options", {}).items()]
        return f"{type(self).__name__}({', '.join(options)})"


def _checking(init: Callable[..., None]) -> Callable[..., None]:
    """Make an `__init__` check its arguments first."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(init).parameters.values())[1:]
    positional = [parameter.name for parameter in parameters if parameter.kind in kinds]
    takes_more = any(parameter.kind is Parameter.VAR_POSITIONAL for parameter in parameters)

    @functools.wraps(init)
    def checking(self: Any, *values: Any, **options: Any) -> None:
        if type(self).__init__ is not checking:
            # Reached by `super().__init__` of a subclass, which has checked.
            init(self, *values, **options)
            return
        if len(values) > len(positional) and not takes_more:
            raise ConfigurationError(
                f"{type(self).__name__} takes at most {len(positional)} positional values "
                f"({', '.join(positional) or 'none'}), not {len(values)}: write name=value."
            )
        by_place = dict(zip(positional, values, strict=False))
        for name in by_place:
            if name in options:
                raise ConfigurationError(f"{name} is given twice, by position and by name.")
        checked = check_options(type(self), by_place | options)
        defaults = options_of(type(self))
        self._given_options = {}
        for name, value in checked.items():
            if type(value) is not type(defaults[name].default) or value != defaults[name].default:
                self._given_options[name] = value
        init(self, *values[len(positional) :], **checked)

    return checking


def _no_class(source: RecordSource) -> RecordSource:
    # A class has the methods of the protocol, too.
    if isinstance(source, type):
        raise ValueError
    return source


Records = Annotated[
    RecordSource,
    AfterValidator(_no_class),
    "a source of records, an object with the methods of dpbench.records.source.RecordSource,",
]

NoiseMultiplier = Annotated[float, "a positive number (strategy=none trains without privacy)"]
FactorSchedule = Annotated[Schedule, f"{FORMS}, or a list with a factor for each step, or a function"]
LedgerFile = Annotated[str, Field(pattern=r"\S"), "the name of a file"]


class StrategyOptions(CheckedOptions, ABC, kw_only=True):
    """Options that all private strategies have.

    Args:
        noise_multiplier: z, noise of the whole release, statistics included, in units of its sensitivity to one added
            or removed record.
        target_epsilon: Budget. Alone, the noise multiplier is found for the planned number of steps; with a
            noise_multiplier, training stops before the step that would exceed it.
        noise_schedule: Factors of z over the planned steps: "linear:E", "exponential:E" or "cosine:E" (from 1 to E),
            "step:F@P/F@P" (F from the share P of the steps on), a factor for each step, or a function of the share of
            steps completed. With a target, z is found for the whole training. None: constant.
        noise: "gaussian", independent from step to step; "banded", correlated over `bands` steps, so that running sums
            of releases carry less of it (batches: cyclic_poisson); or the name of a plug-in's noise.
        bands: Number of steps over which noise is correlated; 1: independent noise; None: noise is not "banded".
        max_grad_norm_schedule: Schedule of the bounds of all groups; not with bounds that adapt.
        delta: δ of the guarantee; below 1 / number of records.
        accountant: Name of the accountant that calibrates and stops, see `privacy.accounting.accountants`.
        seed: Seed of a repeatable run. Noise, batches and the model's own randomness follow from it and everything else
            that determines the sums (`callback.run_key`), so that different runs share nothing. Anyone who knows it can
            subtract the noise. None: the operating system's entropy, for models that will be published.
        max_physical_batch_size: Largest number of rows processed at once; the result is the same. "auto": all rows;
            when the memory of a GPU runs out, the batch restarts in pieces of half as many.
        microbatch_size: μ. Above 1 the gradients of the examples that were drawn into one microbatch are added up,
            divided by μ and clipped instead of each example's; an example can then move the sum by twice the bound.
        discretization_threshold: τ, above which coordinates of a record's gradient become ±1, before clipping (the
            others 0); None: no discretization.
        discretization_values: Values of coordinates beyond τ: "signs" (±1), ± the "threshold", "rescaled" signs or
            "kept" values, see `privacy.gradients.discretization.Discretization`.
        correction_threshold: ν of the error correction of the released gradient; None: no correction.
        correction_hypotheses: Likelihood of the error correction, see `privacy.mechanism.denoising.ErrorCorrection`.
        correction_scale: Quantity that ν is compared with: the noisy "sum" or "mean".
        correction_estimate: The most probable of −ν, 0, +ν (the "mode"), or their posterior "mean".
        priors: [p_down, p_stop, p_up] of the error correction; None takes equal ones.
        metrics: Private metrics: name → bound of one record's value, released as `private/<name>`; None: none.
        metrics_share: Share of the budget (of z⁻²) that they take.
        loss_reduction: How `training_step` combines records: "mean" or "sum".
        gradients: How the gradients of examples are computed: "engine", all in one backward pass; "one_by_one", each
            by an ordinary one, for every network and loss that is a function of one record; or "auto", the engine where
            it knows the network.
        executor: How the arithmetic is carried out, for speed alone: "eager", "graph" (padded batches
            repeated as CUDA graphs, and fused updates), "auto" ("graph" on a GPU, else "eager"), or the executor of a
            plug-in, with its options: NAME:OPTIONS.
        ledger: Path of the ledger; by default `ledger.jsonl` in the trainer's log folder, or, where that records
            another run, in a folder run-2 (run-3, ...) of it.
        after: Ledger of an earlier training that gave the module its weights: the second stage of one budget. The
            ledger begins with a copy of it (or continues that file, if it is the same), so that epsilon and target
            cover both: noise is found for the rest.
        fingerprint: Name of a run that may be started again in its own ledger without a checkpoint, as `dpbench train`
            does; releases on disk are then repeated. Under another name the ledger gets a new phase.
        records: Source of records that are neither examples nor microbatches, such as users.
        audit: One-run audit, whose canaries join the batches; the model learns from them, too. None: no audit.

    Raises:
        ConfigurationError: A value is out of range, or neither noise_multiplier nor target_epsilon is given.
    """

    noise_multiplier: NoiseMultiplier | None = None
    target_epsilon: float | None = None
    noise: str = "gaussian"
    bands: PositiveInt | None = None
    noise_schedule: FactorSchedule | None = None
    max_grad_norm_schedule: FactorSchedule | None = None
    delta: float = 1e-5
    accountant: str = "rdp"
    seed: Count | None = None
    max_physical_batch_size: PositiveInt | Literal["auto"] | None = None
    microbatch_size: PositiveInt = 1
    discretization_threshold: float | None = None
    discretization_values: Values = "signs"
    correction_threshold: float | None = None
    correction_hypotheses: Hypotheses = "points"
    correction_scale: Scale = "sum"
    correction_estimate: Estimate = "mode"
    priors: list[float] | None = None
    metrics: dict[str, float] | None = None
    metrics_share: Share = 0.05
    loss_reduction: LossReduction = "mean"
    gradients: GradientsName = "auto"
    executor: str = "auto"
    ledger: LedgerFile | None = None
    after: str | None = None
    fingerprint: str | None = None
    records: Records | None = None
    audit: Annotated[Audit, "an audit"] | None = None

    _fixed = False

    def __setattr__(self, name: str, value: Any) -> None:
        if self._fixed and any(field.name == name for field in fields(self)):
            schedule = _SCHEDULES.get(name)
            varying = "" if schedule is None else f"vary it over the steps by {schedule}, or "
            raise ConfigurationError(
                f"{name} cannot change after the {type(self).__name__} is made: {varying}make a new one with "
                f"{name}={value!r}."
            )
        super().__setattr__(name, value)

    def _set_solved(self, name: str, value: Any) -> None:
        """Set an option that a training has solved for."""
        object.__setattr__(self, name, value)

    @abstractmethod
    def design(self) -> Recipe:
        """Make the recipe of this strategy from its own options; the common ones are added to it.

        Raises:
            ConfigurationError: An option is out of range.
        """

    def noise_process(self, noise_multiplier: float, factors: Factors) -> Noise:
        """Make the noise of all releases; a strategy may have another process than independent Gaussian noise.

        Args:
            noise_multiplier: z, given or solved for; first, to solve for it, 1. The multipliers of all steps are
                proportional to it.
            factors: Factors of z by step: those of `noise_schedule`.
        """
        return self._make_noise()(noise_multiplier, factors)

    def _make_noise(self) -> MakeNoise:
        """Find the noise's constructor by its name."""
        if self.noise == "gaussian":
            if self.bands is not None:
                raise ConfigurationError("bands needs correlated noise: also set noise=banded.")
            return noise_of
        if type(self).noise_process is not StrategyOptions.noise_process:
            raise ConfigurationError(f"{type(self).__name__} has its own noise process: leave out noise.")
        processes = entry_points(group=_NOISES)
        if self.noise not in processes.names:
            raise ConfigurationError(f"unknown noise {self.noise!r}; known are gaussian, {', '.join(processes.names)}.")
        make_noise: MakeNoise = processes[self.noise].load()(self.bands)
        return make_noise

    def _schedules(self, recipe: Recipe) -> Schedules:
        """How noise and bounds move."""
        check_schedule("noise_schedule", self.noise_schedule)
        check_schedule("max_grad_norm_schedule", self.max_grad_norm_schedule)
        if self.max_grad_norm_schedule is not None and recipe.adaptation is not None:
            raise ConfigurationError(
                f"the bounds of {type(self).__name__} adapt to the gradients: leave out max_grad_norm_schedule, or "
                "use a strategy with fixed bounds (dpsgd)."
            )
        if self.noise_schedule is not None and not recipe.private:
            raise ConfigurationError(f"{type(self).__name__} is not private: leave out noise_schedule.")
        return Schedules(self.noise_schedule, self.max_grad_norm_schedule)

    def _with_common_parts(self, recipe: Recipe) -> Recipe:
        if self.correction_threshold is None and self.priors is not None:
            raise ConfigurationError("priors needs error correction: also set correction_threshold.")
        if self.discretization_threshold is None and self.discretization_values != "signs":
            raise ConfigurationError("discretization_values needs discretization: also set discretization_threshold.")
        parts: dict[str, Any] = {}
        if self.discretization_threshold is not None:
            parts["transform"] = Discretization(self.discretization_threshold, self.discretization_values)
        if self.correction_threshold is not None:
            parts["denoiser"] = ErrorCorrection(
                self.correction_threshold,
                self.correction_hypotheses,
                self.correction_scale,
                self.priors,
                self.correction_estimate,
            )
        if self.metrics is not None:
            parts["metrics"] = PrivateMetrics(self.metrics, self.metrics_share)
        for name in parts:
            if getattr(recipe, name) is not None:
                raise ConfigurationError(
                    f"{type(self).__name__} already has its own {name}: leave out the option for it."
                )
        return replace(recipe, **parts)

    def _source_of_records(self) -> RecordSource:
        """The source that was given, or examples; a ConfigurationError where options of examples go with another."""
        if self.records is None:
            return Examples(
                self.loss_reduction,
                self.max_physical_batch_size,
                self.microbatch_size,
                self.gradients,
            )
        for field in fields(self):
            if field.name in _OF_EXAMPLES and getattr(self, field.name) != field.default:
                raise ConfigurationError(
                    f"{field.name} applies to records made of examples, but records={type(self.records).__name__} "
                    "defines records differently: leave one of them out."
                )
        return self.records
