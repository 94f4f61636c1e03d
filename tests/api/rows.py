"""The rows of API.md, in few words, and which tests show them.

A test says so by itself: `@pytest.mark.api("2.11")` above it, within `pytest.param(..., marks=...)`, or in the file's
`pytestmark`. `python -m tests.api.rows` prints a table of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

TITLES = {
    1: "Trial",
    2: "Context",
    3: "Ranks",
    4: "Data loader and samplers",
    5: "LR schedules",
    6: "Metrics",
    7: "Callbacks",
    8: "init, fit, units",
    9: "Checkpoints and resuming",
    10: "TorchWriter and the alias",
}

ROWS = {
    "1.1": "a trial defines its constructor, train_batch and both loaders",
    "1.2": "train_batch(batch, epoch_idx, batch_idx) by keyword; both count from the trial's start, also when resumed",
    "1.3": "train_batch returns a dict, or one tensor: the loss",
    "1.4": "build_callbacks: none by default; the name is the key of the saved state",
    "1.5": "exactly one of evaluate_batch and evaluate_full_dataset",
    "1.6": "evaluate_batch with or without batch_idx",
    "1.7": "evaluate_batch's batch_idx starts at 0 in each validation",
    "1.8": "evaluate_full_dataset: a torch DataLoader over all data, on the chief, a dict",
    "1.9": "evaluation_reducer: AVG by default, or one for each metric",
    "1.10": "get_batch_length: the first leaf's length, or your own",
    "1.11": "train mode while training; eval mode without gradients while validating",
    "1.12": "validation metrics keep their names; validation data are not empty",
    "1.13": "a model and an optimizer must be wrapped",
    "1.14": "any number of models, optimizers, schedules, in any order",
    "1.15": "metrics become numpy arrays; training metrics keep their names",
    "2.1": "get_hparams, get_hparam",
    "2.2": "batch sizes a slot and over all slots",
    "2.3": "global_batch_size is checked in init()",
    "2.4": "get_experiment_config, get_data_config",
    "2.5": "get_trial_seed",
    "2.6": "get_initial_batch, also when resuming",
    "2.7": "get_experiment_id, get_trial_id",
    "2.8": "get_tensorboard_path",
    "2.9": "get_tensorboard_writer",
    "2.10": "TensorBoard logging on and off",
    "2.11": "scalars for TensorBoard: Determined/<name>, Determined/val_<name>",
    "2.12": "set_stop_requested: on to the boundary, checkpoint, exit",
    "2.13": "where training is: batch, epoch, its start and end",
    "2.14": "to_device",
    "2.15": "lists of what was wrapped; device, distributed, experimental, profiler",
    "2.16": "wrap_model: on the device, DDP over several, attributes reachable",
    "2.17": "wrap_optimizer",
    "2.18": "backward as Tensor.backward",
    "2.19": "step_optimizer: clip after averaging, step, zero",
    "2.20": "gradient aggregation, averaged or summed",
    "2.21": "aggregation excludes auto_zero_grads=False",
    "2.22": "wrap_lr_scheduler",
    "2.23": "set_profiler: torch.profiler, stepped a batch, traces for TensorBoard",
    "2.24": "wrap_scaler",
    "2.25": "experimental.use_amp",
    "2.26": "configure_apex_amp",
    "2.27": "a loader that is no pytorch.DataLoader needs the checks off",
    "2.28": "disable_auto_to_device",
    "2.29": "a loader without a length is one endless epoch",
    "2.30": "a bare loader that runs out too early",
    "3.1": "DistributedContext's numbers: keywords, all or none",
    "3.2": "get_rank, get_local_rank, get_size, get_num_agents",
    "3.3": "gather and allgather, and on one machine",
    "3.4": "broadcast, and on one machine",
    "3.5": "from_torch_distributed",
    "3.6": "from_horovod, from_deepspeed, from_tf_config",
    "3.7": "several processes need torch.distributed; USE_TORCH_DISTRIBUTED",
    "4.1": "torch's arguments and defaults",
    "4.2": "arguments that exclude each other",
    "4.3": "iter and len outside of training; get_data_loader",
    "4.4": "repeat, then shard whole batches, then skip",
    "4.5": "training data repeat; a partial last batch stays unless dropped",
    "4.6": "an epoch is as long as the chief's shard, on all ranks",
    "4.7": "shuffle=True is reproducible",
    "4.8": "RepeatSampler, RepeatBatchSampler",
    "4.9": "DistributedSampler",
    "4.10": "DistributedBatchSampler",
    "4.11": "SkipSampler, SkipBatchSampler",
    "4.12": "ReproducibleShuffleSampler, ReproducibleShuffleBatchSampler",
    "5.1": "the four modes and their numbers",
    "5.2": "every batch, every epoch, every n-th; after train_batch",
    "5.3": "every batch, with aggregation: as often in all, together with the optimizer",
    "5.4": "every optimizer step, every n-th",
    "5.5": "every epoch, with aggregation: at the last step before the boundary",
    "5.6": "step, get_last_lr, state_dict, load_state_dict are passed on",
    "6.1": "Reducer: AVG over batches, SUM, MAX, MIN, over ranks",
    "6.2": "MetricReducer: reset, per_slot_reduce, cross_slot_reduce",
    "6.3": "wrap_reducer(function): one flat list in the order of one process",
    "6.4": "a name or a dict; faulty reducers are refused and named",
    "6.5": "reducers for training or validation; in the averages, not in the batches' metrics",
    "6.6": "training metrics: averages over ranks and batches, the same on all ranks",
    "6.7": "averages carry batches and epochs; None is skipped; what is no number is None",
    "7.1": "every hook exists and does nothing",
    "7.2": "the order of hooks",
    "7.3": "on_trial_startup: where training begins, and from which checkpoint",
    "7.4": "epoch hooks: whole epochs, none twice; the old form without argument",
    "7.5": "on_training_workload_end at every boundary",
    "7.6": "on_validation_epoch_end: this rank's outputs; none with evaluate_full_dataset",
    "7.7": "on_validation_end: reduced metrics on every rank",
    "7.8": "on_checkpoint_save_start and load_start may edit",
    "7.9": "checkpoint hooks: files on the chief, the same id on all ranks",
    "7.10": "on_trial_shutdown: once, reversed, also after errors",
    "7.11": "what a hook raises ends training; hooks run in the dict's order",
    "8.1": "init(): a context manager with keywords",
    "8.2": "fit(): arguments and defaults",
    "8.3": "max_length is needed; Batch and Epoch take an int",
    "8.3b": "a searcher's max_length decides, with a warning; without one fit()'s counts",
    "8.4": "periods and schedules in batches and epochs",
    "8.4b": "_TrainBoundaryType can be imported",
    "8.5": "without periods: one validation and one checkpoint at the end",
    "8.6": "coinciding boundaries: validate, save once",
    "8.7": "checkpoint policies all, none, best",
    "8.8": "step_zero_validation",
    "8.9": "test_mode",
    "8.10": "lengths and boundaries in epochs",
    "8.11": "ShouldExit",
    "8.12": "InvalidHP",
    "8.13": "other exceptions: no checkpoint, shutdown, raised again",
    "8.14": "configure_profiler",
    "8.15": "get_cluster_info, LOG_FORMAT, import_from_path",
    "8.16": "in an experiment: the best, preemption, progress, the searcher's metric",
    "9.1": "the state's file: state-dict.pth",
    "9.2": "the state's keys; random numbers and the scaler beside them",
    "9.3": "code, config, hyperparameters in the checkpoint",
    "9.3b": "metadata of the user's; metrics are JSON",
    "9.4": "load_trial_from_checkpoint_path",
    "9.5": "... also from several processes' checkpoints",
    "9.6": "CheckpointLoadContext",
    "9.7": "latest_checkpoint restores all; unknown ids and wrong shapes are errors",
    "9.8": "a resumed run is bit-identical",
    "9.9": "from one process to two, and back",
    "9.10": "a store below the working directory",
    "9.11": "checkpoints that Determined wrote",
    "10.1": "TorchWriter",
    "10.2": "import determined gives the same objects",
    "10.3": "unmodified programs run",
    "10.5": "changing determined to dray in an import is enough",
}

#: Rows that no test here shows, and why.
ELSEWHERE = {
    "3.6": "out of scope: Horovod, TensorFlow; from_deepspeed is from_torch_distributed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A test that shows rows.

    Args:
        file: below tests/.
        gpu: it runs where there is a CUDA device.
    """

    file: str
    name: str
    rows: frozenset[str]
    gpu: bool


def tests() -> Iterator[Shown]:
    """All tests with the marker, read from the source: no test file has to be imported."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if "mark.api" not in text:  # to parse all of them takes a second
            continue
        tree = ast.parse(text)
        everywhere = [
            node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets)
        ]
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                marks = [*everywhere, *node.decorator_list]
                if rows := frozenset(row for mark in marks for row in _rows(mark)):
                    gpu = any("mark.gpu" in ast.unparse(mark) for mark in marks)
                    yield Shown(file=path.relative_to(ROOT / "tests").as_posix(), name=node.name, rows=rows, gpu=gpu)


def _rows(mark: ast.expr) -> Iterator[str]:
    for node in ast.walk(mark):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "api":
            yield from (ast.literal_eval(argument) for argument in node.args)


def document(shown: Sequence[Shown]) -> str:
    """The rows with their tests, in Markdown, from all of ``tests()``."""
    lines = [
        "# The PyTorch API, row by row",
        "",
        "Each row of the specification (API.md), the tests that show it, and its state: *shown* by tests that run "
        "anywhere, by tests that need a *GPU*, or not here.",
        "",
    ]
    for section, title in TITLES.items():
        lines += [f"## {section}. {title}", "", "| row | what | state | tests |", "|---|---|---|---|"]
        for row, what in ROWS.items():
            if row.partition(".")[0] == str(section):
                mine = [test for test in shown if row in test.rows]
                lines.append(f"| {row} | {what} | {_state(row, mine)} | {_places(mine)} |")
        lines.append("")
    return "\n".join(lines)


def _state(row: str, mine: list[Shown]) -> str:
    if row in ELSEWHERE:
        return ELSEWHERE[row]
    if not mine:
        return "**not shown**"
    on_gpu = [test.gpu for test in mine]
    return "GPU" if all(on_gpu) else "shown, and on a GPU" if any(on_gpu) else "shown"


def _places(mine: list[Shown]) -> str:
    files: dict[str, list[str]] = {}
    for test in mine:
        files.setdefault(test.file, []).append(f"`{test.name.removeprefix('test_')}`")
    return "; ".join(f"{file}: {', '.join(names)}" for file, names in files.items())


if __name__ == "__main__":
    print(document(list(tests())))
