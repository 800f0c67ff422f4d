#pragma once

// The library is built with hidden visibility: what carries TORCHOPS_API is the C++ API, and nothing else leaks into
// the process that loads it.
#define TORCHOPS_API __attribute__((visibility("default")))
