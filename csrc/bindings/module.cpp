#include <nanobind/nanobind.h>

NB_MODULE(_core, module) { module.doc() = "Windrow's native core."; }
