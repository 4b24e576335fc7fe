// The vertices of an order-k diagram in plain C++, with the number of dimensions known to the
// compiler: the same walk without any proof, bounds or facets. What level_walk is compared with.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

template <int D> struct Walk {
    static constexpr int S = D + 1;
    using On = std::array<int16_t, S>;
    struct Vertex { On on; int32_t end[2 * S]; };
    const double *columns, *bias;
    int experts, k;
    std::vector<Vertex> vertices;
    std::vector<int32_t> table;
    uint64_t mask = 0;
    static uint64_t code(const On &on) {
        uint64_t c = 0;
        for (int16_t e : on) c = (c ^ (uint64_t)e) * 0x9E3779B97F4A7C15ull, c ^= c >> 29;
        return c;
    }
    int number(const On &on) {
        if (2 * vertices.size() >= table.size()) {
            table.assign(std::max<size_t>(1024, 4 * table.size()), -1);
            mask = table.size() - 1;
            for (size_t v = 0; v < vertices.size(); ++v) {
                uint64_t s = code(vertices[v].on) & mask;
                while (table[s] >= 0) s = (s + 1) & mask;
                table[s] = v;
            }
        }
        uint64_t s = code(on) & mask;
        while (table[s] >= 0) {
            if (vertices[table[s]].on == on) return table[s];
            s = (s + 1) & mask;
        }
        int v = table[s] = vertices.size();
        vertices.push_back({on, {}});
        std::fill(vertices[v].end, vertices[v].end + 2 * S, -1);
        return v;
    }
    long run(const int16_t *first) {
        On start;
        std::copy(first, first + S, start.begin());
        number(start);
        std::vector<double> f(experts), h(experts), inverse_f(experts);
        for (size_t v = 0; v < vertices.size(); ++v) {
            const On on = vertices[v].on;
            double m[S][2 * S];
            for (int r = 0; r < S; ++r) {
                for (int c = 0; c < 2 * S; ++c) m[r][c] = 0.0;
                for (int c = 0; c < D; ++c) m[r][c] = columns[c * experts + on[r]];
                m[r][D] = -1.0;
                m[r][S + r] = 1.0;
            }
            for (int c = 0; c < S; ++c) {
                int p = c;
                for (int r = c + 1; r < S; ++r) if (std::fabs(m[r][c]) > std::fabs(m[p][c])) p = r;
                if (p != c) for (int j = 0; j < 2 * S; ++j) std::swap(m[c][j], m[p][j]);
                const double scale = 1.0 / m[c][c];
                for (int j = 0; j < 2 * S; ++j) m[c][j] *= scale;
                for (int r = 0; r < S; ++r) {
                    if (r == c) continue;
                    const double factor = m[r][c];
                    for (int j = 0; j < 2 * S; ++j) m[r][j] -= factor * m[c][j];
                }
            }
            double y[S];
            for (int r = 0; r < S; ++r) {
                y[r] = 0.0;
                for (int c = 0; c < S; ++c) y[r] -= m[r][S + c] * bias[on[c]];
            }
            for (int j = 0; j < experts; ++j) {
                double value = bias[j] - y[D];
                for (int c = 0; c < D; ++c) value += columns[c * experts + j] * y[c];
                f[j] = value;
            }
            for (int r = 0; r < S; ++r) f[on[r]] = -1.0;
            int above = 0;
            for (int j = 0; j < experts; ++j) {
                above += f[j] > 0.0;
                inverse_f[j] = 1.0 / f[j];
            }
            for (int r = 0; r < S; ++r) inverse_f[on[r]] = 0.0;
            for (int c = 0; c < S; ++c) {
                const bool down = above >= k - D + 1 && vertices[v].end[2 * c] == -1;
                const bool up = above <= k - 2 && vertices[v].end[2 * c + 1] == -1;
                if (!down && !up) continue;
                double largest = 0.0, least = 0.0;
                for (int j = 0; j < experts; ++j) {
                    double slope = -m[D][S + c];
                    for (int i = 0; i < D; ++i) slope += columns[i * experts + j] * m[i][S + c];
                    h[j] = -slope * inverse_f[j];
                    largest = h[j] > largest ? h[j] : largest;
                    least = h[j] < least ? h[j] : least;
                }
                for (int side = 0; side < 2; ++side) {
                    if (!(side ? up : down)) continue;
                    const double nearest = side ? largest : least;
                    int32_t end = -2;
                    if (nearest != 0.0) {
                        int met = 0;
                        while (h[met] != nearest) ++met;
                        On next = on;
                        next[c] = met;
                        std::sort(next.begin(), next.end());
                        end = number(next);
                        const int place = std::find(next.begin(), next.end(), met) - next.begin();
                        vertices[end].end[2 * place + (f[met] > 0.0)] = v;
                    }
                    vertices[v].end[2 * c + side] = end;
                }
            }
        }
        return vertices.size();
    }
};

template <int D>
static long walk(const double *columns, const double *bias, int experts, int k,
                 const int16_t *first) {
    Walk<D> w{columns, bias, experts, k};
    return w.run(first);
}

// The number of vertices that are reached from the one with the experts ``first`` on the level.
extern "C" long walk_vertices(const double *columns, const double *bias, int experts, int dims,
                              int k, const int16_t *first) {
    switch (dims) {
    case 2: return walk<2>(columns, bias, experts, k, first);
    case 3: return walk<3>(columns, bias, experts, k, first);
    case 4: return walk<4>(columns, bias, experts, k, first);
    case 5: return walk<5>(columns, bias, experts, k, first);
    case 6: return walk<6>(columns, bias, experts, k, first);
    }
    return -1;
}
