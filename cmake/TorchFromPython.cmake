# Finds the PyTorch that Python imports and defines
#   torchops::libtorch        its C++ API: headers, libtorch, libtorch_cpu, libc10
#   torchops::libtorch_cuda   on top of it libtorch_cuda and libc10_cuda, if it is a CUDA build
# and sets
#   TORCHOPS_TORCH_VERSION, _MINOR (2.13), _DIR (.../site-packages/torch), _CUDA (13.0, or empty), _OPENMP (path of the OpenMP
#   runtime that it loads, or empty) and, when that is impossible, TORCHOPS_TORCH_ERROR.
#
# Not find_package(Torch): for a CUDA build of torch that one demands a whole CUDA toolkit, which the pip packages are not.
# Used by this build and, installed beside torchopsConfig.cmake, by everyone who links against torchops.

find_package(Python 3.10 COMPONENTS Interpreter)
set(TORCHOPS_TORCH_ERROR "")
if(NOT Python_Interpreter_FOUND)
  set(TORCHOPS_TORCH_ERROR "no Python >= 3.10 was found; name one with -DPython_EXECUTABLE=...")
  return()
endif()

execute_process(
  COMMAND "${Python_EXECUTABLE}" -c [=[
import pathlib, re, torch
# The mapped files tell which OpenMP runtime torch runs on, whatever its file is called in this wheel.
try:
    mapped = pathlib.Path("/proc/self/maps").read_text()
except OSError:
    mapped = ""
openmp = re.search(r"/\S*/lib(gomp|iomp5|omp)[^/\s]*\.so[^/\s]*", mapped)
print(torch.__version__, pathlib.Path(torch.__file__).parent, torch.version.cuda or "",
      int(torch._C._GLIBCXX_USE_CXX11_ABI), openmp[0] if openmp else "", sep="\n")
]=]
  RESULT_VARIABLE _torch_result
  OUTPUT_VARIABLE _torch_output
  ERROR_VARIABLE _torch_stderr
  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_STRIP_TRAILING_WHITESPACE)
if(NOT _torch_result EQUAL 0)
  string(REGEX REPLACE ".*\n" "" _torch_stderr "${_torch_stderr}")
  set(TORCHOPS_TORCH_ERROR "${Python_EXECUTABLE} cannot import torch (${_torch_stderr})")
  return()
endif()

string(REPLACE "\n" ";" _torch_output "${_torch_output};")
list(GET _torch_output 0 TORCHOPS_TORCH_VERSION)
list(GET _torch_output 1 TORCHOPS_TORCH_DIR)
list(GET _torch_output 2 TORCHOPS_TORCH_CUDA)
list(GET _torch_output 3 _torch_cxx11_abi)
list(GET _torch_output 4 TORCHOPS_TORCH_OPENMP)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" TORCHOPS_TORCH_MINOR "${TORCHOPS_TORCH_VERSION}")
if(CMAKE_SCRIPT_MODE_FILE)
  return()  # a script can ask, and has no targets
endif()

function(_torchops_import_torch name)
  set(file "${TORCHOPS_TORCH_DIR}/lib/lib${name}${CMAKE_SHARED_LIBRARY_SUFFIX}")
  if(NOT TARGET torchops::_${name})
    add_library(torchops::_${name} SHARED IMPORTED)
    set_target_properties(torchops::_${name} PROPERTIES IMPORTED_LOCATION "${file}")
  endif()
endfunction()

_torchops_import_torch(c10)
_torchops_import_torch(torch_cpu)
_torchops_import_torch(torch)
if(NOT TARGET torchops::libtorch)
  add_library(torchops::libtorch INTERFACE IMPORTED)
  set_target_properties(torchops::libtorch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES
      "${TORCHOPS_TORCH_DIR}/include;${TORCHOPS_TORCH_DIR}/include/torch/csrc/api/include"
    INTERFACE_COMPILE_DEFINITIONS "_GLIBCXX_USE_CXX11_ABI=${_torch_cxx11_abi}"
    INTERFACE_LINK_LIBRARIES "torchops::_torch;torchops::_torch_cpu;torchops::_c10")
endif()
if(TORCHOPS_TORCH_CUDA AND NOT TARGET torchops::libtorch_cuda)
  _torchops_import_torch(c10_cuda)
  _torchops_import_torch(torch_cuda)
  add_library(torchops::libtorch_cuda INTERFACE IMPORTED)
  set_target_properties(torchops::libtorch_cuda PROPERTIES
    INTERFACE_LINK_LIBRARIES "torchops::libtorch;torchops::_torch_cuda;torchops::_c10_cuda")
endif()
