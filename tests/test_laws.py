"""Laws of the code base: what may import what, where code may live, how long things may get."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from llmserve.builder.targets.registry import TARGETS
from llmserve.models.number_formats import CACHES, WEIGHTS
from tests.target_branches import REGISTRIES, branches, rooms
from tests.tiers import PLACES, TIERS, tier_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "llmserve"

# From docs/architecture.md: imports point left only.
LAYERS = (
    (
        "errors",
        "metrics",
        "owned_directory",
        "sealed_log",
        "strict_yaml",
        "tenant_counters",
        "progress",
        "at_once",
        "__init__",
    ),
    ("wire",),
    ("core",),
    ("models",),
    ("scheduler",),
    ("checkpoint",),
    ("engine",),
    ("stages",),
    ("builder",),
    ("serving",),
    ("backends",),
    ("frontends",),
    ("client",),
    ("benchmark",),
    ("evaluation",),
    ("cluster",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
FORBIDDEN = {("serving", "engine"), ("serving", "stages"), ("engine", "checkpoint"), ("frontends", "engine")}
# The same inside `serving`, whose modules and folders may import their own floor and those above them in this table.
SERVING_FLOORS = (
    ("threads",),
    ("instruments", "types"),  # a request carries its trace, and a trace shows tensors
    ("answers", "collation", "settings", "signature", "streams", "tensor_data"),
    ("backend",),
    ("config",),
    ("schedulers",),
    ("model",),
    ("ensemble_plan",),
    ("ensemble",),
    ("loading",),
    ("observe", "rollout"),
    ("lifecycle",),
    ("core",),
)
LAZY = {
    "torch": {
        "evaluation/baseline/hf.py",
        "evaluation/baseline/baichuan_torch.py",
        "backends/pytorch/torch_model.py",
        "engine/tensorrt_llm/library.py",
    },
    "onnxruntime": {"backends/onnxruntime/session.py"},
    "tensorrt_llm": {"engine/tensorrt_llm/library.py"},
    "tensorrt": {"engine/tensorrt_llm/library.py"},
    "transformers": {"evaluation/baseline/hf.py", "evaluation/baseline/baichuan_torch.py"},
    "datasets": {"evaluation/data.py"},
    "llguidance": {f"stages/{name}.py" for name in ("guide_vocabulary", "guides", "likely_text", "token_guide")},
    "opentelemetry": {"frontends/shared/span_export.py"},
    "pynvml": {"serving/observe/gpu.py"},
    "triton": {
        "builder/targets/cuda/compiler.py",
        *(path.relative_to(PACKAGE).as_posix() for path in (PACKAGE / "engine/cuda/kernels").glob("*.py")),
    },
    "cuda": {"engine/cuda/bindings.py"},
    "dynamo": {"cluster/client.py", "cluster/worker.py"},
}
FORMAT_NAMES = {*WEIGHTS, *CACHES}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def cpp_files() -> list[Path]:
    folders = (PACKAGE, ROOT / "tests")
    return sorted(path for folder in folders for suffix in ("cpp", "h") for path in folder.rglob(f"*.{suffix}"))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text())))


@cache
def imports(path: Path) -> tuple[str, ...]:
    return tuple(imported(path))


def imported(path: Path) -> Iterator[str]:
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            yield node.module or ""


def layer(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def tracked(pattern: str) -> list[str]:
    output = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return output.split()


def test_every_module_has_a_layer() -> None:
    assert {layer_of(path) for path in python_files()} <= set(RANK)


def test_imports_point_left_only() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in python_files()
        for name in imports(path)
        if name.split(".")[0] == "llmserve"
        and (
            RANK[layer(name)] > RANK[layer_of(path)]
            or (layer_of(path), layer(name)) in FORBIDDEN
        )
    ]  # fmt: skip
    assert wrong == []


def test_imports_inside_serving_point_down_only() -> None:
    floors = {name: floor for floor, names in enumerate(SERVING_FLOORS) for name in names}
    folder = PACKAGE / "serving"
    files = {path: path.relative_to(folder).parts[0].removesuffix(".py") for path in folder.rglob("*.py")}
    assert set(files.values()) - {"__init__"} == set(floors)
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path, own in files.items()
        for name in imports(path)
        if name.startswith("llmserve.serving.") and floors[name.split(".")[2]] > floors[own]
    ]
    assert wrong == []


def test_the_wire_knows_errors_only() -> None:
    used = {name for path in (PACKAGE / "wire").rglob("*.py") for name in imports(path) if name.startswith("llmserve")}
    assert {name for name in used if layer(name) != "wire"} == {"llmserve.errors"}


@pytest.mark.parametrize("package", sorted(LAZY))
def test_heavy_packages_have_one_owner(package: str) -> None:
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in python_files()
        for name in imports(path)
        if name.split(".")[0] == package
    }
    assert users <= LAZY[package]


def test_command_line_starts_without_heavy_packages() -> None:
    heavy = {"torch", "onnxruntime", "transformers", "datasets", "pandas", "llguidance", "opentelemetry"}
    heavy |= {"tensorrt_llm", "tensorrt", "triton", "cuda"}
    code = "import sys; from llmserve.cli.app import Commands; list(Commands().values());"
    code += f"print(sorted({heavy} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert output.strip() == "[]"


def test_a_server_starts_without_the_libraries_of_openais_api() -> None:
    heavy = "{'fastapi', 'starlette', 'pydantic', 'pydantic_core'}"
    code = f"import sys, llmserve.cli.server, llmserve.cli.backends; print(sorted({heavy} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert output.strip() == "[]"


def test_only_a_targets_own_rooms_ask_which_target_it_is() -> None:
    assert branches(PACKAGE, TARGETS, rooms(TARGETS)) == []


def test_a_targets_rooms_are_imported_by_themselves_and_the_registries() -> None:
    room = re.compile(rf"llmserve\.(?:engine|builder\.targets)\.({'|'.join(TARGETS)})\b")
    describes_the_processor = "cli/machine.py"
    wrong = [
        f"{file} imports {name}"
        for path in python_files()
        if (file := path.relative_to(PACKAGE).as_posix()) not in (*REGISTRIES, describes_the_processor)
        for name in imports(path)
        if (found := room.match(name)) and not file.startswith(rooms([found[1]]))
    ]
    assert wrong == []


ASKING = (
    "if options.target == 'cpu': ...",
    "if 'tensorrt_llm' != name: ...",
    "if manifest.target == DEFAULT: ...",
    "if target is not other: ...",
    "if name in ('cpu', 'cuda'): ...",
    "if directory.manifest.target != GPU_TARGET: ...",
    "needs = {'cpu': 1}",
    "target = {GPU_TARGET: 1}[name]",
    "rows = report['tensorrt_llm']",
    "rows = report.get('tensorrt_llm')",
    "size = options.tensorrt_llm.tp_size",
    "match name:\n    case 'cpu': ...",
    "isinstance(options, TensorrtLlmOptions)",
    "isinstance(options, int | targets.TensorrtLlmOptions)",
    "match options:\n    case TensorrtLlmOptions(): ...",
)
NOT_ASKING = (
    "if options.target not in TARGETS: ...",
    "runtime = RUNTIMES[manifest.target]",
    "if model.name == ENGINE_MODEL: ...",
    "tensor = tensor.to('cpu').cpu()",
    "isinstance(options, TargetOptions)",
)


@pytest.mark.parametrize("code", [*ASKING, *NOT_ASKING])
def test_the_law_of_targets_knows_a_question_when_it_sees_one(code: str, tmp_path: Path) -> None:
    (tmp_path / "engine/cpu").mkdir(parents=True)
    (tmp_path / "engine/cpu/own.py").write_text("class TensorrtLlmOptions: ...\nif name == 'cpu': ...")
    (tmp_path / "engine/names.py").write_text("GPU_TARGET, ENGINE_MODEL = 'tensorrt_llm', 'tensorrt_llm'")
    (tmp_path / "file.py").write_text(code)
    found = branches(tmp_path, ("cpu", "tensorrt_llm"), ("engine/cpu/",))
    assert bool(found) == (code in ASKING)


def test_nobody_asks_a_number_format_its_name() -> None:
    own = ("models/number_formats.py", "builder/spellings.py")  # the registry; what users write
    # dtypes in files and of tensors; constants and types of Triton
    foreign = ("checkpoint/", "backends/", "engine/cuda/kernels/", "engine/cuda/layout.py")
    wrong = [
        f"{file}:{line}"
        for path in python_files()
        if not (file := path.relative_to(PACKAGE).as_posix()).startswith((*own, *foreign))
        for line in name_questions(nodes_of(path))
    ]
    assert wrong == []


def name_questions(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Lines that compare something with a format's name, or look something up by it."""
    for node in nodes:
        match node:
            case ast.Compare(left, _, comparators):
                asked = [left, *comparators]
            case ast.MatchValue(value) | ast.Subscript(slice=value):
                asked = [value]
            case ast.Dict(keys):
                asked = [key for key in keys if key is not None]
            case ast.Call(ast.Attribute(attr="get" | "startswith"), [key, *_]):
                asked = [key]
            case _:
                continue
        parts = [one.elts if isinstance(one, ast.Tuple | ast.List | ast.Set) else [one] for one in asked]
        for each in chain.from_iterable(parts):
            if isinstance(each, ast.Constant) and each.value in FORMAT_NAMES:
                yield each.lineno


@pytest.mark.parametrize(
    ("code", "asks"),
    [
        ("if options.quantization == 'int4': ...", True),
        ("if 'int8' != name: ...", True),
        ("if name in ('int8', 'uint8'): ...", True),
        ("bits = {'int8': 8.5}.get(name)", True),
        ("bits = BITS['float32']", True),
        ("match name:\n    case 'int8': ...", True),
        ("if options.weights.is_rounded: ...", False),
        ("tensor = PlacedTensor(name, 'float32', 1, outputs)", False),
        ("if options.quantization in QUANTIZED: ...", False),
    ],
)
def test_the_law_of_formats_knows_a_question_when_it_sees_one(code: str, asks: bool) -> None:
    assert bool(list(name_questions(ast.walk(ast.parse(code))))) == asks


def test_scheduler_is_plain_ints() -> None:
    used = {name.split(".")[0] for path in (PACKAGE / "scheduler").glob("*.py") for name in imports(path)}
    assert not used & {"numpy", "torch", "asyncio", "threading"}


def test_files_and_functions_are_short() -> None:
    long_files = [
        f"{path.relative_to(ROOT)}: {lines} lines"
        for path in [*python_files(), *cpp_files()]
        if (lines := len(path.read_text().splitlines())) > MAX_FILE_LINES
    ]
    long_functions = [
        f"{path.relative_to(ROOT)}:{node.name}: {length} lines"
        for path in python_files()
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and (length := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert long_files + long_functions == []


def test_data_folders_hold_no_python() -> None:
    assert tracked("build/*.py") == []
    assert tracked("eval/*.py") == []


def test_pipeline_shims_are_thin() -> None:
    shims = sorted(ROOT.glob("pipelines*/**/*.py"))
    assert shims
    assert [str(path.relative_to(ROOT)) for path in shims if len(path.read_text().splitlines()) > 40] == []


def test_ignore_rules_are_anchored() -> None:
    rules = (ROOT / ".gitignore").read_text().split()
    assert all(rule.startswith(("/", "*", "__pycache__")) for rule in rules)


def test_no_relics() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in [*python_files(), *cpp_files()]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if marks.search(line)
    ]
    assert wrong == []


def test_every_test_file_is_in_one_tier() -> None:
    files = [path.removeprefix("tests/") for path in tracked("tests/*test_*.py") if "/repository/" not in path]
    assert {tier_of(path) for path in files} == set(TIERS)
    places = [place for listed in PLACES.values() for place in listed.split()]
    assert sorted(set(places)) == sorted(places)
    assert [place for place in places if not (ROOT / "tests" / place).exists()] == []
