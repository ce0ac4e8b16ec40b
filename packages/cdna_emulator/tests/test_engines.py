"""The compiled engine against the numpy engine: every instruction, with all and some lanes active."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from emulator_machine import assembly
from emulator_support import TARGETS
from engine_cases import assert_same

from narrowkv.cdna_emulator import UnknownInstructionError, convert, engine_refusal, load_program, scalar
from narrowkv.cdna_emulator.atomics import ATOMICS, LDS_ATOMICS
from narrowkv.cdna_emulator.lanes import CROSS_LANE
from narrowkv.cdna_emulator.lds import _READS, _TRANSPOSES, _WRITES
from narrowkv.cdna_emulator.operands import DTYPES
from narrowkv.cdna_emulator.packed import _DOT, _HALF_OPS, _WORD_OPS
from narrowkv.cdna_emulator.scalar import SCALAR
from narrowkv.cdna_emulator.valu import CARRY, SPECIAL
from narrowkv.cdna_emulator.valu_ops import ACCUMULATING, COMPARES, LITERAL_FMA, SATURATING, VALU
from narrowkv.cdna_emulator.vmem import WIDTHS

pytestmark = pytest.mark.skipif(
    engine_refusal(load_program(assembly("gfx942", "s_nop 0"))) is not None, reason="no C compiler"
)
Case = tuple[str, str, tuple[str, ...], str]  # target, lines, kinds of the sources, kind of the result


def is_wide(kind: str) -> bool:
    return DTYPES[kind]().itemsize == 8


def vector(k: int, kind: str) -> str:
    return f"v[{4 * k}:{4 * k + 1}]" if is_wide(kind) else f"v{4 * k}"


def scalar_pair(k: int, kind: str) -> str:
    return f"s[{16 + 4 * k}:{17 + 4 * k}]" if is_wide(kind) else f"s{16 + 4 * k}"


def registers(first: int, size: int) -> str:
    return f"v[{first}:{first + size // 4 - 1}]" if size > 4 else f"v{first}"


def each(function: Any, kinds: tuple[str, ...]) -> str:
    return ", ".join(function(k, kind) for k, kind in enumerate(kinds))


def plain_cases() -> Any:
    for name, op in VALU.items():
        result, kinds = "v[16:17]" if is_wide(op.result) else "v16", op.sources
        texts = [each(vector, kinds)]
        if op.result[0] == "f":
            texts += [f"{texts[0]} {modifier}" for modifier in ("clamp", "mul:2", "div:2", "mul:4 clamp")]
        if all(kind[0] == "f" for kind in kinds):
            texts.append(
                ", ".join(
                    ("-|{}|" if k == 0 else "-{}").format(vector(k, kind)) for k, kind in enumerate(kinds)
                )
            )
        if len(kinds) > 1:
            texts.append(
                ", ".join([scalar_pair(0, kinds[0]), *(vector(k, kind) for k, kind in enumerate(kinds) if k)])
            )
            texts.append(
                ", ".join([vector(0, kinds[0]), *("1.0" if kind[0] == "f" else "-5" for kind in kinds[1:])])
            )
        if any(DTYPES[kind]().itemsize == 2 for kind in (op.result, *kinds)):
            texts.append(f"{texts[0]} op_sel:[{','.join('1' * (len(kinds) + 1))}]")
        yield from (("gfx950", f"{name} {result}, {text}", kinds, op.result) for text in texts)
        if name in SATURATING:
            yield "gfx942", f"{name} {result}, {texts[0]} clamp", kinds, op.result


def part_cases() -> Any:
    """SDWA and DPP."""
    selections = (
        "dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_2 src1_sel:WORD_1",
        "dst_sel:BYTE_1 dst_unused:UNUSED_SEXT src0_sel:WORD_1 src1_sel:DWORD",
        "dst_sel:WORD_0 dst_unused:UNUSED_PAD src0_sel:BYTE_0 src1_sel:BYTE_3",
    )
    controls = (
        "quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf",
        "row_shr:3 row_mask:0xa bank_mask:0x7",
        "row_shl:1 bound_ctrl:0 row_mask:0xf bank_mask:0xf",
        "row_bcast:15 row_mask:0xa bank_mask:0xf",
        "row_mirror row_mask:0xf bank_mask:0xf",
        "wave_ror:1 row_mask:0xf bank_mask:0xf",
    )
    for name, op in VALU.items():
        if len(op.sources) > 2 or is_wide(op.result):
            continue
        texts = each(vector, op.sources)
        if any(is_wide(kind) for kind in op.sources):
            yield "gfx942", f"{name}_dpp v16, {texts} {controls[1]}", op.sources, op.result
            continue
        yield from (("gfx942", f"{name}_sdwa v16, {texts} {s}", op.sources, "u32") for s in selections)
        yield from (("gfx942", f"{name}_dpp v16, {texts} {c}", op.sources, op.result) for c in controls)


def mask_cases() -> Any:
    for name, op in COMPARES.items():
        texts = each(vector, op.sources)
        yield "gfx942", f"{name} vcc, {texts}", op.sources, "u32"
        yield "gfx942", f"{name.replace('v_cmp_', 'v_cmpx_')} s[20:21], {texts}", op.sources, "u32"
    for name, (_, _, takes) in CARRY.items():
        yield "gfx942", f"{name} v16, vcc, v0, v4{', vcc' if takes else ''}", ("u32", "u32"), "u32"
        yield "gfx942", f"{name} v16, s[22:23], s16, v4{', s[24:25]' if takes else ''}", ("u32", "u32"), "u32"


def other_vector_cases() -> Any:
    for name, base in ACCUMULATING.items():
        kinds = VALU[base].sources
        target = "v[16:17]" if is_wide(kinds[0]) else "v16"
        yield "gfx942", f"{name} {target}, {each(vector, kinds[:2])}", kinds, kinds[0]
    for name, base in LITERAL_FMA.items():
        operands = "v0, 0x3fc01234, v8" if "amk" in name else "v0, v4, 0x3fc01234"
        yield "gfx942", f"{name} v16, {operands}", VALU[base].sources, VALU[base].result
    for name, kinds in {
        "v_mad_u64_u32": ("u32", "u32", "u64"),
        "v_mad_i64_i32": ("i32", "i32", "i64"),
    }.items():
        yield "gfx942", f"{name} v[16:17], s[20:21], v0, v4, v[8:9]", kinds, "u64"
    floats = ("f32",) * 3
    for first in ("v0", "v4", "v8"):
        yield "gfx942", f"v_div_scale_f32 v16, vcc, {first}, v4, v8", floats, "f32"
    yield "gfx942", "v_div_fmas_f32 v16, v0, v4, v8", floats, "f32"
    doubles = ("f64",) * 3
    for first in ("v[0:1]", "v[4:5]", "v[8:9]"):
        yield "gfx942", f"v_div_scale_f64 v[16:17], vcc, {first}, v[4:5], v[8:9]", doubles, "f64"
    yield "gfx942", "v_div_fmas_f64 v[16:17], v[0:1], v[4:5], v[8:9]", doubles, "f64"
    for line in (
        "v_mbcnt_lo_u32_b32 v16, v0, v4",
        "v_mbcnt_hi_u32_b32 v16, v0, v4",
        "v_cndmask_b32 v16, v0, v4, vcc",
        "v_cndmask_b32 v16, -v0, |v4|, s[20:21]",
        "v_perm_b32 v16, v0, v4, s20",
        "v_perm_b32 v16, v0, v4, 0xd010c07",
        "v_perm_b32 v16, v0, v4, 0xb0a0908",
        "v_cndmask_b32_sdwa v16, v0, v4, vcc dst_sel:WORD_1 "
        "dst_unused:UNUSED_PRESERVE src0_sel:BYTE_1 src1_sel:WORD_0",
        "v_readfirstlane_b32 s36, v0",
        "v_readfirstlane_b32 s36, s16",
        "v_readlane_b32 s36, v0, s20",
        "v_writelane_b32 v16, s16, s20",
        "v_permlane32_swap_b32 v0, v4",
        "v_permlane16_swap_b32 v0, v4",
        "v_swap_b32 v0, v4",
        "v_bitop3_b16 v16, v0, v4, v8 bitop3:0x6c",
        "v_mov_b32 v16, scc",
        *(f"v_bitop3_b32 v16, v0, v4, v8 bitop3:{table:#x}" for table in range(0, 256, 17)),
    ):
        yield "gfx950", line, ("u32",) * 3, "u32"


def scalar_cases() -> Any:
    for name, op in SCALAR.items():
        target = "s[36:37]" if is_wide(op.result) else "s36"
        yield "gfx942", f"{name} {target}, {each(scalar_pair, op.sources)}", op.sources, "u32"
        yield "gfx942", f"{name} {target}, {', '.join('-7' for _ in op.sources)}", op.sources, "u32"
    for order, kind in itertools.product(("eq", "lg", "gt", "ge", "lt", "le"), ("i32", "u32", "i64", "u64")):
        yield (
            "gfx942",
            f"s_cmp_{order}_{kind} {scalar_pair(0, kind)}, {scalar_pair(1, kind)}",
            (kind, kind),
            "u32",
        )
        if not is_wide(kind):
            yield "gfx942", f"s_cmpk_{order}_{kind} s16, 0xfff0", (kind,), "u32"
    for name in ("and", "or", "xor", "andn2", "orn2", "andn1", "orn1", "nand", "nor", "xnor"):
        yield "gfx942", f"s_{name}_saveexec_b64 s[36:37], s[20:21]\nv_add_u32 v16, v0, v4", ("u32",), "u32"
    for line in (
        "s_addc_u32 s36, s16, s20",
        "s_subb_u32 s36, s16, s20",
        "s_cselect_b32 s36, s16, s20",
        "s_movk_i32 s36, 0xfff3",
        "s_cselect_b64 s[36:37], s[16:17], s[20:21]",
        "s_cmov_b32 s36, s16",
        "s_cmov_b64 s[36:37], s[16:17]",
        "s_addk_i32 s36, 0x7ff3",
        "s_mulk_i32 s36, 0xfff3",
        "s_cmovk_i32 s36, 0xfff3",
        "s_bitset0_b32 s36, s16",
        "s_bitset1_b32 s36, s16",
        "s_bitset0_b64 s[36:37], s16",
        "s_bitset1_b64 s[36:37], s16",
        "s_bitcmp0_b32 s16, s20",
        "s_bitcmp1_b32 s16, s20",
        "s_bitcmp0_b64 s[16:17], s20",
        "s_bitcmp1_b64 s[16:17], s20",
        "s_mov_b64 exec, s[16:17]\nv_mov_b32 v16, v4",
        "s_add_u32 s36, s16, scc",
        "s_mov_b32 exec_lo, s16\nv_mov_b32 v16, v4",
    ):
        yield "gfx942", line, ("u32",) * 2, "u32"


def convert_cases() -> Any:
    overflow = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\n"
    for target, mode, narrow in itertools.product(("gfx942", "gfx950"), ("", overflow), ("fp8", "bf8")):
        for select in ("", " op_sel:[0,0,1]"):
            yield target, f"{mode}v_cvt_pk_{narrow}_f32 v16, v0, -v4{select}", ("f32", "f32"), "u32"
        yield target, f"{mode}v_cvt_f16_f32 v16, v0 op_sel:[0,1]", ("f32",), "f16"
        sdwa = "dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:DWORD"
        yield target, f"{mode}v_cvt_f16_f32_sdwa v16, -v0 {sdwa}", ("f32",), "f16"
        for select in ("", " op_sel:[1,0]", " op_sel:[0,1]", " op_sel:[1,1]"):
            yield target, f"v_cvt_pk_f32_{narrow} v[16:17], v0{select}", ("u32",), "f32"
            yield target, f"v_cvt_f32_{narrow} v16, v0{select}", ("u32",), "f32"
        yield target, f"v_cvt_pk_f32_{narrow}_sdwa v[16:17], v0 src0_sel:WORD_1", ("u32",), "f32"
        yield target, f"v_cvt_f32_{narrow}_sdwa v16, v0 src0_sel:BYTE_3", ("u32",), "f32"
    for narrow, wide, mode in itertools.product(
        ("fp8", "bf8", "fp4"), ("f32", "f16", "bf16"), ("", overflow)
    ):
        sources, kind = ("v0, v4", "f32") if wide == "f32" else ("v0", "f16" if wide == "f16" else "u32")
        last = (
            "op_sel:[0,0,1,1]"
            if narrow == "fp4"
            else "op_sel:[0,0,0,1]"
            if wide == "f32"
            else "op_sel:[0,0,1]"
        )
        for select in ("", last):
            yield (
                "gfx950",
                f"{mode}v_cvt_scalef32_pk_{narrow}_{wide} v16, {sources}, v8 {select}",
                (kind, kind, "f32"),
                "u32",
            )
        for select in ("", " op_sel:[1,0]", " op_sel:[0,1]"):
            line = (
                f"v_cvt_scalef32_pk_{wide}_{narrow} {'v[16:17]' if wide == 'f32' else 'v16'}, v0, v4{select}"
            )
            yield "gfx950", line, ("u32", "f32"), wide if wide != "bf16" else "u32"
            if narrow != "fp4" and wide != "bf16":
                yield "gfx950", f"v_cvt_scalef32_{wide}_{narrow} v16, v0, v4{select}", ("u32", "f32"), wide
    for name, kind in {
        "v_cvt_pk_bf16_f32": "f32",
        "v_cvt_pk_f16_f32": "f32",
        "v_cvt_pkrtz_f16_f32": "f32",
        "v_cvt_pk_u16_u32": "u32",
        "v_cvt_pk_i16_i32": "i32",
        "v_cvt_pknorm_i16_f32": "f32",
        "v_cvt_pknorm_u16_f32": "f32",
        "v_pack_b32_f16": "f16",
    }.items():
        result = "f16" if name in ("v_cvt_pk_f16_f32", "v_cvt_pkrtz_f16_f32") else "u32"
        yield "gfx950", f"{name} v16, v0, v4", (kind, kind), result
        yield (
            "gfx950",
            f"{name} v16, s16, -v4" if kind == "f32" else f"{name} v16, s16, v4",
            (kind, kind),
            result,
        )
    for line in (
        "v_pack_b32_f16 v16, v0, v4 op_sel:[1,1,0]",
        "v_cvt_f32_bf16 v16, v0",
        "v_cvt_f32_bf16_sdwa v16, v0 src0_sel:WORD_1",
        "v_ashr_pk_i8_i32 v16, v0, v4, v8",
        "v_ashr_pk_u8_i32 v16, v0, v4, v8 op_sel:[0,0,0,1]",
    ):
        yield "gfx950", line, ("u32",) * 3, "f32" if "bf16" in line else "u32"


def packed_cases() -> Any:
    for name, op in {**_HALF_OPS, **_WORD_OPS}.items():
        count, is_word = len(op.sources), name in _WORD_OPS
        kinds = (("u64" if name == "v_pk_mov_b32" else "f64",) * count) if is_word else op.sources
        odd, even = (",".join(bits[k % 2] for k in range(count)) for bits in ("01", "10"))
        alternate = f"op_sel:[{even}] op_sel_hi:[{odd}]"
        modifiers = ["", alternate, f"op_sel_hi:[{','.join('0' * count)}]"]
        if op.result[0] == "f":
            modifiers += [
                f"neg_lo:[{','.join('1' * count)}] neg_hi:[{','.join('01'[k % 2] for k in range(count))}]",
                "clamp",
            ]
        elif name in ("v_pk_add_u16", "v_pk_sub_u16", "v_pk_add_i16", "v_pk_sub_i16"):
            modifiers.append("clamp")
        targets = ("v[16:17]", "v[0:1]", "v[4:5]") if is_word else ("v16",)
        for target, modifier in itertools.product(targets, modifiers):
            yield (
                "gfx950",
                f"{name} {target}, {each(vector, kinds)} {modifier}",
                kinds,
                "f32" if is_word else op.result,
            )
        if not is_word:
            constants = ", ".join(["s16", *(["1.0" if op.result[0] == "f" else "3"] * (count - 1))])
            yield "gfx950", f"{name} v16, {constants}", kinds, op.result
    for name in ("v_fma_mix_f32", "v_fma_mixlo_f16", "v_fma_mixhi_f16"):
        for modifier in (
            "",
            "op_sel_hi:[1,0,1]",
            "op_sel:[1,0,0] op_sel_hi:[1,1,0]",
            "op_sel_hi:[1,0,0] clamp",
            "op_sel_hi:[0,1,1] op_sel:[0,1,1] neg_lo:[1,0,1] neg_hi:[0,1,1]",
        ):
            result = "f32" if name == "v_fma_mix_f32" else "f16"
            yield "gfx942", f"{name} v16, v0, -v4, |v8| {modifier}", ("f16", "f32", "f32"), result
    for name in _DOT:
        kinds = ("f16", "f16", "f32") if re.search(r"f32_f16$", name) else ("u32",) * 3
        yield "gfx950", f"{name} v16, v0, v4{'' if re.match(r'v_dot.c', name) else ', v8'}", kinds, "f32"


# v2: 16 bytes for each lane; all of LDS holds numbers.
LDS = (
    "s_mov_b64 s[44:45], exec\ns_mov_b64 exec, -1\nv_lshrrev_b32 v2, 2, v127\nv_lshlrev_b32 v2, 4, v2\n"
    + "".join(f"ds_write_b128 v2, v[{4 + 4 * k}:{7 + 4 * k}] offset:{1024 * k}\n" for k in range(4))
)
ACTIVE = "s_mov_b64 exec, s[44:45]\n"


def lds_cases() -> Any:
    start = LDS + ACTIVE
    for name, width in _READS.items():
        yield (
            "gfx942",
            f"{start}ds_read_{name} {registers(16, width.size)}, v2 offset:{16 + width.size % 4}",
            ("u32",),
            "u32",
        )
    for name, width in _WRITES.items():
        line = f"ds_write_{name} v2, {registers(20, width.size)} offset:32\n"
        yield "gfx942", f"{start}{line}ds_read_b128 v[16:19], v2 offset:32", ("u32",), "u32"
    for far in ("", "st64"):
        for line in (
            f"ds_read2{far}_b32 v[2:3], v2 offset0:1 offset1:3",
            f"ds_read2{far}_b64 v[16:19], v2 offset0:1 offset1:3",
            f"ds_write2{far}_b32 v2, v20, v21 offset0:1 offset1:3\nds_read_b128 v[16:19], v2",
            f"ds_write2{far}_b64 v2, v[20:21], v[22:23] offset0:1 offset1:3\nds_read_b128 v[16:19], v2",
        ):
            yield "gfx942", start + line, ("u32",), "u32"
    for name in _TRANSPOSES:
        line = f"v_lshrrev_b32 v3, 1, v2\nds_read_{name} v[16:17], v3 offset:64"
        yield "gfx950", LDS + line, ("u32",), "u32"
    for line in (
        "ds_bpermute_b32 v16, v0, v4 offset:8",
        "ds_permute_b32 v16, v0, v4 offset:8",
        *(
            f"ds_swizzle_b32 v16, v0 offset:{o}"
            for o in (
                "swizzle(QUAD_PERM,1,0,3,2)",
                "swizzle(SWAP,8)",
                "0x8055",
                'swizzle(BITMASK_PERM,"01pip")',
                "0x1234",
            )
        ),
    ):
        yield "gfx942", line, ("u32", "u32"), "u32"
    for name, atomic in LDS_ATOMICS.items():
        kind = "f64" if "f64" in name else "f32" if "f32" in name else "u64"
        what, data, old = name.split("_"), registers(8, atomic.size), registers(18, atomic.size)
        at = (
            "v_and_b32 v3, 0x38, v4\nv_mov_b32 v20, 1.0\nv_mov_b32 v21, 0\nds_write_b64 v3, v[20:21]\n"
            + ACTIVE
        )
        if not name.startswith("wrxchg"):
            yield (
                "gfx942",
                f"{LDS}{at}ds_{name} v3, {data}\nds_read_b64 v[16:17], v3",
                ("u32", "u32", kind),
                "f32",
            )
        line = f"ds_{what[0]}_rtn_{what[1]} {old}, v3, {data}\nds_read_b64 v[16:17], v3"
        yield "gfx942", f"{LDS}{at}{line}", ("u32", "u32", kind), "f32"


# A buffer of 700 bytes for each workgroup at s[20:23]; v2 has offsets, v[4:5] addresses.
BUFFER = (
    "s_mul_i32 s24, s2, 2048\ns_add_u32 s20, s12, s24\ns_addc_u32 s21, s13, 0\ns_mov_b32 s22, 700\n"
    "s_mov_b32 s23, 0x20000\ns_mov_b32 s26, 8\nv_lshrrev_b32 v2, 2, v127\nv_lshlrev_b32 v2, 4, v2\n"
    "v_mov_b32 v3, 0\nv_mov_b32 v4, s12\nv_mov_b32 v5, s13\nv_lshl_add_u64 v[4:5], v[2:3], 0, v[4:5]\n"
)


def memory_cases() -> Any:
    kinds: tuple[str, ...] = ("u32",)
    for name, width in WIDTHS.items():
        offset = {1: 3, 2: 6}.get(width.size, 8)
        data, loaded = registers(20, width.size), registers(16, width.size)
        if name not in ("byte", "short", "byte_d16_hi"):
            for line in (
                f"buffer_load_{name} {loaded}, v2, s[20:23], 0 offen offset:{offset}",
                f"buffer_load_{name} {loaded}, v2, s[20:23], s26 offen offset:{offset}",
                f"buffer_load_{name} {loaded}, off, s[20:23], 0 offset:{offset}",
                f"global_load_{name} {loaded}, v2, s[20:21] offset:{offset}",
                f"global_load_{name} {loaded}, v[4:5], off offset:{offset}",
                f"flat_load_{name} {loaded}, v[4:5] offset:{offset}",
                f"v_lshrrev_b32 v2, 3, v2\nglobal_load_{name} {loaded}, v2, s[20:21] offset:5",  # unaligned
            ):
                yield "gfx942", BUFFER + line, kinds, "u32"
        if name in ("byte", "short", "dword", "dwordx2", "dwordx3", "dwordx4", "byte_d16_hi", "short_d16_hi"):
            yield (
                "gfx942",
                f"{BUFFER}buffer_store_{name} {data}, v2, s[20:23], 0 offen offset:{offset}",
                kinds,
                "u32",
            )
            yield "gfx942", f"{BUFFER}global_store_{name} v2, {data}, s[20:21] offset:{offset}", kinds, "u32"
            overlapping = f"{BUFFER}v_lshrrev_b32 v2, 3, v2\n"
            yield "gfx942", f"{overlapping}global_store_{name} v2, {data}, s[20:21] offset:5", kinds, "u32"
            yield (
                "gfx942",
                f"{overlapping}buffer_store_{name} {data}, v2, s[20:23], 0 offen offset:1",
                kinds,
                "u32",
            )
        if name in ("ubyte", "ushort", "dword", "dwordx3", "dwordx4", "sbyte"):
            first = f"{LDS}{BUFFER}{ACTIVE}s_mov_b32 m0, {0x100 - offset}\n"
            after = "ds_read_b128 v[16:19], v2"
            yield (
                "gfx950",
                f"{first}buffer_load_{name} v2, s[20:23], 0 offen offset:{offset} lds\n{after}",
                kinds,
                "u32",
            )
            yield (
                "gfx950",
                f"{first}global_load_lds_{name} v2, s[20:21] offset:{offset}\n{after}",
                kinds,
                "u32",
            )
    for name, atomic in ATOMICS.items():
        integer = atomic.dtype in (np.uint32, np.int32) and not name.startswith("pk")
        for wide in ("", "_x2") if integer else ("",):
            size = atomic.size * (2 if wide else 1)
            data, old = registers(8, size * (2 if atomic.compares else 1)), registers(16, size)
            kind = (
                "f16"
                if name.startswith("pk")
                else "f64"
                if "f64" in name
                else "f32"
                if "f32" in name
                else "u64"
            )
            start = BUFFER + "v_and_b32 v2, 0x38, v2\n"
            for line in (
                f"global_atomic_{name}{wide} {old}, v2, {data}, s[20:21] sc0",
                f"global_atomic_{name}{wide} v2, {data}, s[20:21]",
                f"buffer_atomic_{name}{wide} {data}, v2, s[20:23], 0 offen sc0",
            ):
                yield "gfx942", start + line, ("u32", "u32", kind), "f32"


# Shapes by target: result, m, k, blocks and types of the factors.
MATRICES = {
    "gfx942": """
        f32_32x32x1_2b_f32 f32_16x16x1_4b_f32 f32_4x4x1_16b_f32 f32_32x32x2_f32 f32_16x16x4_f32
        f32_32x32x4_2b_f16 f32_16x16x4_4b_f16 f32_4x4x4_16b_f16 f32_32x32x8_f16 f32_16x16x16_f16
        i32_32x32x16_i8 i32_16x16x32_i8 f32_32x32x8_bf16_1k f32_16x16x16_bf16_1k f64_16x16x4_f64
        f32_16x16x8_xf32 f32_32x32x4_xf32 f32_16x16x32_fp8_fp8 f32_16x16x32_bf8_fp8
        f32_32x32x16_fp8_bf8 f32_32x32x16_bf8_bf8 i32_4x4x4_16b_i8
    """,
    "gfx950": """
        f32_16x16x32_f16 f32_32x32x16_f16 f32_16x16x32_bf16 f32_32x32x16_bf16 i32_16x16x64_i8
        i32_32x32x32_i8 f32_16x16x32_fp8_fp8 f32_16x16x128_f8f6f4 f32_32x32x64_f8f6f4
        scale_f32_16x16x128_f8f6f4 scale_f32_32x32x64_f8f6f4
    """,
}
_BITS = {"f32": 32, "xf32": 32, "f64": 64, "f16": 16, "bf16": 16, "i8": 8, "fp8": 8, "bf8": 8, "f8f6f4": 8}


def matrix_lines(shape: str, constant: str | None, codes: tuple[int, int] = (0, 0), sharing: str = "") -> str:
    """A, B and C in registers from v32 on, filled from v0..v31 with finite numbers of the type."""
    scaled = shape.startswith("scale_")
    result, size, *rest = shape.removeprefix("scale_").split("_")
    m, _, k = (int(n) for n in size.split("x"))
    blocks = int(rest.pop(0)[:-1]) if rest[0][-1] == "b" else 1
    bits = [{0: 8, 1: 8, 2: 6, 3: 6, 4: 4}[code] if rest[0] == "f8f6f4" else _BITS[rest[0]] for code in codes]
    a, b = (m * k * blocks * n // 2048 for n in bits)
    c = m * m * blocks // 64 * (2 if result == "f64" else 1)
    clean = {
        "f32": 0xBFFFFFFF,
        "xf32": 0xBFFFFFFF,
        "f64": 0xBFFFFFFF,
        "f16": 0xBFFFBFFF,
        "bf16": 0xBFFFBFFF,
        "fp8": 0x77777777,
        "bf8": 0x7B7B7B7B,
        "f8f6f4": 0x37373737,
    }.get(rest[0], 0xFFFFFFFF)
    lines = ["s_mov_b64 exec, -1", *(f"v_and_b32 v{32 + r}, {clean:#x}, v{r % 16}" for r in range(a))]
    lines += [f"v_and_b32 v{48 + r}, {clean:#x}, v{(r + 5) % 16}" for r in range(b)]
    lines += [
        f"v_and_b32 v{64 + r}, {0xBFFFFFFF if result != 'i32' else 0xFFFFFF:#x}, v{(r * 7) % 16}"
        for r in range(c)
    ]

    def text(first: int, count: int) -> str:
        return f"v[{first}:{first + count - 1}]" if count > 1 else f"v{first}"

    operands = [text(64, c), text(32, a), text(48, b), constant or text(64, c)]
    scales = ["v20", "v21"] if scaled else []
    if scaled:
        lines += ["v_and_b32 v20, 0x7f7f7f7f, v20", "v_and_b32 v21, 0x7f7f7f7f, v21"]
    flags = " op_sel:[1,0,0] op_sel_hi:[0,1,0]" if scaled else ""
    flags += f" cbsz:{codes[0]} blgp:{codes[1]}" if "f8f6f4" in shape else sharing
    lines.append(f"v_mfma_{shape} {', '.join(operands + scales)}{flags}")
    return "\n".join([*lines, *(f"v_mov_b32 v{r}, v{64 + r}" for r in range(min(c, 32)))])


def matrix_cases() -> Any:
    for target, shapes in MATRICES.items():
        for shape in shapes.split():
            constants = [None, "0", "1.0"] if not shape.startswith("i32") else [None, "0", "7"]
            pairs = [(0, 0), (1, 0), (2, 3), (4, 4), (0, 4)] if "f8f6f4" in shape else [(0, 0)]
            for constant, codes in itertools.product(constants, pairs):
                yield (
                    target,
                    matrix_lines(shape, constant, codes),
                    ("u32",) * 4,
                    "u32" if shape[:3] == "i32" else "f32",
                )

    for shape, size, number in (
        ("f32_4x4x4_16b_f16", 4, 11),
        ("f32_4x4x1_16b_f32", 2, 1),
        ("i32_4x4x4_16b_i8", 1, 1),
        ("f32_16x16x4_4b_f16", 2, 3),
        ("f32_32x32x1_2b_f32", 1, 0),
    ):
        lines = matrix_lines(shape, None, sharing=f" cbsz:{size} abid:{number}")
        yield "gfx942", lines, ("u32",) * 4, "u32" if shape[:3] == "i32" else "f32"


FAMILIES = {
    "plain": plain_cases,
    "parts": part_cases,
    "masks": mask_cases,
    "other vector": other_vector_cases,
    "scalar": scalar_cases,
    "convert": convert_cases,
    "packed": packed_cases,
    "lds": lds_cases,
    "memory": memory_cases,
    "matrix": matrix_cases,
}
# Finite as fp16, bf16 and fp32.
EXTRA = np.random.default_rng(3).normal(size=4096).astype(np.float32).view(np.uint32) & np.uint32(0xBFFFBFFF)


def check(cases: list[Case], seeds: range) -> None:
    wrong = []
    for (target, lines, kinds, result), seed in itertools.product(cases, seeds):
        try:
            assert_same(target, lines, kinds, result, seed=seed, extra=EXTRA)
        except AssertionError as error:
            wrong.append(f"{target}: {str(error)[-300:]}")
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.parametrize("family", FAMILIES)
def test_instructions_compute_the_same(family):
    cases = list(FAMILIES[family]())
    check(cases[:: max(len(cases) // 25, 1)], range(1))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_instruction_computes_the_same(family):
    check(list(FAMILIES[family]()), range(1, 2))


def test_every_instruction_of_the_numpy_engine_is_known():
    """The families above name every entry of the numpy engine's tables."""
    text = "\n".join(lines for family in FAMILIES.values() for _, lines, _, _ in family())
    seen = {re.sub(r"_(sdwa|dpp)$", "", word) for word in re.findall(r"\b(?:v|s|ds|buffer|global)_\w+", text)}
    tables = [
        VALU,
        ACCUMULATING,
        LITERAL_FMA,
        CARRY,
        COMPARES,
        _HALF_OPS,
        _WORD_OPS,
        _DOT,
        SCALAR,
        CROSS_LANE,
    ]
    tables += [SPECIAL, scalar._OTHER, convert._PACKS]
    wanted = {name for table in tables for name in table} | {
        f"ds_read_{name}" for name in (*_READS, *_TRANSPOSES)
    }
    wanted |= {f"ds_write_{name}" for name in _WRITES} | {f"global_atomic_{name}" for name in ATOMICS}
    assert wanted - seen == set()


def test_no_encoding_that_numpy_loads_is_refused():
    """Every vector instruction, plain and with SDWA, DPP and modifiers that change its translation."""
    forms = [("", "", ""), ("", "", " clamp"), ("_sdwa", "", " src0_sel:BYTE_1"), ("_dpp", "", " row_shr:1")]
    forms += [("_dpp", "", " row_shr:1 clamp"), ("_e64", "-", ""), ("_e64", "-", " mul:2")]
    refused, loaded = [], 0
    for target, (name, op), (suffix, sign, modifier) in itertools.product(TARGETS, VALU.items(), forms):
        result = "v[16:17]" if is_wide(op.result) else "v16"
        line = f"{name}{suffix} {result}, {sign}{each(vector, op.sources)}{modifier}"
        try:
            program = load_program(assembly(target, line))
        except UnknownInstructionError:
            continue
        loaded += 1
        if (why := engine_refusal(program)) is not None:
            refused.append(f"{target}: {line}: {why}")
    assert loaded > 1500
    assert not refused, "\n".join(refused)


@pytest.mark.parametrize(
    "shape", ["f32_16x16x16_f16", "f32_32x32x8_bf16_1k", "f32_16x16x32_bf8_fp8", "f32_16x16x4_f32"]
)
def test_the_hardware_s_sums_are_the_same(shape):
    for constant, seed in ((None, 0), ("1.0", 1)):
        assert_same("gfx942", matrix_lines(shape, constant), result="f32", seed=seed, hardware_sums=True)
