"""``dray cluster``."""

from __future__ import annotations

import os
import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dray.cli import show
from dray.cli.arguments import Json
from dray.cli.errors import BAD_INPUT, FAILED, BadUse
from dray.text import counted, size

if TYPE_CHECKING:
    from dray.checks.findings import ClusterCheck
    from dray.storage import Location

app = typer.Typer(help="Inspect and check the Ray cluster that experiments run on.", no_args_is_help=True)


@app.command()
def status(
    address: Annotated[str | None, typer.Option(help="Address of the Ray cluster; RAY_ADDRESS by default.")] = None,
    json: Json = False,
) -> None:
    """Show the nodes of the Ray cluster that experiments run on, and its free CPUs and GPUs.

    \b
    RAY_ADDRESS=head:6379 dray cluster status
    """
    from dray.cluster.nodes import status

    found = status(address)
    if json:
        show.as_json(found)
        return
    cpus = counted(found["cpus"], "CPU")
    if found["address"] is None:
        typer.echo(f"RAY_ADDRESS is not set: an experiment starts its own Ray on this machine ({cpus})")
        return
    rows = [
        (node["address"], "alive" if node["is_alive"] else "dead", node["cpus"], node["gpus"], size(node["memory"]))
        for node in found["nodes"]
    ]
    show.table(["node", "state", "CPUs", "GPUs", "memory"], rows, left=["node", "state"])
    free = f"{found['cpus_free']} of {cpus} and {found['gpus_free']} of {counted(found['gpus'], 'GPU')}"
    typer.echo(f"Ray at {found['address']}: {free} free")


@app.command()
def check(
    address: Annotated[
        str | None, typer.Option(help="Address of the Ray cluster; RAY_ADDRESS by default, else only this machine.")
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint storage: a directory, a URI, or an experiment config file; DRAY_STORAGE by default.",
            metavar="WHERE",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check a cluster for problems before anything trains on it. Exit code 1 if there are any.

    Checks each node's versions, GPUs, clock and access to the storage, the network between nodes and NCCL's use of it,
    and an all-reduce over all free GPUs. Only the all-reduce needs free slots.

    \b
    RAY_ADDRESS=auto dray cluster check --storage s3://bucket/results
    RAY_ADDRESS=auto dray cluster check --storage asha.yaml --json
    """
    place = _place(storage)
    # Imported after the config's own errors were reported.
    from dray.checks.cluster import check as checked_cluster
    from dray.records.directory import results_root
    from dray.storage import Location

    checked = checked_cluster(address, place, Location.of(results_root()))
    if json:
        show.as_json(checked.to_dict())
    else:
        _print_check(checked)
    raise typer.Exit(0 if checked.is_fit else FAILED)


def _place(storage: str | None) -> Location | None:
    """The checkpoint storage from the option, from the config that it names, or from the environment."""
    from dray.config.load import load_config
    from dray.storage import Location

    if storage is not None and storage.endswith((".yaml", ".yml")):
        named = load_config(storage).checkpoint_storage.location
        if named is not None:
            return named
        storage = None
    where = storage or os.environ.get("DRAY_STORAGE")
    try:
        return Location.of(where) if where else None
    except ValueError as error:
        raise BadUse(f"--storage: {error}") from None


def _print_check(checked: ClusterCheck) -> None:
    rows = [
        (
            node.name,
            node.python,
            node.ray,
            node.torch,
            f"{len(node.gpus)} {node.gpus[0]}" if node.gpus else "-",
            size(node.disks[0].free) if node.disks else "-",
            "-" if node.clock_s is None else f"{node.clock_s:+.2f} s",
            "-" if node.sends_bytes_s is None else f"{size(round(node.sends_bytes_s))}/s",
        )
        for node in checked.nodes
    ]
    left = ["node", "Python", "Ray", "torch", "GPUs"]
    show.table([*left, "disk free", "clock", "network"], rows, left=left)
    for node in checked.nodes:
        if node.efa_devices or node.nccl_environment:
            plugin = "with" if node.nccl_plugin else "without"
            variables = "".join(f", {name}={value}" for name, value in node.nccl_environment.items())
            typer.echo(f"{node.name}: {counted(node.efa_devices, 'EFA device')}, NCCL {plugin} plugin{variables}")
    if checked.reduces_bytes_s is not None:
        typer.echo(f"NCCL all-reduce: {size(round(checked.reduces_bytes_s))}/s")
    for finding in sorted(checked.findings, key=lambda finding: not finding.is_wrong):
        where = f"{finding.node}: " if finding.node else ""
        typer.echo(f"{'error' if finding.is_wrong else 'note '}  {where}{finding.what}")
    wrong = sum(finding.is_wrong for finding in checked.findings)
    whole = f"Ray at {checked.address}" if checked.address else "RAY_ADDRESS is not set: only this machine"
    errors = counted(wrong, "error") if wrong else "no errors"
    typer.echo(f"{whole}, {counted(len(checked.nodes), 'node')}, storage {checked.storage}: {errors}")


@app.command()
def validate(
    file: Annotated[Path, typer.Argument(help="Cluster config file, as for `ray up`.")], json: Json = False
) -> None:
    """Check a config file for Ray's cluster launcher before it costs money, and report all errors at once.

    Finds what Ray's own check misses: fields to fill in, missing mounts, no token, a dashboard open to all, results on
    a single node's disk. Needs no credentials and starts nothing. Run it where you would run `ray up`.

    \b
    dray cluster validate cluster.yaml
    """
    from dray.config.yaml_file import read_mapping
    from dray.errors import ConfigError

    _check_not_kubernetes(file)
    config = read_mapping(file)
    # Imported after the file's own errors were reported: this is slow.
    from dray.checks.launcher_file import faults, provider

    found = faults(config)
    if json:
        show.as_json([{"path": path, "what": what} for path, what in found])
        raise typer.Exit(BAD_INPUT if found else 0)
    if found:
        raise ConfigError(found, str(file))
    typer.echo(f"{file}: no errors found (provider {provider(config)}); start the cluster with `ray up {file}`")


def _check_not_kubernetes(file: Path) -> None:
    with suppress(OSError, UnicodeDecodeError):  # reported where it is read
        if re.search("^apiVersion:", file.read_text(), re.MULTILINE):
            check = f"kubectl apply --dry-run=server -f {shlex.quote(str(file))}"
            raise BadUse(
                f"{file} is for Kubernetes, not for Ray's cluster launcher; to check it against KubeRay: {check}"
            )
