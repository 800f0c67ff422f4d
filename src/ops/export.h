#pragma once

// The library is built with hidden visibility: TORCHOPS_API marks the C++ API, and no other symbol is visible to the
// process that loads the library.
#define TORCHOPS_API __attribute__((visibility("default")))
