"""The blocks of docs/adapters.md, against `weightsync serve`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integrations.test_huggingface import quiet_peft
from tests.serve.adapted import Served, tiny_adapted
from tests.serve.servers import forked_server
from tests.vllm.adapters_page import send_request_and_unload, send_together
from tests.vllm.tiny import expected

pytestmark = [pytest.mark.timeout(300), quiet_peft]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with forked_server("--no-auth", want_token=False) as (url, _):
        yield Served(url, "")


def test_what_the_page_does_with_a_server(served: Served) -> None:
    send_request_and_unload(tiny_adapted(), served.url)
    assert served.post("policy").status_code == 404


def test_base_and_adapter_together(served: Served) -> None:
    model = tiny_adapted()
    version = send_together(model, served.url)
    served.assert_serves("policy", expected(model), version=version)
