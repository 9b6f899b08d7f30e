/* The node of backward epilogues: the product P = dY·W of the layer after an activation becomes the
 * gradient of what that activation was applied to.
 *
 *   plain   D = P * act'(aux)                          [M, N]
 *           activated = act(aux)                       [M, N], on demand
 *           bias_gradient = the sum of D's rows        [N], on demand
 *   gated   aux is [M, 2N], gate | up; D has the same layout:
 *           D = P * up * act'(gate) | P * act(gate)
 *           activated = act(gate) * up                 [M, N], on demand
 *
 * FP32 throughout; rounded once. aux, or the gate, is the source. Rows of a tile that lie beyond M
 * are zeros and add nothing to a sum: there P is zero, and so is what TMA loads of aux. Kernels are
 * not swapped.
 */
#pragma once

#include "gemmsmith/fused3x.hpp"

namespace gemmsmith {

/* Computes what its outputs store from the product, aux and, if gated, up. Of `Ops` the first is the
 * product, the second aux; then come up and its gradient, activated, the sum of rows. */
template <class Slope, bool Gated, bool Activated, bool BiasGradient, class D, class... Ops>
struct DifferentiateVisitor : fusion::Sm90VisitorImpl<Ops...> {
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
      using Values = cutlass::Array<float, Count>;
      auto fetch = [&](auto& op) CUTLASS_LAMBDA_FUNC_INLINE {
        auto fetched = op.visit(sums, epi_v, epi_m, epi_n);
        using Fetched = typename decltype(fetched)::Element;
        return cutlass::NumericArrayConverter<float, Fetched, Count>{}(fetched);
      };
      auto store = [&](auto& op, Values const& values) CUTLASS_LAMBDA_FUNC_INLINE {
        op.visit(sums, epi_v, epi_m, epi_n, values);
      };
      constexpr int kActivatedAt = Gated ? 4 : 2;
      constexpr int kSumAt = kActivatedAt + Activated;

      Values gradient = fetch(cute::get<0>(callbacks_tuple));
      Values source = fetch(cute::get<1>(callbacks_tuple));
      Values activated;
      Slope of;
      if constexpr (Gated) {
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
      if constexpr (Activated) store(cute::get<kActivatedAt>(callbacks_tuple), activated);
      if constexpr (BiasGradient) store(cute::get<kSumAt>(callbacks_tuple), gradient);
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

/* A tuple of what there is only on a condition. */
template <bool There, class... Values>
auto only_if(Values const&... values) {
  if constexpr (There) return cute::make_tuple(values...);
  else return cute::tuple<>{};
}

template <class Slope, bool Gated, bool Activated, bool BiasGradient>
struct Differentiate {
  static constexpr uint32_t kExtras = uint32_t(kAux) | (Activated ? uint32_t(kActivated) : 0u) |
                                      (BiasGradient ? uint32_t(kBiasGradient) : 0u);
  static constexpr uint32_t kSource = kAux;
  static_assert(!(Gated && BiasGradient), "no such epilogue");

  using Product = Multiply<Scalar<cute::_0>, Accumulator>;

  template <class Build>
  using Sums = ColumnSums<typename Build::CtaTile, typename Build::EpilogueTile>;

  template <class Build, class Out, class... Tuples>
  struct Of;
  template <class Build, class Out, class... Gate, class... Activation, class... Sum>
  struct Of<Build, Out, cute::tuple<Gate...>, cute::tuple<Activation...>, cute::tuple<Sum...>> {
    static_assert(std::is_same_v<typename Build::Compute, float>, "computed in FP32");
    using type = DifferentiateVisitor<
        Slope, Gated, Activated, BiasGradient, Out,
        typename Product::template Visitor<Build, typename Build::Compute>,
        fusion::Sm90SrcFetch<typename Build::D>, Gate..., Activation..., Sum...>;
  };
  template <bool There, class... Nodes>
  using If = std::conditional_t<There, cute::tuple<Nodes...>, cute::tuple<>>;
  template <class Build, class Out>
  using Visitor =
      typename Of<Build, Out, If<Gated, typename Build::Load, typename Build::Store>,
                  If<Activated, typename Build::Store>, If<BiasGradient, Sums<Build>>>::type;

  /* By now aux is C, and `bias_gradient` the sums of the tiles. */
  template <class Build, class Out>
  static typename Visitor<Build, Out>::Arguments arguments(gs_arguments const& g) {
    using Op = typename Build::Op;
    using D = typename Op::ElementOutput;
    using Stride = typename Op::Stride;
    using Load = typename Build::Load::Arguments;
    using Store = typename Build::Store::Arguments;
    auto up = static_cast<D const*>(g.aux) + g.n;
    auto up_gradient = static_cast<D*>(g.d) + g.n;
    return cute::apply(
        cute::tuple_cat(
            only_if<Gated>(Load{up, D(0), stride_of<Stride>(aux<Op>(g), 1)},
                           Store{up_gradient, stride_of<Stride>(gradient<Op>(g), 1)}),
            only_if<Activated>(
                Store{static_cast<D*>(g.activated), stride_of<Stride>(activated<Op>(g), 1)}),
            only_if<BiasGradient>(ColumnSumsArguments{static_cast<float*>(g.bias_gradient)})),
        [&](auto const&... others) {
          return typename Visitor<Build, Out>::Arguments{
              Product::template arguments<Build, typename Build::Compute>(g), {}, others...};
        });
  }

  template <class Op>
  static cutlass::Status check(gs_arguments const& g) {
    using cutlass::Status;
    Status status = check_matrix(aux<Op>(g));
    if (status == Status::kSuccess) status = check_matrix(gradient<Op>(g));
    if (status == Status::kSuccess && Activated) status = check_matrix(activated<Op>(g));
    if (status == Status::kSuccess && BiasGradient) {
      status = check_vector(g.bias_gradient, sizeof(typename Op::ElementOutput));
    }
    return status;
  }

 private:
  static constexpr int64_t kHalves = Gated ? 2 : 1; /* of aux and D, in matrices of N columns */

  template <class Op>
  static Operand aux(gs_arguments const& g) {
    return matrix_of<Op>(g.aux, g, kHalves * g.n, g.ld_aux);
  }
  template <class Op>
  static Operand gradient(gs_arguments const& g) {
    return matrix_of<Op>(g.d, g, kHalves * g.n, g.ldd);
  }
  template <class Op>
  static Operand activated(gs_arguments const& g) {
    return matrix_of<Op>(g.activated, g, g.n, g.ld_activated);
  }
};

}  // namespace gemmsmith
