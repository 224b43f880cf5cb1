/* What a driver's libnvidia-ml.so.1 answers, as a test tells it. Compiled against NVIDIA's nvml.h, whose
   declarations say under which name and with which structures each function is called. */
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int initialised;
static nvmlReturn_t failure;
static char failing[80];
static nvmlMemory_v2_t memory;
static nvmlProcessInfo_v2_t processes[64];
static unsigned int process_count, growing;

void stub_reset(void) {
    initialised = 0;
    failing[0] = 0;
    process_count = growing = 0;
    memset(&memory, 0, sizeof memory);
}
void stub_memory(unsigned long long total, unsigned long long reserved, unsigned long long used) {
    memory.total = total;
    memory.reserved = reserved;
    memory.used = used;
    memory.free = total - reserved - used;
}
void stub_process(unsigned int pid, unsigned long long bytes) {
    processes[process_count].pid = pid;
    processes[process_count++].usedGpuMemory = bytes;
}
/* Calls do not return until this is 0 again. */
static volatile int hanging;
void stub_hang(int on) { hanging = on; }
void stub_idle(void) { process_count = 0; }
/* A process more at each of the next calls, so that the room asked for is never enough. */
void stub_grow(unsigned int calls) { growing = calls; }
void stub_fail(const char *name, int code) {
    snprintf(failing, sizeof failing, "%s", name);
    failure = (nvmlReturn_t)code;
}
int stub_initialised(void) { return initialised; }

#define ENTER() do { \
    if (!strcmp(failing, __func__)) return failure; \
    if (!initialised) return NVML_ERROR_UNINITIALIZED; \
} while (0)

nvmlReturn_t DECLDIR nvmlInit_v2(void) {
    if (!strcmp(failing, __func__)) return failure;
    initialised++;
    return NVML_SUCCESS;
}
nvmlReturn_t DECLDIR nvmlShutdown(void) { ENTER(); initialised--; return NVML_SUCCESS; }
const DECLDIR char *nvmlErrorString(nvmlReturn_t code) {
    return code == NVML_ERROR_NOT_FOUND ? "Not Found" : code == NVML_ERROR_GPU_IS_LOST ? "GPU is lost"
        : code == NVML_ERROR_DRIVER_NOT_LOADED ? "Driver Not Loaded" : NULL;
}
nvmlReturn_t DECLDIR nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    ENTER();
    if (strcmp(uuid, "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf")) return NVML_ERROR_NOT_FOUND;
    *device = (nvmlDevice_t)&memory;
    return NVML_SUCCESS;
}
#ifndef OLD
nvmlReturn_t DECLDIR nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *found) {
    ENTER();
    if (device != (nvmlDevice_t)&memory || found->version != nvmlMemory_v2) return NVML_ERROR_INVALID_ARGUMENT;
    while (hanging) usleep(1000);
    unsigned int version = found->version;
    *found = memory;
    found->version = version;
    return NVML_SUCCESS;
}
#endif
nvmlReturn_t DECLDIR nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *found) {
    ENTER();
    if (device != (nvmlDevice_t)&memory) return NVML_ERROR_INVALID_ARGUMENT;
    found->total = memory.total;
    found->free = memory.free;
    found->used = memory.used + memory.reserved;
    return NVML_SUCCESS;
}
#define LIST(NAME, KIND) nvmlReturn_t DECLDIR NAME(nvmlDevice_t device, unsigned int *count, KIND *infos) { \
    ENTER(); \
    if (device != (nvmlDevice_t)&memory) return NVML_ERROR_INVALID_ARGUMENT; \
    if (growing) { growing--; *count = process_count + 100; return NVML_ERROR_INSUFFICIENT_SIZE; } \
    unsigned int room = *count; \
    *count = process_count; \
    if (room < process_count) return NVML_ERROR_INSUFFICIENT_SIZE; \
    for (unsigned int i = 0; i < process_count; i++) { \
        memset(&infos[i], 0xff, sizeof(KIND)); \
        infos[i].pid = processes[i].pid; \
        infos[i].usedGpuMemory = processes[i].usedGpuMemory; \
    } \
    return NVML_SUCCESS; \
}
#ifndef OLD
LIST(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t)
LIST(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_v2_t)
#endif
LIST(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t)
