// What the dispatcher knows once the library is loaded: every public schema, and a kernel for every key that needs one.

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>

#include <vector>

#include "expect.h"

namespace {

using c10::DispatchKey;

const std::vector<std::string> kSchemas = {
    "myops::dense(Tensor x, Tensor w, Tensor? b=None) -> Tensor",
    "myops::gate(Tensor v, Tensor x, Tensor w, Tensor? b=None) -> Tensor",
    "myops::gate_(Tensor(a!) v, Tensor x, Tensor w, Tensor? b=None) -> ()",
    "myops::glu(Tensor x, Tensor w, Tensor wg, Tensor? b=None, Tensor? bg=None, *, str activation=\"sigmoid\") -> "
    "Tensor",
    "myops::transition(Tensor x, *, Tensor? norm_weight=None, Tensor? norm_bias=None, Tensor gate_weight, "
    "Tensor? gate_bias=None, Tensor up_weight, Tensor? up_bias=None, Tensor down_weight, Tensor? down_bias=None, "
    "float eps=1e-05) -> Tensor",
    "myops::add_transition_(Tensor(a!) x, *, Tensor? norm_weight=None, Tensor? norm_bias=None, Tensor gate_weight, "
    "Tensor? gate_bias=None, Tensor up_weight, Tensor? up_bias=None, Tensor down_weight, Tensor? down_bias=None, "
    "float eps=1e-05) -> ()",
    "myops::sigmoid(Tensor x) -> Tensor",
    "myops::sigmoid_(Tensor(a!) x) -> ()",
    "myops::square_matmul(Tensor a, Tensor b, *, bool transpose_b=False) -> Tensor",
    "myops::square_matmul_(Tensor(a!) a, Tensor b, *, bool transpose_b=False) -> ()",
    "myops::softmax(Tensor x, int dim=-1) -> Tensor",
    "myops::softmax_(Tensor(a!) x, int dim=-1) -> ()",
    "myops::layer_norm(Tensor x, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05)"
    " -> Tensor",
    "myops::layer_norm_(Tensor(a!) x, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, "
    "float eps=1e-05) -> ()",
};

void test_schema(const std::string& schema) {
  const std::string name = schema.substr(0, schema.find('('));
  const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
  expect::that(op.has_value(), name + " to be registered", __FILE__, __LINE__);
  if (!op) return;

  expect::that(op->schema() == torch::jit::parseSchema(schema), schema + ", got " + c10::toString(op->schema()),
               __FILE__, __LINE__);

  std::vector<DispatchKey> keys = {DispatchKey::CPU, DispatchKey::Meta, DispatchKey::Autograd,
                                   DispatchKey::FuncTorchBatched};
  if (op->schema().is_mutable()) keys.push_back(DispatchKey::ADInplaceOrView);
  for (const auto key : keys) {
    expect::that(op->hasKernelForDispatchKey(key), name + " to have a kernel for " + c10::toString(key), __FILE__,
                 __LINE__);
  }
}

}  // namespace

int main() {
  for (const auto& schema : kSchemas) test_schema(schema);
  EXPECT(!c10::Dispatcher::singleton().findSchema({"myops::no_such_operator", ""}).has_value());
  return expect::result();
}
