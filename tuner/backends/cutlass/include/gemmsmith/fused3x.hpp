/* CUTLASS 3.x kernels with an epilogue: D = activation(alpha * acc + bias) + residual, and what the
 * activation is applied to stored as well, in one visitor tree. FP32 throughout; rounded once.
 *
 * The residual takes the place of CUTLASS's C, and is loaded as that is; there is no beta. A kernel
 * without one has a void C, and keeps no shared memory for it. Swapped kernels compute Dᵀ: there a
 * bias runs along the rows, and aux and residual are column-major.
 */
#pragma once

#include "gemmsmith/activations.hpp"
#include "gemmsmith/gemm3x.hpp"

namespace gemmsmith {

/* The fusion operation that the collective builder is asked for. */
template <template <class> class Activation_, bool Bias, bool Residual, bool Aux, bool Scaled,
          bool Swapped, class ElementD, class ElementCompute_>
struct Fused : cutlass::epilogue::fusion::FusionOperation {
  using ElementOutput = ElementD;
  using ElementCompute = ElementCompute_;
  using ElementScalar = ElementCompute_;
  using ElementSource = std::conditional_t<Residual, ElementD, void>;
  using ElementBias = ElementD;
  using ElementAux = std::conditional_t<Aux, ElementD, void>;
  using GmemLayoutTagAux =
      std::conditional_t<Swapped, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;
  static constexpr bool IsSourceSupported = Residual;
  static constexpr bool IsPerRowBiasSupported = Bias && Swapped;
  static constexpr bool IsPerColBiasSupported = Bias && !Swapped;
  static constexpr bool IsAuxOutSupported = Aux;
  static constexpr int AlignmentAux = 128 / cutlass::sizeof_bits<ElementD>::value;
  static constexpr bool kHasBias = Bias, kHasResidual = Residual, kHasAux = Aux;
  static constexpr bool kIsScaled = Scaled, kIsSwapped = Swapped;

  template <class T>
  using Activation = Activation_<T>;
  static constexpr bool kActivates = !std::is_same_v<Activation<float>, Identity<float>>;
  static_assert(Bias || Residual, "nothing follows the product");
  static_assert(!(Aux && !kActivates), "what is stored is D");
  static_assert(!(Residual && kActivates), "no such epilogue");
};

namespace fusion = cutlass::epilogue::fusion;

template <template <class> class Function, class Output, class Compute>
using Node =
    fusion::Sm90Compute<Function, Output, Compute, cutlass::FloatRoundStyle::round_to_nearest>;

/* The tree, from its leaves up; what is not its root stays in ElementCompute. `Copies` are the
 * shared-memory layout and the copy that the builder chose for aux. */
template <class Op, int StagesD, class CtaTile, class EpilogueTile, class... Copies>
struct FusedTree {
  using D = typename Op::ElementOutput;
  using Compute = typename Op::ElementCompute;
  using Scalar =
      fusion::Sm90ScalarBroadcast<Compute, cute::Stride<cute::_0, cute::_0, int64_t>,
                                  Op::kIsScaled ? 3 : 1>;
  using Bias = std::conditional_t<
      Op::kIsSwapped,
      fusion::Sm90ColBroadcast<0, CtaTile, D, Compute,
                               cute::Stride<cute::_1, cute::_0, cute::_0>, 1, false>,
      fusion::Sm90RowBroadcast<0, CtaTile, D, Compute,
                               cute::Stride<cute::_0, cute::_1, cute::_0>, 1, false>>;

  static constexpr bool kEndsLinear = !Op::kActivates && !Op::kHasResidual;
  using LinearOutput = std::conditional_t<kEndsLinear, D, Compute>;
  using Linear = std::conditional_t<
      Op::kHasBias,
      fusion::Sm90EVT<Node<cutlass::homogeneous_multiply_add, LinearOutput, Compute>, Scalar,
                      fusion::Sm90AccFetch, Bias>,
      fusion::Sm90EVT<Node<cutlass::multiplies, LinearOutput, Compute>, Scalar,
                      fusion::Sm90AccFetch>>;

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

  using type = std::conditional_t<
      Op::kActivates,
      fusion::Sm90EVT<Node<Op::template Activation, D, Compute>, Stored>,
      std::conditional_t<Op::kHasResidual,
                         fusion::Sm90EVT<Node<cutlass::plus, D, Compute>,
                                         fusion::Sm90SrcFetch<typename Op::ElementSource>, Linear>,
                         Linear>>;
};

/* What a launch says to the tree. */
template <class Op, class Tree>
struct FusedArguments {
  using ElementD = typename Op::ElementOutput;
  using Scalar = typename Op::ElementScalar;
  using StrideAux = cutlass::gemm::TagToStrideC_t<typename Op::GmemLayoutTagAux>;

  Scalar alpha = Scalar(1);
  Scalar const* scale_a = nullptr;
  Scalar const* scale_b = nullptr;
  ElementD const* bias = nullptr;
  ElementD* aux = nullptr;
  StrideAux stride_aux = {};

  operator typename Tree::type::Arguments() const {
    if constexpr (Op::kActivates && Op::kHasAux) {
      return {{linear(), {aux, stride_aux}}, {}};
    } else if constexpr (Op::kActivates) {
      return {linear(), {}};
    } else if constexpr (Op::kHasResidual) {
      return {{}, linear(), {}};
    } else {
      return linear();
    }
  }

 private:
  typename Tree::Linear::Arguments linear() const {
    if constexpr (Op::kHasBias) {
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
constexpr uint32_t kExtrasOf<FusedArguments<Op, Tree>> =
    (Op::kHasBias ? uint32_t(kBias) : 0u) | (Op::kHasAux ? uint32_t(kAux) : 0u) |
    (Op::kIsScaled ? uint32_t(kScales) : 0u);

/* Aux in the problem's orientation; TMA stores it. */
template <class Op>
Operand aux_of(gs_arguments const& g) {
  return {g.aux, g.m, g.n, g.ld_aux, 0, Op::AlignmentAux,
          int(sizeof(typename Op::ElementOutput))};
}

/* Found by its argument where `Gemm3x` copies the scalars. */
template <bool Swapped = false, class Op, class Tree>
void set_scalars(FusedArguments<Op, Tree>& epilogue, gs_arguments const& g) {
  using ElementD = typename Op::ElementOutput;
  static_assert(Swapped == Op::kIsSwapped, "orientation of the epilogue");
  epilogue.alpha = g.alpha;
  epilogue.scale_a = g.scale_a;
  epilogue.scale_b = g.scale_b;
  epilogue.bias = static_cast<ElementD const*>(g.bias);
  epilogue.aux = static_cast<ElementD*>(g.aux);
  set_row_stride(epilogue.stride_aux, aux_of<Op>(g).row_stride());
}

/* The adapter: what an epilogue reads and writes is checked, and its residual becomes C. */
template <class Kernel, class Traits, bool Swapped>
struct FusedGemm3x {
  using Product = Gemm3x<Kernel, Traits, Swapped>;
  using Op = typename Kernel::CollectiveEpilogue::ThreadEpilogueOp;

  static int32_t describe(gs_kernel_info& info) { return Product::describe(info); }

  static int32_t can_implement(gs_arguments const& g) {
    cutlass::Status status = check(g);
    return status == cutlass::Status::kSuccess ? Product::can_implement(product_of(g))
                                               : status_code(status);
  }

  static int64_t workspace_bytes(gs_arguments const& g) {
    cutlass::Status status = check(g);
    return status == cutlass::Status::kSuccess ? Product::workspace_bytes(product_of(g))
                                               : -int64_t(status_code(status));
  }

  static int32_t run(gs_arguments const& g, void* workspace, void* stream) {
    cutlass::Status status = check(g);
    return status == cutlass::Status::kSuccess ? Product::run(product_of(g), workspace, stream)
                                               : status_code(status);
  }

 private:
  static cutlass::Status check(gs_arguments const& g) {
    using cutlass::Status;
    if (g.batch != 1 || g.beta != 0.0f) return Status::kErrorNotSupported;
    if (!takes_only(g, kExtrasOf<typename Product::EpilogueScalars> |
                           (Op::kHasResidual ? uint32_t(kResidual) : 0u))) {
      return Status::kErrorNotSupported;
    }
    if (Op::kHasBias && !g.bias) return Status::kErrorInvalidProblem;
    if (Op::kHasResidual && !g.residual) return Status::kErrorInvalidProblem;
    if (Op::kHasBias && reinterpret_cast<uintptr_t>(g.bias) % sizeof(typename Op::ElementBias)) {
      return Status::kErrorMisalignedOperand;
    }
    if (!Op::kHasAux) return Status::kSuccess;
    return g.aux ? aux_of<Op>(g).check(1) : Status::kErrorInvalidProblem;
  }

  /* The launch that CUTLASS knows: the residual is a C of which there is one. */
  static gs_arguments product_of(gs_arguments const& g) {
    gs_arguments product = g;
    if (Op::kHasResidual) {
      product.c = g.residual;
      product.ldc = g.ld_residual;
      product.beta = 1.0f;
      product.residual = nullptr;
    }
    return product;
  }
};

}  // namespace gemmsmith

namespace cutlass::epilogue::fusion {

/* TMA epilogue only. */
template <int StagesC, int StagesD, int FragmentSize, bool ReuseSmemC, bool DelayTmaStore,
          template <class> class Activation, bool Bias, bool Residual, bool Aux, bool Scaled,
          bool Swapped, class ElementD, class ElementCompute, class CtaTileShapeMNK,
          class EpilogueTile, class... Copies>
struct FusionCallbacks<
    Sm90TmaWarpSpecialized<StagesC, StagesD, FragmentSize, ReuseSmemC, DelayTmaStore>,
    gemmsmith::Fused<Activation, Bias, Residual, Aux, Scaled, Swapped, ElementD, ElementCompute>,
    CtaTileShapeMNK, EpilogueTile, Copies...>
    : gemmsmith::FusedTree<gemmsmith::Fused<Activation, Bias, Residual, Aux, Scaled, Swapped,
                                            ElementD, ElementCompute>,
                           StagesD, CtaTileShapeMNK, EpilogueTile, Copies...>::type {
  using Operation = gemmsmith::Fused<Activation, Bias, Residual, Aux, Scaled, Swapped, ElementD,
                                     ElementCompute>;
  using Tree = gemmsmith::FusedTree<Operation, StagesD, CtaTileShapeMNK, EpilogueTile, Copies...>;
  using Impl = typename Tree::type;
  using Arguments = gemmsmith::FusedArguments<Operation, Tree>;
  using Impl::Impl;
};

}  // namespace cutlass::epilogue::fusion
