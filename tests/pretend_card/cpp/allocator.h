// The card's memory: torch's native caching allocator over a capped amount of host memory.
//
// Pretends: sizes rounded to 512 bytes, segments of 2 MiB, 20 MiB or as asked, blocks split and merged, pools by stream
// and by graph, the cache released before an OutOfMemoryError, a limit by fraction, peaks, a snapshot. Fresh and freed
// memory is filled with 0xFF, a NaN in every floating-point dtype.
// Does not: expandable segments, cudaMallocAsync, workspaces of cuBLAS and of kernels, other processes on the card,
// blocks that wait for another stream (record_stream is ignored).
#pragma once
#include "streams.h"

namespace card {

struct Segment;
struct Pool;
struct Block {
  char* at;
  size_t size, asked = 0;
  Pool* pool;
  bool used = false;
  Block *before = nullptr, *behind = nullptr;  // neighbours in the segment
  Segment* segment;
};
struct Segment {
  char* at;
  size_t size;
  Pool* pool;
  Block* first;
};
struct Smaller {
  bool operator()(const Block* a, const Block* b) const { return a->size != b->size ? a->size < b->size : a->at < b->at; }
};
struct Pool {
  std::set<Block*, Smaller> free;
  bool small;
  int64_t stream;
  uint64_t graphs;  // 0: nobody's; else the private pool of graphs
};

std::map<std::tuple<int64_t, uint64_t, bool>, std::unique_ptr<Pool>> pools_;
std::map<char*, Segment*> segments_;
std::unordered_map<void*, Block*> live_;
std::unordered_map<uint64_t, int> graphs_of_pool_;

struct Memory {
  size_t total = size_t(24) << 30, context = 450 * MB;  // the context is CUDA's own, before any tensor
  size_t allocated = 0, reserved = 0, peak_allocated = 0, peak_reserved = 0;
  double fraction = 1.0;
  int64_t out_of_memory = 0, segments_made = 0;
  bool poison = true;
} memory_;

uint64_t pool_of_capture();    // graphs.h: 0 outside a capture
int64_t stream_of_capture();   // graphs.h
void note_made(void* at, size_t size);  // graphs.h

inline size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

inline Pool* pool_of(int64_t stream, uint64_t graphs, bool small) {
  auto& pool = pools_[{stream, graphs, small}];
  if (!pool) pool = std::make_unique<Pool>(Pool{{}, small, stream, graphs});
  return pool.get();
}

// Give segments back in which nothing lies; those of graphs that are still there stay.
inline void release_cached() {
  for (auto i = segments_.begin(); i != segments_.end();) {
    Segment* s = i->second;
    Block* b = s->first;
    bool graphs_live = s->pool->graphs && graphs_of_pool_[s->pool->graphs] > 0;
    if (b->used || b->behind || graphs_live) {
      ++i;
      continue;
    }
    s->pool->free.erase(b);
    munmap(s->at, s->size);
    memory_.reserved -= s->size;
    delete b;
    delete s;
    i = segments_.erase(i);
  }
}

inline std::string human(double bytes) {
  std::ostringstream out;
  out.precision(2);
  out << std::fixed;
  if (bytes >= double(MB << 10)) out << bytes / double(MB << 10) << " GiB";
  else out << bytes / MB << " MiB";
  return out.str();
}

inline size_t capacity() { return std::min<double>(memory_.total - memory_.context, memory_.total * memory_.fraction); }

[[noreturn]] inline void out_of_memory(size_t asked) {
  memory_.out_of_memory++;
  size_t used = memory_.context + memory_.reserved;
  TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", human(asked),
                   ". GPU 0 has a total capacity of ", human(memory_.total), " of which ",
                   human(memory_.total > used ? memory_.total - used : 0), " is free. ", human(memory_.allocated),
                   " is allocated by PyTorch, and ", human(memory_.reserved - memory_.allocated),
                   " is reserved but unallocated. (pretend card)");
}

inline Block* new_segment(size_t asked, size_t size, Pool* pool) {
  size_t bytes = size <= MB ? 2 * MB : size < 10 * MB ? 20 * MB : round_up(size, 2 * MB);
  if (memory_.reserved + bytes > capacity()) release_cached();
  if (memory_.reserved + bytes > capacity()) out_of_memory(asked);
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK_WITH(OutOfMemoryError, at != MAP_FAILED, "CUDA out of memory (pretend card: the host gave none)");
  if (memory_.poison && bytes <= 64 * MB) memset(at, 0xFF, bytes);
  memory_.reserved += bytes;
  memory_.peak_reserved = std::max(memory_.peak_reserved, memory_.reserved);
  memory_.segments_made++;
  clock_.host = std::max(clock_.host, clock_.device) + rates_.malloc;
  auto* s = new Segment{(char*)at, bytes, pool, nullptr};
  s->first = new Block{(char*)at, bytes, 0, pool, false, nullptr, nullptr, s};
  segments_[s->at] = s;
  return s->first;
}

inline void* take(size_t asked) {
  Locked guard(lock_);
  if (!asked) return nullptr;
  counts_.allocations++;
  if (asked >= (size_t(1) << 46)) out_of_memory(asked);
  size_t size = std::max<size_t>(512, round_up(asked, 512));
  bool small = size <= MB;
  Pool* pool = pool_of(capturing() ? stream_of_capture() : current_stream_, pool_of_capture(), small);
  Block key{nullptr, size};
  auto found = pool->free.lower_bound(&key);
  Block* b;
  if (found != pool->free.end()) {
    b = *found;
    pool->free.erase(found);
  } else {
    b = new_segment(asked, size, pool);
  }
  size_t left = b->size - size;
  if (small ? left >= 512 : left > MB) {
    auto* rest = new Block{b->at + size, left, 0, pool, false, b, b->behind, b->segment};
    if (b->behind) b->behind->before = rest;
    b->behind = rest;
    b->size = size;
    pool->free.insert(rest);
  }
  b->used = true;
  b->asked = asked;
  live_[b->at] = b;
  memory_.allocated += b->size;
  memory_.peak_allocated = std::max(memory_.peak_allocated, memory_.allocated);
  written_.erase(b->at);
  note_made(b->at, b->size);
  return b->at;
}

inline void swallow(Block* x, Block* y) {
  x->size += y->size;
  x->behind = y->behind;
  if (y->behind) y->behind->before = x;
  delete y;
}

inline void give(void* at) {
  if (!at) return;
  Locked guard(lock_);
  auto found = live_.find(at);
  if (found == live_.end()) return;
  Block* b = found->second;
  live_.erase(found);
  b->used = false;
  memory_.allocated -= b->size;
  if (memory_.poison && !capturing()) memset(b->at, 0xFF, b->size);
  if (b->behind && !b->behind->used) {
    b->pool->free.erase(b->behind);
    swallow(b, b->behind);
  }
  if (b->before && !b->before->used) {
    b->pool->free.erase(b->before);
    Block* joined = b->before;
    swallow(joined, b);
    b = joined;
  }
  b->pool->free.insert(b);
}

// Is this address inside memory that the card has? A graph that reads elsewhere is an illegal access there.
inline bool is_mapped(const void* at) {
  auto s = segments_.upper_bound((char*)at);
  if (s == segments_.begin()) return false;
  --s;
  return (char*)at < s->second->at + s->second->size;
}

struct CardAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* at = take(n);
    return {at, at, &give, CARD};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
} allocator_;

// ---- pinned memory of the host: copies from and to it may be late

std::map<char*, size_t> pinned_;

struct PinnedAllocator final : c10::Allocator {
  static void drop(void* at) {
    Locked guard(lock_);
    arrive();
    pinned_.erase((char*)at);
    free(at);
  }
  c10::DataPtr allocate(size_t n) override {
    void* at = nullptr;
    size_t bytes = std::max<size_t>(n, 64);
    if (posix_memalign(&at, 64, bytes)) throw std::bad_alloc();
    Locked guard(lock_);
    memset(at, 0x5A, bytes);
    pinned_[(char*)at] = bytes;
    return {at, at, &drop, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
} pinned_allocator_;

inline bool is_pinned(const void* at) {
  Locked guard(lock_);
  auto i = pinned_.upper_bound((char*)at);
  if (i == pinned_.begin()) return false;
  --i;
  return (char*)at < i->first + i->second;
}

}  // namespace card
