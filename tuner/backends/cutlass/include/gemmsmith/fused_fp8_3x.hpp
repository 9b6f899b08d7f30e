/* CUTLASS 3.x kernels of FP8 operands whose D is FP8 too, for the next product:
 * D = scale_d * activation(alpha * scale_a * scale_b * acc + bias), saturated, and on demand the
 * largest absolute value before scale_d. FP32 throughout; rounded once. The bias has 16 bits.
 */
#pragma once

#include "gemmsmith/amax.hpp"
#include "gemmsmith/fused3x.hpp"

namespace gemmsmith {

/* The fusion operation that the collective builder is asked for. */
template <template <class> class Activation_, bool Swapped, class ElementBias_, class ElementD,
          class ElementCompute_>
struct FusedFp8 : cutlass::epilogue::fusion::FusionOperation {
  using ElementOutput = ElementD;
  using ElementCompute = ElementCompute_;
  using ElementScalar = ElementCompute_;
  using ElementSource = void;
  using ElementBias = ElementBias_;
  static constexpr bool IsSourceSupported = false;
  static constexpr bool IsPerRowBiasSupported = Swapped;
  static constexpr bool IsPerColBiasSupported = !Swapped;
  static constexpr int AlignmentAux = 128 / cutlass::sizeof_bits<ElementD>::value;
  static constexpr bool kHasBias = true, kHasResidual = false, kHasAux = false;
  static constexpr bool kIsSwapped = Swapped;

  template <class T>
  using Activation = Activation_<T>;
  static constexpr bool kActivates = !std::is_same_v<Activation<float>, Identity<float>>;
};

/* The tree, from its leaves up; what is not its root stays in ElementCompute. */
template <class Op, class CtaTile>
struct FusedFp8Tree {
  using Compute = typename Op::ElementCompute;
  using Scalar = fusion::Sm90ScalarBroadcast<
      Compute, cute::Stride<cute::_0, cute::_0, int64_t>, 3>;
  using Bias = std::conditional_t<
      Op::kIsSwapped,
      fusion::Sm90ColBroadcast<0, CtaTile, typename Op::ElementBias, Compute,
                               cute::Stride<cute::_1, cute::_0, cute::_0>, 1, false>,
      fusion::Sm90RowBroadcast<0, CtaTile, typename Op::ElementBias, Compute,
                               cute::Stride<cute::_0, cute::_1, cute::_0>, 1, false>>;
  using Linear = fusion::Sm90EVT<Node<cutlass::homogeneous_multiply_add, Compute, Compute>,
                                 Scalar, fusion::Sm90AccFetch, Bias>;
  using Activated = std::conditional_t<
      Op::kActivates,
      fusion::Sm90EVT<Node<Op::template Activation, Compute, Compute>, Linear>, Linear>;
  /* Conversions to FP8 saturate. */
  using type = fusion::Sm90EVT<Node<cutlass::multiplies, typename Op::ElementOutput, Compute>,
                               fusion::Sm90ScalarBroadcast<Compute>,
                               fusion::Sm90EVT<Amax<CtaTile>, Activated>>;
};

/* What a launch says to the tree. */
template <class Op, class Tree>
struct FusedFp8Arguments {
  using Scalar = typename Op::ElementScalar;
  using ElementBias = typename Op::ElementBias;

  Scalar alpha = Scalar(1);
  Scalar const* scale_a = nullptr;
  Scalar const* scale_b = nullptr;
  Scalar const* scale_d = nullptr;
  ElementBias const* bias = nullptr;
  float* amax = nullptr;

  operator typename Tree::type::Arguments() const {
    return {{{Scalar(1)}, {scale_d}}, {activated(), {amax}}, {}};
  }

 private:
  typename Tree::Activated::Arguments activated() const {
    if constexpr (Op::kActivates) {
      return {linear(), {}};
    } else {
      return linear();
    }
  }

  typename Tree::Linear::Arguments linear() const {
    return {{{alpha, Scalar(1), Scalar(1)}, {nullptr, scale_a, scale_b}},
            {},
            {bias, ElementBias(0), {}},
            {}};
  }
};

template <class Op, class Tree>
constexpr uint32_t kExtrasOf<FusedFp8Arguments<Op, Tree>> =
    uint32_t(kBias) | uint32_t(kScales) | uint32_t(kOutputScale) | uint32_t(kAmax);

/* Found by its argument where `Gemm3x` copies the scalars. */
template <bool Swapped = false, class Op, class Tree>
void set_scalars(FusedFp8Arguments<Op, Tree>& epilogue, gs_arguments const& g) {
  static_assert(Swapped == Op::kIsSwapped, "orientation of the epilogue");
  epilogue.alpha = g.alpha;
  epilogue.scale_a = g.scale_a;
  epilogue.scale_b = g.scale_b;
  epilogue.scale_d = g.scale_d;
  epilogue.bias = static_cast<typename Op::ElementBias const*>(g.bias);
  epilogue.amax = g.amax;
}

}  // namespace gemmsmith

namespace cutlass::epilogue::fusion {

/* TMA epilogue only. */
template <int StagesC, int StagesD, int FragmentSize, bool ReuseSmemC, bool DelayTmaStore,
          template <class> class Activation, bool Swapped, class ElementBias, class ElementD,
          class ElementCompute, class CtaTileShapeMNK, class EpilogueTile>
struct FusionCallbacks<
    Sm90TmaWarpSpecialized<StagesC, StagesD, FragmentSize, ReuseSmemC, DelayTmaStore>,
    gemmsmith::FusedFp8<Activation, Swapped, ElementBias, ElementD, ElementCompute>,
    CtaTileShapeMNK, EpilogueTile>
    : gemmsmith::FusedFp8Tree<
          gemmsmith::FusedFp8<Activation, Swapped, ElementBias, ElementD, ElementCompute>,
          CtaTileShapeMNK>::type {
  using Operation = gemmsmith::FusedFp8<Activation, Swapped, ElementBias, ElementD, ElementCompute>;
  using Tree = gemmsmith::FusedFp8Tree<Operation, CtaTileShapeMNK>;
  using Impl = typename Tree::type;
  using Arguments = gemmsmith::FusedFp8Arguments<Operation, Tree>;
  using Impl::Impl;
};

}  // namespace cutlass::epilogue::fusion
