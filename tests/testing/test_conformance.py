"""The plug-in of conformance suites: which tests it runs, and the table that it prints."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

CONTRACT = """
    import pytest
    from weightsync.testing.conformance import Contract

    class Plain(Contract):
        contract = "the contract"
        result = 1

        @pytest.fixture
        def ready(self):
            assert self.result is not None

        def test_it_is_one(self, ready):
            assert self.result == 1

        @pytest.mark.parametrize("over", [0, 1])
        def test_it_is_more(self, ready, over):
            assert self.result > over
"""


def run(pytester: pytest.Pytester, engines: str) -> pytest.RunResult:
    pytester.makepyfile(plain=CONTRACT)
    pytester.makepyfile(f"from plain import Plain\n\n{engines}")
    pytester.syspathinsert()
    return pytester.runpytest("-p", "weightsync.testing.conformance")


def test_the_table_says_what_each_engine_keeps(pytester: pytest.Pytester) -> None:
    engines = """
class TestTwo(Plain):
    engine = "two"
    result = 2
    broken = {"test_it_is_one": "it is two"}

class TestOne(Plain):
    engine = "one"
    without = {"test_it_is_more": "there is one at most"}

class TestZero(Plain):
    engine = "zero"
    label = "nothing at all"
    result = 0

class TestLost(Plain):
    engine = "lost"
    result = None
"""
    ended = run(pytester, engines)
    ended.assert_outcomes(passed=3, xfailed=1, skipped=2, failed=3, errors=3)
    ended.stdout.fnmatch_lines(
        [
            "*conformance: the contract*",
            "| the contract | `two` | `one` | `nothing at all` | `lost` |",
            "|---|---|---|---|---|",
            "| it is one | [*][*]no[*][*] | yes | [*][*]failed[*][*] | [*][*]error[*][*] |",
            "| it is more | yes | - | [*][*]failed[*][*] | [*][*]error[*][*] |",
        ]
    )


def test_one_failed_parameter_is_what_the_table_says(pytester: pytest.Pytester) -> None:
    ended = run(pytester, 'class TestOne(Plain):\n    engine = "one"\n')
    ended.assert_outcomes(passed=2, failed=1)
    ended.stdout.fnmatch_lines(["| it is more | [*][*]failed[*][*] |"])


def test_an_engine_that_keeps_what_it_is_known_to_break_is_a_failure(
    pytester: pytest.Pytester,
) -> None:
    ended = run(
        pytester,
        """
class TestTwo(Plain):
    engine = "two"
    result = 2
    broken = {"test_it_is_more": "it was less once", "test_it_is_one": "it is two"}
""",
    )
    ended.assert_outcomes(failed=2, xfailed=1)


def test_a_fixture_that_fails_is_an_error_in_a_test_that_is_known_to_fail(
    pytester: pytest.Pytester,
) -> None:
    ended = run(
        pytester,
        """
class TestLost(Plain):
    engine = "lost"
    result = None
    broken = {"test_it_is_more": "it is nothing", "test_it_is_one": "as well"}
""",
    )
    ended.assert_outcomes(errors=3)


@pytest.mark.parametrize("name", ["test_no", "engine"])
def test_a_name_of_no_test_is_an_error(pytester: pytest.Pytester, name: str) -> None:
    ended = run(
        pytester, f'class TestOne(Plain):\n    engine = "one"\n    broken = {{"{name}": ""}}\n'
    )
    assert ended.ret == pytest.ExitCode.USAGE_ERROR
    ended.stderr.fnmatch_lines([f"*TestOne: no test is called {name}*"])


def test_other_tests_are_left_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it() -> None:\n    pass\n")
    ended = pytester.runpytest("-p", "weightsync.testing.conformance")
    ended.assert_outcomes(passed=1)
    assert "conformance:" not in ended.stdout.str()
