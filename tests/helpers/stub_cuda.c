/* A CUDA driver without a GPU: each call returns at once. It counts and records launches, and counts descriptors.

   The host's path up to the driver is real, so that tests can read what a launch hands over, and time the path. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

enum { CAPACITY = 1 << 22, MAX_ATTRIBUTES = 4 };

/* A CUfunction points to one. Python sets the layout, which the driver reads from the binary. */
typedef struct {
  char* name;
  uint32_t n_params;
  uint32_t* sizes;
} Function;

/* The parameters' bytes follow it, one after another. */
typedef struct {
  uint64_t function, stream;
  uint32_t grid[3], block[3], shared, n_attributes;
  uint32_t attributes[MAX_ATTRIBUTES][4]; /* an id, and three numbers of the value */
  uint64_t size;
} Record;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* launchers release the GIL */
static uint64_t launches, descriptors, recorded, used;
static char records[CAPACITY];

uint64_t stub_launches(void) { return launches; }
uint64_t stub_descriptors(void) { return descriptors; }
uint64_t stub_recorded(void) { return recorded; }
uint64_t stub_used(void) { return used; }
const char* stub_records(void) { return records; }
const char* stub_name(const Function* function) { return function->name; }
/* Launches fail from here on, with this error; none if it is 0. */
static CUresult refusal;
void stub_refuse(int error) { refusal = (CUresult)error; }
void stub_clear(void) { launches = descriptors = recorded = used = 0; }

void stub_set_layout(Function* function, uint32_t n_params, const uint32_t* sizes) {
  function->sizes = realloc(function->sizes, n_params * sizeof *sizes);
  memcpy(function->sizes, sizes, n_params * sizeof *sizes);
  function->n_params = n_params;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction handle, void** params, void** extra) {
  const Function* function = (const Function*)handle;
  Record record = {
      .function = (uint64_t)handle,
      .stream = (uint64_t)config->hStream,
      .grid = {config->gridDimX, config->gridDimY, config->gridDimZ},
      .block = {config->blockDimX, config->blockDimY, config->blockDimZ},
      .shared = config->sharedMemBytes,
      .n_attributes = config->numAttrs,
  };
  if (refusal) return refusal;
  if (config->numAttrs > MAX_ATTRIBUTES) return CUDA_ERROR_INVALID_VALUE;
  for (uint32_t i = 0; i < config->numAttrs; i++) {
    const CUlaunchAttribute* attribute = &config->attrs[i];
    /* The other values are one number; the bytes behind it are not set. */
    int n = attribute->id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION ? 3 : 1;
    record.attributes[i][0] = attribute->id;
    memcpy(&record.attributes[i][1], &attribute->value, n * sizeof(uint32_t));
  }
  for (uint32_t i = 0; i < function->n_params; i++) record.size += function->sizes[i];

  pthread_mutex_lock(&mutex);
  launches++;
  if (used + sizeof record + record.size <= CAPACITY) {
    recorded++;
    memcpy(records + used, &record, sizeof record);
    used += sizeof record;
    for (uint32_t i = 0; i < function->n_params; i++) {
      memcpy(records + used, params[i], function->sizes[i]);
      used += function->sizes[i];
    }
  }
  pthread_mutex_unlock(&mutex);
  return CUDA_SUCCESS;
}

static uint64_t mix(uint64_t hash, const void* bytes, size_t n) { /* FNV-1a */
  for (const unsigned char* byte = bytes; n--; byte++) hash = (hash ^ *byte) * 1099511628211ull;
  return hash;
}

/* A descriptor holds its address, and a hash of all else that it is made of. */
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  uint32_t kinds[] = {type, rank, interleave, swizzle, promotion, fill};
  uint64_t hash = mix(14695981039346656037ull, kinds, sizeof kinds);
  hash = mix(hash, sizes, rank * sizeof *sizes);
  hash = mix(hash, strides, (rank - 1) * sizeof *strides);
  hash = mix(hash, box, rank * sizeof *box);
  hash = mix(hash, element_strides, rank * sizeof *element_strides);
  memset(map, 0, sizeof *map);
  memcpy(map, &address, 8);
  memcpy((char*)map + 8, &hash, 8);
  pthread_mutex_lock(&mutex);
  descriptors++;
  pthread_mutex_unlock(&mutex);
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  *module = (CUmodule)1;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* handle, CUmodule module, const char* name) {
  Function* function = calloc(1, sizeof *function);
  function->name = strdup(name);
  *handle = (CUfunction)function;
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) { /* an H100's */
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = 9;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = 0;
      break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = 132;
      break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      *value = 32;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
      *value = 65536;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = 232448;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
      *value = 233472;
      break;
    default:
      *value = 1;
  }
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuOccupancyMaxActiveClusters(int* n, CUfunction function, const CUlaunchConfig* config) {
  *n = 1;
  return CUDA_SUCCESS;
}

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  *count = 1;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* device) {
  *device = 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }

CUresult cuCtxGetLimit(size_t* value, CUlimit limit) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  memcpy(value, &address, sizeof address); /* Triton asks for the device's pointer alone */
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult result, const char** text) {
  *text = "the stub of the CUDA driver refuses";
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult result, const char** name) {
  *name = result == CUDA_ERROR_INVALID_HANDLE ? "CUDA_ERROR_INVALID_HANDLE" : "another error";
  return CUDA_SUCCESS;
}
