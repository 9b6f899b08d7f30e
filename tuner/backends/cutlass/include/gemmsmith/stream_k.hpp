/* CUTLASS's stream-K tile scheduler, usable with programmatic dependent launch.
 *
 * In CUTLASS 4.2.0 `is_last_tile` of the stream-K scheduler, which a kernel calls only when
 * programmatic dependent launch is compiled in, does not compile (it is const and changes a
 * member). This scheduler answers the same question on a copy of itself.
 */
#pragma once

#include "cutlass/gemm/kernel/tile_scheduler.hpp"
#include "gemmsmith/gemm3x.hpp"

namespace gemmsmith {

struct StreamKScheduler {}; /* the tag that generated kernels name */

template <class TileShape, class ClusterShape>
class StreamKTileScheduler
    : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90StreamK<TileShape,
                                                                               ClusterShape> {
  using Base =
      cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90StreamK<TileShape, ClusterShape>;

 public:
  using Base::Base;

  /* Tells only when the next grid may start; `work` is what this block computes now. */
  CUTLASS_DEVICE bool is_last_tile(typename Base::WorkTileInfo work) const {
    Base copy = *this;
    return !cute::get<0>(copy.fetch_next_work(work)).is_valid();
  }
};

}  // namespace gemmsmith

namespace cutlass::gemm::kernel::detail {

template <class TileShape, class ClusterShape, uint32_t Stages>
struct TileSchedulerSelector<gemmsmith::StreamKScheduler, arch::Sm90, TileShape, ClusterShape,
                             Stages> {
  using Scheduler = gemmsmith::StreamKTileScheduler<TileShape, ClusterShape>;
};

}  // namespace cutlass::gemm::kernel::detail
