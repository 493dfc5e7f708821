"""The two sizes of a model's exploration: quick and the same every time, or at length."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_UNHURRIED = list(HealthCheck)
SOAK_TIMEOUT_S = 3000


def quick(max_examples: int, steps: int) -> settings:
    """The size of every test run: some seconds, always the same steps."""
    return settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        derandomize=True,
        deadline=None,
        suppress_health_check=_UNHURRIED,
    )


def at_length(max_examples: int, steps: int) -> settings:
    """The size of -m soak: other steps in every run."""
    return settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=_UNHURRIED,
        print_blob=True,
    )
