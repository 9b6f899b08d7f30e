/* CUTLASS 3.x kernels with an epilogue, which an expression of the nodes below describes:
 *
 *   Apply<activation::silu, Store<MultiplyAdd<Alpha, Accumulator, Bias<D>>>>
 *
 * is D = silu(alpha * acc + bias), with what the activation is applied to stored in aux. FP32
 * throughout; D is rounded once. Python writes the expression (tuner/backends/cutlass3x/build.py).
 *
 * A node has four members. `kExtras`: the operands that it reads or writes. `Visitor<Build, Out>`:
 * CUTLASS's visitor, whose results have the type Out. `arguments`: what a launch gives that visitor.
 * `check`: whether the launch has the operands, aligned to their elements.
 *
 * The residual takes the place of CUTLASS's C, and is loaded as that is; there is no beta. A kernel
 * without a residual has a void C, and keeps no shared memory for it. Swapped kernels compute Dᵀ:
 * there a vector of the problem's columns runs along the rows, and aux and residual are
 * column-major.
 */
#pragma once

#include "gemmsmith/activations.hpp"
#include "gemmsmith/amax.hpp"
#include "gemmsmith/gemm3x.hpp"

namespace gemmsmith {

namespace fusion = cutlass::epilogue::fusion;

/* The fusion operation that the collective builder is asked for. */
template <class Expression_, bool Swapped, class ElementD, class ElementCompute_>
struct Fused : cutlass::epilogue::fusion::FusionOperation {
  using Expression = Expression_;
  using ElementOutput = ElementD;
  using ElementCompute = ElementCompute_;
  using ElementScalar = ElementCompute_;
  static constexpr bool kHasBias = Expression::kExtras & kBias;
  static constexpr bool kHasResidual = Expression::kExtras & kResidual;
  static constexpr bool kHasAux = Expression::kExtras & kAux;
  static constexpr bool kIsSwapped = Swapped;
  using ElementSource = std::conditional_t<kHasResidual, ElementD, void>;
  using ElementBias = ElementD;
  using ElementAux = std::conditional_t<kHasAux, ElementD, void>;
  using GmemLayoutTagAux =
      std::conditional_t<Swapped, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;
  using StrideAux = cutlass::gemm::TagToStrideC_t<GmemLayoutTagAux>;
  static constexpr bool IsSourceSupported = kHasResidual;
  static constexpr bool IsPerRowBiasSupported = kHasBias && Swapped;
  static constexpr bool IsPerColBiasSupported = kHasBias && !Swapped;
  static constexpr bool IsAuxOutSupported = kHasAux;
  static constexpr int AlignmentAux = 128 / cutlass::sizeof_bits<ElementD>::value;
};

/* What the builder chose. `Copies` are aux's shared-memory layout and copy, if there is an aux. */
template <class Op_, int StagesD_, class CtaTile_, class EpilogueTile_, class... Copies>
struct Build {
  using Op = Op_;
  using Compute = typename Op::ElementCompute;
  using CtaTile = CtaTile_;
  using EpilogueTile = EpilogueTile_;
  static constexpr int StagesD = StagesD_;

  template <class...>
  struct Aux {};
  template <class Layout, class Copy>
  struct Aux<Layout, Copy> {
    using Store =
        fusion::Sm90AuxStore<StagesD, EpilogueTile, typename Op::ElementOutput,
                             cutlass::FloatRoundStyle::round_to_nearest, typename Op::StrideAux,
                             Layout, Copy, Op::AlignmentAux, false>;
  };
  using AuxOf = Aux<Copies...>;
};

/* What a launch gives the tree. */
template <class Op, class Build>
struct FusedArguments {
  using D = typename Op::ElementOutput;
  using Tree = typename Op::Expression::template Visitor<Build, D>;

  typename Op::ElementScalar alpha = 1;
  gs_arguments launch = {};

  operator typename Tree::Arguments() const {
    return Op::Expression::template arguments<Build, D>(launch);
  }
};

template <class Op, class Build>
constexpr uint32_t kExtrasOf<FusedArguments<Op, Build>> =
    Op::Expression::kExtras & ~uint32_t(kResidual); /* which is C by then */

/* Found by its argument where `Gemm3x` copies the scalars. */
template <bool Swapped = false, class Op, class Build>
void set_scalars(FusedArguments<Op, Build>& epilogue, gs_arguments const& g) {
  static_assert(Swapped == Op::kIsSwapped, "orientation of the epilogue");
  epilogue.alpha = g.alpha;
  epilogue.launch = g;
}

/* ---- Leaves ---- */

template <uint32_t Extras = 0>
struct Leaf {
  static constexpr uint32_t kExtras = Extras;
  static cutlass::Status check(gs_arguments const&) { return cutlass::Status::kSuccess; }
};

struct Accumulator : Leaf<> {
  template <class Build, class Out>
  using Visitor = fusion::Sm90AccFetch;
  template <class Build, class Out>
  static typename Visitor<Build, Out>::Arguments arguments(gs_arguments const&) {
    return {};
  }
};

struct Alpha : Leaf<> {
  template <class Build, class Out>
  using Visitor = fusion::Sm90ScalarBroadcast<typename Build::Compute,
                                              cute::Stride<cute::_0, cute::_0, int64_t>>;
  template <class Build, class Out>
  static typename Visitor<Build, Out>::Arguments arguments(gs_arguments const& g) {
    return {{g.alpha}};
  }
};

/* alpha times the factors of A and B. */
struct ScaledAlpha : Leaf<kScales> {
  template <class Build, class Out>
  using Visitor = fusion::Sm90ScalarBroadcast<typename Build::Compute,
                                              cute::Stride<cute::_0, cute::_0, int64_t>, 3>;
  template <class Build, class Out>
  static typename Visitor<Build, Out>::Arguments arguments(gs_arguments const& g) {
    return {{g.alpha, 1.0f, 1.0f}, {nullptr, g.scale_a, g.scale_b}};
  }
};

/* What an FP8 D is multiplied by before it is rounded; conversions to FP8 saturate. */
struct OutputScale : Leaf<kOutputScale> {
  template <class Build, class Out>
  using Visitor = fusion::Sm90ScalarBroadcast<typename Build::Compute>;
  template <class Build, class Out>
  static typename Visitor<Build, Out>::Arguments arguments(gs_arguments const& g) {
    return {{1.0f}, {g.scale_d}};
  }
};

/* A vector with an element for each of the problem's columns, or rows, read element by element. */
template <uint32_t Extra, class Element, bool OfRows, auto Member>
struct Vector {
  static constexpr uint32_t kExtras = Extra;
  template <class Build, class Out>
  using Visitor = std::conditional_t<
      OfRows != Build::Op::kIsSwapped,
      fusion::Sm90ColBroadcast<0, typename Build::CtaTile, Element, typename Build::Compute,
                               cute::Stride<cute::_1, cute::_0, cute::_0>, 1, false>,
      fusion::Sm90RowBroadcast<0, typename Build::CtaTile, Element, typename Build::Compute,
                               cute::Stride<cute::_0, cute::_1, cute::_0>, 1, false>>;
  template <class Build, class Out>
  static typename Visitor<Build, Out>::Arguments arguments(gs_arguments const& g) {
    return {static_cast<Element const*>(g.*Member), Element(0), {}};
  }
  static cutlass::Status check(gs_arguments const& g) {
    if (!(g.*Member)) return cutlass::Status::kErrorInvalidProblem;
    return reinterpret_cast<uintptr_t>(g.*Member) % sizeof(Element)
               ? cutlass::Status::kErrorMisalignedOperand
               : cutlass::Status::kSuccess;
  }
};

template <class Element>
using Bias = Vector<kBias, Element, false, &gs_arguments::bias>;
template <class Element>
using ColumnScale = Vector<kColumnFactors, Element, false, &gs_arguments::column_scale>;
using RowScale = Vector<kRowFactors, float, true, &gs_arguments::row_scale>;

template <class Element>
struct Residual : Leaf<kResidual> {
  template <class Build, class Out>
  using Visitor = fusion::Sm90SrcFetch<Element>;
  template <class Build, class Out>
  static typename Visitor<Build, Out>::Arguments arguments(gs_arguments const&) {
    return {};
  }
};

/* ---- Nodes ---- */

/* `Own` is the node's visitor by itself; its inputs' results stay in ElementCompute. */
template <template <class Build, class Out> class Own, class... Inputs>
struct Node {
  static constexpr uint32_t kExtras = (Inputs::kExtras | ... | 0u);
  template <class Build, class Out>
  using Visitor =
      fusion::Sm90EVT<Own<Build, Out>,
                      typename Inputs::template Visitor<Build, typename Build::Compute>...>;
  template <class Build, class Out>
  static typename Visitor<Build, Out>::Arguments arguments(gs_arguments const& g) {
    return {Inputs::template arguments<Build, typename Build::Compute>(g)..., {}};
  }
  static cutlass::Status check(gs_arguments const& g) {
    cutlass::Status status = cutlass::Status::kSuccess;
    ((status = status == cutlass::Status::kSuccess ? Inputs::check(g) : status), ...);
    return status;
  }
};

template <template <class> class Function>
struct OfFunction {
  template <class Build, class Out>
  using Own = fusion::Sm90Compute<Function, Out, typename Build::Compute,
                                  cutlass::FloatRoundStyle::round_to_nearest>;
};

template <template <class> class Function, class... Inputs>
using Apply = Node<OfFunction<Function>::template Own, Inputs...>;
template <class Factor, class Input>
using Multiply = Apply<cutlass::multiplies, Factor, Input>;
template <class Left, class Right>
using Add = Apply<cutlass::plus, Left, Right>;
template <class Factor, class Input, class Addend>
using MultiplyAdd = Apply<cutlass::homogeneous_multiply_add, Factor, Input, Addend>;

/* Aux in the problem's orientation; TMA stores it. */
template <class Op>
Operand aux_of(gs_arguments const& g) {
  return {g.aux, g.m, g.n, g.ld_aux, 0, Op::AlignmentAux,
          int(sizeof(typename Op::ElementOutput))};
}

/* Stores its input in aux, and passes it on. */
template <class Input>
struct Store {
  static constexpr uint32_t kExtras = Input::kExtras | kAux;
  template <class Build, class Out>
  using Visitor = fusion::Sm90EVT<typename Build::AuxOf::Store,
                                  typename Input::template Visitor<Build, typename Build::Compute>>;
  template <class Build, class Out>
  static typename Visitor<Build, Out>::Arguments arguments(gs_arguments const& g) {
    using Op = typename Build::Op;
    typename Op::StrideAux stride{};
    set_row_stride(stride, aux_of<Op>(g).row_stride());
    return {Input::template arguments<Build, typename Build::Compute>(g),
            {static_cast<typename Op::ElementOutput*>(g.aux), stride}};
  }
  static cutlass::Status check(gs_arguments const& g) { return Input::check(g); }
};

/* Adds its input's largest absolute value to amax, if there is an amax, and passes the input on. */
template <class Input>
struct StoreAmax : Input {
  static constexpr uint32_t kExtras = Input::kExtras | kAmax;
  template <class Build, class Out>
  using Visitor = fusion::Sm90EVT<Amax<typename Build::CtaTile>,
                                  typename Input::template Visitor<Build, Out>>;
  template <class Build, class Out>
  static typename Visitor<Build, Out>::Arguments arguments(gs_arguments const& g) {
    return {Input::template arguments<Build, Out>(g), {g.amax}};
  }
};

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
    if (!takes_only(g, Op::Expression::kExtras)) return Status::kErrorNotSupported;
    if (Op::kHasResidual && !g.residual) return Status::kErrorInvalidProblem;
    Status status = Op::Expression::check(g);
    if (status != Status::kSuccess || !Op::kHasAux) return status;
    return g.aux ? aux_of<Op>(g).check(1) : Status::kErrorInvalidProblem;
  }

  /* The launch that CUTLASS knows: C is the residual. */
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
          class Expression, bool Swapped, class ElementD, class ElementCompute,
          class CtaTileShapeMNK, class EpilogueTile, class... Copies>
struct FusionCallbacks<
    Sm90TmaWarpSpecialized<StagesC, StagesD, FragmentSize, ReuseSmemC, DelayTmaStore>,
    gemmsmith::Fused<Expression, Swapped, ElementD, ElementCompute>, CtaTileShapeMNK, EpilogueTile,
    Copies...>
    : gemmsmith::FusedArguments<
          gemmsmith::Fused<Expression, Swapped, ElementD, ElementCompute>,
          gemmsmith::Build<gemmsmith::Fused<Expression, Swapped, ElementD, ElementCompute>,
                           StagesD, CtaTileShapeMNK, EpilogueTile, Copies...>>::Tree {
  using Operation = gemmsmith::Fused<Expression, Swapped, ElementD, ElementCompute>;
  using Arguments = gemmsmith::FusedArguments<
      Operation,
      gemmsmith::Build<Operation, StagesD, CtaTileShapeMNK, EpilogueTile, Copies...>>;
  using Impl = typename Arguments::Tree;
  using Impl::Impl;
};

}  // namespace cutlass::epilogue::fusion
