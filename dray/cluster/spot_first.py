"""Makes Ray's autoscaler prefer spot machines, and start others while no spot machines are available.

Ray's own choice among node types ignores failed launches: it keeps requesting machines that the cloud does not have.
Version 1 of its autoscaler lets one replace that choice, with
``RAY_AUTOSCALER_UTILIZATION_SCORER=dray.cluster.spot_first.score`` in the environment of the head's ``ray start``.
Version 2 (``RAY_enable_autoscaler_v2``) does not.
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
    """How well a machine of a type fits the demand; Ray starts one of the type with the highest score.

    As Ray's own rule, except that types with a failed launch in the last half hour come after all others that fit, and
    that among equals those with ``spot`` in their name come first.

    Args:
        node_resources: what a machine of the type has.
        resources: the demand, a mapping for each slot.
        node_type: its name in the cluster's file.
        node_availability_summary: Ray's summary of launches until now.

    Returns:
        None if it fits nothing of the demand.
    """
    from ray.autoscaler._private.resource_demand_scheduler import _resource_based_utilization_scorer

    fit = _resource_based_utilization_scorer(
        node_resources, resources, node_availability_summary=node_availability_summary
    )
    if fit is None:
        return None
    launched = node_availability_summary.node_availabilities.get(node_type)
    # Ray puts first whether its GPUs would be used, and how many kinds of requested resources it has.
    kind, use = fit[:2], fit[2:]
    return (*kind, launched is None or launched.is_available, *use, "spot" in node_type)
