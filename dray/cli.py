"""The command line: ``dray experiment create asha.yaml .``, ``... resume PATH``, ``... extend PATH``, ``dray preview``.

Exit codes: 0 done, 1 the search failed, 2 bad input, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

import dray
from dray.cluster.startup_hook import HOOK, StartupHookFailed
from dray.experiment.errors import ConfigError, ExperimentError
from dray.script import ScriptFailed
from searchers.errors import JournalError

# Imports of torch and Ray stay inside the commands: `dray --help` answers at once.

_FAILED, _BAD_INPUT, _INTERRUPTED = 1, 2, 130

app = typer.Typer(
    help="Train PyTorch models and search their hyperparameters on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
experiment = typer.Typer(help="Create an experiment, or go on with one.", no_args_is_help=True)
app.add_typer(experiment, name="experiment")
app.add_typer(experiment, name="e", hidden=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dray {dray.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    logging.basicConfig(level=logging.INFO, format=dray.LOG_FORMAT)


@experiment.command()
def create(
    config: Annotated[Path, typer.Argument(help="The experiment's YAML file.")],
    model_dir: Annotated[
        Path | None, typer.Argument(help="The directory of the model's code; that of CONFIG by default.")
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Run one trial in this process, without Ray: for debugging.")
    ] = False,
    path: Annotated[
        Path | None, typer.Option("--path", "--storage", help="Keep the experiment in this directory.")
    ] = None,
    storage_path: Annotated[
        str | None, typer.Option(help="Keep checkpoints below this directory, or in s3://BUCKET/PREFIX.")
    ] = None,
) -> None:
    """Run the experiment of a config file to its end."""
    with _told():
        from dray.experiment.config import load_config

        checked = load_config(config)
        code = model_dir if model_dir is not None else config.parent
        if local and storage_path is not None:
            told = "has no use with --local, whose checkpoints lie beside its metrics; give --path"
            raise ConfigError([("--storage-path", told)], "The command")
        if local:
            from dray.experiment.local import run_local

            typer.echo(f"results: {run_local(checked, code, path=path)}")
        else:
            dray.Experiment(checked, model_dir=code, path=path, storage_path=storage_path).run()


@experiment.command()
def resume(path: Annotated[str, typer.Argument(help="The experiment's directory, or s3://BUCKET/...")]) -> None:
    """Go on with an experiment that was stopped, or whose driver died."""
    with _told():
        dray.Experiment.resume(path).run()


@experiment.command()
def extend(
    path: Annotated[str, typer.Argument(help="The experiment's directory, or s3://BUCKET/...")],
    max_trials: Annotated[int | None, typer.Option(help="Trials in all, instead of those until now.", min=1)] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Length of a trial, instead of that until now, in the same unit.", min=1)
    ] = None,
) -> None:
    """Go on with an experiment, also a finished one, with more trials or longer ones."""
    with _told():
        if max_trials is None and max_length is None:
            raise ConfigError([("extend", "give --max-trials N or --max-length N, or both")], "The command")
        dray.Experiment.resume(path, max_trials=max_trials, max_length=max_length).run()


@app.command()
def preview(
    config: Annotated[Path, typer.Argument(help="The experiment's YAML file.")],
    model_dir: Annotated[
        Path | None,
        typer.Argument(help="The directory of a search method of your own; that of CONFIG by default."),
    ] = None,
    trials_per_hour: Annotated[
        float | None, typer.Option(help="Trials of full length that the cluster trains in an hour: tells the time.")
    ] = None,
) -> None:
    """Show what a search will do before it runs: brackets, rungs, trials at each, and the total."""
    with _told():
        from rich.console import Console

        from dray.experiment.config import load_config
        from dray.experiment.preview import show_preview

        if trials_per_hour is not None and not 0 < trials_per_hour < math.inf:
            what = f"must be a number > 0, got {trials_per_hour:g}"
            raise ConfigError([("--trials-per-hour", what)], "The command")
        code = model_dir if model_dir is not None else config.parent
        show_preview(load_config(config), model_dir=code, trials_per_hour=trials_per_hour, console=Console())


@contextmanager
def _told() -> Iterator[None]:
    """Tell what is the user's to mend in one message; let what is ours end in a traceback."""
    try:
        yield
    except ConfigError as error:
        raise _exit(str(error), _BAD_INPUT) from None
    except ExperimentError as error:
        raise _exit(str(error), _FAILED) from None
    except StartupHookFailed as error:
        raise _exit(f"{HOOK} {error}", _BAD_INPUT) from None
    except ScriptFailed as error:
        raise _exit(str(error), _FAILED) from None
    except JournalError as error:  # damaged, or another driver is writing it
        raise _exit(str(error), _BAD_INPUT) from None
    except KeyboardInterrupt:
        raise _exit("stopped by Ctrl-C", _INTERRUPTED) from None


def _exit(message: str, code: int) -> typer.Exit:
    typer.echo(f"dray: {message}", err=True)
    return typer.Exit(code)


def main() -> None:
    """The console script."""
    app(prog_name="dray")


if __name__ == "__main__":
    main()
