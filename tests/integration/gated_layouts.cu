/* What gated kernels assume about CuTe's layouts, checked on the host, and the TMA descriptors
 * that it asks the driver for, printed: one line each, as cuTensorMapEncodeTiled gets them. */
#include <cstdio>
#include <cstdlib>

#include "gemmsmith/gated3x.hpp"

extern "C" CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType type, cuuint32_t rank,
                                           void* address, const cuuint64_t* extents,
                                           const cuuint64_t* strides, const cuuint32_t* box,
                                           const cuuint32_t*, CUtensorMapInterleave,
                                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                           CUtensorMapFloatOOBfill) {
  int bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
  std::printf("map %llx swizzle %d", static_cast<unsigned long long>(
                                         reinterpret_cast<uintptr_t>(address)), int(swizzle));
  for (cuuint32_t i = 0; i < rank; ++i) {
    std::printf(" %llu/%llu/%u", static_cast<unsigned long long>(extents[i]),
                static_cast<unsigned long long>(i ? strides[i - 1] : bytes), box[i]);
  }
  std::printf("\n");
  return CUDA_SUCCESS;
}

static void require(bool holds, char const* what) {
  if (holds) return;
  std::printf("not so: %s\n", what);
  std::exit(1);
}

/* `at` is asked for an FP8 element, and for the first of the 16 bytes that stmatrix writes. */
template <class Box>
void check_box() {
  auto box = cute::as_position_independent_swizzle_layout(typename Box::Layout{});
  constexpr int kElementBytes = Box::kRowBytes / Box::kColumns;
  constexpr int kTogether = kElementBytes == 1 ? 1 : 16 / kElementBytes;
  for (int row = 0; row < Box::kRows; ++row) {
    for (int column = 0; column < Box::kColumns; ++column) {
      int first = column / kTogether * kTogether;
      int at = Box::at(row, first) / kElementBytes + column - first;
      require(box(row, column) == at, "an element's place in a box");
    }
  }
}

template <int N>
void check_fp8() {
  using namespace cute;
  using Element = cutlass::float_e4m3_t;
  using Store = gemmsmith::GateStore<Shape<_128, Int<N>, _128>, gemmsmith::activation::silu, false,
                                     true, true, Element>;
  check_box<typename Store::Box>();
  typename Store::Arguments arguments{};
  arguments.ptr_D = reinterpret_cast<Element*>(0x40000);
  get<0>(arguments.dD) = 528;
  Store::to_underlying_arguments(make_shape(1000, 2 * 512, 640, 1), arguments, nullptr);
}

template <int M, int N, int ClusterM, bool Pingpong>
void check() {
  using namespace cute;
  using Element = cutlass::bfloat16_t;
  using Tile = Shape<Int<M>, Int<N>, _64>;
  using Schedule = std::conditional_t<Pingpong, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                                      cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
  using Collective = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cutlass::layout::RowMajor, 8,
      Element, cutlass::layout::ColumnMajor, 8, float, Tile, Shape<Int<ClusterM>, _1, _1>,
      cutlass::gemm::collective::StageCount<3>, Schedule>::CollectiveOp;
  using Mainloop = gemmsmith::GatedMainloop<Collective>;
  using Epilogue = gemmsmith::GatedEpilogue<Tile, gemmsmith::activation::silu, true, false,
                                            Pingpong, Element>;
  using Box = typename Epilogue::Store::Box;
  constexpr int kHalf = Mainloop::kHalf, kWarpgroups = Epilogue::Store::kWarpgroups;
  std::printf("tile %d %d cluster %d\n", M, N, ClusterM);

  auto whole = as_position_independent_swizzle_layout(typename Collective::SmemLayoutB{});
  auto halves = as_position_independent_swizzle_layout(typename Mainloop::SmemLayoutHalf{});
  for (int stage = 0; stage < 3; ++stage) {
    for (int n = 0; n < N; ++n) {
      for (int k = 0; k < 64; ++k) {
        require(whole(n, k, stage) == halves(n % kHalf, k, 2 * stage + n / kHalf), "halves of B");
      }
    }
  }
  check_box<Box>();
  typename Collective::TiledMma mma;
  for (int thread = 0; thread < size(mma); ++thread) {
    auto places = mma.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<M>, Int<N>>{}));
    int lane = thread % 32, warpgroup = thread / 128;
    require(size<1>(places) * kWarpgroups * 64 == M && size<2>(places) == 1, "rows of a tile");
    for (int atom = 0; atom < size<1>(places); ++atom) {
      for (int block = 0; block < N / 8; ++block) {
        for (int i = 0; i < 2; ++i) {
          for (int j = 0; j < 2; ++j) {
            auto place = places(make_coord(j, i, block), atom, 0);
            int row = (atom * kWarpgroups + warpgroup) * 64 + thread % 128 / 32 * 16 + i * 8;
            require(get<0>(place) == row + lane / 4, "row of a sum");
            require(get<1>(place) == block * 8 + lane % 4 * 2 + j, "column of a sum");
          }
        }
      }
    }
  }

  auto at = [](uintptr_t place) { return reinterpret_cast<Element*>(place); };
  auto shape = make_shape(1000, 2 * 504, 520, 1);
  typename Mainloop::Arguments mainloop{};
  mainloop.ptr_A = at(0x10000);
  mainloop.ptr_B = at(0x20000);
  mainloop.ptr_up = at(0x30000);
  get<0>(mainloop.dA) = 528;
  get<0>(mainloop.dB) = 1040;
  Mainloop::to_underlying_arguments(shape, mainloop, nullptr);
  typename Epilogue::Store::Arguments epilogue{};
  epilogue.thread.aux = at(0x50000);
  epilogue.thread.ld_aux = 1016;
  epilogue.ptr_D = at(0x40000);
  get<0>(epilogue.dD) = 512;
  Epilogue::Store::to_underlying_arguments(shape, epilogue, nullptr);
}

int main() {
  check<128, 192, 2, true>();
  check<256, 128, 1, false>();
  check_fp8<256>();
  check_fp8<128>();
  check_fp8<192>();
  check_fp8<96>();
}
