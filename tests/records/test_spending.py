"""What an experiment has spent, from the timeline of its worker groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dray.records.spending import FILE, Spending, totals_of
from dray.text import seconds_of

PRICES = {"A100": 3.6, "A100-spot": 1.8}


def events(*of: tuple[float, str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"event": event, "time": time, **fields} for time, event, fields in of]


RUN = events(
    (0, "opened", {}),
    (10, "starts", {"group": "a", "slots": 2}),
    (20, "arrived", {"group": "a"}),  # until then it waits for a node
    (30, "granted", {"group": "a", "trial": 0, "slot_type": "A100-spot"}),
    (40, "starts", {"group": "b", "slots": 0.5}),
    (40, "arrived", {"group": "b"}),
    (60, "left", {"group": "a", "trial": 0}),
    (80, "ends", {"group": "a"}),
    (100, "closed", {}),
)


def spent(records: list[dict[str, Any]]) -> dict[str, float]:
    found = Spending(PRICES)
    for record in records:
        found.add(record)
    return dict(found.at(1000.0).spent)


def test_slots_count_from_the_first_process_to_the_groups_end() -> None:
    # Group b never had a trial: its slots have the highest price.
    slot_s = 2 * 60 + 0.5 * 60
    assert spent(RUN) == pytest.approx({"time": 100, "slot_hours": slot_s / 3600, "usd": (120 * 1.8 + 30 * 3.6) / 3600})


def test_a_run_that_was_killed_counts_up_to_its_last_event() -> None:
    killed = [*RUN[:5], *events((55, "alive", {}))]
    assert spent([*killed, *events((500, "opened", {}), (510, "closed", {}))])["time"] == 55 + 10
    assert spent([*killed, *events((500, "opened", {}), (510, "closed", {}))])["slot_hours"] == 2 * 35 / 3600


def test_on_a_server_only_time_with_slots_counts() -> None:
    granted = events((20, "starts", {"group": "a", "slots": 1}), (20, "granted", {"group": "a", "trial": 0}))
    lent = [*events((0, "opened", {"lent": True})), *granted, *events((50, "ends", {"group": "a"}), (90, "closed", {}))]
    assert spent(lent)["time"] == 30


def test_the_rates_are_those_of_now() -> None:
    found = Spending(PRICES)
    for record in RUN[:4]:
        found.add(record)
    assert found.at(35.0).per_s == pytest.approx({"time": 1.0, "slot_hours": 2 / 3600, "usd": 2 * 1.8 / 3600})


def test_a_reader_finds_what_the_driver_knows_while_it_writes(tmp_path: Path) -> None:
    live, reader = Spending(PRICES), Spending(PRICES)
    with (tmp_path / FILE).open("w") as file:
        for record in RUN:
            live.add(record)
            text = json.dumps(record) + "\n"
            file.write(text[:9])
            file.flush()
            reader.read(tmp_path)
            file.write(text[9:])
            file.flush()
            reader.read(tmp_path)
            assert reader.usage == live.usage
    assert reader.usage.spent["time"] == 100


@pytest.mark.parametrize("text", ["0h", "-2h", "2", "2x", "nan", "inf", "9" * 400 + "h"])
def test_a_time_is_a_finite_duration(text: str) -> None:
    with pytest.raises(ValueError, match="must be a duration such as 2h"):
        seconds_of(text)


def test_totals_are_in_seconds() -> None:
    assert totals_of({"time": "1h30m", "usd": None, "slot_hours": 4}) == {"time": 5400, "slot_hours": 4}
    assert totals_of(None) == {}
