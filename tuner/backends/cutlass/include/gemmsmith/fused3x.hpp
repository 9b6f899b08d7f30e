/* CUTLASS 3.x kernels with an epilogue, which an expression of the nodes below describes:
 *
 *   Apply<activation::silu, Store<MultiplyAdd<Alpha, Accumulator, Bias<D>>>>
 *
 * is D = silu(alpha * acc + bias), with what the activation is applied to stored in aux. FP32
 * throughout; D is rounded once. Python writes the expression (tuner/backends/cutlass3x/build.py).
 *
 * A node has five members. `kExtras`: the operands that it reads or writes. `kSource`: which of them
 * takes the place of CUTLASS's C and is loaded as that is, if any. `Visitor<Build, Out>`: CUTLASS's
 * visitor, whose results have the type Out. `arguments`: what a launch gives that visitor.
 * `check<Op>`: whether the launch has the operands, aligned as the visitor reads them.
 *
 * There is no beta. A kernel without a source has a void C, and keeps no shared memory for it.
 * Swapped kernels compute Dᵀ: there a vector of the problem's columns runs along the rows, and aux
 * and residual are column-major.
 */
#pragma once

#include "gemmsmith/activations.hpp"
#include "gemmsmith/amax.hpp"
#include "gemmsmith/column_sums.hpp"
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
  static constexpr bool kHasSource = Expression::kSource != 0;
  static constexpr bool kIsSwapped = Swapped;
  using ElementSource = std::conditional_t<kHasSource, ElementD, void>;
  using Stride = cutlass::gemm::TagToStrideC_t<
      std::conditional_t<Swapped, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>>;
  static constexpr bool IsSourceSupported = kHasSource;
  static constexpr int kAlignment = 128 / cutlass::sizeof_bits<ElementD>::value;
};

/* What the builder chose, and how matrices beside C and D pass through shared memory. */
template <class Op_, int StagesC, int StagesD, class CtaTile_, class EpilogueTile_>
struct Build {
  using Op = Op_;
  using Compute = typename Op::ElementCompute;
  using CtaTile = CtaTile_;
  using EpilogueTile = EpilogueTile_;
  using D = typename Op::ElementOutput;
  using Stride = typename Op::Stride;
  using SmemAtom =
      decltype(cutlass::epilogue::collective::detail::sm90_get_epilogue_smem_swizzle_layout_atom<
               Stride, D, EpilogueTile>());
  using CopyOut =
      decltype(cutlass::epilogue::collective::detail::sm90_get_smem_store_op_for_accumulator<
               Stride, D, EpilogueTile>());
  using CopyIn = decltype(cutlass::epilogue::collective::detail::sm90_get_smem_load_op_for_source<
                          Stride, D, EpilogueTile>());

  using Load = fusion::Sm90AuxLoad<StagesC, EpilogueTile, D, Stride, SmemAtom, CopyIn,
                                   Op::kAlignment, false>;
  using Store =
      fusion::Sm90AuxStore<StagesD, EpilogueTile, D, cutlass::FloatRoundStyle::round_to_nearest,
                           Stride, SmemAtom, CopyOut, Op::kAlignment, false>;
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
constexpr uint32_t kExtrasOf<FusedArguments<Op, Build>> = Op::Expression::kExtras;

/* Found by its argument where `Gemm3x` copies the scalars. */
template <bool Swapped = false, class Op, class Build>
void set_scalars(FusedArguments<Op, Build>& epilogue, gs_arguments const& g) {
  static_assert(Swapped == Op::kIsSwapped, "orientation of the epilogue");
  epilogue.alpha = g.alpha;
  epilogue.launch = g;
}

/* A matrix of D's type beside it, in the problem's orientation; TMA loads or stores it. */
template <class Op>
Operand matrix_of(const void* data, gs_arguments const& g, int64_t columns, int64_t leading) {
  return {data, g.m, columns, leading, 0, Op::kAlignment, int(sizeof(typename Op::ElementOutput))};
}

inline cutlass::Status check_matrix(Operand const& matrix) {
  return matrix.data ? matrix.check(1) : cutlass::Status::kErrorInvalidProblem;
}

/* A vector, read or written element by element. */
inline cutlass::Status check_vector(const void* data, size_t element_bytes) {
  if (!data) return cutlass::Status::kErrorInvalidProblem;
  return reinterpret_cast<uintptr_t>(data) % element_bytes
             ? cutlass::Status::kErrorMisalignedOperand
             : cutlass::Status::kSuccess;
}

/* ---- Leaves ---- */

template <uint32_t Extras = 0>
struct Leaf {
  static constexpr uint32_t kExtras = Extras, kSource = 0;
  template <class Op>
  static cutlass::Status check(gs_arguments const&) {
    return cutlass::Status::kSuccess;
  }
};

struct Accumulator : Leaf<> {
  template <class Build, class Out>
  using Visitor = fusion::Sm90AccFetch;
  template <class Build, class Out>
  static typename Visitor<Build, Out>::Arguments arguments(gs_arguments const&) {
    return {};
  }
};

template <class BatchStride>
struct Scalar : Leaf<> {
  template <class Build, class Out>
  using Visitor = fusion::Sm90ScalarBroadcast<typename Build::Compute,
                                              cute::Stride<cute::_0, cute::_0, BatchStride>>;
  template <class Build, class Out>
  static typename Visitor<Build, Out>::Arguments arguments(gs_arguments const& g) {
    return {{g.alpha}};
  }
};

using Alpha = Scalar<int64_t>;

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
  static constexpr uint32_t kExtras = Extra, kSource = 0;
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
  template <class Op>
  static cutlass::Status check(gs_arguments const& g) {
    return check_vector(g.*Member, sizeof(Element));
  }
};

template <class Element>
using Bias = Vector<kBias, Element, false, &gs_arguments::bias>;
template <class Element>
using ColumnScale = Vector<kColumnFactors, Element, false, &gs_arguments::column_scale>;
using RowScale = Vector<kRowFactors, float, true, &gs_arguments::row_scale>;

template <class Element>
struct Residual {
  static constexpr uint32_t kExtras = kResidual, kSource = kResidual;
  template <class Build, class Out>
  using Visitor = fusion::Sm90SrcFetch<Element>;
  template <class Build, class Out>
  static typename Visitor<Build, Out>::Arguments arguments(gs_arguments const&) {
    return {};
  }
  template <class Op>
  static cutlass::Status check(gs_arguments const& g) {
    return g.residual ? cutlass::Status::kSuccess : cutlass::Status::kErrorInvalidProblem;
  }
};

/* ---- Nodes ---- */

/* `Own` is the node's visitor by itself; its inputs' results stay in ElementCompute. */
template <template <class Build, class Out> class Own, class... Inputs>
struct Node {
  static constexpr uint32_t kExtras = (Inputs::kExtras | ... | 0u);
  static constexpr uint32_t kSource = (Inputs::kSource | ... | 0u);
  template <class Build, class Out>
  using Visitor =
      fusion::Sm90EVT<Own<Build, Out>,
                      typename Inputs::template Visitor<Build, typename Build::Compute>...>;
  template <class Build, class Out>
  static typename Visitor<Build, Out>::Arguments arguments(gs_arguments const& g) {
    return {Inputs::template arguments<Build, typename Build::Compute>(g)..., {}};
  }
  template <class Op>
  static cutlass::Status check(gs_arguments const& g) {
    cutlass::Status status = cutlass::Status::kSuccess;
    ((status = status == cutlass::Status::kSuccess ? Inputs::template check<Op>(g) : status), ...);
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

/* Stores its input in aux, and passes it on. */
template <class Input>
struct Store : Input {
  static constexpr uint32_t kExtras = Input::kExtras | kAux;
  template <class Build, class Out>
  using Visitor = fusion::Sm90EVT<typename Build::Store,
                                  typename Input::template Visitor<Build, typename Build::Compute>>;
  template <class Build, class Out>
  static typename Visitor<Build, Out>::Arguments arguments(gs_arguments const& g) {
    using Op = typename Build::Op;
    return {Input::template arguments<Build, typename Build::Compute>(g),
            {static_cast<typename Op::ElementOutput*>(g.aux), stride_of<typename Op::Stride>(aux<Op>(g), 1)}};
  }
  template <class Op>
  static cutlass::Status check(gs_arguments const& g) {
    cutlass::Status status = Input::template check<Op>(g);
    return status == cutlass::Status::kSuccess ? check_matrix(aux<Op>(g)) : status;
  }

 private:
  template <class Op>
  static Operand aux(gs_arguments const& g) {
    return matrix_of<Op>(g.aux, g, g.n, g.ld_aux);
  }
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

/* ---- The adapter ---- */

/* What an epilogue reads and writes is checked, and its source becomes C. */
template <class Kernel, class Traits, bool Swapped>
struct FusedGemm3x
    : CheckedGemm<Gemm3x<Kernel, Traits, Swapped>, FusedGemm3x<Kernel, Traits, Swapped>> {
  using Op = typename Kernel::CollectiveEpilogue::ThreadEpilogueOp;
  using Expression = typename Op::Expression;

  static cutlass::Status check(gs_arguments const& g) {
    using cutlass::Status;
    if (g.batch != 1 || g.beta != 0.0f) return Status::kErrorNotSupported;
    if (!takes_only(g, Expression::kExtras)) return Status::kErrorNotSupported;
    if (g.m <= 0 || g.n <= 0) return Status::kErrorInvalidProblem;
    return Expression::template check<Op>(g);
  }

  /* The launch that CUTLASS knows. */
  static gs_arguments product_of(gs_arguments const& g) {
    gs_arguments product = g;
    if constexpr (Op::kHasSource) {
      constexpr bool kIsResidual = Expression::kSource == kResidual;
      product.c = kIsResidual ? g.residual : g.aux;
      product.ldc = kIsResidual ? g.ld_residual : g.ld_aux;
      product.beta = 1.0f;
    }
    return product;
  }
};

/* The same, and the tiles' sums of rows, which lie first in the workspace, are added up. */
template <class Kernel, class Traits, bool Swapped>
struct SummingGemm3x : FusedGemm3x<Kernel, Traits, Swapped> {
  using Base = FusedGemm3x<Kernel, Traits, Swapped>;
  using Sums = TileSums<typename Kernel::TileShape, typename Base::Op::ElementOutput>;

  static int64_t workspace_bytes(gs_arguments const& g) {
    int64_t bytes = Base::workspace_bytes(g);
    return bytes < 0 ? bytes : bytes + Sums::bytes(g);
  }

  static int32_t run(gs_arguments const& g, void* workspace, void* stream) {
    cutlass::Status status = Base::check(g);
    if (status != cutlass::Status::kSuccess) return status_code(status);
    if (workspace == nullptr) return status_code(cutlass::Status::kErrorWorkspaceNull);
    gs_arguments product = g;
    product.bias_gradient = workspace;
    int32_t code = Base::run(product, static_cast<char*>(workspace) + Sums::bytes(g), stream);
    return code == 0 ? Sums::add_up(g, workspace, stream) : code;
  }
};

}  // namespace gemmsmith

namespace cutlass::epilogue::fusion {

/* TMA epilogue only. */
template <int StagesC, int StagesD, int FragmentSize, bool ReuseSmemC, bool DelayTmaStore,
          class Expression, bool Swapped, class ElementD, class ElementCompute,
          class CtaTileShapeMNK, class EpilogueTile>
struct FusionCallbacks<
    Sm90TmaWarpSpecialized<StagesC, StagesD, FragmentSize, ReuseSmemC, DelayTmaStore>,
    gemmsmith::Fused<Expression, Swapped, ElementD, ElementCompute>, CtaTileShapeMNK, EpilogueTile>
    : gemmsmith::FusedArguments<
          gemmsmith::Fused<Expression, Swapped, ElementD, ElementCompute>,
          gemmsmith::Build<gemmsmith::Fused<Expression, Swapped, ElementD, ElementCompute>,
                           StagesC, StagesD, CtaTileShapeMNK, EpilogueTile>>::Tree {
  using Operation = gemmsmith::Fused<Expression, Swapped, ElementD, ElementCompute>;
  using Arguments = gemmsmith::FusedArguments<
      Operation, gemmsmith::Build<Operation, StagesC, StagesD, CtaTileShapeMNK, EpilogueTile>>;
  using Impl = typename Arguments::Tree;
  using Impl::Impl;
  static_assert(!(DelayTmaStore && (Expression::kExtras & gemmsmith::kBiasGradient)),
                "the stores of each part are barriers between sums of columns");
};

}  // namespace cutlass::epilogue::fusion
