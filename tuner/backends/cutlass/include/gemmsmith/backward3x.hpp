/* CUTLASS 3.x kernels with a backward epilogue: the product P = dY·W of the layer after an
 * activation becomes the gradient of what that activation was applied to.
 *
 *   plain   D = P * act'(aux)                          [M, N]
 *           activated = act(aux)                       [M, N], if wanted
 *           bias_gradient = the sum of D's rows        [N], if wanted
 *   gated   aux is [M, 2N], gate | up; D likewise:
 *           D = P * up * act'(gate) | P * act(gate)
 *           activated = act(gate) * up                 [M, N], if wanted
 *
 * FP32 throughout; rounded once. aux, or the gate, takes the place of CUTLASS's C and is loaded as
 * that is; further matrices are loaded and stored by nodes of CUTLASS's own. Rows of a tile that
 * lie beyond M are zeros and add nothing to a sum: there P is zero, and so is what TMA loads of aux.
 *
 * Each tile sums its own rows in a fixed order, and a second kernel adds up the tiles' sums in
 * theirs: no atomics, the same bits every time. Kernels are not swapped.
 */
#pragma once

#include "cutlass/arch/grid_dependency_control.h"
#include "gemmsmith/activations.hpp"
#include "gemmsmith/column_sums.hpp"
#include "gemmsmith/gemm3x.hpp"

namespace gemmsmith {

/* The fusion operation that the collective builder is asked for. */
template <class Slope_, bool Gated, bool Activated, bool BiasGradient, class ElementD,
          class ElementCompute_>
struct Backward : cutlass::epilogue::fusion::FusionOperation {
  using ElementOutput = ElementD;
  using ElementCompute = ElementCompute_;
  using ElementScalar = ElementCompute_;
  using ElementSource = ElementD;
  using Slope = Slope_;
  static constexpr bool IsSourceSupported = true;
  static constexpr int kAlignment = 128 / cutlass::sizeof_bits<ElementD>::value;
  static constexpr int kHalves = Gated ? 2 : 1; /* of aux and D, in matrices of N columns */
  static constexpr bool kIsGated = Gated, kIsActivated = Activated;
  static constexpr bool kHasBiasGradient = BiasGradient;
  static_assert(std::is_same_v<ElementCompute, float>, "computed in FP32");
  static_assert(!(Gated && BiasGradient), "no such epilogue");
};

namespace fusion = cutlass::epilogue::fusion;

/* Computes what its outputs store from the product, aux and, where gated, up. Of `Ops` the first is
 * the product, the second aux; then come up and its gradient, activated, the sum of rows. */
template <class Op, class... Ops>
struct BackwardVisitor : fusion::Sm90VisitorImpl<Ops...> {
  using Base = fusion::Sm90VisitorImpl<Ops...>;
  using Base::Base;

  template <class Callbacks>
  struct ConsumerStoreCallbacks : Callbacks {
    CUTLASS_DEVICE ConsumerStoreCallbacks(Callbacks&& callbacks)
        : Callbacks(cute::forward<Callbacks>(callbacks)) {}

    using Callbacks::callbacks_tuple;

    template <class Accumulator, int Count>
    CUTLASS_DEVICE auto visit(cutlass::Array<Accumulator, Count> const& sums, int epi_v, int epi_m,
                              int epi_n) {
      using D = typename Op::ElementOutput;
      using Values = cutlass::Array<float, Count>;
      auto fetch = [&](auto& op) CUTLASS_LAMBDA_FUNC_INLINE {
        auto fetched = op.visit(sums, epi_v, epi_m, epi_n);
        using Fetched = typename decltype(fetched)::Element;
        return cutlass::NumericArrayConverter<float, Fetched, Count>{}(fetched);
      };
      auto store = [&](auto& op, Values const& values) CUTLASS_LAMBDA_FUNC_INLINE {
        op.visit(sums, epi_v, epi_m, epi_n, values);
      };
      constexpr int kActivatedAt = Op::kIsGated ? 4 : 2;
      constexpr int kSumAt = kActivatedAt + Op::kIsActivated;

      Values gradient = fetch(cute::get<0>(callbacks_tuple));
      Values source = fetch(cute::get<1>(callbacks_tuple));
      Values activated;
      typename Op::Slope of;
      if constexpr (Op::kIsGated) {
        Values up = fetch(cute::get<2>(callbacks_tuple));
        Values up_gradient;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Count; ++i) {
          ValueAndSlope gate = of(source[i]);
          up_gradient[i] = gradient[i] * gate.value;
          activated[i] = gate.value * up[i];
          gradient[i] *= gate.slope * up[i];
        }
        store(cute::get<3>(callbacks_tuple), up_gradient);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Count; ++i) {
          ValueAndSlope linear = of(source[i]);
          activated[i] = linear.value;
          gradient[i] *= linear.slope;
        }
      }
      if constexpr (Op::kIsActivated) store(cute::get<kActivatedAt>(callbacks_tuple), activated);
      if constexpr (Op::kHasBiasGradient) store(cute::get<kSumAt>(callbacks_tuple), gradient);
      return cutlass::NumericArrayConverter<D, float, Count>{}(gradient);
    }
  };

  template <bool ReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(
      fusion::detail::ConsumerStoreArgs<Args...> const& args) {
    auto callbacks = Base::template get_consumer_store_callbacks<ReferenceSrc>(args);
    return ConsumerStoreCallbacks<decltype(callbacks)>(cute::move(callbacks));
  }
};

/* The visitor of an operation, and its nodes. */
template <class Op, int StagesC, int StagesD, class CtaTile, class EpilogueTile>
struct BackwardTree {
  using D = typename Op::ElementOutput;
  using Compute = typename Op::ElementCompute;
  using Stride = cutlass::gemm::TagToStrideC_t<cutlass::layout::RowMajor>;
  static constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;
  using SmemAtom =
      decltype(cutlass::epilogue::collective::detail::sm90_get_epilogue_smem_swizzle_layout_atom<
               Stride, D, EpilogueTile>());
  using CopyOut =
      decltype(cutlass::epilogue::collective::detail::sm90_get_smem_store_op_for_accumulator<
               Stride, D, EpilogueTile>());
  using CopyIn = decltype(cutlass::epilogue::collective::detail::sm90_get_smem_load_op_for_source<
                          Stride, D, EpilogueTile>());

  using Product =
      fusion::Sm90EVT<fusion::Sm90Compute<cutlass::multiplies, Compute, Compute, kRound>,
                      fusion::Sm90ScalarBroadcast<Compute>, fusion::Sm90AccFetch>;
  using Source = fusion::Sm90SrcFetch<D>;
  using Load =
      fusion::Sm90AuxLoad<StagesC, EpilogueTile, D, Stride, SmemAtom, CopyIn, Op::kAlignment, false>;
  using Store = fusion::Sm90AuxStore<StagesD, EpilogueTile, D, kRound, Stride, SmemAtom, CopyOut,
                                     Op::kAlignment, false>;
  using Sum = ColumnSums<CtaTile, EpilogueTile>;

  /* Chosen by a tuple of the nodes that there are. */
  template <bool There, class... Nodes>
  using If = std::conditional_t<There, cute::tuple<Nodes...>, cute::tuple<>>;
  template <class... Tuples>
  struct Joined;
  template <class... A, class... B, class... C>
  struct Joined<cute::tuple<A...>, cute::tuple<B...>, cute::tuple<C...>> {
    using type = BackwardVisitor<Op, Product, Source, A..., B..., C...>;
  };
  using type = typename Joined<If<Op::kIsGated, Load, Store>, If<Op::kIsActivated, Store>,
                               If<Op::kHasBiasGradient, Sum>>::type;
};

/* What a launch says to the visitor. */
template <class Op, class Tree>
struct BackwardArguments {
  using ElementD = typename Op::ElementOutput;
  using Scalar = typename Op::ElementScalar;
  using Stride = typename Tree::Stride;

  Scalar alpha = Scalar(1);
  ElementD const* up = nullptr;
  ElementD* up_gradient = nullptr;
  ElementD* activated = nullptr;
  Scalar* row_sums = nullptr;
  Stride stride_aux = {}, stride_d = {}, stride_activated = {};

  operator typename Tree::type::Arguments() const {
    typename Tree::Product::Arguments product{{{alpha}}, {}, {}};
    typename Tree::Load::Arguments load{up, ElementD(0), stride_aux};
    typename Tree::Store::Arguments up_out{up_gradient, stride_d};
    typename Tree::Store::Arguments activated_out{activated, stride_activated};
    typename Tree::Sum::Arguments sum{row_sums};
    if constexpr (Op::kIsGated && Op::kIsActivated) {
      return {product, {}, load, up_out, activated_out};
    } else if constexpr (Op::kIsGated) {
      return {product, {}, load, up_out};
    } else if constexpr (Op::kIsActivated && Op::kHasBiasGradient) {
      return {product, {}, activated_out, sum};
    } else if constexpr (Op::kIsActivated) {
      return {product, {}, activated_out};
    } else if constexpr (Op::kHasBiasGradient) {
      return {product, {}, sum};
    } else {
      return {product, {}};
    }
  }
};

template <class Op, class Tree>
constexpr uint32_t kExtrasOf<BackwardArguments<Op, Tree>> =
    uint32_t(kAux) | (Op::kIsActivated ? uint32_t(kActivated) : 0u) |
    (Op::kHasBiasGradient ? uint32_t(kBiasGradient) : 0u);

/* aux, D and activated in the problem's orientation; TMA loads and stores them. */
template <class Op>
Operand backward_operand(const void* data, gs_arguments const& g, int halves, int64_t leading) {
  return {data, g.m, int64_t(halves) * g.n, leading, 0, Op::kAlignment,
          int(sizeof(typename Op::ElementOutput))};
}

template <class Op>
Operand aux_read(gs_arguments const& g) {
  return backward_operand<Op>(g.aux, g, Op::kHalves, g.ld_aux);
}

template <class Op>
Operand gradient_written(gs_arguments const& g) {
  return backward_operand<Op>(g.d, g, Op::kHalves, g.ldd);
}

template <class Op>
Operand activated_written(gs_arguments const& g) {
  return backward_operand<Op>(g.activated, g, 1, g.ld_activated);
}

/* Found by its argument where `Gemm3x` copies the scalars. */
template <bool Swapped = false, class Op, class Tree>
void set_scalars(BackwardArguments<Op, Tree>& epilogue, gs_arguments const& g) {
  using ElementD = typename Op::ElementOutput;
  static_assert(!Swapped, "backward epilogues are not swapped");
  epilogue.alpha = g.alpha;
  epilogue.up = static_cast<ElementD const*>(g.aux) + g.n;
  epilogue.up_gradient = static_cast<ElementD*>(g.d) + g.n;
  epilogue.activated = static_cast<ElementD*>(g.activated);
  epilogue.row_sums = static_cast<float*>(g.bias_gradient); /* the tiles': see `product_of` */
  set_row_stride(epilogue.stride_aux, aux_read<Op>(g).row_stride());
  set_row_stride(epilogue.stride_d, gradient_written<Op>(g).row_stride());
  set_row_stride(epilogue.stride_activated, activated_written<Op>(g).row_stride());
}

template <class ElementD>
struct SumRowsParams {
  float const* partials; /* [rows, pitch] */
  ElementD* sums;        /* [columns] */
  int32_t rows, columns;
  int64_t pitch;
};

constexpr int kSumColumns = 32, kSumSlices = 16;

/* A block adds up 32 columns: each warp every sixteenth row, the first warp what they have found. */
template <class ElementD>
__global__ void __launch_bounds__(kSumColumns* kSumSlices)
    sum_rows(CUTLASS_GRID_CONSTANT SumRowsParams<ElementD> const params) {
  __shared__ float found[kSumSlices][kSumColumns];
  cutlass::arch::launch_dependent_grids();
  int lane = threadIdx.x % kSumColumns, slice = threadIdx.x / kSumColumns;
  int column = blockIdx.x * kSumColumns + lane;
  bool inside = column < params.columns;
  float sum = 0.0f;
  cutlass::arch::wait_on_dependent_grids();
  if (inside) {
#pragma unroll 4
    for (int row = slice; row < params.rows; row += kSumSlices) {
      sum += __ldcg(params.partials + row * params.pitch + column);
    }
  }
  found[slice][lane] = sum;
  __syncthreads();
  if (slice != 0 || !inside) return;
  for (int other = 1; other < kSumSlices; ++other) sum += found[other][lane];
  params.sums[column] = static_cast<ElementD>(sum);
}

/* The adapter: what an epilogue reads and writes is checked, and aux becomes C. */
template <class Kernel, class Traits, bool Swapped>
struct BackwardGemm3x {
  using Product = Gemm3x<Kernel, Traits, Swapped>;
  using Op = typename Kernel::CollectiveEpilogue::ThreadEpilogueOp;
  using ElementD = typename Op::ElementOutput;
  using SumRows = Launcher<SumRowsParams<ElementD>, sum_rows<ElementD>, 0, Start::kOverlaps>;
  static_assert(!Swapped, "backward epilogues are not swapped");

  static int32_t describe(gs_kernel_info& info) { return Product::describe(info); }

  static int32_t can_implement(gs_arguments const& g) {
    cutlass::Status status = check(g);
    return status == cutlass::Status::kSuccess
               ? Product::can_implement(product_of(g, g.bias_gradient))
               : status_code(status);
  }

  static int64_t workspace_bytes(gs_arguments const& g) {
    cutlass::Status status = check(g);
    if (status != cutlass::Status::kSuccess) return -int64_t(status_code(status));
    int64_t bytes = Product::workspace_bytes(product_of(g, g.bias_gradient));
    return bytes < 0 ? bytes : bytes + partial_bytes(g);
  }

  static int32_t run(gs_arguments const& g, void* workspace, void* stream) {
    cutlass::Status status = check(g);
    if (status != cutlass::Status::kSuccess) return status_code(status);
    if constexpr (!Op::kHasBiasGradient) {
      return Product::run(product_of(g, nullptr), workspace, stream);
    } else {
      if (workspace == nullptr) return status_code(cutlass::Status::kErrorWorkspaceNull);
      void* beyond = static_cast<char*>(workspace) + partial_bytes(g);
      int32_t code = Product::run(product_of(g, workspace), beyond, stream);
      if (code != 0) return code;
      DeviceScope device(g.device);
      if (device.error() != cudaSuccess) return status_code(device.error());
      SumRowsParams<ElementD> params{static_cast<float const*>(workspace),
                                     static_cast<ElementD*>(g.bias_gradient),
                                     int32_t(tiles_m(g)), g.n, pitch(g)};
      auto blocks = static_cast<unsigned>((g.n + kSumColumns - 1) / kSumColumns);
      return status_code(SumRows::launch(params, dim3(blocks), dim3(kSumColumns * kSumSlices),
                                         dim3(1), g.device, static_cast<cudaStream_t>(stream)));
    }
  }

 private:
  static constexpr int64_t kTileM = cute::size<0>(typename Kernel::TileShape{});
  static constexpr int64_t kTileN = cute::size<1>(typename Kernel::TileShape{});

  static cutlass::Status check(gs_arguments const& g) {
    using cutlass::Status;
    if (g.batch != 1 || g.beta != 0.0f) return Status::kErrorNotSupported;
    if (!takes_only(g, kExtrasOf<typename Product::EpilogueScalars>)) {
      return Status::kErrorNotSupported;
    }
    if (g.m <= 0 || g.n <= 0) return Status::kErrorInvalidProblem;
    if (!g.aux || (Op::kIsActivated && !g.activated)) return Status::kErrorInvalidProblem;
    if (Op::kHasBiasGradient && !g.bias_gradient) return Status::kErrorInvalidProblem;
    if (reinterpret_cast<uintptr_t>(g.bias_gradient) % sizeof(ElementD)) {
      return Status::kErrorMisalignedOperand;
    }
    Status status = aux_read<Op>(g).check(1);
    if (status == Status::kSuccess) status = gradient_written<Op>(g).check(1);
    if (status == Status::kSuccess && Op::kIsActivated) {
      status = activated_written<Op>(g).check(1);
    }
    return status;
  }

  static int64_t tiles_m(gs_arguments const& g) { return (g.m + kTileM - 1) / kTileM; }

  static int64_t pitch(gs_arguments const& g) { return (g.n + kTileN - 1) / kTileN * kTileN; }

  /* Of the tiles' sums; a multiple of what workspaces are aligned to. */
  static int64_t partial_bytes(gs_arguments const& g) {
    if (!Op::kHasBiasGradient) return 0;
    int64_t bytes = tiles_m(g) * pitch(g) * int64_t(sizeof(float));
    return (bytes + 255) / 256 * 256;
  }

  /* The launch that CUTLASS knows: aux, or its gate, is a C of which there is one, and sums of
   * rows go where the second kernel finds them. */
  static gs_arguments product_of(gs_arguments const& g, void* row_sums) {
    gs_arguments product = g;
    product.c = g.aux;
    product.ldc = g.ld_aux;
    product.beta = 1.0f;
    product.bias_gradient = row_sums;
    return product;
  }
};

}  // namespace gemmsmith

namespace cutlass::epilogue::fusion {

/* TMA epilogue only. */
template <int StagesC, int StagesD, int FragmentSize, bool ReuseSmemC, bool DelayTmaStore,
          class Slope, bool Gated, bool Activated, bool BiasGradient, class ElementD,
          class ElementCompute, class CtaTileShapeMNK, class EpilogueTile>
struct FusionCallbacks<
    Sm90TmaWarpSpecialized<StagesC, StagesD, FragmentSize, ReuseSmemC, DelayTmaStore>,
    gemmsmith::Backward<Slope, Gated, Activated, BiasGradient, ElementD, ElementCompute>,
    CtaTileShapeMNK, EpilogueTile>
    : gemmsmith::BackwardTree<
          gemmsmith::Backward<Slope, Gated, Activated, BiasGradient, ElementD, ElementCompute>,
          StagesC, StagesD, CtaTileShapeMNK, EpilogueTile>::type {
  using Operation =
      gemmsmith::Backward<Slope, Gated, Activated, BiasGradient, ElementD, ElementCompute>;
  using Tree =
      gemmsmith::BackwardTree<Operation, StagesC, StagesD, CtaTileShapeMNK, EpilogueTile>;
  using Impl = typename Tree::type;
  using Arguments = gemmsmith::BackwardArguments<Operation, Tree>;
  using Impl::Impl;
  static_assert(!DelayTmaStore, "the stores of each part are barriers between sums of columns");
};

}  // namespace cutlass::epilogue::fusion
