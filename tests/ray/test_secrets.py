"""Canaries: whatever is secret to an experiment is, at its end, in no byte that it has left but where it belongs."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from dray.cli import main
from dray.storage import RemoteDirectory
from tests.loggers import mlflow_server
from tests.ray.harness import TRIALS, Driver, ends, journal, lines, printed, recorded
from tests.storage.s3 import LocalS3

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TRIAL_COUNT, BATCHES = 3, 40
DATA, NESTED, PEM = "c4n4ry-of-data", "c4n4ry-nested", "-----BEGIN C4N4RY KEY-----\nc4n4ryc4n4ryc4n4ry\n"
STORE_KEY, STORE_SECRET = "AKIAC4N4RYOFTHESTORE", "c4n4ry/of+the/store"
WANDB_KEY, MLFLOW_PASSWORD = "c4n4ry00" * 5, "c4n4ry-of-mlflow"
CANARIES = (DATA, NESTED, *PEM.splitlines(), STORE_KEY, STORE_SECRET, WANDB_KEY, MLFLOW_PASSWORD)

COMMANDS = (
    ("experiment", "describe"),
    ("experiment", "describe", "--json"),
    ("experiment", "logs"),
    ("experiment", "logs", "--json"),
    ("trial", "list"),
    ("trial", "list", "--json"),
    ("trial", "describe", 1),
    ("trial", "describe", 1, "--json"),
    ("trial", "logs", 1),
    ("trial", "metrics", 0, "--json"),
    ("checkpoint", "list", "--json"),
    ("checkpoint", "verify"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    home: Path
    """Below it is all that a person has: the model, the experiment, HOME, Ray's own directory, the loggers'."""
    path: Path
    output: str
    stored: dict[str, bytes]
    """The bucket's content."""
    tokens: list[str] = field(default_factory=list)
    """Ray's, which it has made by itself."""


@pytest.fixture(scope="module")
def story(drive: Callable[..., Driver], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """A search with a trial that fails; its driver is killed, and it is resumed."""
    pytest.importorskip("wandb")
    home = tmp_path_factory.mktemp("secrets")
    code, path, record = home / "model", home / "results" / "secretive", home / "record"
    shutil.copytree(TRIALS, code, ignore=shutil.ignore_patterns("__pycache__"))
    # Ray's sockets are below it: their paths must be short.
    rays = Path(tempfile.mkdtemp(prefix="dray-"))
    s3 = LocalS3()
    try:
        (home / "mlflow").mkdir()
        with mlflow_server(home / "mlflow") as server:
            config = recorded(
                record, trials=TRIAL_COUNT, batches=BATCHES, pause_s=0.1, entrypoint="secretive:Secretive"
            )
            config["data"] = {"path": "/data", "secrets": {"token": DATA, "others": [{"key": NESTED}], "pem": PEM}}
            config["checkpoint_storage"] = {
                "type": "s3", "bucket": s3.bucket, "prefix": "results", "endpoint_url": f"http://127.0.0.1:{s3.port}",
                "access_key": STORE_KEY, "secret_key": STORE_SECRET,
            }  # fmt: skip
            config["loggers"] = {"mlflow": {"tracking_uri": server}, "wandb": {"mode": "offline"}}
            # As people have it: the config is in the model's directory, and so is a program that has the secret.
            (code / "config.yaml").write_text(yaml.safe_dump(config))
            (code / "driver.py").write_text(f"TOKEN = {DATA!r}\n")
            environment = {
                "HOME": str(home / "home"),
                "RAY_TMPDIR": str(rays),
                "WANDB_API_KEY": WANDB_KEY,
                "MLFLOW_TRACKING_USERNAME": "me",
                "MLFLOW_TRACKING_PASSWORD": MLFLOW_PASSWORD,
            }
            (home / "home").mkdir()
            driver = drive("create", code / "config.yaml", code, "--path", path, **environment)
            driver.wait_for(lambda: len(lines(record)) > BATCHES // 2, "a trial trains")
            driver.kill()
            assert not ends(path).keys() >= set(range(TRIAL_COUNT)), "the driver was to die in the middle"
            assert drive("resume", path, **environment).wait() == 3, driver.log.read_text()
        _copy(rays, home / "ray")
        remote = RemoteDirectory(s3.place())
        stored = {name: _read(remote, name) for name in s3.files()}
        tokens = [file.read_text().strip() for file in (home / "home" / ".ray").glob("auth_token")]
        yield Story(home=home, path=path, output=driver.log.read_text(), stored=stored, tokens=tokens)
    finally:
        s3.stop()
        shutil.rmtree(rays, ignore_errors=True)


def _copy(rays: Path, to: Path) -> None:
    """Ray's directory, while the last of its processes may still be ending: files in it come and go."""
    for folder, _, names in os.walk(rays):
        target = to / Path(folder).relative_to(rays)
        target.mkdir(parents=True)
        for file in (Path(folder, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                if file.is_file():  # and no socket
                    shutil.copyfile(file, target / file.name)


def _read(remote: RemoteDirectory, name: str) -> bytes:
    filesystem, root = remote.location.filesystem()
    with filesystem.open_input_stream(f"{root}/{name}") as source:
        return bytes(source.read())


def found(content: bytes, canaries: tuple[str, ...]) -> set[str]:
    """Those that are in a file, also where it is an archive."""
    there = {canary for canary in canaries if canary.encode() in content}
    if zipfile.is_zipfile(io.BytesIO(content)):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            there = there.union(*(found(archive.read(name), canaries) for name in archive.namelist()))
    return there


def test_every_trial_got_the_true_one_before_the_driver_died_and_after(story: Story) -> None:
    told = lines(story.home / "record-secrets")
    assert {each["trial"] for each in told} == {0, 1, 3}, "the hyperparameters of one are invalid"
    assert {each["digest"] for each in told} == {hashlib.sha256(DATA.encode()).hexdigest()}
    assert len({each["pid"] for each in told}) > 1


def test_no_file_has_them_but_those_of_the_owner(story: Story) -> None:
    allowed = {
        "model/config.yaml": set(CANARIES) - {WANDB_KEY, MLFLOW_PASSWORD},
        "model/driver.py": {DATA},
        "results/secretive/secrets.yaml": {DATA, NESTED, *PEM.splitlines()},
        "results/secretive/storage.json": {STORE_KEY, STORE_SECRET},
        "home/.ray/auth_token": set(story.tokens),
    }
    canaries = (*CANARIES, *story.tokens)
    files = {path.relative_to(story.home).as_posix(): path for path in story.home.rglob("*") if path.is_file()}
    there = {name: found(path.read_bytes(), canaries) for name, path in files.items()}
    assert {name: leaks for name in there if (leaks := there[name] - allowed.get(name, set()))} == {}
    for name in allowed.keys() - {"model/config.yaml"}:
        assert there[name] == allowed[name], "they are where they belong"
    # What was searched is what there should be.
    for part in (
        "journal.jsonl",
        "optuna.db",
        "experiment.yaml",
        "code/config.yaml",
        "wandb/",
        "trial_1/logs",
    ):
        assert any(name.startswith(f"results/secretive/{part}") for name in files), part
    for part in ("mlflow/runs.db", "mlflow/artifacts/", "ray/ray/session_"):
        assert any(name.startswith(part) for name in files), part
    for name in ("secrets.yaml", "storage.json"):
        assert (story.path / name).stat().st_mode & 0o777 == 0o600


def test_what_a_trial_prints_and_raises_has_it_crossed_out(story: Story) -> None:
    crossed = "x" * len(DATA)
    assert f"printed: {crossed}" in printed(story.path, 0)
    errors = [record["error"] for record in journal(story.path) if "error" in record]
    assert errors
    for error in errors:
        assert f"PermissionError: no access with {crossed}" in error


def test_the_bucket_has_none(story: Story) -> None:
    assert {name: there for name, content in story.stored.items() if (there := found(content, CANARIES))} == {}
    for part in ("code/config.yaml", "experiment.yaml", "journal.jsonl", "trial_0/checkpoint_40/code/config.yaml"):
        assert f"results/secretive/{part}" in story.stored
    masked = yaml.safe_load(story.stored["results/secretive/trial_0/checkpoint_40/experiment.yaml"])
    assert masked["data"] == {
        "path": "/data",
        "secrets": {"token": "********", "others": [{"key": "********"}], "pem": "********"},
    }


def test_no_output_has_them(story: Story, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = [story.output]
    for group, name, *more in COMMANDS:
        said.append(_run(capfd, group, name, story.path, *more))
    report = tmp_path / "report.html"
    said += [_run(capfd, "report", story.path, "-o", report), report.read_text()]
    assert "c4n4ry" not in "".join(said).lower()
    assert all(said), "each says something"


def _run(capfd: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit):
        main([str(each) for each in arguments])
    out, err = capfd.readouterr()
    return str(out + err)


def test_what_is_exported_and_downloaded_has_none(
    story: Story, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The experiment's own files say where the store is; it is gone by now, but for a trial's directory.
    copy = tmp_path / "copy"
    for name, content in story.stored.items():
        target = copy / Path(name).relative_to("results/secretive")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    _run(capfd, "checkpoint", "export", copy, "-o", tmp_path / "weights")
    files = [path for path in (tmp_path / "weights").rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"model.pt", "hparams.json"}
    assert [path.name for path in files if found(path.read_bytes(), CANARIES)] == []
