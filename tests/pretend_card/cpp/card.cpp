// A pretend CUDA card for a CPU build of torch: everything below the dispatch key CUDA, on memory of the host.
//
// One translation unit, so that it builds in seconds: this file registers the kernels and is what Python calls.
// It must be loaded before torch is imported, which looks for CUDA once.
#include "devices.h"
#include "tensors.h"

using namespace card;

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&unknown>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("copy_", &copy_);
  m.impl("_fused_sdp_choice", &choose_attention);
  m.impl("record_stream", &record_stream);
}

namespace {
const std::set<std::string> OWN = {"empty.memory_format", "empty_strided", "resize_", "set_.source_Storage_storage_offset",
                                   "set_.source_Storage", "set_.source_Tensor", "set_", "copy_", "_fused_sdp_choice",
                                   "record_stream"};
std::string error_, text_;
std::vector<std::unique_ptr<torch::Library>> libraries_;

// 0, or 1 with the error's text kept for Python.
template <class F>
int guarded(F work) {
  try {
    work();
    return 0;
  } catch (const std::exception& e) {
    error_ = e.what();
    return 1;
  }
}
int told(const std::string& error) {
  error_ = error;
  return !error.empty();
}
const char* text(const std::ostringstream& out) {
  text_ = out.str();
  return text_.c_str();
}
}  // namespace

extern "C" {

const char* card_error() { return error_.c_str(); }

// The names of operators that have a CUDA kernel in torch, one a line: kernels here too, not what they are made of.
int card_register(const char* names) {
  auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  std::istringstream in(names);
  std::string line;
  int registered = 0;
  while (std::getline(in, line)) {
    if (OWN.count(line)) continue;
    auto dot = line.find('.');
    std::string overload = dot == std::string::npos ? "" : line.substr(dot + 1);
    if (!c10::Dispatcher::singleton().findOp({"aten::" + line.substr(0, dot), overload})) continue;
    library->impl(line.c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel>());
    registered++;
  }
  libraries_.push_back(std::move(library));
  return registered;
}

int card_set(const char* what, double x) {
  Locked guard(lock_);
  std::string w = what;
  if (w == "total") memory_.total = x;
  else if (w == "context") memory_.context = x;
  else if (w == "fraction") memory_.fraction = x;
  else if (w == "poison") memory_.poison = x;
  else if (w == "copies_are_late") copies_are_late_ = x;
  else if (w == "capability") capability_ = x;
  else if (w == "bandwidth") rates_.bandwidth = x;
  else if (w == "flops16") rates_.flops16 = x;
  else if (w == "flops32") rates_.flops32 = x;
  else return 1;
  return 0;
}

double card_get(const char* what) {
  Locked guard(lock_);
  const std::map<std::string, double> values = {
      {"total", memory_.total}, {"context", memory_.context}, {"fraction", memory_.fraction},
      {"allocated", memory_.allocated}, {"reserved", memory_.reserved}, {"peak_allocated", memory_.peak_allocated},
      {"peak_reserved", memory_.peak_reserved}, {"out_of_memory", memory_.out_of_memory},
      {"segments_made", memory_.segments_made}, {"capturing", capturing()}, {"stream", current_stream_},
      {"launches", counts_.launches}, {"waits", counts_.waits}, {"to_card", counts_.to_card},
      {"to_card_late", counts_.to_card_late}, {"to_host", counts_.to_host}, {"to_host_late", counts_.to_host_late},
      {"replays", counts_.replays}, {"views", counts_.views}, {"allocations", counts_.allocations},
      {"bytes", counts_.bytes}, {"flops", counts_.flops}, {"host_clock", clock_.host}, {"device_clock", clock_.device},
      {"late", late_.size()}, {"streams_made", streams_made_.load()}};
  auto found = values.find(what);
  return found == values.end() ? -1 : found->second;
}

void card_set_tracer(void (*f)(const char*)) { tracer_ = f; }
void card_next_generator_is_default() { next_is_default_ = true; }
void card_reset_peak() {
  Locked guard(lock_);
  memory_.peak_allocated = memory_.allocated;
  memory_.peak_reserved = memory_.reserved;
}
void card_reset_counts() {
  Locked guard(lock_);
  counts_ = Counts();
  memory_.out_of_memory = 0;
  by_operator_.clear();
  by_wait_.clear();
}
void card_empty_cache() {
  Locked guard(lock_);
  release_cached();
}

int card_wait(const char* what) {
  return guarded([&] { wait(what); });
}
void card_arrive(int64_t stream) {
  Locked guard(lock_);
  arrive(stream);
}
void card_join(int64_t later, int64_t earlier) {
  Locked guard(lock_);
  join(later, earlier);
}
int64_t card_new_stream() { return streams_made_++; }
int64_t card_set_stream(int64_t id) { return std::exchange(current_stream_, id); }

// Lines of "operator, launches, bytes, flops", and of "kind of wait, times", tabs between.
const char* card_operators() {
  Locked guard(lock_);
  std::ostringstream out;
  for (auto& [name, one] : by_operator_) out << name << "\t" << one.launches << "\t" << one.bytes << "\t" << one.flops << "\n";
  return text(out);
}
const char* card_waits() {
  Locked guard(lock_);
  std::ostringstream out;
  for (auto& [what, times] : by_wait_) out << what << "\t" << times << "\n";
  return text(out);
}
// A line a segment: address, bytes, pool of graphs, stream, small, then size:used:asked of each block.
const char* card_snapshot() {
  Locked guard(lock_);
  std::ostringstream out;
  for (auto& [at, s] : segments_) {
    out << (size_t)at << " " << s->size << " " << s->pool->graphs << " " << s->pool->stream << " " << s->pool->small;
    for (Block* b = s->first; b; b = b->behind) out << " " << b->size << ":" << b->used << ":" << b->asked;
    out << "\n";
  }
  return text(out);
}

int64_t card_graph_new() {
  Locked guard(lock_);
  graphs_[next_graph_] = std::make_unique<Graph>();
  return next_graph_++;
}
int card_capture_begin(int64_t id, uint64_t pool) { return told(begin_capture(id, pool)); }
int card_capture_end() { return told(end_capture()); }
int card_replay(int64_t id) {
  return guarded([&] { replay(id); });
}
int64_t card_graph_launches(int64_t id) { return graphs_[id]->launches; }
void card_graph_free(int64_t id) { free_graph(id); }
}
