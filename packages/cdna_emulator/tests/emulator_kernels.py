"""Triton kernels that the tests compile for AMD targets."""

import triton
import triton.language as tl


@triton.jit
def softmax(x_ptr, o_ptr, n_cols, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * stride + cols, mask=mask, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(o_ptr + row * stride + cols, e / tl.sum(e, 0), mask=mask)


@triton.jit
def scans(x_ptr, o_ptr, R: tl.constexpr, C: tl.constexpr):
    at = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(o_ptr + at, tl.cumsum(x, 0))
    tl.store(o_ptr + R * C + at, tl.cumsum(x, 1, reverse=True))
    tl.store(o_ptr + 2 * R * C + at, tl.trans(tl.reshape(x, (C, R))))


@triton.jit
def dot(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    tl.store(c_ptr + m[:, None] * N + n[None, :], tl.dot(a, b, out_dtype=ACC))


@triton.jit
def dot_scaled(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, A_PACK: tl.constexpr, B_PACK: tl.constexpr,
):  # fmt: skip
    m, n, s = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // 32)
    ka, kb = tl.arange(0, K // A_PACK), tl.arange(0, K // B_PACK)
    a = tl.load(a_ptr + m[:, None] * (K // A_PACK) + ka[None, :])
    b = tl.load(b_ptr + kb[:, None] * N + n[None, :])
    a_scale = tl.load(a_scale_ptr + m[:, None] * (K // 32) + s[None, :])
    b_scale = tl.load(b_scale_ptr + n[:, None] * (K // 32) + s[None, :])
    c = tl.dot_scaled(a, a_scale, A_FORMAT, b, b_scale, B_FORMAT)
    tl.store(c_ptr + m[:, None] * N + n[None, :], c)


@triton.jit
def matmul(
    a_ptr, b_ptr, c_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def paged_decode(
    q_ptr, k_ptr, v_ptr, o_ptr, table_ptr, lens_ptr, sm_scale, stride_qb, stride_qh, stride_kp, stride_kt,
    stride_kh, stride_tb, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    FP8_QK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0), tl.program_id(1)
    n = tl.load(lens_ptr + b)
    rows, d = tl.arange(0, 16), tl.arange(0, D)
    live = rows < GROUP
    q_at = b * stride_qb + (h * GROUP + rows[:, None]) * stride_qh + d[None, :]
    q = tl.load(q_ptr + q_at, mask=live[:, None], other=0.0)
    if FP8_QK:
        q = q.to(k_ptr.dtype.element_ty)
    m = tl.full([16], -float("inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, D], tl.float32)
    for start in tl.range(0, n, BLOCK_N, num_stages=STAGES):
        t = start + tl.arange(0, BLOCK_N)
        ok = t < n
        page = tl.load(table_ptr + b * stride_tb + t // PAGE, mask=ok, other=0)
        base = page * stride_kp + (t % PAGE) * stride_kt + h * stride_kh
        k = tl.load(k_ptr + base[None, :] + d[:, None], mask=ok[None, :], other=0.0)
        if not FP8_QK:
            k = k.to(q.dtype)
        s = tl.dot(q, k) * (sm_scale * 1.4426950408889634)
        s = tl.where(ok[None, :], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        total = total * alpha + tl.sum(p, 1)
        v = tl.load(v_ptr + base[:, None] + d[None, :], mask=ok[:, None], other=0.0)
        acc = tl.dot(p.to(tl.bfloat16), v.to(tl.bfloat16), acc * alpha[:, None])
        m = m_new
    tl.store(o_ptr + q_at, (acc / total[:, None]).to(tl.bfloat16), mask=live[:, None])


@triton.jit
def split_sum(x_ptr, part_ptr, count_ptr, o_ptr, N, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Each split stores a partial sum; the one that arrives last adds them up."""
    row, split = tl.program_id(0), tl.program_id(1)
    per = tl.cdiv(N, SPLITS)
    acc = 0.0
    for start in range(split * per, min(N, (split + 1) * per), BLOCK):
        at = start + tl.arange(0, BLOCK)
        acc += tl.sum(tl.load(x_ptr + row * N + at, mask=at < min(N, (split + 1) * per), other=0.0))
    tl.store(part_ptr + row * SPLITS + split, acc)
    if tl.atomic_add(count_ptr + row, 1, sem="acq_rel") == SPLITS - 1:
        tl.store(o_ptr + row, tl.sum(tl.load(part_ptr + row * SPLITS + tl.arange(0, SPLITS))))
        tl.store(count_ptr + row, 0)


@triton.jit
def atomics(x_ptr, sum_ptr, max_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(sum_ptr + at % 8, tl.load(x_ptr + at))
    tl.atomic_max(max_ptr + at % 4, at)


@triton.jit
def spin_lock(lock_ptr, count_ptr):
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(count_ptr, tl.load(count_ptr) + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


@triton.jit
def convert(x_ptr, o_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(o_ptr + at, tl.load(x_ptr + at).to(o_ptr.dtype.element_ty))


@triton.jit
def maths(x_ptr, o_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(o_ptr + at, tl.exp(x))
    tl.store(o_ptr + BLOCK + at, tl.log(tl.abs(x) + 0.1))
    tl.store(o_ptr + 2 * BLOCK + at, tl.sin(x))
    tl.store(o_ptr + 3 * BLOCK + at, tl.sqrt(tl.abs(x)))
    tl.store(o_ptr + 4 * BLOCK + at, tl.rsqrt(tl.abs(x) + 0.1))
    tl.store(o_ptr + 5 * BLOCK + at, tl.sigmoid(x))
    tl.store(o_ptr + 6 * BLOCK + at, tl.erf(x))
    tl.store(o_ptr + 7 * BLOCK + at, x / (tl.abs(x) + 0.5))


@triton.jit
def integers(x_ptr, y_ptr, o_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(o_ptr + at, x // y)
    tl.store(o_ptr + BLOCK + at, x % y)
    tl.store(o_ptr + 2 * BLOCK + at, x * y)
    tl.store(o_ptr + 3 * BLOCK + at, tl.umulhi(x, y))
    tl.store(o_ptr + 4 * BLOCK + at, ((x.to(tl.int64) * y) >> 7).to(tl.int32))
    tl.store(o_ptr + 5 * BLOCK + at, (x.to(tl.int64) // y.to(tl.int64)).to(tl.int32))


@triton.jit
def rope(x_ptr, cos_ptr, sin_ptr, o_ptr, H: tl.constexpr, D: tl.constexpr):
    t, h, d = tl.program_id(0), tl.arange(0, H)[:, None], tl.arange(0, D // 2)[None, :]
    c, s = tl.load(cos_ptr + t * (D // 2) + d), tl.load(sin_ptr + t * (D // 2) + d)
    at = (t * H + h) * D + d
    a, b = tl.load(x_ptr + at).to(tl.float32), tl.load(x_ptr + at + D // 2).to(tl.float32)
    tl.store(o_ptr + at, (a * c - b * s).to(tl.bfloat16))
    tl.store(o_ptr + at + D // 2, (b * c + a * s).to(tl.bfloat16))


@triton.jit
def inline_asm(x_ptr, o_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    y = tl.inline_asm_elementwise(
        "v_bfe_u32 $0, $1, 4, 8", "=v,v", [tl.load(x_ptr + at)], dtype=tl.int32, is_pure=True, pack=1
    )
    tl.store(o_ptr + at, y)


@triton.jit
def sort_and_count(x_ptr, o_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(o_ptr + at, tl.sort(x))
    tl.store(o_ptr + BLOCK + tl.arange(0, 64), tl.histogram(x, 64))
