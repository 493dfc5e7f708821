"""How long a body, a list of tensors and a name may be: the last that fits, and the next one."""

from __future__ import annotations

import msgspec
import pytest
import requests

from tests.server.live import TOKEN, make_app, serving
from tests.transports.scripted import ScriptedReceiver
from weightsync.errors import ConfigError, ProtocolError
from weightsync.specs import MAX_DIMENSIONS, MAX_NAME_LENGTH, TensorSpec
from weightsync.wire import codec
from weightsync.wire.offers import MAX_TENSORS, ManifestMessage

HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_may_be_as_long_as_the_limit_and_no_longer(chunked: bool) -> None:
    receiver = ScriptedReceiver()
    limit = 1000
    empty = b"{}"
    with serving(make_app(receiver, max_body_nbytes=limit)) as url:

        def post(nbytes: int) -> int:
            body = empty + b" " * (nbytes - len(empty))
            data = iter([body[:500], body[500:]]) if chunked else body
            answer = requests.post(f"{url}/resume", data=data, headers=HEADERS, timeout=20)
            return answer.status_code

        assert post(limit) == 200
        seen = len(receiver.seen)
        assert post(limit + 1) == 413
        assert post(100 * limit) == 413
        assert len(receiver.seen) == seen


def columns(tensors: int) -> bytes:
    """A manifest of so many tensors, as short as JSON makes it; that they fit is another check."""
    return b'{"names":[%s],"dtype_names":[],"shapes":[]}' % b",".join([b'"n"'] * tensors)


def test_a_manifest_may_have_a_million_tensors_and_no_more() -> None:
    read = msgspec.json.Decoder(ManifestMessage).decode
    assert len(read(columns(MAX_TENSORS)).names) == MAX_TENSORS
    with pytest.raises(msgspec.ValidationError, match=f"length <= {MAX_TENSORS}.*names"):
        read(columns(MAX_TENSORS + 1))


@pytest.mark.parametrize(("length", "fits"), [(0, False), (MAX_NAME_LENGTH, True)])
def test_names_of_tensors(length: int, fits: bool) -> None:
    for size, good in ((length, fits), (MAX_NAME_LENGTH + 1, False)):
        message = b'{"names":["%s"],"dtype_names":["float32"],"shapes":[[1]]}' % (b"n" * size)
        if good:
            assert msgspec.json.decode(message, type=ManifestMessage).names == ["n" * size]
            assert TensorSpec("n" * size, "float32", (1,)).name == "n" * size
            continue
        with pytest.raises(msgspec.ValidationError, match="length"):
            msgspec.json.decode(message, type=ManifestMessage)
        with pytest.raises(ConfigError, match="1 to 1024 characters"):
            TensorSpec("n" * size, "float32", (1,))


def test_dimensions_of_a_shape() -> None:
    for count, fits in ((MAX_DIMENSIONS, True), (MAX_DIMENSIONS + 1, False)):
        shape = ",".join(["1"] * count)
        message = f'{{"names":["n"],"dtype_names":["float32"],"shapes":[[{shape}]]}}'.encode()
        if fits:
            assert msgspec.json.decode(message, type=ManifestMessage).shapes == [[1] * count]
        else:
            with pytest.raises(msgspec.ValidationError, match="length <= 16"):
                msgspec.json.decode(message, type=ManifestMessage)


@pytest.mark.parametrize(
    ("call", "field", "longest"),
    [
        ("update_weight_version", "new_version", 256),
        ("finish_weight_update", "weight_version", 256),
        ("finish_weight_update", "update_id", 128),
        ("abort_weight_update", "reason", 4096),
        ("start_weight_update", "label", 256),
    ],
)
def test_free_texts(call: str, field: str, longest: int) -> None:
    decoded = codec.decode_request(call, msgspec.json.encode({field: "x" * longest}))
    assert getattr(decoded, field) == "x" * longest
    with pytest.raises(ProtocolError, match=field):
        codec.decode_request(call, msgspec.json.encode({field: "x" * (longest + 1)}))
