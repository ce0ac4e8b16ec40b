"""Arguments of attn_prefill's kernels: structs of pointers and strides, and of constants.

A struct of pointers is passed at run time; one of constants is a `tl.constexpr`. Sizes that serving changes
are arguments of their own, see `RUNTIME_SIZES`, with which kernels complete the structs.
"""

from typing import Any, NamedTuple


class Queries(NamedTuple):
    """Q `[tokens, heads, head_dim]` and where each sequence's rows begin."""

    ptr: Any
    token: Any
    head: Any
    starts: Any  # cu_seqlens_q
    num_tokens: Any
    max_len: Any  # query tokens of a sequence beyond this number are left out
    descale: Any  # one float32, or None
    least_len: Any = None  # sequences with fewer query tokens are another launch's
    most_len: Any = None  # and those with more, of `kernels/shares.py`
    shift: Any = None  # `[tokens, heads]` fp32, added to natural logits where keys lost an offset, or None


class Outputs(NamedTuple):
    """O `[tokens, heads, v_head_dim]`, lse `[tokens, heads]` or None, sinks `[heads]` or None.

    `scale`: what FP8 numbers of O are still to be multiplied by, one float32, or None.
    """

    ptr: Any
    token: Any
    head: Any
    lse: Any
    lse_token: Any
    sinks: Any
    scale: Any = None


class Tile(NamedTuple):
    """A tile of packed rows: its sequence (-1: none) and number there, and what the sequence is."""

    seq: Any
    number: Any
    q_start: Any
    q_len: Any  # query tokens that are served
    kv_len: Any  # rows of keys up to the last one, padding included
    base: Any  # the sequence's first row in the scratch
    padding: Any  # rows of that part which are no keys: its first ones, or those between old and new keys
    before: Any  # the position of the sequence's first query token among its keys


class Cache(NamedTuple):
    """K and V as they are read: `KVPointers` and `Descale` of each."""

    k: Any
    v: Any
    k_descale: Any
    v_descale: Any


class Destination(NamedTuple):
    """K and V as new tokens are written: `KVPointers` and `DescalePointers` of each.

    Attributes:
        max_pages, num_pages: pages of a sequence, and in all.
    """

    k: Any
    v: Any
    k_descale: Any
    v_descale: Any
    max_pages: Any = None
    num_pages: Any = None


class Chunk(NamedTuple):
    """Keys and values of new tokens `[tokens, heads, head_dim]`, and their strides.

    Attributes:
        k_offset, k_balance: of the cache's `key_transform`, see `transform_keys`.
        q: the queries before they were transformed for stored keys, as the chunk's own keys see them; None if
            they are not transformed.
    """

    k: Any
    k_token: Any
    k_head: Any
    v: Any
    v_token: Any
    v_head: Any
    k_offset: Any = None
    k_balance: Any = None
    q: Any = None
    q_token: Any = None
    q_head: Any = None


class Scratch(NamedTuple):
    """Widened keys `[heads, rows, head_dim]`: sequences one after the other, each in whole blocks of rows.

    Attributes:
        k, v: the keys and values.
        k_factor, v_factor: what each key is still to be multiplied by, `[heads, rows]` fp32, or None.
        k_block_factor, v_block_factor: the same for whole blocks, `[heads, blocks]`, or None.
        factor_flag: `[2]` or None: whether any of v_block_factor is not 1 or a key that stays in its page has
            a factor, and how many programs of the launch have read that.
        schedule: the order of tiles `[tiles, 8]`, see `scheduled_tile`.
        rows: rows of a head.
        max_keys: the most keys of a sequence that are read from the cache.
        key_blocks: the most blocks that the keys of all sequences take. Keys beyond either are left out.
    """

    k: Any
    v: Any
    k_factor: Any
    v_factor: Any
    k_block_factor: Any
    v_block_factor: Any
    factor_flag: Any
    schedule: Any
    rows: Any
    max_keys: Any
    key_blocks: Any


class AppendScales(NamedTuple):
    """Numbers that an append multiplies by.

    Attributes:
        logit: of real logits, in base 2, or natural for a soft cap.
        k, v: what stored keys and values are still to be multiplied by besides their descale tensors; values
            of new tokens in the scratch are divided by `v`.
        soft_cap: the cap of logits, or 0.
    """

    logit: Any
    k: Any
    v: Any
    soft_cap: Any


class Read(NamedTuple):
    """Which keys a tile reads in their pages.

    Attributes:
        row_base, kv_head: the sequence's first page id, see `first_id`, and the head.
        num_keys: tokens of the sequence.
        first_key, last_key: keys outside are not read.
    """

    row_base: Any
    kv_head: Any
    num_keys: Any
    first_key: Any
    last_key: Any


class Sizes(NamedTuple):
    """Constants: the model's heads and the table's pages; `ragged`: whether the table is ragged.

    `head_dim` is Q's and K's, `v_head_dim` V's and the output's.
    """

    num_kv_heads: int
    gqa_ratio: int
    head_dim: int
    page_size: int
    ragged: bool
    v_head_dim: int


class Rules(NamedTuple):
    """Constants of the mathematics.

    Attributes:
        compute: the 16-bit type of Q @ K^T, and of P @ V where the cache is widened in the loop.
        scale_q: Q is brought into float16's range by a power of two.
        split_q: Q is two terms in the compute type.
        fp8: the FP8 type of the matrix unit, or None to widen the cache.
        clean: no stored FP8 byte is OCP's negative zero or NaN.
        p_scale: what P is multiplied by in FP8.
        acc_parts: parts that V is multiplied in; see `Stored.parts`.
        q_descale, soft_cap, sinks, lse: whether there are any.
        window_left, window_right: keys before and after itself that a row sees, or -1.
        folded: the scale of the logits is positive and applied within the softmax.
        lazy, once, prefetch: as in the rules of decode.
        split: whether several programs share a tile's keys.
        shares: whether programs have equal shares of all keys; see `kernels/shares.py`.
        as_decode: whether the compiler pipelines the loop's loads, as in decode.
        settle: see `settle_stores`.
        int64_offsets: element offsets in the cache need 64 bits.
        nvidia: whether the target is one of NVIDIA's.
        native: no kernel here multiplies FP4 as it is stored; see the rules of decode.
        order: see `program_on_its_xcd`; an `XcdOrder`, or None.
    """

    compute: Any
    scale_q: bool
    split_q: bool
    fp8: Any
    clean: bool
    p_scale: float
    acc_parts: int
    q_descale: bool
    soft_cap: bool
    sinks: bool
    lse: bool
    window_left: int
    window_right: int
    folded: bool
    split: bool
    settle: str
    int64_offsets: bool
    nvidia: bool
    shares: bool = False
    as_decode: bool = False
    native: bool = False
    lazy: bool = False
    once: bool = False
    prefetch: str = ""
    order: Any = None


class Widened(NamedTuple):
    """Constants of attention over the scratch.

    Attributes:
        k_per_key, v_per_key, k_block_factors, v_block_factors: which factors the scratch has; see `Scratch`.
        tma: keys are loaded by tensor descriptor, else by pointer.
        overlap: P @ V of a key tile runs during the softmax of the next one.
        branch: see `dense_keys`.
        ahead: keys and values of a tile are loaded to registers while the tile before is multiplied.
    """

    k_per_key: bool
    v_per_key: bool
    k_block_factors: bool
    v_block_factors: bool
    tma: bool
    overlap: bool
    branch: bool
    ahead: bool = False


class Filling(NamedTuple):
    """Constants of a launch that fills the scratch for the one that attends.

    Attributes:
        k_type: what K is widened to, or the FP8 type that its bytes are kept as; None leaves it in its pages.
        causal: which rows see the most keys, for the order of tiles.
        early: the launch that attends may begin before this one has ended.
        loops: a program of an append fills several blocks, not one.
        int64_offsets, nvidia: as in `Rules`.
        k_per_key, v_per_key: whether factors of keys stay beside them; else numbers take them along.
        v_exponent: what numbers of V are multiplied by, as a power of two, before a block's own power; None
            leaves them as they are widened.
    """

    k_type: Any
    causal: bool
    early: bool
    loops: bool
    int64_offsets: bool
    nvidia: bool
    k_per_key: bool
    v_per_key: bool
    v_exponent: int | None


class Storing(NamedTuple):
    """Constants of how new tokens are rotated and stored.

    Attributes:
        rotary_dim, interleaved: the columns that are rotated, and whether neighbours are partners.
        rule: how an FP4 scale's exponent is chosen.
        k_max, v_max: the largest number of the format.
        k_scaling, v_scaling: see `quantise_rows`.
        k_group, v_group: FP4: channels of a scale, 0 for one scale.
        butterflies: how keys are rotated last, see `rotate_parts`.
    """

    rotary_dim: int
    interleaved: bool
    rule: str
    k_max: float
    v_max: float
    k_scaling: str
    v_scaling: str
    k_group: int
    v_group: int
    butterflies: int


class Blocks(NamedTuple):
    """Constants: rows and keys of a tile, its columns, which are powers of two, and other block sizes.

    Attributes:
        m, n: rows and keys of a tile; d: `v_head_dim` rounded up, columns of V; dk: `head_dim` rounded up,
            columns of Q and K.
        s: keys of a block of the scratch.
        t: new tokens that a program quantises at once; of a fused append: keys of the chunk itself that a
            program attends to at once.
        i: tiles that a program puts in their order.
    """

    m: int
    n: int
    d: int
    dk: int = 0
    s: int = 0
    t: int = 0
    i: int = 0
