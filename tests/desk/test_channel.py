"""Both sides of a connection in one process, with a stranger between them."""

from __future__ import annotations

import itertools

import pytest

from dray.desk import channel
from dray.desk.channel import Channel, Forged

KEY = bytes(range(32))


def pair(key: bytes = KEY) -> tuple[Channel, Channel]:
    """A client and a desk that have exchanged their nonces and proofs."""
    client, desk = Channel(key, "client"), Channel(KEY, "desk")
    proof, _ = desk.receive(client.hello)
    answer, _ = client.receive(desk.hello)
    client.receive(proof)
    desk.receive(answer)
    return client, desk


def test_messages_arrive_in_whatever_pieces_they_come() -> None:
    client, desk = pair()
    sent = [b"", b"one", bytes(100_000), b"two"]
    stream = b"".join(map(client.seal, sent))
    pieces = [stream[at : at + 997] for at in range(0, len(stream), 997)]
    assert [message for piece in pieces for message in desk.receive(piece)[1]] == sent
    assert client.receive(desk.seal(b"answer"))[1] == [b"answer"]


def test_the_whole_handshake_may_come_byte_by_byte() -> None:
    client, desk = Channel(KEY, "client"), Channel(KEY, "desk")
    proof = b"".join(desk.receive(bytes([byte]))[0] for byte in client.hello)
    answer, _ = client.receive(desk.hello + proof)
    assert client.is_proven
    assert not desk.is_proven
    together = answer + client.seal(b"at once")
    assert [message for byte in together for message in desk.receive(bytes([byte]))[1]] == [b"at once"]


def test_who_does_not_know_the_key_is_refused_by_both() -> None:
    for role, other in (("client", "desk"), ("desk", "client")):
        side, stranger = Channel(KEY, role), Channel(b"another", other)  # type: ignore[arg-type]
        proof, _ = stranger.receive(side.hello)
        with pytest.raises(Forged):
            side.receive(stranger.hello + proof)
        assert not side.is_proven


@pytest.mark.parametrize("role", ["client", "desk"])
def test_its_own_bytes_sent_back_prove_nothing(role: channel.Role) -> None:
    side = Channel(KEY, role)
    proof, _ = side.receive(side.hello)
    with pytest.raises(Forged):
        side.receive(proof)


@pytest.mark.parametrize("role", ["client", "desk"])
def test_a_proof_of_another_side_with_the_same_role_proves_nothing(role: channel.Role) -> None:
    """As when a stranger connects two desks, or a desk with itself."""
    one, other = Channel(KEY, role), Channel(KEY, role)
    proof, _ = one.receive(other.hello)
    other.receive(one.hello)
    with pytest.raises(Forged):
        other.receive(proof)


def test_a_recorded_connection_can_not_be_replayed() -> None:
    client, desk = Channel(KEY, "client"), Channel(KEY, "desk")
    desk.receive(client.hello)
    answer, _ = client.receive(desk.hello)
    desk.receive(answer)
    again = Channel(KEY, "desk")
    with pytest.raises(Forged):
        again.receive(client.hello + answer)


def test_frames_that_are_changed_left_out_repeated_or_turned_round_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "MAX_MESSAGE", 1 << 16)
    for number in range(len(pair()[0].seal(b"message"))):
        client, desk = pair()
        frame = bytearray(client.seal(b"message"))
        frame[number] ^= 1
        with pytest.raises(Forged):  # also where the length is larger now
            desk.receive(bytes(frame) + bytes(1 << 17))
    for order in itertools.permutations(range(3)):
        client, desk = pair()
        frames = [client.seal(b"%d" % number) for number in range(3)]
        if order != (0, 1, 2):
            with pytest.raises(Forged):
                desk.receive(b"".join(frames[number] for number in order))
    client, desk = pair()
    once = client.seal(b"once")
    assert desk.receive(once)[1] == [b"once"]
    with pytest.raises(Forged):
        desk.receive(once)
    client, desk = pair()
    with pytest.raises(Forged):
        client.receive(client.seal(b"to the desk"))
    with pytest.raises(Forged):
        desk.receive(pair()[0].seal(b"of another connection"))


def test_a_frame_that_is_too_large_is_refused_before_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_MESSAGE", 1000)
    client, desk = pair()
    assert desk.receive(client.seal(bytes(1000)))[1] == [bytes(1000)]
    with pytest.raises(Forged, match="1,001 bytes was announced"):
        desk.receive((1001).to_bytes(4, "big") + bytes(16))
