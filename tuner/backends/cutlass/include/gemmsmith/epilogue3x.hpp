/* `ScaledLinearCombination` for CUTLASS 3.x collectives; see epilogue.hpp. */
#pragma once

#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "gemmsmith/epilogue.hpp"

namespace gemmsmith {

/* The fusion operation that the collective builder is asked for. */
template <class ElementD, class ElementCompute, class ElementC, class ElementScalar>
struct ScaledLinearCombination
    : cutlass::epilogue::fusion::LinearCombination<ElementD, ElementCompute, ElementC,
                                                   ElementScalar> {};

/* beta * C + (alpha * scale_a * scale_b) * acc */
template <class ElementD, class ElementCompute, class ElementC, class ElementScalar>
using ScaledLinearCombinationTree = cutlass::epilogue::fusion::Sm90EVT<
    cutlass::epilogue::fusion::Sm90Compute<cutlass::homogeneous_multiply_add, ElementD,
                                           ElementCompute,
                                           cutlass::FloatRoundStyle::round_to_nearest>,
    cutlass::epilogue::fusion::Sm90ScalarBroadcast<
        ElementScalar, cute::Stride<cute::_0, cute::_0, int64_t>>,
    cutlass::epilogue::fusion::Sm90SrcFetch<ElementC>,
    cutlass::epilogue::fusion::Sm90EVT<
        cutlass::epilogue::fusion::Sm90Compute<cutlass::multiplies, ElementCompute, ElementCompute,
                                               cutlass::FloatRoundStyle::round_to_nearest>,
        cutlass::epilogue::fusion::Sm90ScalarBroadcast<
            ElementScalar, cute::Stride<cute::_0, cute::_0, int64_t>, 3>,
        cutlass::epilogue::fusion::Sm90AccFetch>>;

/* D = alpha * scale_m * scale_n * acc + beta * C, with FP32 factors for each row and column. */
template <class ElementD, class ElementCompute, class ElementC, class ElementScalar>
struct RowScaledLinearCombination
    : cutlass::epilogue::fusion::LinearCombination<ElementD, ElementCompute, ElementC,
                                                   ElementScalar> {};

template <class ElementCompute>
using Product =
    cutlass::epilogue::fusion::Sm90Compute<cutlass::multiplies, ElementCompute, ElementCompute,
                                           cutlass::FloatRoundStyle::round_to_nearest>;

/* beta * C + scale_m * (scale_n * (alpha * acc)) */
template <class TileShape, class ElementD, class ElementCompute, class ElementC,
          class ElementScalar>
using RowScaledLinearCombinationTree = cutlass::epilogue::fusion::Sm90EVT<
    cutlass::epilogue::fusion::Sm90Compute<cutlass::homogeneous_multiply_add, ElementD,
                                           ElementCompute,
                                           cutlass::FloatRoundStyle::round_to_nearest>,
    cutlass::epilogue::fusion::Sm90ScalarBroadcast<
        ElementScalar, cute::Stride<cute::_0, cute::_0, int64_t>>,
    cutlass::epilogue::fusion::Sm90SrcFetch<ElementC>,
    cutlass::epilogue::fusion::Sm90EVT<
        Product<ElementCompute>,
        cutlass::epilogue::fusion::Sm90ColBroadcast<
            0, TileShape, ElementScalar, ElementCompute,
            cute::Stride<cute::_1, cute::_0, int64_t>, 1, false>,
        cutlass::epilogue::fusion::Sm90EVT<
            Product<ElementCompute>,
            cutlass::epilogue::fusion::Sm90RowBroadcast<
                0, TileShape, ElementScalar, ElementCompute,
                cute::Stride<cute::_0, cute::_1, int64_t>, 1, false>,
            cutlass::epilogue::fusion::Sm90EVT<
                Product<ElementCompute>,
                cutlass::epilogue::fusion::Sm90ScalarBroadcast<
                    ElementScalar, cute::Stride<cute::_0, cute::_0, int64_t>>,
                cutlass::epilogue::fusion::Sm90AccFetch>>>>;

}  // namespace gemmsmith

namespace cutlass::epilogue::fusion {

/* TMA epilogue. */
template <int StagesC, int StagesD, int FragmentSize, bool ReuseSmemC, bool DelayTmaStore,
          class ElementD, class ElementCompute, class ElementC, class ElementScalar,
          class CtaTileShapeMNK, class EpilogueTile>
struct FusionCallbacks<
    Sm90TmaWarpSpecialized<StagesC, StagesD, FragmentSize, ReuseSmemC, DelayTmaStore>,
    gemmsmith::ScaledLinearCombination<ElementD, ElementCompute, ElementC, ElementScalar>,
    CtaTileShapeMNK, EpilogueTile>
    : gemmsmith::ScaledLinearCombinationTree<ElementD, ElementCompute, ElementC, ElementScalar> {
  using Impl =
      gemmsmith::ScaledLinearCombinationTree<ElementD, ElementCompute, ElementC, ElementScalar>;
  using Operation =
      gemmsmith::ScaledLinearCombination<ElementD, ElementCompute, ElementC, ElementScalar>;
  using Impl::Impl;

  struct Arguments {
    ElementScalar alpha = ElementScalar(1);
    ElementScalar beta = ElementScalar(0);
    ElementScalar const* scale_a_ptr = nullptr;
    ElementScalar const* scale_b_ptr = nullptr;

    operator typename Impl::Arguments() const {
      return {
          {{beta}},  // beta
          {},        // C
          {
              {{alpha, ElementScalar(1), ElementScalar(1)}, {nullptr, scale_a_ptr, scale_b_ptr}},
              {},  // accumulator
              {},  // multiplies
          },
          {},  // multiply_add
      };
    }
  };
};

/* TMA epilogue only. */
template <int StagesC, int StagesD, int FragmentSize, bool ReuseSmemC, bool DelayTmaStore,
          class ElementD, class ElementCompute, class ElementC, class ElementScalar,
          class CtaTileShapeMNK, class EpilogueTile>
struct FusionCallbacks<
    Sm90TmaWarpSpecialized<StagesC, StagesD, FragmentSize, ReuseSmemC, DelayTmaStore>,
    gemmsmith::RowScaledLinearCombination<ElementD, ElementCompute, ElementC, ElementScalar>,
    CtaTileShapeMNK, EpilogueTile>
    : gemmsmith::RowScaledLinearCombinationTree<CtaTileShapeMNK, ElementD, ElementCompute,
                                                ElementC, ElementScalar> {
  using Impl = gemmsmith::RowScaledLinearCombinationTree<CtaTileShapeMNK, ElementD, ElementCompute,
                                                         ElementC, ElementScalar>;
  using Operation =
      gemmsmith::RowScaledLinearCombination<ElementD, ElementCompute, ElementC, ElementScalar>;
  using Impl::Impl;

  struct Arguments {
    ElementScalar alpha = ElementScalar(1);
    ElementScalar beta = ElementScalar(0);
    ElementScalar const* scale_m_ptr = nullptr;
    ElementScalar const* scale_n_ptr = nullptr;
    int64_t batch_stride_scale_m = 0;
    int64_t batch_stride_scale_n = 0;

    operator typename Impl::Arguments() const {
      return {
          {{beta}},  // beta
          {},        // C
          {
              {scale_m_ptr, ElementScalar(0), {cute::_1{}, cute::_0{}, batch_stride_scale_m}},
              {
                  {scale_n_ptr, ElementScalar(0), {cute::_0{}, cute::_1{}, batch_stride_scale_n}},
                  {
                      {{alpha}},  // alpha
                      {},         // accumulator
                      {},         // multiplies
                  },
                  {},  // multiplies
              },
              {},  // multiplies
          },
          {},  // multiply_add
      };
    }
  };
};

}  // namespace cutlass::epilogue::fusion

namespace cutlass::epilogue::collective {

/* Shared-memory-free epilogue: CUTLASS's own, with the thread-level functor in it. */
template <class OpClass, class TileShapeMNK, class ClusterShapeMNK, class EpilogueTile,
          class ElementAccumulator, class ElementCompute, class ElementC, class LayoutC,
          int AlignmentC, class ElementD, class LayoutD, int AlignmentD>
struct CollectiveBuilder<
    arch::Sm90, OpClass, TileShapeMNK, ClusterShapeMNK, EpilogueTile, ElementAccumulator,
    ElementCompute, ElementC, LayoutC, AlignmentC, ElementD, LayoutD, AlignmentD,
    NoSmemWarpSpecialized,
    gemmsmith::ScaledLinearCombination<ElementD, ElementCompute, ElementC, ElementCompute>, void> {
  using CollectiveOp = detail::Sm90TmaWarpSpecializedAdapter<DefaultEpilogue<
      ElementC, cutlass::detail::TagToStrideC_t<LayoutC>, cutlass::detail::TagToStrideC_t<LayoutD>,
      gemmsmith::thread::ScaledLinearCombination<ElementD, 1, ElementAccumulator, ElementCompute>,
      cutlass::gemm::EpilogueDefault>>;
};

}  // namespace cutlass::epilogue::collective
