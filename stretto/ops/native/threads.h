// Loops over the threads that torch computes with.
//
// A second pool of threads would spin beside torch's and take its cores. So no runtime is linked here: library.py finds
// the OpenMP runtime that torch has loaded and hands over its entry points (of libgomp; LLVM's and Intel's have them,
// too). Without them everything runs in the calling thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <new>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace stretto {

using Body = void (*)(void *);
inline void (*gomp_parallel)(Body, void *, unsigned threads, unsigned flags) = nullptr;

// Calls work(i) for i in [0, count), in any order, on up to `threads` threads; returns when all have been done. Who does
// which is decided while they run, so results may not depend on it. Where one throws, so does this: std::bad_alloc.
template <class Work>
void for_each(int64_t count, int threads, const Work &work) {
    if (threads <= 1 || count <= 1 || gomp_parallel == nullptr) {
        for (int64_t i = 0; i < count; ++i) work(i);
        return;
    }
    struct Shared {
        const Work *work;
        std::atomic<int64_t> next;
        int64_t count;
        std::atomic<bool> failed;
    } shared{&work, {0}, count, {false}};
    Body body = [](void *data) {
        auto *all = static_cast<Shared *>(data);
        try {
            for (int64_t i; (i = all->next.fetch_add(1, std::memory_order_relaxed)) < all->count;) (*all->work)(i);
        } catch (...) {  // the runtime that calls this knows no exceptions
            all->failed = true;
        }
    };
    gomp_parallel(body, &shared, static_cast<unsigned>(threads < count ? threads : count), 0);
    if (shared.failed) throw std::bad_alloc();
}

// For a function that allocates and is called from Python, which exceptions may not reach: 0, or 1 where memory is short.
template <class Work>
int code_of(const Work &work) {
    try {
        work();
        return 0;
    } catch (...) {
        return 1;
    }
}

}  // namespace stretto

EXPORT void stretto_use_threads(void *parallel) {
    stretto::gomp_parallel = reinterpret_cast<decltype(stretto::gomp_parallel)>(parallel);
}
