/* CUTLASS 3.x kernels whose D = activation(gate) * up, gate and up halves of one product (SwiGLU,
 * GeGLU), and which store gate and up as well where the backward pass wants them.
 *
 * The tile's B has gate rows in its first half and up rows in its second, each half filled by a TMA
 * copy of its own from wherever it lies:
 *
 *   B's tile    [ gate j … j + N/2 | up j … j + N/2 ]      one wgmma operand, N wide
 *   sums        [ columns 0 … N/2  | N/2 … N        ]
 *
 * In a wgmma accumulator columns j and j + N/2 belong to the same thread, so what gates an element
 * lies beside it in registers. Nothing else differs from a plain product: the mainloop, its pipeline,
 * clusters and schedulers are CUTLASS's own. The kernel's N is the product's, gate and up together;
 * a tile N wide gives N/2 columns of D.
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
#include "gemmsmith/gemm3x.hpp"

namespace gemmsmith {

/* `Base` is CUTLASS's collective for a tile of gate and up together, B K-major. */
template <class Base>
struct GatedMainloop : Base {
  using typename Base::ElementA;
  using typename Base::ElementB;
  using typename Base::InternalElementA;
  using typename Base::InternalElementB;
  using typename Base::MainloopPipeline;
  using typename Base::PipelineState;
  using typename Base::StrideA;
  using typename Base::StrideB;
  using typename Base::TensorStorage;
  using typename Base::TileShape;
  using ClusterShape = typename Base::DispatchPolicy::ClusterShape;
  using CopyA = typename Base::GmemTiledCopyA;
  using CopyB = typename Base::GmemTiledCopyB;

  static constexpr int kHalf = cute::size<1>(TileShape{}) / 2;
  static constexpr int kTileK = cute::size<2>(TileShape{});
  static constexpr int kStages = Base::DispatchPolicy::Stages;
  using HalfTile = decltype(cute::replace<1>(TileShape{}, cute::Int<kHalf>{}));
  /* A stage's B is two matrices of N/2 rows, one after the other: gate, then up. */
  using SmemLayoutHalf = decltype(cute::tile_to_shape(
      typename Base::SmemLayoutAtomB{},
      cute::make_shape(cute::Int<kHalf>{}, cute::Int<kTileK>{}, cute::Int<2 * kStages>{})));
  static_assert(!kFirstModeContiguous<StrideB>, "B is K-major");
  static_assert(kHalf % 8 == 0, "columns j and j + N/2 belong to one thread");
  static_assert(kTileK == cute::size<1>(typename Base::SmemLayoutAtomB{}),
                "a half is contiguous where rows of the tile are those of a swizzle atom");
  static_assert(cute::cosize_v<SmemLayoutHalf> == cute::cosize_v<typename Base::SmemLayoutB>,
                "the halves are the tile");

  struct Arguments : Base::Arguments {
    ElementB const* ptr_up = nullptr; /* with ptr_B's strides */
  };

  struct Params {
    using TMA_A = typename Base::Params::TMA_A;
    using TMA_B = decltype(cute::make_tma_copy_B_sm90(
        CopyB{},
        cute::make_tensor(static_cast<InternalElementB const*>(nullptr),
                          cute::repeat_like(StrideB{}, int32_t(0)), StrideB{}),
        SmemLayoutHalf{}(cute::_, cute::_, cute::_0{}), HalfTile{}, ClusterShape{}));
    TMA_A tma_load_a;
    TMA_B tma_load_b; /* the gate */
    TMA_B tma_load_up;
    uint32_t tma_transaction_bytes = Base::TmaTransactionBytes;
    uint32_t tma_transaction_bytes_mk = Base::TmaTransactionBytesMK;
    uint32_t tma_transaction_bytes_nk = Base::TmaTransactionBytesNK;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(ProblemShape const& shape, Arguments const& arguments,
                                        void*) {
    using namespace cute;
    auto [M, N, K, L] = append<4>(shape, 1);
    auto of_half = make_layout(make_shape(N / 2, K, L), arguments.dB);
    auto copy_of = [&](ElementB const* from) {
      return make_tma_copy_B_sm90(
          CopyB{}, make_tensor(reinterpret_cast<InternalElementB const*>(from), of_half),
          SmemLayoutHalf{}(_, _, _0{}), HalfTile{}, ClusterShape{});
    };
    Tensor a = make_tensor(reinterpret_cast<InternalElementA const*>(arguments.ptr_A),
                           make_layout(make_shape(M, K, L), arguments.dA));
    Params params{make_tma_copy_A_sm90(CopyA{}, a, typename Base::SmemLayoutA{}(_, _, _0{}),
                                       TileShape{}, ClusterShape{}),
                  copy_of(arguments.ptr_B), copy_of(arguments.ptr_up)};
    return params;
  }

  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    cute::prefetch_tma_descriptor(params.tma_load_a.get_tma_descriptor());
    cute::prefetch_tma_descriptor(params.tma_load_b.get_tma_descriptor());
    cute::prefetch_tma_descriptor(params.tma_load_up.get_tma_descriptor());
  }

  /* Tiles of A, of the gate and of up: as many of each as the product has. */
  template <class ProblemShape>
  CUTLASS_DEVICE auto load_init(ProblemShape const& shape, Params const& params) const {
    using namespace cute;
    using X = Underscore;
    auto [M, N, K, L] = shape;
    auto half = make_shape(N / 2, K, L);
    Tensor a = local_tile(params.tma_load_a.get_tma_tensor(make_shape(M, K, L)), TileShape{},
                          make_coord(_, _, _), Step<_1, X, _1>{});
    Tensor gate = local_tile(params.tma_load_b.get_tma_tensor(half), HalfTile{},
                             make_coord(_, _, _), Step<X, _1, _1>{});
    Tensor up = local_tile(params.tma_load_up.get_tma_tensor(half), HalfTile{},
                           make_coord(_, _, _), Step<X, _1, _1>{});
    return make_tuple(a, gate, up);
  }

  /* As the base's, with one copy more a stage: together they bring as many bytes. */
  template <class Inputs, class Tile, class KTiles>
  CUTLASS_DEVICE void load(Params const& params, MainloopPipeline pipeline, PipelineState write,
                           Inputs const& inputs, Tile const& tile, KTiles k_tile, int k_tiles,
                           int, uint32_t block_rank, TensorStorage& shared) {
    using namespace cute;
    if (!elect_one_sync()) return;
    Tensor sA = make_tensor(make_smem_ptr(shared.smem_A.data()), typename Base::SmemLayoutA{});
    Tensor sB = make_tensor(make_smem_ptr(shared.smem_B.data()), SmemLayoutHalf{});
    constexpr uint32_t kClusterM = get<0>(ClusterShape{});
    uint32_t along_m = block_rank % kClusterM, along_n = block_rank / kClusterM;
    auto copy_a = params.tma_load_a.get_slice(along_n);
    auto copy_gate = params.tma_load_b.get_slice(along_m);
    auto copy_up = params.tma_load_up.get_slice(along_m);
    auto [m, n, k, l] = tile;
    Tensor from_a = copy_a.partition_S(get<0>(inputs)(_, _, m, _, l));
    Tensor from_gate = copy_gate.partition_S(get<1>(inputs)(_, _, n, _, l));
    Tensor from_up = copy_up.partition_S(get<2>(inputs)(_, _, n, _, l));
    Tensor to_a = copy_a.partition_D(sA);
    Tensor to_b = copy_gate.partition_D(sB);

    uint16_t blocks_of_a = 0, blocks_of_b = 0;
    auto block_at = Layout<ClusterShape>{};
    if constexpr (is_same_v<CopyA, SM90_TMA_LOAD_MULTICAST>) {
      for (int each = 0; each < size<1>(block_at); ++each) {
        blocks_of_a |= uint16_t(1) << block_at(along_m, each, _0{});
      }
    }
    if constexpr (is_same_v<CopyB, SM90_TMA_LOAD_MULTICAST>) {
      for (int each = 0; each < size<0>(block_at); ++each) {
        blocks_of_b |= uint16_t(1) << block_at(each, along_n, _0{});
      }
    }
    CUTLASS_PRAGMA_NO_UNROLL
    for (; k_tiles > 0; --k_tiles, ++k_tile, ++write) {
      pipeline.producer_acquire(write);
      auto* barrier = pipeline.producer_get_barrier(write);
      int stage = write.index();
      copy(params.tma_load_a.with(*barrier, blocks_of_a), from_a(_, _, _, *k_tile),
           to_a(_, _, _, stage));
      copy(params.tma_load_b.with(*barrier, blocks_of_b), from_gate(_, _, _, *k_tile),
           to_b(_, _, _, 2 * stage));
      copy(params.tma_load_up.with(*barrier, blocks_of_b), from_up(_, _, _, *k_tile),
           to_b(_, _, _, 2 * stage + 1));
    }
  }

  /* The base's: how B came is nothing to it. Of its parameters it reads the default ones at most. */
  template <class Sums>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState read, Sums& sums, int k_tiles,
                          int thread, TensorStorage& shared, Params const&) {
    Base::mma(pipeline, read, sums, k_tiles, thread, shared, typename Base::Params{});
  }
};

/* What a launch says to the epilogue. */
template <class ElementD, bool Aux, bool Scaled>
struct GateArguments {
  float alpha = 1.0f;
  float const* scale_a = nullptr;
  float const* scale_b = nullptr;
  ElementD* aux = nullptr; /* gate, and up N/2 columns on */
  int64_t ld_aux = 0;
};

/* A box that leaves at once: 64 rows of a warpgroup, as many columns as divide a tile's half. */
template <int Half, class ElementD>
struct GateBox {
  static constexpr int kRows = 64;
  static constexpr int kColumns = Half % 64 == 0 ? 64 : Half % 32 == 0 ? 32 : 16;
  static constexpr int kRowBytes = kColumns * int(sizeof(ElementD));
  using Atom = std::conditional_t<
      kColumns == 64, cute::GMMA::Layout_K_SW128_Atom<ElementD>,
      std::conditional_t<kColumns == 32, cute::GMMA::Layout_K_SW64_Atom<ElementD>,
                         cute::GMMA::Layout_K_SW32_Atom<ElementD>>>;
  using Shape = cute::Shape<cute::Int<kRows>, cute::Int<kColumns>>;
  using Layout = decltype(cute::tile_to_shape(Atom{}, Shape{}));
  static_assert(Half % kColumns == 0 && sizeof(ElementD) == 2, "boxes of 16-bit elements");

  /* Where 16 bytes of a row start, in bytes: CuTe's swizzle of that atom, which spreads eight rows
   * over all banks. */
  CUTLASS_HOST_DEVICE static constexpr int at(int row, int column) {
    int place = row * kRowBytes + column * int(sizeof(ElementD));
    return place ^ ((place >> 7 & (kRowBytes / 16 - 1)) << 4);
  }
};

/* The part of the epilogue that CUTLASS's adapter makes a collective of. */
template <class TileShape, template <class> class Activation, bool Aux, bool Scaled, bool Pingpong,
          class ElementD_>
class GateStore {
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

  struct Params {
    using Copy = decltype(cute::make_tma_copy(
        cute::SM90_TMA_STORE{},
        cute::make_tensor(static_cast<ElementD*>(nullptr),
                          cute::make_layout(cute::Shape<int32_t, int32_t>{},
                                            cute::Stride<int64_t, cute::_1>{})),
        typename Box::Layout{}, typename Box::Shape{}, cute::_1{}));
    Copy d, gate, up; /* the latter two are D's where there is no aux */
    float alpha;
    float const* scale_a;
    float const* scale_b;
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
    Params params{d, d, d, thread.alpha, thread.scale_a, thread.scale_b};
    if constexpr (Aux) {
      params.gate = copy_of(thread.aux, thread.ld_aux);
      params.up = copy_of(thread.aux + columns, thread.ld_aux);
    }
    return params;
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

  CUTLASS_HOST_DEVICE explicit GateStore(Params const& params) : params_(params) {}

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
    float factor = params_.alpha;
    if constexpr (Scaled) {
      if (params_.scale_a) factor *= *params_.scale_a;
      if (params_.scale_b) factor *= *params_.scale_b;
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
    leave(params_.d, [](float gate, float up) { return Activation<float>{}(gate) * up; });
  }

 private:
  Params const& params_;

  /* A warp's 16 rows of a box, by 8×8 blocks. */
  template <class Sums, class Value>
  CUTLASS_DEVICE static void stage(ElementD* staged, Sums const& sums, int atom, int part,
                                   int thread, float factor, Value value) {
    using namespace cute;
    int lane = thread % 32, first = thread % kThreads / 32 * 16;
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < Box::kColumns / 8; block += 2) {
      uint32_t packed[4];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        int gate = part * (Box::kColumns / 8) + block + i / 2, up = gate + kHalf / 8;
        float pair[2];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 2; ++j) {
          pair[j] = value(factor * sums(make_coord(j, i % 2, gate), atom, 0),
                          factor * sums(make_coord(j, i % 2, up), atom, 0));
        }
        packed[i] = pack(pair[0], pair[1]);
      }
      /* Lane 8·i + r names the address of row r of block i. */
      int i = lane / 8;
      int row = first + i % 2 * 8 + lane % 8, column = (block + i / 2) * 8;
      auto to = reinterpret_cast<char*>(staged) + Box::at(row, column);
      SM90_U32x4_STSM_N::copy(packed[0], packed[1], packed[2], packed[3],
                              *reinterpret_cast<uint128_t*>(to));
    }
  }

  CUTLASS_DEVICE static uint32_t pack(float low, float high) {
    cutlass::NumericArrayConverter<ElementD, float, 2> convert;
    cutlass::Array<float, 2> pair;
    pair[0] = low;
    pair[1] = high;
    auto narrow = convert(pair);
    return reinterpret_cast<uint32_t const&>(narrow);
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
    uint32_t(kGate) | (Aux ? uint32_t(kAux) : 0u) | (Scaled ? uint32_t(kScales) : 0u);

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
  epilogue.aux = static_cast<ElementD*>(g.aux);
  epilogue.ld_aux = gate_and_up<ElementD>(g).row_stride();
}

/* The adapter: up and aux are checked beside what every kernel has. */
template <class Kernel, class Traits>
struct GatedGemm3x {
  using Product = Gemm3x<Kernel, Traits, false>;
  using ElementB = typename Kernel::ElementB;
  using ElementD = typename Kernel::ElementD;
  static constexpr bool kHasAux = Kernel::CollectiveEpilogue::kHasAux;

  static int32_t describe(gs_kernel_info& info) { return Product::describe(info); }

  static int32_t can_implement(gs_arguments const& g) {
    cutlass::Status status = check(g);
    return status == cutlass::Status::kSuccess ? Product::can_implement(g) : status_code(status);
  }

  static int64_t workspace_bytes(gs_arguments const& g) {
    cutlass::Status status = check(g);
    return status == cutlass::Status::kSuccess ? Product::workspace_bytes(g)
                                               : -int64_t(status_code(status));
  }

  static int32_t run(gs_arguments const& g, void* workspace, void* stream) {
    cutlass::Status status = check(g);
    return status == cutlass::Status::kSuccess ? Product::run(g, workspace, stream)
                                               : status_code(status);
  }

 private:
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
