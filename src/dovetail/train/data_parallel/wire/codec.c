/* SPDX-License-Identifier: Apache-2.0 */
/* The arithmetic of codec.py in one pass over memory, for fp32 numbers on a CPU.
 *
 * Bit for bit what the operators there compute: a product and the sum behind it are rounded apart (compiled with
 * -ffp-contract=off), and numbers are rounded to the nearest, halves to even.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { BLOCK = 128 };
static const float STEPS = 127.0f, SMALLEST_SCALE = 0x1p-126f;

static inline float as_float(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
static inline uint32_t as_bits(float f) { uint32_t bits; memcpy(&bits, &f, 4); return bits; }

/* Largest magnitude of a block; not finite if one of its numbers is not, since such bits are larger than others. */
static inline float largest(const float *restrict x, int64_t n) {
    uint32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = as_bits(x[i]) & 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    return as_float(most);
}

/* One block. Inlined, so that the loops of whole blocks have a length that the compiler knows. */
static inline __attribute__((always_inline)) void encode_block(
    const float *restrict values, float *restrict error, float *restrict scales, int8_t *restrict steps, int64_t n) {
    const float *x = values;
    if (error) {
        for (int64_t i = 0; i < n; i++) error[i] += values[i];
        x = error;
    }
    float scale = largest(x, n) / STEPS;
    scale = scale < SMALLEST_SCALE ? SMALLEST_SCALE : scale;
    *scales = scale;
    if (!isfinite(scale)) { /* every number of the block arrives as one that is not finite */
        memset(steps, 1, n);
        if (error) memset(error, 0, 4 * n);
        return;
    }
    float inverse = 1.0f / scale;
    for (int64_t i = 0; i < n; i++) {
        float rounded = rintf(x[i] * inverse);
        steps[i] = (int8_t)(int32_t)rounded;
        if (error) error[i] = x[i] - rounded * scale;
    }
}

/* scales: one for each block, the last of which may be shorter. With `error` it encodes values + error, and leaves in
 * `error` what was lost. */
void int8_encode(const float *values, float *error, float *scales, int8_t *steps, int64_t n) {
    int64_t at = 0, b = 0;
    for (; at + BLOCK <= n; at += BLOCK, b++)
        encode_block(values + at, error ? error + at : 0, scales + b, steps + at, BLOCK);
    if (at < n) encode_block(values + at, error ? error + at : 0, scales + b, steps + at, n - at);
}

void int8_decode(const float *scales, const int8_t *steps, float *out, int64_t n) {
    for (int64_t at = 0, b = 0; at < n; at += BLOCK, b++) {
        int64_t width = n - at < BLOCK ? n - at : BLOCK;
        for (int64_t i = 0; i < width; i++) out[at + i] = (float)steps[at + i] * scales[b];
    }
}

void int8_decode_add(const float *scales, const int8_t *steps, float *out, int64_t n) {
    for (int64_t at = 0, b = 0; at < n; at += BLOCK, b++) {
        int64_t width = n - at < BLOCK ? n - at : BLOCK;
        for (int64_t i = 0; i < width; i++) {
            float decoded = (float)steps[at + i] * scales[b];
            out[at + i] += decoded;
        }
    }
}

static inline uint16_t to_bf16(float x) {
    uint32_t bits = as_bits(x);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (uint16_t)rounded; /* not a number stays that */
}

static inline float from_bf16(uint16_t x) { return as_float((uint32_t)x << 16); }

/* With error feedback only: without it this is a plain copy. */
void bf16_encode(const float *values, float *error, uint16_t *sent, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        float exact = error[i] + values[i];
        uint16_t s = to_bf16(exact);
        float lost = exact - from_bf16(s);
        sent[i] = s;
        error[i] = (as_bits(lost) & 0x7f800000u) == 0x7f800000u ? 0.0f : lost;
    }
}

void bf16_decode_add(const uint16_t *sent, float *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] += from_bf16(sent[i]);
}
