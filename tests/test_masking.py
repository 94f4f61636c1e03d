"""What a config keeps secret is masked, wherever it stands, and nothing else is."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from dray.masking import MASK, hidden, masked, texts

SECRETS: dict[str, Any] = {
    "token": "t0k3n-t0k3n",
    "nested": {"keys": ["first-key", None, 12345678]},
    "pem": "-----BEGIN KEY-----\nAAAABBBBCCCC\n-----END KEY-----\n",
    "short": "abc",
}


def test_values_are_masked_and_names_stay() -> None:
    config = {"name": "a", "data": {"path": "/data", "secrets": SECRETS}}
    assert masked(config) == {
        "name": "a",
        "data": {
            "path": "/data",
            "secrets": {
                "token": MASK,
                "nested": {"keys": [MASK, None, MASK]},
                "pem": MASK,
                "short": MASK,
            },
        },
    }
    assert config["data"] == {"path": "/data", "secrets": SECRETS}, "the caller's own is left alone"


@pytest.mark.parametrize("config", [{}, {"data": None}, {"data": "text"}, {"data": {"path": "/data"}}])
def test_without_secrets_nothing_changes(config: dict[str, Any]) -> None:
    assert masked(config) == config
    assert texts(config) == []


def test_what_is_looked_for_are_lines_that_are_no_common_words() -> None:
    expected = ["t0k3n-t0k3n", "first-key", "12345678", "-----BEGIN KEY-----", "AAAABBBBCCCC", "-----END KEY-----"]
    assert texts({"data": {"secrets": SECRETS}}) == expected
    assert texts({"data": {"secrets": "only-one"}}) == ["only-one"]
    assert texts({"data": {"secrets": [True, False, 1.5]}}) == []


@pytest.mark.parametrize(
    ("secret", "written"),
    [
        ("t0k3n-t0k3n", "password = t0k3n-t0k3n  # t0k3n-t0k3n"),
        ('say "friend"', json.dumps({"a": 'say "friend"'})),
        ("schlüssel-wort", json.dumps("schlüssel-wort")),
        ("schlüssel-wort", json.dumps("schlüssel-wort", ensure_ascii=False)),
        ("it's a secret", "a: 'it''s a secret'\n"),
        ("se/cr+et/key", "s3://KEY:se%2Fcr%2Bet%2Fkey@bucket"),
        (SECRETS["pem"], yaml.safe_dump({"a": {"pem": SECRETS["pem"]}}, default_style="|")),
    ],
)
def test_a_file_has_it_crossed_out_and_keeps_its_length(secret: str, written: str) -> None:
    before = written.encode()
    after = hidden(before, texts({"data": {"secrets": secret}}))
    assert len(after) == len(before)
    changed = [old for old, new in zip(before, after, strict=True) if old != new]
    assert len(changed) >= 8
    assert {new for old, new in zip(before, after, strict=True) if old != new} == {ord("x")}
    for line in texts({"data": {"secrets": secret}}):
        assert line not in after.decode()
