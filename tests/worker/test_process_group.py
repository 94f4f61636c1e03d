"""Programs that initialise and destroy the process group that a worker has already."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from dray.worker.process_group import outliving_programs


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.api("3.5")
def test_the_group_outlives_a_program_that_initialises_and_destroys_it(group: None) -> None:
    before = dist.group.WORLD
    with outliving_programs():
        for _ in range(2):
            dist.init_process_group(backend="nccl")
            dist.destroy_process_group()
        dist.destroy_process_group(dist.group.WORLD)
    assert dist.group.WORLD is before


def test_a_program_can_destroy_groups_that_it_made(group: None) -> None:
    with outliving_programs():
        mine = dist.new_group([0])
        dist.destroy_process_group(mine)
        with pytest.raises(ValueError):
            dist.get_rank(mine)


def test_both_functions_are_restored_afterwards(group: None) -> None:
    before = dist.init_process_group, dist.destroy_process_group
    with outliving_programs():
        assert before[0] is not dist.init_process_group
        assert dist.destroy_process_group.__name__ == "destroy_process_group"
    assert before == (dist.init_process_group, dist.destroy_process_group)
