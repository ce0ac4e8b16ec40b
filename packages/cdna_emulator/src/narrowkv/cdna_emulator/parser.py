"""Assembly text to instructions: lines, operands' text, modifiers, labels, descriptor and metadata.

Nothing here knows what an instruction does. The syntax is that of LLVM's AMDGPU backend ("Syntax of AMDGPU
instruction operands and modifiers", "AMDHSA kernel descriptor" and "Code object metadata" in its user guide).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

from .errors import EmulatorError

_MNEMONIC = re.compile(r"^(?:s|v|ds|buffer|global|flat|scratch)_\w+$")
_LABEL = re.compile(r"^([\w.$]+):")
_ENCODINGS = ("_e64_dpp", "_sdwa", "_e32", "_e64", "_dpp")  # the longest first


@dataclass(frozen=True)
class Instruction:
    """One line of assembly.

    Attributes:
        name: mnemonic without its encoding suffix, ``v_add_f32``.
        encoding: ``e32``, ``e64``, ``sdwa``, ``dpp`` or the empty string.
        operands: operands as written, destination first.
        modifiers: ``{"offset": "16", "offen": ""}``.
        line: line number in the text, from 1.
        text: the line without its comment.
    """

    name: str
    encoding: str
    operands: tuple[str, ...]
    modifiers: dict[str, str]
    line: int
    text: str

    def integer(self, modifier: str, default: int = 0) -> int:
        """The integer value of a modifier such as ``offset:16``."""
        value = self.modifiers.get(modifier)
        return default if value is None else int(value, 0)

    def bits(self, modifier: str, count: int, default: int) -> tuple[int, ...]:
        """The list value of a modifier such as ``op_sel:[1,0]``, filled with ``default`` to ``count``."""
        value = self.modifiers.get(modifier)
        given = [int(item, 0) for item in value.strip("[]").split(",")] if value else []
        return tuple((given + [default] * count)[:count])


@dataclass(frozen=True)
class KernelArgument:
    """One entry of the metadata's ``.args``: where it lies in the argument block and what it is."""

    offset: int
    size: int
    kind: str


@dataclass
class Assembly:
    """The parsed text of one compiled kernel."""

    target: str = ""
    kernel_name: str = ""
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    descriptor: dict[str, int] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    arguments: tuple[KernelArgument, ...] = ()


def _split(text: str, separators: str) -> list[str]:
    """Split at separators that stand outside brackets, parentheses and absolute-value bars."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        if char in "([":
            depth += 1
        elif char in ")]":
            depth -= 1
        elif char in separators and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def parse_instruction(text: str, line: int) -> Instruction:
    """Parse one instruction, for example ``ds_read2_b32 v[2:3], v36 offset1:32``."""
    return Instruction(*_parts(text), line, text)


@lru_cache(maxsize=1 << 16)  # kernels share most of their lines, and edited copies of a kernel all but one
def _parts(text: str) -> tuple[str, str, tuple[str, ...], dict[str, str]]:
    """Name, encoding, operands and modifiers of an instruction."""
    mnemonic, _, rest = text.partition(" ")
    encoding = next((e for e in _ENCODINGS if mnemonic.endswith(e)), "")
    name = mnemonic.removesuffix(encoding) if encoding else mnemonic
    operands: list[str] = []
    modifiers: dict[str, str] = {}
    for part in _split(rest, ","):
        operand, *flags = _split(part, " \t")
        if re.match(r"^[a-z][a-z_0-9]*:", operand):  # an instruction with modifiers alone
            flags.insert(0, operand)
        else:
            operands.append(operand)
        for flag in flags:
            key, _, value = flag.partition(":")
            modifiers[key] = value
    return name, encoding.strip("_"), tuple(operands), modifiers


def _parse_arguments(lines: list[str]) -> tuple[KernelArgument, ...]:
    """Read the ``.args`` list of the metadata, which is YAML of a fixed shape."""
    arguments: list[KernelArgument] = []
    current: dict[str, str] = {}
    indent: int | None = None
    for raw in lines:
        text, depth = raw.strip(), len(raw) - len(raw.lstrip())
        if indent is None:
            if text in (".args:", "- .args:"):
                indent = depth
            continue
        starts = text.startswith("- ")
        if depth <= indent + (2 if not starts else -1) and not starts:
            break
        if depth < indent:
            break
        if starts and current:
            arguments.append(_argument(current))
            current = {}
        key, _, value = text.removeprefix("- ").partition(":")
        current[key] = value.strip()
    if current:
        arguments.append(_argument(current))
    return tuple(arguments)


def _argument(entry: dict[str, str]) -> KernelArgument:
    return KernelArgument(int(entry[".offset"]), int(entry[".size"]), entry[".value_kind"])


def parse_assembly(text: str) -> Assembly:
    """Parse the text of ``compiled.asm["amdgcn"]``.

    Args:
        text: assembly of one kernel, as LLVM prints it.

    Returns:
        The parsed kernel. Labels map to the index of the instruction that follows them.

    Raises:
        EmulatorError: if the text holds no kernel or names no target.
    """
    result = Assembly()
    in_code, in_metadata, metadata = False, False, []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split(";", 1)[0].rstrip()
        stripped = line.strip()
        if in_metadata:
            if stripped == ".end_amdgpu_metadata":
                in_metadata = False
            else:
                metadata.append(line)
        elif not stripped:
            continue
        elif stripped.startswith(".amdgcn_target"):
            found = re.search(r"gfx[0-9a-f]+", stripped.split('"')[1].rsplit("-", 1)[-1])
            result.target = found.group(0) if found else ""
        elif stripped == ".text":
            in_code = True
        elif stripped.startswith(".section"):
            in_code = False
        elif stripped.startswith(".amdhsa_kernel "):
            result.kernel_name = stripped.split()[1]
        elif stripped.startswith(".amdhsa_"):
            key, *value = stripped.split()
            if value and value[0].lstrip("-").isdigit():
                result.descriptor[key.removeprefix(".amdhsa_")] = int(value[0])
        elif stripped == ".amdgpu_metadata":
            in_metadata = True
        elif in_code:
            label = _LABEL.match(stripped)
            if label:
                result.labels[label.group(1)] = len(result.instructions)
                stripped = stripped[label.end() :].strip()
            if stripped and _MNEMONIC.match(stripped.split(None, 1)[0]):
                result.instructions.append(parse_instruction(" ".join(stripped.split()), number))
    for line in metadata:
        found = re.match(r"^\s*(?:- )?(\.\w+):\s+(\S.*)$", line)
        if found:
            result.metadata.setdefault(found.group(1), found.group(2).strip())
    result.arguments = _parse_arguments(metadata)
    if not result.target:
        raise EmulatorError(
            'the text names no target: expected a line .amdgcn_target "...gfx942" or "...gfx950"'
        )
    if not result.kernel_name or not result.instructions:
        raise EmulatorError("the text holds no kernel: expected .amdhsa_kernel and instructions in .text")
    return result
