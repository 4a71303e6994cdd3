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
#include <emmintrin.h>
#endif

namespace slidedp {

constexpr int64_t kBlock = 1 << 17;  // elements a thread takes at a time: a preempted thread holds up one block, not a share
constexpr int64_t kTile = 512;       // elements that are looked at, updated and stored while they are in L1

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
inline void store_tile(void* dst, const void* tile, int64_t nbytes) {
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
};
struct Betas {
    float beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
};
struct Tensors {  // element 0 of a group's flat buffers; `shadow` may be null
    float *master, *exp_avg, *exp_avg_sq;
    const void* grad;
    void* shadow;
};

// torch.optim.AdamW, operation for operation up to the rounding of its lerp and its division by sqrt(bias correction 2).
template <class G, class S>
void update_tile(float* __restrict p, float* __restrict m, float* __restrict v, const G* __restrict g, S* __restrict out,
                 int64_t n, const Segment& s, const Betas& b) {
    for (int64_t i = 0; i < n; i++) {
        float grad = widen(g[i]) * s.scale;
        float mean = b.beta1 * m[i] + b.one_minus_beta1 * grad;
        float square = b.beta2 * v[i] + b.one_minus_beta2 * grad * grad;
        float denom = std::sqrt(square) * s.inv_bias2_sqrt + b.eps;
        float param = p[i] * s.keep - s.step_size * mean / denom;
        m[i] = mean, v[i] = square, p[i] = param;
        narrow(param, out[i]);
    }
}

// Updates [lo, hi). Returns -1; or, when a gradient is an Inf or a NaN, the start of its tile, which is left untouched like
// all that follows.
template <class G, class S>
int64_t update_block(const Tensors& t, int64_t lo, int64_t hi, const Segment& s, const Betas& b) {
    const G* g = static_cast<const G*>(t.grad);
    S* shadow = static_cast<S*>(t.shadow);
    alignas(64) S tile[kTile];
    for (int64_t i = lo; i < hi; i += kTile) {
        int64_t n = hi - i < kTile ? hi - i : kTile;
        if (any_nonfinite(g + i, n)) {
            fence_streamed();
            return i;
        }
        update_tile(t.master + i, t.exp_avg + i, t.exp_avg_sq + i, g + i, tile, n, s, b);
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
