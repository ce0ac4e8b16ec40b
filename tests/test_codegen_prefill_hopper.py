"""What the prefill kernel for Hopper compiles to, on a machine without a GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from narrowkv.attn_prefill import plan_append
from narrowkv.paged_cache import CacheFormat
from narrowkv.runtime.toolchain import TRITON
from narrowkv.testing.cases.decode import K8V4
from narrowkv.testing.cases.prefill import PrefillCase


def _width(opcode: str) -> int:
    """How many registers an instruction writes."""
    product = re.match(r"HGMMA\.64x(\d+)x", opcode)
    if product:
        return int(product[1]) // 2
    if re.search(r"\.128|\.M88\.4", opcode):
        return 4
    return 2 if re.search(r"\.64|\.WIDE|\.M88\.2|^CS2R$", opcode) else 1


def _stale_addresses(code: str) -> list[str]:
    """Products whose left operand's address comes, on some way, from before what it is computed of.

    Follows the uniform registers of each address backwards. Where two definitions meet there must be a
    counter, which is one of them plus one, or twice the base of shared memory. A register that was copied to
    a vector register and back has the definitions that it had where it was copied.
    """
    listing = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", code)
    place = {int(address, 16): number for number, (address, _) in enumerate(listing)}
    texts = [text for _, text in listing]
    before: list[list[int]] = [[] for _ in texts]
    defined: list[tuple[str, ...]] = []
    for number, text in enumerate(texts):
        operation = re.sub(r"^@\S+\s+", "", text)
        branch = re.match(r"BRA.*?0x([0-9a-f]+)$", operation)
        if branch and int(branch[1], 16) in place:
            before[place[int(branch[1], 16)]].append(number)
        goes_on = text.startswith("@") or not re.match(r"BRA(\.\S+)? 0x|EXIT|RET", operation)
        if goes_on and number + 1 < len(texts):
            before[number + 1].append(number)
        target = re.match(r"(\S+) (?:U?P\w+, )?(U?R)(\d+)", operation)
        names = [f"{target[2]}{int(target[3]) + i}" for i in range(_width(target[1]))] if target else []
        defined.append(tuple(names))

    def reaching(number: int, name: str) -> set[int]:
        found, seen, waiting = set(), set(), list(before[number])
        while waiting:
            at = waiting.pop()
            if at in seen:
                continue
            seen.add(at)
            if name in defined[at]:
                found.add(at)
            if name not in defined[at] or texts[at].startswith("@"):
                waiting += before[at]
        return found

    def definitions(number: int, name: str) -> list[int]:
        found, seen, waiting = set(), set(), reaching(number, name)
        while waiting:
            at = waiting.pop()
            if at in seen:
                continue
            seen.add(at)
            back = re.match(rf"R2UR {name}, (R\d+)", texts[at])
            saved = reaching(at, back[1]) if back else set()
            copies = [re.match(rf"(MOV|IMAD\.U32) R\d+, (RZ, RZ, )?{name}$", texts[i]) for i in saved]
            if len(copies) == 1 and copies[0]:
                waiting |= reaching(*saved, name)
            else:
                found.add(at)
        return sorted(found)

    stale = []
    for number, text in enumerate(texts):
        product = re.search(r"HGMMA.*gdesc\[UR(\d+)\](?!\.tnspB)", text)
        if not product:
            continue
        waiting = [(number, f"UR{int(product[1]) + i}") for i in range(2)]
        seen = set()
        while waiting:
            at, name = waiting.pop()
            if (at, name) in seen:
                continue
            seen.add((at, name))
            found = definitions(at, name)
            sources = [texts[i] for i in found]
            if len(found) != 1:
                counts = any(re.search(rf"UIADD3 {name}, {name}, 0x1\b|UMOV {name}, UR", t) for t in sources)
                bases = all(re.match(r"ULEA \S+ \S+ \S+ 0x18$", t) for t in sources)
                if not (counts and any("URZ" in t for t in sources)) and not bases:
                    stale.append(f"{text}: {name} of {sources}")
                continue
            if not re.match(r"R2UR|S2UR|ULDC", sources[0]):
                operands = re.findall(r"\bUR\d+", sources[0].split(",", 1)[1])
                waiting += [(found[0], operand) for operand in operands]
    return stale


LOOP = """
/*0000*/ R2UR UR4, R3 ;
/*0010*/ R2UR UR5, R4 ;
/*0020*/ MOV R9, {saved} ;
/*0030*/ HGMMA.64x64x16.F32.BF16 R16, gdesc[UR4], R16 ;
/*0040*/ UMOV UR5, 0x1 ;
/*0050*/ {between} ;
/*0060*/ R2UR UR5, R9 ;
/*0070*/ @P0 BRA 0x20 ;
/*0080*/ EXIT ;
"""


@pytest.mark.parametrize(
    ("saved", "between", "stale"),
    [
        ("UR5", "NOP", False), ("UR6", "NOP", True), ("UR5", "MOV R9, R10", True),
        ("UR5", "LDG.E.128 R8, desc[UR8][R2.64]", True), ("UR5", "@P1 MOV R9, R10", True),
        ("UR5", "SHFL.IDX PT, R9, R9, RZ, 0x1f", True),
    ],
)  # fmt: skip
def test_an_address_that_is_saved_and_restored_is_not_stale(saved: str, between: str, stale: bool) -> None:
    assert bool(_stale_addresses(LOOP.format(saved=saved, between=between))) == stale


def _check(
    kernel: Any, head_dim: int, block_n: int, *, scales: int, with_factors: bool, in_scalar: bool
) -> None:
    """Each product of a round is computed once and beside other work, and nothing is spilled in a loop."""
    assert kernel.name == "_pipelined_prefill_kernel"
    assert kernel.shared_bytes <= 227 * 1024
    assert _stale_addresses(kernel.machine_code()) == []
    found = ["\n".join(loop) for loop in kernel.product_loops()]
    # One wait for the scores with P @ V still under way, one for P @ V.
    overlapped = [text for text in found if re.search(r"gsb0, 0x1\b", text)]
    assert len(overlapped) == 2 * 2  # of two warpgroups, with a mask and without
    assert len(found) - len(overlapped) == with_factors
    for text in overlapped:
        # Q @ K^T over head_dim, P @ V over the tile's keys, 16 at a time.
        assert len(re.findall("HGMMA", text)) == head_dim // 16 + block_n // 16
        assert len(re.findall(r"WARPGROUP\.DEPBAR", text)) == 2  # nothing was serialised
        assert not re.search(r"\b(STL|LDL)\b", text)
        # Masked scores are compared where they are needed, not ahead and packed into bits.
        assert len(re.findall(r"\bSEL R", text)) <= scales - 1
        if in_scalar:
            # The scale by which each of a thread's scores is multiplied.
            assert len(re.findall(r"\bFFMA R\d+, R\d+, UR\d+", text)) >= block_n // 2


def _check_early_begin(ahead: Any, attend: Any, early: bool = True) -> None:
    """What attends may begin before the launch ahead has ended, which says when, and then waits for it."""
    assert not ahead.compiled.metadata.launch_pdl
    assert attend.compiled.metadata.launch_pdl == early
    assert len(re.findall(r"\bPREEXIT\b", ahead.machine_code())) == early
    assert len(re.findall(r"\bACQBULK\b", attend.machine_code())) == 1


# A key tile of 64 at head_dim 256 takes as much shared memory as one of 128 at head_dim 128.
@pytest.mark.sampled(always=[{"head_dim": 64, "keys": 1024}, {"head_dim": 256, "cap": 50.0}], most=2)
@pytest.mark.parametrize(
    ("fmt", "head_dim", "keys", "block_n", "cap"),
    [
        ("fp8_e4m3fn", 128, 1024, 64, 0.0), ("bf16", 128, 1024, 64, 0.0), ("fp8_e4m3fn", 64, 1024, 64, 0.0),
        ("fp8_e4m3fn", 128, 2048, 128, 0.0), ("bf16", 128, 2048, 128, 0.0),
        ("fp8_e4m3fn", 64, 2048, 128, 0.0), ("fp8_e4m3fn", 256, 4096, 64, 0.0), ("bf16", 256, 4096, 64, 0.0),
        ("fp8_e4m3fn", 128, 4096, 128, 50.0), ("fp8_e4m3fn", 256, 4096, 64, 50.0),
        ("fp4_e2m1", 128, 2048, 128, 0.0),
    ],
)  # fmt: skip
def test_scores_and_values_overlap(
    fmt: str, head_dim: int, keys: int, block_n: int, cap: float, sm90_code: Any
) -> None:
    case = PrefillCase(
        q_lens=(1024,), lens=(keys,), num_kv_heads=8, gqa_ratio=12, head_dim=head_dim, format=fmt,
        logits_soft_cap=cap,
    )  # fmt: skip
    widen, attend = _kernels(case, sm90_code)
    with_factors = fmt in ("bf16", "fp4_e2m1")
    # The capped scores are not multiplied again. With factors, addresses of 256 channels fill the uniform
    # registers: ptxas saves some in vector registers, and has the scale in one.
    in_scalar = not cap and not (with_factors and head_dim == 256)
    _check(attend, head_dim, block_n, scales=1, with_factors=with_factors, in_scalar=in_scalar)
    assert widen.stack_bytes() == 0 or fmt == "bf16"
    _check_early_begin(widen, attend)


def _kernels(case: PrefillCase, sm90_code: Any) -> Any:
    """The kernels of a case's launches."""
    inputs = case.inputs()
    inputs.run(inputs.plan())
    return sm90_code.kernels


@pytest.mark.sampled(always=[{"q_len": 16, "fmt": "fp8_e4m3fn"}], most=1)
@pytest.mark.parametrize("fmt", ["fp8_e4m3fn", K8V4, "fp4_e2m1"], ids=str)
@pytest.mark.parametrize("q_len", [4, 8, 16])
def test_sequences_of_few_tokens_are_attended_to_in_tall_tiles(q_len: int, fmt: Any, sm90_code: Any) -> None:
    inputs = PrefillCase(
        q_lens=(q_len,) * 8,
        lens=(64,) * 8,
        num_kv_heads=8,
        gqa_ratio=12,
        head_dim=128,
        format=fmt,
        sinks=True,
    ).inputs()
    inputs.run(inputs.plan(max_q_len=q_len))
    attend = sm90_code.kernels[-1]
    assert attend.name == "_tall_prefill_kernel"
    assert attend.shared_bytes <= 227 * 1024
    loops = attend.product_loops()
    assert not any(re.search(r"\b(STL|LDL)\b", text) for loop in loops for text in loop)
    assert any("WARPGROUP.DEPBAR.LE gsb0, 0x1" in text for text in loops[1])


@pytest.mark.sampled(always=[{"old": 512, "granularity": "head"}], most=1)
@pytest.mark.parametrize("granularity", ["float", "head"])
@pytest.mark.parametrize(
    ("fmt", "gqa_ratio", "old", "early"),
    [("fp8_e4m3fn", 4, 1536, True), ("fp8_e4m3fn", 12, 512, True), ("bf16", 12, 3584, False)],
)
def test_an_append_attends_by_the_same_loops(
    fmt: str, gqa_ratio: int, old: int, early: bool, granularity: str, sm90_code: Any
) -> None:
    workload = PrefillCase.append(
        q_lens=(512,), lens=(old,), num_kv_heads=8, gqa_ratio=gqa_ratio, head_dim=128, format=fmt,
        granularity=granularity,
    )  # fmt: skip
    produce, attend = _kernels(workload, sm90_code)
    assert produce.name == "_produce_kernel"
    block_n = 64 if old + 512 <= 1024 else 128
    if block_n == 128:
        # Two programs of 16 warps share a unit; what does not fit its registers is little.
        assert produce.registers() <= 64
        assert produce.compiled.metadata.num_warps == 16
    assert produce.stack_bytes() <= (64 if fmt == "bf16" else 16)
    # A bf16 cache is read as it is, so that old and new keys have one scale.
    scales = 1 if fmt == "bf16" and granularity == "float" else 2
    # By ptxas of Triton 3.9 one of two scales is in an ordinary register.
    in_scalar = scales == 1 or (granularity == "float" and TRITON < (3, 9))
    _check(attend, 128, block_n, scales=scales, with_factors=True, in_scalar=in_scalar)
    _check_early_begin(produce, attend, early)
    # Nothing of where rows lie is kept while keys are attended to.
    assert attend.stack_bytes() <= 16


LONG: dict[str, Any] = {"gqa_ratio": 4, "head_dim": 128, "format": "bf16"}


@pytest.mark.sampled(always=[{"appends": True, "page_size": 16}], most=1)
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("appends", [False, True])
def test_keys_that_stay_in_their_pages_are_copied_from_there(
    appends: bool, page_size: int, sm90_code: Any
) -> None:
    make = PrefillCase.append if appends else PrefillCase.small
    case = make((128,), (9000,), **LONG, num_kv_heads=8, page_size=page_size)
    ahead, attend = _kernels(case, sm90_code)
    _check(attend, 128, 128, scales=1, with_factors=True, in_scalar=True)
    _check_early_begin(ahead, attend)
    # Two programs of 16 warps share a unit.
    assert ahead.registers() <= 64
    # By the warp that copies and by `attend_with_factors`: halves of rows in each page of a tile, besides V.
    pieces = 2 * 128 // page_size
    assert len(re.findall(r"\bUTMALDG\b", attend.machine_code())) > 2 * pieces


@pytest.mark.parametrize(
    ("layout", "page_size", "block"),
    [
        ("NHD", 16, [16, 64]), ("HND", 8, [8, 64]), ("concat", 32, [32, 64]), ("NHD", 128, [128, 64]),
        ("HND", 384, [128, 64]), ("NHD", 1, None), ("tokens", 1, None), ("NHD", 4, None), ("NHD", 48, None),
        ("NHD", 192, None), ("vectorised", 16, None),
    ],
)  # fmt: skip
def test_pages_whose_keys_can_be_copied(layout: str, page_size: int, block: list[int] | None) -> None:
    from narrowkv.attn_prefill.kernels.pipelined_copies import page_matrix

    for heads in (1, 3):
        workload = PrefillCase.small(
            lens=(500,), q_lens=(5,), num_kv_heads=heads, head_dim=128, format="bf16", layout=layout,
            page_size=page_size,
        )  # fmt: skip
        cache = workload.build()[1]
        pages = page_matrix(cache, 128)
        if block is None:
            assert pages is None
            continue
        assert pages is not None
        desc = pages.descriptor
        assert desc.block_shape == block
        # The matrix that it names has each page's keys where the cache has them.
        matrix = torch.as_strided(cache.k, desc.shape, desc.strides, cache.k.storage_offset())
        keys = cache.logical()[0]
        for page in (0, cache.num_pages - 1):
            for head in range(heads):
                row, column = page * pages.page + head * pages.head, head * pages.columns
                found = matrix[row : row + page_size, column : column + 128]
                assert torch.equal(found.view(torch.int16), keys[page, :, head].view(torch.int16))


# A table of one column, and one page: Triton takes numbers that are one as constants.
@pytest.mark.slow
def test_a_long_page_and_a_table_of_one(sm90_code: Any) -> None:
    inputs = PrefillCase.small((128,), (9000,), **LONG, num_kv_heads=1, page_size=16384).inputs()
    assert inputs.table.page_ids.shape == (1, 1)
    plan = inputs.plan()
    assert plan.config.k_in_pages
    inputs.run(plan)
    assert re.search(r"\bUTMALDG\b", sm90_code.kernels[-1].machine_code())


def test_an_append_to_few_keys_attends_in_plain_triton(sm90_code: Any) -> None:
    case = PrefillCase.append(q_lens=(128,), lens=(256,), num_kv_heads=8, gqa_ratio=12, head_dim=128)
    produce, attend = _kernels(case, sm90_code)
    assert (produce.name, attend.name) == ("_produce_kernel", "_dense_prefill_kernel")
    for kernel in (produce, attend):
        assert not re.search(r"\b(PREEXIT|ACQBULK)\b", kernel.machine_code())
    assert attend.stack_bytes() == 0
    assert produce.stack_bytes() <= (8 if TRITON == (3, 8) else 0)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("operation", ["prefill", "append"])
@pytest.mark.parametrize("kernel", ["split", "fused"])
def test_no_product_with_values_is_32_columns_wide(kernel: str, operation: str, sm90_code: Any) -> None:
    """Triton 3.6 gets those wrong beside wider ones; FP4 values are multiplied in four parts elsewhere."""
    case = PrefillCase(
        operation=operation, kernel=kernel, format=CacheFormat("fp8_e4m3fn", "fp4_e2m1"), head_dim=128,
        gqa_ratio=8, q_lens=(64,), lens=(300,),
    )  # fmt: skip
    kernels = _kernels(case, sm90_code)
    assert not any(re.search(r"HGMMA\.64x32.*tnspB", each.machine_code()) for each in kernels)


@pytest.mark.parametrize(("columns", "loops"), [(16, False), (1024, True)])
def test_an_append_among_long_decodes_has_few_programs(
    columns: int, loops: bool, sm90_code: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program for each block that the batch's keys could fill took 143 us for 26 us of work."""
    grids = []

    def launch(
        kernel: Any, grid: tuple[int, ...], args: Any, constexprs: dict[str, Any], options: Any
    ) -> None:
        if kernel.__name__ == "_produce_kernel":
            grids.append((grid[0], constexprs["FILLING"].loops))

    monkeypatch.setattr(sm90_code, "launch", launch)
    case = PrefillCase.append(
        q_lens=(2048,) + (1,) * 63, lens=(64,) * 64, num_kv_heads=8, gqa_ratio=4, head_dim=128,
        page_size=16, stale_columns=columns,
    )  # fmt: skip
    inputs = case.inputs()
    inputs.run(plan_append(inputs.q, inputs.cache, inputs.table, inputs.starts, max_q_len=2048))
    ((programs, looped),) = grids
    assert looped == loops
    # Up to 26 sequences of 18,000 tokens would fill 3,700 blocks of each of 8 heads.
    assert programs <= 8000


WAYS = [("prefill", kernel) for kernel in ("dense", "fused", "split")]
WAYS += [("append", kernel) for kernel in ("append_then_attend", "fused", "split")]


@pytest.mark.sampled(always=[{"way": ("append", "fused"), "fmt": "fp8_e4m3fn", "head_dim": 512}], most=2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("head_dim", [320, 512])
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3fn", "int4", "fp4_e2m1", K8V4], ids=str)
def test_heads_wider_than_256_hardly_spill(
    fmt: Any, head_dim: int, way: tuple[str, str], sm90_code: Any
) -> None:
    operation, kernel = way
    case = PrefillCase(
        operation=operation, kernel=kernel, q_lens=(64,), lens=(700,), num_kv_heads=2, gqa_ratio=4,
        head_dim=head_dim, format=fmt,
    )  # fmt: skip
    for code in _kernels(case, sm90_code):
        # The loop that widens spills 8 or 16 bytes at 255 registers, as appends would without a limit.
        assert code.stack_bytes() <= (16 if way == ("prefill", "fused") else 0), code.name
        assert code.shared_bytes <= 227 * 1024
