"""Every block of code in the docs and the README works: Python runs, YAML is a config, commands are commands.

The Python of a page is run by that page's own test, which knows the expected result.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from dray.cli import app
from dray.config.determined_fields import IGNORED_FIELDS
from dray.config.load import load_config
from dray.config.schema import ExperimentConfig
from dray.config.server_settings import server_notify
from dray.records.directory import ExperimentDirectory
from tests.cli.conftest import checkpoint, dray, home, simulated_once  # noqa: F401 - fixtures
from tests.cli.said import Said
from tests.cli.test_commands import HAS
from tests.docs.pages import DOCS, PAGES, PROJECT, ROOT, Block, blocks, files

PYTHON = {
    "README.md": "tests/test_readme.py",
    "batch-size.md": "tests/docs/test_batch_size_page.py",
    "checkpoints.md": "tests/docs/test_checkpoints_page.py",
    "early-stopping.md": "tests/docs/test_how_to.py",
    "hugging-face.md": "tests/docs/test_how_to.py",
    "large-models.md": "tests/docs/test_how_to.py",
    "images.md": "tests/docs/test_how_to.py",
    "streaming.md": "tests/docs/test_how_to.py",
    "torchmetrics.md": "tests/docs/test_how_to.py",
    "tracking.md": "tests/docs/test_how_to.py",
    "core-api.md": "tests/docs/test_core_api_page.py",
    "cli.md": "tests/docs/test_cli_page.py",
    "coming-from.md": "tests/docs/test_coming_from.py",
    "from-hydra.md": "tests/docs/test_coming_from.py",
    "from-katib.md": "tests/docs/test_coming_from.py",
    "from-lightning.md": "tests/docs/test_coming_from.py",
    "from-optuna.md": "tests/docs/test_coming_from.py",
    "from-ray-tune.md": "tests/ray/test_pages.py",
    "from-wandb-sweeps.md": "tests/docs/test_coming_from.py",
    "quick-start.md": "tests/ray/test_pages.py",
    "looking.md": "tests/docs/test_looking_page.py",
    "machine.md": "tests/docs/test_results_page.py",
    "migration.md": "tests/docs/test_migration_page.py",
    "porting.md": "tests/docs/test_porting.py",
    "porting-more.md": "tests/docs/test_porting.py",
    "steering.md": "tests/docs/test_steering_page.py",
    "results.md": "tests/docs/test_results_page.py",
    "server-api.md": "tests/serve/test_docs.py",
    "tune.md": "tests/ray/test_tune_page.py",
    "warm.md": "tests/docs/test_how_to.py",
}
"""What runs the Python of each page."""

OTHER_TOOLS = [
    ("from-hydra.md", "config.yaml"),
    ("from-katib.md", "katib.yaml"),
    ("from-wandb-sweeps.md", "sweep.yaml"),
]
"""YAML that other tools read; tests/docs/test_coming_from.py has them read it."""

READING = {
    ("experiment", "list"),
    ("experiment", "describe"),
    ("experiment", "logs"),
    ("trial", "list"),
    ("trial", "metrics"),
    ("trial", "logs"),
    ("checkpoint", "export"),
}
"""Commands that are run here, on an existing experiment, in some tenths of a second each."""

DRAY = typer.main.get_command(app)
BASE = {
    "entrypoint": "model_def:DigitsTrial",
    "hyperparameters": {"global_batch_size": 64},
    "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"epochs": 1}},
}


def test_every_page_with_python_has_a_test_that_runs_it() -> None:
    assert {block.page for block in blocks("python")} == set(PYTHON)
    for page, test in PYTHON.items():
        assert page in (ROOT / test).read_text(), f"{test} does not read {page}"


def test_every_language_is_tested() -> None:
    assert {block.language for block in blocks()} <= {"python", "yaml", "sh", "text"}
    # What dray prints, compared in the test of its page; a directory's listing; and nginx's config.
    pages = ["README.md", "installing.md", "looking.md", "migration.md", "concepts.md", "server-access.md"]
    pages += ["how-it-works.md"] * 3  # formulas
    assert Counter(block.page for block in blocks("text")) <= Counter(pages)


@pytest.mark.parametrize("page", PAGES)
def test_all_code_is_fenced(page: str) -> None:
    outside = re.sub(r"^```.*?^```$|^    options: .*?$", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    outside = re.sub(r"^!!! \w+(?: \".*\")?\n(?:(?:    .*)?\n)+", "", outside, flags=re.M)  # admonitions
    assert "```" not in outside
    assert re.findall(r"^(?:    |\t).*$", outside, flags=re.MULTILINE) == [], "code by indentation: fence it"


def test_only_blocks_that_need_a_cluster_are_not_run() -> None:
    assert [(block.page, block.parsed_only) for block in blocks() if block.parsed_only is not None] == [
        ("clusters.md", "needs a cluster with a dashboard"),
        ("kubernetes.md", "needs a cluster"),
        ("kubernetes.md", "needs a cluster"),
        ("operating-clusters.md", "needs a cloud"),
        ("operating-clusters.md", "needs a cluster"),
    ]


# --------------------------------------------------------------------------------------------------------------- YAML
SETTINGS = files("alerts.md")["server.yaml"]
OTHERS = [*(files(page)[name] for page, name in OTHER_TOOLS), SETTINGS]


def test_the_settings_of_a_server_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "server.yaml").write_text(SETTINGS)
    assert (
        server_notify(tmp_path / "server.yaml").model_dump(exclude_defaults=True) == yaml.safe_load(SETTINGS)["notify"]
    )


@pytest.mark.parametrize(
    "block", [block for block in blocks("yaml") if block.text not in OTHERS], ids=lambda block: block.page
)
def test_yaml_is_a_config_or_a_part_of_one(block: Block) -> None:
    given = yaml.safe_load(block.text) or {}
    assert given or "yaml-language-server" in block.text
    assert set(given) <= set(ExperimentConfig.model_fields) | set(IGNORED_FIELDS)
    config = load_config({"name": "page", **BASE, **given})
    for section in ("searcher", "resources", "checkpoint_storage"):
        for field, value in given.get(section, {}).items():
            loaded = getattr(getattr(config, section), field)
            if isinstance(loaded, list):  # perhaps of sections
                loaded = config.to_dict()[section][field]
            if field == "sampler":
                loaded = loaded.name
            assert (loaded.to_dict() if hasattr(loaded, "to_dict") else loaded) == value, field


# -------------------------------------------------------------------------------------------------------------- shell
def commands(text: str) -> Iterator[list[str]]:
    """The words of each command, without comments, settings of the environment, and where output goes."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = min((n for n, word in enumerate(words) if word in ("&&", "|")), default=len(words))
            one, words = words[:end], words[end + 1 :]
            one = one[: one.index(">")] if ">" in one else one
            while re.match(r"[A-Z_]+=", one[0]):
                one = one[1:]
            yield one


def parse(command: Any, words: list[str], parent: Any = None) -> None:
    """Parse as click does, without calling the command."""
    name, *arguments = words
    if hasattr(command, "commands") and (not arguments or arguments[0] in ("--install-completion", "--help")):
        return
    context = command.make_context(name, list(arguments), parent=parent)
    if hasattr(command, "commands"):
        rest = [*context._protected_args, *context.args]  # noqa: SLF001 - the public name is deprecated
        if not rest and command.invoke_without_command:
            return
        inner, chosen, arguments = command.resolve_command(context, rest)
        parse(chosen, [inner, *arguments], context)


def check(words: list[str], page: str) -> None:
    """Check one command.

    Raises:
        Exception: it is not a valid one.
    """
    match words:
        case ["dray", *_]:
            parse(DRAY, words)
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        case ["pip", "install" | "wheel", *what] | ["uv", "pip", "install", *what]:
            for extra in re.findall(r"\[([\w,]+)\]", " ".join(what)):
                assert set(extra.split(",")) <= set(PROJECT["optional-dependencies"])
        case ["python3", "-c", _] | ["python3", "-m", "venv", ".venv"] | ["uv", "venv"] | [".", ".venv/bin/activate"]:
            pass
        case ["python", file, *_] if file.startswith("clusters/"):
            assert (ROOT / file).exists()
        case ["python", file, *_] | ["torchrun", *_, file]:
            assert file in files(page)
        case ["ray", *_]:
            from ray.scripts.scripts import cli

            parse(cli, words)
        case ["wandb", *_]:
            from wandb.cli.cli import cli

            parse(cli, words)
        case ["kubectl", *_, file] | ["sbatch", file] if file.startswith("clusters/"):
            assert (ROOT / file).exists()
        case ["chmod", "600", _] | ["mkdir", "-p", _] | ["kubectl" | "scancel" | "jq" | "git", *_]:
            pass
        case _:
            raise AssertionError(f"{page}: unknown command {words}")


@pytest.mark.parametrize(
    "block",
    # Commands of Ray and W&B take seconds to import.
    [
        pytest.param(block, marks=pytest.mark.slow if re.search("^(ray|wandb) ", block.text, re.MULTILINE) else ())
        for block in blocks("sh")
    ],
    ids=lambda block: block.page,
)
@pytest.mark.filterwarnings("ignore")
def test_commands_are_commands(block: Block) -> None:
    found = list(commands(block.text))
    assert found
    for words in found:
        check(words, block.page)


@pytest.mark.parametrize("page", PAGES)
def test_inline_commands_are_commands(page: str) -> None:
    for code in re.findall(r"`(dray [a-z][^`\n]*)`", PAGES[page]):
        if code.removeprefix("dray ") not in HAS:  # there the name stands for what it does
            for words in commands(re.sub(r"[][]", "", re.sub(r"\bN\b", "1", code))):
                check(words, page)


@pytest.mark.parametrize("page", ["README.md", "cli.md", "quick-start.md"])
def test_read_only_commands_run(page: str, home: Path, dray: Callable[..., Said]) -> None:  # noqa: F811
    logs = home / "digits-1" / "trial_7" / "logs"
    logs.mkdir()
    (logs / "rank_0.log").write_text("one\n")
    checkpoint(ExperimentDirectory.open(home / "digits-1").store(1), 160)  # that of the best validation
    ran = [
        words[1:] for block in blocks("sh", page=page) for words in commands(block.text) if tuple(words[1:3]) in READING
    ]
    assert len(ran) >= 4
    for words in ran:
        said = dray(*words)
        assert said.code == 0, (words, said.err)
        assert said.out


# -------------------------------------------------------------------------------------------------------------- files
@pytest.mark.parametrize("page", PAGES)
def test_named_files_of_the_repository_exist(page: str) -> None:
    code = re.findall(r"`([^`\n]+)`", PAGES[page])
    named = {path for each in code for path in re.findall(r"\b(?:docs|examples|bench|tests)/[\w/.-]*\w", each)}
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert DOCS.is_dir()
