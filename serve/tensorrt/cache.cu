// Moves rows between the slots of the cache, the windows that an engine reads, and its new rows.
//
//   slots   CACHE   [slots, tensors, heads, positions, dim]
//   window  CACHE   [tensors, batch, heads, live, dim]      the first positions of some slots
//   rows    PRESENT [tensors, batch, heads, count, dim]     what a step appends
//
// Each tensor of a window, and of the rows, starts at a multiple of 256 bytes, as TensorRT wants of
// its addresses: from one to the next it is a stride, which may be more than the tensor is long.
//
// Defined by whoever compiles this: CACHE and PRESENT, unsigned integers of an element's size, and
// WORD, what one thread of `gather` moves: several elements where dim allows it.

struct Row {
    long long slot;
    long long length;  // filled positions
};

struct Arguments {
    void* slots;
    void* window;
    const void* rows;
    const Row* where;     // [batch]
    long long tensors, batch, heads, positions, live, count;
    long long dim, window_stride, rows_stride;  // in elements
};

#define EACH(i, n)                                                                    \
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x, end_ = (n);  \
         i < end_; i += (long long)gridDim.x * blockDim.x)

// The first `live` positions of each row's slot, filled or not, into the window.
extern "C" __global__ void gather(Arguments a) {
    const long long width = a.dim * sizeof(CACHE) / sizeof(WORD);
    const WORD* slots = (const WORD*)a.slots;
    WORD* window = (WORD*)a.window;
    EACH(i, a.tensors * a.batch * a.heads * a.live * width) {
        const long long size = a.batch * a.heads * a.live * width;  // of one tensor
        const long long tensor = i / size, inner = i % size;
        const long long in_head = inner % (a.live * width), outer = inner / (a.live * width);
        const long long head = outer % a.heads, row = outer / a.heads;
        const long long head_of_slot = (a.where[row].slot * a.tensors + tensor) * a.heads + head;
        window[tensor * (a.window_stride * sizeof(CACHE) / sizeof(WORD)) + inner] =
            slots[head_of_slot * a.positions * width + in_head];
    }
}

// The new rows behind what each slot holds; into the window too, if there is one and they fit.
// Of an element of two bytes that is kept in one, the upper is kept: E5M2 is the top of an FP16.
extern "C" __global__ void append(Arguments a) {
    CACHE* slots = (CACHE*)a.slots;
    CACHE* window = (CACHE*)a.window;
    const PRESENT* rows = (const PRESENT*)a.rows;
    EACH(i, a.tensors * a.batch * a.heads * a.count * a.dim) {
        const long long size = a.batch * a.heads * a.count * a.dim;  // of one tensor
        const long long tensor = i / size, inner = i % size;
        const long long element = inner % a.dim, token = inner / a.dim % a.count;
        const long long outer = inner / a.dim / a.count;
        const long long head = outer % a.heads, row = outer / a.heads;
        const PRESENT value = rows[tensor * a.rows_stride + inner];
        const CACHE code = (CACHE)(value >> 8 * (sizeof(PRESENT) - sizeof(CACHE)));
        const long long at = a.where[row].length + token;
        const long long head_of_slot = (a.where[row].slot * a.tensors + tensor) * a.heads + head;
        slots[(head_of_slot * a.positions + at) * a.dim + element] = code;
        if (window && at < a.live)
            window[tensor * a.window_stride + (outer * a.live + at) * a.dim + element] = code;
    }
}
