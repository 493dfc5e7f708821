"""Every import in weightsync/ goes down a layer, never beside or up."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import weightsync

PACKAGE = "weightsync"
ROOT = Path(__file__).resolve().parent.parent / PACKAGE


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Top-level modules of one height; `mutual` ones may import each other, without a cycle."""

    units: frozenset[str]
    mutual: bool = False
    stdlib_only: bool = False
    banned: frozenset[str] = frozenset()


def layer(*units: str, mutual: bool = False, stdlib_only: bool = False, ban: str = "") -> Layer:
    return Layer(
        units=frozenset(units),
        mutual=mutual,
        stdlib_only=stdlib_only,
        banned=frozenset(ban.split()),
    )


# The empty name is weightsync/__init__.py: it stands on L4, and L5 and above may import it.
LAYERS = (
    layer("errors", "specs", "report", mutual=True, stdlib_only=True),
    layer("runtime"),
    layer("wire", ban="torch"),
    layer("tensors", "look", mutual=True),
    layer("shm", "arguments"),
    layer("cuda"),
    layer("profiling", "weights"),
    layer("backends", "transports"),
    layer("observe"),
    layer("ranks"),
    layer("update"),
    layer("sender", "set_sender", "receiver", mutual=True),
    layer(""),
    layer("server", "ray"),
    layer("queues"),
    layer("integrations"),
    layer("serve"),
    layer("testing"),
    layer("cli", "__main__", mutual=True),
)
ROOMS = ("copying", "inner_tensors", "tensor_kinds", "lines", "sinks", "sources", "deltas")
"""Of weightsync/weights/: each imports from itself and from those before it."""
OUTSIDE = frozenset({"queues", "serve"})
"""Packages that carry no weights: nothing but the command line imports them from elsewhere, and
they import what any program may: the names of docs/api, and those of `weightsync.__all__`."""
HEIGHT = {unit: height for height, row in enumerate(LAYERS) for unit in row.units}


def unit_of(module: str) -> str:
    """Return the second part of `weightsync.unit.rest`, or "" for the package itself."""
    return module.partition(".")[2].partition(".")[0]


def is_ours(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] == PACKAGE


def absolute(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    """Return the full name of what `from … import` in `module` reads from."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    kept = len(parts) - node.level + is_package
    return ".".join([*parts[:kept], *([node.module] if node.module else [])])


def from_targets(node: ast.ImportFrom, module: str, *, is_package: bool) -> Iterator[str]:
    base = absolute(node, module, is_package=is_package)
    for alias in node.names:
        # `from weightsync import errors` reads a module, `from weightsync import connect` the top.
        name = f"{base}.{alias.name}"
        yield name if is_ours(base) and path_of(name) is not None else base


def named_module(node: ast.expr) -> str | None:
    """Return the module that a text names: in `import_module("…")`, or any of ours in any text."""
    if isinstance(node, ast.Call) and node.args:
        called = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
        first = getattr(node.args[0], "value", None)
        is_import = called in {"import_module", "__import__"}
        return first if is_import and isinstance(first, str) else None
    text = node.value if isinstance(node, ast.Constant) else None
    if not isinstance(text, str) or not re.fullmatch(rf"{PACKAGE}(\.\w+)+(:\w+)?", text):
        return None
    module = text.partition(":")[0]
    return module if path_of(module) is not None else None


def is_type_check(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"


def imports(source: str, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield line and full name of every import, inside functions and type checks too.

    The top's own type checks are left out: it offers names of the layers above it, lazily.
    """
    tree = ast.parse(source)
    if module == PACKAGE:
        tree.body = [node for node in tree.body if not is_type_check(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            targets = from_targets(node, module, is_package=is_package)
            yield from ((node.lineno, target) for target in targets)
        # The top says where the layers above it are: they are imported at their first use.
        elif module != PACKAGE and isinstance(node, ast.expr) and (named := named_module(node)):
            yield node.lineno, named


def fault(unit: str, target: str) -> str | None:
    """Return what is wrong when a module of `unit` imports `target`, None when nothing is."""
    own = LAYERS[HEIGHT[unit]]
    if not is_ours(target):
        return foreign_fault(own, target.split(".", maxsplit=1)[0])
    other = unit_of(target)
    if other == unit:
        return None
    if other not in HEIGHT:
        return "is in no layer"
    if HEIGHT[other] > HEIGHT[unit]:
        return "is above it"
    if HEIGHT[other] == HEIGHT[unit] and not own.mutual:
        return "is beside it"
    return None


def foreign_fault(own: Layer, top: str) -> str | None:
    if own.stdlib_only and top not in sys.stdlib_module_names:
        return "is not in the standard library"
    return "is banned there" if top in own.banned else None


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Return one line per import of `module` that breaks the layers."""
    unit = unit_of(module)
    if unit not in HEIGHT:
        return [f"{module} is in no layer: give it a place in LAYERS"]
    return [
        f"{module}:{line} imports {target}, which {reason}"
        for line, target in dict.fromkeys(imports(source, module, is_package=is_package))
        if (reason := fault(unit, target)) is not None
    ]


def cycle(sources: Mapping[str, str]) -> list[str]:
    """Return the top-level modules that import each other in a ring, or nothing."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        unit = unit_of(module)
        found = {unit_of(t) for _, t in imports(source, module, is_package=False) if is_ours(t)}
        graph.setdefault(unit, set()).update(found - {unit})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as exc:
        return list(exc.args[1])
    return []


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_only_from_below(path: Path) -> None:
    is_package = path.name == "__init__.py"
    assert violations(path.read_text(), module_name(path), is_package=is_package) == []


def rooms_above(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Return the imports of a module of weightsync.weights from rooms after its own."""
    prefix = f"{PACKAGE}.weights."
    own = ROOMS.index(module.removeprefix(prefix).partition(".")[0])
    return [
        f"{module}:{line} imports {target}"
        for line, target in imports(source, module, is_package=is_package)
        if target.startswith(prefix)
        and ROOMS.index(target.removeprefix(prefix).partition(".")[0]) > own
    ]


IN_ROOMS = [path for path in FILES if path.parent.parent.name == "weights"]
IN_ROOMS += [ROOT / "weights/inner_tensors.py", ROOT / "weights/tensor_kinds.py"]


@pytest.mark.parametrize("path", IN_ROOMS, ids=module_name)
def test_rooms_of_weights_import_from_those_before(path: Path) -> None:
    is_package = path.name == "__init__.py"
    assert rooms_above(path.read_text(), module_name(path), is_package=is_package) == []


def test_an_import_from_a_later_room_is_found() -> None:
    source = "def f():\n    from weightsync.weights.sinks.base import X\n"
    found = rooms_above(source, "weightsync.weights.lines.memory")
    assert found == ["weightsync.weights.lines.memory:2 imports weightsync.weights.sinks.base"]
    assert rooms_above(source, "weightsync.weights.sources.base") == []
    source = "from weightsync.weights import copying, sinks\n"
    found = rooms_above(source, "weightsync.weights.lines.memory")
    assert found == ["weightsync.weights.lines.memory:1 imports weightsync.weights.sinks"]


BY_NAME = re.compile(
    rf"{PACKAGE}\.backends\.(?!(base|registry)$)|{PACKAGE}\.transports\.(?!(base|calls|polled)$)"
    r"|(http|urllib\.request|requests|fastapi|uvicorn|ray)(\.|$)"
)
"""Backends, and kinds of transports: an update knows the contracts of both alone."""


def known_by_name(source: str, module: str) -> list[str]:
    """Return one line for each import of a backend, or of what one kind of transport needs."""
    found = imports(source, module, is_package=False)
    return [f"{module}:{line} imports {name}" for line, name in found if BY_NAME.match(name)]


CORE = [path for path in FILES if path.parent.name in {"ranks", "update"}]


@pytest.mark.parametrize("path", CORE, ids=module_name)
def test_an_update_knows_no_backend_and_no_kind_of_transport(path: Path) -> None:
    assert known_by_name(path.read_text(), module_name(path)) == []


@pytest.mark.parametrize(
    "name",
    [
        "weightsync.backends.ring",
        "weightsync.backends.ipc",
        "weightsync.backends.ipc.sender",
        "weightsync.transports.http",
        "http.client",
        "urllib.request",
        "ray",
    ],
)
def test_a_planted_backend_or_kind_of_transport_is_found(name: str) -> None:
    found = known_by_name(f"import {name}", "weightsync.update.paths")
    assert found == [f"weightsync.update.paths:1 imports {name}"]
    package, _, last = name.rpartition(".")
    if package.startswith(PACKAGE):
        assert known_by_name(f"from {package} import {last}", "weightsync.update.paths") == found
    assert known_by_name("import weightsync.backends.base", "weightsync.update.paths") == []


FOREIGN = re.compile(
    r"vllm|sglang|openai|hugging_?face|peft|megatron|openrlhf|(?<![a-z])(verl|trl)(?![a-z])"
    r"|ipc_handles|handlesupdate|held_names|describedsource"
)
"""Names of other systems, and of the fields of their messages and the methods of their objects."""
KNOWS_OTHERS = {
    "": "says where integrations are, and has public names of theirs",
    "errors": "advises users of PEFT on what to give to connect()",
}


def foreign_names(source: str, module: str) -> list[str]:
    """Return one line for each name or text in code that is another system's; prose may have it."""
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        texts = [getattr(node, field, None) for field in ("id", "attr", "name", "arg", "module")]
        if isinstance(node, ast.Constant) and id(node) not in prose:
            texts.append(node.value)
        found += [
            f"{module}:{getattr(node, 'lineno', 0)} has {text:.60}"
            for text in texts
            if isinstance(text, str) and FOREIGN.search(text.lower())
        ]
    return found


BELOW_INTEGRATIONS = [
    path
    for path in FILES
    if HEIGHT[unit_of(module_name(path))] < HEIGHT["integrations"]
    and unit_of(module_name(path)) not in KNOWS_OTHERS
]


@pytest.mark.parametrize("path", BELOW_INTEGRATIONS, ids=module_name)
def test_no_other_system_is_known_below_integrations(path: Path) -> None:
    assert foreign_names(path.read_text(), module_name(path)) == []


@pytest.mark.parametrize("unit", KNOWS_OTHERS)
def test_what_may_know_other_systems_does(unit: str) -> None:
    (path,) = (path for path in FILES if module_name(path) == f"{PACKAGE}.{unit}".rstrip("."))
    assert foreign_names(path.read_text(), module_name(path)) != []


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("from vllm.config import VllmConfig", "vllm.config"),
        ("import sglang", "sglang"),
        ("class OpenaiAnswer: ...", "OpenaiAnswer"),
        ("def as_source(verl_worker): ...", "verl_worker"),
        ("described.held_names()", "held_names"),
        ("made = Made(ipc_handles=[])", "ipc_handles"),
        ("isinstance(source, DescribedSource)", "DescribedSource"),
        ("is_vllm = url.startswith(SCHEME)", "is_vllm"),
        ("SCHEME = 'vllm+'", "vllm+"),
    ],
)
def test_a_planted_name_of_another_system_is_found(source: str, text: str) -> None:
    (found,) = foreign_names(f"{source}\n", "weightsync.update.paths")[:1]
    assert found == f"weightsync.update.paths:1 has {text}"


def test_prose_may_name_another_system() -> None:
    source = '''"""As vLLM's WeightSource."""\noverlap = 1\n"""Of verl's ranks."""  # vLLM\n'''
    assert foreign_names(source, "weightsync.update.paths") == []


CUDA_PACKAGES = ("triton", "torch.cuda", "cuda", "pycuda", "cupy", "pynvml")
"""Packages that call a CUDA driver, or compile for one."""


def cuda_use(node: ast.AST) -> str | None:
    """Return what an expression uses of CUDA; imports are looked at by `cuda_calls`."""
    if isinstance(node, ast.Attribute):
        if node.attr == "is_cuda":
            return "uses is_cuda"
        if node.attr == "cuda" and getattr(node.value, "id", "") == "torch":
            return "uses torch.cuda"
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "CDLL":
        names = [str(a.value) for a in node.args if isinstance(a, ast.Constant)]
        if any(name.startswith(("libcuda", "libnvidia", "libnvrtc")) for name in names):
            return "loads a library of CUDA"
    return None


def cuda_calls(source: str, module: str) -> list[str]:
    """Return one line for each use of CUDA: torch.cuda, is_cuda, Triton, bindings of a driver."""
    found = []
    for line, target in imports(source, module, is_package=False):
        if target in CUDA_PACKAGES or target.startswith(tuple(f"{p}." for p in CUDA_PACKAGES)):
            found.append((line, f"imports {target}"))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            found += [(node.lineno, "imports torch.cuda") for a in node.names if a.name == "cuda"]
        elif isinstance(node, ast.expr) and (use := cuda_use(node)) is not None:
            found.append((node.lineno, use))
    return [f"{module}:{line} {what}" for line, what in sorted(found)]


def test_cuda_is_called_in_one_room_only() -> None:
    found = [
        line
        for path in FILES
        if not path.is_relative_to(ROOT / "cuda")
        for line in cuda_calls(path.read_text(), module_name(path))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("torch.cuda.synchronize(device)", "uses torch.cuda"),
        ("on_gpu = tensor.is_cuda", "uses is_cuda"),
        ("import torch.cuda.nvtx", "imports torch.cuda.nvtx"),
        ("from torch import cuda", "imports torch.cuda"),
        ("from torch.cuda import synchronize", "imports torch.cuda"),
        ("import_module('torch.cuda')", "imports torch.cuda"),
        ("import triton.language as tl", "imports triton.language"),
        ("from cuda.bindings import runtime", "imports cuda.bindings"),
        ("ctypes.CDLL('libcudart.so.12')", "loads a library of CUDA"),
    ],
)
def test_a_planted_call_of_cuda_is_found(source: str, what: str) -> None:
    planted = f"def f():\n    {source}"
    assert cuda_calls(planted, "weightsync.queues.codec") == [f"weightsync.queues.codec:2 {what}"]


def test_placement_is_no_call_of_cuda() -> None:
    source = "from weightsync.cuda import devices\non_gpu = tensor.device.type == 'cuda'\n"
    assert cuda_calls(source + "built = torch.version.cuda", "weightsync.queues.codec") == []


def public_names() -> set[str]:
    """Return the names of the API reference, in full, and `weightsync.` and each of `__all__`.

    A page shows a name, some `members` of a module, or a module: then all of its names.
    """
    found = {f"{PACKAGE}.{name}" for name in weightsync.__all__}
    for page in sorted((ROOT.parent / "docs/api").glob("*.md")):
        for name, options in SHOWN.findall(page.read_text(encoding="utf-8")):
            listed = re.search(r"^      members:\n((?:        - \w+\n?)+)", options, re.MULTILINE)
            if path_of(name) is None:
                found.add(name)
            else:
                members = re.findall(r"- (\w+)", listed[1]) if listed else names_of(name)
                found.update(f"{name}.{member}" for member in members)
    return found


SHOWN = re.compile(r"^::: ([\w.]+)\n?((?:    .*\n?)*)", re.MULTILINE)
"""What a page shows, and how."""


def path_of(module: str) -> Path | None:
    """Return the file of a module, None for a name that is none."""
    path = ROOT.parent / module.replace(".", "/")
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def names_of(module: str) -> Iterator[str]:
    """Yield the names without underscore that a module defines."""
    path = path_of(module)
    assert path is not None
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        else:
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            inside = [each for target in targets for each in ast.walk(target)]
            names = [each.id for each in inside if isinstance(each, ast.Name)]
        yield from (name for name in names if not name.startswith("_"))


def imported_names(source: str, module: str) -> Iterator[tuple[str, str]]:
    """Yield what a module imports from other packages of ours: its local name, and the full one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            base = absolute(node, module, is_package=False)
            found = ((each.asname or each.name, f"{base}.{each.name}") for each in node.names)
        elif isinstance(node, ast.Import):
            found = ((each.asname or each.name, each.name) for each in node.names)
        else:
            continue
        for local, name in found:
            if is_ours(name) and (unit_of(name) != unit_of(module)):
                yield local, name


def names_taken(source: str, module: str) -> set[str]:
    """Return the full name of each name that a module takes from other packages of ours.

    Of a module that it imports as a whole these are the attributes that it reads, anywhere.
    """
    modules, names = dict[str, str](), set[str]()
    for local, name in imported_names(source, module):
        if path_of(name) is None or "." in local:  # the uses of `import a.b` are not looked for
            names.add(name)
        else:
            modules[local] = name
    return names | {
        f"{modules[node.value.id]}.{node.attr}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id in modules
    }


@pytest.mark.parametrize(
    "path", [path for path in FILES if unit_of(module_name(path)) in OUTSIDE], ids=module_name
)
def test_queues_and_serve_import_public_names_only(path: Path) -> None:
    module, public = module_name(path), public_names()
    taken = names_taken(path.read_text(encoding="utf-8"), module)
    assert taken - public == set()


def test_nothing_but_the_command_line_imports_queues_or_serve() -> None:
    found = [
        f"{module}:{line} imports {target}"
        for path in FILES
        if unit_of(module := module_name(path)) not in OUTSIDE | {"cli"}
        for line, target in imports(
            path.read_text(encoding="utf-8"), module, is_package=path.name == "__init__.py"
        )
        if is_ours(target) and unit_of(target) in OUTSIDE
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "taken"),
    [
        ("from weightsync.shm.segment import Segment", "weightsync.shm.segment.Segment"),
        ("from weightsync.shm.segment import _reserve", "weightsync.shm.segment._reserve"),
        ("def f():\n    from weightsync import connect", "weightsync.connect"),
        ("from ..update.fleet import Fleet", "weightsync.update.fleet.Fleet"),
        ("import weightsync.update.fleet", "weightsync.update.fleet"),
        ("import weightsync as ws\nws.connect()", "weightsync.connect"),
        (
            "from weightsync.cuda import handles\nhandles.export(x)",
            "weightsync.cuda.handles.export",
        ),
        (
            "from weightsync.cuda import handles as h\nh.collect()",
            "weightsync.cuda.handles.collect",
        ),
    ],
)
def test_a_name_taken_from_another_package_is_found(source: str, taken: str) -> None:
    assert names_taken(source, "weightsync.queues.pool") == {taken}


def test_public_is_what_the_reference_shows() -> None:
    public = public_names()
    assert {
        "weightsync.connect",
        "weightsync.errors.ConfigError",  # a name
        "weightsync.wire.offers.SegmentHandle",  # of a module that is shown as a whole
        "weightsync.queues.codec.MessageCodec",  # one of the members that are listed
    } <= public
    assert (
        not {
            "weightsync.queues.codec.split",
            "weightsync.update.fleet.Fleet",
            "weightsync.shm.segment.live_segments",
        }
        & public
    )


OF_IPC = {
    "weightsync.integrations.vllm.handles_receiver": "feeds hooks from memory of another process"
}
"""Modules that may import from weightsync.backends.ipc, and why; others build on backends.ring."""


def test_the_backend_ipc_is_reached_through_the_ring_and_its_entry_point() -> None:
    found = [
        f"{module_name(path)}:{line} imports {target}"
        for path in FILES
        for line, target in imports(path.read_text(), module_name(path), is_package=False)
        if target.startswith(f"{PACKAGE}.backends.ipc")
        and not path.is_relative_to(ROOT / "backends/ipc")
        and module_name(path) not in OF_IPC
    ]
    assert found == []


def test_modules_of_one_layer_form_no_cycle() -> None:
    mutual = {unit for row in LAYERS if row.mutual for unit in row.units}
    sources = {module_name(path): path.read_text() for path in FILES}
    assert cycle({name: text for name, text in sources.items() if unit_of(name) in mutual}) == []


def test_the_package_is_there() -> None:
    assert ROOT / "errors.py" in FILES


@pytest.mark.parametrize(
    ("module", "source", "reason"),
    [
        ("weightsync.wire.codec", "from weightsync.weights.sources.base import X", "is above it"),
        ("weightsync.wire.codec", "def f():\n    import weightsync.sender", "is above it"),
        (
            "weightsync.wire.codec",
            "if TYPE_CHECKING:\n    from weightsync import receiver",
            "is above it",
        ),
        ("weightsync.wire.codec", "from ..weights import source", "is above it"),
        ("weightsync.wire.codec", "import torch.nn", "is banned there"),
        ("weightsync.weights.sinks.base", "from weightsync.queues import sockets", "is above it"),
        ("weightsync.shm.ring", "import weightsync.weights.sinks.base", "is above it"),
        ("weightsync.backends.base", "import weightsync.transports.base as b", "is beside it"),
        (
            "weightsync.backends.registry",
            "import_module('weightsync.transports.base')",
            "is beside it",
        ),
        ("weightsync.transports.base", "from weightsync import connect", "is above it"),
        (
            "weightsync.transports.factory",
            "SERVERS = 'weightsync.integrations.servers:ServerTransports'",
            "is above it",
        ),
        ("weightsync.sender", "import weightsync", "is above it"),
        ("weightsync.integrations.trl", "from weightsync.serve import model", "is above it"),
        (
            "weightsync.integrations.certificate",
            "from weightsync.testing import held",
            "is above it",
        ),
        ("weightsync", "from weightsync.server import weight_router", "is above it"),
        ("weightsync.specs", "import msgspec", "is not in the standard library"),
        ("weightsync.sender", "from weightsync.magic import x", "is in no layer"),
    ],
)
def test_a_planted_violation_is_caught(module: str, source: str, reason: str) -> None:
    (found,) = violations(source, module)
    assert module in found
    assert found.endswith(f"which {reason}")


def test_a_module_of_no_layer_is_refused() -> None:
    (found,) = violations("import os", "weightsync.magic")
    assert found == "weightsync.magic is in no layer: give it a place in LAYERS"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("weightsync.wire.codec", "import msgspec\nfrom weightsync.errors import ProtocolError"),
        ("weightsync.specs", "import math\nfrom weightsync.errors import ConfigError"),
        ("weightsync.weights.sinks.base", "import torch\nfrom weightsync.weights import layout"),
        ("weightsync.sender", "from weightsync.update.fleet import Fleet"),
        ("weightsync.server.router", "import fastapi\nimport weightsync as ws"),
        ("weightsync.cli.serve", "from weightsync.serve.model import load"),
        ("weightsync", "from weightsync.receiver import WeightReceiver"),
        ("weightsync", "if TYPE_CHECKING:\n    from weightsync.integrations import trl"),
        ("weightsync", "def __getattr__(n):\n    return import_module('weightsync.server')"),
    ],
)
def test_an_import_from_below_passes(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_relative_imports_of_a_package_start_inside_it() -> None:
    source = "from . import codec\nfrom .. import errors\nfrom ..sender import connect"
    (found,) = violations(source, "weightsync.wire", is_package=True)
    assert found == "weightsync.wire:3 imports weightsync.sender, which is above it"


def test_a_planted_cycle_is_caught() -> None:
    ring = {
        "weightsync.sender": "from weightsync.receiver import WeightReceiver",
        "weightsync.receiver": "from weightsync.observe import watching",
        "weightsync.observe": "def f():\n    from weightsync import sender",
    }
    assert set(cycle(ring)) == {"sender", "receiver", "observe"}
    assert cycle({**ring, "weightsync.observe": "import weightsync.report"}) == []
