/* All iterations of a group, one group after the other: what a group needs stays in the cache.  See `groups.py`. */

#include "vectors.h"

typedef struct {
    int64_t groups, max_iter; /* W (groups, N); C, of all iterations, is the trail (groups, max_iter + 1, k, d) */
    double eps, no_mass; /* the mass up to which a centroid is empty */
    const REAL *tau; /* (groups,) */
    const uint8_t *counts; /* (groups, n), or NULL */
} Groups;

static Weight group_of(const Weight *all, const Groups *groups, int64_t group)
{
    Weight w = *all;
    w.W += group * w.N;
    w.scale = (REAL)(1.442695040888963407 / groups->tau[group]);
    w.slope = 2 / groups->tau[group];
    w.counts = groups->counts ? groups->counts + group * vectors(all) : NULL;
    return w;
}

/* One iteration of a group: C_next (k, d) from C.  Returns how far the centroid goes that moves most. */
static double update(const Weight *w, const Groups *groups, const REAL *C, Place *at, double *sums, REAL *W_tilde,
                     REAL *C_next)
{
    const int64_t d = DIM(w), k = w->k;
    double moved = 0;
    sums_of(w, C, 0, vectors(w), at, W_tilde);
    reduce(at->sums, k * (d + 1), sums);
    for (int64_t i = 0; i < k; i++) {
        double mass = sums[i * (d + 1) + d];
        for (int64_t j = 0; j < d; j++) {
            REAL c = C[i * d + j], next = mass <= groups->no_mass ? c : (REAL)(c + sums[i * (d + 1) + j] / mass);
            double distance = next > c ? next - c : c - next;
            moved = distance <= moved || moved != moved ? moved : distance; /* a NaN stays */
            C_next[i * d + j] = next;
        }
    }
    return moved;
}

/* W_tilde (groups, N), the trail from its row 0, and iterations (groups,). */
int dkm_groups(const Weight *all, const Groups *groups, REAL *trail, REAL *W_tilde, int64_t *iterations)
{
    const int64_t size = all->k * DIM(all), last = groups->max_iter;
    Place at;
    double *sums = malloc((size + all->k) * sizeof(double));
    if (sums == NULL || allocate(&at, all)) {
        free(sums);
        return 1;
    }
    for (int64_t group = 0; group < groups->groups; group++) {
        Weight w = group_of(all, groups, group);
        REAL *C = trail + group * (last + 1) * size, *out = W_tilde + group * w.N;
        int64_t t = 0;
        for (;; t++, C += size) { /* late in a training the first iteration is the only one */
            int averages = t == 0 || t + 1 == last;
            double moved = update(&w, groups, C, &at, sums, averages ? out : NULL, C + size);
            if (t + 1 == last)
                break;
            if (moved <= groups->eps) {
                if (!averages)
                    sums_of(&w, C, 0, vectors(&w), &at, out);
                break;
            }
        }
        memmove(trail + (group * (last + 1) + last) * size, C + size, size * sizeof(REAL));
        iterations[group] = t + 1;
    }
    free(at.x);
    free(sums);
    return 0;
}

/* From G (groups, N): dW (groups, N), added to; dC (groups, k, d), that of the first centroids if `unrolled`, otherwise
   that of the ones used last; and dtau (groups,), times tau^2. */
int dkm_groups_back(const Weight *all, const Groups *groups, const REAL *trail, const REAL *G, REAL *dW, REAL *dC,
                    double *dtau, const int64_t *iterations, int unrolled)
{
    const int64_t d = DIM(all), k = all->k, size = k * d;
    Place at;
    double *sums = malloc((2 * size + k) * sizeof(double));
    REAL *H = malloc(size * sizeof(REAL));
    if (sums == NULL || H == NULL || allocate(&at, all)) {
        free(sums);
        free(H);
        return 1;
    }
    for (int64_t group = 0; group < groups->groups; group++) {
        Weight w = group_of(all, groups, group);
        const REAL *C = trail + (group * (groups->max_iter + 1) + iterations[group] - 1) * size;
        REAL *dw = dW + group * w.N, *dc = dC + group * size;
        V lost = {0};
        through_output(&w, C, 0, vectors(&w), &at, G + group * w.N, dw, 1, &lost);
        reduce(at.sums, 2 * size, sums);
        for (int64_t i = 0; i < k; i++)
            for (int64_t j = 0; j < d; j++)
                dc[i * d + j] = (REAL)(sums[2 * i * d + j] * w.slope + sums[(2 * i + 1) * d + j]);
        for (int64_t t = unrolled ? iterations[group] - 2 : -1; t >= 0; t--) {
            C -= size;
            sums_of(&w, C, 0, vectors(&w), &at, NULL);
            reduce(at.sums, size + k, sums);
            for (int64_t i = 0; i < k; i++) {
                double mass = sums[i * (d + 1) + d];
                for (int64_t j = 0; j < d; j++) {
                    H[i * d + j] = mass <= groups->no_mass ? 0 : (REAL)(dc[i * d + j] / mass);
                    dc[i * d + j] = mass <= groups->no_mass ? dc[i * d + j] : 0; /* an empty centroid has stayed */
                }
            }
            through_update(&w, C, 0, vectors(&w), &at, H, C + size, dw, 1, &lost);
            reduce(at.sums, size, sums);
            for (int64_t value = 0; value < size; value++)
                dc[value] += (REAL)(sums[value] * w.slope);
        }
        reduce((REAL *)&lost, 1, dtau + group);
    }
    free(at.x);
    free(H);
    free(sums);
    return 0;
}

