#include "cpu/matmul.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <map>
#include <oneapi/dnnl/dnnl.hpp>
#include <tuple>
#include <vector>

#include "cpu/buffer.h"
#include "cpu/threads.h"

namespace bam {

using dnnl::memory;

namespace {

memory::data_type type_of(DType t) { return t == DType::bf16 ? memory::data_type::bf16 : memory::data_type::f32; }

// A product C (M, N) {=, +=} A (M, K) B (K, N). A and B are row-major, or stored transposed.
struct Shape {
    int64_t M, N, K;
    DType a, b, c;
    bool a_transposed, b_transposed, accumulate;

    auto key() const { return std::tie(M, N, K, a, b, c, a_transposed, b_transposed, accumulate); }
    bool operator<(const Shape& o) const { return key() < o.key(); }
};

memory::desc describe(int64_t rows, int64_t columns, DType t, bool transposed) {
    return {{rows, columns}, type_of(t), transposed ? memory::dims{1, rows} : memory::dims{columns, 1}};
}

struct Weight {
    Tensor master;
    DType compute;
    Buffer copy = {}, transposed = {};  // bf16 (out, in) and (in, out); the latter on first need
    Buffer rounded = {};                // where bf16 is refused: fp32 (out, in), rounded to bf16
    bool need_transposed = false;
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
    std::vector<Weight> weights;
    Buffer scratchpad;
    Buffer converted[3];
    bool bf16_works = true;

    Impl(const Kernels& k, int threads) : kernels(k), threads(threads) {
        try {
            make({32, 32, 32, DType::bf16, DType::bf16, DType::f32, false, false, false});
        } catch (const dnnl::error&) {
            bf16_works = false;
        }
    }

    Primitive make(const Shape& s) const {
        const memory::desc a = describe(s.M, s.K, s.a, s.a_transposed), b = describe(s.K, s.N, s.b, s.b_transposed),
                           c = describe(s.M, s.N, s.c, false);
        dnnl::primitive_attr attr;
        attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
        if (s.accumulate) {
            dnnl::post_ops sum;
            sum.append_sum(1.0f);
            attr.set_post_ops(sum);
        }
        const dnnl::matmul::primitive_desc pd({a, b, c}, attr, engine);
        return {dnnl::matmul(pd), a, b, c, pd.scratchpad_desc(), pd.impl_info_str()};
    }

    const Primitive& primitive(const Shape& s) {
        auto it = primitives.find(s);
        if (it == primitives.end()) it = primitives.emplace(s, make(s)).first;
        return it->second;
    }

    void multiply(const Shape& s, void* c, const void* a, const void* b) {
        if (s.M == 0 || s.N == 0) return;
        const Primitive& p = primitive(s);
        p.run.execute(stream, {{DNNL_ARG_SRC, memory(p.a, engine, const_cast<void*>(a))},
                               {DNNL_ARG_WEIGHTS, memory(p.b, engine, const_cast<void*>(b))},
                               {DNNL_ARG_DST, memory(p.c, engine, c)},
                               {DNNL_ARG_SCRATCHPAD, memory(p.scratchpad, engine, scratchpad.room<char>(p.scratchpad.get_size()))}});
    }

    // x as fp32, through `buffer` if it is bf16.
    const float* as_fp32(Tensor x, Buffer& buffer) const {
        if (x.dtype == DType::f32) return x.as<float>();
        const uint16_t* from = static_cast<const uint16_t*>(x.data);
        float* to = buffer.room<float>(x.numel());
        for_ranges(threads, x.numel(), 1 << 14, [&](int64_t b, int64_t e) { kernels.to_fp32(to + b, from + b, e - b); });
        return to;
    }

    // Same product in fp32, the result rounded to c's type.
    void multiply_fp32(Shape s, Tensor c, const float* a, const float* b) {
        s.a = s.b = s.c = DType::f32;
        if (c.dtype == DType::f32) return multiply(s, c.data, a, b);
        float* wide = converted[2].room<float>(c.numel());
        multiply(s, wide, a, b);
        uint16_t* to = static_cast<uint16_t*>(c.data);
        for_ranges(threads, c.numel(), 1 << 14, [&](int64_t b, int64_t e) { kernels.to_bf16(to + b, wide + b, e - b); });
    }

    void refresh(Weight& w) {
        if (w.compute == DType::f32) return;
        const int64_t n = w.master.numel(), out = w.master.shape[0], in = w.master.shape[1];
        const float* from = w.master.as<float>();
        if (!bf16_works) {
            float* to = w.rounded.room<float>(n);
            for_ranges(threads, n, 1 << 14, [&](int64_t b, int64_t e) { kernels.round_to_bf16(to + b, from + b, e - b); });
            return;
        }
        uint16_t* copy = w.copy.room<uint16_t>(n);
        for_ranges(threads, n, 1 << 14, [&](int64_t b, int64_t e) { kernels.to_bf16(copy + b, from + b, e - b); });
        if (!w.need_transposed) return;
        uint16_t* to = w.transposed.room<uint16_t>(n);
        for_ranges(threads, out, 64, [&](int64_t b, int64_t e) {
            kernels.transpose16(to + b, copy + b * in, e - b, in, out, in);
        });
    }
};

Matmul::Matmul(const Kernels& kernels, int threads) : impl_(std::make_unique<Impl>(kernels, threads)) {}
Matmul::~Matmul() = default;

std::string Matmul::version() {
    const dnnl::version_t* v = dnnl::version();
    return std::to_string(v->major) + "." + std::to_string(v->minor) + "." + std::to_string(v->patch);
}

int Matmul::bind(Tensor master, DType compute) {
    impl_->weights.push_back({master, compute});
    impl_->refresh(impl_->weights.back());
    return int(impl_->weights.size()) - 1;
}

void Matmul::refresh() {
    for (Weight& w : impl_->weights) impl_->refresh(w);
}

int64_t Matmul::weight_bytes(int64_t out, int64_t in, DType compute) {
    return compute == DType::f32 ? 0 : out * in * 4;  // two bf16 copies, or one rounded fp32 copy
}

void Matmul::forward(Tensor y, Tensor x, int id) {
    Weight& w = impl_->weights[id];
    const int64_t out = w.master.shape[0], in = w.master.shape[1];
    const Shape s{x.numel() / in, out, in, w.compute, w.compute, y.dtype, false, true, false};
    if (w.compute == DType::f32) return impl_->multiply(s, y.data, x.data, w.master.data);
    if (impl_->bf16_works) return impl_->multiply(s, y.data, x.data, w.copy.get<uint16_t>());
    impl_->multiply_fp32(s, y, impl_->as_fp32(x, impl_->converted[0]), w.rounded.get<float>());
}

void Matmul::backward(Tensor dx, Tensor dw, Tensor dy, Tensor x, int id) {
    Impl& m = *impl_;
    Weight& w = m.weights[id];
    const int64_t out = w.master.shape[0], in = w.master.shape[1], N = dy.numel() / out;
    const bool plain = w.compute == DType::f32 || m.bf16_works;
    if (dx) {
        const bool transposed = w.compute == DType::bf16 && m.bf16_works;
        if (transposed && !w.need_transposed) w.need_transposed = true, m.refresh(w);
        const Shape s{N, in, out, w.compute, w.compute, dx.dtype, false, transposed, false};
        if (!plain) m.multiply_fp32(s, dx, m.as_fp32(dy, m.converted[0]), w.rounded.get<float>());
        else m.multiply(s, dx.data, dy.data, transposed ? w.transposed.get<void>() : w.master.data);
    }
    if (dw) {
        const Shape s{out, in, N, w.compute, w.compute, DType::f32, true, false, true};
        if (!plain) m.multiply_fp32(s, dw, m.as_fp32(dy, m.converted[0]), m.as_fp32(x, m.converted[1]));
        else m.multiply(s, dw.data, dy.data, x.data);
    }
}

bool Matmul::fast_bf16() const {
    const dnnl::cpu_isa isa = dnnl::get_effective_cpu_isa();
    return impl_->bf16_works && (isa == dnnl::cpu_isa::avx512_core_bf16 || isa == dnnl::cpu_isa::avx512_core_amx);
}

std::string Matmul::implementation(DType compute) const {
    if (compute == DType::bf16 && !impl_->bf16_works)
        return "fp32 of rounded operands, " + implementation(DType::f32);
    return impl_->primitive({2048, 3072, 768, compute, compute, compute, false, true, false}).name;
}

double Matmul::measure(DType compute) {
    constexpr int64_t N = 2048, out = 3072, in = 768;
    const DType t = compute == DType::bf16 && !impl_->bf16_works ? DType::f32 : compute;
    const int64_t size = size_of(t);
    std::vector<char> x(N * in * size, 1), w(out * in * size, 1), y(N * out * size);
    double best = 0;
    for (bool transposed : {true, false}) {
        const Shape s{N, out, in, t, t, t, false, transposed, false};
        std::vector<double> seconds;
        for (int i = 0; i < 13; ++i) {
            const auto begin = std::chrono::steady_clock::now();
            impl_->multiply(s, y.data(), x.data(), w.data());
            const std::chrono::duration<double> d = std::chrono::steady_clock::now() - begin;
            if (i >= 3) seconds.push_back(d.count());
        }
        std::sort(seconds.begin(), seconds.end());
        best = std::max(best, 2.0 * N * out * in / ((seconds[4] + seconds[5]) / 2));
    }
    return best;
}

}  // namespace bam
