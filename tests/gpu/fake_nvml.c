/* NVIDIA's management library without a GPU, for tests: what nvidia-ml-py asks of libnvidia-ml.so.1.

   Energy is 200 W for every microsecond of the fake driver's clock, in steps of 10 ms of it. */

#include <dlfcn.h>
#include <string.h>

static unsigned reasons = 4;
static int energy = 1;

void fake_nvml_reasons(unsigned bits) { reasons = bits; }
void fake_nvml_energy(int there) { energy = there; }

int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return error == 3 ? "Not Supported" : "Not Found"; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **out) {
    if (strcmp(bus, "0000:3B:00.0")) return 6;
    return *out = &reasons, 0;
}
int nvmlDeviceGetClockInfo(void *device, unsigned type, unsigned *out) { return *out = type == 1 ? 1695 : 9751, 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *out) { return *out = reasons, 0; }
int nvmlDeviceGetTemperature(void *device, unsigned sensor, unsigned *out) { return *out = 61, 0; }
int nvmlDeviceGetPowerUsage(void *device, unsigned *out) { return 3; }
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *out) {
    double (*now)(void) = (double (*)(void))dlsym(RTLD_DEFAULT, "fake_now_us");
    if (!energy || !now) return 3;
    return *out = (unsigned long long)(now() / 1e4) * 2000, 0; /* 200 W for 10 ms are 2,000 mJ */
}
