// What one thread does to one range of elements: conversions, AdamW, sums. Included by adamw.cpp and queue.cpp.
//
// Bits never depend on where a range is cut, on the thread that works on it, or on the vector width: every element goes
// through the same sequence of single IEEE operations (built with -ffp-contract=off and without -ffast-math, so there is
// no FMA in one place and a multiply and an add in another). The loops are memory-bound; what FMA would save is hidden.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace slidedp {

constexpr int64_t kBlock = 1 << 17;  // elements a thread takes at a time: a preempted thread holds up one block, not a share
constexpr int64_t kTile = 512;       // elements that are looked at, updated and stored while they are in L1

constexpr int64_t kAhead = 512;      // elements from what is updated to what is fetched from memory
constexpr int64_t kLine = 16;        // floats of a cache line
constexpr int64_t kStride = 2 * kLine;

enum Dtype : int32_t { kNone = 0, kFloat32 = 1, kBFloat16 = 2 };

inline uint32_t bits_of(float x) {
    uint32_t u;
    std::memcpy(&u, &x, sizeof u);
    return u;
}
inline float float_of(uint32_t u) {
    float x;
    std::memcpy(&x, &u, sizeof x);
    return x;
}

inline float widen(float x) { return x; }
inline float widen(uint16_t x) { return float_of(uint32_t(x) << 16); }

inline void narrow(float x, float& out) { out = x; }
inline void narrow(float x, uint16_t& out) {  // round to nearest even; NaN becomes the quiet NaN 0x7FC0, as in c10::BFloat16
    uint32_t u = bits_of(x);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    out = uint16_t((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// Stores a tile past the caches: what is written here is read next by DMA, not by this core (8 % of the update's time).
// `tile`: aligned to 64 bytes.
inline void store_tile(void* dst, const void* tile, int64_t nbytes) {
#ifdef __AVX512F__
    if ((reinterpret_cast<uintptr_t>(dst) & 63) == 0) {  // a line at once
        int64_t whole = nbytes & ~int64_t(63);
        for (int64_t i = 0; i < whole; i += 64)
            _mm512_stream_si512(reinterpret_cast<__m512i*>(static_cast<char*>(dst) + i),
                                _mm512_load_si512(static_cast<const char*>(tile) + i));
        std::memcpy(static_cast<char*>(dst) + whole, static_cast<const char*>(tile) + whole, nbytes - whole);
        return;
    }
#endif
#ifdef __SSE2__
    if ((reinterpret_cast<uintptr_t>(dst) & 15) == 0) {
        int64_t whole = nbytes & ~int64_t(15);
        for (int64_t i = 0; i < whole; i += 16)
            _mm_stream_si128(reinterpret_cast<__m128i*>(static_cast<char*>(dst) + i),
                             _mm_load_si128(reinterpret_cast<const __m128i*>(static_cast<const char*>(tile) + i)));
        std::memcpy(static_cast<char*>(dst) + whole, static_cast<const char*>(tile) + whole, nbytes - whole);
        return;
    }
#endif
    std::memcpy(dst, tile, nbytes);
}

inline void fence_streamed() {  // streaming stores are weakly ordered: without this a later release word could overtake them
#ifdef __SSE2__
    _mm_sfence();
#endif
}

inline bool any_nonfinite(const float* g, int64_t n) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t magnitude = bits_of(g[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest >= 0x7f800000u;
}
inline bool any_nonfinite(const uint16_t* g, int64_t n) {
    uint16_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint16_t magnitude = g[i] & 0x7fffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest >= 0x7f80u;
}

// ---- AdamW ------------------------------------------------------------------------------------------------------

struct Segment {  // mirrors SEGMENT in executor/native/build.py
    int64_t start, end;     // elements of the flat group
    float keep;             // 1 - lr * weight_decay
    float step_size;        // lr / (1 - beta1^t)
    float inv_bias2_sqrt;   // 1 / sqrt(1 - beta2^t)
    float scale;            // of the gradient; 1 changes no bit
    int64_t copied;         // 1: no gradient; where the next state has a buffer of its own, copied there
};
struct Betas {
    float beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
};
struct State {  // element 0 of a group's flat buffers; `shadow` may be null
    float *master, *exp_avg, *exp_avg_sq;
    void* shadow;
};
struct Tensors {  // `next`: where the updated state goes: `now`, or other buffers
    State now;
    const void* grad;
    State next;
};

// Hints: an address beyond the end of a buffer is harmless. To be written soon: the line comes as this core's own at once.
inline void fetch_to_write(const void* line) {
#ifdef __GNUC__
    __builtin_prefetch(line, 1);
#endif
}
inline void fetch_to_read(const void* line) {
#ifdef __GNUC__
    __builtin_prefetch(line, 0);
#endif
}

struct Element {
    float p, m, v;
};
// torch.optim.AdamW, operation for operation up to the rounding of its lerp and its division by sqrt(bias correction 2).
inline Element updated(const Element& e, float grad, const Segment& s, const Betas& b) {
    grad *= s.scale;
    float mean = b.beta1 * e.m + b.one_minus_beta1 * grad;
    float square = b.beta2 * e.v + b.one_minus_beta2 * grad * grad;
    float denom = std::sqrt(square) * s.inv_bias2_sqrt + b.eps;
    return {e.p * s.keep - s.step_size * mean / denom, mean, square};
}

template <class G, class S>
void update_run(float* __restrict p, float* __restrict m, float* __restrict v, const G* __restrict g, S* __restrict out,
                int64_t n, const Segment& s, const Betas& b) {
    for (int64_t i = 0; i < n; i++) {
        Element next = updated({p[i], m[i], v[i]}, widen(g[i]), s, b);
        p[i] = next.p, m[i] = next.m, v[i] = next.v;
        narrow(next.p, out[i]);
    }
}
template <class G, class S>
void update_run_apart(const float* __restrict p, const float* __restrict m, const float* __restrict v, const G* __restrict g,
                      float* __restrict new_p, float* __restrict new_m, float* __restrict new_v, S* __restrict out, int64_t n,
                      const Segment& s, const Betas& b) {
    for (int64_t i = 0; i < n; i++) {
        Element next = updated({p[i], m[i], v[i]}, widen(g[i]), s, b);
        new_p[i] = next.p, new_m[i] = next.m, new_v[i] = next.v;
        narrow(next.p, out[i]);
    }
}

// Fetches kAhead elements ahead, a few lines between every kStride elements: the processor by itself has too few lines on
// their way (15 % at 14 threads of a Xeon; all of a tile's lines in one burst lose).
template <class G, class S>
void update_tile(float* p, float* m, float* v, const G* g, S* out, int64_t n, const Segment& s, const Betas& b) {
    int64_t i = 0;
    for (; i + kStride <= n; i += kStride) {
        int64_t first = i + kAhead, second = first + kLine;
        for (float* state : {p, m, v}) fetch_to_write(state + first), fetch_to_write(state + second);
        fetch_to_read(g + first);
        if (sizeof(G) == sizeof(float)) fetch_to_read(g + second);
        update_run(p + i, m + i, v + i, g + i, out + i, kStride, s, b);
    }
    update_run(p + i, m + i, v + i, g + i, out + i, n - i, s, b);
}

// Updates [lo, hi). Returns -1; or, when a gradient is an Inf or a NaN, the start of its tile, which is left untouched like
// all that follows.
template <class G, class S>
int64_t update_block(const Tensors& t, int64_t lo, int64_t hi, const Segment& s, const Betas& b) {
    const G* g = static_cast<const G*>(t.grad);
    S* shadow = static_cast<S*>(t.next.shadow);
    alignas(64) S tile[kTile];
    for (int64_t i = lo; i < hi; i += kTile) {
        int64_t n = hi - i < kTile ? hi - i : kTile;
        if (any_nonfinite(g + i, n)) {
            fence_streamed();
            return i;
        }
        update_tile(t.now.master + i, t.now.exp_avg + i, t.now.exp_avg_sq + i, g + i, tile, n, s, b);
        if (shadow) store_tile(shadow + i, tile, n * int64_t(sizeof(S)));
    }
    fence_streamed();
    return -1;
}

// update_tile into `p`, `m`, `v`, which are in L1.
template <class G, class S>
void update_tile_apart(const float* const (&now)[3], float* p, float* m, float* v, const G* g, S* out, int64_t n,
                       const Segment& s, const Betas& b) {
    for (int64_t i = 0; i < n; i += kStride) {
        int64_t first = i + kAhead, second = first + kLine, count = n - i < kStride ? n - i : kStride;
        for (const float* state : now) fetch_to_read(state + first), fetch_to_read(state + second);
        fetch_to_read(g + first);
        if (sizeof(G) == sizeof(float)) fetch_to_read(g + second);
        update_run_apart(now[0] + i, now[1] + i, now[2] + i, g + i, p + i, m + i, v + i, out + i, count, s, b);
    }
}

// The same arithmetic into buffers that nobody reads yet: past the caches, so that as many bytes move as in place. Of gradients
// that are not finite no more is asked: what they make is never read.
template <class G, class S>
int64_t update_block_apart(const Tensors& t, int64_t lo, int64_t hi, const Segment& s, const Betas& b) {
    const G* g = static_cast<const G*>(t.grad);
    const S* old = static_cast<const S*>(t.now.shadow);
    S* shadow = static_cast<S*>(t.next.shadow);
    alignas(64) float p[kTile], m[kTile], v[kTile];
    alignas(64) S tile[kTile];
    for (int64_t i = lo; i < hi; i += kTile) {
        int64_t n = hi - i < kTile ? hi - i : kTile, nbytes = n * int64_t(sizeof(float));
        const float* const now[3] = {t.now.master + i, t.now.exp_avg + i, t.now.exp_avg_sq + i};
        if (s.copied) {
            std::memcpy(p, now[0], nbytes), std::memcpy(m, now[1], nbytes), std::memcpy(v, now[2], nbytes);
            if (shadow) std::memcpy(tile, old + i, n * int64_t(sizeof(S)));
        } else {
            update_tile_apart(now, p, m, v, g + i, tile, n, s, b);
        }
        store_tile(t.next.master + i, p, nbytes);
        store_tile(t.next.exp_avg + i, m, nbytes);
        store_tile(t.next.exp_avg_sq + i, v, nbytes);
        if (shadow) store_tile(shadow + i, tile, n * int64_t(sizeof(S)));
    }
    fence_streamed();
    return -1;
}

using UpdateBlock = int64_t (*)(const Tensors&, int64_t, int64_t, const Segment&, const Betas&);

inline UpdateBlock update_block_of(int32_t grad, int32_t shadow) {
    if (grad == kBFloat16) return shadow == kBFloat16 ? update_block<uint16_t, uint16_t> : update_block<uint16_t, float>;
    return shadow == kBFloat16 ? update_block<float, uint16_t> : update_block<float, float>;
}
inline UpdateBlock update_block_apart_of(int32_t grad, int32_t shadow) {
    if (grad == kBFloat16)
        return shadow == kBFloat16 ? update_block_apart<uint16_t, uint16_t> : update_block_apart<uint16_t, float>;
    return shadow == kBFloat16 ? update_block_apart<float, uint16_t> : update_block_apart<float, float>;
}

// Segments cut into blocks of about kBlock elements, numbered through: a long one is many blocks, short ones share one, so that
// thousands of rows scattered over a table are taken a hundred at a time.
class Blocks {
public:
    Blocks() = default;
    explicit Blocks(std::vector<Segment> segments) : segments_(std::move(segments)) {
        int64_t room = 0;
        for (size_t i = 0; i < segments_.size(); i++) {
            for (int64_t at = segments_[i].start, end = segments_[i].end; at < end;) {
                if (room <= 0) {
                    first_.push_back({i, at});
                    room = kBlock;
                }
                int64_t take = (room + kTile - 1) / kTile * kTile;  // what follows starts as well aligned as the segment
                take = take < end - at ? take : end - at;
                at += take, room -= take;
            }
        }
    }
    int64_t count() const { return int64_t(first_.size()); }

    // `run(lo, hi, segment)` for each piece of a block, until one does not return -1; what that returns.
    template <class Run>
    int64_t each(int64_t block, const Run& run) const {
        bool last = block + 1 == count();
        Cut from = first_[block], to = last ? Cut{segments_.size(), 0} : first_[block + 1];
        for (size_t i = from.segment; i < segments_.size() && i <= to.segment; i++) {
            int64_t lo = i == from.segment ? from.at : segments_[i].start;
            int64_t hi = i == to.segment ? to.at : segments_[i].end;
            int64_t bad = lo < hi ? run(lo, hi, segments_[i]) : -1;
            if (bad >= 0) return bad;
        }
        return -1;
    }
    int64_t update(int64_t block, UpdateBlock run, const Tensors& tensors, const Betas& betas) const {
        return each(block, [&](int64_t lo, int64_t hi, const Segment& s) { return run(tensors, lo, hi, s, betas); });
    }

private:
    struct Cut {
        size_t segment;
        int64_t at;
    };
    std::vector<Segment> segments_;
    std::vector<Cut> first_;  // where each block begins
};

}  // namespace slidedp
