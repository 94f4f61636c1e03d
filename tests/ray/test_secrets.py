"""Canaries: whatever is secret to an experiment is, at its end, in no byte that it has left but where it belongs."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from pathlib import Path

import pytest
import yaml

from dray.cli import main
from tests.ray.harness import journal, lines, printed
from tests.ray.watched import (
    BATCHES,
    DATA,
    INVALID,
    MLFLOW_PASSWORD,
    NESTED,
    PEM,
    STORE_KEY,
    STORE_SECRET,
    TRIAL_COUNT,
    WANDB_KEY,
    Watched,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long]

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


def found(content: bytes, canaries: tuple[str, ...]) -> set[str]:
    """Those that are in a file, also where it is an archive."""
    there = {canary for canary in canaries if canary.encode() in content}
    if zipfile.is_zipfile(io.BytesIO(content)):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            there = there.union(*(found(archive.read(name), canaries) for name in archive.namelist()))
    return there


def test_every_trial_got_the_true_secret_in_both_runs(watched: Watched) -> None:
    told = lines(watched.home / "record-secrets")
    assert {each["trial"] for each in told} == set(range(TRIAL_COUNT)) - {INVALID}
    assert {each["digest"] for each in told} == {hashlib.sha256(DATA.encode()).hexdigest()}
    assert len({each["pid"] for each in told}) > 1


def test_no_file_has_them_but_those_of_the_owner(watched: Watched) -> None:
    allowed = {
        "model/config.yaml": set(CANARIES) - {WANDB_KEY, MLFLOW_PASSWORD},
        "model/driver.py": {DATA},
        "results/secretive/secrets.yaml": {DATA, NESTED, *PEM.splitlines()},
        "results/secretive/storage.json": {STORE_KEY, STORE_SECRET},
        "home/.ray/auth_token": set(watched.tokens),
    }
    canaries = (*CANARIES, *watched.tokens)
    files = {path.relative_to(watched.home).as_posix(): path for path in watched.home.rglob("*") if path.is_file()}
    there = {name: found(path.read_bytes(), canaries) for name, path in files.items()}
    assert {name: leaks for name in there if (leaks := there[name] - allowed.get(name, set()))} == {}
    for name in allowed.keys() - {"model/config.yaml"}:
        assert there[name] == allowed[name], "they are where they belong"
    # What was searched is what there should be.
    for part in (
        "journal.jsonl",
        "experiment.yaml",
        "code/config.yaml",
        "wandb/",
        "trial_1/logs",
    ):
        assert any(name.startswith(f"results/secretive/{part}") for name in files), part
    for part in ("mlflow/runs.db", "mlflow/artifacts/", f"ray/dray-{os.getuid()}/ray/session_"):
        assert any(name.startswith(part) for name in files), part
    for name in ("secrets.yaml", "storage.json"):
        assert (watched.path / name).stat().st_mode & 0o777 == 0o600


def test_what_a_trial_prints_and_raises_has_it_crossed_out(watched: Watched) -> None:
    crossed = "x" * len(DATA)
    assert f"printed: {crossed}" in printed(watched.path, 0)
    errors = [record["error"] for record in journal(watched.path) if "error" in record]
    assert errors
    for error in errors:
        assert f"PermissionError: no access with {crossed}" in error


def test_the_bucket_has_none(watched: Watched) -> None:
    assert {name: there for name, content in watched.stored.items() if (there := found(content, CANARIES))} == {}
    checkpoint = f"trial_{watched.result.best_trial.trial_id}/checkpoint_{BATCHES}"
    for part in ("code/config.yaml", "experiment.yaml", "journal.jsonl", f"{checkpoint}/code/config.yaml"):
        assert f"results/secretive/{part}" in watched.stored
    masked = yaml.safe_load(watched.stored[f"results/secretive/{checkpoint}/experiment.yaml"])
    assert masked["data"] == {
        "path": "/data",
        "secrets": {"token": "********", "others": [{"key": "********"}], "pem": "********"},
    }


def test_no_output_has_them(watched: Watched, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = [watched.output]
    for group, name, *more in COMMANDS:
        said.append(_run(capfd, group, name, watched.path, *more))
    report = tmp_path / "report.html"
    said += [_run(capfd, "report", watched.path, "-o", report), report.read_text()]
    assert "c4n4ry" not in "".join(said).lower()
    assert all(said), "each says something"


def _run(capfd: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit):
        main([str(each) for each in arguments])
    out, err = capfd.readouterr()
    return str(out + err)


def test_what_is_exported_and_downloaded_has_none(
    watched: Watched, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The experiment's own files say where the store is; it is gone by now, but for a trial's directory.
    copy = tmp_path / "copy"
    for name, content in watched.stored.items():
        target = copy / Path(name).relative_to("results/secretive")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    _run(capfd, "checkpoint", "export", copy, "-o", tmp_path / "weights")
    files = [path for path in (tmp_path / "weights").rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"model.pt", "hparams.json"}
    assert [path.name for path in files if found(path.read_bytes(), CANARIES)] == []
