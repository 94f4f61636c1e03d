"""Which machines Ray's autoscaler starts: spot ones, and others for as long as there are no spot ones.

Ray's own way to choose among node types hears of launches that failed and takes no account of it: it asks again and
again for machines that its cloud has none of. Its first autoscaler lets one choose otherwise: with
``RAY_AUTOSCALER_UTILIZATION_SCORER=dray.cluster.spot_first.score`` in the environment of the head's ``ray start``. The
second one (``RAY_enable_autoscaler_v2``) does not, and behaves as said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def score(
    node_resources: Mapping[str, float],
    resources: Sequence[Mapping[str, float]],
    node_type: str,
    *,
    node_availability_summary: Any,
) -> tuple[float, ...] | None:
    """How good a machine of a type is for what is asked; of those with the highest score Ray starts one.

    As by Ray's own rule, but that types of which a launch has failed in the last half hour come after all others that
    fit, and that among equals those with ``spot`` in their name come first.

    Args:
        node_resources: what a machine of the type has.
        resources: what is asked for, a mapping for each slot.
        node_type: its name in the cluster's file.
        node_availability_summary: Ray's, of launches until now.

    Returns:
        None if it is good for nothing of it.
    """
    from ray.autoscaler._private.resource_demand_scheduler import _resource_based_utilization_scorer

    fit = _resource_based_utilization_scorer(
        node_resources, resources, node_availability_summary=node_availability_summary
    )
    if fit is None:
        return None
    launched = node_availability_summary.node_availabilities.get(node_type)
    # Whether it has GPUs for nothing, and all kinds of resources that are asked for, comes first with Ray.
    kind, use = fit[:2], fit[2:]
    return (*kind, launched is None or launched.is_available, *use, "spot" in node_type)
