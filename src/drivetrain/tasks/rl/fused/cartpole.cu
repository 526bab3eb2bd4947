// The pole on a cart of envs/cartpole.py.
#define HAS_ENV_KERNEL
struct EnvRules {
    static constexpr int CHANCES = 4, LIMIT = 500;
    float position, speed, angle, angular_speed;
    DEVICE void read(const void* state, int env) {
        const float4 motion = ((const float4*)state)[env];
        position = motion.x, speed = motion.y, angle = motion.z, angular_speed = motion.w;
    }
    DEVICE void write(void* state, int env) const { ((float4*)state)[env] = make_float4(position, speed, angle, angular_speed); }
    DEVICE void observe(float* x) const { x[0] = position, x[1] = speed, x[2] = angle, x[3] = angular_speed; }
    template <class Random> DEVICE void reset(const Random& random) {
        position = random(0) * 0.1f - 0.05f, speed = random(1) * 0.1f - 0.05f;
        angle = random(2) * 0.1f - 0.05f, angular_speed = random(3) * 0.1f - 0.05f;
    }
    template <class Random> DEVICE bool step(int action, const Random&, float& reward) {
        float sine, cosine;
        sincosf(angle, &sine, &cosine);
        const float push = (action * 20.f - 10.f + 0.05f * angular_speed * angular_speed * sine) / 1.1f;
        const float angular_acceleration = (9.8f * sine - cosine * push) / (0.5f * (4.f / 3.f) - 0.05f / 1.1f * cosine * cosine);
        const float acceleration = push - 0.05f / 1.1f * angular_acceleration * cosine;
        position += 0.02f * speed, speed += 0.02f * acceleration;
        angle += 0.02f * angular_speed, angular_speed += 0.02f * angular_acceleration;
        reward = 1.f;
        return fabsf(position) > 2.4f || fabsf(angle) > 0.20943951f;
    }
};
