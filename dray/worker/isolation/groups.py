"""Process groups that a trial makes, by ``new_group`` or ``init_device_mesh``: each has threads and connections, and a
communicator in the GPU's memory."""

from __future__ import annotations

import weakref
from collections.abc import Set
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from dray.memory import gpu_in_use
from dray.text import counted
from dray.training.parallel import ddp


def group_names() -> set[str]:
    """The names of all process groups of this process."""
    return {group.group_name for group in c10d._world.pg_map}


def groups_of_trial(before: Set[str]) -> list[Any]:
    """The process groups that a trial has made and not destroyed, in the order in which all ranks made them.

    Args:
        before: `group_names` when it began.
    """
    return [group for group in c10d._world.pg_map if group.group_name not in before and not ddp.is_kept(group)]


def end_groups(groups: list[Any]) -> list[str]:
    """End process groups, on all ranks together, and empty the list.

    Returns:
        The reasons to run no other trial in this process: something still holds such a group (a global variable, a
        library's cache, compiled code), which the next trial might use.
    """
    device = torch.device("cuda" if gpu_in_use() else "cpu")
    if gpu_in_use():
        torch.cuda.synchronize()  # another rank may still need this one's queued collectives, which ending would abort
    made = [weakref.ref(group) for group in groups]
    while groups:  # none may stay in a variable: its threads end with the last reference
        ddp.end_group(device, groups.pop())
    held = sum(group() is not None for group in made)
    return [f"{counted(held, 'process group')} that its trial made can't be freed"] if held else []
