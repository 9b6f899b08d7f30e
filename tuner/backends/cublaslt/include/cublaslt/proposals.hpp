/* The library's algorithms for a product: its heuristics' list, and what lies near one of them. */
#pragma once

#include <array>
#include <numeric>
#include <set>
#include <vector>

#include "cublaslt/product.hpp"
#include "cublaslt/proposal.h"

namespace gemmsmith::cublaslt {

constexpr int64_t kWorkspaceLimit = 32 << 20; /* what torch gives cuBLAS on Hopper */

/* Collects algorithms that the library would run, each once. */
class Proposals {
 public:
  Proposals(Session const& session, Operation const& op, gs_arguments const& g, int32_t most,
            gs_proposal* out)
      : library(*session.library),
        handle(session.device->handle),
        descriptors(library, *session.device, op, g),
        limit(g.workspace_limit > 0 ? g.workspace_limit : kWorkspaceLimit),
        most_(most),
        out_(out) {}

  Library const& library;
  void* handle;
  Descriptors descriptors;
  int64_t limit;

  bool full() const { return count_ >= most_; }
  int32_t count() const { return count_; }
  void skip(Algorithm const& algorithm) { seen_.insert(words(algorithm)); }

  /* Keeps an algorithm that the library takes, within the workspace. */
  void offer(Algorithm const& algorithm) {
    if (full() || !seen_.insert(words(algorithm)).second) return;
    Result result;
    if (check_algorithm(library, handle, descriptors, algorithm, result) != 0) return;
    keep(algorithm, result);
  }

  void keep(Algorithm const& algorithm, Result const& result) {
    if (full() || result.workspace_bytes > size_t(limit)) return;
    gs_proposal& made = out_[count_++];
    made = gs_proposal{};
    std::memcpy(made.algorithm, algorithm.words, sizeof made.algorithm);
    made.library_version = library.version;
    made.workspace_bytes = int64_t(result.workspace_bytes);
    made.id = configured<int32_t>(algorithm, kId);
    made.tile_id = configured<uint32_t>(algorithm, kTile);
    made.stages_id = configured<uint32_t>(algorithm, kStages);
    made.cluster_id = configured<uint16_t>(algorithm, kClusterShape);
    made.inner_shape = configured<uint16_t>(algorithm, kInnerShape);
    made.custom = configured<uint32_t>(algorithm, kCustomOption);
    made.split_k = configured<int32_t>(algorithm, kSplitK);
    made.reduction = configured<uint32_t>(algorithm, kReduction);
    made.swizzle = configured<uint32_t>(algorithm, kSwizzling);
    made.waves = result.waves;
  }

  template <class Value>
  int32_t configured(Algorithm const& algorithm, int attribute) const {
    Value value{};
    size_t written = 0;
    int error =
        library.MatmulAlgoConfigGetAttribute(&algorithm, attribute, &value, sizeof value, &written);
    return error == 0 ? int32_t(value) : -1;
  }

 private:
  static std::array<uint64_t, 8> words(Algorithm const& algorithm) {
    std::array<uint64_t, 8> copy;
    std::memcpy(copy.data(), algorithm.words, sizeof algorithm.words);
    return copy;
  }

  int32_t most_, count_ = 0;
  gs_proposal* out_;
  std::set<std::array<uint64_t, 8>> seen_;
};

inline int32_t propose(Proposals& proposals, int32_t most) {
  Library const& library = proposals.library;
  Descriptors& descriptors = proposals.descriptors;
  Opaque preference;
  size_t limit = size_t(proposals.limit);
  int status = library.MatmulPreferenceInit_internal(&preference, sizeof preference);
  if (status == 0) {
    status = library.MatmulPreferenceSetAttribute(&preference, kMaxWorkspace, &limit, sizeof limit);
  }
  uint32_t alignment = kAlignment;
  for (int which = kMinAlignmentA; status == 0 && which <= kMinAlignmentD; ++which) {
    status = library.MatmulPreferenceSetAttribute(&preference, which, &alignment, sizeof alignment);
  }
  if (status != 0) return kCublasBase + status;
  std::vector<Result> found(static_cast<size_t>(most));
  int count = 0;
  status = library.MatmulAlgoGetHeuristic(proposals.handle, &descriptors.product, &descriptors.a,
                                          &descriptors.b, &descriptors.c, &descriptors.d,
                                          &preference, most, found.data(), &count);
  if (status == kNotSupported) return 0; /* it has none */
  if (status != 0) return kCublasBase + status;
  for (int i = 0; i < count; ++i) {
    if (found[i].state == 0) proposals.keep(found[i].algorithm, found[i]);
  }
  return 0;
}

/* What of an algorithm can be set, and to what. */
class Neighbours {
 public:
  Neighbours(Proposals& proposals, Algorithm const& start, int32_t k)
      : proposals_(proposals), library_(proposals.library), start_(start) {
    tiles_ = ids(kTileIds, kLastTile);
    stages_ = ids(kStagesIds, kLastStages);
    for (uint16_t cluster = 0; cluster <= kLastCluster; ++cluster) {
      if (cluster != 1) clusters_.push_back(cluster);
    }
    custom_ = capability<int32_t>(kCustomOptionMax);
    if (custom_ > kMostOptions) custom_ = kMostOptions;
    swizzles_ = capability<uint32_t>(kSwizzlingSupport) != 0 ? 1 : 0;
    if (capability<int32_t>(kSplitKSupport) != 0) {
      uint32_t mask = capability<uint32_t>(kReductionMask);
      for (int32_t splits : {2, 3, 4, 5, 6, 7, 8, 10, 12, 16}) {
        if (k / splits < kLeastSlice) break;
        for (uint32_t scheme : {1u, 2u, 4u}) {
          if (mask & scheme) splits_.push_back({splits, scheme});
        }
      }
    }
  }

  /* One thing changed; then two that decide most. */
  void offer_all() {
    each_cluster(start_);
    for (uint32_t swizzle = 0; swizzle <= swizzles_; ++swizzle) {
      offer(start_, [&](Algorithm& made) { return set(made, kSwizzling, swizzle); });
    }
    for (int32_t option = 0; option <= custom_; ++option) {
      offer(start_, [&](Algorithm& made) { return set(made, kCustomOption, uint32_t(option)); });
    }
    for (uint16_t shape = 0; shape <= kLastInnerShape; ++shape) {
      offer(start_, [&](Algorithm& made) { return set(made, kInnerShape, shape); });
    }
    each_stages(start_);
    each_split(start_);
    each_tile([&](Algorithm const& made) { proposals_.offer(made); });
    each_tile([&](Algorithm const& made) { each_cluster(made); });
    each_tile([&](Algorithm const& made) { each_stages(made); });
    each_tile([&](Algorithm const& made) { each_split(made); });
  }

 private:
  static constexpr uint16_t kLastCluster = 51, kLastInnerShape = 4;
  static constexpr int32_t kMostOptions = 64;
  static constexpr uint32_t kLastTile = 645, kLastStages = 38; /* of cuBLASLt 13.10 */
  static constexpr int32_t kLeastSlice = 128; /* of K: shorter ones are all overhead */

  struct Split {
    int32_t number;
    uint32_t scheme;
  };

  template <class Change>
  void offer(Algorithm const& from, Change change) {
    Algorithm made = from;
    if (change(made)) proposals_.offer(made);
  }

  template <class Value>
  bool set(Algorithm& made, int attribute, Value value) {
    return library_.MatmulAlgoConfigSetAttribute(&made, attribute, &value, sizeof value) == 0;
  }

  void each_cluster(Algorithm const& from) {
    for (uint16_t cluster : clusters_) {
      offer(from, [&](Algorithm& made) { return set(made, kClusterShape, cluster); });
    }
  }

  void each_stages(Algorithm const& from) {
    for (uint32_t stages : stages_) {
      offer(from, [&](Algorithm& made) { return set(made, kStages, stages); });
    }
  }

  void each_split(Algorithm const& from) {
    offer(from, [&](Algorithm& made) {
      return set(made, kSplitK, int32_t(1)) && set(made, kReduction, uint32_t(0));
    });
    for (Split const& split : splits_) {
      offer(from, [&](Algorithm& made) {
        return set(made, kSplitK, split.number) && set(made, kReduction, split.scheme);
      });
    }
  }

  template <class Visit>
  void each_tile(Visit visit) {
    for (uint32_t tile : tiles_) {
      if (proposals_.full()) return;
      Algorithm made = start_;
      if (set(made, kTile, tile)) visit(made);
    }
  }

  template <class Value>
  Value capability(int which) const {
    Value value{};
    size_t written = 0;
    int error =
        library_.MatmulAlgoCapGetAttribute(&start_, which, &value, sizeof value, &written);
    return error == 0 ? value : Value{};
  }

  /* The numbers that an algorithm may have; where it does not say, all that there are. */
  std::vector<uint32_t> ids(int which, uint32_t last) const {
    size_t bytes = 0;
    int error = library_.MatmulAlgoCapGetAttribute(&start_, which, nullptr, 0, &bytes);
    std::vector<uint32_t> found(error == 0 ? bytes / sizeof(uint32_t) : 0);
    if (!found.empty()) {
      error = library_.MatmulAlgoCapGetAttribute(&start_, which, found.data(), bytes, &bytes);
      if (error == 0) return found;
    }
    found.resize(last + 1);
    std::iota(found.begin(), found.end(), 0u);
    return found;
  }

  Proposals& proposals_;
  Library const& library_;
  Algorithm start_;
  std::vector<uint32_t> tiles_, stages_;
  std::vector<uint16_t> clusters_;
  std::vector<Split> splits_;
  int32_t custom_ = 0;
  uint32_t swizzles_ = 0;
};

/* Neighbours of the start; then of the library's other algorithms, from their defaults. */
inline int32_t variants(Proposals& proposals, Operation const& op, gs_arguments const& g) {
  Library const& library = proposals.library;
  Algorithm start = algorithm_of(g);
  proposals.offer(start); /* first: the others are told apart by what they change of it */
  Neighbours(proposals, start, g.k).offer_all();
  constexpr int kMostIds = 256;
  int ids[kMostIds], count = 0;
  int status = library.MatmulAlgoGetIds(proposals.handle, op.compute, op.scale, op.b, op.a, op.d,
                                        op.d, kMostIds, ids, &count);
  if (status != 0 && status != kNotSupported) return kCublasBase + status;
  int32_t own = proposals.configured<int32_t>(start, kId);
  for (int i = 0; i < count && !proposals.full(); ++i) {
    Algorithm other{};
    if (ids[i] == own || library.MatmulAlgoInit(proposals.handle, op.compute, op.scale, op.b, op.a,
                                                op.d, op.d, ids[i], &other) != 0) {
      continue;
    }
    proposals.offer(other);
    Neighbours(proposals, other, g.k).offer_all();
  }
  return 0;
}

/* Runs `collect(proposals)` in the device's context. */
template <class Collect>
int32_t list(Operation const& op, gs_arguments const& g, bool with_algorithm, int32_t most,
             gs_proposal* out, int32_t* count, Collect collect) {
  *count = 0;
  Session session(op, g, with_algorithm);
  if (session.status != 0) return session.status;
  ContextScope scope(session.driver(), session.device->context);
  if (scope.error() != 0) return kCudaBase + scope.error();
  Proposals proposals(session, op, g, most, out);
  if (proposals.descriptors.status != 0) return kCublasBase + proposals.descriptors.status;
  int32_t status = collect(proposals);
  *count = proposals.count();
  return status;
}

}  // namespace gemmsmith::cublaslt
