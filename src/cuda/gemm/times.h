#pragma once

#include <array>
#include <span>

#include "cuda/gemm/plan.h"

// How long the candidates of a plan take, predicted from what they do. Host code without torch or CUTLASS.
//
// A kernel of tiles takes, in microseconds, with w waves of CTAs and at most p tiles on a multiprocessor,
//
//   launch + max(w * epilogue + steps * max(w * latency, p * throughput), bytes / bandwidth * memory)
//
// where a step is 128 bytes of rows (64 in sm80/), and the maximum of two times is a smooth one, because they overlap
// in part. Rows of other alignments multiply steps, epilogue and memory. cuBLAS takes the best of some tiles and
// numbers of parts of a sum, for which the same holds, and the pass after it what memory takes. measured_times.h
// has the numbers; `python -m benchmarks candidates` measures in 16 bits and fits them. They are those of one chip.
// Others have their own multiprocessors and bandwidth in the formula, but not their own speed of matrix instructions.
namespace torchops::cuda::gemm {

/// By how much a time grows for rows of which 16, 8, 4 or 2 bytes may be read or written at once.
using ByAlignment = std::array<double, 4>;
/// Of a product, of one with a factor, and of two products.
using ByRule = std::array<double, 3>;
inline size_t rule_of(const Conditions& c) { return c.products == 2 ? 2 : c.is_gated ? 1 : 0; }

/// Of a candidate with tiles, of which `ctas` fit a multiprocessor. An epilogue of 0: there is no such kernel. A second
/// product multiplies the time of steps by `second`.
struct TileTime {
  Candidate candidate;
  int rows, columns, ctas;
  double launch, latency, throughput;
  ByRule epilogue;
  double memory, second;
  ByAlignment of_steps, of_epilogue, of_memory;
};

/// Of linear/few_rows.cuh: memory, or the chunks of a sum in waves of blocks, of which more than 8 rows make more.
struct FewRowsTime {
  double launch, memory, chunk, of_more_rows;
};

/// Of cuBLAS. A sum in parts takes `parts` longer, and the memory of its partial sums.
struct CublasTime {
  ByAlignment of_steps, of_results;
  double epilogue, latency;
  std::array<double, 4> throughput;  // of its tiles
  double parts, memory_of_parts, memory;
  ByAlignment of_memory;
  double launch;
  ByRule pass;
  double memory_of_pass;
  ByAlignment of_pass;
};

std::span<const TileTime> tile_times();

double time_of(const TileTime& tile, const Case& c, const Conditions& conditions);
double time_of_few_rows(const Case& c);

/// Of cuBLAS's products and the pass after them.
double time_of_cublas(const Case& c, const Conditions& conditions);

}  // namespace torchops::cuda::gemm
