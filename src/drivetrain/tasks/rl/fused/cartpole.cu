// The pole on a cart of envs/cartpole.py.
#define WORLD
struct World {
    static constexpr int CHANCES = 4, LIMIT = 500;
    float place, speed, angle, spin;
    DEVICE void read(const void* state, int env) { const float4 s = ((const float4*)state)[env]; place = s.x, speed = s.y, angle = s.z, spin = s.w; }
    DEVICE void write(void* state, int env) const { ((float4*)state)[env] = make_float4(place, speed, angle, spin); }
    DEVICE void observe(float* x) const { x[0] = place, x[1] = speed, x[2] = angle, x[3] = spin; }
    template <class L> DEVICE void reset(const L& luck) {
        place = luck(0) * 0.1f - 0.05f, speed = luck(1) * 0.1f - 0.05f, angle = luck(2) * 0.1f - 0.05f, spin = luck(3) * 0.1f - 0.05f;
    }
    template <class L> DEVICE bool step(int action, const L&, float& reward) {
        float sine, cosine;
        sincosf(angle, &sine, &cosine);
        const float push = (action * 20.f - 10.f + 0.05f * spin * spin * sine) / 1.1f;
        const float turn = (9.8f * sine - cosine * push) / (0.5f * (4.f / 3.f) - 0.05f / 1.1f * cosine * cosine);
        const float pull = push - 0.05f / 1.1f * turn * cosine;
        place += 0.02f * speed, speed += 0.02f * pull, angle += 0.02f * spin, spin += 0.02f * turn;
        reward = 1.f;
        return fabsf(place) > 2.4f || fabsf(angle) > 0.20943951f;
    }
};
