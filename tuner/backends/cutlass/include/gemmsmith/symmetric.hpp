/* CUTLASS 3.x kernels of D = alpha * A.A^T + beta * C, whose D and C are symmetric.
 *
 * Only the tiles that meet the lower triangle are computed. The epilogue stores each twice, the
 * second time with the rows and columns of D exchanged. Where a tile crosses the diagonal, or two
 * tiles do, both stores write the same elements: with the same bits, as element (i, j) adds the
 * terms of (j, i) in the same order, and its C has the same bits.
 */
#pragma once

#include "cutlass/gemm/kernel/tile_scheduler.hpp"
#include "gemmsmith/gemm3x.hpp"
#include "gemmsmith/triangle.hpp"

namespace gemmsmith {

namespace fusion = cutlass::epilogue::fusion;

/* The fusion operation that the collective builder is asked for. */
template <class ElementD, class ElementCompute>
struct Mirrored : fusion::LinearCombination<ElementD, ElementCompute, ElementD, ElementCompute> {};

/* beta * C + alpha * acc, stored in D by CUTLASS and mirrored by the visitor at the root. */
template <class D_, class Compute_, int Stages, class EpilogueTile>
struct MirroredTree {
  using D = D_;
  using Compute = Compute_;
  using Stride = cutlass::gemm::TagToStrideC_t<cutlass::layout::ColumnMajor>;
  using SmemAtom =
      decltype(cutlass::epilogue::collective::detail::sm90_get_epilogue_smem_swizzle_layout_atom<
               Stride, D, EpilogueTile>());
  using CopyOut =
      decltype(cutlass::epilogue::collective::detail::sm90_get_smem_store_op_for_accumulator<
               Stride, D, EpilogueTile>());
  static constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;
  using Scalar = fusion::Sm90ScalarBroadcast<Compute, cute::Stride<cute::_0, cute::_0, int64_t>>;
  using Store = fusion::Sm90AuxStore<Stages, EpilogueTile, D, kRound, Stride, SmemAtom, CopyOut,
                                     128 / cutlass::sizeof_bits<D>::value, false>;
  using Type = fusion::Sm90EVT<
      Store,
      fusion::Sm90EVT<
          fusion::Sm90Compute<cutlass::homogeneous_multiply_add, Compute, Compute, kRound>, Scalar,
          fusion::Sm90SrcFetch<D>,
          fusion::Sm90EVT<fusion::Sm90Compute<cutlass::multiplies, Compute, Compute, kRound>,
                          Scalar, fusion::Sm90AccFetch>>>;
};

template <class Tree>
struct MirroredArguments {
  typename Tree::Compute alpha = 1;
  typename Tree::Compute beta = 0;
  typename Tree::D* mirror = nullptr;
  typename Tree::Stride stride{};

  operator typename Tree::Type::Arguments() const {
    return {{{{beta}}, {}, {{{alpha}}, {}, {}}, {}}, {mirror, stride}};
  }
};

/* Found by its argument where `Gemm3x` copies the scalars. */
template <bool Swapped = false, class Tree>
void set_scalars(MirroredArguments<Tree>& epilogue, gs_arguments const& g) {
  static_assert(!Swapped, "a symmetric result is its own transpose");
  epilogue.alpha = g.alpha;
  epilogue.beta = g.beta;
  epilogue.mirror = static_cast<typename Tree::D*>(g.d);
  set_row_stride(epilogue.stride, g.ldd);
  cute::get<2>(epilogue.stride) = g.batch > 1 ? g.batch_stride_d : 0;
}

struct TriangleScheduler {}; /* the tag that generated kernels name */

/* CUTLASS's persistent scheduler over the clusters' tiles of `Triangle`. What it does not redefine
 * is the same for every order of tiles. */
template <class TileShape, class ClusterShape>
class TriangleTileScheduler : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90 {
  using Base = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90;
  static constexpr int kClusterM = cute::size<0>(ClusterShape{});
  static constexpr int kClusterN = cute::size<1>(ClusterShape{});

 public:
  using Tiles = Triangle<cute::size<0>(TileShape{}) * kClusterM,
                         cute::size<1>(TileShape{}) * kClusterN>;
  using WorkTileInfo = typename Base::WorkTileInfo;
  using Arguments = typename Base::Arguments;

  struct Params : Base::Params {
    Tiles tiles;
    int32_t work = 0; /* clusters' tiles of all batches */
  };

  template <class ProblemShape, class... Rest>
  static Params to_underlying_arguments(ProblemShape problem, TileShape, ClusterShape,
                                        cutlass::KernelHardwareInfo const&,
                                        Arguments const& arguments, Rest const&...) {
    Params params;
    params.tiles = Tiles(cute::size<0>(problem), arguments.max_swizzle_size);
    params.work = params.tiles.tiles * cute::size<3>(problem);
    return params;
  }

  template <class ProblemShape>
  static dim3 get_grid_shape(Params const& params, ProblemShape problem, TileShape tile,
                             ClusterShape cluster, cutlass::KernelHardwareInfo hardware,
                             Arguments arguments) {
    dim3 most = Base::get_grid_shape(params, problem, tile, cluster, hardware, arguments);
    int32_t clusters = most.x * most.y / (kClusterM * kClusterN);
    if (clusters > params.work) clusters = params.work;
    return dim3(kClusterM, kClusterN * clusters, 1);
  }

  TriangleTileScheduler() = default;

  CUTLASS_DEVICE explicit TriangleTileScheduler(Params const& params) : params_(params) {
#if defined(__CUDA_ARCH__)
    work_ = blockIdx.y / kClusterN;
    stride_ = gridDim.y / kClusterN;
#endif
  }

  CUTLASS_DEVICE WorkTileInfo initial_work_tile_info(ClusterShape) const {
    return get_current_work();
  }

  CUTLASS_DEVICE WorkTileInfo get_current_work() const {
    if (work_ >= params_.work) return WorkTileInfo::invalid_work_tile();
    int32_t matrix = work_ / params_.tiles.tiles;
    auto tile = params_.tiles.tile(work_ - matrix * params_.tiles.tiles);
    dim3 block = cute::block_id_in_cluster();
    return {tile.row * kClusterM + int32_t(block.x), tile.column * kClusterN + int32_t(block.y),
            matrix, true};
  }

  CUTLASS_DEVICE void advance_to_next_work(uint32_t count = 1) {
    work_ += stride_ * int32_t(count);
  }

  CUTLASS_DEVICE bool is_last_tile(WorkTileInfo&, uint32_t count = 1) const {
    return work_ + stride_ * int32_t(count) >= params_.work;
  }

  template <class... Pipeline>
  CUTLASS_DEVICE auto fetch_next_work(WorkTileInfo, Pipeline&&...) {
    advance_to_next_work();
    return cute::make_tuple(get_current_work(), true);
  }

 private:
  Params params_;
  int32_t work_ = 0, stride_ = 0;
};

/* A square problem of one matrix. Tiles are written in any order, so D cannot be read as well. */
template <class Kernel, class Traits>
struct SymmetricGemm3x
    : CheckedGemm<Gemm3x<Kernel, Traits, false>, SymmetricGemm3x<Kernel, Traits>> {
  using Base = CheckedGemm<Gemm3x<Kernel, Traits, false>, SymmetricGemm3x<Kernel, Traits>>;

  static int32_t run(gs_arguments const& g, void* workspace, void* stream) {
    bool reads_d = g.d == g.a || (g.beta != 0.0f && g.d == g.c);
    return reads_d ? status_code(cutlass::Status::kErrorInvalidProblem)
                   : Base::run(g, workspace, stream);
  }

  static cutlass::Status check(gs_arguments const& g) {
    using cutlass::Status;
    bool one_matrix = g.a == g.b && g.lda == g.ldb &&
                      (g.batch <= 1 || g.batch_stride_a == g.batch_stride_b);
    if (g.m != g.n || !one_matrix) return Status::kErrorInvalidProblem;
    if (g.m <= 0 || g.batch <= 0 || g.swizzle <= 0) return Status::kErrorInvalidProblem;
    int64_t work = typename Kernel::TileScheduler::Tiles(g.m, g.swizzle).tiles;
    return work * g.batch <= INT32_MAX ? Status::kSuccess : Status::kErrorInvalidProblem;
  }

  static gs_arguments const& product_of(gs_arguments const& g) { return g; }
};

}  // namespace gemmsmith

namespace cutlass::gemm::kernel::detail {

template <class TileShape, class ClusterShape, uint32_t Stages>
struct TileSchedulerSelector<gemmsmith::TriangleScheduler, arch::Sm90, TileShape, ClusterShape,
                             Stages> {
  using Scheduler = gemmsmith::TriangleTileScheduler<TileShape, ClusterShape>;
};

}  // namespace cutlass::gemm::kernel::detail

namespace cutlass::epilogue::fusion {

/* TMA epilogue only. */
template <int StagesC, int StagesD, int FragmentSize, bool ReuseSmemC, bool DelayTmaStore,
          class ElementD, class ElementCompute, class CtaTileShapeMNK, class EpilogueTile>
struct FusionCallbacks<
    Sm90TmaWarpSpecialized<StagesC, StagesD, FragmentSize, ReuseSmemC, DelayTmaStore>,
    gemmsmith::Mirrored<ElementD, ElementCompute>, CtaTileShapeMNK, EpilogueTile>
    : gemmsmith::MirroredTree<ElementD, ElementCompute, StagesD, EpilogueTile>::Type {
  using Operation = gemmsmith::Mirrored<ElementD, ElementCompute>;
  using Tree = gemmsmith::MirroredTree<ElementD, ElementCompute, StagesD, EpilogueTile>;
  using Arguments = gemmsmith::MirroredArguments<Tree>;
  using Impl = typename Tree::Type;
  using Impl::Impl;
};

}  // namespace cutlass::epilogue::fusion
