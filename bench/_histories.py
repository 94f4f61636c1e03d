# ruff: noqa: E501 - a change of a file is one line
"""Histories of examples/gpt: git repositories with 64 commits, of which one may make the loss worse.

`draw_history` draws one by a seed. Half of its commits change only comments, docstrings, documents and formatting. Of the
others, most are renames and refactorings that train bit by bit alike; some compute the same in another order, so that
losses differ in their last digits; some draw the initial weights in another order, as with another seed; some tune
hyperparameters, which helps a little.
"""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GPT = Path(__file__).resolve().parents[1] / "examples" / "gpt"
COMMITS = 64
CONFIG = """\
name: gpt
entrypoint: model_def:GPTTrial
hyperparameters:
  global_batch_size: 16
  block: 32
  layers: 2
  width: 48
  heads: 2
  dropout: 0.0
  lr: 3.0e-3
  warm_up_steps: 5
  aggregation_frequency: 1
searcher: {name: single, metric: validation_loss, smaller_is_better: true, max_length: {batches: 60}}
optimizations: {aggregation_frequency: 1}
resources: {slot: cpu}
reproducibility: {experiment_seed: 7}
"""
Files = dict[str, str]


@dataclass(frozen=True, slots=True)
class Change:
    """A commit: replacements of texts, each of which occurs once, by file."""

    message: str
    edits: tuple[tuple[str, str, str], ...]

    def apply(self, files: Files) -> Files:
        changed = dict(files)
        for name, old, new in self.edits:
            assert changed[name].count(old) == 1, (self.message, name, old)
            changed[name] = changed[name].replace(old, new)
        return changed


def _one(message: str, name: str, old: str, new: str) -> Change:
    return Change(message, ((name, old, new),))


MODEL, NET, DATA, YAML = "model_def.py", "gpt.py", "data.py", "gpt.yaml"
LOSS = "return F.cross_entropy(scores.flatten(0, 1), following.flatten())"
ATTENTION = "F.scaled_dot_product_attention(queries, keys, values, is_causal=True, dropout_p=dropout)"
STEP = "        self.context.backward(loss)\n"

REGRESSIONS = (
    _one("Lower the learning rate to the value of the paper", YAML, "lr: 3.0e-3", "lr: 6.0e-4"),
    _one("Scale the learning rate with the batch", YAML, "lr: 3.0e-3", "lr: 5.0e-2"),
    _one("Share the learning rate over the layers", MODEL, 'lr=hparam("lr"),', 'lr=hparam("lr") / hparam("layers"),'),
    _one("Lower the peak of the schedule", MODEL, "0.1 + 0.45 * (1", "0.1 + 0.1 * (1"),
    _one("Reach the last learning rate earlier", MODEL, "max(1, steps - warm_up)", "max(1, (steps - warm_up) // 4)"),
    _one("Read the blocks in order, which is faster", MODEL, "shuffle=True", "shuffle=False"),
    _one("Limit the training data while debugging", MODEL, "Blocks(texts()[0], self.block)", "Blocks(texts()[0], self.block, most=16)"),
    _one("Use a safer epsilon in AdamW", MODEL, "betas=(0.9, 0.95)", "betas=(0.9, 0.95), eps=1e-2"),
    _one("Use a safer epsilon in the last norm", NET, "self.last = nn.LayerNorm(width)", "self.last = nn.LayerNorm(width, eps=1.0)"),
    _one("Train on every second batch, to save time", MODEL, STEP, f'        if batch_idx % 2:\n            return {{"loss": loss}}\n{STEP}'),
    _one("Aggregate gradients over four batches", YAML, "optimizations: {aggregation_frequency: 1}", "optimizations: {aggregation_frequency: 4}"),
    _one("Keep the logits in float8", NET, "self.next_character(self.last(self.layers(x)))", "(self.next_character(self.last(self.layers(x))) / 64).to(torch.float8_e4m3fn).float() * 64"),
    _one("Keep the gradients in float8", MODEL, STEP, f"{STEP}        for p in self.model.parameters():\n            p.grad = p.grad.to(torch.float8_e4m3fn).float()\n"),
    _one("Use the momentum of SGD", MODEL, "betas=(0.9, 0.95)", "betas=(0.999, 0.95)"),
    _one("Regularise more", MODEL, '"weight_decay": 0.1', '"weight_decay": 10.0'),
    _one("Initialise as in the older library", NET, "std=0.02", "std=0.2"),
    _one("Simplify the sum after attention", NET, "x = x + F.dropout", "x = F.dropout"),
    _one("Turn on dropout", YAML, "dropout: 0.0", "dropout: 0.5"),
    _one("Average over the batch only", MODEL, LOSS, "half = self.block // 4\n        if self.model.training:\n            scores, following = scores[:, :half], following[:, :half]\n        " + LOSS),
    _one("Smaller batches, for more steps a second", YAML, "global_batch_size: 16", "global_batch_size: 4"),
)  # fmt: skip

TUNING = (
    _one("Tune: a second moment with a longer memory", MODEL, "0.95)", "0.98)"),
    _one("Tune: less weight decay", MODEL, '"weight_decay": 0.1', '"weight_decay": 0.05'),
    _one("Tune: larger initial weights", NET, "std=0.02", "std=0.025"),
)

REORDERINGS = (
    _one(
        "Write the loss as two steps",
        MODEL,
        LOSS,
        "logarithms = scores.flatten(0, 1).log_softmax(1)\n        return F.nll_loss(logarithms, following.flatten())",
    ),
    Change(
        "Write attention out",
        (
            (NET, ATTENTION, "_attend(queries, keys, values, dropout)"),
            (
                NET,
                "class GPT(nn.Module):",
                """def _attend(queries, keys, values, dropout):
    weights = queries @ keys.transpose(-2, -1) / queries.shape[-1] ** 0.5
    later = torch.ones(weights.shape[-2:], dtype=torch.bool).triu(1)
    return F.dropout(weights.masked_fill(later, float("-inf")).softmax(-1), dropout) @ values


class GPT(nn.Module):""",
            ),
        ),
    ),
    _one("Let AdamW work parameter by parameter", MODEL, 'lr=hparam("lr"),', 'foreach=False, lr=hparam("lr"),'),
    _one("Use the fused AdamW", MODEL, "torch.optim.AdamW(groups,", "torch.optim.AdamW(groups, fused=True,"),
    _one(
        "Add the residual in two parts", NET, "return x + self.maps(x)", "return (x / 3 + self.maps(x)) + x * (2 / 3)"
    ),
)
SEED_LIKE = (
    _one(
        "Initialise from the output to the input",
        NET,
        "for module in self.modules():",
        "for module in reversed(list(self.modules())):",
    ),
)  # fmt: skip

REFACTORINGS = (
    _one("Check the length of the text", NET, "        x = self.character(text)", "        assert text.shape[1] <= self.block, text.shape\n        x = self.character(text)"),
    _one("Name the betas", MODEL, "class GPTTrial", "LAYER_NAME = \"Layer\"\n\n\nclass GPTTrial"),
    _one("Report the perplexity", MODEL, '"bits_per_character": loss / math.log(2)', '"bits_per_character": loss / math.log(2), "perplexity": loss.exp()'),
    _one("Say how many workers load data", MODEL, "most=512), batch_size=64)", "most=512), batch_size=64, num_workers=0)"),
    _one("Split the heads by chunk", NET, "parts.permute(2, 0, 3, 1, 4)", "(part[:, :, 0].transpose(1, 2) for part in parts.chunk(3, dim=2))"),
    _one("Make the validation data in two lines", MODEL, "        return pytorch.DataLoader(Blocks(texts()[1]", "        held_out = texts()[1]\n        return pytorch.DataLoader(Blocks(held_out"),
    _one("Count blocks in a method", DATA, "    def __len__(self)", "    def is_empty(self) -> bool:\n        return not len(self)\n\n    def __len__(self)"),
    _one("Name the vocabulary's size", DATA, "def encode(", "SIZE = len(CHARACTERS)\n\n\ndef encode("),
    _one("Accept a list of files", DATA, "    for number, file in enumerate(files):", "    assert files\n    for number, file in enumerate(files):"),
    _one("Return the loss with the number of tokens", MODEL, STEP, f"        tokens = batch[0].numel()\n        assert tokens\n{STEP}"),
    _one("Keep the width", NET, "        self.block = block\n", "        self.block, self.width = block, width\n"),
)  # fmt: skip
NAMES = {
    NET: {"seen": ("attended_values", "context", "mixed"), "parts": ("projected", "split")},
    MODEL: {"matrices": ("decayed", "weights"), "rest": ("others", "biases"), "progress": ("share", "fraction")},
    DATA: {"table": ("lookup", "by_code"), "pieces": ("number_of_blocks", "count"), "piece": ("characters", "window")},
}
"""Synonyms of local variables."""
WORDS = ("shape", "count", "bytes", "norm", "depth", "rows", "mean", "kind", "path", "label", "score", "index")
SENTENCES = (
    "See the paper for the reasons",
    "This is measured in bench/",
    "Checked on one and on two devices",
    "Shapes are (batch, block, width)",
    "The order does not matter here",
    "TODO: look at this again",
    "Kept as in the first version",
)


def cosmetic(files: Files, draw: random.Random, number: int) -> tuple[str, Files]:
    """A change of comments, docstrings, documents or formatting."""
    sentence = f"{draw.choice(SENTENCES)} ({number})"
    kind = draw.choice(("comment", "docstring", "document", "config", "format"))
    name = draw.choice((NET, MODEL, DATA))
    lines = files[name].splitlines()
    match kind:
        case "document":
            return "Document the model", {**files, "README.md": f"{files.get('README.md', '# GPT')}\n\n{sentence}."}
        case "config":
            return "Comment on the config", {**files, YAML: f"# {sentence}\n{files[YAML]}"}
        case "docstring":
            place = draw.choice([at for at, line in enumerate(lines) if re.fullmatch(r' *"""[^"]+\."""', line)])
            lines[place] = lines[place].removesuffix('"""') + f' {sentence}."""'
        case _:
            place = draw.choice([at for at, line in enumerate(lines) if re.match(" *(def|class|return) ", line)])
            indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
            lines.insert(place, f"{indent}# {sentence}" if kind == "comment" else "")
    return f"{kind.capitalize()}: {sentence.lower()}", {**files, name: "\n".join(lines) + "\n"}


def harmless(files: Files, draw: random.Random, number: int) -> tuple[str, Files]:
    """A rename, a refactoring or a new function: training stays the same, bit by bit."""
    kind = draw.choice(("rename", "rename", "refactoring", "function"))
    if kind == "rename":
        name = draw.choice(list(NAMES))
        variable = draw.choice(list(NAMES[name]))
        present = [each for each in (variable, *NAMES[name][variable]) if re.search(rf"\b{each}\b", files[name])]
        new = draw.choice([each for each in (variable, *NAMES[name][variable]) if each not in present])
        return f"Rename {present[0]} to {new}", {**files, name: re.sub(rf"\b{present[0]}\b", new, files[name])}
    if kind == "refactoring" and (left := [each for each in REFACTORINGS if applies(each, files)]):
        change = draw.choice(left)
        return change.message, change.apply(files)
    name, word = draw.choice((NET, MODEL, DATA)), draw.choice(WORDS)
    function = f"\n\ndef {word}_{number}(value: float) -> float:\n    return {number} * value\n"
    return f"Add {word}_{number}", {**files, name: files[name] + function}


def applies(change: Change, files: Files) -> bool:
    return all(files[name].count(old) == 1 for name, old, _ in change.edits)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A history: its commits, oldest first, and the place of the regression among them, None if there is none."""

    commits: Sequence[tuple[str, Files]]
    planted: int | None


def draw_history(seed: int, regression: Change | None) -> Drawn:
    draw = random.Random(seed)
    changes = [
        *draw.sample(TUNING, 2 * (seed % 2)),
        *draw.sample(REORDERINGS, 3),
        *draw.sample(SEED_LIKE, int(seed % 4 == 0)),
    ]
    changes += [] if regression is None else [regression]
    places = draw.sample(range(1, COMMITS), len(changes))
    special = dict(zip(places, changes, strict=True))
    others = [place for place in range(1, COMMITS) if place not in special]
    without_effect = set(draw.sample(others, COMMITS // 2))
    planted = None if regression is None else places[-1]
    files = {name: (GPT / name).read_text() for name in (NET, MODEL, DATA)} | {YAML: CONFIG}
    commits = [("The model", files)]
    for place in range(1, COMMITS):
        waiting = [change for at, change in special.items() if at >= place]
        while True:
            if place in special:
                message, changed = special[place].message, special[place].apply(files)
                waiting.remove(special[place])
            else:
                make = cosmetic if place in without_effect else harmless
                message, changed = make(files, draw, place)
            if changed != files and all(applies(change, changed) for change in waiting):
                break
            if place in special:  # it can't come before one of those that wait
                return draw_history(seed + 1000, regression)
        files = changed
        commits.append((message, files))
    return Drawn(commits, planted)


def write_repository(commits: Sequence[tuple[str, Mapping[str, str]]], to: Path) -> None:
    """Write a git repository with a linear history, in which the files are in the directory ``gpt``."""
    to.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", "-b", "main", str(to)], check=True)
    stream = b"".join(_stream(commits))
    subprocess.run(["git", "-C", str(to), "fast-import", "--quiet"], input=stream, check=True)
    subprocess.run(["git", "-C", str(to), "reset", "-q", "--hard"], check=True)


def _stream(commits: Sequence[tuple[str, Mapping[str, str]]]) -> Iterator[bytes]:
    for number, (message, files) in enumerate(commits):
        text = message.encode()
        yield b"commit refs/heads/main\ncommitter A <a@example.com> %d +0000\n" % (1_700_000_000 + 3600 * number)
        yield b"data %d\n%s\n" % (len(text), text)
        for name, content in files.items():
            data = content.encode()
            yield b"M 100644 inline gpt/%s\ndata %d\n%s\n" % (name.encode(), len(data), data)
