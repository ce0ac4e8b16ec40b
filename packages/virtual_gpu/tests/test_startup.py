"""The start-up file, the chips, the cache folder and their errors: no test here has a virtual GPU itself."""

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

import narrowkv.virtual_gpu as virtual_gpu
from narrowkv.cdna_emulator.compiled import building
from narrowkv.virtual_gpu import __main__ as command
from narrowkv.virtual_gpu import build

STARTUP = Path(__file__).parents[1] / "narrowkv_virtual_gpu.pth"
# What a program can see of torch and Triton that the virtual GPU could change.
NAMES = """
    import sys
    modules = set(sys.modules)
    import torch, triton
    from triton.backends.amd.driver import HIPLauncher
    print(sorted(name for name in modules if "narrowkv" in name), len(sys.meta_path))
    def describe(value):
        defined = isinstance(value, (type, type(describe), type(len)))
        return type(value).__name__, *((value.__module__, value.__qualname__) if defined else ())
    for module in (torch, torch._C, torch.cuda, torch.cuda.graphs, torch.cuda.streams, torch.version,
                   torch.backends.cuda, torch.Tensor, torch.UntypedStorage, triton, triton.knobs,
                   HIPLauncher):
        print(module.__name__, sorted((name, *describe(value)) for name, value in vars(module).items()))
    print(torch.version.hip, triton.knobs.runtime.kernel_load_start_hook.calls, torch.cuda.is_available())
"""


def python(code: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    return subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)], capture_output=True, text=True,
        env=environment | variables,
    )  # fmt: skip


def started(code: str) -> str:
    """Code after the start-up file's line, as `site` runs it at the start of Python."""
    return STARTUP.read_text() + "\n" + textwrap.dedent(code)


def test_without_the_variable_nothing_is_imported_and_no_name_is_changed() -> None:
    # Without `site` no start-up file runs, that of an installed package neither.
    path = os.pathsep.join(sys.path)
    plain, with_file = (python(code, "-S", PYTHONPATH=path) for code in (NAMES, started(NAMES)))
    assert plain.returncode == 0, plain.stderr
    assert plain.stdout.startswith("[] ")
    assert with_file.stdout == plain.stdout


def test_the_variable_gives_a_gpu_to_a_program_that_imports_torch() -> None:
    done = python(started("import torch; print(torch.ones(2, device='cuda'))"), TRITON_VIRTUAL_GPU="gfx942")
    assert done.stdout == "tensor([1., 1.], device='cuda:0')\n", done.stderr
    done = python(
        started("import sys; print('torch' in sys.modules, 'numpy' in sys.modules)"),
        TRITON_VIRTUAL_GPU="gfx942",
    )
    assert done.stdout == "False False\n", done.stderr


def test_install_works_before_and_after_torch_is_imported() -> None:
    for order in (
        "virtual_gpu.install('gfx950'); import torch",
        "import torch; virtual_gpu.install('gfx950')",
    ):
        done = python(
            f"""
            import narrowkv.virtual_gpu as virtual_gpu
            {order}
            x = torch.ones(3, device="cuda", requires_grad=True)
            (x * x).sum().backward()
            print(x.grad.tolist(), torch.cuda.get_device_properties(0).gcnArchName,
                  virtual_gpu.install("MI355X"))
            try:
                virtual_gpu.install("gfx942")
            except virtual_gpu.VirtualGpuError as error:
                print(error)
            """
        )
        lines = done.stdout.splitlines()
        assert lines[0].startswith("[2.0, 2.0, 2.0] gfx950:sramecc+:xnack- <virtual GPU: 1 x MI355X"), (
            done.stderr
        )
        assert lines[1].startswith("a process has one virtual GPU"), done.stderr


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TRITON_VIRTUAL_GPU": "gfx90a"}, "must be one of gfx942, gfx950, MI300X.*got 'gfx90a'"),
        (
            {"TRITON_VIRTUAL_GPU": "gfx942", "TRITON_VIRTUAL_GPU_COUNT": "two"},
            "must be a number of devices, got 'two'",
        ),
        (
            {"TRITON_VIRTUAL_GPU": "gfx942", "TRITON_VIRTUAL_GPU_COUNT": "99"},
            r"count must be within 1\.\.16, got 99",
        ),
        ({"TRITON_VIRTUAL_GPU": "gfx942", "TRITON_VIRTUAL_GPU_CHECK": "yes"}, "must be 0 or 1, got 'yes'"),
    ],
)
def test_wrong_variables_are_refused(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((ValueError, virtual_gpu.VirtualGpuError), match=message):
        virtual_gpu.install_from_environment()


def test_chips_have_the_compute_units_of_the_data_sheets() -> None:
    units = {name: chip.compute_units for name, chip in virtual_gpu.CHIPS.items()}
    assert units["MI300X"] == units["MI325X"] == 304
    assert units["MI300X-CPX"] == 304 // 8
    assert (units["MI300A"], units["MI308X"]) == (228, 80)
    assert units["MI350X"] == units["MI355X"] == 256


def test_two_threads_that_need_a_product_compile_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is on the folder: two processes see what two threads with files of their own see."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compile_product, compiled = build._compile, []

    def counted(command: list[str], folder: Path, name: str) -> None:
        compiled.append(name)
        assert not (folder / name).exists()
        compile_product(command, folder, name)

    monkeypatch.setattr(build, "_compile", counted)
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(build.hip_runtime())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled == ["libamdhip64.so"]
    assert len(set(paths)) == 1
    assert len(paths) == 4
    assert sorted(p.name for p in paths[0].parent.iterdir()) == ["libamdhip64.so", "lock"]


def test_a_missing_compiler_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(
        virtual_gpu.VirtualGpuError, match=r"needs a C compiler .*none of gcc, clang, cc was found"
    ):
        build.hip_runtime()
    monkeypatch.setenv("CC", "/nowhere/gcc")
    with pytest.raises(virtual_gpu.VirtualGpuError, match="CC=/nowhere/gcc is not there") as caught:
        build.hip_runtime()
    assert "\n" not in str(caught.value)


def test_a_compiler_that_fails_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'x.c:1: error: no headers' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(virtual_gpu.VirtualGpuError, match=r"failed: x.c:1: error: no headers"):
        build.hip_runtime()
    assert not list(build.cache_folder().rglob("*.so*"))


def test_a_folder_that_cannot_be_written_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.raises(virtual_gpu.VirtualGpuError, match=r"cannot be written.*XDG_CACHE_HOME"):
        build.hip_runtime()


def test_the_command_empties_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = build.hip_runtime()
    engine = building.cache_folder() / "engine" / "library.so"
    engine.parent.mkdir(parents=True)
    engine.write_bytes(b"")
    assert command.main(["clean"]) == 0
    assert "bytes removed" in capsys.readouterr().out
    assert not library.exists()
    assert list(tmp_path.iterdir()) == []
    assert command.main(["chips"]) == 0
    assert "MI308X" in capsys.readouterr().out
