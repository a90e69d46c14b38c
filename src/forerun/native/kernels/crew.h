// A fixed crew of threads that runs the phases of a pass together.
//
// The calling thread works too, and no phase waits for a thread, only for work: items are taken one
// by one, and a phase is over when all of them are done. A worker that is late, or that the system
// has suspended for another process, costs nothing unless it holds an item. Each thread begins with a share
// of neighbouring items, so that it reads weights in the order of their addresses, and then helps with the
// shares of the others.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "amx.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace forerun {

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Wait for something that usually comes within a microsecond; past that, let others run.
template <class Condition>
void spin_until(Condition&& condition) {
    for (int round = 0; !condition(); ++round) {
        if (round < 4096) relax();
        else std::this_thread::yield();
    }
}

struct alignas(64) Counter {
    std::atomic<int> value{0};
};

class Crew;

// One thread's way through the phases of one job.
class Walker {
  public:
    Walker(Crew& crew, int thread) : thread(thread), crew_(crew) {}

    ~Walker() { release_tiles(); }

    // Run `work(item)` for every item, shared between the threads; returns when all are done.
    template <class Work>
    void each(int num_items, Work&& work) {
        each_ahead(num_items, [&](int item, int) { work(item); });
    }

    // The same with `work(item, next)`, next being the item this thread does after it, or -1.
    template <class Work>
    void each_ahead(int num_items, Work&& work);

    const int thread;

  private:
    Crew& crew_;
    size_t index_ = 0;
};

class Crew {
  public:
    explicit Crew(int num_threads) {
        for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this, i] { wait_for_jobs(i); });
    }

    int num_threads() const { return int(threads_.size()) + 1; }

    // Let all threads run `job`, which consists of at most `num_phases` calls of Walker::each.
    void run(size_t num_phases, const std::function<void(Walker&)>& job) {
        std::lock_guard<std::mutex> one_job(jobs_);
        const size_t num_counters = num_phases * (num_threads() + 1);
        if (counters_.size() < num_counters) counters_ = std::vector<Counter>(num_counters);
        for (size_t i = 0; i < num_counters; ++i) counters_[i].value.store(0, std::memory_order_relaxed);
        job_ = &job;
        open_.store(true);
        epoch_.fetch_add(1);
        if (num_asleep_.load() > 0) {
            std::lock_guard<std::mutex> lock(sleep_);
            wake_.notify_all();
        }
        Walker walker(*this, 0);
        job(walker);
        open_.store(false);
        spin_until([&] { return num_active_.load() == 0; });
    }

  private:
    friend class Walker;

    static constexpr auto kSpin = std::chrono::microseconds(1000);

    [[noreturn]] void wait_for_jobs(int thread) {
        for (unsigned long seen = 0;;) {
            wait_past(seen);
            seen = epoch_.load();
            num_active_.fetch_add(1);
            if (open_.load()) {  // else the others have finished without us
                Walker walker(*this, thread);
                (*job_)(walker);
            }
            num_active_.fetch_sub(1);
        }
    }

    // Between two passes a step draws, decides and packs, some hundred microseconds of it: spin for
    // as long as that may take, then sleep. Waking a sleeper costs a pass a twentieth of its time.
    void wait_past(unsigned long seen) {
        const auto changed = [&] { return epoch_.load() != seen; };
        const auto end = std::chrono::steady_clock::now() + kSpin;
        for (int round = 0; !changed(); ++round) {
            relax();
            if (round % 64 == 63 && std::chrono::steady_clock::now() > end) break;
        }
        if (changed()) return;
        std::unique_lock<std::mutex> lock(sleep_);
        num_asleep_.fetch_add(1);
        wake_.wait(lock, changed);
        num_asleep_.fetch_sub(1);
    }

    std::vector<std::thread> threads_;
    std::vector<Counter> counters_;  // per phase: items taken of every thread's share, then items done
    const std::function<void(Walker&)>* job_ = nullptr;
    std::atomic<unsigned long> epoch_{0};
    std::atomic<bool> open_{false};
    std::atomic<int> num_active_{0};
    std::atomic<int> num_asleep_{0};
    std::mutex jobs_, sleep_;
    std::condition_variable wake_;
};

template <class Work>
void Walker::each_ahead(int num_items, Work&& work) {
    const int num_threads = crew_.num_threads();
    Counter* taken = &crew_.counters_[(num_threads + 1) * index_++];
    std::atomic<int>& done = taken[num_threads].value;
    int num_empty = 0;  // shares that have no more items, this thread's first
    const auto take = [&] {
        for (; num_empty < num_threads; ++num_empty) {
            const int64_t share = (thread + num_empty) % num_threads;
            const int begin = int(num_items * share / num_threads), end = int(num_items * (share + 1) / num_threads);
            const int item = begin + taken[share].value.fetch_add(1, std::memory_order_relaxed);
            if (item < end) return item;
        }
        return -1;
    };
    int num_done = 0;
    for (int item = take(), next; item >= 0; item = next, ++num_done) {
        next = take();
        work(item, next);
    }
    if (num_done) done.fetch_add(num_done, std::memory_order_release);
    spin_until([&] { return done.load(std::memory_order_acquire) == num_items; });
}

}  // namespace forerun
