"""What every operation is made of: its keywords, its plans, calls that are prepared once, scratch memory.

docs/architecture.md, "An operation", says how the parts fit. An operation is an `Operation`, a subclass of
`Plan`, and functions that say what a call launches, arguments by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch

from narrowkv.runtime.errors import check_instance, span_bytes
from narrowkv.runtime.launch.options import LaunchOptions
from narrowkv.runtime.launch.path import BoundLaunch, executor
from narrowkv.runtime.launch.prepared import Arg, Part, PreparedCall
from narrowkv.runtime.launch.tracing import handle_of
from narrowkv.runtime.launch.workspace import Block, Workspace, block_bytes
from narrowkv.runtime.targets import Target
from narrowkv.runtime.untried import compare_first_call, refuse_untried

if TYPE_CHECKING:
    from typing_extensions import Self

_V = TypeVar("_V")
_P = TypeVar("_P", bound="Prepared")
_MOST_LAYOUTS = 4096
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


class ByIdentity(dict[int, _V]):
    """A dictionary from objects, compared by identity, to values; an entry is removed with its object.

    A look-up takes a quarter of the time of a `WeakKeyDictionary`, and every call of a plan makes one.

    Example:
        >>> class Cache: ...
        >>> cache, found = Cache(), ByIdentity()
        >>> found.keep(cache, "bound")
        'bound'
        >>> found.get(id(cache))
        'bound'
        >>> del cache
        >>> len(found)
        0
    """

    def __init__(self) -> None:
        super().__init__()
        self._owners: dict[int, weakref.ref[object]] = {}

    def keep(self, owner: object, value: _V) -> _V:
        """Stores and returns the value of an object."""
        key = id(owner)

        def forget(_: object) -> None:
            self.pop(key, None)
            self._owners.pop(key, None)

        self._owners[key] = weakref.ref(owner, forget)
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
    grad, tensor = torch.is_grad_enabled(), torch.Tensor
    return tuple(
        [
            x if x is None or not isinstance(x, tensor)
            else (type(x), x.shape, x.stride(), x.dtype, x.device, grad and x.requires_grad)
            for x in values
        ]
    )  # fmt: skip


def metadata_of(x: object) -> tuple[Any, ...]:
    """The key of calls with a tensor: its metadata without its address; of a number, itself and its class."""
    if not isinstance(x, torch.Tensor):
        return type(x), x
    return type(x), x.dtype, x.shape, x.stride(), x.device, x.requires_grad


class Operation:
    """A public function that plans serve, by what it is called with.

    Args:
        name: of the function.
        options: the `TypedDict` of its keywords: one list for the function, `run` of its plans, the reference
            and the operator.
        arguments: the `NamedTuple` of a call's arguments: tensors, structures, keywords with their defaults.
        maker: the name of the function that makes its plans; "" if callers make none.

    Attributes:
        keywords: names of the keywords.
    """

    def __init__(self, name: str, options: Any, arguments: Any, maker: str = "") -> None:
        self.name, self.arguments, self.maker = name, arguments, maker
        self.keywords = frozenset(options.__annotations__)

    def check_keywords(self, given: Iterable[str]) -> None:
        """Raises for a keyword that the function does not have.

        Raises:
            TypeError: as Python does.
        """
        for name in given:
            if name not in self.keywords:
                raise TypeError(f"{self.name}() got an unexpected keyword argument {name!r}")


def refuse_containers(given: Any, values: slice) -> None:
    """Raises an error that names a keyword with a list or another unhashable value.

    Calls are looked up in a dictionary by the values of their keywords. The look-up fails for such a value
    before the keyword's own check has run, and does not name it.

    Args:
        given: the arguments, a named tuple.
        values: those of them that a call is prepared for as they are.

    Raises:
        TypeError: naming it, if there is one.
    """
    for name, value in zip(given._fields[values], given[values], strict=True):
        try:
            hash(value)
        except TypeError:
            raise TypeError(f"{name} must be a single value, got {value!r}") from None


Spans = Sequence[tuple[int, int]]  # first address of each, and the one behind its last


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Prepared:
    """A checked call, which calls with the same metadata repeat; operations add what else they need.

    Attributes:
        launches: of the call; None where there is nothing to launch.
        out, lse: shape and dtype of the output and of the log-sum-exp that a call allocates.
        inputs: tensors that are read, as places among the call's arguments, and the bytes that each spans.
        outputs: bytes that the given output and log-sum-exp span.
        scratch_bytes: of the block `SCRATCH` that each call allocates.
    """

    launches: PreparedCall | None = None
    out: Block = ((), torch.float32)
    lse: Block = ((), torch.float32)
    inputs: tuple[tuple[int, int], ...] = ()
    outputs: tuple[int, int] = (0, 0)
    scratch_bytes: int = 0


def spans_of_arguments(given: Any, unread: Collection[str] = ()) -> dict[str, Any]:
    """`inputs` and `outputs` of a `Prepared`: what the tensors among a call's arguments span.

    Args:
        given: the arguments, a named tuple.
        unread: names of tensors that no launch reads once a result is written.
    """
    sizes = {
        name: span_bytes(value)
        for name, value in zip(given._fields, given, strict=True)
        if isinstance(value, torch.Tensor)
    }
    outputs = sizes.pop("out", 0), sizes.pop("lse", 0)
    inputs = [
        (given._fields.index(name), size) for name, size in sizes.items() if size and name not in unread
    ]
    return {"inputs": tuple(inputs), "outputs": outputs}


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """What the calls of an operation share up to one size: the base of the operations' plans.

    A subclass adds its shape, keywords and configuration, says in `blocks` what scratch its largest call
    takes, in `kernels` what it launches, in `explain` what was chosen, in `refuse_overlap` by which names
    messages call what a call reads. Its calls find in `calls` what was prepared for their metadata, or check,
    bind and prepare; then they take their results from `results`, and launch. Two plans are equal only if
    they are the same object.

    Attributes:
        target: what it was planned for.
        device: where its tensors are.
        workspace: memory of scratch, which calls of the plan share; None allocates it in each call.
        handle: the name by which operators of `torch.ops.narrowkv` find the plan in this process.
    """

    operation: ClassVar[Operation]  # that its calls carry out
    most_calls: ClassVar[int] = 256  # prepared calls that a plan keeps
    # Whether first calls on a target that nothing has run are compared with the reference.
    compared: ClassVar[bool] = True
    target: Target
    device: torch.device
    workspace: Workspace | None = field(repr=False, default=None)
    handle: str = field(init=False, repr=False)
    # Calls that were checked and prepared, by their signature.
    calls: Bounded[Any] = field(init=False, repr=False)
    # Launches that calls of several sizes share.
    _layouts: Bounded[PreparedCall] = field(init=False, repr=False)
    _bound: dict[Any, BoundLaunch] = field(init=False, repr=False)
    _scratch: dict[str, torch.Tensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Makes the plan known to operators, and divides its workspace."""
        if self.compared:
            refuse_untried(type(self), self.target, self.device)
        made: dict[str, Any] = {"handle": handle_of(self), "calls": Bounded(self.most_calls), "_bound": {}}
        made["_layouts"] = Bounded(_MOST_LAYOUTS)
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

    def results(
        self, call: Prepared, given: Any, cache: Spans = (), read: Spans = (), store: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output and the log-sum-exp of a call, new where none is given; None where none is wanted.

        Args:
            call: what was prepared.
            given: the arguments, with `out`, `lse` and `return_lse`.
            cache: addresses of a cache that is read; read: of other structures that are read.
            store: what the call writes of the cache, with a method `meets` of spans; None if nothing.

        Raises:
            ValueError: the call would write to what it reads, or one result lies over the other.
        """
        out, lse = given.out, given.lse
        if out is not None or lse is not None or store is not None:
            taken = [*read]
            for index, size in call.inputs:
                begin = given[index].data_ptr()
                taken.append((begin, begin + size))
            met = store is not None and store.meets(taken)
            taken += cache
            for result, size in ((out, call.outputs[0]), (lse, call.outputs[1])):
                if result is None or not size:
                    continue
                begin = result.data_ptr()
                for low, high in taken:
                    met = met or (begin < high and low < begin + size)
                taken.append((begin, begin + size))
            if met:
                self.refuse_overlap(given)
        if out is None:
            shape, dtype = call.out
            out = torch.empty(shape, dtype=dtype, device=self.device)
        if lse is None and given.return_lse:
            shape, dtype = call.lse
            lse = torch.empty(shape, dtype=dtype, device=self.device)
        return out, lse

    def prepared(self, signature: Any, call: _P, given: Any) -> _P:
        """Keeps a call that was prepared; on a target that nothing has run its results are compared first."""
        self.calls.keep(signature, call)
        if self.compared and self.target.is_untried and executor() is None:
            compare_first_call(self, given)
        return call

    def refuse_overlap(self, given: Any) -> None:
        """Names what a call would write to and reads, if anything; `results` has found that spans meet."""
        raise NotImplementedError

    def scratch_block(self, call: Prepared) -> torch.Tensor | None:
        """The scratch of a call that the workspace does not hold."""
        size = call.scratch_bytes
        return torch.empty(size, dtype=torch.uint8, device=self.device) if size else None

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
        if not size and any(isinstance(part, Part) for part in found.values()):
            size = block_bytes([((1,), torch.uint8)])  # parts of no elements lie in a block, too
        return found, size
