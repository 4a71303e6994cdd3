// Host-side kernels of SlideDP: AdamW over segments of a flat group, FP32 -> BF16 cast, rank-ordered reduction, and
// release/acquire words. Plain C ABI, called through ctypes (which drops the GIL); no torch headers. See elements.h for
// the arithmetic, queue.cpp for updates that run without Python.

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "update.h"

namespace {

using namespace slidedp;

// ---- threads ----------------------------------------------------------------------------------------------------

// Threads that sleep between calls: an OpenMP team would spin and take cores from the transfers and from Python.
// The caller works too and never waits for a helper that has not begun, so a slow wake-up costs nothing (and a pool
// whose threads a fork() lost still works).
class Pool : public Crew {
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
    ~Pool() override {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
        }
        wake_.notify_all();
        for (auto& w : workers_) w.join();
    }

    void run(void (*work)(void*, int64_t), void* context, int64_t items) override {
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
void parallel(Crew* crew, int64_t items, F& body) {
    crew->run([](void* context, int64_t i) { (*static_cast<F*>(context))(i); }, &body, items);
}

// ---- work over ranges ---------------------------------------------------------------------------------------------

// The least of what `run(block)` returns over all blocks, -1 (nothing wrong) left out of it; -1 if that is all there is.
template <class Run>
int64_t run_blocks(Crew* crew, int64_t count, Run run) {
    std::atomic<int64_t> bad{INT64_MAX};
    auto body = [&](int64_t block) {
        int64_t at = run(block), seen = bad.load();
        while (at >= 0 && at < seen && !bad.compare_exchange_weak(seen, at)) {
        }
    };
    parallel(crew, count, body);
    return bad.load() == INT64_MAX ? -1 : bad.load();
}

template <class T>
void reduce(Crew* crew, const T* const* sources, int64_t num_sources, T* out, int64_t numel) {
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
    parallel(crew, (numel + kBlock - 1) / kBlock, body);
}

template <class T>
void cast(Crew* crew, const float* source, T* out, int64_t numel) {
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
    parallel(crew, (numel + kBlock - 1) / kBlock, body);
}

}  // namespace

extern "C" {

// `crew`, below: a pool, or a queue's (slidedp_queue_crew).
void* slidedp_pool_create(int32_t threads) { return static_cast<Crew*>(new (std::nothrow) Pool(threads)); }
void slidedp_pool_destroy(void* pool) { delete static_cast<Crew*>(pool); }

// Pointers are those of element 0 of the group. Returns -1, or the first element of the lowest tile that was left
// untouched because its gradient holds an Inf or a NaN.
int64_t slidedp_adamw(void* crew, float* p, float* m, float* v, const void* grad, int32_t grad_dtype, void* shadow,
                      int32_t shadow_dtype, const void* segments, int64_t num_segments, float beta1, float one_minus_beta1,
                      float beta2, float one_minus_beta2, float eps) {
    auto* list = static_cast<const Segment*>(segments);
    Blocks blocks(std::vector<Segment>(list, list + num_segments));
    Tensors tensors{{p, m, v, shadow}, grad, {p, m, v, shadow}};
    Betas betas{beta1, one_minus_beta1, beta2, one_minus_beta2, eps};
    UpdateBlock run = update_block_of(grad_dtype, shadow_dtype);
    return run_blocks(static_cast<Crew*>(crew), blocks.count(),
                      [&](int64_t block) { return blocks.update(block, run, tensors, betas); });
}

// An update of `queue.cpp` done at once, by the caller and its crew; `present`: one flag a parameter, or null. Returns as above.
int64_t slidedp_update_now(void* crew, const void* update, int64_t step, double lr, const uint8_t* present,
                           double scale) {
    auto* the = static_cast<const Update*>(update);
    Blocks blocks = the->begin(step, lr, Present{present, 1, 0}, float(scale));
    return run_blocks(static_cast<Crew*>(crew), blocks.count(), [&](int64_t block) { return the->run(step, blocks, block); });
}

void slidedp_cast(void* crew, const float* source, void* out, int32_t dtype, int64_t numel) {
    if (dtype == kBFloat16) return cast(static_cast<Crew*>(crew), source, static_cast<uint16_t*>(out), numel);
    return cast(static_cast<Crew*>(crew), source, static_cast<float*>(out), numel);
}

void slidedp_reduce(void* crew, const void* const* sources, int64_t num_sources, void* out, int32_t dtype, int64_t numel) {
    auto* threads = static_cast<Crew*>(crew);
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
