"""A cloud that is out of some types of machines, as Ray's autoscaler sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider
from ray.autoscaler.node_launch_exception import NodeLaunchException
from ray.autoscaler.tags import TAG_RAY_USER_NODE_TYPE

CATEGORY, WHY = "InsufficientInstanceCapacity", "there are none in this zone now"


class NoCapacity(FakeMultiNodeProvider):  # type: ignore[misc]  # Ray's classes are untyped here
    """Has no machine of the types whose names are in the file `out_of` of its config; silently, if that says so."""

    def create_node_with_resources_and_labels(self, config: Any, tags: dict[str, str], *more: Any) -> None:
        out_of = Path(self.provider_config["out_of"]).read_text().split()
        if tags[TAG_RAY_USER_NODE_TYPE] in out_of:
            if "silently" in out_of:
                return
            raise NodeLaunchException(CATEGORY, WHY, None)
        super().create_node_with_resources_and_labels(config, tags, *more)
