/* From the kernel to libfuse. What the table can answer is answered here, in a thread that never holds the
 * interpreter's lock; the rest is passed on. Nothing here blocks on Python except the send to a full socket.
 * The bytes themselves are moved in _channel_bytes.c.
 */
#define _GNU_SOURCE
#include "_channel.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

ssize_t channel_reply(struct channel *channel, uint64_t unique, int error, const void *payload, size_t length) {
    struct fuse_out_header header = {(uint32_t)(sizeof header + length), error, unique};
    struct iovec parts[2] = {{&header, sizeof header}, {(void *)payload, length}};
    ssize_t written = writev(channel->device, parts, length ? 2 : 1);
    if (written < 0)
        atomic_fetch_add(&channel->reply_errors, 1);
    return written;
}

static bool answer_open(struct channel *channel, struct request *request) {
    const struct fuse_open_in *in = request->body;
    uint64_t nodeid = request->header->nodeid;
    if ((in->flags & O_ACCMODE) != O_RDONLY || (in->flags & O_TRUNC))
        return false;
    struct channel_open_out out = {CHANNEL_NATIVE_HANDLE | nodeid, CHANNEL_FOPEN_NOFLUSH, 0};
    pthread_mutex_lock(&channel->lock);
    struct record *record = channel_record(channel, nodeid);
    bool answered = record && (record->flags & RECORD_SEALED);
    if (answered) {
        if (record->backing_id > 0) {
            out.open_flags |= CHANNEL_FOPEN_PASSTHROUGH;
            out.backing_id = record->backing_id;
        } else {
            out.open_flags |= CHANNEL_FOPEN_KEEP_CACHE;
        }
        record->opens++;
        record->hits++;
        if (!(record->flags & RECORD_TOUCHED) && channel->touched_count < CHANNEL_TOUCHED_SLOTS) {
            record->flags |= RECORD_TOUCHED;
            channel->touched[channel->touched_count++] = nodeid;
        }
    }
    pthread_mutex_unlock(&channel->lock);
    if (answered && channel_reply(channel, request->header->unique, 0, &out, sizeof out) < 0) {
        pthread_mutex_lock(&channel->lock); /* the kernel did not take it, so no RELEASE will come */
        if (record->opens)
            record->opens--;
        pthread_mutex_unlock(&channel->lock);
    }
    return answered;
}

/* What the kernel is told of a node, and for how long it holds. Caller holds the lock. */
static bool describe(struct record *record, uint64_t nodeid, struct fuse_attr *attr, uint64_t *valid_seconds) {
    struct stat status;
    if (!record || !channel_status(record, &status))
        return false;
    *attr = (struct fuse_attr){.ino = nodeid,
                               .size = (uint64_t)status.st_size,
                               .blocks = (uint64_t)status.st_blocks,
                               .atime = (uint64_t)status.st_atim.tv_sec,
                               .mtime = (uint64_t)status.st_mtim.tv_sec,
                               .ctime = (uint64_t)status.st_ctim.tv_sec,
                               .atimensec = (uint32_t)status.st_atim.tv_nsec,
                               .mtimensec = (uint32_t)status.st_mtim.tv_nsec,
                               .ctimensec = (uint32_t)status.st_ctim.tv_nsec,
                               .mode = record->mode,
                               .nlink = (uint32_t)status.st_nlink,
                               .uid = record->uid,
                               .gid = record->gid,
                               .blksize = (uint32_t)status.st_blksize};
    *valid_seconds = (record->flags & RECORD_SEALED) ? CHANNEL_CACHE_SECONDS
                     : S_ISDIR(record->mode)         ? CHANNEL_DIRECTORY_SECONDS
                                                     : 0;
    return true;
}

/* A name that does not exist, or that means a node of the table; the others are left to Python. */
static bool answer_lookup(struct channel *channel, struct request *request) {
    const char *name = request->body;
    size_t length = strnlen(name, request->body_length);
    uint64_t parent = request->header->nodeid;
    if (parent < CHANNEL_FIRST_ENTRY && (parent != CHANNEL_ROOT || strcmp(name, CHANNEL_CONTROL_NAME) == 0))
        return false;
    if (length > CHANNEL_NAME_MAX)
        return false;
    struct fuse_entry_out out = {.entry_valid = CHANNEL_CACHE_SECONDS};
    struct record *record = NULL;
    uint32_t node;
    pthread_mutex_lock(&channel->lock);
    bool exists = names_get(&channel->names, parent, name, length, &node);
    if (exists) {
        record = channel_record(channel, node);
        if (!describe(record, node, &out.attr, &out.attr_valid)) {
            pthread_mutex_unlock(&channel->lock);
            return false;
        }
        out.nodeid = node;
        record->lookups++;
    } else if (!atomic_load(&channel->names_complete)) {
        pthread_mutex_unlock(&channel->lock);
        return false;
    } else {
        misses_searched(&channel->misses, request->header->pid, parent, name, length);
    }
    pthread_mutex_unlock(&channel->lock);
    if (channel_reply(channel, request->header->unique, 0, &out, sizeof out) < 0 && record) {
        pthread_mutex_lock(&channel->lock); /* the kernel did not take it, and will not forget it */
        if (record->lookups)
            record->lookups--;
        pthread_mutex_unlock(&channel->lock);
    }
    return true;
}

static bool answer_getattr(struct channel *channel, struct request *request) {
    struct fuse_attr_out out = {0};
    uint64_t nodeid = request->header->nodeid;
    pthread_mutex_lock(&channel->lock);
    bool answered = describe(channel_record(channel, nodeid), nodeid, &out.attr, &out.attr_valid);
    pthread_mutex_unlock(&channel->lock);
    if (answered)
        channel_reply(channel, request->header->unique, 0, &out, sizeof out);
    return answered;
}

/* RELEASE of a handle given here is counted here. Once Python has withdrawn the record it gets the message too,
 * since it may wait for the last handle. Of a handle that Python gave it is told later where it was flushed, that is,
 * where somebody wrote: there are many such, and close(2) waits for none. */
static bool answer_release(struct channel *channel, struct request *request) {
    struct fuse_release_in *in = request->body;
    if (!(in->fh & CHANNEL_NATIVE_HANDLE)) {
        in->fh = flush_taken(channel, in->fh);
        if ((in->fh & CHANNEL_UNFLUSHED_HANDLE) || !ended_note(channel, in->fh, 0))
            return false;
        channel_reply(channel, request->header->unique, 0, NULL, 0);
        return true;
    }
    pthread_mutex_lock(&channel->lock);
    struct record *record = channel_record(channel, request->header->nodeid);
    bool answered = record && (record->flags & RECORD_SEALED);
    if (record && record->opens)
        record->opens--;
    pthread_mutex_unlock(&channel->lock);
    if (answered)
        channel_reply(channel, request->header->unique, 0, NULL, 0);
    return answered;
}

static bool answer_flush(struct channel *channel, struct request *request) {
    const struct fuse_flush_in *in = request->body;
    pthread_mutex_lock(&channel->lock);
    struct record *record = channel_record(channel, request->header->nodeid);
    bool draft = record && record->write_fd >= 0;
    pthread_mutex_unlock(&channel->lock);
    if (draft && !(in->fh & CHANNEL_NATIVE_HANDLE))
        flush_submit(channel, request->header->unique, in->fh, request->header->pid);
    else
        channel_reply(channel, request->header->unique, 0, NULL, 0);
    return true;
}

static bool answer_statfs(struct channel *channel, struct request *request) {
    struct statvfs room;
    if (!channel->statfs_wanted || fstatvfs(channel->tier, &room) != 0)
        return false;
    struct fuse_statfs_out out = {.st = {.blocks = room.f_blocks,
                                         .bfree = room.f_bfree,
                                         .bavail = room.f_bavail,
                                         .files = room.f_files,
                                         .ffree = room.f_ffree,
                                         .bsize = (uint32_t)room.f_bsize,
                                         .namelen = (uint32_t)room.f_namemax,
                                         .frsize = (uint32_t)room.f_frsize}};
    channel_reply(channel, request->header->unique, 0, &out, sizeof out);
    return true;
}

/* The kernel asks for security.capability before each first write of an inode; no page has any. */
static bool answer_getxattr(struct channel *channel, struct request *request) {
    const struct fuse_getxattr_in *in = request->body;
    const char *name = (const char *)(in + 1);
    if (request->body_length < sizeof *in + 10 || strncmp(name, "security.", 9) != 0)
        return false;
    channel_reply(channel, request->header->unique, -ENODATA, NULL, 0);
    return true;
}

/* Bodies shorter than their structures do not come from a kernel that speaks this protocol. */
static size_t body_required(uint32_t opcode) {
    switch (opcode) {
    case FUSE_LOOKUP: return 2; /* a name and its end */
    case FUSE_OPEN: return sizeof(struct fuse_open_in);
    case FUSE_RELEASE: return sizeof(struct fuse_release_in);
    case FUSE_FORGET: return sizeof(struct fuse_forget_in);
    case FUSE_BATCH_FORGET: return sizeof(struct fuse_batch_forget_in);
    case FUSE_FLUSH: return sizeof(struct fuse_flush_in);
    case FUSE_READ: return sizeof(struct fuse_read_in);
    case FUSE_WRITE: return sizeof(struct fuse_write_in);
    case FUSE_LSEEK: return sizeof(struct fuse_lseek_in);
    case FUSE_FALLOCATE: return sizeof(struct fuse_fallocate_in);
    case FUSE_GETXATTR: return sizeof(struct fuse_getxattr_in);
    case FUSE_READDIRPLUS: return sizeof(struct fuse_read_in);
    case FUSE_INIT: return offsetof(struct fuse_init_in, unused);
    default: return 0;
    }
}

static bool answer(struct channel *channel, struct request *request, char *buffer) {
    switch (request->header->opcode) {
    case FUSE_LOOKUP: return answer_lookup(channel, request);
    case FUSE_OPEN: return answer_open(channel, request);
    case FUSE_GETATTR: return answer_getattr(channel, request);
    case FUSE_RELEASE: return answer_release(channel, request);
    case FUSE_FORGET: return answer_forget(channel, request);
    case FUSE_BATCH_FORGET: return answer_batch_forget(channel, request);
    case FUSE_FLUSH: return answer_flush(channel, request);
    case FUSE_READ: return answer_read(channel, request, buffer);
    case FUSE_WRITE: return answer_write(channel, request);
    case FUSE_LSEEK: return answer_lseek(channel, request);
    case FUSE_FALLOCATE: return answer_fallocate(channel, request);
    case FUSE_STATFS: return answer_statfs(channel, request);
    case FUSE_GETXATTR: return answer_getxattr(channel, request);
    case FUSE_INTERRUPT: return true; /* nothing here waits long enough to be interrupted */
    default: return false;
    }
}

void channel_expect(struct channel *channel, uint64_t unique, uint64_t nodeid, uint32_t opcode, bool read_only) {
    struct pending_reply *slot = &channel->pending[(unique >> 1) % CHANNEL_PENDING];
    slot->nodeid = nodeid;
    slot->opcode = opcode;
    slot->read_only = read_only;
    atomic_store_explicit(&slot->unique, unique, memory_order_release);
}

/* The name that a request gives to something, and the directory that it lies in; NULL for any other request. */
static const char *name_made(const struct request *request, uint64_t *parent, size_t *length) {
    size_t place;
    *parent = request->header->nodeid;
    switch (request->header->opcode) {
    case FUSE_CREATE: place = sizeof(struct fuse_create_in); break;
    case FUSE_MKNOD: place = sizeof(struct fuse_mknod_in); break;
    case FUSE_MKDIR: place = sizeof(struct fuse_mkdir_in); break;
    case FUSE_LINK: place = sizeof(struct fuse_link_in); break;
    case FUSE_SYMLINK: place = 0; break;
    case FUSE_RENAME: place = sizeof(struct fuse_rename_in); break;
    case FUSE_RENAME2: place = sizeof(struct fuse_rename2_in); break;
    default: return NULL;
    }
    const char *body = request->body, *name = body + place, *end = body + request->body_length;
    if (request->header->opcode == FUSE_RENAME || request->header->opcode == FUSE_RENAME2) {
        if (place > request->body_length)
            return NULL;
        memcpy(parent, body, sizeof *parent); /* both begin with the new directory */
        name += strnlen(name, (size_t)(end - name)) + 1;
    }
    if (name >= end)
        return NULL;
    *length = strnlen(name, (size_t)(end - name));
    return name;
}

static void remember(struct channel *channel, struct request *request) {
    const struct fuse_in_header *header = request->header;
    uint64_t parent;
    size_t length;
    const char *made = name_made(request, &parent, &length);
    if (made) {
        pthread_mutex_lock(&channel->lock);
        misses_made(&channel->misses, header->pid, parent, made, length);
        pthread_mutex_unlock(&channel->lock);
    }
    if (header->opcode == FUSE_INIT) {
        const struct fuse_init_in *in = request->body;
        channel->init_flags = in->flags;
        channel->init_flags2 = (in->flags & CHANNEL_FUSE_INIT_EXT) ? in->flags2 : 0;
        atomic_store(&channel->init_unique, header->unique);
    } else if (header->opcode == FUSE_OPEN || header->opcode == FUSE_CREATE) {
        const struct fuse_open_in *in = request->body;
        bool read_only = header->opcode == FUSE_OPEN && (in->flags & (O_ACCMODE | O_TRUNC)) == O_RDONLY;
        channel_expect(channel, header->unique, header->nodeid, header->opcode, read_only);
    } else if (header->opcode == FUSE_READDIRPLUS) {
        struct fuse_read_in *in = request->body;
        if (in->size > CHANNEL_MAX_LISTING)
            in->size = CHANNEL_MAX_LISTING;
    }
}

/* A request that finds no memory is refused, and is not the end of the mount. */
bool channel_forward(struct channel *channel, const void *message, size_t length) {
    while (send(channel->outer, message, length, MSG_NOSIGNAL) < 0) {
        if (errno == EINTR)
            continue;
        if (errno != EMSGSIZE && errno != ENOBUFS && errno != ENOMEM)
            return false;
        channel_reply(channel, ((const struct fuse_in_header *)message)->unique, -ENOMEM, NULL, 0);
        return true;
    }
    atomic_fetch_add_explicit(&channel->forwarded, 1, memory_order_relaxed);
    return true;
}

void *channel_answers_main(void *argument) {
    struct channel *channel = argument;
    char *message = malloc(CHANNEL_BUFFER_BYTES), *buffer = malloc(CHANNEL_MAX_WRITE);
    while (message && buffer) {
        flush_expire(channel);
        ssize_t length = read(channel->device, message, CHANNEL_BUFFER_BYTES);
        if (length < 0 && (errno == EINTR || errno == EAGAIN || errno == ENOENT))
            continue; /* ENOENT: the request was aborted before it was read */
        if (length < (ssize_t)sizeof(struct fuse_in_header))
            break; /* ENODEV: unmounted or aborted */
        struct request request = {(void *)message, message + sizeof(struct fuse_in_header),
                                  (size_t)length - sizeof(struct fuse_in_header)};
        if (request.body_length < body_required(request.header->opcode)) {
            if (request.header->opcode != FUSE_FORGET && request.header->opcode != FUSE_BATCH_FORGET)
                channel_reply(channel, request.header->unique, -EIO, NULL, 0);
            continue;
        }
        if (answer(channel, &request, buffer)) {
            atomic_fetch_add_explicit(&channel->answered, 1, memory_order_relaxed);
            continue;
        }
        remember(channel, &request);
        if (!channel_forward(channel, message, (size_t)length))
            break;
    }
    free(message);
    free(buffer);
    eventfd_write(channel->ended_event, 1);
    return NULL;
}
