"""Whether all ranks of a trainer send the same tensors."""

from __future__ import annotations

from weightsync.errors import ManifestMismatchError
from weightsync.sending.ranks import RankComm
from weightsync.specs import Manifest


def compare_manifests(manifest: Manifest, ranks: RankComm, *, advice: str) -> None:
    """Raise ManifestMismatchError on all ranks, naming the first tensor that differs. Collective.

    Every rank is compared with rank 0; `advice` ends the message.
    """
    digests = ranks.exchange(manifest.digest.encode())
    if len(set(digests)) == 1:
        return
    at = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    lines = [f"{spec.name} {spec}" for spec in manifest.specs]
    lines += [f"{alias} = {name}" for alias, name in sorted(manifest.aliases.items())]
    told = [body.decode().split("\n") for body in ranks.exchange("\n".join(lines).encode())]
    ours, theirs = told[0], told[at]
    shared = min(len(ours), len(theirs))
    i = next((i for i in range(shared) if ours[i] != theirs[i]), shared)
    first, other = ((side[i : i + 1] or [""])[0] or "nothing" for side in (ours, theirs))
    raise ManifestMismatchError(
        f"the trainer's ranks send different tensors: at position {i} rank {ranks.names[at]} has "
        f"{other}, rank {ranks.names[0]} has {first}; {advice}",
        mismatched=[f"{other} on rank {ranks.names[at]}, {first} on rank {ranks.names[0]}"],
    )
