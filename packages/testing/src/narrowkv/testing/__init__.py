"""What tests and the command `narrowkv` share: kernels run, compiled and modelled for AMD on any machine."""

from narrowkv.testing.codegen import KernelCode, compile_call
from narrowkv.testing.emulation import EmulateExecutor, emulating

__all__ = ["EmulateExecutor", "KernelCode", "compile_call", "emulating"]
