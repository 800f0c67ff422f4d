# Decides about CUDA kernels (TORCHOPS_CUDA = AUTO, ON or OFF) and sets TORCHOPS_WITH_CUDA. When on, it enables the CUDA language
# and defines torchops_cuda, which carries what the kernels compile and link with. The machine's GPU is never looked at.

set(TORCHOPS_WITH_CUDA OFF)
set(TORCHOPS_CUDA_VERSION "")
set(TORCHOPS_CUDA_ARCHITECTURES "")

# Sets CMAKE_CUDA_COMPILER, or `obstacle` to why CUDA kernels cannot be built.
function(_torchops_find_nvcc obstacle)
  if(NOT TORCHOPS_TORCH_CUDA)
    set(${obstacle} "torch ${TORCHOPS_TORCH_VERSION} is not a CUDA build" PARENT_SCOPE)
    return()
  endif()
  string(REGEX MATCH "^[0-9]+" torch_major "${TORCHOPS_TORCH_CUDA}")
  set(nvcc "${CMAKE_CUDA_COMPILER}")
  if(NOT nvcc)
    set(nvcc "$ENV{CUDACXX}")
  endif()
  if(NOT nvcc)
    # In its first argument, find_program() takes a set variable for an answer.
    unset(nvcc)
  endif()
  find_program(nvcc nvcc NO_CACHE
    HINTS "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin"
      "${TORCHOPS_TORCH_DIR}/../nvidia/cu${torch_major}/bin"
    PATHS /usr/local/cuda-${torch_major}/bin /usr/local/cuda/bin)
  if(NOT nvcc)
    set(${obstacle} "no nvcc was found (in CUDACXX, CUDA_HOME, PATH and /usr/local/cuda)" PARENT_SCOPE)
    return()
  endif()
  execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE version ERROR_VARIABLE version)
  if(NOT version MATCHES "release ([0-9]+)(\\.[0-9]+)")
    set(${obstacle} "${nvcc} --version does not work" PARENT_SCOPE)
  elseif(NOT CMAKE_MATCH_1 STREQUAL torch_major)
    set(${obstacle}
      "${nvcc} is CUDA ${CMAKE_MATCH_1}${CMAKE_MATCH_2}, while torch was built with CUDA ${TORCHOPS_TORCH_CUDA}"
      PARENT_SCOPE)
  endif()
  set(CMAKE_CUDA_COMPILER "${nvcc}" PARENT_SCOPE)
endfunction()

# TORCH_CUDA_ARCH_LIST, "8.0;9.0a+PTX", as CMAKE_CUDA_ARCHITECTURES: "80-real;90a"; TORCHOPS_CUDA_ARCHITECTURES keeps it
# for the Python package to tell.
function(_torchops_cuda_architectures out)
  set(archs "${TORCH_CUDA_ARCH_LIST}")
  if(NOT archs)
    set(archs "$ENV{TORCH_CUDA_ARCH_LIST}")
  endif()
  if(NOT archs)
    # PTX of the newest architecture whose code later ones can run; 9.0a is for Hopper alone.
    set(archs "8.0+PTX;9.0a")
  endif()
  string(REGEX REPLACE "[ ,;]+" ";" archs "${archs}")
  set(result "")
  foreach(arch IN LISTS archs)
    if(NOT arch MATCHES "^([0-9]+)\\.([0-9][af]?)(\\+PTX)?$")
      message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST: expected entries like 8.0, 9.0a or 8.0+PTX, got \"${arch}\"")
    endif()
    if(CMAKE_MATCH_3)
      list(APPEND result "${CMAKE_MATCH_1}${CMAKE_MATCH_2}")
    else()
      list(APPEND result "${CMAKE_MATCH_1}${CMAKE_MATCH_2}-real")
    endif()
  endforeach()
  set(${out} "${result}" PARENT_SCOPE)
  set(TORCHOPS_CUDA_ARCHITECTURES "${archs}" PARENT_SCOPE)
endfunction()

# The headers of PyPI's nvidia-cutlass, or those in TORCHOPS_CUTLASS_DIR.
function(_torchops_find_cutlass)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "import importlib.util as u; print(u.find_spec('cutlass_library').origin)"
    OUTPUT_VARIABLE package ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  get_filename_component(package "${package}" DIRECTORY)
  find_path(TORCHOPS_CUTLASS_DIR cutlass/cutlass.h HINTS "${package}/source/include" NO_DEFAULT_PATH
    DOC "Folder of the CUTLASS 4 headers")
  if(NOT TORCHOPS_CUTLASS_DIR)
    message(FATAL_ERROR
      " The CUDA kernels need the CUTLASS 4 headers. Install them, or set -DTORCHOPS_CUTLASS_DIR=.../include:\n"
      "     ${Python_EXECUTABLE} -m pip install nvidia-cutlass\n")
  endif()
endfunction()

if(NOT TORCHOPS_CUDA)
  message(STATUS "CUDA kernels: off (TORCHOPS_CUDA=${TORCHOPS_CUDA})")
  return()
endif()
if(NOT TORCHOPS_CUDA STREQUAL "AUTO")
  set(_cuda_required ON)
endif()
set(_cuda_obstacle "")
_torchops_find_nvcc(_cuda_obstacle)
if(_cuda_obstacle AND _cuda_required)
  message(FATAL_ERROR " TORCHOPS_CUDA=${TORCHOPS_CUDA}, but ${_cuda_obstacle}.\n")
elseif(_cuda_obstacle)
  message(STATUS "CUDA kernels: off, because ${_cuda_obstacle}")
  return()
elseif(NOT TORCHOPS_CUDA_SOURCES)
  message(STATUS "CUDA kernels: none in this tree")
  return()
endif()

_torchops_find_cutlass()
_torchops_cuda_architectures(CMAKE_CUDA_ARCHITECTURES)
# torch has loaded the one CUDA runtime of the process already. PyPI's nvcc looks for libraries in lib64, while they are in
# lib, and has no libcudart.so to link, only libcudart.so.<major>.
get_filename_component(_pip_nvidia "${TORCHOPS_TORCH_DIR}/../nvidia" REALPATH)
get_filename_component(_nvcc "${CMAKE_CUDA_COMPILER}" REALPATH)
string(FIND "${_nvcc}" "${_pip_nvidia}/" _nvcc_in_pip)
if(_nvcc_in_pip EQUAL 0)
  set(CMAKE_CUDA_RUNTIME_LIBRARY None)
  get_filename_component(_pip_cuda "${_nvcc}/../../lib" ABSOLUTE)
  string(APPEND CMAKE_CUDA_FLAGS " -L${_pip_cuda}")
  file(GLOB _cudart "${_pip_cuda}/libcudart.so.*")
else()
  set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
endif()
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  # CMake before 3.26 does not know that nvcc has C++20.
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
set(TORCHOPS_WITH_CUDA ON)
set(TORCHOPS_CUDA_VERSION "${TORCHOPS_TORCH_CUDA}")
message(STATUS "CUDA kernels: on, by ${CMAKE_CUDA_COMPILER} for ${CMAKE_CUDA_ARCHITECTURES}")

# Headers that torch's own include (cuBLAS, cuSPARSE, ...) but a bare compiler lacks come with torch's pip packages.
file(GLOB _cuda_pip_includes "${TORCHOPS_TORCH_DIR}/../nvidia/*/include")
add_library(torchops_cuda INTERFACE)
target_include_directories(torchops_cuda SYSTEM INTERFACE "${TORCHOPS_CUTLASS_DIR}" ${_cuda_pip_includes})
# CUTLASS with device asserts serialises its matrix instructions, so they are off in every build type.
target_compile_options(torchops_cuda INTERFACE
  $<$<COMPILE_LANGUAGE:CUDA>:-DNDEBUG;--expt-relaxed-constexpr;-Xcompiler=-Wall,-Wextra>
  $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${TORCHOPS_WERROR}>>:-Werror=all-warnings;-Xcompiler=-Werror>)
target_link_libraries(torchops_cuda INTERFACE torchops::libtorch_cuda ${_cudart})
