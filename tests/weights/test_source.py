"""Where tensors come from: names as the receiver knows them, and changes that are noticed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from weightsync.errors import ConfigError, ManifestMismatchError
from weightsync.specs import Manifest, TensorSpec
from weightsync.weights.sinks.module_sink import ModuleTensors, strip_wrappers
from weightsync.weights.sources.base import (
    IterableSource,
    ModuleSource,
    StateDictSource,
    WeightSource,
    as_source,
    checked,
)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("rope", torch.ones(2))


def names(source: WeightSource) -> list[str]:
    return [spec.name for spec in source.manifest.specs]


class TestModuleSource:
    def test_parameters_and_persistent_buffers_tied_ones_once(self) -> None:
        source = ModuleSource(Tied())
        assert source.manifest.aliases == {"head.weight": "embed.weight"}
        assert set(source.manifest.index) == set(Tied().state_dict())
        assert "scratch" not in source.manifest.index
        assert [name for name, _ in source.tensors()] == names(source)

    def test_tied_by_memory_alone(self) -> None:
        module = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
        module["b"].weight.data = module["a"].weight.data
        assert ModuleSource(module).manifest.aliases == {"b.weight": "a.weight"}

    def test_a_module_that_stands_in_two_places(self) -> None:
        shared = nn.Linear(2, 2)
        source = ModuleSource(nn.ModuleDict({"a": shared, "b": shared}))
        assert source.manifest.aliases == {"b.weight": "a.weight", "b.bias": "a.bias"}

    def test_empty_tensors_are_not_tied(self) -> None:
        module = nn.Module()
        module.a, module.b = (nn.Parameter(torch.zeros(0)) for _ in range(2))
        assert ModuleSource(module).manifest.aliases == {}

    def test_views_of_one_memory_in_other_shapes_are_not_tied(self) -> None:
        whole = torch.zeros(4)
        module = nn.Module()
        module.a, module.b = nn.Parameter(whole), nn.Parameter(whole.view(2, 2))
        assert names(ModuleSource(module)) == ["a", "b"]

    def test_wrappers_are_stripped(self) -> None:
        plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        wanted = [name for name, _ in plain.named_parameters()]
        wrapped = nn.Sequential(checkpoint_wrapper(plain[0]), plain[1])
        holder = nn.Module()
        holder.module = wrapped  # as DDP does
        compiled = torch.compile(holder, backend="eager")
        assert isinstance(compiled, nn.Module)
        assert names(ModuleSource(compiled)) == wanted

    def test_only_whole_prefixes_are_stripped(self) -> None:
        assert strip_wrappers("module._orig_mod.a._checkpoint_wrapped_module.w") == "a.w"
        assert strip_wrappers("my_module.w") == "my_module.w"
        assert strip_wrappers("model.submodule.w") == "model.submodule.w"

    def test_rename_by_function_and_by_table(self) -> None:
        module = nn.Linear(2, 2)
        assert names(ModuleSource(module, rename=str.upper)) == ["WEIGHT", "BIAS"]
        assert names(ModuleSource(module, rename={"bias": "b"})) == ["weight", "b"]
        with pytest.raises(ConfigError, match="appears twice"):
            ModuleSource(module, rename=lambda _: "same")

    def test_dtype_casts_floating_point_tensors_alone(self) -> None:
        source = ModuleSource(nn.BatchNorm1d(3), dtype=torch.bfloat16)
        dtypes = {spec.name: spec.dtype for spec in source.manifest.specs}
        assert dtypes["weight"] == dtypes["running_mean"] == "bfloat16"
        assert dtypes["num_batches_tracked"] == "int64"
        assert source.stable_tensors() is None
        assert ModuleSource(nn.Linear(2, 2), dtype=torch.float32).stable_tensors() is not None

    def test_a_replaced_parameter_is_the_one_that_is_sent(self) -> None:
        module = nn.Linear(2, 2)
        source = ModuleSource(module)
        module.weight = nn.Parameter(torch.full((2, 2), 5.0))
        stable = source.stable_tensors()
        assert stable is not None
        assert stable[0] is module.weight
        assert dict(source.tensors())["weight"].tolist() == [[5.0, 5.0], [5.0, 5.0]]

    def test_an_added_tensor_is_an_error_that_names_it(self) -> None:
        module = nn.Sequential(nn.Linear(2, 2))
        source = ModuleSource(module)
        module.append(nn.Linear(2, 2))
        with pytest.raises(ManifestMismatchError, match=r"1\.weight: .* 1\.bias: .* connect again"):
            source.stable_tensors()

    def test_a_removed_tensor_is_an_error_that_names_it(self) -> None:
        module = nn.Linear(2, 2)
        source = ModuleSource(module)
        module.bias = None  # type: ignore[assignment]  # how torch removes a parameter
        with pytest.raises(ManifestMismatchError, match="bias"):
            list(source.tensors())

    def test_another_shape_is_an_error_that_names_it(self) -> None:
        module = nn.Linear(2, 2)
        source = ModuleSource(module)
        module.weight = nn.Parameter(torch.zeros(2, 3))
        with pytest.raises(ManifestMismatchError, match="weight"):
            source.stable_tensors()

    def test_an_untied_tensor_is_an_error_that_names_it(self) -> None:
        module = Tied()
        source = ModuleSource(module)
        module.head.weight = nn.Parameter(torch.zeros(5, 3))
        with pytest.raises(ManifestMismatchError, match=r"head\.weight"):
            source.stable_tensors()


class TestModuleTensors:
    def test_nothing_changed(self) -> None:
        found = ModuleTensors(Tied())
        assert not found.refresh()

    def test_values_may_change(self) -> None:
        module = Tied()
        found = ModuleTensors(module)
        with torch.no_grad():
            module.embed.weight.add_(1)
        module.norm.weight.data = torch.zeros(3)
        assert not found.refresh()

    def test_a_replaced_child_is_noticed_once(self) -> None:
        module = nn.Sequential(nn.Linear(2, 2))
        found = ModuleTensors(module)
        module[0] = nn.Linear(2, 2)
        assert found.refresh()
        assert found.tensors[0] is module[0].weight
        assert not found.refresh()

    @pytest.mark.parametrize(
        "change",
        [
            lambda m: setattr(m[1], "bias", nn.Parameter(torch.ones(2))),
            lambda m: setattr(m[0], "bias", None),
            lambda m: m[0].__dict__.update(copy.deepcopy(m[0].__dict__)),
            lambda m: m[0].__dict__.update(_parameters={"weight": m[0].weight}),
            lambda m: m.__dict__.update(_modules={**m._modules, "3": nn.Linear(2, 2)}),
            lambda m: m.__setitem__(1, nn.Linear(2, 2)),
            lambda m: m._modules.update({"1": None}),
        ],
        ids=["set", "unset", "copied", "fewer", "more", "another child", "no child"],
    )
    def test_every_change_is_noticed(self, change: Callable[[nn.Module], object]) -> None:
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
        found = ModuleTensors(module)
        change(module)
        assert found.refresh()
        assert set(found.names) == set(module.state_dict())
        held = module.state_dict(keep_vars=True)
        assert all(held[n] is t for n, t in zip(found.names, found.tensors, strict=True))
        assert not found.refresh()

    def test_other_buffers_may_change(self) -> None:
        module = nn.BatchNorm1d(2)
        module.register_buffer("cache", torch.ones(1), persistent=False)
        found = ModuleTensors(module)
        module.cache = torch.ones(3)
        assert not found.refresh()

    def test_a_new_buffer_is_noticed(self) -> None:
        module = nn.Linear(2, 2)
        found = ModuleTensors(module)
        module.register_buffer("mask", torch.ones(2))
        assert found.refresh()
        assert found.names == ["weight", "bias", "mask"]


class TestOtherSources:
    def test_a_state_dict_is_read_anew(self) -> None:
        state = {"a": torch.zeros(2), "b": torch.zeros(3)}
        source = as_source(state, dtype=torch.float16, rename={"a": "x"})
        assert isinstance(source, StateDictSource)
        assert names(source) == ["x", "b"]
        assert source.manifest.specs[0].dtype == "float16"
        state["a"] = torch.ones(2)
        assert dict(source.tensors())["x"].tolist() == [1.0, 1.0]
        assert source.stable_tensors() is None

    def test_a_factory_is_called_for_every_update(self) -> None:
        calls: list[int] = []

        def factory() -> Iterator[tuple[str, torch.Tensor]]:
            calls.append(1)
            yield "a", torch.full((2,), float(len(calls)))

        source = as_source(factory)
        assert isinstance(source, IterableSource)
        assert [dict(source.tensors())["a"][0].item() for _ in range(2)] == [2.0, 3.0]

    def test_a_source_passes_through_and_names_its_own_tensors(self) -> None:
        source = ModuleSource(nn.Linear(2, 2))
        assert as_source(source) is source
        with pytest.raises(ConfigError, match="leave out dtype/rename"):
            as_source(source, dtype=torch.float16)

    @pytest.mark.parametrize("bad", [3, "model", iter([("a", torch.zeros(1))])])
    def test_what_runs_dry_or_is_none_is_refused(self, bad: object) -> None:
        with pytest.raises(ConfigError, match="cannot send from an object of"):
            as_source(bad)

    def test_a_dtype_that_no_weight_comes_in(self) -> None:
        with pytest.raises(ConfigError, match=r"a is of dtype torch\.bits8"):
            as_source({"a": torch.empty(2, dtype=torch.bits8)})


class TestChecked:
    manifest = Manifest((TensorSpec("a", "float32", (2,)), TensorSpec("b", "float32", (3,))))
    a, b = ("a", torch.zeros(2)), ("b", torch.zeros(3))

    def test_what_was_announced_passes(self) -> None:
        assert [name for name, _ in checked([self.a, self.b], self.manifest)] == ["a", "b"]

    def test_another_order(self) -> None:
        with pytest.raises(ManifestMismatchError, match=r"at position 0: it yields 'b' \[3\]"):
            list(checked([self.b, self.a], self.manifest))

    def test_another_shape(self) -> None:
        wrong = ("b", torch.zeros(4))
        with pytest.raises(ManifestMismatchError, match=r"the manifest has 'b' \[3\]") as caught:
            list(checked([self.a, wrong], self.manifest))
        assert caught.value.mismatched == ("b: float32[3], yielded 'b' [4]",)

    def test_another_dtype(self) -> None:
        wrong = ("b", torch.zeros(3, dtype=torch.int32))
        with pytest.raises(ManifestMismatchError, match=r"'b' int32\[3\].*'b' float32\[3\]"):
            list(checked([self.a, wrong], self.manifest))

    def test_what_is_only_to_be_cast_passes(self) -> None:
        master = ("b", torch.zeros(3, dtype=torch.float64))
        assert len(list(checked([self.a, master], self.manifest))) == 2

    def test_one_too_few(self) -> None:
        with pytest.raises(ManifestMismatchError, match="ended before 'a'") as caught:
            list(checked([], self.manifest))
        assert caught.value.missing == ("a", "b")

    def test_one_too_many(self) -> None:
        pairs = [self.a, self.b, ("c", torch.zeros(1))]
        with pytest.raises(ManifestMismatchError, match="'c' at position 2") as caught:
            list(checked(pairs, self.manifest))
        assert caught.value.unexpected == ("c",)
