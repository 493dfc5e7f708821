"""The source of an adapter, and what sender and server agree on: its place and its config.

An adapter is a receiver below its server's URL, at `adapters/NAME`. Its tensors have the names of a
PEFT checkpoint. Its config is one more tensor, the JSON of PEFT's `adapter_config.json` as bytes:
so it is fingerprinted, staged and committed together with the tensors that it belongs to.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn

from weightsync.arguments import Dtype
from weightsync.errors import ConfigError, ManifestMismatchError, shorten
from weightsync.integrations.adapter_paths import adapter_path, check_name
from weightsync.specs import Manifest, TensorSpec
from weightsync.transports.factory import Targets, TransportFactory
from weightsync.weights.copying.shards import Slice
from weightsync.weights.sources.base import ModuleSource
from weightsync.weights.sources.holdings import Holdings
from weightsync.weights.sources.wrapping import WrappingSource

CONFIG_NAME = "adapter_config.json"
"""The name of the tensor that holds the config: uint8[n], the bytes of a JSON object."""
MAX_CONFIG_NBYTES = 1 << 20

# With any other PEFT changes the base when training begins, so that it is not the server's.
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica")
_VARIANTS = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
)
"""Fields of PEFT's config with which the two matrices of a layer are not all that it computes."""


def config_spec(manifest: Manifest) -> TensorSpec:
    """Return the spec of the config's tensor. Raises ManifestMismatchError where there is none."""
    i = manifest.index.get(CONFIG_NAME)
    spec = None if i is None else manifest.specs[i]
    if spec is None or spec.dtype != "uint8" or len(spec.shape) != 1:
        raise ManifestMismatchError(
            f"an adapter comes with its config, in a tensor {CONFIG_NAME!r} of uint8[n], and this "
            f"has {spec or 'none'}; send weightsync.AdapterSource(model, name=...)",
            missing=[CONFIG_NAME],
        )
    if not 0 < spec.nbytes <= MAX_CONFIG_NBYTES:
        raise ManifestMismatchError(
            f"{CONFIG_NAME!r} has {spec.nbytes} bytes, and may have 1 to {MAX_CONFIG_NBYTES}",
            mismatched=[CONFIG_NAME],
        )
    return spec


def encode_config(config: Mapping[str, Any]) -> bytes:
    """Return a config as JSON, equal for equal configs."""
    return json.dumps(config, sort_keys=True, separators=(",", ":"), default=_plain).encode()


def decode_config(data: bytes) -> dict[str, Any]:
    """Return the config in JSON. Raises ConfigError where it is no JSON object."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{CONFIG_NAME} is no JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise ConfigError(f"{CONFIG_NAME} is a JSON {type(found).__name__}, not an object")
    return found


def unsupported(config: Mapping[str, Any]) -> list[str]:
    """Return what a config asks for that its tensors do not show, and that no server computes.

    A server that read the tensors alone would generate other tokens than the trainer.
    """
    kind = str(config.get("peft_type") or "LORA")
    init = config.get("init_lora_weights", True)
    found = [] if kind == "LORA" else [f"peft_type={kind!r}"]
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        found.append(f"init_lora_weights={init!r}, which changes the base model")
    return found + [f"{name}={config[name]!r:.60}" for name in _VARIANTS if config.get(name)]


def _plain(value: object) -> object:
    """Return plain data for what PEFT has in a config: sets, and dtypes or enums as text."""
    return sorted(value, key=str) if isinstance(value, set | frozenset) else str(value)


class AdapterSource(WrappingSource):
    """A WeightSource of one adapter of a PEFT model: its tensors and its config, nothing else.

    `connect(AdapterSource(model, name="policy"), to=url)` sends to the receiver of the adapter
    `policy` of the server at `url`, which goes on to serve the base model and other adapters.

    - `model`: a PeftModel, plain or under `fully_shard`, also wrapped by DDP or torch.compile.
    - `name`: the adapter's name on the server.
    - `adapter`: its name in `model`; by default `name` if the model has such an adapter, else the
      active one.
    - `dtype`: casts floating-point tensors.

    Tensors have the names of a PEFT checkpoint; `adapter_config.json` is one more. Modules that are
    trained whole, biases and DoRA's magnitudes are sent, too: a server that does not take them
    refuses them by name, before any byte moves.

    Raises ConfigError where `model` is no PeftModel or has no such adapter, for an adapter of
    another kind than LoRA, and for what changes the base model, or how it computes (PiSSA, OLoRA,
    CorDA, LoftQ, LoRA-GA, aLoRA, Arrow, BD-LoRA, KaSA, MonteCLoRA, QALoRA, replicated layers).
    Raises it in an update whose model has another config or another scale than at `connect`.
    MissingExtraError without peft.
    """

    only_moves = True

    def __init__(
        self,
        model: nn.Module,
        name: str,
        *,
        adapter: str | None = None,
        dtype: Dtype | None = None,
    ) -> None:
        # Loaded here, so that `import weightsync` and servers do not need peft.
        self._peft = import_module("weightsync.integrations.huggingface")
        self._model = self._peft.peft_model(model)
        self.name = check_name(name)
        self.adapter: str = self._peft.adapter_named(self._model, name, adapter)
        self._config = encode_config(self._peft.config_of(self._model, self.adapter))
        if refused := unsupported(decode_config(self._config)):
            raise ConfigError(
                f"the adapter {self.adapter!r} has {', '.join(refused)}: no server computes that "
                "from its tensors; send the merged model, with MergedSource"
            )
        self._check_scales()
        names = self._peft.checkpoint_names(self._model, self.adapter)
        source = ModuleSource(model, dtype=dtype, rename=names, wants=names.__contains__)
        super().__init__(source)
        inner = source.manifest
        own = source.made_of()[1]
        device = own[0].device if own else torch.device("cpu")
        self._tensor = torch.tensor(list(self._config), dtype=torch.uint8, device=device)
        spec = TensorSpec(CONFIG_NAME, "uint8", (len(self._config),))
        self._manifest = Manifest((*inner.specs, spec), inner.aliases)

    @property
    def receiver_path(self) -> str:
        """The path of the adapter's receiver below its server's URL."""
        return adapter_path(self.name)

    @property
    def manifest(self) -> Manifest:
        """The names of a PEFT checkpoint, and the config."""
        return self._manifest

    def convert(
        self, pairs: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the adapter's tensors, and its config."""
        yield from pairs
        yield CONFIG_NAME, self._tensor

    def stable_tensors(self) -> list[torch.Tensor] | None:
        """Return the model's own tensors and the config; None where they are cast or gathered.

        Raises ConfigError where the adapter's config or scale has changed.
        """
        self._check_config()
        stable = self.source.stable_tensors()
        return None if stable is None else [*stable, self._tensor]

    def hold(self, held: Holdings) -> Holdings:
        """Return the boxes of the adapter's tensors, and the config, which each rank has whole.

        Reading them raises ConfigError where the adapter's config or scale has changed.
        """

        def read() -> list[torch.Tensor]:
            self._check_config()
            return [*held.tensors(), self._tensor]

        return Holdings(
            [*held.names, CONFIG_NAME],
            [*held.boxes, Slice.whole_of(tuple(self._tensor.shape))],
            read,
            buffers=held.buffers,
        )

    def _check_config(self) -> None:
        """Raise ConfigError where the adapter's config or scale has changed since `connect`."""
        if encode_config(self._peft.config_of(self._model, self.adapter)) != self._config:
            raise ConfigError(
                f"the config of the adapter {self.adapter!r} is not that of connect() any more; "
                "connect again"
            )
        self._check_scales()

    def _check_scales(self) -> None:
        """Raise ConfigError for layers whose scale is not the one that the config tells."""
        if other := self._peft.other_scales(self._model, self.adapter):
            raise ConfigError(
                f"the adapter {self.adapter!r} has another scale than its config: {shorten(other)};"
                " a server knows the config alone. Undo set_scale() or scale_layer(), or send the "
                "merged model, with MergedSource"
            )


def unload_adapter(
    to: Targets,
    name: str,
    *,
    token: str | None = None,
    verify_tls: bool | str = True,
    timeout_s: float = 30.0,
) -> None:
    """Have servers forget an adapter that was sent, with all of its versions.

    Requests in flight end with it; later ones that name it are refused, until it is sent again.
    Does nothing where it was not sent. `to`, `token`, `verify_tls` and `timeout_s` are as in
    `connect`. Raises ConfigError for a target that cannot unload.
    """
    transports = TransportFactory(
        token, verify_tls=verify_tls, timeout_s=timeout_s, below=adapter_path(name)
    ).every(to)
    try:
        for transport in {id(transport.round): transport for transport in transports}.values():
            transport.unload(timeout_s)
    finally:
        for transport in transports:
            transport.close()
