"""The line below all other output: nothing that a program prints is torn, lost or sent elsewhere."""

from __future__ import annotations

import io
import logging
import multiprocessing
import pdb
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from dray.hosts import bottom_line
from dray.hosts.bottom_line import NotebookLine, TerminalLine
from tests.hosts.terminal import terminal


def test_output_appears_above_the_line_which_is_removed_at_the_end() -> None:
    with terminal() as screen:
        with TerminalLine() as line:
            line.draw("10 %")
            print("one", 1)
            line.draw("20 %")
            print("two", file=sys.stderr)
            line.draw("30 %")
        assert sys.stdout is sys.stderr is screen.stream
        assert screen.screen() == ["one 1", "two", ""]
        assert screen.written.count("\x1b[2K20 %") == 1
        assert "two\r\n20 %" in screen.written, "drawn again at once"


def test_log_lines_of_earlier_handlers_appear_above_the_line() -> None:
    with terminal() as screen:
        log = logging.Logger("mine")
        handler = logging.StreamHandler()
        logging.root.addHandler(handler)
        try:
            with TerminalLine() as line:
                line.draw("10 %")
                handler.handle(log.makeRecord("mine", logging.INFO, "", 0, "logged", None, None))
        finally:
            logging.root.removeHandler(handler)
        assert handler.stream is screen.stream
        assert screen.screen() == ["logged", ""]


def test_a_prompt_or_another_progress_bar_is_not_overwritten() -> None:
    with terminal() as screen:
        with TerminalLine() as line:
            line.draw("10 %")
            print("(Pdb) ", end="")
            line.draw("20 %")
            print("n")
            line.draw("30 %")
        assert screen.screen() == ["(Pdb) n", ""]
        assert "\x1b[2K20 %" not in screen.written


def test_the_line_is_not_drawn_while_a_debugger_waits_for_a_command() -> None:
    class Commands(io.StringIO):
        """Reports progress while it waits for a command; drawing then would overwrite the prompt."""

        def readline(self, size: int = -1, /) -> str:
            debugger.stdout.write("first\n")
            line.draw("20 %")
            return super().readline(size)

    with terminal() as screen:
        with TerminalLine() as line:
            line.draw("10 %")
            debugger = pdb.Pdb(stdin=Commands("print('answer')\nc\n"), stdout=sys.stdout, nosigint=True, readrc=False)
            debugger.set_trace()
            line.draw("30 %")
        assert "answer" in screen.screen()
        assert "20 %" not in screen.written
        assert "30 %" in screen.written


def test_standard_output_in_a_file_stays_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal() as screen:
        with (tmp_path / "out.txt").open("w") as file:
            monkeypatch.setattr(sys, "stdout", file)
            with TerminalLine() as line:
                line.draw("10 %")
                print("for the file")
        assert (tmp_path / "out.txt").read_text() == "for the file\n"
        assert screen.screen() == [""]


class SlowText(str):
    """A text that is not drawn until `go`."""

    def __new__(cls, text: str) -> SlowText:
        slow = super().__new__(cls, text)
        slow.drawing, slow.go = threading.Event(), threading.Event()
        return slow

    drawing: threading.Event
    go: threading.Event

    def __format__(self, spec: str) -> str:
        self.drawing.set()
        assert self.go.wait(60)
        return str(self)


def test_a_forked_worker_may_print_while_the_line_is_being_drawn() -> None:
    with terminal() as screen:
        with TerminalLine() as line:
            text = SlowText("10 %")
            thread = threading.Thread(target=line.draw, args=(text,))
            thread.start()
            assert text.drawing.wait(60)
            worker = multiprocessing.get_context("fork").Process(target=print, args=("from the worker",))
            worker.start()
            worker.join(60)
            text.go.set()
            thread.join()
            assert worker.exitcode == 0
        assert screen.screen() == ["from the worker", ""]


def test_streams_kept_from_the_block_still_work_after_it() -> None:
    with terminal() as screen:
        with TerminalLine():
            kept = sys.stdout
        print("later", file=kept)
        assert screen.screen() == ["later", ""]


@pytest.mark.parametrize(("variable", "stream"), [("dumb", None), ("xterm", io.StringIO())])
def test_there_is_no_line_without_a_terminal(monkeypatch: pytest.MonkeyPatch, variable: str, stream: Any) -> None:
    with terminal():
        monkeypatch.setenv("TERM", "xterm")
        assert isinstance(bottom_line.bottom_line(), TerminalLine)
        monkeypatch.setenv("TERM", variable)
        if stream is not None:
            monkeypatch.setattr(sys, "stderr", stream)
        assert bottom_line.bottom_line() is None


def test_in_a_notebook_one_output_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def display(what: str, display_id: bool) -> Any:
        assert display_id
        shown.append(what)
        return types.SimpleNamespace(update=lambda what: shown.__setitem__(0, what))

    ipython = types.SimpleNamespace(HTML=str, display=display)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setattr("builtins.get_ipython", type("ZMQInteractiveShell", (), {}), raising=False)
    line = bottom_line.bottom_line()
    assert isinstance(line, NotebookLine)
    with line:
        line.draw("10 % <")
        assert shown == ["<pre>10 % &lt;</pre>"]
    assert shown == [""]
