"""The names and sizes of the dimensions in which a trial's ranks are arranged. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dray.training.units import is_int

#: Each rank along these has its own records.
DATA = ("dp_replicate", "dp", "dp_shard")
#: Ranks along these hold copies of the model or shards of one, and their gradients are averaged. Along `cp` they have
#: the same records, and each trains on a part of every sequence.
AVERAGED = (*DATA, "cp")


@dataclass(frozen=True, slots=True)
class MeshShape:
    """The dimensions of a trial's mesh, outermost first: those in `AVERAGED`, then the others as they were given.

    So ranks with the same records are neighbours, and among them those that differ only along the other dimensions.
    """

    dims: tuple[tuple[str, int], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.dims)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.dims)

    @property
    def replicas(self) -> int:
        """The number of shares of the data."""
        return math.prod(size for name, size in self.dims if name in DATA)

    @property
    def sharing(self) -> int:
        """The number of neighbouring ranks with the same records."""
        return math.prod(self.sizes) // self.replicas

    @property
    def model_parallel(self) -> int:
        """The number of neighbouring ranks along the dimensions that the trial's code handles."""
        return math.prod(size for name, size in self.dims if name not in AVERAGED)

    def replica(self, rank: int) -> int:
        return rank // self.sharing


def mesh_shape(sizes: Mapping[Any, Any] | None, ranks: int) -> MeshShape:
    """The mesh of a number of ranks with these sizes; `dp_replicate`, `dp_shard` and `tp` always exist.

    The default of `dp_shard` is 1 if `dp` is given, and else `ranks` divided by the other sizes.

    Raises:
        ValueError: a name is no identifier, a size no int >= 1, or the sizes don't make up the ranks.

    >>> mesh_shape({"tp": 2, "cp": 2}, 8).dims
    (('dp_replicate', 1), ('dp_shard', 2), ('cp', 2), ('tp', 2))
    """
    sizes = {} if sizes is None else sizes
    for name, size in sizes.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"the name of a mesh dimension must be an identifier, such as tp, got {name!r}")
        if not is_int(size) or size < 1:
            raise ValueError(f"the size of the mesh dimension {name} must be an int >= 1, got {size!r}")
    product = math.prod(sizes.values())
    fills = sizes.keys().isdisjoint(("dp", "dp_shard"))
    if ranks % product if fills else ranks != product:
        given = " * ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"{given} {'does not divide' if fills else 'is not'} the trial's {ranks} slot(s); change the number of "
            "slots, or the mesh"
        )
    every = {"dp_replicate": 1, "dp_shard": ranks // product if fills else 1, "tp": 1, **sizes}
    names = dict.fromkeys([*AVERAGED, *sizes, "tp"])
    return MeshShape(tuple((name, every[name]) for name in names if name in every))
