/* The bytes of open files, where the kernel does not move them by itself: READ, WRITE, LSEEK; and FALLOCATE, which
 * it never does.
 */
#define _GNU_SOURCE
#include "_channel.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The descriptor stays open as long as the kernel has the file open: no lock is needed around the I/O itself. */
static int file_of(struct channel *channel, uint64_t nodeid, bool writing) {
    pthread_mutex_lock(&channel->lock);
    struct record *record = channel_record(channel, nodeid);
    int fd = record && (record->flags & RECORD_KNOWN) ? (writing ? record->write_fd : record->read_fd) : -1;
    pthread_mutex_unlock(&channel->lock);
    return fd;
}

/* Pages of its own, made at the first use: of an array that nobody ever wrote all pages are the kernel's one page of
 * zeros, and to copy from that it takes the slow way, page by page. Only the answers thread comes here. */
static const char *zeros(void) {
    static char bytes[CHANNEL_MAX_WRITE];
    static bool made;
    if (!made)
        memset(bytes, 0, sizeof bytes);
    made = true;
    return bytes;
}

/* Whether the file holds nothing but zeros there, which need not be read: the first touch of a mapping that a program
 * is about to fill. */
static bool is_unwritten(int fd, uint64_t offset, size_t size) {
    struct stat status;
    if (fstat(fd, &status) != 0 || size > (uint64_t)status.st_size || offset > (uint64_t)status.st_size - size)
        return false;
    off_t data = lseek(fd, (off_t)offset, SEEK_DATA);
    return data < 0 ? errno == ENXIO : (uint64_t)data >= offset + size;
}

bool answer_read(struct channel *channel, struct request *request, char *buffer) {
    const struct fuse_read_in *in = request->body;
    int fd = file_of(channel, request->header->nodeid, false);
    if (fd < 0)
        return false;
    size_t size = in->size < CHANNEL_MAX_WRITE ? in->size : CHANNEL_MAX_WRITE, done = 0;
    if (is_unwritten(fd, in->offset, size)) {
        channel_reply(channel, request->header->unique, 0, zeros(), size);
        return true;
    }
    while (done < size) {
        ssize_t part = pread(fd, buffer + done, size - done, in->offset + done);
        if (part < 0 && errno == EINTR)
            continue;
        if (part < 0 && !done) {
            channel_reply(channel, request->header->unique, -errno, NULL, 0);
            return true;
        }
        if (part <= 0)
            break;
        done += part;
    }
    channel_reply(channel, request->header->unique, 0, buffer, done);
    return true;
}

static void mark(struct channel *channel, uint64_t nodeid, uint32_t flag) {
    pthread_mutex_lock(&channel->lock);
    struct record *record = channel_record(channel, nodeid);
    if (record)
        record->flags |= flag;
    pthread_mutex_unlock(&channel->lock);
}

/* Takes from the budget what this write may allocate; false when there is not enough. */
static bool take_budget(struct channel *channel, int fd, uint64_t end) {
    struct stat status;
    if (atomic_load(&channel->write_budget) == INT64_MAX || fstat(fd, &status) != 0 || end <= (uint64_t)status.st_size)
        return true;
    int64_t growth = (int64_t)(end - status.st_size);
    if (atomic_fetch_sub(&channel->write_budget, growth) >= growth) {
        atomic_fetch_add(&channel->grown, growth);
        return true;
    }
    atomic_fetch_add(&channel->write_budget, growth);
    return false;
}

bool answer_write(struct channel *channel, struct request *request) {
    const struct fuse_write_in *in = request->body;
    const char *data = (const char *)(in + 1);
    int fd = file_of(channel, request->header->nodeid, true);
    if (fd < 0)
        return false;
    size_t size = in->size;
    if (size > request->body_length - sizeof *in)
        size = request->body_length - sizeof *in;
    size_t done = 0;
    int error = take_budget(channel, fd, in->offset + size) ? 0 : ENOSPC;
    while (!error && done < size) {
        ssize_t part = pwrite(fd, data + done, size - done, in->offset + done);
        if (part < 0 && errno != EINTR)
            error = errno;
        else if (part > 0)
            done += part;
    }
    if (error == ENOSPC)
        mark(channel, request->header->nodeid, RECORD_FULL);
    struct fuse_write_out out = {(uint32_t)done, 0};
    if (error && !done)
        channel_reply(channel, request->header->unique, -error, NULL, 0);
    else
        channel_reply(channel, request->header->unique, 0, &out, sizeof out);
    return true;
}

/* Of a page without a descriptor: no part of it is said to be a hole, which is always right. */
static off_t seek_described(const struct stat *status, const struct fuse_lseek_in *in) {
    if (in->whence != SEEK_DATA && in->whence != SEEK_HOLE)
        return -EINVAL;
    if (in->offset >= (uint64_t)status->st_size)
        return -ENXIO;
    return in->whence == SEEK_DATA ? (off_t)in->offset : status->st_size;
}

bool answer_lseek(struct channel *channel, struct request *request) {
    const struct fuse_lseek_in *in = request->body;
    struct stat status;
    off_t found;
    int fd = file_of(channel, request->header->nodeid, false);
    if (fd >= 0) {
        found = lseek(fd, (off_t)in->offset, (int)in->whence);
        if (found < 0)
            found = -errno;
    } else {
        pthread_mutex_lock(&channel->lock);
        struct record *record = channel_record(channel, request->header->nodeid);
        bool described = record && channel_status(record, &status);
        pthread_mutex_unlock(&channel->lock);
        /* Never ENOSYS, which libfuse would say: the kernel would ask for no file any more. */
        found = described ? seek_described(&status, in) : -EINVAL;
    }
    struct fuse_lseek_out out = {(uint64_t)found};
    if (found < 0)
        channel_reply(channel, request->header->unique, (int)found, NULL, 0);
    else
        channel_reply(channel, request->header->unique, 0, &out, sizeof out);
    return true;
}

struct allocation {
    struct channel *channel;
    int fd;
    struct fuse_in_header header;
    struct fuse_fallocate_in in;
};

/* There is no room for a fallocate. Python can make some: it is asked for the size that the file would have, which it
 * allocates. Not where it would leave holes that were to be filled. */
static bool ask_for_size(const struct allocation *allocation) {
    const struct fuse_fallocate_in *in = &allocation->in;
    struct {
        struct fuse_in_header header;
        struct fuse_setattr_in in;
    } message = {allocation->header, {.valid = FATTR_SIZE, .size = in->offset + in->length}};
    struct stat status;
    if (in->mode || fstat(allocation->fd, &status) != 0 || message.in.size <= (uint64_t)status.st_size)
        return false;
    if (status.st_blocks * 512 < status.st_size)
        return false;
    message.header.opcode = FUSE_SETATTR;
    message.header.len = sizeof message;
    channel_expect(allocation->channel, message.header.unique, message.header.nodeid, FUSE_FALLOCATE, false);
    channel_forward(allocation->channel, &message, sizeof message);
    return true;
}

size_t fallocate_answered(struct channel *channel, uint64_t nodeid, struct fuse_out_header *reply) {
    if (!reply->error || reply->error == -ENOSPC)
        mark(channel, nodeid, reply->error ? RECORD_FULL : RECORD_SIZED);
    return reply->len = sizeof *reply;
}

static void answer_allocation(const struct allocation *allocation, int error) {
    if (error == ENOSPC && ask_for_size(allocation))
        return;
    if (!error || error == ENOSPC)
        mark(allocation->channel, allocation->header.nodeid, error ? RECORD_FULL : RECORD_SIZED);
    channel_reply(allocation->channel, allocation->header.unique, -error, NULL, 0);
}

static void allocate(const struct allocation *allocation) {
    const struct fuse_fallocate_in *in = &allocation->in;
    int failed = fallocate(allocation->fd, (int)in->mode, (off_t)in->offset, (off_t)in->length);
    answer_allocation(allocation, failed ? errno : 0);
}

static void *allocation_main(void *argument) {
    struct allocation *allocation = argument;
    struct channel *channel = allocation->channel;
    allocate(allocation);
    close(allocation->fd);
    free(allocation);
    pthread_mutex_lock(&channel->lock);
    channel->allocations--;
    pthread_cond_broadcast(&channel->allocated);
    pthread_mutex_unlock(&channel->lock);
    return NULL;
}

/* In a thread of its own: zeroing many pages takes long, and others wait for answers. False if it cannot be had. */
static bool allocate_aside(const struct allocation *allocation) {
    struct channel *channel = allocation->channel;
    struct allocation *copy = malloc(sizeof *copy);
    pthread_t thread;
    if (!copy)
        return false;
    *copy = *allocation;
    copy->fd = fcntl(allocation->fd, F_DUPFD_CLOEXEC, 0); /* it outlives the handle where the connection is aborted */
    if (copy->fd < 0) {
        free(copy);
        return false;
    }
    pthread_mutex_lock(&channel->lock);
    bool started = channel->allocations < CHANNEL_ALLOCATIONS && pthread_create(&thread, NULL, allocation_main, copy) == 0;
    channel->allocations += started;
    pthread_mutex_unlock(&channel->lock);
    if (started) {
        pthread_detach(thread);
    } else {
        close(copy->fd);
        free(copy);
    }
    return started;
}

void allocations_wait(struct channel *channel) {
    pthread_mutex_lock(&channel->lock);
    while (channel->allocations)
        pthread_cond_wait(&channel->allocated, &channel->lock);
    pthread_mutex_unlock(&channel->lock);
}

/* Neither libfuse's callback table in pyfuse3 nor pyfuse3 has fallocate, so it is always answered here. */
bool answer_fallocate(struct channel *channel, struct request *request) {
    const struct fuse_fallocate_in *in = request->body;
    struct allocation allocation = {channel, file_of(channel, request->header->nodeid, true), *request->header, *in};
    int error = 0;
    if (allocation.fd < 0)
        error = EOPNOTSUPP;
    else if (in->offset + in->length > atomic_load(&channel->file_bytes_limit))
        error = EFBIG;
    else if (!take_budget(channel, allocation.fd, in->offset + in->length))
        error = ENOSPC;
    if (error)
        answer_allocation(&allocation, error);
    else if (in->length <= CHANNEL_INLINE_ALLOCATION || !allocate_aside(&allocation))
        allocate(&allocation);
    return true;
}
