// A stand-in for libnvidia-ml.so.1: two GPUs, the second without ECC and with a power limit reached.
#include <stdio.h>
#include <string.h>

enum { OK = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6 };
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Utilization;
static int devices[2] = {0, 1};
static int reads = 0; // of the power: it changes with each

int nvmlInitWithFlags(unsigned flags) { return OK; }
int nvmlInit_v2(void) { return OK; }
int nvmlShutdown(void) { fprintf(stderr, "shutdown\n"); return OK; }
const char *nvmlErrorString(int code) { return "stand-in"; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
  if (strcmp(uuid, "GPU-aaa") && strcmp(uuid, "GPU-bbb")) return NOT_FOUND;
  *device = &devices[uuid[4] == 'b'];
  return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  if (index > 1) return NOT_FOUND;
  *device = &devices[index];
  return OK;
}
int nvmlDeviceGetMemoryInfo(int *device, Memory *memory) {
  memory->total = 80000000000ull;
  memory->used = *device ? 30000000000ull : 10000000000ull;
  return OK;
}
int nvmlDeviceGetPowerUsage(int *device, unsigned *milliwatts) { *milliwatts = 100000 * ++reads; return OK; }
int nvmlDeviceGetUtilizationRates(int *device, Utilization *rates) { rates->gpu = *device ? 50 : 100; return OK; }
int nvmlDeviceGetClockInfo(int *device, int clock, unsigned *mhz) { *mhz = clock == 1 ? 1980 : 2619; return OK; }
int nvmlDeviceGetTemperature(int *device, int sensor, unsigned *celsius) { *celsius = *device ? 60 : 40; return OK; }
int nvmlDeviceGetTotalEccErrors(int *device, int type, int counter, unsigned long long *count) {
  if (*device) return NOT_SUPPORTED;
  *count = type == 1 && counter == 0 ? 2 : 99; // uncorrected, volatile
  return OK;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(int *device, unsigned long long *reasons) {
  *reasons = *device ? 0x4 : 0x40; // software power cap; thermal slowdown of the hardware
  return OK;
}
