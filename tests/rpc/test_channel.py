"""Both sides of a connection in one loop, with a stranger between them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dray.rpc.channel import MAX_MESSAGE, Channel, Forged, Role

KEY = bytes(range(32))
OTHER: dict[Role, Role] = {"client": "desk", "desk": "client"}


class Pipe:
    """Takes what one side writes; the stranger decides what its `reader` gets of it."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.reader, self.written, self._is_open = asyncio.StreamReader(), bytearray(), is_open

    def write(self, data: bytes) -> None:
        self.written += data
        if self._is_open:
            self.reader.feed_data(data)

    def is_closing(self) -> bool:
        return False

    async def hold(self, send: Callable[[], None]) -> bytes:
        """What a side writes now, which does not arrive."""
        self._is_open, before = False, len(self.written)
        send()
        await asyncio.sleep(0)
        return bytes(self.written[before:])


def side(role: Role, incoming: Pipe, outgoing: Pipe, key: bytes = KEY) -> Channel:
    writer: Any = outgoing
    return Channel(incoming.reader, writer, key, role)


async def pair() -> tuple[Channel, Channel, Pipe, Pipe]:
    """A client and a desk that have proven the key to each other; what they write."""
    to_desk, to_client = Pipe(), Pipe()
    client, desk = side("client", to_client, to_desk), side("desk", to_desk, to_client)
    await asyncio.gather(client.prove(), desk.prove())
    return client, desk, to_desk, to_client


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    def run(**kwargs: Any) -> None:
        async def bounded() -> None:
            await asyncio.wait_for(test(**kwargs), 30)

        asyncio.run(bounded())

    run.__name__ = test.__name__  # type: ignore[attr-defined]
    return run


async def received(desk: Channel, to_desk: Pipe, data: bytes) -> list[bytes]:
    """The messages that a side takes of these bytes, after which nothing comes."""
    to_desk.reader.feed_data(data)
    to_desk.reader.feed_eof()
    messages = []
    with contextlib.suppress(ConnectionResetError):
        while True:
            messages.append(await desk.receive())
    return messages


def test_messages_arrive_in_whatever_pieces_they_come() -> None:
    @in_loop
    async def check() -> None:
        client, desk, to_desk, _ = await pair()
        sent = [b"", b"one", bytes(100_000), b"two"]

        def send() -> None:
            for message in sent:
                client.send(message[:2], message[2:])

        data = await to_desk.hold(send)
        for at in range(0, len(data), 997):
            to_desk.reader.feed_data(data[at : at + 997])
        assert [await desk.receive() for _ in sent] == sent
        desk.send(b"answer")
        assert await client.receive() == b"answer"

    check()


@pytest.mark.parametrize("role", ["client", "desk"])
@pytest.mark.parametrize("stranger", ["another key", "no key", "an echo", "the same role", "a recording"])
def test_who_does_not_know_the_key_is_refused(role: Role, stranger: str) -> None:
    """A stranger without it may send the side's own bytes back or those of another connection, or connect two clients,
    or two desks."""

    @in_loop
    async def check() -> None:
        incoming, outgoing = Pipe(), Pipe()
        other = side(OTHER[role], outgoing, incoming, b"" if stranger == "no key" else b"another")
        proving = [side(role, incoming, outgoing).prove()]
        if stranger == "an echo":
            outgoing.reader = incoming.reader
        elif stranger == "the same role":
            proving.append(side(role, outgoing, incoming).prove())
        elif stranger == "a recording":
            *_, to_desk, to_client = await pair()
            incoming.reader.feed_data(bytes(to_client.written if role == "client" else to_desk.written))
        else:
            proving.append(other.prove())
        for refused in await asyncio.gather(*proving, return_exceptions=True):
            assert isinstance(refused, Forged)

    check()


def test_frames_changed_left_out_repeated_or_reversed_are_refused() -> None:
    @in_loop
    async def check() -> None:
        async def frames(count: int = 1) -> tuple[Channel, Pipe, list[bytes]]:
            client, desk, to_desk, _ = await pair()
            return desk, to_desk, [await to_desk.hold(lambda: client.send(b"message")) for _ in range(count)]

        for number in range(27):
            desk, to_desk, [frame] = await frames()
            assert len(frame) == 27
            changed = bytearray(frame)
            changed[number] ^= 1
            with contextlib.suppress(Forged):  # a length that is larger now waits for more
                assert await received(desk, to_desk, bytes(changed)) == []
        for order in set(itertools.product(range(3), repeat=3)) - {(0, 1, 2)}:
            desk, to_desk, sent = await frames(3)
            with pytest.raises(Forged):
                await received(desk, to_desk, b"".join(sent[number] for number in order))
        _, answering, _, to_client = await pair()
        for foreign in ((await frames())[2][0], await to_client.hold(lambda: answering.send(b"to the client"))):
            _, desk, to_desk, _ = await pair()
            with pytest.raises(Forged):
                await received(desk, to_desk, foreign)

    check()


def test_a_frame_that_is_too_large_is_refused_before_it_has_come() -> None:
    @in_loop
    async def check() -> None:
        _, desk, to_desk, _ = await pair()
        with pytest.raises(Forged, match=f"{MAX_MESSAGE + 1:,} bytes was announced"):
            await received(desk, to_desk, (MAX_MESSAGE + 1).to_bytes(4, "big") + bytes(16))

    check()
