"""The data of the recorded tasks: scikit-learn's bundled sets, and the source of Python's standard library.

Each function returns a `Split`, the same in every process with the same scikit-learn and the same Python.
"""

from __future__ import annotations

import ast
import io
import itertools
import sysconfig
import tokenize
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from torch.utils.data import TensorDataset

Array = npt.NDArray[np.float32]

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
"""The packages that a snippet of code may be from: the classes of `code_origin`."""
SNIPPET, BUCKETS = 200, 128

CHARACTERS = "\n abcdefghijklmnopqrstuvwxyz0123456789.,:;'\"()[]{}<>=+-*/_#%@\\|!?"
"""The alphabet of text, in lower case; any other character is the last class."""
NUM_CHARACTERS = len(CHARACTERS) + 1
LENGTH = 16
"""Characters of a sequence of text."""
NUM_SEQUENCES, NUM_HELD_OUT = 4096, 96

TAGS = ("blank", "name", "number", "string", "comment", "operator")
LEVELS = 4
"""Levels of grey in `pixels`."""


@dataclass(frozen=True, slots=True)
class Split:
    """Records to train on and to validate with: tensors of inputs and of targets."""

    training: TensorDataset
    validation: TensorDataset


# -------------------------------------------------------------------------------------------------------- scikit-learn
@cache
def digits() -> Split:
    """8x8 images of handwritten digits as 64 numbers from 0 to 1, and the digit."""
    bunch = load_digits()
    return _split(bunch.data.astype(np.float32) / 16, bunch.target.astype(np.int64), 800, 400)


@cache
def diabetes() -> Split:
    """Ten measurements of a patient, and the progression of the disease; all standardised."""
    bunch = load_diabetes()
    target = _standardised(bunch.target.astype(np.float32)[:, None])
    return _split(_standardised(bunch.data.astype(np.float32)), target, 300, 142)


@cache
def cancer() -> Split:
    """Thirty measurements of a tumour, standardised, and whether it is benign."""
    bunch = load_breast_cancer()
    return _split(_standardised(bunch.data.astype(np.float32)), bunch.target.astype(np.int64), 380, 189)


@cache
def pixels() -> Split:
    """The digits' middle six columns in four levels of grey, row by row; the task is to predict the next."""
    levels = np.minimum(load_digits().images[:, :, 1:7].reshape(-1, 48) // 4, LEVELS - 1).astype(np.int64)
    before = np.concatenate([np.full((len(levels), 1), LEVELS), levels[:, :-1]], axis=1)
    return _split(before, levels, 1600, 96)


# ----------------------------------------------------------------------------------------------- the standard library
@cache
def code_origin() -> Split:
    """Snippets of code as hashed counts of their byte pairs, and the package of each."""
    rows, labels = [], []
    rng = np.random.default_rng(0)
    for label, package in enumerate(PACKAGES):
        text = b"\n".join(path.read_bytes() for path in _modules(package))
        for start in rng.integers(0, len(text) - SNIPPET, 150).tolist():
            rows.append(_pairs(text[start : start + SNIPPET]))
            labels.append(label)
    return _split(_standardised(np.stack(rows)), np.array(labels), 800, 400)


@cache
def docs() -> Split:
    """Characters of docstrings; the task is to predict the next."""
    return _next_characters("\n".join(_docstrings()))


@cache
def code() -> Split:
    """Characters of source code; the task is to predict the next."""
    return _next_characters("\n".join(path.read_text("utf-8") for path in _modules()))


@cache
def code_tags() -> Split:
    """Characters of source code, and the kind of token of each."""
    characters, tags = [], []
    for path in _modules()[:60]:
        text = path.read_text("utf-8")
        characters.append(_encoded(text))
        tags.append(_tagged(text))
    return _sequences(np.concatenate(characters), np.concatenate(tags))


def _modules(package: str = "") -> list[Path]:
    """The source files of a package of the standard library; by default its top-level modules."""
    return sorted((Path(sysconfig.get_path("stdlib")) / package).glob("*.py"))


def _docstrings() -> Iterator[str]:
    for path in _modules():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                yield text


def _pairs(snippet: bytes) -> Array:
    counts = np.zeros(BUCKETS, dtype=np.float32)
    for first, second in itertools.pairwise(snippet):
        counts[zlib.crc32(bytes([first, second])) % BUCKETS] += 1
    return np.sqrt(counts)


def _encoded(text: str) -> npt.NDArray[np.int64]:
    numbers = {character: number for number, character in enumerate(CHARACTERS)}
    return np.array([numbers.get(character, len(CHARACTERS)) for character in text.lower()])


def _tagged(text: str) -> npt.NDArray[np.int64]:
    """The number of the tag of each character."""
    starts = np.cumsum([0, *(len(line) for line in text.splitlines(keepends=True))])
    kinds = {tokenize.NAME: 1, tokenize.NUMBER: 2, tokenize.STRING: 3, tokenize.COMMENT: 4, tokenize.OP: 5}
    tags = np.zeros(len(text), dtype=np.int64)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        (first, column), (last, end) = token.start, token.end
        if token.type in kinds:
            tags[starts[first - 1] + column : starts[last - 1] + end] = kinds[token.type]
    return tags


def _next_characters(text: str) -> Split:
    characters = _encoded(text)
    return _sequences(characters[:-1], characters[1:])


def _sequences(inputs: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> Split:
    """Sequences from random places; the held-out ones are from the last tenth of the text."""
    rng = np.random.default_rng(0)
    edge = len(inputs) * 9 // 10
    places = rng.integers(0, edge - LENGTH, NUM_SEQUENCES), rng.integers(edge, len(inputs) - LENGTH, NUM_HELD_OUT)
    parts = [[values[place[:, None] + np.arange(LENGTH)] for values in (inputs, targets)] for place in places]
    return Split(*(TensorDataset(*map(torch.as_tensor, part)) for part in parts))


# ------------------------------------------------------------------------------------------------------------- helpers
def _standardised(values: Array) -> Array:
    scaled: Array = (values - values.mean(axis=0)) / (values.std(axis=0) + 1e-6)
    return scaled


def _split(inputs: npt.NDArray[np.generic], targets: npt.NDArray[np.generic], train: int, held_out: int) -> Split:
    """The first `train` of the shuffled records, and `held_out` others."""
    order = np.random.default_rng(0).permutation(len(inputs))
    parts = order[:train], order[train : train + held_out]
    return Split(*(TensorDataset(*(torch.as_tensor(values[part]) for values in (inputs, targets))) for part in parts))


Load = Callable[[], Split]
