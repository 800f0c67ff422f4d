"""The import hook can fail in nothing but its own extension, and that is a warning. Whatever happens there, the module
is not lost. Each case has its own process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

START = """
import importlib, importlib.util, sys, warnings
from pathlib import Path
sys.path.insert(0, str(Path.cwd()))
from torchops._core.when_imported import when_imported
calls = []
"""


def run(tmp_path: Path, program: str, *, start: str = START, flags: tuple[str, ...] = ()) -> list[str]:
    """What `program` prints, beside a module `costly` that can be executed once in a process, as DTensor's."""
    (tmp_path / "costly.py").write_text(
        "import sys\nassert not hasattr(sys, 'costly'), 'already registered'\nsys.costly = value = 7\n"
    )
    command = [sys.executable, *flags, "-c", start + program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return (done.stdout + done.stderr).splitlines()


def test_is_called_once_and_then_is_gone(tmp_path: Path) -> None:
    program = """
before = list(sys.meta_path)
when_imported("costly", lambda: calls.append(sys.modules["costly"].value))
import costly, costly
print(calls, type(costly.__loader__).__name__, costly.__spec__.loader is costly.__loader__)
del sys.modules["costly"], sys.costly
import costly
print(calls)
when_imported("costly", lambda: calls.append("now"))
print(calls)
"""
    assert run(tmp_path, program) == ["[7] SourceFileLoader True", "[7]", "[7, 'now']"]


@pytest.mark.parametrize("imported_before", [False, True])
def test_a_failing_extension_is_a_warning(tmp_path: Path, imported_before: bool) -> None:
    program = """
def fail(): raise KeyError("a rule")
with warnings.catch_warnings(record=True) as caught:
    when_imported("costly", fail)
    import costly
print(costly.value, *(f"{w.category.__name__}: {w.message}" for w in caught))
import costly
"""
    said = "RuntimeWarning: torchops could not extend costly, which does without: KeyError: 'a rule'"
    assert run(tmp_path, ("import costly" if imported_before else "") + program) == [f"7 {said}"]


def test_a_failing_extension_under_warnings_as_errors(tmp_path: Path) -> None:
    program = """
def fail(): raise KeyError("a rule")
when_imported("costly", fail)
with warnings.catch_warnings():
    warnings.simplefilter("error")
    import costly
print(costly.value)
"""
    lines = run(tmp_path, program)
    assert lines[0] == "7"
    assert "torchops could not extend costly, which does without: KeyError: 'a rule'" in lines
    assert lines[-1] == "KeyError: 'a rule'"


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "SystemExit", "Terminated"])
def test_an_interrupted_extension_does_not_lose_the_module(tmp_path: Path, error: str) -> None:
    """The import raises; the next one gets the same module, which is not executed again, and extends it."""
    program = f"""
class Terminated(BaseException): pass
def interrupted():
    calls.append(sys.modules["costly"])
    if len(calls) < 3: raise {error}
when_imported("costly", interrupted)
for _ in range(2):
    try:
        import costly
    except {error}:
        print("raised", "costly" in sys.modules)
import costly
print(costly.value, [call is costly for call in calls], type(costly.__loader__).__name__)
print(costly.__spec__.loader is costly.__loader__)
del sys.modules["costly"], sys.costly
import costly
print(costly.value, costly in calls)
"""
    assert run(tmp_path, program) == [
        "raised False",
        "raised False",
        "7 [True, True, True] SourceFileLoader",
        "True",
        "7 False",
    ]


def test_an_interrupted_extension_of_a_package(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("from pack import inner\n")
    (tmp_path / "pack" / "inner.py").write_text("import sys\nassert not hasattr(sys, 'inner')\nsys.inner = value = 7\n")
    program = """
def interrupted():
    calls.append("called")
    if len(calls) < 2: raise KeyboardInterrupt
when_imported("pack", interrupted)
try:
    import pack.inner
except KeyboardInterrupt:
    print("raised")
import pack.inner
print(pack.inner.value, pack.__path__ == [str(Path.cwd() / "pack")], calls)
"""
    assert run(tmp_path, program) == ["raised", "7 True ['called', 'called']"]


def test_a_failing_module_fails_as_ever(tmp_path: Path) -> None:
    program = """
when_imported("broken", lambda: calls.append("extended"))
for text in ("1 / 0", "value = 1"):
    Path("broken.py").write_text(text)
    importlib.invalidate_caches()
    sys.dont_write_bytecode = True
    try:
        import broken
    except ZeroDivisionError:
        print("fails", calls)
print(calls)
"""
    assert run(tmp_path, program) == ["fails []", "['extended']"]


def test_no_such_module(tmp_path: Path) -> None:
    program = """
when_imported("missing", lambda: calls.append("extended"))
try:
    import missing
except ModuleNotFoundError as error:
    print(error, calls)
"""
    assert run(tmp_path, program) == ["No module named 'missing' []"]


def test_one_finder_however_often_torchops_is_imported(tmp_path: Path) -> None:
    program = """
import torchops
def ours(): return [f for f in sys.meta_path if type(f).__module__ == "torchops._core.when_imported"]
importlib.reload(torchops)
importlib.reload(torchops)
print(len(ours()))
for name in [name for name in sys.modules if name.partition(".")[0] == "torchops"]:
    del sys.modules[name]
import torchops
print(len(ours()))
import torch.utils.flop_counter, torch.distributed.tensor, torchao.utils, torch._inductor.lowering
print(len(ours()), "torchops.distributed" in sys.modules)
"""
    (tmp_path / "torchao").mkdir()
    implements = "implements_torch_function = staticmethod(lambda functions: lambda f: f)"
    (tmp_path / "torchao" / "utils.py").write_text(f"class TorchAOBaseTensor:\n    {implements}\n")
    # What torchao says as it is imported comes after.
    assert run(tmp_path, program)[:3] == ["1", "1", "0 True"]


def test_other_finders_may_be_of_any_kind(tmp_path: Path) -> None:
    """Without find_spec, as before Python 3.4, and one that asks all the others itself, as hooks do."""
    program = """
class Old:
    def find_module(self, name, path=None): return None
class Asking:
    asking = False
    def find_spec(self, name, path=None, target=None):
        if self.asking: return None
        self.asking = True
        try:
            return next(filter(None, (f.find_spec(name, path, target) for f in sys.meta_path
                                      if hasattr(f, "find_spec"))), None)
        finally:
            self.asking = False
sys.meta_path[:0] = [Old(), Asking()]
when_imported("costly", lambda: calls.append("extended"))
sys.meta_path[:0] = [Old(), Asking()]
warnings.simplefilter("ignore")
import costly
print(costly.value, calls)
"""
    assert run(tmp_path, program) == ["7 ['extended']"]


def test_a_spec_that_is_only_looked_at_has_all_methods_of_its_loader(tmp_path: Path) -> None:
    program = """
when_imported("costly", lambda: calls.append("extended"))
spec = importlib.util.find_spec("costly")
print(spec.loader.get_source("costly").splitlines()[0])
print(spec.loader.is_package("costly"), spec.loader.path == spec.origin)
print(spec.loader.get_resource_reader("costly") is not None, spec.loader.get_data(spec.origin)[:6], calls)
import costly
print(calls)
"""
    assert run(tmp_path, program) == ["import sys", "False True", "True b'import' []", "['extended']"]


def test_lazy_loader(tmp_path: Path) -> None:
    program = """
when_imported("costly", lambda: calls.append("extended"))
spec = importlib.util.find_spec("costly")
spec.loader = importlib.util.LazyLoader(spec.loader)
sys.modules["costly"] = costly = importlib.util.module_from_spec(spec)
spec.loader.exec_module(costly)
print(calls)
print(costly.value, calls)
"""
    assert run(tmp_path, program) == ["[]", "7 ['extended']"]


def test_packages_without_a_file(tmp_path: Path) -> None:
    (tmp_path / "spread").mkdir()
    program = """
when_imported("spread", lambda: calls.append("extended"))
import spread
print(set(spread.__path__) == {str(Path.cwd() / "spread")})
"""
    assert run(tmp_path, program) == ["True"]


def test_dtensor_survives_a_broken_extension(tmp_path: Path) -> None:
    program = """
import sys, warnings
import torchops
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "torchops.distributed":
            raise RuntimeError("broken")
sys.meta_path.insert(0, Broken())
with warnings.catch_warnings(record=True) as caught:
    import torch.distributed.tensor
print(len(caught), "RuntimeError: broken" in str(caught[0].message))
from torch.distributed.tensor import DTensor
import torch
print(torch.compile(torchops.softmax, backend="eager", fullgraph=True)(torch.zeros(2)).tolist())
"""
    assert run(tmp_path, program, start="") == ["1 True", "[0.5, 0.5]"]


# Stops torchops.distributed where its own rules are registered, and those of transitions and triangles are not.
HALFWAY = """
import sys, warnings
import torchops
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "torchops.distributed.transition" and self in sys.meta_path:
            sys.meta_path.remove(self)
            raise error
sys.meta_path.insert(0, Broken())
"""

AFTERWARDS = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
print(torch.compile(torchops.softmax, backend="eager", fullgraph=True)(torch.zeros(2)).tolist())
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = DeviceMesh("cpu", [0, 1])
x = distribute_tensor(torch.zeros(2, 2), mesh, [Shard(0)], src_data_rank=None)
print(torchops.softmax(x).placements == x.placements, torch.ops.aten.relu(x).placements == x.placements)
w = distribute_tensor(torch.zeros(2, 2), mesh, [Replicate()], src_data_rank=None)
try:
    print(torchops.transition(x, gate_weight=w, up_weight=w, down_weight=w).placements == x.placements)
except Exception:
    print("transition refuses")
dist.destroy_process_group()
"""


def test_dtensor_survives_an_extension_that_fails_halfway(tmp_path: Path) -> None:
    """What was registered before goes on working; what was not raises."""
    program = """
error = RuntimeError("broken")
with warnings.catch_warnings(record=True) as caught:
    import torch.distributed.tensor
print(*(w.message for w in caught))
"""
    assert run(tmp_path, HALFWAY + program + AFTERWARDS, start="") == [
        "torchops could not extend torch.distributed.tensor, which does without: RuntimeError: broken",
        "[0.5, 0.5]",
        "True True",
        "transition refuses",
    ]


def test_dtensor_survives_an_interrupted_extension(tmp_path: Path) -> None:
    """The next import registers what is missing."""
    program = """
error = KeyboardInterrupt()
try:
    import torch.distributed.tensor
except KeyboardInterrupt:
    print("interrupted", "torch.distributed.tensor" in sys.modules)
with warnings.catch_warnings(record=True) as caught:
    import torch.distributed.tensor
print(*(str(w.message)[:71] for w in caught))
"""
    assert run(tmp_path, HALFWAY + program + AFTERWARDS, start="") == [
        "interrupted False",
        "",
        "[0.5, 0.5]",
        "True True",
        "True",
    ]


def test_modules_are_attributes(tmp_path: Path) -> None:
    program = """
import sys, torchops
print([name in sys.modules for name in ("torchops.distributed", "torchops.inductor", "torchops.onnx")])
print({"distributed", "inductor", "onnx"} <= set(dir(torchops)))
print(torchops.onnx.__name__, torchops.inductor.__name__, torchops.distributed.__name__)
print(torchops.onnx is sys.modules["torchops.onnx"])
from torchops import *
print(distributed is torchops.distributed)
try:
    torchops.nothing
except AttributeError as error:
    print(error)
"""
    assert run(tmp_path, program, start="") == [
        "[False, False, False]",
        "True",
        "torchops.onnx torchops.inductor torchops.distributed",
        "True",
        "True",
        "module 'torchops' has no attribute 'nothing'",
    ]
