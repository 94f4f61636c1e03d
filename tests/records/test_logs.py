"""A journal for a person."""

from __future__ import annotations

from typing import Any

import pytest

from dray.config.load import load_config
from dray.records.logs import event_lines


@pytest.mark.parametrize(
    ("space", "drawn", "shown"),
    [
        (
            {
                "global_batch_size": 16,
                "clip": {"type": "const", "val": 1.5},
                "optimizer": {"name": "Adam", "lr": {"type": "double", "minval": 0.02, "maxval": 0.2}},
                "width": {"type": "categorical", "vals": [[6, 12], [3]]},
            },
            {"global_batch_size": 16, "clip": 1.5, "optimizer": {"name": "Adam", "lr": 0.1234567}, "width": [6, 12]},
            ": optimizer.lr=0.12346 width=[6, 12]",
        ),
        (
            {"optimizer": {"type": "categorical", "vals": [{"name": "SGD"}, {"name": "Adam", "eps": 0.1}]}},
            {"optimizer": {"name": "Adam", "eps": 0.1}},
            ": optimizer.name=Adam optimizer.eps=0.1",
        ),
        ({"lr": 0.1}, {"lr": 0.1}, ""),
    ],
    ids=["dotted names", "a choice between mappings, in full", "nothing is searched"],
)
def test_start_of_a_trial_shows_what_is_searched(space: Any, drawn: Any, shown: str) -> None:
    searcher = {"name": "single", "metric": "loss", "max_length": {"batches": 1}}
    config = load_config({"entrypoint": "a:A", "searcher": searcher, "hyperparameters": space})
    records = [{"event": "started", "trial": 3, "hparams": drawn}]
    assert list(event_lines(config, records)) == [f"trial 3 started{shown}"]


def test_what_a_driver_says_of_all_trials_is_in_the_log() -> None:
    searcher = {"name": "single", "metric": "loss", "max_length": {"batches": 1}}
    config = load_config({"entrypoint": "a:A", "searcher": searcher, "hyperparameters": {"global_batch_size": 16}})
    records = [
        {"event": "new_processes", "trial": 1, "code": None, "text": "the trials get new processes from now on"},
        {"event": "unread", "unread": ["dropuot"], "read": ["lr"]},
    ]
    assert list(event_lines(config, records)) == [
        "the trials get new processes from now on",
        "dropuot is searched, but no trial has read it; read: lr",
    ]
