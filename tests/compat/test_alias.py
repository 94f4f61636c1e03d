"""`import determined` gives dray: the same objects, and one clear error for what dray lacks."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pickle
import sys
import textwrap
import types
import typing
from pathlib import Path
from typing import Any

import pytest
import torch

import dray
import dray.core
import dray.pytorch
from dray import compat
from dray.code.load import load_trial_class
from dray.compat.names import COUNTERPARTS, MEMBERS, MISSING, missing
from dray.config.entrypoint import ClassName
from dray.errors import EntrypointError
from dray.imports import use_model_dir
from dray.script import Script

HERE = Path(__file__).parent


def listed(file: str) -> list[str]:
    lines = (HERE / file).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def found(name: str) -> Any:
    """What a dotted name is: attributes as they lie in their class, and modules that are still to be imported."""
    at, *parts = name.split(".")
    thing: Any = importlib.import_module(at)
    for part in parts:
        at = f"{at}.{part}"
        if isinstance(thing, type):
            thing = inspect.getattr_static(thing, part)
        else:
            thing = getattr(thing, part) if hasattr(thing, part) else importlib.import_module(at)
    return thing


@pytest.mark.api("10.1", "10.2")
def test_every_name_of_the_api_is_the_same_object(alias: None) -> None:
    names = listed("api_names.txt")
    assert len(names) > 130
    assert {name for name in names if found(f"determined.{name}") is not found(ours(f"determined.{name}"))} == set()


def ours(name: str) -> str:
    """The name here of what lies in something with a counterpart: it goes by the same name there."""
    known = name
    while known not in COUNTERPARTS:
        known = known.rpartition(".")[0]
    return COUNTERPARTS[known] + name[len(known) :]


def test_every_public_name_of_determined_has_a_counterpart_or_an_answer(alias: None) -> None:
    names = listed("determined-0.38.1.txt")
    assert {name for name in names if (name in COUNTERPARTS) == (missing(name) is not None)} == set()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.api("10.1", "10.2", "10.5")
def test_every_counterpart_is_the_same_object_by_both_names(run_python: Any) -> None:
    """By dray's also where nothing has put up the alias: changing `determined` to `dray` in an import is enough."""
    names = list(COUNTERPARTS)
    assert "determined.tensorboard.metric_writers.pytorch.TorchWriter" in names
    program = f"""
        import importlib, sys
        from dray.compat.names import COUNTERPARTS, MODULES
        for name in {names}:
            ours = name.replace("determined", "dray", 1)
            module, _, attribute = ours.rpartition(".")
            home, _, known = COUNTERPARTS[name].rpartition(".")
            if name in MODULES:
                assert importlib.import_module(ours) is importlib.import_module(COUNTERPARTS[name]), name
            else:
                there = getattr(importlib.import_module(module), attribute)
                assert there is getattr(importlib.import_module(home), known), name
        import dray.tensorboard.metric_writers.pytorch as writers
        from dray.pytorch._trainer import Trainer
        assert writers.__name__ == "dray.tensorboard.metric_writers.pytorch"
        assert Trainer is sys.modules["dray.pytorch"].Trainer
        assert "determined" not in sys.modules
        from tests.compat.test_alias import compat, found, listed
        compat.install()
        for name, here in COUNTERPARTS.items():
            assert found(name) is found(here), name
        assert all(found(name) is not None for name in listed("determined-0.38.1.txt"))
        print("all are")
        """
    assert run_python(program) == "all are"


def test_the_names_are_those_of_the_last_version() -> None:
    known = set(listed("determined-0.38.1.txt"))
    older = """estimator profiler pytorch.dsat pytorch.lightning pytorch.ClipGradsL2Norm pytorch.ClipGradsL2Value
    pytorch.reset_parameters util.download_gcs_blob_with_backoff"""
    inner = "common.api common.experimental common.set_logger searcher util.merge_dicts"
    unlisted = {name.removeprefix("determined.") for name in {*COUNTERPARTS, *MISSING} - known if "._" not in name}
    assert unlisted == {*older.split(), *inner.split()}


IMPORTS = [
    "import determined.pytorch; got = determined.pytorch",
    "import determined as det; got = det.pytorch",
    "import determined.pytorch as got",
    "from determined import pytorch as got",
    "from determined.pytorch import samplers; import determined; got = determined.pytorch",
    "import importlib; got = importlib.import_module('determined.pytorch')",
]


@pytest.mark.api("10.2")
@pytest.mark.parametrize("statement", IMPORTS)
def test_all_ways_to_import_give_the_module_itself(alias: None, statement: str) -> None:
    space: dict[str, Any] = {}
    exec(statement, space)
    assert space["got"] is dray.pytorch
    assert sys.modules["determined.pytorch"] is sys.modules["dray.pytorch"]


def test_import_star_gives_what_dray_exports(alias: None) -> None:
    space: dict[str, Any] = {}
    exec("from determined.pytorch import *\nfrom determined import *", space)
    assert space["PyTorchTrial"] is dray.pytorch.PyTorchTrial
    assert space["get_cluster_info"] is dray.get_cluster_info


def test_the_modules_stay_what_they_are(alias: None) -> None:
    """Import puts the alias's spec into the module that it is given; by that it would be reloaded."""
    import determined.pytorch.samplers as samplers  # type: ignore[import-not-found]

    assert samplers.__name__ == samplers.__spec__.name == "dray.pytorch.samplers"
    assert inspect.getmodule(samplers.SkipSampler) is samplers
    assert "class SkipSampler" in inspect.getsource(samplers)
    assert importlib.reload(samplers) is samplers is sys.modules["dray.pytorch.samplers"]


def test_the_package_has_a_version_a_source_and_names(alias: None) -> None:
    import determined as det

    assert det.__version__.startswith("0.38.1+dray")
    assert "def __getattr__" in inspect.getsource(det)
    assert {"pytorch", "core", "InvalidHP", "get_cluster_info"} <= set(dir(det))
    assert importlib.reload(det) is det
    assert det.pytorch is dray.pytorch
    assert not hasattr(det, "no_such_name")
    with pytest.raises(AttributeError, match=r"module 'determined' .* has no attribute 'pytroch'"):
        _ = det.pytroch
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'determined\.no_such_module'"):
        importlib.import_module("determined.no_such_module")


def test_our_own_modules_are_not_loaded_again_under_its_name(alias: None) -> None:
    """`determined.pytorch` is ours, with our directory as its path."""
    from determined import pytorch

    assert pytorch.__path__
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'determined\.pytorch\.trainer'"):
        importlib.import_module("determined.pytorch.trainer")


def test_the_import_brings_no_torch(run_python: Any) -> None:
    said = run_python(
        """
        import sys
        import dray.compat
        dray.compat.install()
        import determined as det
        from determined.keras import TFKerasTrial
        print(det.LOG_FORMAT == dray.LOG_FORMAT, det.get_cluster_info(), "torch" in sys.modules)
        """
    )
    assert said == "True None False"


# ------------------------------------------------------------------------------------------------- what dray lacks


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("determined.keras.TFKerasTrial", "dray has no Keras: .*dray.core.init"),
        ("determined.pytorch.deepspeed.DeepSpeedTrial", "dray has no DeepSpeed: write a PyTorchTrial"),
        ("determined.experimental.client.login", "dray has no master: use the dray command"),
        ("determined.experimental.core_v2.init", r"core\.init\(\), which outside an experiment starts a local run"),
        ("determined.common.set_logger", "logging"),
        ("determined.util.download_gcs_blob_with_backoff", "blob.download_as_bytes"),
    ],
)
def test_missing_names_can_be_imported_and_fail_at_first_use(alias: None, name: str, answer: str) -> None:
    module, _, attribute = name.rpartition(".")
    space: dict[str, Any] = {}
    exec(f"from {module} import {attribute} as thing", space)
    thing = space["thing"]
    for use in (lambda: thing(), lambda: thing("a", b=1), lambda: types.new_class("Mine", (thing,))):
        with pytest.raises(compat.NotSupported, match=f"^{name}: .*{answer}"):
            use()


@pytest.mark.parametrize(
    "statement",
    [
        "from determined.experimental import client",
        "import determined.experimental.client as client",
        "import determined.experimental; client = determined.experimental.client",
    ],
)
def test_a_missing_module_is_imported_in_all_ways(alias: None, statement: str) -> None:
    space: dict[str, Any] = {}
    exec(statement, space)
    with pytest.raises(compat.NotSupported, match=r"determined\.experimental\.client\.create_experiment: "):
        space["client"].create_experiment(config="c.yaml", model_dir=".")


def test_a_missing_module_of_an_existing_package(alias: None) -> None:
    from determined.pytorch import deepspeed

    with pytest.raises(compat.NotSupported, match=r"determined\.pytorch\.deepspeed\.init"):
        deepspeed.init()
    with pytest.raises(ImportError, match="no_such"):
        exec("from determined.pytorch import no_such")


@pytest.mark.parametrize("use", ["'a' in {}", "list({})", "{}[0]", "exec('with {}(): pass')", "exec('with {}: pass')"])
def test_a_constant_that_is_missing_is_reported_too(use: str, alias: None) -> None:
    with pytest.raises(
        compat.NotSupported, match=r"^determined\.common\.util\._LEGACY_TRAINING: .*replace it by code of yours"
    ):
        exec(f"from determined.common.util import _LEGACY_TRAINING as it\n{use.format('it')}", {})


def test_what_is_missing_may_be_named_where_it_is_not_used(alias: None) -> None:
    """In annotations, in isinstance(), as a decorator's argument, in the table of a program's own."""
    from determined.keras import TFKerasTrial, TFKerasTrialContext

    assert typing.Optional[TFKerasTrialContext]  # noqa: UP045
    assert typing.Union[int, TFKerasTrialContext]  # noqa: UP007
    assert (TFKerasTrialContext | None) is (None | TFKerasTrialContext)
    assert not isinstance(object(), TFKerasTrial)
    assert not issubclass(int, TFKerasTrial)
    assert {TFKerasTrial: 1}[TFKerasTrial] == 1
    assert "determined.keras.TFKerasTrial" in repr(TFKerasTrial)
    assert pickle.loads(pickle.dumps(TFKerasTrial)) is TFKerasTrial
    assert not hasattr(TFKerasTrial, "__wrapped__")
    assert not hasattr(TFKerasTrial, "_repr_html_")


@pytest.mark.parametrize("name", ["errors.InvalidExperimentException", "common.api.errors.APIException"])
def test_an_exception_of_what_is_missing_can_be_caught_and_raised(alias: None, name: str) -> None:
    exception = found(f"determined.{name}")
    with pytest.raises(ZeroDivisionError):
        try:
            _ = 1 / 0
        except exception:
            pytest.fail("it is no such exception")
    with pytest.raises(exception, match="mine"):
        raise exception("mine")


def test_an_attribute_that_a_class_lacks_is_reported(alias: None) -> None:
    """To `hasattr`, which programs ask to run with several versions, it is not there."""
    import determined as det
    from determined import core

    info = det.ClusterInfo(trial=det.TrialInfo(trial_id=1, experiment_id=2, trial_seed=3))
    with pytest.raises(compat.NotSupported, match=r"^determined\.ClusterInfo\.task_id: .* trial_id and experiment_id"):
        _ = info.task_id
    with pytest.raises(compat.NotSupported, match=r"^determined\.core\.DistributedContext\.from_horovod: .*torch"):
        core.DistributedContext.from_horovod(None)
    assert not hasattr(info, "master_url")
    assert getattr(info, "session_token", None) is None
    assert pickle.loads(pickle.dumps(info)) == info


# ------------------------------------------------------------------------------------- model directories and programs


TRIAL = """
import torch
import determined as det
from determined import pytorch
from determined.pytorch import DataLoader, PyTorchTrial, PyTorchTrialContext
from determined.tensorboard.metric_writers.pytorch import TorchWriter


class Trial(PyTorchTrial):
    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=context.get_hparam("lr")))

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(torch.ones(4, 1), batch_size=2)

    build_validation_data_loader = build_training_data_loader

    def train_batch(self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int):
        return {"loss": self.model(batch).mean()}

    def evaluate_batch(self, batch: pytorch.TorchData):
        return {"validation_loss": self.model(batch).mean()}
"""


@pytest.fixture
def model_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "det_model_def.py").write_text(TRIAL)
    return directory


@pytest.mark.api("10.2", "10.3")
def test_a_model_directory_needs_no_install(untouched: None, model_dir: Path) -> None:
    trial = load_trial_class(ClassName("det_model_def", "Trial"), model_dir)
    assert trial.__base__ is dray.pytorch.PyTorchTrial


@pytest.mark.api("9.4", "10.3")
@pytest.mark.slow
def test_a_checkpoints_code_may_import_determined(untouched: None, model_dir: Path, tmp_path: Path) -> None:
    """One as Determined 0.38 has left it."""
    old = tmp_path / "checkpoint"
    (old / "code").mkdir(parents=True)
    (old / "code" / "det_model_def.py").write_text(TRIAL)
    (old / "load_data.json").write_text(
        '{"trial_type": "PyTorchTrial", "trial_cls_spec": "det_model_def:Trial", "hparams": {"lr": 0.5},'
        ' "experiment_config": {}}'
    )
    weights = {"weight": torch.full((1, 1), 3.0), "bias": torch.zeros(1)}
    state = {"models_state_dict": [weights], "optimizers_state_dict": [], "lr_schedulers_state_dict": []}
    torch.save({**state, "callbacks": {}}, old / "state_dict.pth")
    (old / "metadata.json").write_text('{"steps_completed": 5}')
    trial: Any = dray.pytorch.load_trial_from_checkpoint_path(str(old))
    assert isinstance(trial, dray.pytorch.PyTorchTrial)
    assert trial.model.weight.item() == 3.0
    assert trial.context.get_hparam("lr") == 0.5


def test_a_module_of_the_users_of_this_name_goes_first(
    untouched: None, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (model_dir / "determined.py").write_text("mine = True\n")
    use_model_dir(model_dir)
    assert importlib.import_module("determined").mine
    assert not caplog.messages
    assert not compat.real_package_hint()


def test_the_next_model_directory_has_the_same_alias(untouched: None, model_dir: Path, tmp_path: Path) -> None:
    first = load_trial_class(ClassName("det_model_def", "Trial"), model_dir)
    package = sys.modules["determined"]
    (tmp_path / "next").mkdir()
    (tmp_path / "next" / "det_model_def.py").write_text(TRIAL)
    second = load_trial_class(ClassName("det_model_def", "Trial"), tmp_path / "next")
    assert first is not second
    assert sys.modules["determined"] is package
    assert sys.modules["determined.pytorch"] is dray.pytorch


@pytest.mark.api("10.3")
def test_a_program_and_a_module_run(untouched: None, model_dir: Path) -> None:
    (model_dir / "train.py").write_text(
        "import determined as det\nfrom determined import core, pytorch\n"
        "assert det.get_cluster_info() is None\nopen('ran.txt', 'a').write(f'{__name__} {pytorch.__name__}\\n')\n"
    )
    use_model_dir(model_dir)
    Script(command="python3 train.py", file="train.py").run(model_dir)
    Script(command="python3 -m train", module="train").run(model_dir)
    assert (model_dir / "ran.txt").read_text() == "__main__ dray.pytorch\n" * 2


@pytest.mark.slow
def test_a_spawned_process_finds_it(untouched: None, run_python: Any, tmp_path: Path) -> None:
    """As the workers of a data loader, where they are not forked: they import the dataset's module by name."""
    (tmp_path / "spawn_data.py").write_text(
        "from determined.experimental import client\nimport determined as det\n"
        "def tell(queue):\n    queue.put((det.__version__, client.__name__))\n"
    )
    said = run_python(
        f"""
        import multiprocessing
        from dray.imports import use_model_dir
        if __name__ == "__main__":
            use_model_dir({str(tmp_path)!r})
            import spawn_data
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            process = context.Process(target=spawn_data.tell, args=(queue,))
            process.start()
            print(*queue.get(timeout=200))
            process.join()
        """
    )
    assert said == f"0.38.1+dray{dray.__version__} determined.experimental.client"


@pytest.mark.long
@pytest.mark.slow
def test_a_class_of_a_notebook_travels_with_its_modules(alias: None, run_python: Any, tmp_path: Path) -> None:
    """By value: it names `determined`, and is made in a worker before anything of the user's is imported there."""
    import ray.cloudpickle

    from dray.code.factory import Sent

    space: dict[str, Any] = {"__name__": "__main__"}
    exec(
        textwrap.dedent(
            """
            import determined as det
            from determined import pytorch
            from determined.keras import TFKerasTrial

            class Mine(pytorch.PyTorchTrial):
                def train_batch(self, batch, epoch_idx, batch_idx):
                    return det.get_cluster_info(), det.pytorch.Batch(1), TFKerasTrial
                build_training_data_loader = build_validation_data_loader = __init__ = None
            """
        ),
        space,
    )
    sent = Sent(name="Mine", pickled=ray.cloudpickle.dumps(space["Mine"]), home=None)
    (tmp_path / "class.pkl").write_bytes(pickle.dumps(sent))
    said = run_python(
        f"""
        import pickle
        with open({str(tmp_path / "class.pkl")!r}, "rb") as file:
            trial = pickle.load(file)()
        import dray.pytorch
        print(trial.__base__ is dray.pytorch.PyTorchTrial, *trial.train_batch(None, None, 0, 0))
        """
    )
    assert said == "True None Batch(1) <determined.keras.TFKerasTrial, which dray has no counterpart for>"


# ---------------------------------------------------------------------------------------------- the real one is there


@pytest.fixture
def real(untouched: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution `determined`, installed."""
    place = tmp_path / "site-packages"
    (place / "determined" / "pytorch").mkdir(parents=True)
    (place / "determined" / "__init__.py").write_text("__version__ = '0.38.1'\n")
    (place / "determined" / "pytorch" / "__init__.py").write_text(
        "class PyTorchTrial: pass\nclass PyTorchTrialContext: pass\nclass DataLoader: pass\nTorchData = object\n"
    )
    (place / "determined" / "tensorboard" / "metric_writers").mkdir(parents=True)
    (place / "determined" / "tensorboard" / "metric_writers" / "pytorch.py").write_text("class TorchWriter: pass\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(place)])
    importlib.invalidate_caches()
    return place


def test_the_real_package_goes_first_with_a_warning(real: Path, caplog: pytest.LogCaptureFixture) -> None:
    compat.install_if_absent()
    import determined as det

    assert det.__version__ == "0.38.1"
    assert importlib.import_module("determined.pytorch").__name__ == "determined.pytorch"
    (warned,) = caplog.messages
    assert f"({real / 'determined' / '__init__.py'})" in warned
    assert "pip uninstall determined" in warned


def test_a_class_of_the_real_package_is_an_error_with_the_fix(real: Path, model_dir: Path) -> None:
    with pytest.raises(EntrypointError) as told:
        load_trial_class(ClassName("det_model_def", "Trial"), model_dir)
    assert len(told.value.faults) == 1
    assert f"Determined's own package ({real / 'determined' / '__init__.py'})" in str(told.value)
    assert "pip uninstall determined" in str(told.value)


def test_install_wins_over_the_real_package(real: Path, caplog: pytest.LogCaptureFixture) -> None:
    compat.install()
    assert not caplog.messages
    import determined as det

    assert det.pytorch is dray.pytorch
    compat.install()
    assert importlib.import_module("determined") is det


def test_install_after_the_real_package_is_an_error(real: Path) -> None:
    importlib.import_module("determined")
    with pytest.raises(
        RuntimeError, match=r"already imported, from .*determined/__init__\.py; call .* before the first"
    ):
        compat.install()


@pytest.mark.parametrize("path", MEMBERS)
def test_a_member_listed_as_missing_is_missing(path: str) -> None:
    of, _, name = path.rpartition(".")
    module, _, ours = COUNTERPARTS[of].rpartition(".")
    counterpart = getattr(importlib.import_module(module), ours)
    assert not hasattr(counterpart, name)
    assert name not in getattr(counterpart, "__dataclass_fields__", {})
