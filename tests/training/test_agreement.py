"""What fails on one rank fails on all, and all leave training together, for the strongest of their reasons; ranks are
threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from dray.core import DistributedContext
from dray.leases.failure import FailureKind, failure_of
from dray.training.errors import DataExhausted, InvalidHP, PeerFailed, ShouldExit
from dray.training.parallel import agreement, ddp, exchange
from dray.training.parallel.agreement import Agreement
from dray.training.parallel.exchange import Leave, Reason, all_or_none, on_chief
from tests.core.test_distributed import HANGS_S, nodes, on_ranks


class TooWide(InvalidHP):
    """Which the other ranks may not be able to import."""


@pytest.mark.api("8.11", "8.12", "8.13")
@pytest.mark.parametrize(
    ("errors", "ends"),
    [
        ([None, None, None], ["done"] * 3),
        (
            [None, KeyError("gone"), None],
            ["PeerFailed: rank 1 failed while starting: KeyError('gone')", "KeyError: 'gone'", "as rank 0"],
        ),
        ([None, None, TooWide("width 99")], ["InvalidHP: width 99", "InvalidHP: width 99", "TooWide: width 99"]),
        ([ShouldExit(True), None, None], ["ShouldExit: True"] * 3),
        (
            [ValueError("0"), ValueError("1"), None],
            ["ValueError: 0", "ValueError: 1", "PeerFailed: rank 0 failed while starting: ValueError('0')"],
        ),
    ],
)
def test_what_all_ranks_do_or_none(errors: list[Exception | None], ends: list[str]) -> None:
    def on_rank(context: DistributedContext) -> str:
        try:
            with all_or_none(context, "starting"):
                if (error := errors[context.rank]) is not None:
                    raise error
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "done"

    assert on_ranks(nodes(3), on_rank) == [ends[0] if end == "as rank 0" else end for end in ends]


def test_one_process_raises_what_it_raised() -> None:
    with pytest.raises(PeerFailed, match="mine"), all_or_none(DistributedContext(), "starting"):
        raise PeerFailed("mine")


def test_what_the_chief_does_counts_for_all() -> None:
    def told(work: Callable[[], str]) -> list[object]:
        def on_rank(context: DistributedContext) -> object:
            try:
                return on_chief(context, "saving", work, message=context.rank)
            except Exception as error:
                return f"{type(error).__name__}: {error}"

        return on_ranks(nodes(2), on_rank)

    def fails() -> str:
        raise KeyError("gone")

    assert told(lambda: "an id") == [("an id", [0, 1])] * 2
    assert told(fails) == ["KeyError: 'gone'", "PeerFailed: rank 0 failed while saving: KeyError('gone')"]


def raises(error: BaseException) -> Callable[[], int]:
    def work() -> int:
        raise error

    return work


def ends_training(*works: Callable[[], int]) -> list[str]:
    """The result of each rank after all have done their part."""

    def on_rank(context: DistributedContext) -> str:
        ranks = Agreement(context, stop_requested=lambda: False, trained=lambda: 0)
        try:
            values, leave = ranks.on_all(works[context.rank])
            if leave is None:
                return f"goes on with {values}"
            ranks.raise_error()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "saves" if leave.save else "does not save"

    return on_ranks(nodes(len(works)), on_rank)


CUT, WIDE, GONE = dist.DistError("connection closed"), InvalidHP("width 99"), KeyError("gone")


@pytest.mark.parametrize(
    ("works", "ends"),
    [
        ((lambda: 3, lambda: 4, lambda: 5), ["goes on with [3, 4, 5]"] * 3),
        ((lambda: 3, raises(ShouldExit(False)), lambda: 5), ["saves"] * 3),
        ((lambda: 3, raises(ShouldExit(True)), lambda: 5), ["does not save"] * 3),
        ((lambda: 3, raises(WIDE)), ["InvalidHP: width 99"] * 2),
        ((raises(DataExhausted("after 4")), lambda: 4), ["DataExhausted: after 4"] * 2),
        # The strongest reason counts.
        ((raises(ShouldExit()), raises(WIDE)), ["InvalidHP: width 99"] * 2),
        ((raises(DataExhausted("after 4")), raises(ShouldExit())), ["DataExhausted: after 4"] * 2),
        (
            (raises(WIDE), raises(GONE), lambda: 5),
            ["InvalidHP: width 99", "KeyError: 'gone'", "PeerFailed: rank 1 failed while training: KeyError('gone')"],
        ),
        # A rank that was disconnected leaves for the reason of the other.
        ((raises(CUT), raises(ShouldExit())), ["saves"] * 2),
        ((raises(CUT), raises(WIDE)), ["InvalidHP: width 99"] * 2),
        (
            (raises(CUT), lambda: 4),
            [
                "DistError: connection closed",
                "PeerFailed: rank 0 failed while training: DistError('connection closed')",
            ],
        ),
    ],
)
def test_ranks_end_together_for_the_strongest_reason(works: tuple[Callable[[], int], ...], ends: list[str]) -> None:
    assert ends_training(*works) == ends


def test_a_rank_that_has_failed_does_not_wait_long_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "FAIL_S", 0.2)
    failed = threading.Event()

    def on_rank(context: DistributedContext) -> str:
        ranks = Agreement(context, stop_requested=lambda: False, trained=lambda: 0)
        if context.rank == 1:  # it is in a batch that never ends
            assert failed.wait(HANGS_S)
            return "killed by its host"
        try:
            ranks.on_all(raises(KeyError("gone")))
        except KeyError as error:
            return f"raises {error!r}"
        finally:
            failed.set()
        return "goes on"

    assert on_ranks(nodes(2), on_rank) == ["raises KeyError('gone')", "killed by its host"]


class Collectives:
    """A process group whose collectives are queued, of two ranks in this process; one rank's abort ends all."""

    def __init__(self, patches: pytest.MonkeyPatch) -> None:
        self.aborted = threading.Event()
        patches.setattr(ddp, "queues_collectives", lambda device: True)
        patches.setattr(ddp, "abort", self.aborted.set)
        for name in ("LISTEN_S", "AGREE_S"):
            patches.setattr(agreement, name, 0.001)

    def hang(self) -> None:
        """Wait for gradients of a rank that does not come; what is then computed from them seems to succeed."""
        assert self.aborted.wait(HANGS_S)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ShouldExit(), Reason.EXIT), (InvalidHP("width 99"), Reason.INVALID_HP), (KeyError("gone"), Reason.FAILED)],
)
def test_a_rank_waiting_for_one_that_left_is_aborted_and_knows_it(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: Reason
) -> None:
    collectives = Collectives(monkeypatch)
    monkeypatch.setattr(agreement, "LEAVE_S", 0.1)

    def on_rank(context: DistributedContext) -> tuple[Reason, bool, bool]:
        ranks = Agreement(context, stop_requested=lambda: False, trained=lambda: 0)
        with ranks.listening():
            _, leave = ranks.section(raises(error) if context.rank == 1 else collectives.hang, training=True)
            assert leave is not None
            ranks.exchange("over", leave)
            return leave.reason, leave.aborted, ranks.must_stop(3)

    waiting, left = on_ranks(nodes(2), on_rank)
    assert waiting == (Reason.DISCONNECTED, True, True)
    assert left[0] is reason


def test_a_rank_that_has_died_is_not_waited_for_with_the_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    collectives = Collectives(monkeypatch)
    monkeypatch.setattr(agreement, "ABORT_S", 0.1)
    dead = threading.Event()

    def on_rank(context: DistributedContext) -> Leave | None:
        ranks = Agreement(context, stop_requested=lambda: False, trained=lambda: 0)
        if context.rank == 1:
            ranks.connect()
            _, leave = ranks.section(raises(KeyError("gone")), training=True)
            ranks.board.send()
            dead.set()  # with its thread, which is none here
            return leave
        with ranks.listening():
            assert dead.wait(HANGS_S)
            return ranks.section(collectives.hang, training=True)[1]

    waiting, _ = on_ranks(nodes(2), on_rank)
    assert waiting is not None
    assert waiting.aborted


class Stopped:
    """The store of a chief whose process is stopped: no call returns until it continues."""

    port = 0

    def __init__(self) -> None:
        self.called, self.continues = threading.Event(), threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.called.set()
        assert self.continues.wait(HANGS_S)
        return False

    def set(self, key: str, value: bytes) -> None:
        self.check([key])


def test_a_rank_raises_its_error_although_the_chief_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Stopped()
    context = DistributedContext(**nodes(2)[1], transport=Dead())
    monkeypatch.setattr(context, "side_store", lambda: store)
    monkeypatch.setattr(context, "broadcast", lambda prefix: prefix)
    ranks = Agreement(context, stop_requested=lambda: False, trained=lambda: 0)
    with pytest.raises(KeyError, match="gone"), ranks.listening():
        assert store.called.wait(HANGS_S)
        try:
            ranks.on_all(raises(KeyError("gone")), training=True)
        finally:
            store.continues.set()


def test_nothing_is_saved_once_one_rank_was_aborted() -> None:
    sound, aborted = Leave(reason=Reason.EXIT), Leave(reason=Reason.DISCONNECTED, aborted=True)

    def on_rank(context: DistributedContext) -> bool:
        ranks = Agreement(context, stop_requested=lambda: False, trained=lambda: 0)
        leave = ranks.agree([sound, aborted], training=True)
        assert leave is not None
        return leave.save

    assert on_ranks(nodes(2), on_rank) == [False, False]


def test_ranks_that_leave_at_the_same_batch_are_not_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    collectives = Collectives(monkeypatch)
    monkeypatch.setattr(agreement, "LEAVE_S", 0.05)

    def on_rank(context: DistributedContext) -> bool:
        ranks = Agreement(context, stop_requested=lambda: False, trained=lambda: 0)
        with ranks.listening():
            _, leave = ranks.section(raises(ShouldExit()), training=True)
            threading.Event().wait(0.2)  # long after the others were to be out
            agreed = ranks.agree(ranks.exchange(leave, leave), training=True)
        assert agreed is not None
        return agreed.save

    assert on_ranks(nodes(2), on_rank) == [True, True]
    assert not collectives.aborted.is_set()


class Dead:
    """How a rank talks to another one whose process has died; what it does before that, it has done at `reached`."""

    def __init__(self) -> None:
        self.reached = False

    def allgather(self, stuff: object, timeout_s: float | None = None) -> list[object]:
        self.reached = True
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    def gather(self, stuff: object) -> None:
        raise AssertionError("not used here")

    def close(self) -> None:
        pass


def with_dead_peer(error: BaseException) -> tuple[str, FailureKind, list[tuple[BaseException, bool]]]:
    """The surviving rank's exception after this error, the errors it has reported, and whether that was too late."""
    peers = Dead()
    context = DistributedContext(**nodes(2)[0], transport=peers)
    ranks = Agreement(context, stop_requested=lambda: False, trained=lambda: 0)
    reported = []
    with (
        exchange.on_failure(lambda error: reported.append((error, peers.reached))),
        pytest.raises(BaseException) as raised,
    ):
        ranks.on_all(raises(error))
    return type(raised.value).__name__, failure_of(raised.value, 0).kind, reported


def test_an_error_of_a_rank_counts_although_the_others_have_died() -> None:
    for error in (KeyError("gone"), SystemExit(3)):
        assert with_dead_peer(error) == (type(error).__name__, "error", [(error, False)])
    assert with_dead_peer(InvalidHP("width 99")) == ("InvalidHP", "error", [])


def test_a_rank_that_leaves_without_an_error_notices_that_the_others_have_died() -> None:
    assert with_dead_peer(ShouldExit()) == ("RuntimeError", "collective", [])


def test_the_first_of_a_ranks_errors_counts_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that has failed fails again when it is synchronised, without the user's line."""
    monkeypatch.setattr(torch.cpu, "synchronize", lambda device: raises(RuntimeError("CUDA error"))())
    context = DistributedContext(**nodes(2)[0], transport=Dead())
    ranks = Agreement(context, stop_requested=lambda: False, trained=lambda: 0)
    reported: list[BaseException] = []
    first = RuntimeError("CUDA error")
    with exchange.on_failure(reported.append), pytest.raises(RuntimeError) as raised:
        ranks.on_all(raises(first), training=True)
    assert raised.value is first
    assert reported == [first]


def test_one_process_alone_reports_its_error_by_raising_it() -> None:
    reported: list[BaseException] = []
    with (
        exchange.on_failure(reported.append),
        pytest.raises(KeyError),
        all_or_none(DistributedContext(), "starting"),
    ):
        raise KeyError("gone")
    assert reported == []
