"""Prepares the worker groups of a run: their slots, the trial's code, and the settings of all trials."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import cloudpickle

from dray.cluster.node_check import REMEDIES, Needs, Trouble, nodes_without, write_sign
from dray.cluster.packages import runtime_env
from dray.cluster.view import GPU_TYPE, slot_type
from dray.code.archive import Archived
from dray.code.factory import FromDirectory, Sent, home_of
from dray.code.ignore import code_of, copied
from dray.config.schema import ExperimentConfig
from dray.environment import device, versions
from dray.errors import ConfigError
from dray.groups.capacity import find_slots, gpu_types, slots_of
from dray.groups.lender import GroupKind
from dray.groups.on_ray import OnRay
from dray.groups.slots import Slots
from dray.records.directory import ExperimentDirectory
from dray.text import LOG_FORMAT, some
from dray.worker.lease import SharedSettings
from dray.worker.spec import ExperimentSpec

if TYPE_CHECKING:
    from dray.pytorch import PyTorchTrial

NAMED_NODES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The workers of a run, before any group is started."""

    experiment: ExperimentSpec  # settings of all trials; each run, also of a resumed experiment, has a unique name
    kind: GroupKind  # the kind of groups; that of the smallest group, if their size may change
    sizes: tuple[int, ...]  # the allowed sizes, ascending, if there is a single group whose size may change
    max_slots: int | None  # most slots of all groups together; None: no limit
    share: Mapping[str, Any]  # priority, weight and max_slots, as in `dray.leases.shares.Claim`

    def for_code(self, directory: ExperimentDirectory, variant: str | None) -> ExperimentSpec:
        """The settings of trials that run a variant of the experiment's code, or its own (None)."""
        if variant is None:
            return self.experiment
        own = self.experiment.load_trial
        assert isinstance(own, FromDirectory), "a class of a script has no variants"
        code = directory.code_of(variant)
        place = str(code) if isinstance(own.directory, str) else Archived.of(code)
        return replace(self.experiment, load_trial=replace(own, directory=place), code=variant)


def prepare_workers(
    config: ExperimentConfig,
    directory: ExperimentDirectory,
    on_ray: OnRay,
    trial: type[PyTorchTrial] | None,
    rungs: Sequence[float],
    say: Callable[[str], None],
) -> Workers:
    """Find the slots, send the code to other machines, and check the nodes.

    Args:
        trial: the class, if the config has no entrypoint.
        rungs: absolute lengths at which the search decides, in the unit of its method.
        say: prints a line for the user.

    Raises:
        ConfigError: no group fits on the cluster, a node lacks something, or the code is too large.
    """
    sizes, resources = config.slots_per_trial, config.resources
    cluster, view = on_ray.cluster, on_ray.look(on_ray.limits())
    kind = find_slots(view, resources, sizes[0], cluster.description)
    usable = [node for node in view.nodes if slots_of(node.resources, kind, resources.cpus_per_slot)]
    allowed = gpu_types(resources, view)
    usable = [node for node in usable if not allowed or node.labels.get(GPU_TYPE) in allowed]
    check_prices(config, [slot_type(node.labels, gpu=kind == "gpu") for node in usable])
    load_trial, env = send_code(trial, directory, config, say, local=cluster.local)
    slots = Slots(
        per_trial=sizes[0],
        gpu=kind == "gpu",
        cpus_per_slot=resources.cpus_per_slot,
        runtime_env=env,
        placement_strategy=resources.placement_strategy,
        shared_by=resources.trials_per_slot,
        gpu_types=allowed,
    )
    run = f"{directory.path.name}-{secrets.token_hex(4)}"
    needs = None if cluster.local else check_nodes(directory, run, gpu=slots.gpu)
    settings = SharedSettings.of(config, rungs, device(gpu=slots.gpu))
    most = None if resources.max_slots is None else resources.max_slots * slots.unit
    return Workers(
        experiment=ExperimentSpec(
            run=run, settings=settings, load_trial=load_trial, log_format=LOG_FORMAT, needs=needs
        ),
        kind=GroupKind(
            slots=slots,
            # A worker that starts sandboxes must not itself be changed by the experiment.
            environment={} if settings.is_sandboxed else settings.environment,
            deterministic=settings.deterministic,
            collective_timeout_s=settings.collective_timeout_s,
            reuse_workers=settings.reuse_workers,
        ),
        sizes=tuple(sizes) if len(sizes) > 1 else (),
        max_slots=resources.max_slots,
        share={"priority": resources.priority, "weight": resources.weight, "max_slots": most},
    )


def check_prices(config: ExperimentConfig, slot_types: Iterable[str]) -> None:
    """Check that slots of these types have a price, if the config has a budget of money. Raises `ConfigError`."""
    missing = sorted(set(slot_types) - (config.prices or {}).keys())
    if missing and config.budget is not None and config.budget.usd is not None:
        fault = (
            f"required for slots of type {', '.join(missing)} with budget.usd; add it, in an existing experiment with "
            f"dray experiment extend PATH --price {missing[0]}=USD, or restrict resources.slot_type"
        )
        raise ConfigError([("prices", fault)])


def send_code(
    trial: type[PyTorchTrial] | None,
    directory: ExperimentDirectory,
    config: ExperimentConfig,
    say: Callable[[str], None],
    *,
    local: bool,
) -> tuple[FromDirectory | Sent, dict[str, Any]]:
    """The loader of an experiment's code for its workers, and their runtime environment.

    Unless the workers are on this machine (`local`), the loader contains the experiment's copy of its code, and dray
    itself is uploaded to the cluster's store. For a class from a script or a notebook, its directory is first copied
    into the experiment.

    Args:
        trial: the class, if the config has no entrypoint.
    """
    entrypoint, code, env = config.entrypoint, None, {}
    if not local:
        if trial is not None and entrypoint is None and not directory.has_code:
            _copy_home(trial, directory, config)
        what = "the trial's class"
        if directory.has_code or entrypoint is not None:  # even if all its modules are installed
            code = Archived.of(directory.code)
            what = f"{directory.code} ({copied(directory.code).summary})"
        say(f"sending {what} and dray itself to the workers")
        env = runtime_env()
    if entrypoint is not None:
        return FromDirectory(entrypoint=entrypoint, directory=code or str(directory.code)), env
    assert trial is not None, "an experiment has an entrypoint or a class"
    return Sent(name=trial.__qualname__, pickled=cloudpickle.dumps(trial), home=code), env


def _copy_home(trial: type[PyTorchTrial], directory: ExperimentDirectory, config: ExperimentConfig) -> None:
    home = home_of(trial)
    if home is None:
        return
    # A whole home directory is not code, but `ray submit` puts scripts and their modules there.
    deep = not Path.home().resolve().is_relative_to(home.resolve())
    directory.copy_code(code_of(home, leave_out=directory.path, deep=deep, field="trial"), config)


def check_nodes(directory: ExperimentDirectory, run: str, *, gpu: bool) -> Needs:
    """The requirements of each node. If checkpoints are in a directory, all nodes are checked first.

    Args:
        run: a name for this run of the experiment.
        gpu: whether workers use GPUs; if so, nodes without GPUs are not checked.

    Raises:
        ConfigError: a node lacks something.
    """
    path = str(directory.path)
    sign = run if directory.storage.is_local else None
    if sign is not None:
        write_sign(directory.path, sign)
        found = nodes_without(path, sign, "GPU" if gpu else "CPU")
        # The same trouble on several nodes is reported once; nodes are sorted by name.
        having: dict[Trouble, list[str]] = {}
        for name in sorted(found):
            having.setdefault(found[name], []).append(name)
        faults = [
            ("checkpoint_storage", f"node {names[0]} {trouble.what}{_also(names[1:])}; {REMEDIES[trouble.kind]}")
            for trouble, names in having.items()
        ]
        if faults:
            raise ConfigError(faults)
    store = None if directory.storage.is_local else directory.storage
    return Needs(versions=versions(), directory=path, sign=sign, store=store)


def _also(names: list[str]) -> str:
    return f" (also {some(names, NAMED_NODES)})" if names else ""
