"""Specs and manifests: what makes a tensor, what makes a model, and how two models differ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import ConfigError, ManifestMismatchError
from weightsync.specs import (
    DTYPE_NBYTES,
    MAX_DIMENSIONS,
    MAX_NAME_LENGTH,
    Manifest,
    TensorSpec,
    compare,
)


def spec(name: str, *shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, dtype, shape)


class TestTensorSpec:
    @pytest.mark.parametrize(("dtype", "itemsize"), DTYPE_NBYTES.items())
    def test_knows_its_bytes(self, dtype: str, itemsize: int) -> None:
        assert spec("w", 3, 5, dtype=dtype).nbytes == 15 * itemsize

    def test_scalars_and_empty_tensors(self) -> None:
        assert spec("s").nbytes == 4
        assert spec("e", 3, 0).nbytes == 0

    @pytest.mark.parametrize(
        ("name", "dtype", "shape", "says"),
        [
            ("", "float32", (1,), "1 to 1024 characters"),
            ("n" * (MAX_NAME_LENGTH + 1), "float32", (1,), "1 to 1024 characters"),
            ("w", "complex32", (1,), "unknown dtype 'complex32'"),
            ("w", "float32", (2, -1), "none negative"),
            ("w", "float32", (1,) * (MAX_DIMENSIONS + 1), "at most 16 sizes"),
            ("w", "float32", (1 << 40, 1 << 40), "too many for one tensor"),
        ],
    )
    def test_refuses_what_is_no_tensor(
        self, name: str, dtype: str, shape: tuple[int, ...], says: str
    ) -> None:
        with pytest.raises(ConfigError, match=says):
            TensorSpec(name, dtype, shape)


class TestManifest:
    def test_columns_must_be_equally_long(self) -> None:
        with pytest.raises(ConfigError, match="names has 2 entries, shapes has 1"):
            Manifest.from_columns(["a", "b"], ["bool", "bool"], [[1]])
        with pytest.raises(ConfigError, match="names has 1 entries, dtype_names has 0"):
            Manifest.from_columns(["a"], [], [[1]])

    def test_a_name_stands_once(self) -> None:
        with pytest.raises(ConfigError, match="appears twice in the manifest: 'b'"):
            Manifest((spec("a", 1), spec("b", 1), spec("b", 2)))

    def test_aliases_point_to_tensors(self) -> None:
        with pytest.raises(ConfigError, match="'c' points to 'x'"):
            Manifest((spec("a", 1),), {"c": "x"})
        with pytest.raises(ConfigError, match="'b' is both a tensor and an alias of 'a'"):
            Manifest((spec("a", 1), spec("b", 1)), {"b": "a"})

    def test_index_and_places_know_aliases(self) -> None:
        manifest = Manifest((spec("a", 2), spec("b", 3)), {"tied": "b"})
        assert manifest.index == {"a": 0, "b": 1, "tied": 1}
        assert manifest.places() == {"a": ("a",), "b": ("b", "tied")}
        assert manifest.nbytes == 20

    @pytest.mark.parametrize(
        "other",
        [
            Manifest((spec("b", 3), spec("a", 2)), {"t": "a"}),
            Manifest((spec("a", 2), spec("b", 3))),
            Manifest((spec("a", 2), spec("b", 3)), {"t": "b"}),
            Manifest((spec("a", 2), spec("c", 3)), {"t": "a"}),
            Manifest((spec("a", 2), spec("b", 1, 3)), {"t": "a"}),
            Manifest((spec("a", 2), spec("b", 3, dtype="int32")), {"t": "a"}),
        ],
    )
    def test_digest_names_order_names_dtypes_shapes_and_aliases(self, other: Manifest) -> None:
        manifest = Manifest((spec("a", 2), spec("b", 3)), {"t": "a"})
        same = Manifest((spec("a", 2), spec("b", 3)), {"t": "a"})
        assert manifest.digest == same.digest != other.digest

    def test_subset_keeps_order_and_aliases(self) -> None:
        manifest = Manifest((spec("a", 1), spec("b", 1), spec("c", 1)), {"t": "c"})
        assert manifest.subset(["t", "a"]) == Manifest((spec("a", 1), spec("c", 1)), {"t": "c"})
        with pytest.raises(ManifestMismatchError) as caught:
            manifest.subset(["a", "x", "y"])
        assert caught.value.unexpected == ("x", "y")


class TestCompare:
    def test_lists_everything_at_once(self) -> None:
        offered = Manifest((spec("a", 2), spec("b", 2), spec("new", 1)))
        wanted = Manifest((spec("a", 3), spec("b", 2, dtype="int32"), spec("gone", 1)))
        difference = compare(offered, wanted)
        assert difference.missing == ("gone",)
        assert difference.unexpected == ("new",)
        assert difference.mismatched == (
            "a: offered float32[2], wanted float32[3]",
            "b: offered float32[2], wanted int32[2]",
        )
        with pytest.raises(ManifestMismatchError) as caught:
            difference.check(partial=True)
        assert caught.value.missing == ()
        with pytest.raises(ManifestMismatchError, match="1 missing: gone"):
            difference.check(partial=False)

    def test_partial_allows_missing_ones_alone(self) -> None:
        offered, wanted = Manifest((spec("a", 2),)), Manifest((spec("a", 2), spec("b", 2)))
        compare(offered, wanted).check(partial=True)
        with pytest.raises(ManifestMismatchError):
            compare(wanted, offered).check(partial=True)

    def test_cast_forgives_dtypes_and_never_shapes(self) -> None:
        wanted = Manifest((spec("a", 2, dtype="bfloat16"),))
        compare(Manifest((spec("a", 2),)), wanted, cast=True).check(partial=False)
        assert compare(Manifest((spec("a", 2),)), wanted).mismatched
        assert compare(Manifest((spec("a", 3),)), wanted, cast=True).mismatched

    def test_a_tied_tensor_arrives_under_any_of_its_names(self) -> None:
        tied = Manifest((spec("embed", 2),), {"head": "embed"})
        compare(Manifest((spec("head", 2),)), tied).check(partial=False)
        compare(tied, Manifest((spec("embed", 2), spec("head", 2)))).check(partial=False)

    def test_one_tied_place_cannot_hold_two_tensors(self) -> None:
        tied = Manifest((spec("embed", 2),), {"head": "embed"})
        untied = Manifest((spec("embed", 2), spec("head", 2)))
        assert compare(untied, tied).mismatched == (
            "embed: offered as embed and head, wanted as one tied tensor",
        )

    @given(
        st.lists(st.text(min_size=1, max_size=3), unique=True, max_size=8),
        st.lists(st.text(min_size=1, max_size=3), unique=True, max_size=8),
    )
    def test_names_are_set_arithmetic(self, offered: list[str], wanted: list[str]) -> None:
        difference = compare(
            Manifest(tuple(spec(name, 1) for name in offered)),
            Manifest(tuple(spec(name, 1) for name in wanted)),
        )
        assert set(difference.missing) == set(wanted) - set(offered)
        assert set(difference.unexpected) == set(offered) - set(wanted)
        assert not difference.mismatched
