/* A decoding step on a CPU: products of few rows, and attention over a shared prompt and a row's own tokens.

_matmul.py compiles it for this processor at first use. All numbers are float32; k and dim are multiples of LANES.
Every sum has its own fixed order: a row's result depends neither on the rows beside it nor on the threads.
It is fast by two things. A tile of R rows and 4 outputs keeps its R * 4 sums in registers, so that a number that was
read is used R or 4 times. And what is read next is asked of memory while this is multiplied. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16 /* numbers of a register */
#define ROWS 6   /* of a tile at most: there are 32 registers */
#define EVERY(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#else
#define ROWS 3
#define EVERY(CASE) CASE(1) CASE(2) CASE(3)
#ifdef __AVX2__
#define LANES 8
#else
#define LANES 4
#endif
#endif
#define NUMBERS 16384 /* of weights, some 64 KB, that stay in the cache while all rows pass */
#define EACH(i, n) _Pragma("GCC unroll 8") for (int i = 0; i < n; i++)
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int ints __attribute__((vector_size(4 * LANES)));
typedef float vec4 __attribute__((vector_size(16)));

const int lanes = LANES;

INLINE vec load(const float *from) {
    vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE float total(vec v) {
    union { vec whole; vec4 part[LANES / 4]; } u = {v};
    vec4 sum = u.part[0];
    EACH(i, LANES / 4 - 1) sum += u.part[i + 1];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* ---- products ---- */

/* y (R, O) = x (R, k) times w (O, k). *_row: from one row to the next; ahead: from w to what is read later, or 0. */
INLINE void tile(const int R, const int O, float *y, long y_row, const float *x, long x_row, const float *w, long k,
                 long ahead) {
    vec sum[ROWS][4], b[ROWS];
    EACH(r, R) EACH(o, O) sum[r][o] = (vec){0};
    for (long i = 0; i < k; i += LANES) {
        EACH(r, R) b[r] = load(x + r * x_row + i);
        EACH(o, O) {
            vec a = load(w + o * k + i);
            if (ahead) __builtin_prefetch(w + o * k + i + ahead, 0, 2);
#ifdef __x86_64__
            EACH(r, R) __asm__("" : "+v"(b[r])); /* stays in its register, is not read again for each o */
#endif
            EACH(r, R) sum[r][o] += a * b[r];
        }
    }
    EACH(r, R) EACH(o, O) y[r * y_row + o] = total(sum[r][o]);
}

/* y (rows, n) = x (rows, k) times w (n, k), of at most ROWS rows. This is one of so many passes over w; each asks
   memory for its share of what lies `ahead` of w and is read next. */
static void strip(float *y, long y_row, const float *x, long x_row, const float *w, long rows, long n, long k,
                  long ahead, long pass, long passes) {
    long o = 0;
#define TILES(R)                                                                        \
    case R:                                                                             \
        for (; o + 4 <= n; o += 4) {                                                    \
            long share = o / 4 % passes == pass ? ahead : 0;                            \
            tile(R, 4, y + o, y_row, x, x_row, w + o * k, k, share);                    \
        }                                                                               \
        break;
    switch (rows) { EVERY(TILES) }
    for (; o < n; o++)
        for (long r = 0; r < rows; r++) tile(1, 1, y + r * y_row + o, 0, x + r * x_row, 0, w + o * k, k, 0);
}

/* y (rows, n) = x (rows, k) times w (n, k) */
void product(float *y, const float *x, const float *w, long rows, long n, long k, long threads) {
    long passes = (rows + ROWS - 1) / ROWS, blocks = (n * k / NUMBERS / threads + 1) * threads;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long b = 0; b < blocks; b++) {
        long o = n / 4 * b / blocks * 4, end = b + 1 < blocks ? n / 4 * (b + 1) / blocks * 4 : n;
        for (long pass = 0; pass < passes; pass++) {
            long first = rows * pass / passes, last = rows * (pass + 1) / passes;
            const float *some = x + first * k, *block = w + o * k;
            strip(y + first * n + o, n, some, k, block, last - first, end - o, k, (end - o) * k, pass, passes);
        }
    }
}

/* ---- attention ---- */

/* e^x for x <= 0, to about 1e-7 of it; 0 below -87. After Cephes: x = n ln 2 + r, and a polynomial of r. */
INLINE vec exponential(vec x) {
    const float whole = 12582912; /* 1.5 * 2^23: a number added to it is rounded */
    vec n = x * 1.44269504f + whole;
    vec power = (vec)(((ints)n + 127) << 23); /* 2^n */
    n -= whole;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return (vec)((ints)(p * power) & ~(x <= -87.0f)); /* a NaN stays one */
}

/* scores (n), n a multiple of LANES, become e^(scale * (score - largest)); returns their sum */
static float weigh(float *scores, long n, float scale) {
    vec most = load(scores), sum = {0};
    for (long i = LANES; i < n; i += LANES) {
        vec s = load(scores + i);
        ints is_larger = s > most;
        most = (vec)(((ints)s & is_larger) | ((ints)most & ~is_larger));
    }
    float largest = most[0];
    EACH(i, LANES) largest = most[i] > largest ? most[i] : largest;
    for (long i = 0; i < n; i += LANES) {
        vec weight = exponential(scale * (load(scores + i) - largest));
        memcpy(scores + i, &weight, sizeof weight);
        sum += weight;
    }
    return total(sum);
}

/* out (R, dim) = (weights (R, n + m) times first (n, dim) and second (m, dim)) / totals (R) */
INLINE void mix(const int R, float *out, const float *weights, long weights_row, const float *totals,
                const float *first, long n, const float *second, long m, long dim) {
    for (long d = 0; d < dim; d += 2 * LANES) {
        const int is_two = d + LANES < dim; /* two registers side by side: sums do not wait for each other */
        vec sum[ROWS][2];
        EACH(r, R) sum[r][0] = sum[r][1] = (vec){0};
        for (long i = 0; i < n + m; i++) {
            const float *value = (i < n ? first + i * dim : second + (i - n) * dim) + d;
            vec left = load(value), right = load(value + is_two * LANES);
            EACH(r, R) {
                sum[r][0] += weights[r * weights_row + i] * left;
                sum[r][1] += weights[r * weights_row + i] * right;
            }
        }
        EACH(r, R) for (int j = 0; j <= is_two; j++) {
            vec result = sum[r][j] / totals[r];
            memcpy(out + r * dim + d + j * LANES, &result, sizeof result);
        }
    }
}

/* Keys (..., heads, tokens, dim) of prompts or rows; from them to values, to the next one, and from head to head. */
typedef struct {
    const float *keys;
    long values, next, head;
} Kept;

/* query (rows, heads, groups, dim), with the strides of the first two; out: the same without gaps. A row attends to the
   first lengths[prompt[row]] tokens of its prompt, at least one, and to the first `width` of its own. */
void attend(float *out, const float *query, long query_row, long query_head, Kept prompts, Kept own, const long *prompt,
            const long *lengths, long rows, long heads, long groups, long dim, long width, long threads,
            float scale) {
    long longest = 0;
    for (long r = 0; r < rows; r++) longest = lengths[prompt[r]] > longest ? lengths[prompt[r]] : longest;
#pragma omp parallel num_threads(threads)
    {
        float *scores = malloc(sizeof(float) * ROWS * (longest + width + LANES)), totals[ROWS];
#pragma omp for collapse(2) schedule(static)
        for (long h = 0; h < heads; h++)
            for (long r = 0; r < rows; r++) {
                long length = lengths[prompt[r]], all = (length + width + LANES - 1) / LANES * LANES;
                const float *shared = prompts.keys + prompt[r] * prompts.next + h * prompts.head;
                const float *written = own.keys + r * own.next + h * own.head;
                for (long g = 0; g < groups; g += ROWS) {
                    long count = groups - g < ROWS ? groups - g : ROWS;
                    const float *q = query + r * query_row + h * query_head + g * dim;
                    float *y = out + ((r * heads + h) * groups + g) * dim;
                    strip(scores, all, q, dim, shared, count, length, dim, prompts.values, 0, 1);
                    strip(scores + length, all, q, dim, written, count, width, dim, own.values, 0, 1);
                    for (long i = 0; i < count; i++) {
                        for (long j = length + width; j < all; j++) scores[i * all + j] = -INFINITY;
                        totals[i] = weigh(scores + i * all, all, scale);
                    }
#define MIX(R)                                                                                                  \
    case R:                                                                                                     \
        mix(R, y, scores, all, totals, shared + prompts.values, length, written + own.values, width, dim);      \
        break;
                    switch (count) { EVERY(MIX) }
                }
            }
        free(scores);
    }
}
