"""A launch and the process around it: threads, signals, forks, tensors without memory, folders."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from narrowkv.runtime.launch import LaunchOptions, compile_for, interpreter, launch

pytestmark = pytest.mark.codegen_all

ONE = LaunchOptions(num_warps=1, num_stages=1)
SCALE = tl.constexpr(3.0)


@triton.jit
def _scaled(x):
    return x * SCALE


@triton.jit
def _sum_kernel(x_ptr, o_ptr, N: tl.constexpr, DTYPE: tl.constexpr = tl.float32):
    pid = tl.program_id(0)
    x = tl.load(x_ptr + pid * N + tl.arange(0, N)).to(DTYPE)
    tl.store(o_ptr + pid, tl.sum(_scaled(x), 0))


def check_interpreting(programs: int = 8) -> None:
    x = torch.arange(programs * 16, dtype=torch.float32)
    o = torch.zeros(programs)
    launch(_sum_kernel, (programs,), (x, o), {"N": 16}, ONE)
    assert torch.equal(o, 3 * x.view(programs, 16).sum(1))


def check_compiling(target: str = "gfx942", n: int = 16) -> None:
    with compile_for(target) as artifacts:
        launch(_sum_kernel, (1,), (torch.zeros(n), torch.zeros(1)), {"N": n, "DTYPE": tl.float32}, ONE)
    assert [artifact.target.name for artifact in artifacts] == [target]
    assert target in artifacts[0].assembly.split("\n", 1)[0]


def slow(value: Any) -> Any:
    """A value for which a process more is started, in the full run alone."""
    return pytest.param(value, marks=pytest.mark.slow)


def _run(code: str, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    """The code in a process of its own, with the functions of this file."""
    inherited = {
        name: value for name, value in os.environ.items() if name != "TRITON_CACHE_DIR" or not environment
    }
    head = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", head + code],
        env={**inherited, **environment}, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


def test_threads_interpret_and_compile_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An empty cache: everything is compiled.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    start = threading.Barrier(4)

    def repeat(check: Any, *args: Any) -> None:
        start.wait()
        for _ in range(5):
            check(*args)

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(repeat, check_interpreting, n) for n in (40, 41)]
        jobs += [pool.submit(repeat, check_compiling, target) for target in ("gfx942", "gfx950")]
        for job in jobs:
            job.result()


def test_threads_parse_kernels_at_once() -> None:
    """Python code that runs in a garbage collection hands over to another thread in the middle of a parse."""

    def collected(phase: str, info: dict[str, int]) -> None:
        sum(range(50))

    def parse(_: int) -> None:
        for _ in range(100):
            assert callable(interpreter._Function(_sum_kernel.fn).body)

    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.callbacks.append(collected)
    gc.set_threshold(50)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(parse, range(4)))
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collected)
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_interrupts_at_any_instant_of_a_launch(seed: int) -> None:
    """The first of them come while the interpreter is loaded, the others within the time of a launch."""
    done = _run(f"""
import random, signal, time
from test_launch_process import check_interpreting, check_compiling
signal.signal(signal.SIGALRM, signal.default_int_handler)
random.seed({seed})
caught, longest = 0, 0.1
for k in range(150):
    if k == 30:
        begun = time.perf_counter()
        check_interpreting()
        longest = time.perf_counter() - begun
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, longest))
        check_interpreting()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        caught += 1
    except RuntimeError as error:
        # Before 3.12 Python wraps what comes while a class body is finished (__set_name__).
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        caught += 1
    except TypeError as error:
        # numpy replaces what comes while it reads a shape.
        if "expected a sequence of integers" not in str(error):
            raise
        caught += 1
signal.setitimer(signal.ITIMER_REAL, 0)
check_interpreting()
check_compiling()
print(caught)
""")
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    assert int(done.stdout) >= 20, "most launches are to be interrupted"


@pytest.mark.parametrize("loaded", [slow(True), False])
def test_a_fork_while_another_thread_interprets(loaded: bool) -> None:
    done = _run(f"""
import faulthandler, os, threading, time
from test_launch_process import check_interpreting, check_compiling
if {loaded}:
    check_interpreting()
stop = threading.Event()
def work():
    while not stop.is_set():
        check_interpreting(100)
thread = threading.Thread(target=work)
thread.start()
children = []
for k in range(5):
    time.sleep(0.02)
    child = os.fork()
    if not child:
        faulthandler.dump_traceback_later(20, exit=True)
        check_interpreting()
        os._exit(0)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
stop.set()
thread.join()
assert codes == [0] * 5, codes
check_compiling()
""")
    assert done.returncode == 0, done.stderr


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(16)


def _functional() -> torch.Tensor:
    with FunctionalTensorMode():
        return FunctionalTensor.to_functional(torch.zeros(16))


WITHOUT_MEMORY = {
    "fake": _fake,
    "functional": _functional,
    "functionalized": lambda: torch._to_functional_tensor(torch.zeros(16)),
    "meta": lambda: torch.zeros(16, device="meta"),
    "sparse": lambda: torch.zeros(16).to_sparse(),
}


@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
def test_tensors_without_memory_are_refused(kind: str) -> None:
    check_interpreting()
    bad, good = WITHOUT_MEMORY[kind](), torch.zeros(16)
    for args in ((bad, good), (good, bad), ((good, (bad,)), good)):
        with pytest.raises(TypeError, match="tensors that have memory, got a"):
            launch(_sum_kernel, (1,), args, {"N": 16}, ONE)
        with compile_for("gfx942"), pytest.raises(TypeError, match="tensors that have memory"):
            launch(_sum_kernel, (1,), args, {"N": 16}, ONE)


def test_tensors_under_vmap_are_refused() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        launch(_sum_kernel, (1,), (x, torch.zeros(1)), {"N": 16}, ONE)
        return x

    with pytest.raises(TypeError, match="tensors that have memory"):
        torch.func.vmap(run)(torch.zeros(2, 16))


def test_an_empty_tensor_has_no_memory_to_miss() -> None:
    o = torch.zeros(1)
    launch(_sum_kernel, (1,), (torch.arange(16.0), o), {"N": 16}, ONE)
    assert float(o) == 360
    launch(_sum_kernel, (0,), (torch.zeros(0), torch.zeros(0)), {"N": 16}, ONE)


# A size that this process has not compiled yet.
@pytest.mark.parametrize(("variable", "n"), [("TRITON_CACHE_DIR", 64), ("TRITON_HOME", 128)])
def test_a_cache_folder_that_cannot_be_written_is_named(
    variable: str, n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "a file"
    blocked.touch()
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv(variable, str(blocked / "folder"))
    with pytest.raises(OSError, match=f"(?s)TRITON_CACHE_DIR.*{blocked}|{blocked}.*TRITON_CACHE_DIR"):
        check_compiling(n=n)


@pytest.mark.slow
def test_a_home_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """Triton reads it when it is imported."""
    blocked = tmp_path / "a file"
    blocked.touch()
    done = _run("import test_launch_process as p; p.check_compiling()", HOME=str(blocked / "folder"))
    assert "TRITON_CACHE_DIR" in done.stderr
    assert str(blocked) in done.stderr


def test_kernels_made_to_be_interpreted_are_interpreted_and_not_compiled() -> None:
    done = _run("""
from test_launch_process import *
from narrowkv.runtime.errors import UnsupportedError
check_interpreting()
try:
    check_compiling()
except UnsupportedError as error:
    print(error)
""", TRITON_INTERPRET="1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "TRITON_INTERPRET" in done.stdout


def test_an_error_of_another_kind_of_file_is_left_as_it_is() -> None:
    from narrowkv.runtime.launch.kernel_cache import explained_cache_errors

    with pytest.raises(FileNotFoundError, match="No such file") as caught, explained_cache_errors():
        Path("/nowhere/at all").read_text()
    assert "TRITON_CACHE_DIR" not in str(caught.value)
