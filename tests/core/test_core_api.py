"""Programs with their own training loop, without an experiment: alone, and as ranks that are threads here."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed import TCPStore

from dray import core
from dray.core import (
    ClusterInfo,
    Context,
    DistributedContext,
    DownloadMode,
    EarlyExitReason,
    PreemptMode,
    SearcherMode,
    TensorboardMode,
    TrialInfo,
    Unit,
    get_cluster_info,
)
from dray.hosts import LocalHost, use_host
from dray.pytorch import InvalidHP
from dray.records.local_runs import LocalRun, local_runs
from dray.storage import CheckpointError
from dray.training.checkpoint.files import read_state
from dray.training.errors import PeerFailed, SearcherMetricError
from dray.training.host import Report
from tests.core.test_distributed import HANGS_S, nodes, on_ranks
from tests.pytorch.fakes import FakeHost
from tests.storage.s3 import LocalS3

pytestmark = pytest.mark.usefixtures("home")


def rows(home: Path) -> list[dict[str, Any]]:
    """What was reported, and at the end of the run how it ended."""
    (file,) = home.glob("local/*/metrics.jsonl")
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "time"} for row in found]


def ranks(work: Callable[[Context], Any], **arguments: Any) -> list[Any]:
    """The results of `work` on two ranks, each with a context."""

    def one(distributed: DistributedContext) -> Any:
        with core.init(distributed=distributed, **arguments) as context:
            return work(context)

    return on_ranks(nodes(2), one)


class Searching(LocalHost):
    """The host of a search that wants a report at each of these lengths, and stops the trial at `stop_at`."""

    def __init__(self, directory: Path, lengths: list[float], stop_at: float | None = None) -> None:
        super().__init__(directory)
        self.lengths, self.stop_at = lengths, stop_at
        self.reports: list[Report] = []
        self.acknowledged = 0

    def report(self, report: Report) -> bool:
        self.reports.append(report)
        return report.length is not None and report.length == self.stop_at

    def interrupted(self) -> None:
        self.acknowledged += 1


def info_of(**searcher: Any) -> ClusterInfo:
    config = {"searcher": {"metric": "loss", **searcher}}
    return ClusterInfo(trial=TrialInfo(trial_id=3, experiment_id=1, trial_seed=0, hparams={"lr": 0.5}, config=config))


@pytest.fixture
def in_search(tmp_path: Path, set_info: Any) -> Callable[..., Searching]:
    def make(lengths: list[float], stop_at: float | None = None, **searcher: Any) -> Searching:
        set_info(info_of(**searcher))
        return Searching(tmp_path / "trial", lengths, stop_at)

    return make


# ------------------------------------------------------------------------------------------------------------- metrics
def test_metrics_go_to_the_directory_of_the_run(home: Path) -> None:
    with core.init() as context:
        context.train.report_training_metrics(steps_completed=1, metrics={"loss": torch.tensor(0.5)})
        context.train.report_validation_metrics(steps_completed=np.int64(2), metrics={"acc": np.float32(0.25), "n": 3})
        context.train.report_metrics("validation", 3.0, {"acc": 0.5, "raw": b"left out"})  # type: ignore[arg-type]
        context.train.report_metrics("inference", 3, {"bleu": 31})
    assert rows(home) == [
        {"batches": 1, "training": {"loss": 0.5}},
        {"batches": 2, "validation": {"acc": 0.25, "n": 3}},
        {"batches": 3, "validation": {"acc": 0.5}},
        {"batches": 3, "groups": {"inference": {"bleu": 31}}},
        {"batches": 3, "ended": "COMPLETED"},
    ]


def test_a_local_run_shows_its_directory_and_its_validations(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with core.init() as core_context:
        core_context.train.report_validation_metrics(3, {"accuracy": 0.5})
    (run,) = home.glob("local/*")
    assert capsys.readouterr().err.splitlines() == [
        f"local run: metrics and checkpoints go to {run}",
        "validated at batch 3: accuracy=0.5",
    ]


def test_nothing_is_written_before_the_first_report(home: Path) -> None:
    with core.init() as context:
        assert context.info is None
        assert context.train.get_experiment_best_validation() is None
        assert not context.preempt.should_preempt()
    assert not home.exists()


@pytest.mark.parametrize(
    ("report", "error"),
    [
        (lambda train: train.report_training_metrics("7", {}), "steps_completed must be an int, got '7'"),
        (lambda train: train.report_training_metrics(True, {}), "steps_completed must be an int >= 0, got True"),
        (lambda train: train.report_validation_metrics(-1, {}), "steps_completed must be an int >= 0, got -1"),
        (lambda train: train.report_validation_metrics(2**63, {}), "steps_completed must be at most 2.*63 - 1"),
        (lambda train: train.report_validation_metrics(1, {"n": 10**400}), "'n' with a number that is larger than any"),
        (lambda train: train.report_validation_metrics(1, 0.5), r"report_validation_metrics\(\) takes a dict of metr"),
        (lambda train: train.report_validation_metrics(1, {"loss": None}), "the metric 'loss' is None; report a num"),
        (
            lambda train: train.report_training_metrics(1, {"loss": object()}),
            "'loss' of type object, which is not JSON",
        ),
        (lambda train: train.report_metrics("a.b", 1, {}), "group must be a name without a dot"),
        (lambda train: train.report_metrics("system", 1, {}), "other than 'system', got 'system'"),
        (lambda train: train.report_progress(1.5), "progress must be a number from 0 to 1, got 1.5"),
    ],
)
def test_an_invalid_report_is_an_error(report: Callable[[Any], None], error: str, home: Path) -> None:
    with core.init() as context, pytest.raises((TypeError, ValueError), match=error):
        report(context.train)
    assert not home.exists()


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (None, "COMPLETED"),
        (SystemExit(0), "COMPLETED"),
        (SystemExit(None), "COMPLETED"),
        (SystemExit("no data"), "ERROR"),
        (KeyboardInterrupt(), "STOPPED"),
        (RuntimeError("boom\nagain"), "ERROR"),
        (InvalidHP("too wide"), "ERROR"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("reports", [0, 2])
def test_how_a_program_ended_is_recorded(home: Path, error: BaseException | None, state: str, reports: int) -> None:
    def train(context: Context) -> None:
        for step in range(reports):
            context.train.report_training_metrics(step, {"loss": 1.0})
        if error is not None:
            raise error

    def in_a_block() -> None:
        with core.init() as context:
            train(context)

    def without_a_block() -> None:
        context = core.init()
        try:
            train(context)
        finally:
            context.close()

    for program in (in_a_block, without_a_block):
        shutil.rmtree(home, ignore_errors=True)
        with contextlib.nullcontext() if error is None else pytest.raises(type(error)):
            program()
        if not reports and state != "ERROR":
            assert not home.exists()
            continue
        [run] = map(LocalRun, local_runs(home))
        assert run.state == state
        assert run.failure == ({"RuntimeError": "RuntimeError: boom again"}.get(type(error).__name__, run.failure))
        assert bool(run.failure) == (state == "ERROR")


def test_a_program_that_was_asked_to_stop_is_stopped(home: Path) -> None:
    with core.init() as context:
        context.train.report_training_metrics(1, {"loss": 1.0})
        os.kill(os.getpid(), signal.SIGTERM)
        assert context.preempt.should_preempt()
    [run] = map(LocalRun, local_runs(home))
    assert run.state == "STOPPED"


def test_a_rank_that_fails_before_any_report_records_it_once(home: Path) -> None:
    def fail(context: Context) -> None:
        raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        ranks(fail)
    assert rows(home) == [{"batches": 0, "ended": "ERROR", "error": "ValueError: no data"}]


def test_only_the_chiefs_reports_are_recorded(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    ranks(lambda context: context.train.report_validation_metrics(1, {"of": context.distributed.rank}))
    assert rows(home) == [{"batches": 1, "validation": {"of": 0}}, {"batches": 1, "ended": "COMPLETED"}]
    assert (
        "rank 1 called report_validation_metrics(), which has no effect: only the chief's metrics are recorded"
        in caplog.text
    )


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(directory))
    events.Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.api("2.11")
def test_tensorboard_shows_what_was_reported(home: Path) -> None:
    with core.init() as context:
        context.train.report_training_metrics(2, {"loss": 0.5}, batch_metrics=[{"loss": 0.75}, {"loss": 0.25}])
        context.train.report_training_metrics(3, {"loss": 1.0, "name": "text"})
        context.train.report_validation_metrics(3, {"acc": 0.5, "val_loss": 2.0})
        directory = context.train.get_tensorboard_path()
    assert scalars(directory) == {
        "Determined/loss": [(1, 0.75), (2, 0.25), (3, 1.0)],
        "Determined/val_acc": [(3, 0.5)],
        "Determined/val_loss": [(3, 2.0)],
    }


def test_in_manual_mode_nothing_is_written_for_tensorboard() -> None:
    with core.init(tensorboard_mode=TensorboardMode.MANUAL) as context:
        context.train.report_training_metrics(1, {"loss": 0.5})
        context.train.upload_tensorboard_files()
        assert not context.train.get_tensorboard_path().exists()
    with core.init() as context, pytest.raises(RuntimeError, match=r"needs core\.init\(tensorboard_mode="):
        context.train.upload_tensorboard_files()


def test_the_last_metadata_of_a_run_are_kept() -> None:
    with core.init() as context:
        assert context.train.get_metadata() is None
        context.train.set_metadata({"model": "a"})
        assert context.train.set_metadata({"dataset": {"rows": 3}}) == {"dataset": {"rows": 3}}
        assert context.train.get_metadata() == {"dataset": {"rows": 3}}


def test_an_early_exit_for_invalid_hyperparameters_raises() -> None:
    with pytest.raises(InvalidHP), core.init() as context:
        context.train.report_early_exit(EarlyExitReason.USER_REQUESTED_STOP)
        context.train.report_early_exit(EarlyExitReason.INVALID_HP)


# --------------------------------------------------------------------------------------------------------- checkpoints
def store(context: Context, steps: int, content: str = "x") -> str:
    with context.checkpoint.store_path({"steps_completed": steps, "note": content}) as (path, storage_id):
        (path / "below").mkdir()
        (path / "below" / "state").write_text(content)
    return str(storage_id)


def test_a_checkpoint_is_found_by_its_id_in_this_run_and_in_others(home: Path, tmp_path: Path) -> None:
    with core.init() as context:
        storage_id = store(context, 10)
        store(context, 20, "newer")
    with core.init() as context:
        with context.checkpoint.restore_path(storage_id) as path:
            assert (path / "below" / "state").read_text() == "x"
        assert context.checkpoint.get_metadata(storage_id) == {"steps_completed": 10, "note": "x"}
        context.checkpoint.download(storage_id, tmp_path / "copy", selector=lambda name: name.startswith("below"))
        assert [path.name for path in (tmp_path / "copy").rglob("*")] == ["below", "state"]
        with pytest.raises(FileNotFoundError, match="there is no checkpoint 'nothing'"):
            context.checkpoint.download("nothing", tmp_path / "nothing")
        with pytest.raises(ValueError, match="a run can delete only its own"):
            context.checkpoint.delete(storage_id)


def test_deleting_a_checkpoint_leaves_the_others() -> None:
    with core.init() as context:
        first, second = store(context, 1), store(context, 2)
        context.checkpoint.delete(first)
        with pytest.raises(FileNotFoundError):
            context.checkpoint.get_metadata(first)
        assert context.checkpoint.get_metadata(second)["steps_completed"] == 2


def test_a_checkpoint_whose_block_raises_is_not_committed(home: Path) -> None:
    with core.init() as context:
        with pytest.raises(ArithmeticError), context.checkpoint.store_path({"steps_completed": 1}) as (path, _):
            (path / "state").write_text("half")
            raise ArithmeticError
        refused = pytest.raises(
            ValueError, match=r"can't have a file 'manifest\.json', a name that dray itself uses; rename the file"
        )
        with refused, context.checkpoint.store_path({"steps_completed": 1}) as (path, _):
            (path / "manifest.json").write_text("mine")
    assert not list(home.rglob("*state*"))
    assert not list(home.rglob("manifest.json"))


@pytest.mark.parametrize("metadata", [None, {}, {"steps_completed": -1}, {"steps_completed": "3"}])
def test_metadata_must_have_steps_completed(metadata: dict[str, Any] | None) -> None:
    with core.init() as context, pytest.raises(ValueError, match="metadata must have 'steps_completed', an int >= 0"):
        context.checkpoint.store_path(metadata).__enter__()


def test_upload_takes_the_selected_files_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "mine" / "deep").mkdir(parents=True)
    (tmp_path / "mine" / "a.pt").write_text("a")
    (tmp_path / "mine" / "deep" / "b.tmp").write_text("b")
    with core.init() as context:
        whole = context.checkpoint.upload(tmp_path / "mine", {"steps_completed": 1})
        part = context.checkpoint.upload(
            tmp_path / "mine", {"steps_completed": 2}, selector=lambda name: name.endswith(".pt")
        )
        found = []
        for storage_id in (whole, part):
            with context.checkpoint.restore_path(storage_id) as path:
                found.append(sorted(file.name for file in path.rglob("*.*") if file.suffix in (".pt", ".tmp")))
        assert found == [["a.pt", "b.tmp"], ["a.pt"]]
        with pytest.raises(NotADirectoryError, match="no such directory"):
            context.checkpoint.upload(tmp_path / "nothing", {"steps_completed": 3})
        with pytest.raises(RuntimeError, match="would save nothing"):
            context.checkpoint.upload(None, {"steps_completed": 3})
    assert sorted(path.name for path in (tmp_path / "mine").rglob("*")) == ["a.pt", "b.tmp", "deep"], "as it was"


def test_ranks_write_into_one_sharded_checkpoint() -> None:
    def work(context: Context) -> tuple[str, dict[str, Any], list[str]]:
        rank = context.distributed.rank
        metadata = {"steps_completed": 4, "ranks": {str(rank): rank}}
        with context.checkpoint.store_path(metadata, shard=True) as (path, storage_id):
            (path / f"rank_{rank}").write_text(str(rank))
        with context.checkpoint.restore_path(storage_id) as path:
            files = sorted(file.name for file in path.glob("rank_*"))
        return storage_id, context.checkpoint.get_metadata(storage_id), files

    first, second = ranks(work)
    assert first == second
    assert first[1:] == ({"steps_completed": 4, "ranks": {"0": 0, "1": 1}}, ["rank_0", "rank_1"])


@pytest.fixture
def s3() -> Iterator[dict[str, Any]]:
    server = LocalS3()
    endpoint = f"http://127.0.0.1:{server.port}"
    yield {"type": "s3", "bucket": server.bucket, "endpoint_url": endpoint, "access_key": "a", "secret_key": "b"}
    server.stop()


@pytest.mark.slow
@pytest.mark.parametrize("slots", [(1, 1), (2, 1)])
def test_each_machine_uploads_its_part_of_a_checkpoint_to_an_object_store(
    slots: tuple[int, ...], tmp_path: Path, s3: dict[str, Any]
) -> None:
    machines = nodes(*slots)

    def work(context: Context, content: str) -> str:
        rank = context.distributed.rank
        with context.checkpoint.store_path({"steps_completed": 4}, shard=True) as (path, storage_id):
            (path / "part").mkdir(exist_ok=True)
            (path / "part" / f"rank_{rank}").write_text(content)
        return str(storage_id)

    def one(distributed: DistributedContext) -> list[str]:
        with core.init(distributed=distributed, checkpoint_storage={**s3, "prefix": "parts"}) as context:
            storage_id = work(context, "first")
            assert work(context, f"again {distributed.rank}") == storage_id
            with context.checkpoint.restore_path(storage_id) as path:
                found = sorted(file.read_text() for file in (path / "part").iterdir())
            with (
                pytest.raises(
                    RuntimeError, match="several machines wrote a file named 'same'; put the rank into the names"
                ),
                context.checkpoint.store_path({"steps_completed": 5}, shard=True) as (path, _),
            ):
                (path / "same").write_text("of two")
            return found

    written = [f"again {rank}" for rank in range(sum(slots))]
    assert on_ranks(machines, one) == [written] * len(written)
    assert not list(tmp_path.rglob(".staging*"))


def test_sharded_upload_takes_each_file_once_and_refuses_different_files_of_one_name(tmp_path: Path) -> None:
    def work(context: Context) -> list[str]:
        rank = context.distributed.rank
        mine = tmp_path / f"of_{rank}"
        mine.mkdir()
        (mine / "same").write_text("same")
        (mine / f"own_{rank}").write_text("own")
        storage_id = context.checkpoint.upload(mine, {"steps_completed": 1}, shard=True)
        with context.checkpoint.restore_path(storage_id) as path:
            found = sorted(file.name for file in path.iterdir() if file.suffix == "")
        (mine / "same").write_text(f"not the same {rank}")
        with pytest.raises(RuntimeError, match="different files of the same name: same; put the rank into the names"):
            context.checkpoint.upload(mine, {"steps_completed": 2}, shard=True)
        with pytest.raises(
            RuntimeError, match="metadata of a sharded checkpoint differ: of is 0 on one and 1 on another"
        ):
            context.checkpoint.upload(mine, {"steps_completed": 2, "of": rank}, shard=True, selector=lambda name: False)
        return found

    assert ranks(work) == [["own_0", "own_1", "same"]] * 2


def test_a_rank_that_fails_in_a_sharded_checkpoint_fails_all_ranks_and_leaves_no_checkpoint(home: Path) -> None:
    def work(context: Context) -> str:
        try:
            with context.checkpoint.store_path({"steps_completed": 1}, shard=True):
                if context.distributed.rank == 1:
                    raise ArithmeticError("no shard")
        except (ArithmeticError, PeerFailed) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    failed = "PeerFailed: rank 1 failed while writing a sharded checkpoint: ArithmeticError('no shard')"
    assert ranks(work) == [failed, "ArithmeticError: no shard"]
    assert not list(home.rglob("checkpoint_*"))
    assert not list(home.rglob(".staging*"))


def test_other_ranks_can_restore_alone_or_together(tmp_path: Path) -> None:
    def work(context: Context) -> list[str]:
        rank = context.distributed.rank
        storage_id = context.distributed.broadcast(store(context, 3) if rank == 0 else "")
        if rank == 1:
            context.checkpoint.download(storage_id, tmp_path / "alone", DownloadMode.NoSharedDownload)
        context.checkpoint.download(
            storage_id, tmp_path / "shared", selector=lambda name: (rank == 0) == name.startswith("below")
        )
        return sorted(path.name for path in (tmp_path / "shared").rglob("*") if path.is_file())

    assert [sorted({*found, "metrics.jsonl"}) for found in ranks(work)] == [
        ["metadata.json", "metrics.jsonl", "state"]
    ] * 2
    assert (tmp_path / "alone" / "below" / "state").exists()


@pytest.mark.parametrize("form", ["text", "section"])
def test_a_local_run_stores_checkpoints_where_checkpoint_storage_says(form: str, tmp_path: Path, home: Path) -> None:
    place = str(tmp_path / "elsewhere")
    storage: Any = (
        place if form == "text" else {"type": "shared_fs", "host_path": str(tmp_path), "storage_path": "elsewhere"}
    )
    with core.init(checkpoint_storage=storage) as context:
        storage_id = store(context, 1)
    with core.init(checkpoint_storage=storage) as context:
        assert context.checkpoint.get_metadata(storage_id)["note"] == "x"
    assert [path.parent.parent for path in Path(place).rglob("checkpoint_1")] == [Path(place)]
    assert not home.exists()


@pytest.mark.parametrize(
    ("storage", "error"),
    [
        ({"type": "hdfs"}, "checkpoint_storage.type: .*HDFS"),
        ({"type": "directory", "container_path": "/a", "prefx": "b"}, "prefx: unknown field; did you mean prefix"),
        ({"save_trial_best": 2}, "checkpoint_storage.type: missing required field"),
    ],
)
def test_an_invalid_storage_is_reported_like_a_configs(storage: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=rf"core.init\(checkpoint_storage=...\) has 1 error:\n  .*{error}"):
        core.init(checkpoint_storage=storage)


def test_a_damaged_checkpoint_is_an_error(home: Path) -> None:
    with core.init() as context:
        storage_id = store(context, 1)
        next(home.rglob("state")).write_text("y")
        # Read by every rank: the files that it does not return are verified when they are restored, once a machine.
        assert context.checkpoint.get_metadata(storage_id) == {"steps_completed": 1, "note": "x"}
        damaged = pytest.raises(CheckpointError, match="state does not match its checksum")
        with damaged, context.checkpoint.restore_path(storage_id):
            pass
        metadata = next(home.rglob("metadata.json"))
        metadata.write_text(metadata.read_text().replace("x", "y"))
        with pytest.raises(CheckpointError, match=r"metadata\.json does not match its checksum"):
            context.checkpoint.get_metadata(storage_id)
        next(home.rglob("state")).write_text("longer")
        with pytest.raises(CheckpointError, match="state has 6 bytes"):
            context.checkpoint.get_metadata(storage_id)


def test_a_programs_checkpoint_has_no_model_state(home: Path) -> None:
    with core.init() as context:
        store(context, 1)
    (checkpoint,) = home.rglob("checkpoint_1")
    with pytest.raises(ValueError, match=r"has no state-dict\.pth: a program saved it with the core API"):
        read_state(checkpoint, [])


# ------------------------------------------------------------------------------------------------------------- preempt
def test_sigterm_asks_a_local_run_to_stop() -> None:
    with core.init() as context:
        assert not context.preempt.should_preempt()
        os.kill(os.getpid(), signal.SIGTERM)
        assert context.preempt.should_preempt()


@pytest.mark.parametrize("mode", [PreemptMode.WorkersAskChief, PreemptMode.WorkersAskMaster])
def test_all_ranks_get_the_chiefs_request_to_stop(mode: PreemptMode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalHost, "report", lambda host, report: True)
    barrier = threading.Barrier(2, timeout=HANGS_S)

    def work(context: Context) -> list[bool]:
        answers = [context.preempt.should_preempt()]
        barrier.wait()
        if context.distributed.rank == 0:
            context.train.report_training_metrics(1, {})
            if mode is PreemptMode.WorkersAskMaster:
                assert context.preempt.should_preempt()
        barrier.wait()
        return [*answers, context.preempt.should_preempt()]

    assert ranks(work, preempt_mode=mode) == [[False, True]] * 2


def test_a_rank_that_asks_after_the_chief_has_exited_should_preempt_too() -> None:
    """The chief serves the store that ranks ask: it was asked to stop, and its process has ended."""
    servers = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]

    class Peer(DistributedContext):
        def side_store(self) -> Any:
            return TCPStore("127.0.0.1", servers[0].port, is_master=False)

    with core.init(distributed=Peer(), preempt_mode=PreemptMode.WorkersAskMaster) as context:
        assert not context.preempt.should_preempt()
        servers.clear()
        assert context.preempt.should_preempt()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda context: store(context, 4), r"checkpoint\.store_path\(\) .* without shard=True, "),
        (lambda context: context.checkpoint.upload(".", {}), r"checkpoint\.upload\(\) .* without shard=True, "),
        (lambda context: context.preempt.should_preempt(), r"should_preempt\(\) .* with PreemptMode\.ChiefOnly, "),
        (
            lambda context: list(context.searcher.operations(SearcherMode.ChiefOnly)),
            r".*with SearcherMode\.ChiefOnly, ",
        ),
    ],
    ids=["store_path", "upload", "should_preempt", "operations"],
)
def test_what_the_chief_alone_calls_is_an_error_on_other_ranks(call: Callable[[Context], Any], says: str) -> None:
    def work(context: Context) -> None:
        if context.distributed.rank == 1:
            with pytest.raises(RuntimeError, match=f"{says}call it on rank 0 only"):
                call(context)

    ranks(work, preempt_mode=PreemptMode.ChiefOnly)


def test_an_answer_is_acknowledged_at_once_unless_auto_ack_is_off(
    in_search: Callable[..., Searching],
) -> None:
    host = in_search([1.0], stop_at=1.0, max_length={"batches": 1})
    with use_host(host), core.init() as context:
        for operation in context.searcher.operations():
            operation.report_completed(0.5)
        assert context.preempt.should_preempt(auto_ack=False)
        assert host.acknowledged == 0
        context.preempt.acknowledge_preemption_signal()
        assert host.acknowledged == 1
        assert context.preempt.should_preempt()
        assert host.acknowledged == 2


# ------------------------------------------------------------------------------------------------------------ searcher
def test_a_run_without_a_search_has_one_operation(home: Path) -> None:
    with core.init() as context:
        lengths = []
        for op in context.searcher.operations():
            op.report_progress(0.5)
            lengths.append(op.length)
            op.report_completed(torch.tensor(0.25))
        assert context.searcher.get_configured_units() is Unit.EPOCHS
        context.searcher.acknowledge_out_of_ops()
    assert lengths == [1]
    assert rows(home)[0] == {"batches": 1, "validation": {"searcher_metric": 0.25}}


def test_there_is_an_operation_for_each_length_until_the_search_stops_the_trial(
    in_search: Callable[..., Searching],
) -> None:
    host = in_search([1, 4, 16], 4, max_length={"epochs": 16})
    with use_host(host), core.init() as context:
        for op in context.searcher.operations():
            context.train.report_validation_metrics(100 * op.length, {"loss": 0.5})
            op.report_completed(1 / op.length)
        assert context.preempt.should_preempt()
        assert context.searcher.get_configured_units() is Unit.EPOCHS
    reported = [(r.batches, r.epochs, r.validation, r.length, r.compared) for r in host.reports]
    assert reported == [
        (100, None, {"loss": 0.5}, None, False),
        (100, 1, {"loss": 1.0}, 1, True),
        (400, None, {"loss": 0.5}, None, False),
        (400, 4, {"loss": 0.25}, 4, True),
    ]


@pytest.mark.parametrize(
    ("searcher", "unit"),
    [
        ({"max_length": {"batches": 16}}, Unit.BATCHES),
        ({"max_length": {"records": 16}}, Unit.RECORDS),
        ({"max_time": 16, "time_metric": "epochs"}, Unit.EPOCHS),
        ({"max_time": 16, "time_metric": "seconds"}, None),
    ],
)
def test_the_unit_is_the_configs(
    searcher: dict[str, Any], unit: Unit | None, in_search: Callable[..., Searching]
) -> None:
    with use_host(in_search([16], **searcher)), core.init() as context:
        assert context.searcher.get_configured_units() is unit
        assert [op.report_completed(1.0) for op in context.searcher.operations()] == [None]


def test_all_ranks_get_the_same_operations() -> None:
    def work(context: Context) -> list[float]:
        lengths = []
        for op in context.searcher.operations():
            lengths.append(op.length)
            if context.distributed.rank == 0:
                op.report_completed(0.5)
            else:
                with pytest.raises(RuntimeError, match=r"op.report_completed\(\) was called on rank 1; call it on r"):
                    op.report_completed(0.5)
        return lengths

    assert ranks(work) == [[1], [1]]


def test_misuse_of_operations_is_an_error(in_search: Callable[..., Searching]) -> None:
    with core.init() as context:
        with pytest.raises(RuntimeError, match=r"the operation of length 1 ended without op.report_completed\(\)"):
            list(context.searcher.operations(SearcherMode.ChiefOnly))
        op = next(iter(context.searcher.operations()))
        with pytest.raises(SearcherMetricError, match=r"op.report_completed\(\) needs a number, got 'good'"):
            op.report_completed("good")
        with pytest.raises(RuntimeError, match="was called twice"):
            op.report_completed(1.0)
    no_length = pytest.raises(ValueError, match="the search sets no length, so there are no operations; set searcher")
    with use_host(in_search([])), core.init() as context, no_length:
        next(context.searcher.operations())
    several = in_search([16], max_length={"batches": 16}, metrics=[{"name": "loss"}, {"name": "mb", "at_most": 8}])
    with use_host(several), core.init() as context:
        op = next(iter(context.searcher.operations()))
        with pytest.raises(SearcherMetricError, match=r"searcher.metrics: op.report_completed\(\) takes one metric"):
            op.report_completed(1.0)


# ---------------------------------------------------------------------------------------------------------------- init
def test_a_trial_that_is_a_class_can_not_init_the_core_api(tmp_path: Path) -> None:
    with use_host(FakeHost(tmp_path)), pytest.raises(RuntimeError, match="but this trial is a class, whose trainer"):  # type: ignore[arg-type]
        core.init()


def test_a_context_can_be_closed_without_a_block(home: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    context = core.init()
    context.start()
    context.train.report_training_metrics(1, {"loss": 1.0})
    context.close()
    context.close()
    assert signal.getsignal(signal.SIGTERM) is before
    assert rows(home)[1:] == [{"batches": 1, "ended": "COMPLETED"}]


def test_info_is_the_trials(in_search: Callable[..., Searching]) -> None:
    with use_host(in_search([])), core.init(checkpoint_storage="/elsewhere") as context:
        assert context.info is not None
        assert context.info.trial.hparams == {"lr": 0.5}
        assert get_cluster_info() is context.info
