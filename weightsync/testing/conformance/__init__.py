"""Contracts of other projects' engine interfaces, as a pytest plug-in: of vLLM's and of verl's.

A test file subclasses a contract and names an engine:

    from weightsync.testing.conformance.verl import VerlEngineContract

    class TestMine(VerlEngineContract):
        engine = "mine"
        module = "my.package"

`pytest -p weightsync.testing.conformance` runs it, and prints at its end which engine keeps what as
a table in Markdown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

pytest.register_assert_rewrite(__name__)  # so that a failure shows the values


class Contract:
    """Tests that every engine of an interface has to pass. A subclass, called Test…, is collected.

    - `engine`: its name, by which it is registered with vLLM or verl.
    - `label`: what the table calls it, where one engine is tried in several ways.
    - `broken`: the tests that it is known to fail, each with the reason. They are run, and one that
      passes is an error.
    - `without`: the tests of something that it does not have, each with the reason. They are not
      run.
    """

    contract: ClassVar[str]
    engine: ClassVar[str]
    label: ClassVar[str] = ""
    broken: ClassVar[Mapping[str, str]] = {}
    without: ClassVar[Mapping[str, str]] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of what an engine does not have, and note whose each one is."""
    for number, item in enumerate(items):
        kind = getattr(item, "cls", None)
        if not (isinstance(item, pytest.Function) and kind and issubclass(kind, Contract)):
            continue
        named = (*kind.broken, *kind.without)
        unknown = [n for n in named if not (n.startswith("test_") and hasattr(kind, n))]
        if unknown:
            raise pytest.UsageError(f"{kind.__name__}: no test is called {', '.join(unknown)}")
        test = item.originalname
        if test in kind.without:
            item.add_marker(pytest.mark.skip(reason=kind.without[test]))
        item.user_properties.append(
            ("conformance", [number, kind.contract, kind.label or kind.engine, test])
        )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Expect the failure of a known test: of the test itself, not of its fixtures."""
    kind = getattr(item, "cls", None)
    if isinstance(item, pytest.Function) and kind and issubclass(kind, Contract):
        reason = kind.broken.get(item.originalname)
        if reason is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


_WORDS = (  # from the best to the worst
    ("passed", "yes"),
    ("xfailed", "**no**"),
    ("skipped", "-"),
    ("failed", "**failed**"),
    ("error", "**error**"),
)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a table per contract."""
    tried = sorted(
        (value, worse)
        for worse, (outcome, _) in enumerate(_WORDS)
        for report in terminalreporter.stats.get(outcome, ())
        for name, value in getattr(report, "user_properties", ())
        if name == "conformance"
    )
    contracts: dict[str, dict[str, dict[str, int]]] = {}
    for (_, contract, engine, test), outcome in tried:
        row = contracts.setdefault(contract, {}).setdefault(test, {})
        row[engine] = max(outcome, row.get(engine, 0))  # of a test with parameters, the worst
    for contract, rows in contracts.items():
        engines = list(dict.fromkeys(engine for row in rows.values() for engine in row))
        terminalreporter.section(f"conformance: {contract}")
        terminalreporter.line(f"| {contract} | {' | '.join(f'`{e}`' for e in engines)} |")
        terminalreporter.line(f"|---|{'---|' * len(engines)}")
        for test, row in rows.items():
            said = test.removeprefix("test_").replace("_", " ")
            words = (_WORDS[row[e]][1] if e in row else "" for e in engines)
            terminalreporter.line(f"| {said} | {' | '.join(words)} |")
