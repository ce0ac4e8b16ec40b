"""Device helpers (`@triton.jit`) of a launch that begins before the one ahead of it has ended.

Programmatic dependent launch of NVIDIA's GPUs from Hopper on: see `LaunchOptions.launch_pdl`.
"""

import narrowkv.runtime.toolchain  # noqa: F401, I001  # first: it says how to get Triton
import triton
import triton.language as tl


@triton.jit
def begin_next_launch():
    """Lets the next launch of the stream begin as soon as all programs of this launch have called this."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def await_previous_launch():
    """Waits until the launch before this one has ended and its stores are visible.

    Every program calls it, on every way through the kernel: the launch after this one counts on it.
    """
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
