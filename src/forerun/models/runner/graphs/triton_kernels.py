"""Triton kernels between the matrix products of a pass over few rows.

Each does in one launch, reading its operands once, what torch needs several for. The attention
kernel reads every key where it lies, once for all rows of a sequence and all query heads of a
group. The context is cut into chunks, whose length does not depend on how many rows and sequences
share the pass.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_kernel(
    rows,
    update,
    weight,
    total,
    normed,
    eps,
    num_columns: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Compute the RMS norm of a row; if ADDS, `update` is added first and the sum stored."""
    first = tl.program_id(0) * num_columns
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    places = first + columns
    dtype = normed.dtype.element_ty
    values = tl.load(rows + places, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(update + places, mask=inside, other=0.0).to(tl.float32)
        # The residual stream is what is stored, so what is stored is what is normed.
        tl.store(total + places, values.to(dtype), mask=inside)
        values = values.to(dtype).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / num_columns + eps)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + places, (values * scale * weights).to(dtype), mask=inside)


@triton.jit
def gate_kernel(gate_up, gated, num_columns: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply SiLU of the first half of a row by its second half."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    source = gate_up + row * 2 * num_columns + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + num_columns, mask=inside, other=0.0).to(tl.float32)
    dtype = gated.dtype.element_ty
    active = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    tl.store(gated + row * num_columns + columns, (active * up).to(dtype), mask=inside)


@triton.jit
def normed_halves(first, second, weight, halves, inside, eps, head_dim: tl.constexpr, dtype):
    """RMS norm of one head given as two halves, rounded to `dtype` as a store to memory would."""
    mean_square = (tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)) / head_dim
    scale = tl.rsqrt(mean_square + eps)
    first_weight = tl.load(weight + halves, mask=inside, other=0.0).to(tl.float32)
    second_weight = tl.load(weight + head_dim // 2 + halves, mask=inside, other=0.0).to(tl.float32)
    first = (first * scale * first_weight).to(dtype).to(tl.float32)
    second = (second * scale * second_weight).to(dtype).to(tl.float32)
    return first, second


@triton.jit
def rotate_kernel(
    qkv,
    query_norm,
    key_norm,
    cosine,
    sine,
    slot,
    index,
    query,
    keys,
    values,
    eps,
    width,
    NUM_ROWS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMS: tl.constexpr,
):
    """Norm and rotate one query or key head of a row; keys and values are written to the store."""
    row, head = tl.program_id(0), tl.program_id(1)
    halves = tl.arange(0, BLOCK)
    inside = halves < HEAD_DIM // 2
    dtype = query.dtype.element_ty
    source = qkv + (row * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM + halves
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HEAD_DIM // 2, mask=inside, other=0.0).to(tl.float32)
    if head < NUM_HEADS + NUM_KV_HEADS:
        if NORMS:
            if head < NUM_HEADS:
                first, second = normed_halves(
                    first, second, query_norm, halves, inside, eps, HEAD_DIM, dtype
                )
            else:
                first, second = normed_halves(
                    first, second, key_norm, halves, inside, eps, HEAD_DIM, dtype
                )
        angles = row * (HEAD_DIM // 2) + halves
        cos = tl.load(cosine + angles, mask=inside, other=0.0)
        sin = tl.load(sine + angles, mask=inside, other=0.0)
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    if head < NUM_HEADS:
        target = query + (row * NUM_HEADS + head) * HEAD_DIM + halves
        tl.store(target, first.to(dtype), mask=inside)
        tl.store(target + HEAD_DIM // 2, second.to(dtype), mask=inside)
    else:
        kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
        own_slot, own_index = tl.load(slot + row // NUM_ROWS), tl.load(index + row)
        place = ((own_slot * NUM_KV_HEADS + kv_head) * width + own_index) * HEAD_DIM + halves
        if head < NUM_HEADS + NUM_KV_HEADS:
            tl.store(keys + place, first.to(dtype), mask=inside)
            tl.store(keys + place + HEAD_DIM // 2, second.to(dtype), mask=inside)
        else:
            tl.store(values + place, first.to(dtype), mask=inside)
            tl.store(values + place + HEAD_DIM // 2, second.to(dtype), mask=inside)


@triton.jit
def masked(scores, bits, places, first, last):
    """Set scores to -inf at keys that a row does not see; all keys before `first` are visible."""
    since = places - first
    own = bits[:, None] >> tl.minimum(tl.maximum(since, 0), 63)[None, :]
    seen = (places < last)[None, :] & ((since < 0)[None, :] | ((own & 1) != 0))
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def softened(scores, peak):
    """Return exp(scores - maximum), the running maximum, and the factor to rescale older sums."""
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    # A row that has seen nothing yet has no peak to measure from.
    level = tl.where(higher == float("-inf"), 0.0, higher)
    return tl.exp(scores - level[:, None]), higher, tl.exp(peak - level)


@triton.jit
def attend_kernel(
    query,
    keys,
    values,
    slot,
    start,
    end,
    visible,
    partial,
    peaks,
    masses,
    scaling,
    width,
    NUM_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend a tile of rows to one chunk of keys; store weighted sum, maximum and weight sum."""
    num_tiles: tl.constexpr = (GROUPS * NUM_ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    sequence, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    kv_head, chunk = tl.program_id(1), tl.program_id(2)
    first, last = tl.load(start + sequence), tl.load(end + sequence)
    if chunk * CHUNK >= last:
        return
    folded = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = folded < GROUPS * NUM_ROWS
    row = sequence * NUM_ROWS + folded % NUM_ROWS
    head = kv_head * GROUPS + folded // NUM_ROWS
    columns = tl.arange(0, BLOCK_D)
    inside = columns < HEAD_DIM
    place = ((row * NUM_KV_HEADS * GROUPS + head) * HEAD_DIM)[:, None] + columns[None, :]
    queries = tl.load(query + place, mask=live[:, None] & inside[None, :], other=0.0)
    bits = tl.load(visible + row, mask=live, other=1)
    base = (tl.load(slot + sequence) * NUM_KV_HEADS + kv_head) * width * HEAD_DIM
    peak = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_ROWS,), tl.float32)
    total = tl.zeros((BLOCK_ROWS, BLOCK_D), tl.float32)
    for offset in range(0, CHUNK, BLOCK_KEYS):
        places = chunk * CHUNK + offset + tl.arange(0, BLOCK_KEYS)
        address = base + places[:, None] * HEAD_DIM + columns[None, :]
        mask = (places < last)[:, None] & inside[None, :]
        block = tl.trans(tl.load(keys + address, mask=mask, other=0.0))
        scores = tl.dot(queries, block, input_precision=PRECISION) * scaling
        scores = masked(scores, bits, places, first, last)
        weights, peak, shrink = softened(scores, peak)
        mass = mass * shrink + tl.sum(weights, axis=1)
        own, total = tl.load(values + address, mask=mask, other=0.0), total * shrink[:, None]
        total = tl.dot(weights.to(own.dtype), own, total, input_precision=PRECISION)
    own_chunk = (sequence * NUM_KV_HEADS + kv_head) * NUM_CHUNKS + chunk
    target = own_chunk * num_tiles * BLOCK_ROWS + folded
    tl.store(peaks + target, peak)
    tl.store(masses + target, mass)
    tl.store(partial + target[:, None] * BLOCK_D + columns[None, :], total)


@triton.jit
def combine_kernel(
    partial,
    peaks,
    masses,
    end,
    attended,
    NUM_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_FOLDED: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Combine the partial attention of all key chunks for one head of one row."""
    row, head = tl.program_id(0), tl.program_id(1)
    sequence = row // NUM_ROWS
    folded = (head % GROUPS) * NUM_ROWS + row % NUM_ROWS
    columns = tl.arange(0, BLOCK_D)
    num_used = tl.cdiv(tl.load(end + sequence), CHUNK)
    base = (sequence * NUM_KV_HEADS + head // GROUPS) * NUM_CHUNKS
    peak = float("-inf")
    mass = 0.0
    total = tl.zeros((BLOCK_D,), tl.float32)
    for low in range(0, NUM_CHUNKS, BLOCK_CHUNKS):
        chunks = low + tl.arange(0, BLOCK_CHUNKS)
        used = chunks < num_used
        places = (base + chunks) * NUM_FOLDED + folded
        tops = tl.load(peaks + places, mask=used, other=float("-inf"))
        # Every row sees itself and all before its sequence's start, so the first peak is finite.
        higher = tl.maximum(peak, tl.max(tops, axis=0))
        weights = tl.exp(tops - higher)
        shrink = tl.exp(peak - higher)
        sums = tl.load(masses + places, mask=used, other=0.0)
        mask = used[:, None] & (columns < HEAD_DIM)[None, :]
        parts = tl.load(
            partial + places[:, None] * BLOCK_D + columns[None, :], mask=mask, other=0.0
        )
        mass = mass * shrink + tl.sum(sums * weights, axis=0)
        total = total * shrink + tl.sum(parts * weights[:, None], axis=0)
        peak = higher
    target = attended + (row * NUM_KV_HEADS * GROUPS + head) * HEAD_DIM + columns
    tl.store(target, (total / mass).to(attended.dtype.element_ty), mask=columns < HEAD_DIM)
