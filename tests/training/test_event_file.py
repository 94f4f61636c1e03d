"""TensorBoard's event files, written by hand and read by TensorBoard itself."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c
from tensorboard.plugins.hparams import metadata

from dray.training.metrics import event_file
from dray.training.metrics.event_file import EventFile


def read(directory: Path) -> Any:
    """The events that TensorBoard reads from a directory."""
    shown = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    shown.Reload()
    return shown


@given(st.binary())
def test_checksums_are_those_of_tensorboard(data: bytes) -> None:
    assert event_file.crc32c(data) == crc32c(data)


@given(
    st.floats(0, 1e11),
    st.integers(0, 2**62),
    st.dictionaries(st.text(max_size=200), st.floats(width=32, allow_nan=False)),
)
def test_an_event_says_what_it_was_given(wall_time: float, step: int, values: dict[str, float]) -> None:
    event = Event.FromString(event_file.scalars(wall_time, step, values))
    assert (event.wall_time, event.step) == (wall_time, step)
    assert [(value.tag, value.simple_value) for value in event.summary.value] == list(values.items())


@pytest.mark.parametrize(
    ("value", "shown"), [(1e300, math.inf), (-1e300, -math.inf), (math.inf, math.inf), (math.nan, math.nan)]
)
def test_what_no_float_holds_is_infinite_and_nan_stays(value: float, shown: float) -> None:
    (found,) = Event.FromString(event_file.scalars(1.0, 1, {"x": value})).summary.value
    assert found.simple_value == pytest.approx(shown, nan_ok=True)


@pytest.mark.parametrize("pids", [[7] * 12, range(103, 91, -1)], ids=["one process", "one after another"])
def test_files_are_read_in_the_order_in_which_they_were_made(
    pids: Iterable[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []
    for pid in pids:
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        files.append(EventFile(tmp_path))
    assert [file.path for file in files] == sorted(tmp_path.iterdir())
    for file in files:
        file.close()


HPARAMS = st.dictionaries(st.text(max_size=200), st.booleans() | st.floats(allow_nan=False) | st.text(max_size=200))


@given(st.floats(0, 1e11), HPARAMS)
def test_hyperparameters_are_what_tensorboards_page_reads(
    wall_time: float, values: dict[str, bool | float | str]
) -> None:
    event = Event.FromString(event_file.hparams(wall_time, values))
    [found] = event.summary.value
    assert (event.wall_time, found.tag) == (wall_time, metadata.SESSION_START_INFO_TAG)
    assert found.metadata.plugin_data.plugin_name == metadata.PLUGIN_NAME
    info = metadata.parse_session_start_info_plugin_data(found.metadata.plugin_data.content)
    assert info.start_time_secs == wall_time
    read = {name: getattr(value, value.WhichOneof("kind")) for name, value in info.hparams.items()}
    assert read == values
    assert {name: type(value) for name, value in read.items()} == {name: type(value) for name, value in values.items()}
