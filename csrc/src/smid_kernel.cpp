#include "smid_kernel.h"

#include <algorithm>

namespace windrow {
namespace {

// windrow_smid(out, hold_ns): thread 0 of each block writes %smid to out[block], and the block
// stays until hold_ns have passed, so that no SM runs two in turn while another stays empty. PTX,
// because the driver compiles it for whatever GPU is there; sm_70 is the oldest that has green
// contexts.
constexpr const char* kPtx = R"(
.version 6.4
.target sm_70
.address_size 64

.visible .entry windrow_smid(.param .u64 out, .param .u64 hold_ns)
{
  .reg .pred  %done, %other;
  .reg .b32   %sm, %thread, %block;
  .reg .b64   %at, %offset, %hold, %begin, %now;

  mov.u32     %thread, %tid.x;
  setp.ne.u32 %other, %thread, 0;
  @%other bra FINISH;

  ld.param.u64       %at, [out];
  cvta.to.global.u64 %at, %at;
  mov.u32            %block, %ctaid.x;
  mul.wide.u32       %offset, %block, 4;
  add.s64            %at, %at, %offset;
  mov.u32            %sm, %smid;
  st.global.u32      [%at], %sm;

  ld.param.u64 %hold, [hold_ns];
  mov.u64      %begin, %globaltimer;
WAIT:
  mov.u64      %now, %globaltimer;
  sub.s64      %now, %now, %begin;
  setp.lt.u64  %done, %now, %hold;
  @%done bra WAIT;
FINISH:
  bar.sync 0;
  ret;
}
)";

// 1,024 threads a block, so that an SM holds two at most; twice over, for the first launch finds a
// GPU that is waking up.
constexpr unsigned kThreads = 1024;
constexpr int kBlocksPerUnit = 4;
constexpr unsigned long long kHoldNs = 60'000;

class Module {
 public:
  Module(const CudaContext& context, const cuda::GreenCalls& green)
      : context_(context), green_(green) {
    context_.check(green_.cuModuleLoadData(&module_, kPtx), "loading the kernel that reads %smid");
  }
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;
  ~Module() { context_.library().check_quietly(green_.cuModuleUnload(module_), "cuModuleUnload"); }

  [[nodiscard]] cuda::Function function() const {
    cuda::Function found = nullptr;
    context_.check(green_.cuModuleGetFunction(&found, module_, "windrow_smid"),
                   "finding the kernel that reads %smid");
    return found;
  }

 private:
  const CudaContext& context_;
  const cuda::GreenCalls& green_;
  cuda::Module module_ = nullptr;
};

std::vector<unsigned> read_words(const CudaContext& context, const Reservation& from,
                                 std::size_t count, cuda::Stream stream) {
  std::vector<unsigned> words(count);
  context.check(context.calls().cuMemcpyDtoHAsync(words.data(),
                                                  reinterpret_cast<cuda::DevicePtr>(from.data()),
                                                  count * sizeof(unsigned), stream),
                "copying the SM ids");
  context.check(context.calls().cuStreamSynchronize(stream), "waiting for the SM ids");
  return words;
}

}  // namespace

std::vector<unsigned> smids_of(CudaDriver& driver, cuda::Stream stream, int units) {
  const CudaContext& context = *driver.context();
  const cuda::GreenCalls& green = context.library().green();
  const CudaContext::Current current(context);
  const Module module(context, green);
  const cuda::Function function = module.function();
  const auto blocks = static_cast<unsigned>(units * kBlocksPerUnit);
  const auto memory = driver.create(blocks * sizeof(unsigned), "windrow-smid");
  const auto words = map_whole(driver, *memory, Access::kReadWrite);
  auto out = reinterpret_cast<cuda::DevicePtr>(words->data());
  unsigned long long hold = kHoldNs;
  void* parameters[] = {&out, &hold};
  for (int round = 0; round < 2; ++round) {
    context.check(green.cuLaunchKernel(function, blocks, 1, 1, kThreads, 1, 1, 0, stream,
                                       static_cast<void**>(parameters), nullptr),
                  "launching the kernel that reads %smid");
  }
  std::vector<unsigned> seen = read_words(context, *words, blocks, stream);
  std::sort(seen.begin(), seen.end());
  seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
  return seen;
}

}  // namespace windrow
