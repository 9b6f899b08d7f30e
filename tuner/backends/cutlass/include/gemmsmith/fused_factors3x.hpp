/* CUTLASS 3.x kernels whose epilogue has factors, in one visitor tree:
 *
 *   of columns   D = s[n] * (alpha * acc + bias[n]) + residual, and what s multiplies stored as well
 *   of rows      D = r[m] * (alpha * acc) + bias[n]
 *
 * s has D's type, r is FP32. FP32 throughout; rounded once. Residual, aux and swapped kernels are
 * as in fused3x.hpp: there what the problem has along its columns runs along the rows.
 */
#pragma once

#include "gemmsmith/fused3x.hpp"

namespace gemmsmith {

/* The fusion operation that the collective builder is asked for. `OfColumns`: factors of columns,
 * and a residual; else of rows. */
template <bool OfColumns, bool Bias, bool Aux, bool Scaled, bool Swapped, class ElementD,
          class ElementCompute_>
struct FusedFactors : cutlass::epilogue::fusion::FusionOperation {
  using ElementOutput = ElementD;
  using ElementCompute = ElementCompute_;
  using ElementScalar = ElementCompute_;
  using ElementSource = std::conditional_t<OfColumns, ElementD, void>;
  using ElementBias = ElementD;
  using ElementFactor = std::conditional_t<OfColumns, ElementD, float>;
  using ElementAux = std::conditional_t<Aux, ElementD, void>;
  using GmemLayoutTagAux =
      std::conditional_t<Swapped, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;
  static constexpr bool IsSourceSupported = OfColumns;
  static constexpr bool IsPerRowBiasSupported = Bias && Swapped;
  static constexpr bool IsPerColBiasSupported = Bias && !Swapped;
  static constexpr bool IsAuxOutSupported = Aux;
  static constexpr int AlignmentAux = 128 / cutlass::sizeof_bits<ElementD>::value;
  static constexpr bool kOfColumns = OfColumns;
  static constexpr bool kHasBias = Bias, kHasResidual = OfColumns, kHasAux = Aux;
  static constexpr bool kIsScaled = Scaled, kIsSwapped = Swapped;
  static_assert(OfColumns || !Aux, "the gradient of factors of rows is not computed from aux");
};

/* A vector that runs along the rows of what the kernel computes, or along its columns. */
template <bool AlongRows, class CtaTile, class Element, class Compute>
using VectorNode = std::conditional_t<
    AlongRows,
    fusion::Sm90ColBroadcast<0, CtaTile, Element, Compute,
                             cute::Stride<cute::_1, cute::_0, cute::_0>, 1, false>,
    fusion::Sm90RowBroadcast<0, CtaTile, Element, Compute,
                             cute::Stride<cute::_0, cute::_1, cute::_0>, 1, false>>;

/* The tree, from its leaves up; what is not its root stays in ElementCompute. `Copies` are the
 * shared-memory layout and the copy that the builder chose for aux. */
template <class Op, int StagesD, class CtaTile, class EpilogueTile, class... Copies>
struct FactorsTree {
  using D = typename Op::ElementOutput;
  using Compute = typename Op::ElementCompute;
  using Scalar =
      fusion::Sm90ScalarBroadcast<Compute, cute::Stride<cute::_0, cute::_0, int64_t>,
                                  Op::kIsScaled ? 3 : 1>;
  using Bias = VectorNode<Op::kIsSwapped, CtaTile, typename Op::ElementBias, Compute>;
  using Factor = VectorNode<Op::kOfColumns == Op::kIsSwapped, CtaTile, typename Op::ElementFactor,
                            Compute>;

  static constexpr bool kAddsBiasFirst = Op::kHasBias && Op::kOfColumns;
  using Linear = std::conditional_t<
      kAddsBiasFirst,
      fusion::Sm90EVT<Node<cutlass::homogeneous_multiply_add, Compute, Compute>, Scalar,
                      fusion::Sm90AccFetch, Bias>,
      fusion::Sm90EVT<Node<cutlass::multiplies, Compute, Compute>, Scalar, fusion::Sm90AccFetch>>;

  template <class... Chosen>
  struct Storing {
    using type = Linear;
  };
  template <class SmemLayoutAtom, class CopyOp>
  struct Storing<SmemLayoutAtom, CopyOp> {
    using type = fusion::Sm90EVT<
        fusion::Sm90AuxStore<StagesD, EpilogueTile, D, cutlass::FloatRoundStyle::round_to_nearest,
                             cutlass::gemm::TagToStrideC_t<typename Op::GmemLayoutTagAux>,
                             SmemLayoutAtom, CopyOp, Op::AlignmentAux, false>,
        Linear>;
  };
  using Stored = typename Storing<Copies...>::type;

  using Add = Node<cutlass::homogeneous_multiply_add, D, Compute>;
  using type = std::conditional_t<
      Op::kOfColumns,
      fusion::Sm90EVT<Add, Factor, Stored, fusion::Sm90SrcFetch<typename Op::ElementSource>>,
      std::conditional_t<
          Op::kHasBias, fusion::Sm90EVT<Add, Factor, Linear, Bias>,
          fusion::Sm90EVT<Node<cutlass::multiplies, D, Compute>, Factor, Linear>>>;
};

/* What a launch says to the tree. */
template <class Op, class Tree>
struct FactorsArguments {
  using ElementD = typename Op::ElementOutput;
  using ElementFactor = typename Op::ElementFactor;
  using Scalar = typename Op::ElementScalar;
  using StrideAux = cutlass::gemm::TagToStrideC_t<typename Op::GmemLayoutTagAux>;

  Scalar alpha = Scalar(1);
  Scalar const* scale_a = nullptr;
  Scalar const* scale_b = nullptr;
  ElementD const* bias = nullptr;
  ElementFactor const* factors = nullptr;
  ElementD* aux = nullptr;
  StrideAux stride_aux = {};

  operator typename Tree::type::Arguments() const {
    if constexpr (Op::kHasAux) {
      return {factor(), {linear(), {aux, stride_aux}}, {}, {}};
    } else if constexpr (Op::kOfColumns) {
      return {factor(), linear(), {}, {}};
    } else if constexpr (Op::kHasBias) {
      return {factor(), linear(), {bias, ElementD(0), {}}, {}};
    } else {
      return {factor(), linear(), {}};
    }
  }

 private:
  typename Tree::Factor::Arguments factor() const { return {factors, ElementFactor(0), {}}; }

  typename Tree::Linear::Arguments linear() const {
    if constexpr (Tree::kAddsBiasFirst) {
      return {scalar(), {}, {bias, ElementD(0), {}}, {}};
    } else {
      return {scalar(), {}, {}};
    }
  }

  typename Tree::Scalar::Arguments scalar() const {
    if constexpr (Op::kIsScaled) {
      return {{alpha, Scalar(1), Scalar(1)}, {nullptr, scale_a, scale_b}};
    } else {
      return {{alpha}};
    }
  }
};

template <class Op, class Tree>
constexpr uint32_t kExtrasOf<FactorsArguments<Op, Tree>> =
    (Op::kOfColumns ? uint32_t(kColumnFactors) : uint32_t(kRowFactors)) |
    (Op::kHasBias ? uint32_t(kBias) : 0u) | (Op::kHasAux ? uint32_t(kAux) : 0u) |
    (Op::kIsScaled ? uint32_t(kScales) : 0u);

/* Where the factors lie. */
template <class Op>
void const* factors_of(gs_arguments const& g) {
  return Op::kOfColumns ? g.column_scale : g.row_scale;
}

/* Found by its argument where `Gemm3x` copies the scalars. */
template <bool Swapped = false, class Op, class Tree>
void set_scalars(FactorsArguments<Op, Tree>& epilogue, gs_arguments const& g) {
  using ElementD = typename Op::ElementOutput;
  static_assert(Swapped == Op::kIsSwapped, "orientation of the epilogue");
  epilogue.alpha = g.alpha;
  epilogue.scale_a = g.scale_a;
  epilogue.scale_b = g.scale_b;
  epilogue.bias = static_cast<ElementD const*>(g.bias);
  epilogue.factors = static_cast<typename Op::ElementFactor const*>(factors_of<Op>(g));
  epilogue.aux = static_cast<ElementD*>(g.aux);
  set_row_stride(epilogue.stride_aux, aux_of<Op>(g).row_stride());
}

/* The adapter: `FusedGemm3x`, and the factors are checked. They are read element by element. */
template <class Kernel, class Traits, bool Swapped>
struct FactorsGemm3x {
  using Fused = FusedGemm3x<Kernel, Traits, Swapped>;
  using Op = typename Fused::Op;

  static int32_t describe(gs_kernel_info& info) { return Fused::describe(info); }

  static int32_t can_implement(gs_arguments const& g) {
    cutlass::Status status = check(g);
    return status == cutlass::Status::kSuccess ? Fused::can_implement(g) : status_code(status);
  }

  static int64_t workspace_bytes(gs_arguments const& g) {
    cutlass::Status status = check(g);
    return status == cutlass::Status::kSuccess ? Fused::workspace_bytes(g)
                                               : -int64_t(status_code(status));
  }

  static int32_t run(gs_arguments const& g, void* workspace, void* stream) {
    cutlass::Status status = check(g);
    return status == cutlass::Status::kSuccess ? Fused::run(g, workspace, stream)
                                               : status_code(status);
  }

 private:
  static cutlass::Status check(gs_arguments const& g) {
    using cutlass::Status;
    void const* factors = factors_of<Op>(g);
    if (!factors) return Status::kErrorInvalidProblem;
    return reinterpret_cast<uintptr_t>(factors) % sizeof(typename Op::ElementFactor)
               ? Status::kErrorMisalignedOperand
               : Status::kSuccess;
  }
};

}  // namespace gemmsmith

namespace cutlass::epilogue::fusion {

/* TMA epilogue only. */
template <int StagesC, int StagesD, int FragmentSize, bool ReuseSmemC, bool DelayTmaStore,
          bool OfColumns, bool Bias, bool Aux, bool Scaled, bool Swapped, class ElementD,
          class ElementCompute, class CtaTileShapeMNK, class EpilogueTile, class... Copies>
struct FusionCallbacks<
    Sm90TmaWarpSpecialized<StagesC, StagesD, FragmentSize, ReuseSmemC, DelayTmaStore>,
    gemmsmith::FusedFactors<OfColumns, Bias, Aux, Scaled, Swapped, ElementD, ElementCompute>,
    CtaTileShapeMNK, EpilogueTile, Copies...>
    : gemmsmith::FactorsTree<
          gemmsmith::FusedFactors<OfColumns, Bias, Aux, Scaled, Swapped, ElementD, ElementCompute>,
          StagesD, CtaTileShapeMNK, EpilogueTile, Copies...>::type {
  using Operation =
      gemmsmith::FusedFactors<OfColumns, Bias, Aux, Scaled, Swapped, ElementD, ElementCompute>;
  using Tree =
      gemmsmith::FactorsTree<Operation, StagesD, CtaTileShapeMNK, EpilogueTile, Copies...>;
  using Impl = typename Tree::type;
  using Arguments = gemmsmith::FactorsArguments<Operation, Tree>;
  using Impl::Impl;
};

}  // namespace cutlass::epilogue::fusion
