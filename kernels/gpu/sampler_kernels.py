"""The kernels behind sampler.py: one program per logits row.

A row that changes its logits (bans, allowed ids, biases, penalties) is first written to `work` as float32, with -inf where an id takes
no part; any other is read where it lies. Ranks are never sorted: keys that order as z does are searched for the threshold that keeps as
many ids, or as much mass, as asked, and ties at the threshold are kept from the lowest id on.
"""

import triton
import triton.language as tl

from .arithmetic import exp32, mass_of
from .masses import entropy_of, logprob_of, mass_sum, peak_of, z_at

_LOWEST = tl.constexpr(-(2**31))


@triton.jit(do_not_specialize=["ld_logits", "ld_work", "allowed_words"])
def changed_logits_kernel(logits, work, ban_offset, banned, adjust_offset, adjust, allowed_row, allowed, ld_logits, ld_work, allowed_words,
                          V: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, LIST: tl.constexpr):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    ban, ban_end = tl.load(ban_offset + r), tl.load(ban_offset + r + 1)
    entry, entry_end = tl.load(adjust_offset + r), tl.load(adjust_offset + r + 1)
    mask_row = tl.load(allowed_row + r)
    if (ban < ban_end) | (entry < entry_end) | (mask_row >= 0):
        row, target = logits + r * (ld_logits * UNIT), work + r * (ld_work * 4)
        words = allowed + tl.maximum(mask_row, 0).to(tl.int64) * allowed_words
        end = tl.where(mask_row >= 0, allowed_words, 0)
        open_ = tl.where(mask_row >= 0, 0, 1)
        for first in range(0, V, BLOCK):
            at = first + tl.arange(0, BLOCK)
            bit = ((tl.load(words + at // 32, mask=at // 32 < end, other=0) >> (at % 32)) & 1) | open_
            y = tl.load(row + at, mask=at < V, other=0.0).to(tl.float32)
            tl.store(target + at, tl.where(bit != 0, y, float("-inf")), mask=at < V)
        tl.debug_barrier()  # what is written next must come after
        for first in range(entry, entry_end, LIST):
            i = first + tl.arange(0, LIST)
            inside = i < entry_end
            at = tl.load(adjust + i * 4, mask=inside, other=0)
            bias = tl.load(adjust + i * 4 + 1, mask=inside, other=0).to(tl.float32, bitcast=True)
            factor = tl.load(adjust + i * 4 + 2, mask=inside, other=0x3F800000).to(tl.float32, bitcast=True)
            subtract = tl.load(adjust + i * 4 + 3, mask=inside, other=0).to(tl.float32, bitcast=True)
            bit = ((tl.load(words + at // 32, mask=inside & (at // 32 < end), other=0) >> (at % 32)) & 1) | open_
            y = tl.load(row + at, mask=inside, other=0.0).to(tl.float32) + bias
            y = tl.where(y > 0, tl.div_rn(y, factor), y * factor) - subtract
            tl.store(target + at, y, mask=inside & (bit != 0) & (at < V))
        tl.debug_barrier()
        for first in range(ban, ban_end, LIST):
            i = first + tl.arange(0, LIST)
            at = tl.load(banned + i, mask=i < ban_end, other=V)
            tl.store(target + at, tl.full((LIST,), float("-inf"), dtype=tl.float32), mask=(i < ban_end) & (at < V))


@triton.jit
def drawn_z(row, work_row, row_end, work_end, limit, at, inv, V: tl.constexpr, CHANGES: tl.constexpr):
    """z of ids as they take part in the draw: of `work_row` below `work_end`, of `row` below `row_end`; -inf from `limit` on."""
    y = tl.load(row + at, mask=at < row_end, other=float("-inf")).to(tl.float32)
    if CHANGES:
        y = tl.where(at < work_end, tl.load(work_row + at, mask=at < work_end, other=float("-inf")), y)
    return tl.where(at < limit, y, float("-inf")) * inv


@triton.jit
def key_of(z):
    """int32 that orders as z does; zeros of both signs are one key."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weights_from(row, work_row, row_end, work_end, limit, inv, peak, t1, t2, t3, MASS: tl.constexpr, V: tl.constexpr,
                  CHANGES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    # How many ids, or how much mass, have keys >= each of three thresholds.
    s1, s2, s3 = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    for first in range(0, V, BLOCK):
        at = first + tl.arange(0, BLOCK)
        z = drawn_z(row, work_row, row_end, work_end, limit, at, inv, V, CHANGES)
        key = key_of(z).to(tl.int64)
        weight = (at < V).to(tl.int64)
        if MASS:
            weight = tl.where(at < V, mass_of(exp32(z - peak)), 0)
        s1 += tl.where(key >= t1, weight, 0)
        s2 += tl.where(key >= t2, weight, 0)
        s3 += tl.where(key >= t3, weight, 0)
    return tl.sum(s1, axis=0), tl.sum(s2, axis=0), tl.sum(s3, axis=0)


@triton.jit
def _threshold(row, work_row, row_end, work_end, limit, inv, peak, want, MASS: tl.constexpr, V: tl.constexpr, CHANGES: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    # The largest key from which on there is as much as `want`, and how much lies above it. Sixteen passes: two bits of the key each.
    low = tl.zeros((), tl.int64) + _LOWEST
    high = key_of(peak).to(tl.int64)
    above = tl.zeros((), tl.int64)
    while low < high:
        n = high - low
        a, b, c = low + (n + 3) // 4, low + (n + 1) // 2, low + (3 * n + 3) // 4
        wa, wb, wc = _weights_from(row, work_row, row_end, work_end, limit, inv, peak, a, b, c, MASS, V, CHANGES, BLOCK)
        above = tl.where(wc >= want, above, tl.where(wb >= want, wc, tl.where(wa >= want, wb, wa)))
        high = tl.where(wc >= want, high, tl.where(wb >= want, c - 1, tl.where(wa >= want, b - 1, a - 1)))
        low = tl.where(wc >= want, c, tl.where(wb >= want, b, tl.where(wa >= want, a, low)))
    return low, above


@triton.jit
def _kept(z, at, e, cut, last, min_p, V: tl.constexpr):
    key = key_of(z)
    in_rank = (key > cut) | ((key == cut) & (at <= last))
    return in_rank & (e >= min_p) & (at < V)


@triton.jit
def _weight(row, work_row, row_end, work_end, limit, at, inv, peak, cut, last, min_p, TIES: tl.constexpr, V: tl.constexpr,
            CHANGES: tl.constexpr):  # fmt: skip
    # Masses of what is kept; or 1 for every id at the cut.
    z = drawn_z(row, work_row, row_end, work_end, limit, at, inv, V, CHANGES)
    if TIES:
        weight = ((key_of(z) == cut) & (at < V)).to(tl.int64)
    else:
        e = exp32(z - peak)
        weight = tl.where(_kept(z, at, e, cut, last, min_p, V), mass_of(e), 0)
    return weight


@triton.jit
def _kept_sum(row, work_row, row_end, work_end, limit, inv, peak, cut, last, min_p, V: tl.constexpr, CHANGES: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    total = tl.zeros((BLOCK,), tl.int64)
    for first in range(0, V, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += _weight(row, work_row, row_end, work_end, limit, at, inv, peak, cut, last, min_p, False, V, CHANGES)
    return tl.sum(total, axis=0)


@triton.jit
def _first_beyond(row, work_row, row_end, work_end, limit, inv, peak, cut, last, min_p, bound, TIES: tl.constexpr, V: tl.constexpr,
                  CHANGES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    # The first id, ascending, at which the running weight exceeds `bound`.
    before, running, first = tl.zeros((), tl.int64), tl.zeros((), tl.int64), tl.zeros((), tl.int32)
    while (running <= bound) & (first < V):
        at = first + tl.arange(0, BLOCK)
        weight = _weight(row, work_row, row_end, work_end, limit, at, inv, peak, cut, last, min_p, TIES, V, CHANGES)
        before = running
        running = running + tl.sum(weight, axis=0)
        first += BLOCK
    at = tl.maximum(first - BLOCK, 0) + tl.arange(0, BLOCK)
    weight = _weight(row, work_row, row_end, work_end, limit, at, inv, peak, cut, last, min_p, TIES, V, CHANGES)
    reached = before + tl.cumsum(weight, axis=0) > bound
    return tl.min(tl.where(reached, at, V - 1), axis=0)


@triton.jit
def _first_equal(row, work_row, row_end, work_end, limit, inv, peak, V: tl.constexpr, CHANGES: tl.constexpr, BLOCK: tl.constexpr):
    best = tl.full((BLOCK,), V, tl.int32)
    for first in range(0, V, BLOCK):
        at = first + tl.arange(0, BLOCK)
        z = drawn_z(row, work_row, row_end, work_end, limit, at, inv, V, CHANGES)
        best = tl.minimum(best, tl.where((z == peak) & (at < V), at, V))
    return tl.min(best, axis=0)


@triton.jit
def _next_rank(row, work_row, row_end, work_end, limit, inv, previous, V: tl.constexpr, CHANGES: tl.constexpr, BLOCK: tl.constexpr):
    # The largest (key, -id) below `previous`, packed in an int64.
    best = tl.full((BLOCK,), -(2**63), tl.int64)
    for first in range(0, V, BLOCK):
        at = first + tl.arange(0, BLOCK)
        z = drawn_z(row, work_row, row_end, work_end, limit, at, inv, V, CHANGES)
        packed = (key_of(z).to(tl.int64) << 32) | (0x7FFFFFFF - at).to(tl.int64)
        best = tl.maximum(best, tl.where((at < V) & (packed < previous), packed, -(2**63)))
    return tl.max(best, axis=0)


@triton.jit
def random_bits(seed, sample_index, position):
    """64 bits of Philox4x32-10 as uint64: key = seed, counter = (position, 0, sample index, 0)."""
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c2 = position.to(tl.uint32), sample_index.to(tl.uint32)
    c1, c3 = tl.zeros((), tl.uint32), tl.zeros((), tl.uint32)
    m0, m1 = tl.full((), 0xD2511F53, tl.uint32), tl.full((), 0xCD9E8D57, tl.uint32)
    w0, w1 = tl.full((), 0x9E3779B9, tl.uint32), tl.full((), 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        h0, l0, h1, l1 = tl.umulhi(m0, c0), m0 * c0, tl.umulhi(m1, c2), m1 * c2
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = k0 + w0, k1 + w1
    return c0.to(tl.uint64) | (c1.to(tl.uint64) << 32)


@triton.jit
def _truncate(row, work_row, row_end, work_end, limit, inv, peak, total, top_k, top_p, V: tl.constexpr, CHANGES: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    # (key of the last rank that is kept, the last id kept among those with that key)
    cut, ties, kept = tl.zeros((), tl.int64) + _LOWEST, tl.zeros((), tl.int64) + V, total
    if (top_k > 0) & (top_k < V):
        cut, above = _threshold(row, work_row, row_end, work_end, limit, inv, peak, top_k, False, V, CHANGES, BLOCK)
        ties = top_k - above
        if top_p < 1.0:
            _, more, _ = _weights_from(row, work_row, row_end, work_end, limit, inv, peak, cut, cut + 1, cut + 1, True, V, CHANGES, BLOCK)
            each = _one_mass(cut, peak)
            kept = more + ties * each
    if top_p < 1.0:
        target = tl.ceil(top_p * kept.to(tl.float64)).to(tl.int64)
        target = tl.minimum(tl.maximum(target, 1), kept)
        cut, above = _threshold(row, work_row, row_end, work_end, limit, inv, peak, target, True, V, CHANGES, BLOCK)
        each = tl.maximum(_one_mass(cut, peak), 1)
        ties = (target - above + each - 1) // each
    last = _first_beyond(row, work_row, row_end, work_end, limit, inv, peak, cut.to(tl.int32), V, 0.0, ties - 1, True, V, CHANGES, BLOCK)
    return cut.to(tl.int32), last


@triton.jit
def _one_mass(key, peak):
    # Mass of the ids with that key: the key gives z back.
    small = key.to(tl.int32)
    z = (small ^ ((small >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return mass_of(exp32(z - peak))


@triton.jit(do_not_specialize=["ld_logits", "ld_work", "ld_mask", "limit"])
def sample_kernel(logits, work, ban_offset, adjust_offset, allowed_row, temperatures, top_ps, min_ps, top_ks, seeds, sample_indices,
                  positions, forced_ids, wants, top_ns, out_token, out_logprob, out_temperature_logprob, out_model_logprob, out_entropy,
                  out_nonfinite, out_top_id, out_top_logprob, out_mask, ld_logits, ld_work, ld_mask, limit, V: tl.constexpr,
                  CHANGES: tl.constexpr, MASK: tl.constexpr, TOP_MAX: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    row, work_row = logits + r * (ld_logits * UNIT), work + r * (ld_work * 4)
    row_end, work_end = V, 0
    if CHANGES:
        bans = tl.load(ban_offset + r + 1) - tl.load(ban_offset + r)
        entries = tl.load(adjust_offset + r + 1) - tl.load(adjust_offset + r)
        changed = (bans > 0) | (entries > 0) | (tl.load(allowed_row + r) >= 0)
        row_end, work_end = tl.where(changed, 0, V), tl.where(changed, V, 0)
    temperature = tl.load(temperatures + r)
    greedy = temperature == 0.0
    inv = tl.where(greedy, 1.0, 1.0 / tl.where(greedy, 1.0, temperature)).to(tl.float32)
    want, forced, top_n = tl.load(wants + r), tl.load(forced_ids + r), tl.load(top_ns + r).to(tl.int32)
    whole_peak, broken = peak_of(row, inv, V, BLOCK)
    peak, broken_draw = _drawn_peak(row, work_row, row_end, work_end, limit, inv, V, CHANGES, BLOCK)
    whole_sound = (broken == 0) & (tl.abs(whole_peak) < float("inf"))
    sound = whole_sound & (broken_draw == 0) & (tl.abs(peak) < float("inf"))
    nothing_left = whole_sound & (broken_draw == 0) & (peak == float("-inf"))
    tl.store(out_nonfinite + r, tl.where(sound, 0, tl.where(nothing_left, 2, 1)).to(tl.uint8))
    nan = tl.full((), float("nan"), tl.float32)
    token = tl.maximum(forced, 0)
    logprob, temperature_logprob, model, entropy = nan, nan, nan, nan
    cut, last, min_p = tl.zeros((), tl.int32) + _LOWEST, tl.zeros((), tl.int32) + V, tl.zeros((), tl.float32)
    kept, mask_cut, mask_last = tl.zeros((), tl.int64), cut, last
    if sound:
        if greedy:
            best = _first_equal(row, work_row, row_end, work_end, limit, inv, peak, V, CHANGES, BLOCK).to(tl.int64)
            token = tl.where(forced < 0, best, forced)
            mask_cut, mask_last = key_of(peak), best.to(tl.int32)
            logprob = tl.where(token == best, 0.0, float("-inf"))
            temperature_logprob = logprob
            entropy = tl.where((want & 2) != 0, 0.0, nan)
            if top_n > 0:
                kept = _kept_sum(row, work_row, row_end, work_end, limit, inv, peak, cut, last, min_p, V, CHANGES, BLOCK)
        else:
            top_p, top_k, min_p = tl.load(top_ps + r), tl.load(top_ks + r), tl.load(min_ps + r)
            total = mass_sum(row, inv, whole_peak, V, BLOCK)
            if (limit < V) | (work_end > 0) | (min_p > 0.0) | (top_p < 1.0) | ((top_k > 0) & (top_k < V)):
                if (top_p < 1.0) | ((top_k > 0) & (top_k < V)):
                    all_drawn = _kept_sum(row, work_row, row_end, work_end, limit, inv, peak, cut, last, 0.0, V, CHANGES, BLOCK)
                    cut, last = _truncate(row, work_row, row_end, work_end, limit, inv, peak, all_drawn, top_k, top_p, V, CHANGES, BLOCK)
                    mask_cut, mask_last = cut, last
                kept = _kept_sum(row, work_row, row_end, work_end, limit, inv, peak, cut, last, min_p, V, CHANGES, BLOCK)
            else:
                kept = total
            if forced < 0:
                bits = random_bits(tl.load(seeds + r), tl.load(sample_indices + r), tl.load(positions + r))
                bound = tl.umulhi(bits, kept.to(tl.uint64)).to(tl.int64)
                token = _first_beyond(row, work_row, row_end, work_end, limit, inv, peak, cut, last, min_p, bound, False, V, CHANGES,
                                      BLOCK).to(tl.int64)  # fmt: skip
            z = drawn_z(row, work_row, row_end, work_end, limit, token, inv, V, CHANGES)
            is_kept = _kept(z, token, exp32(z - peak), cut, last, min_p, V)
            logprob = tl.where(is_kept, logprob_of(z, peak, kept), float("-inf"))
            temperature_logprob = logprob_of(z_at(row, token, inv, V), whole_peak, total)
            if (want & 2) != 0:
                entropy = entropy_of(row, inv, whole_peak, total, V, BLOCK).to(tl.float32)
        if (want & 1) != 0:
            one_peak, _ = peak_of(row, 1.0, V, BLOCK)
            model = logprob_of(z_at(row, token, 1.0, V), one_peak, mass_sum(row, 1.0, one_peak, V, BLOCK))
    tl.store(out_token + r, token)
    tl.store(out_logprob + r, logprob)
    tl.store(out_temperature_logprob + r, temperature_logprob)
    tl.store(out_model_logprob + r, model)
    tl.store(out_entropy + r, entropy)
    if MASK:  # noqa: SIM102 (decided by the compiler)
        if (want & 4) != 0:
            for first in range(0, V, BLOCK):
                at = first + tl.arange(0, BLOCK)
                z = drawn_z(row, work_row, row_end, work_end, limit, at, inv, V, CHANGES)
                could = _kept(z, at, exp32(z - peak), mask_cut, mask_last, min_p, V) & (z > float("-inf"))
                bits = tl.reshape(could.to(tl.int32), (BLOCK // 32, 32)) << tl.arange(0, 32)[None, :]
                word = first // 32 + tl.arange(0, BLOCK // 32)
                tl.store(out_mask + r * ld_mask + word, tl.where(sound, tl.sum(bits, axis=1), 0), mask=word < (V + 31) // 32)
    previous = tl.full((), 2**63 - 1, tl.int64)
    for i in range(top_n):
        found, score = tl.full((), -1, tl.int32), tl.full((), float("-inf"), tl.float32)
        if sound:
            previous = _next_rank(row, work_row, row_end, work_end, limit, inv, previous, V, CHANGES, BLOCK)
            at = 0x7FFFFFFF - (previous & 0x7FFFFFFF).to(tl.int32)
            at = tl.minimum(at, V - 1)
            z = drawn_z(row, work_row, row_end, work_end, limit, at, inv, V, CHANGES)
            reports = _kept(z, at, exp32(z - peak), cut, last, min_p, V) & (z > float("-inf")) & (i < V)
            found = tl.where(reports, at, -1)
            score = tl.where(reports, logprob_of(z, peak, tl.maximum(kept, 1)), float("-inf"))
        tl.store(out_top_id + r * TOP_MAX + i, found)
        tl.store(out_top_logprob + r * TOP_MAX + i, score)


@triton.jit
def _drawn_peak(row, work_row, row_end, work_end, limit, inv, V: tl.constexpr, CHANGES: tl.constexpr, BLOCK: tl.constexpr):
    # (the largest z that takes part, how many are NaN)
    top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    broken = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, V, BLOCK):
        at = first + tl.arange(0, BLOCK)
        z = tl.where(at < V, drawn_z(row, work_row, row_end, work_end, limit, at, inv, V, CHANGES), float("-inf"))
        top = tl.maximum(top, z)
        broken += (z != z).to(tl.int32)
    return tl.max(top, axis=0), tl.sum(broken, axis=0)
