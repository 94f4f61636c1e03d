"""The API for training PyTorch models in trials. Names, defaults and order of events are Determined AI's."""

import enum

from dray.pytorch import first_import  # noqa: F401

# isort: split
from dray.core import DistributedContext
from dray.pytorch import samplers
from dray.pytorch.batch_functions import data_length, to_device
from dray.pytorch.cached import cached, pretrained
from dray.pytorch.context import PyTorchExperimentalContext, PyTorchTrialContext
from dray.pytorch.data import DataLoader, TorchData
from dray.pytorch.early_stopping import EarlyStopping
from dray.pytorch.init import init
from dray.pytorch.load import CheckpointLoadContext, load_trial_from_checkpoint_path
from dray.pytorch.samplers import adapt_batch_sampler
from dray.pytorch.trainer import Trainer
from dray.pytorch.trial import PyTorchTrial
from dray.training.callback import PyTorchCallback
from dray.training.errors import DataExhausted, InvalidHP, PeerFailed, ShouldExit
from dray.training.lr_scheduler import LRScheduler
from dray.training.metrics.reducers import MetricReducer, Reducer
from dray.training.parallel.fully_shard import FullyShard
from dray.training.units import Batch, Epoch, TrainUnit

# The name that old code raises in train_batch().
_ShouldExit = ShouldExit


class _TrainBoundaryType(enum.Enum):
    """Determined's kinds of boundaries in training; dray does not use them."""

    TRAIN = "TRAIN"
    VALIDATE = "VALIDATE"
    CHECKPOINT = "CHECKPOINT"
    REPORT = "REPORT"


__all__ = [
    "Batch",
    "CheckpointLoadContext",
    "DataExhausted",
    "DataLoader",
    "DistributedContext",
    "EarlyStopping",
    "Epoch",
    "FullyShard",
    "InvalidHP",
    "LRScheduler",
    "MetricReducer",
    "PeerFailed",
    "PyTorchCallback",
    "PyTorchExperimentalContext",
    "PyTorchTrial",
    "PyTorchTrialContext",
    "Reducer",
    "ShouldExit",
    "TorchData",
    "TrainUnit",
    "Trainer",
    "_TrainBoundaryType",
    "adapt_batch_sampler",
    "cached",
    "data_length",
    "init",
    "load_trial_from_checkpoint_path",
    "pretrained",
    "samplers",
    "to_device",
]
