/* What gated CUTLASS 3.x kernels (gated3x.hpp) of FP8 operands may have: sums that are promoted, and
 * a D that is FP8 too, for the next product, D = scale_d * activation(gate) * up, saturated, and on
 * demand the largest absolute value before scale_d.
 *
 * D leaves in boxes as there. A thread has two neighbouring columns of a row, two bytes, which it
 * stores by itself: matrices of stmatrix have elements of 16 bits.
 */
#pragma once

#include "gemmsmith/amax.hpp"
#include "gemmsmith/gated3x.hpp"

namespace gemmsmith {

/* CUTLASS's collective that promotes the sums of FP8 operands to FP32 has no names of its own for
 * what TMA reads, as `GatedMainloop` asks for. */
template <class Base>
struct PromotingMainloop : Base {
  using InternalElementA = typename Base::ElementA;
  using InternalElementB = typename Base::ElementB;
};

/* What a launch says to the epilogue. */
struct GateFp8Arguments {
  float alpha = 1.0f;
  float const* scale_a = nullptr;
  float const* scale_b = nullptr;
  float const* scale_d = nullptr;
  float* amax = nullptr;
};

/* A box that leaves at once: 64 rows of a warpgroup, as many columns as divide a tile's half. */
template <int Half, class ElementD>
struct GateFp8Box {
  static constexpr int kRows = 64;
  static constexpr int kColumns = Half % 128 == 0  ? 128
                                  : Half % 64 == 0 ? 64
                                  : Half % 32 == 0 ? 32
                                                   : 16;
  using Atom = std::conditional_t<
      kColumns == 128, cute::GMMA::Layout_K_SW128_Atom<ElementD>,
      std::conditional_t<kColumns == 64, cute::GMMA::Layout_K_SW64_Atom<ElementD>,
                         std::conditional_t<kColumns == 32, cute::GMMA::Layout_K_SW32_Atom<ElementD>,
                                            cute::GMMA::Layout_K_INTER_Atom<ElementD>>>>;
  using Shape = cute::Shape<cute::Int<kRows>, cute::Int<kColumns>>;
  using Layout = decltype(cute::tile_to_shape(Atom{}, Shape{}));
  static_assert(Half % kColumns == 0 && sizeof(ElementD) == 1, "boxes of 8-bit elements");

  /* Where an element lies, in bytes: CuTe's swizzle of that atom, as in `GateBox`. */
  CUTLASS_HOST_DEVICE static constexpr int at(int row, int column) {
    int place = row * kColumns + column;
    return place ^ ((place >> 7 & (kColumns / 16 - 1)) << 4);
  }
};

/* The part of the epilogue that CUTLASS's adapter makes a collective of. */
template <class TileShape, template <class> class Activation, bool Pingpong, class ElementD_>
class GateFp8Store {
 public:
  using ElementC = void;
  using ElementD = ElementD_;
  using ElementOutput = ElementD;
  using StrideC = cute::Stride<int64_t, cute::_1, int64_t>;
  using StrideD = StrideC;
  using ThreadEpilogueOp = GateFp8Arguments;
  static constexpr bool kHasAux = false;

  static constexpr int kHalf = cute::size<1>(TileShape{}) / 2;
  static constexpr int kBuffers = 2;
  static constexpr int kWarpgroups = Pingpong ? 1 : 2; /* that store at once */
  static constexpr int kThreads = cutlass::NumThreadsPerWarpGroup;
  using Box = GateFp8Box<kHalf, ElementD>;

  struct SharedStorage {
    alignas(1024) ElementD boxes[kWarpgroups][kBuffers][Box::kRows * Box::kColumns];
  };

  struct Arguments {
    ThreadEpilogueOp thread{};
    ElementC const* ptr_C = nullptr;
    StrideC dC{};
    ElementD* ptr_D = nullptr;
    StrideD dD{};
  };

  struct Params {
    using Copy = decltype(cute::make_tma_copy(
        cute::SM90_TMA_STORE{},
        cute::make_tensor(static_cast<ElementD*>(nullptr),
                          cute::make_layout(cute::Shape<int32_t, int32_t>{},
                                            cute::Stride<int64_t, cute::_1>{})),
        typename Box::Layout{}, typename Box::Shape{}, cute::_1{}));
    Copy d;
    ThreadEpilogueOp thread;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& shape, Arguments const& arguments,
                                        void*) {
    int32_t rows = cute::get<0>(shape), columns = cute::get<1>(shape) / 2;
    auto d = cute::make_tma_copy(
        cute::SM90_TMA_STORE{},
        cute::make_tensor(arguments.ptr_D,
                          cute::make_layout(cute::make_shape(rows, columns),
                                            cute::make_stride(cute::get<0>(arguments.dD),
                                                              cute::_1{}))),
        typename Box::Layout{}, typename Box::Shape{}, cute::_1{});
    return {d, arguments.thread};
  }

  template <class ProblemShape>
  static size_t get_workspace_size(ProblemShape const&, Arguments const&) {
    return 0;
  }

  template <class ProblemShape>
  static cutlass::Status initialize_workspace(ProblemShape const&, Arguments const&, void*,
                                              cudaStream_t, cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }

  template <class ProblemShape>
  static bool can_implement(ProblemShape const&, Arguments const&) {
    return true;
  }

  CUTLASS_HOST_DEVICE explicit GateFp8Store(Params const& params) : params_(params) {}

  /* Rows and columns beyond the problem are zeros, which no largest value is. */
  template <class ProblemShape, class Tile, class Coord, class Sums, class TiledMma, class Residue>
  CUTLASS_DEVICE void operator()(ProblemShape shape, Tile, Coord tile, Sums const& sums, TiledMma,
                                 Residue, int thread, char* memory) {
    using namespace cute;
    static_assert(size(TiledMma{}) == kWarpgroups * kThreads, "warpgroups that share a tile");
    static_assert(size<0, 2>(Sums{}) == 2 * kHalf / 8 && size<2>(Sums{}) == 1,
                  "one instruction spans the tile's N");
    auto& shared = *reinterpret_cast<SharedStorage*>(memory);
    auto const& launch = params_.thread;
    int warpgroup = thread / kThreads;
    auto extents = make_shape(get<0>(shape), get<1>(shape) / 2);
    float factor = launch.alpha;
    if (launch.scale_a) factor *= *launch.scale_a;
    if (launch.scale_b) factor *= *launch.scale_b;
    float scale_d = launch.scale_d ? *launch.scale_d : 1.0f;
    Largest largest;
    int box = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int atom = 0; atom < size<1>(sums); ++atom) {
      CUTLASS_PRAGMA_UNROLL
      for (int part = 0; part < kHalf / Box::kColumns; ++part, ++box) {
        ElementD* staged = shared.boxes[warpgroup][box % kBuffers];
        if (box == 0) tma_store_wait<0>(); /* of the tile before */
        else tma_store_wait<kBuffers - 1>();
        cutlass::arch::NamedBarrier::sync(kThreads, warpgroup);
        stage(staged, sums, atom, part, thread, factor, scale_d, largest);
        tma_store_fence();
        cutlass::arch::NamedBarrier::sync(kThreads, warpgroup);
        if (thread % kThreads == 0) {
          auto whole =
              local_tile(params_.d.get_tma_tensor(extents), typename Box::Shape{}, make_coord(_, _));
          int row = get<0>(tile) * (size<0>(TileShape{}) / Box::kRows) + atom * kWarpgroups +
                    warpgroup;
          int column = get<1>(tile) * (kHalf / Box::kColumns) + part;
          auto slice = params_.d.get_slice(_0{});
          Tensor from = make_tensor(make_smem_ptr(staged), typename Box::Layout{});
          copy(params_.d, slice.partition_S(from), slice.partition_D(whole(_, _, row, column)));
          tma_store_arrive();
        }
      }
    }
    if (launch.amax) largest.leave(launch.amax);
  }

 private:
  Params const& params_;

  /* A warp's 16 rows of a box, by 8×8 blocks: of each a thread has two columns in two rows. */
  template <class Sums>
  CUTLASS_DEVICE static void stage(ElementD* staged, Sums const& sums, int atom, int part,
                                   int thread, float factor, float scale_d, Largest& largest) {
    using namespace cute;
    int lane = thread % 32, first = thread % kThreads / 32 * 16;
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < Box::kColumns / 8; ++block) {
      int gate = part * (Box::kColumns / 8) + block, up = gate + kHalf / 8;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        cutlass::Array<float, 2> pair;
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 2; ++j) {
          float value = Activation<float>{}(factor * sums(make_coord(j, i, gate), atom, 0)) *
                        (factor * sums(make_coord(j, i, up), atom, 0));
          largest.see(value);
          pair[j] = scale_d * value;
        }
        /* The conversion saturates. */
        auto narrow = cutlass::NumericArrayConverter<ElementD, float, 2>{}(pair);
        int place = Box::at(first + i * 8 + lane / 4, block * 8 + lane % 4 * 2);
        *reinterpret_cast<uint16_t*>(reinterpret_cast<char*>(staged) + place) =
            reinterpret_cast<uint16_t const&>(narrow);
      }
    }
  }
};

/* The collective. Ping-pong kernels hand the buffers over after every tile. */
template <class TileShape, template <class> class Activation, bool Pingpong, class ElementD>
struct GatedFp8Epilogue : cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<
                              GateFp8Store<TileShape, Activation, Pingpong, ElementD>> {
  using Store = GateFp8Store<TileShape, Activation, Pingpong, ElementD>;
  using Base = cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<Store>;
  using Base::Base;
  using GmemTiledCopyD = cute::SM90_TMA_STORE;

  CUTLASS_DEVICE static void prefetch_tma_descriptors(typename Store::Params const& params) {
    cute::prefetch_tma_descriptor(params.d.get_tma_descriptor());
  }

  template <class Load, class LoadState, class StorePipeline, class StoreState>
  CUTLASS_DEVICE auto store_tail(Load, LoadState load, StorePipeline, StoreState store) {
    cute::tma_store_wait<0>(); /* the copies still read the buffers */
    return cute::make_tuple(load, store);
  }
};

template <>
constexpr uint32_t kExtrasOf<GateFp8Arguments> =
    uint32_t(kGate) | uint32_t(kScales) | uint32_t(kOutputScale) | uint32_t(kAmax);

/* Found by its argument where `Gemm3x` fills in the launch. */
template <bool Swapped = false>
void set_scalars(GateFp8Arguments& epilogue, gs_arguments const& g) {
  static_assert(!Swapped, "gate and up lie along the kernel's N");
  epilogue.alpha = g.alpha;
  epilogue.scale_a = g.scale_a;
  epilogue.scale_b = g.scale_b;
  epilogue.scale_d = g.scale_d;
  epilogue.amax = g.amax;
}

}  // namespace gemmsmith
