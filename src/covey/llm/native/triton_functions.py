"""The functions of `TritonKernels` that run on a GPU.

A program, one of a grid, computes a row or a tile. Triton compiles a function for the types of its arguments; pointers
are to the first number of a contiguous tensor, None leaves a tensor out, and constants are in capital letters.

Shapes: as in `triton_kernels`. The names of numbers are those of their tensors there.
"""

import triton
import triton.language as tl


@triton.jit
def add_rmsnorm(hidden, added, weight, total, out, scales, width, epsilon, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    here, inside = row * width + column, column < width
    x = tl.load(hidden + here, mask=inside, other=0.0).to(tl.float32)
    if added is not None:
        x += tl.load(added + here, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + here, x, mask=inside)
    scale = 1 / tl.sqrt(tl.sum(x * x, axis=0) / width + epsilon)
    if scales is not None:
        tl.store(scales + row, scale)
    weights = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + here, weights * x * scale, mask=inside)


@triton.jit
def rmsnorm_backward(
    x, weight, scales, dout, dtotal, dx, dadded, partial_sums, rows, width, BLOCK: tl.constexpr
):  # fmt: skip
    program, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    weights = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK], tl.float32)
    for turn in range(tl.cdiv(rows - tl.program_id(0), tl.num_programs(0))):
        row = program + turn * tl.num_programs(0)
        here = row * width + column
        scale = tl.load(scales + row)
        normed = tl.load(x + here, mask=inside, other=0.0).to(tl.float32) * scale
        d = tl.load(dout + here, mask=inside, other=0.0).to(tl.float32)
        dweight += d * normed
        d *= weights
        gradient = scale * (d - normed * (tl.sum(d * normed, axis=0) / width))
        if dtotal is not None:
            gradient += tl.load(dtotal + here, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + here, gradient, mask=inside)
        if dadded is not None:
            tl.store(dadded + here, gradient, mask=inside)
    tl.store(partial_sums + program * width + column, dweight, mask=inside)


@triton.jit
def gate_of(g, GELU: tl.constexpr):
    """The share of g that the activation lets through, and the slope of g times it: SiLU, or GELU by tanh."""
    # (1 + tanh(x)) / 2 = sigmoid(2 x)
    angle = 1.5957691216057308 * (g + 0.044715 * g * g * g) if GELU else g
    share = tl.sigmoid(angle)
    slope = 1.5957691216057308 * (1 + 0.134145 * g * g) if GELU else 1.0
    return share, share * (1 + g * (1 - share) * slope)


@triton.jit
def gated(gate, up, out, stride, width, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gate + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    share, _ = gate_of(g, GELU)
    tl.store(out + row * width + column, g * share * u, mask=inside)


@triton.jit
def gated_backward(gate, up, dout, dgate, dup, count, BLOCK: tl.constexpr, GELU: tl.constexpr):
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = here < count
    g = tl.load(gate + here, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + here, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dout + here, mask=inside, other=0.0).to(tl.float32)
    share, slope = gate_of(g, GELU)
    tl.store(dup + here, d * g * share, mask=inside)
    tl.store(dgate + here, d * u * slope, mask=inside)


@triton.jit
def rotate(x, cosine, sine, out, heads, HALF: tl.constexpr, BLOCK: tl.constexpr, BACKWARD: tl.constexpr):
    token, head, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    inside = column < HALF
    here, angle = (token * heads + head) * 2 * HALF + column, token * 2 * HALF + column
    a = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + here + HALF, mask=inside, other=0.0).to(tl.float32)
    cos_a = tl.load(cosine + angle, mask=inside, other=0.0).to(tl.float32)
    cos_b = tl.load(cosine + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    sin_a = tl.load(sine + angle, mask=inside, other=0.0).to(tl.float32)
    sin_b = tl.load(sine + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    if BACKWARD:
        tl.store(out + here, a * cos_a + b * sin_b, mask=inside)
        tl.store(out + here + HALF, b * cos_b - a * sin_a, mask=inside)
    else:
        tl.store(out + here, a * cos_a - b * sin_a, mask=inside)
        tl.store(out + here + HALF, b * cos_b + a * sin_b, mask=inside)


@triton.jit
def product(a, b, EXACT: tl.constexpr):
    # Three products of TF32 have nearly the bits of fp32. That of fp32 needs no tensor cores, but minutes to compile.
    return tl.dot(a, b, input_precision="tf32x3" if EXACT else "tf32")


@triton.jit
def rows_of(x, token, head, inside, HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """[tokens, WIDTH] of one head, 0 outside."""
    column = tl.arange(0, WIDTH)
    place = (token.to(tl.int64) * HEADS + head)[:, None] * D + column[None, :]
    return tl.load(x + place, mask=inside[:, None] & (column < D)[None, :], other=0.0)


@triton.jit
def tile_of(tiles, sequences):
    """The sequence of this program's tile, the tile's begin in it, and the sequence's first token, length and number of
    tokens before it."""
    tile = tl.program_id(0)
    sequence, begin = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    of_it = sequences + 5 * sequence
    return sequence, begin, tl.load(of_it), tl.load(of_it + 1), tl.load(of_it + 4)


@triton.jit
def parent_of(sequences, sequence):
    """The parent of a sequence, negative without one, and its first token, length and number of tokens before it."""
    parent = tl.load(sequences + 5 * sequence + 2)
    known = sequences + 5 * tl.maximum(parent, 0)
    return parent, tl.load(known), tl.load(known + 1), tl.load(known + 4)


@triton.jit
def first_seen(least, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """The first token of the first tile with a key that a query at this place, or one after it, attends to."""
    return tl.maximum(least - WINDOW + 1, 0) // TILE * TILE if WINDOW else 0


@triton.jit
def within(seen, query, key, WINDOW: tl.constexpr):
    """`seen` without the pairs whose key is too far before the query; places count from the same token."""
    return seen & (query - key < WINDOW) if WINDOW else seen


@triton.jit
def attend(
    query, key, value, out, logsumexp, sequences, tiles, scaling,
    D: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
    EXACT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    sequence, begin, first, length, before = tile_of(tiles, sequences)
    place = begin + tl.arange(0, TILE)  # in the sequence
    inside, asking = place < length, before + place
    q = rows_of(query, first + place, head, inside, HEADS, D, WIDTH)
    top = tl.full([TILE], -1e30, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    attended = tl.zeros([TILE, WIDTH], tl.float32)
    token, end, skipped = first, tl.minimum(begin + TILE, length), before
    last = place  # the last key of each query
    while sequence >= 0:
        for start in range(first_seen(before + begin - skipped, TILE, WINDOW), end, TILE):
            column = start + tl.arange(0, TILE)
            k = rows_of(key, token + column, head // GROUP, column < end, HEADS // GROUP, D, WIDTH)
            scores = product(q, tl.trans(k), EXACT) * scaling
            seen = (column[None, :] <= last[:, None]) & (column < end)[None, :]
            seen = within(seen, asking[:, None], (skipped + column)[None, :], WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, axis=1))
            weights = tl.exp(scores - higher[:, None])
            shrunk = tl.exp(top - higher)
            v = rows_of(value, token + column, head // GROUP, column < end, HEADS // GROUP, D, WIDTH)
            attended = attended * shrunk[:, None] + product(weights.to(v.dtype), v, EXACT)
            total = total * shrunk + tl.sum(weights, axis=1)
            top = higher
        sequence, token, end, skipped = parent_of(sequences, sequence)
        last = end + tl.zeros([TILE], tl.int32)
    total = tl.maximum(total, 1e-30)  # past the end of the sequence a window may have no key
    column = tl.arange(0, WIDTH)
    row = (first + place).to(tl.int64) * HEADS + head
    tl.store(
        out + row[:, None] * D + column[None, :], attended / total[:, None],
        mask=inside[:, None] & (column < D)[None, :],
    )  # fmt: skip
    tl.store(logsumexp + row, top + tl.log(total), mask=inside)


@triton.jit
def row_products(a, b, out, D: tl.constexpr, WIDTH: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1), tl.arange(0, WIDTH)
    x = tl.load(a + row * D + column, mask=column < D, other=0.0).to(tl.float32)
    y = tl.load(b + row * D + column, mask=column < D, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(x * y, axis=0))


@triton.jit
def attend_dquery(
    query, key, value, dout, logsumexp, delta, dquery, sequences, tiles, scaling,
    D: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
    EXACT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    sequence, begin, first, length, before = tile_of(tiles, sequences)
    place = begin + tl.arange(0, TILE)
    inside, asking = place < length, before + place
    row = (first + place).to(tl.int64) * HEADS + head
    q = rows_of(query, first + place, head, inside, HEADS, D, WIDTH)
    d = rows_of(dout, first + place, head, inside, HEADS, D, WIDTH)
    log_total = tl.load(logsumexp + row, mask=inside, other=0.0)
    mean = tl.load(delta + row, mask=inside, other=0.0)
    gradient = tl.zeros([TILE, WIDTH], tl.float32)
    token, end, last, skipped = first, tl.minimum(begin + TILE, length), place, before
    while sequence >= 0:
        for start in range(first_seen(before + begin - skipped, TILE, WINDOW), end, TILE):
            column = start + tl.arange(0, TILE)
            k = rows_of(key, token + column, head // GROUP, column < end, HEADS // GROUP, D, WIDTH)
            v = rows_of(value, token + column, head // GROUP, column < end, HEADS // GROUP, D, WIDTH)
            seen = (column[None, :] <= last[:, None]) & (column < end)[None, :] & inside[:, None]
            seen = within(seen, asking[:, None], (skipped + column)[None, :], WINDOW)
            scores = product(q, tl.trans(k), EXACT) * scaling
            weights = tl.exp(tl.where(seen, scores - log_total[:, None], -1e30))
            slope = weights * (product(d, tl.trans(v), EXACT) - mean[:, None])
            gradient += product(slope.to(k.dtype), k, EXACT)
        sequence, token, end, skipped = parent_of(sequences, sequence)
        last = end + tl.zeros([TILE], tl.int32)
    column = tl.arange(0, WIDTH)
    tl.store(
        dquery + row[:, None] * D + column[None, :], gradient * scaling, mask=inside[:, None] & (column < D)[None, :]
    )


@triton.jit
def attend_dkey(
    query, key, value, dout, logsumexp, delta, dkey, dvalue, sequences, tiles, scaling,
    D: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
    EXACT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1)
    own, begin, first, length, before = tile_of(tiles, sequences)
    place = begin + tl.arange(0, TILE)  # of the keys
    inside = place < length
    k = rows_of(key, first + place, kv_head, inside, HEADS // GROUP, D, WIDTH)
    v = rows_of(value, first + place, kv_head, inside, HEADS // GROUP, D, WIDTH)
    dk, dv = tl.zeros([TILE, WIDTH], tl.float32), tl.zeros([TILE, WIDTH], tl.float32)
    for sequence in range(own, tl.load(sequences + 5 * own + 3)):  # itself and its descendants
        of_it = sequences + 5 * sequence
        token, count, skipped = tl.load(of_it), tl.load(of_it + 1), tl.load(of_it + 4)
        end = count
        if WINDOW:  # the last query to which a key of the tile is near enough
            end = tl.minimum(count, before + begin + TILE - 1 + WINDOW - skipped)
        for start in range(tl.where(sequence == own, begin, 0), end, TILE):
            asking = start + tl.arange(0, TILE)
            there = asking < count
            seen = inside[:, None] & there[None, :] & ((sequence != own) | (place[:, None] <= asking[None, :]))
            seen = within(seen, (skipped + asking)[None, :], (before + place)[:, None], WINDOW)
            for member in range(GROUP):
                head = kv_head * GROUP + member
                row = (token + asking).to(tl.int64) * HEADS + head
                q = rows_of(query, token + asking, head, there, HEADS, D, WIDTH)
                d = rows_of(dout, token + asking, head, there, HEADS, D, WIDTH)
                log_total = tl.load(logsumexp + row, mask=there, other=0.0)
                mean = tl.load(delta + row, mask=there, other=0.0)
                scores = product(k, tl.trans(q), EXACT) * scaling
                weights = tl.exp(tl.where(seen, scores - log_total[None, :], -1e30))
                dv += product(weights.to(d.dtype), d, EXACT)
                slope = weights * (product(v, tl.trans(d), EXACT) - mean[None, :])
                dk += product(slope.to(q.dtype), q, EXACT)
    column = tl.arange(0, WIDTH)
    target = ((first + place).to(tl.int64) * (HEADS // GROUP) + kv_head)[:, None] * D + column[None, :]
    wanted = inside[:, None] & (column < D)[None, :]
    tl.store(dkey + target, dk * scaling, mask=wanted)
    tl.store(dvalue + target, dv, mask=wanted)


@triton.jit
def append(
    qkv, cosine, sine, query_norm, key_norm, query, own_keys, own_values, slots, decoded, capacity, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, head, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    inside = column < HALF
    here, angle = (row * (HEADS + 2 * KV_HEADS) + head) * 2 * HALF + column, row * 2 * HALF + column
    a = tl.load(qkv + here, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(qkv + here + HALF, mask=inside, other=0.0).to(tl.float32)
    slot, place = tl.load(slots + row).to(tl.int64), tl.load(decoded + row)
    own = ((slot * KV_HEADS + (head - HEADS) % KV_HEADS) * capacity + place) * 2 * HALF + column
    if head >= HEADS + KV_HEADS:
        tl.store(own_values + own, a, mask=inside)
        tl.store(own_values + own + HALF, b, mask=inside)
    else:
        if query_norm is not None:
            scale = 1 / tl.sqrt(tl.sum(a * a + b * b, axis=0) / (2 * HALF) + epsilon)
            of_query, of_key = inside & (head < HEADS), inside & (head >= HEADS)
            norm_a = tl.load(query_norm + column, mask=of_query, other=0.0).to(tl.float32)
            norm_b = tl.load(query_norm + column + HALF, mask=of_query, other=0.0).to(tl.float32)
            norm_a += tl.load(key_norm + column, mask=of_key, other=0.0).to(tl.float32)
            norm_b += tl.load(key_norm + column + HALF, mask=of_key, other=0.0).to(tl.float32)
            a *= scale * norm_a
            b *= scale * norm_b
        cos_a = tl.load(cosine + angle, mask=inside, other=0.0).to(tl.float32)
        cos_b = tl.load(cosine + angle + HALF, mask=inside, other=0.0).to(tl.float32)
        sin_a = tl.load(sine + angle, mask=inside, other=0.0).to(tl.float32)
        sin_b = tl.load(sine + angle + HALF, mask=inside, other=0.0).to(tl.float32)
        first, second = a * cos_a - b * sin_a, b * cos_b + a * sin_b
        if head < HEADS:
            target = (row * HEADS + head) * 2 * HALF + column
            tl.store(query + target, first, mask=inside)
            tl.store(query + target + HALF, second, mask=inside)
        else:
            tl.store(own_keys + own, first, mask=inside)
            tl.store(own_keys + own + HALF, second, mask=inside)


@triton.jit
def attend_part(
    q, asking, keys, values, begin, end, scaling,
    QUERIES: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Attention of q [QUERIES, WIDTH] to the tokens begin to end of [tokens, D], and its logsumexp; `asking` are the
    places of the queries, counted from the same token."""
    top = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    attended = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range(tl.maximum(begin, first_seen(tl.min(asking, axis=0), TILE, WINDOW)), end, TILE):
        token = start + tl.arange(0, TILE)
        k = rows_of(keys, token, 0, token < end, 1, D, WIDTH)
        v = rows_of(values, token, 0, token < end, 1, D, WIDTH)
        seen = within((token < end)[None, :], asking[:, None], token[None, :], WINDOW)
        scores = tl.where(seen, product(q, tl.trans(k), EXACT) * scaling, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights, shrunk = tl.exp(scores - higher[:, None]), tl.exp(top - higher)
        attended = attended * shrunk[:, None] + product(weights.to(v.dtype), v, EXACT)
        total = total * shrunk + tl.sum(weights, axis=1)
        top = higher
    divisor = tl.maximum(total, 1e-30)
    return attended / divisor[:, None], tl.where(total > 0, top + tl.log(divisor), -1e30)


@triton.jit
def store_part(
    attended, log_total, parts, logsumexp, part, rows, row, head, inside,
    HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WIDTH)
    place = (part.to(tl.int64) * rows + row) * HEADS + head
    tl.store(parts + place[:, None] * D + column[None, :], attended, mask=inside[:, None] & (column < D)[None, :])
    tl.store(logsumexp + place, log_total, mask=inside)


@triton.jit(do_not_specialize=["rows", "layer"])  # else it is compiled for each kind of number
def attend_prompts(
    query, prompt_keys, prompt_values, prompt_lengths, decoded, own_keys, parts, logsumexp, tiles, rows, layer, scaling,
    D: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
    EXACT: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lead = tl.load(tiles + tile * ROWS)
    if lead >= 0:
        number = tl.arange(0, QUERIES)
        row = tl.load(tiles + tile * ROWS + number // GROUP, mask=number < ROWS * GROUP, other=-1)
        head = kv_head * GROUP + number % GROUP
        q = rows_of(query, row * HEADS + head, 0, row >= 0, 1, D, WIDTH)
        length = tl.load(prompt_lengths + lead)
        of_layer = (layer * (HEADS // GROUP) + kv_head).to(tl.int64) * length * D
        keys = tl.load(prompt_keys + lead).to(own_keys.dtype) + of_layer
        values = tl.load(prompt_values + lead).to(own_keys.dtype) + of_layer
        if D % 8 == 0:  # else the compiler does not know that 16 bytes can be read at once
            keys, values = tl.multiple_of(keys, 16), tl.multiple_of(values, 16)
        asking = length + tl.load(decoded + row, mask=row >= 0, other=1 << 30)
        share = tl.cdiv(tl.cdiv(length, TILE), tl.num_programs(2)) * TILE
        begin, end = part * share, tl.minimum((part + 1) * share, length)
        attended, log_total = attend_part(
            q, asking, keys, values, begin, end, scaling, QUERIES, D, TILE, WIDTH, EXACT, WINDOW
        )
        store_part(attended, log_total, parts, logsumexp, part, rows, row, head, row >= 0, HEADS, D, WIDTH)


@triton.jit
def attend_own(
    query, own_keys, own_values, slots, decoded, parts, logsumexp, prompt_parts, capacity, scaling,
    D: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
    EXACT: tl.constexpr, WINDOW: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    row, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    number = tl.arange(0, QUERIES)
    head, inside = kv_head * GROUP + number, number < GROUP
    q = rows_of(query, row * HEADS + head, 0, inside, 1, D, WIDTH)
    own = (tl.load(slots + row).to(tl.int64) * (HEADS // GROUP) + kv_head) * capacity * D
    length = tl.load(decoded + row) + 1
    share = tl.cdiv(tl.cdiv(length, TILE), tl.num_programs(2)) * TILE
    begin, end = part * share, tl.minimum((part + 1) * share, length)
    asking = length - 1 + tl.zeros([QUERIES], tl.int32)
    attended, log_total = attend_part(
        q, asking, own_keys + own, own_values + own, begin, end, scaling, QUERIES, D, TILE, WIDTH, EXACT, WINDOW
    )
    store_part(
        attended, log_total, parts, logsumexp, prompt_parts + part, tl.num_programs(0), row, head, inside,
        HEADS, D, WIDTH,
    )  # fmt: skip


@triton.jit
def merge_parts(
    parts, logsumexp, out, PARTS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    rows = tl.num_programs(0) * tl.num_programs(1)
    row, part, column = (
        tl.program_id(0) * tl.num_programs(1) + tl.program_id(1),
        tl.arange(0, BLOCK),
        tl.arange(0, WIDTH),
    )
    place = part.to(tl.int64) * rows + row
    log_total = tl.load(logsumexp + place, mask=part < PARTS, other=-1e30)
    weights = tl.exp(log_total - tl.max(log_total, axis=0))
    wanted = (part < PARTS)[:, None] & (column < D)[None, :]
    of_parts = tl.load(parts + place[:, None] * D + column[None, :], mask=wanted, other=0.0)
    attended = tl.sum(of_parts * weights[:, None], axis=0) / tl.sum(weights, axis=0)
    tl.store(out + row.to(tl.int64) * D + column, attended, mask=column < D)


@triton.jit
def draw(logits, uniforms, sums, tokens, logprobs, vocabulary, blocks, temperature, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    logits += row * vocabulary
    sums += row * blocks
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for block in range(blocks):
        here = block * BLOCK + column
        z = tl.load(logits + here, mask=here < vocabulary, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, z)
    highest = tl.max(top, axis=0) / temperature
    total = tl.sum(tl.zeros([BLOCK], tl.float64), axis=0)
    for block in range(blocks):
        here = block * BLOCK + column
        z = tl.load(logits + here, mask=here < vocabulary, other=float("-inf")).to(tl.float32) / temperature
        mass = tl.sum(tl.exp(z - highest).to(tl.float64), axis=0)
        tl.store(sums + block, mass)
        total += mass
    tl.debug_barrier()  # every thread reads the sums that one has written
    wanted = tl.load(uniforms + row) * total
    chosen, before, upto = 0, total * 0, total * 0
    for block in range(blocks):  # the first block in which the sum exceeds the wanted one; else the last with a mass
        mass = tl.load(sums + block)
        is_next = (mass > 0) & (upto <= wanted)
        chosen, before = tl.where(is_next, block, chosen), tl.where(is_next, upto, before)
        upto += mass
    here = chosen * BLOCK + column
    z = tl.load(logits + here, mask=here < vocabulary, other=float("-inf")).to(tl.float32) / temperature
    mass = tl.exp(z - highest)
    over = (before + tl.cumsum(mass.to(tl.float64), axis=0) > wanted) & (mass > 0)
    last = tl.max(tl.where(mass > 0, column, 0), axis=0)  # by rounding the sum may not exceed the wanted one
    place = tl.minimum(tl.min(tl.where(over, column, BLOCK), axis=0), last)
    token = chosen * BLOCK + place
    tl.store(tokens + row, token.to(tl.int64))
    log_total = tl.log(total).to(tl.float32)
    z_token = tl.load(logits + token).to(tl.float32) / temperature
    tl.store(logprobs + row, (z_token - highest) - log_total)


@triton.jit
def logprob_entropy(logits, tokens, logprobs, entropy, logsumexp, vocabulary, temperature, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    logits += row * vocabulary
    top = tl.full([BLOCK], -1e38, tl.float32)
    total, weighted = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        here = start + column
        z = tl.load(logits + here, mask=here < vocabulary, other=float("-inf")).to(tl.float32) / temperature
        higher = tl.maximum(top, z)
        shrunk, mass = tl.exp(top - higher), tl.exp(z - higher)
        total = total * shrunk + mass
        weighted = weighted * shrunk + tl.where(mass > 0, mass * z, 0.0)
        top = higher
    highest = tl.max(top, axis=0)
    shrunk = tl.exp(top - highest)
    sum_of_masses = tl.sum(total * shrunk, axis=0)
    log_total = highest + tl.log(sum_of_masses)
    z_token = tl.load(logits + tl.load(tokens + row)).to(tl.float32) / temperature
    tl.store(logprobs + row, z_token - log_total)
    tl.store(entropy + row, log_total - tl.sum(weighted * shrunk, axis=0) / sum_of_masses)
    tl.store(logsumexp + row, log_total)


@triton.jit
def logit_gradients(
    logits, tokens, logsumexp, entropy, dlogprob, dentropy, vocabulary, temperature, first, BLOCK: tl.constexpr
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here, inside = row * vocabulary + column, column < vocabulary
    logp = tl.load(logits + here, mask=inside, other=0.0).to(tl.float32) / temperature - tl.load(logsumexp + row)
    # d log p_token / dz = [token] - p;  dH / dz = -p (log p + H)
    slope = tl.zeros([BLOCK], tl.float32)
    if dentropy is not None:
        slope -= tl.load(dentropy + row) * (logp + tl.load(entropy + row))
    gradient = tl.exp(logp) * slope
    if dlogprob is not None:
        d = tl.load(dlogprob + row)
        gradient += tl.where(first + column == tl.load(tokens + row), d, 0.0) - tl.exp(logp) * d
    tl.store(logits + here, gradient / temperature, mask=inside)
