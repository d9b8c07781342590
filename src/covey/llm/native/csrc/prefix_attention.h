// Attention over a prefix tree, forward and backward: completions continue their prompt, prompts a common prefix.
//
// Tiled as in FlashAttention: scores exist only for one tile of queries at a time, in a core's cache (arXiv
// 2205.14135), and the backward pass recomputes them from their logsumexp (arXiv 2307.08691, algorithm 2). A task is a
// part of the tokens and one key-value head. Several tasks may contribute to dK and dV of a shared prefix; their
// partial gradients are summed at the end, in order, so the result is reproducible.
//
// prefix_tree.h has the tree and the tasks, prefix_rows.h reads and writes rows, prefix_levels.h holds packed keys and
// values, prefix_queries.h a tile of queries, prefix_forward.h and prefix_backward.h the two passes. Matrix products
// are those of gemm.h. Entry point: `prefix_attention`.

#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "prefix_backward.h"
#include "prefix_forward.h"

namespace {

// The worker of one thread, which computes one task after another.
template <typename Scalar>
class PrefixAttention {
  public:
    explicit PrefixAttention(const PrefixAttentionArgs& args) : rows(args), path(rows), queries(rows, path) {}
    PrefixAttention(const PrefixAttention&) = delete;

    // Compute a task; `partial_for` as for `PrefixPath::push`.
    template <typename PartialFor>
    void operator()(const Part& part, int kv_head, PartialFor partial_for) {
        rows.kv_head = kv_head;
        for (TokenRange range : part) {
            path.push(range, partial_for);
            int end = range.end * rows.group;
            for (int query = range.begin * rows.group; query < end; query += QUERY_TILE) {
                queries.load_queries(query, std::min(query + QUERY_TILE, end));
                if (rows.args.dout) backward(queries);
                else forward(queries);
            }
        }
        path.pop(0, partial_for);
    }

    void reduce_partials(int sequence, int kv_head, const std::vector<PartialGrad>& partials) {
        rows.kv_head = kv_head;
        path.reduce_partials(sequence, partials);
    }

  private:
    PrefixRows<Scalar> rows;
    PrefixPath<Scalar> path;
    PrefixQueries<Scalar> queries;
    PrefixForward<Scalar> forward;
    PrefixBackward<Scalar> backward;
};

// Attention of all tokens or, if `dout` is not null, its gradients. Threads take tasks from a counter.
template <typename Scalar>
void prefix_attention(const PrefixAttentionArgs& args) {
    std::vector<Part> parts = split_into_parts(args);
    int tasks = int(parts.size()) * args.kv_heads;
    std::vector<std::vector<int>> contributors = contributors_of(args, parts);
    std::vector<std::vector<PartialGrad>> partials(args.sequence_count);  // of shared sequences: [contributors, K]
    for (int s = 0; s < args.sequence_count; s++)
        if (args.dout && contributors[s].size() > 1) partials[s].resize(contributors[s].size() * args.kv_heads);
    std::atomic<int> next_task{0};
#pragma omp parallel num_threads(args.threads)
    {
        TileConfig tile_config;
        PrefixAttention<Scalar> attention(args);
        for (int task; (task = next_task++) < tasks;) {
            int part = task / args.kv_heads, kv_head = task % args.kv_heads;
            attention(parts[part], kv_head, [&](int s) -> PartialGrad* {
                if (partials[s].empty()) return nullptr;
                const std::vector<int>& known = contributors[s];
                size_t contributor = std::find(known.begin(), known.end(), part) - known.begin();
                return &partials[s][contributor * args.kv_heads + kv_head];
            });
        }
#pragma omp barrier
#pragma omp for schedule(dynamic)
        for (int task = 0; task < args.sequence_count * args.kv_heads; task++) {
            int s = task / args.kv_heads, kv_head = task % args.kv_heads;
            if (!partials[s].empty()) attention.reduce_partials(s, kv_head, partials[s]);
        }
    }
}

}  // namespace
