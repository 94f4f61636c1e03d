"""What a server tells the receivers of its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dray.cli import main
from dray.config.notify import ServerNotify
from dray.config.server_settings import server_notify
from dray.errors import ConfigError
from dray.serve.alerts import ServerAlerts
from dray.serve.effects import Ended
from dray.serve.idle import IdleSlots
from tests.records.story import happened

LIMIT_S = 600.0


def told(idle: IdleSlots, *looks: tuple[float, float, list[str]]) -> list[str]:
    """What is told after looks at these times, with these free slots of 8, and this waiting."""
    return [text for now, free, waiting in looks if (text := idle.look(now, 8, free, "gpu", waiting))]


def test_idle_slots_are_told_once_until_all_are_in_use_again() -> None:
    idle = IdleSlots(LIMIT_S)
    assert told(idle, (0, 2, []), (599, 2, [])) == []
    assert told(idle, (600, 2, [])) == ["2 of 8 GPUs idle for 10:00, and nothing waits"]
    assert told(idle, (700, 8, []), (9000, 1, [])) == []
    assert told(idle, (9001, 0, []), (9002, 1, []), (9600, 1, [])) == []
    assert told(idle, (9602, 1, [])) == ["1 of 8 GPUs idle for 10:00, and nothing waits"]


def test_idle_slots_are_told_again_if_something_waits_for_as_long() -> None:
    idle = IdleSlots(LIMIT_S)
    assert len(told(idle, (0, 2, []), (600, 2, []))) == 1
    assert told(idle, (700, 2, ["a"]), (1299, 2, ["a"])) == []
    assert told(idle, (1300, 2, ["a", "b"])) == ["2 of 8 GPUs idle for 10:00, while a, b wait"]
    assert told(idle, (1400, 2, []), (1500, 2, ["a"]), (2099, 2, ["a"])) == []
    assert told(idle, (2100, 2, ["a"])) == ["2 of 8 GPUs idle for 10:00, while a waits"]


def test_what_waits_from_the_beginning_is_told_once() -> None:
    assert len(told(IdleSlots(LIMIT_S), (0, 2, ["a"]), (600, 2, ["a"]), (900, 2, ["a"]), (2000, 2, []))) == 1


def test_what_waits_almost_from_the_beginning_is_told_with_the_idle_slots_and_not_again() -> None:
    said = told(IdleSlots(LIMIT_S), (1, 2, []), (2, 2, ["a"]), (601, 2, ["a"]), (602, 2, ["a"]), (1300, 2, ["a"]))
    assert said == ["2 of 8 GPUs idle for 10:00, while a waits"]


def test_a_fraction_of_a_slot_is_not_idle() -> None:
    assert told(IdleSlots(LIMIT_S), (0, 0.5, []), (9000, 0.5, [])) == []


LOOKS = st.lists(st.tuples(st.floats(1, 400), st.sampled_from([0.0, 1.0, 2.0]), st.booleans()), max_size=60)


@given(LOOKS)
def test_nothing_is_told_of_slots_that_were_in_use_within_the_limit_nor_twice_in_it(
    looks: list[tuple[float, float, bool]],
) -> None:
    idle, now, busy_at, last = IdleSlots(LIMIT_S), 0.0, 0.0, {True: -1e9, False: -1e9}
    for passed, free, waits in looks:
        now += passed
        busy_at = now if free < 1 else busy_at
        if told(idle, (now, free, ["a"] if waits else [])):
            assert now - busy_at >= LIMIT_S - 400, "a look may be that late"
            assert now - last[waits] >= LIMIT_S
            last[waits] = now


def written(tmp_path: Path, text: str) -> Path:
    (tmp_path / "server.yaml").write_text(text)
    return tmp_path / "server.yaml"


def test_the_settings_of_a_server_have_a_section_notify(tmp_path: Path) -> None:
    found = server_notify(written(tmp_path, "notify: {url: https://hooks.example/x, idle: 10m, no_gain: 30}"))
    assert (found.idle, found.no_gain, found.wants("idle")) == ("10m", 30, True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("url: https://hooks.example/s3cr3t", "url: unknown field; a server's settings have only notify"),
        ("notify: {idle: soon}", "notify.idle: must be a duration such as 2h"),
        ("notify: {url: hooks.example/s3cr3t}", "notify.url: must be a URL that begins with https://"),
        ("notify: {url: [https://hooks.example/s3cr3t]}", "notify.url: must be a string, got a list"),
        ("notify: {idle: 10m}", "notify: has no receiver; give a url, a command, or both"),
        ("notify: {comand: ls}", "notify.comand: unknown field; did you mean command"),
    ],
)
def test_faults_of_the_settings_are_named_without_the_url(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        server_notify(written(tmp_path, text))
    assert says in str(refused.value)
    assert "s3cr3t" not in str(refused.value)


def alert(number: int = 0, kind: str = "trial_failed", level: int | None = None) -> dict[str, Any]:
    """A record of an experiment's journal."""
    return {"event": "alert", "id": number, "kind": kind, "level": level, "key": f"{number}", "text": "trial 3 failed"}


def test_a_server_tells_of_all_experiments_and_of_an_alert_once(tmp_path: Path) -> None:
    story, out = happened(tmp_path / "story"), tmp_path / "told"
    wanted = ServerNotify(
        command=f'echo "$DRAY_NOTIFY_EVENT: $DRAY_NOTIFY_TEXT" >> {out}', states=["failed"], idle="1s"
    )
    alerts, said = ServerAlerts(wanted, lambda line: said.append(line)), list[str]()
    for _ in range(2):  # the second is by a driver that continues for one that was killed
        alerts.raised(story.path, alert())
    alerts.raised(story.path, alert(1, kind="no_gain", level=5))  # that only the experiment's receivers want
    alerts.ended(story.path, Ended("story", "completed"))
    alerts.ended(story.path, Ended("story", "failed", "it has died 3 times"))
    alerts.close()
    first, second = out.read_text().splitlines()
    assert first == "trial_failed: experiment story: trial 3 failed"
    assert second.startswith(
        "failed: experiment story failed; it has died 3 times; best validation_loss 0.126 (trial 0)"
    )


def test_the_server_tells_an_experiments_own_receivers_if_its_process_could_not(tmp_path: Path) -> None:
    story, out = happened(tmp_path / "story"), tmp_path / "told"
    config = yaml.safe_load(story.config_file.read_text())
    config["notify"] = {"command": f'echo "$DRAY_NOTIFY_TEXT" > {out}'}
    story.config_file.write_text(yaml.safe_dump(config))
    alerts = ServerAlerts(ServerNotify(), print)
    alerts.ended(story.path, Ended("story", "failed", "killed by signal 9", by_server=True))
    alerts.close()
    assert out.read_text().startswith("experiment story failed; killed by signal 9; best validation_loss 0.126")


def test_a_server_with_faults_in_its_settings_does_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (written(tmp_path, "notify: {idle: soon}"), tmp_path / "missing.yaml"):
        with pytest.raises(SystemExit) as ended:
            main(["serve", "--settings", str(file)])
        assert ended.value.code not in (0, None)
        assert str(file) in capsys.readouterr().err
