"""Hyperparameter search methods as pure state machines, and the adapters that drive them.

    events, method                       the vocabulary: events in, actions out
    random_search                        methods that run every trial to its end: random, grid, single
    asha, promotion, adaptive_asha       methods that compare trials while they run
    pbt, pb2                             population-based training, and a model of its trials
    repeats, intervals                   the best trials run again with other seeds; means and differences of runs
    slots, rung                          shared by the methods: slots for trials, and the best trials at a length
    objectives, pareto                   several metrics: their directions and limits, and the order of trials
    previews                             the expected course of a search
    space, domains, numeric              hyperparameter spaces: their YAML and their domains
    samplers, convert                    draws from a space; spaces converted from Optuna and Ray Tune
    memory_model                         where trials fit in memory, for samplers that learn
    beliefs                              a person's beliefs about good hyperparameters, for multi_fidelity
    search, views                        the object that a driver holds, and its view of each trial
    journal, records                     the append-only log and its JSON; replaying it restores a search
    simulate                             a search in virtual time
    testing                              the contract of methods, checked on random histories; also for your own
    optuna_sampler, _trials, _space      the adapter to Optuna; not imported here
    ray_tune                             the adapter to Ray Tune for dray's own trials; not imported here
    tune, tune_trials                    the adapter to Ray Tune for any `Tuner`; not imported here
    answers                              shared by both: a search's decisions as answers to a trial's result

Nothing named here imports torch, ray or optuna. Names are loaded on first use, so that importing an error type does not
import the methods.
"""

# ruff: noqa: F401
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from searchers.adaptive_asha import AdaptiveASHA
    from searchers.asha import ASHA
    from searchers.asha_promotion import PromotionASHA
    from searchers.auto import Auto
    from searchers.convert import from_optuna, from_ray_tune
    from searchers.errors import DamagedFile, FieldError, IllegalEvent, JournalError, MethodError, SpaceError
    from searchers.events import (
        Action,
        Create,
        Done,
        DoneReason,
        Event,
        Exited,
        Losses,
        Pause,
        Reason,
        Repeat,
        Reported,
        Requested,
        Resume,
        Source,
        Started,
        Stop,
    )
    from searchers.journal import Journal
    from searchers.method import Method
    from searchers.objectives import Metric, Objectives
    from searchers.previews import BracketPreview, Preview, RungPreview, preview
    from searchers.random_search import Grid, RandomSearch, Single
    from searchers.repeats import Repeats
    from searchers.rung import rung_lengths
    from searchers.samplers import FirstPoints, GridSampler, RandomSampler, Sampler
    from searchers.search import Search
    from searchers.space import Space
    from searchers.space import parse as parse_space
    from searchers.views import State, TrialView

_HOMES = {
    "searchers.adaptive_asha": "AdaptiveASHA",
    "searchers.asha": "ASHA",
    "searchers.asha_promotion": "PromotionASHA",
    "searchers.auto": "Auto",
    "searchers.convert": "from_optuna from_ray_tune",
    "searchers.errors": "DamagedFile FieldError IllegalEvent JournalError MethodError SpaceError",
    "searchers.events": "Action Create Done DoneReason Event Exited Losses Pause Reason Repeat Reported Requested "
    "Resume Source Started Stop",
    "searchers.journal": "Journal",
    "searchers.method": "Method",
    "searchers.objectives": "Metric Objectives",
    "searchers.previews": "BracketPreview Preview RungPreview preview",
    "searchers.random_search": "Grid RandomSearch Single",
    "searchers.repeats": "Repeats",
    "searchers.rung": "rung_lengths",
    "searchers.samplers": "FirstPoints GridSampler RandomSampler Sampler",
    "searchers.search": "Search",
    "searchers.space": "Space parse_space",
    "searchers.views": "State TrialView",
}
_RENAMED = {"parse_space": "parse"}
__all__ = sorted(name for names in _HOMES.values() for name in names.split())


def __getattr__(name: str) -> object:
    home = next((module for module, names in _HOMES.items() if name in names.split()), None)
    if home is None:
        raise AttributeError(f"module 'searchers' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), _RENAMED.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
