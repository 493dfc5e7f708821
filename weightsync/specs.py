"""Names, dtypes and shapes of a model's weights: specs and manifests."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from weightsync.errors import INNER_TENSORS, ConfigError, ManifestMismatchError

DTYPE_NBYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "complex128": 16,
    "complex64": 8,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element, by the dtype's name without `torch.`."""

FLOATING: frozenset[str] = frozenset(name for name in DTYPE_NBYTES if "float" in name)
"""The names of the floating-point dtypes."""

DTYPE_ALIASES: Mapping[str, str] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "double": "float64",
}
"""Short names of floating-point dtypes, as users write them."""

MAX_VERSION = 1 << 62
MAX_NAME_LENGTH = 1024
MAX_DIMENSIONS = 16
MAX_TENSOR_NBYTES = 1 << 46


def described_name(name: str, description: str) -> str:
    """Return the name of the tensor that describes the inner tensors of the parameter `name`.

    It is a `uint8[0]`: all that it says is in its name. A receiver needs a tensor of that very
    name, so that it takes the inner tensors of no other class, and with no other attributes.
    """
    return f"{name}.<{description}>"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape of one tensor. Raises ConfigError if they are invalid."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= MAX_NAME_LENGTH:
            raise ConfigError(
                f"a tensor name must have 1 to {MAX_NAME_LENGTH} characters, "
                f"this has {len(self.name)}: {self.name[:40]!r}"
            )
        itemsize = DTYPE_NBYTES.get(self.dtype)
        if itemsize is None:
            raise ConfigError(
                f"{self.name}: unknown dtype {self.dtype!r}; known: {', '.join(DTYPE_NBYTES)}"
            )
        if len(self.shape) > MAX_DIMENSIONS or any(size < 0 for size in self.shape):
            raise ConfigError(
                f"{self.name}: a shape has at most {MAX_DIMENSIONS} sizes, none negative; "
                f"this is {self.shape[: MAX_DIMENSIONS + 1]}"
            )
        nbytes = math.prod(self.shape) * itemsize
        # A size of zero hides the other sizes, whose product would overflow inside torch.
        extent = math.prod(max(size, 1) for size in self.shape) * itemsize
        if extent > MAX_TENSOR_NBYTES:
            raise ConfigError(f"{self.name}: {extent} bytes are too many for one tensor")
        object.__setattr__(self, "nbytes", nbytes)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Manifest:
    """The ordered specs of a model; `aliases` maps a tied name to the spec that carries its bytes.

    Raises ConfigError for a repeated name, or an alias of an unknown name.
    """

    specs: tuple[TensorSpec, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = {spec.name for spec in self.specs}
        if len(names) != len(self.specs):
            raise ConfigError(f"a name appears twice in the manifest: {self._first_repeated()!r}")
        for alias, name in self.aliases.items():
            if alias in names:
                raise ConfigError(f"{alias!r} is both a tensor and an alias of {name!r}")
            if name not in names:
                raise ConfigError(f"alias {alias!r} points to {name!r}, which is no tensor here")

    @classmethod
    def from_columns(
        cls,
        names: Sequence[str],
        dtype_names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        aliases: Mapping[str, str] | None = None,
    ) -> Manifest:
        """Build a manifest from parallel lists. Raises ConfigError naming unequal lengths."""
        for label, column in (("dtype_names", dtype_names), ("shapes", shapes)):
            if len(column) != len(names):
                raise ConfigError(
                    f"names has {len(names)} entries, {label} has {len(column)}; "
                    "they must be equally long"
                )
        specs = tuple(
            TensorSpec(name, dtype, tuple(shape))
            for name, dtype, shape in zip(names, dtype_names, shapes, strict=True)
        )
        return cls(specs, dict(aliases or {}))

    @cached_property
    def descriptions(self) -> Mapping[str, str]:
        """The descriptions of inner tensors, by the name of their parameter; see described_name."""
        found = {}
        for name, i in self.index.items():
            spec = self.specs[i]
            if name.endswith(">") and (spec.dtype, spec.shape) == ("uint8", (0,)):
                parameter, begins, text = name[:-1].partition(".<")
                if begins:
                    found[parameter] = text
        return found

    @cached_property
    def inner(self) -> Mapping[str, tuple[str, ...]]:
        """The names of what is sent of each parameter with a description, that one included."""
        found: dict[str, list[str]] = {parameter: [] for parameter in self.descriptions}
        for name in self.index if found else ():
            parameter = owner_of(name, found)
            if parameter is not None:
                found[parameter].append(name)
        return {parameter: tuple(names) for parameter, names in found.items()}

    @cached_property
    def together(self) -> Mapping[str, str]:
        """For each tensor that is sent with another one alone, the name of that.

        Of a quantized weight its scale, of an inner tensor its description.
        """
        described = {
            name: described_name(parameter, self.descriptions[parameter])
            for parameter, names in self.inner.items()
            for name in names
        }
        return {**self.scales, **{name: of for name, of in described.items() if name != of}}

    @cached_property
    def scales(self) -> Mapping[str, str]:
        """The names of scales by those of quantized weights, as checkpoints have them."""
        quantized = (
            spec.name
            for spec in self.specs
            if spec.dtype in ("float8_e4m3fn", "int8") and spec.name.endswith(".weight")
        )
        return {
            weight: scale
            for weight in quantized
            for scale in (f"{weight}_scale", f"{weight}_scale_inv")
            if scale in self.index
        }

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors; tied tensors count once."""
        return sum(spec.nbytes for spec in self.specs)

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Position of the spec that carries each name, aliases included."""
        positions = {spec.name: i for i, spec in enumerate(self.specs)}
        positions.update({alias: positions[name] for alias, name in self.aliases.items()})
        return positions

    @cached_property
    def digest(self) -> str:
        """Hash of order, names, dtypes, shapes and aliases, as 32 hex digits."""
        state = hashlib.blake2b(digest_size=16)
        for spec in self.specs:
            state.update(f"{spec.name}\0{spec.dtype}\0{spec.shape}\0".encode())
        for alias in sorted(self.aliases):
            state.update(f"{alias}\0{self.aliases[alias]}\1".encode())
        return state.hexdigest()

    def places(self) -> dict[str, tuple[str, ...]]:
        """Return all names of each spec: `{name: (name, alias, …)}`."""
        grouped: dict[str, list[str]] = {spec.name: [spec.name] for spec in self.specs}
        for alias, name in self.aliases.items():
            grouped[name].append(alias)
        return {name: tuple(group) for name, group in grouped.items()}

    def subset(self, names: Iterable[str]) -> Manifest:
        """Return the manifest of `names` only, in the order of this manifest.

        Raises ManifestMismatchError for unknown names.
        """
        wanted = {self.index[name] for name in self._known(names)}
        specs = tuple(spec for i, spec in enumerate(self.specs) if i in wanted)
        kept = {spec.name for spec in specs}
        return Manifest(specs, {a: name for a, name in self.aliases.items() if name in kept})

    def _known(self, names: Iterable[str]) -> list[str]:
        listed = list(names)
        unknown = [name for name in listed if name not in self.index]
        if unknown:
            raise ManifestMismatchError(unexpected=unknown)
        return listed

    def _first_repeated(self) -> str:
        seen: set[str] = set()
        for spec in self.specs:
            if spec.name in seen:
                return spec.name
            seen.add(spec.name)
        return ""


@dataclass(frozen=True, slots=True)
class ManifestDifference:
    """Difference between the tensors that a sender offered and those that a receiver wanted.

    `cut` are tensors offered without others that the receiver needs together with them. `fitting`
    are the floating-point dtypes of the tensors that fit.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()
    fitting: frozenset[str] = frozenset()

    def check(self, *, partial: bool, more_follows: bool = False) -> None:
        """Raise ManifestMismatchError with all names at once; `partial` allows missing names.

        `more_follows`: this is one message of several, and may cut tensors that belong together.
        """
        missing = () if partial else self.missing
        mismatched = self.mismatched if more_follows else (*self.mismatched, *self.cut)
        if missing or self.unexpected or mismatched:
            raise ManifestMismatchError(
                missing=missing,
                unexpected=self.unexpected,
                mismatched=mismatched,
                fitting=self.fitting,
            )


def owner_of(name: str, parameters: Container[str]) -> str | None:
    """Return the parameter whose inner tensor, or description, a name is; None of others."""
    end = name.find(".<")
    end = name.rfind(".") if end < 0 else end
    while end > 0:
        if name[:end] in parameters:
            return name[:end]
        end = name.rfind(".", 0, end)
    return None


def changes(before: Manifest, now: Manifest) -> list[str]:
    """Return `name: float32[8, 4] before, bfloat16[8, 4] now` for each name that differs."""
    was = {spec.name: spec for spec in before.specs}
    is_now = {spec.name: spec for spec in now.specs}
    names = [name for name in {**was, **is_now} if was.get(name) != is_now.get(name)]
    found = [
        f"{name}: {was.get(name, 'nothing')} before, {is_now.get(name, 'nothing')} now"
        for name in names
    ]
    ties = {name for name, _ in set(before.aliases.items()) ^ set(now.aliases.items())}
    found += [
        f"{name}: {_tie(before, name)} before, {_tie(now, name)} now"
        for name in sorted(ties.difference(names))
    ]
    return found or ["their order"]


def _tie(manifest: Manifest, name: str) -> str:
    other = manifest.aliases.get(name)
    return f"tied to {other}" if other else "not tied"


def union(manifests: Sequence[Manifest], ties: Mapping[str, str]) -> Manifest:
    """Return the union of the manifests of several messages; a repeated name has its last spec.

    `ties` maps aliases to names. A name in `ties` becomes an alias if its target is present.
    """
    specs = {spec.name: spec for manifest in manifests for spec in manifest.specs}
    aliases = {alias: name for manifest in manifests for alias, name in manifest.aliases.items()}
    aliases.update((alias, name) for alias, name in ties.items() if alias in specs)
    left = {alias: name for alias, name in aliases.items() if name in specs and alias != name}
    return Manifest(tuple(spec for name, spec in specs.items() if name not in left), left)


def compare(
    offered: Manifest, wanted: Manifest, *, cast: bool = False, may_cast: Container[str] = ()
) -> ManifestDifference:
    """Compare two manifests, in time linear in the number of tensors.

    A wanted tensor is present if any of its tied names is offered. Two offered tensors that the
    receiver ties together are a mismatch, because one place cannot hold both. With `cast`, dtypes
    may differ; those of offered floating-point tensors that are in `may_cast`, in any case.
    """
    unexpected = [name for name in offered.index if name not in wanted.index]
    missing: list[str] = []
    mismatched: list[str] = []
    fitting: set[str] = set()
    places = wanted.places()
    for want in wanted.specs:
        sources = {offered.index[name] for name in places[want.name] if name in offered.index}
        if not sources:
            missing.append(want.name)
            continue
        if len(sources) > 1:
            tied = " and ".join(offered.specs[i].name for i in sorted(sources))
            mismatched.append(f"{want.name}: offered as {tied}, wanted as one tied tensor")
        have = offered.specs[min(sources)]
        casts = cast or (have.name in may_cast and {have.dtype, want.dtype} <= FLOATING)
        if have.shape != want.shape or (have.dtype != want.dtype and not casts):
            mismatched.append(f"{want.name}: offered {have}, wanted {want}")
        elif have.dtype in FLOATING:
            fitting.add(have.dtype)
    found = ManifestDifference(
        tuple(missing), tuple(unexpected), tuple(mismatched), fitting=frozenset(fitting)
    )
    return _with_inner(found, offered, wanted)


def refuse_inner(offered: Manifest) -> ManifestDifference:
    """Return the difference from a receiver that does not declare its tensors: no inner tensors.

    It would be given their bytes, and could not know what these mean.
    """
    lines = [
        f"{name}: offered {_inner_of(text)}, wanted tensors that need no description"
        for name, text in offered.descriptions.items()
    ]
    return ManifestDifference(mismatched=tuple(lines))


def _with_inner(
    found: ManifestDifference, offered: Manifest, wanted: Manifest
) -> ManifestDifference:
    """Return the difference with one entry for each parameter whose inner tensors do not fit."""
    if not offered.descriptions and not wanted.descriptions:
        return found
    unlike = {}
    for name in {**wanted.descriptions, **offered.descriptions}:
        have, want = offered.descriptions.get(name), wanted.descriptions.get(name)
        if have is not None and want is not None:
            if have != want:
                unlike[name] = _unlike(have, want)
        elif have is not None and name in wanted.index:
            spec = wanted.specs[wanted.index[name]]
            unlike[name] = f"offered {_inner_of(have)}, wanted {spec}"
        elif want is not None and name in offered.index:
            spec = offered.specs[offered.index[name]]
            unlike[name] = f"offered {spec}, wanted {_inner_of(want)}"

    def others(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(n for n in names if n not in unlike and owner_of(n, unlike) is None)

    named = {entry: entry.partition(": offered ")[0] for entry in found.mismatched}
    kept = set(others(named.values()))
    mismatched = [entry for entry, name in named.items() if name in kept]
    mismatched += [f"{name}: {line}" for name, line in unlike.items()]
    return ManifestDifference(
        others(found.missing),
        others(found.unexpected),
        tuple(mismatched),
        tuple(_cut(offered, wanted, unlike)),
        found.fitting,
    )


def _cut(offered: Manifest, wanted: Manifest, unlike: Container[str]) -> Iterator[str]:
    """Yield an entry for each parameter of which some inner tensors are offered, and not all."""
    places = wanted.places()
    for parameter, names in wanted.inner.items():
        specs = dict.fromkeys(wanted.specs[wanted.index[name]].name for name in names)
        lacks = [n for n in specs if not any(name in offered.index for name in places[n])]
        if parameter not in unlike and 0 < len(lacks) < len(specs):
            yield f"{parameter}: offered a part of its inner tensors, wanted with {lacks[0]}"


def _inner_of(description: str, entries: Iterable[str] = ()) -> str:
    listed = ", ".join(entries)
    cls = description.partition("; ")[0]
    return f"{INNER_TENSORS} of {cls}" + (f" with {listed}" if listed else "")


def _unlike(have: str, want: str) -> str:
    """Return what differs between two descriptions: the classes, or else the attributes."""
    offers, wants = have.split("; "), want.split("; ")
    if offers[0] != wants[0]:
        return f"offered {_inner_of(have)}, wanted {_inner_of(want)}"
    given = _inner_of(have, (entry for entry in offers if entry not in wants))
    asked = _inner_of(want, (entry for entry in wants if entry not in offers))
    return f"offered {given}, wanted {asked}"


def rounds(before: str, after: str) -> bool:
    """Whether a cast between these dtypes may round: floating-point ones, and not to a larger."""
    both = before in FLOATING and after in FLOATING
    return both and before != after and DTYPE_NBYTES[after] <= DTYPE_NBYTES[before]


def find_widened(offered: Manifest, wanted: Manifest) -> list[str]:
    """Return the names of offered tensors that the receiver holds in a dtype of more digits."""
    found: dict[str, None] = {}
    for name, i in offered.index.items():
        place = wanted.index.get(name)
        if place is not None and rounds(wanted.specs[place].dtype, offered.specs[i].dtype):
            found[offered.specs[i].name] = None
    return list(found)


def count_casts(manifest: Manifest, wanted: Manifest) -> dict[str, int]:
    """Return how many tensors have another dtype in `wanted`, as `{"float32 to bfloat16": 290}`."""
    places, counts = manifest.places(), Counter[str]()
    for spec in manifest.specs:
        at = next((wanted.index[name] for name in places[spec.name] if name in wanted.index), None)
        if at is not None and wanted.specs[at].dtype != spec.dtype:
            counts[f"{spec.dtype} to {wanted.specs[at].dtype}"] += 1
    return dict(counts)
