"""A cloud that has no machines, as Ray's autoscaler sees it."""

from __future__ import annotations

from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider
from ray.autoscaler.node_launch_exception import NodeLaunchException

CATEGORY, WHY = "InsufficientInstanceCapacity", "there are none in this zone now"


class NoCapacity(FakeMultiNodeProvider):  # type: ignore[misc]  # Ray's classes are untyped here
    """Has no machine to give."""

    def create_node_with_resources_and_labels(self, *_: Any, **__: Any) -> None:
        raise NodeLaunchException(CATEGORY, WHY, None)
