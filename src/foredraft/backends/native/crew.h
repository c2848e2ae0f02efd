/* The thread pool that runs a pass.
 *
 * A pass is a sequence of phases, and a phase is a number of chunks. Each thread takes the next chunk, computes it into private memory, and
 * copies the result into place unless another thread has done so. A preempted thread therefore blocks nobody: when no chunks are left to
 * take, the others recompute its chunk, and its own late result is dropped. Nobody waits for helpers that never start. The bits of a result
 * depend neither on which thread computes a chunk nor on the number of threads.
 *
 * In most phases all threads take chunks from one range. Where a chunk reads weights that lie behind those of the chunk before, each thread
 * begins with a range of its own, and takes chunks from the others' when that is empty: hardware prefetchers read beyond the end of a chunk,
 * and what they read is then used.
 *
 * A phase:
 *     for (int i = first(w, chunks); i >= 0; i = next(w)) {
 *         ... compute chunk i from the results of earlier phases, into this thread's own memory ...
 *         if (mine(w)) ... copy it to its destination ...
 *     }
 * A preempted thread may read inputs that a later phase is overwriting. mine() then returns 0, so the wrong result is dropped.
 *
 * On a busy machine the OS may give all threads of a process together no more CPU time than one thread would get, often on a single core.
 * The caller works alone while helpers bring little, and tries the other mode from time to time.
 */
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#ifdef __x86_64__
#include <x86intrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define APART _Alignas(128)
#define BITS 24 /* low bits of `next` and `done`, which count chunks; the bits above count phases */
#define CHUNKS (1 << 20) /* entries of `phases`; who wins chunk i also computes chunks i + CHUNKS, i + 2 * CHUNKS, .. */
#define STACK (4 << 20) /* least size in bytes of a helper's stack: products keep up to 1 MB there */
#define RANGES 16 /* of the chunks of a phase, at most; further threads share them */
#define CLOSED (1u << 31) /* no further helper may join */
#define ASLEEP (1u << 30) /* the caller waits for the others to leave */
#ifdef __aarch64__
#define MICROSECOND ticks_of_microsecond()
#else
#define MICROSECOND 2500ull /* in TSC ticks, roughly */
#endif
#define SHORT (20 * MICROSECOND) /* a helper spins so long before it sleeps, on a busy machine */
#define LONG (1000 * MICROSECOND) /* and on an idle one */
#define BETWEEN (200 * MICROSECOND) /* least time between two measurements, so that short work such as a draft's is not slowed down */
#define MILLISECOND 1000000ull /* in nanoseconds */
#define WINDOW (30 * MILLISECOND) /* of work for each decision of judge() */
#define TRIAL (500 * MILLISECOND) /* between two trials of the other mode while helpers bring little */
#define WORTH 1.1 /* helpers are used if all threads get at least so many times the CPU time of the caller alone */

/* A cheap clock; the pause inside spin loops; and how this thread rounds and treats denormal numbers, which is each thread's own */
#ifdef __aarch64__
INLINE uint64_t ticks(void) {
    uint64_t now;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(now));
    return now;
}
INLINE uint64_t ticks_of_microsecond(void) {
    uint64_t of_second;
    __asm__("mrs %0, cntfrq_el0" : "=r"(of_second));
    return of_second / 1000000;
}
INLINE void relax(void) { __asm__ volatile("isb"); } /* `yield` does nothing on most processors */
INLINE uint64_t float_mode(void) {
    uint64_t found;
    __asm__ volatile("mrs %0, fpcr" : "=r"(found));
    return found;
}
INLINE void set_float_mode(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#else
INLINE uint64_t ticks(void) { return __rdtsc(); }
INLINE void relax(void) { _mm_pause(); }
INLINE uint64_t float_mode(void) { return _mm_getcsr(); }
INLINE void set_float_mode(uint64_t mode) { _mm_setcsr(mode); }
#endif

typedef struct Worker Worker;
typedef void Work(Worker *w, const void *job);

typedef struct {
    APART _Atomic uint64_t taken; /* the last phase in which a chunk was taken, and how many were */
} Range;

typedef struct {
    Range ranges[RANGES];
    APART _Atomic uint64_t now;    /* the phase */
    APART _Atomic uint64_t done;   /* the phase, and how many chunks are in place */
    APART _Atomic uint32_t rounds; /* jobs started so far; helpers wait for a change */
    _Atomic int sleeping;          /* number of sleeping helpers */
    APART _Atomic uint32_t inside; /* number of working helpers, plus the flags CLOSED and ASLEEP */
    _Atomic int busy;              /* a caller has the crew */
    APART Work *work;
    const void *job;
    uint64_t mode;        /* the caller's float_mode() */
    int threads, helpers; /* threads wanted, including the caller; helpers started */
    uint64_t begin;       /* the first phase of this job */
    int alone, measured;  /* whether the caller works alone at present; whether this job is measured */
    _Atomic uint64_t helped;              /* CPU time of the helpers in this job, in nanoseconds, as are the next three */
    uint64_t clock, processor, trial;     /* wall and CPU time in this window; time of the next trial */
    uint64_t looked;                      /* time of the last measurement, in ticks */
    double got[2];                        /* recent CPU time over wall time: of all threads together, of the caller alone */
    _Atomic uint64_t phases[CHUNKS]; /* the phase in which each chunk was last put in place */
} Crew;

struct Worker {
    Crew *crew; /* null: the caller works alone */
    int number, threads;
    uint64_t phase;
    int ranges; /* of the phase */
    int count, item, won, looked; /* chunks of the phase; the current one; whether it is this thread's; where to look for one to recompute */
    uint64_t since, span;         /* when the current chunk was taken; duration of the last one; in ticks */
};

static Crew of_this_library = {.now = 1, .done = 1 << BITS, .inside = CLOSED, .begin = 1, .got = {2.0, 1.0}};
static Crew *crew = &of_this_library;

/* All kernels of a process share one crew: that of the library that was loaded first. */
Crew *share(Crew *with) { return crew = with ? with : crew; }

static long wait_while(_Atomic uint32_t *at, uint32_t value) { return syscall(SYS_futex, at, FUTEX_WAIT_PRIVATE, value, 0, 0, 0); }
static long wake(_Atomic uint32_t *at) { return syscall(SYS_futex, at, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0); }

/* Whether this thread puts the current chunk in place; the phase cannot end before it has done so. All inputs of the chunk were read before
 * the exchange, also on CPUs that reorder loads, so a thread that wins has read nothing that a later phase changed. */
INLINE int mine(Worker *w) {
    if (!w->crew || w->won) return 1;
    _Atomic uint64_t *at = &w->crew->phases[w->item];
    uint64_t before = atomic_load_explicit(at, memory_order_acquire);
    return w->won = before < w->phase && atomic_compare_exchange_strong(at, &before, w->phase);
}

/* Waits for the phase to end and returns -1. If that takes too long, returns a chunk that another thread took and has not put in place. */
static int wait_for_others(Worker *w, int chunks) {
    const uint64_t patience = 2 * w->span + 2 * MICROSECOND;
    uint64_t since = ticks();
    while (atomic_load_explicit(&w->crew->now, memory_order_acquire) == w->phase) {
        if (w->looked < chunks || ticks() - since > patience) {
            if (w->looked >= chunks) w->looked = 0;
            for (; w->looked < chunks; w->looked++)
                if (atomic_load_explicit(&w->crew->phases[w->looked], memory_order_relaxed) < w->phase) return w->item = w->looked++;
            sched_yield(); /* the last chunks are being copied into place */
            since = ticks();
        }
        relax();
    }
    w->phase++;
    return -1;
}

/* A chunk that nobody has taken, from this thread's own range first; -1 if there is none */
static int take(Worker *w, int chunks) {
    for (int i = 0; i < w->ranges; i++) {
        const int number = (w->number + i) % w->ranges, begin = (int64_t)chunks * number / w->ranges;
        const int size = (int64_t)chunks * (number + 1) / w->ranges - begin;
        _Atomic uint64_t *range = &w->crew->ranges[number].taken;
        uint64_t at = atomic_load_explicit(range, memory_order_acquire);
        while (at >> BITS <= w->phase) {
            const uint64_t from = at >> BITS == w->phase ? at : w->phase << BITS; /* it may be of an earlier phase */
            const int count = from & ((1 << BITS) - 1);
            if (count >= size) break;
            if (atomic_compare_exchange_weak(range, &at, from + 1)) return begin + count;
        }
    }
    return -1;
}

static int next(Worker *w) {
    if (!w->crew) return ++w->item < w->count ? w->item : -1;
    Crew *c = w->crew;
    const int chunks = w->count < CHUNKS ? w->count : CHUNKS;
    if (w->won) {
        if (w->item + CHUNKS < w->count) return w->item += CHUNKS;
        w->won = 0, w->item %= CHUNKS;
        if (atomic_fetch_add(&c->done, 1) + 1 == (w->phase << BITS) + chunks) { /* the last chunk: start the next phase */
            atomic_store(&c->done, (w->phase + 1) << BITS);
            atomic_store(&c->now, w->phase + 1);
        }
    }
    const int taken = take(w, chunks);
    if (taken >= 0) {
        const uint64_t now = ticks();
        if (w->since) w->span = now - w->since;
        w->since = now;
        return w->item = taken;
    }
    if (w->since) w->span = ticks() - w->since, w->since = 0;
    return wait_for_others(w, chunks);
}

INLINE int first_of(Worker *w, int count, int ranges) {
    w->ranges = ranges, w->count = count, w->item = -1, w->won = 0, w->since = 0, w->looked = INT_MAX;
    return count > 0 ? next(w) : -1;
}
INLINE int first(Worker *w, int count) { return first_of(w, count, 1); }
/* The same, with a range for each thread */
INLINE int first_in_range(Worker *w, int count) { return first_of(w, count, w->threads < RANGES ? w->threads : RANGES); }

/* Spin until there is work, then sleep. A long gap between two clock reads means that this thread was preempted: it then spins for a shorter
 * time from now on. */
static void await_work(Crew *c, uint32_t seen, uint64_t *patience) {
    uint64_t now = ticks(), before = now;
    const uint64_t until = now + *patience;
    for (; now < until && atomic_load_explicit(&c->rounds, memory_order_acquire) == seen; before = now, now = ticks()) {
        if (now - before > 100 * MICROSECOND) {
            *patience = SHORT;
            break;
        }
        relax();
    }
    if (now - before <= 100 * MICROSECOND && *patience < LONG) *patience += *patience / 4;
    atomic_fetch_add(&c->sleeping, 1);
    while (atomic_load(&c->rounds) == seen) wait_while(&c->rounds, seen);
    atomic_fetch_sub(&c->sleeping, 1);
}

static uint64_t nanoseconds(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * 1000 * MILLISECOND + t.tv_nsec;
}

/* At the end of a window, decide whether the next jobs use helpers; `now` is in nanoseconds. One thread gets one core at most, which is
 * what the caller alone is assumed to get whenever helpers prove useful. */
static void judge(Crew *c, uint64_t now) {
    if (c->clock < WINDOW) return;
    double *got = c->got;
    got[c->alone] += ((double)c->processor / c->clock - got[c->alone]) / 2;
    c->clock = c->processor = 0;
    if (got[0] >= WORTH) got[1] = 1.0;
    c->alone = got[0] < WORTH * got[1];
    if (got[0] < WORTH && now >= c->trial) c->alone = !c->alone, c->trial = now + TRIAL;
}

static void *help(void *number) {
    Crew *c = crew;
    uint64_t patience = LONG;
    for (uint32_t seen = 0;;) {
        await_work(c, seen, &patience);
        seen = atomic_load(&c->rounds);
        uint32_t inside = atomic_load(&c->inside);
        while (!(inside & CLOSED) && !atomic_compare_exchange_weak(&c->inside, &inside, inside + 1));
        if (inside & CLOSED) continue;
        if ((intptr_t)number < c->threads) {
            Worker w = {.crew = c, .number = (intptr_t)number, .threads = c->threads, .phase = c->begin};
            const uint64_t since = c->measured ? nanoseconds(CLOCK_THREAD_CPUTIME_ID) : 0;
            set_float_mode(c->mode);
            c->work(&w, c->job);
            if (c->measured) atomic_fetch_add(&c->helped, nanoseconds(CLOCK_THREAD_CPUTIME_ID) - since);
        }
        if (atomic_fetch_sub(&c->inside, 1) - 1 == (CLOSED | ASLEEP)) wake(&c->inside);
    }
    return 0;
}

/* A forked process has no helpers. */
static void alone_again(void) {
    crew->helpers = 0, crew->begin = crew->now + 1;
    atomic_store(&crew->busy, 0), atomic_store(&crew->sleeping, 0), atomic_store(&crew->inside, CLOSED);
    atomic_store(&crew->now, crew->begin), atomic_store(&crew->done, crew->begin << BITS);
}

static void watch_forks(void) { pthread_atfork(0, 0, alone_again); }

static void recruit(Crew *c, int helpers) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    sigset_t all, before;
    pthread_attr_t detached;
    sigfillset(&all), pthread_sigmask(SIG_SETMASK, &all, &before); /* leave signals to the program's own threads */
    size_t stack = 0;
    pthread_attr_init(&detached), pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    if (!pthread_attr_getstacksize(&detached, &stack) && stack < STACK) pthread_attr_setstacksize(&detached, STACK);
    pthread_t thread;
    while (c->helpers < helpers && !pthread_create(&thread, &detached, help, (void *)(intptr_t)(c->helpers + 1))) c->helpers++;
    pthread_attr_destroy(&detached), pthread_sigmask(SIG_SETMASK, &before, 0);
}

static void with_helpers(Crew *c, int threads, Work *work, const void *job) {
    Worker w = {.crew = c, .threads = threads, .phase = c->begin};
    if (c->helpers < threads - 1) recruit(c, threads - 1);
    c->work = work, c->job = job, c->threads = threads, c->mode = float_mode();
    atomic_store(&c->inside, 0);
    atomic_fetch_add(&c->rounds, 1);
    if (atomic_load(&c->sleeping)) wake(&c->rounds);
    work(&w, job);
    uint32_t inside = atomic_fetch_or(&c->inside, CLOSED) | CLOSED;
    for (const uint64_t since = ticks(); inside != CLOSED && ticks() - since < SHORT; inside = atomic_load(&c->inside)) relax();
    while ((inside & ~ASLEEP) != CLOSED) { /* a preempted helper still reads memory that may be freed after this call */
        inside = atomic_fetch_or(&c->inside, ASLEEP) | ASLEEP;
        if (inside != (CLOSED | ASLEEP)) wait_while(&c->inside, inside);
        inside = atomic_load(&c->inside);
    }
    c->begin = w.phase;
}

/* Run `work` on up to `threads` threads, including this one; on this one alone if another caller has the crew or helpers bring little. */
static void together(int threads, Work *work, const void *job) {
    Crew *c = crew;
    Worker alone = {.threads = 1};
    if (threads < 2 || atomic_exchange(&c->busy, 1)) {
        work(&alone, job);
        return;
    }
    uint64_t clock = 0, processor = 0;
    c->measured = ticks() - c->looked > BETWEEN, c->helped = 0;
    if (c->measured) clock = nanoseconds(CLOCK_MONOTONIC), processor = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
    if (c->alone)
        work(&alone, job);
    else
        with_helpers(c, threads, work, job);
    if (c->measured) {
        const uint64_t now = nanoseconds(CLOCK_MONOTONIC);
        c->clock += now - clock, c->processor += nanoseconds(CLOCK_THREAD_CPUTIME_ID) - processor + c->helped;
        judge(c, now);
        c->looked = ticks();
    }
    atomic_store(&c->busy, 0);
}
