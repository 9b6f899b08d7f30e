/* CUTLASS 3.x kernels whose D = activation(gate) * up, gate and up halves of one product (SwiGLU,
 * GeGLU), and which store gate and up as well if the backward pass wants them. An FP8 D, for the next
 * product, is multiplied by scale_d and saturated; on demand the kernel notes the largest absolute
 * value before scale_d.
 *
 * D, gate and up leave in boxes of 64 rows by way of shared memory, two buffers a warpgroup, by TMA,
 * which clips what is beyond the matrix.
 */
#pragma once

#include "cute/arch/copy_sm90.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/epilogue/collective/detail.hpp"
#include "cutlass/numeric_conversion.h"
#include "gemmsmith/activations.hpp"
#include "gemmsmith/amax.hpp"
#include "gemmsmith/gated_mainloop.hpp"

namespace gemmsmith {

struct GateFactors {
  float alpha = 1.0f;
  float const* scale_a = nullptr;
  float const* scale_b = nullptr;
};

struct Fp8GateFactors : GateFactors {
  float const* scale_d = nullptr;
  float* amax = nullptr;
};

template <class ElementD>
constexpr bool kIsFp8 = sizeof(ElementD) == 1;

template <class ElementD>
using GateFactorsOf = std::conditional_t<kIsFp8<ElementD>, Fp8GateFactors, GateFactors>;

/* What a launch says to the epilogue. */
template <class ElementD, bool Aux, bool Scaled>
struct GateArguments : GateFactorsOf<ElementD> {
  ElementD* aux = nullptr; /* gate, and up N/2 columns on */
  int64_t ld_aux = 0;
};

/* A box that leaves at once: 64 rows of a warpgroup, and the most columns, at most 128 bytes, that
 * divide a tile's half. */
template <int Half, class ElementD>
struct GateBox {
  static constexpr int kRows = 64;
  static constexpr int kColumns = Half % 128 == 0 && kIsFp8<ElementD> ? 128
                                  : Half % 64 == 0                    ? 64
                                  : Half % 32 == 0                    ? 32
                                                                      : 16;
  static constexpr int kRowBytes = kColumns * int(sizeof(ElementD));
  using Atom = std::conditional_t<
      kRowBytes == 128, cute::GMMA::Layout_K_SW128_Atom<ElementD>,
      std::conditional_t<kRowBytes == 64, cute::GMMA::Layout_K_SW64_Atom<ElementD>,
                         std::conditional_t<kRowBytes == 32, cute::GMMA::Layout_K_SW32_Atom<ElementD>,
                                            cute::GMMA::Layout_K_INTER_Atom<ElementD>>>>;
  using Shape = cute::Shape<cute::Int<kRows>, cute::Int<kColumns>>;
  using Layout = decltype(cute::tile_to_shape(Atom{}, Shape{}));
  static_assert(Half % kColumns == 0 && sizeof(ElementD) <= 2, "boxes of 16-bit or 8-bit elements");

  /* Where an element lies, in bytes: CuTe's swizzle of that atom, which spreads eight rows over all
   * banks. 16 bytes of a row stay together. */
  CUTLASS_HOST_DEVICE static constexpr int at(int row, int column) {
    int place = row * kRowBytes + column * int(sizeof(ElementD));
    return place ^ ((place >> 7 & (kRowBytes / 16 - 1)) << 4);
  }
};

/* TMA's copies. The latter two are D's if there is no aux; FP8 kernels have no aux. */
template <class Copy>
struct GateCopies {
  Copy d, gate, up;
};

template <class Copy>
struct GateCopy {
  Copy d;
};

/* The part of the epilogue that CUTLASS's adapter makes a collective of. */
template <class TileShape, template <class> class Activation, bool Aux, bool Scaled, bool Pingpong,
          class ElementD_>
class GateStore : public WithoutWorkspace {
 public:
  using ElementC = void;
  using ElementD = ElementD_;
  using ElementOutput = ElementD;
  using StrideC = cute::Stride<int64_t, cute::_1, int64_t>;
  using StrideD = StrideC;
  using ThreadEpilogueOp = GateArguments<ElementD, Aux, Scaled>;
  static constexpr bool kHasAux = Aux;

  static constexpr int kHalf = cute::size<1>(TileShape{}) / 2;
  static constexpr int kBuffers = 2;
  static constexpr int kWarpgroups = Pingpong ? 1 : 2; /* that store at once */
  static constexpr int kThreads = cutlass::NumThreadsPerWarpGroup;
  using Box = GateBox<kHalf, ElementD>;

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

  using Copy = decltype(cute::make_tma_copy(
      cute::SM90_TMA_STORE{},
      cute::make_tensor(static_cast<ElementD*>(nullptr),
                        cute::make_layout(cute::Shape<int32_t, int32_t>{},
                                          cute::Stride<int64_t, cute::_1>{})),
      typename Box::Layout{}, typename Box::Shape{}, cute::_1{}));
  struct Params : std::conditional_t<kIsFp8<ElementD>, GateCopy<Copy>, GateCopies<Copy>> {
    GateFactorsOf<ElementD> factors;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& shape, Arguments const& arguments,
                                        void*) {
    int32_t rows = cute::get<0>(shape), columns = cute::get<1>(shape) / 2;
    auto copy_of = [&](ElementD* to, int64_t leading) {
      return cute::make_tma_copy(
          cute::SM90_TMA_STORE{},
          cute::make_tensor(to, cute::make_layout(cute::make_shape(rows, columns),
                                                  cute::make_stride(leading, cute::_1{}))),
          typename Box::Layout{}, typename Box::Shape{}, cute::_1{});
    };
    auto const& thread = arguments.thread;
    auto d = copy_of(arguments.ptr_D, cute::get<0>(arguments.dD));
    if constexpr (kIsFp8<ElementD>) {
      return {{d}, thread};
    } else if constexpr (Aux) {
      return {{d, copy_of(thread.aux, thread.ld_aux), copy_of(thread.aux + columns, thread.ld_aux)},
              thread};
    } else {
      return {{d, d, d}, thread};
    }
  }

  CUTLASS_HOST_DEVICE explicit GateStore(Params const& params) : params_(params) {}

  /* Rows and columns beyond the problem are zeros, which no largest value is. */
  template <class ProblemShape, class Tile, class Coord, class Sums, class TiledMma, class Residue>
  CUTLASS_DEVICE void operator()(ProblemShape shape, Tile, Coord tile, Sums const& sums, TiledMma,
                                 Residue, int thread, char* memory) {
    using namespace cute;
    static_assert(size(TiledMma{}) == kWarpgroups * kThreads, "warpgroups that share a tile");
    static_assert(size<0, 2>(Sums{}) == 2 * kHalf / 8 && size<2>(Sums{}) == 1,
                  "one instruction spans the tile's N");
    auto& shared = *reinterpret_cast<SharedStorage*>(memory);
    int warpgroup = thread / kThreads;
    auto extents = make_shape(get<0>(shape), get<1>(shape) / 2);
    auto const& factors = params_.factors;
    float factor = factors.alpha;
    if constexpr (Scaled) {
      if (factors.scale_a) factor *= *factors.scale_a;
      if (factors.scale_b) factor *= *factors.scale_b;
    }
    int box = 0;
    /* Leaves by `copy`, box after box, what `value` makes of gate and up. */
    auto leave = [&](auto const& tma, auto value) {
      CUTLASS_PRAGMA_UNROLL
      for (int atom = 0; atom < size<1>(sums); ++atom) {
        CUTLASS_PRAGMA_UNROLL
        for (int part = 0; part < kHalf / Box::kColumns; ++part, ++box) {
          ElementD* staged = shared.boxes[warpgroup][box % kBuffers];
          if (box == 0) tma_store_wait<0>(); /* of the tile before */
          else tma_store_wait<kBuffers - 1>();
          cutlass::arch::NamedBarrier::sync(kThreads, warpgroup);
          stage(staged, sums, atom, part, thread, factor, value);
          tma_store_fence();
          cutlass::arch::NamedBarrier::sync(kThreads, warpgroup);
          if (thread % kThreads == 0) {
            auto whole = local_tile(tma.get_tma_tensor(extents), typename Box::Shape{},
                                    make_coord(_, _));
            int row = get<0>(tile) * (size<0>(TileShape{}) / Box::kRows) + atom * kWarpgroups +
                      warpgroup;
            int column = get<1>(tile) * (kHalf / Box::kColumns) + part;
            auto slice = tma.get_slice(_0{});
            Tensor from = make_tensor(make_smem_ptr(staged), typename Box::Layout{});
            copy(tma, slice.partition_S(from), slice.partition_D(whole(_, _, row, column)));
            tma_store_arrive();
          }
        }
      }
    };
    if constexpr (Aux) {
      leave(params_.gate, [](float gate, float) { return gate; });
      leave(params_.up, [](float, float up) { return up; });
    }
    auto gated = [](float gate, float up) { return Activation<float>{}(gate) * up; };
    if constexpr (kIsFp8<ElementD>) {
      float scale_d = factors.scale_d ? *factors.scale_d : 1.0f;
      Largest largest;
      leave(params_.d, [&](float gate, float up) {
        float value = gated(gate, up);
        largest.see(value);
        return scale_d * value;
      });
      if (factors.amax) largest.leave(factors.amax);
    } else {
      leave(params_.d, gated);
    }
  }

 private:
  Params const& params_;

  /* A warp's 16 rows of a box, by 8×8 blocks: of each a thread has two columns in two rows. */
  template <class Sums, class Value>
  CUTLASS_DEVICE static void stage(ElementD* staged, Sums const& sums, int atom, int part,
                                   int thread, float factor, Value value) {
    using namespace cute;
    int lane = thread % 32, first = thread % kThreads / 32 * 16;
    auto pair = [&](int block, int half) {
      int gate = part * (Box::kColumns / 8) + block, up = gate + kHalf / 8;
      cutlass::Array<float, 2> values;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 2; ++j) {
        values[j] = value(factor * sums(make_coord(j, half, gate), atom, 0),
                          factor * sums(make_coord(j, half, up), atom, 0));
      }
      return cutlass::NumericArrayConverter<ElementD, float, 2>{}(values); /* FP8 saturates */
    };
    auto bytes = reinterpret_cast<char*>(staged);
    if constexpr (kIsFp8<ElementD>) {
      /* Two bytes that a thread stores by itself: stmatrix takes elements of 16 bits. */
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < Box::kColumns / 8; ++block) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) {
          auto narrow = pair(block, i);
          int place = Box::at(first + i * 8 + lane / 4, block * 8 + lane % 4 * 2);
          *reinterpret_cast<uint16_t*>(bytes + place) = reinterpret_cast<uint16_t const&>(narrow);
        }
      }
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < Box::kColumns / 8; block += 2) {
        uint32_t packed[4];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) {
          auto narrow = pair(block + i / 2, i % 2);
          packed[i] = reinterpret_cast<uint32_t const&>(narrow);
        }
        /* Lane 8·i + r names the address of row r of block i. */
        int i = lane / 8;
        int row = first + i % 2 * 8 + lane % 8, column = (block + i / 2) * 8;
        SM90_U32x4_STSM_N::copy(packed[0], packed[1], packed[2], packed[3],
                                *reinterpret_cast<uint128_t*>(bytes + Box::at(row, column)));
      }
    }
  }
};

/* The collective. Ping-pong kernels hand the buffers over after every tile. */
template <class TileShape, template <class> class Activation, bool Aux, bool Scaled, bool Pingpong,
          class ElementD>
struct GatedEpilogue
    : cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<
          GateStore<TileShape, Activation, Aux, Scaled, Pingpong, ElementD>> {
  using Store = GateStore<TileShape, Activation, Aux, Scaled, Pingpong, ElementD>;
  using Base = cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<Store>;
  using Base::Base;
  using GmemTiledCopyD = cute::SM90_TMA_STORE;

  CUTLASS_DEVICE static void prefetch_tma_descriptors(typename Store::Params const& params) {
    cute::prefetch_tma_descriptor(params.d.get_tma_descriptor());
    if constexpr (Aux) {
      cute::prefetch_tma_descriptor(params.gate.get_tma_descriptor());
      cute::prefetch_tma_descriptor(params.up.get_tma_descriptor());
    }
  }

  template <class Load, class LoadState, class StorePipeline, class StoreState>
  CUTLASS_DEVICE auto store_tail(Load, LoadState load, StorePipeline, StoreState store) {
    cute::tma_store_wait<0>(); /* the copies still read the buffers */
    return cute::make_tuple(load, store);
  }
};

template <class ElementD, bool Aux, bool Scaled>
constexpr uint32_t kExtrasOf<GateArguments<ElementD, Aux, Scaled>> =
    uint32_t(kGate) | (Aux ? uint32_t(kAux) : 0u) | (Scaled ? uint32_t(kScales) : 0u) |
    (kIsFp8<ElementD> ? uint32_t(kOutputScale) | uint32_t(kAmax) : 0u);

/* Gate and up side by side, in the problem's orientation; TMA stores both. */
template <class ElementD>
Operand gate_and_up(gs_arguments const& g) {
  return {g.aux, g.m, g.n, g.ld_aux, 0, 16 / int(sizeof(ElementD)), int(sizeof(ElementD))};
}

/* Found by its argument where `Gemm3x` fills in the launch. */
template <bool Swapped = false, class ElementD, bool Aux, bool Scaled>
void set_scalars(GateArguments<ElementD, Aux, Scaled>& epilogue, gs_arguments const& g) {
  static_assert(!Swapped, "gate and up lie along the kernel's N");
  epilogue.alpha = g.alpha;
  epilogue.scale_a = g.scale_a;
  epilogue.scale_b = g.scale_b;
  if constexpr (kIsFp8<ElementD>) {
    epilogue.scale_d = g.scale_d;
    epilogue.amax = g.amax;
  }
  epilogue.aux = static_cast<ElementD*>(g.aux);
  epilogue.ld_aux = gate_and_up<ElementD>(g).row_stride();
}

/* The adapter: up and aux are checked beside what every kernel has. */
template <class Kernel, class Traits>
struct GatedGemm3x : CheckedGemm<Gemm3x<Kernel, Traits, false>, GatedGemm3x<Kernel, Traits>> {
  using Product = Gemm3x<Kernel, Traits, false>;
  using ElementB = typename Kernel::ElementB;
  using ElementD = typename Kernel::ElementD;
  static constexpr bool kHasAux = Kernel::CollectiveEpilogue::kHasAux;

  static gs_arguments const& product_of(gs_arguments const& g) { return g; }

  static cutlass::Status check(gs_arguments const& g) {
    using cutlass::Status;
    if (g.batch != 1 || g.beta != 0.0f) return Status::kErrorNotSupported;
    if (!takes_only(g, kExtrasOf<typename Product::EpilogueScalars>)) {
      return Status::kErrorNotSupported;
    }
    if (!g.b_up || g.n % 2 || (kHasAux && !g.aux)) return Status::kErrorInvalidProblem;
    Operand up{g.b_up, g.n, g.k, g.ldb, 0, Traits::AlignmentB, int(sizeof(ElementB))};
    Status status = up.check(1);
    if (status != Status::kSuccess || !kHasAux) return status;
    /* Up begins in the middle of aux's rows. */
    if (g.n / 2 % Traits::AlignmentD) return Status::kErrorMisalignedOperand;
    return gate_and_up<ElementD>(g).check(1);
  }
};

}  // namespace gemmsmith
