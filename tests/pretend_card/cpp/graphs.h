// CUDA graphs: operators recorded with the addresses that they read and write, run again on the same addresses.
//
// Pretends: a capture computes nothing (what its operators wrote is put back, its own memory is filled with 0xFF), keeps
// its memory in a private pool, and forbids waits and copies from pageable memory; a replay reads and writes the captured
// addresses, whatever lies there by now, and is an error where the card has no memory any more.
// Does not: other streams that join a capture, conditional nodes, updates of a captured graph.
#pragma once
#include "allocator.h"
#include "stand_ins.h"

namespace card {

struct Recorded {
  c10::OperatorHandle op;
  int special;
  Stack arguments;                                // tensors of the host on the card's addresses
  std::vector<const void*> reads;                 // those addresses
  std::vector<const void*> writes;                // of those, what is written in place
  std::vector<std::pair<void*, size_t>> results;  // where a fresh result goes; {nullptr, 0}: an argument or a view
};
struct Graph {
  std::vector<Recorded> steps;
  uint64_t pool = 0;
  double seconds = 0;
  int64_t launches = 0;
};
struct Capture {
  Graph* graph;
  uint64_t pool;
  std::thread::id thread;
  int64_t stream;
  std::string failed_by;
  std::map<void*, std::vector<char>> before;  // whole storages from outside that were written
  std::map<char*, size_t> made;               // memory taken inside
};
std::unique_ptr<Capture> capture_;
std::unordered_map<int64_t, std::unique_ptr<Graph>> graphs_;
int64_t next_graph_ = 1;

bool capturing() { return capture_ && capture_->thread == std::this_thread::get_id(); }
uint64_t pool_of_capture() { return capturing() ? capture_->pool : 0; }
int64_t stream_of_capture() { return capture_->stream; }

void forbid(const std::string& what) {
  if (capture_->failed_by.empty()) capture_->failed_by = what;
  TORCH_CHECK(false, "CUDA error: operation not permitted when stream is capturing (pretend card: ", what, ")");
}
void count_captured(double seconds) { capture_->graph->seconds += seconds; }
void note_made(void* at, size_t size) {
  if (capturing()) capture_->made[(char*)at] = size;
}

// The storage will be written: keep what it held, unless the capture itself took the memory.
inline void save_before_write(const at::Tensor& t) {
  auto* s = storage_of(t);
  char* at = (char*)s->mutable_data();
  auto made = capture_->made.upper_bound(at);
  if (made != capture_->made.begin() && (--made, at < made->first + made->second)) return;
  if (!capture_->before.count(at)) capture_->before[at] = std::vector<char>(at, at + s->nbytes());
}

inline std::string begin_capture(int64_t id, uint64_t pool) {
  Locked guard(lock_);
  if (capture_) return "a capture is going on already";
  if (current_stream_ == 0) return "CUDA graphs must be captured on a non-default stream.";
  auto* graph = graphs_[id].get();
  graph->pool = pool;
  graphs_of_pool_[pool]++;
  capture_ = std::make_unique<Capture>(Capture{graph, pool, std::this_thread::get_id(), current_stream_});
  return "";
}

inline std::string end_capture() {
  Locked guard(lock_);
  if (!capture_) return "no capture is going on";
  auto capture = std::move(capture_);
  for (auto& [at, bytes] : capture->before) memcpy(at, bytes.data(), bytes.size());
  for (auto& [at, size] : capture->made) memset(at, 0xFF, size);
  if (capture->failed_by.empty()) return "";
  return "CUDA error: operation failed due to a previous error during capture (pretend card: " + capture->failed_by + ")";
}

inline void replay(int64_t id) {
  at::AutoDispatchBelowADInplaceOrView below;
  Locked guard(lock_);
  auto* graph = graphs_[id].get();
  counts_.replays++;
  kernels_of_[current_stream_]++;
  for (auto& step : graph->steps) {
    for (auto* at : step.reads)
      TORCH_CHECK(is_mapped(at), "CUDA error: an illegal memory access was encountered (pretend card: ",
                  step.op.schema().name(), " in a graph reads memory that was given back)");
    for (auto* at : step.reads) must_be_behind(at, step.op.schema().name() + " in a graph");
    for (auto* at : step.writes) note_written(at);
    for (auto& [at, size] : step.results)
      if (at) note_written(at);
    Stack stack = step.arguments;
    run_on_host(step.op, step.special, &stack);
    size_t next = 0;
    auto put = [&](const at::Tensor& result) {
      if (!result.defined() || next == step.results.size()) return;
      auto [at, size] = step.results[next++];
      if (at && size) memcpy(at, result.const_data_ptr(), size);
    };
    for (auto& value : stack) {
      if (value.isTensor()) put(value.toTensor());
      else if (value.isTensorList())
        for (const at::Tensor& t : value.toTensorVector()) put(t);
    }
  }
  clock_.host += rates_.replay;
  clock_.device = std::max(clock_.device, clock_.host) + graph->seconds;
}

inline void free_graph(int64_t id) {
  Locked guard(lock_);
  auto found = graphs_.find(id);
  if (found == graphs_.end()) return;
  if (found->second->pool) graphs_of_pool_[found->second->pool]--;
  graphs_.erase(found);
}

}  // namespace card
