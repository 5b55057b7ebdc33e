// A simulated accelerator for PyTorch, for tests on machines without one.
//
// It registers itself under the HPU dispatch key of a stock build of torch, because
// HPU is one of the few keys whose tensors may be exchanged with CPU tensors through
// `param.data = ...`, as CUDA's may (PrivateUse1's may not). Kernels compute on the CPU,
// at launch. Around them it keeps what makes accelerators hard; README.md says what.
//
// Contents: state, virtual time, deferred work, race check, allocators, streams and
// events, copies, kernels, operators, autocast, and the C interface of sim_device.py.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/native_group_norm_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string_view>
#include <thread>
#include <vector>

namespace torch::autograd {
int get_current_graph_task_id();  // of graph_task.h, too large to include for one name
}

namespace {
constexpr auto kDevice = c10::DeviceType::HPU;
constexpr int kPoison = 0xFF;         // as a float: NaN
constexpr double kPollSeconds = 1e-6;  // what a query that finds work unfinished costs
constexpr int kToDevice = 0, kToHost = 1;  // the link's directions
const c10::Device device0(kDevice, 0);

// ------------------------------------------------------------------------------- state

using Clock = std::map<int64_t, int64_t>;  // stream id -> the last work of it that is known done

struct Config {  // the same as in sim_device.py; configure() there has units and defaults
  uint64_t capacity_bytes;
  double h2d_gbps, d2h_gbps, tflops, hbm_gbps, launch_us, host_launch_us;
  int32_t deferred, half_duplex;
};

struct Readings {  // the same as in sim_device.py
  uint64_t allocated_bytes, peak_bytes, pinned_bytes, peak_pinned_bytes;
  uint64_t copied_bytes[2], copies[2], kernel_launches, syncs;
  double now_seconds, host_seconds;
};

struct Work {  // queued on a stream: a wait for another stream, or a copy
  int64_t seq;
  int64_t awaited = -1, awaited_seq = 0;  // a wait, if awaited >= 0
  at::Tensor from, to, keep;  // a copy: both sides as host views; what keeps the host side alive
  int direction = 0;
  size_t print = 0;  // fingerprint of the host side when the copy was queued
  const at::Tensor& host_side() const { return direction == kToDevice ? from : to; }
};

struct Stream {
  Clock seen;           // what is ordered before the stream's next work
  int64_t seq = 0;      // of its last work
  int64_t last_free = 0;  // seq when memory was last freed to it
  double now = 0;       // when its last work ends, in virtual seconds
  std::deque<Work> queue;
};

struct Event {
  Clock seen;
  double at;
  int64_t stream, seq, generation;
};

struct Access {
  int64_t stream, seq;
  bool write;
  const char* what;
  const char *lo, *hi;
};

struct Block {  // one allocation
  bool on_device;
  size_t bytes;
  int64_t stream;              // allocated on
  std::set<int64_t> recorded;  // by record_stream()
  std::vector<Access> last;    // accesses that later ones must be ordered after
  int queued;                  // queued copies that touch it
};

struct State {
  std::recursive_mutex mutex;
  int depth = 0;                     // of Locks held, by the one thread that holds any
  std::vector<at::Tensor> finished;  // see Lock
  Config config{};
  std::map<int64_t, Stream> streams;
  int64_t next_stream = 1;
  std::map<char*, Block> blocks;  // device and pinned memory, by base address
  std::deque<std::string> races;
  c10::CachingDeviceAllocator::DeviceStats device_stats;
  c10::CachingAllocator::Stat pinned_bytes;
  uint64_t copied_bytes[2]{}, copies[2]{}, kernel_launches = 0, syncs = 0;
  double link_free[2]{};  // when the link's last copy ends
  std::map<double, double> link_busy;  // half-duplex: when it is taken, from and until
  Clock host_seen;        // what some host thread has waited for
  std::thread::id home = std::this_thread::get_id();
  double home_now = 0;
  int64_t generation = 0;  // of reset()
};

// Never destroyed: tensors may outlive static destruction at interpreter exit.
State& sim = *new State;
thread_local int64_t current = 0;  // stream
thread_local bool in_kernel = false;

// Note [Order of locks]: taking or dropping a reference to a tensor that Python knows may
// need the interpreter's lock, which another thread may hold while it frees memory and so
// waits for ours. Under a Lock, therefore, no tensor of the program is copied, returned or
// dropped: those that finished copies kept alive go when the outermost Lock has let go.
class Lock {
 public:
  Lock() {
    sim.mutex.lock();
    ++sim.depth;
  }
  ~Lock() {
    if (--sim.depth == 0) dropped_.swap(sim.finished);
    sim.mutex.unlock();
  }
  Lock(const Lock&) = delete;

 private:
  std::vector<at::Tensor> dropped_;
};

void merge(Clock& into, const Clock& from) {
  for (auto& [stream, seq] : from) into[stream] = std::max(into[stream], seq);
}

Block* find_block(const void* address) {
  auto* p = static_cast<char*>(const_cast<void*>(address));
  auto it = sim.blocks.upper_bound(p);
  if (it == sim.blocks.begin()) return nullptr;
  --it;
  return p < it->first + it->second.bytes ? &it->second : nullptr;
}

bool is_pinned(const void* address) {
  auto* block = find_block(address);
  return block && !block->on_device;
}

std::pair<const char*, const char*> byte_range(const at::Tensor& t) {
  int64_t span = 1;
  for (int64_t d = 0; d < t.dim(); d++) span += (t.size(d) - 1) * t.stride(d);
  auto* lo = static_cast<const char*>(t.const_data_ptr());
  return {lo, lo + span * t.element_size()};
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  auto [a_lo, a_hi] = byte_range(a);
  auto [b_lo, b_hi] = byte_range(b);
  return a_lo < b_hi && b_lo < a_hi;
}

// ------------------------------------------------------------------------ virtual time

// The calling thread's clock. A thread that is new since reset() starts at the time of the
// home thread, which is the one that called reset(). Inside backward the home thread only
// waits for the autograd engine's threads, so these run on its clock.
double& host_now() {
  struct Own {
    double now;
    int64_t generation = -1;
  };
  thread_local Own own;
  if (std::this_thread::get_id() == sim.home) return sim.home_now;
  if (torch::autograd::get_current_graph_task_id() != -1) return sim.home_now;
  if (own.generation != sim.generation) own = {sim.home_now, sim.generation};
  return own.now;
}

// When work that the calling thread launches now on this stream can start.
double launch_time(const Stream& s) {
  host_now() += sim.config.host_launch_us * 1e-6;
  return std::max(s.now, host_now());
}

void host_waits(const Clock& seen, double until) {
  merge(sim.host_seen, seen);
  host_now() = std::max(host_now(), until);
}

// ----------------------------------------------------------------------- deferred work

// The same bytes, seen as a CPU tensor that nothing else knows.
at::Tensor host_view(const at::Tensor& t) {
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  auto view = at::from_blob(const_cast<void*>(t.const_data_ptr()), t.sizes(), t.strides(), options);
  view._set_conj(t.is_conj());
  view._set_neg(t.is_neg());
  return view;
}

// A copy may run inside whatever the program is doing when it is waited for: keep that
// program's autograd and dispatch modes out.
struct PlainTorch {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_python{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

size_t fingerprint(const at::Tensor& view) {
  PlainTorch plain;
  auto bytes = view.contiguous();
  return std::hash<std::string_view>{}(
      {static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()});
}

void copy_bytes(const at::Tensor& from, const at::Tensor& to) {
  PlainTorch plain;
  to.copy_(from);
}

void refresh_prints(const at::Tensor& written) {
  for (auto& [id, stream] : sim.streams)
    for (auto& work : stream.queue)
      if (work.awaited < 0 && overlap(work.host_side(), written))
        work.print = fingerprint(work.host_side());
}

void run_copy(Work& work) {
  if (fingerprint(work.host_side()) != work.print)
    sim.races.push_back(
        work.direction == kToDevice
            ? "host buffer rewritten before its copy ran: the device gets the new bytes"
            : "host buffer rewritten before the copy into it ran: the new bytes are lost");
  copy_bytes(work.from, work.to);
  bool others = false;  // queued copies that this one's host bytes matter to
  for (auto* side : {&work.from, &work.to})
    if (auto* block = find_block(side->const_data_ptr())) {
      --block->queued;
      others |= !block->on_device && block->queued > 0;
    }
  if (work.direction == kToHost && others) refresh_prints(work.to);
  sim.finished.push_back(std::move(work.keep));
}

// Runs what a stream has queued up to a position, and what that waits for on others.
void run_until(int64_t id, int64_t seq) {
  auto& queue = sim.streams[id].queue;
  while (!queue.empty() && queue.front().seq <= seq) {
    Work work = std::move(queue.front());
    queue.pop_front();
    if (work.awaited >= 0)
      run_until(work.awaited, work.awaited_seq);
    else
      run_copy(work);
  }
}

void run_all(int64_t id) { run_until(id, INT64_MAX); }

bool inside(const at::Tensor& t, const char* lo, size_t bytes) {
  auto* p = static_cast<const char*>(t.const_data_ptr());
  return lo <= p && p < lo + bytes;
}

// Runs all copies whose side of that name lies in a block that is being freed.
void run_copies(at::Tensor Work::* side, const char* lo, size_t bytes) {
  for (auto& [id, stream] : sim.streams) {
    int64_t last = -1;
    for (auto& work : stream.queue)
      if (work.awaited < 0 && inside(work.*side, lo, bytes)) last = work.seq;
    run_until(id, last);
  }
}

// Device memory may be freed under a queued copy from it, since its next owner comes later
// on the stream. The copy must not run for that: it gets the bytes to itself.
void keep_bytes_for_copies(const char* lo, size_t bytes) {
  run_copies(&Work::to, lo, bytes);
  PlainTorch plain;
  for (auto& [id, stream] : sim.streams)
    for (auto& work : stream.queue)
      if (work.awaited < 0 && inside(work.from, lo, bytes)) work.from = work.from.clone();
}

// -------------------------------------------------------------------------- race check

Stream& synced(int64_t id) {
  auto& s = sim.streams[id];
  merge(s.seen, sim.host_seen);  // whatever is launched now, the host launched after its waits
  return s;
}

// Opens a new piece of work on a stream.
Stream& launch(int64_t id) {
  auto& s = synced(id);
  s.seen[id] = ++s.seq;
  return s;
}

// Notes that the stream's last work reads or writes a tensor's bytes.
void touch(const at::Tensor& t, int64_t id, bool write, const char* what) {
  if (t.numel() == 0) return;
  auto [lo, hi] = byte_range(t);
  auto* block = find_block(lo);
  if (!block) return;
  auto& s = sim.streams[id];
  for (auto& a : block->last)
    if (a.stream != id && (a.write || write) && a.lo < hi && lo < a.hi && s.seen[a.stream] < a.seq)
      sim.races.push_back(c10::str(
          what, " on stream ", id, write ? " writes " : " reads ",
          block->on_device ? "device" : "pinned", " memory that ", a.what, " on stream ", a.stream,
          a.write ? " wrote" : " read", ", with no event between them"));
  std::erase_if(block->last, [&, lo = lo, hi = hi](const Access& a) {
    return lo <= a.lo && a.hi <= hi && (write || (a.stream == id && !a.write));
  });
  block->last.push_back({id, s.seq, write, what, lo, hi});
}

// -------------------------------------------------------------------------- allocators

template <typename F>
void each_size_stat(c10::CachingDeviceAllocator::DeviceStats& stats, F&& f) {
  for (auto* array : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes,
                      &stats.requested_bytes})
    f((*array)[0]);  // 0 is the sum over all pools
}

template <typename F>
void each_count_stat(c10::CachingDeviceAllocator::DeviceStats& stats, F&& f) {
  for (auto* array : {&stats.allocation, &stats.segment, &stats.active}) f((*array)[0]);
}

void reset_device_peak() {
  auto reset = [](auto& stat) { stat.reset_peak(); };
  each_size_stat(sim.device_stats, reset);
  each_count_stat(sim.device_stats, reset);
}

uint64_t allocated_bytes() { return sim.device_stats.allocated_bytes[0].current; }

void* poisoned(size_t bytes, size_t alignment) {
  void* p = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  TORCH_CHECK(p, "the host has no memory for ", bytes, " bytes of the simulated device");
  return std::memset(p, kPoison, bytes);
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &free_block, device0};
    Lock lock;
    auto free = sim.config.capacity_bytes - std::min(allocated_bytes(), sim.config.capacity_bytes);
    if (n > free) sim.device_stats.num_ooms++;
    TORCH_CHECK_WITH(OutOfMemoryError, n <= free, "simulated device out of memory: ", n,
                     " bytes asked, ", free, " of ", sim.config.capacity_bytes, " free");
    auto* p = static_cast<char*>(poisoned(n, 512));
    each_size_stat(sim.device_stats, [&](auto& stat) { stat.increase(n); });
    each_count_stat(sim.device_stats, [](auto& stat) { stat.increase(1); });
    sim.device_stats.num_device_alloc++;
    // As with CUDA's caching allocator the memory may be what was last freed to this
    // stream, whose kernels may still use it: other streams must be ordered after that.
    Access owner{current, sim.streams[current].last_free, true, "its earlier owner", p, p + n};
    sim.blocks[p] = {true, n, current, {}, {owner}, 0};
    return {p, p, &free_block, device0};
  }
  static void free_block(void* address) {
    if (!address) return;
    Lock lock;
    auto* p = static_cast<char*>(address);
    auto block = std::move(sim.blocks.at(p));
    // Freed memory goes back to the stream it was allocated on, which may reuse it at once;
    // if streams were named, once these have done what they were given until now.
    auto& s = synced(block.stream);
    auto ordered = [&](const Access& a) {
      if (a.stream == block.stream || s.seen[a.stream] >= a.seq) return true;
      auto covers = [&](int64_t r) { return r == a.stream || synced(r).seen[a.stream] >= a.seq; };
      return std::any_of(block.recorded.begin(), block.recorded.end(), covers);
    };
    for (auto& a : block.last)
      if (!ordered(a)) {
        sim.races.push_back(c10::str("device memory of stream ", block.stream, " freed while ",
                                     a.what, " on stream ", a.stream, " may still use it"));
        break;
      }
    s.last_free = s.seq;
    if (block.queued) keep_bytes_for_copies(p, block.bytes);
    each_size_stat(sim.device_stats, [&](auto& stat) { stat.decrease(block.bytes); });
    each_count_stat(sim.device_stats, [](auto& stat) { stat.decrease(1); });
    sim.device_stats.num_device_free++;
    sim.blocks.erase(p);
    std::free(std::memset(p, kPoison, block.bytes));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& p, c10::Stream s) override {
    Lock lock;
    if (auto* block = find_block(p.get())) block->recorded.insert(s.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    Lock lock;
    return sim.device_stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {
    Lock lock;
    auto reset = [](auto& stat) { stat.reset_accumulated(); };
    each_size_stat(sim.device_stats, reset);
    each_count_stat(sim.device_stats, reset);
    sim.device_stats.num_ooms = 0;
    sim.device_stats.num_device_alloc = sim.device_stats.num_device_free = 0;
  }
  void resetPeakStats(c10::DeviceIndex) override {
    Lock lock;
    reset_device_peak();
  }
  // No `override`: the oldest torch that is supported lacks it.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) {
    Lock lock;
    auto total = sim.config.capacity_bytes;
    return {total - std::min(allocated_bytes(), total), total};
  }
};

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t n) override {
    Lock lock;
    auto* p = static_cast<char*>(poisoned(std::max<size_t>(n, 1), 4096));
    sim.pinned_bytes.increase(n);
    sim.blocks[p] = {false, n, current, {}, {}, 0};
    return {p, p, &free_block, c10::Device(c10::kCPU)};
  }
  static void free_block(void* address) {
    if (!address) return;
    Lock lock;
    auto* p = static_cast<char*>(address);
    auto& block = sim.blocks.at(p);
    auto bytes = block.bytes;
    // Only through a tensor that does not own the memory: a queued copy keeps its own alive.
    if (block.queued) {
      sim.races.push_back("pinned memory freed before a copy of it ran");
      run_copies(&Work::from, p, bytes);
      run_copies(&Work::to, p, bytes);
    }
    sim.pinned_bytes.decrease(bytes);
    sim.blocks.erase(p);
    std::free(std::memset(p, kPoison, bytes));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

DeviceAllocator& device_allocator = *new DeviceAllocator;
PinnedAllocator& pinned_allocator = *new PinnedAllocator;
REGISTER_ALLOCATOR(kDevice, &device_allocator)
REGISTER_HOST_ALLOCATOR(kDevice, &pinned_allocator)

// ------------------------------------------------------------------ streams and events

struct HPUHooks : at::HPUHooksInterface {  // torch's registry looks this very name up
  explicit HPUHooks(at::HPUHooksArgs) {}
  bool hasHPU() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* p) const override {
    Lock lock;
    return is_pinned(p);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
};

// Of two accelerators torch refuses to say which is the current one, and a build for CUDA
// counts as one even where no GPU is seen. It has asked for its hooks by now and keeps
// them, so they are turned into those of a build for CPUs: they have nothing but methods.
const bool hides_cuda = [] {
  static const at::CUDAHooksInterface none;
  auto& hooks = at::detail::getCUDAHooks();
  static_assert(sizeof hooks == sizeof(void*));
  std::memcpy(const_cast<void*>(static_cast<const void*>(&hooks)), &none, sizeof none);
  return true;
}();

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return device0; }
  c10::Device getDevice() const override { return device0; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  static c10::Stream stream(int64_t id) {
    if (id == 0) return c10::Stream(c10::Stream::DEFAULT, device0);
    return c10::Stream(c10::Stream::UNSAFE, device0, id);
  }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    Lock lock;
    return stream(sim.next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override {
    return getNewStream(d, 0);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    return stream(std::exchange(current, s.id()));
  }
  bool queryStream(const c10::Stream& st) const override {
    Lock lock;
    auto& s = sim.streams[st.id()];
    return poll(s.now, st.id(), s.seq, s.seen);
  }
  void synchronizeStream(const c10::Stream& st) const override {
    Lock lock;
    sim.syncs++;
    run_all(st.id());
    auto& s = sim.streams[st.id()];
    host_waits(s.seen, s.now);
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    Lock lock;
    sim.syncs++;
    for (auto& [id, s] : sim.streams) {
      run_all(id);
      host_waits(s.seen, s.now);
    }
  }

  void record(void** handle, const c10::Stream& st, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    Lock lock;
    if (!*handle) *handle = new Event;
    auto& s = launch(st.id());
    s.now = std::max(s.now, host_now());
    *static_cast<Event*>(*handle) = {s.seen, s.now, st.id(), s.seq, sim.generation};
  }
  void block(void* handle, const c10::Stream& st) const override {
    Lock lock;
    auto* e = pending(handle);
    if (!e) return;
    auto& s = launch(st.id());
    merge(s.seen, e->seen);
    s.now = std::max(s.now, e->at);
    auto& queue = sim.streams[e->stream].queue;
    if (!queue.empty() && queue.front().seq <= e->seq)
      s.queue.push_back({s.seq, e->stream, e->seq});
  }
  bool queryEvent(void* handle) const override {
    Lock lock;
    auto* e = pending(handle);
    return !e || poll(e->at, e->stream, e->seq, e->seen);
  }
  void synchronizeEvent(void* handle) const override {
    Lock lock;
    sim.syncs++;
    auto* e = pending(handle);
    if (!e) return;
    run_until(e->stream, e->seq);
    host_waits(e->seen, e->at);
  }
  void destroyEvent(void* handle, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(handle);
  }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    return (static_cast<Event*>(b)->at - static_cast<Event*>(a)->at) * 1e3;
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    device_allocator.recordStream(p, s);
  }

 private:
  static Event* pending(void* handle) {  // nothing for what reset() has forgotten
    auto* e = static_cast<Event*>(handle);
    return e && e->generation == sim.generation ? e : nullptr;
  }
  static bool poll(double done_at, int64_t id, int64_t seq, const Clock& seen) {
    if (done_at > host_now()) {
      host_now() += kPollSeconds;  // so that a polling loop ends
      return false;
    }
    run_until(id, seq);
    merge(sim.host_seen, seen);
    return true;
  }
};
C10_REGISTER_GUARD_IMPL(HPU, Guard)

// ------------------------------------------------------------------------------ copies

// Brackets a kernel: charges the current stream for it, and makes the copies within it the
// kernel's reads and writes instead of transfers.
class Kernel {
 public:
  explicit Kernel(double bytes, double flops = 0) {
    Lock lock;
    sim.kernel_launches++;
    auto& s = launch(current);
    auto& c = sim.config;
    s.now = launch_time(s) + c.launch_us * 1e-6 +
            std::max(bytes / (c.hbm_gbps * 1e9), flops / (c.tflops * 1e12));
    run_all(current);
    in_kernel = true;
  }
  ~Kernel() { in_kernel = outer_; }
  Kernel(const Kernel&) = delete;

 private:
  bool outer_ = in_kernel;
};

void kernel_copy(const at::Tensor& src, const at::Tensor& dst) {
  Lock lock;
  touch(src, current, false, "a kernel");
  touch(dst, current, true, "a kernel");
  copy_bytes(host_view(src), host_view(dst));
}

void queue_copy(Stream& s, const at::Tensor& src, const at::Tensor& dst, at::Tensor&& keep) {
  const int direction = dst.is_cpu() ? kToHost : kToDevice;
  auto* from = find_block(src.const_data_ptr());
  auto* to = find_block(dst.const_data_ptr());
  // Whoever reads the buffer before the copy has run shall notice. Not if another queued
  // copy still needs the bytes that are there.
  if (direction == kToHost && to->queued == 0 && dst.is_contiguous())
    std::memset(dst.mutable_data_ptr(), kPoison, dst.nbytes());
  from->queued++;
  to->queued++;
  Work work{s.seq, -1, 0, host_view(src), host_view(dst), std::move(keep), direction};
  work.print = fingerprint(work.host_side());
  s.queue.push_back(std::move(work));
}

// When a copy ends that needs its direction for so long. On a half-duplex link it takes what
// is free of the one link, in pieces, as copies that were launched before it have left it.
double take_link(int direction, double ready, double seconds) {
  auto& own = sim.link_free[direction];
  double at = std::max(ready, own);
  if (!sim.config.half_duplex) return own = at + seconds;
  auto& busy = sim.link_busy;
  auto next = busy.upper_bound(at);
  if (next != busy.begin()) at = std::max(at, std::prev(next)->second);
  while (true) {
    const bool fits = next == busy.end() || at + seconds <= next->first;
    const double until = fits ? at + seconds : next->first;
    if (until > at) {
      auto before = next == busy.begin() ? busy.end() : std::prev(next);
      if (before != busy.end() && before->second == at)
        before->second = until;
      else
        busy.emplace_hint(next, at, until);
      seconds -= until - at;
    }
    if (fits) return own = until;
    at = next->second;
    ++next;
  }
}

void link_copy(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  at::Tensor host = src.is_cpu() ? src : dst;  // before the Lock; see Note [Order of locks]
  Lock lock;
  const int direction = dst.is_cpu() ? kToHost : kToDevice;
  const auto& c = sim.config;
  const double rate = (direction == kToDevice ? c.h2d_gbps : c.d2h_gbps) * 1e9;
  const bool async = non_blocking && is_pinned(host.const_data_ptr());
  auto& s = launch(current);
  touch(src, current, false, "a copy");
  touch(dst, current, true, "a copy");
  sim.copies[direction]++;
  sim.copied_bytes[direction] += src.nbytes();
  s.now = take_link(direction, launch_time(s), c.launch_us * 1e-6 + src.nbytes() / rate);
  if (async && c.deferred) {
    queue_copy(s, src, dst, std::move(host));
    return;
  }
  run_all(current);
  copy_bytes(host_view(src), host_view(dst));
  if (!async) {
    sim.syncs++;
    host_waits(s.seen, s.now);
  }
}

at::Tensor sim_copy(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  if (src.numel() == 0 || dst.numel() == 0) return dst;
  if (in_kernel) {
    kernel_copy(src, dst);
  } else if (src.is_cpu() || dst.is_cpu()) {
    link_copy(src, dst, non_blocking);
  } else {
    Kernel kernel(2.0 * src.nbytes());
    kernel_copy(src, dst);
  }
  return dst;
}

at::Tensor sim_copy_resize(const at::Tensor& src, const at::Tensor& dst) {
  if (src.sizes() != dst.sizes()) dst.resize_(src.sizes());
  return sim_copy(src, dst, false);
}

// ----------------------------------------------------------------------------- kernels

// The CPU fallback would quietly compute with tensors of both sides. On an accelerator
// that is an error, but for numbers in zero-dimensional tensors.
void require_one_device(const char* name, at::ArrayRef<at::Tensor> arguments) {
  bool device = false, cpu = false;
  for (auto& t : arguments) {
    device |= !t.is_cpu();
    cpu |= t.is_cpu() && t.dim() > 0;
  }
  TORCH_CHECK(!(device && cpu), "Expected all tensors to be on the same device, but found at ",
              "least two devices, hpu:0 and cpu! (in ", name, ")");
}

// Tensors and lists of tensors. Lists of optional tensors are indices, which may be anywhere.
std::vector<at::Tensor> tensor_arguments(const c10::FunctionSchema& schema,
                                         const torch::jit::Stack& stack) {
  std::vector<at::Tensor> found;
  auto add = [&](const at::Tensor& t) {
    if (t.defined()) found.push_back(t);
  };
  for (auto& value : torch::jit::last(stack, schema.arguments().size())) {
    if (value.isTensor()) add(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& t : value.toTensorList()) add(t);
  }
  return found;
}

double flops_of(const std::string& name, const std::vector<at::Tensor>& in) {
  auto product = [&](size_t a, size_t b) { return 2.0 * in[a].numel() * in[b].size(-1); };
  if (name == "aten::mm" || name == "aten::bmm") return product(0, 1);
  if (name == "aten::addmm" || name == "aten::baddbmm") return product(1, 2);
  return 0;
}

void boxed_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  auto in = tensor_arguments(op.schema(), *stack);
  if (name != "aten::_pack_padded_sequence") require_one_device(name.c_str(), in);  // host lengths
  double bytes = 0;
  for (auto& t : in)
    if (!t.is_cpu()) bytes += t.nbytes();
  Kernel kernel(bytes, flops_of(name, in));
  at::native::cpu_fallback(op, stack);
}

// --------------------------------------------------------------------------- operators

at::Tensor sim_empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>,
                     std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::HPU),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor sim_empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                             std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                             std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::HPU),
                                           c10::dtype_or_default(dtype));
}

at::Tensor& sim_set(at::Tensor& t, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                    c10::IntArrayRef stride) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, stride);
  return t;
}

// The whole storage, as torch.save() reads it.
at::Tensor& sim_set_storage(at::Tensor& t, at::Storage storage) {
  int64_t size = storage.nbytes() / t.element_size();
  return sim_set(t, std::move(storage), 0, {size}, {1});
}

at::Tensor sim_as_strided(const at::Tensor& t, c10::IntArrayRef size, c10::IntArrayRef stride,
                          std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(t, size, stride, offset);
}

at::Tensor sim_view(const at::Tensor& t, c10::SymIntArrayRef size) {
  return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size));
}

// Grows the storage in place, as torch does: views of it stay views of it.
const at::Tensor& sim_resize(const at::Tensor& t, c10::SymIntArrayRef sym_size,
                             std::optional<c10::MemoryFormat> format) {
  auto size = C10_AS_INTARRAYREF_SLOW(sym_size);
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  auto old_bytes = storage->nbytes();
  auto bytes = static_cast<size_t>((t.storage_offset() + t.numel()) * t.element_size());
  if (t.numel() == 0 || bytes <= old_bytes) return t;
  Kernel kernel(2.0 * old_bytes);
  auto data = device_allocator.allocate(bytes);
  if (old_bytes) std::memcpy(data.get(), storage->data(), old_bytes);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
  return t;
}

void sim_record_stream(at::Tensor& t, c10::Stream s) {
  device_allocator.recordStream(t.storage().data_ptr(), s);
}

at::Scalar sim_item(const at::Tensor& t) { return t.cpu().item(); }

at::Tensor to_host(const at::Tensor& t) { return t.defined() ? t.cpu() : t; }
at::Tensor to_device(const at::Tensor& t) { return t.defined() ? t.to(device0) : t; }

at::Tensor sim_convolution(const at::Tensor& x, const at::Tensor& w,
                           const std::optional<at::Tensor>& b, c10::IntArrayRef stride,
                           c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                           c10::IntArrayRef output_padding, int64_t groups) {
  auto bias = b.value_or(at::Tensor());
  require_one_device("aten::convolution", {x, w, bias.defined() ? bias : w});
  Kernel kernel(static_cast<double>(x.nbytes() + w.nbytes()));
  return to_device(at::convolution(to_host(x), to_host(w), to_host(bias), stride, padding,
                                   dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> sim_convolution_backward(
    const at::Tensor& g, const at::Tensor& x, const at::Tensor& w, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
    c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  require_one_device("aten::convolution_backward", {g, x, w});
  Kernel kernel(static_cast<double>(x.nbytes() + w.nbytes() + g.nbytes()));
  const int64_t bias_size = transposed ? w.size(1) * groups : w.size(0);
  auto [dx, dw, db] = at::convolution_backward(
      to_host(g), to_host(x), to_host(w), at::OptionalIntArrayRef({bias_size}), stride, padding,
      dilation, transposed, output_padding, groups, mask);
  return {to_device(dx), to_device(dw), to_device(db)};
}

// Takes integers, as CUDA's does and the CPU's does not.
at::Tensor sim_histc(const at::Tensor& x, int64_t bins, const at::Scalar& lo,
                     const at::Scalar& hi) {
  Kernel kernel(static_cast<double>(x.nbytes()));
  auto values = to_host(x);
  if (!values.is_floating_point()) values = values.to(at::kFloat);
  return to_device(at::histc(values, bins, lo, hi).to(x.scalar_type()));
}

// The general kernel views its input, which need not be contiguous: torch 2.14 has that done
// for devices that it knows.
std::tuple<at::Tensor, at::Tensor, at::Tensor> sim_group_norm(
    const at::Tensor& x, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, int64_t n, int64_t c, int64_t hw, int64_t group,
    double eps) {
  return at::native::math_group_norm(x.contiguous(), weight, bias, n, c, hw, group, eps);
}

TORCH_LIBRARY_IMPL(_, HPU, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&boxed_kernel>());
}

TORCH_LIBRARY_IMPL(aten, HPU, m) {
  m.impl("empty.memory_format", &sim_empty);
  m.impl("empty_strided", &sim_empty_strided);
  m.impl("_copy_from", &sim_copy);
  m.impl("_copy_from_and_resize", &sim_copy_resize);
  m.impl("set_.source_Storage_storage_offset", &sim_set);
  m.impl("set_.source_Storage", &sim_set_storage);
  m.impl("as_strided", &sim_as_strided);
  m.impl("view", &sim_view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &sim_resize);
  m.impl("record_stream", &sim_record_stream);
  m.impl("_local_scalar_dense", &sim_item);
  m.impl("convolution_overrideable", &sim_convolution);
  m.impl("convolution_backward_overrideable", &sim_convolution_backward);
  m.impl("histc", &sim_histc);
  m.impl("native_group_norm", &sim_group_norm);
}

// The copies above resolve lazy conjugation and negation themselves. The fallbacks of these
// keys would do it by a clone, which comes back here without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

// ---------------------------------------------------------------------------- autocast

// Matrix products take lower precision copies, which torch caches within the region.
at::Tensor low(const at::Tensor& t) {
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(kDevice), t, kDevice);
}
std::optional<at::Tensor> low(const std::optional<at::Tensor>& t) {
  return t && t->defined() ? std::optional(low(*t)) : std::nullopt;
}
struct Plain : c10::impl::ExcludeDispatchKeyGuard {
  Plain() : ExcludeDispatchKeyGuard(c10::DispatchKey::AutocastHPU) {}
};
at::Tensor cast_linear(const at::Tensor& x, const at::Tensor& w,
                       const std::optional<at::Tensor>& b) {
  Plain plain;
  return at::linear(low(x), low(w), low(b));
}
at::Tensor cast_matmul(const at::Tensor& a, const at::Tensor& b) {
  Plain plain;
  return at::matmul(low(a), low(b));
}
at::Tensor cast_mm(const at::Tensor& a, const at::Tensor& b) {
  Plain plain;
  return at::mm(low(a), low(b));
}
at::Tensor cast_bmm(const at::Tensor& a, const at::Tensor& b) {
  Plain plain;
  return at::bmm(low(a), low(b));
}
at::Tensor cast_addmm(const at::Tensor& c, const at::Tensor& a, const at::Tensor& b,
                      const at::Scalar& beta, const at::Scalar& alpha) {
  Plain plain;
  return at::addmm(low(c), low(a), low(b), beta, alpha);
}
at::Tensor cast_convolution(const at::Tensor& x, const at::Tensor& w,
                            const std::optional<at::Tensor>& b, c10::SymIntArrayRef stride,
                            c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                            bool transposed, c10::SymIntArrayRef output_padding,
                            c10::SymInt groups) {
  Plain plain;
  return at::convolution_symint(low(x), low(w), low(b), stride, padding, dilation, transposed,
                                output_padding, groups);
}

// Norms are computed in float32, as on CUDA: in backward no kernel of the CPU takes both.
at::Tensor high(const at::Tensor& t) {
  return at::autocast::cached_cast(at::kFloat, t, kDevice);
}
std::optional<at::Tensor> high(const std::optional<at::Tensor>& t) {
  return t && t->defined() ? std::optional(high(*t)) : std::nullopt;
}
at::Tensor cast_layer_norm(const at::Tensor& x, c10::SymIntArrayRef shape,
                           const std::optional<at::Tensor>& w,
                           const std::optional<at::Tensor>& b, double eps, bool cudnn) {
  Plain plain;
  return at::layer_norm_symint(high(x), shape, high(w), high(b), eps, cudnn);
}

TORCH_LIBRARY_IMPL(_, AutocastHPU, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastHPU, m) {
  m.impl("linear", &cast_linear);
  m.impl("matmul", &cast_matmul);
  m.impl("mm", &cast_mm);
  m.impl("bmm", &cast_bmm);
  m.impl("addmm", &cast_addmm);
  m.impl("convolution", &cast_convolution);
  m.impl("layer_norm", &cast_layer_norm);
}
}  // namespace

namespace at {
using ::HPUHooks;
REGISTER_HPU_HOOKS(HPUHooks)
}  // namespace at

// ------------------------------------------------------------------------- C interface

extern "C" {
void sim_configure(const Config* config) {
  Lock lock;
  sim.config = *config;
}

// Finishes what is queued, then forgets it: all that was, happened before all that comes.
void sim_reset() {
  Lock lock;
  for (auto& [id, s] : sim.streams) run_all(id);
  sim.streams.clear();  // each one ever used would be in every clock from now on
  for (auto& [address, block] : sim.blocks) {
    block.last.clear();
    block.recorded.clear();
  }
  sim.host_seen.clear();
  sim.races.clear();
  sim.link_busy.clear();
  for (int direction : {kToDevice, kToHost})
    sim.copies[direction] = sim.copied_bytes[direction] = sim.link_free[direction] = 0;
  sim.kernel_launches = sim.syncs = 0;
  reset_device_peak();
  sim.pinned_bytes.reset_peak();
  sim.home = std::this_thread::get_id();
  sim.home_now = 0;
  sim.generation++;
}

void sim_reset_peak() {
  Lock lock;
  reset_device_peak();
  sim.pinned_bytes.reset_peak();
}

void sim_advance_host(double us) {
  Lock lock;
  host_now() += us * 1e-6;
}

void sim_read(Readings* out) {
  Lock lock;
  auto& device = sim.device_stats.allocated_bytes[0];
  auto unsigned_ = [](int64_t n) { return static_cast<uint64_t>(n); };
  *out = {unsigned_(device.current),
          unsigned_(device.peak),
          unsigned_(sim.pinned_bytes.current),
          unsigned_(sim.pinned_bytes.peak),
          {sim.copied_bytes[0], sim.copied_bytes[1]},
          {sim.copies[0], sim.copies[1]},
          sim.kernel_launches,
          sim.syncs,
          host_now(),
          host_now()};
  for (auto& [id, s] : sim.streams) out->now_seconds = std::max(out->now_seconds, s.now);
}

uint64_t sim_stream_count() {
  Lock lock;
  return sim.streams.size();
}

uint64_t sim_race_count() {
  Lock lock;
  return sim.races.size();
}

const char* sim_race(uint64_t i) {
  Lock lock;
  return sim.races[i].c_str();
}

// Forgets all races but the first `kept`.
void sim_keep_races(uint64_t kept) {
  Lock lock;
  sim.races.resize(kept);
}
}
