"""Sixty changes of examples/gpt, as a mechanical researcher would try them: most work, some break, hang or are hungry.

Each is a name, its kind, and texts of a file that it replaces. Which of those that work are good is measured.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

GPT = Path(__file__).resolve().parents[1] / "examples" / "gpt"
KINDS = ("works", "breaks", "hangs", "is hungry")
_ADAM = 'torch.optim.AdamW(groups, lr=hparam("lr"), betas=(0.9, 0.95))'
_STEP = "        self.context.backward(loss)\n"
_LOSS = "        return F.cross_entropy(scores.flatten(0, 1), following.flatten())\n"
_CLIP = "clip_grad_norm_(parameters, 1.0)"
_FACTOR = "return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))"
_BEGIN = "        self.context = context\n"
_PROGRESS = "    progress = min(1.0, (step - warm_up) / max(1, steps - warm_up))\n"

_SCORES = "        scores = self.model(text)\n"
_HALF = """\
        if self.model.training:
            scores, following = scores[:, self.block // 2 :], following[:, self.block // 2 :]
"""
_SMOOTH = "following.flatten(), label_smoothing=0.1 * self.model.training)\n"
_NORM, _SUM = (
    "self.before_attention = nn.LayerNorm(width)",
    "self.character(text) + self.position.weight[: text.shape[1]]",
)
_LOCKED = (
    "        import threading\n\n        lock = threading.Lock()\n        lock.acquire()\n        lock.acquire()\n"
)
_ENDLESS = """\
    def evaluate_batch(self, *_: Any, **__: Any) -> dict[str, torch.Tensor]:
        while True:
            pass

    def evaluate_other("""
_KEPT = "        self.kept = [*getattr(self, 'kept', []), torch.ones(2**20)]\n"
_ASLEEP = "        import time\n\n        time.sleep(3600 * (batch_idx == 3))\n"
_AGAIN = "        for _ in range(19):\n            self.loss(batch)\n"
_MODEL, _GPT = "model_def.py", "gpt.py"
_WORKS = [
    ("betas 0.9, 0.99", _MODEL, "betas=(0.9, 0.95)", "betas=(0.9, 0.99)"),
    ("betas 0.8, 0.95", _MODEL, "betas=(0.9, 0.95)", "betas=(0.8, 0.95)"),
    ("betas 0.95, 0.95", _MODEL, "betas=(0.9, 0.95)", "betas=(0.95, 0.95)"),
    ("no weight decay", _MODEL, '"weight_decay": 0.1}', '"weight_decay": 0.0}'),
    ("weight decay 1", _MODEL, '"weight_decay": 0.1}', '"weight_decay": 1.0}'),
    ("rate x 2", _MODEL, 'lr=hparam("lr")', 'lr=2 * hparam("lr")'),
    ("rate x 4", _MODEL, 'lr=hparam("lr")', 'lr=4 * hparam("lr")'),
    ("rate x 16", _MODEL, 'lr=hparam("lr")', 'lr=16 * hparam("lr")'),
    ("rate / 2", _MODEL, 'lr=hparam("lr")', 'lr=hparam("lr") / 2'),
    ("rate / 10", _MODEL, 'lr=hparam("lr")', 'lr=hparam("lr") / 10'),
    ("rate / 100", _MODEL, 'lr=hparam("lr")', 'lr=hparam("lr") / 100'),
    ("NAdam", _MODEL, _ADAM, 'torch.optim.NAdam(groups, lr=hparam("lr"))'),
    ("RAdam", _MODEL, _ADAM, 'torch.optim.RAdam(groups, lr=hparam("lr"))'),
    ("Adamax", _MODEL, _ADAM, 'torch.optim.Adamax(groups, lr=hparam("lr"))'),
    ("Adagrad", _MODEL, _ADAM, 'torch.optim.Adagrad(groups, lr=hparam("lr"))'),
    ("RMSprop", _MODEL, _ADAM, 'torch.optim.RMSprop(groups, lr=hparam("lr"))'),
    ("plain SGD", _MODEL, _ADAM, 'torch.optim.SGD(groups, lr=hparam("lr"))'),
    ("clip at 0.1", _MODEL, _CLIP, "clip_grad_norm_(parameters, 0.1)"),
    ("clip at 10", _MODEL, _CLIP, "clip_grad_norm_(parameters, 10.0)"),
    ("decay to zero", _MODEL, _FACTOR, "return 0.5 * (1 + math.cos(math.pi * progress))"),
    ("linear decay", _MODEL, _FACTOR, "return 1 - 0.9 * progress"),
    ("constant rate", _MODEL, _FACTOR, "return 1.0"),
    ("late decay", _MODEL, _PROGRESS, f"{_PROGRESS}    progress = max(0.0, 4 * progress - 3)\n"),
    ("label smoothing", _MODEL, "following.flatten())\n", _SMOOTH),
    ("loss of the second half", _MODEL, _SCORES, _SCORES + _HALF),
    ("logits below 30", _MODEL, _SCORES, "        scores = 30 * torch.tanh(self.model(text) / 30)\n"),
    ("no shuffling", _MODEL, "shuffle=True", "shuffle=False"),
    ("ReLU", _GPT, "nn.GELU()", "nn.ReLU()"),
    ("SiLU", _GPT, "nn.GELU()", "nn.SiLU()"),
    ("Tanh", _GPT, "nn.GELU()", "nn.Tanh()"),
    ("no activation", _GPT, "nn.GELU()", "nn.Identity()"),
    ("RMSNorm", _GPT, _NORM, "self.before_attention = nn.RMSNorm(width)"),
    ("no norm before attention", _GPT, _NORM, "self.before_attention = nn.Identity()"),
    ("no last norm", _GPT, "self.last = nn.LayerNorm(width)", "self.last = nn.Identity()"),
    ("wide init", _GPT, "std=0.02", "std=0.2"),
    ("narrow init", _GPT, "std=0.02", "std=0.002"),
    ("init by width", _GPT, "std=0.02", "std=module.weight.shape[-1] ** -0.5"),
    ("untied embeddings", _GPT, "        self.next_character.weight = self.character.weight\n", ""),
    ("no positions", _GPT, _SUM, "self.character(text)"),
    ("no attention", _GPT, "x = x + F.dropout(", "x = x + 0 * F.dropout("),
    ("half residuals", _GPT, "return x + self.maps(x)", "return x + 0.5 * self.maps(x)"),
]  # fmt: skip
_BREAKS = [
    ("no Python", _MODEL, _BEGIN, "        self.context == = context\n"),
    ("an import that is not there", _MODEL, "import torch\n", "import torch\nimport flash_attention_9\n"),
    ("a name that is not there", _GPT, "class Layer(nn.Module)", "class Layer(nn.Modul)"),
    ("another class", _MODEL, "class GPTTrial(", "class GPTrial("),
    ("widths that do not fit", _GPT, "nn.Linear(4 * width, width)", "nn.Linear(3 * width, width)"),
    ("a hyperparameter that is not there", _MODEL, 'hparam("dropout")', 'hparam("drop_out")'),
    ("no gradient", _MODEL, _LOSS, _LOSS.replace("flatten())\n", "flatten()).detach()\n")),
    ("no metric", _MODEL, '"validation_loss": loss', '"validation_los": loss'),
    ("an index error", _MODEL, _STEP, "        batch[2].mean()\n" + _STEP),
    ("an assertion at batch 7", _MODEL, _STEP, "        assert batch_idx < 7, 'not yet'\n" + _STEP),
]  # fmt: skip
_HANGS = [
    ("sleeps in batch 3", _MODEL, _STEP, _ASLEEP + _STEP),
    ("loops in the constructor", _MODEL, _BEGIN, _BEGIN + "        while context:\n            pass\n"),
    ("waits for a lock", _MODEL, _STEP, _LOCKED + _STEP),
    ("loops in the validation", _MODEL, "    def evaluate_batch(", _ENDLESS),
    ("loops at import", _MODEL, "class GPTTrial(", "while torch:\n    pass\n\n\nclass GPTTrial("),
]  # fmt: skip
_HUNGRY = [
    ("a tensor of 100 TB", _MODEL, _STEP, "        torch.ones(25, 10**12)\n" + _STEP),
    ("memory that is not given back", _MODEL, _STEP, _KEPT + _STEP),
    ("a model 256 times as large", _MODEL, 'width=hparam("width")', 'width=16 * hparam("width")'),
    ("everything computed 20 times", _MODEL, _STEP, _AGAIN + _STEP),
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One change."""

    name: str
    kind: str  # one of `KINDS`
    file: str
    old: str
    new: str

    def changed(self) -> str:
        """The file's text with the change."""
        text = (GPT / self.file).read_text()
        assert text.count(self.old) >= 1, (self.name, self.old)
        return text.replace(self.old, self.new, 1)

    def diff(self) -> str:
        """The change as a unified diff."""
        lines = ((GPT / self.file).read_text().splitlines(keepends=True), self.changed().splitlines(keepends=True))
        return "".join(difflib.unified_diff(*lines, f"a/{self.file}", f"b/{self.file}"))


def patches() -> list[Patch]:
    """All of them, in an order that is always the same."""
    found = list(_all())
    Random(7).shuffle(found)
    return found


def _all() -> Iterator[Patch]:
    for kind, given in zip(KINDS, (_WORKS, _BREAKS, _HANGS, _HUNGRY), strict=True):
        for name, file, old, new in given:
            yield Patch(name=name, kind=kind, file=file, old=old, new=new)
