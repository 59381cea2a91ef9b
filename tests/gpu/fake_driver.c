/* A CUDA driver without a GPU, for tests: enough of libcuda.so.1 for cuda.core to run on.

   Memory is the host's. Time is virtual: a launch costs LAUNCH_US in a stream (GRAPH_US in a graph), and a kernel what
   the test set for its symbol, cold if its first argument has not been seen since the last flush. Code is any text with
   ".entry NAME(.param .uNN ...)", also behind the four bytes that a cubin begins with; a line "// registers N" says how
   many a thread has. A kernel whose symbol contains "fault" breaks the context as an illegal address does. Nothing is
   executed. Functions that are missing here answer CUDA_ERROR_NOT_SUPPORTED. */

#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 4096
#define LAUNCH_US 4.0
#define GRAPH_US 1.5
#define MEMORY_BYTES (1ull << 30)

typedef struct { char name[200]; int registers, sizes[64], count, dynamic; } Kernel;
typedef struct { char *text; int cubin; Kernel *kernels[64]; int count; } Library;
typedef struct { Kernel *kernel; unsigned grid[3], block[3], shared; unsigned char arguments[512]; int bytes; } Launch;
typedef struct { Launch launches[MOST]; int count; } Graph;
typedef struct { double time_us; } Event;
typedef struct { char symbol[200]; double warm_us, cold_us; } Cost;

static struct {
    CUresult sticky;
    double now_us;
    Graph *capturing;
    Launch log[MOST];
    int logged;
    Cost costs[64];
    int cost_count;
    unsigned long long seen[MOST];
    int seen_count;
    unsigned long long allocated;
    struct { unsigned long long address, bytes; } blocks[MOST];
    int block_count, major, minor, version, device_count;
    CUcontext current;
} state = {.major = 8, .minor = 6, .version = 13050, .device_count = 1};

static int context_token, stream_token;

/* -- what tests call -------------------------------------------------------------------------------------------- */

void fake_reset(void) {
    state.sticky = CUDA_SUCCESS;
    state.logged = state.cost_count = state.seen_count = 0;
    state.major = 8, state.minor = 6;
}
void fake_arch(int major, int minor) { state.major = major, state.minor = minor; }
void fake_cost(const char *symbol, double warm_us, double cold_us) {
    Cost *cost = &state.costs[state.cost_count++];
    snprintf(cost->symbol, sizeof cost->symbol, "%s", symbol);
    cost->warm_us = warm_us, cost->cold_us = cold_us;
}
double fake_now_us(void) { return state.now_us; }
int fake_launches(void) { return state.logged; }
const char *fake_symbol(int n) { return state.log[n].kernel->name; }
void fake_geometry(int n, unsigned *out) {
    memcpy(out, state.log[n].grid, 12), memcpy(out + 3, state.log[n].block, 12), out[6] = state.log[n].shared;
}
int fake_arguments(int n, unsigned char *out) {
    memcpy(out, state.log[n].arguments, state.log[n].bytes);
    return state.log[n].bytes;
}
unsigned long long fake_allocated(void) { return state.allocated; }

/* -- time ------------------------------------------------------------------------------------------------------- */

static void run(const Launch *launch, double overhead_us) {
    double us = 0;
    if (state.logged < MOST) state.log[state.logged++] = *launch;
    if (!strcmp(launch->kernel->name, "lowbit_read")) {
        unsigned long long vectors;
        memcpy(&vectors, launch->arguments + 8, 8);
        state.seen_count = 0;
        us = vectors * 16 / 1e6; /* 1 TB/s */
    }
    if (!strcmp(launch->kernel->name, "lowbit_spin")) {
        int count;
        memcpy(&count, launch->arguments, 4);
        us = count * 2e-3;
    }
    for (int i = 0; i < state.cost_count; i++)
        if (!strcmp(state.costs[i].symbol, launch->kernel->name)) {
            unsigned long long first = 0;
            int known = 0;
            memcpy(&first, launch->arguments, launch->bytes < 8 ? launch->bytes : 8);
            for (int j = 0; j < state.seen_count; j++) known |= state.seen[j] == first;
            if (!known && state.seen_count < MOST) state.seen[state.seen_count++] = first;
            us = known ? state.costs[i].warm_us : state.costs[i].cold_us;
        }
    if (!us && strncmp(launch->kernel->name, "lowbit_", 7) && getenv("FAKE_KERNEL_US")) us = atof(getenv("FAKE_KERNEL_US"));
    state.now_us += overhead_us + us;
    if (strstr(launch->kernel->name, "fault")) state.sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
}

/* -- code ------------------------------------------------------------------------------------------------------- */

static int width(const char *type) {
    const char *digits = type;
    while (*digits && (*digits < '0' || *digits > '9')) digits++;
    return atoi(digits) / 8;
}

/* Sizes of parameters, from a kernel's .nv.info section: attribute 0x17 is (index, ordinal, offset, size << 18 | …). */
static void parse_parameters(Kernel *kernel, const unsigned char *at, const unsigned char *end) {
    while (at + 4 <= end) {
        unsigned short size = at[0] == 4 ? at[2] | at[3] << 8 : 0;
        if (at[0] == 4 && at[1] == 0x17 && size == 12) {
            unsigned word;
            memcpy(&word, at + 12, 4);
            int ordinal = at[8] | at[9] << 8;
            kernel->sizes[ordinal] = word >> 18;
            if (ordinal >= kernel->count) kernel->count = ordinal + 1;
        }
        at += 4 + size;
    }
}

/* A real cubin: a kernel for each .text.NAME section. */
static void parse_elf(Library *library, const char *code) {
    unsigned long long sections, names;
    unsigned short size, count, strings;
    memcpy(&sections, code + 0x28, 8), memcpy(&size, code + 0x3a, 2), memcpy(&count, code + 0x3c, 2);
    memcpy(&strings, code + 0x3e, 2);
    memcpy(&names, code + sections + strings * size + 0x18, 8);
    for (int i = 0; i < count && library->count < 64; i++) {
        const char *section = code + sections + i * size, *name = code + names + *(unsigned *)section;
        if (strncmp(name, ".text.", 6)) continue;
        Kernel *kernel = calloc(1, sizeof *kernel);
        snprintf(kernel->name, sizeof kernel->name, "%s", name + 6);
        kernel->registers = 32, kernel->dynamic = 48 << 10;
        library->kernels[library->count++] = kernel;
        for (int j = 0; j < count; j++) {
            const char *other = code + sections + j * size, *info = code + names + *(unsigned *)other;
            unsigned long long offset, bytes;
            memcpy(&offset, other + 0x18, 8), memcpy(&bytes, other + 0x20, 8);
            if (!strncmp(info, ".nv.info.", 9) && !strcmp(info + 9, kernel->name))
                parse_parameters(kernel, (const unsigned char *)code + offset, (const unsigned char *)code + offset + bytes);
        }
    }
}

static void parse(Library *library) {
    const char *at = library->text, *noted = strstr(at, "// registers ");
    while ((at = strstr(at, ".entry ")) && library->count < 64) {
        Kernel *kernel = calloc(1, sizeof *kernel);
        at += 7;
        int n = (int)strcspn(at, "( \n");
        snprintf(kernel->name, sizeof kernel->name, "%.*s", n, at);
        kernel->registers = noted ? atoi(noted + 13) : 32;
        kernel->dynamic = 48 << 10;
        const char *end = strchr(at, ')');
        while ((at = strstr(at, ".param ")) && at < end) {
            at += 7;
            while (*at == ' ' || !strncmp(at, ".align", 6)) at++;
            kernel->sizes[kernel->count++] = width(at);
        }
        at = end;
        library->kernels[library->count++] = kernel;
    }
}

#define LIVE if (state.sticky) return state.sticky

CUresult cuLibraryLoadData(CUlibrary *out, const void *code, CUjit_option *a, void **b, unsigned c, CUlibraryOption *d,
                           void **e, unsigned f) {
    LIVE;
    Library *library = calloc(1, sizeof *library);
    library->cubin = !memcmp(code, "\x7f" "ELF", 4);
    if (library->cubin && ((const char *)code)[4] == 2) {
        parse_elf(library, code);
        return *out = (CUlibrary)library, CUDA_SUCCESS;
    }
    library->text = strdup((const char *)code);
    if (strstr(library->text, "refuse")) return CUDA_ERROR_INVALID_PTX;
    const char *target = strstr(library->text, ".target sm_");
    if (target) {
        int arch = atoi(target + 11), here = state.major * 10 + state.minor;
        if (library->cubin ? arch / 10 != state.major || arch > here : arch > here) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    }
    parse(library);
    *out = (CUlibrary)library;
    return CUDA_SUCCESS;
}
CUresult cuLibraryUnload(CUlibrary library) { return state.sticky; }
CUresult cuLibraryGetKernel(CUkernel *out, CUlibrary library, const char *name) {
    LIVE;
    Library *code = (Library *)library;
    for (int i = 0; i < code->count; i++)
        if (!strcmp(code->kernels[i]->name, name)) return *out = (CUkernel)code->kernels[i], CUDA_SUCCESS;
    return CUDA_ERROR_NOT_FOUND;
}
CUresult cuKernelGetLibrary(CUlibrary *out, CUkernel kernel) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuKernelGetFunction(CUfunction *out, CUkernel kernel) { return *out = (CUfunction)kernel, state.sticky; }
CUresult cuKernelGetAttribute(int *out, CUfunction_attribute attribute, CUkernel kernel, CUdevice device) {
    Kernel *k = (Kernel *)kernel;
    switch (attribute) {
        case CU_FUNC_ATTRIBUTE_NUM_REGS: *out = k->registers; break;
        case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *out = 1024; break;
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *out = k->dynamic; break;
        default: *out = 0;
    }
    return state.sticky;
}
CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device) {
    LIVE;
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value > 99 << 10) return CUDA_ERROR_INVALID_VALUE;
    ((Kernel *)kernel)->dynamic = value;
    return CUDA_SUCCESS;
}
CUresult cuKernelGetParamInfo(CUkernel kernel, size_t n, size_t *offset, size_t *size) {
    Kernel *k = (Kernel *)kernel;
    if ((int)n >= k->count) return CUDA_ERROR_INVALID_VALUE;
    *offset = 0;
    for (size_t i = 0; i <= n; i++) {
        *offset = (*offset + k->sizes[i] - 1) / k->sizes[i] * k->sizes[i];
        if (i < n) *offset += k->sizes[i];
    }
    if (size) *size = k->sizes[n];
    return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
    LIVE;
    Kernel *kernel = (Kernel *)function;
    Launch launch = {kernel,
                     {config->gridDimX, config->gridDimY, config->gridDimZ},
                     {config->blockDimX, config->blockDimY, config->blockDimZ},
                     config->sharedMemBytes};
    if ((int)config->sharedMemBytes > kernel->dynamic) return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < kernel->count; i++) {
        memcpy(launch.arguments + launch.bytes, arguments[i], kernel->sizes[i]);
        launch.bytes += kernel->sizes[i];
    }
    if (state.capturing)
        state.capturing->launches[state.capturing->count++] = launch;
    else
        run(&launch, LAUNCH_US);
    return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream stream, void **arguments, void **extra) {
    CUlaunchConfig config = {gx, gy, gz, bx, by, bz, shared, stream, NULL, 0};
    return cuLaunchKernelEx(&config, f, arguments, extra);
}

/* -- devices and contexts --------------------------------------------------------------------------------------- */

CUresult cuInit(unsigned flags) {
    const char *arch = getenv("FAKE_ARCH"); /* 86 */
    if (arch) state.major = atoi(arch) / 10, state.minor = atoi(arch) % 10;
    return state.device_count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}
CUresult cuDriverGetVersion(int *out) { return *out = state.version, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *out) { return *out = state.device_count, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *out, int n) {
    if (n < 0 || n >= state.device_count) return CUDA_ERROR_INVALID_DEVICE;
    return *out = n, CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char *out, int length, CUdevice device) {
    return snprintf(out, length, "Fake GPU"), CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid(CUuuid *out, CUdevice device) {
    for (int i = 0; i < 16; i++) out->bytes[i] = (char)(i * 17);
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetPCIBusId(char *out, int length, CUdevice device) {
    return snprintf(out, length, "0000:3B:00.0"), CUDA_SUCCESS;
}
CUresult cuDeviceTotalMem(size_t *out, CUdevice device) { return *out = MEMORY_BYTES, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *out, CUdevice_attribute attribute, CUdevice device) {
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *out = state.major; break;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *out = state.minor; break;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *out = 82; break;
        case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *out = 1695000; break;
        case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *out = 9751000; break;
        case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *out = 384; break;
        case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *out = 6 << 20; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *out = 99 << 10; break;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *out = 100 << 10; break;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *out = 65536; break;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *out = 1536; break;
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: *out = 1; break;
        default: *out = 0;
    }
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) {
    return *out = (CUcontext)&context_token, state.sticky;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return state.current = context, CUDA_SUCCESS; }
CUresult cuCtxPushCurrent(CUcontext context) { return state.current = context, CUDA_SUCCESS; }
CUresult cuCtxPopCurrent(CUcontext *out) { return *out = state.current, CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *out) { return *out = state.current, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *out) { return *out = 0, state.current ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT; }
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, CUDA_SUCCESS; }
CUresult cuCtxSynchronize(void) { return state.sticky; }
CUresult cuStreamCreateWithPriority(CUstream *out, unsigned flags, int priority) {
    return *out = (CUstream)&stream_token, state.sticky;
}
CUresult cuStreamDestroy(CUstream stream) { return CUDA_SUCCESS; }
CUresult cuStreamSynchronize(CUstream stream) { return state.sticky; }
CUresult cuStreamGetCtx(CUstream stream, CUcontext *out) { return *out = (CUcontext)&context_token, CUDA_SUCCESS; }

/* -- memory ----------------------------------------------------------------------------------------------------- */

static int inside(unsigned long long address, size_t bytes) {
    for (int i = 0; i < state.block_count; i++)
        if (address >= state.blocks[i].address && address + bytes <= state.blocks[i].address + state.blocks[i].bytes)
            return 1;
    return 0;
}
CUresult cuMemAlloc(CUdeviceptr *out, size_t bytes) {
    LIVE;
    if (state.allocated + bytes > MEMORY_BYTES || state.block_count == MOST) return CUDA_ERROR_OUT_OF_MEMORY;
    *out = (CUdeviceptr)aligned_alloc(256, (bytes + 255) / 256 * 256);
    state.blocks[state.block_count].address = *out;
    state.blocks[state.block_count++].bytes = bytes;
    state.allocated += bytes;
    return CUDA_SUCCESS;
}
CUresult cuMemFree(CUdeviceptr address) {
    for (int i = 0; i < state.block_count; i++)
        if (state.blocks[i].address == address) {
            free((void *)address);
            state.allocated -= state.blocks[i].bytes;
            state.blocks[i] = state.blocks[--state.block_count];
            return state.sticky;
        }
    return CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemGetInfo(size_t *free_bytes, size_t *total) {
    return *free_bytes = MEMORY_BYTES - state.allocated, *total = MEMORY_BYTES, state.sticky;
}
CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    LIVE;
    if (!inside(to, bytes) || state.capturing) return CUDA_ERROR_INVALID_VALUE;
    return memcpy((void *)to, from, bytes), CUDA_SUCCESS;
}
CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    LIVE;
    if (!inside(from, bytes) || state.capturing) return CUDA_ERROR_INVALID_VALUE;
    return memcpy(to, (void *)from, bytes), CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
    LIVE;
    if (!inside(to, bytes)) return CUDA_ERROR_INVALID_VALUE;
    return memset((void *)to, value, bytes), CUDA_SUCCESS;
}

/* -- events and graphs ------------------------------------------------------------------------------------------ */

CUresult cuEventCreate(CUevent *out, unsigned flags) {
    LIVE;
    if (flags & CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_VALUE; /* nothing here wants one */
    return *out = (CUevent)calloc(1, sizeof(Event)), CUDA_SUCCESS;
}
CUresult cuEventDestroy(CUevent event) { return free(event), CUDA_SUCCESS; }
CUresult cuEventRecord(CUevent event, CUstream stream) {
    LIVE;
    return ((Event *)event)->time_us = state.now_us, CUDA_SUCCESS;
}
CUresult cuEventSynchronize(CUevent event) { return state.sticky; }
CUresult cuEventQuery(CUevent event) { return state.sticky; }
CUresult cuEventElapsedTime(float *ms, CUevent start, CUevent end) {
    return *ms = (float)((((Event *)end)->time_us - ((Event *)start)->time_us) / 1e3), state.sticky;
}
CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
    LIVE;
    if (state.capturing) return CUDA_ERROR_ILLEGAL_STATE;
    return state.capturing = calloc(1, sizeof(Graph)), CUDA_SUCCESS;
}
CUresult cuStreamEndCapture(CUstream stream, CUgraph *out) {
    if (!state.capturing) return CUDA_ERROR_ILLEGAL_STATE;
    return *out = (CUgraph)state.capturing, state.capturing = NULL, CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *out) {
    *out = state.capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}
CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                const CUgraphNode **nodes, const CUgraphEdgeData **edges, size_t *count) {
    cuStreamIsCapturing(stream, status);
    if (id) *id = 1;
    if (graph) *graph = (CUgraph)state.capturing;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return CUDA_SUCCESS;
}
CUresult cuGraphInstantiateWithParams(CUgraphExec *out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters) {
    LIVE;
    Graph *copy = malloc(sizeof *copy);
    parameters->result_out = CUDA_GRAPH_INSTANTIATE_SUCCESS;
    return memcpy(copy, (Graph *)graph, sizeof *copy), *out = (CUgraphExec)copy, CUDA_SUCCESS;
}
CUresult cuGraphInstantiate(CUgraphExec *out, CUgraph graph, unsigned long long flags) {
    CUDA_GRAPH_INSTANTIATE_PARAMS parameters = {0};
    return cuGraphInstantiateWithParams(out, graph, &parameters);
}
CUresult cuGraphUpload(CUgraphExec graph, CUstream stream) { return state.sticky; }
CUresult cuGraphLaunch(CUgraphExec graph, CUstream stream) {
    LIVE;
    Graph *work = (Graph *)graph;
    for (int i = 0; i < work->count; i++) run(&work->launches[i], GRAPH_US);
    return CUDA_SUCCESS;
}
CUresult cuGraphExecDestroy(CUgraphExec graph) { return free(graph), CUDA_SUCCESS; }
CUresult cuGraphDestroy(CUgraph graph) { return free(graph), CUDA_SUCCESS; }

CUresult cuUserObjectCreate(CUuserObject *out, void *value, CUhostFn destroy, unsigned count, unsigned flags) {
    return *out = (CUuserObject)malloc(1), CUDA_SUCCESS;
}
CUresult cuUserObjectRelease(CUuserObject object, unsigned count) { return CUDA_SUCCESS; }
CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned count, unsigned flags) {
    return CUDA_SUCCESS;
}
CUresult cuGraphReleaseUserObject(CUgraph graph, CUuserObject object, unsigned count) { return CUDA_SUCCESS; }

/* -- errors and entry points ------------------------------------------------------------------------------------ */

static const struct { CUresult error; const char *name, *words; } errors[] = {
#define ERROR(name, words) {name, #name, words}
    ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    ERROR(CUDA_ERROR_INVALID_PTX, "a PTX JIT compilation failed"),
    ERROR(CUDA_ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device"),
    ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
};
#define ERRORS (sizeof errors / sizeof *errors)
CUresult cuGetErrorName(CUresult error, const char **out) {
    size_t i = 0;
    while (i < ERRORS - 1 && errors[i].error != error) i++;
    return *out = errors[i].name, CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **out) {
    size_t i = 0;
    while (i < ERRORS - 1 && errors[i].error != error) i++;
    return *out = errors[i].words, CUDA_SUCCESS;
}

static CUresult missing(void) { return CUDA_ERROR_NOT_SUPPORTED; }

CUresult cuGetProcAddress(const char *symbol, void **out, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *status);

#define KNOWN(name) {#name, (void *)name}
static const struct { const char *symbol; void *function; } known[] = {
    KNOWN(cuInit), KNOWN(cuDriverGetVersion), KNOWN(cuDeviceGetCount), KNOWN(cuDeviceGet), KNOWN(cuDeviceGetName),
    KNOWN(cuDeviceGetUuid), KNOWN(cuDeviceGetPCIBusId), KNOWN(cuDeviceTotalMem), KNOWN(cuDeviceGetAttribute),
    KNOWN(cuDevicePrimaryCtxRetain), KNOWN(cuDevicePrimaryCtxRelease), KNOWN(cuCtxSetCurrent), KNOWN(cuCtxGetCurrent),
    KNOWN(cuCtxPushCurrent), KNOWN(cuCtxPopCurrent), KNOWN(cuCtxGetDevice), KNOWN(cuCtxGetStreamPriorityRange),
    KNOWN(cuCtxSynchronize), KNOWN(cuStreamCreateWithPriority), KNOWN(cuStreamDestroy), KNOWN(cuStreamSynchronize),
    KNOWN(cuStreamGetCtx), KNOWN(cuMemAlloc), KNOWN(cuMemFree), KNOWN(cuMemGetInfo), KNOWN(cuMemcpyHtoDAsync),
    KNOWN(cuMemcpyDtoHAsync), KNOWN(cuMemsetD8Async), KNOWN(cuEventCreate), KNOWN(cuEventDestroy), KNOWN(cuEventRecord),
    KNOWN(cuEventSynchronize), KNOWN(cuEventQuery), KNOWN(cuEventElapsedTime), KNOWN(cuStreamBeginCapture),
    KNOWN(cuStreamEndCapture), KNOWN(cuStreamIsCapturing), KNOWN(cuStreamGetCaptureInfo),
    KNOWN(cuGraphInstantiateWithParams), KNOWN(cuGraphInstantiate), KNOWN(cuGraphUpload), KNOWN(cuGraphLaunch),
    KNOWN(cuGraphExecDestroy), KNOWN(cuGraphDestroy), KNOWN(cuLibraryLoadData), KNOWN(cuLibraryUnload),
    KNOWN(cuLibraryGetKernel), KNOWN(cuKernelGetLibrary), KNOWN(cuKernelGetFunction), KNOWN(cuKernelGetAttribute),
    KNOWN(cuKernelSetAttribute), KNOWN(cuKernelGetParamInfo), KNOWN(cuLaunchKernelEx), KNOWN(cuLaunchKernel),
    KNOWN(cuUserObjectCreate), KNOWN(cuUserObjectRelease), KNOWN(cuGraphRetainUserObject),
    KNOWN(cuGraphReleaseUserObject),
    KNOWN(cuGetErrorName), KNOWN(cuGetErrorString), KNOWN(cuGetProcAddress),
};

/* The preprocessor gives a table's names their version: cuMemAlloc_v2 is asked for as cuMemAlloc. */
static int same(const char *known_name, const char *symbol) {
    size_t n = strlen(symbol);
    return !strncmp(known_name, symbol, n) && (!known_name[n] || !strncmp(known_name + n, "_v", 2));
}

CUresult cuGetProcAddress(const char *symbol, void **out, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *status) {
    if (status) *status = CU_GET_PROC_ADDRESS_SUCCESS;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (same(known[i].symbol, symbol)) return *out = known[i].function, CUDA_SUCCESS;
    return *out = (void *)missing, CUDA_SUCCESS;
}
