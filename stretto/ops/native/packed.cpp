// Products of rows by a matrix that stays in the 4 or 8 bits it is stored in, in float32.
//
//     out[r, o] = sum over groups g of  scale[o, g] * sum over i in g of code[o, i] * x[r, i]
//                                     + offset[o, g] * sum over i in g of x[r, i]
//
// Codes are small whole numbers, so that code * x is what a float32 product makes of it, and no number of the matrix is
// rounded. A lane of a vector is an output; sums run over the inputs in one order, whatever the rows beside, the
// thread, or the width of the machine's registers:
//
//     within a group      two sums, of even and of odd inputs, then the one plus the other
//     over groups         total = fma(scale, sum, total); total = fma(offset, sum of x, total)
//
// Layout: panels of 16 outputs, one after the other; in each, group by group, what one turn of the loop reads:
//
//     | 16 scales | 16 offsets, if any | codes of the group's inputs |
//
//     4 bits    8 inputs are 16 words of 32 bits, one an output; input j has bits 4 j .. 4 j + 3; codes are -8 .. 7
//     8 bits    an input is 16 signed bytes, one an output
//     scales and offsets in float32; or in float16, if all of them are: d, m with offset = m + 8 d, as GGUF stores them
#include "threads.h"

#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

using stretto::for_each;

namespace {

constexpr int LANES = 16;  // outputs of a panel
constexpr int AT_ONCE = 128;  // rows that are arranged before they are multiplied: they fit the second-level cache
// WIDTH: outputs that one register holds. MOST: rows that are multiplied at once, two sums each in registers.
#if defined(__AVX512F__)
constexpr int WIDTH = 16, MOST = 8;
#elif defined(__AVX2__)
constexpr int WIDTH = 8, MOST = 4;
#else
constexpr int WIDTH = 4, MOST = 4;
#endif

using Floats = float __attribute__((vector_size(4 * WIDTH)));
using Ints = int32_t __attribute__((vector_size(4 * WIDTH)));
using Words = uint32_t __attribute__((vector_size(4 * WIDTH)));

template <class T>
inline T load(const void *from) {
    T made;
    std::memcpy(&made, from, sizeof(T));
    return made;
}

inline Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }  // contracted: see build.FLAGS

inline Floats all(float x) { return x - Floats{}; }

// GCC 12 takes conversions apart, so those of x86 are written out.
inline Floats halves(const uint8_t *from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__AVX2__) && defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(load<__m128i>(from));
#else
    using Half = _Float16 __attribute__((vector_size(2 * WIDTH)));
    return __builtin_convertvector(load<Half>(from), Floats);
#endif
}

inline Floats bytes_of(const uint8_t *from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from))));
#else
    using Bytes = int8_t __attribute__((vector_size(WIDTH)));
    return __builtin_convertvector(__builtin_convertvector(load<Bytes>(from), Ints), Floats);
#endif
}

// ------------------------------------------------------------------------------------------------------------ codes
// Codes of some inputs and WIDTH outputs, factors of X: `[j]` goes with the j-th of PARTS numbers of x, `add` sums up.
template <int BITS, class X>
struct Codes;

template <>
struct Codes<4, float> {
    static constexpr int STEP = 8, PARTS = 8;  // inputs that lie together
    Words words;
    explicit Codes(const uint8_t *at) : words(load<Words>(at)) {}
    Floats operator[](int j) const {
#if defined(__AVX512F__)  // a permutation looks at the low four bits alone
        const __m512 numbers = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
        return (Floats)_mm512_permutexvar_ps((__m512i)(words >> (4 * j)), numbers);
#else
        return __builtin_convertvector((Ints)((words >> (4 * j)) & 15u) - 8, Floats);
#endif
    }
    static Floats add(Floats code, float x, Floats sum) { return fma(code, all(x), sum); }
};

template <>
struct Codes<8, float> {
    static constexpr int STEP = 4, PARTS = 4;
    const uint8_t *bytes;
    explicit Codes(const uint8_t *at) : bytes(at) {}
    Floats operator[](int j) const { return bytes_of(bytes + LANES * j); }
    static Floats add(Floats code, float x, Floats sum) { return fma(code, all(x), sum); }
};

// Two inputs of a row in bfloat16, of eight the j-th and the one four behind it. Codes are exact in bfloat16, too, and
// their products in float32: an instruction makes and adds two of them.
using Pair = uint32_t;

#if defined(__AVX512BF16__)
using Input = Pair;  // how rows in bfloat16 are multiplied

inline Floats add_pairs(Words codes, Pair x, Floats sum) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)codes, (__m512bh)_mm512_set1_epi32(int(x)));
}

template <>
struct Codes<4, Pair> {
    static constexpr int STEP = 8, PARTS = 4;
    Words words;
    explicit Codes(const uint8_t *at) : words(load<Words>(at)) {}
    Words operator[](int j) const {  // this permutation looks at five bits: the numbers stand there twice
        alignas(64) static constexpr uint16_t NUMBERS[32] = {
            0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080,
            0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80,
            0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
        return (Words)_mm512_permutexvar_epi16((__m512i)(words >> (4 * j)), _mm512_load_si512(NUMBERS));
    }
    static Floats add(Words codes, Pair x, Floats sum) { return add_pairs(codes, x, sum); }
};

template <>
struct Codes<8, Pair> {
    static constexpr int STEP = 8, PARTS = 4;
    const uint8_t *bytes;
    explicit Codes(const uint8_t *at) : bytes(at) {}
    Words operator[](int j) const {
        return (Words)bytes_of(bytes + LANES * j) >> 16 | ((Words)bytes_of(bytes + LANES * (j + 4)) & 0xffff0000u);
    }
    static Floats add(Words codes, Pair x, Floats sum) { return add_pairs(codes, x, sum); }
};
#else
using Input = float;
#endif

}  // namespace

// As `_Matrix` in packed.py.
struct Matrix {
    const uint8_t *data;
    int64_t outputs, inputs, group;
    int32_t bits, offsets, halves;

    int64_t groups() const { return inputs / group; }
    int64_t scale_bytes() const { return LANES * (halves ? 2 : 4); }
    int64_t group_bytes() const { return (1 + offsets) * scale_bytes() + LANES * group * bits / 8; }
    int64_t panel_bytes() const { return groups() * group_bytes(); }
};

namespace {

template <class X>
struct Rows {
    const X *x;         // a block of `count` rows: [inputs or pairs of them, count]
    const float *sums;  // over the inputs of each group: [groups, count]
};

// What ROWS rows have of WIDTH outputs so far. Arrays are indexed by numbers that are known when this is compiled, and
// stay in registers.
template <int BITS, int ROWS, class X>
struct Sums {
    using Code = Codes<BITS, X>;
    Floats even[ROWS] = {}, odd[ROWS] = {}, total[ROWS] = {};

    void take(const uint8_t *codes, const X *x) {  // Code::STEP inputs
        const Code code(codes);
#pragma GCC unroll 8
        for (int j = 0; j < Code::PARTS; j += 2) {
            const auto first = code[j], second = code[j + 1];
            for (int r = 0; r < ROWS; ++r) even[r] = Code::add(first, x[j * ROWS + r], even[r]);
            for (int r = 0; r < ROWS; ++r) odd[r] = Code::add(second, x[(j + 1) * ROWS + r], odd[r]);
        }
    }

    void close(const Matrix &m, const uint8_t *scales, const float *sums) {  // a group
        const Floats scale = m.halves ? halves(scales) : load<Floats>(scales);
        for (int r = 0; r < ROWS; ++r) {
            total[r] = fma(scale, even[r] + odd[r], total[r]);
            even[r] = odd[r] = Floats{};
        }
        if (!m.offsets) return;
        const uint8_t *stored = scales + m.scale_bytes();
        const Floats offset = m.halves ? fma(all(8.0f), scale, halves(stored)) : load<Floats>(stored);
        for (int r = 0; r < ROWS; ++r) total[r] = fma(offset, all(sums[r]), total[r]);
    }
};

// ROWS rows by the WIDTH outputs of a panel from `first` on -> totals [ROWS]
template <int BITS, int ROWS, class X>
void tile(const Matrix &m, const uint8_t *panel, int first, const Rows<X> &rows, Floats *totals) {
    using Code = Codes<BITS, X>;
    Sums<BITS, ROWS, X> made;
    const X *x = rows.x;
    const float *sums = rows.sums;
    const int64_t head = (1 + m.offsets) * m.scale_bytes() + first * (BITS == 4 ? 4 : 1), bytes = m.group_bytes();
    const uint8_t *scales = panel + first * (m.halves ? 2 : 4), *codes = panel + head;
    const int64_t length = LANES * m.group * BITS / 8;
    for (int64_t g = 0; g < m.groups(); ++g, scales += bytes, codes += bytes, sums += ROWS) {
        for (int64_t i = 0; i < length; i += LANES * Code::STEP * BITS / 8, x += Code::PARTS * ROWS)
            made.take(codes + i, x);
        made.close(m, scales, sums);
    }
    std::memcpy(totals, made.total, sizeof(made.total));
}

template <int BITS, class X>
void tile_of(int count, const Matrix &m, const uint8_t *panel, int first, const Rows<X> &rows, Floats *totals) {
    switch (count) {
        case 1: return tile<BITS, 1>(m, panel, first, rows, totals);
        case 2: return tile<BITS, 2>(m, panel, first, rows, totals);
        case 3: return tile<BITS, 3>(m, panel, first, rows, totals);
        case 4: return tile<BITS, 4>(m, panel, first, rows, totals);
#if defined(__AVX512F__)
        case 5: return tile<BITS, 5>(m, panel, first, rows, totals);
        case 6: return tile<BITS, 6>(m, panel, first, rows, totals);
        case 7: return tile<BITS, 7>(m, panel, first, rows, totals);
        case 8: return tile<BITS, 8>(m, panel, first, rows, totals);
#endif
    }
}

// -------------------------------------------------------------------------------------------------------- in and out
inline float widen(uint16_t bits) {  // bfloat16
    const uint32_t word = uint32_t(bits) << 16;
    return load<float>(&word);
}
inline float widen(float x) { return x; }

inline void narrow(float x, float *to) { *to = x; }
inline void narrow(float x, uint16_t *to) {  // to the nearest, ties to even
    const uint32_t word = load<uint32_t>(&x);
    *to = x != x ? 0x7fc0 : uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

inline void place(const float *x, int64_t i, int count, float *to) { to[i * count] = x[i]; }
inline void place(const uint16_t *x, int64_t i, int count, float *to) { to[i * count] = widen(x[i]); }
inline void place(const uint16_t *x, int64_t i, int count, Pair *to) {
    if (i % 8 < 4) to[(i / 8 * 4 + i % 4) * count] = Pair(x[i]) | Pair(x[i + 4]) << 16;
}

// `count` rows of x, from `row` on, as the kernels read them.
template <class T, class X>
void arrange(const Matrix &m, const T *x, int64_t stride, int64_t row, int count, X *to, float *sums) {
    for (int r = 0; r < count; ++r) {
        const T *from = x + (row + r) * stride;
        for (int64_t g = 0; g < m.groups(); ++g) {
            float part[LANES] = {};
            for (int64_t i = g * m.group; i < (g + 1) * m.group; i += LANES)
                for (int l = 0; l < LANES; ++l) {
                    part[l] += widen(from[i + l]);
                    place(from, i + l, count, to + r);
                }
            for (int width = LANES / 2; width; width /= 2)
                for (int l = 0; l < width; ++l) part[l] += part[l + width];
            sums[g * count + r] = part[0];
        }
    }
}

template <class T>
struct Out {
    T *to;
    int64_t stride;
    const T *bias;
    bool add;

    void store(int64_t row, int64_t output, const Floats &total) const {
        T *at = to + row * stride + output;
        for (int l = 0; l < WIDTH; ++l) {
            float made = total[l];
            if (bias) made += widen(bias[output + l]);
            if (add) {
                T rounded;
                narrow(made, &rounded);
                made = widen(at[l]) + widen(rounded);
            }
            narrow(made, at + l);
        }
    }
};

// Up to AT_ONCE rows. X: in which form they are multiplied
template <class X, class In, class T>
void multiply(const Matrix &m, const In *x, int64_t stride, int64_t rows, const Out<T> &out, int threads) {
    static_assert(sizeof(X) == sizeof(float), "both stand in one room");
    static thread_local std::vector<float> room;
    const int64_t panels = m.outputs / LANES, blocks = (rows + MOST - 1) / MOST;
    const int64_t length = m.inputs + m.groups();
    if (int64_t(room.size()) < rows * length + LANES) room.resize(rows * length + LANES);
    float *const arranged = room.data();
    for_each(blocks, blocks >= 8 ? threads : 1, [&](int64_t b) {
        const int64_t row = b * MOST;
        const int count = int(rows - row < MOST ? rows - row : MOST);
        float *to = arranged + row * length;
        arrange(m, x, stride, row, count, reinterpret_cast<X *>(to), to + count * m.inputs);
    });
    const int64_t grain = panels / (8 * threads) + 1;  // panels that a thread takes at a time
    for_each((panels + grain - 1) / grain, threads, [&](int64_t task) {
        const int64_t end = (task + 1) * grain < panels ? (task + 1) * grain : panels;
        for (int64_t p = task * grain; p < end; ++p)
            for (int64_t row = 0; row < rows; row += MOST) {
                const int count = int(rows - row < MOST ? rows - row : MOST);
                const float *from = arranged + row * length;
                const Rows<X> block{reinterpret_cast<const X *>(from), from + count * m.inputs};
                for (int first = 0; first < LANES; first += WIDTH) {
                    Floats totals[MOST];
                    (m.bits == 4 ? tile_of<4, X> : tile_of<8, X>)(count, m, m.data + p * m.panel_bytes(), first, block,
                                                                  totals);
                    for (int r = 0; r < count; ++r) out.store(row + r, p * LANES + first, totals[r]);
                }
            }
    });
}

}  // namespace

// x [rows, inputs] -> out [rows, outputs], `add`: onto what is there. Strides in elements; `half`: bit 0: x, bit 1: out
// and bias are bfloat16, else float32. bias: null for none.
EXPORT int multiply_rows(const Matrix *m, const void *x, int64_t x_stride, int64_t rows, void *out, int64_t out_stride,
                         const void *bias, int half, int add, int threads) {
    auto run = [&](auto form, auto *from, auto *to) {
        using T = std::remove_pointer_t<decltype(to)>;
        for (int64_t row = 0; row < rows; row += AT_ONCE) {
            const Out<T> into{to + row * out_stride, out_stride, static_cast<const T *>(bias), add != 0};
            const int64_t some = rows - row < AT_ONCE ? rows - row : AT_ONCE;
            multiply<decltype(form)>(*m, from + row * x_stride, x_stride, some, into, threads);
        }
    };
    auto from = [&](auto *to) {
        if (half & 1) run(Input{}, static_cast<const uint16_t *>(x), to);
        else run(0.0f, static_cast<const float *>(x), to);
    };
    return stretto::code_of([&] {
        if (half & 2) from(static_cast<uint16_t *>(out));
        else from(static_cast<float *>(out));
    });
}

// codes as `ops.packed.Packed` has them, scales and offsets [outputs, groups] in the matrix's type, offsets null for
// none -> m.data
EXPORT void arrange_codes(const Matrix *matrix, const uint8_t *codes, const uint8_t *scales, const uint8_t *offsets,
                          int threads) {
    const Matrix &m = *matrix;
    const int64_t size = m.halves ? 2 : 4, width = m.inputs * m.bits / 8;
    for_each(m.outputs / LANES, threads, [&](int64_t p) {
        uint8_t *to = const_cast<uint8_t *>(m.data) + p * m.panel_bytes();
        for (int64_t g = 0; g < m.groups(); ++g) {
            for (int part = 0; part < 1 + m.offsets; ++part)
                for (int o = 0; o < LANES; ++o, to += size)
                    std::memcpy(to, (part ? offsets : scales) + ((p * LANES + o) * m.groups() + g) * size, size);
            for (int64_t i = g * m.group; i < (g + 1) * m.group; i += m.bits == 4 ? 8 : 1)
                for (int o = 0; o < LANES; ++o) {
                    const uint8_t *row = codes + (p * LANES + o) * width;
                    if (m.bits == 8) {
                        *to++ = row[i];
                        continue;
                    }
                    uint32_t word = 0;  // of a block of 64, column j is in byte j % 32, low bits first
                    for (int j = 0; j < 8; ++j) {
                        const int64_t column = (i + j) % 64, byte = (i + j) / 64 * 32 + column % 32;
                        word |= uint32_t(row[byte] >> (column < 32 ? 0 : 4) & 15) << (4 * j);
                    }
                    std::memcpy(to, &word, 4);
                    to += 4;
                }
        }
    });
}
