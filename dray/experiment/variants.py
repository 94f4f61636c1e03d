"""Variants of an experiment's code: the code with a patch applied, or another directory, for one of its trials.

A variant is checked and stored before anything refers to it, at the address of its content: equal code has one
directory, which never changes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from dray.code import patch as patches
from dray.code.archive import MAX_FILES
from dray.code.difference import differences
from dray.code.ignore import MAX_CODE_BYTES, Code, code_of, copied
from dray.code.load import check_entrypoint_file
from dray.code.startup_hook import HOOK
from dray.code.trial_import import Importer, import_in_new_process
from dray.config.entrypoint import ClassName
from dray.errors import ConfigError, Invalid
from dray.experiment.isolation_check import import_in_sandbox
from dray.records.directory import CODE_ID_LENGTH, DIFF, ExperimentDirectory
from dray.records.secrets import hide_in, with_secrets
from dray.storage.disk import force_to_disk
from dray.text import one_line

if TYPE_CHECKING:
    from dray.config.schema import ExperimentConfig

_IMPOSSIBLE = (errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.EINVAL, errno.EILSEQ)
"""Errors of a file whose name is too long, or that is a directory too."""


def from_patch(directory: ExperimentDirectory, patch: str, importer: Importer = import_in_new_process) -> str:
    """Store the experiment's code with a patch applied.

    Args:
        patch: a unified diff, as of ``git diff`` or ``diff -u``.

    Returns:
        The variant's name, for `Requested.code`.

    Raises:
        Invalid: the patch does not apply, leaves the directory, is too large, or its code can't be used.
    """
    _check_can_change(directory)
    base = _own(directory.code)
    files, links = frozenset(base.files), frozenset(base.links)

    def read(name: str) -> bytes | None:
        above = [str(parent) for parent in PurePosixPath(name).parents][:-1]
        if link := next((each for each in (name, *above) if each in links), None):
            raise patches.BadPatch(f"the patch is about {name}, but {link} is a link in the code")
        if name in base.folders:
            raise patches.BadPatch(f"the patch is about {name}, which is a directory of the code")
        if file := next((each for each in above if each in files), None):
            raise patches.BadPatch(f"the patch is about {name}, but {file} is a file of the code")
        return (directory.code / name).read_bytes() if name in files else None

    try:
        changed = patches.apply(patch, read)
    except patches.BadPatch as error:
        raise Invalid(str(error)) from None
    with _new(directory) as tree:
        base.copy(tree)
        for name, content in changed.items():
            try:
                _write(tree / name, content)
            except OSError as error:
                if error.errno not in _IMPOSSIBLE:
                    raise
                what = f"the patch is about {name!r:.100}, which can't be a file: {error.strerror}"
                raise Invalid(what) from None
        return _stored(directory, tree, importer)


def _write(place: Path, content: bytes | None) -> None:
    """Write a file, whose mode stays, or delete it (None)."""
    if content is None:
        place.unlink()
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    mode = place.stat().st_mode if place.exists() else 0o644
    place.unlink(missing_ok=True)
    place.write_bytes(content)
    place.chmod(mode)


def from_directory(directory: ExperimentDirectory, code: Path, importer: Importer = import_in_new_process) -> str:
    """Store another directory of code, as `from_patch`."""
    _check_can_change(directory)
    if not code.is_dir():
        raise Invalid(f"no such directory: {code}; give the directory with the variant's code")
    try:
        found = code_of(code, leave_out=directory.path, field="code")
    except ConfigError as error:
        raise Invalid("; ".join(what for _, what in error.faults)) from None
    with _new(directory) as tree:
        found.copy(tree)
        return _stored(directory, tree, importer)


def _check_can_change(directory: ExperimentDirectory) -> None:
    if directory.config().entrypoint is None or not directory.has_code:
        what = "its class is from a script or a notebook; create it with an entrypoint and model_dir"
        raise Invalid(f"{directory.path.name} has no code that a trial can change: {what}")


def _own(code: Path) -> Code:
    """A copy of code, without the bytecode that Python has left in it."""
    found = copied(code)
    keep = [[name for name in names if "__pycache__" not in name.split("/")] for names in (found.folders, found.files)]
    return replace(found, folders=tuple(keep[0]), files=tuple(keep[1]))


@contextlib.contextmanager
def _new(directory: ExperimentDirectory) -> Iterator[Path]:
    """A directory to fill with code, which is removed after the block with all that was not renamed."""
    directory.variants.mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=directory.variants, prefix="."))
    try:
        yield scratch / "code"
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _stored(directory: ExperimentDirectory, tree: Path, importer: Importer) -> str:
    """Check the code in a new directory, and give it its place."""
    config = with_secrets(directory.config(), directory.secrets_file)
    hide_in(tree, config.secrets)
    base, found = _own(directory.code), _own(tree)
    if found.size > MAX_CODE_BYTES or len(found.folders) + len(found.files) + len(found.links) >= MAX_FILES:
        raise Invalid(f"the variant has more than {MAX_CODE_BYTES >> 20} MiB or {MAX_FILES:,} files of code")
    before, after = _contents(base), _contents(found)
    if before == after:
        raise Invalid("the variant's code is the experiment's own; add the trial without it")
    if before.get(HOOK) != after.get(HOOK):
        raise Invalid(f"a variant can't change {HOOK}, which prepares the machines for all trials")
    name = hashlib.sha256(repr(sorted(after.items())).encode()).hexdigest()[:CODE_ID_LENGTH]
    place = directory.variant(name)
    if place.is_dir():
        return name
    _check(config, tree, [each for each in found.files if before.get(each) != after[each]], importer)
    with (tree.parent / DIFF).open("w", errors="surrogateescape") as file:
        file.writelines(differences(directory.code, tree))
    force_to_disk(tree.parent)
    try:
        tree.parent.rename(place)
    except OSError:  # another process has made it meanwhile
        if not place.is_dir():
            raise
    force_to_disk(place)
    return name


def _contents(code: Code) -> dict[str, str]:
    """A digest of each file, and the target of each link, by name."""
    digests = {name: hashlib.sha256((code.root / name).read_bytes()).hexdigest() for name in code.files}
    return digests | {name: f"-> {target}" for name, target in code.targets()}


def _check(config: ExperimentConfig, tree: Path, changed: Iterable[str], importer: Importer) -> None:
    """Check that the changed files can be parsed, and that the entrypoint can be imported."""
    for name in changed:
        if name.endswith(".py"):
            try:
                compile((tree / name).read_bytes(), name, "exec", dont_inherit=True)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                raise Invalid(
                    f"the variant's {name} can't be parsed: {one_line(error) or 'it is nested too deeply'}"
                ) from None
    try:
        check_entrypoint_file(config.entrypoint, tree)
        fault = ""
        # Programs train when they are run, and with a startup hook only the workers can import the model.
        if isinstance(config.entrypoint, ClassName) and not (tree / HOOK).is_file():
            imports = import_in_sandbox if config.isolation.is_sandbox else importer
            fault = imports(config.entrypoint, tree.resolve())
    except ConfigError as error:
        fault = "; ".join(what for _, what in error.faults)
    if fault:
        for path in (tree.resolve(), tree):
            fault = fault.replace(f"{path}/", "").replace(str(path), "the variant's code")
        raise Invalid(f"the variant's code can't be used: {fault}")
