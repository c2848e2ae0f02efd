/* Runs what vectors.h has and almost all of layer.c on fixed numbers, and prints of each result a name, a hash of its bits, and some of its numbers.
 * test_native_vectors.py compares these lines between instruction sets. No number is printed where one has no meaning. */
#include "layer.c"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { H = 128, K = 192, N = 128, MOST_TOKENS = 60, THREADS = 2 };

static uint32_t state = 1;

static uint32_t any(void) { return state = state * 1664525u + 1013904223u, state >> 8 ^ state << 16; }
static float between(float low, float high) { return low + (high - low) * (any() % 65536) / 65536.0f; }

static void *room(size_t bytes) {
    void *memory = aligned_alloc(64, (bytes + 255) / 64 * 64);
    return memset(memory, 0, (bytes + 255) / 64 * 64);
}

static value *values(size_t count, float low, float high) {
    value *all = room(count * sizeof(value));
    for (size_t i = 0; i < count; i++) put_number(all + i, between(low, high));
    return all;
}

static void *bytes(size_t count, int mask) {
    uint8_t *all = room(count);
    for (size_t i = 0; i < count; i++) all[i] = any() & mask;
    return all;
}

static void print(const char *name, const uint32_t *words, int count, int numbers) {
    uint64_t hash = 14695981039346656037ull;
    for (int i = 0; i < count; i++) hash = (hash ^ words[i]) * 1099511628211ull;
    printf("%s %016llx", name, (unsigned long long)hash);
    for (int i = 0; numbers && i < count; i += (count + 63) / 64) {
        float one;
        memcpy(&one, words + i, 4);
        printf(" %.9g", one);
    }
    printf("\n");
}

static void print_floats(const char *name, const float *x, int count) {
    uint32_t *words = room(count * 4);
    memcpy(words, x, count * 4);
    for (int i = 0; i < count; i++)
        if (x[i] != x[i]) words[i] = 0x7fc00000; /* which of the numbers that are none is not promised */
    print(name, words, count, 1);
    free(words);
}

static void print_values(const char *name, const value *x, int count) {
    float *all = room(count * sizeof(float));
    for (int i = 0; i < count; i++) all[i] = number(x + i);
    print_floats(name, all, count);
    free(all);
}

static void print_vector(const char *name, f32 x) {
    float all[16];
    f32_store(all, x);
    print_floats(name, all, 16);
}

static void print_whole(const char *name, i32 x) {
    uint32_t all[16];
    i32_store(all, x);
    print(name, all, 16, 0);
}

static void print_word(const char *name, uint32_t x) { print(name, &x, 1, 0); }

static void vectors(void) {
    static const float special[16] = {0.0f, -0.0f, 1.0f, -1.0f, 0x1p-140f, -0x1p-127f, 1e30f, -1e30f,
                                      0.5f, 1.5f, 2.5f, -2.5f, __builtin_inff(), -__builtin_inff(), __builtin_nanf(""), 3e38f};
    float floats[64];
    int32_t whole[64];
    int16_t halves[64];
    for (int i = 0; i < 64; i++) floats[i] = i < 16 ? special[i] : between(-27.0f, 27.0f) / 3.0f, whole[i] = any() * 2654435761u, halves[i] = any();
    for (int i = 0; i < 4; i++) {
        const f32 x = f32_load(floats + 16 * i), y = f32_load(floats + 16 * ((i + 1) % 4)), z = f32_load(floats + 16 * ((i + 2) % 4));
        const i32 a = i32_load(whole + 16 * i), b = i32_load(whole + 16 * ((i + 1) % 4));
        const lanes m = any();
        int32_t small[16];
        for (int j = 0; j < 16; j++) small[j] = whole[16 * i + j] >> (j + 8);
        print_vector("f32_of", f32_of(floats[i])), print_vector("f32_zero", f32_zero()), print_vector("f32_load", x);
        print_vector("f32_add", f32_add(x, y)), print_vector("f32_sub", f32_sub(x, y)), print_vector("f32_mul", f32_mul(x, y));
        print_vector("f32_div", f32_div(x, y)), print_vector("f32_max", f32_max(x, y)), print_vector("f32_max", f32_max(y, x));
        print_vector("f32_abs", f32_abs(x)), print_vector("f32_fma", f32_fma(x, y, z)), print_vector("f32_fnma", f32_fnma(x, y, z));
        print_vector("f32_nearest", f32_nearest(x)), print_vector("f32_keep", f32_keep(m, x)), print_vector("f32_pick", f32_pick(m, x, y));
        print_word("f32_less", f32_less(x, y)), print_word("f32_equal", f32_equal(x, f32_pick(m, x, y))), print_word("f32_least", f32_least(x, y));
        print_vector("f32_sum", f32_of(f32_sum(x))), print_vector("f32_most", f32_of(f32_most(x))), print_vector("f32_first", f32_of(f32_first(x)));
        print_vector("f32_load_some", f32_load_some(m, floats + 16 * i)), print_vector("f32_gather", f32_gather(floats, i32_and(a, i32_of(63))));
        print_vector("exponential", exponential(f32_sub(f32_zero(), f32_abs(x)))), print_vector("sigmoid", sigmoid(x)), print_vector("silu", silu(x));
        print_vector("gelu", gelu(x)), print_vector("exact_gelu", exact_gelu(x)), print_vector("capped", capped(x, 5.0f));
        print_vector("noise", noise(a, (uint64_t)whole[i] << 32 | whole[i + 1]));
        print_whole("i32_of", i32_of(whole[i])), print_whole("i32_zero", i32_zero()), print_whole("i32_count", i32_count()), print_whole("i32_load", a);
        print_whole("i32_load_some", i32_load_some(m, whole + 16 * i)), print_whole("i32_add", i32_add(a, b)), print_whole("i32_sub", i32_sub(a, b));
        print_whole("i32_mul", i32_mul(a, b)), print_whole("i32_and", i32_and(a, b)), print_whole("i32_xor", i32_xor(a, b));
        print_whole("i32_min", i32_min(a, b)), print_whole("i32_max", i32_max(a, b)), print_whole("i32_pick", i32_pick(m, a, b));
        print_word("i32_more", i32_more(a, b)), print_whole("i32_right", i32_right(a, 7)), print_whole("i32_left", i32_left(a, 7));
        print_whole("i32_bytes_of_e2m1", i32_bytes_of_e2m1(i32_and(a, i32_of(0x0f0f0f0f)))), print_vector("f32_twice_e2m1", f32_twice_e2m1(a));
        print_whole("i32_right_signed", i32_right_signed(a, 7)), print_whole("i32_halves_right", i32_halves_right(a, 12));
        print_whole("i32_add_pairs", i32_add_pairs(a, i32_and(b, i32_of(0x00ff00ff)), halves + 2 * i));
        print_whole("i32_add_pairs", i32_add_pairs(i32_zero(), i32_and(b, i32_of(0xff7fff7f)), halves + 2 * i));
        print_word("i32_sum", i32_sum(i32_right_signed(a, 4))), print_word("i32_most", i32_most(a)), print_word("i32_least_of", i32_least_of(m, a));
        print_vector("i32_to_f32", i32_to_f32(a)), print_whole("f32_to_i32", f32_to_i32(f32_load(floats + 16 + 16 * (i % 3))));
        print_whole("i32_from_8", i32_from_8((int8_t *)(whole + i))), print_whole("i32_from_16", i32_from_16((uint16_t *)(whole + i)));
        print_word("bytes_set", bytes_set(0xffff, bytes(16, 1))), print_word("bytes_set", bytes_set(0x1fff, bytes(13, 1)));
        f32 power;
        print_vector("fraction", fraction(f32_add(f32_abs(f32_load(floats + 32)), f32_of(0x1p-9f * (i + 1))), &power)), print_vector("fraction", power);
        print_vector("f32_power_of_two", f32_power_of_two(f32_of(1.5f), f32_nearest(f32_load(floats + 32))));
        float stored[16] = {0};
        f32_store_some(stored, m, x), print_floats("f32_store_some", stored, 16);
        uint32_t words[8];
        uint16_t of_float16[16];
        for (int apart = 2; apart <= 4; apart += 2) i32_to_alternating((int16_t *)words, i32_load(small), apart), print("i32_to_alternating", words, 8, 0);
        i32_to_16((uint16_t *)words, i32_right(a, 16)), print("i32_to_16", words, 8, 0);
        for (int j = 0; j < 16; j++) of_float16[j] = whole[(i * 16 + j) % 64] >> 8;
        print_vector("f32_from_half", f32_from_half(of_float16));
        value some[16];
        store(some, f32_load(floats + 16 + 16 * (i % 3))), print_values("store", some, 16), print_vector("load", load(some));
        print_vector("rounded", rounded(f32_load(floats + 16 + 16 * (i % 3))));
    }
    i32 rows[16];
    for (int i = 0; i < 16; i++) rows[i] = i32_add(i32_count(), i32_of(i * 16));
    turned(rows);
    for (int i = 0; i < 16; i++) print_whole("turned", rows[i]);
}

/* A product of `size` inputs over several numbers of tokens, in order of kinds; each token has the same bits as alone */
static void product_of(const char *name, const Matrix *m, const value *x, int size) {
    static const int counts[] = {1, 2, 3, 4, 5, 6, 7, 11, 13, 33, 49, MOST_TOKENS};
    value *y = room(MOST_TOKENS * N * sizeof(value)), *one = room(N * sizeof(value));
    for (int i = 0; i < 12; i++) {
        int different = 0;
        linear(m, x, y, counts[i], size, N, 1 + i % THREADS);
        for (int t = 0; t < counts[i]; t++) {
            linear(m, x + t * size, one, 1, size, N, 1);
            different += memcmp(one, y + t * N, N * sizeof(value)) != 0;
        }
        if (different) printf("%s of %d tokens: %d differ from what they are alone\n", name, counts[i], different), exit(1);
    }
    print_values(name, y, MOST_TOKENS * N);
}

static const uint16_t *float16s(int count) {
    uint16_t *all = room(count * 2);
    for (int i = 0; i < count; i++) all[i] = 0x1c00 + any() % 0x800; /* 1/256 to 1/64 */
    return all;
}

static void products(void) {
    value *x = values(MOST_TOKENS * K, -1.0f, 1.0f);
    for (int t = 0; t < MOST_TOKENS; t += 3) put_number(x + t * K + any() % K, 600.0f); /* beside which integers of 16 bits do not do */
    for (int t = 1; t < MOST_TOKENS; t += 3) put_number(x + t * K + any() % K, 0x1.fep3f); /* all bits set, so that 15 bits would not do */
    const value *weights = values(N * K, -0.1f, 0.1f), *bias = values(N, -1.0f, 1.0f), *scale = values(N, 0.001f, 0.01f);
    int32_t *order = room(K * sizeof(int32_t));
    for (int i = 0; i < K; i++) order[i] = (i * 5 + 3) % K;
    float *single = room(N * sizeof(float));
    for (int i = 0; i < N; i++) single[i] = between(0.001f, 0.01f);
    uint16_t *brain = room(N * 3 * 2);
    for (int i = 0; i < N * 3; i++) brain[i] = 0x3b80 + any() % 256;
    product_of("values", &(Matrix){.values = weights}, x, K);
    product_of("values_bias", &(Matrix){.values = weights, .bias = bias}, x, K);
    product_of("eights", &(Matrix){.values = bytes(N * K, 255), .kind = EIGHTS, .scale = scale, .bias = bias}, x, K);
    product_of("four", &(Matrix){.values = bytes(N * K / 2, 255), .kind = GROUPS_OF_FOUR, .group = 32, .scale = float16s(N * 6), .zero = 8}, x, K);
    product_of("four_order", &(Matrix){.values = bytes(N * K / 2, 255), .kind = GROUPS_OF_FOUR, .group = 64, .scale = brain, .scales = BRAIN,
                                       .zeros = bytes(N * 3, 15), .order = order, .bias = bias}, x, K);
    product_of("eight", &(Matrix){.values = bytes(N * K, 255), .kind = GROUPS_OF_EIGHT, .group = K, .scale = single, .scales = SINGLE, .zero = 128}, x, K);
    product_of("floats", &(Matrix){.values = bytes(N * K / 2, 255), .kind = GROUPS_OF_E2M1, .group = 64, .scale = brain, .scales = BRAIN}, x, K);
    product_of("four_mins", &(Matrix){.values = bytes(N * K / 2, 255), .kind = GROUPS_OF_FOUR, .group = 32, .scale = bytes(N * 6, 63), .scales = BYTE,
                                      .over = float16s(N * 3), .mins = float16s(N * 3), .nested = 2, .zeros = bytes(N * 6, 63)}, x, K);
    const uint32_t kept = state; /* what follows has the numbers that it had before there were these */
    const value *wide = values(MOST_TOKENS * 256, -1.0f, 1.0f);
    product_of("six", &(Matrix){.values = bytes(N * K * 3 / 4, 255), .kind = GROUPS_OF_SIX, .group = 16, .scale = float16s(N * 12), .zero = 32}, x, K);
    product_of("four_of_64", &(Matrix){.values = bytes(N * K / 2, 255), .kind = GROUPS_OF_FOUR, .group = 64, .scale = float16s(N * 3), .zero = 8}, x, K);
    product_of("four_zeros", &(Matrix){.values = bytes(N * K / 2, 255), .kind = GROUPS_OF_FOUR, .group = 32, .scale = float16s(N * 6),
                                       .zeros = bytes(N * 6, 15)}, x, K);
    product_of("floats_of_32", &(Matrix){.values = bytes(N * K / 2, 255), .kind = GROUPS_OF_E2M1, .group = 32, .scale = float16s(N * 6)}, x, K);
    product_of("six_zeros", &(Matrix){.values = bytes(N * K * 3 / 4, 255), .kind = GROUPS_OF_SIX, .group = 64, .scale = float16s(N * 3),
                                      .zeros = bytes(N * 3, 63)}, x, K);
    product_of("eight_zeros", &(Matrix){.values = bytes(N * K, 255), .kind = GROUPS_OF_EIGHT, .group = 32, .scale = float16s(N * 6),
                                        .zeros = bytes(N * 6, 255)}, x, K);
    product_of("four_of_128", &(Matrix){.values = bytes(N * 128 / 2, 255), .kind = GROUPS_OF_FOUR, .group = 128, .scale = float16s(N),
                                        .zeros = bytes(N, 15)}, x, 128);
    product_of("six_of_128", &(Matrix){.values = bytes(N * 128 * 3 / 4, 255), .kind = GROUPS_OF_SIX, .group = 128, .scale = float16s(N), .zero = 32}, x, 128);
    product_of("eight_of_256", &(Matrix){.values = bytes(N * 256, 255), .kind = GROUPS_OF_EIGHT, .group = 256, .scale = float16s(N), .zero = 128}, wide, 256);
    state = kept;
}

static void attentions(int size) {
    enum { ROWS = 2, NODES = 3, WIDTH = 180, HEADS_OF_KEYS = 2, ALL = 4 };
    const int tokens = ROWS * NODES, of_keys = ROWS * HEADS_OF_KEYS * WIDTH * size;
    const value *keys = values(of_keys, -1.0f, 1.0f), *v = values(of_keys, -1.0f, 1.0f);
    value *attended = room(tokens * ALL * size * sizeof(value));
    const int32_t begins[] = {0, NODES, 2 * NODES}, row_of[] = {0, 0, 0, 1, 1, 1}, slots[] = {WIDTH - 3, WIDTH - 2, WIDTH - 1, 97, 98, 99};
    int32_t positions[ROWS * WIDTH];
    const float sinks[ALL] = {0.5f, -0.5f, 1.0f, 0.0f};
    uint8_t *mask = bytes(ROWS * NODES * WIDTH, 3);
    for (int i = 0; i < ROWS * WIDTH; i++) positions[i] = i % WIDTH;
    for (int t = 0; t < tokens; t++) {
        positions[t / NODES * WIDTH + slots[t]] -= t % NODES;
        for (int s = slots[t] - t % NODES; s < WIDTH; s++) mask[t * WIDTH + s] = s == slots[t]; /* siblings */
    }
    Pass p = {.threads = THREADS, .rows = ROWS, .tokens = tokens, .nodes = NODES, .width = WIDTH, .head_stride = WIDTH * size,
              .row_stride = HEADS_OF_KEYS * WIDTH * size, .mask_row_stride = NODES * WIDTH, .mask_stride = WIDTH, .begins = begins,
              .row_of = row_of, .slots = slots, .projected = values(tokens * ALL * size, -2.0f, 2.0f), .attended = attended,
              .scratch = room(THREADS * SCRATCH(size) * sizeof(float))};
    Layer l = {.heads = ALL, .key_heads = HEADS_OF_KEYS, .size = size, .scaling = 0.3};
    attend_over(&l, &p, 0, keys, v), print_values("attend_causal", attended, tokens * ALL * size);
    attend_over(&l, &p, mask, keys, v), print_values("attend_mask", attended, tokens * ALL * size);
    p.positions = positions, l.sinks = sinks, l.cap = 3.0, l.window = 70;
    attend_over(&l, &p, mask, keys, v), print_values("attend_moved", attended, tokens * ALL * size);
}

/* A text of many tokens: each has the bits that it has alone. Once, scores rise along the text, so that sums are made relative to larger ones. */
static void texts(int size) {
    enum { T = 85, BEGIN = 230, WIDTH = 320, HEADS_OF_KEYS = 2, ALL = 6 };
    const int of_keys = HEADS_OF_KEYS * WIDTH * size, columns = ALL * size;
    value *keys = values(of_keys, -1.0f, 1.0f), *v = values(of_keys, -1.0f, 1.0f), *attended = room(T * columns * sizeof(value));
    value *all = room(T * columns * sizeof(value)), *projected = values(T * columns, -2.0f, 2.0f);
    const float sinks[ALL] = {0.5f, -0.5f, 1.0f, 0.0f, 3.0f, -3.0f};
    int32_t begins[] = {0, T}, row_of[T] = {0}, slots[T];
    for (int t = 0; t < T; t++) slots[t] = BEGIN + t;
    value *rising = room(of_keys * sizeof(value));
    for (int i = 0; i < of_keys; i++) put_number(rising + i, number(keys + i) * (1 + i / size % WIDTH / 40));
    for (int kind = 0; kind < 3; kind++) {
        Pass p = {.threads = THREADS, .rows = 1, .tokens = T, .nodes = T, .width = WIDTH, .head_stride = WIDTH * size, .row_stride = of_keys,
                  .begins = begins, .row_of = row_of, .slots = slots, .projected = projected, .attended = attended,
                  .scratch = room(THREADS * SCRATCH(size) * sizeof(float))};
        const Layer l = {.heads = ALL, .key_heads = HEADS_OF_KEYS, .size = size, .scaling = 0.3, .sinks = kind ? sinks : 0, .window = kind == 1 ? 70 : 0,
                         .cap = kind == 2 ? 30.0 : 0.0};
        begins[1] = T, attend_over(&l, &p, 0, kind ? keys : rising, v), print_values("text", attended, T * columns);
        memcpy(all, attended, T * columns * sizeof(value));
        begins[1] = p.tokens = p.nodes = 1;
        for (int t = 0; t < T; t++) {
            p.slots = slots + t, p.projected = projected + (size_t)t * columns;
            attend_over(&l, &p, 0, kind ? keys : rising, v);
            if (memcmp(attended, all + (size_t)t * columns, columns * sizeof(value))) printf("token %d of %d has other bits alone\n", t, T), exit(1);
        }
    }
}

static Matrix matrix(int outputs, int inputs) { return (Matrix){.values = values((size_t)outputs * inputs, -0.1f, 0.1f)}; }

static void mixtures(void) {
    enum { COUNT = 8, CHOSEN = 2, INNER = 128, T = 7 };
    Experts e = {.count = COUNT, .chosen = CHOSEN, .inner = INNER, .width = INNER, .gate_up = matrix(COUNT * 2 * INNER, H),
                 .down = matrix(COUNT * H, INNER), .gate_up_bias = values(COUNT * 2 * INNER, -0.1f, 0.1f),
                 .down_bias = values(COUNT * H, -0.1f, 0.1f)};
    const value *x = values(T * H, -1.0f, 1.0f);
    value *y = room(T * H * sizeof(value));
    int64_t chosen[T * CHOSEN];
    float scores[T * CHOSEN];
    for (int i = 0; i < T * CHOSEN; i++) chosen[i] = (any() % (COUNT / 2)) * 2 + i % 2, scores[i] = between(0.1f, 0.9f);
    experts_over(&e, x, y, T, H, chosen, scores, room(experts_room(&e, T, H, THREADS)), THREADS);
    print_values("experts", y, T * H);
    e.activation = CLAMPED, e.alpha = 1.7, e.limit = 0.8, e.exact = 1, e.by_number = 1;
    experts_over(&e, x, y, T, H, chosen, scores, room(experts_room(&e, T, H, THREADS)), THREADS);
    print_values("experts_clamped", y, T * H);
}

static Norm norm(int size) { return (Norm){.weight = values(size, 0.5f, 1.5f)}; }

static void models(void) {
    enum { T = 9, WIDTH = 64, ALL = 4, HEADS_OF_KEYS = 2, SIZE_OF_HEAD = 32, INNER = 192, COLUMNS = (ALL + 2 * HEADS_OF_KEYS) * SIZE_OF_HEAD, VOCABULARY = 1000 };
    Layer first = {.hidden = H, .inner = INNER, .heads = ALL, .key_heads = HEADS_OF_KEYS, .size = SIZE_OF_HEAD, .eps = 1e-5, .head_eps = 1e-5, .scaling = 0.2};
    first.before = norm(H), first.after = norm(H);
    first.qkv = matrix(COLUMNS, H), first.output = matrix(H, ALL * SIZE_OF_HEAD), first.gate_up = matrix(2 * INNER, H), first.down = matrix(H, INNER);
    Layer second = first;
    second.query_norm = second.key_norm = norm(SIZE_OF_HEAD), second.before.bias = second.after.bias = values(H, -0.1f, 0.1f), second.activation = GELU;
    Experts e = {.count = 8, .chosen = 2, .inner = 64, .width = 64, .router = matrix(64, H), .gate_up = matrix(8 * 128, H),
                 .down = matrix(8 * H, 64), .normed = 1};
    Layer third = first;
    third.experts = &e, third.cap = 4.0;
    const Layer *layers[] = {&first, &second, &third};
    value *keys[3], *v[3], *x = values(T * H, -1.0f, 1.0f), *out = room(T * H * sizeof(value));
    int32_t begins[] = {0, T}, row_of[T] = {0}, slots[T];
    for (int i = 0; i < 3; i++) keys[i] = room(HEADS_OF_KEYS * WIDTH * SIZE_OF_HEAD * sizeof(value)), v[i] = room(HEADS_OF_KEYS * WIDTH * SIZE_OF_HEAD * sizeof(value));
    for (int t = 0; t < T; t++) slots[t] = t;
    const Pass p = {.threads = THREADS, .rows = 1, .tokens = T, .nodes = T, .width = WIDTH, .head_stride = WIDTH * SIZE_OF_HEAD,
                    .row_stride = HEADS_OF_KEYS * WIDTH * SIZE_OF_HEAD, .cos = values(T * SIZE_OF_HEAD, -1.0f, 1.0f),
                    .sin = values(T * SIZE_OF_HEAD, -1.0f, 1.0f), .begins = begins, .row_of = row_of, .slots = slots, .states = room(T * H * sizeof(value)),
                    .projected = room(T * COLUMNS * sizeof(value)), .attended = room(T * ALL * SIZE_OF_HEAD * sizeof(value)),
                    .wide = room(T * 2 * INNER * sizeof(value)), .thin = room(T * INNER * sizeof(value)), .experts = room(experts_room(&e, T, H, THREADS)),
                    .scratch = room(THREADS * SCRATCH(SIZE_OF_HEAD) * sizeof(float))};
    const Norm last = norm(H);
    model(layers, 3, &p, 0, x, keys, v, 0, &last, 1e-5, out, 0, 0);
    print_values("model", out, T * H);
    print_values("model_keys", keys[2], HEADS_OF_KEYS * WIDTH * SIZE_OF_HEAD);

    const value *logits = values(2 * 1024, -4.0f, 4.0f);
    int64_t places[2 * 8];
    float logs[2 * 8];
    largest(logits, 2, VOCABULARY, 1024, 8, places, logs, THREADS);
    print("largest", (uint32_t *)places, 32, 0), print_floats("logs", logs, 16);
    float best, q[1024];
    const uint64_t words[] = {0x123456789abcdefull};
    const Draws d = {.words = words, .hashes = bytes(1024 * 4, 255), .q = q, .columns = 1024, .temperature = 0.7};
    print_word("following", following(logits, VOCABULARY, 3.0f, -1, &best)), print_vector("following", f32_of(best));
    print_word("drawn", drawn(&d, 0, logits, VOCABULARY, q)), print_floats("drawn", q, 1024);
    enum { ROWS = 8, NODES = 4, WIDE_ONE = 100 };
    float p_of[ROWS * NODES * WIDE_ONE], q_of[ROWS * (NODES - 1) * WIDE_ONE], survival[ROWS * (NODES - 1)], chances[ROWS * (NODES - 1)];
    int64_t tokens[ROWS * NODES], drafted[ROWS], keys_of[ROWS], positions[ROWS], wrong[ROWS * (NODES - 1)], ends[2 * ROWS];
    for (int i = 0; i < ROWS * NODES * WIDE_ONE; i++) p_of[i] = (float)((i * 7919 + 13) % 211) / (100.0f * 105.0f);
    for (int i = 0; i < ROWS * (NODES - 1) * WIDE_ONE; i++) q_of[i] = (float)((i * 5501 + 77) % 199) / (100.0f * 99.0f);
    for (int i = 0; i < ROWS * NODES; i++) tokens[i] = (i * 37) % WIDE_ONE;
    for (int i = 0; i < ROWS; i++) drafted[i] = i % NODES, keys_of[i] = 1000003 * i - 5, positions[i] = i;
    for (int by_blocks = 0; by_blocks < 2; by_blocks++) {
        const Chains c = {.p = p_of, .q = q_of, .tokens = tokens, .drafted = drafted, .keys = keys_of, .positions = positions, .hashes = d.hashes,
                          .rows = ROWS, .nodes = NODES, .width = WIDE_ONE, .apart = (NODES - 1) * WIDE_ONE, .blocks = by_blocks,
                          .survival = survival, .chances = chances, .wrong = wrong, .accepted = ends, .chosen = ends + ROWS};
        chains(&c, THREADS);
        print_floats("survival", survival, ROWS * (NODES - 1)), print_floats("chances", chances, ROWS * (NODES - 1));
        print("ends", (uint32_t *)ends, 4 * ROWS, 0);
    }
}

/* Scratch memory for passes over T tokens, in which `most` numbers are the widest of a token */
static Pass pass_of(int T, int most, int size, int width) {
    int32_t *begins = room(2 * sizeof(int32_t)), *slots = room(T * sizeof(int32_t));
    for (int t = 0; t < T; t++) slots[t] = t;
    begins[1] = T;
    return (Pass){.threads = THREADS, .rows = 1, .tokens = T, .nodes = T, .width = width, .begins = begins, .row_of = room(T * sizeof(int32_t)),
                  .slots = slots, .states = room(T * H * sizeof(value)), .projected = room(T * most * sizeof(value)),
                  .attended = room(T * most * sizeof(value)), .wide = room(T * most * sizeof(value)), .thin = room(T * most * sizeof(value)),
                  .scratch = room(THREADS * SCRATCH(size) * sizeof(float))};
}

/* Two layers: queries by way of a smaller vector, and not */
static void latents(void) {
    enum { T = 9, WIDTH = 64, ASKING = 2, RANK = 64, TURNED = 16, PLAIN = 48, VALUES_OF_HEAD = 64, LOW = 64, INNER = 192 };
    Latent low = {.rank = RANK, .turned = TURNED, .plain = PLAIN, .values = VALUES_OF_HEAD, .query_rank = LOW, .kept = matrix(128, H),
                  .query_in = matrix(LOW, H), .query = matrix(128, LOW), .to_latents = values(ASKING * RANK * PLAIN, -0.2f, 0.2f),
                  .to_values = values(ASKING * RANK * VALUES_OF_HEAD, -0.2f, 0.2f)};
    Latent direct = low;
    direct.query_rank = 0, direct.query = matrix(128, H);
    Layer first = {.hidden = H, .inner = INNER, .heads = ASKING, .key_heads = 1, .size = RANK + TURNED, .eps = 1e-5, .head_eps = 1e-5, .scaling = 0.2,
                   .rotary = TURNED, .rotation = INTERLEAVED, .latent = &low, .before = norm(H), .after = norm(H), .query_norm = norm(LOW),
                   .key_norm = norm(RANK), .output = matrix(H, ASKING * VALUES_OF_HEAD), .gate_up = matrix(2 * INNER, H), .down = matrix(H, INNER)};
    Layer second = first;
    second.latent = &direct, second.rotation |= IN_PAIRS;
    const Layer *layers[] = {&first, &second};
    value *keys[2], *turned_keys[2], *x = values(T * H, -1.0f, 1.0f), *out = room(T * H * sizeof(value));
    for (int i = 0; i < 2; i++) keys[i] = room(WIDTH * RANK * sizeof(value)), turned_keys[i] = room(WIDTH * TURNED * sizeof(value));
    float *angles = room(2 * T * TURNED * sizeof(float));
    int64_t places[T];
    for (int i = 0; i < 2 * T * TURNED; i++) angles[i] = between(-1.0f, 1.0f);
    for (int t = 0; t < T; t++) places[t] = t;
    const Kind kind = {.row_stride = WIDTH * RANK, .head_stride = WIDTH * RANK, .cos = angles, .sin = angles + T * TURNED};
    Pass p = pass_of(T, 2 * INNER, RANK + TURNED, WIDTH);
    p.kinds = &kind, p.places = places;
    const Norm last = norm(H);
    model(layers, 2, &p, 0, x, keys, turned_keys, 0, &last, 1e-5, out, 0, 0);
    print_values("latents", out, T * H), print_values("latents_kept", keys[1], T * RANK), print_values("latents_turned", turned_keys[1], T * TURNED);
}

static void print_tree(const char *name, const Growth *g, const int64_t *tokens, int count, int read) {
    uint32_t all[64] = {count, read};
    for (int i = 0; i < count; i++) all[i + 2] = tokens[i];
    print(name, all, count + 2, 0);
    char line[64];
    snprintf(line, 64, "%s_logits", name), print_values(line, g->logits, g->columns);
}

/* Drafts by a decoder, by an EAGLE-3 head and by Medusa heads: trees that grow, and static ones, of likely tokens and of drawn ones */
static void growths(void) {
    enum { ALL = 2, SIZE_OF_HEAD = 32, INNER = 192, QKV = 3 * ALL * SIZE_OF_HEAD, VOCABULARY = 250, WIDTH = 64, K = 4, LEVELS = 3, START = 5, MOST_READ = 8,
           NODES = 9, CANDIDATES = K + K * K * (LEVELS - 1) };
    Layer l = {.hidden = H, .inner = INNER, .heads = ALL, .key_heads = ALL, .size = SIZE_OF_HEAD, .eps = 1e-5, .scaling = 0.2, .before = norm(H),
               .after = norm(H), .qkv = matrix(QKV, H), .output = matrix(H, ALL * SIZE_OF_HEAD), .gate_up = matrix(2 * INNER, H), .down = matrix(H, INNER)};
    const Layer *layers[] = {&l};
    const Matrix head = matrix(256, H);
    const int of_keys = ALL * WIDTH * SIZE_OF_HEAD;
    value *keys[] = {values(of_keys, -1.0f, 1.0f)}, *v[] = {values(of_keys, -1.0f, 1.0f)};
    Growth g = {.layers = layers, .embedded = {.tokens = values(256 * H, -1.0f, 1.0f), .hidden = H, .padding = -1, .scale = 1.0}, .norm = norm(H),
                .cos = values(WIDTH * SIZE_OF_HEAD, -1.0f, 1.0f), .sin = values(WIDTH * SIZE_OF_HEAD, -1.0f, 1.0f), .head = &head, .keys = keys, .values = v,
                .count = 1, .vocab = VOCABULARY, .columns = 256, .start = START, .missed = 2, .most = WIDTH, .depth = LEVELS, .k = K, .total = NODES,
                .eps = 1e-5, .delta = -1.0, .least = -100.0, .x = room(MOST_READ * H * sizeof(value)), .out = room(MOST_READ * H * sizeof(value)),
                .logits = room(MOST_READ * 256 * sizeof(value)), .angles = room(2 * MOST_READ * SIZE_OF_HEAD * sizeof(value)), .mask = room(16 * WIDTH),
                .stride = WIDTH, .slots = room(MOST_READ * 4), .begins = room(8), .candidates = room(4 * CANDIDATES * 4), .scores = room(CANDIDATES * 4),
                .order = room(CANDIDATES * 4), .logit_cap = 5.0};
    Pass p = pass_of(MOST_READ, 2 * INNER, SIZE_OF_HEAD, WIDTH);
    p.head_stride = WIDTH * SIZE_OF_HEAD, p.row_stride = of_keys;
    const int64_t text[] = {17, 101};
    const int32_t parents[] = {0, 0, 1, 1, 2, 3, 3, 5, 6}, ranks[] = {0, 1, 0, 2, 0, 0, 1, 0, 0};
    const uint64_t words[] = {0x123456789abcdefull, 0xfedcba987654321ull, 0x13579bdf02468aceull, 99};
    float q[4 * 256];
    const Draws d = {.words = words, .hashes = bytes(256 * 4, 255), .q = q, .apart = 256, .columns = 256, .top_k = 40, .temperature = 0.7, .top_p = 0.9};
    int64_t tokens[NODES], above[NODES], own[NODES], fed;
    double expected;
    int count = grow(&g, &p, text, tokens, above, own, &fed, &expected, 0);
    print_tree("grown", &g, tokens, count, fed), print("grown_parents", (uint32_t *)above, 2 * count, 0);
    count = grow(&g, &p, text, tokens, above, own, &fed, &expected, &d), print_tree("grown_drawn", &g, tokens, count, fed);
    print_tree("filled", &g, tokens, NODES, fill(&g, &p, text, parents, ranks, NODES, tokens, 0));
    print_tree("filled_drawn", &g, tokens, NODES, fill(&g, &p, text, parents, ranks, NODES, tokens, &d));
    const Eagle e = {.fuse = matrix(H, 192), .of_embedding = values(H, 0.5f, 1.5f), .of_state = values(H, 0.5f, 1.5f), .features = values(2 * 192, -1.0f, 1.0f),
                     .inputs = room(MOST_READ * 2 * H * sizeof(value)), .states = room(16 * H * sizeof(value)), .width = 192, .residual_normed = 1};
    Layer wider = l;
    wider.qkv = matrix(QKV, 2 * H), layers[0] = &wider, g.eagle = &e;
    count = grow(&g, &p, text, tokens, above, own, &fed, &expected, 0), print_tree("eagle", &g, tokens, count, fed);
    Matrix of_heads[LEVELS], lm_heads[LEVELS];
    for (int i = 0; i < LEVELS; i++) of_heads[i] = matrix(H, H), lm_heads[i] = matrix(256, H);
    const int64_t committed[] = {17, 101, 5, 17, 101, 8, 17, 101}, contexts[] = {101}, following_101[] = {3, 9};
    const int32_t places[] = {0, 2};
    const float odds[] = {2.0f, -1.0f}, weights[] = {1.0f, 0.5f, 0.25f}, likely[PATH - 1] = {0.2f, 0.3f, 0.4f};
    const Lists lists = {.contexts = contexts, .first = places, .tokens = following_101, .odds = odds, .count = 1};
    Medusa m = {.state = values(H, -1.0f, 1.0f), .layers = of_heads, .lm_heads = lm_heads, .hidden = H, .count = 1, .vocabulary = 256, .lists = &lists,
                .weights = weights, .reach = 1, .text = committed, .length = 8, .heed = 1, .shares = likely, .x = room(H * sizeof(value)),
                .y = room(H * sizeof(value)), .own = room(256 * sizeof(value)), .read = room(16 * 8), .above = room(16 * 8)};
    g.eagle = 0, g.medusa = &m, g.start = 0, g.missed = 1;
    count = grow(&g, &p, committed + 7, tokens, above, own, &fed, &expected, 0), print_tree("medusa", &g, tokens, count, fed);
}

int main(void) {
#if defined(TILED) && !defined(EMULATED)
    if (syscall(158, 0x1023, 18)) return 2; /* ask Linux for the tiles */
#endif
    vectors(), products(), attentions(48), attentions(96), mixtures(), models(), latents(), growths(), texts(48), texts(96);
#if defined(TILED) && defined(EMULATED)
    return !tiles_used;
#else
    return 0;
#endif
}
