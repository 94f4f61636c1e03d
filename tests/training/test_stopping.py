"""Ranks of any speed, in step or not, that one of them asks to stop at any moment."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from dray.training.parallel import agreement
from dray.training.parallel.agreement import Agreement

ENOUGH = 1_000_000
"""Batches: never reached."""
HANGS_S = 30


class FakeStore:
    """The part of a TCPStore that Agreement uses."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes:
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


class FakePeers:
    """One of several threads."""

    def __init__(self, rank: int, size: int, store: FakeStore | None) -> None:
        self.rank, self.size, self._store = rank, size, store

    def side_store(self) -> FakeStore | None:
        return self._store

    def broadcast(self, stuff: str) -> str:
        return "this run"


class Ranks:
    """Each trains until it is stopped; it meets the others within every so many-th batch."""

    def __init__(self, size: int, together: int, rng: random.Random) -> None:
        store = FakeStore() if size > 1 else None
        self.trained = [0] * size
        self.asked = [False] * size
        self._together, self._meeting = together, threading.Barrier(size)
        self._pauses = [rng.choice([0, 0, 1e-5, 1e-3]) for _ in range(size)]
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(rank, FakePeers(rank, size, store)), daemon=True)
            for rank in range(size)
        ]

    def _run(self, rank: int, peers: Any) -> None:
        pause = threading.Event()
        line = Agreement(peers, stop_requested=lambda: self.asked[rank], trained=lambda: self.trained[rank])
        try:
            with line.listening():
                for batch in range(ENOUGH):
                    if batch >= line.stop_at and line.must_stop(batch):
                        return
                    if batch % self._together == 0:
                        self._meeting.wait(HANGS_S)
                    if self._pauses[rank]:
                        pause.wait(self._pauses[rank])
                    self.trained[rank] = batch + 1
        except BaseException as error:
            self._errors.append(error)

    def play(self, asks: int, after_s: float) -> None:
        for thread in self._threads:
            thread.start()
        threading.Event().wait(after_s)
        self.asked[asks] = True
        for thread in self._threads:
            thread.join(HANGS_S)
            assert not thread.is_alive(), "it waits for ever"
        assert self._errors == []


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "LISTEN_S", 0.001)
    monkeypatch.setattr(agreement, "AGREE_S", 0.001)


@pytest.mark.parametrize("together", [1, 7, 60])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_stop_after_the_same_batch(size: int, together: int) -> None:
    rng = random.Random(size)
    for _ in range(10):
        ranks = Ranks(size, together, rng)
        ranks.play(rng.randrange(size), rng.uniform(0, 0.005))
        assert len(set(ranks.trained)) == 1, ranks.trained
        assert ranks.trained[0] < ENOUGH


def agreement_of(peers: FakePeers, *, asked: bool, trained: int) -> Agreement:
    return Agreement(peers, stop_requested=lambda: asked, trained=lambda: trained)  # type: ignore[arg-type]


def test_rank_whose_training_has_failed_is_not_waited_for() -> None:
    store = FakeStore()
    with pytest.raises(ArithmeticError), agreement_of(FakePeers(1, 2, store), asked=False, trained=3).listening():
        raise ArithmeticError
    ranks = agreement_of(FakePeers(0, 2, store), asked=True, trained=5)
    with ranks.listening():
        assert ranks.must_stop(6)


def test_without_the_others_training_continues() -> None:
    class Gone(FakeStore):
        def check(self, keys: list[str]) -> bool:
            raise ConnectionError("the chief has died")

        def set(self, key: str, value: bytes) -> None:
            raise ConnectionError("the chief has died")

    ranks = agreement_of(FakePeers(1, 2, Gone()), asked=True, trained=5)
    with ranks.listening():
        assert not ranks.must_stop(5)
    with pytest.raises(ArithmeticError), ranks.listening():
        raise ArithmeticError
