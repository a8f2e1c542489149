/* Misses: names that somebody looked for and that are not there. The kernel never asks to open such a name, so only
 * its LOOKUP tells that a program wanted a page and did not find it.
 *
 * The kernel also looks a name up just before a program makes it. So the last search of each task waits for a moment,
 * and is forgotten if the task then gives the name to something. Which names were evicted is remembered in a table of
 * fixed size, by a part of their hash: new ones replace old ones.
 */
#include "_channel.h"

#include <string.h>
#include <time.h>

/* Between a LOOKUP and the CREATE that it belongs to lie the wake-ups of two tasks; between a miss and the store of
 * what was missed lies a computation. */
#define PATIENCE_MS 100

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* The names that programs give to files that are not pages yet, and those that desktops and shells look for. */
static bool is_temporary(const char *name) { return name[0] == '.' || strstr(name, ".tmp"); }

static uint32_t *place_of(struct misses *misses, uint64_t hash, uint32_t *mark) {
    *mark = (uint32_t)(hash >> 32) | 1u;
    return &misses->gone[hash % CHANNEL_GONE_NAMES];
}

void misses_gone(struct misses *misses, uint64_t parent, const char *name, size_t length, bool evicted) {
    uint32_t mark, *place = place_of(misses, name_hash(parent, name, length), &mark);
    *place = evicted ? mark : mark - 1; /* the lowest bit: it was evicted */
}

void misses_came_back(struct misses *misses, uint64_t parent, const char *name, size_t length) {
    uint32_t mark, *place = place_of(misses, name_hash(parent, name, length), &mark);
    if ((*place | 1u) == mark)
        *place = 0;
}

/* Counts a search that nothing came of. */
static void settle(struct misses *misses, struct search *search) {
    uint32_t mark, *place = place_of(misses, search->name, &mark);
    search->waits = false;
    if (*place == mark)
        misses->evicted++;
    else if (*place && *place == mark - 1)
        *place = 0; /* it was counted when it was found out */
    else
        misses->absent++;
}

void misses_searched(struct misses *misses, uint32_t task, uint64_t parent, const char *name, size_t length) {
    struct search *search = &misses->searches[task % CHANNEL_SEARCHES];
    if (is_temporary(name))
        return;
    if (search->waits)
        settle(misses, search);
    *search = (struct search){name_hash(parent, name, length), now_ms(), task, true};
}

void misses_made(struct misses *misses, uint32_t task, uint64_t parent, const char *name, size_t length) {
    struct search *search = &misses->searches[task % CHANNEL_SEARCHES];
    if (!search->waits || search->task != task || search->name != name_hash(parent, name, length))
        return;
    if (now_ms() - search->since_ms > PATIENCE_MS)
        settle(misses, search);
    search->waits = false;
}

void misses_settle(struct misses *misses) {
    for (uint32_t i = 0; i < CHANNEL_SEARCHES; i++) {
        struct search *search = &misses->searches[i];
        if (search->waits && now_ms() - search->since_ms > PATIENCE_MS)
            settle(misses, search);
    }
}
