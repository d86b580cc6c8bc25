// Clocks per instruction of straight-line code by its size: the first, second and third pass of a launch, for the first and
// a later launch of a graph. Where the passes of a later launch cost what its second pass does, the caches keep their code
// from launch to launch.
// nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -o instruction_cache instruction_cache.cu && ./instruction_cache
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <vector>

constexpr int PIECE = 512;  // instructions of 16 bytes: 8 KB
constexpr int THREADS = 352, SHARED = 200 * 1024, LAUNCHES = 6, PASSES = 3;

__device__ __forceinline__ void piece(float (&x)[8], float b, float c) {
#pragma unroll
    for (int i = 0; i < PIECE; ++i) asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x[i % 8]) : "f"(b), "f"(c));
}

template <int PIECES>
__device__ __noinline__ float straight(float b, float c) {
    float x[8];
    for (int i = 0; i < 8; ++i) x[i] = b + i;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) piece(x, b, c);
    return x[0] + x[1] + x[2] + x[3] + x[4] + x[5] + x[6] + x[7];
}

// clocks: [CTAs, PASSES]
template <int PIECES>
__global__ void __launch_bounds__(THREADS, 1) passes(float b, float c, int warps, long long* clocks, float* sink) {
    float sum = 0.f;
    for (int pass = 0; pass < PASSES; ++pass) {
        __syncthreads();
        const long long start = clock64();
        if (threadIdx.x / 32 < warps) sum += straight<PIECES>(b, c + pass);
        __syncthreads();
        if (threadIdx.x == 0) clocks[blockIdx.x * PASSES + pass] = clock64() - start;
    }
    if (sum == 12345.678f) *sink = sum;
}

template <int PIECES>
void measure(int sms, int warps) {
    long long* clocks;
    float* sink;
    cudaMalloc(&clocks, LAUNCHES * sms * PASSES * sizeof(long long));
    cudaMalloc(&sink, sizeof(float));
    cudaFuncSetAttribute(passes<PIECES>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    cudaStream_t stream;
    cudaStreamCreate(&stream);
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    for (int launch = 0; launch < LAUNCHES; ++launch) {
        passes<PIECES><<<sms, THREADS, SHARED, stream>>>(1.f, 0.5f, warps, clocks + launch * sms * PASSES, sink);
    }
    cudaStreamEndCapture(stream, &graph);
    cudaGraphInstantiate(&replay, graph, 0);
    for (int turn = 0; turn < 3; ++turn) cudaGraphLaunch(replay, stream);
    std::vector<long long> all(LAUNCHES * sms * PASSES);
    cudaStreamSynchronize(stream);
    cudaMemcpy(all.data(), clocks, all.size() * sizeof(long long), cudaMemcpyDeviceToHost);
    printf("%4d KB %d warps:", PIECES * PIECE / 64, warps);
    for (int launch : {0, LAUNCHES - 1}) {
        for (int pass = 0; pass < PASSES; ++pass) {
            std::vector<long long> of_pass;
            for (int cta = 0; cta < sms; ++cta) of_pass.push_back(all[(launch * sms + cta) * PASSES + pass]);
            std::nth_element(of_pass.begin(), of_pass.begin() + sms / 2, of_pass.end());
            printf(" %5.2f", static_cast<double>(of_pass[sms / 2]) / (PIECES * PIECE));
        }
        printf(launch == 0 ? " |" : "  %s\n", cudaGetErrorString(cudaGetLastError()));
    }
    cudaFree(clocks);
    cudaFree(sink);
}

int main() {
    int sms = 0;
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
    printf("clocks per instruction (median CTA): first launch, passes 1 to 3 | last launch, passes 1 to 3\n");
    for (int warps : {1, 4, 8}) {
        measure<1>(sms, warps);
        measure<3>(sms, warps);
        measure<4>(sms, warps);
        measure<6>(sms, warps);
        measure<8>(sms, warps);
        measure<12>(sms, warps);
        measure<16>(sms, warps);
        measure<20>(sms, warps);
        measure<32>(sms, warps);
    }
}
