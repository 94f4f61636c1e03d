"""ASHA, the promotion variant: a trial pauses at each rung, and goes on when a free place finds it among the best."""

from __future__ import annotations

from searchers.asha import ASHA


class PromotionASHA(ASHA):
    """Asynchronous successive halving, promoting."""

    _name = "promotion_asha"
