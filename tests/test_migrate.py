"""`dray.migrate`: the unsupported Determined names of Python files, and the faults of experiment files, with lines."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from dray.compat.names import COUNTERPARTS, MISSING
from dray.migrate import check, instead_of

CONFIG = """\
name: digits
entrypoint: model_def:Digits
hyperparameters:
  global_batch_size: 64
searcher:
  name: single
  metric: loss
  max_length: {batches: 100}
"""

Checker = Callable[..., list[str]]


@pytest.fixture
def changes(tmp_path: Path) -> Checker:
    """Check a directory with this model_def.py; its findings, without what to use instead."""

    def run(code: str) -> list[str]:
        (tmp_path / "model_def.py").write_text(textwrap.dedent(code))
        return [": ".join(str(finding).split(": ")[:3]) for finding in check(tmp_path).findings]

    return run


@pytest.fixture
def findings(tmp_path: Path) -> Checker:
    """Check a directory with these files."""

    def run(files: dict[str, str]) -> list[str]:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
            (tmp_path / name).write_text(text)
        return [str(finding) for finding in check(tmp_path).findings]

    return run


# -------------------------------------------------------------------------------------------------------------- Python


@pytest.mark.parametrize(
    "code",
    [
        "import determined\ndetermined.experimental.client.login()",
        "import determined as det\ndet.experimental.client.login()",
        "import determined.experimental.client\ndetermined.experimental.client.login()",
        "import determined.experimental.client as c\nc.login()",
        "from determined import experimental\nexperimental.client.login()",
        "from determined.experimental import client as c\nc.login(user=1)",
        "from determined.experimental.client import login as enter\nenter()",
        "from determined.experimental import client\n@client.login()\ndef f(): ...",
        "from determined.experimental import client\nclient.login()\nclient.login()",
        "def f():\n    client.login()\nfrom determined.experimental import client",
    ],
)
def test_a_name_is_found_by_any_import_at_its_first_use(changes: Checker, code: str) -> None:
    assert changes(code) == ["model_def.py:2: change: determined.experimental.client.login"]


@pytest.mark.parametrize(
    "code",
    [
        "from determined.experimental import client",
        "from determined.keras import TFKerasTrial\nimport determined.lightning",
        "from determined.experimental import client\ntry:\n    pass\nexcept client.NotFound:\n    pass",
        "from determined.experimental import client\ndef f(trial: client.Trial) -> client.Trial: ...",
        "from determined.experimental import client\nbest: client.Trial",
        "import determined as det\nraise det.errors.InvalidConfigurationException(det.__version__)",
        "from determined.pytorch._data import DataLoader\nfrom determined.core import _context\n_context.Context",
        "import client\nclient.login()\nfrom .determined import experimental\nexperimental.client.login()",
    ],
)
def test_what_works_is_not_reported(changes: Checker, code: str) -> None:
    assert changes(code) == []


def test_a_missing_attribute_of_a_class_is_reported(changes: Checker) -> None:
    code = "from determined.core import DistributedContext as D\nD.from_horovod()\nD.from_torch_distributed()"
    assert changes(code) == ["model_def.py:2: change: determined.core.DistributedContext.from_horovod"]


def test_a_misspelt_name_is_reported_where_it_is_imported(findings: Checker) -> None:
    code = "from determined.pytorch import PyTorchTrail\nfrom determined import *\nclass T(PyTorchTrail): ...\n"
    assert findings({"model_def.py": code}) == [
        "model_def.py:1: change: determined.pytorch.PyTorchTrail: neither Determined nor dray has it; did you mean "
        "determined.pytorch.PyTorchTrial?"
    ]


@pytest.mark.parametrize(("code", "line"), [("import determined\nprint 'x'\n", 2), ("x = " + "(" * 600, 1)])
def test_invalid_python_is_reported_with_its_line(findings: Checker, code: str, line: int) -> None:
    [found] = findings({"model_def.py": code})
    assert found.startswith(f"model_def.py:{line}: change: Python can't parse it: ")


def test_nothing_is_imported_or_run(findings: Checker, tmp_path: Path) -> None:
    findings({"model_def.py": "import determined\nopen('ran', 'w')\nraise SystemExit(3)\n"})
    assert [path.name for path in tmp_path.iterdir()] == ["model_def.py"]


def test_every_counterpart_is_supported_and_every_missing_name_has_a_replacement() -> None:
    assert [name for name in COUNTERPARTS if instead_of(name) is not None] == []
    supported = [name for name in MISSING if instead_of(f"{name}.x" if name in COUNTERPARTS else name) is None]
    assert supported == ["determined.errors"]  # exceptions, which may be raised and caught


# ---------------------------------------------------------------------------------------------------- experiment files


def test_an_experiment_file_without_faults_has_no_findings(findings: Checker, tmp_path: Path) -> None:
    assert findings({"const.yaml": CONFIG}) == []
    assert check(tmp_path).experiments == ["const.yaml"]


def test_all_faults_have_their_lines(findings: Checker) -> None:
    text = CONFIG.replace("metric: loss", "metirc: loss") + "resources:\n  slots_per_trial: many\nlabels: [1, two]\n"
    found = {tuple(line.split(": ")[:3]): line for line in findings({"const.yaml": text})}
    assert set(found) == {
        ("const.yaml:5", "change", "searcher.metric"),  # the section that it is missing from
        ("const.yaml:7", "change", "searcher.metirc"),
        ("const.yaml:10", "change", "resources.slots_per_trial"),
        ("const.yaml:11", "change", "labels[0]"),
    }
    assert found["const.yaml:7", "change", "searcher.metirc"].endswith("did you mean metric?")


def test_ignored_fields_are_listed(findings: Checker) -> None:
    text = CONFIG + "workspace: me\nenvironment:\n  image: x/y:1\nresources:\n  resource_pool: a\n"
    assert [line.split(": ")[:3] for line in findings({"const.yaml": text})] == [
        ["const.yaml:9", "ignored", "workspace"],
        ["const.yaml:11", "ignored", "environment.image"],
        ["const.yaml:13", "ignored", "resources.resource_pool"],
    ]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("searcher:\n  name: [single\n", ["const.yaml:3"]),
        ("searcher: {}\nname: x\nname: y\n", ["const.yaml:3"]),
        ("- searcher\n", []),
        ("a: [", []),
    ],
)
def test_invalid_yaml_is_reported_if_it_has_a_searcher(findings: Checker, text: str, where: list[str]) -> None:
    assert [line.partition(": ")[0] for line in findings({"const.yaml": text})] == where


@pytest.mark.parametrize("text", ["services: {web: {image: x}}\n", "entrypoint: main.js\n", "", "searcher: elastic\n"])
def test_other_yaml_files_are_passed_over(findings: Checker, text: str) -> None:
    assert findings({"other.yml": text}) == []


def test_experiment_files_are_found_in_folders_and_where_code_is_ignored(findings: Checker, tmp_path: Path) -> None:
    ignore = "*.yaml\ndata/\n"
    findings({".detignore": ignore, "const.yaml": CONFIG, "configs/asha.yml": CONFIG, "data/x.yaml": CONFIG})
    assert check(tmp_path).experiments == ["configs/asha.yml", "const.yaml"]
