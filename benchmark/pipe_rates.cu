// Clocks per warp instruction and scheduler for the instructions of the NVFP4 decode, alone and mixed, on this GPU.
// nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -o pipe_rates pipe_rates.cu && ./pipe_rates
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>

constexpr int CHAINS = 8, TURNS = 256;


// Two register operands an instruction, as in the decode, and an immediate; 8 independent chains of each kind.
template <int LOGIC, int SHIFT, int PERMUTE, int MULTIPLY, int WIDE, int BF16, int HALF, int FP32, int TENSOR>
__global__ void mixed(uint32_t* out, long long* clocks, uint32_t seed) {
    uint32_t l[CHAINS], s[CHAINS], p[CHAINS], m[CHAINS], b[CHAINS], h[CHAINS], a[4];
    uint64_t w[CHAINS];
    float f[CHAINS], c[CHAINS][4];
    const uint32_t start = seed * (threadIdx.x + 1);
    for (int i = 0; i < CHAINS; ++i) {
        l[i] = s[i] = p[i] = m[i] = b[i] = h[i] = start + i;
        w[i] = start + i;
        f[i] = static_cast<float>(start + i);
        for (int j = 0; j < 4; ++j) c[i][j] = static_cast<float>(i + j);
    }
    for (int j = 0; j < 4; ++j) a[j] = start ^ j;
    __syncthreads();
    const long long begin = clock64();
    for (int turn = 0; turn < TURNS; ++turn) {
#pragma unroll
        for (int i = 0; i < CHAINS; ++i) {
            const int n = (i + 1) % CHAINS;
#pragma unroll
            for (int k = 0; k < TENSOR; ++k)
                asm volatile(
                    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
                    "{%0,%1,%2,%3};"
                    : "+f"(c[(i + k * 4) % CHAINS][0]), "+f"(c[(i + k * 4) % CHAINS][1]),
                      "+f"(c[(i + k * 4) % CHAINS][2]), "+f"(c[(i + k * 4) % CHAINS][3])
                    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[0]), "r"(a[1]));
#pragma unroll
            for (int k = 0; k < LOGIC; ++k)
                asm volatile("lop3.b32 %0, %0, %1, 0x1234abcd, 0xe8;" : "+r"(l[(i + k) % CHAINS]) : "r"(l[(n + k) % CHAINS]));
#pragma unroll
            for (int k = 0; k < SHIFT; ++k)
                asm volatile("shf.l.wrap.b32 %0, %0, %1, 7;" : "+r"(s[(i + k) % CHAINS]) : "r"(s[(n + k) % CHAINS]));
#pragma unroll
            for (int k = 0; k < PERMUTE; ++k)
                asm volatile("prmt.b32 %0, %0, %1, 0x3615;" : "+r"(p[(i + k) % CHAINS]) : "r"(p[(n + k) % CHAINS]));
#pragma unroll
            for (int k = 0; k < MULTIPLY; ++k)
                asm volatile("mad.lo.u32 %0, %0, 0x1041, %1;" : "+r"(m[(i + k) % CHAINS]) : "r"(m[(n + k) % CHAINS]));
#pragma unroll
            for (int k = 0; k < WIDE; ++k)
                asm volatile("mul.wide.u32 %0, %1, 0x21000004;" : "=l"(w[(i + k) % CHAINS]) : "r"(static_cast<uint32_t>(w[(n + k) % CHAINS] >> 32)));
#pragma unroll
            for (int k = 0; k < BF16; ++k)
                asm volatile("mul.rn.bf16x2 %0, %0, %1;" : "+r"(b[(i + k) % CHAINS]) : "r"(b[(n + k) % CHAINS]));
#pragma unroll
            for (int k = 0; k < HALF; ++k)
                asm volatile("mul.rn.f16x2 %0, %0, %1;" : "+r"(h[(i + k) % CHAINS]) : "r"(h[(n + k) % CHAINS]));
#pragma unroll
            for (int k = 0; k < FP32; ++k)
                asm volatile("fma.rn.f32 %0, %0, 0f3F800003, %1;" : "+f"(f[(i + k) % CHAINS]) : "f"(f[(n + k) % CHAINS]));
        }
    }
    const long long end = clock64();
    uint32_t sum = 0;
    for (int i = 0; i < CHAINS; ++i) {
        sum += l[i] ^ s[i] ^ p[i] ^ m[i] ^ b[i] ^ h[i] ^ static_cast<uint32_t>(w[i] >> 32) ^ __float_as_uint(f[i]);
        for (int j = 0; j < 4; ++j) sum ^= __float_as_uint(c[i][j]);
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
    if (threadIdx.x == 0) clocks[blockIdx.x] = end - begin;
}

// Clocks per turn of one chain's mix and per warp of a scheduler, with 2 and with 4 warps on each scheduler.
template <int... COUNTS>
void report(const char* name, uint32_t* out, long long* clocks) {
    printf("%-44s", name);
    for (int warps : {8, 16}) {
        for (int i = 0; i < 2; ++i) mixed<COUNTS...><<<132, warps * 32>>>(out, clocks, 12345u + i);
        const cudaError_t status = cudaDeviceSynchronize();
        if (status != cudaSuccess) {
            printf("%s\n", cudaGetErrorString(status));
            return;
        }
        printf("  %6.2f", static_cast<double>(clocks[0]) / (TURNS * CHAINS) / (warps / 4));
    }
    printf("\n");
}

int main() {
    uint32_t* out;
    long long* clocks;
    if (cudaMalloc(&out, 132 * 512 * 4) != cudaSuccess || cudaMallocHost(&clocks, 132 * 8) != cudaSuccess) return 1;
    printf("clocks per warp on one scheduler              8 warps 16 warps\n");
    //     logic shift permute multiply wide bf16 half fp32 tensor
    report<1, 0, 0, 0, 0, 0, 0, 0, 0>("LOP3", out, clocks);
    report<0, 1, 0, 0, 0, 0, 0, 0, 0>("SHF", out, clocks);
    report<0, 0, 1, 0, 0, 0, 0, 0, 0>("PRMT", out, clocks);
    report<0, 0, 0, 1, 0, 0, 0, 0, 0>("IMAD", out, clocks);
    report<0, 0, 0, 0, 1, 0, 0, 0, 0>("IMAD.WIDE", out, clocks);
    report<0, 0, 0, 0, 0, 1, 0, 0, 0>("HMUL2.BF16", out, clocks);
    report<0, 0, 0, 0, 0, 0, 1, 0, 0>("HMUL2 (fp16)", out, clocks);
    report<0, 0, 0, 0, 0, 0, 0, 1, 0>("FFMA", out, clocks);
    report<0, 0, 0, 0, 0, 0, 0, 0, 1>("HMMA.16816.F32.BF16", out, clocks);
    report<0, 0, 0, 0, 1, 0, 0, 0, 1>("1 HMMA + 1 IMAD.WIDE", out, clocks);
    report<0, 0, 0, 0, 3, 0, 0, 0, 1>("1 HMMA + 3 IMAD.WIDE", out, clocks);
    report<0, 0, 0, 0, 0, 1, 0, 0, 1>("1 HMMA + 1 HMUL2.BF16", out, clocks);
    report<0, 0, 0, 0, 0, 16, 0, 0, 1>("1 HMMA + 16 HMUL2.BF16", out, clocks);
    report<4, 0, 0, 0, 0, 4, 0, 0, 0>("4 LOP3 + 4 HMUL2.BF16", out, clocks);
    report<4, 0, 0, 4, 0, 0, 0, 0, 0>("4 LOP3 + 4 IMAD", out, clocks);
    report<0, 0, 0, 4, 0, 4, 0, 0, 0>("4 IMAD + 4 HMUL2.BF16", out, clocks);
    report<4, 0, 0, 4, 0, 4, 0, 0, 0>("4 LOP3 + 4 IMAD + 4 HMUL2.BF16", out, clocks);
    report<0, 0, 0, 4, 0, 0, 0, 4, 0>("4 IMAD + 4 FFMA", out, clocks);
    report<4, 0, 0, 0, 0, 0, 0, 0, 1>("1 HMMA + 4 LOP3", out, clocks);
    report<8, 0, 0, 0, 0, 0, 0, 0, 1>("1 HMMA + 8 LOP3", out, clocks);
    report<0, 0, 0, 4, 0, 0, 0, 0, 1>("1 HMMA + 4 IMAD", out, clocks);
    report<0, 0, 0, 8, 0, 0, 0, 0, 1>("1 HMMA + 8 IMAD", out, clocks);
    report<0, 0, 0, 0, 0, 4, 0, 0, 1>("1 HMMA + 4 HMUL2.BF16", out, clocks);
    report<0, 0, 0, 0, 0, 8, 0, 0, 1>("1 HMMA + 8 HMUL2.BF16", out, clocks);
    report<0, 0, 0, 0, 0, 0, 8, 0, 1>("1 HMMA + 8 HMUL2 (fp16)", out, clocks);
    report<0, 0, 0, 0, 0, 0, 0, 8, 1>("1 HMMA + 8 FFMA", out, clocks);
    report<6, 0, 0, 4, 0, 5, 0, 0, 1>("1 HMMA + 6 LOP3 + 4 IMAD + 5 HMUL2.BF16", out, clocks);
    report<6, 0, 0, 4, 0, 5, 0, 0, 2>("2 HMMA + 6 LOP3 + 4 IMAD + 5 HMUL2.BF16", out, clocks);
    report<9, 1, 0, 4, 0, 5, 0, 0, 1>("1 HMMA + 9 LOP3 + 1 SHF + 4 IMAD + 5 HMUL2.BF16", out, clocks);
    report<6, 0, 0, 4, 0, 1, 0, 4, 1>("1 HMMA + 6 LOP3 + 4 IMAD + 1 HMUL2 + 4 FFMA", out, clocks);
    return 0;
}
