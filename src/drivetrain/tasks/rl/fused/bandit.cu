// The contextual bandit of envs/bandit.py.
#define HAS_ENV_KERNEL
struct EnvRules {
    static constexpr int CHANCES = 1, LIMIT = 100;
    int side;
    DEVICE void read(const void* state, int env) { side = (int)((const long long*)state)[env]; }
    DEVICE void write(void* state, int env) const { ((long long*)state)[env] = side; }
    DEVICE void observe(float* x) const { x[0] = side == 0, x[1] = side == 1; }
    template <class Random> DEVICE void reset(const Random& random) { side = random(0) < 0.5f; }
    template <class Random> DEVICE bool step(int action, const Random& random, float& reward) {
        reward = action == side;
        reset(random);
        return false;
    }
};
