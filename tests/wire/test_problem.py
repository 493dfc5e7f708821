from __future__ import annotations

import msgspec
import pytest

from tests.transports.contract import ERRORS
from weightsync.errors import (
    ManifestMismatchError,
    ProtocolError,
    RemoteError,
    StaleVersionError,
    WeightSyncError,
)
from weightsync.wire import problem


def through_the_wire(exc: BaseException) -> WeightSyncError:
    body = problem.encode_problem(problem.to_problem(exc))
    document = msgspec.json.decode(body, type=problem.Problem)
    return problem.error_of(document, peer="http://peer", call="finish_weight_update")


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_an_error_arrives_as_its_own_class(error: WeightSyncError) -> None:
    arrived = through_the_wire(error)
    assert type(arrived) is type(error)
    assert str(arrived) == f"http://peer: {error}"
    assert vars(arrived).keys() == vars(error).keys()


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_the_status_says_whose_fault_it_is(error: WeightSyncError) -> None:
    status = problem.status_of(error)
    wanted = {"NotReadyError": 503, "WeightSyncError": 500}.get(type(error).__name__)
    assert status == wanted if wanted else 400 <= status < 500


def test_a_subclass_from_elsewhere_keeps_what_is_known() -> None:
    class LocalError(StaleVersionError):
        pass

    document = problem.to_problem(LocalError(held=2, offered=1))
    assert document.status == 409
    arrived = problem.from_problem(document)
    assert type(arrived) is StaleVersionError
    assert (arrived.held, arrived.offered) == (2, 1)


def test_a_foreign_error_keeps_type_and_message() -> None:
    arrived = through_the_wire(MemoryError("no room"))
    assert isinstance(arrived, RemoteError)
    assert (arrived.remote_type, arrived.remote_message) == ("MemoryError", "no room")
    assert str(arrived) == "http://peer: finish_weight_update: the peer raised MemoryError: no room"


def test_many_names_are_cut() -> None:
    names = [f"layer.{i}" for i in range(5000)]
    arrived = through_the_wire(ManifestMismatchError(missing=names))
    assert isinstance(arrived, ManifestMismatchError)
    assert list(arrived.missing) == names[: problem.MAX_LISTED]


@pytest.mark.parametrize("error", ["SystemExit", "KeyboardInterrupt", "__class__", "", "Exception"])
def test_a_document_cannot_raise_what_is_not_ours(error: str) -> None:
    document = problem.Problem(title="t", status=500, detail="d", error=error)
    assert type(problem.error_of(document, peer="p", call="resume")) is RemoteError


def test_attributes_that_do_not_belong_are_dropped() -> None:
    document = problem.Problem(
        title="t",
        status=409,
        detail="d",
        error="StaleVersionError",
        attributes={"held": 3, "offered": 2, "args": "x", "message": "y"},
    )
    arrived = problem.from_problem(document)
    assert isinstance(arrived, StaleVersionError)
    assert (arrived.held, arrived.offered, str(arrived)) == (3, 2, "d")


@pytest.mark.parametrize(
    ("error", "attributes"),
    [
        ("VerificationError", {"names": 3}),
        ("ManifestMismatchError", {"missing": 3, "unexpected": "ab"}),
        ("StaleVersionError", {"held": "3"}),
        ("AuthError", {"status": ["403"]}),
    ],
)
def test_attributes_of_another_type_are_dropped(
    error: str, attributes: dict[str, int | str | list[str]]
) -> None:
    document = problem.Problem(
        title="t", status=409, detail="d", error=error, attributes=attributes
    )
    arrived = problem.from_problem(document)
    assert type(arrived).__name__ == error
    assert str(arrived) == "d"
    assert all(getattr(arrived, name) != value for name, value in attributes.items())


@pytest.mark.parametrize("body", [b"", b"\xff", b'{"title":"\xe9"}', b"[" * 9999, b'{"error":"E"}'])
def test_what_is_no_error_is_one_of_the_peer(body: bytes) -> None:
    error = problem.decode_error(body, peer="worker 3")
    assert type(error) is ProtocolError
    assert str(error).startswith("worker 3 sent an error that cannot be read: b")
