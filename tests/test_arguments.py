"""Arguments that a user may plausibly give: taken where they are clear, else one line each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import nn

import weightsync as ws
from weightsync.server import weight_router


def make() -> nn.Module:
    return nn.Linear(4, 4)


def connected(**settings: Any) -> ws.WeightSender:
    receiver = ws.WeightReceiver(make())
    return ws.connect(**{"source": make(), "to": receiver.handle, **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        {"dtype": "torch.float32"},
        {"packed": True, "bucket_nbytes": "8MB"},
        {"packed": True, "bucket_nbytes": 8e6},
        {"timeout_s": 5},
        {"source": make().state_dict},
        {"to": ws.WeightReceiver(make())},
        {"to": [ws.WeightReceiver(make()), ws.WeightReceiver(make())]},
    ],
)
def test_what_is_clear_is_taken(settings: dict[str, Any]) -> None:
    with connected(**settings) as sender:
        assert sender.send_weights().version == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "bfloat"}, "dtype is a floating-point dtype, as torch.bfloat16 or 'bfloat16', "
         "not 'bfloat'"),
        ({"dtype": torch.int8}, "dtype is a floating-point dtype, as torch.bfloat16 or 'bfloat16', "
         "not torch.int8"),
        ({"bucket_nbytes": "8 apples"}, "bucket_nbytes: '8 apples' is not a size; write 512MiB"),
        ({"bucket_nbytes": 0}, "bucket_nbytes is a positive integer, not 0"),
        ({"num_buckets": 2.5}, "num_buckets is a positive integer, not 2.5"),
        ({"timeout_s": "5"}, "timeout_s is a number of seconds, above 0 and at most 1000000, "
         "not '5'"),
        ({"timeout_s": None}, "timeout_s is a number of seconds, above 0 and at most 1000000, "
         "not None"),
        ({"timeout_s": float("nan")}, "timeout_s is a number of seconds, above 0 and at most "
         "1000000, not nan"),
        ({"rename": "model."}, "rename is a mapping of names or a callable, not 'model.'; to "
         "remove a prefix: lambda name: name.removeprefix('model.')"),
        ({"packed": "yes"}, "packed is True, False or None, not 'yes'"),
        ({"verify": "no"}, "verify is True or False, not 'no'"),
        ({"adopt": 1}, "adopt is True or False, not 1"),
        ({"on_failure": "x"}, "on_failure must be abort or drop, not 'x'"),
        ({"to": make()}, "to= is a module, Linear; give a receiver of it: "
         "WeightReceiver(module)"),
        ({"to": 7}, "cannot send to an object of int; give a URL, a Ray actor, a "
         "WeightReceiver, a callable that takes and returns dicts, or a Transport"),
        ({"source": lambda: ["weight"]}, "a source yields (name, tensor) pairs, and this one "
         "yields a str: 'weight'"),
        ({"source": lambda: 7}, "tensors are a module, a state dict or (name, tensor) pairs, "
         "not 7"),
        ({"source": {"a": torch.ones(3, 3).to_sparse()}}, "1 tensor cannot be sent: a is "
         "sparse_coo (send a dense tensor, as its to_dense() is); give connect() a callable that"),
        ({"source": {"a": torch.ones(3, device="meta")}}, "1 tensor cannot be sent: a is on "
         "the meta device, without values (send the real tensor); give connect()"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ws.ConfigError) as caught:
        connected(**settings)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda sender: sender.send_weights(label=7), "label is a text of at most 256 characters"),
        (lambda sender: sender.send_weights(label="x" * 257), "label is a text of at most 256"),
        (lambda sender: sender.send_weights("3"), "a version is an integer from 0 to"),
    ],
)
def test_arguments_of_an_update_are_checked_before_it(
    call: Callable[[ws.WeightSender], object], message: str
) -> None:
    with connected() as sender:
        with pytest.raises(ws.ConfigError, match=message):
            call(sender)
        assert sender.send_weights().version == 1


def test_the_tensors_and_the_target_of_the_one_call_are_told_apart() -> None:
    with pytest.raises(ws.ConfigError, match=r"pairs, not 'http://127\.0\.0\.1:9'"):
        ws.send_weights("http://127.0.0.1:9", make())  # type: ignore[arg-type]  # that it is refused
    receiver = ws.WeightReceiver(make())
    model = make()
    try:
        assert ws.send_weights(model, receiver, dtype="float32").version == 1
        assert ws.send_weights(model.state_dict(), receiver).version == 2
    finally:
        ws.close()


def test_a_router_of_a_module_is_refused() -> None:
    lacking = r"a Linear is no receiver, without dispatch, handle_json, report, status; give weight"
    with pytest.raises(ws.ConfigError, match=lacking):
        weight_router(make(), token=None)  # type: ignore[arg-type]  # that it is refused


def test_a_router_of_half_a_receiver_names_what_is_not_there() -> None:
    half = SimpleNamespace(dispatch=print, report=print, status=print)
    with pytest.raises(ws.ConfigError, match=r"is no receiver, without handle_json; give weight"):
        weight_router(half, token=None)


def test_a_callable_state_dict_sends_tied_tensors_once() -> None:
    model: Any = nn.Module()
    target: Any = nn.Module()
    for module in (model, target):
        module.first, module.second = make(), make()
        module.second.weight = module.first.weight
    with closing(ws.WeightReceiver(target)) as receiver:
        with ws.connect(model.state_dict, to=receiver) as sender:
            assert sender.send_weights().tensors == 3
            with torch.no_grad():
                model.first.weight.fill_(3.0)
            sender.send_weights()
        assert torch.equal(target.second.weight, model.second.weight)


def test_a_mapping_that_makes_its_tensors_has_no_false_ties() -> None:
    class Lazy(Mapping[str, torch.Tensor]):
        """Each tensor is a new one, in memory that the one before has left."""

        def __getitem__(self, name: str) -> torch.Tensor:
            return torch.full((4096,), float(ord(name)))

        def __iter__(self) -> Iterator[str]:
            return iter("abcdefgh")

        def __len__(self) -> int:
            return 8

    given: dict[str, float] = {}

    def load(pairs: Any) -> None:
        given.update((name, tensor[0].item()) for name, tensor in pairs)

    for source in (Lazy(), Lazy):
        with (
            closing(ws.WeightReceiver(load)) as receiver,
            ws.connect(source, to=receiver) as sender,
        ):
            sender.send_weights()
        assert given == {name: float(ord(name)) for name in "abcdefgh"}


def test_tensors_that_are_untied_later_are_an_error() -> None:
    state = {"a": torch.ones(8), "b": torch.zeros(8)}
    state["b"] = state["a"]
    with (
        closing(ws.WeightReceiver(lambda pairs: [name for name, _ in pairs])) as receiver,
        ws.connect(lambda: state, to=receiver) as sender,
    ):
        sender.send_weights()
        state["b"] = torch.full((8,), 7.0)
        with pytest.raises(ws.ManifestMismatchError, match="other tensors are tied than at"):
            sender.send_weights()


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        (make().bfloat16(), "The 2 tensors differ in dtype only: dtype=torch.float32"),
        (
            {f"policy.{name}": tensor for name, tensor in make().state_dict().items()},
            "Your names begin with 'policy.': rename=lambda name: name.removeprefix('policy.')",
        ),
        (nn.Linear(5, 4), "Map names with rename=, cast with dtype=, or send a subset with"),
        (nn.Linear(5, 4).bfloat16(), "Map names with rename=, cast with dtype=, or send a subset"),
        ({"w": torch.ones(4, 4), "b": torch.ones(4)}, "Map names with rename=, cast with dtype="),
    ],
)
def test_a_mismatch_says_what_would_fit(source: Any, advice: str) -> None:
    with pytest.raises(ws.ManifestMismatchError) as caught:
        connected(source=source)
    assert advice in str(caught.value)


def test_names_of_the_receiver_with_a_prefix() -> None:
    receiver = ws.WeightReceiver(nn.Sequential(make()))
    with pytest.raises(ws.ManifestMismatchError, match=r"Its names begin with '0\.'") as caught:
        ws.connect(make(), to=receiver)
    assert "rename=lambda name: '0.' + name. 2 missing: 0.weight, 0.bias; " in str(caught.value)
    with ws.connect(make(), to=receiver, rename=lambda name: "0." + name) as sender:
        sender.send_weights()


def test_a_prefix_of_most_names_is_named_before_the_names() -> None:
    source = {f"policy.{name}": tensor for name, tensor in make().state_dict().items()}
    with pytest.raises(ws.ManifestMismatchError) as caught:
        connected(source={**source, "value.weight": torch.ones(3)})
    assert str(caught.value) == (
        "WeightReceiver.handle: the tensors offered do not fit the receiver. Your names begin with "
        "'policy.' (1 name differs otherwise): rename=lambda name: name.removeprefix('policy.'). "
        "2 missing: weight, bias; 3 unexpected: policy.weight, policy.bias, value.weight"
    )


def test_names_of_a_peft_model_lead_to_the_source_that_merges() -> None:
    config = peft.LoraConfig(r=2, target_modules=["0"])
    model = peft.get_peft_model(nn.Sequential(make()), config)
    with pytest.raises(ws.ManifestMismatchError, match=r"MergedSource\(model\) in place"):
        ws.connect(model, to=ws.WeightReceiver(nn.Sequential(make())))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"rename": lambda _: None},
            "rename makes None of 'weight'; it returns the name to send, or the same one",
        ),
        ({"token": b""}, "token is a text (str) or None, not bytes"),
        ({"token": b"secret"}, "token is a text (str) or None, not bytes"),
        (
            {"source": {"model": {"w": torch.ones(2)}}},
            "'model' of the source is no tensor but a dict; give the value of 'model' itself as "
            "the source",
        ),
        (
            {"source": lambda: [("w", torch.ones(2).numpy())]},
            "'w' of the source is no tensor but a numpy.ndarray; convert it with torch.as_tensor",
        ),
        (
            {"backend": "cuda_ipc"},
            "there is no backend 'cuda_ipc'; it is a path of backend='ipc', which chooses it",
        ),
        (
            {"backend": "nccl"},
            "there is no backend 'nccl'; NCCL needs one group of all processes, which a process "
            "that dies or joins breaks, and it refuses a trainer and a server on one GPU: use "
            "'auto', or 'nixl' for RDMA between hosts",
        ),
    ],
)
def test_what_users_try_first_is_explained(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ws.ConfigError) as caught:
        connected(**arguments)
    assert str(caught.value) == words


def test_a_sender_is_made_by_connect() -> None:
    with pytest.raises(ws.ConfigError, match=r"made by weightsync\.connect\(source, to=\.\.\.\)"):
        ws.WeightSender(make(), "http://127.0.0.1:9")  # type: ignore[arg-type]  # what users try


def test_both_sides_say_where_they_stand() -> None:
    receiver = ws.WeightReceiver(make())
    assert repr(receiver) == "<WeightReceiver at version 0, READY>"
    with ws.connect(make(), to=receiver) as sender:
        sender.send_weights()
        assert repr(sender) == (
            "<WeightSender at version 1, to WeightReceiver.handle by shared_memory>"
        )
        sender.release()
        assert repr(sender) == "<WeightSender at version 1, to WeightReceiver.handle, released>"
    assert repr(sender) == "<WeightSender at version 1, closed>"
    assert repr(receiver) == "<WeightReceiver at version 1, READY>"


def test_a_report_says_which_path_was_skipped() -> None:
    with connected() as sender:
        report = sender.send_weights()
    assert "skipped" not in str(report)
    object.__setattr__(report, "skipped_paths", {"cuda_ipc": "another GPU"})
    assert str(report).endswith("; skipped cuda_ipc: another GPU")
