"""A local S3 server that can be stopped, and a connection to it that breaks."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import urllib.request

from dray.storage import Location, RemoteDirectory

KEYS = (("access_key", "test"), ("secret_key", "test"))


class LocalS3:
    """A moto server in this process, with a bucket. What is in it outlives `stop`."""

    def __init__(self, bucket: str = "bucket", host: str = "127.0.0.1") -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.bucket, self.host = bucket, host
        self.port = 0
        self.start()
        url = f"http://{host}:{self.port}/{bucket}"
        urllib.request.urlopen(urllib.request.Request(url, method="PUT")).close()

    def start(self) -> None:
        from moto.server import ThreadedMotoServer  # which takes a second

        self._server = ThreadedMotoServer(ip_address=self.host, port=self.port, verbose=False)
        self._server.start()
        self.port = self._server.get_host_and_port()[1]

    def stop(self) -> None:
        self._server.stop()

    def uri(self, *names: str, bucket: str | None = None, port: int | None = None) -> str:
        place = "/".join((bucket or self.bucket, *names))
        return f"s3://{place}?region=us-east-1&scheme=http&endpoint_override={self.host}:{port or self.port}"

    def place(self, *names: str, port: int | None = None) -> Location:
        return Location(Location.of(self.uri(*names, port=port)).uri, KEYS)

    def demand_keys(self, wanted: bool) -> None:
        """Whether any key will do, as by default, or none that was not made."""
        url = f"http://{self.host}:{self.port}/moto-api/reset-auth"
        body = b"0" if wanted else b"inf"
        urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "text/plain"})).close()

    def files(self, *names: str) -> dict[str, int]:
        return RemoteDirectory(self.place(*names)).sizes()


class Wire:
    """Carries connections to a server, and is cut for good when so many bytes have gone there."""

    def __init__(self, port: int, cut_after: float) -> None:
        self._target, self._left, self._lock = port, cut_after, threading.Lock()
        self.carried = 0
        self._ends: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                with self._lock:
                    self._ends |= {near, far}
                threading.Thread(target=self._carry, args=(near, far, True), daemon=True).start()
                threading.Thread(target=self._carry, args=(far, near, False), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if counts:
                    with self._lock:
                        data = data[: int(min(self._left, len(data)))]
                        self._left -= len(data)
                        self.carried += len(data)
                target.sendall(data)
                if self._left <= 0:
                    self.close()
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            for end in self._ends:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
