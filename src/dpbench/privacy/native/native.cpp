// Per-record gradients on the CPU in one pass; the pure PyTorch rules of layers.py are the reference for every function.
//
// Images are float32: input a (rows, height, width, inputs), output gradients g (rows, height, width, outputs), stored
// channels-last or, for convolutions, also channels-first. A record is one or several rows: those at order[starts[r]] ...
// order[starts[r + 1] - 1].
// A plain C interface without torch's headers: compiles in seconds, works with any version of torch. No -ffast-math: NaN
// and infinity must reach the squared norms, where clipping looks for them.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#if defined(__AVX512F__)
#define LANES 16
#define SUMS 24  // accumulators: of 32 registers
#elif defined(__AVX2__)
#define LANES 8
#define SUMS 12  // of 16
#else
#define LANES 4
#define SUMS 12
#endif

typedef float Lanes __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t Mask __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1)));

static inline Lanes load(const float* from) { return *(const Lanes*)from; }
static inline void store(float* to, Lanes value) { *(Lanes*)to = value; }
static inline int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// +1 above the threshold, -1 below its negative, else 0; 0 for NaN.
static inline Mask signs(Lanes value, float threshold) { return (value < -threshold) - (value > threshold); }

static inline double sum_of_squares(const float* values, int64_t n) {
  double total = 0;
  for (int64_t start = 0; start < n; start += 4096) {  // float32 lanes, short enough not to lose digits
    const int64_t end = start + 4096 < n ? start + 4096 : n;
    Lanes parts[4] = {};
    int64_t j = start;
    for (; j + 4 * LANES <= end; j += 4 * LANES)
      for (int p = 0; p < 4; p++) {
        const Lanes v = load(values + j + p * LANES);
        parts[p] += v * v;
      }
    const Lanes sum = (parts[0] + parts[1]) + (parts[2] + parts[3]);
    for (int lane = 0; lane < LANES; lane++) total += sum[lane];
    for (; j < end; j++) total += (double)values[j] * values[j];
  }
  return total;
}

// Writes the signs of n numbers and returns how many are not zero.
static inline int64_t to_signs(const float* values, int64_t n, float threshold, int8_t* to) {
  Mask counts = {};
  int64_t j = 0, total = 0;
  for (; j + LANES <= n; j += LANES) {
    const Mask sign = signs(load(values + j), threshold);
    *(Bytes*)(to + j) = __builtin_convertvector(sign, Bytes);
    counts += sign * sign;
  }
  for (int lane = 0; lane < LANES; lane++) total += counts[lane];
  for (; j < n; j++) {
    to[j] = (int8_t)((values[j] > threshold) - (values[j] < -threshold));
    total += to[j] * to[j];
  }
  return total;
}

// ---------------------------------------------------------------------------------------------- convolution

struct Convolution {
  int64_t records, height, width, inputs, out_height, out_width, outputs;
  int64_t kernel_height, kernel_width, stride_y, stride_x, pad_y, pad_x, dilation_y, dilation_x;
  int64_t a_first, g_first;  // whether channels come first
  int64_t threads;
};

// out[k][t][o] += sum over positions of a[position + row k + t] * g[position][o]: ROWS kernel rows of TAPS inputs each,
// times VECTORS * LANES outputs, all sums in registers.
template <int VECTORS, int ROWS, int TAPS>
static void block(const float* a, int64_t kernel_row, int64_t a_row, int64_t a_step, const float* g, int64_t g_step,
                  int64_t rows, int64_t columns, float* out, int64_t out_row, int64_t out_step, int64_t taps) {
  Lanes sums[ROWS][TAPS][VECTORS] = {};
  for (int64_t y = 0; y < rows; y++) {
    const float* at = a + y * a_row;
    for (int64_t x = 0; x < columns; x++, at += a_step, g += g_step) {
      Lanes gradient[VECTORS];
      for (int v = 0; v < VECTORS; v++) gradient[v] = load(g + v * LANES);
#pragma GCC unroll 3
      for (int k = 0; k < ROWS; k++)
#pragma GCC unroll 24
        for (int t = 0; t < TAPS; t++) {
          const float input = at[k * kernel_row + t];
#pragma GCC unroll 4
          for (int v = 0; v < VECTORS; v++) sums[k][t][v] += input * gradient[v];
        }
    }
  }
  for (int k = 0; k < ROWS; k++)
    for (int64_t t = 0; t < taps; t++)
      for (int v = 0; v < VECTORS; v++) {
        float* to = out + k * out_row + t * out_step + v * LANES;
        store(to, load(to) + sums[k][t][v]);
      }
}

// All taps of a run that lies side by side in memory. Inputs past the run are read and dropped: the scratch has slack.
template <int VECTORS>
static void run(const float* a, int64_t a_row, int64_t a_step, const float* g, int64_t g_step, int64_t rows,
                int64_t columns, float* out, int64_t out_step, int64_t taps) {
  constexpr int full = SUMS / VECTORS, third = (full + 2) / 3, two_thirds = (2 * full + 2) / 3;
  for (int64_t t = 0; t < taps; t += full) {
    const int64_t left = taps - t < full ? taps - t : full;
    const auto one = left <= third        ? block<VECTORS, 1, third>
                     : left <= two_thirds ? block<VECTORS, 1, two_thirds>
                                          : block<VECTORS, 1, full>;
    one(a + t, 0, a_row, a_step, g, g_step, rows, columns, out + t * out_step, 0, out_step, left);
  }
}

// Adds one row's weight gradient, (kernel_height, kernel_width, inputs, outputs padded to lanes), to out.
static void add_row(const Convolution& c, const float* a, const float* g, float* out) {
  const int64_t wide = padded(c.outputs), across = c.width + 2 * c.pad_x;
  const bool together = c.dilation_x == 1;  // the taps of a kernel row lie side by side in the input
  const int64_t runs = together ? 1 : c.kernel_width, taps = together ? c.kernel_width * c.inputs : c.inputs;
  if (together && wide == LANES && taps <= SUMS / 3) {  // few taps, few outputs: three kernel rows fill the registers
    const int64_t kernel_row = c.dilation_y * across * c.inputs, out_row = taps * wide;
    for (int64_t ky = 0; ky < c.kernel_height; ky += 3) {
      const int64_t left = c.kernel_height - ky;
      const auto some = left >= 3 ? block<1, 3, SUMS / 3> : left == 2 ? block<1, 2, SUMS / 3> : block<1, 1, SUMS / 3>;
      some(a + ky * kernel_row, kernel_row, c.stride_y * across * c.inputs, c.stride_x * c.inputs, g, wide,
           c.out_height, c.out_width, out + ky * out_row, out_row, wide, taps);
    }
    return;
  }
  for (int64_t ky = 0; ky < c.kernel_height; ky++)
    for (int64_t kx = 0; kx < runs; kx++) {
      const float* from = a + (ky * c.dilation_y * across + kx * c.dilation_x) * c.inputs;
      float* to = out + (ky * c.kernel_width + kx) * c.inputs * wide;
      for (int64_t o = 0; o < wide; o += 4 * LANES) {
        const int64_t vectors = (wide - o) / LANES;
        const auto any = vectors >= 4 ? run<4> : vectors == 3 ? run<3> : vectors == 2 ? run<2> : run<1>;
        any(from, c.stride_y * across * c.inputs, c.stride_x * c.inputs, g + o, wide, c.out_height, c.out_width,
            to + o, wide, taps);
      }
    }
}

// Pixels of one line of an image, channels-last and `step` numbers apart.
static void copy_line(const float* from, bool channels_first, int64_t plane, int64_t width, int64_t channels, float* to,
                      int64_t step) {
  if (channels_first && channels > 1)
    for (int64_t c = 0; c < channels; c++)
      for (int64_t x = 0; x < width; x++) to[x * step + c] = from[c * plane + x];
  else if (step == channels)
    memcpy(to, from, width * channels * 4);
  else
    for (int64_t x = 0; x < width; x++) memcpy(to + x * step, from + x * channels, channels * 4);
}

static void copy_padded(const Convolution& c, const float* a, float* to) {  // the border of `to` stays zero
  const int64_t across = c.width + 2 * c.pad_x, line = c.width * (c.a_first ? 1 : c.inputs);
  for (int64_t y = 0; y < c.height; y++)
    copy_line(a + y * line, c.a_first, c.height * c.width, c.width, c.inputs,
              to + ((y + c.pad_y) * across + c.pad_x) * c.inputs, c.inputs);
}

static void widen(const Convolution& c, const float* g, float* to) {  // lanes past `outputs` stay zero
  const int64_t wide = padded(c.outputs), line = c.out_width * (c.g_first ? 1 : c.outputs);
  for (int64_t y = 0; y < c.out_height; y++)
    copy_line(g + y * line, c.g_first, c.out_height * c.out_width, c.out_width, c.outputs, to + y * c.out_width * wide,
              wide);
}

// to[o] += sum of g[position][o], for o up to `outputs` padded to lanes.
static void add_positions(const Convolution& c, const float* g, float* to) {
  const int64_t wide = padded(c.outputs), pixels = c.out_height * c.out_width;
  for (int64_t o = 0; o < wide; o += LANES) {
    Lanes sums[4] = {};
    int64_t p = 0;
    for (; p + 4 <= pixels; p += 4)
      for (int k = 0; k < 4; k++) sums[k] += load(g + (p + k) * wide + o);
    for (; p < pixels; p++) sums[0] += load(g + p * wide + o);
    store(to + o, load(to + o) + ((sums[0] + sums[1]) + (sums[2] + sums[3])));
  }
}

// Weight gradient of each record, (records, kernel_height, kernel_width, inputs, outputs), and its squared norm.
// `weights` null: the norms only. `threshold` from 0 on: every number becomes its sign as a byte, `weights` points to bytes.
// `bias` (records, outputs): sums of the output gradients.
extern "C" void dpbench_convolution(const Convolution* shape, const float* a, const float* g, const int64_t* order,
                                    const int64_t* starts, float factor, float threshold, void* weights,
                                    float* squared_norms, float* bias) {
  const Convolution& c = *shape;
  const int64_t wide = padded(c.outputs), taps = c.kernel_height * c.kernel_width * c.inputs;
  const int64_t a_size = c.height * c.width * c.inputs, g_size = c.out_height * c.out_width * c.outputs;
  const int64_t scratch = (c.height + 2 * c.pad_y) * (c.width + 2 * c.pad_x) * c.inputs + SUMS;
  const bool direct = weights && threshold < 0 && wide == c.outputs, as_it_is = wide == c.outputs && !c.g_first;
#pragma omp parallel num_threads((int)c.threads)
  {
    std::vector<float> image(scratch, 0.0f), gradient(as_it_is ? 0 : c.out_height * c.out_width * wide, 0.0f);
    std::vector<float> own(direct ? 0 : taps * wide), shift(wide);
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < c.records; r++) {
      float* sum = direct ? (float*)weights + r * taps * wide : own.data();
      memset(sum, 0, taps * wide * 4);
      std::fill(shift.begin(), shift.end(), 0.0f);
      for (int64_t at = starts[r]; at < starts[r + 1]; at++) {
        const float* own_g = g + order[at] * g_size;
        copy_padded(c, a + order[at] * a_size, image.data());
        if (!as_it_is) {
          widen(c, own_g, gradient.data());
          own_g = gradient.data();
        }
        add_row(c, image.data(), own_g, sum);
        add_positions(c, own_g, shift.data());
      }
      if (factor != 1) {
        for (int64_t j = 0; j < taps * wide; j++) sum[j] *= factor;
        for (int64_t o = 0; o < c.outputs; o++) shift[o] *= factor;
      }
      memcpy(bias + r * c.outputs, shift.data(), c.outputs * 4);
      if (threshold >= 0) {
        int8_t* to = (int8_t*)weights + r * taps * c.outputs;
        int64_t count = 0;
        for (int64_t t = 0; t < taps; t++)
          count += to_signs(sum + t * wide, c.outputs, threshold, to + t * c.outputs);
        squared_norms[r] = (float)count;
        continue;
      }
      squared_norms[r] = (float)sum_of_squares(sum, taps * wide);
      if (weights && !direct)
        for (int64_t t = 0; t < taps; t++)
          memcpy((float*)weights + (r * taps + t) * c.outputs, sum + t * wide, c.outputs * 4);
    }
  }
}

template <typename Number>
static void weighted_sum(const Number* rows, const float* factors, float* out, int64_t records, int64_t size,
                         int64_t threads) {
  constexpr int64_t tile = 16 * LANES;
#pragma omp parallel for schedule(static) num_threads((int)threads)
  for (int64_t start = 0; start < size; start += tile) {
    const int64_t n = start + tile < size ? tile : size - start;
    float sums[tile] = {};
    if (n == tile) {
      for (int64_t r = 0; r < records; r++)
        for (int64_t j = 0; j < tile; j++) sums[j] += factors[r] * (float)rows[r * size + start + j];
    } else {
      for (int64_t r = 0; r < records; r++)
        for (int64_t j = 0; j < n; j++) sums[j] += factors[r] * (float)rows[r * size + start + j];
    }
    memcpy(out + start, sums, n * 4);
  }
}

// out[j] = sum over records of factors[r] * rows[r][j].
extern "C" void dpbench_weighted_sum(const float* rows, const float* factors, float* out, int64_t records, int64_t size,
                                     int64_t threads) {
  weighted_sum(rows, factors, out, records, size, threads);
}

extern "C" void dpbench_weighted_signs(const int8_t* rows, const float* factors, float* out, int64_t records,
                                       int64_t size, int64_t threads) {
  weighted_sum(rows, factors, out, records, size, threads);
}

// ---------------------------------------------------------------------------------------------- linear, discretized

// How many coordinates of the outer product g[r] a[r]^T are beyond the threshold, for each record.
extern "C" void dpbench_count_outer(const float* g, const float* a, float* counts, int64_t records, int64_t outputs,
                                    int64_t inputs, float threshold, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads)
  for (int64_t r = 0; r < records; r++) {
    int64_t total = 0;
    const float* row = a + r * inputs;
    for (int64_t o = 0; o < outputs; o++) {
      const float gradient = g[r * outputs + o];
      Mask beyond = {};
      int64_t i = 0;
      for (; i + LANES <= inputs; i += LANES) {
        const Lanes v = gradient * load(row + i);
        beyond -= (v > threshold) | (v < -threshold);
      }
      for (int lane = 0; lane < LANES; lane++) total += beyond[lane];
      for (; i < inputs; i++) total += gradient * row[i] > threshold || gradient * row[i] < -threshold;
    }
    counts[r] = (float)total;
  }
}

// out[o][i] = sum over records of factors[r] * sign(g[r][o] * a[r][i]) where that is beyond the threshold.
extern "C" void dpbench_sum_outer(const float* g, const float* a, const float* factors, float* out, int64_t records,
                                  int64_t outputs, int64_t inputs, float threshold, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads)
  for (int64_t o = 0; o < outputs; o++) {
    int64_t i = 0;
    for (; i + 8 * LANES <= inputs; i += 8 * LANES) {
      Lanes sums[8] = {};
      for (int64_t r = 0; r < records; r++) {
        const float gradient = g[r * outputs + o];
        const float* row = a + r * inputs + i;
        const Lanes factor = factors[r] + (Lanes){};
#pragma GCC unroll 8
        for (int p = 0; p < 8; p++) {
          const Lanes v = gradient * load(row + p * LANES);
          sums[p] += (v > threshold) ? factor : (Lanes){};
          sums[p] -= (v < -threshold) ? factor : (Lanes){};
        }
      }
      for (int p = 0; p < 8; p++) store(out + o * inputs + i + p * LANES, sums[p]);
    }
    for (; i < inputs; i++) {
      float sum = 0;
      for (int64_t r = 0; r < records; r++) {
        const float v = g[r * outputs + o] * a[r * inputs + i];
        sum += factors[r] * ((v > threshold) - (v < -threshold));
      }
      out[o * inputs + i] = sum;
    }
  }
}

// ---------------------------------------------------------------------------------------------- group normalization

// Per-row gradients of scale and shift, (rows, channels) each, from input x and output gradient g, both channels-last.
extern "C" void dpbench_group_norm(const float* x, const float* g, float* scale, float* shift, int64_t rows,
                                   int64_t pixels, int64_t channels, int64_t groups, double eps, int64_t threads) {
#pragma omp parallel num_threads((int)threads)
  {
    std::vector<float> part(4 * channels);
    std::vector<double> sum(4 * channels);  // of x, x^2, g, g x, with x as its distance from the first pixel
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
      const float *first = x + r * pixels * channels, *own_g = g + r * pixels * channels;
      float *px = part.data(), *pxx = px + channels, *pg = pxx + channels, *pgx = pg + channels;
      sum.assign(4 * channels, 0.0);
      for (int64_t start = 0; start < pixels; start += 64) {
        const int64_t end = start + 64 < pixels ? start + 64 : pixels;
        part.assign(4 * channels, 0.0f);
        for (int64_t p = start; p < end; p++) {
          const float *xs = first + p * channels, *gs = own_g + p * channels;
#pragma GCC ivdep
          for (int64_t c = 0; c < channels; c++) {
            const float d = xs[c] - first[c];
            px[c] += d;
            pxx[c] += d * d;
            pg[c] += gs[c];
            pgx[c] += gs[c] * d;
          }
        }
        for (int64_t j = 0; j < 4 * channels; j++) sum[j] += part[j];
      }
      const double *sx = sum.data(), *sxx = sx + channels, *sg = sxx + channels, *sgx = sg + channels;
      const int64_t members = channels / groups;
      for (int64_t k = 0; k < groups; k++) {
        double mean = 0, square = 0;
        for (int64_t c = k * members; c < (k + 1) * members; c++) mean += sx[c] / pixels + first[c];
        mean /= members;
        for (int64_t c = k * members; c < (k + 1) * members; c++) {
          const double gap = first[c] - mean;  // of the distances' origin from the mean
          square += sxx[c] + 2 * gap * sx[c] + pixels * gap * gap;
        }
        const double inverse = 1 / std::sqrt((square < 0 ? 0 : square) / (pixels * members) + eps);
        for (int64_t c = k * members; c < (k + 1) * members; c++) {
          scale[r * channels + c] = (float)(inverse * (sgx[c] + (first[c] - mean) * sg[c]));
          shift[r * channels + c] = (float)sg[c];
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------- Gaussian noise

// As wide as the registers; block and number of a lane do not depend on that.
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef float Floats __attribute__((vector_size(LANES * 4)));

enum Nonce : uint32_t { BULK = 0, TAIL = 1 };  // blocks of one key for two uses
static const uint32_t BEYOND = 1 << 20;        // words below give radii beyond sqrt(24 log 2) = 4.08

static inline Words rotate(Words x, int n) { return (x << n) | (x >> (32 - n)); }

static inline void quarter(Words& a, Words& b, Words& c, Words& d) {
  a += b, d = rotate(d ^ a, 16), c += d, b = rotate(b ^ c, 12);
  a += b, d = rotate(d ^ a, 8), c += d, b = rotate(b ^ c, 7);
}

// Blocks of ChaCha20 (RFC 8439), one in each lane, numbers `first`, `first` + 1, ... of a 64-bit counter.
static inline void chacha(const uint32_t* key, uint64_t first, Nonce nonce, Words* x) {
  static const uint32_t constants[4] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574};
  Words start[16];
  for (int i = 0; i < 4; i++) start[i] = constants[i] + (Words){};
  for (int i = 0; i < 8; i++) start[4 + i] = key[i] + (Words){};
  start[12] = start[13] = (Words){};
  for (int lane = 0; lane < LANES; lane++) {
    start[12][lane] = (uint32_t)(first + lane);
    start[13][lane] = (uint32_t)((first + lane) >> 32);
  }
  start[14] = (uint32_t)nonce + (Words){};
  start[15] = (Words){};
  for (int i = 0; i < 16; i++) x[i] = start[i];
  for (int round = 0; round < 10; round++) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) quarter(x[i], x[4 + i], x[8 + i], x[12 + i]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) quarter(x[i], x[4 + (i + 1) % 4], x[8 + (i + 2) % 4], x[12 + (i + 3) % 4]);
  }
  for (int i = 0; i < 16; i++) x[i] += start[i];
}

// Natural logarithm of (1 + 2 * word) / 2^33, the middle of one of 2^32 parts of (0, 1), from a word read as a signed
// number: exponent, and a polynomial in the mantissa's distance from 1 (Cephes' logf). Above a half the distance is taken
// from the word itself, or the smallest radii would be multiples of 2^-11.5.
static inline Floats logarithm(Ints word) {
  const Floats distance = (__builtin_convertvector(word, Floats) + 0.5f) * 0x1p-32f;  // from 0, or from 1 where negative
  const Ints above = word >> 31, bits = (Ints)distance;
  const Ints small_above = distance < -0.292893219f;
  Ints exponent = (bits >> 23) - 126;
  Floats m = (Floats)((bits & 0x007fffff) | 0x3f000000);  // in [1/2, 1)
  const Ints small = m < 0.707106781f;
  exponent += small;
  m = m - 1.0f + (Floats)((Ints)m & small);
  const Floats near = distance + (Floats)((Ints)(distance + 1.0f) & small_above);
  m = (Floats)(((Ints)m & ~above) | ((Ints)near & above));
  exponent = (exponent & ~above) | (small_above & above);
  Floats p = m * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  const Floats e = __builtin_convertvector(exponent, Floats), square = m * m;
  return (m + (p * m * square - e * 2.12194440e-4f - 0.5f * square)) + e * 0.693359375f;
}

static inline Floats root(Floats x) {
  for (int lane = 0; lane < LANES; lane++) x[lane] = __builtin_sqrtf(x[lane]);
  return x;
}

// Two independent normal numbers from two independent words (Box-Muller), one of which gives the radius, the other the
// angle: `scale` is their standard deviation.
static inline void box_muller(Words first, Words second, float scale, Floats& one, Floats& two) {
  const Floats radius = scale * root(-2.0f * logarithm((Ints)first));
  const Words quadrant = (second + 0x20000000u) >> 30;  // the angle in turns, exactly: a quarter, and the rest of it
  const Floats t = __builtin_convertvector((Ints)(second - (quadrant << 30)), Floats) * 1.46291807926716e-9f;
  const Floats z = t * t;
  const Floats sine = ((-1.9515295891e-4f * z + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * t + t;
  const Floats cosine =
      ((2.443315711809948e-5f * z - 1.388731625493765e-3f) * z + 4.166664568298827e-2f) * z * z - 0.5f * z + 1.0f;
  const Ints odd = -(Ints)(quadrant & 1), sign_c = (Ints)((((quadrant + 1) >> 1) & 1) << 31);
  const Ints sign_s = (Ints)(((quadrant >> 1) & 1) << 31);
  const Ints c = ((Ints)cosine & ~odd) | ((Ints)sine & odd), s = ((Ints)sine & ~odd) | ((Ints)cosine & odd);
  one = radius * (Floats)(c ^ sign_c);
  two = radius * (Floats)(s ^ sign_s);
}

// A pair once more whose radius is beyond 4: 32 bits end at 6.8 standard deviations and are coarse before, so the part of
// (0, 1) that they name is divided by 64 bits more, from a block that gives nothing else. The end is then 11.6.
__attribute__((noinline)) static void refine(const uint32_t* key, uint64_t pair, uint32_t first, uint32_t second,
                                             float scale, float& one, float& two) {
  Words x[16];
  chacha(key, pair, TAIL, x);
  const double more = (double)((uint64_t)x[0][0] << 32 | x[1][0]) + 0.5;
  const double radius = scale * std::sqrt(-2 * std::log((first + more * 0x1p-64) * 0x1p-32));
  const double angle = (int32_t)second * 1.4629180792671596e-9;
  one = (float)(radius * std::cos(angle));
  two = (float)(radius * std::sin(angle));
}

// Numbers 256 group, ..., 256 group + 255 of the key's stream, times `scale`. Numbers j and 128 + j are a pair, j = 16 i + l:
// of words i and 8 + i of block 16 group + l.
static inline void normal_numbers(const uint32_t* key, uint64_t group, float scale, float* values) {
  Words x[16];
  Floats one, two;
  for (int lane = 0; lane < 16; lane += LANES) {
    chacha(key, group * 16 + lane, BULK, x);
    Ints beyond = {};
    for (int i = 0; i < 8; i++) {
      beyond |= x[i] < BEYOND;
      box_muller(x[i], x[8 + i], scale, one, two);
      std::memcpy(values + 16 * i + lane, &one, sizeof one);
      std::memcpy(values + 16 * (8 + i) + lane, &two, sizeof two);
    }
    for (int l = 0; l < LANES; l++) {
      if (!beyond[l]) continue;
      for (int i = 0; i < 8; i++) {
        const int j = 16 * i + lane + l;
        if (x[i][l] < BEYOND) refine(key, group * 128 + j, x[i][l], x[8 + i][l], scale, values[j], values[128 + j]);
      }
    }
  }
}

// total[j] becomes the multiple of `spacing`, a power of two, nearest to total[j] + spacing * scale * number j of the key's
// stream, `start` <= j < `start` + n; total points to number `start`.
extern "C" void dpbench_add_noise(float* total, int64_t start, int64_t n, float scale, double spacing,
                                  const uint32_t* key, int64_t threads) {
  const int64_t end = start + n;
  const double inverse = 1 / spacing;
#pragma omp parallel for schedule(static) num_threads((int)threads)
  for (int64_t group = start / 256; group < (end + 255) / 256; group++) {
    float values[256];
    normal_numbers(key, (uint64_t)group, scale, values);
    const int64_t from = group * 256 < start ? start : group * 256, to = group * 256 + 256 < end ? group * 256 + 256 : end;
    float* sums = total + (from - start);
    const float* numbers = values + (from - group * 256);
    for (int64_t j = 0; j < to - from; j++)
      sums[j] = (float)(std::rint(sums[j] * inverse + numbers[j]) * spacing);
  }
}
