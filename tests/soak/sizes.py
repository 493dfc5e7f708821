"""The two sizes of a soak: seconds in every run of the tests, and the whole under -m soak."""

from __future__ import annotations

import pytest

WHOLE_TIMEOUT_S = 3600
SOAK = [pytest.mark.soak, pytest.mark.timeout(WHOLE_TIMEOUT_S)]
"""The marks of the whole size."""


def sizes(*, quick: object, whole: object) -> pytest.MarkDecorator:
    """Parametrise a test by its `size`."""
    return pytest.mark.parametrize(
        "size",
        [pytest.param(quick, id="quick"), pytest.param(whole, id="whole", marks=SOAK)],
    )
