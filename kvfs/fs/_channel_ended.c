/* What ended: drafts that were closed, and what the kernel forgot. Nobody waits for an answer to either, so the kernel
 * is answered at once and Python told later, of many together: whenever it handles a request, which is then handled
 * after all that ended before it, and otherwise soon.
 */
#define _GNU_SOURCE
#include "_channel.h"

#include <string.h>
#include <sys/timerfd.h>

#define SOON_NANOSECONDS 2000000

bool ended_note(struct channel *channel, uint64_t number, uint32_t lookups) {
    struct ended *ended = &channel->ended;
    pthread_mutex_lock(&channel->lock);
    bool noted = ended->count < CHANNEL_ENDED, first = !ended->count;
    if (noted)
        ended->list[ended->count++] = (struct end){number, lookups};
    pthread_mutex_unlock(&channel->lock);
    if (noted && first) {
        struct itimerspec soon = {.it_value.tv_nsec = SOON_NANOSECONDS};
        timerfd_settime(ended->timer, 0, &soon, NULL);
    }
    return noted;
}

/* Of nodes below the first entry's Python keeps no count. */
static bool forgot(struct channel *channel, uint64_t nodeid, uint64_t lookups) {
    uint32_t count = lookups < UINT32_MAX ? (uint32_t)lookups : UINT32_MAX;
    return nodeid < CHANNEL_FIRST_ENTRY || !count || ended_note(channel, nodeid, count);
}

bool answer_forget(struct channel *channel, struct request *request) {
    const struct fuse_forget_in *in = request->body;
    return forgot(channel, request->header->nodeid, in->nlookup);
}

/* Python is told of all of them where it cannot be told of one later. */
bool answer_batch_forget(struct channel *channel, struct request *request) {
    struct fuse_batch_forget_in *in = request->body;
    struct fuse_forget_one *list = (void *)(in + 1);
    uint64_t count = (request->body_length - sizeof *in) / sizeof *list, left = 0;
    for (uint64_t i = 0; i < in->count && i < count; i++)
        if (!forgot(channel, list[i].nodeid, list[i].nlookup))
            list[left++] = list[i];
    in->count = (uint32_t)left;
    return !left;
}
