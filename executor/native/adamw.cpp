// Host-side kernels of SlideDP: AdamW over segments of a flat group, FP32 -> BF16 cast, rank-ordered reduction, and
// release/acquire words. Plain C ABI, called through ctypes (which drops the GIL); no torch headers.
//
// Bits never depend on where a range is cut, on the thread that works on it, or on the vector width: every element goes
// through the same sequence of single IEEE operations (built with -ffp-contract=off and without -ffast-math, so there is
// no FMA in one place and a multiply and an add in another). The loops are memory-bound; what FMA would save is hidden.

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <cmath>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace {

constexpr int64_t kBlock = 1 << 17;  // elements a thread takes at a time: a preempted thread holds up one block, not a share
constexpr int64_t kTile = 1024;      // elements whose converted values wait in L1 before they are stored

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

// ---- threads ----------------------------------------------------------------------------------------------------

// Threads that sleep between calls: an OpenMP team would spin and take cores from the transfers and from Python.
// The caller works too and never waits for a helper that has not begun, so a slow wake-up costs nothing (and a pool
// whose threads a fork() lost still works).
class Pool {
public:
    explicit Pool(int threads) {
        for (int i = 1; i < threads; i++) {
            try {
                workers_.emplace_back([this] { serve(); });
            } catch (const std::system_error&) {
                break;  // no more threads to be had: fewer helpers, same bits
            }
        }
    }
    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
        }
        wake_.notify_all();
        for (auto& w : workers_) w.join();
    }

    // work(context, i) for every i in [0, items), each once, in any order on any thread.
    void run(void (*work)(void*, int64_t), void* context, int64_t items) {
        std::lock_guard<std::mutex> one_job(caller_);
        int64_t helpers = items - 1 < int64_t(workers_.size()) ? items - 1 : int64_t(workers_.size());
        next_.store(0, std::memory_order_relaxed);
        if (helpers > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            work_ = work, context_ = context, items_ = items, tickets_ = helpers;
        }
        for (int64_t i = 0; i < helpers; i++) wake_.notify_one();
        drain(work, context, items);
        if (helpers > 0) {
            std::unique_lock<std::mutex> lock(mutex_);
            tickets_ = 0;  // who has not begun by now finds nothing to do
            done_.wait(lock, [this] { return active_ == 0; });
        }
    }

private:
    void drain(void (*work)(void*, int64_t), void* context, int64_t items) {
        for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < items;) work(context, i);
    }
    void serve() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return stop_ || tickets_ > 0; });
            if (stop_) return;
            tickets_--, active_++;
            auto work = work_;
            auto context = context_;
            auto items = items_;
            lock.unlock();
            drain(work, context, items);
            lock.lock();
            if (--active_ == 0) done_.notify_one();
        }
    }

    std::vector<std::thread> workers_;
    std::mutex caller_, mutex_;
    std::condition_variable wake_, done_;
    std::atomic<int64_t> next_{0};
    void (*work_)(void*, int64_t) = nullptr;
    void* context_ = nullptr;
    int64_t items_ = 0, tickets_ = 0, active_ = 0;
    bool stop_ = false;
};

template <class F>
void parallel(Pool* pool, int64_t items, F& body) {
    pool->run([](void* context, int64_t i) { (*static_cast<F*>(context))(i); }, &body, items);
}

// ---- elements ---------------------------------------------------------------------------------------------------

// Stores a tile past the caches: what is written here is read next by DMA, not by this core (8 % of the update's time).
void store_tile(void* dst, const void* tile, int64_t nbytes) {
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

void fence_streamed() {  // streaming stores are weakly ordered: without this a later release word could overtake them
#ifdef __SSE2__
    _mm_sfence();
#endif
}

bool any_nonfinite(const float* g, int64_t n) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t magnitude = bits_of(g[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest >= 0x7f800000u;
}
bool any_nonfinite(const uint16_t* g, int64_t n) {
    uint16_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint16_t magnitude = g[i] & 0x7fffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest >= 0x7f80u;
}

struct Segment {  // mirrors SEGMENT in executor/native/build.py
    int64_t start, end;     // elements of the flat group
    float keep;             // 1 - lr * weight_decay
    float step_size;        // lr / (1 - beta1^t)
    float inv_bias2_sqrt;   // 1 / sqrt(1 - beta2^t)
    float unused;
};
struct Betas {
    float beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
};

// torch.optim.AdamW, operation for operation up to the rounding of its lerp and its division by sqrt(bias correction 2).
template <class G, class S>
void update_tile(float* __restrict p, float* __restrict m, float* __restrict v, const G* __restrict g, S* __restrict out,
                 int64_t n, const Segment& s, const Betas& b) {
    for (int64_t i = 0; i < n; i++) {
        float grad = widen(g[i]);
        float mean = b.beta1 * m[i] + b.one_minus_beta1 * grad;
        float square = b.beta2 * v[i] + b.one_minus_beta2 * grad * grad;
        float denom = std::sqrt(square) * s.inv_bias2_sqrt + b.eps;
        float param = p[i] * s.keep - s.step_size * mean / denom;
        m[i] = mean, v[i] = square, p[i] = param;
        narrow(param, out[i]);
    }
}

template <class G, class S>
void update_block(float* p, float* m, float* v, const G* g, S* shadow, int64_t lo, int64_t hi, const Segment& s,
                  const Betas& b) {
    alignas(64) S tile[kTile];
    for (int64_t i = lo; i < hi; i += kTile) {
        int64_t n = hi - i < kTile ? hi - i : kTile;
        update_tile(p + i, m + i, v + i, g + i, tile, n, s, b);
        if (shadow) store_tile(shadow + i, tile, n * int64_t(sizeof(S)));
    }
    fence_streamed();
}

template <class G, class S>
int64_t adamw(Pool* pool, float* p, float* m, float* v, const G* g, S* shadow, const Segment* segments, int64_t count,
              const Betas& betas) {
    std::vector<int64_t> first(count + 1, 0);  // number of the first block of each segment
    for (int64_t i = 0; i < count; i++)
        first[i + 1] = first[i] + (segments[i].end - segments[i].start + kBlock - 1) / kBlock;
    std::atomic<int64_t> bad{INT64_MAX};
    auto body = [&](int64_t block) {
        int64_t low = 0, high = count;  // the segment that holds this block: first[low] <= block < first[low + 1]
        while (high - low > 1) {
            int64_t middle = (low + high) / 2;
            (first[middle] <= block ? low : high) = middle;
        }
        while (first[low + 1] <= block) low++;  // past empty segments
        const Segment& s = segments[low];
        int64_t lo = s.start + (block - first[low]) * kBlock;
        int64_t hi = lo + kBlock < s.end ? lo + kBlock : s.end;
        if (any_nonfinite(g + lo, hi - lo)) {
            int64_t seen = bad.load();
            while (lo < seen && !bad.compare_exchange_weak(seen, lo)) {
            }
            return;
        }
        update_block(p, m, v, g, shadow, lo, hi, s, betas);
    };
    parallel(pool, first[count], body);
    return bad.load() == INT64_MAX ? -1 : bad.load();
}

template <class T>
void reduce(Pool* pool, const T* const* sources, int64_t num_sources, T* out, int64_t numel) {
    auto body = [&](int64_t block) {
        int64_t hi = (block + 1) * kBlock < numel ? (block + 1) * kBlock : numel;
        alignas(64) float sum[kTile];
        alignas(64) T tile[kTile];
        for (int64_t i = block * kBlock; i < hi; i += kTile) {
            int64_t n = hi - i < kTile ? hi - i : kTile;
            for (int64_t j = 0; j < n; j++) sum[j] = widen(sources[0][i + j]);
            for (int64_t k = 1; k < num_sources; k++) {
                const T* __restrict source = sources[k] + i;
                for (int64_t j = 0; j < n; j++) sum[j] += widen(source[j]);
            }
            for (int64_t j = 0; j < n; j++) narrow(sum[j], tile[j]);
            std::memcpy(out + i, tile, n * int64_t(sizeof(T)));
        }
    };
    parallel(pool, (numel + kBlock - 1) / kBlock, body);
}

template <class T>
void cast(Pool* pool, const float* source, T* out, int64_t numel) {
    auto body = [&](int64_t block) {
        int64_t hi = (block + 1) * kBlock < numel ? (block + 1) * kBlock : numel;
        alignas(64) T tile[kTile];
        for (int64_t i = block * kBlock; i < hi; i += kTile) {
            int64_t n = hi - i < kTile ? hi - i : kTile;
            for (int64_t j = 0; j < n; j++) narrow(source[i + j], tile[j]);
            store_tile(out + i, tile, n * int64_t(sizeof(T)));
        }
        fence_streamed();
    };
    parallel(pool, (numel + kBlock - 1) / kBlock, body);
}

template <class G>
int64_t adamw_shadow(Pool* pool, float* p, float* m, float* v, const G* g, void* shadow, int32_t dtype,
                     const Segment* segments, int64_t count, const Betas& betas) {
    if (dtype == kBFloat16) return adamw(pool, p, m, v, g, static_cast<uint16_t*>(shadow), segments, count, betas);
    return adamw(pool, p, m, v, g, static_cast<float*>(dtype == kNone ? nullptr : shadow), segments, count, betas);
}

}  // namespace

extern "C" {

void* slidedp_pool_create(int32_t threads) { return new (std::nothrow) Pool(threads); }
void slidedp_pool_destroy(void* pool) { delete static_cast<Pool*>(pool); }

// Pointers are those of element 0 of the group. Returns -1, or the first element of the lowest block that was left
// untouched because its gradient holds an Inf or a NaN.
int64_t slidedp_adamw(void* pool, float* p, float* m, float* v, const void* grad, int32_t grad_dtype, void* shadow,
                      int32_t shadow_dtype, const void* segments, int64_t num_segments, float beta1, float one_minus_beta1,
                      float beta2, float one_minus_beta2, float eps) {
    Betas betas{beta1, one_minus_beta1, beta2, one_minus_beta2, eps};
    auto* list = static_cast<const Segment*>(segments);
    auto* threads = static_cast<Pool*>(pool);
    if (grad_dtype == kBFloat16)
        return adamw_shadow(threads, p, m, v, static_cast<const uint16_t*>(grad), shadow, shadow_dtype, list, num_segments, betas);
    return adamw_shadow(threads, p, m, v, static_cast<const float*>(grad), shadow, shadow_dtype, list, num_segments, betas);
}

void slidedp_cast(void* pool, const float* source, void* out, int32_t dtype, int64_t numel) {
    if (dtype == kBFloat16) return cast(static_cast<Pool*>(pool), source, static_cast<uint16_t*>(out), numel);
    return cast(static_cast<Pool*>(pool), source, static_cast<float*>(out), numel);
}

void slidedp_reduce(void* pool, const void* const* sources, int64_t num_sources, void* out, int32_t dtype, int64_t numel) {
    auto* threads = static_cast<Pool*>(pool);
    if (dtype == kBFloat16)
        return reduce(threads, reinterpret_cast<const uint16_t* const*>(sources), num_sources, static_cast<uint16_t*>(out), numel);
    return reduce(threads, reinterpret_cast<const float* const*>(sources), num_sources, static_cast<float*>(out), numel);
}

void slidedp_store_release(int64_t* word, int64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

int64_t slidedp_load_min(const int64_t* words, int64_t count) {
    int64_t least = INT64_MAX;
    for (int64_t i = 0; i < count; i++) {
        int64_t value = __atomic_load_n(words + i, __ATOMIC_ACQUIRE);
        least = value < least ? value : least;
    }
    return least;
}

}  // extern "C"
