"""What a check says of experiment files, shell scripts and requirements, and on which line."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dray.errors import ConfigError
from dray.migrate import Checked, check
from dray.migrate.configs import Lines
from dray.migrate.shell import COMMANDS, of_command

WHOLE = """\
name: digits
entrypoint: model_def:Digits
hyperparameters:
  global_batch_size: 64
searcher:
  name: single
  metric: loss
  max_length: {batches: 100}
"""


TASK = "entrypoint: [python3, serve.py]\nresources: {slots: 0}\n"


@pytest.fixture
def checked(tmp_path: Path) -> Callable[..., Checked]:
    """Write these files beside a model, and check the directory."""

    def run(files: dict[str, str]) -> Checked:
        for name, text in {"model_def.py": "class Digits: ...\nclass Letters: ...\n", **files}.items():
            (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
            (tmp_path / name).write_text(text)
        return check(tmp_path)

    return run


def lines(found: Checked) -> list[str]:
    return [str(finding) for finding in found.findings]


def test_an_experiment_file_without_faults_runs(checked: Callable[..., Checked]) -> None:
    found = checked({"const.yaml": WHOLE})
    assert lines(found) == ["const.yaml: runs: dray experiment create const.yaml ."]
    assert found.runs
    assert found.experiments == ("const.yaml",)
    assert found.summary == "0 to change, 0 to look at, 0 ignored: runs unchanged"


def test_what_is_to_be_looked_at_is_not_said_to_run(checked: Callable[..., Checked]) -> None:
    code = "import no_such_package\nfrom determined import pytorch\nclass Digits(pytorch.PyTorchTrial): ...\n"
    found = checked({"const.yaml": WHOLE, "model_def.py": code})
    assert found.runs
    assert found.summary == "0 to change, 1 to look at, 0 ignored; the rest runs unchanged"


def test_all_faults_are_told_with_their_lines(checked: Callable[..., Checked]) -> None:
    text = WHOLE.replace("metric: loss", "metirc: loss") + "resources:\n  slots_per_trial: many\nlabels: [1, two]\n"
    found = checked({"const.yaml": text})
    assert not found.runs
    told = {line.partition(": change: ")[0]: line.partition(": change: ")[2] for line in lines(found)}
    assert {where: what.partition(":")[0] for where, what in told.items()} == {
        "const.yaml:5": "searcher.metric",  # where it is missing from
        "const.yaml:7": "searcher.metirc",
        "const.yaml:10": "resources.slots_per_trial",
        "const.yaml:11": "labels.0",
    }
    assert told["const.yaml:7"].endswith("did you mean metric?")


def test_what_is_not_used_is_ignored(checked: Callable[..., Checked]) -> None:
    text = WHOLE + "workspace: me\nenvironment:\n  image: x/y:1\nresources:\n  resource_pool: a\n"
    found = checked({"const.yaml": text})
    assert [line.split(": ")[:3] for line in lines(found)] == [
        ["const.yaml:9", "ignored", "workspace"],
        ["const.yaml:11", "ignored", "environment.image"],
        ["const.yaml:13", "ignored", "resources.resource_pool"],
        ["const.yaml", "runs", "dray experiment create const.yaml ."],
    ]
    assert found.runs


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("searcher:\n  name: [single\n", 3),
        ("entrypoint: a:B\nname: x\nname: y\n", 3),
        ("- searcher\n", None),
        ("a: [", None),
    ],
)
def test_yaml_that_cannot_be_read_is_told_if_it_is_an_experiments(
    checked: Callable[..., Checked], text: str, line: int | None
) -> None:
    found = [finding.line for finding in checked({"const.yaml": text}).findings]
    assert found == ([] if line is None else [line])


@pytest.mark.parametrize(
    "text",
    ["services:\n  web: {image: x}\n", "name: build\nentrypoint: main.js\n", "", "searcher: elastic\n", "[1, 2]", TASK],
)
def test_other_yaml_is_passed_over(checked: Callable[..., Checked], text: str) -> None:
    assert checked({"other.yml": text}).findings == ()


def test_experiment_files_are_found_below_and_where_code_is_ignored(checked: Callable[..., Checked]) -> None:
    found = checked(
        {".detignore": "*.yaml\ndata/\n", "const.yaml": WHOLE, "configs/asha.yml": WHOLE, "data/x.yaml": WHOLE}
    )
    assert found.experiments == ("configs/asha.yml", "const.yaml")


@pytest.mark.parametrize(
    ("entrypoint", "told"),
    [
        ("model_def:Digits", None),
        ("python3 -m determined.launch.torch_distributed --trial model_def:Letters", None),
        ("python3 train.py --epochs 1", None),
        ("python3 -m pkg.train", None),
        ("python3 -m pkg", None),
        ("[python3, train.py]", None),
        ("starred:Anything", None),
        ("model_def:Digit", "model_def.py has no class Digit; its classes are Digits, Letters"),
        ("model_dev:Digits", "no module model_dev in the directory or this environment; give an existing one"),
        ("torch.nn:Module", None),
        (
            "python3 trian.py",
            "no script trian.py in the directory; give the path of a script, relative to the directory",
        ),
        ("torchrun train.py", "can't start torchrun"),
        ("null", "missing required field"),
    ],
)
def test_the_entrypoint_leads_somewhere(checked: Callable[..., Checked], entrypoint: str, told: str | None) -> None:
    files = {"train.py": "", "pkg/__main__.py": "", "pkg/train.py": "", "starred.py": "from model_def import *\n"}
    found = checked({**files, "const.yaml": WHOLE.replace("model_def:Digits", entrypoint)})
    changes = [finding for finding in found.findings if finding.verdict == "change"]
    if told is None:
        assert changes == []
    else:
        [change] = changes
        assert change.line == 2
        assert change.what.startswith("entrypoint: ")
        assert told in change.what


@pytest.mark.parametrize(
    "entrypoint",
    [
        "deep:Mixture",
        "derived:Bigger",
        "pkg.inner:Again",
        "python3 -m determined.launch.deepspeed --trial deep:Mixture",
        "python3 -m determined.launch.deepspeed python3 trainer.py",
        "python3 -m pkg.inner",
    ],
)
def test_an_entrypoint_whose_code_must_be_changed_is_not_said_to_run(
    checked: Callable[..., Checked], entrypoint: str
) -> None:
    files = {
        "deep.py": "from determined.pytorch import deepspeed\nclass Mixture(deepspeed.DeepSpeedTrial): ...\n",
        "derived.py": "from deep import Mixture\nclass Bigger(Mixture): ...\n",
        "trainer.py": "def main():\n    import derived\n",
        "pkg/__init__.py": "",
        "pkg/inner.py": "from .. import derived\nclass Again(derived.Bigger): ...\n",
        "other.yaml": WHOLE,
    }
    found = checked({**files, "const.yaml": WHOLE.replace("model_def:Digits", entrypoint)})
    assert [str(each) for each in found.findings if each.file.endswith(".yaml")] == [
        "const.yaml: blocked: change deep.py first; then: dray experiment create const.yaml .",
        "other.yaml: runs: dray experiment create other.yaml .",
    ]


def test_paths_in_containers_that_the_file_gives_to_the_code_are_told(checked: Callable[..., Checked]) -> None:
    config = (
        WHOLE
        + "data: {name: cifar, where: [/data/train, /datasets], out: /run/determined/workdir/out}\n"
        + "bind_mounts: [{host_path: /mnt/nfs, container_path: /data}]\n"
    )
    found = [str(each) for each in checked({"const.yaml": config}).findings if each.verdict in ("look", "change")]
    assert [line.split(": ")[:3] for line in found] == [
        ["const.yaml:9", "look", "data.where[0]"],
        ["const.yaml:9", "change", "data.out"],
    ]
    assert "write /mnt/nfs/train, or make /data a link" in found[0]


def test_lines_of_fields() -> None:
    text = "a:\n  - b: 1\n  - c:\n      d.e: 2\nf: {g: 3}\n"
    assert [Lines(text).of(path) for path in ("a.0.b", "a.1.c.d.e", "a[1].c", "f.g", "f.h", "z", "")] == [
        2,
        4,
        3,
        5,
        5,
        0,
        0,
    ]


# ------------------------------------------------------------------------------------------------------------- shell


def test_a_startup_hook_runs(checked: Callable[..., Checked]) -> None:
    found = checked({"startup-hook.sh": "# det e list\npip install -r requirements.txt\nmkdir -p data\n"})
    assert lines(found) == ["startup-hook.sh: runs: once on each node, before the model's code"]


def test_lines_of_a_startup_hook(checked: Callable[..., Checked]) -> None:
    hook = (
        "apt-get install -y jq && sudo yum install x\n"
        "pip install 'x' determined==0.38.1\n"
        "cp data /run/determined/workdir/data\n"
        'for id in $(det e ls --csv); do FOO=1 det trial logs "$id; done\n'
        "pip install determined-helpers; detox\n"
    )
    found = checked({"startup-hook.sh": hook})
    assert [line.split("; ")[0].split(", ")[0] for line in lines(found)] == [
        "startup-hook.sh:1: look: apt-get needs root",
        "startup-hook.sh:2: change: determined==0.38.1: if the real package is installed",
        "startup-hook.sh:3: change: /run/determined/workdir exists only in Determined's containers",
        "startup-hook.sh:4: change: det experiment list: use dray experiment list",
        "startup-hook.sh:4: change: det trial logs: use dray trial logs",
    ]


def test_other_shell_scripts_are_read_for_commands(checked: Callable[..., Checked]) -> None:
    found = checked({"scripts/submit.sh": "apt-get update\ndet experiment create const.yaml .\n"})
    assert lines(found) == ["scripts/submit.sh:2: change: det experiment create: use dray experiment create"]


def test_every_command_has_an_answer() -> None:
    for command, instead in COMMANDS.items():
        assert of_command(["det", "-u", "me", *command.split(), "7"]) == f"det {command}: use {instead}"
    assert of_command(["det", "user", "login", "me"]) == "det user login: dray has no such command; remove it"
    assert of_command(["det", "e", "lt", "7"]) == "det experiment list-trials: use dray trial list"
    assert of_command(["det"]) is None
    assert of_command(["ls", "e"]) is None


def notebook(*cells: str) -> str:
    """With a cell of text before the cells of code."""
    code = [{"cell_type": "code", "source": cell.splitlines(keepends=True), "outputs": []} for cell in cells]
    return json.dumps({"cells": [{"cell_type": "markdown", "source": ["import determined"]}, *code], "nbformat": 4})


def test_notebooks_are_read_cell_by_cell(checked: Callable[..., Checked]) -> None:
    found = checked(
        {
            "demo.ipynb": notebook(
                "%matplotlib inline\nfrom determined.experimental import client\nimport determined as det\n",
                "%%time\nif True:\n    !det experiment create const.yaml .\nclient.login()",
                "%%bash\nexport A=1\ndet e ls",
                "%%html\n<b>client.login()",
                "x = = client.login()",
                "det.get_cluster_info?\ndet.get_cluster_info()",
            )
        }
    )
    assert [line.partition(";")[0][:93] for line in lines(found)] == [
        "demo.ipynb: change: cell 3, line 3: det experiment create: use dray experiment create",
        "demo.ipynb: change: cell 3, line 4: determined.experimental.client.login: dray has no master:",
        "demo.ipynb: change: cell 4, line 3: det experiment list: use dray experiment list",
        "demo.ipynb: runs: 2 supported uses of Determined's API",
    ]


def test_what_several_cells_need_is_said_once(checked: Callable[..., Checked]) -> None:
    login = "from determined.experimental import client\nclient.login()\n"
    found = checked({"demo.ipynb": notebook(login, login), "code.py": login})
    assert [line for line in found.lines() if "change" in line] == [
        "code.py:2: change: determined.experimental.client.login: dray has no master: use the dray command, or "
        "dray.Experiment and its Result in Python; also demo.ipynb:cell 2, line 2, cell 3, line 2"
    ]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cells": 3}', '{"cells": [3, {"cell_type": "code"}]}'])
def test_what_is_no_notebook_is_passed_over(checked: Callable[..., Checked], text: str) -> None:
    assert lines(checked({"demo.ipynb": text})) == []


def test_a_requirement_of_the_real_package_must_go(checked: Callable[..., Checked]) -> None:
    found = checked({"requirements.txt": "torch\ndetermined>=0.30\n# determined\ndetermined-x\n"})
    assert [(finding.line, finding.verdict) for finding in found.findings] == [(2, "change")]


def test_other_versions_of_what_dray_needs_are_to_be_looked_at(checked: Callable[..., Checked]) -> None:
    here = importlib.metadata.version("pandas")
    hook = f"pip install -U 'ray[air]==2.9.3' 'pydantic<2.0.0' # old\npip install timm==1.0 pandas=={here} torch\n"
    found = checked(
        {"startup-hook.sh": hook, "requirements.txt": "Torch >= 1.9; python_version > '3'\nnumpy\ntimm==1\n"}
    )
    assert [line.partition(" uses ")[0] for line in lines(found)] == [
        "requirements.txt:1: look: Torch >= 1.9: dray itself",
        "startup-hook.sh:1: look: ray[air]==2.9.3: dray itself",
        "startup-hook.sh:1: look: pydantic<2.0.0: dray itself",
        "startup-hook.sh: runs: once on each node, before the model's code",
    ]


def test_the_real_package_beside_dray_must_go(checked: Callable[..., Checked], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"determined": "0.38.1"}[name])
    [found] = lines(checked({}))
    assert found.startswith("this environment: change: determined 0.38.1 is installed: ")


def test_a_directory_that_is_too_large_to_be_code_is_told(tmp_path: Path) -> None:
    with (tmp_path / "data.bin").open("wb") as file:
        file.truncate(100 * 2**20)
    with pytest.raises(ConfigError, match=r"exclude what is not code in .*\.drayignore"):
        check(tmp_path)
