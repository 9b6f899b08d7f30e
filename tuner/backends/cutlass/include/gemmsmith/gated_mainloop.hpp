/* The mainloop of gated kernels: gate and up are halves of one product.
 *
 * The tile's B has gate rows in its first half and up rows in its second, each half filled by a TMA
 * copy of its own from wherever it lies:
 *
 *   B's tile    [ gate j … j + N/2 | up j … j + N/2 ]      one wgmma operand, N wide
 *   sums        [ columns 0 … N/2  | N/2 … N        ]
 *
 * In a wgmma accumulator columns j and j + N/2 belong to the same thread, so what gates an element
 * lies beside it in registers. Nothing else differs from a plain product: the pipeline, clusters and
 * schedulers are CUTLASS's own. The kernel's N is the product's, gate and up together; a tile N wide
 * gives N/2 columns of D.
 */
#pragma once

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

/* CUTLASS's collective that promotes the sums of FP8 operands to FP32 has no names of its own for
 * what TMA reads, as `GatedMainloop` asks for. */
template <class Base>
struct PromotingMainloop : Base {
  using InternalElementA = typename Base::ElementA;
  using InternalElementB = typename Base::ElementB;
};

}  // namespace gemmsmith
