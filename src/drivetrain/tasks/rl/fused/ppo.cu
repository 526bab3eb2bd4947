// PPO for two small perceptrons, the actor and the critic. They fit on the chip: activations never leave it.
//
// Compiled for one shape: INPUTS numbers in an observation, LAYERS hidden layers of WIDTH units (RELU or tanh), ACTIONS actions;
// and so that RESIDENT blocks of `learn` fit on one multiprocessor. Every kernel takes one struct: pointers, then integers, then
// floats. Matrix products have operands of 16 bits (11 bits of mantissa, as tf32) and sums of 32 bits. In the first and the last
// layer, which decide the precision of probabilities and values, each operand is split into a 16-bit number and its remainder, so
// that nothing is lost. Sums over blocks are made in a fixed order, so that the same samples give the same bits.

typedef unsigned int u32;
typedef unsigned short half;  // only stored and moved
typedef unsigned long long u64;
#define DEVICE __device__ __forceinline__

constexpr int up(int n, int to) { return (n + to - 1) / to * to; }
constexpr bool TOGETHER = 3 * INPUTS + 1 <= 16;  // the observation, its remainder, and the observation again (for the weights' remainder) fit in one product
constexpr int SEEN = TOGETHER ? 16 : up(INPUTS + 1, 16);  // the observation, a one for the biases' gradients, padding
constexpr bool PAIRED = ACTIONS <= 8;       // the head's weights and their remainders are one operand
constexpr int OUT = up(ACTIONS, 16), OUTS = up(ACTIONS, 8) / 8;
constexpr int TILE = 64;                    // samples of a block at a time: 16 for each warp
constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int PAD = 8;                      // numbers after each row, so that the rows of a block of 8 are in different memory banks
constexpr int BLOCKS = WIDTH / 16, MINE = up(BLOCKS, WARPS) / WARPS;  // blocks of 16 units, and the share of one warp
constexpr int FIRST = WIDTH * INPUTS + WIDTH, HIDDEN = WIDTH * WIDTH + WIDTH;
constexpr int BEFORE_HEAD = FIRST + (LAYERS - 1) * HIDDEN;
constexpr int ACTOR = BEFORE_HEAD + ACTIONS * WIDTH + ACTIONS, CRITIC = BEFORE_HEAD + WIDTH + 1, SIZE = ACTOR + CRITIC;
constexpr int SUMS = 8;                     // after the gradients: loss, entropy, KL, clipped, value error, number of living samples
constexpr int PER_BLOCK = SIZE + SUMS;
constexpr float BEND = RELU ? 1.f : 2.885390082f;  // 2 / log 2: hidden layers are multiplied by it, so that tanh can use powers of two
enum { ACTION, LOGP, ADVANTAGE, TARGET, VALUE, ALIVE };  // the first columns of a sample, as in COLUMNS of samples.py

// --- numbers and matrices ---

DEVICE u32 pack(float a, float b) { u32 r; asm("cvt.rn.satfinite.f16x2.f32 %0, %2, %1;" : "=r"(r) : "f"(a), "f"(b)); return r; }
DEVICE half narrow(float a) { half r; asm("cvt.rn.satfinite.f16.f32 %0, %1;" : "=h"(r) : "f"(a)); return r; }
DEVICE float widen(half a) { float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(a)); return r; }
DEVICE float rest(float a) { return a - widen(narrow(a)); }  // the remainder that 16 bits cannot represent
DEVICE u32 times(u32 a, u32 b) { u32 r; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DEVICE u32 at(const half* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE float power2(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DEVICE float power(float x) { return power2(x * 1.4426950409f); }
DEVICE float logarithm(float x) { float r; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r * 0.6931471806f; }
DEVICE float inverse(float x) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }

DEVICE void load(u32 (&r)[4], u32 p) {  // four blocks of 8 x 8
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(p));
}
DEVICE void load_turned(u32 (&r)[4], u32 p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(p));
}
DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {  // c [16 x 8] += a [16 x 16] b [16 x 8]
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void multiply_anew(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {  // c = a b
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}

// Calls `use` COUNT times; the operands of the next calls are loaded meanwhile.
template <int COUNT, class Load, class Use> DEVICE void in_turn(Load load_one, Use use) {
    constexpr int AHEAD = COUNT < 3 ? COUNT : 3;
    u32 b[AHEAD][4];
#pragma unroll
    for (int i = 0; i < AHEAD - 1; i++) load_one(i, b[i]);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        if (i + AHEAD - 1 < COUNT) load_one(i + AHEAD - 1, b[(i + AHEAD - 1) % AHEAD]);
        use(i, b[i % AHEAD]);
    }
}

// z [16 x N] += a [16 x K] times a weight [N x K], transposed.
template <int K, int N> DEVICE void forward(float (&z)[N / 8][4], const u32 (&a)[K / 16][4], const half* weight) {
    const int lane = threadIdx.x & 31;
    const half* own = weight + ((lane >> 4) * 8 + (lane & 7)) * (K + PAD) + (lane >> 3 & 1) * 8;
    in_turn<K / 16 * N / 16>(
        [&](int i, u32 (&b)[4]) { load(b, at(own + i % (N / 16) * 16 * (K + PAD) + i / (N / 16) * 16)); },
        [&](int i, const u32 (&b)[4]) {
            const int n = i % (N / 16), k = i / (N / 16);
            multiply(z[2 * n], a[k], b[0], b[1]);
            multiply(z[2 * n + 1], a[k], b[2], b[3]);
        });
}

// z [16 x N] = a [16 x K] times a weight [K x N].
template <int K, int N> DEVICE void backward(float (&z)[N / 8][4], const u32 (&a)[K / 16][4], const half* weight) {
    const int lane = threadIdx.x & 31;
    const half* own = weight + ((lane >> 3 & 1) * 8 + (lane & 7)) * (N + PAD) + (lane >> 4) * 8;
    in_turn<K / 16 * N / 16>(
        [&](int i, u32 (&b)[4]) { load_turned(b, at(own + i / (N / 16) * 16 * (N + PAD) + i % (N / 16) * 16)); },
        [&](int i, const u32 (&b)[4]) {
            const int n = i % (N / 16), k = i / (N / 16);
            if (k) multiply(z[2 * n], a[k], b[0], b[1]), multiply(z[2 * n + 1], a[k], b[2], b[3]);
            else multiply_anew(z[2 * n], a[k], b[0], b[1]), multiply_anew(z[2 * n + 1], a[k], b[2], b[3]);
        });
}

// Loads rows k..k+15 of a tile [samples x columns], transposed: 16 of its columns as the rows of the first operand, or as the columns of the second.
DEVICE void rows_of(u32 (&a)[4], const half* tile, int stride, int k, int column) {
    const int lane = threadIdx.x & 31, block = lane >> 3, row = lane & 7;
    load_turned(a, at(tile + (k * 16 + (block >> 1) * 8 + row) * stride + column + (block & 1) * 8));
}
DEVICE void columns_of(u32 (&b)[4], const half* tile, int stride, int k, int column) {
    const int lane = threadIdx.x & 31, block = lane >> 3, row = lane & 7;
    load_turned(b, at(tile + (k * 16 + (block & 1) * 8 + row) * stride + column + (block >> 1) * 8));
}

// Stores an operand as a warp's 16 rows of a tile.
template <int K> DEVICE void put(half* tile, const u32 (&a)[K / 16][4]) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int k = 0; k < K / 16; k++) {
#if __CUDA_ARCH__ >= 900
        const u32 p = at(tile + ((lane >> 3 & 1) * 8 + (lane & 7)) * (K + PAD) + k * 16 + (lane >> 4) * 8);
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" :: "r"(p), "r"(a[k][0]), "r"(a[k][1]), "r"(a[k][2]), "r"(a[k][3]) : "memory");
#else
#pragma unroll
        for (int part = 0; part < 4; part++)
            *(u32*)(tile + ((lane >> 2) + (part & 1) * 8) * (K + PAD) + k * 16 + (part >> 1) * 8 + 2 * (lane & 3)) = a[k][part];
#endif
    }
}

// --- the network ---

struct __align__(16) Weights {  // of one network, in the layout of the matrix products
    half first[WIDTH * (SEEN + PAD)], first_rest[TOGETHER ? 8 : WIDTH * (SEEN + PAD)];
    half hidden[LAYERS > 1 ? LAYERS - 1 : 1][WIDTH * (WIDTH + PAD)];
    half head[OUT * (WIDTH + PAD)], head_rest[PAIRED ? 8 : OUT * (WIDTH + PAD)];
    float bias[LAYERS][WIDTH], head_bias[OUT];
};

// Writes parameter number i of a network to its positions. All other positions stay zero.
DEVICE void place(Weights& w, int i, float v, int outputs) {
    if (i < WIDTH * INPUTS) {
        const int o = i / INPUTS, k = i % INPUTS;
        half* row = w.first + o * (SEEN + PAD);
        v *= BEND;
        row[k] = narrow(v);
        if (TOGETHER) row[INPUTS + 1 + k] = narrow(v), row[2 * INPUTS + 1 + k] = narrow(rest(v));
        else w.first_rest[o * (SEEN + PAD) + k] = narrow(rest(v));
    } else if (i < FIRST) {
        w.bias[0][i - WIDTH * INPUTS] = v * BEND;
    } else if (i < BEFORE_HEAD) {
        const int l = (i - FIRST) / HIDDEN, j = (i - FIRST) % HIDDEN;
        if (j < WIDTH * WIDTH) w.hidden[l][j / WIDTH * (WIDTH + PAD) + j % WIDTH] = narrow(v * BEND);
        else w.bias[l + 1][j - WIDTH * WIDTH] = v * BEND;
    } else if (i < BEFORE_HEAD + outputs * WIDTH) {
        const int o = (i - BEFORE_HEAD) / WIDTH, k = (i - BEFORE_HEAD) % WIDTH;
        w.head[o * (WIDTH + PAD) + k] = narrow(v);
        if (PAIRED) w.head[(o + 8) * (WIDTH + PAD) + k] = narrow(rest(v));
        else w.head_rest[o * (WIDTH + PAD) + k] = narrow(rest(v));
    } else {
        w.head_bias[i - BEFORE_HEAD - outputs * WIDTH] = v;
    }
}

struct Prepare { const float* parameters; Weights* weights; const u64* table; u64* streams; const int* turn; int width; };

// Before an epoch: converts the parameters of both networks to `weights`, and copies the epoch's random keys from the table.
extern "C" __global__ void __launch_bounds__(256) prepare(Prepare a) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i < a.width) a.streams[i] = a.table[*a.turn * a.width + i];
    if (i < SIZE) i < ACTOR ? place(a.weights[0], i, a.parameters[i], ACTIONS) : place(a.weights[1], i - ACTOR, a.parameters[i], 1);
}

DEVICE void take_in(Weights& w, const Weights* from) {
    static_assert(sizeof(Weights) % 16 == 0, "copied by 16 bytes");
#pragma unroll 4
    for (int i = threadIdx.x; i < sizeof(Weights) / 16; i += blockDim.x) ((uint4*)&w)[i] = ((const uint4*)from)[i];
}

// Initialises a layer's sums with its bias.
template <int N> DEVICE void begin(float (&z)[N / 8][4], const float* bias) {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        const float2 b = *(const float2*)(bias + n * 8 + 2 * t);
        z[n][0] = z[n][2] = b.x, z[n][1] = z[n][3] = b.y;
    }
}

// Computes the activations, as the next operand, and their slopes, which gradients are multiplied by; exact also where tanh is
// saturated. The weights of the next hidden layer are multiplied by BEND; the slope is divided by it.
template <int LAYER> DEVICE void activate(u32 (&h)[WIDTH / 16][4], u32 (&slope)[WIDTH / 16][4], const float (&z)[WIDTH / 8][4]) {
    constexpr float share = 4.f / (LAYER < LAYERS - 1 ? BEND : 1.f);
#pragma unroll
    for (int n = 0; n < WIDTH / 8; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float x = z[n][2 * r], y = z[n][2 * r + 1];
            u32 &to = h[n / 2][(n & 1) * 2 + r], &s = slope[n / 2][(n & 1) * 2 + r];
            if (RELU) {
                to = pack(fmaxf(x, 0.f), fmaxf(y, 0.f));
                s = pack(x > 0.f ? 1.f : 0.f, y > 0.f ? 1.f : 0.f);
            } else {  // with p = 1 / (1 + e^2z), tanh is 1 - 2p and its slope 4 (p - pp)
                const float p = inverse(1.f + power2(x)), q = inverse(1.f + power2(y)), a = p * share, b = q * share;
                to = pack(fmaf(p, -2.f, 1.f), fmaf(q, -2.f, 1.f));
                s = pack(fmaf(-a, p, a), fmaf(-b, q, b));
            }
        }
}

struct __align__(16) Seen {  // 16 observations, and their remainders where they do not fit in one product
    half now[16 * (SEEN + PAD)], rest[TOGETHER ? 8 : 16 * (SEEN + PAD)];
};

// Stores 16 observations; `row` is the one of this lane, for lanes 0 to 15.
DEVICE void put_seen(Seen& seen, const float* row, bool there) {
    const int lane = threadIdx.x & 31;
    __syncwarp();
    if (lane < 16) {
        float v[SEEN] = {};
#pragma unroll
        for (int i = 0; i < INPUTS; i++) {
            v[i] = there ? row[i] : 0.f;
            if (TOGETHER) v[INPUTS + 1 + i] = rest(v[i]), v[2 * INPUTS + 1 + i] = v[i];
        }
        v[INPUTS] = 1.f;
#pragma unroll
        for (int i = 0; i < SEEN; i += 8) {
            *(uint4*)(seen.now + lane * (SEEN + PAD) + i) = make_uint4(pack(v[i], v[i + 1]), pack(v[i + 2], v[i + 3]), pack(v[i + 4], v[i + 5]), pack(v[i + 6], v[i + 7]));
            if (!TOGETHER)
                *(uint4*)(seen.rest + lane * (SEEN + PAD) + i) = make_uint4(pack(rest(v[i]), rest(v[i + 1])), pack(rest(v[i + 2]), rest(v[i + 3])), pack(rest(v[i + 4]), rest(v[i + 5])), pack(rest(v[i + 6]), rest(v[i + 7])));
        }
    }
    __syncwarp();
}

template <int LAYER, class Keep> DEVICE void run_hidden(u32 (&h)[WIDTH / 16][4], u32 (&slope)[LAYERS][WIDTH / 16][4], const Weights& w, Keep keep) {
    if constexpr (LAYER < LAYERS) {
        float z[WIDTH / 8][4];
        begin<WIDTH>(z, w.bias[LAYER]);
        forward<WIDTH, WIDTH>(z, h, w.hidden[LAYER - 1]);
        activate<LAYER>(h, slope[LAYER], z);
        keep(LAYER, h);
        run_hidden<LAYER + 1>(h, slope, w, keep);
    }
}

// Runs all layers for 16 rows. `keep` is called with each hidden layer's activations; their slopes stay in registers.
template <class Keep>
DEVICE void run_net(float (&y)[OUT / 8][4], u32 (&slope)[LAYERS][WIDTH / 16][4], const Weights& w, const Seen& seen, Keep keep) {
    const int lane = threadIdx.x & 31, block = lane >> 3, row = lane & 7, t = lane & 3;
    u32 x[SEEN / 16][4], h[WIDTH / 16][4];
    float z[WIDTH / 8][4];
#pragma unroll
    for (int k = 0; k < SEEN / 16; k++) load(x[k], at(seen.now + ((block & 1) * 8 + row) * (SEEN + PAD) + k * 16 + (block >> 1) * 8));
    begin<WIDTH>(z, w.bias[0]);
    forward<SEEN, WIDTH>(z, x, w.first);
    if (!TOGETHER) {
        forward<SEEN, WIDTH>(z, x, w.first_rest);
#pragma unroll
        for (int k = 0; k < SEEN / 16; k++) load(x[k], at(seen.rest + ((block & 1) * 8 + row) * (SEEN + PAD) + k * 16 + (block >> 1) * 8));
        forward<SEEN, WIDTH>(z, x, w.first);
    }
    activate<0>(h, slope[0], z);
    keep(0, h);
    run_hidden<1>(h, slope, w, keep);
    begin<OUT>(y, w.head_bias);
    forward<WIDTH, OUT>(y, h, w.head);
    if (!PAIRED) forward<WIDTH, OUT>(y, h, w.head_rest);
    else
#pragma unroll
        for (int c = 0; c < 4; c++) y[0][c] += y[1][c];
}

DEVICE float over_four(float v) {  // the sum over the lanes that share a row
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
}
DEVICE float most_of_four(float v) {
    v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
    return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}

// --- learning ---

struct Learn {
    const float *seen, *facts, *stats;  // stats: mean and deviation of the advantages, scales of the actor's and the critic's gradients
    const Weights* weights;
    const int* rows;
    float* partial;
    int count, stride;
    float ratio_clip, value_clip, value_weight, entropy_weight;
};

// A warp's 16 samples, copied asynchronously while the previous ones are processed.
struct Coming {
    float seen[16][INPUTS], facts[16][6];
    DEVICE void fetch(const Learn& a, int row) {  // lanes 0 to 15 have the row of their sample, or -1
        constexpr int EACH = INPUTS + 6;
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int i = 0; i < (16 * EACH + 31) / 32; i++) {
            const int n = (i * 32 + lane) / EACH, k = (i * 32 + lane) % EACH;
            const long long from = __shfl_sync(~0u, row, n & 15);
            if (n < 16) {
                float* to = k < INPUTS ? &seen[n][k] : &facts[n][k - INPUTS];
                const float* source = k < INPUTS ? a.seen + from * INPUTS + k : a.facts + from * a.stride + k - INPUTS;
                if (from < 0) *to = 0.f;
                else asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"((u32)__cvta_generic_to_shared(to)), "l"(source) : "memory");
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    static DEVICE void wait() { asm volatile("cp.async.wait_all;" ::: "memory"); __syncwarp(); }
};

struct __align__(16) LearnRoom {
    Weights w;
    Coming coming[WARPS][2];
    Seen seen[WARPS];
    half h[LAYERS][TILE * (WIDTH + PAD)], d[LAYERS][TILE * (WIDTH + PAD)], out[TILE * (OUT + PAD)];
    float sums[WARPS][SUMS], head[WARPS][OUT];
};

// The gradients are summed in registers over all tiles of a block. With P blocks, blocks (p, 0) and (p, 1) compute the actor's
// and the critic's gradients of the tiles p, p + P, p + 2 P, ...
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) learn(Learn a) {
    extern __shared__ __align__(16) unsigned char memory[];
    LearnRoom& room = *(LearnRoom*)memory;
    const int critic = blockIdx.y, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int outputs = critic ? 1 : ACTIONS;
    take_in(room.w, a.weights + critic);
    __syncthreads();
    const float unit = a.stats[2 + critic], per_unit = 1.f / unit, mean = a.stats[0], per_spread = 1.f / a.stats[1];
    float first[MINE][SEEN / 8][4] = {}, hidden[LAYERS > 1 ? LAYERS - 1 : 1][MINE][WIDTH / 8][4] = {}, bias[LAYERS > 1 ? LAYERS - 1 : 1][MINE][4] = {};
    float head[MINE][OUT / 16][2][4] = {}, head_bias[OUTS][2] = {}, sums[SUMS] = {};
    const int tiles = (a.count + TILE - 1) / TILE;
    auto row_of = [&](int tile) {
        const int n = tile * TILE + warp * 16 + (lane & 15);
        return tile < tiles && n < a.count ? a.rows[n] : -1;
    };
    room.coming[warp][0].fetch(a, row_of(blockIdx.x));
    int next = row_of(blockIdx.x + gridDim.x);
    for (int tile = blockIdx.x, turn = 0; tile < tiles; tile += gridDim.x, turn ^= 1) {
        Coming& now = room.coming[warp][turn];
        now.wait();
        put_seen(room.seen[warp], now.seen[lane & 15], true);
        float known[2][3], alive[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float* f = now.facts[g + 8 * r];
            alive[r] = f[ALIVE];  // 0 for padding rows without a sample
            known[r][0] = f[critic ? TARGET : ACTION], known[r][1] = f[critic ? VALUE : LOGP], known[r][2] = (f[ADVANTAGE] - mean) * per_spread;
        }
        room.coming[warp][turn ^ 1].fetch(a, next);
        next = row_of(tile + 2 * gridDim.x);
        u32 slope[LAYERS][WIDTH / 16][4];
        float y[OUT / 8][4];
        run_net(y, slope, room.w, room.seen[warp], [&](int l, const u32 (&h)[WIDTH / 16][4]) { put<WIDTH>(room.h[l] + warp * 16 * (WIDTH + PAD), h); });
        float d[OUTS][4];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (critic) {
                const float value = y[0][2 * r], target = known[r][0], before = known[r][1];  // valid in lanes with t = 0
                float error = (value - target) * (value - target), slope_of = 2.f * (value - target);
                if (a.value_clip > 0.f) {
                    const float near = before + fminf(fmaxf(value - before, -a.value_clip), a.value_clip), other = (near - target) * (near - target);
                    if (other > error) error = other, slope_of = fabsf(value - before) <= a.value_clip ? 2.f * (near - target) : 0.f;
                }
#pragma unroll
                for (int n = 0; n < OUTS; n++) d[n][2 * r] = d[n][2 * r + 1] = 0.f;
                if (t == 0) d[0][2 * r] = 0.5f * a.value_weight * slope_of * alive[r] * per_unit, sums[4] += alive[r] * error;
            } else {
                const int action = (int)known[r][0];
                float most = -1e30f, total = 0.f, chosen = 0.f, entropy = 0.f, p[OUTS][2];
#pragma unroll
                for (int n = 0; n < OUTS; n++)
#pragma unroll
                    for (int c = 0; c < 2; c++) if (n * 8 + 2 * t + c < ACTIONS) most = fmaxf(most, y[n][2 * r + c]);
                most = most_of_four(most);
#pragma unroll
                for (int n = 0; n < OUTS; n++)
#pragma unroll
                    for (int c = 0; c < 2; c++) if (n * 8 + 2 * t + c < ACTIONS) total += power(y[n][2 * r + c] - most);
                const float norm = logarithm(over_four(total)) + most;
#pragma unroll
                for (int n = 0; n < OUTS; n++)
#pragma unroll
                    for (int c = 0; c < 2; c++) if (n * 8 + 2 * t + c < ACTIONS) {
                        const float l = y[n][2 * r + c] - norm;
                        p[n][c] = power(l), entropy -= p[n][c] * l;
                        if (n * 8 + 2 * t + c == action) chosen += l;
                    }
                entropy = over_four(entropy);
                const float moved = over_four(chosen) - known[r][1], ratio = power(moved), gain = known[r][2];
                const float near = fminf(fmaxf(ratio, 1.f - a.ratio_clip), 1.f + a.ratio_clip);
                const float pull = ratio * gain <= near * gain ? -ratio * gain : 0.f;  // 0 where the ratio is clipped
#pragma unroll
                for (int n = 0; n < OUTS; n++)
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        const int o = n * 8 + 2 * t + c;
                        const float l = y[n][2 * r + c] - norm;
                        d[n][2 * r + c] = o < ACTIONS ? (pull * ((o == action ? 1.f : 0.f) - p[n][c]) + a.entropy_weight * p[n][c] * (l + entropy)) * alive[r] * per_unit : 0.f;
                    }
                if (t == 0) {
                    sums[0] += alive[r] * (-fminf(ratio * gain, near * gain) - a.entropy_weight * entropy);
                    sums[1] += alive[r] * entropy;
                    sums[2] += alive[r] * (ratio - 1.f - moved);
                    sums[3] += fabsf(ratio - 1.f) > a.ratio_clip ? alive[r] : 0.f;
                    sums[5] += alive[r];
                }
            }
#pragma unroll
            for (int n = 0; n < OUTS; n++) head_bias[n][0] += d[n][2 * r], head_bias[n][1] += d[n][2 * r + 1];
        }
        // backward through the layers; each warp has its own rows
        u32 e[OUT / 16][4];
#pragma unroll
        for (int n = 0; n < OUT / 8; n++) {  // twice if the weights are paired with their remainders; zeros after the last
            const int from = PAIRED ? 0 : n < OUTS ? n : 0;
            const bool zero = !PAIRED && n >= OUTS;
            e[n / 2][(n & 1) * 2] = zero ? 0 : pack(d[from][0], d[from][1]), e[n / 2][(n & 1) * 2 + 1] = zero ? 0 : pack(d[from][2], d[from][3]);
        }
        put<OUT>(room.out + warp * 16 * (OUT + PAD), e);
        u32 back[WIDTH / 16][4];
#pragma unroll
        for (int l = LAYERS - 1; l >= 0; l--) {
            float z[WIDTH / 8][4];
            if (l == LAYERS - 1) backward<OUT, WIDTH>(z, e, room.w.head);
            else backward<WIDTH, WIDTH>(z, back, room.w.hidden[l]);
#pragma unroll
            for (int n = 0; n < WIDTH / 8; n++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    back[n / 2][(n & 1) * 2 + r] = times(pack(z[n][2 * r], z[n][2 * r + 1]), slope[l][n / 2][(n & 1) * 2 + r]);
                }
            put<WIDTH>(room.d[l] + warp * 16 * (WIDTH + PAD), back);
        }
        __syncthreads();
        // gradients of the weights over all rows; each warp has its own units
#pragma unroll
        for (int m = 0; m < MINE; m++) {
            const int unit16 = warp + m * WARPS;
            if (unit16 < BLOCKS) {
#pragma unroll
                for (int k = 0; k < TILE / 16; k++) {
                    u32 x[SEEN / 16][4], rows[LAYERS][4], columns[4], out[OUT / 16][4];
#pragma unroll
                    for (int l = 0; l < LAYERS; l++) rows_of(rows[l], room.d[l], WIDTH + PAD, k, unit16 * 16);
#pragma unroll
                    for (int n = 0; n < SEEN / 16; n++) columns_of(x[n], room.seen[k].now, SEEN + PAD, 0, n * 16);
                    columns_of(columns, room.h[LAYERS - 1], WIDTH + PAD, k, unit16 * 16);
#pragma unroll
                    for (int o = 0; o < OUT / 16; o++) rows_of(out[o], room.out, OUT + PAD, k, o * 16);
#pragma unroll
                    for (int l = 1; l < LAYERS; l++)
                        in_turn<WIDTH / 16>(
                            [&](int n, u32 (&b)[4]) { columns_of(b, room.h[l - 1], WIDTH + PAD, k, n * 16); },
                            [&](int n, const u32 (&b)[4]) {
                                multiply(hidden[l - 1][m][2 * n], rows[l], b[0], b[1]);
                                multiply(hidden[l - 1][m][2 * n + 1], rows[l], b[2], b[3]);
                            });
#pragma unroll
                    for (int n = 0; n < SEEN / 8; n++)
                        if (n * 8 <= INPUTS) multiply(first[m][n], rows[0], x[n / 2][(n & 1) * 2], x[n / 2][(n & 1) * 2 + 1]);
#pragma unroll
                    for (int l = 1; l < LAYERS; l++)
                        multiply(bias[l - 1][m], rows[l], x[INPUTS / 16][INPUTS % 16 / 8 * 2], x[INPUTS / 16][INPUTS % 16 / 8 * 2 + 1]);
#pragma unroll
                    for (int o = 0; o < OUT / 16; o++) {
                        multiply(head[m][o][0], out[o], columns[0], columns[1]);
                        multiply(head[m][o][1], out[o], columns[2], columns[3]);
                    }
                }
            }
        }
        __syncthreads();
    }
    // write the sums of this block
    float* to = a.partial + (long long)blockIdx.x * PER_BLOCK + critic * ACTOR;
#pragma unroll
    for (int m = 0; m < MINE; m++) {
        const int unit16 = warp + m * WARPS;
        if (unit16 < BLOCKS) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int o = unit16 * 16 + g + (c >> 1) * 8;
#pragma unroll
                for (int n = 0; n < SEEN / 8; n++) {
                    const int i = n * 8 + 2 * t + (c & 1);
                    if (i < INPUTS) to[o * INPUTS + i] = first[m][n][c] * unit;
                    if (i == INPUTS) to[WIDTH * INPUTS + o] = first[m][n][c] * unit;
                }
#pragma unroll
                for (int l = 1; l < LAYERS; l++) {
                    float* layer = to + FIRST + (l - 1) * HIDDEN;
#pragma unroll
                    for (int n = 0; n < WIDTH / 8; n++) layer[o * WIDTH + n * 8 + 2 * t + (c & 1)] = hidden[l - 1][m][n][c] * unit;
                    if (INPUTS / 8 * 8 + 2 * t + (c & 1) == INPUTS) layer[WIDTH * WIDTH + o] = bias[l - 1][m][c] * unit;
                }
#pragma unroll
                for (int k = 0; k < OUT / 16; k++)
#pragma unroll
                    for (int n = 0; n < 2; n++) {
                        const int action = k * 16 + g + (c >> 1) * 8, i = unit16 * 16 + n * 8 + 2 * t + (c & 1);
                        if (action < outputs) to[BEFORE_HEAD + action * WIDTH + i] = head[m][k][n][c] * unit;
                    }
            }
        }
    }
    // sum over the lanes, then over the warps
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
        for (int step = 16; step; step >>= 1) sums[i] += __shfl_xor_sync(~0u, sums[i], step);
        if (lane == 0) room.sums[warp][i] = sums[i];
    }
#pragma unroll
    for (int n = 0; n < OUTS; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            for (int step = 16; step > 2; step >>= 1) head_bias[n][c] += __shfl_xor_sync(~0u, head_bias[n][c], step);
            if (g == 0) room.head[warp][n * 8 + 2 * t + c] = head_bias[n][c];
        }
    __syncthreads();
    float total = 0.f;
    if (threadIdx.x < outputs) {
        for (int w = 0; w < WARPS; w++) total += room.head[w][threadIdx.x];
        to[BEFORE_HEAD + outputs * WIDTH + threadIdx.x] = total * unit;
    } else if (threadIdx.x >= 64 && threadIdx.x < 64 + SUMS && ((threadIdx.x == 64 + 4) == (critic == 1))) {
        for (int w = 0; w < WARPS; w++) total += room.sums[w][threadIdx.x - 64];
        a.partial[(long long)blockIdx.x * PER_BLOCK + SIZE + threadIdx.x - 64] = total;
    }
}

struct AddUp {
    const float *partial, *counts;
    float *gradients, *squares, *corrections;
    int rows, number;
    float beta1, beta2;
};

// Sums the gradients over all blocks, 32 columns a block, with the sum of squares of each 32; computes Adam's bias corrections.
extern "C" __global__ void __launch_bounds__(512) add_up(AddUp a) {
    __shared__ float part[16][32];
    const int lane = threadIdx.x & 31, column = blockIdx.x * 32 + lane, row = threadIdx.x >> 5;
    float total = 0.f;
    if (column < PER_BLOCK)
#pragma unroll 8
        for (int r = row; r < a.rows; r += 16) total += a.partial[(long long)r * PER_BLOCK + column];
    part[row][lane] = total;
    __syncthreads();
    if (row == 0) {
        total = 0.f;
        for (int r = 0; r < 16; r++) total += part[r][lane];
        if (column < PER_BLOCK) a.gradients[column] = total;
        float square = column < SIZE ? total * total : 0.f;
        for (int step = 16; step; step >>= 1) square += __shfl_xor_sync(~0u, square, step);
        if (lane == 0) a.squares[blockIdx.x] = square;
    } else if (blockIdx.x == 0 && row < 3 && lane == 0) {
        a.corrections[row - 1] = 1. - pow((double)(row == 1 ? a.beta1 : a.beta2), (double)a.counts[0] + a.number + 1.);
    }
}

struct Update {
    float *parameters, *mean, *square, *ledger;
    Weights* weights;
    const float *gradients, *squares, *corrections, *rates, *recent;  // recent: return, length, explained variance, half the value weight
    const long long* step;  // the number of the epoch's first step
    int number, many, width, figures, rows;                           // number: of this step in the epoch; width, figures, rows: the shape of the metric ring
    float beta1, beta2, epsilon, decay, clip;
};

// Clips the gradient and takes Adam's step. The step's metrics are written to its row of the metric ring.
extern "C" __global__ void __launch_bounds__(256) update(Update a) {
    float sum = 0.f;  // of all squares; every warp computes it
    for (int i = threadIdx.x & 31; i < a.many; i += 32) sum += a.squares[i];
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
    const long long now = *a.step + a.number;
    const float living = a.gradients[SIZE + 5], samples = fmaxf(living, 1.f), norm = sqrtf(sum) / samples;
    const float factor = (a.clip > 0.f ? fminf(a.clip / (norm + 1e-6f), 1.f) : 1.f) / samples;
    const float rate = a.rates[now], step_size = rate / a.corrections[0], root = sqrtf(a.corrections[1]);
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i < SIZE) {
        const float gradient = a.gradients[i] * factor, m = a.mean[i] + (gradient - a.mean[i]) * (1.f - a.beta1);
        const float v = a.square[i] * a.beta2 + gradient * gradient * (1.f - a.beta2);
        const float p = a.parameters[i] * (1.f - rate * a.decay) - step_size * m / (sqrtf(v) / root + a.epsilon);
        a.parameters[i] = p, a.mean[i] = m, a.square[i] = v;
        i < ACTOR ? place(a.weights[0], i, p, ACTIONS) : place(a.weights[1], i - ACTOR, p, 1);
    }
    if (blockIdx.x == 0 && threadIdx.x < 9) {
        float* row = a.ledger + now % a.rows * a.width;
        const float* sums = a.gradients + SIZE;
        const float figures[8] = {sums[0] + a.recent[3] * sums[4], sums[1], sums[2], sums[3], sums[4],
                                  a.recent[0] * living, a.recent[1] * living, a.recent[2] * living};
        if (threadIdx.x == 8) row[0] = norm;
        else row[a.figures + threadIdx.x] = figures[threadIdx.x], row[a.figures + 8 + threadIdx.x] = living;
    }
}

struct Advance { long long* step; float* counts; int* turn; int counters, taken, turns; };

// After an epoch: advances the counters to the next epoch's first step.
extern "C" __global__ void __launch_bounds__(32) advance(Advance a) {
    for (int i = threadIdx.x; i < a.counters; i += 32) a.counts[i] += a.taken;
    if (threadIdx.x == 0) *a.step += a.taken, *a.turn = (*a.turn + 1) % a.turns;
}
