"""Which versions of an adapter an engine's requests use, and which its workers keep."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import weightsync as ws
from weightsync.integrations.vllm import adapter_versions, rpc
from weightsync.integrations.vllm.adapter_names import AdapterPath, path_of
from weightsync.integrations.vllm.adapter_versions import KEPT_VARIABLE, AdapterVersions, kept_of


def version(number: int, digest: str = "0" * 16, name: str = "policy") -> str:
    return str(AdapterPath(name, number, digest))


def held(name: str, of_workers: list[list[str]]) -> list[dict[str, list[str]]]:
    """What each worker tells that holds versions of one adapter."""
    return [{name: paths} for paths in of_workers]


def current(versions: AdapterVersions, request: str = "r") -> str:
    found = versions.accept(request, "weightsync://policy")
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
    assert str(versions.accept("r", "weightsync://policy/v1")) == one


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
    assert str(versions.accept("r", "weightsync://policy/v1")) == after
    assert str(versions.accept("s", before)) == before


def test_every_version_has_names_of_its_own() -> None:
    paths = [AdapterPath("policy", n, d * 16) for n in (1, 2) for d in "ab"]
    assert len({str(path) for path in paths}) == len({path.id for path in paths}) == 4
    assert all(1 << 61 <= path.id < 1 << 62 for path in paths)
    assert [AdapterPath.parse(str(path)) for path in paths] == paths
    assert len({path.lora_name for path in paths}) == 4
    assert paths[0].model == "policy@1"


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
