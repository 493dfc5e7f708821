"""Objects of `weightsync.integrations` that lower layers use by their role.

`weightsync/__init__.py` sets where each one is. It is imported at its first use, so that no layer
below knows another system by name, and `import weightsync` loads none of it.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, Literal

Role = Literal["servers", "source", "update"]
"""The roles:

- `servers(token, verify_tls=, timeout_s=)`: makes the transports for the URLs of servers of any
  kind; the UrlTransports of weightsync.transports.factory.
- `source(given, dtype=, rename=)`: a WeightSource of another system's object, or None.
- `update`: the ForeignUpdate that receivers accept.
"""

_places: dict[Role, str] = {}


def provide(role: Role, place: str) -> None:
    """Set where the object of a role is: "package.module:name"."""
    _places[role] = place


@cache
def provided(role: Role) -> Any:
    """Return the object of a role, imported at the first call."""
    module, _, name = _places[role].partition(":")
    return getattr(import_module(module), name)
