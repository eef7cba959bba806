/* The checksum of `dkm/modelling/checksum.py`, for values of BYTES bytes: 2, 4 or 8. */

#include <stdint.h>

#if BYTES == 2
typedef int16_t VALUE;
#elif BYTES == 4
typedef int32_t VALUE;
#else
typedef int64_t VALUE;
#endif

/* The sum of bits (count,) times inner (count,), modulo 2^64. */
uint64_t dkm_weighted_sum(const VALUE *bits, int64_t count, const uint64_t *inner)
{
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += (uint64_t)(int64_t)bits[i] * inner[i];
    return sum;
}
