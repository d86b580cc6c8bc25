// Counter-based uniforms, bit for bit those of sgl_muse_mega.speculative.philox.
#pragma once
#include "instr/core.cuh"

namespace philox {

enum Purpose : uint32_t { DRAFT = 0, ACCEPT = 1, SAMPLE = 2 };

// 24 random bits: the uniform is bits * 2^-24.
DEVICE uint32_t bits(uint64_t seed, uint64_t position, Purpose purpose) {
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    uint32_t c0 = static_cast<uint32_t>(position), c1 = static_cast<uint32_t>(position >> 32), c2 = purpose, c3 = 0;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * c0, b = static_cast<uint64_t>(0xCD9E8D57u) * c2;
        c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
        c1 = static_cast<uint32_t>(b);
        c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
        c3 = static_cast<uint32_t>(a);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c0 >> 8;
}
DEVICE float uniform(uint64_t seed, uint64_t position, Purpose purpose) {
    return static_cast<float>(bits(seed, position, purpose)) * 0x1p-24f;
}

}  // namespace philox
