"""Completions for TRL's GRPO trainer from a server, with their weight versions.

From `weightsync serve`, which says the version of each token, or from vLLM with our engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Self, TypeVar

import msgspec
import xxhash

from weightsync.errors import ConfigError, NotReadyError, ProtocolError, RemoteError
from weightsync.integrations.adapter_paths import adapter_path, check_name
from weightsync.integrations.engine_control import EngineClient
from weightsync.integrations.servers import read_target
from weightsync.integrations.vllm.server import SCHEME
from weightsync.transports.base import Transport
from weightsync.transports.factory import TransportFactory
from weightsync.transports.http import HttpTransport
from weightsync.wire.messages import Status, StatusRequest

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 600.0
_BRIEF_S = 60.0
_TRIES = 4

_MAX_PROMPTS = 256
_MAX_COMPLETIONS = 1024
_MAX_N = 256


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens `start` up to `stop` of a completion: weights of `version` made them."""

    version: int
    start: int
    stop: int


class ServedCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """One completion in the reply of `/generate`; see the documentation of that route."""

    prompt_index: int
    token_ids: list[int]
    logprobs: list[float] | None
    weight_versions: list[Span]
    prompt_version: int
    finish_reason: str


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    completions: list[ServedCompletion]


class ServedRollouts:
    """A `rollout_func` for TRL's GRPOTrainer: the server at `url` generates.

    `url` is that of `weightsync serve`, or of a vLLM server with our engine: `vllm+http://…`.

    Each rank sends its own prompts. Temperature, `top_p`, `max_completion_length` and the seed are
    the trainer's. With `weightsync serve`, the same seed, step and weights give the same
    completions; vLLM draws by its own seed. Reward functions get
    `weight_versions` and `prompt_version` of each completion: the versions that made its tokens,
    and the version that read its prompt. `made_by` counts tokens by version. vLLM does not say the
    version of a token: an update between question and answer leaves two versions for all of its
    tokens, which `made_by` then counts under None.

    `adapter` is the name of an adapter that a trainer sends to that server: it generates, and the
    versions are its own. Of vLLM the newest version is requested by its number, so that all tokens
    of a reply are of that one. NotReadyError where none was sent yet.

    `token` and `verify_tls` are HttpTransport's. `timeout_s` limits the wait for one reply, which
    has up to 1024 completions. Calls raise ConfigError for settings of the trainer that the server
    does not support (tools, images, `top_k`, …), NotReadyError where the server ended completions
    early, ProtocolError for an invalid reply, TransportError, AuthError, and the server's errors.
    """

    __name__ = "ServedRollouts"  # TRL's messages contain it

    def __init__(
        self,
        url: str,
        *,
        adapter: str | None = None,
        token: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        verify_tls: bool | str = True,
    ) -> None:
        self.made_by: Counter[int | None] = Counter()
        plain, engine = read_target(url)
        kind = _VllmClient if engine == "vllm" else _GenerateClient
        self._client: _GenerateClient | _VllmClient = kind(
            plain,
            token,
            verify_tls=verify_tls,
            adapter=None if adapter is None else check_name(adapter),
        )
        self._timeout_s = timeout_s
        self._calls = 0

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Return one completion for each prompt, in order. Called by the trainer on every rank.

        The trainer repeats a prompt for each completion of it. `logprobs` are those of the sampled
        tokens; None where temperature or `top_p` change the model's probabilities.
        """
        sampling = _sampling(trainer)
        prompt_ids = _tokenize(prompts, trainer)
        seed = self._seed(trainer)
        completions = self._generate(prompt_ids, sampling, seed)
        drawn_as_scored = sampling["temperature"] == 1 and sampling["top_p"] == 1
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [c.token_ids for c in completions],
            "logprobs": [c.logprobs for c in completions] if drawn_as_scored else None,
            "weight_versions": [[span.version for span in c.weight_versions] for c in completions],
            "prompt_version": [c.prompt_version for c in completions],
        }

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _generate(
        self, prompts: list[list[int]], sampling: dict[str, Any], seed: int
    ) -> list[ServedCompletion]:
        completions: list[ServedCompletion] = []
        for number, batch in enumerate(_batches(_groups(prompts))):
            chosen = [prompts[group[0]] for group in batch]
            fields = {**sampling, "prompts": chosen, "n": len(batch[0])}
            fields["seed"] = (seed + number) % 2**63
            completions += self._client.generate(fields, timeout_s=self._timeout_s)
        for completion in completions:
            spans = completion.weight_versions
            if len(spans) == 2 and spans[0].stop > spans[1].start:
                self.made_by[None] += len(completion.token_ids)
                continue
            for span in spans:
                self.made_by[span.version] += span.stop - span.start
        return completions

    def _seed(self, trainer: Any) -> int:
        where = (trainer.args.seed, trainer.accelerator.process_index, trainer.state.global_step)
        self._calls += 1
        return xxhash.xxh3_64_intdigest(repr((*where, self._calls)).encode()) >> 1


class _GenerateClient(HttpTransport):
    """Client of `POST /generate`, with the connections, errors and token of HttpTransport."""

    def __init__(
        self, url: str, token: str | None = None, *, verify_tls: bool | str, adapter: str | None
    ) -> None:
        super().__init__(url, token, verify_tls=verify_tls)
        self._named = {} if adapter is None else {"model": adapter}

    def generate(self, fields: dict[str, Any], *, timeout_s: float) -> list[ServedCompletion]:
        """Return the completions, in the order of the prompts. Raises as ServedRollouts does."""
        status, body = self._exchange(
            "generate", msgspec.json.encode(fields | self._named), timeout_s
        )
        if status == 404:
            raise ConfigError(
                f"{self.target} has no /generate; give the URL of `weightsync serve`, or "
                f"vllm+{self.target} where it is a vLLM server"
            )
        if status != 200:
            raise self._error("generate", status, body)
        try:
            completions = msgspec.json.decode(body, type=_Answer).completions
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise ProtocolError(
                f"{self.target} answered /generate with something else than completions ({exc}); "
                "is this `weightsync serve` of the same version?"
            ) from exc
        _check(self.target, completions, len(fields["prompts"]), fields["n"])
        return completions


def _check(target: str, completions: Sequence[ServedCompletion], num_prompts: int, n: int) -> None:
    if [c.prompt_index for c in completions] != [i for i in range(num_prompts) for _ in range(n)]:
        raise ProtocolError(
            f"{target} answered with {len(completions)} completions, {num_prompts} x {n} "
            "were asked for; is this a server of the same version?"
        )
    cut = sum(c.finish_reason == "abort" or not c.token_ids for c in completions)
    if cut:
        raise NotReadyError(
            f"{target} ended {cut} of {len(completions)} completions early: it was paused "
            "with mode=abort, or is ending; see its log, POST /resume, and train on"
        )


class _Logprobs(msgspec.Struct, frozen=True, kw_only=True):
    token_logprobs: list[float]


class _Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: str | None


class _Choices(msgspec.Struct, frozen=True, kw_only=True):
    choices: list[_Choice]


class _Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str


class _Models(msgspec.Struct, frozen=True, kw_only=True):
    data: list[_Model]


class _VllmClient(EngineClient):
    """Client of vLLM's `POST /v1/completions`, which asks our engine for the version."""

    def __init__(
        self, url: str, token: str | None = None, *, verify_tls: bool | str, adapter: str | None
    ) -> None:
        super().__init__(url, token, verify_tls=verify_tls)
        self._model = ""
        self._adapter = adapter
        below = "" if adapter is None else adapter_path(adapter)
        self._workers = TransportFactory(token, verify_tls=verify_tls, below=below)
        self._worker: Transport | None = None

    def generate(self, fields: dict[str, Any], *, timeout_s: float) -> list[ServedCompletion]:
        """Return the completions, in the order of the prompts. Raises as ServedRollouts does."""
        asked = {
            "prompt": fields["prompts"],
            "n": fields["n"],
            "max_tokens": fields["max_new_tokens"],
            "temperature": fields["temperature"],
            "top_p": fields["top_p"],
            # No seed: on a CPU, vLLM 0.32 ends where a seeded prompt is read in several pieces.
            "logprobs": 0,
            "return_token_ids": True,
            # Given, because vLLM takes others from the model's generation_config.json.
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        if self._adapter is None:
            before = self._version()
            answer = self._complete(self._base(), asked, timeout_s)
            after = self._version()
        else:
            before, answer = self._by_version(self._adapter, asked, timeout_s)
            after = before
        completions = [
            ServedCompletion(
                prompt_index=choice.index // fields["n"],
                token_ids=choice.token_ids,
                logprobs=choice.logprobs.token_logprobs,
                weight_versions=[
                    Span(version=version, start=0, stop=len(choice.token_ids))
                    for version in dict.fromkeys((before, after))
                ],
                prompt_version=before,
                finish_reason=choice.finish_reason or "",
            )
            for choice in sorted(answer.choices, key=lambda choice: choice.index)
        ]
        _check(self.target, completions, len(fields["prompts"]), fields["n"])
        return completions

    def _base(self) -> str:
        """Return the name of the base model, which the server lists first."""
        if not self._model:
            found = self._ask("v1/models", None, _Models, _BRIEF_S).data
            self._model = found[0].id if found else ""
        return self._model

    def _complete(self, model: str, asked: dict[str, Any], timeout_s: float) -> _Choices:
        return self._ask("v1/completions", {"model": model, **asked}, _Choices, timeout_s)

    def _by_version(
        self, adapter: str, asked: dict[str, Any], timeout_s: float
    ) -> tuple[int, _Choices]:
        """Return the newest version of an adapter, and the answer of that version.

        By its number, since the samples of a request by name may begin with different versions.
        """
        for left in reversed(range(_TRIES)):
            version = self._version()
            if not version:
                raise NotReadyError(
                    f"{self.target} holds no version of the adapter {adapter!r} yet; send it "
                    f"first: WeightSyncCallback(to, adapter={adapter!r}) does, before the first "
                    "step"
                )
            try:
                return version, self._complete(f"{adapter}@{version}", asked, timeout_s)
            except RemoteError as exc:
                # Updates meanwhile may have dropped the version.
                gone = exc.remote_type == "HTTP 404" and self._version() != version
                if not gone or not left:
                    raise
        raise AssertionError("the last try returns or raises")

    def close(self) -> None:
        """Close all connections."""
        super().close()
        if self._worker is not None:
            self._worker.close()

    def _version(self) -> int:
        if self._worker is None:
            self._worker, *others = self._workers.every(SCHEME + self.target)
            for other in others:
                other.close()
        status = self._worker.call(StatusRequest(), timeout_s=_BRIEF_S)
        if not isinstance(status, Status):
            raise ProtocolError(f"{self.target} does not say its version")
        return status.version

    def _ask(self, path: str, fields: Any, kind: type[T], timeout_s: float) -> T:
        body = None if fields is None else msgspec.json.encode(fields)
        status, answer = self._exchange(path, body, timeout_s)
        if status != 200:
            raise self._error(path, status, answer)
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise ProtocolError(
                f"{self.target} answered /{path} with something else than vLLM does ({exc})"
            ) from exc


def _sampling(trainer: Any) -> dict[str, Any]:
    """Return the trainer's settings as fields of `/generate`. Raises ConfigError for others."""
    unusable = [
        f"{name}={value!r}"
        for name, value, unset in (
            ("use_vllm", trainer.use_vllm, (False,)),
            ("top_k", trainer.top_k, (None, 0, -1)),
            ("min_p", trainer.min_p, (None, 0.0)),
            ("repetition_penalty", trainer.repetition_penalty, (None, 1.0)),
            ("generation_kwargs", trainer.args.generation_kwargs, (None, {})),
            ("tools", list(trainer.tools or ()), ([],)),
        )
        if value not in unset
    ]
    if trainer.max_completion_length is None:
        unusable.append("max_completion_length=None")
    if unusable:
        raise ConfigError(
            f"completions from a server of weightsync cannot follow {', '.join(unusable)} of the "
            "trainer; leave out what is named (and give max_completion_length a number)"
        )
    return {
        "max_new_tokens": trainer.max_completion_length,
        "temperature": float(trainer.temperature),
        "top_p": float(trainer.top_p),
        "logprobs": True,
    }


def _tokenize(prompts: list[Any], trainer: Any) -> list[list[int]]:
    """Return the token ids of the prompts, as the trainer's own generation makes them."""
    if isinstance(prompts[0], str):
        found = trainer.processing_class(text=prompts)["input_ids"]
    else:
        if any(not isinstance(message["content"], str) for chat in prompts for message in chat):
            raise ConfigError(
                "a prompt has parts that are no text; completions from a server of weightsync are "
                "for text alone: write a rollout_func that posts to /v1/chat/completions"
            )
        found = trainer.processing_class.apply_chat_template(
            conversation=prompts,
            chat_template=trainer.chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **trainer.chat_template_kwargs,
        )["input_ids"]
    return [list(ids) for ids in found]


def _groups(prompts: list[list[int]]) -> Iterator[range]:
    """Yield the positions of equal prompts in a row, no more than one prompt's may be."""
    first = 0
    for _, same in groupby(prompts):
        end = first + len(list(same))
        yield from (range(at, min(at + _MAX_N, end)) for at in range(first, end, _MAX_N))
        first = end


def _batches(groups: Iterator[range]) -> Iterator[list[range]]:
    """Yield groups for one request each, in order: of one size, and within the server's limits."""
    for n, same in groupby(groups, key=len):
        size = max(1, min(_MAX_PROMPTS, _MAX_COMPLETIONS // n))
        found = list(same)
        yield from (found[at : at + size] for at in range(0, len(found), size))
