/* The threads of a pass.
 *
 * A pass is a row of phases, and a phase a number of chunks. Whoever runs takes the next chunk, computes it into memory of its own, and
 * puts it in place unless somebody else has done so. A thread that the system takes off its core therefore holds nobody up: once the others
 * find nothing left to take, they compute its chunk again, and what it brings when it comes back is dropped. Helpers that do not come at all
 * are not waited for. A chunk has the same bits whoever computes it, and chunks do not depend on the number of threads.
 *
 * A phase:
 *     for (int i = first(w, chunks); i >= 0; i = next(w)) {
 *         ... compute chunk i from what earlier phases made, into memory of this thread ...
 *         if (mine(w)) ... copy it to where it belongs ...
 *     }
 * What it reads may be changed by the others while a thread that was away reads it; that thread is then told that the chunk is not its own.
 *
 * On a busy machine the system may give all threads of a program together no more processor time than one alone would get, often on one and
 * the same core. The caller therefore works alone where its helpers bring little; now and then it tries the other way.
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
#define BITS 24 /* of a word that count chunks; those above count phases */
#define CHUNKS (1 << 20) /* that are told apart; each stands for those whole multiples of that further on as well */
#define CLOSED (1u << 31) /* nobody may join any more */
#define ASLEEP (1u << 30) /* the caller waits for the others to leave */
#ifdef __aarch64__
#define MICROSECOND ticks_of_microsecond()
#else
#define MICROSECOND 2500ull /* in ticks, about */
#endif
#define SHORT (20 * MICROSECOND) /* that a helper looks out for work before it sleeps, on a busy machine */
#define LONG (1000 * MICROSECOND) /* and on a quiet one */
#define BETWEEN (200 * MICROSECOND) /* two times of work that are measured: short work, such as a draft's, is not slowed down */
#define MILLISECOND 1000000ull /* in nanoseconds */
#define WINDOW (30 * MILLISECOND) /* of work that is judged together */
#define TRIAL (500 * MILLISECOND) /* from one trial of the other way to the next, where it may be better */
#define WORTH 1.1 /* times as much processor time as one thread alone that all together have to get */

/* A clock that costs little to read, and what a thread does between two looks at what it waits for */
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
#else
INLINE uint64_t ticks(void) { return __rdtsc(); }
INLINE void relax(void) { _mm_pause(); }
#endif

typedef struct Worker Worker;
typedef void Work(Worker *w, const void *job);

typedef struct {
    APART _Atomic uint64_t next;   /* the phase, and the first chunk that nobody has taken */
    APART _Atomic uint64_t done;   /* the phase, and how many chunks are in place */
    APART _Atomic uint32_t rounds; /* of work so far; helpers wait for it to change */
    _Atomic int sleeping;          /* helpers */
    APART _Atomic uint32_t inside; /* helpers at work, with CLOSED and ASLEEP */
    _Atomic int taken;             /* by a caller */
    APART Work *work;
    const void *job;
    int threads, helpers; /* wanted, the caller included; started */
    uint64_t begin;       /* the first phase of this work */
    int alone, measured;  /* whether the caller works alone at present; whether this work is measured */
    _Atomic uint64_t helped;              /* processor time of helpers in this work; this and the following in nanoseconds */
    uint64_t clock, processor, trial;     /* time in this window, and processor time; when the other way is tried next */
    uint64_t looked;                      /* when work was measured last, in ticks */
    double got[2];                        /* cores that all together got lately, and the caller alone */
    _Atomic uint64_t phases[CHUNKS]; /* in which each chunk was last put in place */
} Crew;

struct Worker {
    Crew *crew; /* null: alone */
    int number, threads;
    uint64_t phase;
    int count, item, won, looked; /* chunks of the phase, the one at hand, whether it is this thread's, the next one to compute again */
    uint64_t since, span;         /* when the chunk was taken; what the last one took, in ticks */
};

static Crew of_this_library = {.next = 1 << BITS, .done = 1 << BITS, .inside = CLOSED, .begin = 1, .got = {2.0, 1.0}};
static Crew *crew = &of_this_library;

/* All kernels of a process share one crew: that of the library that was loaded first. */
Crew *share(Crew *with) { return crew = with ? with : crew; }

static long wait_while(_Atomic uint32_t *at, uint32_t value) { return syscall(SYS_futex, at, FUTEX_WAIT_PRIVATE, value, 0, 0, 0); }
static long wake(_Atomic uint32_t *at) { return syscall(SYS_futex, at, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0); }

/* Whether the chunk at hand is to be put in place by this thread, before the phase can end. Everything that was read for it was read before
 * the exchange, also on processors that reorder reads: so a thread that wins read nothing that a later phase had changed. */
INLINE int mine(Worker *w) {
    if (!w->crew || w->won) return 1;
    _Atomic uint64_t *at = &w->crew->phases[w->item];
    uint64_t before = atomic_load_explicit(at, memory_order_acquire);
    return w->won = before < w->phase && atomic_compare_exchange_strong(at, &before, w->phase);
}

/* One of the chunks that others have taken and not put in place, to be computed again when waiting takes too long; -1 when the phase is over */
static int wait_for_others(Worker *w, int chunks) {
    const uint64_t patience = 2 * w->span + 2 * MICROSECOND;
    uint64_t since = ticks();
    while (atomic_load_explicit(&w->crew->next, memory_order_acquire) >> BITS == w->phase) {
        if (w->looked < chunks || ticks() - since > patience) {
            if (w->looked >= chunks) w->looked = 0;
            for (; w->looked < chunks; w->looked++)
                if (atomic_load_explicit(&w->crew->phases[w->looked], memory_order_relaxed) < w->phase) return w->item = w->looked++;
            sched_yield(); /* the last ones are being put in place */
            since = ticks();
        }
        relax();
    }
    w->phase++;
    return -1;
}

static int next(Worker *w) {
    if (!w->crew) return ++w->item < w->count ? w->item : -1;
    Crew *c = w->crew;
    const int chunks = w->count < CHUNKS ? w->count : CHUNKS;
    if (w->won) {
        if (w->item + CHUNKS < w->count) return w->item += CHUNKS;
        w->won = 0, w->item %= CHUNKS;
        if (atomic_fetch_add(&c->done, 1) + 1 == (w->phase << BITS) + chunks) { /* the last one: on to the next phase */
            atomic_store(&c->done, (w->phase + 1) << BITS);
            atomic_store(&c->next, (w->phase + 1) << BITS);
        }
    }
    uint64_t at = atomic_load_explicit(&c->next, memory_order_acquire);
    while (at >> BITS == w->phase && (int)(at & ((1 << BITS) - 1)) < chunks)
        if (atomic_compare_exchange_weak(&c->next, &at, at + 1)) {
            const uint64_t now = ticks();
            if (w->since) w->span = now - w->since;
            w->since = now;
            return w->item = at & ((1 << BITS) - 1);
        }
    if (w->since) w->span = ticks() - w->since, w->since = 0;
    return wait_for_others(w, chunks);
}

INLINE int first(Worker *w, int count) {
    w->count = count, w->item = -1, w->won = 0, w->since = 0, w->looked = INT_MAX;
    return count > 0 ? next(w) : -1;
}

/* Wait for work: awake for a while, which gets shorter where the core is somebody else's meanwhile, then asleep */
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

/* Decide who does the next work, `now`, from what this window's got; one thread gets one core at most */
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
            c->work(&w, c->job);
            if (c->measured) atomic_fetch_add(&c->helped, nanoseconds(CLOCK_THREAD_CPUTIME_ID) - since);
        }
        if (atomic_fetch_sub(&c->inside, 1) - 1 == (CLOSED | ASLEEP)) wake(&c->inside);
    }
    return 0;
}

/* A forked process has no helpers. */
static void alone_again(void) {
    crew->helpers = 0, crew->begin = (crew->next >> BITS) + 1;
    atomic_store(&crew->taken, 0), atomic_store(&crew->sleeping, 0), atomic_store(&crew->inside, CLOSED);
    atomic_store(&crew->next, crew->begin << BITS), atomic_store(&crew->done, crew->begin << BITS);
}

static void watch_forks(void) { pthread_atfork(0, 0, alone_again); }

static void recruit(Crew *c, int helpers) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    sigset_t all, before;
    pthread_attr_t detached;
    sigfillset(&all), pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads of the program */
    pthread_attr_init(&detached), pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    while (c->helpers < helpers && !pthread_create(&thread, &detached, help, (void *)(intptr_t)(c->helpers + 1))) c->helpers++;
    pthread_attr_destroy(&detached), pthread_sigmask(SIG_SETMASK, &before, 0);
}

static void with_helpers(Crew *c, int threads, Work *work, const void *job) {
    Worker w = {.crew = c, .threads = threads, .phase = c->begin};
    if (c->helpers < threads - 1) recruit(c, threads - 1);
    c->work = work, c->job = job, c->threads = threads;
    atomic_store(&c->inside, 0);
    atomic_fetch_add(&c->rounds, 1);
    if (atomic_load(&c->sleeping)) wake(&c->rounds);
    work(&w, job);
    uint32_t inside = atomic_fetch_or(&c->inside, CLOSED) | CLOSED;
    for (const uint64_t since = ticks(); inside != CLOSED && ticks() - since < SHORT; inside = atomic_load(&c->inside)) relax();
    while ((inside & ~ASLEEP) != CLOSED) { /* the last chunk of somebody who is away; it reads what may be gone after this */
        inside = atomic_fetch_or(&c->inside, ASLEEP) | ASLEEP;
        if (inside != (CLOSED | ASLEEP)) wait_while(&c->inside, inside);
        inside = atomic_load(&c->inside);
    }
    c->begin = w.phase;
}

/* Do `work` with up to so many threads, this one included; with this one alone while another one has the crew, or helpers bring little. */
static void together(int threads, Work *work, const void *job) {
    Crew *c = crew;
    Worker alone = {.threads = 1};
    if (threads < 2 || atomic_exchange(&c->taken, 1)) {
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
    atomic_store(&c->taken, 0);
}
