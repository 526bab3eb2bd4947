// PPO for two small MLPs, the actor and the critic. Their activations stay in registers and shared memory.
//
// Compiled for one shape: INPUTS numbers in an observation, LAYERS hidden layers of WIDTH units (RELU or tanh), ACTIONS actions.
// RESIDENT blocks of `learn` fit on one multiprocessor. Every kernel takes one struct: pointers, then integers, then floats.
// Matrix products take fp16 operands (11 bits of mantissa, as tf32) and add up in fp32. The first and the last layer decide the
// precision of probabilities and values. There, each operand is split into an fp16 number and its remainder, so that no precision
// is lost. Sums over blocks have a fixed order, so that the same samples give the same bits.
//
// Names: a lane is a thread of a warp. A product c = a b has a [16 x 16] and b [16 x 8]. In the layout of the tensor core
// instructions (see `mma.m16n8k16` in the PTX manual) `group` = lane / 4 is a lane's row, and `member` = lane % 4 its pair of columns.

typedef unsigned int u32;
typedef unsigned short half;  // only stored and moved
typedef unsigned long long u64;
#define DEVICE __device__ __forceinline__

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
// Whether one row of 16 holds the observation, a one, the observation's remainder, and the observation again (for the weights' remainder).
constexpr bool ONE_PRODUCT = 3 * INPUTS + 1 <= 16;
constexpr int OBSERVATION_WIDTH = ONE_PRODUCT ? 16 : round_up(INPUTS + 1, 16);  // the observation, a one for the biases' gradients, padding
constexpr bool PAIRED_HEAD = ACTIONS <= 8;  // whether the head's weights and their remainders are one operand
constexpr int PADDED_ACTIONS = round_up(ACTIONS, 16), ACTION_BLOCKS = round_up(ACTIONS, 8) / 8;
constexpr int TILE = 64;                    // samples that a block processes at a time: 16 for each warp
constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int PAD = 8;                      // unused numbers after each row, so that 8 consecutive rows are in different memory banks
constexpr int UNIT_BLOCKS = WIDTH / 16;     // blocks of 16 hidden units
constexpr int BLOCKS_PER_WARP = round_up(UNIT_BLOCKS, WARPS) / WARPS;
constexpr int FIRST_LAYER_SIZE = WIDTH * INPUTS + WIDTH, HIDDEN_LAYER_SIZE = WIDTH * WIDTH + WIDTH;
constexpr int HEAD_OFFSET = FIRST_LAYER_SIZE + (LAYERS - 1) * HIDDEN_LAYER_SIZE;
constexpr int ACTOR_SIZE = HEAD_OFFSET + ACTIONS * WIDTH + ACTIONS, CRITIC_SIZE = HEAD_OFFSET + WIDTH + 1;
constexpr int NUM_PARAMETERS = ACTOR_SIZE + CRITIC_SIZE;
// Sums over samples, which stand after the gradients. Two places are padding.
enum { LOSS_SUM, ENTROPY_SUM, KL_SUM, CLIPPED_SUM, VALUE_ERROR_SUM, ALIVE_SUM, NUM_SUMS = 8 };
constexpr int FLOATS_PER_BLOCK = NUM_PARAMETERS + NUM_SUMS;
constexpr float ACTIVATION_SCALE = RELU ? 1.f : 2.885390082f;  // 2 / log 2: weights of hidden layers are multiplied by it, so that tanh can use exp2
enum { ACTION, LOG_PROB, ADVANTAGE, TARGET, VALUE, IS_ALIVE };  // the first columns of a sample, as in COLUMNS of samples.py

// --- numbers and matrices ---

// Returns two floats as two fp16 numbers in 32 bits.
DEVICE u32 pack(float a, float b) { u32 r; asm("cvt.rn.satfinite.f16x2.f32 %0, %2, %1;" : "=r"(r) : "f"(a), "f"(b)); return r; }
DEVICE half to_half(float a) { half r; asm("cvt.rn.satfinite.f16.f32 %0, %1;" : "=h"(r) : "f"(a)); return r; }
DEVICE float to_float(half a) { float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(a)); return r; }
DEVICE float half_remainder(float a) { return a - to_float(to_half(a)); }  // what fp16 cannot represent
DEVICE u32 multiply_pairs(u32 a, u32 b) { u32 r; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
DEVICE u32 shared_address(const half* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE float fast_exp2(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DEVICE float fast_exp(float x) { return fast_exp2(x * 1.4426950409f); }
DEVICE float fast_log(float x) { float r; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r * 0.6931471806f; }
DEVICE float fast_reciprocal(float x) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }

DEVICE void load_matrices(u32 (&r)[4], u32 p) {  // four blocks of 8 x 8
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(p));
}
DEVICE void load_transposed(u32 (&r)[4], u32 p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(p));
}
DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {  // c [16 x 8] += a [16 x 16] b [16 x 8]
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {  // c = a b
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}

// Calls `use` COUNT times, and loads the operands of the next two calls before each.
template <int COUNT, class Load, class Use> DEVICE void for_each_prefetched(Load load_operand, Use use) {
    constexpr int NUM_BUFFERS = COUNT < 3 ? COUNT : 3;
    u32 buffers[NUM_BUFFERS][4];
#pragma unroll
    for (int i = 0; i < NUM_BUFFERS - 1; i++) load_operand(i, buffers[i]);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        if (i + NUM_BUFFERS - 1 < COUNT) load_operand(i + NUM_BUFFERS - 1, buffers[(i + NUM_BUFFERS - 1) % NUM_BUFFERS]);
        use(i, buffers[i % NUM_BUFFERS]);
    }
}

// z [16 x N] += a [16 x K] times a weight [N x K], transposed.
template <int K, int N> DEVICE void forward(float (&z)[N / 8][4], const u32 (&a)[K / 16][4], const half* weight) {
    const int lane = threadIdx.x & 31;
    const half* lane_weight = weight + ((lane >> 4) * 8 + (lane & 7)) * (K + PAD) + (lane >> 3 & 1) * 8;
    for_each_prefetched<K / 16 * N / 16>(
        [&](int i, u32 (&b)[4]) { load_matrices(b, shared_address(lane_weight + i % (N / 16) * 16 * (K + PAD) + i / (N / 16) * 16)); },
        [&](int i, const u32 (&b)[4]) {
            const int n = i % (N / 16), k = i / (N / 16);
            multiply_add(z[2 * n], a[k], b[0], b[1]);
            multiply_add(z[2 * n + 1], a[k], b[2], b[3]);
        });
}

// z [16 x N] = a [16 x K] times a weight [K x N].
template <int K, int N> DEVICE void backward(float (&z)[N / 8][4], const u32 (&a)[K / 16][4], const half* weight) {
    const int lane = threadIdx.x & 31;
    const half* lane_weight = weight + ((lane >> 3 & 1) * 8 + (lane & 7)) * (N + PAD) + (lane >> 4) * 8;
    for_each_prefetched<K / 16 * N / 16>(
        [&](int i, u32 (&b)[4]) { load_transposed(b, shared_address(lane_weight + i / (N / 16) * 16 * (N + PAD) + i % (N / 16) * 16)); },
        [&](int i, const u32 (&b)[4]) {
            const int n = i % (N / 16), k = i / (N / 16);
            if (k) multiply_add(z[2 * n], a[k], b[0], b[1]), multiply_add(z[2 * n + 1], a[k], b[2], b[3]);
            else multiply(z[2 * n], a[k], b[0], b[1]), multiply(z[2 * n + 1], a[k], b[2], b[3]);
        });
}

// Loads 16 rows (from row 16 k) and 16 columns of a tile [samples x columns], transposed, as the first or the second operand of a product.
DEVICE void load_first_operand(u32 (&a)[4], const half* tile, int stride, int k, int column) {
    const int lane = threadIdx.x & 31, block = lane >> 3, row = lane & 7;
    load_transposed(a, shared_address(tile + (k * 16 + (block >> 1) * 8 + row) * stride + column + (block & 1) * 8));
}
DEVICE void load_second_operand(u32 (&b)[4], const half* tile, int stride, int k, int column) {
    const int lane = threadIdx.x & 31, block = lane >> 3, row = lane & 7;
    load_transposed(b, shared_address(tile + (k * 16 + (block & 1) * 8 + row) * stride + column + (block >> 1) * 8));
}

// Stores an operand as a warp's 16 rows of a tile.
template <int K> DEVICE void store_rows(half* tile, const u32 (&a)[K / 16][4]) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int k = 0; k < K / 16; k++) {
#if __CUDA_ARCH__ >= 900
        const u32 p = shared_address(tile + ((lane >> 3 & 1) * 8 + (lane & 7)) * (K + PAD) + k * 16 + (lane >> 4) * 8);
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
    half first[WIDTH * (OBSERVATION_WIDTH + PAD)], first_remainder[ONE_PRODUCT ? 8 : WIDTH * (OBSERVATION_WIDTH + PAD)];
    half hidden[LAYERS > 1 ? LAYERS - 1 : 1][WIDTH * (WIDTH + PAD)];
    half head[PADDED_ACTIONS * (WIDTH + PAD)], head_remainder[PAIRED_HEAD ? 8 : PADDED_ACTIONS * (WIDTH + PAD)];
    float bias[LAYERS][WIDTH], head_bias[PADDED_ACTIONS];
};

// Writes parameter number i of a network to its positions. All other positions stay zero.
DEVICE void store_parameter(Weights& w, int i, float value, int outputs) {
    if (i < WIDTH * INPUTS) {
        const int output = i / INPUTS, input = i % INPUTS;
        half* row = w.first + output * (OBSERVATION_WIDTH + PAD);
        value *= ACTIVATION_SCALE;
        row[input] = to_half(value);
        if (ONE_PRODUCT) row[INPUTS + 1 + input] = to_half(value), row[2 * INPUTS + 1 + input] = to_half(half_remainder(value));
        else w.first_remainder[output * (OBSERVATION_WIDTH + PAD) + input] = to_half(half_remainder(value));
    } else if (i < FIRST_LAYER_SIZE) {
        w.bias[0][i - WIDTH * INPUTS] = value * ACTIVATION_SCALE;
    } else if (i < HEAD_OFFSET) {
        const int layer = (i - FIRST_LAYER_SIZE) / HIDDEN_LAYER_SIZE, index = (i - FIRST_LAYER_SIZE) % HIDDEN_LAYER_SIZE;
        if (index < WIDTH * WIDTH) w.hidden[layer][index / WIDTH * (WIDTH + PAD) + index % WIDTH] = to_half(value * ACTIVATION_SCALE);
        else w.bias[layer + 1][index - WIDTH * WIDTH] = value * ACTIVATION_SCALE;
    } else if (i < HEAD_OFFSET + outputs * WIDTH) {
        const int output = (i - HEAD_OFFSET) / WIDTH, input = (i - HEAD_OFFSET) % WIDTH;
        w.head[output * (WIDTH + PAD) + input] = to_half(value);
        if (PAIRED_HEAD) w.head[(output + 8) * (WIDTH + PAD) + input] = to_half(half_remainder(value));
        else w.head_remainder[output * (WIDTH + PAD) + input] = to_half(half_remainder(value));
    } else {
        w.head_bias[i - HEAD_OFFSET - outputs * WIDTH] = value;
    }
}

struct Prepare { const float* parameters; Weights* weights; const u64* key_table; u64* random_keys; const int* key_row; int num_keys; };

// Before an epoch: converts the parameters of both networks to `weights`, and copies the epoch's random keys from the table.
extern "C" __global__ void __launch_bounds__(256) prepare(Prepare a) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i < a.num_keys) a.random_keys[i] = a.key_table[*a.key_row * a.num_keys + i];
    if (i >= NUM_PARAMETERS) return;
    i < ACTOR_SIZE ? store_parameter(a.weights[0], i, a.parameters[i], ACTIONS) : store_parameter(a.weights[1], i - ACTOR_SIZE, a.parameters[i], 1);
}

DEVICE void copy_to_shared(Weights& target, const Weights* source) {
    static_assert(sizeof(Weights) % 16 == 0, "copied by 16 bytes");
#pragma unroll 4
    for (int i = threadIdx.x; i < sizeof(Weights) / 16; i += blockDim.x) ((uint4*)&target)[i] = ((const uint4*)source)[i];
}

// Initialises a layer's sums with its bias.
template <int N> DEVICE void init_with_bias(float (&z)[N / 8][4], const float* bias) {
    const int member = threadIdx.x & 3;
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        const float2 b = *(const float2*)(bias + n * 8 + 2 * member);
        z[n][0] = z[n][2] = b.x, z[n][1] = z[n][3] = b.y;
    }
}

// Computes the activations `h`, as the operand of the next layer, and their derivatives `slope`. Both are exact also where tanh is
// saturated. The weights of the next hidden layer are multiplied by ACTIVATION_SCALE, so the derivative is divided by it.
template <int LAYER> DEVICE void activate(u32 (&h)[WIDTH / 16][4], u32 (&slope)[WIDTH / 16][4], const float (&z)[WIDTH / 8][4]) {
    constexpr float slope_scale = 4.f / (LAYER < LAYERS - 1 ? ACTIVATION_SCALE : 1.f);
#pragma unroll
    for (int n = 0; n < WIDTH / 8; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float x = z[n][2 * r], y = z[n][2 * r + 1];
            u32 &activation = h[n / 2][(n & 1) * 2 + r], &slope_pair = slope[n / 2][(n & 1) * 2 + r];
            if (RELU) {
                activation = pack(fmaxf(x, 0.f), fmaxf(y, 0.f));
                slope_pair = pack(x > 0.f ? 1.f : 0.f, y > 0.f ? 1.f : 0.f);
            } else {  // with p = 1 / (1 + exp(2 z)), tanh(z) is 1 - 2 p and its derivative 4 (p - p p)
                const float p = fast_reciprocal(1.f + fast_exp2(x)), q = fast_reciprocal(1.f + fast_exp2(y));
                const float a = p * slope_scale, b = q * slope_scale;
                activation = pack(fmaf(p, -2.f, 1.f), fmaf(q, -2.f, 1.f));
                slope_pair = pack(fmaf(-a, p, a), fmaf(-b, q, b));
            }
        }
}

struct __align__(16) Observations {  // 16 observations, and their remainders where they do not fit in one product
    half values[16 * (OBSERVATION_WIDTH + PAD)], remainders[ONE_PRODUCT ? 8 : 16 * (OBSERVATION_WIDTH + PAD)];
};

// Stores 16 observations. Lanes 0 to 15 each store one: `row`, or zeros if it is not valid.
DEVICE void store_observations(Observations& observations, const float* row, bool is_valid) {
    const int lane = threadIdx.x & 31;
    __syncwarp();
    if (lane < 16) {
        float values[OBSERVATION_WIDTH] = {};
#pragma unroll
        for (int i = 0; i < INPUTS; i++) {
            values[i] = is_valid ? row[i] : 0.f;
            if (ONE_PRODUCT) values[INPUTS + 1 + i] = half_remainder(values[i]), values[2 * INPUTS + 1 + i] = values[i];
        }
        values[INPUTS] = 1.f;
#pragma unroll
        for (int i = 0; i < OBSERVATION_WIDTH; i += 8) {
            const float* v = values + i;
            const int offset = lane * (OBSERVATION_WIDTH + PAD) + i;
            *(uint4*)(observations.values + offset) = make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
            if (!ONE_PRODUCT)
                *(uint4*)(observations.remainders + offset) =
                    make_uint4(pack(half_remainder(v[0]), half_remainder(v[1])), pack(half_remainder(v[2]), half_remainder(v[3])),
                               pack(half_remainder(v[4]), half_remainder(v[5])), pack(half_remainder(v[6]), half_remainder(v[7])));
        }
    }
    __syncwarp();
}

// Runs the hidden layers from number LAYER on.
template <int LAYER, class OnHidden>
DEVICE void run_hidden(u32 (&h)[WIDTH / 16][4], u32 (&slope)[LAYERS][WIDTH / 16][4], const Weights& weights, OnHidden on_hidden) {
    if constexpr (LAYER < LAYERS) {
        float z[WIDTH / 8][4];
        init_with_bias<WIDTH>(z, weights.bias[LAYER]);
        forward<WIDTH, WIDTH>(z, h, weights.hidden[LAYER - 1]);
        activate<LAYER>(h, slope[LAYER], z);
        on_hidden(LAYER, h);
        run_hidden<LAYER + 1>(h, slope, weights, on_hidden);
    }
}

// Runs all layers for 16 rows: the outputs are `y`. Calls `on_hidden` with each hidden layer's activations; their derivatives stay in registers.
template <class OnHidden>
DEVICE void run_net(
    float (&y)[PADDED_ACTIONS / 8][4], u32 (&slope)[LAYERS][WIDTH / 16][4], const Weights& weights, const Observations& observations, OnHidden on_hidden
) {
    const int lane = threadIdx.x & 31, block = lane >> 3, row = lane & 7;
    const int offset = ((block & 1) * 8 + row) * (OBSERVATION_WIDTH + PAD) + (block >> 1) * 8;
    u32 x[OBSERVATION_WIDTH / 16][4], h[WIDTH / 16][4];
    float z[WIDTH / 8][4];
#pragma unroll
    for (int k = 0; k < OBSERVATION_WIDTH / 16; k++) load_matrices(x[k], shared_address(observations.values + offset + k * 16));
    init_with_bias<WIDTH>(z, weights.bias[0]);
    forward<OBSERVATION_WIDTH, WIDTH>(z, x, weights.first);
    if (!ONE_PRODUCT) {
        forward<OBSERVATION_WIDTH, WIDTH>(z, x, weights.first_remainder);
#pragma unroll
        for (int k = 0; k < OBSERVATION_WIDTH / 16; k++) load_matrices(x[k], shared_address(observations.remainders + offset + k * 16));
        forward<OBSERVATION_WIDTH, WIDTH>(z, x, weights.first);
    }
    activate<0>(h, slope[0], z);
    on_hidden(0, h);
    run_hidden<1>(h, slope, weights, on_hidden);
    init_with_bias<PADDED_ACTIONS>(y, weights.head_bias);
    forward<WIDTH, PADDED_ACTIONS>(y, h, weights.head);
    if (!PAIRED_HEAD) forward<WIDTH, PADDED_ACTIONS>(y, h, weights.head_remainder);
    else
#pragma unroll
        for (int c = 0; c < 4; c++) y[0][c] += y[1][c];
}

// Sums a value over the four lanes that share a row.
DEVICE float sum_of_four_lanes(float value) {
    value += __shfl_xor_sync(~0u, value, 1);
    return value + __shfl_xor_sync(~0u, value, 2);
}
DEVICE float max_of_four_lanes(float value) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
    return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}

// --- learning ---

struct Learn {
    const float *observations, *columns;
    const float* stats;      // mean and deviation of the advantages, scales of the actor's and the critic's gradients
    const Weights* weights;  // of the actor, then of the critic
    const int* rows;         // the samples to learn from
    float* partial_sums;     // of each block: gradients, then the sums over samples
    int count, stride;       // the number of samples, and of columns
    float ratio_clip, value_clip, value_weight, entropy_weight;
};

// A warp's next 16 samples, copied to shared memory while the previous ones are processed.
struct SampleBuffer {
    float observations[16][INPUTS], columns[16][6];
    DEVICE void start_copy(const Learn& args, int row) {  // in lanes 0 to 15, `row` is a sample's row, or -1 for zeros
        constexpr int FLOATS_PER_SAMPLE = INPUTS + 6;
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int i = 0; i < (16 * FLOATS_PER_SAMPLE + 31) / 32; i++) {
            const int sample = (i * 32 + lane) / FLOATS_PER_SAMPLE, column = (i * 32 + lane) % FLOATS_PER_SAMPLE;
            const long long source_row = __shfl_sync(~0u, row, sample & 15);
            if (sample < 16) {
                float* target = column < INPUTS ? &observations[sample][column] : &columns[sample][column - INPUTS];
                const float* source = column < INPUTS ? args.observations + source_row * INPUTS + column
                                                      : args.columns + source_row * args.stride + column - INPUTS;
                if (source_row < 0) *target = 0.f;
                else asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"((u32)__cvta_generic_to_shared(target)), "l"(source) : "memory");
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    static DEVICE void wait() { asm volatile("cp.async.wait_all;" ::: "memory"); __syncwarp(); }
};

struct __align__(16) LearnMemory {
    Weights weights;
    SampleBuffer buffers[WARPS][2];
    Observations observations[WARPS];
    half hidden[LAYERS][TILE * (WIDTH + PAD)], grad_hidden[LAYERS][TILE * (WIDTH + PAD)], grad_logits[TILE * (PADDED_ACTIONS + PAD)];
    float sums[WARPS][NUM_SUMS], grad_head_bias[WARPS][PADDED_ACTIONS];
};

// Computes the gradients of the loss. Each block sums the gradients of its tiles in registers. With P blocks, blocks (p, 0) and
// (p, 1) compute the actor's and the critic's gradients of the tiles p, p + P, p + 2 P, ...
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) learn(Learn args) {
    extern __shared__ __align__(16) unsigned char memory[];
    LearnMemory& shared = *(LearnMemory*)memory;
    const int critic = blockIdx.y, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    const int group = lane >> 2, member = lane & 3;
    const int num_outputs = critic ? 1 : ACTIONS;
    copy_to_shared(shared.weights, args.weights + critic);
    __syncthreads();
    // Gradients are divided by `scale` where they are stored in fp16.
    const float scale = args.stats[2 + critic], inverse_scale = 1.f / scale, mean = args.stats[0], inverse_deviation = 1.f / args.stats[1];
    constexpr int HIDDEN_PRODUCTS = LAYERS > 1 ? LAYERS - 1 : 1;  // at least 1, because an array cannot be empty
    float grad_first[BLOCKS_PER_WARP][OBSERVATION_WIDTH / 8][4] = {};
    float grad_weight[HIDDEN_PRODUCTS][BLOCKS_PER_WARP][WIDTH / 8][4] = {}, grad_bias[HIDDEN_PRODUCTS][BLOCKS_PER_WARP][4] = {};
    float grad_head[BLOCKS_PER_WARP][PADDED_ACTIONS / 16][2][4] = {}, grad_head_bias[ACTION_BLOCKS][2] = {}, sums[NUM_SUMS] = {};
    const int tiles = (args.count + TILE - 1) / TILE;
    auto row_of = [&](int tile) {
        const int n = tile * TILE + warp * 16 + (lane & 15);
        return tile < tiles && n < args.count ? args.rows[n] : -1;
    };
    shared.buffers[warp][0].start_copy(args, row_of(blockIdx.x));
    int next_row = row_of(blockIdx.x + gridDim.x);
    for (int tile = blockIdx.x, buffer = 0; tile < tiles; tile += gridDim.x, buffer ^= 1) {
        SampleBuffer& current = shared.buffers[warp][buffer];
        current.wait();
        store_observations(shared.observations[warp], current.observations[lane & 15], true);
        float inputs[2][3], is_alive[2];  // inputs: target and old value for the critic; action, old log probability and advantage for the actor
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float* sample = current.columns[group + 8 * r];
            is_alive[r] = sample[IS_ALIVE];  // 0 for padding rows without a sample
            inputs[r][0] = sample[critic ? TARGET : ACTION], inputs[r][1] = sample[critic ? VALUE : LOG_PROB];
            inputs[r][2] = (sample[ADVANTAGE] - mean) * inverse_deviation;
        }
        shared.buffers[warp][buffer ^ 1].start_copy(args, next_row);
        next_row = row_of(tile + 2 * gridDim.x);
        u32 slope[LAYERS][WIDTH / 16][4];
        float output[PADDED_ACTIONS / 8][4];
        run_net(output, slope, shared.weights, shared.observations[warp], [&](int layer, const u32 (&h)[WIDTH / 16][4]) {
            store_rows<WIDTH>(shared.hidden[layer] + warp * 16 * (WIDTH + PAD), h);
        });
        float grad_logits[ACTION_BLOCKS][4];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (critic) {
                const float value = output[0][2 * r], target = inputs[r][0], old_value = inputs[r][1];  // valid in lanes with member = 0
                float error = (value - target) * (value - target), error_slope = 2.f * (value - target);
                if (args.value_clip > 0.f) {
                    const float clipped = old_value + fminf(fmaxf(value - old_value, -args.value_clip), args.value_clip);
                    const float clipped_error = (clipped - target) * (clipped - target);
                    if (clipped_error > error) {
                        error = clipped_error;
                        error_slope = fabsf(value - old_value) <= args.value_clip ? 2.f * (clipped - target) : 0.f;
                    }
                }
#pragma unroll
                for (int n = 0; n < ACTION_BLOCKS; n++) grad_logits[n][2 * r] = grad_logits[n][2 * r + 1] = 0.f;
                if (member == 0) {
                    grad_logits[0][2 * r] = 0.5f * args.value_weight * error_slope * is_alive[r] * inverse_scale;
                    sums[VALUE_ERROR_SUM] += is_alive[r] * error;
                }
            } else {
                const int action = (int)inputs[r][0];
                float max_logit = -1e30f, total = 0.f, log_prob = 0.f, entropy = 0.f, probability[ACTION_BLOCKS][2];
#pragma unroll
                for (int n = 0; n < ACTION_BLOCKS; n++)
#pragma unroll
                    for (int c = 0; c < 2; c++) if (n * 8 + 2 * member + c < ACTIONS) max_logit = fmaxf(max_logit, output[n][2 * r + c]);
                max_logit = max_of_four_lanes(max_logit);
#pragma unroll
                for (int n = 0; n < ACTION_BLOCKS; n++)
#pragma unroll
                    for (int c = 0; c < 2; c++) if (n * 8 + 2 * member + c < ACTIONS) total += fast_exp(output[n][2 * r + c] - max_logit);
                const float norm = fast_log(sum_of_four_lanes(total)) + max_logit;
#pragma unroll
                for (int n = 0; n < ACTION_BLOCKS; n++)
#pragma unroll
                    for (int c = 0; c < 2; c++) if (n * 8 + 2 * member + c < ACTIONS) {
                        const float log_p = output[n][2 * r + c] - norm;
                        probability[n][c] = fast_exp(log_p), entropy -= probability[n][c] * log_p;
                        if (n * 8 + 2 * member + c == action) log_prob += log_p;
                    }
                entropy = sum_of_four_lanes(entropy);
                const float log_ratio = sum_of_four_lanes(log_prob) - inputs[r][1], ratio = fast_exp(log_ratio), advantage = inputs[r][2];
                const float clipped = fminf(fmaxf(ratio, 1.f - args.ratio_clip), 1.f + args.ratio_clip);
                const float log_prob_grad = ratio * advantage <= clipped * advantage ? -ratio * advantage : 0.f;  // 0 where the ratio is clipped
#pragma unroll
                for (int n = 0; n < ACTION_BLOCKS; n++)
#pragma unroll
                    for (int c = 0; c < 2; c++) {
                        const int o = n * 8 + 2 * member + c;
                        const float log_p = output[n][2 * r + c] - norm;
                        // The gradients of the policy's loss and of the entropy; 0 in padding.
                        grad_logits[n][2 * r + c] = o < ACTIONS ? (log_prob_grad * ((o == action ? 1.f : 0.f) - probability[n][c])
                            + args.entropy_weight * probability[n][c] * (log_p + entropy)) * is_alive[r] * inverse_scale : 0.f;
                    }
                if (member == 0) {
                    sums[LOSS_SUM] += is_alive[r] * (-fminf(ratio * advantage, clipped * advantage) - args.entropy_weight * entropy);
                    sums[ENTROPY_SUM] += is_alive[r] * entropy;
                    sums[KL_SUM] += is_alive[r] * (ratio - 1.f - log_ratio);
                    sums[CLIPPED_SUM] += fabsf(ratio - 1.f) > args.ratio_clip ? is_alive[r] : 0.f;
                    sums[ALIVE_SUM] += is_alive[r];
                }
            }
#pragma unroll
            for (int n = 0; n < ACTION_BLOCKS; n++) grad_head_bias[n][0] += grad_logits[n][2 * r], grad_head_bias[n][1] += grad_logits[n][2 * r + 1];
        }
        // Backward through the layers: each warp computes its own rows.
        u32 grad_operand[PADDED_ACTIONS / 16][4];
#pragma unroll
        for (int n = 0; n < PADDED_ACTIONS / 8; n++) {  // a paired head takes block 0 twice: for the weights and for their remainders
            const int source = PAIRED_HEAD ? 0 : n < ACTION_BLOCKS ? n : 0;
            const bool is_padding = !PAIRED_HEAD && n >= ACTION_BLOCKS;
            grad_operand[n / 2][(n & 1) * 2] = is_padding ? 0 : pack(grad_logits[source][0], grad_logits[source][1]);
            grad_operand[n / 2][(n & 1) * 2 + 1] = is_padding ? 0 : pack(grad_logits[source][2], grad_logits[source][3]);
        }
        store_rows<PADDED_ACTIONS>(shared.grad_logits + warp * 16 * (PADDED_ACTIONS + PAD), grad_operand);
        u32 layer_grad[WIDTH / 16][4];
#pragma unroll
        for (int layer = LAYERS - 1; layer >= 0; layer--) {
            float z[WIDTH / 8][4];
            if (layer == LAYERS - 1) backward<PADDED_ACTIONS, WIDTH>(z, grad_operand, shared.weights.head);
            else backward<WIDTH, WIDTH>(z, layer_grad, shared.weights.hidden[layer]);
#pragma unroll
            for (int n = 0; n < WIDTH / 8; n++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const int part = (n & 1) * 2 + r;
                    layer_grad[n / 2][part] = multiply_pairs(pack(z[n][2 * r], z[n][2 * r + 1]), slope[layer][n / 2][part]);
                }
            store_rows<WIDTH>(shared.grad_hidden[layer] + warp * 16 * (WIDTH + PAD), layer_grad);
        }
        __syncthreads();
        // Gradients of the weights, summed over all rows: each warp computes those of its own units.
#pragma unroll
        for (int m = 0; m < BLOCKS_PER_WARP; m++) {
            const int unit_block = warp + m * WARPS;
            if (unit_block < UNIT_BLOCKS) {
#pragma unroll
                for (int k = 0; k < TILE / 16; k++) {
                    u32 observation_columns[OBSERVATION_WIDTH / 16][4], grad_rows[LAYERS][4], last_hidden[4], logit_grads[PADDED_ACTIONS / 16][4];
#pragma unroll
                    for (int layer = 0; layer < LAYERS; layer++)
                        load_first_operand(grad_rows[layer], shared.grad_hidden[layer], WIDTH + PAD, k, unit_block * 16);
#pragma unroll
                    for (int n = 0; n < OBSERVATION_WIDTH / 16; n++)
                        load_second_operand(observation_columns[n], shared.observations[k].values, OBSERVATION_WIDTH + PAD, 0, n * 16);
                    load_second_operand(last_hidden, shared.hidden[LAYERS - 1], WIDTH + PAD, k, unit_block * 16);
#pragma unroll
                    for (int o = 0; o < PADDED_ACTIONS / 16; o++)
                        load_first_operand(logit_grads[o], shared.grad_logits, PADDED_ACTIONS + PAD, k, o * 16);
#pragma unroll
                    for (int layer = 1; layer < LAYERS; layer++)
                        for_each_prefetched<WIDTH / 16>(
                            [&](int n, u32 (&b)[4]) { load_second_operand(b, shared.hidden[layer - 1], WIDTH + PAD, k, n * 16); },
                            [&](int n, const u32 (&b)[4]) {
                                multiply_add(grad_weight[layer - 1][m][2 * n], grad_rows[layer], b[0], b[1]);
                                multiply_add(grad_weight[layer - 1][m][2 * n + 1], grad_rows[layer], b[2], b[3]);
                            });
#pragma unroll
                    for (int n = 0; n < OBSERVATION_WIDTH / 8; n++)
                        if (n * 8 <= INPUTS) {
                            const u32* operand = observation_columns[n / 2] + (n & 1) * 2;
                            multiply_add(grad_first[m][n], grad_rows[0], operand[0], operand[1]);
                        }
                    const u32* ones = observation_columns[INPUTS / 16] + INPUTS % 16 / 8 * 2;  // column INPUTS is 1, which sums over the samples
#pragma unroll
                    for (int layer = 1; layer < LAYERS; layer++) multiply_add(grad_bias[layer - 1][m], grad_rows[layer], ones[0], ones[1]);
#pragma unroll
                    for (int o = 0; o < PADDED_ACTIONS / 16; o++) {
                        multiply_add(grad_head[m][o][0], logit_grads[o], last_hidden[0], last_hidden[1]);
                        multiply_add(grad_head[m][o][1], logit_grads[o], last_hidden[2], last_hidden[3]);
                    }
                }
            }
        }
        __syncthreads();
    }
    // Write the sums of this block.
    float* block_sums = args.partial_sums + (long long)blockIdx.x * FLOATS_PER_BLOCK + critic * ACTOR_SIZE;
#pragma unroll
    for (int m = 0; m < BLOCKS_PER_WARP; m++) {
        const int unit_block = warp + m * WARPS;
        if (unit_block < UNIT_BLOCKS) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int o = unit_block * 16 + group + (c >> 1) * 8;
#pragma unroll
                for (int n = 0; n < OBSERVATION_WIDTH / 8; n++) {
                    const int i = n * 8 + 2 * member + (c & 1);
                    if (i < INPUTS) block_sums[o * INPUTS + i] = grad_first[m][n][c] * scale;
                    if (i == INPUTS) block_sums[WIDTH * INPUTS + o] = grad_first[m][n][c] * scale;
                }
#pragma unroll
                for (int layer = 1; layer < LAYERS; layer++) {
                    float* layer_sums = block_sums + FIRST_LAYER_SIZE + (layer - 1) * HIDDEN_LAYER_SIZE;
#pragma unroll
                    for (int n = 0; n < WIDTH / 8; n++)
                        layer_sums[o * WIDTH + n * 8 + 2 * member + (c & 1)] = grad_weight[layer - 1][m][n][c] * scale;
                    if (INPUTS / 8 * 8 + 2 * member + (c & 1) == INPUTS) layer_sums[WIDTH * WIDTH + o] = grad_bias[layer - 1][m][c] * scale;
                }
#pragma unroll
                for (int k = 0; k < PADDED_ACTIONS / 16; k++)
#pragma unroll
                    for (int n = 0; n < 2; n++) {
                        const int action = k * 16 + group + (c >> 1) * 8, i = unit_block * 16 + n * 8 + 2 * member + (c & 1);
                        if (action < num_outputs) block_sums[HEAD_OFFSET + action * WIDTH + i] = grad_head[m][k][n][c] * scale;
                    }
            }
        }
    }
    // Sum over the lanes, then over the warps.
#pragma unroll
    for (int i = 0; i < NUM_SUMS; i++) {
        for (int offset = 16; offset; offset >>= 1) sums[i] += __shfl_xor_sync(~0u, sums[i], offset);
        if (lane == 0) shared.sums[warp][i] = sums[i];
    }
#pragma unroll
    for (int n = 0; n < ACTION_BLOCKS; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            for (int offset = 16; offset > 2; offset >>= 1) grad_head_bias[n][c] += __shfl_xor_sync(~0u, grad_head_bias[n][c], offset);
            if (group == 0) shared.grad_head_bias[warp][n * 8 + 2 * member + c] = grad_head_bias[n][c];
        }
    __syncthreads();
    float total = 0.f;
    if (threadIdx.x < num_outputs) {
        for (int warp_index = 0; warp_index < WARPS; warp_index++) total += shared.grad_head_bias[warp_index][threadIdx.x];
        block_sums[HEAD_OFFSET + num_outputs * WIDTH + threadIdx.x] = total * scale;
    } else if (threadIdx.x >= 64 && threadIdx.x < 64 + NUM_SUMS && ((threadIdx.x == 64 + VALUE_ERROR_SUM) == (critic == 1))) {
        for (int warp_index = 0; warp_index < WARPS; warp_index++) total += shared.sums[warp_index][threadIdx.x - 64];
        args.partial_sums[(long long)blockIdx.x * FLOATS_PER_BLOCK + NUM_PARAMETERS + threadIdx.x - 64] = total;
    }
}

struct ReduceGradients {
    const float *partial_sums, *counts;
    float *gradients, *squares, *corrections;
    int num_blocks, step_number;
    float beta1, beta2;
};

// Sums the gradients over all blocks of `learn`. Each block here sums 32 columns and their squares. Block 0 computes Adam's bias corrections.
extern "C" __global__ void __launch_bounds__(512) reduce_gradients(ReduceGradients args) {
    __shared__ float row_sums[16][32];
    const int lane = threadIdx.x & 31, column = blockIdx.x * 32 + lane, row = threadIdx.x >> 5;
    float total = 0.f;
    if (column < FLOATS_PER_BLOCK)
#pragma unroll 8
        for (int r = row; r < args.num_blocks; r += 16) total += args.partial_sums[(long long)r * FLOATS_PER_BLOCK + column];
    row_sums[row][lane] = total;
    __syncthreads();
    if (row == 0) {
        total = 0.f;
        for (int r = 0; r < 16; r++) total += row_sums[r][lane];
        if (column < FLOATS_PER_BLOCK) args.gradients[column] = total;
        float squared = column < NUM_PARAMETERS ? total * total : 0.f;
        for (int offset = 16; offset; offset >>= 1) squared += __shfl_xor_sync(~0u, squared, offset);
        if (lane == 0) args.squares[blockIdx.x] = squared;
    } else if (blockIdx.x == 0 && row < 3 && lane == 0) {
        args.corrections[row - 1] = 1. - pow((double)(row == 1 ? args.beta1 : args.beta2), (double)args.counts[0] + args.step_number + 1.);
    }
}

struct Update {
    float *parameters, *mean, *square, *metric_ring;  // mean and square: Adam's moments
    Weights* weights;
    const float *gradients, *squares, *corrections, *learning_rates;
    const float* recent_metrics;   // return, length, explained variance, and half the value weight
    const long long* step;         // the number of the epoch's first step
    int step_number, num_squares;  // step_number: of this step in the epoch
    int ring_width, first_metric, ring_rows;
    float beta1, beta2, epsilon, weight_decay, clip;
};

// Clips the gradient and takes Adam's step. The step's metrics are written to its row of the metric ring.
extern "C" __global__ void __launch_bounds__(256) update(Update args) {
    float sum = 0.f;  // of the squares of all gradients; every warp computes it
    for (int i = threadIdx.x & 31; i < args.num_squares; i += 32) sum += args.squares[i];
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
    const long long current_step = *args.step + args.step_number;
    const float num_alive = args.gradients[NUM_PARAMETERS + ALIVE_SUM], num_samples = fmaxf(num_alive, 1.f), norm = sqrtf(sum) / num_samples;
    const float factor = (args.clip > 0.f ? fminf(args.clip / (norm + 1e-6f), 1.f) : 1.f) / num_samples;
    const float rate = args.learning_rates[current_step], step_size = rate / args.corrections[0], root = sqrtf(args.corrections[1]);
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i < NUM_PARAMETERS) {
        const float gradient = args.gradients[i] * factor, m = args.mean[i] + (gradient - args.mean[i]) * (1.f - args.beta1);
        const float v = args.square[i] * args.beta2 + gradient * gradient * (1.f - args.beta2);
        const float p = args.parameters[i] * (1.f - rate * args.weight_decay) - step_size * m / (sqrtf(v) / root + args.epsilon);
        args.parameters[i] = p, args.mean[i] = m, args.square[i] = v;
        i < ACTOR_SIZE ? store_parameter(args.weights[0], i, p, ACTIONS) : store_parameter(args.weights[1], i - ACTOR_SIZE, p, 1);
    }
    if (blockIdx.x == 0 && threadIdx.x < 9) {
        float* row = args.metric_ring + current_step % args.ring_rows * args.ring_width;
        const float* sums = args.gradients + NUM_PARAMETERS;
        const float* recent = args.recent_metrics;
        const float metrics[8] = {sums[LOSS_SUM] + recent[3] * sums[VALUE_ERROR_SUM], sums[ENTROPY_SUM], sums[KL_SUM], sums[CLIPPED_SUM],
                                  sums[VALUE_ERROR_SUM], recent[0] * num_alive, recent[1] * num_alive, recent[2] * num_alive};
        if (threadIdx.x == 8) row[0] = norm;
        else row[args.first_metric + threadIdx.x] = metrics[threadIdx.x], row[args.first_metric + 8 + threadIdx.x] = num_alive;
    }
}

struct Advance { long long* step; float* counts; int* key_row; int num_counts, num_steps, num_key_rows; };

// After an epoch: advances the counters to the next epoch's first step.
extern "C" __global__ void __launch_bounds__(32) advance(Advance args) {
    for (int i = threadIdx.x; i < args.num_counts; i += 32) args.counts[i] += args.num_steps;
    if (threadIdx.x == 0) *args.step += args.num_steps, *args.key_row = (*args.key_row + 1) % args.num_key_rows;
}
