"""A debugger in a local run shows the user's frames, without those that led there from the command."""

from __future__ import annotations

import bdb
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from dray.desk.failure import is_users_file


@contextmanager
def users_frames_in_debugger(caller: str) -> Iterator[None]:
    """In the block, debuggers (`breakpoint()`, `pdb`, and others made of `bdb`) begin the stack with the user's code.

    Args:
        caller: the file whose code calls the user's.
    """
    whole = bdb.Bdb.get_stack

    def get_stack(
        self: bdb.Bdb, f: FrameType | None, t: TracebackType | None
    ) -> tuple[list[tuple[FrameType, int]], int]:
        stack, at = whole(self, f, t)
        files = [each.f_code.co_filename for each, _ in stack]
        first = files.index(caller) if caller in files else len(files)
        begin = next((place for place in range(first, at + 1) if is_users_file(files[place])), 0)
        return stack[begin:], at - begin

    bdb.Bdb.get_stack = get_stack  # type: ignore[method-assign]
    try:
        yield
    finally:
        bdb.Bdb.get_stack = whole  # type: ignore[method-assign]
