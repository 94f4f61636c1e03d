"""Hyperparameter search methods as pure state machines, and the adapters that drive them.

    events, method                       the vocabulary: events in, actions out
    single, random_search, grid          methods that run every trial to its end
    asha, promotion, adaptive_asha       methods that compare trials while they run
    slots, rung, halving                 what methods share: which trials hold slots, which are best at a length
    preview                              what a method will do
    space, domains, numeric              hyperparameter spaces: their YAML, and what can be drawn
    samplers, convert                    what draws from a space; spaces of Optuna and Ray Tune converted
    search, views                        the one object that a driver holds, and what it knows of each trial
    journal, records, recorded           the append-only log, and its JSON; a replay of it restores a search
    simulate, simulator                  a search in virtual time
    testing, histories                   the contract of methods, for yours too; random histories to check it
    optuna_sampler, _trials, _space, _storage    the adapter to Optuna; not imported here
    ray_tune                             the adapter to Ray Tune; not imported here

Nothing imported here imports torch, ray or optuna.
"""

from searchers.adaptive_asha import AdaptiveASHA
from searchers.asha import ASHA
from searchers.convert import from_optuna, from_ray_tune
from searchers.errors import FieldError, IllegalEvent, JournalError, MethodError, SpaceError
from searchers.events import (
    Action,
    Create,
    Done,
    DoneReason,
    Event,
    Exited,
    Pause,
    Reason,
    Reported,
    Resume,
    Started,
    Stop,
)
from searchers.grid import Grid
from searchers.journal import Journal
from searchers.method import Method
from searchers.preview import BracketPreview, Preview, RungPreview, preview
from searchers.promotion import PromotionASHA
from searchers.random_search import RandomSearch
from searchers.rung import rung_lengths
from searchers.samplers import FirstPoints, GridSampler, RandomSampler, Sampler
from searchers.search import Search
from searchers.single import Single
from searchers.space import Space
from searchers.space import parse as parse_space
from searchers.views import State, TrialView

__all__ = [
    "ASHA",
    "Action",
    "AdaptiveASHA",
    "BracketPreview",
    "Create",
    "Done",
    "DoneReason",
    "Event",
    "Exited",
    "FieldError",
    "FirstPoints",
    "Grid",
    "GridSampler",
    "IllegalEvent",
    "Journal",
    "JournalError",
    "Method",
    "MethodError",
    "Pause",
    "Preview",
    "PromotionASHA",
    "RandomSampler",
    "RandomSearch",
    "Reason",
    "Reported",
    "Resume",
    "RungPreview",
    "Sampler",
    "Search",
    "Single",
    "Space",
    "SpaceError",
    "Started",
    "State",
    "Stop",
    "TrialView",
    "from_optuna",
    "from_ray_tune",
    "parse_space",
    "preview",
    "rung_lengths",
]
