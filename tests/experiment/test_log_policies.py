"""What a trial has printed forbids to start it again, by the config's log policies."""

from __future__ import annotations

import time
from pathlib import Path

from dray.config.log_policies import LogPolicy
from dray.experiment.log_policies import LONGEST, forbidden, printed
from dray.storage import Location, RemoteDirectory

FULL = LogPolicy(pattern=r".*disk\s+full.*", action="cancel_retries")
BEGINS = LogPolicy(pattern="^fatal: ", action="cancel_retries")
STAMP = "2026-11-21T19:02:02.123Z "


def test_the_first_matching_line_of_a_policy_is_reported() -> None:
    lines = ["all is well", f"{STAMP}fatal: the disk  full", f"{STAMP}fatal: more"]
    assert forbidden([FULL], lines) == (
        r"log_policies: cancel_retries, as its log has '.*disk\\s+full.*': fatal: the disk  full"
    )
    assert "'^fatal: '" in forbidden([BEGINS], lines), "a line begins after its time"
    assert forbidden([FULL, BEGINS], ["this is not fatal: no"]) == ""
    assert forbidden([], lines) == ""


def test_a_long_line_takes_no_longer_than_it_has_to() -> None:
    policy = LogPolicy(pattern=".*CUDA out of memory.*", action="cancel_retries")
    began = time.thread_time()
    assert forbidden([policy], ["x" * 1_000_000] * 20) == ""
    assert time.thread_time() - began < 5
    assert forbidden([policy], ["x" * LONGEST + "CUDA out of memory"]) == "", "no more of it is looked at"


def test_it_is_looked_for_in_the_error_and_in_all_logs_wherever_they_are(tmp_path: Path) -> None:
    here, afar = tmp_path / "trial_3" / "logs", Location.of("memory://policies/trial_3")
    here.mkdir(parents=True)
    (here / "rank_0.log").write_text(f"{STAMP}one\n{STAMP}two\n")
    (here / "rank_1.log").write_text(f"{STAMP}three, without an end")
    assert [
        line.rpartition(" | ")[2].removeprefix(STAMP) for line in printed("boom\nbang", here, Location.of(tmp_path))
    ] == [
        "boom",
        "bang",
        "one",
        "two",
        "three, without an end",
    ]
    RemoteDirectory(afar).write("logs/rank_0.20261121T190000.000Z.log", f"{STAMP}the disk full\n".encode())
    assert "the disk full" in forbidden([FULL], printed("boom", here, afar))
    gone = Location.of("memory://policies/trial_4")
    assert forbidden([FULL], printed("disk full", tmp_path / "none", gone)) != ""
