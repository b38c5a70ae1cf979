// What stands between the products of a layer, on rows that know nothing of each other: norm, gate, rotation. Few rows
// spend more time on the way into a kernel than in it, so there are also calls for several kernels one after another.
#include "heads.h"

#include <memory>

using namespace stretto;

namespace {

constexpr int64_t PART = 16384;  // numbers that are worth a thread

// Calls work(row) for every row of so many numbers.
template <class Work>
void for_rows(int64_t rows, int64_t numbers, int threads, const Work &work) {
    const int64_t together = numbers < PART ? PART / (numbers + 1) + 1 : 1;
    for_each((rows + together - 1) / together, threads, [&](int64_t part) {
        const int64_t end = (part + 1) * together < rows ? (part + 1) * together : rows;
        for (int64_t row = part * together; row < end; ++row) work(row);
    });
}

template <class T, class W>
void norm_row(const T *x, int64_t size, const W *weight, float eps, T *out) {
    Floats squares[4] = {};
    int64_t i = 0;
    for (int turn = 0; i < size; i += LANES, turn = (turn + 1) & 3) {
        const Floats a = load(x + i, size - i);
        squares[turn] = fma(a, a, squares[turn]);
    }
    const float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    const float scale = 1 / std::sqrt(total / float(size) + eps);
    for (i = 0; i < size; i += LANES)
        store(out + i, load(x + i, size - i) * scale * load(weight + i, size - i), size - i);
}

template <class T, class W>
void norm_rows(const void *x, int64_t stride, int64_t rows, int64_t size, const void *weight, float eps, void *out,
               int threads) {
    for_rows(rows, size, threads, [&](int64_t row) {
        norm_row(static_cast<const T *>(x) + row * stride, size, static_cast<const W *>(weight), eps,
                 static_cast<T *>(out) + row * size);
    });
}

enum Act { SILU, GELU_TANH, GELU, RELU };

template <int ACT>
Floats activate(Floats x) {
    if constexpr (ACT == SILU) return x / (1.0f + exponential(-x));
    if constexpr (ACT == GELU_TANH)
        return 0.5f * x * (1.0f + hyperbolic_tangent(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    if constexpr (ACT == GELU) {
        Floats y;
        for (int i = 0; i < LANES; ++i) y[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.7071067811865476f));
        return y;
    }
    return x < 0 ? Floats{} : x;
}

template <class T, int ACT>
void gate_rows(const void *x, int64_t stride, int64_t rows, int64_t size, void *out, int threads) {
    for_rows(rows, size, threads, [&](int64_t row) {
        const T *first = static_cast<const T *>(x) + row * stride, *second = first + size;
        T *to = static_cast<T *>(out) + row * size;
        for (int64_t i = 0; i < size; i += LANES)
            store(to + i, activate<ACT>(load(first + i, size - i)) * load(second + i, size - i), size - i);
    });
}

template <class T>
void gate_by(const void *x, int64_t stride, int64_t rows, int64_t size, int act, void *out, int threads) {
    if (act == SILU) return gate_rows<T, SILU>(x, stride, rows, size, out, threads);
    if (act == GELU_TANH) return gate_rows<T, GELU_TANH>(x, stride, rows, size, out, threads);
    if (act == GELU) return gate_rows<T, GELU>(x, stride, rows, size, out, threads);
    gate_rows<T, RELU>(x, stride, rows, size, out, threads);
}

}  // namespace

// x [rows, size], rows `stride` apart -> out without gaps; float32, or with `half` bfloat16; the weight likewise, or
// with `wide` in float32.
EXPORT void norm(const void *x, int64_t stride, int64_t rows, int64_t size, const void *weight, float eps, void *out,
                 int half, int wide, int threads) {
    if (!half) return norm_rows<float, float>(x, stride, rows, size, weight, eps, out, threads);
    if (wide) return norm_rows<bfloat16, float>(x, stride, rows, size, weight, eps, out, threads);
    norm_rows<bfloat16, bfloat16>(x, stride, rows, size, weight, eps, out, threads);
}

// x [rows, 2 size], rows `stride` apart -> act(first half) * second half, without gaps.
EXPORT void gate(const void *x, int64_t stride, int64_t rows, int64_t size, int act, void *out, int half,
                 int threads) {
    if (half) return gate_by<bfloat16>(x, stride, rows, size, act, out, threads);
    gate_by<float>(x, stride, rows, size, act, out, threads);
}

// As in packed.py: rows by a matrix; `half` counts 1 for bfloat16 inputs and 2 for bfloat16 outputs.
// Returns `code_of`.
using Multiply = int (*)(const void *matrix, const void *x, int64_t x_stride, int64_t rows, void *out,
                         int64_t out_stride, const void *bias, int half, int add, int threads);

struct Norm {
    const void *weight;
    float eps;
    int32_t wide;  // the weight is in float32, whatever x is in
};

struct Product {
    Multiply multiply;
    const void *matrix, *bias;
    int64_t outputs, inputs;

    void operator()(const void *x, int64_t x_stride, int64_t rows, void *out, int64_t out_stride, int half, int add,
                    int threads) const {
        throw_of(multiply(matrix, x, x_stride, rows, out, out_stride, bias, half, add, threads));
    }
};

namespace {

// Of the calling thread, for what goes from one kernel to the next.
void *between(size_t bytes) {
    thread_local std::unique_ptr<Floats[]> held;
    thread_local size_t size = 0;
    if (size < bytes) {
        size = 0;
        held.reset();
        held.reset(new Floats[bytes / sizeof(Floats) + 1]);
        size = bytes;
    }
    return held.get();
}

// x normed, by a matrix, and where `act` is not negative the gate of that. `free` is memory of [rows, size] and, with a
// gate, [rows, outputs] numbers behind that.
void norm_and_multiply(const Norm &by, const Product &product, const void *x, int64_t stride, int64_t rows,
                       int64_t size, int act, void *out, char *free, int half, int threads) {
    const int64_t number = half ? 2 : 4, both = half ? 3 : 0;
    norm(x, stride, rows, size, by.weight, by.eps, free, half, by.wide, threads);
    void *made = act < 0 ? out : free + rows * size * number;
    product(free, size, rows, made, product.outputs, int(both), 0, threads);
    if (act >= 0) gate(made, product.outputs, rows, product.outputs / 2, act, out, half, threads);
}

}  // namespace

// x [rows, size] -> out [rows, outputs], or with a gate [rows, outputs / 2].
EXPORT int normed_product(const Norm *by, const Product *product, const void *x, int64_t stride, int64_t rows,
                          int64_t size, int act, void *out, int half, int threads) {
    return code_of([&] {
        auto *free = static_cast<char *>(between(size_t(rows * (size + product->outputs)) * (half ? 2 : 4)));
        norm_and_multiply(*by, *product, x, stride, rows, size, act, out, free, half, threads);
    });
}

// residual [rows, size] += what an MLP makes of it, normed.
EXPORT int add_mlp(const Norm *by, const Product *gate_up, int act, const Product *down, void *residual,
                   int64_t stride, int64_t rows, int64_t size, int half, int threads) {
    return code_of([&] {
        const int64_t number = half ? 2 : 4, inner = gate_up->outputs / 2;
        auto *made = static_cast<char *>(between(size_t(rows * (size + 3 * inner)) * number));
        norm_and_multiply(*by, *gate_up, residual, stride, rows, size, act, made, made + rows * inner * number, half,
                          threads);
        (*down)(made, inner, rows, residual, stride, half ? 3 : 0, 1, threads);
    });
}

EXPORT void rotate_heads(const Heads *heads, int64_t tokens, const void *x, int64_t x_stride, void *out,
                         int64_t out_stride, int half, int threads) {
    rotate(*heads, tokens, x, x_stride, out, out_stride, half, threads);
}
