"""The actors of ``dray cluster check``: each examines its own node, and does there the same as trials."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from dray.cluster.node_check import STORE_S, Trouble, directory_trouble, disks, full_disk, mounted
from dray.environment import versions, visible_gpus
from dray.storage import Location, RemoteDirectory, StorageError

ANSWER_S = 120.0  # how long a node may take to start a process, and then for each request
SENDING_S = 1.0
SENT_BYTES = 1 << 20
REDUCED_BYTES, REDUCTIONS = 64 << 20, 10
SIGN = "sign"  # the object that the driver writes to an object store, and nodes read
_OF_NCCL = ("NCCL_", "OFI_NCCL_", "FI_")  # prefixes of the variables that NCCL and its plugin for EFA read

_TORCH = """
import ctypes, json, os, torch

def loads(library):
    try:
        return bool(ctypes.CDLL(library))
    except OSError:
        return False

# Where NCCL looks for one: a path, or a part of the library's name.
plugin = os.environ.get("NCCL_NET_PLUGIN") or "libnccl-net.so"
nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
print(json.dumps({
    "cuda": torch.version.cuda or "",
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else "",
    "nccl_plugin": any(map(loads, (plugin, f"libnccl-net-{plugin}.so"))),
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A disk: where it is mounted, and its free and total bytes."""

    path: str
    free: int
    size: int


class Inspector:
    def facts(self) -> dict[str, Any]:
        """Fields of `Node`, the error of importing torch (``error``, or ""), and a full disk (``full``, or "")."""
        # Keep one directory of each disk.
        places = {os.stat(place).st_dev: place for place in reversed([*disks(), "/dev/shm"]) if os.path.isdir(place)}
        usage = [(place, shutil.disk_usage(place)) for place in reversed(places.values())]
        full = full_disk(disks())
        return {
            "host": platform.node(),
            **versions(),
            **_torch_facts(),
            "disks": [Disk(path=mounted(place), free=its.free, size=its.total) for place, its in usage],
            "has_token": os.environ.get("RAY_AUTH_MODE", "").lower() == "token",
            "full": full.what if full else "",
            "efa_devices": efa_devices(Path("/sys/class/infiniband")),
            "nccl_environment": {
                name: value for name, value in sorted(os.environ.items()) if name.startswith(_OF_NCCL)
            },
        }

    def clock(self) -> float:
        return time.time()

    def storage(self, place: Location, sign: str, mine: str) -> Trouble | None:
        """Check that the driver's sign is in a place, and write a file there, named ``mine`` with the same content."""
        if place.is_local:
            trouble = directory_trouble(str(place.path), sign)
            if trouble is None:
                (place.path / mine).write_text(mine)
            return trouble
        store = RemoteDirectory(place, patience_s=STORE_S)
        try:
            if store.read(SIGN).decode() != sign:
                return Trouble("unseen", f"reads something else from {place} than the driver wrote")
            store.write(mine, mine.encode())
        except StorageError as error:
            return Trouble("refused", str(error))
        except OSError as error:
            return Trouble("unseen", f"can't use {place}: {error}")
        return None

    def listen(self) -> tuple[str, int]:
        """Receive data from one other node. Returns the address that it must send to."""
        import ray

        listener = socket.create_server((ray.util.get_node_ip_address(), 0))
        listener.settimeout(ANSWER_S)
        threading.Thread(target=_receive_all, args=(listener,), daemon=True).start()
        address = listener.getsockname()
        return str(address[0]), int(address[1])

    def send(self, to: tuple[str, int]) -> tuple[float | None, str]:
        """Send to another node for a while. Returns the bytes per second, or the error."""
        block, sent, began = bytes(SENT_BYTES), 0, time.perf_counter()
        try:
            with socket.create_connection(to, timeout=ANSWER_S / 10) as wire:
                while time.perf_counter() - began < SENDING_S:
                    wire.sendall(block)
                    sent += len(block)
                wire.shutdown(socket.SHUT_WR)
                wire.recv(1)  # the other node has received all of it
        except OSError as error:
            return None, str(error)
        return sent / (time.perf_counter() - began), ""


def efa_devices(infiniband: Path) -> int:
    """The number of devices in this directory of sysfs that use AWS's driver for EFA."""
    drivers = [device.resolve().name for device in infiniband.glob("*/device/driver")]
    return drivers.count("efa")


def _receive_all(listener: socket.socket) -> None:
    block = bytearray(SENT_BYTES)
    with contextlib.suppress(OSError), listener, listener.accept()[0] as wire:
        while wire.recv_into(block):
            pass
        wire.sendall(b".")


def _torch_facts() -> dict[str, Any]:
    # Another process imports torch: a broken torch may crash it, and Ray hides GPUs from an actor that asked for none.
    environment = {name: value for name, value in os.environ.items() if name not in visible_gpus([])}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _TORCH], capture_output=True, text=True, env=environment, timeout=ANSWER_S
        )
        if ran.returncode == 0:
            return {**json.loads(ran.stdout), "error": ""}
        error = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
    except (OSError, subprocess.TimeoutExpired, ValueError) as failed:
        error = str(failed)
    return {"cuda": "", "nccl": "", "nccl_plugin": False, "gpus": [], "error": error}


class AllReduceRank:
    """One rank of an all-reduce; with NCCL it has a GPU."""

    def open(self) -> tuple[str, int]:
        """Open the store, as rank 0. Returns the store's address for the other ranks."""
        import ray
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def reduce(self, at: tuple[str, int], rank: int, size: int, backend: str) -> float:
        """Bytes per second that each rank sends and receives ("bus bandwidth") when all reduce 64 MiB."""
        import ray
        import torch
        import torch.distributed as dist
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        from dray.training.parallel.transport import use_interface_of

        use_interface_of(ray.util.get_node_ip_address())
        limit = timedelta(seconds=ANSWER_S / 2)
        store = self._store if rank == 0 else TCPStore(*at, is_master=False, timeout=limit)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        device = torch.device("cuda" if backend == "nccl" else "cpu")

        def wait() -> float:
            if device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter()

        ones = torch.ones(REDUCED_BYTES // 4, device=device)
        dist.all_reduce(ones)
        if ones[-1].item() != size:
            raise RuntimeError(f"the all-reduce returned a wrong sum of {size} ones: {ones[-1].item()}")
        began = wait()
        for _ in range(REDUCTIONS):
            dist.all_reduce(ones)
        took = wait() - began
        return 2 * (size - 1) / size * REDUCED_BYTES * REDUCTIONS / took
