# Decides about CUDA kernels (TORCHOPS_CUDA = AUTO, ON or OFF), from TORCHOPS_TORCH_*. Makes no targets, so it also runs in a
# script (WheelName.cmake). Sets
#   TORCHOPS_WITH_CUDA         ON or OFF
#   TORCHOPS_CUDA_VERSION      13.0, torch's, or empty
#   TORCHOPS_CUTLASS_DIR       the headers of CUTLASS, of a supported version
#   TORCHOPS_LOCAL_VERSION     torch213.cu130 or torch213.cpu: what a wheel is for, in its version and so in its name
# and CMAKE_CUDA_COMPILER and what torchops_cuda_architectures() sets.
include(CudaArchitectures)
include(Pyproject)

set(TORCHOPS_WITH_CUDA OFF)
set(TORCHOPS_CUDA_VERSION "")
set(TORCHOPS_CUDA_ARCHITECTURES "")
set(TORCHOPS_GEMM_ARCHITECTURES "")
set(TORCHOPS_SM90A OFF)

# Sets CMAKE_CUDA_COMPILER, or `obstacle` to why CUDA kernels cannot be built.
function(_torchops_find_nvcc obstacle)
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

# Sets TORCHOPS_CUTLASS_DIR to the headers of PyPI's nvidia-cutlass where it is not set already, or `obstacle` to why they
# are none to build with. The GEMM kernels build on parts of CUTLASS that change from one version to another.
function(_torchops_find_cutlass obstacle)
  torchops_supported_range(nvidia-cutlass least end)
  set(install "${Python_EXECUTABLE} -m pip install \"nvidia-cutlass>=${least},<${end}\"")
  set(dir "${TORCHOPS_CUTLASS_DIR}")
  if(NOT dir)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c "import importlib.util as u; print(u.find_spec('cutlass_library').origin)"
      OUTPUT_VARIABLE package ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
    get_filename_component(dir "${package}" DIRECTORY)
    string(APPEND dir "/source/include")
  endif()
  if(NOT EXISTS "${dir}/cutlass/version.h")
    set(missing "the CUTLASS headers are not installed")
    if(TORCHOPS_CUTLASS_DIR)
      set(missing "TORCHOPS_CUTLASS_DIR has no cutlass/version.h")
    endif()
    set(${obstacle} "${missing}; this installs them:\n     ${install}\n" PARENT_SCOPE)
    return()
  endif()
  file(STRINGS "${dir}/cutlass/version.h" lines REGEX "define CUTLASS_(MAJOR|MINOR|PATCH) +[0-9]+")
  string(REGEX MATCHALL "[0-9]+" version "${lines}")
  list(JOIN version "." version)
  if(version VERSION_LESS least OR NOT version VERSION_LESS end)
    set(${obstacle}
      "${dir} has CUTLASS ${version}, while the kernels are written for ${least} up to, not including, ${end}; this \
installs one:\n     ${install}\n"
      PARENT_SCOPE)
    return()
  endif()
  set(TORCHOPS_CUTLASS_DIR "${dir}" PARENT_SCOPE)
endfunction()

set(_cuda_obstacle "")
if(TORCHOPS_CUDA)
  if(NOT TORCHOPS_TORCH_CUDA)
    set(_cuda_obstacle "torch ${TORCHOPS_TORCH_VERSION} is not a CUDA build")
  else()
    _torchops_find_nvcc(_cuda_obstacle)
    if(NOT _cuda_obstacle)
      _torchops_find_cutlass(_cuda_obstacle)
    endif()
  endif()
endif()

if(NOT TORCHOPS_CUDA)
  message(STATUS "CUDA kernels: off (TORCHOPS_CUDA=${TORCHOPS_CUDA})")
elseif(NOT _cuda_obstacle)
  torchops_cuda_architectures()
  set(TORCHOPS_WITH_CUDA ON)
  set(TORCHOPS_CUDA_VERSION "${TORCHOPS_TORCH_CUDA}")
elseif(NOT TORCHOPS_CUDA STREQUAL "AUTO")
  # Lines that begin with a space are printed as they are.
  message(FATAL_ERROR " TORCHOPS_CUDA=${TORCHOPS_CUDA}, but ${_cuda_obstacle}\n")
elseif(TORCHOPS_TORCH_CUDA)
  message(WARNING
    " torch ${TORCHOPS_TORCH_VERSION} is for CUDA, but the CUDA kernels are left out: ${_cuda_obstacle}\n"
    " With TORCHOPS_CUDA=ON this is an error, with OFF it is what is asked for.\n")
else()
  message(STATUS "CUDA kernels: off, because ${_cuda_obstacle}")
endif()

string(REPLACE "." "" TORCHOPS_LOCAL_VERSION "torch${TORCHOPS_TORCH_MINOR}")
if(TORCHOPS_WITH_CUDA)
  string(REPLACE "." "" _cuda "${TORCHOPS_CUDA_VERSION}")
  string(APPEND TORCHOPS_LOCAL_VERSION ".cu${_cuda}")
else()
  string(APPEND TORCHOPS_LOCAL_VERSION ".cpu")
endif()
