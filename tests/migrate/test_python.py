"""What a check says of Python: which of Determined's names a file uses, however it names them."""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from dray.compat.names import COUNTERPARTS, HOOKS, MEMBERS, MISSING
from dray.migrate import check
from dray.migrate.names import why_not
from dray.migrate.scopes import ATTRIBUTES, RESULTS

Checker = Callable[..., list[str]]


@pytest.fixture
def said(tmp_path: Path) -> Checker:
    """Write files, check the directory, and give its lines; of changes and looks, without what to do about them."""

    def run(code: str = "", **files: str) -> list[str]:
        for name, text in {"model_def.py": code, **{f"{name}.py": text for name, text in files.items()}}.items():
            (tmp_path / name).write_text(textwrap.dedent(text))
        return [": ".join(str(finding).split(": ")[:3]) for finding in check(tmp_path).findings]

    return run


LOGIN = "model_def.py:{}: change: determined.experimental.client.login"
ONE, TWO = (
    "model_def.py: runs: " + told
    for told in ("1 supported use of Determined's API", "2 supported uses of Determined's API")
)


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
        "import importlib\nimportlib.import_module('determined.experimental').client.login()",
        "from determined.experimental import client\n@client.login()\ndef f(): ...",
    ],
)
def test_a_name_is_known_however_it_is_imported(said: Checker, code: str) -> None:
    assert LOGIN.format(2) in said(code)


def test_what_is_only_imported_runs(said: Checker) -> None:
    code = """\
        from determined.experimental import client
        from determined.keras import TFKerasTrial
        import determined.lightning
    """
    assert [line for line in said(code) if "change" in line] == []


@pytest.mark.parametrize(
    "use",
    [
        "try:\n    pass\nexcept client.NotFound:\n    pass",
        "isinstance(1, client.Trial)",
        "def f(trial: client.Trial) -> client.Trial: ...",
        "best: client.Trial",
    ],
)
def test_what_dray_lacks_may_be_caught_tested_for_and_annotated(said: Checker, use: str) -> None:
    assert [line for line in said(f"from determined.experimental import client\n{use}") if "change" in line] == []


def test_a_helper_is_replaced_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "model_def.py").write_text(
        "from determined.util import merge_dicts, make_metrics\nmerge_dicts({}, {})\nmake_metrics(1, [])\n"
    )
    merge, other = [finding.what for finding in check(tmp_path).findings if finding.verdict == "change"]
    assert "write {**base, **source} in its place" in merge
    assert "replace it by code of yours" in other


def test_exceptions_of_determineds_may_be_raised_and_derived_from(said: Checker) -> None:
    code = """\
        import determined as det
        class Own(det.errors.InvalidExperimentException): ...
        raise det.errors.InvalidConfigurationException(det.__version__)
    """
    assert [line for line in said(code) if "change" in line] == []


def test_a_class_that_derives_from_what_dray_lacks_must_change(said: Checker) -> None:
    code = """\
        from determined import keras
        class Digits(keras.TFKerasTrial):
            pass
    """
    assert said(code) == ["model_def.py:2: change: determined.keras.TFKerasTrial"]


def test_star_imports_bring_the_public_names(said: Checker) -> None:
    code = """\
        from determined.pytorch import *
        class Digits(PyTorchTrial):
            def build_training_data_loader(self):
                return DataLoader([])
    """
    # The module, and two of its names.
    assert said(code) == ["model_def.py: runs: 3 supported uses of Determined's API"]


def test_other_things_of_the_same_name_are_no_uses(said: Checker) -> None:
    code = """\
        from determined.experimental import client
        def with_a_parameter(client):
            client.login()
        def with_a_variable():
            client = open("x")
            client.login()
        class Own:
            def method(self):
                self.client.login()
        for each in []:
            each.client.login()
    """
    assert said(code) == []


def test_names_come_through_the_directorys_own_modules(said: Checker) -> None:
    found = said(
        "from common import det, client as c\nfrom common import *\nc.login()\nclient.login()\ndet.get_cluster_info()",
        common="from other import client\nimport determined as det",
        other="from determined.experimental import client\nfrom common import det",
    )
    assert LOGIN.format(3) in found
    assert LOGIN.format(4) in found
    assert ONE in found


@pytest.mark.parametrize(
    "code",
    [
        "import common\ncommon.client.login()",
        "import common as c\nc.client.login()",
        "import pkg.inner\npkg.inner.client.login()",
        "import pkg.inner as inner\ninner.client.login()",
        "from pkg import inner\ninner.client.login()",
        "from pkg import inner as i\nclass A:\n    def f(self): i.client.login()",
        "import common\nlogin = common.client.login\ncommon.other.client.login()",
    ],
)
def test_names_of_the_directorys_own_modules_are_known_by_their_attributes(tmp_path: Path, code: str) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "pkg" / "inner.py").write_text("from determined.experimental import client\n")
    (tmp_path / "other.py").write_text("from determined.experimental import client\n")
    (tmp_path / "common.py").write_text("import other\nfrom determined.experimental import client\n")
    (tmp_path / "model_def.py").write_text(code)
    found = [str(each)[:65] for each in check(tmp_path).findings if each.verdict == "change"]
    assert "change: determined.experimental.client.login" in found[0]


@pytest.mark.parametrize(
    "code",
    [
        "import common\ndef f(common): common.client.login()",
        "import common\ncommon.other.login()",
        "import os\nos.client.login()",
        "import common\nclass A:\n    common = 1\n    common.client.login()",
    ],
)
def test_and_no_others(said: Checker, code: str) -> None:
    assert said(code, common="from determined.experimental import client") == []


def test_what_is_nested_too_deeply_is_to_be_looked_at(said: Checker) -> None:
    assert said("x = " + " + ".join(["1"] * 600)) == [
        "model_def.py: look: is too deeply nested to be checked; check yourself what it uses of Determined"
    ]


def test_relative_imports_lead_to_the_same_module(tmp_path: Path) -> None:
    package = tmp_path / "pkg" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "pkg" / "common.py").write_text("from determined.experimental import client\n")
    (package / "train.py").write_text("from ..common import client\nclient.login()\n")
    assert [str(each)[:40] for each in check(tmp_path).findings] == ["pkg/inner/train.py:2: change: determined"]


@pytest.mark.parametrize(
    "code",
    [
        "info = det.get_cluster_info()\nprint(info.master_url)",
        "def f():\n    print(det.get_cluster_info().master_url)",
        "info: det.ClusterInfo = make()\nprint(info.master_url)",
        "def f(info: 'Optional[det.ClusterInfo]'):\n    info.master_url",
        "def f(info: Optional[det.ClusterInfo]):\n    info.master_url",
        "def f(info: det.ClusterInfo | None):\n    info.master_url",
        "if (info := det.get_cluster_info()) is not None:\n    info.master_url",
        "with det.core.init() as context:\n    context.info.master_url",
        "class A:\n    def set(self): self.i = det.get_cluster_info()\n    def get(self): return self.i.master_url",
    ],
)
def test_attributes_of_what_determined_returns_are_known(said: Checker, code: str) -> None:
    found = said(f"import determined as det\n{code}")
    assert [line.partition(": ")[2] for line in found if "master_url" in line] == [
        "change: determined.ClusterInfo.master_url"
    ]


def test_the_context_of_a_trial_is_known(said: Checker) -> None:
    code = """\
        import determined.pytorch as p
        class Digits(p.PyTorchTrial):
            def __init__(self, context):
                self.context = context
                context.reduce_metrics
            def train_batch(self, batch, epoch_idx, batch_idx):
                self._own = self.context._anything
                self.context.get_hparam("lr")
        class Other:
            def __init__(self, context):
                context.reduce_metrics
    """
    assert said(code)[:2] == [
        "model_def.py:5: change: determined.pytorch.PyTorchTrialContext.reduce_metrics",
        "model_def.py:7: change: determined.pytorch.PyTorchTrialContext._anything",
    ]
    assert len(said(code)) == 3


def test_what_is_private_but_used_by_determineds_examples_is_here(said: Checker) -> None:
    code = """\
        import determined.pytorch as p
        class Digits(p.PyTorchTrial):
            def train_batch(self, batch, epoch_idx, batch_idx):
                warm = self.context._current_batch_idx / self.context._epoch_len
    """
    assert [line for line in said(code) if ": change: " in line] == []


def test_a_trial_of_the_old_api_is_told(said: Checker) -> None:
    code = """\
        from determined.pytorch import ClipGradsL2Norm, PyTorchTrial, reset_parameters
        class Digits(PyTorchTrial):
            def build_model(self):
                return reset_parameters(net())
            def build_callbacks(self):
                return {"clip_grads": ClipGradsL2Norm(0.25)}
            def train_batch(self, batch, model, epoch_idx, batch_idx):
                return {"loss": model(batch)}
        class NoTrial:
            def train_batch(self, batch, model):
                return model(batch)
    """
    assert said(code)[:3] == [
        "model_def.py:4: change: determined.pytorch.reset_parameters",
        "model_def.py:6: change: determined.pytorch.ClipGradsL2Norm",
        "model_def.py:7: change: train_batch(batch, model, ...)",
    ]


def test_a_method_of_a_callback_that_nobody_calls_is_told(said: Checker) -> None:
    code = """\
        from determined import pytorch
        class Notes(pytorch.PyTorchCallback):
            def on_train_epoch_start(self, epoch_idx): ...
            def on_validation_end(self, metrics): ...
            def on_before_optimizer_step(self, parameters): ...
            def write(self): ...
    """
    assert said(code)[:2] == [
        "model_def.py:3: look: on_train_epoch_start",
        "model_def.py:5: look: on_before_optimizer_step",
    ]
    assert len(said(code)) == 3


def test_the_hooks_of_callbacks_are_those_of_the_class() -> None:
    from dray.pytorch import PyTorchCallback

    assert {name for name in vars(PyTorchCallback) if name.startswith("on_")} == HOOKS


def test_a_missing_thing_is_told_where_it_is_taken_and_not_again(said: Checker) -> None:
    code = """\
        import determined as det
        url = det.get_cluster_info().master_url
        print(url, url.path)
    """
    assert said(code)[0] == "model_def.py:2: change: determined.ClusterInfo.master_url"
    assert len(said(code)) == 2


def test_what_nobody_has_fails_where_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from determined.pytorch import PyTorchTrail\nfrom determined import _core\n")
    found = [str(each) for each in check(tmp_path).findings]
    assert found[0].endswith("did you mean determined.pytorch.PyTorchTrial?")
    assert found[1].startswith("a.py:2: change: determined._core: _core is private to Determined")


def test_a_private_module_has_the_names_of_the_public_one(said: Checker) -> None:
    code = "from determined.pytorch._data import DataLoader\nfrom determined.pytorch import _data\n_data.Tea"
    assert said(code)[0] == "model_def.py:3: change: determined.pytorch._data.Tea"
    assert said(code)[1] == TWO


def test_paths_in_containers(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '"""On /run/determined/workdir in a docstring."""\n'
        'data = "/run/determined/workdir/data"\n'
        'where = f"/run/determined/workdir/{data}"\n'
        'info = open("/run/determined/info/trial.json")\n'
        'images, others = "/data/images", "/database"\n'
    )
    (tmp_path / "const.yaml").write_text(
        "searcher: {}\nbind_mounts:\n  - {host_path: /mnt/nfs, container_path: /data}\n"
        "  - {host_path: /scratch, container_path: /scratch}\n"
    )
    found = [str(each) for each in check(tmp_path).findings if each.file == "a.py"]
    assert [line.split(": ")[:2] for line in found] == [
        ["a.py:2", "change"],
        ["a.py:3", "change"],
        ["a.py:4", "change"],
        ["a.py:5", "look"],
    ]
    assert found[0].endswith("write data")
    assert "write /mnt/nfs/images, or make /data a link" in found[3]


def test_variables_of_determineds_environment(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "import os\n"
        'os.environ["DET_TRIAL_ID"]\n'
        'os.getenv("DET_HPARAMS")\n'
        'os.environ["DET_MASTER"]\n'
        'os.environ["DET_CHIEF_IP"]\n'
        'os.environ["DET_TRIAL_ID"] = "1"\n'
    )
    assert [str(each) for each in check(tmp_path).findings] == [
        "a.py:2: change: DET_TRIAL_ID: dray does not set this variable; use dray.get_cluster_info().trial.trial_id",
        "a.py:3: look: DET_HPARAMS: dray does not set this variable; use dray.get_cluster_info().trial.hparams",
        "a.py:4: change: DET_MASTER: dray does not set this variable; there is no counterpart",
        "a.py:5: change: DET_CHIEF_IP: dray does not set this variable; use MASTER_ADDR",
    ]


def test_commands_of_determineds_that_python_runs(said: Checker) -> None:
    code = """\
        import os, subprocess
        subprocess.run(["det", "e", "create", "const.yaml"])
        os.system("det -m host:8080 experiment ls")
        os.system("detox run")
    """
    assert said(code) == [
        "model_def.py:2: change: det experiment create",
        "model_def.py:3: change: det experiment list",
    ]


def test_a_program_that_launches_its_own_workers(said: Checker) -> None:
    code = """\
        import subprocess
        command = ["python3", "-m", "determined.launch.wrap_rank", "0", "--", "python3", __file__, "worker"]
        subprocess.Popen(command)
        print("determined.launch.wrap_rank is Determined's")
    """
    assert said(code) == ["model_def.py:2: change: determined.launch.wrap_rank"]


def test_packages_that_are_not_here_are_to_be_looked_at_once(said: Checker) -> None:
    code = """\
        import nowhere_to_be_found.inner
        from nowhere_to_be_found import something
        import horovod.torch as hvd
        import own, json, torch
        try:
            import perhaps_not_here
        except (ImportError, OSError):
            perhaps_not_here = None
    """
    assert said(code, own="x = 1") == [
        "model_def.py:1: look: no package nowhere_to_be_found in this environment; if it was part of the container "
        "image, install it on Ray's nodes",
        "model_def.py:3: change: horovod",
    ]


def test_of_names_that_packages_share_what_is_below_is_looked_for(
    said: Checker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere" / "shared_by_many" / "here").mkdir(parents=True)
    (tmp_path / "elsewhere" / "shared_by_many" / "here" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_def.py").write_text(
        "import shared_by_many\nimport shared_by_many.here\nfrom shared_by_many.lost import x\n"
        "from shared_by_many.lost.inner import y\nimport shared_by_many.gone\n"
    )
    found = [str(each).partition(" in this")[0] for each in check(tmp_path / "model").findings]
    assert found == [
        "model_def.py:3: look: no package shared_by_many.lost",
        "model_def.py:5: look: no package shared_by_many.gone",
    ]


def test_python_that_cannot_be_read_is_told_with_its_line(said: Checker) -> None:
    [found] = said("import determined\nprint 'x'\n")
    assert found.startswith("model_def.py:2: change: Python ")


def test_nothing_is_imported_or_run(tmp_path: Path) -> None:
    (tmp_path / "model_def.py").write_text("import determined\nopen('ran', 'w')\nraise SystemExit(3)\n")
    check(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model_def.py"]


# ------------------------------------------------------------------------------------------------------- the tables


@pytest.mark.parametrize("path", [*RESULTS, *RESULTS.values(), *ATTRIBUTES.values()])
def test_what_the_reader_knows_of_determined_is_dray_s(path: str) -> None:
    assert path in COUNTERPARTS


def test_every_counterpart_runs_and_nothing_missing_does() -> None:
    assert [path for path in COUNTERPARTS if why_not(path) is not None] == []
    runs = [path for path in MISSING if why_not(f"{path}.x" if path in COUNTERPARTS else path) is None]
    assert runs == ["determined.errors"]  # exceptions, which may be raised and caught


@pytest.mark.parametrize("path", MEMBERS)
def test_members_that_are_said_to_be_missing_are(path: str) -> None:
    of, _, name = path.rpartition(".")
    module, _, there = COUNTERPARTS[of].rpartition(".")
    found = getattr(importlib.import_module(module), there)
    assert not hasattr(found, name)
    assert name not in getattr(found, "__dataclass_fields__", {})
