// Per-record gradients on the CPU in one pass; the pure PyTorch rules of layers.py are the reference for every function.
//
// Images are channels-last float32: input a (rows, height, width, inputs), output gradients g (rows, height, width,
// outputs). A record is one or several rows: those at order[starts[r]] ... order[starts[r + 1] - 1].
// A plain C interface without torch's headers: compiles in seconds, works with any version of torch. No -ffast-math: NaN
// and infinity must reach the squared norms, where clipping looks for them.
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
  int64_t threads;
};

// out[t][o] += sum over positions of a[position + t] * g[position][o], TAPS times VECTORS * LANES numbers in registers.
template <int VECTORS, int TAPS>
static void block(const float* a, int64_t a_row, int64_t a_step, const float* g, int64_t g_step, int64_t rows,
                  int64_t columns, float* out, int64_t out_step, int64_t taps) {
  Lanes sums[TAPS][VECTORS] = {};
  for (int64_t y = 0; y < rows; y++) {
    const float* at = a + y * a_row;
    for (int64_t x = 0; x < columns; x++, at += a_step, g += g_step) {
      Lanes gradient[VECTORS];
      for (int v = 0; v < VECTORS; v++) gradient[v] = load(g + v * LANES);
#pragma GCC unroll 24
      for (int t = 0; t < TAPS; t++) {
        const float input = at[t];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sums[t][v] += input * gradient[v];
      }
    }
  }
  for (int64_t t = 0; t < taps; t++)
    for (int v = 0; v < VECTORS; v++) {
      float* to = out + t * out_step + v * LANES;
      store(to, load(to) + sums[t][v]);
    }
}

// All taps of a run that lies side by side in memory. Inputs past the run are read and dropped: the scratch has slack.
template <int VECTORS>
static void run(const float* a, int64_t a_row, int64_t a_step, const float* g, int64_t g_step, int64_t rows,
                int64_t columns, float* out, int64_t out_step, int64_t taps) {
  constexpr int full = SUMS / VECTORS, third = (full + 2) / 3, two_thirds = (2 * full + 2) / 3;
  for (int64_t t = 0; t < taps; t += full) {
    const int64_t left = taps - t < full ? taps - t : full;
    const auto one = left <= third ? block<VECTORS, third> : left <= two_thirds ? block<VECTORS, two_thirds> : block<VECTORS, full>;
    one(a + t, a_row, a_step, g, g_step, rows, columns, out + t * out_step, out_step, left);
  }
}

// Adds one row's weight gradient, (kernel_height, kernel_width, inputs, outputs padded to lanes), to out.
static void add_row(const Convolution& c, const float* a, const float* g, float* out) {
  const int64_t wide = padded(c.outputs), across = c.width + 2 * c.pad_x;
  const bool together = c.dilation_x == 1;  // the taps of a kernel row lie side by side in the input
  const int64_t runs = together ? 1 : c.kernel_width, taps = together ? c.kernel_width * c.inputs : c.inputs;
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

static void copy_padded(const Convolution& c, const float* a, float* to) {  // the border of `to` stays zero
  const int64_t across = c.width + 2 * c.pad_x;
  for (int64_t y = 0; y < c.height; y++)
    memcpy(to + ((y + c.pad_y) * across + c.pad_x) * c.inputs, a + y * c.width * c.inputs, c.width * c.inputs * 4);
}

static void widen(const Convolution& c, const float* g, float* to) {  // lanes past `outputs` stay zero
  const int64_t wide = padded(c.outputs), pixels = c.out_height * c.out_width;
  for (int64_t p = 0; p < pixels; p++) memcpy(to + p * wide, g + p * c.outputs, c.outputs * 4);
}

// Weight gradient of each record, (records, kernel_height, kernel_width, inputs, outputs), and its squared norm.
// `weights` null: the norms only. `threshold` from 0 on: every number becomes its sign as a byte, `weights` points to bytes.
extern "C" void dpbench_convolution(const Convolution* shape, const float* a, const float* g, const int64_t* order,
                                    const int64_t* starts, float factor, float threshold, void* weights,
                                    float* squared_norms) {
  const Convolution& c = *shape;
  const int64_t wide = padded(c.outputs), taps = c.kernel_height * c.kernel_width * c.inputs;
  const int64_t a_size = c.height * c.width * c.inputs, g_size = c.out_height * c.out_width * c.outputs;
  const int64_t scratch = (c.height + 2 * c.pad_y) * (c.width + 2 * c.pad_x) * c.inputs + SUMS;
  const bool direct = weights && threshold < 0 && wide == c.outputs;
#pragma omp parallel num_threads((int)c.threads)
  {
    std::vector<float> image(scratch, 0.0f), gradient(wide == c.outputs ? 0 : c.out_height * c.out_width * wide, 0.0f);
    std::vector<float> own(direct ? 0 : taps * wide);
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < c.records; r++) {
      float* sum = direct ? (float*)weights + r * taps * wide : own.data();
      memset(sum, 0, taps * wide * 4);
      for (int64_t at = starts[r]; at < starts[r + 1]; at++) {
        const float* own_g = g + order[at] * g_size;
        copy_padded(c, a + order[at] * a_size, image.data());
        if (wide != c.outputs) {
          widen(c, own_g, gradient.data());
          own_g = gradient.data();
        }
        add_row(c, image.data(), own_g, sum);
      }
      if (factor != 1)
        for (int64_t j = 0; j < taps * wide; j++) sum[j] *= factor;
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

// out[j] = sum over records of factors[r] * rows[r][j], for rows of signs.
extern "C" void dpbench_weighted_signs(const int8_t* rows, const float* factors, float* out, int64_t records,
                                       int64_t size, int64_t threads) {
  const int64_t tile = 64 * LANES;
#pragma omp parallel for schedule(static) num_threads((int)threads)
  for (int64_t start = 0; start < size; start += tile) {
    const int64_t n = start + tile < size ? tile : size - start;
    float sums[64 * LANES] = {};
    for (int64_t r = 0; r < records; r++) {
      const int8_t* row = rows + r * size + start;
      for (int64_t j = 0; j < n; j++) sums[j] += factors[r] * row[j];
    }
    memcpy(out + start, sums, n * 4);
  }
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
