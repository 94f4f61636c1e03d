"""An experiment's secrets belong to its owner and to operators: each route with each kind of token."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from dray.config.load import load_config
from dray.masking import leaves
from dray.records.directory import ExperimentDirectory
from dray.serve import requests, tokens
from dray.serve.draft import Allowance, Draft
from dray.serve.quota import NOTHING, Quota
from dray.storage import Location
from tests.serve.conftest import Reply, Served
from tests.serve.test_tokens import routes

SECRETS = ("tr0ub4dor-and-3", "hf_abcdefghijkl", "T0-B0-XXXXXXXX", "AKIA-access-key", "s3-secret-key-0")
CONFIG = f"""
name: digits
entrypoint: model_def:DigitsTrial
hyperparameters: {{global_batch_size: 64}}
searcher: {{name: single, metric: loss, max_length: {{batches: 4}}}}
data: {{secrets: {{password: {SECRETS[0]}, nested: [{{pin: {SECRETS[0]}}}]}}}}
environment: {{environment_variables: [HF_TOKEN={SECRETS[1]}, OMP_NUM_THREADS=4]}}
notify: {{url: "https://hooks.slack.com/{SECRETS[2]}", states: [failed]}}
checkpoint_storage: {{type: s3, bucket: alices, access_key: {SECRETS[3]}, secret_key: {SECRETS[4]}}}
"""
NAMES = [
    "data.secrets.password",
    "data.secrets.nested.0.pin",
    "environment.environment_variables.HF_TOKEN",
    "environment.environment_variables.OMP_NUM_THREADS",
    "notify.url",
    "checkpoint_storage.access_key",
    "checkpoint_storage.secret_key",
]
EVERYONE = {"owner", "other", "sandboxed", "reader", "operator"}
SUBMITTERS = EVERYONE - {"reader"}
OWNERS = {"owner", "operator"}
API, ONE = "/api/v1", "/api/v1/experiments/{name}"
READS = (
    "", "/config", "/events", "/trials", "/curves", "/comparison", "/beliefs", "/checkpoints", "/figures/{kind}",
    "/failures", "/variants/{variant}", "/logs", "/code", "/code/{path}", "/difference", "/trials/{trial}",
    "/trials/{trial}/metrics", "/trials/{trial}/system", "/trials/{trial}/logs",
)  # fmt: skip
ROUTES: Mapping[tuple[str, str], set[str]] = {
    **{("GET", f"{API}/{name}"): EVERYONE for name in ("status", "openapi.json", "token", "experiments", "queue")},
    ("GET", f"{API}/queue/preview"): EVERYONE,
    ("GET", f"{API}/tokens"): {"operator"},
    **{("GET", f"{ONE}{what}"): EVERYONE for what in READS},
    ("POST", f"{API}/experiments"): SUBMITTERS,
    ("POST", f"{ONE}/fork"): SUBMITTERS,
    ("PATCH", ONE): OWNERS,
    ("DELETE", ONE): OWNERS,
    **{("POST", f"{ONE}/{verb}"): OWNERS for verb in ("stop", "pause", "activate", "kill", "extend", "trials")},
    **{("POST", f"{ONE}/trials/{{trial}}/{verb}"): OWNERS for verb in ("fork", "stop")},
    ("POST", f"{ONE}/boards"): {"operator"},
}
"""Who may use each route with an experiment of ``owner``. Nobody reads its secrets by any of them."""


@pytest.fixture
def alices(served: Served) -> ExperimentDirectory:
    """``digits-1``, an experiment of the token ``owner`` with secrets of each kind, and with its code."""
    code = served.results.parent / "code"
    code.mkdir()
    (code / "model_def.py").write_text(f"class DigitsTrial(PyTorchTrial): ...\nPASSWORD = {SECRETS[0]!r}\n")
    config = load_config(yaml.safe_load(CONFIG))
    directory = ExperimentDirectory.create(served.results / "digits-1", config, code)
    variant = directory.variant("0" * 12)
    variant.mkdir(parents=True)
    (variant / "change.diff").write_text("a difference")
    served.control.put("digits-1", "RUNNING", owner="owner")
    return directory


@pytest.fixture
def bearers(served: Served) -> dict[str, dict[str, str]]:
    """The headers of each kind of token."""
    scopes = {"owner": "submit", "other": "submit", "sandboxed": "submit", "reader": "read", "ops": "operate"}
    made = {
        name: tokens.create(served.results, name, scope, Quota(sandbox=name == "sandboxed"))
        for name, scope in scopes.items()
    }
    headers = {name: {"Authorization": f"Bearer {secret}"} for name, secret in made.items()}
    headers["operator"] = headers.pop("ops")
    return headers


def filled(path: str) -> str:
    values = {"name": "digits-1", "trial": "0", "kind": "history", "variant": "0" * 12, "path": "model_def.py"}
    return re.sub(r"\{(\w+)\}", lambda match: values[match[1]], path)


def fork(served: Served, headers: Mapping[str, str], config: object = None) -> Reply:
    body = {} if config is None else {"config": config}
    return served.send("POST", f"{API}/experiments/digits-1/fork", body, headers=headers)


def of_fork(served: Served, reply: Reply) -> tuple[dict[str, Any], str]:
    """A fork's secrets, by their places, and its directory's text."""
    directory = ExperimentDirectory(served.results / reply.json["name"])
    there = directory.secrets_file
    kept = yaml.safe_load(there.read_text()) if there.exists() else {}
    return kept, "".join(each.read_text() for each in directory.path.rglob("*") if each.is_file())


def test_every_route_of_the_api_is_in_the_table(served: Served) -> None:
    assert {each for each in routes(served) if each[1].startswith("/api/")} == set(ROUTES)


def test_each_route_serves_only_the_tokens_of_the_table_and_shows_no_secret(
    served: Served,
    alices: ExperimentDirectory,
    bearers: dict[str, dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requests.ServedTrials, "answer_s", 0.0)  # no driver runs that could answer
    # Its checkpoints are listed, which must need no network.
    alices.write_storage(Location(str(alices.path), (("secret_key", SECRETS[4]),)))
    for kind, headers in bearers.items():
        for (method, path), may in ROUTES.items():
            if method == "DELETE" or path.endswith("/boards"):
                continue  # would end the test; `dray.serve.auth.NEEDS` is the same for them
            served.control.put("digits-1", "RUNNING", owner="owner")
            reply = served.send(method, filled(path), headers=headers)
            assert (reply.status != 403) == (kind in may), (kind, method, path, reply.body)
            assert not [each for each in SECRETS if each.encode() in reply.body], (kind, method, path)


def test_whoever_may_not_change_an_experiment_is_told_to_fork_it(
    served: Served, alices: ExperimentDirectory, bearers: dict[str, dict[str, str]]
) -> None:
    change = "@@ -1 +1 @@\n-class DigitsTrial(PyTorchTrial): ...\n+import os\n"
    patch = {"patch": f"--- a/model_def.py\n+++ b/model_def.py\n{change}"}
    for kind in ("other", "sandboxed"):
        reply = served.send("POST", f"{API}/experiments/digits-1/trials", patch, headers=bearers[kind])
        assert reply.status == 403
        assert reply.json["error"].endswith("; fork it instead")
    assert not list(alices.path.glob("requests/*"))


def test_an_owners_and_an_operators_fork_has_the_secrets(
    served: Served, alices: ExperimentDirectory, bearers: dict[str, dict[str, str]]
) -> None:
    text = alices.config_file.read_text()  # as the page sends it, with masks
    for kind in ("owner", "operator"):
        for config in (None, {"hyperparameters.global_batch_size": 32}, text):
            reply = fork(served, bearers[kind], config)
            assert (reply.status, reply.json["missing_secrets"]) == (201, []), reply.body
            found, _ = of_fork(served, reply)
            assert found["data.secrets"] == {"password": SECRETS[0], "nested": [{"pin": SECRETS[0]}]}
            assert found["environment.environment_variables"]["HF_TOKEN"] == SECRETS[1]
            assert found["notify.url"].endswith(SECRETS[2])
            stored = ExperimentDirectory(served.results / reply.json["name"]).storage
            assert dict(stored.secrets) == {"access_key": SECRETS[3], "secret_key": SECRETS[4]}


def test_anybody_elses_fork_begins_without_secrets_and_names_them(
    served: Served, alices: ExperimentDirectory, bearers: dict[str, dict[str, str]]
) -> None:
    text = alices.config_file.read_text()
    for kind in ("other", "sandboxed"):
        for config in (None, {"description": "mine"}, text, text.replace("name: digits", "name: other")):
            reply = fork(served, bearers[kind], config)
            assert (reply.status, reply.json["owner"]) == (201, kind), reply.body
            assert sorted(reply.json["missing_secrets"]) == sorted(NAMES)
            kept, everything = of_fork(served, reply)
            assert list(leaves(kept, "")) == []
            assert not [each for each in SECRETS if each in everything]


def test_whoever_forks_can_give_secrets_of_their_own(
    served: Served, alices: ExperimentDirectory, bearers: dict[str, dict[str, str]]
) -> None:
    mine = {
        "data.secrets": {"password": "mine-is-longer"},
        "environment.environment_variables": {"HF_TOKEN": "hf_of-my-own"},
        "notify": {"url": "https://hooks.slack.com/mine"},
        "checkpoint_storage.access_key": "my-access-key",
        "checkpoint_storage.secret_key": "my-secret-key",
    }
    reply = fork(served, bearers["other"], mine)
    assert (reply.status, reply.json["missing_secrets"]) == (201, [])
    found, everything = of_fork(served, reply)
    assert found["data.secrets"] == mine["data.secrets"]
    assert found["environment.environment_variables"] == mine["environment.environment_variables"]
    stored = ExperimentDirectory(served.results / reply.json["name"]).storage
    assert dict(stored.secrets) == {"access_key": "my-access-key", "secret_key": "my-secret-key"}
    assert not [each for each in SECRETS if each in everything]


def test_an_experiment_that_nobody_has_submitted_keeps_its_secrets_from_submitters(
    served: Served, alices: ExperimentDirectory, bearers: dict[str, dict[str, str]]
) -> None:
    alices.path.rename(served.results / "local-1")
    for kind, missing in (("other", True), ("owner", True), ("operator", False)):
        path = f"{API}/experiments/local-1/fork"
        reply = served.send("POST", path, {"config": {"checkpoint_storage": None}}, headers=bearers[kind])
        assert (reply.status, bool(reply.json["missing_secrets"])) == (201, missing), reply.body


def test_the_owners_command_is_not_run_for_a_fork_of_somebody_else(tmp_path: Path, results: Path) -> None:
    content = {**yaml.safe_load(CONFIG), "notify": {"command": "post-to-alice"}}
    for name in ("checkpoint_storage", "data", "environment"):
        del content[name]
    path = ExperimentDirectory.create(tmp_path / "digits-1", load_config(content), None).path
    read = Draft(config={}, forked=path).read()
    assert (read.config.notify.command, read.missing_secrets) == (None, ("notify.command",))
    assert Draft(config={}, forked=path, is_owner=True).read().config.notify.command == "post-to-alice"
    own = Draft(config={"notify.command": "mine"}, forked=path).read()
    assert (own.config.notify.command, own.missing_secrets) == ("mine", ())


def test_masks_that_stand_for_nothing_are_left_to_be_reported(tmp_path: Path, results: Path) -> None:
    path = ExperimentDirectory.create(tmp_path / "digits-1", load_config(yaml.safe_load(CONFIG)), None).path
    read = Draft(config={"data.secrets.new": "********"}, forked=path, is_owner=True).read()
    assert read.config.data["secrets"] == {
        "password": SECRETS[0],
        "nested": [{"pin": SECRETS[0]}],
        "new": "********",
    }


def test_a_mask_in_place_of_all_secrets_gives_somebody_else_none(tmp_path: Path, results: Path) -> None:
    content = {name: value for name, value in yaml.safe_load(CONFIG).items() if name != "checkpoint_storage"}
    path = ExperimentDirectory.create(tmp_path / "digits-1", load_config(content), None).path
    for place in ("data.secrets", "environment.environment_variables"):
        read = Draft(config={place: "********"}, forked=path).read()
        section, field = place.split(".")
        assert not read.config.to_dict()[section].get(field)
        assert place in read.missing_secrets


def test_the_limits_of_a_token_hold_for_its_forks(tmp_path: Path, results: Path) -> None:
    path = ExperimentDirectory.create(tmp_path / "digits-1", load_config(yaml.safe_load(CONFIG)), None).path
    read = Draft(config={}, forked=path).read(Allowance(quota=Quota(slots=2), use=NOTHING))
    assert (read.config.resources.max_slots, read.by_quota) == (2, {"resources.max_slots": 2})
