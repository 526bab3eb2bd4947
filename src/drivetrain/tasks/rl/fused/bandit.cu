// The contextual bandit of envs/bandit.py.
#define WORLD
struct World {
    static constexpr int CHANCES = 1, LIMIT = 100;
    int side;
    DEVICE void read(const void* state, int env) { side = (int)((const long long*)state)[env]; }
    DEVICE void write(void* state, int env) const { ((long long*)state)[env] = side; }
    DEVICE void observe(float* x) const { x[0] = side == 0, x[1] = side == 1; }
    template <class L> DEVICE void reset(const L& luck) { side = luck(0) < 0.5f; }
    template <class L> DEVICE bool step(int action, const L& luck, float& reward) {
        reward = action == side;
        reset(luck);
        return false;
    }
};
