/* A libcuda.so that checks its caller. NVIDIA's own header declares every function here, so the compiler
   holds us to its names (cuMemAlloc becomes cuMemAlloc_v2) and types. It runs no kernel: it reads each
   cubin's parameter table by itself, and notes what a device would suffer from, in stub_faults(). */
#include <cuda.h>
#include <elf.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX = 64, PARAMS = 128, BLOCK = 4096 };

typedef struct {
    int module, count, bytes, threads, warm, shared, used_by_graph;
    int offset[PARAMS], size[PARAMS];
    char name[96];
} Kernel;
typedef struct { int alive, sm; } Module;
typedef struct { char *base; size_t size; int alive; } Memory;
typedef struct { int kernel; size_t bytes; unsigned char block[BLOCK]; } Node;
typedef struct { int alive, executable, count; Node node[MAX]; } Recording;

static Kernel kernels[MAX];
static Module modules[MAX];
static Memory memory[MAX];
static Recording graphs[MAX];
static int kernel_count, module_count, memory_count, graph_count, stream_count;
static int initialised, retained, current, device_sm = 80, version = 12020;
static int capturing, broken, recording; /* stream, whether it was invalidated, index of its graph */
static char log_text[1 << 18], fault_text[1 << 14];
static char fail_name[64];
static int fail_code, fail_after;

static void append(char *text, size_t room, const char *form, va_list list) {
    size_t used = strlen(text);
    vsnprintf(text + used, room - used, form, list);
}
static void say(const char *form, ...) {
    va_list list;
    va_start(list, form);
    append(log_text, sizeof log_text, form, list);
    va_end(list);
}
static CUresult fault(CUresult code, const char *form, ...) {
    va_list list;
    va_start(list, form);
    append(fault_text, sizeof fault_text, form, list);
    va_end(list);
    return code;
}

const char *stub_log(void) { return log_text; }
const char *stub_faults(void) { return fault_text; }
void stub_fail(const char *name, int code, int after) {
    snprintf(fail_name, sizeof fail_name, "%s", name);
    fail_code = code;
    fail_after = after;
}
/* Memory that the test holds (torch's, where a device would have its own). */
void stub_own(void *base, size_t size) {
    memory[memory_count].base = base;
    memory[memory_count].size = size;
    memory[memory_count++].alive = 1;
}
void stub_reset(int sm, int driver) {
    kernel_count = module_count = memory_count = graph_count = stream_count = 0;
    memset(graphs, 0, sizeof graphs);
    memset(memory, 0, sizeof memory);
    initialised = retained = current = capturing = broken = fail_code = 0;
    device_sm = sm;
    version = driver;
    log_text[0] = fault_text[0] = 0;
}

/* Begins every function: the failure that a test asked for, or a call that comes too early. */
static CUresult enter(const char *name, int needs_context) {
    if (fail_code && !strcmp(name, fail_name) && fail_after-- == 0) {
        CUresult code = (CUresult)fail_code;
        fail_code = 0;
        say("%s fails\n", name);
        return code;
    }
    if (!initialised && strcmp(name, "cuInit")) return fault(CUDA_ERROR_NOT_INITIALIZED, "%s before cuInit\n", name);
    if (needs_context && !current) return fault(CUDA_ERROR_INVALID_CONTEXT, "%s without a context\n", name);
    return CUDA_SUCCESS;
}
#define ENTER(context) do { CUresult code_ = enter(__func__, context); if (code_) return code_; } while (0)
/* What CUDA calls unsafe: it may not happen while a stream is captured, and ends the capture. */
#define UNSAFE() do { if (capturing) { broken = 1; \
    return fault(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "%s during a capture\n", __func__); } } while (0)

static void *handle(char kind, int index) { return (void *)(uintptr_t)(((uintptr_t)kind << 32) + (uintptr_t)index + 1); }
static int index_of(const void *pointer, char kind, int count) {
    uintptr_t value = (uintptr_t)pointer;
    int index = (int)(value & 0xffffffff) - 1;
    return value >> 32 == (uintptr_t)kind && index >= 0 && index < count ? index : -1;
}
static int allocated(CUdeviceptr address, size_t size) {
    for (int i = 0; i < memory_count; i++) {
        CUdeviceptr base = (CUdeviceptr)(uintptr_t)memory[i].base;
        if (memory[i].alive && address >= base && address + size <= base + memory[i].size) return 1;
    }
    return 0;
}

CUresult CUDAAPI cuGetErrorName(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
        : error == CUDA_ERROR_INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE"
        : error == CUDA_ERROR_NOT_FOUND ? "CUDA_ERROR_NOT_FOUND"
        : error == CUDA_ERROR_NO_BINARY_FOR_GPU ? "CUDA_ERROR_NO_BINARY_FOR_GPU"
        : error == CUDA_ERROR_INVALID_IMAGE ? "CUDA_ERROR_INVALID_IMAGE"
        : error == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
        : error == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED ? "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED" : NULL;
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult CUDAAPI cuGetErrorString(CUresult error, const char **text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : NULL;
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuInit(unsigned int flags) {
    if (getenv("STUB_FAIL")) stub_fail(getenv("STUB_FAIL"), CUDA_ERROR_OUT_OF_MEMORY, 0);
    ENTER(0);
    const char *names[] = {"CUDA_DISABLE_PTX_JIT", "CUDA_CACHE_DISABLE"};
    for (int i = 0; i < 2; i++) {
        const char *value = getenv(names[i]);
        if (!value || strcmp(value, "1")) fault(CUDA_SUCCESS, "cuInit without %s=1\n", names[i]);
    }
    if (getenv("CUDA_FORCE_PTX_JIT")) fault(CUDA_SUCCESS, "cuInit with CUDA_FORCE_PTX_JIT\n");
    initialised = 1;
    return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult CUDAAPI cuDriverGetVersion(int *found) { ENTER(0); *found = version; return CUDA_SUCCESS; }
CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER(0);
    if (ordinal) return CUDA_ERROR_INVALID_DEVICE;
    *device = 0;
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    ENTER(0);
    if (device) return CUDA_ERROR_INVALID_DEVICE;
    if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) *value = device_sm / 10;
    else if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) *value = device_sm % 10;
    else return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    ENTER(0);
    if (device) return CUDA_ERROR_INVALID_DEVICE;
    for (int i = 0; i < 16; i++) uuid->bytes[i] = (char)(0xa0 + i);
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER(0);
    retained++;
    *context = handle('c', device);
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice device) {
    ENTER(0);
    UNSAFE();
    say("cuDevicePrimaryCtxRelease\n");
    if (device || !retained) return fault(CUDA_ERROR_INVALID_CONTEXT, "a context released that is not held\n");
    current = --retained > 0;
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuCtxSetCurrent(CUcontext context) {
    ENTER(0);
    if (index_of(context, 'c', 1) || !retained) return CUDA_ERROR_INVALID_CONTEXT;
    current = 1;
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuMemGetInfo(size_t *left, size_t *total) {
    ENTER(1);
    *total = (size_t)80 << 30;
    *left = *total;
    for (int i = 0; i < memory_count; i++) if (memory[i].alive) *left -= memory[i].size;
    return CUDA_SUCCESS;
}
static CUresult check_stream(CUstream stream, const char *name) {
    if (index_of(stream, 's', stream_count) < 0) return fault(CUDA_ERROR_INVALID_HANDLE, "%s on no stream of ours\n", name);
    if (capturing && stream != handle('s', capturing - 1)) {
        broken = 1;
        return fault(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "%s beside the capturing stream\n", name);
    }
    return CUDA_SUCCESS;
}
#define STREAM(stream) do { CUresult code_ = check_stream(stream, __func__); if (code_) return code_; } while (0)

/* The parameter table of one .nv.info.<kernel> section: attributes 0x17 (a parameter), 0x19 (bytes of
   all), 0x10 (threads of a block). */
static void read_info(Kernel *kernel, const unsigned char *at, size_t size) {
    const unsigned char *end = at + size;
    while (at + 4 <= end) {
        int form = at[0], number = at[1];
        uint16_t half;
        memcpy(&half, at + 2, 2);
        const unsigned char *value = at + 4;
        if (form == 3 && number == 0x19) kernel->bytes = half;
        if (form == 4 && number == 0x17) {
            uint16_t place[2];
            uint32_t packed;
            memcpy(place, value + 4, 4);
            memcpy(&packed, value + 8, 4);
            if (place[0] < PARAMS) {
                kernel->offset[place[0]] = place[1];
                kernel->size[place[0]] = (int)(packed >> 18);
                if (place[0] >= kernel->count) kernel->count = place[0] + 1;
            }
        }
        if (form == 4 && number == 0x10) memcpy(&kernel->threads, value, 4);
        at = form == 4 ? value + half : value;
    }
}
CUresult CUDAAPI cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, CUjit_option *options, void **values) {
    ENTER(1);
    UNSAFE();
    (void)options; (void)values;
    if (count) return fault(CUDA_ERROR_INVALID_VALUE, "options for a compiler that must not run\n");
    const Elf64_Ehdr *head = image;
    if (memcmp(head->e_ident, ELFMAG, SELFMAG) || head->e_machine != 190)
        return fault(CUDA_ERROR_INVALID_IMAGE, "an image that would have to be compiled\n");
    int sm = (int)(head->e_flags & 0xff), exact = (head->e_flags & 0x800) != 0;
    if (sm / 10 != device_sm / 10 || sm > device_sm || (exact && sm != device_sm)) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    const char *bytes = image;
    const Elf64_Shdr *section = (const void *)(bytes + head->e_shoff);
    const char *names = bytes + section[head->e_shstrndx].sh_offset;
    for (int i = 0; i < head->e_shnum; i++) {
        const char *name = names + section[i].sh_name;
        if (!strncmp(name, ".nv.info.", 9) && kernel_count < MAX) {
            Kernel *kernel = &kernels[kernel_count++];
            memset(kernel, 0, sizeof *kernel);
            kernel->module = module_count;
            snprintf(kernel->name, sizeof kernel->name, "%s", name + 9);
            read_info(kernel, (const unsigned char *)bytes + section[i].sh_offset, section[i].sh_size);
        }
    }
    modules[module_count].alive = 1;
    modules[module_count].sm = sm;
    say("cuModuleLoadDataEx sm=%d\n", sm);
    *module = handle('m', module_count++);
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuModuleUnload(CUmodule module) {
    ENTER(1);
    UNSAFE();
    int index = index_of(module, 'm', module_count);
    if (index < 0 || !modules[index].alive) return fault(CUDA_ERROR_INVALID_HANDLE, "a module unloaded that is not loaded\n");
    modules[index].alive = 0;
    say("cuModuleUnload\n");
    for (int i = 0; i < kernel_count; i++)
        if (kernels[i].module == index && kernels[i].used_by_graph)
            fault(CUDA_SUCCESS, "%s unloaded while a graph holds it\n", kernels[i].name);
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    ENTER(1);
    UNSAFE();
    int index = index_of(module, 'm', module_count);
    for (int i = 0; i < kernel_count; i++)
        if (kernels[i].module == index && modules[index].alive && !strcmp(kernels[i].name, name)) {
            *function = handle('f', i);
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_NOT_FOUND;
}
CUresult CUDAAPI cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    ENTER(1);
    int index = index_of(function, 'f', kernel_count);
    if (index < 0 || attribute != CU_FUNC_ATTRIBUTE_BINARY_VERSION) return CUDA_ERROR_INVALID_VALUE;
    *value = modules[kernels[index].module].sm;
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    ENTER(1);
    UNSAFE();
    int index = index_of(function, 'f', kernel_count);
    if (index < 0 || attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_INVALID_VALUE;
    kernels[index].shared = value;
    return CUDA_SUCCESS;
}
static CUresult check_block(const Kernel *kernel, const unsigned char *block) {
    for (int i = 0; i < kernel->count; i++) {
        CUdeviceptr value;
        if (kernel->size[i] != 8) continue;
        memcpy(&value, block + kernel->offset[i], 8);
        if (i >= kernel->count - 2 ? value != 0 : !allocated(value, 1))
            return fault(CUDA_ERROR_INVALID_VALUE, "%s: parameter %d holds 0x%llx\n", kernel->name, i, (unsigned long long)value);
    }
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuLaunchKernel(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,
    unsigned int by, unsigned int bz, unsigned int shared, CUstream stream, void **params, void **extra) {
    ENTER(1);
    int index = index_of(f, 'f', kernel_count);
    if (index < 0 || !modules[kernels[index].module].alive)
        return fault(CUDA_ERROR_INVALID_HANDLE, "a launch of what is not loaded\n");
    Kernel *kernel = &kernels[index];
    STREAM(stream);
    if (params || !extra || extra[0] != CU_LAUNCH_PARAM_BUFFER_POINTER || extra[2] != CU_LAUNCH_PARAM_BUFFER_SIZE
        || extra[4] != CU_LAUNCH_PARAM_END)
        return fault(CUDA_ERROR_INVALID_VALUE, "%s: parameters that are not one buffer\n", kernel->name);
    size_t size = *(size_t *)extra[3];
    if (size != (size_t)kernel->bytes || size > BLOCK)
        return fault(CUDA_ERROR_INVALID_VALUE, "%s: %zu bytes of parameters, the cubin has %d\n", kernel->name, size, kernel->bytes);
    if ((int)bx != kernel->threads || by != 1 || bz != 1)
        return fault(CUDA_ERROR_INVALID_VALUE, "%s: %u threads, the cubin needs %d\n", kernel->name, bx, kernel->threads);
    if (!gx || gy != 1 || gz != 1) return fault(CUDA_ERROR_INVALID_VALUE, "%s: an empty grid\n", kernel->name);
    if (shared > 48 << 10 && (int)shared > kernel->shared)
        return fault(CUDA_ERROR_INVALID_VALUE, "%s: %u bytes of shared memory without leave\n", kernel->name, shared);
    CUresult code = check_block(kernel, extra[1]);
    if (code) return code;
    if (capturing) {
        if (!kernel->warm) {
            broken = 1;
            return fault(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "%s: first launched in a capture\n", kernel->name);
        }
        Recording *graph = &graphs[recording];
        if (graph->count == MAX) return CUDA_ERROR_OUT_OF_MEMORY;
        Node *node = &graph->node[graph->count++];
        node->kernel = index;
        node->bytes = size;
        memcpy(node->block, extra[1], size);
    }
    kernel->warm = 1;
    say("cuLaunchKernel %s grid=%u threads=%u shared=%u params=%d bytes=%zu", kernel->name, gx, bx, shared, kernel->count, size);
    say(" numbers=");
    for (int i = 0; i < kernel->count; i++) {
        int number;
        memcpy(&number, (const char *)extra[1] + kernel->offset[i], 4);
        if (kernel->size[i] == 4) say("%d,", number);
    }
    say(" %s\n", capturing ? "captured" : "eager");
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuStreamCreate(CUstream *stream, unsigned int flags) {
    ENTER(1);
    UNSAFE();
    if (flags != CU_STREAM_NON_BLOCKING) fault(CUDA_SUCCESS, "a stream that waits for the default one\n");
    *stream = handle('s', stream_count++);
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuStreamSynchronize(CUstream stream) {
    ENTER(1);
    UNSAFE();
    STREAM(stream);
    say("cuStreamSynchronize\n");
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    ENTER(1);
    if (index_of(stream, 's', stream_count) < 0)
        return fault(CUDA_ERROR_INVALID_HANDLE, "%s on no stream of ours\n", __func__);
    *status = !capturing || stream != handle('s', capturing - 1) ? CU_STREAM_CAPTURE_STATUS_NONE
        : broken ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
    ENTER(1);
    UNSAFE();
    STREAM(stream);
    if (mode != CU_STREAM_CAPTURE_MODE_GLOBAL) fault(CUDA_SUCCESS, "a capture that does not see other threads\n");
    for (int i = 0; i < kernel_count; i++)
        if (modules[kernels[i].module].alive && !kernels[i].warm)
            fault(CUDA_SUCCESS, "a capture before %s is warm\n", kernels[i].name);
    if (graph_count == MAX) return CUDA_ERROR_OUT_OF_MEMORY;
    capturing = index_of(stream, 's', stream_count) + 1;
    broken = 0;
    recording = graph_count++;
    say("cuStreamBeginCapture\n");
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    CUresult failure = enter(__func__, 1);
    if (failure) { capturing = 0; return failure; } /* a capture ends, also badly */
    STREAM(stream);
    *graph = NULL;
    if (!capturing) return fault(CUDA_ERROR_INVALID_VALUE, "the end of no capture\n");
    capturing = 0;
    say("cuStreamEndCapture%s\n", broken ? " invalidated" : "");
    if (broken) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    graphs[recording].alive = 1;
    *graph = handle('g', recording);
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuGraphInstantiate(CUgraphExec *ready, CUgraph graph, unsigned long long flags) {
    ENTER(1);
    UNSAFE();
    int index = index_of(graph, 'g', graph_count);
    if (index < 0 || !graphs[index].alive || flags || graph_count == MAX) return CUDA_ERROR_INVALID_VALUE;
    graphs[graph_count] = graphs[index];
    graphs[graph_count].executable = 1;
    for (int i = 0; i < graphs[index].count; i++) kernels[graphs[index].node[i].kernel].used_by_graph++;
    say("cuGraphInstantiate nodes=%d\n", graphs[index].count);
    *ready = handle('x', graph_count++);
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuGraphLaunch(CUgraphExec ready, CUstream stream) {
    ENTER(1);
    STREAM(stream);
    int index = index_of(ready, 'x', graph_count);
    if (index < 0 || !graphs[index].alive || !graphs[index].executable)
        return fault(CUDA_ERROR_INVALID_HANDLE, "a launch of no graph\n");
    for (int i = 0; i < graphs[index].count; i++) {
        const Node *node = &graphs[index].node[i];
        const Kernel *kernel = &kernels[node->kernel];
        if (!modules[kernel->module].alive) return fault(CUDA_ERROR_INVALID_HANDLE, "%s is gone at a replay\n", kernel->name);
        CUresult code = check_block(kernel, node->block);
        if (code) return code;
    }
    say("cuGraphLaunch nodes=%d\n", graphs[index].count);
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec ready) {
    ENTER(1);
    int index = index_of(ready, 'x', graph_count);
    if (index < 0 || !graphs[index].alive) return CUDA_ERROR_INVALID_VALUE;
    graphs[index].alive = 0;
    for (int i = 0; i < graphs[index].count; i++) kernels[graphs[index].node[i].kernel].used_by_graph--;
    say("cuGraphExecDestroy\n");
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuGraphDestroy(CUgraph graph) {
    ENTER(1);
    int index = index_of(graph, 'g', graph_count);
    if (index < 0 || !graphs[index].alive) return CUDA_ERROR_INVALID_VALUE;
    graphs[index].alive = 0;
    say("cuGraphDestroy\n");
    return CUDA_SUCCESS;
}
