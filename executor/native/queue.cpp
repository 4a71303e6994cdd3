// Updates that run without Python: earliest deadline first, on threads of their own.
//
// The threads take blocks, not updates: who finds no block left of the update in progress begins the next one. So no thread
// waits for another between two updates, and one that is preempted holds up one block. An update may begin once all that it
// waits for has arrived, the words that other ranks release have reached its gates, and all ranks' losses of its step are
// known; of those that may, the one of earliest (deadline, id) does. An update that has begun makes way, from the next block
// on, for any of an earlier deadline that may begin: what the next step needs first is never behind a whole chunk of what it
// needs last. Which elements are updated together changes no bit. All that has begun is worked on to its end.
//
// Jobs (casts, sums) that somebody waits for go before all updates, block by block: on threads of their own, beside those of
// the updates, there would be more threads than cores, and a job takes as long as its slowest one (a cast seven times as long).
//
// Python adds updates and says what has arrived; one Python thread collects what is complete, blocked in here without the
// GIL. No thread in here ever takes the GIL and the mutex is held for microseconds, so the short calls are made with the GIL
// held: giving it up would cost more than the call.

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <sys/resource.h>

#include "update.h"

namespace {

using namespace slidedp;
using Microseconds = std::chrono::microseconds;

constexpr int64_t kDone = -1, kSkipped = -2;  // results; others: the first element left untouched
constexpr Microseconds kFirstPause{20}, kLongestPause{1000};  // between looks at words that other processes write

struct Ranks {  // mirrors Ranks in executor/native/build.py: the shape of what the ranks share, the same for all steps
    int64_t num_ranks;
    int64_t present_stride;  // bytes from one rank's presence flags to the next one's
    int64_t loss_stride;     // int64s from one rank's loss cell to the next one's
};
struct Step {  // mirrors StepConstants in executor/native/build.py
    int64_t step;
    double lr;
    int64_t loss_stamp;
    const int64_t* losses;  // (stamp, bits of a double), one a rank; an update waits for `loss_stamp` in all. Null: no wait
    const double* scale;    // of gradients, or NaN for no update; there when the update may begin. Null: 1
};
struct Gate {  // mirrors GATE: open once every rank's word has reached `at_least`
    const int64_t* words;
    int64_t at_least;
};
struct Completion {  // mirrors COMPLETION
    int64_t id, result;
    double start_s, end_s;  // monotonic clock; of two spans one ends before the other starts, or is inside it
};

void yield_to_others(int32_t niceness) {
    errno = 0;
    int before = getpriority(PRIO_PROCESS, 0);  // 0: on Linux the calling thread
    if (niceness > 0 && errno == 0) setpriority(PRIO_PROCESS, 0, before + niceness);
}

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

int64_t acquire(const int64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

struct Task {
    int64_t id, deadline, missing;
    const Update* update;
    const uint8_t* present;
    Step step;
    std::vector<Gate> gates;

    Blocks blocks;
    int64_t num_taken = 0, num_done = 0, bad = kDone;
    double start_s = 0;

    std::pair<int64_t, int64_t> key() const { return {deadline, id}; }

    bool may_begin(int64_t num_ranks, int64_t loss_stride) const {
        for (const Gate& gate : gates)
            for (int64_t rank = 0; rank < num_ranks; rank++)
                if (acquire(gate.words + rank) < gate.at_least) return false;
        for (int64_t rank = 0; step.losses && rank < num_ranks; rank++)
            if (acquire(step.losses + rank * loss_stride) < step.loss_stamp) return false;
        return true;
    }
    // Of the ranks' losses, added in rank order as Words.loss_sum does: the same answer on every rank.
    bool loss_is_finite(int64_t num_ranks, int64_t loss_stride) const {
        double total = 0;
        for (int64_t rank = 0; step.losses && rank < num_ranks; rank++) {
            double loss;
            std::memcpy(&loss, step.losses + rank * loss_stride + 1, sizeof loss);
            total += loss;
        }
        return std::isfinite(total);
    }
    float scale() const { return step.scale ? float(*step.scale) : 1.0f; }
};

struct Job {
    void (*work)(void*, int64_t);
    void* context;
    int64_t num_items, num_taken = 0, num_done = 0;
};

class Queue : public Crew {
public:
    // `niceness`: of the threads, above the process's. Whoever issues work to a GPU wakes and sleeps all the time; on a core of an
    // equal that never rests it would wait for that one's time slice to end, 3 ms.
    Queue(int32_t threads, int32_t niceness, const Ranks& ranks) : ranks_(ranks) {
        for (int32_t i = 0; i < threads; i++) {
            try {
                workers_.emplace_back([this, niceness] {
                    yield_to_others(niceness);
                    serve();
                });
            } catch (const std::system_error&) {
                if (workers_.empty()) throw;
                break;  // no more threads to be had: fewer, same bits
            }
        }
    }
    ~Queue() override { close(); }

    // Drops what has not begun, and waits for the rest and for the threads to end. Idempotent; one caller at a time.
    void close() {
        halt();
        stop();
        for (auto& worker : workers_) worker.join();
        workers_.clear();
    }

    void add(std::unique_ptr<Task> task) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (halted_) return;
            Task* added = (tasks_[task->id] = std::move(task)).get();
            if (added->missing > 0) return;
            ready_.emplace(added->key(), added);
        }
        work_.notify_one();
    }
    // One of the things that update `id` waits for is there. Unknown ids are those of updates that a halt has dropped.
    void arrive(int64_t id) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            auto found = tasks_.find(id);
            if (found == tasks_.end() || --found->second->missing > 0) return;
            ready_.emplace(found->second->key(), found->second.get());
        }
        work_.notify_one();
    }
    // Once this returns no update begins any more; those that have begun go on to their ends.
    void halt() {
        std::lock_guard<std::mutex> lock(mutex_);
        drop_waiting();
    }
    // No more updates will be added: when none is left the threads end, and `collect` returns 0.
    void stop() {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
        wake_all();
    }
    // Also once the queue is closed: the caller is then alone.
    void run(void (*work)(void*, int64_t), void* context, int64_t items) override {
        Job job{work, context, items};
        std::unique_lock<std::mutex> lock(mutex_);
        if (items > 0) jobs_.push_back(&job);
        for (int64_t i = std::min(items - 1, sleeping_); i > 0; i--) work_.notify_one();
        while (job.num_taken < items) take_item(job, lock);
        job_done_.wait(lock, [&] { return job.num_done == items; });
    }
    int64_t collect(Completion* out, int64_t most) {
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [this] { return !completed_.empty() || (stopping_ && tasks_.empty()); });
        int64_t count = 0;
        for (; count < most && !completed_.empty(); count++) {
            out[count] = completed_.front();
            completed_.pop_front();
        }
        return count;
    }

private:
    void serve() {
        std::unique_lock<std::mutex> lock(mutex_);
        Task* task;
        while (next(lock, task)) {
            if (!task) {
                take_item(*jobs_.front(), lock);
                continue;
            }
            int64_t block = task->num_taken++;
            if (task->num_taken == task->blocks.count()) begun_.pop_back();
            bool more = !begun_.empty();
            int64_t wake = sleeping_ > 0 && (more || !ready_.empty()) ? 2 : 0;  // and each of the two wakes two
            lock.unlock();
            for (; wake > 0; wake--) work_.notify_one();
            int64_t bad = task->update->run(task->step.step, task->blocks, block);
            lock.lock();
            if (bad >= 0) {
                task->bad = task->bad < 0 ? bad : std::min(task->bad, bad);
                drop_waiting();
            }
            if (++task->num_done == task->blocks.count()) finish(task);
        }
    }

    void take_item(Job& job, std::unique_lock<std::mutex>& lock) {
        int64_t item = job.num_taken++;
        if (job.num_taken == job.num_items) jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
        lock.unlock();
        job.work(job.context, item);
        lock.lock();
        if (++job.num_done == job.num_items) job_done_.notify_all();
    }

    // Waits for something to do: a job (`task` is then null), or a block of an update. False once there will be none.
    bool next(std::unique_lock<std::mutex>& lock, Task*& task) {
        Microseconds pause = kFirstPause;
        for (;;) {
            task = jobs_.empty() ? most_urgent() : nullptr;
            if (task || !jobs_.empty()) return true;
            if (stopping_ && tasks_.empty()) return false;
            sleeping_++;
            if (ready_.empty() || polling_) {
                work_.wait(lock);
            } else {  // one thread looks at the gates again and again
                polling_ = true;
                work_.wait_for(lock, pause);
                polling_ = false;
                pause = std::min(2 * pause, kLongestPause);
            }
            sleeping_--;
        }
    }

    // Of the updates that have begun and still have blocks, and those that may begin, the one of the earliest deadline; null if
    // there is none. Of equal ones the one that has begun.
    Task* most_urgent() {
        Task* begun = begun_.empty() ? nullptr : begun_.back();
        bool overtaken = !begun || (!ready_.empty() && ready_.begin()->second->deadline < begun->deadline);
        if (Task* task = overtaken ? begin(begun ? begun->deadline : std::numeric_limits<int64_t>::max()) : nullptr)
            begun_.push_back(task);
        return begun_.empty() ? nullptr : begun_.back();
    }

    // The first update due before `before` that may, with work to do; null if there is none.
    Task* begin(int64_t before) {
        for (auto it = first_free(); it != ready_.end() && it->second->deadline < before; it = first_free()) {
            Task* task = it->second;
            ready_.erase(it);
            running_.push_back(task);
            task->start_s = now_s();
            if (!task->loss_is_finite(ranks_.num_ranks, ranks_.loss_stride) || !std::isfinite(task->scale())) {
                task->bad = kSkipped;
            } else {
                Present present{task->present, ranks_.num_ranks, ranks_.present_stride};
                task->blocks = task->update->begin(task->step.step, task->step.lr, present, task->scale());
            }
            if (task->blocks.count() > 0) return task;
            finish(task);
        }
        return nullptr;
    }

    // The first of those ready whose gates are open. A gate that opens during a look at them lets one through whose
    // predecessors were held by it a moment ago: the second look sees them free.
    std::map<std::pair<int64_t, int64_t>, Task*>::iterator first_free() {
        auto look = [this] {
            return std::find_if(ready_.begin(), ready_.end(), [this](const auto& entry) {
                return entry.second->may_begin(ranks_.num_ranks, ranks_.loss_stride);
            });
        };
        auto it = look();
        return it == ready_.begin() || it == ready_.end() ? it : look();
    }

    void finish(Task* task) {
        double end = now_s();
        Completion completion{task->id, task->bad, task->start_s, end};
        running_.erase(std::find(running_.begin(), running_.end(), task));
        for (Task* other : running_)  // begun when this one had no block left to take
            if (other->start_s > task->start_s) other->start_s = end;
        // A failure is told last, so that who hears of it knows of all that has been updated.
        (task->bad >= 0 ? failed_ : completed_).push_back(completion);
        tasks_.erase(task->id);
        if (running_.empty()) {
            completed_.insert(completed_.end(), failed_.begin(), failed_.end());
            failed_.clear();
        }
        if (stopping_ && tasks_.empty())
            wake_all();
        else
            done_.notify_one();
    }

    void drop_waiting() {
        halted_ = true;
        ready_.clear();
        for (auto it = tasks_.begin(); it != tasks_.end();) it = it->second->start_s == 0 ? tasks_.erase(it) : std::next(it);
        if (stopping_ && tasks_.empty()) wake_all();
    }

    void wake_all() {
        work_.notify_all();
        done_.notify_all();
    }

    const Ranks ranks_;
    std::mutex mutex_;  // guards all below
    std::condition_variable work_, done_, job_done_;
    std::deque<Job*> jobs_;                                     // those with items left to take
    std::unordered_map<int64_t, std::unique_ptr<Task>> tasks_;  // neither complete nor dropped
    std::map<std::pair<int64_t, int64_t>, Task*> ready_;        // those with nothing missing that have not begun
    std::vector<Task*> running_;                                // have begun, are not complete
    std::vector<Task*> begun_;                                  // those with blocks left to take, of ever earlier deadlines
    std::deque<Completion> completed_, failed_;
    int64_t sleeping_ = 0;
    bool polling_ = false, halted_ = false, stopping_ = false;
    std::vector<std::thread> workers_;  // last: they use all above
};

}  // namespace

extern "C" {

// `states`: two, the same twice if the group does not speculate; `sides` is then null.
void* slidedp_update_create(int32_t what, const State* states, const int64_t* sides, const void* grad, int32_t grad_dtype, int32_t shadow_dtype,
                            const Part* parts, int64_t num_parts, int64_t* counts, int64_t num_params, const Recipe* recipe) {
    bool apart = What(what) == What::kSpeculate;
    UpdateBlock run = apart ? update_block_apart_of(grad_dtype, shadow_dtype) : update_block_of(grad_dtype, shadow_dtype);
    return new (std::nothrow) Update(What(what), {states[0], states[1]}, sides, grad, grad_dtype, run, std::vector<Part>(parts, parts + num_parts),
                                     counts, num_params, *recipe);
}
// Before its first step: the update is of some rows of its only parameter, which starts at element 0.
void slidedp_update_take_rows(void* update, const Rows* rows) { static_cast<Update*>(update)->take_rows(*rows); }
void slidedp_update_destroy(void* update) { delete static_cast<Update*>(update); }

void* slidedp_queue_create(int32_t threads, int32_t niceness, const Ranks* ranks) {
    try {
        return new Queue(threads, niceness, *ranks);
    } catch (const std::exception&) {
        return nullptr;
    }
}
void* slidedp_queue_crew(void* queue) { return static_cast<Crew*>(static_cast<Queue*>(queue)); }
void slidedp_queue_close(void* queue) { static_cast<Queue*>(queue)->close(); }
void slidedp_queue_destroy(void* queue) { delete static_cast<Queue*>(queue); }

// `present`: the flag of the group's first parameter in rank 0's row, or null. The update begins after `missing` arrivals.
void slidedp_queue_add(void* queue, int64_t id, const void* update, int64_t deadline, int64_t missing, const Step* step,
                       const uint8_t* present, const Gate* gates, int64_t num_gates) {
    auto task = std::make_unique<Task>();
    task->id = id, task->deadline = deadline, task->missing = missing;
    task->update = static_cast<const Update*>(update), task->present = present, task->step = *step;
    task->gates.assign(gates, gates + num_gates);
    static_cast<Queue*>(queue)->add(std::move(task));
}
void slidedp_queue_arrive(void* queue, int64_t id) { static_cast<Queue*>(queue)->arrive(id); }
void slidedp_queue_halt(void* queue) { static_cast<Queue*>(queue)->halt(); }
void slidedp_queue_stop(void* queue) { static_cast<Queue*>(queue)->stop(); }
int64_t slidedp_queue_collect(void* queue, Completion* out, int64_t most) {
    return static_cast<Queue*>(queue)->collect(out, most);
}

}  // extern "C"
