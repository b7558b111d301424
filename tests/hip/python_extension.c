/* The same question from a Python extension module. */
#include <Python.h>

int hipGetDevicePropertiesR0600(char *properties, int device);

static PyObject *layout(PyObject *self, PyObject *none) {
  static char properties[4096];
  hipGetDevicePropertiesR0600(properties, 0);
  return PyUnicode_FromString(properties);
}

static PyMethodDef methods[] = {{"layout", layout, METH_NOARGS, "The struct that came back."}, {NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "hip_extension", NULL, -1, methods};

PyMODINIT_FUNC PyInit_hip_extension(void) { return PyModule_Create(&definition); }
