"""Which versions of an adapter an engine's requests use, and which its workers keep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import weightsync as ws
from weightsync.integrations.vllm import adapter_versions, rpc
from weightsync.integrations.vllm.adapter_names import FIRST_ID, LAST_ID, AdapterPath, path_of
from weightsync.integrations.vllm.adapter_versions import KEPT_VARIABLE, AdapterVersions, kept_of


def version(number: int, digest: str = "0" * 16, name: str = "policy") -> str:
    return str(AdapterPath(name, number, digest))


def held(name: str, of_workers: list[list[str]]) -> list[dict[str, list[str]]]:
    """What each worker tells that holds versions of one adapter."""
    return [{name: paths} for paths in of_workers]


def current(versions: AdapterVersions, request: str = "r") -> str:
    found, _ = versions.accept(request, "weightsync://policy")
    versions.added(request)
    return str(found)


def test_a_version_is_used_once_every_worker_holds_it() -> None:
    versions = AdapterVersions()
    one, two = version(1), version(2)
    versions.answered(held("policy", [[one], [one]]))
    versions.answered(held("policy", [[one, two], [one]]))
    assert current(versions) == one
    with pytest.raises(ws.ConfigError, match="'policy@2' is held; held are policy@1"):
        versions.accept("r", "weightsync://policy/v2")
    versions.answered(held("policy", [[one, two], [one, two]]))
    assert current(versions) == two
    assert str(versions.accept("r", "weightsync://policy/v1")[0]) == one


def test_what_a_request_uses_is_kept_from_its_acceptance_to_its_end() -> None:
    versions = AdapterVersions(kept=1)
    one, two, three = version(1), version(2), version(3)
    versions.answered(held("policy", [[one]]))
    versions.accept("early", "weightsync://policy")
    versions.answered(held("policy", [[one, two]]))
    assert versions.keep([]) == [one, two]
    versions.added("early")
    assert versions.keep([one]) == [one, two]
    versions.answered(held("policy", [[one, two, three]]))
    assert versions.keep([one]) == [one, three]
    assert versions.keep([]) == [three]
    with pytest.raises(ws.ConfigError):
        versions.accept("late", "weightsync://policy/v1")


def test_what_is_not_kept_is_not_accepted_while_the_workers_drop_it() -> None:
    versions = AdapterVersions(kept=2)
    sent = [version(n) for n in (1, 2, 3)]
    versions.answered(held("policy", [sent]))
    assert versions.keep([]) == sent[1:]
    with pytest.raises(ws.ConfigError, match="held are policy@2, policy@3"):
        versions.accept("r", "weightsync://policy/v1")
    assert versions.served == {"policy": sent[1:]}


def test_an_unloaded_adapter_is_kept_for_its_requests_alone() -> None:
    versions = AdapterVersions()
    one, other = version(1), version(1, name="judge")
    versions.answered([{"policy": [one], "judge": [other]}])
    versions.unloaded("policy")
    with pytest.raises(ws.ConfigError, match="'policy' was never sent"):
        versions.accept("r", "weightsync://policy")
    assert versions.keep([one]) == [other, one]
    assert versions.keep([]) == [other]


def test_an_unload_that_a_worker_refuses_changes_nothing() -> None:
    engine = SimpleNamespace(scheduler=SimpleNamespace(requests={}))
    versions = adapter_versions._versions_of(engine)
    one, two = version(1), version(2)
    versions.answered(held("policy", [[one, two]]))
    unload = rpc.encode_round(rpc.Round(nonce="0", below="adapters/policy", unload=True))
    refusal = [rpc.encode_refusal(ws.ConfigError("not now"))]
    assert adapter_versions._pass_on(lambda _: refusal, engine, unload) == refusal
    assert versions.served == {"policy": [one, two]}
    assert current(versions) == two


def test_a_version_that_is_sent_again_is_the_newest() -> None:
    versions = AdapterVersions()
    one, two = version(1), version(2)
    versions.answered(held("policy", [[one, two]]))
    versions.answered(held("policy", [[two, one]]))  # by rewind=True
    assert current(versions) == one


def test_a_number_that_comes_twice_means_the_newer_weights() -> None:
    versions = AdapterVersions()
    before, after = version(1, "a" * 16), version(1, "b" * 16)
    versions.answered(held("policy", [[before, after]]))
    assert str(versions.accept("r", "weightsync://policy/v1")[0]) == after
    assert str(versions.accept("s", before)[0]) == before


def test_every_version_has_names_of_its_own() -> None:
    paths = [AdapterPath("policy", n, d * 16) for n in (1, 2) for d in "ab"]
    assert len({str(path) for path in paths}) == 4
    assert [AdapterPath.parse(str(path)) for path in paths] == paths
    assert len({path.lora_name for path in paths}) == 4
    assert paths[0].model == "policy@1"


def number(versions: AdapterVersions, path: str) -> int:
    found = versions.accept("r", path)[1]
    versions.added("r")
    return found


def test_a_version_has_one_number_while_workers_keep_it() -> None:
    versions = AdapterVersions()
    paths = [version(1), version(2), version(3, name="judge")]
    versions.answered([{"policy": paths[:2], "judge": paths[2:]}])
    numbers = [number(versions, path) for path in paths]
    assert len(set(numbers)) == 3
    versions.keep([])
    assert [number(versions, path) for path in reversed(paths)] == numbers[::-1]


def test_a_number_fits_the_tables_of_vllm_and_is_none_of_a_file() -> None:
    """32 bits with a sign: the V2 model runner's. Files are counted from 1."""
    versions = AdapterVersions(kept=1, next_id=LAST_ID - 2)
    numbers = []
    for i in range(6):
        path = version(i)
        versions.answered(held("policy", [[path]]))
        numbers.append(number(versions, path))
        versions.keep([])
    assert numbers == [LAST_ID - 2, LAST_ID - 1, *range(FIRST_ID, FIRST_ID + 4)]
    assert np.array(numbers, dtype=np.int32).tolist() == numbers
    assert FIRST_ID == 2**30
    assert np.iinfo(np.int32).max == LAST_ID


def test_a_number_in_use_is_not_given_again() -> None:
    versions = AdapterVersions(next_id=LAST_ID - 1)
    one, two, three = version(1), version(2), version(3)
    versions.answered(held("policy", [[one]]))
    first = number(versions, one)
    versions.answered(held("policy", [[one, two]]))
    assert number(versions, two) == FIRST_ID
    versions._next_id = first
    versions.answered(held("policy", [[one, two, three]]))
    assert number(versions, three) == FIRST_ID + 1


def test_numbers_of_versions_that_are_gone_are_forgotten() -> None:
    versions = AdapterVersions(kept=1)
    for i in range(50):
        versions.answered(held("policy", [[version(i)]]))
        number(versions, version(i))
        versions.keep([])
    assert len(versions._ids) == 1


def test_a_refused_unload_does_not_take_back_what_was_sent_since() -> None:
    versions = AdapterVersions()
    one, two = version(1), version(2)
    versions.answered(held("policy", [[one]]))
    take_back = versions.unloaded("policy")
    versions.answered(held("policy", [[two]]))
    take_back()
    assert versions.served == {"policy": [two]}


def test_a_version_that_a_request_uses_may_be_asked_for_by_number() -> None:
    versions = AdapterVersions(kept=1)
    one, two = version(1), version(2)
    versions.answered(held("policy", [[one, two]]))
    assert versions.keep([one]) == [one, two]
    assert str(versions.accept("r", one)[0]) == one


class Core:
    """What is wrapped of vLLM's EngineCore."""

    def __init__(self) -> None:
        self.added = list[str]()

    def collective_rpc(self, *_: object) -> list[object]:
        return []

    def preprocess_add_request(self, request: Any) -> Any:
        return request

    def add_request(self, request: Any) -> None:
        self.added.append(request.request_id)

    def add_lora(self, _: object) -> bool:
        return True


def test_a_wrong_setting_does_not_disturb_requests_of_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error where the engine adds a request ends the engine."""
    monkeypatch.setenv(KEPT_VARIABLE, "two")
    adapter_versions.install(Core)
    core, of_file = Core(), SimpleNamespace(lora_path="/some/adapter")
    request = SimpleNamespace(request_id="r", lora_request=of_file)
    core.add_request(core.preprocess_add_request(request))
    assert core.added == ["r"]
    request.lora_request = SimpleNamespace(lora_path="weightsync://policy")
    with pytest.raises(ws.ConfigError, match=KEPT_VARIABLE):
        core.preprocess_add_request(request)


def test_models_of_requests() -> None:
    assert path_of("policy") == AdapterPath("policy")
    assert path_of("policy@7") == AdapterPath("policy", 7)
    for name in ("", "policy@", "policy@x", "org/model", "policy@1/v2", "policy@-1"):
        assert path_of(name) is None


@pytest.mark.parametrize("path", ["/tmp/adapter", "weightsync://", "weightsync://a/vx", ""])
def test_other_paths_are_refused(path: str) -> None:
    with pytest.raises(ws.ConfigError, match="no adapter of weightsync"):
        AdapterPath.parse(path)


@pytest.mark.parametrize("name", ["stra\u00dfe", "p\u0663", "\u0663", "a\u0301"])
def test_names_are_ascii(name: str) -> None:
    assert path_of(name) is None
    assert path_of(f"policy@{name}") is None
    with pytest.raises(ws.ConfigError, match="no adapter of weightsync"):
        AdapterPath.parse(f"weightsync://{name}")


def test_how_many_versions_stay() -> None:
    assert kept_of({}) == 2
    assert kept_of({KEPT_VARIABLE: "16"}) == 16
    for text in ("0", "-1", "many", ""):
        with pytest.raises(ws.ConfigError, match=KEPT_VARIABLE):
            kept_of({KEPT_VARIABLE: text})
