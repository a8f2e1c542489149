/* Misses: names that somebody looked for and that are not there. The kernel never asks to open such a name, so only
 * its LOOKUP tells that a program wanted a page and did not find it.
 *
 * The kernel also looks a name up just before a program makes it, with O_EXCL once more though the program has just
 * done so. So the last few searches of each task wait for a moment, and those for a name are forgotten if the task then
 * gives the name to something. Which names were evicted is remembered in a table of fixed size, by a part of their
 * hash: new ones replace old ones.
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

static bool is_late(const struct search *search) { return now_ms() - search->since_ms > PATIENCE_MS; }

void misses_searched(struct misses *misses, uint32_t task, uint64_t parent, const char *name, size_t length) {
    struct search *searches = misses->searches[task % CHANNEL_TASKS];
    uint64_t hash = name_hash(parent, name, length);
    size_t last = 0; /* the place that the earlier ones move up to */
    if (is_temporary(name))
        return;
    for (struct search *search = searches; search < searches + CHANNEL_SEARCHES; search++)
        if (search->waits && search->task == task && search->name == hash && !is_late(search))
            return; /* of a name that it knew and that is gone, the kernel asks twice */
    while (searches[last].waits && last < CHANNEL_SEARCHES - 1)
        last++;
    if (searches[last].waits)
        settle(misses, &searches[last]);
    memmove(searches + 1, searches, last * sizeof *searches);
    searches[0] = (struct search){hash, now_ms(), task, true};
}

void misses_made(struct misses *misses, uint32_t task, uint64_t parent, const char *name, size_t length) {
    struct search *searches = misses->searches[task % CHANNEL_TASKS];
    uint64_t hash = name_hash(parent, name, length);
    for (struct search *search = searches; search < searches + CHANNEL_SEARCHES; search++) {
        if (!search->waits || search->task != task || search->name != hash)
            continue;
        if (is_late(search))
            settle(misses, search);
        search->waits = false;
    }
}

void misses_settle(struct misses *misses) {
    for (uint32_t task = 0; task < CHANNEL_TASKS; task++)
        for (uint32_t i = 0; i < CHANNEL_SEARCHES; i++) {
            struct search *search = &misses->searches[task][i];
            if (search->waits && is_late(search))
                settle(misses, search);
        }
}
