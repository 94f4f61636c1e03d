"""NCCL alone: process groups as dray makes them, their end, their memory, and NCCL's error messages.

One GPU makes a group of one rank only: NCCL refuses a second one. On a CPU, gloo stands for it.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from _measure import stamp
from part import DEVICE, ON_GPU, Child, attempt, check, classified, clock, figure, mib, note, raised, stamps, used, well

from dray.training.parallel import ddp
from dray.training.parallel.mesh import device_mesh
from dray.training.parallel.mesh_shape import mesh_shape

BACKEND = "cpu:gloo,cuda:nccl" if ON_GPU else "gloo"
LIMIT = timedelta(seconds=8)
GROUPS = 4
GOES_ON_S = 4.0
"""A process whose device has failed is watched for this long."""
LEFT_BYTES = 48 << 20


def join(store: dist.Store | None = None, rank: int = 0, size: int = 1, backend: str = BACKEND) -> None:
    """The default group, connected at once, like those of dray's workers."""
    device = torch.device("cuda", 0) if "nccl" in backend else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, store=store or dist.HashStore(), rank=rank, world_size=size, timeout=LIMIT, device_id=device
    )


def total(group: dist.ProcessGroup | None = None) -> float:
    """The sum of a one over a group."""
    one = torch.ones(1, device=DEVICE)
    dist.all_reduce(one, group=group)
    return one.item()


def main(tiny: bool) -> None:
    """Meet the errors, each in its own process, then make and end groups here, which may hang."""
    with attempt("errors"):
        store = Path("two").absolute()
        together = {what: Child("nccl", what) for what in ("aborted", "out_of_memory")}
        for backend in ("gloo", "nccl") if ON_GPU else ("gloo",):
            together[f"chief never comes, {backend}"] = Child("nccl", "chief_never_comes", backend)
        for rank in (0, 1):
            together[f"rank {rank} of two on one GPU"] = Child(
                "nccl", "two_on_one", rank, store, GLOO_SOCKET_IFNAME="lo"
            )
        fails = Child("nccl", "device_fails")
        for what, child in together.items():
            well(child, what)
        how, output = fails.ended()
        alive = stamps("alive")
        figure(
            "a rank whose device has failed",
            f"{how}, {alive[-1].fields['after_s']:.1f} s after the error" if alive else f"{how} at once",
        )
        if how.startswith("killed"):
            lines = [line for line in output.splitlines() if "atchdog" in line or "terminate called" in line]
            note(f"It printed last: `{' | '.join(lines[-3:])[-300:]}`")
        well(Child("nccl", "no_memory_left"), "no_memory_left")
    torch.ones(8, 8, device=DEVICE) @ torch.ones(8, 8, device=DEVICE)
    with attempt("joining"):
        before, began = used(), clock()
        join()
        figure("init_process_group with device_id", f"{clock() - began:.2f} s")
        check("sum over the group", total(), 1.0)
        on_cpu = torch.ones(1)
        dist.all_reduce(on_cpu)
        check("sum of a CPU tensor", on_cpu.item(), 1.0)
        figure("bytes of the default group, one rank", mib(used() - before))
    with attempt("new groups"):
        before, began = used(), clock()
        groups = [dist.new_group([0], timeout=LIMIT, use_local_synchronization=n % 2 == 0) for n in range(GROUPS)]
        check("sums over new groups", [total(group) for group in groups], [1.0] * GROUPS)
        figure("new_group and its first sum", f"{(clock() - began) / GROUPS * 1e3:.0f} ms each")
        figure("bytes of a further communicator", mib((used() - before) / GROUPS))
        for group in groups:
            dist.destroy_process_group(group)
        figure("bytes left of these after destroy_process_group", mib(used() - before))
    with attempt("dray's groups"):
        before = used()
        gradients, mesh = ddp.gradients_group(), device_mesh(mesh_shape(None, 1), DEVICE)
        check("sums of dray's groups", [total(gradients.group), total(mesh["dp_shard"].get_group())], [1.0, 1.0])
        check("collectives are queued", ddp.queues_collectives(DEVICE), ON_GPU)
        figure("bytes of dray's groups of a sharded trial", mib(used() - before))
        began = clock()
        del mesh
        ddp.disconnect(DEVICE)
        figure("disconnect, as after a trial that a rank has left", f"{(clock() - began) * 1e3:.0f} ms")
        figure("bytes left of these after it", mib(used() - before))
        check("sum of the next trial's group", total(ddp.gradients_group().group), 1.0)
    with attempt("the end of the default group"):
        ddp.disconnect(DEVICE)
        began = clock()
        ddp.end_group(DEVICE)
        figure("the end of the default group", f"{(clock() - began) * 1e3:.0f} ms")
        join()
        check("sum over a group that is joined after it", total(), 1.0)
        ddp.end_group(DEVICE)


# ------------------------------------------------------------------------------------------- each in its own process
def aborted() -> None:
    """Abort while collectives wait behind a computation, like a rank whose peer has left."""
    join()
    busy = torch.ones(8192 if ON_GPU else 64, 8192 if ON_GPU else 64, device=DEVICE)
    total(ddp.gradients_group().group)
    for _ in range(200 if ON_GPU else 1):  # 4 s of an H100 in float32
        busy = busy @ busy * 1e-4
    queued = torch.ones(1, device=DEVICE)
    dist.all_reduce(queued, group=ddp.gradients_group().group, async_op=True)
    aborts = threading.Thread(target=ddp.abort, daemon=True)
    began = time.perf_counter()
    aborts.start()
    aborts.join(15)
    took = time.perf_counter() - began
    figure("abort, with 4 s of work queued", f"{took:.2f} s" if not aborts.is_alive() else "not over after 15 s")
    check("is_aborted", ddp.is_aborted(), True)
    began = time.perf_counter()
    error = raised(total)
    if ON_GPU:
        classified("a collective after an abort", error, "collective")
    figure("the next collective and synchronisation after it", f"{clock() - began:.2f} s")
    os._exit(0)  # as a worker that is replaced


def chief_never_comes(backend: str) -> None:
    """A rank that joins alone: the chief has died, or its port can't be reached."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=4))
    error = raised(lambda: join(store, rank=1, size=2, backend=backend))
    classified(f"a rank whose chief never comes, {backend}", error, "collective")
    os._exit(0)


def two_on_one(rank: str, file: str) -> None:
    """Two ranks on one GPU. On a CPU, one leaves before the collective."""
    try:
        join(dist.FileStore(file, 2), rank=int(rank), size=2)
        if not ON_GPU and rank == "1":
            os._exit(0)
        total()
    except Exception as error:
        classified(f"{'two ranks on one GPU' if ON_GPU else 'a peer that has gone'}, rank {rank}", error, "collective")
    else:
        check("two ranks on one GPU", "no error", "an error")
    os._exit(0)


def no_memory_left() -> None:
    """A new communicator on a GPU that is full."""
    join()
    total()
    full = []
    while ON_GPU and (free := torch.cuda.mem_get_info()[0] - LEFT_BYTES) > LEFT_BYTES:
        full.append(torch.empty(free // 2, dtype=torch.uint8, device=DEVICE))
    for made in range(64 if ON_GPU else 2):
        if (error := raised(lambda: total(dist.new_group([0], timeout=LIMIT)))) is not None:
            classified(f"communicator {made + 1} on a full GPU", error, "oom")
            break
    else:
        note(f"A GPU with less than {mib(2 * LEFT_BYTES)} left has room for {made + 1} more communicators of one rank.")
    os._exit(0)


def out_of_memory() -> None:
    """Allocate more memory than there is, and then see what torch's allocator has left for a batch."""
    bytes_ = torch.cuda.get_device_properties(0).total_memory if ON_GPU else 1 << 55
    classified("a tensor too large", raised(lambda: torch.empty(bytes_, dtype=torch.uint8, device=DEVICE)), "oom")
    check("a smaller one after it", int(torch.ones(1000, device=DEVICE).sum().item()), 1000)


def device_fails() -> None:
    """A device-side assert in a rank of a group, with a collective behind it: NCCL's watchdog may end the process."""
    join()
    values = torch.zeros(4, device=DEVICE)
    dist.all_reduce(values)

    def fail() -> None:
        wrong = values[torch.tensor([9], device=DEVICE)]
        dist.all_reduce(wrong)
        clock()

    error, began = raised(fail), time.perf_counter()
    stamp("alive", after_s=0.0)
    classified("a device-side assert", error, "device" if ON_GPU else "error")
    while (after := time.perf_counter() - began) < (GOES_ON_S if ON_GPU else 0.2):
        stamp("alive", after_s=after)
        time.sleep(0.05)
    os._exit(0)
