"""Tests that every supported release of TensorRT and CUDA has what Octet uses of it.

What is used is collected from the source (tests/export/bindings/usage.py), what exists was read
from the releases' own bindings (tests/export/bindings/extract.py). Where a TensorRT is installed,
with or without a GPU, it is asked too:

    pytest -m gpu tests/export/test_bindings.py
"""

import ast
import importlib
import inspect
from functools import reduce
from pathlib import Path
from types import ModuleType

import pytest

from tests.export.bindings import LISTED, cuda
from tests.export.bindings.api import Api
from tests.export.bindings.usage import Usage, own_names
from tests.serve import fake_gpu, fake_tensorrt

ROOT = Path(__file__).parents[2]
# These know CUDA alone, whose `runtime` is another one: see bindings/cuda.py.
ONLY_CUDA = {"gpu.py", "kernels.py"}
PLACES = (ROOT / "export" / "engine", ROOT / "serve" / "tensorrt")


def knows_tensorrt(path: Path) -> bool:
    """By its place, or because it names the module."""
    if path.parent in PLACES or path.name == "tensorrt_log.py":
        return path.name not in ONLY_CUDA
    nodes = ast.walk(ast.parse(path.read_text()))
    return any(isinstance(node, ast.Name) and node.id == "trt" for node in nodes)


SOURCES = [
    path
    for pattern in ("octet/**/*.py", "export/**/*.py", "serve/**/*.py")
    for path in sorted(ROOT.glob(pattern))
]
FILES = [path for path in SOURCES if knows_tensorrt(path)]
# Only TensorRT-RTX builds for GPUs that are not there; export/engine/builder.py asks which it is.
ONLY_RTX = {
    "ComputeCapability",
    "IBuilderConfig.num_compute_capabilities",
    "IBuilderConfig.set_compute_capability",
}
RELEASES = {letter: "-".join(name) for letter, name in LISTED.items()}


def usage(letter: str) -> Usage:
    found = Usage(Api.load(letter))
    for path in FILES:
        found.read(path)
    return found


@pytest.mark.parametrize("letter", RELEASES, ids=RELEASES.values())
def test_everything_used_exists_and_takes_what_it_is_given(letter: str) -> None:
    rtx = "rtx" in RELEASES[letter]
    problems = [
        f"{use.where}: {use.name} {use.problem}"
        for use in usage(letter).uses
        if use.problem and (rtx or use.name.removeprefix("the module.") not in ONLY_RTX)
    ]
    assert not problems


def test_nothing_used_is_overlooked() -> None:
    """An attribute of an object whose type is not known is our own, or one of Python's."""
    found = usage("d")
    packages = ("octet", "calibrate", "export", "serve", "verify")
    ours = own_names(path for name in packages for path in ROOT.glob(f"{name}/**/*.py"))
    python = {name for kind in (str, list, dict, set, Path) for name in dir(kind)}
    numpy = {"dtype", "shape"}
    assert found.unknown & found.api.members() <= ours | python | numpy
    used = {use.name for use in found.uses}
    assert len(used) >= 75
    assert used >= ONLY_RTX | {
        "Builder.build_serialized_network",
        "ICudaEngine.get_tensor_profile_shape",
        "IExecutionContext.execute_async_v3",
        "IExecutionContext.set_input_shape",
        "IProgressMonitor.step_complete",
        "ParserError.desc",
        "Runtime.deserialize_cuda_engine",
    }


@pytest.mark.parametrize(
    ("source", "letter", "problem"),
    [
        ("trt.BuilderFlag.FP16", "c", "BuilderFlag.FP16 does not exist"),
        ("trt.BuilderFlag.FP16", "b", None),
        ("trt.Builder(log).platform_has_fast_fp16", "c", "platform_has_fast_fp16 does not exist"),
        ("b = trt.Builder(log)\nb.create_network(1, 2)", "c", "takes no 2 arguments"),
        ("b = trt.Builder(log)\nb.create_network(flags=1)", "c", None),
        ("def f(config):\n    config.num_optimization_profiles = 3", "c", "cannot be assigned to"),
        ("def f(config):\n    config.builder_optimization_level = 3", "c", None),
        ("def f(engine):\n    engine.create_execution_context().execute_v3()", "c", "execute_v3"),
        (
            "def f(network):\n    layers = [network.get_layer(i) for i in x]\n"
            "    return [layer.get_output(0).kind for layer in layers]",
            "c",
            "ITensor.kind does not exist",
        ),
        ("class L(trt.ILogger):\n    def log(self, message): ...", "c", "other than 1 parameters"),
        ("getattr(trt.DataType, 'E5M2')", "c", "DataType.E5M2 does not exist"),
        ("def f(engine: Ours):\n    engine.anything()", "c", None),
        (
            "class C:\n    context: Any\n    def f(self):\n        self.context.nothing",
            "c",
            "nothing",
        ),
    ],
)
def test_what_does_not_exist_is_found(
    source: str, letter: str, problem: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "source.py"
    path.write_text(source)
    found = Usage(Api.load(letter))
    found.read(path)
    problems = [f"{use.name} {use.problem}" for use in found.uses if use.problem]
    if problem is None:
        assert not problems
    else:
        assert len(problems) == 1 and problem in problems[0]


@pytest.mark.parametrize("letter", RELEASES, ids=RELEASES.values())
def test_the_fake_has_nothing_that_tensorrt_has_not(letter: str) -> None:
    api = Api.load(letter)
    kinds = [kind for kind in vars(fake_tensorrt).values() if inspect.isclass(kind)]
    known = [kind for kind in kinds if kind.__name__ in api.bases]
    assert len(known) >= 6
    for kind in known:
        for name, member in vars(kind).items():
            if name.startswith("_"):
                continue
            found = api.find(kind.__name__, name)
            assert found, f"{kind.__name__}.{name}"
            if inspect.isfunction(member):
                own = tuple(inspect.signature(member).parameters)[1:]
                known_as = [signature.parameters[: len(own)] for signature in api.calls[found]]
                assert own in known_as, f"{found}{own}: {known_as}"


class TestCuda:
    def test_what_is_used_is_in_every_release_that_was_looked_at(self) -> None:
        """If this fails for a new name: python -m tests.export.bindings.cuda"""
        lines = [line for line in cuda.CUDA.read_text().splitlines() if not line.startswith("#")]
        recorded = {line.split(" ", 1)[1].strip().partition("(")[0]: line[:2] for line in lines}
        assert sorted(recorded) == cuda.used_by_all()
        assert set(recorded.values()) == {"".join(cuda.LISTED)}

    def test_the_installed_release_has_it(self) -> None:
        assert sorted(line.partition("(")[0] for line in cuda.existing()) == cuda.used_by_all()

    def test_the_fake_has_what_is_used_of_it_and_no_more(self) -> None:
        used = [name.split(".", 1)[1] for name in cuda.used_by_all() if "nvrtc" not in name]
        ours = {name for path in cuda.FILES[:-1] for _, name in cuda.used(path)}
        for name in used:
            if name in ours:
                reduce(getattr, name.split("."), fake_gpu.FakeGpu)
        calls = {name for name in vars(fake_gpu.FakeGpu) if name.startswith("cu")}
        assert calls <= {name.partition(".")[0] for name in ours}


def installed() -> list[ModuleType]:
    found = []
    for name in ("tensorrt", "tensorrt_rtx"):
        try:
            found.append(importlib.import_module(name))
        except ImportError:
            continue
    return found


@pytest.mark.gpu
def test_the_installed_tensorrt_has_it() -> None:
    modules = installed()
    if not modules:
        pytest.skip("no TensorRT is installed; where one is: see the top of this file")
    for trt in modules:
        rtx = trt.__name__ == "tensorrt_rtx"
        for use in usage("d").uses:
            if rtx or use.name not in ONLY_RTX:
                owner = reduce(getattr, use.name.split("."), trt)
                assert owner is not None, f"{trt.__name__} {trt.__version__}: {use.name}"
