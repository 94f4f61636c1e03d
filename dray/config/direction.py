"""Metrics that a search minimizes by default, although by their names larger values are better."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_LARGER_IS_BETTER = re.compile(
    # A word of the name, as in val_acc, acc@1, BinaryAUROC or f1_macro.
    r"(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))"
    r"(?i:acc|accuracy|auc|auroc|auprc|f1(?:score)?|precision|recall|m?ap|m?iou|dice|bleu|rouge|r2|top[15]|ndcg|mrr|mcc"
    r"|psnr|ssim|reward)(?![a-z])"
)
_SMALLER_IS_BETTER = re.compile(r"loss|err|neg|one_minus|(?<!\w)1-", re.IGNORECASE)


def direction_doubts(searcher: object) -> Iterator[tuple[str, str]]:
    """The path of each such metric in a config's section ``searcher``, and what is doubtful."""
    if not isinstance(searcher, Mapping):
        return
    metrics = searcher.get("metrics")
    several = [each for each in metrics if isinstance(each, Mapping)] if isinstance(metrics, list) else []
    named = [("metric", searcher, searcher.get("metric"))]
    named += [(f"metrics[{place}]", each, each.get("name")) for place, each in enumerate(several)]
    for field, entry, name in named:
        has_direction = any(entry.get(each) is not None for each in ("smaller_is_better", "at_most", "at_least"))
        if not has_direction and isinstance(name, str) and _is_suspect(name):
            yield (
                f"searcher.{field}",
                f"the search minimizes {name!r}, because smaller_is_better is not set, although larger values seem "
                "better: set smaller_is_better: false beside it, or true if it is to be minimized",
            )


def _is_suspect(name: str) -> bool:
    return _LARGER_IS_BETTER.search(name) is not None and _SMALLER_IS_BETTER.search(name) is None
