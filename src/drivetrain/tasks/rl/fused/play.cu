// Plays environments with a policy and makes samples with advantages. Compiled after ppo.cu and the rules of an environment.

// --- random numbers: the same as KeyedRand of the engine ---

DEVICE u32 chance(u64 id, u64 place, u64 stream) {  // 24 bits
    u64 x = id * 0x94D049BB133111EBull + place * 0x9E3779B97F4A7C15ull + stream;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return (u32)((x ^ x >> 31) >> 40);
}
struct Luck {
    u64 id, place, stream;
    DEVICE float operator()(int i) const { return chance(id, place + i, stream) * 0x1p-24f; }
};

enum { ENDED = 1, OVER = 2 };
// Positions in `stats`: values that one kernel of a collection passes to the next. stepper.py uses MEAN, ACTOR_UNIT and RECENT.
enum { COUNT, SUM, SQUARES, SCALE, MEAN, SPREAD, ACTOR_UNIT, CRITIC_UNIT, RECENT_RETURN, RECENT_LENGTH, RECENT_EXPLAINED, VALUE_SHARE, STATS };
constexpr int PARTS = 8, FACTS = 8;  // the columns of a sample take 32 bytes, one memory transaction

template <int N> DEVICE void sum_of_block(float (&v)[N], float* to) {  // in a fixed order
    __shared__ float part[32][N];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x + 31 >> 5;
#pragma unroll
    for (int i = 0; i < N; i++) {
        for (int step = 16; step; step >>= 1) v[i] += __shfl_xor_sync(~0u, v[i], step);
        if (lane == 0) part[warp][i] = v[i];
    }
    __syncthreads();
    if (threadIdx.x < N) {
        float total = 0.f;
        for (int w = 0; w < warps; w++) total += part[w][threadIdx.x];
        to[threadIdx.x] = total;
    }
}

struct ActRoom {
    Weights w;
    Seen seen[WARPS];
    float logits[WARPS][16][OUT];
};

// Samples an action with the policy's probabilities; lanes 0 to 15 have a row each.
DEVICE int choose(const float* logits, float draw, float& logp) {
    float most = logits[0], total = 0.f, reached = 0.f;
    int action = 0;
    for (int i = 1; i < ACTIONS; i++) most = fmaxf(most, logits[i]);
    for (int i = 0; i < ACTIONS; i++) total += expf(logits[i] - most);
    for (int i = 0; i < ACTIONS - 1; i++) reached += expf(logits[i] - most) / total, action += reached <= draw;
    logp = logits[action] - most - logf(total);
    return action;
}

DEVICE void put_logits(float (*logits)[OUT], const float (&y)[OUT / 8][4]) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int n = 0; n < OUTS; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) logits[g + (c >> 1) * 8][n * 8 + 2 * t + (c & 1)] = y[n][c];
    __syncwarp();
}

#ifdef WORLD

struct Play {
    void* state;
    long long* steps;
    float *returns, *discounted, *seen, *facts, *beyond, *last, *reward, *partial;
    unsigned char* marks;
    const Weights* weights;
    const u64* stream;
    int envs, horizon;
    float gamma;
};

// Each warp plays 16 environments through all steps. Lanes 0 to 15 step them; all lanes compute the policy's matrix products.
extern "C" __global__ void play(Play a) {
    extern __shared__ __align__(16) unsigned char memory[];
    ActRoom& room = *(ActRoom*)memory;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    take_in(room.w, a.weights);
    __syncthreads();
    const int env = (blockIdx.x * (blockDim.x >> 5) + warp) * 16 + (lane & 15);
    const bool mine = env < a.envs && lane < 16;
    World world;
    long long count = 0;
    float sum = 0.f, discounted = 0.f, parts[PARTS] = {};
    if (mine) world.read(a.state, env), count = a.steps[env], sum = a.returns[env], discounted = a.discounted[env];
    constexpr int DRAWS = 1 + 2 * World::CHANCES;
    for (int step = 0; step < a.horizon; step++) {
        float x[INPUTS];
        world.observe(x);
        put_seen(room.seen[warp], x, mine);
        u32 slope[LAYERS][WIDTH / 16][4];
        float y[OUT / 8][4];
        run_net(y, slope, room.w, room.seen[warp], [](int, const u32 (&)[WIDTH / 16][4]) {});
        put_logits(room.logits[warp], y);
        if (mine) {
            const long long n = (long long)env * a.horizon + step;
            const Luck luck{(u64)env, (u64)step * DRAWS, *a.stream};
            float logp;
            const int action = choose(room.logits[warp][lane], luck(0), logp);
            for (int i = 0; i < INPUTS; i++) a.seen[n * INPUTS + i] = x[i];
            *(float2*)(a.facts + n * FACTS + ACTION) = make_float2(action, logp);
            float reward;
            const bool ended = world.step(action, Luck{luck.id, luck.place + 1, luck.stream}, reward);
            count++, sum += reward, discounted = discounted * a.gamma + reward;
            const bool over = ended || (World::LIMIT && count >= World::LIMIT);
            a.reward[n] = reward, a.marks[n] = (ended ? ENDED : 0) | (over ? OVER : 0);
            parts[COUNT] += 1.f, parts[SUM] += discounted, parts[SQUARES] += discounted * discounted;
            if (over) {
                if (!ended) { float y[INPUTS]; world.observe(y); for (int i = 0; i < INPUTS; i++) a.beyond[n * INPUTS + i] = y[i]; }
                parts[3] += 1.f, parts[4] += sum, parts[5] += count;
                world.reset(Luck{luck.id, luck.place + 1 + World::CHANCES, luck.stream});
                count = 0, sum = 0.f, discounted = 0.f;
            }
        }
    }
    if (mine) {
        world.write(a.state, env), a.steps[env] = count, a.returns[env] = sum, a.discounted[env] = discounted;
        float x[INPUTS];
        world.observe(x);
        for (int i = 0; i < INPUTS; i++) a.last[env * INPUTS + i] = x[i];
    }
    sum_of_block(parts, a.partial + blockIdx.x * PARTS);
}

#endif

// --- environments of tensor functions: the policy, and the records of a step ---

struct Draws { float* draws; const u64* stream; int envs, horizon, chances; };

// Draws all random numbers that the steps and resets of a collection may use: [steps, environments, 2 * chances].
extern "C" __global__ void __launch_bounds__(256) draw(Draws a) {
    const int each = 2 * a.chances;
    const long long i = blockIdx.x * 256ll + threadIdx.x, row = i / each;
    if (row < (long long)a.envs * a.horizon) a.draws[i] = Luck{(u64)(row % a.envs), (u64)(row / a.envs) * (1 + each) + 1 + i % each, *a.stream}(0);
}

struct Act {
    const float* now;  // observations: a row for each environment
    float *seen, *facts;
    long long* actions;
    const Weights* weights;
    const u64* stream;
    int envs, horizon, step, draws;
};

extern "C" __global__ void __launch_bounds__(THREADS) act(Act a) {
    extern __shared__ __align__(16) unsigned char memory[];
    ActRoom& room = *(ActRoom*)memory;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    take_in(room.w, a.weights);
    __syncthreads();
    for (int place = (blockIdx.x * (blockDim.x >> 5) + warp) * 16; place < a.envs; place += gridDim.x * (blockDim.x >> 5) * 16) {
        const int env = place + (lane & 15);
        const bool mine = env < a.envs && lane < 16;
        const float* x = a.now + (long long)env * INPUTS;
        put_seen(room.seen[warp], x, mine);
        u32 slope[LAYERS][WIDTH / 16][4];
        float y[OUT / 8][4];
        run_net(y, slope, room.w, room.seen[warp], [](int, const u32 (&)[WIDTH / 16][4]) {});
        put_logits(room.logits[warp], y);
        if (mine) {
            const long long n = (long long)env * a.horizon + a.step;
            float logp;
            const int action = choose(room.logits[warp][lane], Luck{(u64)env, (u64)a.step * a.draws, *a.stream}(0), logp);
            for (int i = 0; i < INPUTS; i++) a.seen[n * INPUTS + i] = x[i];
            *(float2*)(a.facts + n * FACTS + ACTION) = make_float2(action, logp);
            a.actions[env] = action;
        }
    }
}

struct Book {
    const float *gained, *beyond_now;
    const unsigned char* ended;
    long long* steps;
    float *returns, *discounted, *reward, *beyond, *partial;
    unsigned char *marks, *over;
    int envs, horizon, step, limit;
    float gamma;
};

// Records the rewards of a step, and which episodes are done.
extern "C" __global__ void __launch_bounds__(128) book(Book a) {
    const int env = blockIdx.x * 128 + threadIdx.x;
    float parts[PARTS] = {};
    if (env < a.envs) {
        const long long n = (long long)env * a.horizon + a.step, count = a.steps[env] + 1;
        const float reward = a.gained[env], sum = a.returns[env] + reward, discounted = a.discounted[env] * a.gamma + reward;
        const bool ended = a.ended[env], over = ended || (a.limit && count >= a.limit);
        a.reward[n] = reward, a.marks[n] = (ended ? ENDED : 0) | (over ? OVER : 0), a.over[env] = over;
        a.steps[env] = over ? 0 : count, a.returns[env] = over ? 0.f : sum, a.discounted[env] = over ? 0.f : discounted;
        if (over && !ended) for (int i = 0; i < INPUTS; i++) a.beyond[n * INPUTS + i] = a.beyond_now[(long long)env * INPUTS + i];
        parts[COUNT] = 1.f, parts[SUM] = discounted, parts[SQUARES] = discounted * discounted;
        if (over) parts[3] = 1.f, parts[4] = sum, parts[5] = count;
    }
    __shared__ float sums[PARTS];
    sum_of_block(parts, sums);
    float* to = a.partial + blockIdx.x * PARTS + threadIdx.x;
    if (threadIdx.x < PARTS) *to = a.step ? *to + sums[threadIdx.x] : sums[threadIdx.x];
}

struct Spread {
    const float *partial, *spread, *recent;  // the state's rows, which are all equal
    float* stats;
    int blocks, scaled;
    float value_share;
};

// After playing: computes the scale of rewards, and the mean return and length of finished episodes.
extern "C" __global__ void __launch_bounds__(32) after_play(Spread a) {
    double total[6] = {};
    for (int i = 0; i < 6; i++) {
        for (int b = threadIdx.x; b < a.blocks; b += 32) total[i] += a.partial[b * PARTS + i];
        for (int step = 16; step; step >>= 1) total[i] += __shfl_xor_sync(~0u, total[i], step);
    }
    if (threadIdx.x) return;
    for (int i = 0; i < 3; i++) a.stats[i] = a.spread[i] + (float)total[i];
    const float mean = a.stats[SUM] / a.stats[COUNT];
    a.stats[SCALE] = a.scaled ? fmaxf(sqrtf(fmaxf(a.stats[SQUARES] / a.stats[COUNT] - mean * mean, 0.f)), 1e-4f) : 1.f;
    for (int i = 0; i < 2; i++) a.stats[RECENT_RETURN + i] = total[3] > 0 ? (float)(total[4 + i] / total[3]) : a.recent[i];
    a.stats[VALUE_SHARE] = a.value_share;
}

struct Value {
    const float* seen;
    const Weights* weights;
    float* values;
    const unsigned char* marks;  // if not null, only rows of truncated episodes are computed
    int count;
};
struct ValueRoom {
    Weights w;
    Seen seen[WARPS];
};

// Computes the values of observations.
extern "C" __global__ void __launch_bounds__(THREADS) value(Value a) {
    extern __shared__ __align__(16) unsigned char memory[];
    ValueRoom& room = *(ValueRoom*)memory;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    take_in(room.w, a.weights + 1);
    __syncthreads();
    for (int place = (blockIdx.x * WARPS + warp) * 16; place < a.count; place += gridDim.x * WARPS * 16) {
        const int n = place + (lane & 15);
        const bool wanted = n < a.count && (!a.marks || a.marks[n] == OVER);
        if (!__any_sync(~0u, wanted)) continue;
        put_seen(room.seen[warp], a.seen + (long long)n * INPUTS, wanted);
        u32 slope[LAYERS][WIDTH / 16][4];
        float y[OUT / 8][4];
        run_net(y, slope, room.w, room.seen[warp], [](int, const u32 (&)[WIDTH / 16][4]) {});
        if (t == 0) {
            if (place + g < a.count) a.values[place + g] = y[0][0];
            if (place + g + 8 < a.count) a.values[place + g + 8] = y[0][2];
        }
    }
}

struct Judge {
    const float *reward, *values, *beyond, *last, *stats;
    const unsigned char* marks;
    float *facts, *partial;
    int envs, horizon;
    float gamma, decay;
};

// Computes generalised advantages, one thread for each environment; memory is read and written for 32 steps of an environment at a time.
extern "C" __global__ void __launch_bounds__(128) judge(Judge a) {
    __shared__ float value[128][33], gains[128][33];  // gains: the rewards first, then the advantages
    __shared__ unsigned char marks[128][36];
    const int first = blockIdx.x * 128, env = first + threadIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const float per_scale = 1.f / a.stats[SCALE];
    float parts[PARTS] = {}, gain = 0.f, after = env < a.envs ? a.last[env] : 0.f;
    for (int end = a.horizon; end > 0; end -= 32) {
        const int begin = max(0, end - 32), step = begin + lane;
        for (int row = warp; row < 128 && first + row < a.envs; row += 4)
            if (step < end) {
                const long long n = (long long)(first + row) * a.horizon + step;
                value[row][lane] = a.values[n], gains[row][lane] = a.reward[n], marks[row][lane] = a.marks[n];
            }
        __syncthreads();
        if (env < a.envs)
            for (int i = end - begin - 1; i >= 0; i--) {
                const unsigned char mark = marks[threadIdx.x][i];
                const float v = value[threadIdx.x][i];
                const float next = mark & ENDED ? 0.f : mark & OVER ? a.beyond[(long long)env * a.horizon + begin + i] : after;
                gain = gains[threadIdx.x][i] * per_scale + a.gamma * next - v + (mark ? 0.f : a.gamma * a.decay * gain);
                const float target = gain + v;
                gains[threadIdx.x][i] = gain, after = v;
                parts[0] += 1.f, parts[1] += gain, parts[2] += gain * gain, parts[3] += target, parts[4] += target * target;
            }
        __syncthreads();
        for (int row = warp; row < 128 && first + row < a.envs; row += 4)
            if (step < end) {
                float2* f = (float2*)(a.facts + ((long long)(first + row) * a.horizon + step) * FACTS + ADVANTAGE);
                const float v = value[row][lane], g = gains[row][lane];
                f[0] = make_float2(g, g + v), f[1] = make_float2(v, 1.f);  // the advantage is not normalised: `learn` subtracts the mean
            }
        __syncthreads();
    }
    sum_of_block(parts, a.partial + blockIdx.x * PARTS);
}

struct Judged { const float* partial; float* stats; int blocks; };

// Computes the mean and deviation of the advantages, and the explained variance of the values.
extern "C" __global__ void __launch_bounds__(256) after_judging(Judged a) {
    float* stats = a.stats;
    __shared__ double part[8][5];
    double total[5] = {};
    for (int i = 0; i < 5; i++) {
        for (int b = threadIdx.x; b < a.blocks; b += 256) total[i] += a.partial[b * PARTS + i];
        for (int step = 16; step; step >>= 1) total[i] += __shfl_xor_sync(~0u, total[i], step);
        if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5][i] = total[i];
    }
    __syncthreads();
    if (threadIdx.x) return;
    for (int i = 0; i < 5; i++) { total[i] = 0; for (int w = 0; w < 8; w++) total[i] += part[w][i]; }
    const double mean = total[1] / total[0], middle = total[3] / total[0];
    const double spread = sqrt(fmax(total[2] / total[0] - mean * mean, 0.)), wide = sqrt(fmax(total[4] / total[0] - middle * middle, 0.));
    stats[MEAN] = mean, stats[SPREAD] = spread + 1e-8;
    stats[RECENT_EXPLAINED] = 1. - (spread / fmax(wide, 1e-8)) * (spread / fmax(wide, 1e-8));
    // Gradients have 16 bits: their scale puts a typical one in the middle of the range, far from overflow and underflow.
    stats[ACTOR_UNIT] = 1.f / 32.f, stats[CRITIC_UNIT] = fmax(sqrt(total[2] / total[0]), 1e-20) / 32.;
}

struct Finish {
    const float* stats;
    float *spread, *recent;
    long long* collections;
    int envs;
};

// Stores what the next collection needs of this one in the state.
extern "C" __global__ void __launch_bounds__(256) finish(Finish a) {
    const int n = blockIdx.x * 256 + threadIdx.x;
    if (n >= a.envs) return;
    for (int i = 0; i < 3; i++) a.spread[n * 3 + i] = a.stats[i];
    for (int i = 0; i < 2; i++) a.recent[n * 2 + i] = a.stats[RECENT_RETURN + i];
    a.collections[n]++;
}

struct Shuffle { int* rows; const u64* streams; int envs, horizon, take; };

// The order of samples in each pass: every environment's steps are shuffled separately, as by `SourceFeed`; one warp for each environment.
extern "C" __global__ void __launch_bounds__(THREADS) shuffle(Shuffle a) {
    __shared__ u32 draws[WARPS][256];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, env = blockIdx.x * WARPS + warp, pass = blockIdx.y;
    if (env >= a.envs) return;
    for (int i = lane; i < a.horizon; i += 32) draws[warp][i] = chance(env, i, a.streams[pass]) << 8 | i;
    __syncwarp();
    for (int i = lane; i < a.horizon; i += 32) {
        const u32 own = draws[warp][i];
        int rank = 0;
        for (int j = 0; j < a.horizon; j++) rank += draws[warp][j] < own;
        a.rows[((long long)pass * a.horizon + rank / a.take * a.take) * a.envs + (long long)env * a.take + rank % a.take] = env * a.horizon + i;
    }
}

extern "C" __device__ const int rooms[4] = {sizeof(LearnRoom), sizeof(ValueRoom), sizeof(ActRoom), sizeof(Weights)};
