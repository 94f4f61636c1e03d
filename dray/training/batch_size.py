"""The search for the batch size that fits and trains fastest, given a function that measures a size.

The per-slot batch size doubles from the config's until memory runs out or a batch is a whole epoch, or halves until one
fits; bisection then finds the largest that fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """A measured batch size.

    Args:
        per_slot: records per batch on each slot; with tensor parallelism, of each group of slots that share a batch.
        global_batch_size: records per batch over all slots.
        aggregation_frequency: batches per optimizer step, as many as have at most the config's records per step.
        records_per_second: over all slots, including the wait for data; None if memory ran out.
        has_all_data: whether a batch has all records of an epoch, so that larger batches would be the same.
    """

    per_slot: int
    global_batch_size: int
    aggregation_frequency: int
    records_per_second: float | None
    has_all_data: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """The result of `dray.probe()`.

    Args:
        sizes: the measured sizes, ascending.
        largest: the largest size that fits, to within an eighth.
        suggestion: the fastest size that keeps the number of records per optimizer step exactly.
    """

    sizes: tuple[BatchSize, ...]
    largest: BatchSize
    suggestion: BatchSize


def search_batch_size(first: int, step: int, measure: Callable[[int], BatchSize]) -> BatchSizes:
    """Measure batch sizes, and suggest one.

    Args:
        first: the config's per-slot batch size.
        step: the config's records per optimizer step and slot, a multiple of `first`.
        measure: measures a per-slot batch size; it must raise an exception if not even 1 fits.

    >>> def measure(size: int) -> BatchSize:  # memory for 100 records per slot, and one second per batch
    ...     rate = float(size) if size <= 100 else None
    ...     return BatchSize(
    ...         per_slot=size, global_batch_size=size, aggregation_frequency=256 // size, records_per_second=rate
    ...     )
    >>> found = search_batch_size(32, 256, measure)
    >>> [each.per_slot for each in found.sizes], found.largest.per_slot, found.suggestion.per_slot
    ([32, 64, 96, 104, 112, 128], 96, 64)
    """
    measured: dict[int, BatchSize] = {}

    def fits(size: int) -> bool:
        measured[size] = measure(size)
        return measured[size].records_per_second is not None

    low, high = 0, 0  # the largest size that fits, and the smallest that does not; 0: none yet
    size = first
    while not (low and high):
        if fits(size):
            low, size = size, 2 * size
            if measured[low].has_all_data:
                break
        else:
            high, size = size, size // 2
    # Multiples of a power of two suit the hardware. In steps of about a tenth, three or four more sizes are enough.
    unit = 1 << max(0, low.bit_length() - 4)
    while low // unit < (last := (high - 1) // unit):
        size = (low // unit + last + 1) // 2 * unit
        if fits(size):
            low = size
        else:
            high = size
    divisors = [size for size in range(1, min(low, step) + 1) if step % size == 0]
    if divisors[-1] not in measured:
        fits(divisors[-1])
    rates = {size: each.records_per_second or 0.0 for size, each in measured.items() if size in divisors}
    return BatchSizes(
        sizes=tuple(measured[size] for size in sorted(measured)),
        largest=measured[low],
        suggestion=measured[max(rates, key=lambda size: rates[size])],
    )
