// Loops over the threads that torch computes with.
//
// A second pool of threads would spin beside torch's and take its cores. So no runtime is linked here: library.py finds
// the OpenMP runtime that torch has loaded and hands over its entry points (of libgomp; LLVM's and Intel's have them,
// too). Without them everything runs in the calling thread.
#pragma once

#include <atomic>
#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace stretto {

using Body = void (*)(void *);
inline void (*gomp_parallel)(Body, void *, unsigned threads, unsigned flags) = nullptr;

// Calls work(i) for i in [0, count), in any order, on up to `threads` threads; returns when all have been done. Who does
// which is decided while they run, so results may not depend on it.
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
    } shared{&work, {0}, count};
    Body body = [](void *data) {
        auto *all = static_cast<Shared *>(data);
        for (int64_t i; (i = all->next.fetch_add(1, std::memory_order_relaxed)) < all->count;) (*all->work)(i);
    };
    gomp_parallel(body, &shared, static_cast<unsigned>(threads < count ? threads : count), 0);
}

}  // namespace stretto

EXPORT void stretto_use_threads(void *parallel) {
    stretto::gomp_parallel = reinterpret_cast<decltype(stretto::gomp_parallel)>(parallel);
}
