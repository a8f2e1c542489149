/* FLUSH of drafts: was the program that closes ended by a signal? Its draft is not to become a page then.
 *
 * A program that ends has given up its memory before it closes its files, which is quickly seen. Whether a signal ended
 * it only /proc/PID/stat tells, and reading that can wait for the very program: one that calls execve closes its files
 * while it holds a lock that the reading needs, and goes on only when its FLUSH is answered. So a thread of its own
 * reads, and answers; and whatever it has not answered in time is answered without it, as an ordinary close.
 */
#define _GNU_SOURCE
#include "_channel.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define TASK_EXITING 0x4u /* PF_EXITING in the flags of /proc/PID/stat */
#define PATIENCE_MS 500 /* a busy machine lets a thread wait for tens of them */

/* Reads a file of /proc/TASK whole; false if it cannot be. */
static bool read_of_task(uint32_t task, const char *name, char *text, size_t size) {
    char path[32];
    snprintf(path, sizeof path, "/proc/%u/%s", task, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t length = read(fd, text, size - 1);
    close(fd);
    text[length > 0 ? length : 0] = 0;
    return length > 0;
}

/* Whether a task has no memory, as those that end and those of the kernel. Waits for nobody. */
static bool is_without_memory(uint32_t task) {
    char text[128];
    return read_of_task(task, "statm", text, sizeof text) && strncmp(text, "0 ", 2) == 0;
}

/* True when the task that sent this FLUSH is being ended by a signal: it is exiting, and its exit status, which
 * the kernel sets before it closes the files, names one. A task that exits normally closes its files the same way
 * but has no signal in its status. */
static bool killed_by_signal(uint32_t task) {
    char text[1024];
    if (!read_of_task(task, "stat", text, sizeof text))
        return false;
    char *cursor = strrchr(text, ')'); /* the name before it may hold anything */
    unsigned long flags = 0, status = 0;
    /* After the name: field 3 is the state; 9 the flags; 52 the exit status, the last. */
    for (int field = 3; cursor && (cursor = strchr(cursor, ' ')); field++) {
        cursor++;
        if (field == 9)
            flags = strtoul(cursor, NULL, 10);
        else if (field == 52)
            status = strtoul(cursor, NULL, 10);
    }
    return (flags & TASK_EXITING) && (status & 0x7f);
}

/* Remembers who closed a descriptor last: of several that share the handle (fork, dup) the last one counts. */
static void note(struct channel *channel, uint64_t handle, bool killed) {
    const char *old;
    names_put(&channel->flushes.last, handle, "", 0, killed, &old);
}

static uint64_t take(struct channel *channel, uint64_t handle) {
    uint32_t killed;
    if (!names_get(&channel->flushes.last, handle, "", 0, &killed))
        return handle | CHANNEL_UNFLUSHED_HANDLE;
    names_remove(&channel->flushes.last, handle, "", 0);
    return killed ? handle | CHANNEL_KILLED_HANDLE : handle;
}

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Caller holds the lock. False if somebody was quicker. */
static bool claim(struct channel *channel, struct flush *flush, bool killed) {
    if (flush->answered)
        return false;
    flush->answered = true;
    note(channel, flush->handle, killed);
    return true;
}

void flush_submit(struct channel *channel, uint64_t unique, uint64_t handle, uint32_t task) {
    struct flushes *flushes = &channel->flushes;
    bool ends = is_without_memory(task);
    pthread_mutex_lock(&flushes->lock);
    struct flush *first = &flushes->ring[flushes->head % CHANNEL_FLUSHES];
    bool waiting = flushes->head != flushes->tail;
    bool stuck = waiting && first->answered && first->task == task; /* the same execve, its next file */
    bool queued = !stuck && ends && flushes->tail - flushes->head < CHANNEL_FLUSHES;
    if (queued) {
        flushes->ring[flushes->tail++ % CHANNEL_FLUSHES] = (struct flush){unique, handle, now_ms(), task, false};
        pthread_cond_signal(&flushes->changed);
    } else {
        note(channel, handle, false);
    }
    pthread_mutex_unlock(&flushes->lock);
    if (!queued)
        channel_reply(channel, unique, 0, NULL, 0);
}

/* Answers what has waited too long; waits for the next request no longer than until something has. */
void flush_expire(struct channel *channel) {
    struct flushes *flushes = &channel->flushes;
    for (;;) {
        uint64_t unique = 0;
        bool waiting = false;
        pthread_mutex_lock(&flushes->lock);
        for (uint64_t place = flushes->head; place != flushes->tail && !unique; place++) {
            struct flush *flush = &flushes->ring[place % CHANNEL_FLUSHES];
            waiting = waiting || !flush->answered;
            if (!flush->answered && now_ms() - flush->since_ms >= PATIENCE_MS && claim(channel, flush, false))
                unique = flush->unique;
        }
        pthread_mutex_unlock(&flushes->lock);
        if (unique) {
            channel_reply(channel, unique, 0, NULL, 0);
            continue;
        }
        struct pollfd device = {channel->device, POLLIN, 0};
        if (!waiting || poll(&device, 1, PATIENCE_MS) != 0)
            return;
    }
}

uint64_t flush_taken(struct channel *channel, uint64_t handle) {
    pthread_mutex_lock(&channel->flushes.lock);
    handle = take(channel, handle);
    pthread_mutex_unlock(&channel->flushes.lock);
    return handle;
}

void *channel_flushes_main(void *argument) {
    struct channel *channel = argument;
    struct flushes *flushes = &channel->flushes;
    pthread_setname_np(pthread_self(), "kvfs-flushes");
    pthread_mutex_lock(&flushes->lock);
    while (!flushes->stopping) {
        if (flushes->head == flushes->tail) {
            pthread_cond_wait(&flushes->changed, &flushes->lock);
            continue;
        }
        struct flush *flush = &flushes->ring[flushes->head % CHANNEL_FLUSHES];
        bool mine = false;
        if (!flush->answered) {
            pthread_mutex_unlock(&flushes->lock);
            bool killed = killed_by_signal(flush->task);
            pthread_mutex_lock(&flushes->lock);
            mine = claim(channel, flush, killed);
        }
        uint64_t unique = flush->unique;
        flushes->head++;
        if (mine) {
            pthread_mutex_unlock(&flushes->lock);
            channel_reply(channel, unique, 0, NULL, 0);
            pthread_mutex_lock(&flushes->lock);
        }
    }
    pthread_mutex_unlock(&flushes->lock);
    return NULL;
}
