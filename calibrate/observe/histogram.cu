// The exact histogram of 15-bit magnitude codes, 32,768 counters in shared memory.
//
// A BF16 or FP16 magnitude is the low 15 bits of its code; a float32 is rounded to BF16 first, to
// nearest even, a NaN staying one. Each block zeroes its counters, walks the tensor with 16-byte
// loads, and adds its non-zero counters to the int64 totals. A shared counter is 32 bits wide, so
// the host never gives one launch 2^32 elements.
//
// PARTS (a power of two, given at compile time) splits the codes by their low bits between PARTS
// blocks that read the same elements, for GPUs whose blocks cannot hold 32,768 counters: 128 KB for
// PARTS = 1, 64 KB for 2, 32 KB for 4. The later readers find the elements in the L2.
//
// The increment is the constant 1, for which the hardware first counts the equal addresses of a
// warp (ATOMS.POPC.INC): a tensor of zeros does not queue at one counter.

#define BINS 32768u
#define THREADS 1024u
#define UNROLL 4
#define MAX_BATCHES 256

typedef unsigned int u32;
typedef unsigned long long u64;

// Where the elements are: for batch b, `runs` runs of consecutive elements, `run_stride` apart. With
// rows_outer, a run is one row, `unit` elements, and there are lengths[b] of them; without, there
// are `runs` runs (heads, say) of lengths[b] * unit elements. Strides are in elements. With more
// than one run a batch, every run starts at a multiple of 16 bytes and is a multiple of 16 bytes
// long.
struct Arguments {
    const unsigned char* data;
    u64* counts;  // [32768], of one slot
    u32* bad;     // of the slot: set to 1 if a code is first_special or above
    long long batch_stride;
    long long run_stride;
    u32 batches;
    u32 runs;
    u32 unit;
    u32 rows_outer;
    u32 first_special;
    u32 lengths[MAX_BATCHES];
};

extern __shared__ uint4 shared_memory[];

// The BF16 magnitude code of a float32's bits.
__device__ __forceinline__ u32 rounded(u32 bits) {
    u32 magnitude = bits & 0x7FFFFFFFu;
    u32 upper = magnitude >> 16;
    // Half of the last place less one, plus the last bit that is kept: ties go to even.
    return magnitude > 0x7F800000u ? upper | 0x40u : (magnitude + 0x7FFFu + (upper & 1u)) >> 16;
}

template <bool FLOAT> struct Bits { typedef unsigned short Type; };
template <> struct Bits<true> { typedef u32 Type; };

// `code4` is four times the code, its byte offset in the table of all codes.
__device__ __forceinline__ void count4(u32 code4) {
    char* table = reinterpret_cast<char*>(shared_memory);
#if PARTS == 1
    atomicAdd(reinterpret_cast<u32*>(table + code4), 1u);
#else
    u32 code = code4 >> 2;
    if ((code & (PARTS - 1)) == blockIdx.y)
        atomicAdd(reinterpret_cast<u32*>(table) + code / PARTS, 1u);
#endif
}

// Counts the elements of one 16-byte vector.
template <bool FLOAT>
__device__ __forceinline__ void count_vector(uint4 vector) {
    u32 words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (FLOAT) {
            count4(rounded(words[i]) << 2);
        } else {
            count4((words[i] << 2) & 0x1FFFCu);
            count4((words[i] >> 14) & 0x1FFFCu);
        }
    }
}

template <bool FLOAT>
__device__ __forceinline__ void count_tensor(const Arguments& a) {
    typedef typename Bits<FLOAT>::Type Element;
    const u32 WIDTH = 16 / sizeof(Element);  // elements of a vector
    const Element* data = reinterpret_cast<const Element*>(a.data);

    u32* table = reinterpret_cast<u32*>(shared_memory);
    for (u32 i = threadIdx.x; i < BINS / PARTS / 4; i += THREADS)
        shared_memory[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();

    // Thread `index` of all takes vectors index, index + stride, ... of the runs laid end to end.
    u32 index = blockIdx.x * THREADS + threadIdx.x;
    u32 stride = gridDim.x * THREADS;

    for (u32 b = 0; b < a.batches; ++b) {
        const Element* start = data + b * a.batch_stride;
        u32 runs = a.rows_outer ? a.lengths[b] : a.runs;
        u32 length = a.rows_outer ? a.unit : a.lengths[b] * a.unit;
        u32 head = 0;
        if (runs == 1) {  // elements before the first and after the last whole vector
            head = min(length, ((16u - (u32)((u64)start & 15u)) & 15u) / (u32)sizeof(Element));
            u32 tail = (length - head) % WIDTH;
            if (blockIdx.x == 0 && threadIdx.x < head + tail) {
                u32 i = threadIdx.x < head ? threadIdx.x : length - tail + (threadIdx.x - head);
                count4((FLOAT ? rounded(start[i]) : start[i] & 0x7FFFu) << 2);
            }
        }
        u32 vectors = (length - head) / WIDTH;  // of one run
        u32 total = vectors * runs;
        const uint4* first = reinterpret_cast<const uint4*>(start + head);
        if (runs == 1) {
            // From the end: what the previous kernel wrote last is still in the L2, and what is
            // read last here, the beginning, is what the next kernel reads first. __ldcs marks the
            // lines as the first to go, so that fewer unwritten ones have to make room.
            const uint4* last = first + total - 1;
            for (; index + (UNROLL - 1) * stride < total; index += UNROLL * stride) {
                uint4 loaded[UNROLL];
#pragma unroll
                for (u32 i = 0; i < UNROLL; ++i) loaded[i] = __ldcs(last - (index + i * stride));
#pragma unroll
                for (u32 i = 0; i < UNROLL; ++i) count_vector<FLOAT>(loaded[i]);
            }
            for (; index < total; index += stride)
                count_vector<FLOAT>(__ldcs(last - index));
        } else {
            for (; index < total; index += stride) {
                u32 run = index / vectors;
                const Element* from = start + run * a.run_stride;
                uint4 vector = reinterpret_cast<const uint4*>(from)[index - run * vectors];
                count_vector<FLOAT>(vector);
            }
        }
        index -= total;
    }

    __syncthreads();

    // Blocks start at different codes, so that they do not meet at one total.
    u32 turn = blockIdx.x * (BINS / PARTS / 64u);
    for (u32 i = threadIdx.x; i < BINS / PARTS; i += THREADS) {
        u32 bin = (i + turn) & (BINS / PARTS - 1);
        u32 count = table[bin];
        if (count == 0) continue;
        u32 code = bin * PARTS + blockIdx.y;
        atomicAdd(a.counts + code, (u64)count);
        if (code >= a.first_special) *a.bad = 1;
    }
}

#define KERNEL(name, is_float)                                           \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)             \
        name(const __grid_constant__ Arguments arguments) {              \
        count_tensor<is_float>(arguments);                               \
    }

KERNEL(count_half, false)
KERNEL(count_float, true)
