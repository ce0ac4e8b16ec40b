"""What every operation is made of: a plan, calls that are prepared once, and scratch memory.

docs/architecture.md, "An operation", says how the parts fit. An operation has one subclass of `Plan`, one
frozen dataclass of its keywords, and functions that say what a call launches, arguments by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch

from narrowkv.runtime.errors import check_instance
from narrowkv.runtime.launch.bound import BoundLaunch
from narrowkv.runtime.launch.options import LaunchOptions
from narrowkv.runtime.launch.prepared import Arg, Part
from narrowkv.runtime.launch.tracing import handle_of
from narrowkv.runtime.launch.workspace import Block, Workspace, block_bytes
from narrowkv.runtime.targets import Target
from narrowkv.runtime.untried import refuse_untried

if TYPE_CHECKING:
    from typing_extensions import Self

_V = TypeVar("_V")
SCRATCH = "scratch"  # the name of the memory that a call without a workspace allocates


class Bounded(dict[Any, _V], Generic[_V]):
    """A dictionary that forgets everything when it is full.

    Args:
        most: how many values it holds.

    Example:
        >>> known = Bounded(2)
        >>> for key in "abc":
        ...     known.keep(key, key.upper())
        'A'
        'B'
        'C'
        >>> known
        {'c': 'C'}
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def find(self, key: Any) -> _V | None:
        """The value of a key, or None; also for a key that holds what has no hash, as wrong arguments may."""
        try:
            return self.get(key)
        except TypeError:
            return None

    def keep(self, key: Any, value: _V) -> _V:
        """Stores and returns a value."""
        if len(self) >= self.most:
            self.clear()
        self[key] = value
        return value


def signature_of(*values: Any) -> tuple[Any, ...]:
    """What a call is checked and prepared for: the metadata of tensors, other values as they are.

    Addresses are not part of it.

    Example:
        >>> x = torch.zeros(4, 8)
        >>> signature_of(x, 0.5) == signature_of(x + 1, 0.5) != signature_of(x.T, 0.5)
        True
    """
    grad = torch.is_grad_enabled()
    return tuple(
        [
            (type(x), x.shape, x.stride(), x.dtype, x.device, grad and x.requires_grad)
            if isinstance(x, torch.Tensor)
            else x
            for x in values
        ]
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """What the calls of an operation share up to one size: the base of the operations' plans.

    A subclass adds its shape, keywords and configuration, says in `blocks` what scratch its largest call
    takes, in `kernels` what it launches, in `explain` what was chosen. Two plans are equal only if they are
    the same object.

    Attributes:
        target: what it was planned for.
        device: where its tensors are.
        workspace: memory of scratch, which calls of the plan share; None allocates it in each call.
        handle: the name by which operators of `torch.ops.narrowkv` find the plan in this process.
    """

    most_calls: ClassVar[int] = 256  # prepared calls that a plan keeps
    target: Target
    device: torch.device
    workspace: Workspace | None = field(repr=False, default=None)
    handle: str = field(init=False, repr=False)
    # Calls that were checked and prepared, by their signature.
    calls: Bounded[Any] = field(init=False, repr=False)
    _bound: dict[Any, BoundLaunch] = field(init=False, repr=False)
    _scratch: dict[str, torch.Tensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Makes the plan known to operators, and divides its workspace."""
        refuse_untried(type(self), self.target, self.device)
        made: dict[str, Any] = {"handle": handle_of(self), "calls": Bounded(self.most_calls), "_bound": {}}
        blocks = {} if self.workspace is None else self.blocks()
        tensors = () if self.workspace is None else self.workspace.carve(list(blocks.values()))
        made["_scratch"] = dict(zip(blocks, tensors, strict=True))
        for name, value in made.items():
            object.__setattr__(self, name, value)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """A new plan over the same memory, whose addresses captured graphs hold."""
        return replace(self)

    def blocks(self) -> dict[str, Block]:
        """Scratch of the largest call by name: shapes and dtypes; none where calls divide the workspace."""
        return {}

    def workspace_bytes(self) -> int:
        """Bytes of workspace that the largest call takes."""
        return block_bytes(list(self.blocks().values()))

    def with_workspace(self, workspace: Workspace | None = None) -> Self:
        """The same plan with its own memory, or in a workspace that plans share.

        Args:
            workspace: at least `workspace_bytes()` on the plan's device; None makes one. Plans that never run
                at the same time may share one.

        Raises:
            TypeError, ValueError: naming what was expected and what came.
        """
        needed = self.workspace_bytes()
        if workspace is None:
            workspace = Workspace(needed, self.device)
        check_instance("workspace", workspace, Workspace)
        if workspace.num_bytes < needed or workspace.device != self.device:
            raise ValueError(
                f"workspace must have at least {needed} bytes on {self.device}, "
                f"got {workspace.num_bytes} on {workspace.device}"
            )
        return replace(self, workspace=workspace)

    def bind(self, kernel: Any, options: LaunchOptions, **constexprs: Any) -> BoundLaunch:
        """A kernel with its constants, one object for equal ones."""
        key = (kernel, tuple(constexprs.items()), options)
        known = self._bound.get(key)
        return known or self._bound.setdefault(key, BoundLaunch(kernel, constexprs, options))

    def scratch(self, blocks: Mapping[str, Block]) -> tuple[dict[str, Any], int]:
        """Scratch of a call as arguments of its launches.

        Args:
            blocks: by name, none larger than those of the largest call.

        Returns:
            The tensors of the workspace and, for what it does not hold, parts of the block named `SCRATCH`
            that each call allocates; and the bytes of that block.
        """
        found: dict[str, Any] = {}
        size, block = 0, Arg(SCRATCH)
        for name, (shape, dtype) in blocks.items():
            found[name] = self._scratch.get(name)
            if found[name] is None:
                found[name] = Part(block, size, dtype)
                size += block_bytes([(shape, dtype)])
        return found, size
