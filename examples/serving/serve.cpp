// Runs an exported model with no Python in the process:
//
//   serve MODEL REFERENCE [--library FILE]... [--device cpu|cuda]
//
// MODEL is an AOTInductor package (.pt2) or a TorchScript file, REFERENCE the (input, expected output) pairs that
// export.py writes beside it. Exits with 0 if every output is as expected.

#include <ATen/ops/allclose.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using Model = std::function<at::Tensor(const at::Tensor&)>;

struct Options {
  std::filesystem::path model, reference;
  std::vector<std::string> libraries;
  c10::Device device = c10::kCPU;
};

Options parse(int argc, char** argv) {
  Options options;
  std::vector<std::string> files;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.rfind("--", 0) != 0) {
      files.push_back(argument);
    } else if (argument == "--library" && i + 1 < argc) {
      options.libraries.emplace_back(argv[++i]);
    } else if (argument == "--device" && i + 1 < argc) {
      options.device = c10::Device(argv[++i]);
    } else {
      throw std::runtime_error("unexpected argument " + argument);
    }
  }
  if (files.size() != 2) {
    throw std::runtime_error("usage: serve MODEL REFERENCE [--library FILE]... [--device cpu|cuda]");
  }
  options.model = files[0];
  options.reference = files[1];
  return options;
}

// Operators register themselves with PyTorch's dispatcher as their library loads. This program calls none of them by
// name, so linking to the library would not do: a linker keeps only the libraries whose symbols are used
// (--as-needed, the default of many distributions), and would drop it unless told -Wl,--no-as-needed. Opening it here
// also lets one program serve models of several operator libraries.
void open_operators(const std::string& library) {
  if (!dlopen(library.c_str(), RTLD_NOW)) throw std::runtime_error(dlerror());
}

Model load(const Options& options) {
  if (options.model.extension() == ".pt2") {
    auto loader = std::make_shared<torch::inductor::AOTIModelPackageLoader>(options.model.string());
    return [loader](const at::Tensor& x) { return loader->run({x}).at(0); };
  }
  auto module = std::make_shared<torch::jit::Module>(torch::jit::load(options.model.string(), options.device));
  return [module](const at::Tensor& x) { return module->forward({x}).toTensor(); };
}

c10::List<c10::IValue> read_reference(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  return torch::jit::pickle_load(bytes).toList();
}

int serve(const Options& options) {
  for (const auto& library : options.libraries) open_operators(library);
  const c10::InferenceMode no_gradients;
  const Model model = load(options);
  int failures = 0;
  const c10::List<c10::IValue> pairs = read_reference(options.reference);
  for (size_t i = 0; i < pairs.size(); ++i) {
    const auto elements = pairs.get(i).toTuple()->elements();
    const at::Tensor x = elements[0].toTensor().to(options.device), expected = elements[1].toTensor();
    const at::Tensor y = model(x).cpu();
    const bool ok = y.sizes() == expected.sizes() && at::allclose(y, expected, 1e-4, 1e-6);
    std::printf("%5ld tokens: first output %.6f, %s\n", static_cast<long>(x.size(0)), y.flatten()[0].item<double>(),
                ok ? "as expected" : "NOT as expected");
    failures += !ok;
  }
  return failures == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return serve(parse(argc, argv));
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "serve: %s\n", error.what_without_backtrace());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "serve: %s\n", error.what());
    return 2;
  }
}
