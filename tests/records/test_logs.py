"""A journal for a person."""

from __future__ import annotations

from dray.config.load import load_config
from dray.records.logs import event_lines


def test_start_of_a_trial_shows_its_hyperparameters_by_dotted_names() -> None:
    space = {
        "global_batch_size": 16,
        "clip": {"type": "const", "val": 1.5},
        "optimizer": {"name": "Adam", "lr": {"type": "double", "minval": 0.02, "maxval": 0.2}},
        "width": {"type": "categorical", "vals": [[6, 12], [3]]},
    }
    searcher = {"name": "single", "metric": "loss", "max_length": {"batches": 1}}
    config = load_config({"entrypoint": "a:A", "searcher": searcher, "hyperparameters": space})
    hparams = {"global_batch_size": 16, "clip": 1.5, "optimizer": {"name": "Adam", "lr": 0.1234567}, "width": [6, 12]}
    records = [{"event": "started", "trial": 3, "hparams": hparams}]
    assert list(event_lines(config, records)) == ["trial 3 started: optimizer.lr=0.12346 width=[6, 12]"]


def test_a_choice_between_mappings_is_shown_in_full() -> None:
    space = {"optimizer": {"type": "categorical", "vals": [{"name": "SGD"}, {"name": "Adam", "eps": 0.1}]}}
    searcher = {"name": "single", "metric": "loss", "max_length": {"batches": 1}}
    config = load_config({"entrypoint": "a:A", "searcher": searcher, "hyperparameters": space})
    records = [{"event": "started", "trial": 0, "hparams": {"optimizer": {"name": "Adam", "eps": 0.1}}}]
    assert list(event_lines(config, records)) == ["trial 0 started: optimizer.name=Adam optimizer.eps=0.1"]
