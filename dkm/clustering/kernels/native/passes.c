/* One pass over all vectors of a weight: `__init__.py` makes the loop of these.

   Sums over vectors are added up chunk by chunk, (chunks, ...), by one thread each.  So they do not depend on how many
   threads there are. */

#include "vectors.h"

static int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }

#define FOR_CHUNKS(w, chunk, begin, end)                                                                               \
    for (int64_t chunk = 0, n = vectors(w), begin, end;                                                                \
         (begin = chunk * (w)->chunk) < n && (end = least_of(begin + (w)->chunk, n)); chunk++)

/* W_tilde (N,), unless NULL, and the sums (chunks, k, d + 1) of `sums_of`. */
int dkm_sums(const Weight *w, const REAL *C, REAL *W_tilde, double *sums)
{
    int64_t size = w->k * (DIM(w) + 1);
    Place at;
    if (allocate(&at, w))
        return 1;
    FOR_CHUNKS(w, chunk, begin, end) {
        sums_of(w, C, begin, end, &at, W_tilde);
        reduce(at.sums, size, sums + chunk * size);
    }
    free(at.x);
    return 0;
}

/* `through_output`, with dC (chunks, k, 2, d) and dtau (chunks,), times tau^2; either may be NULL. */
int dkm_through_output(const Weight *w, const REAL *C, const REAL *G, REAL *dW, double *dC, double *dtau)
{
    int64_t size = w->k * 2 * DIM(w);
    Place at;
    if (allocate(&at, w))
        return 1;
    FOR_CHUNKS(w, chunk, begin, end) {
        V lost = {0};
        through_output(w, C, begin, end, &at, G, dW, dC != NULL, dtau ? &lost : NULL);
        if (dC)
            reduce(at.sums, size, dC + chunk * size);
        if (dtau)
            reduce((REAL *)&lost, 1, dtau + chunk);
    }
    free(at.x);
    return 0;
}

/* `through_update`, with dC (chunks, k, d) and dtau (chunks,), times tau^2; dW and these two may be NULL. */
int dkm_through_update(const Weight *w, const REAL *C, const REAL *H, const REAL *P, REAL *dW, double *dC, double *dtau)
{
    int64_t size = w->k * DIM(w);
    Place at;
    if (allocate(&at, w))
        return 1;
    FOR_CHUNKS(w, chunk, begin, end) {
        V lost = {0};
        through_update(w, C, begin, end, &at, H, P, dW, dC != NULL, dtau ? &lost : NULL);
        if (dC)
            reduce(at.sums, size, dC + chunk * size);
        if (dtau)
            reduce((REAL *)&lost, 1, dtau + chunk);
    }
    free(at.x);
    return 0;
}

/* codes (n,): the nearest centroid of each vector, the first of equally near ones. */
int dkm_nearest(const Weight *w, const REAL *C, int64_t *codes)
{
    const int64_t d = DIM(w), k = w->k, n = vectors(w);
    Place at;
    if (allocate(&at, w))
        return 1;
    FOR_BLOCKS(0, n, first) {
        REAL distance[LANES] __attribute__((aligned(64))), least[LANES];
        BITS nearest[LANES]; /* as many bits as a REAL, so that both are compared and replaced side by side */
        load(w->W, w->N, d, first, at.x);
        for (int l = 0; l < LANES; l++) {
            least[l] = INFINITY;
            nearest[l] = 0;
        }
        for (int64_t i = 0; i < k; i++) {
            distances(&at, C + i * d, d, distance);
            for (int l = 0; l < LANES; l++) {
                int closer = distance[l] < least[l];
                least[l] = closer ? distance[l] : least[l];
                nearest[l] = closer ? (BITS)i : nearest[l];
            }
        }
        for (int l = 0; l < count; l++)
            codes[first + l] = nearest[l];
    }
    free(at.x);
    return 0;
}

/* codes (N,) of single weights: labels[the number of the edges (count,), in ascending order, that are below a weight].
   A NaN is above all of them. */
void dkm_positions(const REAL *W, int64_t N, const REAL *edges, int64_t count, const int64_t *labels, int64_t *codes)
{
    for (int64_t first = 0; first < N; first += LANES) {
        int64_t here = least_of(LANES, N - first);
        REAL x[LANES];
        BITS below[LANES];
        for (int l = 0; l < LANES; l++) {
            x[l] = l < here ? W[first + l] : 0;
            below[l] = 0;
        }
        for (int64_t i = 0; i < count; i++)
            for (int l = 0; l < LANES; l++)
                below[l] += !(x[l] <= edges[i]);
        for (int l = 0; l < here; l++)
            codes[first + l] = labels[below[l]];
    }
}
