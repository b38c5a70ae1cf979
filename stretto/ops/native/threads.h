// Loops over the threads that torch computes with.
//
// A second pool of threads would spin beside torch's and take its cores. So no runtime is linked here: library.py finds
// the OpenMP runtime that torch has loaded and hands over its entry points (of libgomp; LLVM's and Intel's have them,
// too). Without them everything runs in the calling thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <new>
#include <stdexcept>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace stretto {

using Body = void (*)(void *);
inline void (*gomp_parallel)(Body, void *, unsigned threads, unsigned flags) = nullptr;

// What an exception becomes where C++ ends, and back.
enum Code { FINE, NO_MEMORY, FAULT };

template <class Work>
int code_of(const Work &work) {
    try {
        work();
        return FINE;
    } catch (const std::bad_alloc &) {
        return NO_MEMORY;
    } catch (...) {
        return FAULT;
    }
}

inline void throw_of(int code) {
    if (code == NO_MEMORY) throw std::bad_alloc();
    if (code != FINE) throw std::runtime_error("a native kernel");
}

// Calls work(i) for i in [0, count), in any order, on up to `threads` threads; returns when all have been done. Who
// does which is decided while they run, so results may not depend on it. Where one throws, so does this.
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
        std::atomic<int> code;
    } shared{&work, {0}, count, {FINE}};
    Body body = [](void *data) {
        auto *all = static_cast<Shared *>(data);
        const int code = code_of([&] {
            for (int64_t i; (i = all->next.fetch_add(1, std::memory_order_relaxed)) < all->count;) (*all->work)(i);
        });
        if (code != FINE) all->code = code;
    };
    gomp_parallel(body, &shared, static_cast<unsigned>(threads < count ? threads : count), 0);
    throw_of(shared.code);
}

}  // namespace stretto

EXPORT void stretto_use_threads(void *parallel) {
    stretto::gomp_parallel = reinterpret_cast<decltype(stretto::gomp_parallel)>(parallel);
}
