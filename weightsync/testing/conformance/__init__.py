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

from collections.abc import Iterator, Mapping
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
    """Mark the tests that an engine is known to fail, and note whose each one is."""
    for item in items:
        kind = getattr(item, "cls", None)
        if not (isinstance(item, pytest.Function) and kind and issubclass(kind, Contract)):
            continue
        unknown = [n for n in (*kind.broken, *kind.without) if not hasattr(kind, n)]
        if unknown:
            raise pytest.UsageError(f"{kind.__name__}: no test is called {', '.join(unknown)}")
        test = item.originalname
        if test in kind.without:
            item.add_marker(pytest.mark.skip(reason=kind.without[test]))
        elif test in kind.broken:
            item.add_marker(pytest.mark.xfail(reason=kind.broken[test], strict=True))
        item.user_properties.append(
            ("conformance", [kind.contract, kind.label or kind.engine, test])
        )


_WORDS = {
    "passed": "yes",
    "xfailed": "**no**",
    "skipped": "-",
    "failed": "**failed**",
    "error": "**error**",
}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a table per contract."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for outcome, word in _WORDS.items():  # the worst of a test's parameters is the last
        for contract, engine, test in _named(terminalreporter.stats.get(outcome, ())):
            found.setdefault(contract, {}).setdefault(engine, {})[test] = word
    for contract, engines in found.items():
        terminalreporter.section(f"conformance: {contract}")
        tests = dict.fromkeys(test for words in engines.values() for test in words)
        terminalreporter.line(f"| {contract} | {' | '.join(f'`{e}`' for e in engines)} |")
        terminalreporter.line(f"|---|{'---|' * len(engines)}")
        for test in tests:
            words = (of_engine.get(test, "") for of_engine in engines.values())
            said = test.removeprefix("test_").replace("_", " ")
            terminalreporter.line(f"| {said} | {' | '.join(words)} |")


def _named(reports: Any) -> Iterator[list[str]]:
    for report in reports:
        for name, value in getattr(report, "user_properties", ()):
            if name == "conformance":
                yield value
