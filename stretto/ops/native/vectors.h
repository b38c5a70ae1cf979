// Sixteen floats at a time, whatever the width of the machine's registers, so that the order of every sum is one.
//
// A row's last numbers go through the same instructions as its others, in a vector that is filled up with zeros: what
// becomes of a number depends neither on its place nor on what stands beside it.
#pragma once

#include <cstdint>
#include <cstring>

namespace stretto {

constexpr int LANES = 16;
using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
using Shorts = uint16_t __attribute__((vector_size(32)));

struct bfloat16 {
    uint16_t bits;
};

inline Floats all(float x) { return x - Floats{}; }
inline Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }  // contracted: see build.FLAGS
inline Floats larger(Floats a, Floats b) { return (a > b) | (a != a) ? a : b; }  // a NaN wins

// Of the 32 numbers of a and b, those at 16 places.
template <int... PLACES>
inline Floats picked(Floats a, Floats b) {
#if defined(__clang__)  // GCC has had this since 12
    return __builtin_shufflevector(a, b, PLACES...);
#else
    return __builtin_shuffle(a, b, Ints{PLACES...});
#endif
}

inline Floats widened(Shorts bits) { return (Floats)(__builtin_convertvector(bits, Words) << 16); }

// To the nearest, ties to even. A NaN stays one.
inline Shorts narrowed(Floats x) {
    const Words bits = (Words)x, rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return __builtin_convertvector((x == x ? rounded : bits | 0x400000u) >> 16, Shorts);
}

inline Floats load(const float *from) {
    Floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline Floats load(const bfloat16 *from) {
    Shorts x;
    std::memcpy(&x, from, sizeof x);
    return widened(x);
}

inline void store(float *to, Floats x) { std::memcpy(to, &x, sizeof x); }

inline void store(bfloat16 *to, Floats x) {
    const Shorts bits = narrowed(x);
    std::memcpy(to, &bits, sizeof bits);
}

// The first `count` of sixteen; the others are zeros.
inline Floats load(const float *from, int64_t count) {
    if (count >= LANES) return load(from);
    Floats x{};
    std::memcpy(&x, from, count * sizeof *from);
    return x;
}

inline Floats load(const bfloat16 *from, int64_t count) {
    if (count >= LANES) return load(from);
    Shorts x{};
    std::memcpy(&x, from, count * sizeof *from);
    return widened(x);
}

inline void store(float *to, Floats x, int64_t count) {
    std::memcpy(to, &x, (count < LANES ? count : LANES) * sizeof *to);
}

inline void store(bfloat16 *to, Floats x, int64_t count) {
    const Shorts bits = narrowed(x);
    std::memcpy(to, &bits, (count < LANES ? count : LANES) * sizeof *to);
}

inline float sum(Floats x) {
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; ++i) x[i] += x[i + step];
    return x[0];
}

inline float largest(Floats x) {  // a NaN, if there is one
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; ++i) x[i] = x[i] > x[i + step] || x[i] != x[i] ? x[i] : x[i + step];
    return x[0];
}

// e^x, within two units in the last place; 0 below -87.3, and at most e^88. x = n ln 2 + r, |r| <= ln 2 / 2; e^r by its
// series, whose first term left out is below 2^-26; ln 2 in two parts (Cody and Waite, 1980).
inline Floats exponential(Floats x) {
    const Floats low = all(-87.3f), high = all(88.0f);
    const Floats inside = x < low ? low : x > high ? high : x;
    const Floats magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const Floats n = fma(inside, all(1.44269504f), magic) - magic;
    const Floats r = fma(n, all(-1.42860677e-6f), fma(n, all(-0.693145752f), inside));
    Floats y = all(1.0f / 5040);
    y = fma(y, r, all(1.0f / 720));
    y = fma(y, r, all(1.0f / 120));
    y = fma(y, r, all(1.0f / 24));
    y = fma(y, r, all(1.0f / 6));
    y = fma(y, r, all(0.5f));
    y = fma(y, r, all(1.0f));
    y = fma(y, r, all(1.0f));
    const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
    return x < low ? Floats{} : y * (Floats)power;
}

// By exp(-2 |x|), so that nothing overflows; near 0 by its series, where 1 - e would lose digits.
inline Floats hyperbolic_tangent(Floats x) {
    const Floats size = x < 0 ? -x : x, e = exponential(-2.0f * size);
    const Floats square = x * x;
    const Floats near = size * fma(fma(fma(all(-17.0f / 315), square, all(2.0f / 15)), square, all(-1.0f / 3)), square,
                                   all(1.0f));
    const Floats y = size < all(0.1f) ? near : (1.0f - e) / (1.0f + e);
    return x < 0 ? -y : y;
}

}  // namespace stretto
