// Counters of launches, waits, copies and bytes, and a clock.
//
// Pretends: every operator that CUDA has a kernel of is one launch; a list of tensors (_foreach_) takes as many launches
// as torch's multi_tensor_apply would make of it. A launch costs the host time, a kernel the time of its bytes or of its
// arithmetic, whichever is longer, and a wait brings the host's clock up to the card's.
// Does not: kernels that torch launches inside one operator (a reduction in two passes, a sort), Python's own time.
// The counts are exact and repeat; the clock orders events and is no measurement of anything.
#pragma once
#include "common.h"

namespace card {

struct Clock {
  double host = 0, device = 0;
} clock_;

struct Rates {
  double launch = 4.5e-6, smallest_kernel = 1.6e-6, replay = 12e-6, wait = 6e-6, malloc = 200e-6;  // seconds
  double bandwidth = 0.85e12, pcie = 22e9;                                                         // bytes a second
  double flops16 = 120e12, flops32 = 58e12;
} rates_;

struct Counts {
  int64_t launches = 0, waits = 0, replays = 0, views = 0, allocations = 0;
  int64_t to_card = 0, to_card_late = 0, to_host = 0, to_host_late = 0;
  double bytes = 0, flops = 0;
} counts_;

struct OperatorCount {
  int64_t launches = 0;
  double bytes = 0, flops = 0;
};
std::map<std::string, OperatorCount> by_operator_;
std::map<std::string, int64_t> by_wait_;
void (*tracer_)(const char*) = nullptr;  // Python's, to note which line waits

inline void charge(const std::string& name, int64_t launches, double bytes, double flops, bool half) {
  double seconds = std::max({bytes / rates_.bandwidth, flops / (half ? rates_.flops16 : rates_.flops32),
                             launches * rates_.smallest_kernel});
  counts_.launches += launches;
  counts_.bytes += bytes;
  counts_.flops += flops;
  auto& one = by_operator_[name];
  one.launches += launches;
  one.bytes += bytes;
  one.flops += flops;
  if (capturing()) {
    count_captured(seconds);
    return;
  }
  clock_.host += launches * rates_.launch;
  clock_.device = std::max(clock_.device, clock_.host) + seconds;
}

// Launches of one _foreach_ operator (ATen/native/cuda/MultiTensorApply.cuh): each takes so many tensors and so many
// blocks of 65,536 numbers, fewer tensors the more lists are read and written side by side.
inline int64_t foreach_launches(const std::vector<int64_t>& numels, size_t lists) {
  constexpr int64_t BLOCK = 65536, MOST_BLOCKS = 320;
  constexpr int64_t MOST_TENSORS[] = {110, 64, 48, 36, 30};
  int64_t most = MOST_TENSORS[std::min<size_t>(std::max<size_t>(lists, 1), 5) - 1];
  int64_t launches = 0, tensors = 0, blocks = 0;
  for (size_t i = 0; i < numels.size(); i++) {
    if (!numels[i]) continue;
    tensors++;
    for (int64_t left = (numels[i] + BLOCK - 1) / BLOCK, block = 0; block < left; block++) {
      blocks++;
      bool last_of_tensor = block == left - 1;
      if ((tensors == most && last_of_tensor) || blocks == MOST_BLOCKS) {
        launches++;
        blocks = 0;
        tensors = last_of_tensor ? 0 : 1;
      }
    }
  }
  return launches + (blocks > 0);
}

}  // namespace card
