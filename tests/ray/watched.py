"""A search with secrets that others watch: an object store, MLflow and Weights & Biases.

Eight trials and one more, as one has invalid hyperparameters and another always fails. The driver is killed when the
first trial has completed, and another one resumes. `test_observers.py` is about what the others have seen,
`test_secrets.py` about what they must not see.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

import dray
from dray.storage import RemoteDirectory
from tests.loggers import MLflow, mlflow_server
from tests.ray.harness import OWN_CLUSTER, TRIALS, Driver, ends, promotion, recorded
from tests.storage.s3 import LocalS3

TRIAL_COUNT, BATCHES = 9, 40
INVALID, FAILING = 2, 1  # the trials that have no results
DATA, NESTED, PEM = "c4n4ry-of-data", "c4n4ry-nested", "-----BEGIN C4N4RY KEY-----\nc4n4ryc4n4ryc4n4ry\n"
STORE_KEY, STORE_SECRET = "AKIAC4N4RYOFTHESTORE", "c4n4ry/of+the/store"
WANDB_KEY, MLFLOW_PASSWORD = "c4n4ry00" * 5, "c4n4ry-of-mlflow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    home: Path
    """Below it is all that a person has: the model, the experiment, HOME, Ray's own directory, the loggers'."""
    path: Path
    result: dray.Result
    left: list[str]  # processes that the killed driver left behind
    mlflow: MLflow
    output: str
    stored: dict[str, bytes]  # the bucket's content
    tokens: list[str]  # Ray's, which it has made by itself


@contextlib.contextmanager
def watched(home: Path, drive: Callable[..., Driver], cluster: str) -> Iterator[Watched]:
    """Run it, below this directory; the first driver starts Ray, the other one joins this cluster. The bucket and
    MLflow's server are there until the end of the block."""
    code, path, until = home / "model", home / "results" / "secretive", home / "until"
    shutil.copytree(TRIALS, code, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mlflow", "home"):
        (home / name).mkdir()
    # Ray's sockets are below it: their paths must be short.
    rays = Path(tempfile.mkdtemp(prefix="dray-"))
    s3 = LocalS3()
    try:
        with mlflow_server(home / "mlflow") as server:
            config = recorded(
                home / "record",
                trials=TRIAL_COUNT,
                batches=BATCHES,
                pause_s=0.05,
                searcher=promotion(TRIAL_COUNT - 1, BATCHES),
                resources={"slot": "cpu", "max_slots": 1},
                loggers={"mlflow": {"tracking_uri": server}, "wandb": {"mode": "offline"}},
                data={"path": "/data", "secrets": {"token": DATA, "others": [{"key": NESTED}], "pem": PEM}},
                checkpoint_storage={
                    "type": "s3", "bucket": s3.bucket, "prefix": "results",
                    "endpoint_url": f"http://127.0.0.1:{s3.port}", "access_key": STORE_KEY, "secret_key": STORE_SECRET,
                },
                entrypoint="secretive:Secretive",
            )  # fmt: skip
            # Past the last rung but one, until the driver is dead.
            config["hyperparameters"] |= {"held_at": BATCHES - 5, "until": str(until)}
            # As people have it: the config is in the model's directory, and so is a program that has the secret.
            (code / "config.yaml").write_text(yaml.safe_dump(config))
            (code / "driver.py").write_text(f"TOKEN = {DATA!r}\n")
            environment = {
                **OWN_CLUSTER,
                "HOME": str(home / "home"),
                "RAY_TMPDIR": str(rays),
                "WANDB_API_KEY": WANDB_KEY,
                "MLFLOW_TRACKING_USERNAME": "me",
                "MLFLOW_TRACKING_PASSWORD": MLFLOW_PASSWORD,
            }
            driver = drive("create", code / "config.yaml", code, "--path", path, **environment)
            driver.wait_for(lambda: ends(path), "a trial's end")
            left = driver.kill()
            until.touch()
            assert len(ends(path)) < TRIAL_COUNT, "the driver was to die in the middle"
            assert drive("resume", path, **environment | {"RAY_ADDRESS": cluster}).wait() == 3, driver.log.read_text()
            _copy(rays, home / "ray")
            remote = RemoteDirectory(s3.place())
            stored = {name: _read(remote, name) for name in s3.files()}
            yield Watched(
                home=home,
                path=path,
                result=dray.Result(path),
                left=left,
                mlflow=MLflow(server, "recorded"),
                output=driver.log.read_text(),
                stored=stored,
                tokens=[file.read_text().strip() for file in (home / "home" / ".ray").glob("auth_token")],
            )
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
