// Streams and what is late on them.
//
// Pretends: a copy from the card into pinned memory, non_blocking, arrives only when somebody waits for its stream, so a
// missing wait is seen. Every wait is counted, with where in Python it came from, and is an error inside a capture. A
// kernel that touches what another stream wrote, and that no wait puts behind it, is an error.
// Does not: kernels run at once and in order, whatever stream they are on; what is written while another stream still
// reads it, and memory given back while another stream uses it, are not seen.
#pragma once
#include "counters.h"

namespace card {

std::atomic<int64_t> streams_made_{1};

struct LateCopy {
  void* to;
  std::vector<char> bytes;
  int64_t stream;
};
std::list<LateCopy> late_;
bool copies_are_late_ = true;

// What was copied on this stream has arrived; -1: on all.
inline void arrive(int64_t stream = -1) {
  for (auto i = late_.begin(); i != late_.end();) {
    if (stream >= 0 && i->stream != stream) {
      ++i;
      continue;
    }
    memcpy(i->to, i->bytes.data(), i->bytes.size());
    i = late_.erase(i);
  }
}

struct Written {
  int64_t stream, number;
};
std::unordered_map<int64_t, int64_t> kernels_of_;                 // by stream: how many so far
std::map<std::pair<int64_t, int64_t>, int64_t> behind_;           // (a, b): stream a waited for so many of b's
std::unordered_map<const void*, Written> written_;                // by storage: its last write, if it may not be over

// From here on `later` waits for all that `earlier` was given so far.
inline void join(int64_t later, int64_t earlier) {
  for (auto& [pair, number] : std::map(behind_))
    if (pair.first == earlier) behind_[{later, pair.second}] = std::max(behind_[{later, pair.second}], number);
  behind_[{later, earlier}] = kernels_of_[earlier];
}

inline void must_be_behind(const void* storage, const std::string& who) {
  auto found = written_.find(storage);
  if (found == written_.end() || found->second.stream == current_stream_) return;
  auto [stream, number] = found->second;
  bool waited = behind_[std::pair(current_stream_, stream)] >= number;
  TORCH_CHECK(waited, "pretend card: ", who, " on stream ", current_stream_, " touches what stream ", stream,
              " writes, and does not wait for it");
}

inline void note_written(const void* storage) { written_[storage] = {current_stream_, kernels_of_[current_stream_]}; }

inline void wait(const std::string& what) {
  if (tracer_) tracer_(what.c_str());
  Locked guard(lock_);
  if (capturing()) forbid(what);
  counts_.waits++;
  by_wait_[what]++;
  clock_.host = std::max(clock_.host, clock_.device) + rates_.wait;
  bool all = what.find("synchronize") != std::string::npos;
  for (auto i = written_.begin(); i != written_.end();)
    i = all || i->second.stream == current_stream_ ? written_.erase(i) : std::next(i);
  arrive();
}

}  // namespace card
