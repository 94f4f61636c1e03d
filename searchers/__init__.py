"""Hyperparameter search methods as pure state machines, and the adapters that drive them.

    events, method                       the vocabulary: events in, actions out
    single, random_search, asha          methods, on roster (who runs, who has ended) and rung (who goes on)
    space, domains, samplers, convert    what is drawn, and from where
    search                               the one object that a driver holds
    journal                              append-only log; replay is restore
    simulate                             a search in virtual time
    testing                              the contract that every method keeps, yours too
    optuna_sampler, ray_tune             the adapters to Optuna and to Ray Tune; not imported here

Nothing here imports torch, ray or optuna.
"""

from searchers.asha import ASHA, rung_lengths
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
from searchers.journal import Journal
from searchers.method import Method
from searchers.random_search import RandomSearch
from searchers.samplers import FirstPoints, GridSampler, RandomSampler, Sampler
from searchers.search import Search, State, TrialView
from searchers.single import Single
from searchers.space import Space
from searchers.space import parse as parse_space

__all__ = [
    "ASHA",
    "Action",
    "Create",
    "Done",
    "DoneReason",
    "Event",
    "Exited",
    "FieldError",
    "FirstPoints",
    "GridSampler",
    "IllegalEvent",
    "Journal",
    "JournalError",
    "Method",
    "MethodError",
    "Pause",
    "RandomSampler",
    "RandomSearch",
    "Reason",
    "Reported",
    "Resume",
    "Sampler",
    "Search",
    "Single",
    "Space",
    "SpaceError",
    "Started",
    "State",
    "Stop",
    "TrialView",
    "parse_space",
    "rung_lengths",
]
