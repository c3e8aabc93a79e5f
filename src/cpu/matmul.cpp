#include "cpu/matmul.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <oneapi/dnnl/dnnl.hpp>
#include <tuple>
#include <vector>

#include "cpu/buffer.h"
#include "cpu/threads.h"

namespace bam {

using dnnl::memory;

namespace {

memory::data_type type_of(DType t) {
    return t == DType::bf16 ? memory::data_type::bf16 : memory::data_type::f32;
}

enum class Layout : uint8_t { rows, transposed, packed };  // packed: in the blocks oneDNN likes best

// A product C (M, N) {=, +=} A (M, K) B (K, N); A and C by rows.
struct Shape {
    int64_t M, N, K;
    DType in, out;
    Layout a, b;
    bool accumulate;

    auto key() const { return std::tie(M, N, K, in, out, a, b, accumulate); }
    bool operator<(const Shape& o) const { return key() < o.key(); }
};

memory::desc describe(int64_t rows, int64_t columns, DType t, Layout l) {
    if (l == Layout::packed) return {{rows, columns}, type_of(t), memory::format_tag::any};
    return {{rows, columns}, type_of(t), l == Layout::transposed ? memory::dims{1, rows} : memory::dims{columns, 1}};
}

int64_t round_up(int64_t n, int64_t unit) {
    return (n + unit - 1) / unit * unit;
}

// Whether d is (K, N) in the blocks that isa/pack.cpp writes.
bool is_pack_format(const memory::desc& d, int64_t K) {
    const auto& b = d.data.format_desc.blocking;
    const auto &inner = b.inner_blks, &index = b.inner_idxs;
    return d.data_type() == memory::data_type::bf16 && d.data.format_kind == dnnl_blocked && b.inner_nblks == 3 &&
           inner[0] == kPackK / 2 && inner[1] == kPackN && inner[2] == 2 && index[0] == 0 && index[1] == 1 &&
           index[2] == 0 && b.strides[0] == kPackK * kPackN && b.strides[1] == round_up(K, kPackK) * kPackN;
}

constexpr int64_t kFarBytes = 4 << 20;  // results beyond this are not kept in the caches

// A matrix in the form that one kind of product wants.
struct Form {
    memory::desc desc;
    Buffer data;
    bool wanted = false;
};

// Packed (in, out) and (out, in). In fp32 forward multiplies by the master, or by `rounded`.
struct Copies {
    Form forward = {}, backward = {};
    Buffer rounded = {};  // where bf16 is refused: the master rounded to bf16, fp32
};

struct Weight {
    Tensor master;  // (out, in) f32
    DType compute;
    bool keep;
    Copies kept = {};
};

}  // namespace

struct Matmul::Impl {
    struct Primitive {
        dnnl::matmul run;
        memory::desc a, b, c, scratchpad;
        std::string name;
    };

    const Kernels& kernels;
    int threads;
    dnnl::engine engine{dnnl::engine::kind::cpu, 0};
    dnnl::stream stream{engine};
    std::map<Shape, Primitive> primitives;
    std::deque<Weight> weights;
    Buffer scratchpad, repacked, wide_dy, wide_x, wide_c, transposed;
    Form x_packed;
    Copies made;  // of a weight that keeps none, until the next use of one
    bool bf16_works = true, fast_bf16;

    Impl(const Kernels& k, int threads) : kernels(k), threads(threads) {
        try {
            make({32, 32, 32, DType::bf16, DType::f32, Layout::rows, Layout::rows, false});
        } catch (const dnnl::error&) {
            bf16_works = false;
        }
        const dnnl::cpu_isa isa = dnnl::get_effective_cpu_isa();
        fast_bf16 = bf16_works && (isa == dnnl::cpu_isa::avx512_core_bf16 || isa == dnnl::cpu_isa::avx512_core_amx);
    }

    Primitive make(const Shape& s) const {
        const memory::desc a = describe(s.M, s.K, s.in, s.a), b = describe(s.K, s.N, s.in, s.b),
                           c = describe(s.M, s.N, s.out, Layout::rows);
        dnnl::primitive_attr attr;
        attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
        if (s.accumulate) {
            dnnl::post_ops sum;
            sum.append_sum(1.0f);
            attr.set_post_ops(sum);
        }
        const dnnl::matmul::primitive_desc pd({a, b, c}, attr, engine);
        return {dnnl::matmul(pd), a, pd.weights_desc(), c, pd.scratchpad_desc(), pd.impl_info_str()};
    }

    const Primitive& primitive(const Shape& s) {
        auto it = primitives.find(s);
        if (it == primitives.end()) it = primitives.emplace(s, make(s)).first;
        return it->second;
    }

    void reorder(const memory::desc& to, void* y, const memory::desc& from, const void* x) {
        memory source(from, engine, const_cast<void*>(x)), result(to, engine, y);
        dnnl::reorder(source, result).execute(stream, source, result);
    }

    void execute(const Primitive& p, void* c, const void* a, const void* b) {
        p.run.execute(stream, {{DNNL_ARG_SRC, memory(p.a, engine, const_cast<void*>(a))},
                               {DNNL_ARG_WEIGHTS, memory(p.b, engine, const_cast<void*>(b))},
                               {DNNL_ARG_DST, memory(p.c, engine, c)},
                               {DNNL_ARG_SCRATCHPAD,
                                memory(p.scratchpad, engine, scratchpad.room<char>(p.scratchpad.get_size()))}});
    }

    void multiply(const Shape& s, void* c, const void* a, const void* b) {
        if (s.M > 0) execute(primitive(s), c, a, b);
    }

    // B in a form packed for another M, which so far has always been the same form.
    void multiply(const Shape& s, void* c, const void* a, const Form& b) {
        if (s.M == 0) return;
        const Primitive& p = primitive(s);
        if (p.b == b.desc) return execute(p, c, a, b.data.get<void>());
        void* y = repacked.room<char>(p.b.get_size());
        reorder(p.b, y, b.desc, b.data.get<void>());
        execute(p, c, a, y);
    }

    // ---- forms ------------------------------------------------------------------------------------------------------

    // Gives f room for a packed (K, N) matrix; whether it is in the blocks of isa/pack.cpp.
    bool reserve(Form& f, int64_t K, int64_t N, DType compute) {
        f.desc = primitive({1024, N, K, compute, compute, Layout::rows, Layout::packed, false}).b;
        f.data.room<char>(f.desc.get_size());
        return is_pack_format(f.desc, K);
    }

    // Where (k, n) of a packed (K, N) matrix is; n at the beginning of a block.
    static uint16_t* packed_at(const Form& f, int64_t K, int64_t k, int64_t n) {
        return f.data.get<uint16_t>() + n * round_up(K, kPackK) + k * kPackN;
    }

    // f = x (K, N), bf16 by rows, packed.
    void pack(Form& f, int64_t K, int64_t N, const uint16_t* x) {
        if (!reserve(f, K, N, DType::bf16))
            return reorder(f.desc, f.data.get<void>(), describe(K, N, DType::bf16, Layout::rows), x);
        constexpr int64_t kRows = 8 * kPackK;
        const int64_t columns = (N + kPackN - 1) / kPackN, steps = (K + kRows - 1) / kRows;
        for_parts(threads, columns * steps, [&](int64_t i, int) {
            const int64_t n = i % columns * kPackN, k = i / columns * kRows;
            kernels.pack_kn(packed_at(f, K, k, n), x + k * N + n, true, std::min(kRows, K - k), N,
                            int(std::min<int64_t>(kPackN, N - n)), 2 * K * N > kFarBytes);
        });
    }

    // x (rows, columns) transposed, until the next call.
    const uint16_t* transpose(const uint16_t* x, int64_t rows, int64_t columns) {
        constexpr int64_t kRows = 256, kColumns = 64;
        uint16_t* y = transposed.room<uint16_t>(rows * columns);
        const int64_t across = (columns + kColumns - 1) / kColumns, down = (rows + kRows - 1) / kRows;
        for_parts(threads, across * down, [&](int64_t i, int) {
            const int64_t c = i % across * kColumns, r = i / across * kRows;
            kernels.transpose16(y + c * rows + r, x + r * columns + c, std::min(kRows, rows - r),
                                std::min(kColumns, columns - c), rows, columns, 2 * rows * columns > kFarBytes);
        });
        return y;
    }

    // The wanted forms in bf16 in one pass over the master, a part of kPackN rows of it at a time.
    void pack_both(Copies& w, Tensor master) {
        const float* x = master.as<float>();
        const int64_t out = master.shape[0], in = master.shape[1];
        const bool far = 2 * out * in > kFarBytes;
        constexpr int64_t kColumns = 4 * kPackN;
        const int64_t rows = (out + kPackN - 1) / kPackN, steps = (in + kColumns - 1) / kColumns;
        for_parts(threads, rows * steps, [&](int64_t part, int) {
            const int64_t o = part / steps * kPackN, i = part % steps * kColumns,
                          height = std::min<int64_t>(kPackN, out - o);
            const float* from = x + o * in + i;
            if (w.forward.wanted)
                kernels.pack_nk(packed_at(w.forward, in, i, o), from, std::min(kColumns, in - i), in, int(height), far);
            if (!w.backward.wanted) return;
            for (int64_t n = i; n < std::min(in, i + kColumns); n += kPackN)
                kernels.pack_kn(packed_at(w.backward, out, o, n), x + o * in + n, false, height, in,
                                int(std::min<int64_t>(kPackN, in - n)), far);
        });
    }

    bool refuses(DType compute) const { return compute == DType::bf16 && !bf16_works; }

    // Makes the wanted copies of the master.
    void fill(Copies& w, Tensor master, DType compute) {
        const int64_t n = master.numel(), out = master.shape[0], in = master.shape[1];
        const float* source = master.as<float>();
        if (refuses(compute)) {
            float* to = w.rounded.room<float>(n);
            for_ranges(threads, n, 1 << 14,
                       [&](int64_t b, int64_t e) { kernels.round_to_bf16(to + b, source + b, e - b); });
            source = to, compute = DType::f32;
        }
        const bool blocks = (!w.forward.wanted || reserve(w.forward, in, out, compute)) &
                            (!w.backward.wanted || reserve(w.backward, out, in, compute));
        if (blocks) return pack_both(w, master);
        auto fill = [&](Form& f, int64_t K, int64_t N, Layout layout) {
            if (f.wanted) reorder(f.desc, f.data.get<void>(), describe(K, N, DType::f32, layout), source);
        };
        fill(w.forward, in, out, Layout::transposed);
        fill(w.backward, out, in, Layout::rows);
    }

    bool packs_forward(const Weight& w) const { return w.compute == DType::bf16 && bf16_works; }

    // The copies that one direction multiplies by.
    const Copies& copies(Weight& w, bool backward) {
        if (!w.keep) {
            made.forward.wanted = !backward && packs_forward(w);
            made.backward.wanted = backward;
            fill(made, w.master, w.compute);
            return made;
        }
        if (backward && !w.kept.backward.wanted) {
            w.kept.backward.wanted = true;
            fill(w.kept, w.master, w.compute);
        }
        return w.kept;
    }

    // ---- products where bf16 is refused
    // -------------------------------------------------------------------------------

    const void* as_fp32(Tensor x, Buffer& buffer) const {
        if (x.dtype == DType::f32) return x.data;
        const uint16_t* from = static_cast<const uint16_t*>(x.data);
        float* to = buffer.room<float>(x.numel());
        for_ranges(threads, x.numel(), 1 << 14,
                   [&](int64_t b, int64_t e) { kernels.to_fp32(to + b, from + b, e - b); });
        return to;
    }

    // The product in fp32, its result rounded to c's type.
    template <typename B>
    void multiply_fp32(Shape s, Tensor c, const void* a, const B& b) {
        s.in = s.out = DType::f32;
        if (c.dtype == DType::f32) return multiply(s, c.data, a, b);
        float* wide = wide_c.room<float>(c.numel());
        multiply(s, wide, a, b);
        uint16_t* to = static_cast<uint16_t*>(c.data);
        for_ranges(threads, c.numel(), 1 << 14,
                   [&](int64_t b, int64_t e) { kernels.to_bf16(to + b, wide + b, e - b); });
    }
};

Matmul::Matmul(const Kernels& kernels, int threads) : impl_(std::make_unique<Impl>(kernels, threads)) {}
Matmul::~Matmul() = default;

std::string Matmul::version() {
    const dnnl::version_t* v = dnnl::version();
    return std::to_string(v->major) + "." + std::to_string(v->minor) + "." + std::to_string(v->patch);
}

int Matmul::bind(Tensor master, DType compute, bool keep_copies) {
    Weight& w = impl_->weights.emplace_back();
    w.master = master, w.compute = compute, w.keep = keep_copies;
    w.kept.forward.wanted = impl_->packs_forward(w);
    if (w.keep) impl_->fill(w.kept, master, compute);
    return int(impl_->weights.size()) - 1;
}

void Matmul::refresh() {
    for (Weight& w : impl_->weights)
        if (w.keep) impl_->fill(w.kept, w.master, w.compute);
}

int64_t Matmul::weight_bytes(int64_t out, int64_t in, DType compute) const {
    const int64_t n = round_up(out, kPackN) * round_up(in, kPackN);
    if (impl_->refuses(compute)) return (4 + 4) * n;
    return compute == DType::f32 ? 4 * n : (2 + 2) * n;
}

void Matmul::forward(Tensor y, Tensor x, int id) {
    Impl& m = *impl_;
    Weight& w = m.weights[id];
    const int64_t out = w.master.shape[0], in = w.master.shape[1];
    Shape s{x.numel() / in, out, in, w.compute, y.dtype, Layout::rows, Layout::packed, false};
    if (m.packs_forward(w)) return m.multiply(s, y.data, x.data, m.copies(w, false).forward);
    s.b = Layout::transposed;
    if (w.compute == DType::f32)
        m.multiply(s, y.data, x.data, w.master.data);
    else
        m.multiply_fp32(s, y, m.as_fp32(x, m.wide_x), m.copies(w, false).rounded.get<const void>());
}

void Matmul::backward(Tensor dx, Tensor dw, Tensor dy, Tensor x, int id) {
    Impl& m = *impl_;
    Weight& w = m.weights[id];
    const int64_t out = w.master.shape[0], in = w.master.shape[1], N = dy.numel() / out;
    const bool as_asked = !m.refuses(w.compute);
    const void* wide_dy = as_asked ? nullptr : m.as_fp32(dy, m.wide_dy);
    if (dx) {
        const Form& w_packed = m.copies(w, true).backward;
        const Shape s{N, in, out, w.compute, dx.dtype, Layout::rows, Layout::packed, false};
        if (as_asked)
            m.multiply(s, dx.data, dy.data, w_packed);
        else
            m.multiply_fp32(s, dx, wide_dy, w_packed);
    }
    if (!dw) return;
    Shape s{out, in, N, w.compute, DType::f32, Layout::transposed, Layout::rows, true};
    if (w.compute == DType::f32) return m.multiply(s, dw.data, dy.data, x.data);
    if (!as_asked) return m.multiply_fp32(s, dw, wide_dy, m.as_fp32(x, m.wide_x));
    // Both operands with k, the tokens, as the library's inner loops want it: 1.1 times as fast with AVX-512, more with
    // AMX.
    const uint16_t* dy_t = m.transpose(static_cast<const uint16_t*>(dy.data), N, out);
    m.pack(m.x_packed, N, in, static_cast<const uint16_t*>(x.data));
    s.a = Layout::rows, s.b = Layout::packed;
    m.multiply(s, dw.data, dy_t, m.x_packed);
}

bool Matmul::fast_bf16() const {
    return impl_->fast_bf16;
}

std::string Matmul::implementation(DType compute) const {
    if (compute == DType::bf16 && !impl_->bf16_works) return "fp32 of rounded operands, " + implementation(DType::f32);
    return impl_->primitive({2048, 3072, 768, compute, compute, Layout::rows, Layout::packed, false}).name;
}

double Matmul::measure(DType compute) {
    constexpr int64_t N = 2048, out = 3072, in = 768;
    const DType t = compute == DType::bf16 && !impl_->bf16_works ? DType::f32 : compute;
    std::vector<float> x(N * in, 1.0f), w(out * in, 1.0f), y(N * out);
    double best = 0;
    for (Layout l : {Layout::rows, Layout::transposed, Layout::packed}) {
        const Shape s{N, out, in, t, t, Layout::rows, l, false};
        std::vector<double> seconds;
        for (int i = 0; i < 13; ++i) {
            const auto begin = std::chrono::steady_clock::now();
            impl_->multiply(s, y.data(), x.data(), static_cast<const void*>(w.data()));
            const std::chrono::duration<double> d = std::chrono::steady_clock::now() - begin;
            if (i >= 3) seconds.push_back(d.count());
        }
        std::sort(seconds.begin(), seconds.end());
        best = std::max(best, 2.0 * N * out * in / ((seconds[4] + seconds[5]) / 2));
    }
    return best;
}

}  // namespace bam
