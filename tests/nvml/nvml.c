/* A library with the functions of NVML that the agent calls, whose GPUs are written in a file.
 *
 * The file is `nvml.script` beside the library, read when it is opened and at each count of GPUs, so that a test can
 * change it between two looks. Lines, in any order, `#` begins a comment:
 *
 *   driver 550.54.15
 *   gpu 0 uuid=GPU-0 name=H100 used=1 total=2 util=37 power=310000 temp=61 corrected=3 uncorrected=0 mig=0 accounting=0
 *   instance 0 1 uuid=MIG-1 used=1 total=2      (instance 1 of GPU 0)
 *   process 0 100 used=5 peak=9                 (process 100 on GPU 0; without `used` the driver does not tell)
 *   process 0:1 101 used=5                      (on instance 1 of GPU 0)
 *   error nvmlDeviceGetPowerUsage 3 0           (the call answers 3, for GPU 0; without a GPU for all)
 *   hang nvmlDeviceGetPowerUsage                (the call does not return while this is in the file)
 *
 * Numbers of errors and the layout of structs are NVML's (public header nvml.h of CUDA 12). With -DOLD_DRIVER it lacks
 * what came with driver 510.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, SHORT = 7 };
enum { LIMIT = 64, TEXT = 96 };

typedef unsigned int u32;
typedef unsigned long long u64;

struct device {
    int there, gpu, instance; /* instance -1: a whole GPU */
    char uuid[TEXT], name[TEXT];
    u64 used, total, corrected, uncorrected;
    int util, power, temp, mig, accounting; /* -1: not supported */
};
struct process {
    struct device *device;
    u32 pid;
    u64 used, peak;
};
struct process_info {
    u32 pid;
    u64 used;
    u32 gpu_instance, compute_instance;
};
struct error {
    char call[TEXT];
    int code, gpu;
};

static struct device devices[LIMIT];
static struct process processes[LIMIT];
static struct error errors[LIMIT], hangs[LIMIT];
static int device_count, process_count, error_count, hang_count, open_count;
static char driver[TEXT];

static char *field(char *line, const char *name, char *into) {
    char key[TEXT];
    snprintf(key, sizeof key, " %s=", name);
    char *at = strstr(line, key);
    if (!at) return NULL;
    sscanf(at + strlen(key), "%95s", into);
    return into;
}

static u64 number(char *line, const char *name, u64 otherwise) {
    char text[TEXT];
    return field(line, name, text) ? strtoull(text, NULL, 10) : otherwise;
}

static struct device *find(int gpu, int instance) {
    for (int i = 0; i < device_count; i++)
        if (devices[i].gpu == gpu && devices[i].instance == instance) return &devices[i];
    return NULL;
}

static void add_device(char *line, int gpu, int instance) {
    if (device_count == LIMIT) return;
    struct device *d = &devices[device_count++];
    memset(d, 0, sizeof *d);
    d->there = 1;
    d->gpu = gpu;
    d->instance = instance;
    field(line, "uuid", d->uuid);
    if (!field(line, "name", d->name)) strcpy(d->name, "Test");
    d->used = number(line, "used", 0);
    d->total = number(line, "total", 0);
    d->corrected = number(line, "corrected", ~0ull);
    d->uncorrected = number(line, "uncorrected", 0);
    d->util = (int)number(line, "util", -1);
    d->power = (int)number(line, "power", -1);
    d->temp = (int)number(line, "temp", -1);
    d->mig = (int)number(line, "mig", -1);
    d->accounting = (int)number(line, "accounting", -1);
}

static void load(void) {
    Dl_info self;
    char path[4096], line[512];
    dladdr((void *)load, &self);
    snprintf(path, sizeof path, "%s", self.dli_fname);
    char *end = strrchr(path, '/');
    snprintf(end ? end + 1 : path, 32, "nvml.script");
    FILE *file = fopen(path, "r");
    if (!file) return;
    device_count = process_count = error_count = hang_count = 0;
    strcpy(driver, "550.54.15");
    while (fgets(line, sizeof line, file)) {
        int gpu, instance, code;
        u32 pid;
        char call[TEXT];
        if (sscanf(line, "driver %95s", driver) == 1) continue;
        if (sscanf(line, "gpu %d", &gpu) == 1) add_device(line, gpu, -1);
        else if (sscanf(line, "instance %d %d", &gpu, &instance) == 2) add_device(line, gpu, instance);
        else if (sscanf(line, "process %d:%d %u", &gpu, &instance, &pid) == 3 ||
                 (instance = -1, sscanf(line, "process %d %u", &gpu, &pid) == 2)) {
            if (process_count < LIMIT)
                processes[process_count++] = (struct process){find(gpu, instance), pid, number(line, "used", ~0ull),
                                                              number(line, "peak", ~0ull)};
        } else if (sscanf(line, "error %95s %d %d", call, &code, &gpu) == 3 ||
                   (gpu = -1, sscanf(line, "error %95s %d", call, &code) == 2)) {
            if (error_count < LIMIT) {
                errors[error_count] = (struct error){.code = code, .gpu = gpu};
                strcpy(errors[error_count++].call, call);
            }
        } else if (sscanf(line, "hang %95s", call) == 1 && hang_count < LIMIT) {
            strcpy(hangs[hang_count++].call, call);
        }
    }
    fclose(file);
}

static int hangs_in(const char *call) {
    for (int i = 0; i < hang_count; i++)
        if (!strcmp(hangs[i].call, call)) return 1;
    return 0;
}

/* What the script has the call answer, before it does anything. */
static int verdict(const char *call, const struct device *device) {
    while (hangs_in(call)) {
        usleep(10000);
        load();
    }
    for (int i = 0; i < error_count; i++)
        if (!strcmp(errors[i].call, call) &&
            (errors[i].gpu < 0 || (device && device->gpu == errors[i].gpu)))
            return errors[i].code;
    if (open_count == 0) return UNINITIALIZED;
    return OK;
}

#define BEGIN(device)                         \
    int code = verdict(__func__, device);     \
    if (code) return code

int nvmlInit_v2(void) {
    load();
    open_count++;
    int code = verdict(__func__, NULL);
    if (code) open_count--;
    return code;
}

int nvmlShutdown(void) {
    BEGIN(NULL);
    open_count--;
    return OK;
}

int nvmlSystemGetDriverVersion(char *text, u32 length) {
    BEGIN(NULL);
    snprintf(text, length, "%s", driver);
    return OK;
}

int nvmlDeviceGetCount_v2(u32 *count) {
    load();
    BEGIN(NULL);
    *count = 0;
    for (int i = 0; i < device_count; i++) *count += devices[i].instance < 0;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(u32 index, struct device **device) {
    *device = find((int)index, -1);
    if (!*device) return INVALID;
    BEGIN(*device);
    return OK;
}

int nvmlDeviceGetUUID(struct device *device, char *text, u32 length) {
    BEGIN(device);
    snprintf(text, length, "%s", device->uuid);
    return OK;
}

int nvmlDeviceGetName(struct device *device, char *text, u32 length) {
    BEGIN(device);
    snprintf(text, length, "%s", device->name);
    return OK;
}

int nvmlDeviceGetUtilizationRates(struct device *device, u32 rates[2]) {
    BEGIN(device);
    if (device->util < 0) return NOT_SUPPORTED;
    rates[0] = (u32)device->util;
    rates[1] = 0;
    return OK;
}

int nvmlDeviceGetPowerUsage(struct device *device, u32 *milliwatts) {
    BEGIN(device);
    if (device->power < 0) return NOT_SUPPORTED;
    *milliwatts = (u32)device->power;
    return OK;
}

int nvmlDeviceGetTemperature(struct device *device, int sensor, u32 *degrees) {
    BEGIN(device);
    if (device->temp < 0 || sensor != 0) return NOT_SUPPORTED;
    *degrees = (u32)device->temp;
    return OK;
}

/* kind: 0 corrected, 1 uncorrected; counter: 1 over the device's life. */
int nvmlDeviceGetTotalEccErrors(struct device *device, int kind, int counter, u64 *count) {
    BEGIN(device);
    if (device->corrected == ~0ull || counter != 1) return NOT_SUPPORTED;
    *count = kind == 0 ? device->corrected : device->uncorrected;
    return OK;
}

int nvmlDeviceGetMigMode(struct device *device, u32 *current, u32 *pending) {
    BEGIN(device);
    if (device->mig < 0) return NOT_SUPPORTED;
    *current = *pending = (u32)device->mig;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(struct device *device, u32 *count) {
    BEGIN(device);
    *count = device->mig > 0 ? 7 : 0;
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(struct device *device, u32 index, struct device **instance) {
    BEGIN(device);
    *instance = find(device->gpu, (int)index);
    return *instance ? OK : NOT_FOUND;
}

int nvmlDeviceGetAccountingMode(struct device *device, u32 *mode) {
    BEGIN(device);
    if (device->accounting < 0) return NOT_SUPPORTED;
    *mode = (u32)device->accounting;
    return OK;
}

struct accounting {
    u32 gpu, memory;
    u64 peak, time, start;
    u32 running, reserved[5];
};

int nvmlDeviceGetAccountingStats(struct device *device, u32 pid, struct accounting *stats) {
    BEGIN(device);
    for (int i = 0; i < process_count; i++)
        if (processes[i].device == device && processes[i].pid == pid && processes[i].peak != ~0ull) {
            memset(stats, 0, sizeof *stats);
            stats->peak = processes[i].peak;
            stats->running = 1;
            return OK;
        }
    return NOT_FOUND;
}

static int list(struct device *device, u32 *room, struct process_info *infos) {
    u32 count = 0;
    for (int i = 0; i < process_count; i++) {
        if (processes[i].device != device) continue;
        if (infos && count < *room)
            infos[count] = (struct process_info){processes[i].pid, processes[i].used, ~0u, ~0u};
        count++;
    }
    int fits = count <= *room && (infos || !count);
    *room = count;
    return fits ? OK : SHORT;
}

int nvmlDeviceGetComputeRunningProcesses_v2(struct device *device, u32 *room, struct process_info *infos) {
    BEGIN(device);
    return list(device, room, infos);
}

#ifndef OLD_DRIVER
int nvmlDeviceGetComputeRunningProcesses_v3(struct device *device, u32 *room, struct process_info *infos) {
    BEGIN(device);
    return list(device, room, infos);
}

struct memory {
    u32 version;
    u64 total, reserved, free, used;
};

int nvmlDeviceGetMemoryInfo_v2(struct device *device, struct memory *memory) {
    BEGIN(device);
    memory->total = device->total;
    memory->used = device->used;
    memory->free = device->total - device->used;
    memory->reserved = 0;
    return OK;
}
#endif
