/* The launches of a plan, all by one call from Python. Parameters are packed once; a call puts addresses in.

   It reads nothing of Triton's: `launcher.py` packs what Triton's own launcher would pass to the driver, and
   descriptors are encoded by Triton's function, which knows the driver's faults. A table keeps each argument's
   descriptors by address, of which they are a function. A call fills buffers of its own, so it may release the GIL. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <alloca.h>
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

#include "cuda.h"

#ifdef Py_GIL_DISABLED
#error "the tables of descriptors are guarded by the GIL"
#endif

enum { KEPT = 64, MAX_BYTES = 1 << 15, MAX_PARAMS = 1 << 10, MAX_SLOTS = 1 << 10, ALIGNMENT = 64 };
enum { MAP = sizeof(CUtensorMap) };

typedef struct {
  uint64_t address;
  char map[MAP];
} Encoded;

/* The address of a slot, plus an offset, goes to a place among the parameters' bytes. */
typedef struct {
  Py_ssize_t place, slot;
  int64_t offset;
} Target;

typedef struct {
  Target target;
  PyObject* encode; /* makes Triton's object of an address */
  Encoded* kept[KEPT];
} Descriptor;

typedef struct {
  CUfunction function;
  unsigned grid, threads, shared;
  int cooperative, pdl;
  Py_ssize_t n_bytes, n_params, n_pointers, n_descriptors;
  char* bytes; /* the parameters, but for addresses and descriptors */
  Py_ssize_t* offsets;
  Target* pointers;
  Descriptor* descriptors;
} Kernel;

typedef struct {
  PyObject_HEAD int device;
  Py_ssize_t n_kernels, n_slots, n_bytes, n_params;
  Kernel* kernels;
} Launches;

static CUresult (*launch)(const CUlaunchConfig*, CUfunction, void**, void**);
static CUresult (*get_error_name)(CUresult, const char**);
static CUresult (*get_context)(CUcontext*);
static CUresult (*set_context)(CUcontext);
static CUresult (*get_device)(CUdevice*, int);
static CUresult (*retain_context)(CUcontext*, CUdevice);

static void free_kernel(Kernel* kernel) {
  for (Py_ssize_t i = 0; i < kernel->n_descriptors; i++) {
    Py_XDECREF(kernel->descriptors[i].encode);
    for (int j = 0; j < KEPT; j++) PyMem_Free(kernel->descriptors[i].kept[j]);
  }
  PyMem_Free(kernel->bytes);
  PyMem_Free(kernel->offsets);
  PyMem_Free(kernel->pointers);
  PyMem_Free(kernel->descriptors);
}

static void deallocate(PyObject* object) {
  Launches* self = (Launches*)object;
  for (Py_ssize_t i = 0; i < self->n_kernels; i++) free_kernel(&self->kernels[i]);
  PyMem_Free(self->kernels);
  Py_TYPE(object)->tp_free(object);
}

static int read_target(PyObject* item, Target* target, PyObject** encode, Launches* self, Kernel* kernel) {
  long long offset;
  int is_read = encode ? PyArg_ParseTuple(item, "nnLO", &target->place, &target->slot, &offset, encode)
                       : PyArg_ParseTuple(item, "nnL", &target->place, &target->slot, &offset);
  if (!is_read) return -1;
  Py_ssize_t size = encode ? MAP : 8;
  if (target->place < 0 || target->slot < 0 || target->slot > MAX_SLOTS || target->place > kernel->n_bytes - size) {
    PyErr_SetString(PyExc_ValueError, "a place is not among the parameters");
    return -1;
  }
  target->offset = offset;
  if (target->slot >= self->n_slots) self->n_slots = target->slot + 1;
  return 0;
}

static int read_kernel(PyObject* item, Kernel* kernel, Launches* self) {
  unsigned long long function;
  PyObject *bytes, *offsets, *pointers, *descriptors;
  if (!PyArg_ParseTuple(item, "KIIIppSO!O!O!", &function, &kernel->grid, &kernel->threads, &kernel->shared,
                        &kernel->cooperative, &kernel->pdl, &bytes, &PyTuple_Type, &offsets, &PyTuple_Type, &pointers,
                        &PyTuple_Type, &descriptors))
    return -1;
  kernel->function = (CUfunction)(uintptr_t)function;
  kernel->n_bytes = (PyBytes_GET_SIZE(bytes) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  kernel->n_params = PyTuple_GET_SIZE(offsets);
  self->n_bytes += kernel->n_bytes;
  self->n_params += kernel->n_params;
  if (self->n_bytes > MAX_BYTES || self->n_params > MAX_PARAMS) {
    PyErr_SetString(PyExc_ValueError, "too many parameters");
    return -1;
  }
  kernel->bytes = PyMem_Calloc(kernel->n_bytes + 1, 1);
  kernel->offsets = PyMem_Calloc(kernel->n_params + 1, sizeof *kernel->offsets);
  kernel->pointers = PyMem_Calloc(PyTuple_GET_SIZE(pointers) + 1, sizeof *kernel->pointers);
  kernel->descriptors = PyMem_Calloc(PyTuple_GET_SIZE(descriptors) + 1, sizeof *kernel->descriptors);
  if (!kernel->bytes || !kernel->offsets || !kernel->pointers || !kernel->descriptors) {
    PyErr_NoMemory();
    return -1;
  }
  memcpy(kernel->bytes, PyBytes_AS_STRING(bytes), PyBytes_GET_SIZE(bytes));
  for (Py_ssize_t i = 0; i < kernel->n_params; i++) {
    kernel->offsets[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(offsets, i));
    if (kernel->offsets[i] == -1 && PyErr_Occurred()) return -1;
    if (kernel->offsets[i] < 0 || kernel->offsets[i] >= kernel->n_bytes) {
      PyErr_SetString(PyExc_ValueError, "a parameter is not among the parameters' bytes");
      return -1;
    }
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pointers); i++) {
    if (read_target(PyTuple_GET_ITEM(pointers, i), &kernel->pointers[i], NULL, self, kernel)) return -1;
    kernel->n_pointers++;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(descriptors); i++) {
    Descriptor* descriptor = &kernel->descriptors[i];
    PyObject* encode;
    if (read_target(PyTuple_GET_ITEM(descriptors, i), &descriptor->target, &encode, self, kernel)) return -1;
    descriptor->encode = Py_NewRef(encode);
    kernel->n_descriptors++;
  }
  return 0;
}

/* Return the descriptor of an address; NULL with an error set. */
static const char* find_descriptor(Descriptor* descriptor, uint64_t address) {
  Encoded** place = &descriptor->kept[((address >> 4) * 0x9E3779B97F4A7C15ull) >> 58];
  if (*place && (*place)->address == address) return (*place)->map;
  PyObject* object = PyObject_CallFunction(descriptor->encode, "K", (unsigned long long)address);
  if (!object) return NULL;
  /* Triton's object ends with the descriptor. */
  Py_ssize_t start = Py_TYPE(object)->tp_basicsize - MAP;
  if (start < (Py_ssize_t)sizeof(PyObject) || start > 128) {
    PyErr_SetString(PyExc_RuntimeError, "Triton's descriptor has an unknown form");
  } else if (*place || (*place = PyMem_Malloc(sizeof **place))) { /* another thread may have filled it meanwhile */
    (*place)->address = address;
    memcpy((*place)->map, (char*)object + start, MAP);
  } else {
    PyErr_NoMemory();
  }
  Py_DECREF(object);
  return PyErr_Occurred() ? NULL : (*place)->map;
}

/* Give a thread that has none, as a new one, the device's context, as Triton's launcher does; descriptors need it. */
static CUresult ensure_context(int index) {
  CUcontext context = NULL;
  CUdevice device;
  CUresult result = get_context(&context);
  if (result || context) return result;
  if ((result = get_device(&device, index))) return result;
  if ((result = retain_context(&context, device))) return result;
  return set_context(context);
}

static CUresult launch_all(const Launches* self, void** params, CUstream stream) {
  CUresult result = CUDA_SUCCESS;
  for (Py_ssize_t i = 0; i < self->n_kernels && !result; i++) {
    const Kernel* kernel = &self->kernels[i];
    CUlaunchAttribute attributes[2];
    CUlaunchConfig config = {.gridDimX = kernel->grid, .gridDimY = 1, .gridDimZ = 1};
    config.blockDimX = kernel->threads, config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = kernel->shared, config.hStream = stream, config.attrs = attributes;
    memset(attributes, 0, sizeof attributes);
    if (kernel->pdl) {
      attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
      attributes[config.numAttrs++].value.programmaticStreamSerializationAllowed = 1;
    }
    if (kernel->cooperative) {
      attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
      attributes[config.numAttrs++].value.cooperative = 1;
    }
    if (kernel->grid) result = launch(&config, kernel->function, params, NULL);
    params += kernel->n_params;
  }
  return result;
}

/* run(addresses, stream) */
static PyObject* run(PyObject* object, PyObject* const* args, Py_ssize_t n_args) {
  Launches* self = (Launches*)object;
  if (n_args != 2 || !PyList_Check(args[0]) || PyList_GET_SIZE(args[0]) < self->n_slots) {
    PyErr_Format(PyExc_TypeError, "run() takes a list of at least %zd addresses, and a stream", self->n_slots);
    return NULL;
  }
  uint64_t stream = PyLong_AsUnsignedLongLong(args[1]);
  if (stream == (uint64_t)-1 && PyErr_Occurred()) return NULL;
  uint64_t* addresses = alloca((self->n_slots + 1) * sizeof *addresses);
  for (Py_ssize_t i = 0; i < self->n_slots; i++) {
    addresses[i] = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(args[0], i));
    if (addresses[i] == (uint64_t)-1 && PyErr_Occurred()) return NULL;
  }
  CUresult result = ensure_context(self->device);
  char* bytes = alloca(self->n_bytes + ALIGNMENT);
  bytes += -(uintptr_t)bytes % ALIGNMENT;
  void** params = alloca((self->n_params + 1) * sizeof *params);
  void** next = params;
  for (Py_ssize_t i = 0; i < self->n_kernels && !result; i++) {
    Kernel* kernel = &self->kernels[i];
    memcpy(bytes, kernel->bytes, kernel->n_bytes);
    for (Py_ssize_t j = 0; j < kernel->n_pointers; j++) {
      const Target* target = &kernel->pointers[j];
      uint64_t address = addresses[target->slot] + target->offset;
      memcpy(bytes + target->place, &address, sizeof address);
    }
    for (Py_ssize_t j = 0; j < kernel->n_descriptors; j++) {
      const Target* target = &kernel->descriptors[j].target;
      const char* map = find_descriptor(&kernel->descriptors[j], addresses[target->slot] + target->offset);
      if (!map) return NULL;
      memcpy(bytes + target->place, map, MAP);
    }
    for (Py_ssize_t j = 0; j < kernel->n_params; j++) *next++ = bytes + kernel->offsets[j];
    bytes += kernel->n_bytes;
  }
  if (!result) {
    Py_BEGIN_ALLOW_THREADS;
    result = launch_all(self, params, (CUstream)(uintptr_t)stream);
    Py_END_ALLOW_THREADS;
  }
  if (result) {
    const char* name = NULL;
    get_error_name(result, &name);
    return PyErr_Format(PyExc_RuntimeError, "the CUDA driver refused a launch: %s", name ? name : "an unknown error");
  }
  Py_RETURN_NONE;
}

static PyMethodDef launches_methods[] = {{"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL, NULL}, {0}};

static PyTypeObject LaunchesType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "ropewalk_launcher.Launches",
    .tp_basicsize = sizeof(Launches),
    .tp_dealloc = deallocate,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = launches_methods,
};

/* make(kernels, device): see `Packed` in launcher.py */
static PyObject* make(PyObject* module, PyObject* args) {
  PyObject* kernels;
  int device;
  if (!PyArg_ParseTuple(args, "O!i", &PyList_Type, &kernels, &device)) return NULL;
  Launches* self = (Launches*)LaunchesType.tp_alloc(&LaunchesType, 0); /* zeros */
  if (!self) return NULL;
  self->device = device;
  self->kernels = PyMem_Calloc(PyList_GET_SIZE(kernels) + 1, sizeof *self->kernels);
  if (!self->kernels) PyErr_NoMemory();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(kernels) && !PyErr_Occurred(); i++) {
    self->n_kernels++;
    read_kernel(PyList_GET_ITEM(kernels, i), &self->kernels[i], self);
  }
  if (!PyErr_Occurred()) return (PyObject*)self;
  Py_DECREF(self);
  return NULL;
}

static PyMethodDef methods[] = {{"make", make, METH_VARARGS, NULL}, {0}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "ropewalk_launcher", NULL, -1, methods};

PyMODINIT_FUNC PyInit_ropewalk_launcher(void) {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY); /* Triton has loaded it */
  if (!driver) return PyErr_Format(PyExc_ImportError, "%s", dlerror());
  struct {
    const char* name;
    void* function;
  } wanted[] = {{"cuLaunchKernelEx", &launch},     {"cuGetErrorName", &get_error_name},
                {"cuCtxGetCurrent", &get_context}, {"cuCtxSetCurrent", &set_context},
                {"cuDeviceGet", &get_device},      {"cuDevicePrimaryCtxRetain", &retain_context}};
  for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
    *(void**)wanted[i].function = dlsym(driver, wanted[i].name);
    if (!*(void**)wanted[i].function)
      return PyErr_Format(PyExc_ImportError, "the CUDA driver has no %s", wanted[i].name);
  }
  return PyType_Ready(&LaunchesType) ? NULL : PyModule_Create(&definition);
}
