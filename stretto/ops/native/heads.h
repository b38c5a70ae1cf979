// Heads as a projection makes them, a token at a time: norm of q and k, rotation, the write of keys and values.
//
//     x of a token     | q heads ... | k heads ... | v heads ... |  D numbers each; pairs are (i, i + D/2)
//     q                normed, rotated -> out         k            normed, rotated -> its cell        v  -> its cell
//
// All in float32, rounded once.
#pragma once

#include "threads.h"
#include "vectors.h"

#include <cmath>

namespace stretto {

struct e4m3 {
    uint8_t bits;
};

using Bytes = uint8_t __attribute__((vector_size(16)));

// An e4m3 number's bits, moved to where float32 has them, are the number times 2^-120.
inline Floats load(const e4m3 *from, int64_t count) {
    Bytes bytes{};
    std::memcpy(&bytes, from, count < LANES ? count : LANES);
    const Words code = __builtin_convertvector(bytes, Words);
    return (Floats)(((code & 0x7fu) << 20) | ((code & 0x80u) << 24)) * 0x1p120f;
}

// To the nearest, ties to even; at most 448, and a NaN stays one. Below its smallest normal number, 2^-6, it counts in
// 2^-9: adding 1.5 * 2^14 rounds to these.
inline void store(e4m3 *to, Floats x, int64_t count) {
    const Words sign = (Words)x & 0x80000000u, bits = (Words)x ^ sign;
    const Words normal = ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
    const Words small = (Words)((Floats)bits + 24576.0f) - 0x46c00000u;
    const Words number = (Floats)bits < 0x1p-6f ? small : (Floats)bits > 448.0f ? Words{} + 0x7eu : normal;
    const Words code = (x == x ? number : Words{} + 0x7fu) | (sign >> 24);
    const Bytes bytes = __builtin_convertvector(code, Bytes);
    std::memcpy(to, &bytes, count < LANES ? count : LANES);
}

inline float power_of_two(uint32_t biased) {
    const uint32_t bits = biased << 23;
    float made;
    std::memcpy(&made, &bits, sizeof made);
    return made;
}

}  // namespace stretto

// As in layer.py.
struct Heads {
    const float *table;            // [positions, D], row p = [cos | sin]
    const int64_t *positions;      // [T]
    const void *q_norm, *k_norm;   // [D] each; null: none
    void *k, *v;                   // caches; null: k heads go to `out`, too
    uint8_t *k_scales, *v_scales;  // of e4m3 cells: biased exponents, a byte a head
    const int64_t *cells;          // [T], page * page_size + offset
    int64_t page_stride, cell_stride, page_size;  // elements, elements, cells
    int32_t q_heads, kv_heads, head_dim;
    float eps;
    int32_t wide_norm;  // norms in float32, whatever x is in
    int32_t kind;       // of cells: 0 float32, 1 bfloat16, 2 e4m3
};

namespace stretto {

// One head: `size` pairs, a and b from D/2 apart.
template <class T>
struct Pairs {
    const T *x;
    int64_t half;
    float scale;

    Pairs(const T *x, int64_t half, bool normed, float eps) : x(x), half(half), scale(1) {
        if (!normed) return;
        Floats squares{};
        for (int64_t d = 0; d < half; d += LANES) {
            const Floats a = load(x + d, half - d), b = load(x + half + d, half - d);
            squares = fma(b, b, fma(a, a, squares));
        }
        scale = 1 / std::sqrt(sum(squares) / float(2 * half) + eps);
    }

    // Calls use(d, count, a, b) for all of it, normed and rotated.
    template <class W, class Use>
    void rotated(const W *norm, const float *angle, const Use &use) const {
        for (int64_t d = 0; d < half; d += LANES) {
            Floats a = load(x + d, half - d), b = load(x + half + d, half - d);
            if (norm != nullptr) {
                a = a * scale * load(norm + d, half - d);
                b = b * scale * load(norm + half + d, half - d);
            }
            const Floats cos = load(angle + d, half - d), sin = load(angle + half + d, half - d);
            use(d, half - d, a * cos - b * sin, b * cos + a * sin);
        }
    }

    template <class Use>
    void plain(const Use &use) const {
        for (int64_t d = 0; d < half; d += LANES) use(d, half - d, load(x + d, half - d), load(x + half + d, half - d));
    }
};

template <class C, class Each>
void write_cell(C *to, uint8_t *, int64_t half, const Each &each) {
    each([&](int64_t d, int64_t count, Floats a, Floats b) {
        store(to + d, a, count);
        store(to + half + d, b, count);
    });
}

// With the power of two that takes the largest number into [128, 256) (fp8.py).
template <class Each>
void write_cell(e4m3 *to, uint8_t *exponent, int64_t half, const Each &each) {
    Floats most{};
    each([&](int64_t, int64_t, Floats a, Floats b) {
        most = larger(most, larger(a < 0 ? -a : a, b < 0 ? -b : b));
    });
    const float peak = largest(most);
    uint32_t bits;
    std::memcpy(&bits, &peak, sizeof bits);
    const int32_t biased = int32_t(bits >> 23) - 7;
    *exponent = uint8_t(biased < 1 ? 1 : biased);
    const float scale = power_of_two(254u - *exponent);
    each([&](int64_t d, int64_t count, Floats a, Floats b) {
        store(to + d, a * scale, count);
        store(to + half + d, b * scale, count);
    });
}

template <class T, class W, class C>
void rotate_token(const Heads &heads, int64_t token, const T *x, T *out) {
    const int64_t dim = heads.head_dim, half = dim / 2;
    const float *angle = heads.table + heads.positions[token] * dim;
    const W *q_norm = static_cast<const W *>(heads.q_norm), *k_norm = static_cast<const W *>(heads.k_norm);
    const int64_t to_out = heads.q_heads + (heads.k == nullptr ? heads.kv_heads : 0);
    for (int64_t h = 0; h < to_out; ++h) {
        const W *norm = h < heads.q_heads ? q_norm : k_norm;
        const Pairs<T> pairs(x + h * dim, half, norm != nullptr, heads.eps);
        pairs.rotated(norm, angle, [&](int64_t d, int64_t count, Floats a, Floats b) {
            store(out + h * dim + d, a, count);
            store(out + h * dim + half + d, b, count);
        });
    }
    if (heads.k == nullptr) return;
    const int64_t cell = heads.cells[token], scales = cell * heads.kv_heads;
    const int64_t at = cell / heads.page_size * heads.page_stride + cell % heads.page_size * heads.cell_stride;
    for (int64_t h = 0; h < heads.kv_heads; ++h) {
        const T *k = x + (heads.q_heads + h) * dim, *v = k + heads.kv_heads * dim;
        const Pairs<T> keys(k, half, k_norm != nullptr, heads.eps), values(v, half, false, 0);
        write_cell(static_cast<C *>(heads.k) + at + h * dim, heads.k_scales + scales + h, half,
                   [&](const auto &use) { keys.rotated(k_norm, angle, use); });
        write_cell(static_cast<C *>(heads.v) + at + h * dim, heads.v_scales + scales + h, half,
                   [&](const auto &use) { values.plain(use); });
    }
}

constexpr int64_t SHARED = 16;  // tokens from which on threads share them

template <class T, class W>
void rotate_tokens(const Heads &heads, int64_t tokens, const T *x, int64_t x_stride, T *out, int64_t out_stride,
                   int threads) {
    for_each(tokens, tokens < SHARED ? 1 : threads, [&](int64_t i) {
        const T *from = x + i * x_stride;
        T *to = out + i * out_stride;
        if (heads.kind == 0)
            rotate_token<T, W, float>(heads, i, from, to);
        else if (heads.kind == 1)
            rotate_token<T, W, bfloat16>(heads, i, from, to);
        else
            rotate_token<T, W, e4m3>(heads, i, from, to);
    });
}

// x [T, heads, D], whose tokens lie `x_stride` apart, float32 or with `half` bfloat16, like out. out may be x.
inline void rotate(const Heads &heads, int64_t tokens, const void *x, int64_t x_stride, void *out, int64_t out_stride,
                   bool half, int threads) {
    if (!half)
        rotate_tokens<float, float>(heads, tokens, static_cast<const float *>(x), x_stride, static_cast<float *>(out),
                                    out_stride, threads);
    else if (heads.wide_norm)
        rotate_tokens<bfloat16, float>(heads, tokens, static_cast<const bfloat16 *>(x), x_stride,
                                       static_cast<bfloat16 *>(out), out_stride, threads);
    else
        rotate_tokens<bfloat16, bfloat16>(heads, tokens, static_cast<const bfloat16 *>(x), x_stride,
                                          static_cast<bfloat16 *>(out), out_stride, threads);
}

}  // namespace stretto
