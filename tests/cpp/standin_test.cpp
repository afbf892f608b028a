// The stand-in for libcuda refuses what CUDA's documentation forbids: each rule is broken once.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "drivers.h"
#include "windrow/libcuda.h"

namespace windrow {
namespace {

using testing::Standin;

class StandinTest : public ::testing::Test {
 protected:
  StandinTest() {
    call.cuDevicePrimaryCtxRetain(&context, 0);
    call.cuCtxPushCurrent(context);
    call.cuMemGetAllocationGranularity(&page, &properties, cuda::kGranularityMinimum);
    call.cuMemAddressReserve(&range, 4 * page, 0, 0, 0);
    call.cuMemCreate(&handle, page, &properties, 0);
    call.cuStreamCreate(&stream, cuda::kStreamNonBlocking);
  }
  ~StandinTest() override {
    call.cuStreamDestroy(stream);
    call.cuMemUnmap(range, page);
    call.cuMemRelease(handle);
    call.cuMemAddressFree(range, 4 * page);
    call.cuCtxPopCurrent(&context);
    call.cuDevicePrimaryCtxRelease(0);
    static_cast<void>(Standin::violations());
  }

  void map_with_access() {
    ASSERT_EQ(call.cuMemMap(range, page, 0, handle, 0), cuda::kSuccess);
    ASSERT_EQ(call.cuMemSetAccess(range, page, &read_write, 1), cuda::kSuccess);
  }
  // The call was refused, and the note says which rule it broke.
  static void expect_broken(cuda::Result result, const std::string& rule) {
    EXPECT_NE(result, cuda::kSuccess);
    EXPECT_NE(Standin::violations().find(rule), std::string::npos) << rule;
  }

  std::shared_ptr<const Libcuda> library = Libcuda::open(WINDROW_STANDIN);
  const cuda::CoreCalls& call = library->calls();
  const cuda::GreenCalls& green = library->green();
  cuda::AllocationProperties properties{.type = cuda::kAllocationPinned,
                                        .handle_types = cuda::kHandlePosixDescriptor,
                                        .location = {.type = cuda::kLocationDevice, .id = 0},
                                        .windows_metadata = nullptr,
                                        .compression = 0,
                                        .rdma_capable = 0,
                                        .usage = 0,
                                        .reserved = {}};
  cuda::AccessDesc read_write{.location = {.type = cuda::kLocationDevice, .id = 0},
                              .flags = cuda::kAccessReadWrite};
  cuda::Context context = nullptr;
  std::size_t page = 0;
  cuda::DevicePtr range = 0;
  cuda::MemoryHandle handle = 0;
  cuda::Stream stream = nullptr;
};

TEST_F(StandinTest, WhatIsAllowedBreaksNoRule) {
  map_with_access();
  *reinterpret_cast<char*>(range) = 'x';
  EXPECT_EQ(call.cuMemsetD8Async(range, 7, page, stream), cuda::kSuccess);
  EXPECT_EQ(call.cuStreamSynchronize(stream), cuda::kSuccess);
  EXPECT_EQ(*reinterpret_cast<char*>(range), 7);
  EXPECT_EQ(Standin::violations(), "");
}

TEST_F(StandinTest, AnOffsetThatIsNot0) {
  expect_broken(call.cuMemMap(range, page, page, handle, 0), "offset that is not 0");
}

TEST_F(StandinTest, AMappingSmallerOrLargerThanItsMemory) {
  expect_broken(call.cuMemMap(range, 2 * page, 0, handle, 0), "not as large as its memory");
}

TEST_F(StandinTest, SizesThatAreNoMultipleOfTheGranularity) {
  cuda::MemoryHandle odd = 0;
  cuda::DevicePtr at = 0;
  expect_broken(call.cuMemCreate(&odd, page + 1, &properties, 0), "multiple of the granularity");
  expect_broken(call.cuMemAddressReserve(&at, 1, 0, 0, 0), "multiple of the granularity");
  expect_broken(call.cuMemMap(range + 1, page, 0, handle, 0), "multiple of the granularity");
}

TEST_F(StandinTest, AMappingAtAddressesThatAreNotReserved) {
  expect_broken(call.cuMemMap(range + 4 * page, page, 0, handle, 0), "not reserved");
}

TEST_F(StandinTest, AMappingOverAnother) {
  map_with_access();
  expect_broken(call.cuMemMap(range, page, 0, handle, 0), "where something is mapped");
}

TEST_F(StandinTest, AnUnmapOfPartOfAMappingOrOfNone) {
  cuda::MemoryHandle large = 0;
  ASSERT_EQ(call.cuMemCreate(&large, 2 * page, &properties, 0), cuda::kSuccess);
  ASSERT_EQ(call.cuMemMap(range + page, 2 * page, 0, large, 0), cuda::kSuccess);
  expect_broken(call.cuMemUnmap(range + page, page), "whole mappings");
  expect_broken(call.cuMemUnmap(range, page), "whole mappings");
  EXPECT_EQ(call.cuMemUnmap(range + page, 2 * page), cuda::kSuccess);
  call.cuMemRelease(large);
}

TEST_F(StandinTest, AnAccessBeforeItIsGranted) {
  ASSERT_EQ(call.cuMemMap(range, page, 0, handle, 0), cuda::kSuccess);
  expect_broken(call.cuMemsetD8Async(range, 0, page, stream), "not mapped with that access");
  EXPECT_DEATH(*reinterpret_cast<volatile char*>(range) = 1, "");
}

TEST_F(StandinTest, AWriteWhereOnlyReadingIsGranted) {
  ASSERT_EQ(call.cuMemMap(range, page, 0, handle, 0), cuda::kSuccess);
  const cuda::AccessDesc read{.location = read_write.location, .flags = cuda::kAccessRead};
  ASSERT_EQ(call.cuMemSetAccess(range, page, &read, 1), cuda::kSuccess);
  EXPECT_EQ(*reinterpret_cast<volatile char*>(range + 1), 0);
  expect_broken(call.cuMemcpyAsync(range, range, 8, stream), "not mapped with that access");
  EXPECT_DEATH(*reinterpret_cast<volatile char*>(range) = 1, "");
}

TEST_F(StandinTest, AccessOverWhatIsNotMapped) {
  expect_broken(call.cuMemSetAccess(range, page, &read_write, 1), "whole mappings");
}

TEST_F(StandinTest, ACallWithoutACurrentContext) {
  cuda::Context popped = nullptr;
  call.cuCtxPopCurrent(&popped);
  cuda::MemoryHandle none = 0;
  expect_broken(call.cuMemCreate(&none, page, &properties, 0), "without a context current");
  expect_broken(call.cuMemMap(range, page, 0, handle, 0), "without a context current");
  call.cuCtxPushCurrent(popped);
}

TEST_F(StandinTest, AMappingOfAReleasedHandle) {
  cuda::MemoryHandle gone = 0;
  call.cuMemCreate(&gone, page, &properties, 0);
  call.cuMemRelease(gone);
  expect_broken(call.cuMemMap(range, page, 0, gone, 0), "released or never was");
  expect_broken(call.cuMemRelease(gone), "released twice");
}

TEST_F(StandinTest, AnUnmapUnderPendingWork) {
  map_with_access();
  ASSERT_EQ(call.cuMemsetD8Async(range, 1, page, stream), cuda::kSuccess);
  expect_broken(call.cuMemUnmap(range, page), "pending work");
  call.cuStreamSynchronize(stream);
  EXPECT_EQ(call.cuMemUnmap(range, page), cuda::kSuccess);
}

TEST_F(StandinTest, AnEventIsNotReadyUntilItsWorkIsDone) {
  map_with_access();
  cuda::Event event = nullptr;
  call.cuEventCreate(&event, cuda::kEventDisableTiming);
  call.cuMemsetD8Async(range, 5, page, stream);
  call.cuEventRecord(event, stream);
  EXPECT_EQ(call.cuEventQuery(event), cuda::kNotReady);
  EXPECT_EQ(*reinterpret_cast<volatile char*>(range + 1), 0);
  EXPECT_EQ(call.cuEventQuery(event), cuda::kSuccess);
  EXPECT_EQ(*reinterpret_cast<volatile char*>(range + 1), 5);
  call.cuEventDestroy(event);
  expect_broken(call.cuEventQuery(event), "invalid event");
}

TEST_F(StandinTest, AnEventOnAStreamOfAnotherContext) {
  const cuda::Context foreign = Standin::foreign_context();
  ASSERT_EQ(call.cuCtxPushCurrent(foreign), cuda::kSuccess);
  cuda::Event event = nullptr;
  call.cuEventCreate(&event, cuda::kEventDisableTiming);
  EXPECT_EQ(call.cuEventRecord(event, nullptr), cuda::kSuccess) << "its own default stream";
  expect_broken(call.cuEventRecord(event, stream), "a stream of another context");
  expect_broken(library->record_context()(context, event), "another context than its own");
  call.cuEventDestroy(event);
  cuda::Context popped = nullptr;
  call.cuCtxPopCurrent(&popped);
}

TEST_F(StandinTest, AnEventBehindAContextWaitsForAllItsStreams) {
  map_with_access();
  cuda::Stream other = nullptr;
  call.cuStreamCreate(&other, cuda::kStreamNonBlocking);
  cuda::Event event = nullptr;
  call.cuEventCreate(&event, cuda::kEventDisableTiming);
  call.cuMemsetD8Async(range, 5, 1, other);
  call.cuMemsetD8Async(range + 1, 6, 1, nullptr);
  ASSERT_EQ(library->record_context()(context, event), cuda::kSuccess);
  call.cuMemsetD8Async(range, 7, 1, other);
  EXPECT_EQ(call.cuEventQuery(event), cuda::kNotReady);
  EXPECT_EQ(call.cuEventSynchronize(event), cuda::kSuccess);
  EXPECT_EQ(reinterpret_cast<volatile char*>(range)[0], 5);
  EXPECT_EQ(reinterpret_cast<volatile char*>(range)[1], 6);
  call.cuEventDestroy(event);
  call.cuStreamDestroy(other);
}

TEST_F(StandinTest, ACallThatIsNewerThanTheDriver) {
  const testing::StandinSetting old("WINDROW_STANDIN_CUDA", "12040");
  using Get = cuda::Result (*)(const char*, void**, int, unsigned long long, int*);
  void* handle_of = ::dlopen(WINDROW_STANDIN, RTLD_NOW | RTLD_LOCAL);
  const auto get = reinterpret_cast<Get>(::dlsym(handle_of, "cuGetProcAddress_v2"));
  void* found = nullptr;
  EXPECT_EQ(get("cuInit", &found, 12050, 0, nullptr), cuda::kInvalidValue);
  EXPECT_EQ(get("cuInit", &found, 12040, 0, nullptr), cuda::kSuccess);
  EXPECT_EQ(get("cuGreenCtxStreamCreate", &found, 12040, 0, nullptr), cuda::kNotFound);
}

TEST_F(StandinTest, ADescriptorImportedTwice) {
  int fd = -1;
  ASSERT_EQ(call.cuMemExportToShareableHandle(&fd, handle, cuda::kHandlePosixDescriptor, 0),
            cuda::kSuccess);
  const auto import = [&](int from, cuda::MemoryHandle* into) {
    return call.cuMemImportFromShareableHandle(
        into, reinterpret_cast<void*>(static_cast<std::intptr_t>(from)),
        cuda::kHandlePosixDescriptor);
  };
  cuda::MemoryHandle first = 0;
  cuda::MemoryHandle second = 0;
  EXPECT_EQ(import(fd, &first), cuda::kSuccess);
  expect_broken(import(fd, &second), "imported twice");
  const int copy = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  EXPECT_EQ(import(copy, &second), cuda::kSuccess);
  call.cuMemRelease(first);
  call.cuMemRelease(second);
  ::close(fd);
  ::close(copy);
  expect_broken(import(0, &first), "not exported memory");
}

TEST_F(StandinTest, AReservationFreedWithMappingsOrInPart) {
  map_with_access();
  expect_broken(call.cuMemAddressFree(range, 4 * page), "still has mappings");
  expect_broken(call.cuMemAddressFree(range, page), "one whole reservation");
}

TEST_F(StandinTest, AContextReleasedTooOften) {
  call.cuDevicePrimaryCtxRelease(0);
  const auto kept = Standin::counts().contexts;
  for (long long i = 0; i < kept; ++i) {
    call.cuDevicePrimaryCtxRelease(0);
  }
  expect_broken(call.cuDevicePrimaryCtxRelease(0), "more often than retained");
  for (long long i = 0; i <= kept; ++i) {
    call.cuDevicePrimaryCtxRetain(&context, 0);
  }
}

TEST_F(StandinTest, WhatIsLeftIsCounted) {
  const auto before = Standin::counts();
  cuda::MemoryHandle more = 0;
  cuda::DevicePtr at = 0;
  call.cuMemCreate(&more, page, &properties, 0);
  call.cuMemAddressReserve(&at, page, 0, 0, 0);
  call.cuMemMap(at, page, 0, more, 0);
  const auto after = Standin::counts();
  EXPECT_EQ(after.handles, before.handles + 1);
  EXPECT_EQ(after.reservations, before.reservations + 1);
  EXPECT_EQ(after.mappings, before.mappings + 1);
  call.cuMemUnmap(at, page);
  call.cuMemAddressFree(at, page);
  call.cuMemRelease(more);
  EXPECT_EQ(Standin::counts().handles, before.handles);
}

TEST_F(StandinTest, NewMemoryIsNotClean) {
  map_with_access();
  EXPECT_NE(*reinterpret_cast<volatile unsigned char*>(range), 0);
}

TEST_F(StandinTest, ASplitOfASplitAndADescriptionOfTwiceTheSameSms) {
  cuda::DeviceResource all{};
  ASSERT_EQ(green.cuDeviceGetDevResource(0, &all, cuda::kResourceSm), cuda::kSuccess);
  std::array<cuda::DeviceResource, 2> groups{};
  unsigned count = 2;
  ASSERT_EQ(green.cuDevSmResourceSplitByCount(groups.data(), &count, &all, nullptr, 0, 9),
            cuda::kSuccess);
  EXPECT_EQ(groups[0].sm.count, 16U);  // rounded up to the alignment
  expect_broken(green.cuDevSmResourceSplitByCount(groups.data(), &count, &groups[0], nullptr, 0, 8),
                "came from a split");
  cuda::ResourceDesc desc = nullptr;
  std::array<cuda::DeviceResource, 2> twice{groups[0], groups[0]};
  expect_broken(green.cuDevResourceGenerateDesc(&desc, twice.data(), 2), "overlap");
}

TEST_F(StandinTest, GreenContextsWantTheirFlagsAndTheirStreamsOutliveThemDetached) {
  cuda::DeviceResource all{};
  cuda::DeviceResource group{};
  unsigned count = 1;
  green.cuDeviceGetDevResource(0, &all, cuda::kResourceSm);
  green.cuDevSmResourceSplitByCount(&group, &count, &all, nullptr, 0, 8);
  cuda::ResourceDesc desc = nullptr;
  green.cuDevResourceGenerateDesc(&desc, &group, 1);
  cuda::GreenContext made = nullptr;
  expect_broken(green.cuGreenCtxCreate(&made, desc, 0, 0), "without a default stream");
  ASSERT_EQ(green.cuGreenCtxCreate(&made, desc, 0, cuda::kGreenDefaultStream), cuda::kSuccess);
  cuda::Stream inside = nullptr;
  expect_broken(green.cuGreenCtxStreamCreate(&inside, made, 0, 0), "not non-blocking");
  green.cuGreenCtxStreamCreate(&inside, made, cuda::kStreamNonBlocking, 0);
  map_with_access();
  green.cuGreenCtxDestroy(made);
  expect_broken(call.cuMemsetD8Async(range, 0, 1, inside), "green context is destroyed");
  call.cuStreamDestroy(inside);
}

TEST(StandinStartTest, ACallBeforeCuInit) {
  // In a process of its own, for others here have called cuInit.
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        void* library = ::dlopen(WINDROW_STANDIN, RTLD_NOW | RTLD_LOCAL);
        using Get = cuda::Result (*)(const char*, void**, int, unsigned long long, int*);
        void* count = nullptr;
        reinterpret_cast<Get>(::dlsym(library, "cuGetProcAddress_v2"))("cuDeviceGetCount", &count,
                                                                       12050, 0, nullptr);
        int devices = 0;
        const auto result = reinterpret_cast<cuda::Result (*)(int*)>(count)(&devices);
        ::_exit(result == cuda::kNotInitialized ? 7 : 1);
      },
      ::testing::ExitedWithCode(7), "");
}

// Captures: what CUDA forbids meanwhile is refused, and the capture is lost.
class StandinCapture : public StandinTest {
 protected:
  StandinCapture() {
    call.cuStreamCreate(&other, cuda::kStreamNonBlocking);
    call.cuEventCreate(&event, 0);
    map_with_access();
  }
  ~StandinCapture() override {
    call.cuEventDestroy(event);
    call.cuStreamDestroy(other);
  }
  // Ends it; returns whether there is a graph.
  bool survives(cuda::Stream captured) {
    void* graph = nullptr;
    const bool is_made = Standin::end_capture(captured, &graph) == cuda::kSuccess;
    if (is_made) {
      EXPECT_EQ(Standin::destroy_graph(graph), cuda::kSuccess);
    }
    return is_made;
  }

  cuda::Stream other = nullptr;
  cuda::Event event = nullptr;
};

TEST_F(StandinCapture, WorkOfACapturedStreamRunsWithItsGraphAndNotBefore) {
  *reinterpret_cast<char*>(range) = 1;
  ASSERT_EQ(Standin::begin_capture(stream, 0), cuda::kSuccess);
  EXPECT_EQ(call.cuMemsetD8Async(range, 7, page, stream), cuda::kSuccess);
  void* graph = nullptr;
  ASSERT_EQ(Standin::end_capture(stream, &graph), cuda::kSuccess);
  call.cuStreamSynchronize(stream);
  EXPECT_EQ(*reinterpret_cast<char*>(range), 1);
  for (int run = 0; run < 2; ++run) {
    *reinterpret_cast<char*>(range) = 1;
    EXPECT_EQ(Standin::launch_graph(graph, other), cuda::kSuccess);
    call.cuStreamSynchronize(other);
    EXPECT_EQ(*reinterpret_cast<char*>(range), 7);
  }
  EXPECT_EQ(Standin::destroy_graph(graph), cuda::kSuccess);
  EXPECT_EQ(Standin::violations(), "");
}

TEST_F(StandinCapture, AGraphOverMemoryThatIsNotMappedAnyMore) {
  ASSERT_EQ(Standin::begin_capture(stream, 0), cuda::kSuccess);
  call.cuMemsetD8Async(range, 7, page, stream);
  void* graph = nullptr;
  ASSERT_EQ(Standin::end_capture(stream, &graph), cuda::kSuccess);
  ASSERT_EQ(call.cuMemUnmap(range, page), cuda::kSuccess);
  expect_broken(Standin::launch_graph(graph, stream), "not mapped with that access");
  map_with_access();
  EXPECT_EQ(Standin::launch_graph(graph, stream), cuda::kSuccess);
  call.cuStreamSynchronize(stream);
  EXPECT_EQ(Standin::destroy_graph(graph), cuda::kSuccess);
}

TEST_F(StandinCapture, CallsThatMayInterfereInTheCapturingThread) {
  cuda::MemoryHandle made = 0;
  cuda::DevicePtr at = 0;
  const std::vector<std::pair<const char*, std::function<cuda::Result()>>> calls{
      {"cuMemMap", [&] { return call.cuMemMap(range + page, page, 0, handle, 0); }},
      {"cuMemUnmap", [&] { return call.cuMemUnmap(range, page); }},
      {"cuMemSetAccess", [&] { return call.cuMemSetAccess(range, page, &read_write, 1); }},
      {"cuMemCreate", [&] { return call.cuMemCreate(&made, page, &properties, 0); }},
      {"cuMemRelease", [&] { return call.cuMemRelease(handle); }},
      {"cuMemAddressReserve", [&] { return call.cuMemAddressReserve(&at, page, 0, 0, 0); }},
      {"cuEventQuery", [&] { return call.cuEventQuery(event); }},
      {"cuEventSynchronize", [&] { return call.cuEventSynchronize(event); }},
      {"cuStreamSynchronize", [&] { return call.cuStreamSynchronize(other); }},
  };
  for (const auto& [name, forbidden] : calls) {
    for (const int mode : {0, 1}) {
      ASSERT_EQ(Standin::begin_capture(stream, mode), cuda::kSuccess);
      expect_broken(forbidden(), std::string(name) + " while a stream captures");
      EXPECT_FALSE(survives(stream)) << name;
    }
  }
  static_cast<void>(Standin::violations());
}

TEST_F(StandinCapture, ARelaxedCaptureOrThreadIsLetAlone) {
  int relaxed = 2;
  ASSERT_EQ(Standin::begin_capture(stream, relaxed), cuda::kSuccess);
  EXPECT_EQ(call.cuEventQuery(event), cuda::kSuccess);
  EXPECT_TRUE(survives(stream));
  ASSERT_EQ(Standin::begin_capture(stream, 0), cuda::kSuccess);
  Standin::exchange_mode(&relaxed);
  EXPECT_EQ(call.cuEventQuery(event), cuda::kSuccess);
  Standin::exchange_mode(&relaxed);
  EXPECT_TRUE(survives(stream));
  EXPECT_EQ(Standin::violations(), "");
}

TEST_F(StandinCapture, OtherThreadsAreHeldToAGlobalCaptureOnly) {
  for (const int mode : {0, 1}) {
    ASSERT_EQ(Standin::begin_capture(stream, mode), cuda::kSuccess);
    cuda::Result found = cuda::kSuccess;
    std::thread([&] {
      call.cuCtxPushCurrent(context);
      found = call.cuEventQuery(event);
      cuda::Context popped = nullptr;
      call.cuCtxPopCurrent(&popped);
    }).join();
    EXPECT_EQ(found == cuda::kSuccess, mode == 1);
    EXPECT_EQ(survives(stream), mode == 1);
  }
  static_cast<void>(Standin::violations());
}

TEST_F(StandinCapture, AnEventBehindTheWholeContextEndsEveryCapture) {
  for (const int mode : {0, 1, 2}) {
    ASSERT_EQ(Standin::begin_capture(stream, mode), cuda::kSuccess);
    ASSERT_EQ(Standin::begin_capture(other, mode), cuda::kSuccess);
    cuda::Result found = cuda::kSuccess;
    std::thread([&] { found = library->record_context()(context, event); }).join();
    expect_broken(found, "cuCtxRecordEvent while a stream of the context captures");
    EXPECT_FALSE(survives(stream));
    EXPECT_FALSE(survives(other));
  }
}

TEST_F(StandinCapture, TheStreamItselfCannotBeWaitedForNorAnEventOfIt) {
  ASSERT_EQ(Standin::begin_capture(stream, 2), cuda::kSuccess);
  expect_broken(call.cuStreamSynchronize(stream), "a stream that captures");
  EXPECT_FALSE(survives(stream));
  ASSERT_EQ(Standin::begin_capture(stream, 2), cuda::kSuccess);
  EXPECT_EQ(call.cuEventRecord(event, stream), cuda::kSuccess);
  expect_broken(call.cuEventQuery(event), "an event that a capture has");
  expect_broken(call.cuEventSynchronize(event), "an event that a capture has");
  EXPECT_TRUE(survives(stream));
}

TEST_F(StandinCapture, TheDefaultStreamBesideABlockingStreamThatCaptures) {
  cuda::Stream blocking = nullptr;
  call.cuStreamCreate(&blocking, 0);
  ASSERT_EQ(Standin::begin_capture(stream, 2), cuda::kSuccess);
  EXPECT_EQ(call.cuEventRecord(event, nullptr), cuda::kSuccess) << "it is not behind that stream";
  EXPECT_TRUE(survives(stream));
  ASSERT_EQ(Standin::begin_capture(blocking, 2), cuda::kSuccess);
  expect_broken(call.cuEventRecord(event, nullptr), "while a blocking stream captures");
  EXPECT_FALSE(survives(blocking));
  ASSERT_EQ(Standin::begin_capture(blocking, 2), cuda::kSuccess);
  expect_broken(call.cuMemsetD8Async(range, 7, page, nullptr), "while a blocking stream captures");
  EXPECT_FALSE(survives(blocking));
  expect_broken(Standin::begin_capture(nullptr, 0), "a capture of the default stream");
  call.cuStreamSynchronize(nullptr);
  call.cuStreamDestroy(blocking);
}

TEST_F(StandinCapture, ACaptureIsEndedByTheThreadThatBeganIt) {
  ASSERT_EQ(Standin::begin_capture(stream, 1), cuda::kSuccess);
  cuda::Result found = cuda::kSuccess;
  std::thread([&] {
    call.cuCtxPushCurrent(context);
    void* graph = nullptr;
    found = Standin::end_capture(stream, &graph);
    cuda::Context popped = nullptr;
    call.cuCtxPopCurrent(&popped);
  }).join();
  expect_broken(found, "that another thread began");
  expect_broken(Standin::begin_capture(stream, 1), "a stream that captures");
  EXPECT_TRUE(survives(stream));
  void* graph = nullptr;
  expect_broken(Standin::end_capture(stream, &graph), "was not begun");
}

}  // namespace
}  // namespace windrow
