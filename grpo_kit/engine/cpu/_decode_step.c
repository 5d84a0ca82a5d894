/* A decoding step on a CPU: a token of each of few rows through all layers of a Llama or Qwen, up to its logits.

_matmul.py compiles it for this processor at first use. Numbers are float32; a weight may be bfloat16, which halves
what is read. k and dim are multiples of LANES, k of 2 * LANES under a bfloat16 weight.
Every sum has its own fixed order: a row's result depends neither on the rows beside it nor on the threads.
It is fast by three things. A tile of R rows and 4 outputs keeps its R * 4 sums in registers, so that a number that was
read is used R or 4 times. What is read next is asked of memory while this is multiplied. And nothing but C runs
between the layers.
Longer than 300 lines because one file is compiled in one go, into one library. */

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
const int has_bfloat16 = 1;
#else
const int has_bfloat16 = 0;
#endif

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
#define BYTES 65536 /* of weights, that stay in the cache while all rows pass */
#define EACH(i, n) _Pragma("GCC unroll 8") for (int i = 0; i < n; i++)
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int ints __attribute__((vector_size(4 * LANES)));
typedef float vec4 __attribute__((vector_size(16)));

const int lanes = LANES;

INLINE vec load(const void *from) {
    vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE vec where(ints is, vec a, vec b) { return (vec)(((ints)a & is) | ((ints)b & ~is)); }

/* Sums of neighbours: two of a, two of b */
INLINE vec4 fold(vec4 a, vec4 b) { return (vec4){a[0], a[2], b[0], b[2]} + (vec4){a[1], a[3], b[1], b[3]}; }

/* The totals of four vectors. Lanes are added in one order, whichever of the four a vector is. */
INLINE vec4 four_totals(const vec *v) {
    vec4 part[4][LANES / 4];
    memcpy(part, v, sizeof part);
    EACH(i, LANES / 4 - 1) EACH(j, 4) part[j][0] += part[j][i + 1];
    return fold(fold(part[0][0], part[1][0]), fold(part[2][0], part[3][0]));
}

INLINE float total(vec v) { return four_totals((vec[4]){v})[0]; }

/* ---- products ---- */

/* Numbers of x as they are multiplied: LANES float32 ones, or twice as many rounded to bfloat16 */
INLINE vec factor(const float *x, const int bits) {
#ifdef __AVX512BF16__
    if (bits == 16) return (vec)_mm512_cvtne2ps_pbh((__m512)load(x + LANES), (__m512)load(x));
#endif
    return load(x);
}

INLINE vec add_product(vec sum, vec a, vec b, const int bits) {
#ifdef __AVX512BF16__
    if (bits == 16) return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
    return sum + a * b;
}

/* y (R, O) = x (R, k) times w (O, k), of so many bits. y_row: from one row to the next; ahead: bytes from w to what is
   read later; asked: for how many of the O outputs memory is asked for it; is_added: to what is in y. */
INLINE void tile(const int R, const int O, const int bits, float *y, long y_row, const float *x, const char *w, long k,
                 long ahead, int asked, int is_added) {
    const long bytes = bits / 8 * k;
    vec sum[ROWS][4] = {0}, b[ROWS];
#pragma GCC unroll 2 /* four rows in line take a seventh less time by it */
    for (long i = 0; i < bytes; i += sizeof(vec)) {
        EACH(r, R) b[r] = factor(x + r * k + i * 8 / bits, bits);
        EACH(o, O) {
            vec a = load(w + o * bytes + i);
            if (o < asked) __builtin_prefetch(w + o * bytes + i + ahead, 0, 2);
#ifdef __x86_64__
            EACH(r, R) __asm__("" : "+v"(b[r])); /* stays in its register, is not read again for each o */
#endif
            EACH(r, R) sum[r][o] = add_product(sum[r][o], a, b[r], bits);
        }
    }
    EACH(r, R) {
        vec4 result = {0};
        if (is_added) memcpy(&result, y + r * y_row, 4 * O);
        result += four_totals(sum[r]);
        memcpy(y + r * y_row, &result, 4 * O);
    }
}

/* y (rows, n) = x (rows, k) times w (n, k), of at most ROWS rows. This is one of so many passes over w. Each asks memory
   for some of what lies `ahead` of w and is read next: in every tile of four outputs for `share` of them, 4 / passes
   rounded up, so that no tile waits for all four while memory idles in the others. With 3 passes, or more than 4, some
   is asked for twice, which costs nothing.
   Few rows have little to multiply, and wait for memory. Where they and an output's weights fit into the nearest cache,
   of 32 kB, outputs are taken one by one: a core that reads memory in line reads ahead by itself, and gets half as much
   again. It is also asked for what lies 1 kB ahead, or 12 kB where there is more to multiply: whichever was faster. */
static void strip(float *y, long y_row, const float *x, const void *w, long rows, long n, long k, long bits,
                  long ahead, long pass, long passes, int is_added) {
    const long bytes = bits / 8 * k, share = (passes + 3) / passes;
    /* work: of about all rows; a row counts twice where weights of 16 bits leave half as much to wait for */
    const long work = passes * rows * 32 / bits, numbers = rows * k + k;
    const int is_in_line = work < ROWS && k >= 256 && numbers <= 8192;
    long o = 0;
#define TILE(R, O, BITS)                                                                                               \
    tile(R, O, BITS, y + o, y_row, x, w + o * bytes, k, ahead, share, is_added)
#define TILES(R, O)                                                                                                    \
    for (; o + O <= n; o += O)                                                                                         \
        if (bits == 16) TILE(R, O, 16);                                                                                \
        else TILE(R, O, 32);
#define STRIP(R)                                                                                                       \
    case R:                                                                                                            \
        if (!is_in_line) {                                                                                             \
            TILES(R, 4)                                                                                                \
        }                                                                                                              \
        TILES(R, 1) break;
    ahead = !is_in_line ? ahead + share * pass * bytes : work <= 2 && numbers <= 5120 ? 1024 : 12288;
    switch (rows) { EVERY(STRIP) }
}

/* y (rows, n) = x (rows, k) times w (n, k) of so many bits, or that is added to it; by all threads of the region */
static void spread(float *y, const float *x, const char *w, long rows, long n, long k, long bits, int is_added) {
    const long bytes = bits / 8 * k, threads = omp_get_num_threads();
    const long passes = (rows + ROWS - 1) / ROWS, blocks = (n * bytes / BYTES / threads + 1) * threads;
#pragma omp for schedule(static)
    for (long b = 0; b < blocks; b++) {
        const long o = n / 4 * b / blocks * 4, end = b + 1 < blocks ? n / 4 * (b + 1) / blocks * 4 : n;
        for (long pass = 0; pass < passes; pass++) {
            const long first = rows * pass / passes, count = rows * (pass + 1) / passes - first;
            strip(y + first * n + o, n, x + first * k, w + o * bytes, count, end - o, k, bits, (end - o) * bytes,
                  pass, passes, is_added);
        }
    }
}

/* y (rows, n) = x (rows, k) times w (n, k) */
void product(float *y, const float *x, const void *w, long rows, long n, long k, long threads) {
#pragma omp parallel num_threads(threads)
    spread(y, x, w, rows, n, k, 32, 0);
}

/* A linear layer: x (rows, k) -> x W^T + b + (x down^T) up^T. down (rank, k) and up (n, rank) are of LoRA. */
typedef struct {
    const void *weight;
    const float *bias; /* or NULL */
    const void *down, *up;
    long n, k, rank, bits;
} Linear;

/* y (rows, n) = the layer of x (rows, k), or that is added to it. low: room for (rows, rank). */
static void linear(float *y, const float *x, const Linear *by, long rows, int is_added, float *low) {
    spread(y, x, by->weight, rows, by->n, by->k, by->bits, is_added);
    if (by->bias) {
#pragma omp for collapse(2)
        for (long r = 0; r < rows; r++)
            for (long o = 0; o < by->n; o++) y[r * by->n + o] += by->bias[o];
    }
    if (by->rank) {
        spread(low, x, by->down, rows, by->rank, by->k, 32, 0);
        spread(y, low, by->up, rows, by->n, by->rank, 32, 1);
    }
}

/* ---- attention ---- */

/* e^x for x <= 87, to about 1e-7 of it; 0 below -87. After Cephes: x = n ln 2 + r, and a polynomial of r. */
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
        most = where(s > most, s, most);
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
        vec sum[ROWS][2] = {0};
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

/* Keys (layers, n, heads, tokens, dim) of n prompts or rows; from them to values, to the next layer, n, head */
typedef struct {
    float *keys;
    long values, layer, next, head;
} Kept;

/* Which rows there are, and what they attend to */
typedef struct {
    Kept prompts, own;
    const long *prompt, *lengths; /* of each row; of each prompt, at least 1 */
    long rows, heads, groups, dim, written, threads; /* heads: of keys, groups: of queries to each */
} Rows;

static float *keys_of(const Kept *kept, long layer, long n, long head) {
    return kept->keys + layer * kept->layer + n * kept->next + head * kept->head;
}

/* out (rows, heads, groups, dim), as query is: a row attends to its prompt, to the tokens written and to this one */
static void attend(float *out, const float *query, const Rows *of, long layer, float scale) {
    const long heads = of->heads, groups = of->groups, dim = of->dim, width = of->written + 1;
    /* head / dim: tokens that a prompt has room for */
    float *scores = malloc(sizeof(float) * ROWS * (of->prompts.head / dim + width + LANES)), totals[ROWS];
#pragma omp for collapse(2) schedule(static)
    for (long h = 0; h < heads; h++)
        for (long r = 0; r < of->rows; r++) {
            long length = of->lengths[of->prompt[r]], all = (length + width + LANES - 1) / LANES * LANES;
            const float *shared = keys_of(&of->prompts, layer, of->prompt[r], h), *own = keys_of(&of->own, layer, r, h);
            for (long g = 0; g < groups; g += ROWS) {
                const long count = groups - g < ROWS ? groups - g : ROWS, first = ((r * heads + h) * groups + g) * dim;
                strip(scores, all, query + first, shared, count, length, dim, 32, 4 * of->prompts.values, 0, 1, 0);
                strip(scores + length, all, query + first, own, count, width, dim, 32, 4 * of->own.values, 0, 1, 0);
                for (long i = 0; i < count; i++) {
                    for (long j = length + width; j < all; j++) scores[i * all + j] = -INFINITY;
                    totals[i] = weigh(scores + i * all, all, scale);
                }
#define MIX(R)                                                                                                         \
    case R:                                                                                                            \
        mix(R, out + first, scores, all, totals, shared + of->prompts.values, length, own + of->own.values, width,     \
            dim);                                                                                                      \
        break;
                switch (count) { EVERY(MIX) }
            }
        }
    free(scores);
}

/* ---- layers ---- */

typedef struct {
    const float *weight; /* or NULL */
    double eps;
} Norm;

typedef struct {
    Norm before_attention;
    Linear query, key, value, output;
    Norm before_mlp;
    Linear gate, up, down;
    double scale;
    Norm query_norm, key_norm;
} Layer;

typedef struct {
    long layers, width, inner, rank; /* inner, rank: the largest of a layer */
    Norm last;
    Linear head;
} Decoder;

/* x times the sigmoid of x */
INLINE vec silu(vec x) { return x / (exponential(where(x > -87.0f, -x, (vec){0} + 87.0f)) + 1.0f); }

/* y (n) = RMSNorm of x (n) */
static void norm(float *y, const float *x, Norm by, long n) {
    vec squares = {0};
    for (long i = 0; i < n; i += LANES) squares += load(x + i) * load(x + i);
    const float factor = 1 / sqrtf(total(squares) / n + by.eps);
    for (long i = 0; i < n; i++) y[i] = x[i] * factor * by.weight[i];
}

/* y (rows, n) = RMSNorm of each row of x (rows, n), by all threads of the region */
static void norms(float *y, const float *x, Norm by, long rows, long n) {
#pragma omp for
    for (long r = 0; r < rows; r++) norm(y + r * n, x + r * n, by, n);
}

/* A head (dim) of queries or keys: its norm where there is one, then rotated by its position */
static void place(float *head, Norm by, const float *cos, const float *sin, long dim) {
    const long half = dim / 2;
    if (by.weight) norm(head, head, by, dim);
    for (long i = 0; i < half; i++) {
        const float left = head[i], right = head[i + half];
        head[i] = left * cos[i] - right * sin[i];
        head[i + half] = right * cos[i + half] + left * sin[i + half];
    }
}

/* state (rows, width): embeddings of rows' tokens, of whose positions cos and sin (rows, dim) are. Writes their keys
   and values, and logits (rows, vocabulary) of the next token. */
void step(float *logits, float *state, const float *cos, const float *sin, const Rows *of, const Layer *layers,
          const Decoder *decoder) {
    const long width = decoder->width, inner = decoder->inner;
    const long rows = of->rows, heads = of->heads, groups = of->groups, dim = of->dim, all = heads * dim;
    float *x = malloc(sizeof(float) * rows * (width + 2 * inner + 2 * (groups + 1) * all + decoder->rank));
    float *gate = x + rows * width, *up = gate + rows * inner, *query = up + rows * inner;
    float *mixed = query + rows * groups * all, *key = mixed + rows * groups * all;
    float *value = key + rows * all, *low = value + rows * all;
#pragma omp parallel num_threads(of->threads)
    {
        for (long number = 0; number < decoder->layers; number++) {
            const Layer *layer = layers + number;
            norms(x, state, layer->before_attention, rows, width);
            linear(query, x, &layer->query, rows, 0, low);
            linear(key, x, &layer->key, rows, 0, low);
            linear(value, x, &layer->value, rows, 0, low);
#pragma omp for collapse(2)
            for (long r = 0; r < rows; r++)
                for (long h = 0; h < heads; h++) {
                    const float *row_cos = cos + r * dim, *row_sin = sin + r * dim;
                    float *from = key + r * all + h * dim, *to = keys_of(&of->own, number, r, h) + of->written * dim;
                    for (long g = 0; g < groups; g++)
                        place(query + ((r * heads + h) * groups + g) * dim, layer->query_norm, row_cos, row_sin, dim);
                    place(from, layer->key_norm, row_cos, row_sin, dim);
                    memcpy(to, from, sizeof(float) * dim);
                    memcpy(to + of->own.values, value + r * all + h * dim, sizeof(float) * dim);
                }
            attend(mixed, query, of, number, layer->scale);
            linear(state, mixed, &layer->output, rows, 1, low);
            norms(x, state, layer->before_mlp, rows, width);
            linear(gate, x, &layer->gate, rows, 0, low);
            linear(up, x, &layer->up, rows, 0, low);
#pragma omp for
            for (long i = 0; i < rows * layer->gate.n; i += LANES) {
                vec product = silu(load(gate + i)) * load(up + i);
                memcpy(gate + i, &product, sizeof product);
            }
            linear(state, gate, &layer->down, rows, 1, low);
        }
        norms(x, state, decoder->last, rows, width);
        linear(logits, x, &decoder->head, rows, 0, low);
    }
    free(x);
}
