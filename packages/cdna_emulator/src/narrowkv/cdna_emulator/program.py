"""A kernel that is parsed and bound: basic blocks of steps, and the initial state from its descriptor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .parser import Instruction, KernelArgument
from .state import Waves

Step = Callable[[Waves], None]
"""A function that executes an instruction on a group of waves."""


@dataclass
class Block:
    """Instructions that run without a jump, and how the block ends.

    Attributes:
        steps: what to run.
        instructions: the same, for counts and messages; the instruction that ends the block is among them.
        end: ``fall``, ``exit``, ``barrier`` or a condition of `loading.BRANCHES`.
        target: index of the block that a branch goes to.
        last: the instruction that ends the block.
    """

    steps: list[Step] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    end: str = "fall"
    target: int = -1

    @property
    def last(self) -> Instruction:
        """The instruction that ends the block."""
        return self.instructions[-1]


@dataclass(eq=False)
class Program:
    """One kernel, ready to run on a target.

    Attributes:
        target: ``gfx942`` or ``gfx950``.
        kernel_name: its name.
        kernarg: the arguments of the argument block, in order.
        kernarg_bytes: size of the block.
        num_warps: waves of a workgroup.
        lds_bytes: LDS of a workgroup; accesses past it are errors.
        vgprs: vector registers, accumulation registers included.
        accum_offset: register number of the first accumulation register.
        scratch_bytes: private memory of a lane.
        descriptor: the ``.amdhsa_`` directives.
        blocks: the code.
        entry: index of the block where a wave starts.
        hardware_sums: see `load_program`.
        unbound: fills the steps of the blocks, where that waits for the numpy engine's first run.
    """

    target: str
    kernel_name: str
    kernarg: tuple[KernelArgument, ...]
    kernarg_bytes: int
    num_warps: int
    lds_bytes: int
    vgprs: int
    accum_offset: int
    scratch_bytes: int
    descriptor: dict[str, int]
    blocks: list[Block] = field(default_factory=list)
    entry: int = 0
    hardware_sums: bool = False
    unbound: Callable[[], None] | None = None

    def bind(self) -> None:
        """Fills the steps of the blocks, once.

        Raises:
            EmulatorError: see `loading.load_program`.
        """
        if self.unbound is not None:
            self.unbound()
            self.unbound = None
