/* Latent attention (DeepSeek-AI 2024, DeepSeek-V2): per token, the cache holds a latent of `rank` numbers, and `turned` numbers of a RoPE key
 * that all heads share. The keys and values of a head are linear functions of the latent.
 *
 * The kernel never computes them. A query times a key W_k c is the query W_k^T q times c, and a sum of values W_v c is W_v times the sum
 * of c. So all heads attend to the same keys, [latent, turned], with the latents as values, and a pass reads a fraction of the bytes that
 * full keys and values would take.
 */
/* RoPE of `count` numbers of token t. If pairs are interleaved, the first numbers of all pairs are moved in front of the second ones, unless
 * they stay IN_PAIRS. */
static void turned_apart(const Layer *l, const Pass *p, int t, const value *x, value *out, int count) {
    value y[TAKEN];
    const Kind *k = p->kinds + l->kind;
    turned_by(x, k->cos + p->places[t] * l->rotary, k->sin + p->places[t] * l->rotary, y, count, count, l->rotation);
    const int apart = l->rotation & INTERLEAVED && !(l->rotation & IN_PAIRS);
    for (int i = 0; i < count; i++) out[apart ? i % 2 * (count / 2) + i / 2 : i] = y[i];
}

/* A phase: write each token's latent and RoPE key to the cache, from `found` [T, rank + turned] */
static void keep_latents(Worker *w, const Layer *l, const Pass *p, const value *found, value *latents, value *turned) {
    const int rank = l->latent->rank, rest = l->latent->turned;
    for (int t = first(w, p->tokens); t >= 0; t = next(w)) {
        const value *x = found + (size_t)t * (rank + rest);
        value latent[TAKEN], key[TAKEN];
        normed(x, l->key_norm, latent, rank, l->head_eps);
        turned_apart(l, p, t, x + rank, key, rest);
        if (!mine(w) || spared(p, p->row_of[t], p->slots[t])) continue;
        const int slot = p->slots[t] % KEYS;
        const size_t place = block(p, p->table, p->row_stride, p->head_stride, p->row_of[t], 0, p->slots[t] - slot, rank) + (size_t)slot * rank;
        copied(latent, latents + place, rank);
        copied(key, turned + place / rank * rest, rest);
    }
}

/* A chunk of the work on heads: TILE outputs of one head, for as many tokens as have inputs that fit into TAKEN */
typedef struct {
    int head, tile, begin, n;
} Share;

INLINE int shares(const Layer *l, const Pass *p, int tiles, int inputs) {
    const int most = TAKEN / inputs;
    return l->heads * tiles * ((p->tokens + most - 1) / most);
}

INLINE Share share_of(const Pass *p, int i, int tiles, int inputs) {
    const int most = TAKEN / inputs, parts = (p->tokens + most - 1) / most, begin = i % parts * most;
    return (Share){i / parts / tiles, i / parts % tiles, begin, p->tokens - begin < most ? p->tokens - begin : most};
}

/* A phase: turn queries [T, heads, plain + turned] into queries over the cache, p->projected [T, heads, rank + turned] */
static void ask_latents(Worker *w, const Layer *l, const Pass *p, const value *queries) {
    const int plain = l->latent->plain, rest = l->latent->turned, rank = l->latent->rank, tiles = rank / TILE + 1;
    for (int i = first(w, shares(l, p, tiles, plain + rest)); i >= 0; i = next(w)) {
        const Share s = share_of(p, i, tiles, plain + rest);
        const int last = s.tile == tiles - 1, size = last ? rest : TILE;
        value x[TAKEN], out[TAKEN * TILE / 32];
        entry room[GAP ? TAKEN + TAKEN / 2 : 1];
        for (int t = 0; t < s.n; t++) {
            const value *query = queries + ((size_t)(s.begin + t) * l->heads + s.head) * (plain + rest);
            value *y = last ? out + t * rest : x + t * plain;
            if (last)
                turned_apart(l, p, s.begin + t, query + plain, y, rest);
            else
                copied(query, y, plain);
            const float *factor = p->kinds[l->kind].factor;
            for (int j = 0; factor && j < (last ? rest : plain); j += 16)
                store(y + j, f32_mul(load(y + j), f32_of(factor[p->places[s.begin + t]])));
        }
        const Matrix m = {.values = l->latent->to_latents + (size_t)s.head * rank * plain};
        if (!last) outputs(&m, s.tile * TILE, entries(x, s.n, plain, room), out, s.n, plain, 0);
        for (int t = 0; mine(w) && t < s.n; t++)
            copied(out + t * size, p->projected + ((size_t)(s.begin + t) * l->heads + s.head) * (rank + rest) + s.tile * TILE, size);
    }
}

/* A phase: turn sums of latents p->attended [T, heads, rank] into sums of values, out [T, heads, values] */
static void sum_values(Worker *w, const Layer *l, const Pass *p, value *out) {
    const int rank = l->latent->rank, values = l->latent->values, tiles = values / TILE;
    for (int i = first(w, shares(l, p, tiles, rank)); i >= 0; i = next(w)) {
        const Share s = share_of(p, i, tiles, rank);
        value x[TAKEN], some[TAKEN * TILE / 32];
        entry room[GAP ? TAKEN + TAKEN / 2 : 1];
        for (int t = 0; t < s.n; t++) copied(p->attended + ((size_t)(s.begin + t) * l->heads + s.head) * rank, x + t * rank, rank);
        const Matrix m = {.values = l->latent->to_values + (size_t)s.head * values * rank};
        outputs(&m, s.tile * TILE, entries(x, s.n, rank, room), some, s.n, rank, 0);
        for (int t = 0; mine(w) && t < s.n; t++)
            copied(some + t * TILE, out + ((size_t)(s.begin + t) * l->heads + s.head) * values + s.tile * TILE, TILE);
    }
}

/* The attention of a layer. Latents and RoPE keys go to their tokens' slots. Intermediate results use the MLP's scratch memory. */
static void latent_attention(Worker *w, const Layer *l, const Pass *p, const uint8_t *mask, value *x, value *latents, value *turned) {
    const Latent *m = l->latent;
    const int T = p->tokens, H = l->hidden, kept = m->rank + m->turned, heads = l->heads * (m->plain + m->turned);
    const value *inputs = entered(w, l, p, l->before, x);
    value *found = p->thin, *queries = p->wide;
    product(w, &m->kept, inputs, found, T, H, kept, 0);
    keep_latents(w, l, p, found, latents, turned);
    if (m->query_rank) {
        product(w, &m->query_in, inputs, found, T, H, m->query_rank, 0);
        norms(w, found, l->query_norm, found, T, m->query_rank, l->head_eps);
    }
    product(w, &m->query, m->query_rank ? found : inputs, queries, T, m->query_rank ? m->query_rank : H, heads, 0);
    ask_latents(w, l, p, queries);
    attention(w, l, p, &(Asked){latents, latents, p->row_stride, p->head_stride, l->heads * kept, p->slots, 0, mask, 0, p->table, turned});
    sum_values(w, l, p, queries);
    give(w, l, p, &l->output, queries, l->heads * m->values, l->attention_given, x);
    left(w, l, p, l->before, x);
}
