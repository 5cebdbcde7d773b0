/* Histogram filters, row by row: a cursor's histogram stays in the cache for all tokens of a call.

With h~ = (1 - reset) h + reset * total at 0, a step is

    moved = stay * h~[i] + up * h~[i - 1] + down * h~[i + 1], bounded at both ends

and then h = (moved + eps)^gamma over its sum.

After a step the total is 1, whatever h was: only the first step of a call computes it, and gives it a gradient.

REAL is float or double, INTEGER as wide. Logarithms and powers are our own: any compiler then takes many positions at
once, without being asked for liberties with arithmetic, so that what is not a number remains so. */

#include <stdint.h>
#include <string.h>
#include <tgmath.h>

#define PRAGMA(x) _Pragma(#x)
#define EACH PRAGMA(omp simd)
#define SUM(...) PRAGMA(omp simd reduction(+ : __VA_ARGS__))

enum { IS_FLOAT = sizeof(REAL) == 4, MANTISSA = IS_FLOAT ? 23 : 52, BIAS = IS_FLOAT ? 127 : 1023 };
enum { LOG_TERMS = IS_FLOAT ? 5 : 10, EXP_TERMS = IS_FLOAT ? 7 : 13 };
static const REAL LN2 = 0.693147180559945309417, ROOT_HALF = 0.707106781186547524401;

#define EXPONENT ((INTEGER)1 << MANTISSA) /* an exponent of 1 */

typedef struct {
    REAL reset, up, down, stay;
} Gates;

static inline INTEGER bits_of(REAL x)
{
    INTEGER bits;
    memcpy(&bits, &x, sizeof x);
    return bits;
}

static inline REAL real_of(INTEGER bits)
{
    REAL x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Of normal numbers: n + log2 m with m from sqrt(1/2) to sqrt(2), whose logarithm is 2 artanh((m - 1) / (m + 1)). */
static inline REAL log2_of(REAL x)
{
    INTEGER bits = bits_of(x), n = (bits - bits_of(ROOT_HALF)) >> MANTISSA;
    REAL m = real_of(bits - n * EXPONENT), s = (m - 1) / (m + 1), z = s * s, series = 0;
    for (int k = LOG_TERMS - 1; k >= 0; k--)
        series = series * z + (REAL)1 / (2 * k + 1);
    REAL found = n + 2 / LN2 * s * series;
    return (x > 0) & (x < (REAL)INFINITY) ? found : (REAL)NAN;
}

/* Of numbers up to 0: 2^n with the series of e^x. What is below the smallest normal number is 0. */
static inline REAL exp2_of(REAL y)
{
    y = y < -BIAS ? -BIAS : y;
    REAL n = rint(y), z = (y - n) * LN2, series = 1;
    for (int k = EXP_TERMS; k > 0; k--)
        series = series * z * ((REAL)1 / k) + 1;
    return series * real_of(((INTEGER)n + BIAS) * EXPONENT);
}

/* Where h~ goes: what would leave at an end stays there. */
static void moved(const REAL *restrict h, REAL total, Gates g, REAL *restrict x, int64_t P)
{
    REAL kept = 1 - g.reset, up = kept * g.up, down = kept * g.down, stay = kept * g.stay;
    x[0] = (stay + down) * h[0] + down * h[1] + total * g.reset * (g.down + g.stay);
    EACH
    for (int64_t i = 1; i < P - 1; i++)
        x[i] = stay * h[i] + up * h[i - 1] + down * h[i + 1];
    x[P - 1] = (stay + up) * h[P - 1] + up * h[P - 2];
    x[1] += total * g.reset * g.up;
}

/* h = (x + eps)^gamma over its sum; x is lost. */
static void sharpen(REAL *restrict x, REAL gamma, REAL eps, REAL *restrict h, int64_t P)
{
    REAL top = -INFINITY, sum = 0;
    EACH
    for (int64_t i = 0; i < P; i++)
        x[i] = gamma * log2_of(x[i] + eps);
    PRAGMA(omp simd reduction(max : top))
    for (int64_t i = 0; i < P; i++)
        top = x[i] > top ? x[i] : top;
    SUM(sum)
    for (int64_t i = 0; i < P; i++)
        sum += h[i] = exp2_of(x[i] - top);
    REAL share = 1 / sum;
    EACH
    for (int64_t i = 0; i < P; i++)
        h[i] *= share;
}

static REAL sum_of(const REAL *x, int64_t P)
{
    REAL sum = 0;
    SUM(sum)
    for (int64_t i = 0; i < P; i++)
        sum += x[i];
    return sum;
}

static Gates gates_at(const REAL *reset, const REAL *move, int64_t at)
{
    return (Gates){reset[at], move[3 * at], move[3 * at + 1], move[3 * at + 2]};
}

static void take(const REAL *state, int64_t stride, REAL *restrict h, int64_t P)
{
    for (int64_t i = 0; i < P; i++)
        h[i] = state[i * stride];
}

/* Rows, up to end, are pairs of a sequence and a cursor. reset (B, T, C), move (B, T, C, 3), gamma (C), copy
(B, T, C, P + 1), out (B, steps, C, P) and final (B, C, P) are contiguous; state (B, C, P) has strides; room is for 2 P
numbers. copy and final may be missing. */
void advance(
    const REAL *reset, const REAL *move, const REAL *gamma, const REAL *copy, const REAL *state, REAL eps,
    int64_t first, int64_t steps, REAL *out, REAL *final, REAL *room, int64_t row, int64_t end,
    int64_t T, int64_t C, int64_t P, int64_t state_b, int64_t state_c, int64_t state_p)
{
    for (; row < end; row++) {
        int64_t b = row / C, c = row % C;
        REAL *x = room, *h = room + P;
        take(state + b * state_b + c * state_c, state_p, h, P);
        REAL total = sum_of(h, P);
        for (int64_t t = 0; t < steps; t++, total = 1) {
            int64_t at = (b * T + first + t) * C + c;
            moved(h, total, gates_at(reset, move, at), x, P);
            if (copy) {
                const REAL *jump = copy + at * (P + 1);
                EACH
                for (int64_t i = 0; i < P; i++)
                    x[i] = x[i] * jump[P] + total * jump[i];
            }
            sharpen(x, gamma[c], eps, h, P);
            memcpy(out + ((b * steps + t) * C + c) * P, h, P * sizeof(REAL));
        }
        if (final)
            memcpy(final + row * P, h, P * sizeof(REAL));
    }
}

/* Goes back: grad is out's gradient; carry (B, C, P) that of the last histogram, and becomes that of state. Writes
gradients laid out as the inputs, and adds to grad_gamma (B, C). room is for 3 P numbers. */
void retreat(
    const REAL *reset, const REAL *move, const REAL *gamma, const REAL *copy, const REAL *state, REAL eps,
    int64_t first, int64_t steps, const REAL *out, const REAL *grad, REAL *carry,
    REAL *grad_reset, REAL *grad_move, REAL *grad_gamma, REAL *grad_copy, REAL *room, int64_t row, int64_t end,
    int64_t T, int64_t C, int64_t P, int64_t state_b, int64_t state_c, int64_t state_p)
{
    for (; row < end; row++) {
        int64_t b = row / C, c = row % C;
        REAL *restrict x = room, *restrict d = room + P, *restrict begin = room + 2 * P;
        REAL *restrict found = carry + row * P, of_gamma = 0;
        take(state + b * state_b + c * state_c, state_p, begin, P);
        for (int64_t t = steps - 1; t >= 0; t--) {
            int64_t at = (b * T + first + t) * C + c, place = ((b * steps + t) * C + c) * P;
            const REAL *after = out + place, *fresh = grad + place, *h = t ? after - C * P : begin;
            REAL total = t ? 1 : sum_of(h, P), mean = 0, jumped = 0;
            Gates g = gates_at(reset, move, at);
            SUM(mean)
            for (int64_t i = 0; i < P; i++)
                mean += after[i] * (found[i] += fresh[i]);
            moved(h, total, g, x, P);
            if (copy) {
                const REAL *jump = copy + at * (P + 1);
                REAL *of_jump = grad_copy + at * (P + 1), none = jump[P], of_none = 0;
                SUM(of_none, jumped, of_gamma)
                for (int64_t i = 0; i < P; i++) {
                    REAL all = x[i] * none + total * jump[i] + eps, pull = after[i] * (found[i] - mean);
                    of_gamma += pull * log2_of(all);
                    pull *= gamma[c] / all;
                    of_jump[i] = total * pull;
                    of_none += pull * x[i];
                    jumped += pull * jump[i];
                    d[i] = pull * none;
                }
                of_jump[P] = of_none;
            } else {
                SUM(of_gamma)
                for (int64_t i = 0; i < P; i++) {
                    REAL all = x[i] + eps, pull = after[i] * (found[i] - mean);
                    of_gamma += pull * log2_of(all);
                    d[i] = pull * (gamma[c] / all);
                }
            }
            REAL kept = 1 - g.reset, up = kept * g.up, down = kept * g.down, stay = kept * g.stay;
            REAL of_up = h[0] * d[1] + h[P - 1] * d[P - 1], of_down = h[0] * d[0] + h[P - 1] * d[P - 2];
            REAL of_stay = h[0] * d[0] + h[P - 1] * d[P - 1];
            found[0] = (stay + down) * d[0] + up * d[1];
            SUM(of_up, of_down, of_stay)
            for (int64_t i = 1; i < P - 1; i++) {
                of_up += h[i] * d[i + 1];
                of_down += h[i] * d[i - 1];
                of_stay += h[i] * d[i];
                found[i] = stay * d[i] + up * d[i + 1] + down * d[i - 1];
            }
            found[P - 1] = (stay + up) * d[P - 1] + down * d[P - 2];
            REAL origin = (g.stay + g.down) * d[0] + g.up * d[1], anew = total * g.reset;
            grad_reset[at] = total * origin - g.up * of_up - g.down * of_down - g.stay * of_stay;
            grad_move[3 * at] = kept * of_up + anew * d[1];
            grad_move[3 * at + 1] = kept * of_down + anew * d[0];
            grad_move[3 * at + 2] = kept * of_stay + anew * d[0];
            if (t == 0)
                for (int64_t i = 0; i < P; i++)
                    found[i] += jumped + g.reset * origin;
        }
        grad_gamma[row] += LN2 * of_gamma;
    }
}
