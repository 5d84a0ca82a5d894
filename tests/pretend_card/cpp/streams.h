// Streams and what is late on them.
//
// Pretends: a copy from the card into pinned memory, non_blocking, arrives only when somebody waits for its stream, so a
// missing wait is seen. Every wait is counted, with where in Python it came from, and is an error inside a capture.
// Does not: kernels run at once and in order, whatever stream they are on, so a missing wait between two streams of the
// card itself is not seen.
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

inline void wait(const std::string& what) {
  if (tracer_) tracer_(what.c_str());
  Locked guard(lock_);
  if (capturing()) forbid(what);
  counts_.waits++;
  by_wait_[what]++;
  clock_.host = std::max(clock_.host, clock_.device) + rates_.wait;
  arrive();
}

}  // namespace card
