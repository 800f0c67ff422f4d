#include <type_traits>
#include <vector>

#include "cuda/gemm/spec.h"

// The kernels in this build. CMake writes instances.def, with one line per kernel.
namespace torchops::cuda::gemm {
namespace {

template <class Operation>
struct Entry {
  Element element;
  typename Operation::Tiling tiling;
  Kernel<typename Operation::Problem> kernel;
};

template <class Operation>
using Entries = std::vector<Entry<Operation>>;

template <class Operation>
Entries<Operation> compiled() {
  Entries<Operation> entries;
#define TORCHOPS_INSTANCE(operation, element, tiling)                                                      \
  if constexpr (std::is_same_v<Operation, operation>) {                                                    \
    constexpr auto of_tiling = operation::Tiling::tiling;                                                  \
    entries.push_back(                                                                                     \
        {Element::element,                                                                                 \
         of_tiling,                                                                                        \
         {prepare<operation, Element::element, of_tiling>, run<operation, Element::element, of_tiling>}}); \
  }
#include "instances.def"
#undef TORCHOPS_INSTANCE
  return entries;
}

}  // namespace

template <class Operation>
const Kernel<typename Operation::Problem>* find(Element element, typename Operation::Tiling tiling) {
  static const Entries<Operation> entries = compiled<Operation>();
  for (const auto& entry : entries) {
    if (entry.element == element && entry.tiling == tiling) return &entry.kernel;
  }
  return nullptr;
}

bool has_sm90_kernels() {
  int count = 0;
#define TORCHOPS_INSTANCE(...) ++count;
#include "instances.def"
#undef TORCHOPS_INSTANCE
  return count > 0;
}

#define TORCHOPS_OPERATION(name, ...) \
  template const Kernel<name::Problem>* find<name>(Element element, name::Tiling tiling);
#include "cuda/gemm/table.def"

/// For CMake, which looks for it in a library that it is given.
extern TORCHOPS_GEMM_API const char origin[];
const char origin[] = TORCHOPS_GEMM_ORIGIN;

}  // namespace torchops::cuda::gemm
