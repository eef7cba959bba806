/* What the loop and its gradient compute for the vectors of a weight, on a CPU: `passes.c` and `groups.c` are made of
   this.

   REAL is float or double, given by the compiler's command line.  A weight is W (N,), whose vectors are d consecutive
   values each, the last one filled up with zeros; C is (k, d).  LANES vectors are clustered at a time, side by side:
   x (d, LANES), numerators (k, LANES).  Sums over vectors have a place for each of WIDTH lanes, until `reduce`.

   Everything depends on the differences x - c, which are computed as such: products would cancel. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef REAL V __attribute__((vector_size(64)));

enum { WIDTH = 64 / sizeof(REAL), PARTS = 4, LANES = PARTS * WIDTH };

/* The dimension of the vectors: a constant, if the command line has one. */
#ifdef DIM
enum { KNOWN_DIM = DIM };
#undef DIM
#define DIM(w) KNOWN_DIM
#else
#define DIM(w) ((w)->d)
#endif

#if SINGLE
typedef uint32_t BITS;
enum { TERMS = 8, EXPONENT = 127, MANTISSA = 23 };
static const REAL ROUND = 12582912.0f; /* 1.5 * 2^23: what is added to it is rounded to a whole number */
#else
typedef uint64_t BITS;
enum { TERMS = 14, EXPONENT = 1023, MANTISSA = 52 };
static const REAL ROUND = 6755399441055744.0;
#endif

/* log(2)^i / i!: the series of 2^r.  For |r| <= 1/2 what follows after TERMS is less than a rounding error. */
static const REAL SERIES[14] = {1.0, 6.931471805599453094e-01, 2.402265069591007123e-01, 5.550410866482157996e-02,
    9.618129107628477162e-03, 1.333355814642844342e-03, 1.540353039338160995e-04, 1.525273380405984028e-05,
    1.321548679014430949e-06, 1.017808600923969973e-07, 7.054911620801123330e-09, 4.445538271870811498e-10,
    2.567843599348820514e-11, 1.369148885390412888e-12};

/* A weight or a group, and its temperature: `Weight` in compiling.py has the same fields. */
typedef struct {
    const REAL *W;
    int64_t N, d, k, chunk; /* chunk: vectors per chunk */
    REAL scale, cutoff, slope; /* 1 / (tau log 2); the log2 below which attention counts as zero; 2 / tau */
    const uint8_t *counts; /* (n,): 0 for vectors that do not count; NULL: all of them do */
} Weight;

/* The memory of one call. */
typedef struct {
    REAL *x, *g, *average, *out, *numerators, *sums; /* (d, LANES) four times, (k, LANES), (k, 2 d, WIDTH) */
    REAL share[LANES] __attribute__((aligned(64))); /* 1 / the denominator; 0 for what does not count */
    REAL least[LANES] __attribute__((aligned(64))); /* the smallest distance */
} Place;

static int allocate(Place *at, const Weight *w)
{
    size_t columns = (size_t)w->d * LANES, rows = (size_t)w->k * LANES, sums = (size_t)w->k * 2 * w->d * WIDTH;
    at->x = aligned_alloc(64, (4 * columns + rows + sums) * sizeof(REAL));
    if (at->x == NULL)
        return 1;
    at->g = at->x + columns;
    at->average = at->g + columns;
    at->out = at->average + columns;
    at->numerators = at->out + columns;
    at->sums = at->numerators + rows;
    return 0;
}

/* Vectors first .. first + LANES of a flat (N,), as columns; zeros beyond its end. */
static void load(const REAL *flat, int64_t N, int64_t d, int64_t first, REAL *columns)
{
    const REAL *from = flat + first * d;
    int64_t left = N - first * d;
    if (left >= LANES * d) {
        for (int64_t j = 0; j < d; j++)
            for (int l = 0; l < LANES; l++)
                columns[j * LANES + l] = from[l * d + j];
        return;
    }
    for (int64_t j = 0; j < d; j++)
        for (int l = 0; l < LANES; l++)
            columns[j * LANES + l] = l * d + j < left ? from[l * d + j] : 0;
}

/* The opposite: columns into a flat (N,), or added to it. */
static void store(const REAL *columns, int64_t N, int64_t d, int64_t first, REAL *flat, int add)
{
    REAL *to = flat + first * d;
    int64_t left = N - first * d;
    if (left >= LANES * d) {
        for (int64_t j = 0; j < d; j++)
            for (int l = 0; l < LANES; l++)
                to[l * d + j] = add ? to[l * d + j] + columns[j * LANES + l] : columns[j * LANES + l];
        return;
    }
    for (int64_t j = 0; j < d; j++)
        for (int l = 0; l < LANES && l * d + j < left; l++)
            to[l * d + j] = add ? to[l * d + j] + columns[j * LANES + l] : columns[j * LANES + l];
}

/* |x - c|^2 of the lanes. */
static inline void distances(const Place *at, const REAL *c, int64_t d, REAL *row)
{
    for (int part = 0; part < PARTS; part++) {
        V sum = {0};
        for (int64_t j = 0; j < d; j++) {
            V difference = ((const V *)(at->x + j * LANES))[part] - c[j];
            sum += difference * difference;
        }
        ((V *)row)[part] = sum;
    }
}

/* The numerators of the softmax of -|x - c|^2 / tau, relative to the largest, and the share of each lane.
   Vector `first` is the first of `count`. */
static void attend(const Weight *w, const REAL *C, int64_t first, int64_t count, Place *at)
{
    const int64_t d = DIM(w), k = w->k;
    REAL total[LANES];
    for (int l = 0; l < LANES; l++) {
        at->least[l] = INFINITY;
        total[l] = 0;
    }
    for (int64_t i = 0; i < k; i++) {
        REAL *row = at->numerators + i * LANES;
        distances(at, C + i * d, d, row);
        for (int l = 0; l < LANES; l++)
            at->least[l] = row[l] < at->least[l] ? row[l] : at->least[l];
    }
    for (int64_t i = 0; i < k; i++) {
        REAL *row = at->numerators + i * LANES;
        for (int l = 0; l < LANES; l++) {
            REAL t = (at->least[l] - row[l]) * w->scale, whole = t + ROUND, rest = t - (whole - ROUND);
            REAL power = SERIES[TERMS - 1];
            for (int term = TERMS - 2; term >= 0; term--)
                power = power * rest + SERIES[term];
            BITS bits;
            REAL two; /* to the whole part of t: ROUND has no bits where its lowest ones, t's, are moved */
            memcpy(&bits, &whole, sizeof bits);
            bits = (bits + EXPONENT) << MANTISSA;
            memcpy(&two, &bits, sizeof two);
            row[l] = t < w->cutoff ? 0 : power * two;
            total[l] += row[l];
        }
    }
    for (int l = 0; l < LANES; l++)
        at->share[l] = l < count && (w->counts == NULL || w->counts[first + l]) ? 1 / total[l] : 0;
}

/* A of the lanes to centroid i. */
static inline void attention(const Place *at, int64_t i, V *A)
{
    for (int part = 0; part < PARTS; part++)
        A[part] = ((V *)(at->numerators + i * LANES))[part] * ((V *)at->share)[part];
}

/* Adds A c to out (d, LANES). */
static inline void average(const V *A, const REAL *c, int64_t d, REAL *out)
{
    for (int64_t j = 0; j < d; j++)
        for (int part = 0; part < PARTS; part++)
            ((V *)(out + j * LANES))[part] += A[part] * c[j];
}

/* (count, WIDTH) -> (count,), in double, because a caller adds up many chunks. */
static void reduce(const REAL *sums, int64_t count, double *out)
{
    for (int64_t at = 0; at < count; at++) {
        double total = 0;
        for (int l = 0; l < WIDTH; l++)
            total += sums[at * WIDTH + l];
        out[at] = total;
    }
}

#define FOR_BLOCKS(begin, end, at)                                                                                     \
    for (int64_t at = (begin), count; at < (end) && (count = (end) - at < LANES ? (end) - at : LANES); at += LANES)

static int64_t vectors(const Weight *w) { return (w->N + w->d - 1) / w->d; }

/* Vectors begin .. end: at->sums (k, d + 1, WIDTH), A^T (w - c) and the mass A^T 1; and W_tilde = A C, unless NULL. */
static void sums_of(const Weight *w, const REAL *C, int64_t begin, int64_t end, Place *at, REAL *W_tilde)
{
    const int64_t d = DIM(w), k = w->k;
    memset(at->sums, 0, k * (d + 1) * WIDTH * sizeof(REAL));
    FOR_BLOCKS(begin, end, first) {
        load(w->W, w->N, d, first, at->x);
        attend(w, C, first, count, at);
        memset(at->out, 0, d * LANES * sizeof(REAL));
        for (int64_t i = 0; i < k; i++) {
            V A[PARTS], *total = (V *)(at->sums + i * (d + 1) * WIDTH);
            attention(at, i, A);
            for (int64_t j = 0; j < d; j++) {
                const V *x = (V *)(at->x + j * LANES);
                V sum = total[j];
                for (int part = 0; part < PARTS; part++)
                    sum += A[part] * (x[part] - C[i * d + j]);
                total[j] = sum;
            }
            for (int part = 0; part < PARTS; part++)
                total[d] += A[part];
            if (W_tilde)
                average(A, C + i * d, d, at->out);
        }
        if (W_tilde)
            store(at->out, w->N, d, first, W_tilde, 0);
    }
}

/* What the gradient of the logits of a lane's vector brings: dw (d, LANES) and, unless it is NULL, dc (d, WIDTH), which
   are those of |x - c|^2 / -tau without its slope.  The sum of `lost` is the gradient of tau, times tau^2. */
static inline void through_distance(const V *dlogits, const Place *at, const REAL *c, int64_t d, V *dc, V *lost)
{
    V distance[PARTS];
    for (int part = 0; part < PARTS; part++)
        distance[part] = -((V *)at->least)[part];
    for (int64_t j = 0; j < d; j++) {
        V sum = {0};
        for (int part = 0; part < PARTS; part++) {
            V difference = ((V *)(at->x + j * LANES))[part] - c[j], product = dlogits[part] * difference;
            ((V *)(at->out + j * LANES))[part] -= product;
            sum += product;
            distance[part] += difference * difference;
        }
        if (dc)
            dc[j] += sum;
    }
    if (lost)
        for (int part = 0; part < PARTS; part++)
            *lost += dlogits[part] * distance[part];
}

/* Through W_tilde = A C, from its gradient G (N,), for vectors begin .. end: adds to dW (N,) and, where they are wanted,
   gives at->sums (k, 2, d, WIDTH), the gradients of C through the distance, without its slope, and of the average. */
static void through_output(const Weight *w, const REAL *C, int64_t begin, int64_t end, Place *at, const REAL *G,
                           REAL *dW, int wanted, V *lost)
{
    const int64_t d = DIM(w), k = w->k;
    memset(at->sums, 0, k * 2 * d * WIDTH * sizeof(REAL));
    FOR_BLOCKS(begin, end, first) {
        load(w->W, w->N, d, first, at->x);
        load(G, w->N, d, first, at->g);
        attend(w, C, first, count, at);
        memset(at->average, 0, d * LANES * sizeof(REAL));
        memset(at->out, 0, d * LANES * sizeof(REAL));
        for (int64_t i = 0; i < k; i++) {
            V A[PARTS];
            attention(at, i, A);
            average(A, C + i * d, d, at->average);
        }
        for (int64_t i = 0; i < k; i++) {
            const REAL *c = C + i * d;
            V A[PARTS], dlogits[PARTS] = {{0}}, *dc = wanted ? (V *)(at->sums + i * 2 * d * WIDTH) : NULL;
            attention(at, i, A);
            for (int64_t j = 0; j < d; j++) { /* dA less its mean is G . (c - W_tilde) */
                const V *g = (V *)(at->g + j * LANES), *mean = (V *)(at->average + j * LANES);
                V sum = {0};
                for (int part = 0; part < PARTS; part++) {
                    dlogits[part] += g[part] * (c[j] - mean[part]);
                    sum += A[part] * g[part];
                }
                if (dc)
                    dc[d + j] += sum;
            }
            for (int part = 0; part < PARTS; part++)
                dlogits[part] *= A[part];
            through_distance(dlogits, at, c, d, dc, lost);
        }
        for (int64_t value = 0; value < d * LANES; value++)
            at->out[value] *= w->slope;
        store(at->out, w->N, d, first, dW, 1);
    }
}

/* dA = h . (x - p) of the lanes: moving a vector moves the mean that it is a part of. */
static inline void pull(const Place *at, const REAL *h, const REAL *p, int64_t d, V *dA)
{
    for (int part = 0; part < PARTS; part++)
        dA[part] = (V){0};
    for (int64_t j = 0; j < d; j++)
        for (int part = 0; part < PARTS; part++)
            dA[part] += (((V *)(at->x + j * LANES))[part] - p[j]) * h[j];
}

/* Through C' = (A^T W) / mass, from H = dC' / mass (k, d), with C' as P (k, d), for vectors begin .. end: adds to dW,
   unless it is NULL, and, where it is wanted, gives at->sums (k, d, WIDTH), the gradient of C without the slope. */
static void through_update(const Weight *w, const REAL *C, int64_t begin, int64_t end, Place *at, const REAL *H,
                           const REAL *P, REAL *dW, int wanted, V *lost)
{
    const int64_t d = DIM(w), k = w->k;
    memset(at->sums, 0, k * d * WIDTH * sizeof(REAL));
    FOR_BLOCKS(begin, end, first) {
        V mean[PARTS] = {{0}};
        load(w->W, w->N, d, first, at->x);
        attend(w, C, first, count, at);
        memset(at->average, 0, d * LANES * sizeof(REAL));
        memset(at->out, 0, d * LANES * sizeof(REAL));
        for (int64_t i = 0; i < k; i++) {
            V A[PARTS], dA[PARTS];
            attention(at, i, A);
            pull(at, H + i * d, P + i * d, d, dA);
            for (int part = 0; part < PARTS; part++)
                mean[part] += A[part] * dA[part];
            if (dW)
                average(A, H + i * d, d, at->average);
        }
        for (int64_t i = 0; i < k; i++) {
            V A[PARTS], dlogits[PARTS];
            attention(at, i, A);
            pull(at, H + i * d, P + i * d, d, dlogits);
            for (int part = 0; part < PARTS; part++)
                dlogits[part] = A[part] * (dlogits[part] - mean[part]);
            through_distance(dlogits, at, C + i * d, d, wanted ? (V *)(at->sums + i * d * WIDTH) : NULL, lost);
        }
        if (dW) {
            for (int64_t value = 0; value < d * LANES; value++)
                at->out[value] = at->out[value] * w->slope + at->average[value];
            store(at->out, w->N, d, first, dW, 1);
        }
    }
}
