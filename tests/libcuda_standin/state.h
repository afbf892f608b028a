#pragma once

// A stand-in for libcuda, for tests only: CUDA's calls as far as Windrow uses them, over memfd and
// threads of no GPU. It is stricter than the real library: where CUDA's documentation forbids
// something, the call is refused with the documented result, nothing changes, and the rule that was
// broken is noted with its text. It runs no kernels but the one that reads %smid.

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "standin.h"
#include "windrow/cuda_abi.h"

namespace windrow::standin {

using cuda::DevicePtr;
using cuda::Result;

struct Physical {
  int fd;
  std::size_t bytes;
  bool rdma = false;
};

struct Mapping {
  std::size_t bytes;
  int access = 0;  // none until it is set
};

struct Reservation {
  std::size_t bytes;
  std::map<DevicePtr, Mapping> mappings;
};

struct Range {
  DevicePtr begin;
  std::size_t bytes;
};

// Work that was enqueued and has not run. It runs when somebody waits for it.
struct Work {
  std::function<void()> run;
  std::vector<Range> touches;
};

struct StreamState {
  cuda::Context context = nullptr;  // a green context's stream is of the primary one
  std::vector<Work> queue;
  std::set<unsigned> sms;
  cuda::GreenContext green = nullptr;
  bool detached = false;
  bool blocks = false;  // it waits for the default stream, and that one for it
};

// A capture of a stream; see captures.h.
struct Graph;
struct Capture {
  int mode = 0;
  std::thread::id thread;
  std::shared_ptr<Graph> graph;
  bool invalid = false;
};

// A point in a stream: behind so much of its work, counted from its beginning.
struct Point {
  StreamState* stream;
  std::size_t after;
};

struct EventState {
  cuda::Context context = nullptr;
  std::vector<Point> points;  // of one stream, or of all in its context
  bool asked = false;
  bool is_captured = false;  // recorded last on a stream that captured
};

struct State {
  std::mutex mutex;
  bool initialized = false;
  bool is_mps_client = false;  // settled at the first cuInit, for as long as the process lives
  // Of the simulated device and its driver; tests set them by the environment before cuInit.
  std::size_t granularity = 2 << 20;
  std::size_t memory = std::size_t{8} << 30;
  unsigned sms = 132;
  int capability = 9;                // major
  bool rdma = true;                  // whether memory may be asked to be fit for RDMA
  bool narrows = true;               // whether access that a mapping has may be taken away
  bool reads = true;                 // whether a mapping may be for reading only
  std::vector<unsigned> visible{0};  // which of the machine's GPUs this process sees, in its order
  bool is_gone = false;              // its own exit handler has run, as libcuda's does

  std::map<cuda::MemoryHandle, Physical> handles;
  cuda::MemoryHandle next_handle = 1;
  std::size_t memory_used = 0;
  std::map<DevicePtr, Reservation> reservations;
  std::map<cuda::Stream, std::unique_ptr<StreamState>> streams;
  std::map<cuda::Context, StreamState> default_streams;
  std::map<cuda::Event, std::unique_ptr<EventState>> events;
  std::map<StreamState*, std::size_t> finished;  // how much work of a stream has run
  std::map<StreamState*, Capture> captures;
  std::map<Graph*, std::shared_ptr<Graph>> graphs;
  std::map<cuda::GreenContext, std::set<unsigned>> greens;
  std::map<cuda::ResourceDesc, std::set<unsigned>> descs;
  std::set<cuda::Module> modules;
  std::uintptr_t next_object = 0x1000;
  long long primary_retained = 0;
  std::set<cuda::Context> foreign;  // contexts that another library made (cuCtxCreate)
  long long calls = 0;
  long long maps = 0;
  long long accesses = 0;
  std::vector<std::string> violations;
};

State& state();

// Of the simulated driver: 13000, or what WINDROW_STANDIN_CUDA says. Any time.
int driver_version();
// A number of the environment.
std::size_t setting(const char* name, std::size_t usual);

// Whether this process has a device of that number.
bool is_visible(int device);
// Of one of the machine's GPUs.
cuda::Uuid uuid_of(unsigned gpu);

// A key that no other object has.
template <class Handle>
Handle new_object() {
  return reinterpret_cast<Handle>(state().next_object += 0x10);
}

// Notes the rule and gives the result back.
Result refuse(Result result, const std::string& rule);

// Every call begins with it: counts, and insists on cuInit.
Result enter();
// ... and on a context that is current on this thread.
Result enter_context(const char* call);

// Contexts.
bool push_current(cuda::Context context);
cuda::Context pop_current();
cuda::Context current();
cuda::Context primary();

// Mappings: success where all of [begin, begin + bytes) is mapped with at least that access.
Result require_access(DevicePtr begin, std::size_t bytes, int access, const char* call);
bool is_pending(DevicePtr begin, std::size_t bytes);

// Streams; 0 is the default one. Nullptr where there is none, which is noted.
StreamState* find_stream(cuda::Stream stream, const char* call);
Result enqueue(cuda::Stream stream, const char* call, Work work);
void run_until(StreamState& stream, std::size_t count);
cuda::Stream add_stream(cuda::Context context, std::set<unsigned> sms, cuda::GreenContext green);

}  // namespace windrow::standin
