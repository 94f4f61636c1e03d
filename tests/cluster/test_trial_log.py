"""What a trial prints, by whatever way, is in its own file; what is printed before and after is not."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dray.cluster.trial_log import log_as_python_starts, log_as_the_command_line, printed_to


def test_all_that_a_trial_prints_is_in_its_file_in_order(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trial_3" / "logs" / "rank_0.log"
    print("before")
    for turn in range(2):
        with printed_to(path):
            print("printed", turn)
            print("to stderr", file=sys.stderr)
            os.write(1, b"by the system\n")
            subprocess.run(["echo", "by a child"], check=True)
    print("after")
    sys.stdout.flush()
    lines = ["printed {}", "to stderr", "by the system", "by a child"]
    assert path.read_text() == "".join(f"{line.format(turn)}\n" for turn in range(2) for line in lines)
    assert capfd.readouterr().out == "before\nafter\n"


def test_end_shows_the_last_lines_of_this_block_alone(tmp_path: Path) -> None:
    with printed_to(tmp_path / "log") as log:
        print("an earlier attempt")
    with printed_to(tmp_path / "log") as log:
        assert log.end() == "    | (nothing)"
        for number in range(100):
            print("line", number)
        assert log.end().splitlines() == [f"    | line {number}" for number in range(80, 100)]


def test_streams_are_put_back_after_an_error_and_after_being_closed(tmp_path: Path) -> None:
    before = sys.stdout, sys.stderr
    with pytest.raises(KeyError), printed_to(tmp_path / "log"):
        sys.stdout.close()
        raise KeyError
    assert before == (sys.stdout, sys.stderr)


def test_a_programs_own_logging_config_has_its_effect(tmp_path: Path) -> None:
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    try:
        with printed_to(tmp_path / "log"):
            log_as_python_starts()
            logging.basicConfig(level=logging.DEBUG, format="mine: %(message)s")
            logging.debug("small")
            log_as_the_command_line("%(levelname)s: %(message)s")
            logging.info("large")
            logging.debug("not shown")
    finally:
        root.setLevel(before[0])
        root.handlers[:] = before[1]
    assert (tmp_path / "log").read_text() == "mine: small\nINFO: large\n"
