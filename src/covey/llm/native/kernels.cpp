// What a language model does between its matrix products: for one new token per row while sampling (decoder.py), and
// forward and backward in training (fused.py, ../head.py).
//
// Tensors are stored in bf16 or fp32 and computed on in fp32. Where transformers rounds an intermediate result to the
// storage type, so does this code, so that both write the same numbers but for the order of sums.
//
// Shapes: R rows, W hidden width, H heads, K key-value heads, M = H / K, D head width, P prompt tokens, T own tokens,
// V vocabulary.

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace {

inline float inverse_root_mean_square(const float* x, int width, float epsilon) {
    Floats squares = {};
    int i = 0;
    for (; i + LANES <= width; i += LANES) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (; i < width; i++) total += x[i] * x[i];
    return 1.0f / std::sqrt(total / width + epsilon);
}

// out = weight * (x / rms(x)), rounded before the weight as transformers does. Returns 1 / rms(x).
template <typename Value>
inline float normalise(const float* x, const Value* weight, Value* out, int width, float epsilon) {
    float scale = inverse_root_mean_square(x, width, epsilon);
    int i = 0;
    for (; i + LANES <= width; i += LANES) store(rounded<Value>(load(x + i) * scale) * load(weight + i), out + i);
    for (; i < width; i++) narrow(rounded<Value>(x[i] * scale) * widen(weight[i]), &out[i]);
    return scale;
}

// The same for the forward pass of training, which keeps 1 / rms of every row.
template <typename Value>
void normalise_rows(
    const Value* x, const Value* weight, Value* out, float* scales, int rows, int width, float epsilon, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> wide(width);
#pragma omp for schedule(static)
        for (int row = 0; row < rows; row++) {
            for (int i = 0; i < width; i++) wide[i] = widen(x[size_t(row) * width + i]);
            scales[row] = normalise(wide.data(), weight, out + size_t(row) * width, width, epsilon);
        }
    }
}

// With n = x * scale: dx = scale * (w dy - n mean(w dy n)); of dw = sum over rows of dy n every thread leaves its part
// in `dweights` [threads, W]. Which rows a thread has depends on their number alone, so the sum is always the same.
template <typename Value>
void normalise_backward(const Value* x, const Value* weight, const float* scales, const Value* dy, Value* dx,
    float* dweights, int rows, int width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int part = 0; part < threads; part++) {
        float* dweight = dweights + size_t(part) * width;
        std::fill(dweight, dweight + width, 0.0f);
        std::vector<float> n(width), dn(width);
        for (int row = int(int64_t(rows) * part / threads); row < int(int64_t(rows) * (part + 1) / threads); row++) {
            const Value *from = x + size_t(row) * width, *above = dy + size_t(row) * width;
            Value* to = dx + size_t(row) * width;
            float scale = scales[row], product = 0;
            Floats products = {};
            int i = 0;
            for (; i + LANES <= width; i += LANES) {
                Floats normal = load(from + i) * scale, up = load(above + i), down = up * load(weight + i);
                store(load(dweight + i) + up * rounded<Value>(normal), dweight + i);
                products += down * normal;
                store(normal, &n[i]);
                store(down, &dn[i]);
            }
            for (; i < width; i++) {
                n[i] = widen(from[i]) * scale;
                dn[i] = widen(above[i]) * widen(weight[i]);
                dweight[i] += widen(above[i]) * rounded<Value>(n[i]);
                product += dn[i] * n[i];
            }
            float mean = (product + sum(products)) / width;
            for (i = 0; i + LANES <= width; i += LANES) store((load(&dn[i]) - load(&n[i]) * mean) * scale, to + i);
            for (; i < width; i++) narrow((dn[i] - n[i] * mean) * scale, &to[i]);
        }
    }
}

template <typename Value>
void add_and_normalise(
    Value* hidden, const Value* added, const Value* weight, Value* out, int rows, int width, float epsilon, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int row = 0; row < rows; row++) {
        std::vector<float> x(width);
        Value* mine = hidden + size_t(row) * width;
        for (int i = 0; i < width; i++) {
            x[i] = widen(mine[i]);
            if (added) {
                narrow(x[i] + widen(added[size_t(row) * width + i]), &mine[i]);
                x[i] = widen(mine[i]);
            }
        }
        normalise(x.data(), weight, out + size_t(row) * width, width, epsilon);
    }
}

// silu(x) = x / (1 + exp(-x)), and its slope.
inline Floats sigmoid(Floats x) {
    Floats e = exponential(x > all(0.0f) ? -x : x);
    return (x > all(0.0f) ? all(1.0f) : e) / (1.0f + e);
}
inline Floats silu(Floats x) { return x * sigmoid(x); }
inline Floats silu_slope(Floats x) {
    Floats y = sigmoid(x);
    return y * (1.0f + x * (1.0f - y));
}

// out = silu(gate) * up; the rows of both lie `stride` apart.
template <typename Value>
void gate(const Value* gates, const Value* ups, int stride, Value* out, int rows, int width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int row = 0; row < rows; row++) {
        const Value* gate = gates + size_t(row) * stride;
        const Value* up = ups + size_t(row) * stride;
        Value* mine = out + size_t(row) * width;
        int i = 0;
        for (; i + LANES <= width; i += LANES) store(rounded<Value>(silu(load(gate + i))) * load(up + i), mine + i);
        for (; i < width; i++) narrow(rounded<Value>(silu(all(widen(gate[i])))[0]) * widen(up[i]), &mine[i]);
    }
}

// dgate = d up silu'(gate), dup = d silu(gate).
template <typename Value>
void gate_backward(const Value* gates, const Value* ups, const Value* d, Value* dgates, Value* dups, int64_t count,
    int threads) {
    int64_t whole = count / LANES * LANES;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < whole; i += LANES) {
        Floats gate = load(gates + i), above = load(d + i);
        store(above * rounded<Value>(silu(gate)), dups + i);
        store(above * load(ups + i) * silu_slope(gate), dgates + i);
    }
    for (int64_t i = whole; i < count; i++) {
        Floats gate = all(widen(gates[i]));
        float above = widen(d[i]);
        narrow(above * rounded<Value>(silu(gate)[0]), &dups[i]);
        narrow(above * widen(ups[i]) * silu_slope(gate)[0], &dgates[i]);
    }
}

// x cos + rotate_half(x) sin, each product rounded as transformers does.
template <typename Value>
inline void rotate(float* x, const Value* cosine, const Value* sine, int width) {
    int half = width / 2, i = 0;
    for (; i + LANES <= half; i += LANES) {
        Floats a = load(x + i), b = load(x + half + i);
        Floats left = rounded<Value>(a * load(cosine + i)) - rounded<Value>(b * load(sine + i));
        Floats right = rounded<Value>(b * load(cosine + half + i)) + rounded<Value>(a * load(sine + half + i));
        store(rounded<Value>(left), x + i);
        store(rounded<Value>(right), x + half + i);
    }
    for (; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = rounded<Value>(rounded<Value>(a * widen(cosine[i])) - rounded<Value>(b * widen(sine[i])));
        x[i + half] =
            rounded<Value>(rounded<Value>(b * widen(cosine[i + half])) + rounded<Value>(a * widen(sine[i + half])));
    }
}

// scores[m][t] = query[m] . key[t] for t < tokens, from keys that lie in blocks of PAD tokens, [D][PAD] each: what is
// read together lies together.
template <typename Value, int M>
inline void score(const float* query, int width, const Value* keys, int tokens, float* scores, int pitch) {
    for (int t = 0; t < tokens; t += PAD) {
        Floats low[M] = {}, high[M] = {};
        for (int d = 0; d < width; d++, keys += PAD) {
            Floats a, b;
            load_piece(keys, a, b);
            for (int m = 0; m < M; m++) {
                low[m] += query[m * width + d] * a;
                high[m] += query[m * width + d] * b;
            }
        }
        for (int m = 0; m < M; m++) {
            store(low[m], scores + m * pitch + t);
            store(high[m], scores + m * pitch + t + LANES);
        }
    }
}

// out[m] += sum_t weights[m][t] value[t], values lie as [tokens][stride].
template <typename Value, int M>
inline void blend(const float* weights, int pitch, const Value* values, int stride, int tokens, float* out) {
    for (int d = 0; d < stride; d += PAD) {
        Floats low[M], high[M];
        for (int m = 0; m < M; m++) {
            low[m] = load(out + m * stride + d);
            high[m] = load(out + m * stride + d + LANES);
        }
        for (int t = 0; t < tokens; t++) {
            Floats a, b;
            load_piece(values + size_t(t) * stride + d, a, b);
            for (int m = 0; m < M; m++) {
                low[m] += weights[m * pitch + t] * a;
                high[m] += weights[m * pitch + t] * b;
            }
        }
        for (int m = 0; m < M; m++) {
            store(low[m], out + m * stride + d);
            store(high[m], out + m * stride + d + LANES);
        }
    }
}

// exp(scores - max) in place; returns its sum. What lies between the two parts and behind them becomes 0.
inline float soften(float* scores, int first, int gap, int second, int pitch) {
    auto forbid = [&](int from, int to) { std::fill(scores + from, scores + to, -INFINITY); };
    forbid(first, gap);
    forbid(gap + second, pitch);
    Floats top = all(-INFINITY);
    for (int t = 0; t < pitch; t += LANES) top = greater(load(scores + t), top);
    float highest = top[0];
    for (int i = 1; i < LANES; i++) highest = std::max(highest, top[i]);
    Floats total = {};
    for (int t = 0; t < pitch; t += LANES) {
        Floats mass = exponential(load(scores + t) - highest);
        total += mass;
        store(mass, scores + t);
    }
    return sum(total);
}

// Where everything lies for one layer's attention of one new token per row. library.py declares the same fields.
struct Attention {
    const void *qkv, *cosine, *sine;       // [R, (H + 2 K) D], [R, D], [R, D]
    const void *query_norm, *key_norm;     // [D], or null
    const int64_t *prompt_keys;            // [R] addresses of [layers, K, padded(P) / PAD, D, PAD]
    const int64_t *prompt_values;          // [R] addresses of [layers, K, P, padded(D)]
    const int32_t *prompt_lengths;         // [R]
    void *own_keys, *own_values;           // of this layer: [slots, K, capacity / PAD, D, PAD], [slots, K, capacity, padded(D)]
    const int32_t *slots, *decoded;        // [R]: where a row's own tokens lie, and how many there are
    void *out;                             // [R, H D]
    int32_t rows, heads, kv_heads, width, capacity, layer, threads;
    float scaling, epsilon;
};

// Some query heads of one row that share a key-value head. Keys lie in blocks of PAD tokens, values as
// [tokens][padded(D)].
template <typename Value, int M>
void attend_heads(const float* query, const Attention& shape, const Value* prompt_keys, const Value* prompt_values, int prompt,
    const Value* own_keys, const Value* own_values, int own, std::vector<float>& scratch, Value* out) {
    int gap = padded(prompt), pitch = gap + padded(own), stride = padded(shape.width);
    scratch.resize(size_t(M) * (pitch + stride));
    float* scores = scratch.data();
    float* blended = scores + size_t(M) * pitch;
    score<Value, M>(query, shape.width, prompt_keys, prompt, scores, pitch);
    score<Value, M>(query, shape.width, own_keys, own, scores + gap, pitch);
    std::fill(blended, blended + M * stride, 0.0f);
    float total[M];
    for (int m = 0; m < M; m++) total[m] = soften(scores + size_t(m) * pitch, prompt, gap, own, pitch);
    blend<Value, M>(scores, pitch, prompt_values, stride, prompt, blended);
    blend<Value, M>(scores + gap, pitch, own_values, stride, own, blended);
    for (int m = 0; m < M; m++) {
        const float* from = blended + m * stride;
        Value* to = out + m * shape.width;
        int d = 0;
        for (; d + LANES <= shape.width; d += LANES) store(load(from + d) / total[m], to + d);
        for (; d < shape.width; d++) narrow(from[d] / total[m], &to[d]);
    }
}

template <typename Value>
void attend(const Attention& shape) {
    auto qkv = static_cast<const Value*>(shape.qkv);
    auto cosine = static_cast<const Value*>(shape.cosine), sine = static_cast<const Value*>(shape.sine);
    auto own_keys = static_cast<Value*>(shape.own_keys), own_values = static_cast<Value*>(shape.own_values);
    int rows = shape.rows;
    int width = shape.width, stride = padded(width), queries = shape.heads / shape.kv_heads;
    size_t row_stride = size_t(shape.heads + 2 * shape.kv_heads) * width;
#pragma omp parallel num_threads(shape.threads)
    {
        std::vector<float> query(size_t(queries) * width), key(width), scratch;
#pragma omp for schedule(dynamic, 4)
        for (int task = 0; task < rows * shape.kv_heads; task++) {
            int head = task / rows, row = task % rows;  // neighbours read the same prompt
            const Value* mine = qkv + row * row_stride;
            const Value* cosines = cosine + size_t(row) * width;
            const Value* sines = sine + size_t(row) * width;
            auto prepare = [&](const Value* from, const void* norm_weight, float* to) {
                auto norm = static_cast<const Value*>(norm_weight);
                for (int d = 0; d < width; d++) to[d] = widen(from[d]);
                if (norm) {
                    float scale = inverse_root_mean_square(to, width, shape.epsilon);
                    for (int d = 0; d < width; d++) to[d] = rounded<Value>(rounded<Value>(to[d] * scale) * widen(norm[d]));
                }
                rotate(to, cosines, sines, width);
            };
            for (int m = 0; m < queries; m++) {
                float* to = query.data() + size_t(m) * width;
                prepare(mine + size_t(head * queries + m) * width, shape.query_norm, to);
                for (int d = 0; d < width; d++) to[d] *= shape.scaling;
            }
            prepare(mine + size_t(shape.heads + head) * width, shape.key_norm, key.data());

            size_t place = size_t(shape.slots[row]) * shape.kv_heads + head;
            Value* keys = own_keys + place * width * shape.capacity;
            Value* values = own_values + place * stride * shape.capacity;
            int now = shape.decoded[row], prompt = shape.prompt_lengths[row];
            const Value* value = mine + size_t(shape.heads + shape.kv_heads + head) * width;
            int slot = place_of(now % PAD, value);
            for (int d = 0; d < width; d++) narrow(key[d], &keys[size_t(now / PAD * width + d) * PAD + slot]);
            for (int d = 0; d < width; d++) values[size_t(now) * stride + place_of(d, value)] = value[d];

            size_t part = size_t(shape.layer) * shape.kv_heads + head;
            const Value* shared_keys =
                reinterpret_cast<const Value*>(shape.prompt_keys[row]) + part * width * padded(prompt);
            const Value* shared_values =
                reinterpret_cast<const Value*>(shape.prompt_values[row]) + part * prompt * stride;
            for (int m = 0; m < queries;) {
                Value* to = static_cast<Value*>(shape.out) + (size_t(row) * shape.heads + head * queries + m) * width;
                const float* from = query.data() + size_t(m) * width;
                auto some = [&](auto count) {
                    attend_heads<Value, decltype(count)::value>(
                        from, shape, shared_keys, shared_values, prompt, keys, values, now + 1, scratch, to);
                    m += decltype(count)::value;
                };
                int left = queries - m;
                if (left >= 4) some(std::integral_constant<int, 4>());
                else if (left == 3) some(std::integral_constant<int, 3>());
                else if (left == 2) some(std::integral_constant<int, 2>());
                else some(std::integral_constant<int, 1>());
            }
        }
    }
}

// Logits divided by the temperature, `count` of them in vectors from `z` on; what follows the last one never has mass.
template <typename Value, typename Visit>
inline void each_logit(const Value* z, int count, float temperature, Visit visit) {
    for (int i = 0; i < count; i += LANES) {
        Floats x = all(IMPOSSIBLE);
        if (i + LANES <= count) x = load(z + i);
        else
            for (int lane = 0; i + lane < count; lane++) x[lane] = widen(z[i + lane]);
        if (temperature != 1.0f) x /= temperature;
        visit(i, greater(x, all(IMPOSSIBLE)));  // -infinity times a mass of 0 would be no number
    }
}

template <typename Value>
inline float highest_logit(const Value* z, int vocabulary, float temperature) {
    Floats top = all(IMPOSSIBLE);
    each_logit(z, vocabulary, temperature, [&](int, Floats x) { top = greater(x, top); });
    float highest = top[0];
    for (int i = 1; i < LANES; i++) highest = std::max(highest, top[i]);
    return highest;
}

// Sums over blocks, then over the sums: precise, and what choosing.py draws from.
constexpr int BLOCK = 256;

// The token that choosing.py draws: min {v : sum_{w <= v} p_w > u}, first among sums over blocks, then in the block.
template <typename Value>
void choose(const Value* logits, const double* uniforms, float temperature, int64_t* tokens, float* logprobs, int rows,
    int vocabulary, int threads) {
    int blocks = (vocabulary + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads(threads)
    {
        std::vector<double> upto(blocks);
        std::vector<float> inside(BLOCK);
#pragma omp for schedule(static)
        for (int row = 0; row < rows; row++) {
            const Value* z = logits + size_t(row) * vocabulary;
            float highest = highest_logit(z, vocabulary, temperature);
            auto masses = [&](int block, auto visit) {
                int from = block * BLOCK;
                each_logit(z + from, std::min(BLOCK, vocabulary - from), temperature,
                    [&](int i, Floats x) { visit(i, exponential(x - highest)); });
            };
            double total = 0;
            for (int block = 0; block < blocks; block++) {
                Floats mass = {};
                masses(block, [&](int, Floats part) { mass += part; });
                upto[block] = total += sum(mass);
            }
            double wanted = uniforms[row] * total;
            int block = std::min<int>(std::upper_bound(upto.begin(), upto.end(), wanted) - upto.begin(), blocks - 1);
            std::fill(inside.begin(), inside.end(), 0.0f);
            masses(block, [&](int i, Floats part) { store(part, &inside[i]); });
            double reached = block ? upto[block - 1] : 0.0;
            int chosen = 0;
            for (int i = 0; i < BLOCK; i++) {
                if (inside[i] > 0) chosen = i;  // rounding may point past the last possible token: that one is meant
                reached += inside[i];
                if (reached > wanted) break;
            }
            tokens[row] = int64_t(block) * BLOCK + chosen;
            logprobs[row] = widen(z[tokens[row]]) / temperature - highest - float(std::log(total));
        }
    }
}

// Of every row: log p of its token, entropy, and log sum exp of the logits.
template <typename Value>
void measure_logits(const Value* logits, const int64_t* tokens, float temperature, float* logprobs, float* entropies,
    float* log_totals, int rows, int vocabulary, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int row = 0; row < rows; row++) {
        const Value* z = logits + size_t(row) * vocabulary;
        float highest = highest_logit(z, vocabulary, temperature);
        double total = 0, product = 0;
        for (int from = 0; from < vocabulary; from += BLOCK) {
            Floats mass = {}, masses_times_logits = {};
            each_logit(z + from, std::min(BLOCK, vocabulary - from), temperature, [&](int, Floats x) {
                Floats below = x - highest, part = exponential(below);
                mass += part;
                masses_times_logits += part * below;
            });
            total += sum(mass);
            product += sum(masses_times_logits);
        }
        float log_mass = float(std::log(total));
        log_totals[row] = highest + log_mass;
        entropies[row] = log_mass - float(product / total);
        logprobs[row] = widen(z[tokens[row]]) / temperature - highest - log_mass;
    }
}

// From the logits of `width` tokens, the first of which is `first`, to their gradients, in place:
// d log p_token / dz = [token] - p and dH / dz = -p (log p + H), divided by the temperature.
template <typename Value>
void logit_gradients(Value* logits, const int64_t* tokens, const float* log_totals, const float* entropies,
    const float* dlogprobs, const float* dentropies, float temperature, int64_t first, int rows, int width,
    int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int row = 0; row < rows; row++) {
        Value* z = logits + size_t(row) * width;
        float dlogprob = dlogprobs ? dlogprobs[row] : 0.0f, dentropy = dentropies ? dentropies[row] : 0.0f;
        float entropy = entropies[row], log_total = log_totals[row];
        auto slope = [&](Floats x) {
            Floats logp = x - log_total;
            return exponential(logp) * (-dlogprob - dentropy * (logp + entropy));
        };
        int64_t token = tokens[row] - first;
        float of_token = 0;
        bool here = token >= 0 && token < width;
        if (here) of_token = slope(all(widen(z[token]) / temperature))[0] + dlogprob;
        each_logit(z, width, temperature, [&](int i, Floats x) {
            Floats gradient = slope(x) / temperature;
            if (i + LANES <= width) store(gradient, z + i);
            else
                for (int lane = 0; i + lane < width; lane++) narrow(gradient[lane], &z[i + lane]);
        });
        if (here) narrow(of_token / temperature, &z[token]);
    }
}

}  // namespace

// One set of entry points per storage type, called through ctypes.
#define ENTRY_POINTS(Value, suffix)                                                                                 \
    extern "C" void add_and_normalise_##suffix(Value* hidden, const Value* added, const Value* weight, Value* out,  \
        int rows, int width, float epsilon, int threads) {                                                          \
        add_and_normalise(hidden, added, weight, out, rows, width, epsilon, threads);                               \
    }                                                                                                               \
    extern "C" void gate_##suffix(const Value* gates, const Value* ups, int stride, Value* out, int rows, int width,  \
        int threads) {                                                                                              \
        gate(gates, ups, stride, out, rows, width, threads);                                                        \
    }                                                                                                               \
    extern "C" void gate_backward_##suffix(const Value* gates, const Value* ups, const Value* d, Value* dgates,     \
        Value* dups, int64_t count, int threads) {                                                                  \
        gate_backward(gates, ups, d, dgates, dups, count, threads);                                                 \
    }                                                                                                               \
    extern "C" void normalise_rows_##suffix(const Value* x, const Value* weight, Value* out, float* scales,         \
        int rows, int width, float epsilon, int threads) {                                                          \
        normalise_rows(x, weight, out, scales, rows, width, epsilon, threads);                                      \
    }                                                                                                               \
    extern "C" void normalise_backward_##suffix(const Value* x, const Value* weight, const float* scales,           \
        const Value* dy, Value* dx, float* dweights, int rows, int width, int threads) {                            \
        normalise_backward(x, weight, scales, dy, dx, dweights, rows, width, threads);                              \
    }                                                                                                               \
    extern "C" void attend_##suffix(const Attention* attention) { attend<Value>(*attention); }                      \
    extern "C" void choose_##suffix(const Value* logits, const double* uniforms, float temperature,                 \
        int64_t* tokens, float* logprobs, int rows, int vocabulary, int threads) {                                  \
        choose(logits, uniforms, temperature, tokens, logprobs, rows, vocabulary, threads);                         \
    }                                                                                                               \
    extern "C" void measure_logits_##suffix(const Value* logits, const int64_t* tokens, float temperature,          \
        float* logprobs, float* entropies, float* log_totals, int rows, int vocabulary, int threads) {              \
        measure_logits(logits, tokens, temperature, logprobs, entropies, log_totals, rows, vocabulary, threads);    \
    }                                                                                                               \
    extern "C" void logit_gradients_##suffix(Value* logits, const int64_t* tokens, const float* log_totals,         \
        const float* entropies, const float* dlogprobs, const float* dentropies, float temperature, int64_t first,  \
        int rows, int width, int threads) {                                                                         \
        logit_gradients(logits, tokens, log_totals, entropies, dlogprobs, dentropies, temperature, first, rows,     \
            width, threads);                                                                                        \
    }

ENTRY_POINTS(bf16, bf16)
ENTRY_POINTS(float, fp32)
