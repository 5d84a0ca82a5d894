// What every other file needs: torch's headers, the one card's name, the lock, and what is declared before it is there.
#pragma once
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::IValue;
using c10::Stream;
using torch::jit::Stack;

namespace card {

const Device CARD(DeviceType::CUDA, 0);
constexpr size_t MB = size_t(1) << 20;

// One lock for everything: autograd runs backward passes of a card in a thread of its own.
std::recursive_mutex lock_;
using Locked = std::lock_guard<std::recursive_mutex>;

// The stream in use is a matter of each thread, as in CUDA.
thread_local int64_t current_stream_ = 0;

bool capturing();                         // graphs.h
void forbid(const std::string& what);     // graphs.h: an error of the capture that is going on
void count_captured(double seconds);      // graphs.h

inline c10::StorageImpl* storage_of(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// Bytes that an operator touches of this tensor: a dimension that was expanded is there once.
inline double extent(const at::Tensor& t) {
  double bytes = t.element_size();
  for (int64_t d = 0; d < t.dim(); d++)
    if (t.stride(d) != 0 || t.size(d) == 0) bytes *= t.size(d);
  return bytes;
}

}  // namespace card
