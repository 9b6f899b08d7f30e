/* What gated_fp8_3x.hpp takes for granted of CuTe's layouts, checked on the host, and the TMA
 * descriptors of D that it asks the driver for, printed: one line each. */
#include <cstdio>
#include <cstdlib>

#include "gemmsmith/gated_fp8_3x.hpp"

extern "C" CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t rank,
                                           void* address, const cuuint64_t* extents,
                                           const cuuint64_t* strides, const cuuint32_t* box,
                                           const cuuint32_t*, CUtensorMapInterleave,
                                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                           CUtensorMapFloatOOBfill) {
  std::printf("map %llx swizzle %d", static_cast<unsigned long long>(
                                         reinterpret_cast<uintptr_t>(address)), int(swizzle));
  for (cuuint32_t i = 0; i < rank; ++i) {
    std::printf(" %llu/%llu/%u", static_cast<unsigned long long>(extents[i]),
                static_cast<unsigned long long>(i ? strides[i - 1] : 1), box[i]);
  }
  std::printf("\n");
  return CUDA_SUCCESS;
}

template <int N>
void check() {
  using namespace cute;
  using Element = cutlass::float_e4m3_t;
  using Tile = Shape<_128, Int<N>, _128>;
  using Store = gemmsmith::GateFp8Store<Tile, gemmsmith::SiLU, true, Element>;
  using Box = typename Store::Box;
  auto box = as_position_independent_swizzle_layout(typename Box::Layout{});
  for (int row = 0; row < Box::kRows; ++row) {
    for (int column = 0; column < Box::kColumns; ++column) {
      if (box(row, column) != Box::at(row, column)) {
        std::printf("not so: place of %d, %d\n", row, column);
        std::exit(1);
      }
    }
  }
  typename Store::Arguments arguments{};
  arguments.ptr_D = reinterpret_cast<Element*>(0x40000);
  get<0>(arguments.dD) = 528;
  Store::to_underlying_arguments(make_shape(1000, 2 * 512, 640, 1), arguments, nullptr);
}

int main() {
  check<256>();
  check<128>();
  check<192>();
  check<96>();
}
