"""The two kernels of Triton MLA decode: one tile of query rows over one split of its keys, and the merge of splits.

    query rows of one request, packed:  row = token * heads + head        keys of the request, in table order
    ROWS of them form a tile  ----->  [ROWS x KEYS] scores, online softmax over tiles of KEYS keys
    a split is a run of key tiles      [low ........ stop)  =  split 0 | split 1 | ... | last split

A tile reads every latent once and uses it twice, as key and as value, for all its tokens and heads. The latent stays in
CHUNKS pieces of CHUNK values (four of 128 for DeepSeek): one register tile of 512 columns would spill.

FP8 latents enter the matrix unit as float16, to which e4m3 converts exactly with one instruction for two values (to
bfloat16 it takes four). The scale of a whole tensor joins the factor of the scores and of the result. FP8_DS's scales
multiply the converted latents, over the largest scale that the request has met so far: one instruction for two values,
exact for powers of two down to 2**-15 of it, and far fewer barriers and registers than four products with scales of
their own. So that no bfloat16 query leaves float16's range, a query row is divided by a power of two. Both come back as
factors of whole rows. Probabilities in float16 are 2**14 times as large, or the many small ones of a long context would
vanish.

Numbers inside are base 2. A row without a visible key keeps a maximum of -inf, and every exponent is taken relative to
a finite reference, so that -inf - -inf never happens. Offsets are int64: pools and queries exceed 2**31 elements.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# ruff: noqa: N803, N806

from __future__ import annotations

from .triton_kernel import TritonKernel, dot, e4m3_to, load_rows, round_to, row_max, row_sum, tl, with_sink


def _decode_tile(
    query,
    latent,
    rope,
    scales,
    table,
    seq_lens,
    q_lens,
    k_scale,
    sink,
    out,
    lse,
    part_out,
    part_lse,
    score_factor,
    query_b,
    query_t,
    query_h,
    latent_page,
    latent_slot,
    rope_page,
    rope_slot,
    scale_page,
    scale_slot,
    table_b,
    out_b,
    out_t,
    out_h,
    lse_b,
    lse_t,
    lse_h,
    heads,
    q_len,
    columns,
    window,
    splits,
    split_keys,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_TILE: tl.constexpr,
    ROPE_ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DOT: tl.constexpr,
    ROPE_DOT: tl.constexpr,
    NORMALISE: tl.constexpr,
    FP8: tl.constexpr,
    FP8_BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFT: tl.constexpr,
    HAS_Q_LENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINK: tl.constexpr,
    SPLIT: tl.constexpr,
    INTERPRETED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    query_rows = tile * ROWS + tl.arange(0, ROWS)
    token = query_rows // heads
    head = query_rows - token * heads
    seq_len = tl.load(seq_lens + request)
    tokens = q_len
    if HAS_Q_LENS:
        tokens = tl.load(q_lens + request)
    valid = token < tokens
    before = seq_len - tokens
    position = tl.where(valid, before + token, -1)

    # Keys that some row of the tile sees: from the first row's window to the last row itself.
    first_token = (tile * ROWS) // heads
    last_token = tl.minimum((tile * ROWS + ROWS - 1) // heads, tokens - 1)
    stop = tl.minimum(before + last_token + 1, columns * PAGE)
    stop = tl.where(first_token < tokens, stop, 0)
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(before + first_token - window + 1, 0)
    begin = low // KEYS * KEYS
    end = stop
    if SPLIT:
        share = split_keys
        if split_keys == 0:
            share = ((stop - begin + KEYS - 1) // KEYS + splits - 1) // splits * KEYS
        begin += split * share
        end = tl.minimum(stop, begin + share)

    chunk = tl.arange(0, CHUNK)
    ropes = tl.arange(0, ROPE_TILE)
    query_at = query + request * query_b + token.to(tl.int64) * query_t + head.to(tl.int64) * query_h
    factor = tl.full((ROWS,), score_factor, tl.float32)
    LATENT_UNIT: tl.constexpr = 256.0 if FP8_BYTES else 1.0
    v_scale = LATENT_UNIT
    if FP8 and not GROUP:
        v_scale = tl.load(k_scale) * LATENT_UNIT
        factor = factor * v_scale
    rope_mask = valid[:, None] & (ropes < ROPE)[None, :]
    qr = tl.load(query_at[:, None] + (CHUNK * CHUNKS + ropes)[None, :], mask=rope_mask, other=0)
    q0 = load_rows(query_at, valid, chunk)
    if CHUNKS > 1:
        q1 = load_rows(query_at + CHUNK, valid, chunk)
    if CHUNKS > 2:
        q2 = load_rows(query_at + 2 * CHUNK, valid, chunk)
    if CHUNKS > 3:
        q3 = load_rows(query_at + 3 * CHUNK, valid, chunk)
    if NORMALISE:
        largest = tl.maximum(row_max(tl.abs(q0.to(tl.float32))), row_max(tl.abs(qr.to(tl.float32))))
        if CHUNKS > 1:
            largest = tl.maximum(largest, row_max(tl.abs(q1.to(tl.float32))))
        if CHUNKS > 2:
            largest = tl.maximum(largest, row_max(tl.abs(q2.to(tl.float32))))
        if CHUNKS > 3:
            largest = tl.maximum(largest, row_max(tl.abs(q3.to(tl.float32))))
        # 2**e <= largest < 2**(e + 1); the row is brought to 2**12, so that values down to 2**-26 of it stay normal.
        exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 27), 227) - 12
        factor = factor * (exponent << 23).to(tl.float32, bitcast=True)
        shrink = ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
        qr = qr.to(tl.float32) * shrink
        q0 = q0.to(tl.float32) * shrink
        if CHUNKS > 1:
            q1 = q1.to(tl.float32) * shrink
        if CHUNKS > 2:
            q2 = q2.to(tl.float32) * shrink
        if CHUNKS > 3:
            q3 = q3.to(tl.float32) * shrink
    qr = round_to(qr, ROPE_DOT, INTERPRETED)
    q0 = round_to(q0, DOT, INTERPRETED)
    acc0 = tl.full((ROWS, CHUNK), 0.0, tl.float32)
    if CHUNKS > 1:
        q1 = round_to(q1, DOT, INTERPRETED)
        acc1 = tl.full((ROWS, CHUNK), 0.0, tl.float32)
    if CHUNKS > 2:
        q2 = round_to(q2, DOT, INTERPRETED)
        acc2 = tl.full((ROWS, CHUNK), 0.0, tl.float32)
    if CHUNKS > 3:
        q3 = round_to(q3, DOT, INTERPRETED)
        acc3 = tl.full((ROWS, CHUNK), 0.0, tl.float32)

    sigma = 1e-30
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    table_at = table + request * table_b
    for key_tile in tl.range(begin, end, KEYS):
        key = key_tile + tl.arange(0, KEYS)
        live = (key >= low) & (key < end)
        entry = tl.load(table_at + key // PAGE, mask=live, other=0).to(tl.int64)
        slot = key % PAGE
        latent_at = latent + entry * latent_page + slot * latent_slot
        rope_at = tl.multiple_of(entry * rope_page + slot * rope_slot, ROPE_ALIGN)
        if GROUP:
            scale_at = scales + entry * scale_page + slot * scale_slot
            s0 = tl.load(scale_at, mask=live, other=0)
            largest_scale = s0
            if CHUNKS > 1:
                s1 = tl.load(scale_at + CHUNK // GROUP, mask=live, other=0)
                largest_scale = tl.maximum(largest_scale, s1)
            if CHUNKS > 2:
                s2 = tl.load(scale_at + 2 * CHUNK // GROUP, mask=live, other=0)
                largest_scale = tl.maximum(largest_scale, s2)
            if CHUNKS > 3:
                s3 = tl.load(scale_at + 3 * CHUNK // GROUP, mask=live, other=0)
                largest_scale = tl.maximum(largest_scale, s3)
            # Latents in units of the largest scale so far.
            risen = tl.maximum(sigma, tl.reduce(largest_scale, 0, tl.standard._elementwise_max))
            fall = sigma / risen
            sigma = risen
        k0 = load_rows(latent_at, live, chunk)
        if FP8:
            k0 = e4m3_to(k0, DOT, FP8_BYTES, INTERPRETED)
        if GROUP:
            k0 = k0 * (s0 / sigma).to(DOT)[:, None]
        k0 = k0.to(DOT)
        qk = dot(q0, tl.trans(k0), tl.full((ROWS, KEYS), 0.0, tl.float32), UPCAST)
        if CHUNKS > 1:
            k1 = load_rows(latent_at + CHUNK, live, chunk)
            if FP8:
                k1 = e4m3_to(k1, DOT, FP8_BYTES, INTERPRETED)
            if GROUP:
                k1 = k1 * (s1 / sigma).to(DOT)[:, None]
            k1 = k1.to(DOT)
            qk = dot(q1, tl.trans(k1), qk, UPCAST)
        if CHUNKS > 2:
            k2 = load_rows(latent_at + 2 * CHUNK, live, chunk)
            if FP8:
                k2 = e4m3_to(k2, DOT, FP8_BYTES, INTERPRETED)
            if GROUP:
                k2 = k2 * (s2 / sigma).to(DOT)[:, None]
            k2 = k2.to(DOT)
            qk = dot(q2, tl.trans(k2), qk, UPCAST)
        if CHUNKS > 3:
            k3 = load_rows(latent_at + 3 * CHUNK, live, chunk)
            if FP8:
                k3 = e4m3_to(k3, DOT, FP8_BYTES, INTERPRETED)
            if GROUP:
                k3 = k3 * (s3 / sigma).to(DOT)[:, None]
            k3 = k3.to(DOT)
            qk = dot(q3, tl.trans(k3), qk, UPCAST)
        if GROUP:
            qk = qk * (sigma * LATENT_UNIT)
        kr = tl.load(rope + rope_at[:, None] + ropes[None, :], mask=live[:, None] & (ropes < ROPE)[None, :], other=0)
        if FP8 and not GROUP:
            kr = e4m3_to(kr, ROPE_DOT, FP8_BYTES, INTERPRETED)
        qk = dot(qr, tl.trans(kr.to(ROPE_DOT)), qk, UPCAST)

        visible = key[None, :] <= position[:, None]
        if HAS_WINDOW:
            visible &= key[None, :] > position[:, None] - window
        qk = tl.where(visible, qk * factor[:, None], float("-inf"))
        highest = tl.maximum(maximum, row_max(qk))
        reference = tl.where(highest == float("-inf"), 0.0, highest)
        grown = tl.exp2(maximum - reference)
        maximum = highest
        p = tl.exp2(qk - (reference - SHIFT)[:, None])
        total = total * grown + row_sum(p)
        if GROUP:
            grown = grown * fall
        weight = round_to(p, DOT, INTERPRETED)
        acc0 = dot(weight, k0, acc0 * grown[:, None], UPCAST)
        if CHUNKS > 1:
            acc1 = dot(weight, k1, acc1 * grown[:, None], UPCAST)
        if CHUNKS > 2:
            acc2 = dot(weight, k2, acc2 * grown[:, None], UPCAST)
        if CHUNKS > 3:
            acc3 = dot(weight, k3, acc3 * grown[:, None], UPCAST)

    seen = total > 0
    log_sum = tl.where(seen, maximum - SHIFT + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    norm = tl.where(seen, v_scale / tl.where(seen, total, 1.0), 0.0)
    stored = query_rows < q_len * heads
    if SPLIT:
        part = (request * splits + split) * q_len * heads + query_rows
        tl.store(part_lse + part, log_sum, mask=stored)
        to = part_out + part * (CHUNK * CHUNKS)
        # A split that sees no key leaves its part of the scratch unwritten: the merge reads by the sum, -inf here.
        stored &= seen
    else:
        if HAS_SINK:
            logit = tl.load(sink + head) * 1.4426950408889634
            whole = with_sink(log_sum, logit)
            norm = norm * tl.exp2(log_sum - tl.where(seen, whole, 0.0))
            log_sum = whole
        lse_at = lse + request * lse_b + token.to(tl.int64) * lse_t + head.to(tl.int64) * lse_h
        tl.store(lse_at, log_sum * 0.6931471805599453, mask=stored)
        to = out + request * out_b + token.to(tl.int64) * out_t + head.to(tl.int64) * out_h
    to = to[:, None] + chunk[None, :]
    kind = to.dtype.element_ty
    if GROUP:
        norm = norm * sigma
    tl.store(to, round_to(acc0 * norm[:, None], kind, INTERPRETED), mask=stored[:, None])
    if CHUNKS > 1:
        tl.store(to + CHUNK, round_to(acc1 * norm[:, None], kind, INTERPRETED), mask=stored[:, None])
    if CHUNKS > 2:
        tl.store(to + 2 * CHUNK, round_to(acc2 * norm[:, None], kind, INTERPRETED), mask=stored[:, None])
    if CHUNKS > 3:
        tl.store(to + 3 * CHUNK, round_to(acc3 * norm[:, None], kind, INTERPRETED), mask=stored[:, None])


def _merge_splits(
    part_out,
    part_lse,
    sink,
    out,
    lse,
    out_b,
    out_t,
    out_h,
    lse_b,
    lse_t,
    lse_h,
    heads,
    q_len,
    splits,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One chunk of one query row: SPLITS parts a step, in an order that no number of further empty parts changes."""
    query_row = tl.program_id(0)
    piece = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    token = query_row // heads
    head = query_row - token * heads
    columns = piece * CHUNK + tl.arange(0, CHUNK)
    maximum = float("-inf")
    first = request * splits
    for step in tl.range(0, splits, SPLITS):
        split = step + tl.arange(0, SPLITS)
        part = (first + split) * q_len * heads + query_row
        log_sums = tl.load(part_lse + part, mask=split < splits, other=float("-inf"))
        maximum = tl.maximum(maximum, tl.reduce(log_sums, 0, tl.standard._elementwise_max))
    reference = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = 0.0
    acc = tl.full((CHUNK,), 0.0, tl.float32)
    for step in tl.range(0, splits, SPLITS):
        split = step + tl.arange(0, SPLITS)
        part = (first + split) * q_len * heads + query_row
        log_sums = tl.load(part_lse + part, mask=split < splits, other=float("-inf"))
        weight = tl.exp2(log_sums - reference)
        held = log_sums > float("-inf")
        at = part_out + part * (CHUNK * CHUNKS)
        parts = tl.load(at[:, None] + columns[None, :], mask=held[:, None], other=0.0)
        total += tl.reduce(weight, 0, tl.standard._sum_combine)
        acc += tl.reduce(parts * weight[:, None], 0, tl.standard._sum_combine)
    seen = total > 0
    log_sum = tl.where(seen, maximum + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    norm = tl.where(seen, 1.0 / tl.where(seen, total, 1.0), 0.0)
    if HAS_SINK:
        logit = tl.load(sink + head) * 1.4426950408889634
        whole = with_sink(log_sum, logit)
        norm = norm * tl.exp2(log_sum - tl.where(seen, whole, 0.0))
        log_sum = whole
    to = out + request * out_b + token.to(tl.int64) * out_t + head.to(tl.int64) * out_h
    tl.store(to + columns, round_to(acc * norm, out.dtype.element_ty, INTERPRETED))
    if piece == 0:
        lse_at = lse + request * lse_b + token.to(tl.int64) * lse_t + head.to(tl.int64) * lse_h
        tl.store(lse_at, log_sum * 0.6931471805599453)


DECODE = TritonKernel(_decode_tile, varying=("heads", "q_len", "columns", "window", "splits", "split_keys"))
MERGE = TritonKernel(_merge_splits, varying=("heads", "q_len", "splits"))
