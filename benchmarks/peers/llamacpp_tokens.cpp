// llama.cpp with token ids in and out, and no stop at EOS: after examples/speculative-simple and examples/lookup of llama.cpp
// (MIT licence, the ggml authors), whose library it is linked with. Options are those of llama-speculative-simple;
// --foredraft-lookup drafts as llama-lookup does, by n-grams of 4 to 1. Reads "TOKENS id id id ..." lines from stdin and writes
// one line of JSON for each to stdout; lines that are meant for the reader begin with "> ".
#include "arg.h"
#include "common.h"
#include "llama.h"
#include "log.h"
#include "ngram-cache.h"
#include "sampling.h"
#include "speculative.h"

#include <algorithm>
#include <clocale>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

static double now() { return ggml_time_us() / 1e6; }

struct Engine {
    llama_model * model;
    llama_context * ctx;
    llama_context * ctx_dft;
    common_params params;
    bool lookup;
    int gamma;
};

// Continues `inp` by `n` tokens; the speculator is new for each prompt, so that nothing is remembered of the last.
static int generate(Engine & engine, llama_tokens inp, int n) {
    llama_context * ctx = engine.ctx;
    llama_context * ctx_dft = engine.ctx_dft;
    llama_memory_clear(llama_get_memory(ctx), true);
    if (ctx_dft) llama_memory_clear(llama_get_memory(ctx_dft), true);
    const double begin = now();
    double drafting = 0, scoring = 0;
    common_sampler_ptr smpl(common_sampler_init(engine.model, engine.params.sampling));
    common_speculative * spec = common_speculative_init(engine.params.speculative, 1);
    common_ngram_cache cache, empty1, empty2;
    if (engine.lookup) common_ngram_cache_update(cache, LLAMA_NGRAM_MIN, LLAMA_NGRAM_MAX, inp, inp.size(), false);
    {  // the prompt but its last token: a pass that makes no token
        common_batch batch(ctx);
        for (size_t i = 0; i + 1 < inp.size(); ++i) batch.add(inp[i], i, 0, false);
        if (llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get()) != 0) return 2;
        if (spec && !common_speculative_process(spec, batch)) return 2;
    }
    llama_token last = inp.back();
    llama_tokens past(inp.begin(), inp.end() - 1);
    past.reserve(llama_n_ctx(ctx));
    if (spec) common_speculative_begin(spec, 0, past);
    const double prefilled = now();
    llama_tokens out, draft;
    std::vector<double> times;
    common_batch batch(ctx);
    int passes = 0;
    while ((int) out.size() < n) {
        draft.clear();
        const int room = n - (int) out.size() - 1;
        const double t0 = now();
        if (engine.lookup && room > 0) {
            draft.push_back(last);
            common_ngram_cache_draft(inp, draft, std::min(engine.gamma, room), LLAMA_NGRAM_MIN, LLAMA_NGRAM_MAX, cache, empty1, empty2);
            draft.erase(draft.begin());
        } else if (spec && room > 0) {
            common_speculative_get_draft_params(spec, 0) = { true, room, (llama_pos) past.size(), last, &past, &draft };
            common_speculative_draft(spec);
        }
        if ((int) draft.size() > room) draft.resize(std::max(room, 0));
        if (ctx_dft) llama_memory_seq_rm(llama_get_memory(ctx_dft), 0, past.size(), -1);
        const double t1 = now();
        batch.clear();
        batch.add(last, past.size(), 0, true);
        for (size_t i = 0; i < draft.size(); ++i) batch.add(draft[i], past.size() + 1 + i, 0, true);
        if (llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get()) != 0) return 3;
        const double t2 = now();
        if (spec && !common_speculative_process(spec, batch)) return 3;
        drafting += t1 - t0 + now() - t2;
        scoring += t2 - t1;
        ++passes;
        const auto ids = common_sampler_sample_and_accept_n(smpl.get(), ctx, draft);
        if (spec) common_speculative_accept(spec, 0, ids.size() - 1);
        for (llama_token id : ids) {
            past.push_back(last);
            last = id;
            out.push_back(id);
            if (engine.lookup) {
                inp.push_back(id);
                common_ngram_cache_update(cache, LLAMA_NGRAM_MIN, LLAMA_NGRAM_MAX, inp, 1, false);
            }
        }
        times.resize(out.size(), now() - begin);
        llama_memory_seq_rm(llama_get_memory(ctx), 0, past.size(), -1);
        if (ctx_dft) llama_memory_seq_rm(llama_get_memory(ctx_dft), 0, past.size(), -1);
    }
    const double end = now();
    if (spec) common_speculative_free(spec);
    printf("> {\"passes\": %d, \"prefill\": %.6f, \"draft\": %.6f, \"target\": %.6f, \"overhead\": %.6f", passes, prefilled - begin, drafting,
           scoring, end - prefilled - drafting - scoring);
    printf(", \"tokens\": [");
    for (int i = 0; i < n; ++i) printf("%s%d", i ? ", " : "", out[i]);
    printf("], \"times\": [");
    for (int i = 0; i < n; ++i) printf("%s%.6f", i ? ", " : "", times[i]);
    printf("]}\n");
    fflush(stdout);
    return 0;
}

int main(int argc, char ** argv) {
    std::setlocale(LC_NUMERIC, "C");
    Engine engine{};
    std::vector<char *> options;
    for (int i = 0; i < argc; ++i) {
        if (strcmp(argv[i], "--foredraft-lookup") == 0) engine.lookup = true;
        else options.push_back(argv[i]);
    }
    common_init();
    common_params & params = engine.params;
    if (!common_params_parse((int) options.size(), options.data(), params, LLAMA_EXAMPLE_SPECULATIVE)) return 1;
    engine.gamma = engine.lookup ? params.speculative.draft.n_max : common_speculative_n_max(&params.speculative);
    const auto limits = common_speculative_get_output_limits(params.n_batch, 1, engine.gamma);
    params.n_outputs_max = limits.total;
    params.n_outputs_max_per_seq = limits.per_seq;
    params.n_parallel = 1;

    llama_backend_init();
    auto init = common_init_from_params(params);
    engine.model = init->model();
    engine.ctx = init->context();
    common_params params_dft = common_base_params_to_speculative(params);
    auto spec_init = common_speculative_init_from_params(params_dft, engine.model, engine.ctx);
    engine.ctx_dft = spec_init->context();
    params.speculative.draft.ctx_tgt = engine.ctx;
    params.speculative.draft.ctx_dft = engine.ctx_dft;

    printf("> ready\n");
    fflush(stdout);
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        int n = 0;
        llama_tokens ids;
        words >> n;
        for (int id; words >> id;) ids.push_back(id);
        if (n < 1 || ids.size() < 2) return 4;
        if (const int failed = generate(engine, ids, n)) return failed;
    }
    llama_backend_free();
    return 0;
}
