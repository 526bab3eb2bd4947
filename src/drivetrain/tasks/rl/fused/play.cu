// Plays environments with a policy and makes samples with advantages. Compiled after ppo.cu and the rules of an environment.

// --- random numbers: the same as KeyedRand of the engine ---

DEVICE u32 random_bits(u64 id, u64 counter, u64 key) {  // 24 bits
    u64 bits = id * 0x94D049BB133111EBull + counter * 0x9E3779B97F4A7C15ull + key;
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9ull;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBull;
    return (u32)((bits ^ bits >> 31) >> 40);
}
struct RandomNumbers {
    u64 id, counter, key;
    DEVICE float operator()(int i) const { return random_bits(id, counter + i, key) * 0x1p-24f; }
};

enum { TERMINATED = 1, DONE = 2 };  // bits of `end_flags`
// Positions in `stats`: values that one kernel of a collection passes to the next. stepper.py has the same numbers.
enum {
    COUNT, SUM, SQUARES,  // of the discounted sums of rewards
    SCALE,                // rewards are divided by it
    MEAN, DEVIATION,      // of the advantages
    ACTOR_GRADIENT_SCALE, CRITIC_GRADIENT_SCALE, RECENT_RETURN, RECENT_LENGTH, RECENT_EXPLAINED_VARIANCE, VALUE_LOSS_FACTOR, NUM_STATS
};
enum { NUM_EPISODES = 3, RETURN_SUM, LENGTH_SUM };    // of finished episodes: further partial sums, after COUNT, SUM and SQUARES
constexpr int NUM_PARTIAL_SUMS = 8, NUM_COLUMNS = 8;  // the columns of a sample take 32 bytes, one memory transaction

// Sums values over all threads of a block, in a fixed order.
template <int N> DEVICE void reduce_block(float (&values)[N], float* block_sums) {
    __shared__ float warp_sums[32][N];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, num_warps = blockDim.x + 31 >> 5;
#pragma unroll
    for (int i = 0; i < N; i++) {
        for (int offset = 16; offset; offset >>= 1) values[i] += __shfl_xor_sync(~0u, values[i], offset);
        if (lane == 0) warp_sums[warp][i] = values[i];
    }
    __syncthreads();
    if (threadIdx.x < N) {
        float total = 0.f;
        for (int warp_index = 0; warp_index < num_warps; warp_index++) total += warp_sums[warp_index][threadIdx.x];
        block_sums[threadIdx.x] = total;
    }
}

struct ActMemory {
    Weights weights;
    Observations observations[WARPS];
    float logits[WARPS][16][PADDED_ACTIONS];
};

// Samples an action with the policy's probabilities, from a uniform random number.
DEVICE int sample_action(const float* logits, float uniform, float& log_prob) {
    float max_logit = logits[0], total = 0.f, cumulative = 0.f;
    int action = 0;
    for (int i = 1; i < ACTIONS; i++) max_logit = fmaxf(max_logit, logits[i]);
    for (int i = 0; i < ACTIONS; i++) total += expf(logits[i] - max_logit);
    for (int i = 0; i < ACTIONS - 1; i++) {
        cumulative += expf(logits[i] - max_logit) / total;
        action += cumulative <= uniform;
    }
    log_prob = logits[action] - max_logit - logf(total);
    return action;
}

DEVICE void store_logits(float (*logits)[PADDED_ACTIONS], const float (&y)[PADDED_ACTIONS / 8][4]) {
    const int lane = threadIdx.x & 31, group = lane >> 2, member = lane & 3;
#pragma unroll
    for (int n = 0; n < ACTION_BLOCKS; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) logits[group + (c >> 1) * 8][n * 8 + 2 * member + (c & 1)] = y[n][c];
    __syncwarp();
}

#ifdef HAS_ENV_KERNEL

struct Play {
    void* state;
    long long* steps;
    float *returns, *discounted, *observations, *columns, *truncated_observations, *last_observations, *reward, *partial_sums;
    unsigned char* end_flags;
    const Weights* weights;
    const u64* random_key;
    int envs, horizon;
    float gamma;
};

// Each warp plays 16 environments through all steps. Lanes 0 to 15 step them; all lanes compute the policy's matrix products.
extern "C" __global__ void play(Play args) {
    extern __shared__ __align__(16) unsigned char memory[];
    ActMemory& shared = *(ActMemory*)memory;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    copy_to_shared(shared.weights, args.weights);
    __syncthreads();
    const int env = (blockIdx.x * (blockDim.x >> 5) + warp) * 16 + (lane & 15);
    const bool has_env = env < args.envs && lane < 16;
    EnvRules env_state;
    long long count = 0;
    float sum = 0.f, discounted = 0.f, partial_sums[NUM_PARTIAL_SUMS] = {};
    if (has_env) env_state.read(args.state, env), count = args.steps[env], sum = args.returns[env], discounted = args.discounted[env];
    constexpr int NUMBERS_PER_STEP = 1 + 2 * EnvRules::CHANCES;
    for (int step = 0; step < args.horizon; step++) {
        float x[INPUTS];
        env_state.observe(x);
        store_observations(shared.observations[warp], x, has_env);
        u32 slope[LAYERS][WIDTH / 16][4];
        float y[PADDED_ACTIONS / 8][4];
        run_net(y, slope, shared.weights, shared.observations[warp], [](int, const u32 (&)[WIDTH / 16][4]) {});
        store_logits(shared.logits[warp], y);
        if (has_env) {
            const long long row = (long long)env * args.horizon + step;
            const RandomNumbers random{(u64)env, (u64)step * NUMBERS_PER_STEP, *args.random_key};
            float log_prob;
            const int action = sample_action(shared.logits[warp][lane], random(0), log_prob);
            for (int i = 0; i < INPUTS; i++) args.observations[row * INPUTS + i] = x[i];
            *(float2*)(args.columns + row * NUM_COLUMNS + ACTION) = make_float2(action, log_prob);
            float reward;
            const bool terminated = env_state.step(action, RandomNumbers{random.id, random.counter + 1, random.key}, reward);
            count++, sum += reward, discounted = discounted * args.gamma + reward;
            const bool done = terminated || (EnvRules::LIMIT && count >= EnvRules::LIMIT);
            args.reward[row] = reward, args.end_flags[row] = (terminated ? TERMINATED : 0) | (done ? DONE : 0);
            partial_sums[COUNT] += 1.f, partial_sums[SUM] += discounted, partial_sums[SQUARES] += discounted * discounted;
            if (done) {
                if (!terminated) {
                    float next_observation[INPUTS];
                    env_state.observe(next_observation);
                    for (int i = 0; i < INPUTS; i++) args.truncated_observations[row * INPUTS + i] = next_observation[i];
                }
                partial_sums[NUM_EPISODES] += 1.f, partial_sums[RETURN_SUM] += sum, partial_sums[LENGTH_SUM] += count;
                env_state.reset(RandomNumbers{random.id, random.counter + 1 + EnvRules::CHANCES, random.key});
                count = 0, sum = 0.f, discounted = 0.f;
            }
        }
    }
    if (has_env) {
        env_state.write(args.state, env), args.steps[env] = count, args.returns[env] = sum, args.discounted[env] = discounted;
        float x[INPUTS];
        env_state.observe(x);
        for (int i = 0; i < INPUTS; i++) args.last_observations[env * INPUTS + i] = x[i];
    }
    reduce_block(partial_sums, args.partial_sums + blockIdx.x * NUM_PARTIAL_SUMS);
}

#endif

// --- environments of tensor functions: the policy, and the records of a step ---

struct Draws { float* uniform; const u64* random_key; int envs, horizon, chances; };

// Draws all random numbers that the steps and resets of a collection may use: [steps, environments, 2 * chances].
extern "C" __global__ void __launch_bounds__(256) draw(Draws args) {
    const int per_step = 2 * args.chances;
    const long long i = blockIdx.x * 256ll + threadIdx.x, row = i / per_step;
    if (row >= (long long)args.envs * args.horizon) return;
    const u64 env = row % args.envs, step = row / args.envs;
    args.uniform[i] = RandomNumbers{env, step * (1 + per_step) + 1 + i % per_step, *args.random_key}(0);
}

struct Act {
    const float* observation;  // observations: a row for each environment
    float *observations, *columns;
    long long* actions;
    const Weights* weights;
    const u64* random_key;
    int envs, horizon, step, numbers_per_step;
};

// Takes one step of the policy: samples an action for every environment.
extern "C" __global__ void __launch_bounds__(THREADS) act(Act args) {
    extern __shared__ __align__(16) unsigned char memory[];
    ActMemory& shared = *(ActMemory*)memory;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    copy_to_shared(shared.weights, args.weights);
    __syncthreads();
    for (int first_env = (blockIdx.x * (blockDim.x >> 5) + warp) * 16; first_env < args.envs; first_env += gridDim.x * (blockDim.x >> 5) * 16) {
        const int env = first_env + (lane & 15);
        const bool has_env = env < args.envs && lane < 16;
        const float* x = args.observation + (long long)env * INPUTS;
        store_observations(shared.observations[warp], x, has_env);
        u32 slope[LAYERS][WIDTH / 16][4];
        float y[PADDED_ACTIONS / 8][4];
        run_net(y, slope, shared.weights, shared.observations[warp], [](int, const u32 (&)[WIDTH / 16][4]) {});
        store_logits(shared.logits[warp], y);
        if (has_env) {
            const long long row = (long long)env * args.horizon + args.step;
            float log_prob;
            const RandomNumbers random{(u64)env, (u64)args.step * args.numbers_per_step, *args.random_key};
            const int action = sample_action(shared.logits[warp][lane], random(0), log_prob);
            for (int i = 0; i < INPUTS; i++) args.observations[row * INPUTS + i] = x[i];
            *(float2*)(args.columns + row * NUM_COLUMNS + ACTION) = make_float2(action, log_prob);
            args.actions[env] = action;
        }
    }
}

struct RecordStep {
    const float *step_reward, *next_observation;
    const unsigned char* terminated;
    long long* steps;
    float *returns, *discounted, *reward, *truncated_observations, *partial_sums;
    unsigned char *end_flags, *done;
    int envs, horizon, step, limit;
    float gamma;
};

// Records the rewards of a step, and which episodes are done.
extern "C" __global__ void __launch_bounds__(128) record_step(RecordStep args) {
    const int env = blockIdx.x * 128 + threadIdx.x;
    float partial_sums[NUM_PARTIAL_SUMS] = {};
    if (env < args.envs) {
        const long long row = (long long)env * args.horizon + args.step, count = args.steps[env] + 1;
        const float reward = args.step_reward[env], sum = args.returns[env] + reward, discounted = args.discounted[env] * args.gamma + reward;
        const bool terminated = args.terminated[env], done = terminated || (args.limit && count >= args.limit);
        args.reward[row] = reward, args.end_flags[row] = (terminated ? TERMINATED : 0) | (done ? DONE : 0), args.done[env] = done;
        args.steps[env] = done ? 0 : count, args.returns[env] = done ? 0.f : sum, args.discounted[env] = done ? 0.f : discounted;
        if (done && !terminated)
            for (int i = 0; i < INPUTS; i++) args.truncated_observations[row * INPUTS + i] = args.next_observation[(long long)env * INPUTS + i];
        partial_sums[COUNT] = 1.f, partial_sums[SUM] = discounted, partial_sums[SQUARES] = discounted * discounted;
        if (done) partial_sums[NUM_EPISODES] = 1.f, partial_sums[RETURN_SUM] = sum, partial_sums[LENGTH_SUM] = count;
    }
    __shared__ float sums[NUM_PARTIAL_SUMS];
    reduce_block(partial_sums, sums);
    float* block_sums = args.partial_sums + blockIdx.x * NUM_PARTIAL_SUMS + threadIdx.x;
    if (threadIdx.x < NUM_PARTIAL_SUMS) *block_sums = args.step ? *block_sums + sums[threadIdx.x] : sums[threadIdx.x];
}

struct AfterPlay {
    const float *partial_sums, *reward_sums, *recent;  // the state's rows, which are all equal
    float* stats;
    int blocks, scale_rewards;
    float value_loss_factor;
};

// After playing: computes the scale of rewards, and the mean return and length of finished episodes.
extern "C" __global__ void __launch_bounds__(32) after_play(AfterPlay args) {
    double totals[6] = {};
    for (int i = 0; i < 6; i++) {
        for (int block = threadIdx.x; block < args.blocks; block += 32) totals[i] += args.partial_sums[block * NUM_PARTIAL_SUMS + i];
        for (int offset = 16; offset; offset >>= 1) totals[i] += __shfl_xor_sync(~0u, totals[i], offset);
    }
    if (threadIdx.x) return;
    for (int i = 0; i < 3; i++) args.stats[i] = args.reward_sums[i] + (float)totals[i];
    const float mean = args.stats[SUM] / args.stats[COUNT];
    args.stats[SCALE] = args.scale_rewards ? fmaxf(sqrtf(fmaxf(args.stats[SQUARES] / args.stats[COUNT] - mean * mean, 0.f)), 1e-4f) : 1.f;
    for (int i = 0; i < 2; i++)  // the mean return, then the mean length
        args.stats[RECENT_RETURN + i] = totals[NUM_EPISODES] > 0 ? (float)(totals[RETURN_SUM + i] / totals[NUM_EPISODES]) : args.recent[i];
    args.stats[VALUE_LOSS_FACTOR] = args.value_loss_factor;
}

struct Value {
    const float* observations;
    const Weights* weights;
    float* values;
    const unsigned char* end_flags;  // if not null, only rows of truncated episodes are computed
    int count;
};
struct ValueMemory {
    Weights weights;
    Observations observations[WARPS];
};

// Computes the values of observations.
extern "C" __global__ void __launch_bounds__(THREADS) value(Value args) {
    extern __shared__ __align__(16) unsigned char memory[];
    ValueMemory& shared = *(ValueMemory*)memory;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2, member = lane & 3;
    copy_to_shared(shared.weights, args.weights + 1);
    __syncthreads();
    for (int first_row = (blockIdx.x * WARPS + warp) * 16; first_row < args.count; first_row += gridDim.x * WARPS * 16) {
        const int row = first_row + (lane & 15);
        const bool is_needed = row < args.count && (!args.end_flags || args.end_flags[row] == DONE);
        if (!__any_sync(~0u, is_needed)) continue;
        store_observations(shared.observations[warp], args.observations + (long long)row * INPUTS, is_needed);
        u32 slope[LAYERS][WIDTH / 16][4];
        float output[PADDED_ACTIONS / 8][4];
        run_net(output, slope, shared.weights, shared.observations[warp], [](int, const u32 (&)[WIDTH / 16][4]) {});
        if (member == 0) {
            if (first_row + group < args.count) args.values[first_row + group] = output[0][0];
            if (first_row + group + 8 < args.count) args.values[first_row + group + 8] = output[0][2];
        }
    }
}

struct ComputeAdvantages {
    const float *reward, *values, *truncated_values, *last_values, *stats;
    const unsigned char* end_flags;
    float *columns, *partial_sums;
    int envs, horizon;
    float gamma, gae_lambda;
};

// Computes generalised advantages, one thread for each environment. Reads and writes 32 steps of an environment at a time.
extern "C" __global__ void __launch_bounds__(128) compute_advantages(ComputeAdvantages args) {
    __shared__ float values[128][33], advantages[128][33];  // advantages: the rewards first, then the advantages
    __shared__ unsigned char tile_flags[128][36];
    const int first_env = blockIdx.x * 128, env = first_env + threadIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const float inverse_scale = 1.f / args.stats[SCALE];
    float partial_sums[NUM_PARTIAL_SUMS] = {}, advantage = 0.f, later_value = env < args.envs ? args.last_values[env] : 0.f;
    for (int end = args.horizon; end > 0; end -= 32) {
        const int begin = max(0, end - 32), step = begin + lane;
        for (int row = warp; row < 128 && first_env + row < args.envs; row += 4)
            if (step < end) {
                const long long index = (long long)(first_env + row) * args.horizon + step;
                values[row][lane] = args.values[index], advantages[row][lane] = args.reward[index], tile_flags[row][lane] = args.end_flags[index];
            }
        __syncthreads();
        if (env < args.envs)
            for (int i = end - begin - 1; i >= 0; i--) {
                const unsigned char flags = tile_flags[threadIdx.x][i];
                const float value = values[threadIdx.x][i];
                float next_value = later_value;
                if (flags & TERMINATED) next_value = 0.f;
                else if (flags & DONE) next_value = args.truncated_values[(long long)env * args.horizon + begin + i];
                advantage = advantages[threadIdx.x][i] * inverse_scale + args.gamma * next_value - value + (flags ? 0.f : args.gamma * args.gae_lambda * advantage);
                const float target = advantage + value;
                advantages[threadIdx.x][i] = advantage, later_value = value;
                partial_sums[0] += 1.f, partial_sums[1] += advantage, partial_sums[2] += advantage * advantage;
                partial_sums[3] += target, partial_sums[4] += target * target;
            }
        __syncthreads();
        for (int row = warp; row < 128 && first_env + row < args.envs; row += 4)
            if (step < end) {
                const long long index = (long long)(first_env + row) * args.horizon + step;
                float2* sample_columns = (float2*)(args.columns + index * NUM_COLUMNS + ADVANTAGE);
                const float value = values[row][lane], own_advantage = advantages[row][lane];
                // The advantage is not normalised: `learn` does that.
                sample_columns[0] = make_float2(own_advantage, own_advantage + value), sample_columns[1] = make_float2(value, 1.f);
            }
        __syncthreads();
    }
    reduce_block(partial_sums, args.partial_sums + blockIdx.x * NUM_PARTIAL_SUMS);
}

struct AfterAdvantages { const float* partial_sums; float* stats; int blocks; };

// Computes the mean and deviation of the advantages, and the explained variance of the values.
extern "C" __global__ void __launch_bounds__(256) after_advantages(AfterAdvantages args) {
    float* stats = args.stats;
    __shared__ double warp_sums[8][5];
    double totals[5] = {};
    for (int i = 0; i < 5; i++) {
        for (int block = threadIdx.x; block < args.blocks; block += 256) totals[i] += args.partial_sums[block * NUM_PARTIAL_SUMS + i];
        for (int offset = 16; offset; offset >>= 1) totals[i] += __shfl_xor_sync(~0u, totals[i], offset);
        if ((threadIdx.x & 31) == 0) warp_sums[threadIdx.x >> 5][i] = totals[i];
    }
    __syncthreads();
    if (threadIdx.x) return;
    for (int i = 0; i < 5; i++) {
        totals[i] = 0;
        for (int warp_index = 0; warp_index < 8; warp_index++) totals[i] += warp_sums[warp_index][i];
    }
    const double mean = totals[1] / totals[0], target_mean = totals[3] / totals[0];
    const double deviation = sqrt(fmax(totals[2] / totals[0] - mean * mean, 0.));
    const double target_deviation = sqrt(fmax(totals[4] / totals[0] - target_mean * target_mean, 0.));
    stats[MEAN] = mean, stats[DEVIATION] = deviation + 1e-8;
    stats[RECENT_EXPLAINED_VARIANCE] = 1. - (deviation / fmax(target_deviation, 1e-8)) * (deviation / fmax(target_deviation, 1e-8));
    // Gradients are stored in fp16: the scale moves a typical one to the middle of the range, far from overflow and underflow.
    stats[ACTOR_GRADIENT_SCALE] = 1.f / 32.f, stats[CRITIC_GRADIENT_SCALE] = fmax(sqrt(totals[2] / totals[0]), 1e-20) / 32.;
}

struct StoreState {
    const float* stats;
    float *reward_sums, *recent;
    long long* collections;
    int envs;
};

// Copies the statistics that the next collection needs into the state.
extern "C" __global__ void __launch_bounds__(256) store_state(StoreState args) {
    const int env = blockIdx.x * 256 + threadIdx.x;
    if (env >= args.envs) return;
    for (int i = 0; i < 3; i++) args.reward_sums[env * 3 + i] = args.stats[i];
    for (int i = 0; i < 2; i++) args.recent[env * 2 + i] = args.stats[RECENT_RETURN + i];
    args.collections[env]++;
}

struct Shuffle { int* rows; const u64* random_keys; int envs, horizon, samples_per_step; };  // samples_per_step: of one environment

// Writes the order of samples in each pass: the steps of each environment are shuffled separately, as by `SourceFeed`. A warp shuffles
// one environment: it sorts the steps by random keys.
extern "C" __global__ void __launch_bounds__(THREADS) shuffle(Shuffle args) {
    __shared__ u32 sort_keys[WARPS][256];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, env = blockIdx.x * WARPS + warp, pass = blockIdx.y;
    if (env >= args.envs) return;
    for (int i = lane; i < args.horizon; i += 32) sort_keys[warp][i] = random_bits(env, i, args.random_keys[pass]) << 8 | i;
    __syncwarp();
    for (int i = lane; i < args.horizon; i += 32) {
        const u32 own_key = sort_keys[warp][i];
        int position = 0;
        for (int j = 0; j < args.horizon; j++) position += sort_keys[warp][j] < own_key;
        const int first = position / args.samples_per_step * args.samples_per_step;  // of the optimizer step's samples of this environment
        args.rows[((long long)pass * args.horizon + first) * args.envs + (long long)env * args.samples_per_step + position % args.samples_per_step] =
            env * args.horizon + i;
    }
}

// stepper.py reads these sizes.
extern "C" __device__ const int memory_sizes[4] = {sizeof(LearnMemory), sizeof(ValueMemory), sizeof(ActMemory), sizeof(Weights)};
